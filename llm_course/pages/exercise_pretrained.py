"""The checks of exercise 11, pretrained models: each says what is wrong with an answer."""

import copy
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import safetensors
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from llm_course.model import families, pretrained
from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.families import (
    CHANGES,
    FAMILIES,
    GPT2,
    LLAMA,
    QWEN2,
    Family,
    Key,
    read_config,
    tensor_rules,
)
from llm_course.model.pretrained import save_pretrained
from llm_course.pages.checking import (
    Answer,
    Answers,
    case,
    expect_number,
    expect_plain_number,
    explained,
    forbid,
    written,
)

State = dict[str, Tensor]
Shapes = Mapping[str, Sequence[int]]
Record = dict[str, Any]
KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
}
LLAMA_KEYS = dict(LLAMA.keys)  # to see that a student leaves LLAMA as it is
LLAMA_TENSORS = LLAMA.tensors


def random_state(shapes: Shapes, seed: int = 0, size: float = 0.4) -> State:
    """Random tensors with these names and shapes; the weights of norms are near 1."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        is_norm = name.endswith("weight") and len(shape) == 1
        state[name] = size * torch.randn(tuple(shape), generator=generator) + is_norm
    return state


@cache
def _built(config: str) -> list[DecoderModel]:
    return []  # filled by the first caller, because a configuration can't be hashed


def random_model(config: ModelConfig, seed: int = 0, size: float = 0.4) -> DecoderModel:
    """A model with such weights, in evaluation mode."""
    built = _built(repr(config))
    if not built:
        built.append(DecoderModel(config).eval())
    model = copy.deepcopy(built[0])  # faster than to build it again
    shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
    model.load_state_dict(random_state(shapes, seed, size), strict=False)
    return model


def random_ids(high: int, length: int, seed: int) -> Tensor:
    """Two texts of token ids below `high`: (2, length)."""
    return torch.randint(0, high, (2, length), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------- 1, bytes of a file


def pack_file(
    tensors: Mapping[str, Tensor],
    order: Iterable[str] | None = None,
    metadata: dict[str, str] | None = None,
    multiple: int = 8,
) -> bytes:
    """The bytes of a safetensors file.

    `order` is the order of the data; the header has the order of `tensors`.
    """
    data = b""
    begins = {}
    for name in order or tensors:
        begins[name] = len(data)
        data += bytes(tensors[name].contiguous().flatten().view(torch.uint8).tolist())
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    for name, tensor in tensors.items():
        offsets = [begins[name], begins[name] + tensor.nbytes]
        shape = list(tensor.shape)
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % multiple)
    return len(text).to_bytes(8, "little") + text + data


def _slips_in_places(there: int) -> dict[str, dict[int, str]]:
    """Wrong answers to the first part of task 1, for a header of `there` bytes."""
    from_start = (
        "data_offsets are counted from the end of the header, not from the start of the file"
    )
    no_eight = "the 8 bytes in front of the header are missing"
    return {
        "file_length": {
            22: "that is the data alone; before it stand 8 bytes and the header",
            there + 22: "the 8 bytes that hold the length of the header are part of the file",
            8 + there + 28: "b has the dtype F16, so 2 bytes for each of its numbers",
            8 + there: "that is where the data begins",
        },
        "begin_b": {
            16: from_start,
            8 + 16: "data_offsets are counted from the end of the header, not from byte 8",
            there + 16: no_eight,
            8 + there: "b stands first in the header, but its data_offsets put it behind a",
        },
        "begin_a10": {
            8 + there + 4: (
                "a[1, 0] is not the second number: rows lie one after the other, so a[0, 1] comes"
                " before it"
            ),
            8 + there + 2: (
                "an offset in bytes is wanted: number 2 of a begins 2 x 4 bytes behind the start"
                " of a"
            ),
            8 + there + 6 + 8: "a lies first in the data, whatever the order of the header is",
            8: from_start,
            there + 8: no_eight,
        },
    }


def task1_places(answers: Answers, raw: bytes) -> None:
    """The three places that were found by hand, and the number."""
    names = ("file_length", "begin_b", "begin_a10", "value_a10")
    with case("Task 1"):
        values = dict(zip(names, written(answers, *names), strict=True))
        there = int.from_bytes(raw[:8], "little")
        slips = _slips_in_places(there)
        real = {"file_length": len(raw), "begin_b": 8 + there + 16, "begin_a10": 8 + there + 8}
        for name, right in real.items():
            found = expect_number(values[name], name)
            decimal = int(raw[:1].hex())  # 90, if somebody reads hexadecimal 90 so
            assert found != right - there + decimal, (
                f"{name} is {found:g}: the first 8 bytes are hexadecimal, 90 is 9 x 16"
            )
            assert found not in slips[name], f"{name} is {found:g}: {slips[name][int(found)]}"
            assert found == right, (
                f"{name} is {found:g}, which is off by {found - right:+g}. Add up: 8 bytes, the"
                " header with its blanks, then the offset"
            )
        _check_value(expect_number(values["value_a10"], "value_a10"))


def _check_value(found: float) -> None:
    other = {
        -4.0: "that is a[0, 1]",
        0.25: "that is a[1, 1]",
        8.0: "the fraction is missing: 1.01 in binary is 1.25",
        1.25: "the exponent is missing: 2^(130 - 127)",
    }
    assert found not in other, f"value_a10 is {found:g}: {other[found]}"
    assert found == 10.0, (
        f"value_a10 is {found:g}. The four bytes at byte 8 of the data, read backwards, are 41 20"
        " 00 00"
    )


def check_number(
    find_number: Answer,
    packed: bytes,
    tensors: Mapping[str, Tensor],
    name: str,
    index: tuple[int, ...],
    what: str,
) -> None:
    """One number of one file."""
    reason = (
        "the header is cut at the wrong byte: are all 8 bytes of its length read, lowest first?"
    )
    not_json = (json.JSONDecodeError, UnicodeDecodeError)
    with explained(not_json, reason), case(what), forbid(safetensors):
        answer = find_number(packed, name, index)
    tensor = tensors[name]
    right = tensor[index].item()
    assert answer is not None, f"{what}: find_number returned None: does it return its result?"
    found = expect_plain_number(answer, f"{what}: what find_number returned")
    if found == right:
        return
    turned = [tuple(i.item() for i in place) for place in (tensor == found).nonzero()]
    if turned:
        raise AssertionError(
            f"{what}: {name}{list(index)} is {right:g}, but you found {found:g}, which is"
            f" {name}{list(turned[0])}: rows lie one after the other, the last index counts fastest"
        )
    other = [key for key, t in tensors.items() if key != name and (t == found).any()]
    assert not other, (
        f"{what}: {name}{list(index)} is {right:g}, but you found {found:g}, a number of"
        f" {other[0]}: data_offsets say where a tensor begins, not its place in the header"
    )
    raise AssertionError(
        f"{what}: {name}{list(index)} is {right:g}, but you found {found:g}. Check the start (8"
        f" bytes, header, data_offsets), and the width of {tensor.dtype}"
    )


def number_refused(
    find_number: Answer, packed: bytes, name: str, index: tuple[int, ...], word: str
) -> None:
    """A tensor or an index that the file doesn't hold."""
    call = f"find_number(raw, {name!r}, {index})"
    try:
        found = find_number(packed, name, index)
    except ValueError as error:
        assert word in str(error), f"the ValueError must name {word}; yours says: {error}"
    except Exception as error:
        raise AssertionError(
            f"{call} raised {type(error).__name__}, expected a ValueError that names {word}"
        ) from None
    else:
        raise AssertionError(f"{call} returned {found}, expected a ValueError that names {word}")


def counted(shape: Sequence[int], first: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor with numbers that no other has."""
    count = max(torch.Size(shape).numel(), 1)
    return torch.arange(first, first + count).reshape(tuple(shape)).to(dtype)


SAMPLE = {"b": counted((3,), 1, torch.float16), "a": counted((2, 3), 10)}
IN_SAMPLE = (("b", (0,)), ("b", (2,)), ("a", (0, 0)), ("a", (1, 0)), ("a", (1, 2)))


def task1_find(find_number: Answer) -> None:
    """Small files, and what they don't hold."""
    with case("Task 1, find_number"):
        for packed, what in (
            (pack_file(SAMPLE), "a small file"),
            (pack_file(SAMPLE, metadata={"format": "pt"}), "with __metadata__"),
        ):
            for name, index in IN_SAMPLE:
                check_number(find_number, packed, SAMPLE, name, index, what)
        pair = {"b": counted((3,), 1), "a": counted((2, 3), 10)}
        packed = pack_file(pair, order=["a", "b"])
        check_number(find_number, packed, pair, "b", (1,), "data in another order than the header")
        number_refused(find_number, pack_file(SAMPLE), "norm.weight", (0,), "norm.weight")
        number_refused(find_number, pack_file(SAMPLE), "a", (0, 7), "7")
        number_refused(find_number, pack_file(SAMPLE), "a", (0, 0, 9), "9")
        number_refused(find_number, pack_file(SAMPLE), "a", (0, -1), "-1")


def hidden_find(find_number: Answer) -> None:
    """Long headers, other types, and a tensor without dimensions."""
    with case("Task 1, find_number"):
        long = {
            f"layers.{i}.weight": counted((2, 3, 4), 100 * i, dtype)
            for i, dtype in enumerate(
                [torch.float32, torch.float64, torch.bfloat16, torch.int32] * 3
            )
        }
        long = {name: t if t.dtype != torch.bfloat16 else t % 50 + 0.5 for name, t in long.items()}
        long |= {"größe": counted((), 5000)}
        places = {0: (1, 2, 3), 1: (1, 0, 2), 6: (0, 2, 1), 11: (1, 1, 0)}
        note = {"note": "a brace } and a ä"}
        for multiple in (8, 1):
            packed = pack_file(long, order=sorted(long), metadata=note, multiple=multiple)
            what = "a header of more than 255 bytes"
            for i, index in places.items():
                check_number(find_number, packed, long, f"layers.{i}.weight", index, what)
            check_number(find_number, packed, long, "größe", (), "a tensor of shape []")
        negative = {
            "n": torch.tensor([[-1, -1000]], dtype=torch.int32),
            "h": torch.tensor([-2.5], dtype=torch.float16),
        }
        for name, place in (("n", (0, 0)), ("n", (0, 1)), ("h", (0,))):
            packed = pack_file(negative)
            check_number(find_number, packed, negative, name, place, "negative numbers")


# ---------------------------------------------------------------------------- 2, GPT-2's tensors


def tiny_gpt2(
    num_layers: int = 2,
    C: int = 8,
    prefix: str = "transformer.",
    *,
    masks: bool = False,
    seed: int = 0,
    V: int = 17,
    positions: int = 12,
) -> State:
    """The tensors of a GPT-2, as in a file of the hub."""
    shapes: dict[str, Sequence[int]] = {"wte.weight": (V, C), "wpe.weight": (positions, C)}
    kinds = {
        "attn.c_attn": (C, 3 * C),
        "attn.c_proj": (C, C),
        "mlp.c_fc": (C, 4 * C),
        "mlp.c_proj": (4 * C, C),
    }
    for i in range(num_layers):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{norm}.{w}": (C,) for w in ("weight", "bias")}
        for name, size in kinds.items():
            shapes |= {f"h.{i}.{name}.weight": size, f"h.{i}.{name}.bias": size[1:]}
    shapes |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    state = {prefix + name: t for name, t in random_state(shapes, seed).items()}
    for i in range(num_layers if masks else 0):
        state[f"{prefix}h.{i}.attn.bias"] = torch.ones(1, 1, positions, positions).tril()
        state[f"{prefix}h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    return state | ({"lm_head.weight": state[f"{prefix}wte.weight"]} if prefix else {})


def gpt2_logits(state: State, num_layers: int, num_heads: int, ids: Tensor) -> Tensor:
    """GPT-2 itself, in plain PyTorch: ids (B, T) to logits (B, T, V)."""
    w = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def conv(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)

    x = w["wte.weight"][ids] + w["wpe.weight"][: ids.shape[1]]
    for i in range(num_layers):
        parts = conv(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = map(heads, parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + conv(mixed, f"h.{i}.attn.c_proj")
        inner = F.gelu(conv(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + conv(inner, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def course_config(
    num_layers: int = 2, C: int = 8, num_heads: int = 2, V: int = 17, positions: int = 12
) -> ModelConfig:
    """The same model for DecoderModel."""
    return ModelConfig(
        vocab_size=V,
        hidden_size=C,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=4 * C,
        max_position_embeddings=positions,
        position_type="learned",
        norm_type="layernorm",
        rms_norm_eps=1e-5,
        attention_bias=True,
        mlp_bias=True,
        use_glu=False,
    )


def convert_gpt2(
    gpt2_to_course: Answer,
    what: str,
    num_layers: int = 2,
    num_heads: int = 2,
    C: int = 8,
    **options: Any,
) -> tuple[State, State, DecoderModel]:
    """A tiny GPT-2, the student's dict, with its names and shapes checked, and a model for it."""
    state = tiny_gpt2(num_layers, C, **options)
    before = {key: tensor.clone() for key, tensor in state.items()}
    with case(what), forbid(families, pretrained):
        new = gpt2_to_course(state, num_layers)
    assert isinstance(new, dict), (
        f"{what}: gpt2_to_course returned a {type(new).__name__}, expected a dict"
    )
    same = state.keys() == before.keys() and all(
        torch.equal(state[key], before[key]) for key in before
    )
    assert same, (
        f"{what}: state itself was changed; build a new dict, and change no tensor in place"
    )
    model = DecoderModel(course_config(num_layers, C, num_heads)).eval()
    ours = model.state_dict()
    _check_names(what, new, ours)
    for key, tensor in new.items():
        assert isinstance(tensor, Tensor), (
            f"{what}: {key} is a {type(tensor).__name__}, expected a tensor"
        )
        expected = tuple(ours[key].shape)
        why = ""
        if re.search("[qkv]_proj", key):
            why = (
                ": c_attn holds queries, keys and values side by side, in the bias too; transpose"
                " it first, then cut"
            )
        elif tuple(tensor.shape) == expected[::-1]:
            why = ": Conv1D stores (in, out), nn.Linear (out, in)"
        assert tuple(tensor.shape) == expected, (
            f"{what}: {key} has the shape {tuple(tensor.shape)}, expected {expected}{why}"
        )
    return before, new, model


def _check_names(what: str, new: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    masks = [key for key in new if "masked" in key or key.endswith("attn.bias")]
    assert not masks, f"{what}: {masks[0]} is a mask of an old file; leave it out"
    left_over = sorted(new.keys() - ours.keys())
    missing = sorted(ours.keys() - new.keys())
    assert not left_over, (
        f"{what}: our model has no tensor {left_over[0]}, and {len(left_over)} of your names are"
        " like this"
    )
    assert missing != ["lm_head.weight"], (
        f"{what}: lm_head.weight is missing: our output layer is the table, under its own name"
    )
    assert not missing, f"{what}: {len(missing)} tensors are missing, the first is {missing[0]}"


def check_names(gpt2_to_course: Answer, what: str, *sizes: int, **options: Any) -> None:
    """Names and shapes of one conversion, of the sizes and options of `convert_gpt2`."""
    with case("Task 2, names"):
        convert_gpt2(gpt2_to_course, what, *sizes, **options)


def task2_names(gpt2_to_course: Answer) -> None:
    """Names and shapes."""
    check_names(gpt2_to_course, "2 layers, with prefix")
    check_names(gpt2_to_course, "without prefix", prefix="")
    check_names(gpt2_to_course, "with masks", masks=True)


def _explain_tensor(what: str, key: str, tensor: Tensor, right: State, plain: State) -> None:
    """Say what a tensor with wrong numbers holds instead."""
    square = tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1]
    if square and torch.equal(tensor, right[key].t()):
        raise AssertionError(
            f"{what}: {key} is not transposed. It is square, so no shape reveals it"
        )
    holders = [other for other, t in right.items() if other != key and torch.equal(t, tensor)]
    assert not holders, f"{what}: {key} holds what belongs to {holders[0]}"
    size = tensor.shape[-1]
    stored = [
        other
        for other, t in plain.items()
        if t.ndim == 2 and torch.equal(t.reshape(-1, size)[: len(tensor)], tensor)
    ]
    assert not stored, (
        f"{what}: {key} is a reshaped {stored[0]}; reshape keeps the order of the numbers, a"
        " transposition changes it"
    )
    raise AssertionError(
        f"{what}: {key} has the right shape and wrong numbers. After .t(), c_attn is three"
        " blocks of C rows: q, k, v"
    )


def check_gpt2(gpt2_to_course: Answer, what: str, *sizes: int, **options: Any) -> None:
    """The numbers of one conversion, of the sizes and options of `convert_gpt2`, and the logits."""
    with case("Task 2, logits"):
        state, new, model = convert_gpt2(gpt2_to_course, what, *sizes, **options)
        plain = {key.removeprefix("transformer."): tensor for key, tensor in state.items()}
        right = {"lm_head.weight": plain["wte.weight"]}
        for rule in tensor_rules(GPT2, model.config, model.state_dict()):
            tensors = CHANGES[rule.change].read([plain[key] for key in rule.theirs])
            right |= zip(rule.ours, tensors, strict=True)
        for key, tensor in new.items():
            if not torch.equal(tensor, right[key]):
                _explain_tensor(what, key, tensor, right, plain)
        model.load_state_dict(new)
        ids = random_ids(17, 12, seed=1)
        shape = model.config
        theirs = gpt2_logits(state, shape.num_layers, shape.num_heads, ids)
        with torch.no_grad():
            off = (model(ids).logits - theirs).abs().max()
        assert off < 1e-4, f"{what}: the logits differ by {off:.2g}"


def task2_logits(gpt2_to_course: Answer) -> None:
    """Numbers."""
    check_gpt2(gpt2_to_course, "2 layers, with prefix")
    check_gpt2(gpt2_to_course, "without prefix", prefix="")
    check_gpt2(gpt2_to_course, "with masks", masks=True)


# ---------------------------------------------------------------------------- 3, StarCoder2


def tiny_starcoder2(
    seed: int = 0, without: Sequence[str] = (), **changes: Any
) -> tuple[dict[str, Any], State]:
    """The config.json and the tensors of a StarCoder2, as in a folder of the hub."""
    hf: dict[str, Any] = {
        "model_type": "starcoder2",
        "architectures": ["Starcoder2ForCausalLM"],
        "vocab_size": 19,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "norm_epsilon": 0.02,
        "max_position_embeddings": 64,
        "hidden_act": "gelu_pytorch_tanh",
        "rope_theta": 1000.0,
        "sliding_window": 8,
        "use_bias": True,
        "tie_word_embeddings": True,
        "residual_dropout": 0.1,
        "embedding_dropout": 0.1,
        "torch_dtype": "float32",
    }
    hf |= changes
    state = random_state(_shapes_of_starcoder2(hf), seed)
    return {key: value for key, value in hf.items() if key not in without}, state


def _shapes_of_starcoder2(hf: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    C = hf["hidden_size"]
    M = hf["intermediate_size"]
    V = hf["vocab_size"]
    kv = C // hf["num_attention_heads"] * hf["num_key_value_heads"]
    sizes = {
        "self_attn.q_proj": (C, C),
        "self_attn.k_proj": (kv, C),
        "self_attn.v_proj": (kv, C),
        "self_attn.o_proj": (C, C),
        "mlp.c_fc": (M, C),
        "mlp.c_proj": (C, M),
    }
    shapes: dict[str, Sequence[int]] = {"model.embed_tokens.weight": (V, C)}
    if not hf["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, C)
    for i in range(hf["num_hidden_layers"]):
        for name, size in sizes.items():
            shapes[f"model.layers.{i}.{name}.weight"] = size
            shapes |= {f"model.layers.{i}.{name}.bias": size[:1]} if hf["use_bias"] else {}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"model.layers.{i}.{norm}.{w}": (C,) for w in ("weight", "bias")}
    return shapes | {"model.norm.weight": (C,), "model.norm.bias": (C,)}


def starcoder2_logits(hf: Mapping[str, Any], state: State, ids: Tensor) -> Tensor:
    """StarCoder2 itself, in plain PyTorch: ids (B, T) to logits (B, T, V)."""
    w = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    C = hf["hidden_size"]
    H = hf["num_attention_heads"]
    D = C // H
    T = ids.shape[1]
    window = hf.get("sliding_window") or T
    speeds = hf["rope_theta"] ** (-torch.arange(0, D, 2) / D)
    angles = torch.outer(torch.arange(T), speeds).repeat(1, 2)  # (T, D)
    back = torch.arange(T)[:, None] - torch.arange(T)
    visible = (back >= 0) & (back < window)

    def act(x: Tensor) -> Tensor:
        name = hf.get("hidden_act", "gelu_pytorch_tanh")
        return F.relu(x) if name == "relu" else F.gelu(x, approximate="tanh")

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (C,), w[f"{name}.weight"], w[f"{name}.bias"], hf["norm_epsilon"])

    def turn(x: Tensor) -> Tensor:
        turned = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1)
        return x * angles.cos() + turned * angles.sin()

    x = w["embed_tokens.weight"][ids]
    for i in range(hf["num_hidden_layers"]):
        layer = f"layers.{i}."
        y = norm(x, f"{layer}input_layernorm")
        parts = (linear(y, f"{layer}self_attn.{p}_proj") for p in "qkv")
        q, k, v = (part.unflatten(-1, (-1, D)).transpose(1, 2) for part in parts)
        k, v = (t.repeat_interleave(H // t.shape[1], dim=1) for t in (turn(k), v))
        mixed = F.scaled_dot_product_attention(turn(q), k, v, attn_mask=visible)
        x = x + linear(mixed.transpose(1, 2).flatten(2), f"{layer}self_attn.o_proj")
        y = norm(x, f"{layer}post_attention_layernorm")
        x = x + linear(act(linear(y, f"{layer}mlp.c_fc")), f"{layer}mlp.c_proj")
    return norm(x, "norm") @ w.get("lm_head.weight", w["embed_tokens.weight"]).T


@contextmanager
def known(family: Any) -> Iterator[None]:
    """Put the student's family into the table for a while."""
    assert isinstance(family, Family), (
        f"STARCODER2 is a {type(family).__name__}, expected a Family: replace(LLAMA, ...)"
    )
    assert family.model_type == "starcoder2", (
        f"model_type is {family.model_type!r}, but the file says 'starcoder2'"
    )
    with patch.dict(FAMILIES, {"starcoder2": family}):
        yield


def open_starcoder2(mine: Any, what: str, hf: dict[str, Any], state: State) -> DecoderModel:
    """The model that the student's family reads, by the steps of load_pretrained."""
    with known(mine):
        try:
            family, config = read_config(hf)
            model = DecoderModel(config).eval()
            ours = model.state_dict()
            table = tensor_rules(family, config, ours)
        except (ValueError, TypeError) as error:
            raise AssertionError(
                f"{what}: the package cannot read this folder with your family: {error}"
            ) from None
    file = {key.removeprefix(family.prefix): tensor for key, tensor in state.items()}
    new: State = {}
    for rule in table:
        missing = [key for key in rule.theirs if key not in file]
        assert not missing, (
            f"{what}: your family wants a tensor {missing[0]}, which the file does not hold."
            f" {_about_missing(missing[0])}"
        )
        tensors = CHANGES[rule.change].read([file[key] for key in rule.theirs])
        new |= zip(rule.ours, tensors, strict=True)
    rest = sorted(file.keys() - {key for rule in table for key in rule.theirs})
    assert not rest, (
        f"{what}: your family leaves {rest[0]} of the file unread. Which key decides about it, and"
        " what holds without that key?"
    )
    for key, tensor in new.items():
        assert tensor.shape == ours[key].shape, (
            f"{what}: {key} gets the shape {tuple(tensor.shape)}, expected"
            f" {tuple(ours[key].shape)}: StarCoder2's matrices are those of nn.Linear"
        )
    # tensor_rules leaves none out, and a tied output layer is the table
    model.load_state_dict(new, strict=False)
    return model


def _about_missing(name: str) -> str:
    """Where to look if a family wants this tensor, and the file doesn't hold it."""
    if name == "lm_head.weight":
        return "Where the output layer is the table, there is none: look at tie_word_embeddings"
    if name.endswith("_proj.bias") or ".mlp." in name and name.endswith(".bias"):
        return "The biases of attention and MLP depend on use_bias, and on nothing else"
    return "Of two rules that fit, the first wins"


def check_starcoder2(mine: Any, what: str, T: int = 6, **changes: Any) -> None:
    """One folder that the student's family reads."""
    with case("Task 3, reading"):
        hf, state = tiny_starcoder2(**changes)
        model = open_starcoder2(mine, what, hf, state)
        ids = random_ids(19, T, seed=1)
        with torch.no_grad():
            off = (model(ids).logits - starcoder2_logits(hf, state, ids)).abs().amax((0, 2))
        activation = "relu" if hf.get("hidden_act") == "relu" else "gelu_tanh"
        wish = {
            "norm_type": "layernorm",
            "use_glu": False,
            "rms_norm_eps": hf["norm_epsilon"],
            "activation": activation,
        }
        for setting, right in wish.items():
            found = getattr(model.config, setting)
            assert found == right or (setting, found) == ("activation", None), (
                f"{what}: the logits differ by {off.max():.2g}: {setting} is {found!r}, expected"
                f" {right!r}"
            )
        window = hf.get("sliding_window") or T
        assert off[:window].max() < 1e-4, (
            f"{what}: the logits differ by {off.max():.2g}, from the first positions on"
        )
        assert off.max() < 1e-4, (
            f"{what}: the logits differ by {off.max():.2g}, but only from position {window} on:"
            " beyond the window"
        )


def task3_read(mine: Any) -> None:
    """Folders to read."""
    check_starcoder2(mine, "a text shorter than the window")
    check_starcoder2(mine, "a text longer than the window", T=20)
    check_starcoder2(mine, "use_bias=False", use_bias=False)
    check_starcoder2(mine, "untied", tie_word_embeddings=False)
    check_starcoder2(mine, "sliding_window=null", T=20, sliding_window=None)
    check_starcoder2(mine, "without use_bias", without=["use_bias"])


def hidden_read(mine: Any) -> None:
    """Folders that leave something out, and other sizes."""
    for name in ("hidden_act", "tie_word_embeddings"):
        check_starcoder2(mine, f"without {name}", without=[name])
    check_starcoder2(mine, "without sliding_window", T=20, without=["sliding_window"])
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 24, "sliding_window": 3}
    sizes |= {"num_hidden_layers": 3, "num_key_value_heads": 1}
    check_starcoder2(mine, "other sizes", T=30, seed=4, **sizes)
    check_starcoder2(mine, "hidden_act='relu'", hidden_act="relu", norm_epsilon=0.5)


def check_written(mine: Any, what: str, **changes: Any) -> None:
    """One model that the student's family writes."""
    with case("Task 3, writing"):
        hf, state = tiny_starcoder2(**changes)
        model = open_starcoder2(mine, what, hf, state)
        with known(mine), tempfile.TemporaryDirectory() as place:
            try:
                # it has to find the family by itself
                folder = save_pretrained(model, Path(place, "out"))
            except (ValueError, TypeError) as error:
                raise AssertionError(
                    f"{what}: the package cannot write the model with your family: {error}"
                ) from None
            back = json.loads((folder / "config.json").read_text())
            tensors = load_file(folder / "model.safetensors")
        assert tensors.keys() == state.keys(), (
            f"{what}: the written tensors are not those of the file:"
            f" {sorted(tensors.keys() ^ state.keys())[:3]} are in one only"
        )
        unequal = [key for key in state if not torch.equal(tensors[key], state[key])]
        assert not unequal, f"{what}: {unequal[0]} comes back with other numbers"
        wanted = "architectures norm_epsilon use_bias sliding_window hidden_act"
        wanted += " tie_word_embeddings num_key_value_heads rope_theta"
        for key in wanted.split():
            assert key in back or key not in hf, f"{what}: the written config.json lacks {key}"
            assert key not in hf or back[key] == hf[key], (
                f"{what}: the written config.json has {key}={back[key]!r}, expected {hf[key]!r}"
            )


def check_refused(mine: Any, word: str, without: Sequence[str] = (), **changes: Any) -> None:
    """One config.json that has to be refused."""
    with case("Task 3, refusing"):
        hf, _ = tiny_starcoder2(without=without)
        try:
            with known(mine):
                read_config(hf | changes)
        except ValueError as error:
            assert word in str(error), f"the error should name {word}; it says: {error}"
        else:
            given = f"with {changes}" if changes else f"without {without[0]}"
            raise AssertionError(
                f"a config.json {given} is read without complaint; it must be refused"
            )


def task3_refuse(mine: Any) -> None:
    """What is read, and what is refused; LLAMA stays as it is."""
    with case("Task 3, refusing"), known(mine):
        read_config(tiny_starcoder2()[0])  # the right one is read
        try:
            read_config(tiny_starcoder2(residual_dropout=0.0, embedding_dropout=0.2)[0])
        except ValueError as error:
            raise AssertionError(
                f"dropout changes nothing that we compute, whatever its value: {error}"
            ) from None
        config = read_config(tiny_starcoder2(without=["sliding_window"])[0])[1]
        assert config.window_of(0) is None, (
            f"without sliding_window there is no window, but yours is {config.window_of(0)}"
        )
    check_refused(mine, "layer_norm_bias", layer_norm_bias=True)
    check_refused(mine, "vocab_size", without=["vocab_size"])
    check_refused(mine, "norm_epsilon", without=["norm_epsilon"])
    with case("Task 3, refusing"):
        assert dict(LLAMA.keys) == LLAMA_KEYS and LLAMA.tensors == LLAMA_TENSORS, (
            "LLAMA itself was changed: LLAMA.keys | dict(...) makes a new dict"
        )


def hidden_refuse(mine: Any) -> None:
    """More files to refuse."""
    check_refused(mine, "rms_norm_eps", rms_norm_eps=1e-6)
    check_refused(mine, "norm_epsilon", without=["norm_epsilon"], rms_norm_eps=1e-6)
    check_refused(mine, "query_pre_attn_scalar", query_pre_attn_scalar=3)
    check_refused(mine, "LlamaForCausalLM", architectures=["LlamaForCausalLM"])
    right = mine.architecture == "Starcoder2ForCausalLM" and mine.prefix == "model."
    assert right, (
        f"architecture is {mine.architecture!r} and prefix {mine.prefix!r}, expected"
        " 'Starcoder2ForCausalLM' and 'model.'"
    )


# ---------------------------------------------------------------------------- 4, faults of a file

SOME_KEYS = {
    "hidden_size": Key("hidden_size"),
    "num_layers": Key("num_hidden_layers"),
    "num_experts": Key("num_experts|num_local_experts"),
    "rope_theta": Key("rope_theta", 10_000.0),
    "sliding_window": Key("sliding_window", None),
}
SOME_REQUIRED: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1.0, None),
    "mlp_only_layers": ([], None),
}
SOME_HARMLESS = ("use_cache", "torch_dtype")
Fault = tuple[list[str], list[Any], str]


def faults_in(
    hf: Mapping[str, Any],
    keys: Mapping[str, Key],
    required: Mapping[str, tuple[Any, ...]],
    harmless: Sequence[str],
) -> Iterator[Fault]:
    """For each fault what its string must hold: the names, the values, and why it is one."""
    known_names = [name for key in keys.values() for name in key.name.split("|")]
    for key in keys.values():
        here = [name for name in key.name.split("|") if name in hf]
        values = [hf[name] for name in here]
        if not here and key.default is ...:
            yield key.name.split("|")[:1], [], "it has no default and is missing"
        if values != values[:1] * len(here):
            yield here, values, "these are two names of one setting, with different values"
    for name, value in hf.items():
        if name in required and value not in required[name]:
            yield [name], [value], "this value is not among those allowed"
        elif name not in required and name not in known_names and name not in harmless:
            yield [name], [value], "nobody knows what this key means"


def holds(text: str, names: Sequence[str], values: Sequence[Any]) -> tuple[bool, bool]:
    """Whether a string has all the names, and whether it has all the values, too."""
    named = all(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names)
    return named, named and all(repr(value) in text for value in values)


def check_faults(
    check_config: Answer,
    what: str,
    keys: Mapping[str, Key] = SOME_KEYS,
    required: Mapping[str, tuple[Any, ...]] = SOME_REQUIRED,
    harmless: Sequence[str] = SOME_HARMLESS,
    without: Sequence[str] = (),
    **changes: Any,
) -> None:
    """The faults of one file."""
    right = {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 4}
    hf = {name: value for name, value in (right | changes).items() if name not in without}
    before = copy.deepcopy(hf)
    with case(f"Task 4: {what}"), forbid(families):
        found = check_config(hf, keys, required, harmless)
    with case("Task 4"):
        assert hf == before, f"{what}: hf itself was changed"
        assert isinstance(found, list | tuple) and all(isinstance(text, str) for text in found), (
            f"{what}: check_config returned {found!r}, expected a list of strings"
        )
        rest = list(found)
        for names, values, why in faults_in(hf, keys, required, harmless):
            rest.remove(_fault_about(what, rest, list(found), names, values, why))
        assert not rest, f"{what}: {rest[0]!r} is no fault. The file is {hf}"


def _fault_about(
    what: str, rest: list[str], found: list[str], names: list[str], values: list[Any], why: str
) -> str:
    """The student's string about this fault."""
    whole = [text for text in rest if holds(text, names, values)[1]]
    half = [text for text in rest if holds(text, names, values)[0]]
    pairs = zip(names, values, strict=False)
    spelled = " and ".join(f"{name}={value!r}" for name, value in pairs) or names[0]
    assert whole or not half, (
        f"{what}: the fault {half[0]!r} names the key without its value as repr writes it:"
        f" {', '.join(map(repr, values))}"
    )
    assert whole, f"{what}: no fault names {spelled}, though {why}. You returned {found}"
    return whole[0]


def task4_faults(check_config: Answer) -> None:
    """Files with one fault, with several, and with none."""
    check_faults(check_config, "a right file")
    check_faults(check_config, "a key is missing", without=["hidden_size"])
    alone: dict[str, Any] = {"without": ["num_experts"], "num_local_experts": 4}
    check_faults(check_config, "the other alias alone", **alone)
    check_faults(check_config, "no alias", without=["num_experts"])
    check_faults(check_config, "two aliases, one value", num_local_experts=4)
    check_faults(check_config, "two aliases, two values", num_local_experts=8)
    check_faults(check_config, "an unknown key", attention_scale=0.5)
    check_faults(check_config, "an unknown key whose value is False", use_alibi=False)
    check_faults(check_config, "an unknown key whose value is a text", attention="sparse")
    check_faults(check_config, "a value that is not supported", rope_interleaved=True)
    check_faults(check_config, "harmless keys", use_cache=True, torch_dtype="float16")
    null: dict[str, Any] = {"partial_rotary_factor": None, "sliding_window": None}
    check_faults(check_config, "null where null is allowed", **null)
    check_faults(check_config, "null where only False is allowed", rope_interleaved=None)
    check_faults(check_config, "our own name of a setting", num_layers=2)
    three: dict[str, Any] = {
        "without": ["num_hidden_layers"],
        "mlp_only_layers": [0],
        "attention_scale": None,
    }
    check_faults(check_config, "three faults at once", **three)


def hidden_faults(check_config: Answer) -> None:
    """Nulls, lists and other tables."""
    check = check_faults
    check(check_config, "null for a key without a default: it is there", hidden_size=None)
    check(check_config, "one alias null, the other 4", num_local_experts=None)
    check(check_config, "0 and an empty list are there", hidden_size=0, num_hidden_layers=[])
    same: dict[str, Any] = {"num_experts": [1, 2], "num_local_experts": [1, 2]}
    check(check_config, "lists under two names", **same)
    check(check_config, "other lists under two names", **same | {"num_local_experts": [2, 1]})
    check(check_config, "lists among the allowed values", mlp_only_layers=[])
    both = SOME_REQUIRED | {"rope_theta": (10_000.0,)}
    check(check_config, "a name in keys and in required", required=both, rope_theta=5.0)
    check(check_config, "1 where 1.0 is allowed", partial_rotary_factor=1)
    own = {"width": Key("n_embd|d_model|hidden"), "eps": Key("eps", 1e-5)}
    gone: dict[str, Any] = {"without": ["hidden_size"], "d_model": 3, "hidden": 3, "eps": None}
    check(check_config, "other tables, three aliases", own, {}, (), **gone)
    check(check_config, "three aliases, two values", own, {}, (), **gone | {"n_embd": 4})
    four = {"num_experts": (4,)}
    check(check_config, "other tables, all unknown", own, four, ("num_hidden_layers",))
    many: dict[str, Any] = {
        "rope_interleaved": True,
        "partial_rotary_factor": 0.5,
        "num_local_experts": 5,
    }
    many |= {"a": 1, "b": False, "c": {"x": 2}, "without": ["hidden_size", "num_hidden_layers"]}
    check(check_config, "six faults and more", **many)


# ---------------------------------------------------------------------------- 5, where two part


def noting(model: nn.Module, states: list[Tensor]) -> None:
    """Let the embedding and each layer append what they return to `states`."""

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    for part in (model.embedding, *model.layers):  # type: ignore[misc]
        part.register_forward_hook(note)


def publish_qwen2(
    num_layers: int = 12, seed: int = 0, size: float = 0.3, **sizes: Any
) -> tuple[State, ModelConfig, Record]:
    """The tensors of a Qwen2, its settings, and a record of what it computes."""
    default = {"vocab_size": 23, "hidden_size": 16, "num_heads": 4, "intermediate_size": 20}
    bias = {"attention_bias": True, "attention_out_bias": False}
    config = ModelConfig(**default | sizes | bias, num_layers=num_layers)
    model = random_model(config, seed, size)
    states: list[Tensor] = []
    noting(model, states)
    ids = random_ids(23, 10, seed)
    with torch.no_grad():
        logits = model(ids).logits
    ours = model.state_dict()
    state: State = {}
    for rule in tensor_rules(QWEN2, config, ours):
        tensors = CHANGES[rule.change].write([ours[name].clone() for name in rule.ours])
        state |= zip((f"model.{name}" for name in rule.theirs), tensors, strict=True)
    return state, config, {"ids": ids, "states": states, "logits": logits}


class Pair(nn.Linear):
    """A layer that returns a pair, as those of a DecoderModel do."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return x + super().forward(x).tanh(), None


class Chain(nn.Module):
    """What first_difference needs of a model, and faster: embedding, layers and logits."""

    def __init__(self, num_layers: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(23, 8)
        self.layers = nn.ModuleList(Pair(8, 8) for _ in range(num_layers))
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 23)

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embedding(ids)
        for layer in self.layers:
            x, _ = layer(x)
        return SimpleNamespace(logits=self.lm_head(self.norm(x)))


@torch.no_grad()
def damaged(
    *names: str, seed: int = 0, num_layers: int = 5, row: int | None = None
) -> tuple[Chain, Record]:
    """A model with some tensors spoiled, and the record of the right one."""
    model = Chain(num_layers, seed).eval()
    ids = random_ids(23, 10, seed)
    states = [model.embedding(ids)]
    for layer in model.layers:
        states.append(layer(states[-1])[0])
    record = {"ids": ids, "states": states, "logits": model(ids).logits}
    for name in names:
        model.get_parameter(name)[slice(None) if row is None else row] += 0.5
    return model, record


def check_place(
    first_difference: Answer,
    what: str,
    right: Any,
    model: nn.Module,
    record: Record,
    why: str,
    **options: Any,
) -> None:
    """Where one model parts from one record."""
    before = [tensor.clone() for tensor in (record["logits"], *record["states"])]
    with case(f"Task 5, first_difference: {what}"):
        found = first_difference(model, record, **options)
    with case("Task 5, first_difference"):
        assert found is None or isinstance(found, str | int) and not isinstance(found, bool), (
            f"{what}: first_difference returned {found!r}, expected a name, a number or None"
        )
        assert found == right, (
            f"{what}: first_difference returned {found!r}, expected {right!r}: {why}"
        )
        left = [
            name
            for name, module in model.named_modules()
            if module._forward_hooks or module._forward_pre_hooks
        ]
        assert not left, f"{what}: {left[0]} still has your hook after the call: remove it"
        assert all(map(torch.equal, before, (record["logits"], *record["states"]))), (
            f"{what}: the record was changed"
        )


PLACES: tuple[tuple[str, Any, tuple[str, ...], str], ...] = (
    (
        "an undamaged model",
        None,
        (),
        "nothing differs. The embedding gives a tensor, a layer a pair",
    ),
    (
        "layer 2 damaged",
        2,
        ("layers.2.weight",),
        "the state after layer 2 is the first that differs, whichever differs most; the first state"
        " is the embedding's",
    ),
    (
        "layers 1 and 3 damaged",
        1,
        ("layers.1.bias", "layers.3.weight"),
        "the first difference counts, not the largest",
    ),
    (
        "the embedding damaged",
        "embedding",
        ("embedding.weight",),
        "the very first state differs",
    ),
    (
        "the last norm damaged",
        "output",
        ("norm.weight",),
        "all states agree, the logits do not",
    ),
    ("the last layer damaged", 4, ("layers.4.bias",), "the state after the last layer differs"),
)


def task5_places(first_difference: Answer, broken_model: nn.Module, record: Record) -> None:
    """Models that are damaged in one place or two, and the broken one of the task."""
    for what, right, names, why in PLACES:
        check_place(first_difference, what, right, *damaged(*names), why)

    def check(what: str, right: Any, why: str, change: Callable[[Record], None]) -> None:
        model, own = damaged()
        change(own)
        check_place(first_difference, what, right, model, own, why)

    def other_machine(own: Record) -> None:
        own["states"] = [state * (1 + 1e-6) for state in own["states"]]

    def two_numbers(own: Record) -> None:
        own["states"][2] = own["states"][2].clone()
        text = own["states"][2][0].view(-1)
        text[text.argmax()] += 2e-3
        text[text.argmin()] -= 2e-3

    def larger(own: Record) -> None:
        own["logits"] = own["logits"] + 0.5

    why = "nothing differs but by rounding"
    check("a record from another machine", None, why, other_machine)
    why = "more than the tolerance in any number: not on average, nor relative to its size"
    check("the largest and the smallest number of a state differ by 0.002", 1, why, two_numbers)
    why = "a difference counts in both directions"
    check("the record has larger logits", "output", why, larger)
    why = "the state after layer 0 is the first that differs"
    check_place(first_difference, "broken_model of this task", 0, broken_model, record, why)


def hidden_places(first_difference: Answer) -> None:
    """A real decoder, one token, other depths and tolerances."""
    check = check_place
    _, config, record = publish_qwen2()
    model: nn.Module = random_model(config, size=0.3)
    check(first_difference, "a DecoderModel that is right", None, model, record, "nothing differs")
    why = "the state after layer 0 is the first that differs"
    check(first_difference, "layer 0 damaged", 0, *damaged("layers.0.weight", seed=2), why)
    first, second = damaged()[1]["ids"].tolist()
    rare = next(token for token in second if token not in first)
    why = "a token of the second text differs: look at all numbers"
    one = damaged("embedding.weight", row=rare)
    check(first_difference, "the row of one token damaged", "embedding", *one, why)
    other = damaged("layers.2.weight", seed=5, num_layers=3)
    why = "the state after layer 2 is the first that differs"
    check(first_difference, "another depth", 2, *other, why)
    why = "tolerance is what may differ"
    check(first_difference, "a very large tolerance", None, *other, why, tolerance=1e6)
    model, record = damaged()
    record["states"] = [state + 3e-4 for state in record["states"]]
    why = "that is below the tolerance"
    check(first_difference, "a difference of 0.0003", None, model, record, why)
    what = "a difference of 0.0003, tolerance 0.0001"
    why = "that is above the tolerance"
    check(first_difference, what, "embedding", model, record, why, tolerance=1e-4)
    model.train()
    check(first_difference, "in training mode", "embedding", model, record, "", tolerance=1e-4)
    assert model.training, "the model was in training mode and is not any more"


def hidden_hooks(first_difference: Answer) -> None:
    """NaN, and hooks of other people."""
    why = "NaN > tolerance is false; ask whether all are <= tolerance"
    for what, right, name in (
        ("a weight that is not a number", 2, "layers.2.weight"),
        ("NaN in the output layer", "output", "lm_head.weight"),
    ):
        model, record = damaged()
        with torch.no_grad():
            model.get_parameter(name)[0, 0] = torch.nan
        check_place(first_difference, what, right, model, record, why)
    record["logits"] = model(record["ids"]).logits.detach()
    with case("Task 5, first_difference: NaN in the logits of both"):
        found = first_difference(model, record)
        assert found == "output", f"expected 'output', got {found!r}: NaN is always a difference"
    model, record = damaged()
    model.layers[1].register_forward_hook(lambda module, inputs, output: None)
    first_difference(model, record)
    assert model.layers[1]._forward_hooks, (
        "a hook that was there before is gone: remove your own handles only"
    )


def check_mended(
    mended_convert: Answer, what: str, order: Callable[..., Any] = list, **options: Any
) -> None:
    """One model that the mended converter reads."""
    state, config, record = publish_qwen2(**options)
    state = {name: state[name] for name in order(state)}
    before = {name: tensor.clone() for name, tensor in state.items()}
    with case(f"Task 5, mended_convert: {what}"), forbid(families, pretrained):
        new = mended_convert(state, config)
    with case("Task 5, mended_convert"):
        assert isinstance(new, dict), (
            f"{what}: mended_convert returned a {type(new).__name__}, expected a dict"
        )
        same = all(torch.equal(state[name], before[name]) for name in before)
        assert state.keys() == before.keys() and same, f"{what}: state itself was changed"
        model = random_model(config)
        states: list[Tensor] = []
        try:
            model.load_state_dict(new)
        except (RuntimeError, ValueError) as error:
            words = str(error).splitlines()[-1].strip()
            raise AssertionError(f"{what}: load_state_dict refuses your dict: {words}") from None
        noting(model, states)
        with torch.no_grad():
            logits = model(record["ids"]).logits
        layers = (f"layer {i}" for i in range(config.num_layers))
        names = ["the embedding", *layers, "the last norm and the output layer"]
        theirs = [*record["states"], record["logits"]]
        for name, mine, right in zip(names, [*states, logits], theirs, strict=True):
            off = (mine - right).abs().max()
            assert off < 1e-3, (
                f"{what}: the first difference, {off:.2g}, is that after {name}. What is copied"
                " there, and from where?"
            )


# ---------------------------------------------------------------------------- 6, rounding


def rounding_model(seed: int = 0, **changes: Any) -> tuple[DecoderModel, Tensor]:
    """A model with random weights, and a text for it."""
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": 48,
        "tie_word_embeddings": False,
    }
    model = random_model(ModelConfig(**sizes | changes), seed, size=0.2)
    return model, random_ids(61, 24, seed)


def is_norm(name: str) -> bool:
    """Whether a parameter belongs to a norm."""
    return "norm" in name.split(".")[-2]


MEMBERS: dict[str, Callable[[str], bool]] = {
    "embedding": lambda name: name.startswith("embedding."),
    "attention": lambda name: ".self_attn." in name and not is_norm(name),
    "mlp": lambda name: ".mlp." in name,
    "norms": is_norm,
    "head": lambda name: name.startswith("lm_head."),
}


@torch.no_grad()
def rounded_error(
    model: DecoderModel, ids: Tensor, wanted: Callable[[str], bool]
) -> tuple[float, float]:
    """The error when the parameters with `wanted(name)` are rounded, and that of the largest
    values; the weights are put back.
    """
    exact = model(ids).logits
    kept = {}
    for name, parameter in model.named_parameters():
        if wanted(name):
            kept[name] = parameter.data
            parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    off = model(ids).logits - exact
    for name, data in kept.items():
        model.get_parameter(name).data = data
    return (off.std() / exact.std()).item(), (off.abs().max() / exact.abs().max()).item()


def _errors_of(
    cost_of_rounding: Answer, what: str, model: DecoderModel, ids: Tensor, training: bool
) -> dict[str, Any]:
    """The student's dict, and whether the model is as it was."""
    model.train(training)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with case(f"Task 6: {what}"):
        found = cost_of_rounding(model, ids)
    spoiled = [
        name
        for name, p in model.named_parameters()
        if p.dtype != torch.float32 or not torch.equal(p, before[name])
    ]
    assert not spoiled, (
        f"{what}: afterwards {spoiled[0]} of the model has other numbers: round a copy, or put the"
        " weights back"
    )
    assert model.training == training, f"{what}: the model is in another mode than before"
    assert isinstance(found, dict) and set(found) == set(MEMBERS), (
        f"{what}: cost_of_rounding returned {found!r:.200}, expected a dict with"
        f" {', '.join(MEMBERS)}"
    )
    return found


def _slips_in_error(
    model: DecoderModel, ids: Tensor, group: str, so_far: Sequence[str]
) -> Iterator[tuple[float, str]]:
    """Wrong errors of a group that a student might have computed, and what is wrong with them."""
    error, largest = rounded_error(model, ids, MEMBERS[group])
    whole, _ = rounded_error(model, ids, lambda name: True)
    yield largest, "is made of the largest values; wanted are standard deviations"
    yield (
        whole,
        "is that of all weights rounded at once; round only this group, and start from exact"
        " weights each time",
    )
    if group == "norms":
        layers, _ = rounded_error(model, ids, lambda name: is_norm(name) and "layers." in name)
        yield layers, "leaves out `norm`, the last one of the whole model"
    yield error**2, "is a ratio of variances; wanted are standard deviations"
    yield (
        error * model(ids).logits.std().item(),
        "is not divided by the spread of the exact logits",
    )
    wanted = [MEMBERS[name] for name in so_far]
    added, _ = rounded_error(model, ids, lambda name: any(part(name) for part in wanted))
    yield (
        added,
        "is too large: the groups before it are still rounded; start from exact weights each time",
    )


def check_cost(cost_of_rounding: Answer, what: str, training: bool = False, **changes: Any) -> None:
    """The errors of one model."""
    model, ids = rounding_model(**changes)
    with case("Task 6"):
        found = _errors_of(cost_of_rounding, what, model, ids, training)
        for group in MEMBERS:
            so_far = list(found)[: list(found).index(group) + 1]
            error, _ = rounded_error(model, ids, MEMBERS[group])
            value = expect_number(found[group], f"{what}: the error of {group}")
            overlap, _ = rounded_error(model, ids, lambda name: ".self_attn." in name)
            assert group != "attention" or not _near(value, overlap, error), (
                f"{what}: attention holds the norms of queries and keys too; they belong to norms"
            )
            assert error > 0 or value == 0, (
                f"{what}: the error of {group} is {value:.2g}, expected 0: a tied head is the"
                " table, which is counted under embedding"
            )
            for other, words in _slips_in_error(model, ids, group, so_far):
                assert not _near(value, other, error), f"{what}: the error of {group} {words}"
            times = value / error if error else 1.0
            assert abs(times - 1) < 0.01, (
                f"{what}: the error of {group} is {value:.3g}, expected {error:.3g}, {times:.3g}"
                " times as much. Which weights are in the group, and is anything else rounded,"
                " such as the arithmetic?"
            )


def _near(value: float, other: float, error: float) -> bool:
    """Whether a value is this slip and not the right error."""
    return abs(value - other) < 1e-3 * other and abs(error - other) > 2e-3 * other


def task6_costs(cost_of_rounding: Answer) -> None:
    """An untied model, whose errors are printed, and a tied one."""
    check_cost(cost_of_rounding, "an untied model")
    model, ids = rounding_model()
    squares = 0.0
    for group, wanted in MEMBERS.items():
        error, _ = rounded_error(model, ids, wanted)
        size = sum(p.numel() for name, p in model.named_parameters() if wanted(name))
        squares += error**2
        print(
            f"{group:10}{size:7,} weights, error {100 * error:.2f} %, squared and per weight"
            f" {1e9 * error**2 / size:5.1f}e-9"
        )
    together, _ = rounded_error(model, ids, lambda name: True)
    print(
        f"root of the sum of squares {100 * squares**0.5:.2f} %, all rounded at once"
        f" {100 * together:.2f} %"
    )
    check_cost(cost_of_rounding, "a tied model", tie_word_embeddings=True, num_layers=1)


def hidden_costs(cost_of_rounding: Answer) -> None:
    """Other parts, other places of the norms, another mode."""
    check = check_cost
    check(cost_of_rounding, "norms of queries and keys", seed=1, qk_norm=True, num_layers=1)
    parts: dict[str, Any] = {"norm_type": "layernorm", "position_type": "learned", "use_glu": False}
    parts |= {"attention_bias": True, "mlp_bias": True, "num_layers": 1}
    check(cost_of_rounding, "LayerNorm, biases, learned positions", seed=2, **parts)
    sandwich: dict[str, Any] = {"norm_position": "sandwich", "num_layers": 1}
    check(cost_of_rounding, "norms after the sublayers", seed=3, **sandwich)
    check(cost_of_rounding, "a model in training mode", training=True, num_layers=1)
