"""The visible checks of exercise 09, the decoder: each says what is wrong."""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llm_course.model import cross_entropy, mtp
from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.embedding import EmbeddingLayer
from llm_course.model.estimate import count_parameters, flops_per_token
from llm_course.model.kernels import cross_entropy as kernel
from llm_course.model.masks import document_mask
from llm_course.pages.checking import case, expect, expect_number, forbid, written
from llm_course.pages.memory import kept_bytes
from llm_course.text.batches import IGNORE_INDEX, shift

READY_LOSSES = (cross_entropy, kernel, F.cross_entropy, torch.autograd.grad)
TINY: dict[str, Any] = dict(
    vocab_size=50, hidden_size=24, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=40
)


def size_of(module: nn.Module) -> int:
    """The number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


# ------------------------------------------------------------------------------------------- task 1

EXPERT = 3 * 64 * 96  # the weights of one expert of model C
LETTERS = ("parameters", "saved_by_tying", "active_per_token", "first_loss", "first_loss_ten")


def count_slips(further: int) -> dict[str, dict[int, str]]:
    """By model and by the difference that it makes: what was overlooked."""
    return {
        "A": {
            64_000: "the head is the table, which counts once",
            8192: "K = 2: keys and values have 2 heads, so those two matrices are 64 x 32",
            -8192: "queries and o_proj have all 4 heads",
            -12_288: "a gated MLP has three matrices",
            -64: "there is a last norm after the blocks",
            -256: "each block has two norms",
            -128: "each block has two norms",
        },
        "B": {
            -64_000: "B is untied: the head is a second matrix of 1000 x 64",
            -8192: "128 learned positions have a row each",
            -512: "GPT-2's attention has four biases in each block",
            -640: "GPT-2's MLP has a bias of 256 and one of 64 in each block",
            -1152: "in GPT-2 all four matrices of attention and both of the MLP have a bias",
            -320: "a LayerNorm has a weight and a bias",
            -128: "there is a last norm after the blocks, with a weight and a bias",
            2 * 64 * 256: "GPT-2's MLP has no gate, so two matrices",
        },
        "C": {
            -further: "the module for multi-token prediction is trained too",
            64_000: "the head is the table, and the module for multi-token prediction shares it",
            -8192: "the module for multi-token prediction has a matrix from 2C to C",
            -4096: "the matrix that joins stream and embedding goes from 2C to C",
            -128: "the module for multi-token prediction has two norms in front",
            3 * EXPERT + 256: "the block for multi-token prediction is dense: no experts",
            -512: "each router has E x C weights",
            -4 * EXPERT: "the experts that a token does not use are parameters too",
        },
    }


def check_predictions(answers: Any, three_models: Any) -> None:
    parameters, saved, active, *first = written(answers, *LETTERS)
    assert isinstance(parameters, dict) and set(parameters) == set("ABC"), (
        f'parameters is {parameters!r}, expected a dict with "A", "B", "C"'
    )
    models = {letter: DecoderModel(config) for letter, config in three_models.items()}
    further = size_of(models["C"].mtp)
    slips = count_slips(further)
    for letter, model in models.items():
        off = expect_number(parameters[letter], f"parameters[{letter!r}]") - size_of(model)
        assert off not in slips[letter], (
            f"{letter} is off by {off:+,.0f}: {slips[letter][int(off)]}"
        )
        assert off == 0, (
            f"{letter} is off by {off:+,.0f}. Count again part by part: table, positions,"
            " attention, MLP, norms, head, further modules"
        )
    assert expect_number(saved, "saved_by_tying") == 64_000, (
        f"saved_by_tying is {saved}: what exists twice without the tie?"
    )
    check_active(active, size_of(models["C"]), further)
    for name, value in zip(LETTERS[3:], first, strict=True):
        check_first_loss(name, value)


def check_active(active: Any, size: int, further: int) -> None:
    off = expect_number(active, "active_per_token") - (size - further - 4 * EXPERT)
    slips = {
        4 * EXPERT: "a token uses 2 of the 4 experts",
        -2 * EXPERT: "a token uses 2 experts in each block, not 1",
        -512: "the router scores every token, so its weights work",
        further: "the module for multi-token prediction was to be left out",
        -64_000: "the table counts once: it is the head too",
        -64: "the last norm works on every token",
    }
    assert off not in slips, f"active_per_token is off by {off:+,.0f}: {slips[int(off)]}"
    assert off == 0, (
        f"active_per_token is off by {off:+,.0f}: C's parameters, less the module for further"
        " tokens, less 2 idle experts in each of 2 blocks"
    )


def check_first_loss(name: str, answer: Any) -> None:
    value = expect_number(answer, name)
    assert abs(value - math.log2(1000)) > 0.02, (
        f"{name} is in bits; a nat comes from the natural logarithm"
    )
    assert abs(value - math.log(10)) > 0.02, (
        f"{name}: the model does not know which entries come, it spreads over all 1000"
    )
    assert abs(value - math.log(1000)) < 0.02, (
        f"{name} is {value:g}: the probability of each entry is 1/1000, so what is -ln of it?"
    )


def check_count(answer: Any, name: str, **changes: Any) -> None:
    config = ModelConfig(**(TINY | changes))
    real = size_of(DecoderModel(config))
    with case(name), forbid(DecoderModel, count_parameters, mtp.MultiTokenPrediction):
        found = expect_number(answer(config), "the count")
    assert found == real, (
        f"{name}: your count is {found:,.0f}, the model has {real:,}, so {found - real:+,.0f}."
        " Which part has that size?"
    )


# ------------------------------------------------------------------------------------------- task 2


def some_places(
    N: int,
    C: int = 3,
    V: int = 7,
    seed: int = 0,
    ignored: Any = (1,),
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random hidden vectors, weights and labels, of which some are ignored."""
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(N, C, generator=g).to(dtype)
    w = torch.randn(V, C, generator=g).to(dtype)
    y = torch.randint(V, (N,), generator=g)
    y[[place for place in ignored if place < N]] = IGNORE_INDEX
    return h, w, y


def check_value(answer: Any, h: Tensor, w: Tensor, y: Tensor, chunk_size: int, name: str) -> None:
    kept = y.clone()
    with forbid(*READY_LOSSES):
        loss = answer(h, w, y, chunk_size)
    assert torch.equal(y, kept), (
        f"{name}: the labels have changed after the call: `clamp_` and `y[...] = 0` write into"
        " them, `clamp` and `where` make new ones"
    )
    each = F.cross_entropy(h @ w.T, y, reduction="none", ignore_index=IGNORE_INDEX)
    real = each.sum()
    targets = max(int((y != IGNORE_INDEX).sum()), 1)
    n = len(y)
    assert isinstance(loss, Tensor) and loss.ndim == 0, f"{name}: the loss is not a scalar tensor"
    large = (h @ w.T).max() > 88  # where exp overflows in float32
    assert loss.isfinite(), f"{name}: the loss is {loss}: " + (
        "exp of such a logit is infinite, so subtract each row's largest logit first, as"
        " `logsumexp` does"
        if large
        else "is something divided by a number of targets that is 0?"
    )
    full = n // chunk_size * chunk_size
    last = (n - 1) // chunk_size * chunk_size
    as_zero = F.cross_entropy(h @ w.T, y.clamp(min=0), reduction="sum")
    for slip, wrong in {
        f"the last chunk, of {n - full} places, is lost": each[:full].sum(),
        "this is the loss of the last chunk alone; the chunks add up": each[last:].sum(),
        "this is the mean over the targets, expected is the sum": real / targets,
        "places labelled IGNORE_INDEX are counted, as if their label were 0": as_zero,
    }.items():
        assert abs(wrong - real) < 1e-3 or abs(loss - wrong) > 1e-3, f"{name}: {slip}"
    words = f"{name}: the loss is {loss:.4f}, PyTorch's sum is {real:.4f}"
    expect(loss, real, words, atol=1e-4)


def check_nothing(answer: Any) -> None:
    """All labels ignored."""
    h, w, _ = some_places(6)
    with forbid(*READY_LOSSES):
        nothing = answer(h, w, torch.full((6,), IGNORE_INDEX), 4)
    assert nothing == 0, f"with all labels ignored the loss is {nothing.item():g}, expected 0"


def check_gradients(
    answer: Any, h: Tensor, w: Tensor, y: Tensor, chunk_size: int, name: str, slope: float = 1.0
) -> None:
    h = h.clone().requires_grad_()
    w = w.clone().requires_grad_()
    loss = F.cross_entropy(h @ w.T, y, reduction="sum", ignore_index=IGNORE_INDEX)
    real = torch.autograd.grad(slope * loss, (h, w))
    with forbid(*READY_LOSSES):
        (slope * answer(h, w, y, chunk_size)).backward()
    for letter, found, right in (("hidden", h.grad, real[0]), ("weight", w.grad, real[1])):
        assert found is not None, f"{name}: no gradient reaches {letter}"
        assert not found.isnan().any(), f"{name}: the gradient of {letter} holds NaN"
        if letter == "hidden":
            pulled = (y == IGNORE_INDEX) & (found.abs().amax(-1) > 1e-7)
            assert not pulled.any(), (
                f"{name}: place {pulled.nonzero()[0].item()} is ignored, but has a gradient: it"
                " must be zero"
            )
        assert slope == 1 or not torch.allclose(found * slope, right, atol=1e-5), (
            f"{name}: the gradient of {letter} lacks d_loss, the incoming gradient"
        )
        assert right.abs().max() < 1e-4 or not torch.allclose(found, -right, atol=1e-5), (
            f"{name}: the gradient of {letter} has the wrong sign"
        )
        words = (
            f"{name}: the gradient of {letter} is not PyTorch's: softmax minus one-hot, added up"
            " over the chunks"
        )
        expect(found, right, words, atol=1e-4)


class LargestTensor(TorchFunctionMode):
    """Note the size of the largest tensor that any function of PyTorch returns, and refuse some
    functions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.refused: tuple[Any, ...] = (Tensor.backward,)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self.refused, (
            f"your code calls {func.__name__}; in this task you derive the gradient yourself"
        )
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def check_memory_of_loss(answer: Any) -> None:
    """No tensor may be larger than the logits of a chunk."""
    h, w, y = some_places(64, C=2, V=50)
    h.requires_grad_()
    w.requires_grad_()
    with forbid(*READY_LOSSES), LargestTensor() as watched:
        loss = answer(h, w, y, 8)
        watched.refused = ()
        loss.backward()
    assert w.grad is not None and w.grad.abs().sum() > 0, (
        "no gradient reaches weight, so there is nothing to measure"
    )
    assert watched.largest < 64 * 50, (
        f"somewhere there is a tensor of {watched.largest} numbers, N x V: all logits at once"
    )
    assert watched.largest <= 8 * 50, (
        f"somewhere there is a tensor of {watched.largest} numbers, but a chunk of 8 places has"
        f" {8 * 50} logits"
    )


# ------------------------------------------------------------------------------------------- task 3


class Ends(nn.Module):
    """A table and a head, joined by `inner`."""

    def __init__(self, V: int = 11, C: int = 6, inner: nn.Module | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = EmbeddingLayer(V, C)
        self.lm_head = nn.Linear(C, V, bias=False)
        self.inner = inner or nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.inner(self.embedding(ids)))


def tie_kind(kind: str) -> Ends:
    model = Ends()
    table = model.embedding.embed_tokens
    if kind == "one":
        model.lm_head.weight = table.weight
    elif kind == "copy":
        model.lm_head.weight = nn.Parameter(table.weight.detach().clone())
    elif kind == "memory":
        model.lm_head.weight.data = table.weight.data
    return model


def check_tied(answer: Any) -> None:
    for kind, right, why in (
        ("one", True, "the head is the table, `lm_head.weight = embed_tokens.weight`"),
        ("none", False, "head and table hold different numbers"),
        ("copy", False, "the head is a copy, with equal numbers: after one step they drift apart"),
        (
            "memory",
            False,
            "head and table share memory and are still two parameters: an optimizer sees two, and"
            " each gets"
            " half of the gradient",
        ),
    ):
        found = answer(tie_kind(kind))
        assert isinstance(found, bool), f"is_tied returned {found!r}, expected True or False"
        assert found == right, f"is_tied says {found}, but {why}"


class Divide(nn.Module):
    """Divide by the root mean square along `dim` (None: of everything)."""

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        square = x.square()
        mean = square.mean() if self.dim is None else square.mean(self.dim, keepdim=True)
        return x / mean.sqrt()


class Stretch(Divide):
    """Divide each token by its root mean square, and multiply the one at `place` by `size`."""

    def __init__(self, place: tuple[int, int], size: float) -> None:
        super().__init__(-1)
        self.place = place
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x[self.place] *= self.size
        return x


IDS = torch.tensor([[1, 4, 2, 2, 9], [0, 3, 10, 5, 6]])


def check_normalised(answer: Any) -> None:
    for inner, right, why in (
        (Divide(-1), True, "the stream is normalised, token by token"),
        (None, False, "nothing normalises the stream before the head"),
        (
            Divide(None),
            False,
            "only the whole tensor has a root mean square of 1; the single tokens have not",
        ),
        (Divide(1), False, "this model divides along the text, dim 1, not along the channels"),
        (
            nn.Sequential(Divide(-1), nn.Linear(6, 6)),
            False,
            "the norm stands before the last layer, not after it",
        ),
        (Stretch((1, 2), 3.0), False, "one token of ten has a root mean square of 3: look at all"),
        (Stretch((0, 1), 1.05), False, "a token has a root mean square of 1.05, more than 1.02"),
        (
            Stretch((0, 1), 1.015),
            True,
            "all are 1 to 0.02, one is 1.015: do you take the root of the mean square?",
        ),
    ):
        model = Ends(inner=inner)
        found = answer(model, IDS)
        assert model.training, (
            "the model was in training mode and is not any more: leave it as it was"
        )
        assert isinstance(found, bool), f"is_normalised returned {found!r}, expected True or False"
        assert found == right, f"is_normalised says {found}, but {why}"
        assert not model.lm_head._forward_pre_hooks and not model.lm_head._forward_hooks, (
            "the model keeps your hook: remove it after the call"
        )


def loss_with(offset: int, reduction: str = "mean") -> Callable[..., Tensor]:
    """A loss whose labels are `offset` places ahead of the inputs."""

    def loss_of(model: Any, rows: Tensor) -> Tensor:
        inputs = rows[:, :-1]
        logits = model(inputs)
        places = [t for t in range(inputs.shape[1]) if 0 <= t + offset < rows.shape[1]]
        return F.cross_entropy(
            logits[:, places].flatten(0, 1).float(),
            rows[:, [t + offset for t in places]].flatten(),
            reduction=reduction,
        )

    return loss_of


def check_offset(answer: Any, broken_loss: Any) -> None:
    for offset in (1, 2, 0, -1):
        found = expect_number(answer(loss_with(offset)), "what target_offset returned")
        assert found == offset, (
            f"target_offset returned {found:g} for a loss with the offset {offset}"
        )
    found = expect_number(answer(broken_loss), "what target_offset returned")
    assert found == 2, f"target_offset returned {found:g} for broken_loss: it shifts twice"


def reader(visible: Callable[[int, int], bool]) -> Callable[[Tensor], Tensor]:
    """Logits (B, T, 5) from the sum of the tokens s that `visible(t, s)` lets place t see."""

    def logits_of(ids: Tensor) -> Tensor:
        assert ids.min() >= 0 and ids.max() < 5, (
            f"logits_of was called with the id {int(ids.abs().max())}, but its logits are"
            " (B, T, 5), and ids are below V"
        )
        T = ids.shape[1]
        mask = torch.tensor([[float(visible(t, s)) for s in range(T)] for t in range(T)])
        return torch.sin((ids.float() + 1) @ mask.T)[..., None] * torch.arange(1.0, 6.0)

    return logits_of


SIX = torch.tensor([[1, 4, 2, 2, 3, 0], [0, 3, 1, 2, 4, 1]])


def check_future(answer: Any) -> None:
    cases: list[tuple[Callable[[int, int], bool], bool, str]] = [
        (lambda t, s: s <= t, False, "a place reads itself and what stands before it"),
        (lambda t, s: s < t, False, "a place reads only what stands before it"),
        (lambda t, s: True, True, "every place reads the whole row"),
        (lambda t, s: s <= t + 1, True, "each place reads one token too far"),
        (
            lambda t, s: s <= t or (t == 0 and s == 3),
            True,
            "the first place reads the fourth token",
        ),
    ]
    for visible, right, why in cases:
        ids = SIX.clone()
        found = answer(reader(visible), ids)
        assert torch.equal(ids, SIX), "ids has changed after the call: change a copy, ids.clone()"
        assert isinstance(found, bool), f"reads_future returned {found!r}, expected True or False"
        assert found == right, f"reads_future says {found}, but {why}"


def both_models(answers: Any, config: ModelConfig) -> tuple[Any, Any]:
    """The mended model and the package's, with the same random weights."""
    mended_class, _ = written(answers, "MendedDecoder", "mended_loss")
    torch.manual_seed(1)
    real = DecoderModel(config)
    for parameter in real.parameters():
        nn.init.normal_(parameter, mean=0.5 if parameter.ndim == 1 else 0.0, std=0.4)
    with forbid(DecoderModel):
        mended = mended_class(config)
    names = sorted(mended.state_dict())
    expected = sorted(real.state_dict())
    assert names == expected, (
        f"the parameters are called {sorted(set(names) ^ set(expected))[:3]}: keep the parts and"
        " their names"
    )
    head = mended.lm_head.weight
    table = mended.embedding.embed_tokens.weight
    assert head is table or head.data_ptr() != table.data_ptr(), (
        "the head shares the memory of the table, but is a second parameter: is_tied would say"
        " False"
    )
    assert head is table, "the head is still a parameter of its own: is_tied would say False"
    mended.load_state_dict(real.state_dict())
    return mended, real


def other_order(model: Any, ids: Tensor, positions: Tensor, last: str | None = None) -> Tensor:
    """The logits with other positions, or with the last norm in another place."""
    turn = model.rotary(positions)
    x = model.embedding(ids)
    for i, layer in enumerate(model.layers):
        is_last = i == len(model.layers) - 1
        if last == "every" or (last in ("before", "twice") and is_last):
            x = model.norm(x)
        x, _ = layer(x, position_embeddings=turn)
    return model.lm_head(x if last in ("before", "none") else model.norm(x))


def check_mended(answers: Any, config: ModelConfig, B: int, T: int) -> None:
    mended, real = both_models(answers, config)
    generator = torch.Generator().manual_seed(T)
    ids = torch.randint(0, config.resolved_vocab_size, (B, T), generator=generator)
    with forbid(DecoderModel):
        logits = mended(ids)
    right = real(ids).logits
    ahead = torch.arange(T)
    slips: dict[str, tuple[Tensor, str | None]] = {
        "the positions still run backward: swap two early tokens, and see which logits move": (
            ahead.flip(0),
            None,
        ),
        "the last norm stands before the last block: is_normalised would say False": (
            ahead,
            "before",
        ),
        "the last norm is applied before the last block too": (ahead, "twice"),
        "no norm stands before the head: is_normalised would say False": (ahead, "none"),
        "the positions are all the same, so order does not count": (ahead * 0, None),
        "the last norm stands before every block; it belongs behind the last one only": (
            ahead,
            "every",
        ),
    }
    for slip, wrong in slips.items():
        assert T == 1 or not torch.allclose(logits, other_order(real, ids, *wrong), atol=1e-4), slip
    words = f"B={B}, T={T}: the logits are not those of the package with the same weights"
    expect(logits, right, words, atol=1e-4)


def sure_of(offset: int) -> Callable[[Tensor], Tensor]:
    """A model that is sure that the answer is its token plus `offset`."""
    return lambda ids: 50.0 * F.one_hot((ids + offset) % 20, 20)


def check_mended_offset(answers: Any) -> None:
    (mended_loss,) = written(answers, "mended_loss")
    rows = torch.arange(12)[None]
    with forbid(DecoderModel):
        losses = {k: expect_number(mended_loss(sure_of(k), rows), "the loss") for k in range(-3, 4)}
    best = min(losses, key=lambda k: losses[k])
    assert best == 1, (
        f"target_offset would say {best}; it must be 1, so that the label is the next token"
    )


def check_mended_loss(answers: Any, config: ModelConfig, B: int, T: int, words: str) -> None:
    (mended_loss,) = written(answers, "mended_loss")
    torch.manual_seed(1)
    package = DecoderModel(config)
    rows = torch.randint(0, 40, (B, T))
    out = package(**shift(rows))
    loss = mended_loss(lambda ids: package(ids).logits, rows)
    assert isinstance(loss, Tensor), (
        f"mended_loss returned a {type(loss).__name__}, expected a scalar tensor"
    )
    assert loss.shape != () or abs(loss - out.loss_sum) > 1e-3, (
        "this is the sum over the targets; expected is the mean"
    )
    expect(loss, out.loss_sum / out.num_targets, words, atol=1e-4)


# ------------------------------------------------------------------------------------------- task 4


def build(L: int, seed: int = 0, **changes: Any) -> DecoderModel:
    """A fresh model with L small layers."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(
        vocab_size=20,
        hidden_size=16,
        num_layers=L,
        num_heads=2,
        intermediate_size=24,
        initializer_range=0.2,
    )
    return DecoderModel(ModelConfig(**(sizes | changes)))


@torch.no_grad()
def end_size(model: Any) -> float:
    """The root mean square of the stream after the last block."""
    seen: list[Tensor] = []
    handle = model.layers[-1].register_forward_hook(
        lambda module, args, result: seen.append(result[0])
    )
    model(torch.arange(60).view(4, 15) % 20)
    handle.remove()
    return seen[0].square().mean().sqrt().item()


def check_unscale(answer: Any, L: int, **changes: Any) -> None:
    model = build(L, **changes)
    fresh = build(L, **changes)
    name = f"L={L}" + (", experts" if changes else "")
    identities = [id(p) for p in model.parameters()]
    answer(model)
    assert identities == [id(p) for p in model.parameters()], (
        f"{name}: the model has new parameters; change the numbers in place"
    )
    for (key, after), before in zip(model.named_parameters(), fresh.parameters(), strict=True):
        if before.abs().max() == 0 or torch.equal(before, torch.ones_like(before)):
            assert torch.equal(after, before), (
                f"{name}: {key} has changed, but it does not write to the stream"
            )
            continue
        ratio = (after / before).mean().item()
        writes = "o_proj" in key or "down_proj" in key
        wanted = math.sqrt(2 * L) if writes else 1.0
        assert not (writes and abs(ratio - 1) < 1e-4), (
            f"{name}: {key} writes to the stream, but is unchanged"
        )
        assert writes or abs(ratio - 1) < 1e-4, (
            f"{name}: {key} has changed by the factor {ratio:.3g}, but it does not write to the"
            " stream"
        )
        assert L == 1 or abs(ratio - math.sqrt(L)) > 1e-3, (
            f"{name}: {key} has changed by the root of L; each block writes twice, so 2 L"
        )
        assert abs(ratio - wanted) < 1e-3, (
            f"{name}: {key} has changed by the factor {ratio:.3g}, expected {wanted:.3g}, the root"
            " of 2 L"
        )


def check_exponent(answer: Any, depths: list[int], sizes: list[float]) -> None:
    found = expect_number(answer(depths, sizes), "the exponent")
    name = f"exponent({depths}, {[round(s, 3) for s in sizes]})"
    x = [math.log(d) for d in depths]
    y = [math.log(s) for s in sizes]
    slope = statistics.linear_regression
    right = slope(x, y).slope
    through_origin = sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)
    slips = {
        "a straight line through the sizes themselves; take logarithms of both": (
            slope(depths, sizes).slope
        ),
        "the logarithm of the depths is missing": slope(depths, y).slope,
        "the two are swapped: depth as a function of size": (
            slope(y, x).slope if len(set(y)) > 1 else math.inf
        ),
        "from the first and the last point alone; least squares uses all": (
            (y[-1] - y[0]) / (x[-1] - x[0])
        ),
        "a line through the origin; a is not 1, so subtract the means": through_origin,
    }
    for slip, wrong in slips.items():
        assert abs(found - wrong) > 1e-4 or abs(right - wrong) < 1e-3, (
            f"{name} is {found:.3f}: {slip}"
        )
    assert abs(found - right) < 1e-3, f"{name} is {found:.3f}, expected {right:.3f}"


def check_start(answer: Any, L: int, **changes: Any) -> DecoderModel:
    model = build(L, norm_position="sandwich", **changes)
    fresh = build(L, norm_position="sandwich", **changes)
    name = f"L={L}" + (", experts" if changes else "")
    identities = [id(p) for p in model.parameters()]
    answer(model)
    assert identities == [id(p) for p in model.parameters()], (
        f"{name}: the model has new parameters; change the numbers in place"
    )
    changed = [
        key
        for (key, p), old in zip(model.named_parameters(), fresh.parameters(), strict=True)
        if not torch.equal(p, old)
    ]
    wrong = [key for key in changed if "output_norm" not in key]
    assert not any("o_proj" in key or "down_proj" in key for key in wrong), (
        f"{name}: you scaled {wrong[0]}, but the norm after it divides every factor out again"
    )
    assert not wrong, f"{name}: {wrong[0]} has changed, but it is not what is added to the stream"
    for i, layer in enumerate(model.layers):
        for part in ("attention_output_norm", "mlp_output_norm"):
            check_added(getattr(layer, part), f"{name}: layer {i}", part, L)
    return model


def check_added(norm: Any, name: str, part: str, L: int) -> None:
    """The size of what a layer of a sandwich model adds to the stream."""
    root = math.sqrt(2 * L)
    size = norm(torch.randn(5, 16)).square().mean().sqrt().item() * root
    assert abs(size - root) > 1e-3, f"{name}: what it adds after {part} still has the size 1"
    assert L == 1 or abs(size - math.sqrt(2)) > 1e-3, (
        f"{name}: {part} is divided by the root of L, but there are 2 L additions"
    )
    assert abs(size - 1 / root) > 1e-3, (
        f"{name}: {part} is divided by 2 L: variances add, not sizes, so take the root"
    )
    assert abs(size - 1) < 1e-3, (
        f"{name} adds after {part} with a size of {size / root:.3g}, expected {1 / root:.3g}"
    )


def check_starts(answer: Any) -> None:
    ends = [end_size(check_start(answer, L)) for L in (2, 8)]
    assert max(ends) < 1.5 * min(ends), (
        f"the stream ends at {ends[0]:.2f} with 2 layers, and at {ends[1]:.2f} with 8"
    )


REPLIES: dict[str, dict[str, str | None]] = {
    "why_root": {
        "a": "then the size would grow like a power of a number, not like the root of the depth",
        "b": None,
        "c": "that norm divides what the block reads, not the stream",
        "d": "that makes each addition smaller, but the same for every depth",
    },
    "why_no_effect": {
        "a": "a fresh model has not used a gradient yet",
        "b": "it goes around the block, but what the block adds is what we measure",
        "c": "that is before `o_proj`, which could still shrink the result",
        "d": None,
    },
}


def check_why(answers: Any) -> None:
    for name, answer in zip(REPLIES, written(answers, *REPLIES), strict=True):
        replies = REPLIES[name]
        assert isinstance(answer, str) and answer.lower() in replies, (
            f"{name} is {answer!r}, expected a letter from a to d"
        )
        reply = replies[answer.lower()]
        assert reply is None, f"{name}: not {answer}: {reply}"


# ------------------------------------------------------------------------------------------- task 5


def place_by_place(
    input_ids: Tensor,
    labels: Tensor,
    depth: int,
    document_ids: Tensor | None = None,
    document_offset: int = 0,
    source: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The two tables by a loop over the places; the last two arguments make mistakes."""
    B, T = input_ids.shape
    source = labels if source is None else source
    next_tokens = torch.zeros_like(input_ids)
    targets = torch.full_like(labels, IGNORE_INDEX)
    for b in range(B):
        for t in range(T - depth):
            next_tokens[b, t] = input_ids[b, t + depth]
            other = t + depth + document_offset
            if document_ids is None or (other < T and document_ids[b, t] == document_ids[b, other]):
                targets[b, t] = source[b, t + depth]
    return next_tokens, targets


def check_targets(
    answer: Any,
    name: str,
    input_ids: Tensor,
    labels: Tensor,
    depth: int,
    document_ids: Tensor | None = None,
) -> None:
    rows: Any = input_ids, labels, document_ids
    given: Any = [None if row is None else row.clone() for row in rows]
    with forbid(DecoderModel, mtp.further_rows):
        found = answer(input_ids, labels, depth, document_ids)
    name = f"{name}, depth {depth}"
    for what, before, after in zip(
        ("input_ids", "labels", "document_ids"), given, rows, strict=True
    ):
        assert before is None or torch.equal(before, after), (
            f"{name}: {what} has changed after the call: work on a copy"
        )
    right = place_by_place(given[0], given[1], depth, given[2])
    check_two_tensors(name, found, right)
    check_depth(name, found, right, given, depth)
    check_row_ends(name, found, right, given, depth)
    check_documents(name, found[1], right[1], given, depth)
    for what, row, expected in zip(("next_tokens", "targets"), found, right, strict=True):
        off = (row != expected).nonzero().tolist()
        assert not off, (
            f"{name}: {what} at row {off[0][0]}, place {off[0][1]} is {row[tuple(off[0])]},"
            f" expected {expected[tuple(off[0])]}"
        )


def check_two_tensors(name: str, found: Any, right: tuple[Tensor, Tensor]) -> None:
    assert isinstance(found, tuple | list) and len(found) == 2, (
        f"{name}: expected two tensors, got {type(found).__name__}"
    )
    for what, row, expected in zip(("next_tokens", "targets"), found, right, strict=True):
        assert isinstance(row, Tensor), (
            f"{name}: {what} is a {type(row).__name__}, expected a tensor"
        )
        assert row.shape == expected.shape, (
            f"{name}: {what} has the shape {tuple(row.shape)}, expected {tuple(expected.shape)}"
        )
        assert row.dtype == torch.int64, f"{name}: {what} has the dtype {row.dtype}, expected int64"
    assert torch.equal(found[0], right[0]) or not torch.equal(found[0], right[1]), (
        f"{name}: the two tensors are exchanged"
    )


def check_depth(name: str, found: Any, right: Any, given: Any, depth: int) -> None:
    for d in (depth - 1, depth + 1):
        tokens, targets = place_by_place(given[0], given[1], d, given[2])
        if not torch.equal(tokens, right[0]):
            leak = " It sees the token that it should predict" if d > depth else ""
            assert not torch.equal(found[0], tokens), (
                f"{name}: next_tokens holds the tokens of t + {d}, expected t + {depth}.{leak}"
            )
        if not torch.equal(targets, right[1]):
            assert not torch.equal(found[1], targets), (
                f"{name}: targets holds the labels of t + {d}, expected t + {depth}; labels are"
                " next tokens already"
            )


def check_row_ends(name: str, found: Any, right: Any, given: Any, depth: int) -> None:
    def goes_around(i: int) -> bool:
        rolled = given[i].roll(-depth, 1)
        return torch.equal(found[i], rolled) and not torch.equal(found[i], right[i])

    assert not goes_around(0), (
        f"{name}: next_tokens goes around: the last places get the first tokens of the row."
        " Expected is 0 there"
    )
    assert not goes_around(1), (
        f"{name}: targets goes around: the last places get the first labels of the row"
    )


def check_documents(name: str, targets: Tensor, right: Tensor, given: Any, depth: int) -> None:
    """Targets beyond a document, and targets that `labels` leaves out."""
    unaware = place_by_place(given[0], given[1], depth)[1]
    if given[2] is not None and not torch.equal(right, unaware):
        assert not torch.equal(targets, unaware), (
            f"{name}: a place has a target behind the end of its document"
        )
        for offset in (-1, 1):
            wrong = place_by_place(given[0], given[1], depth, given[2], document_offset=offset)[1]
            assert torch.equal(wrong, right) or not torch.equal(targets, wrong), (
                f"{name}: the document is compared with that of t + {depth + offset}, expected"
                f" t + {depth}"
            )
    source = F.pad(given[0][:, 1:], (0, 1), value=IGNORE_INDEX)
    raw = place_by_place(given[0], given[1], depth, given[2], source=source)[1]
    assert torch.equal(raw, right) or not torch.equal(targets, raw), (
        f"{name}: places that `labels` leaves out are targets: take the targets from labels, not"
        " from input_ids"
    )


def some_rows(
    B: int, T: int, sizes: tuple[int, ...] | None = None, prompt: int = 0, seed: int = 0
) -> tuple[Tensor, Tensor, Any]:
    """Rows of random tokens, with documents of these sizes; the first `prompt` labels and each
    document's last are ignored.
    """
    ids = torch.randint(0, 30, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    input_ids, labels = shift(ids).values()
    labels[:, :prompt] = IGNORE_INDEX
    if sizes is None:
        return input_ids, labels, None
    numbers = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels[:, [sum(sizes[: i + 1]) - 1 for i in range(len(sizes))]] = IGNORE_INDEX
    return input_ids, labels, numbers.expand(B, T).clone()


def check_packed(answer: Any) -> None:
    """The documents of the example, and three of which every label counts."""
    input_ids, labels, documents = some_rows(1, 7, (4, 3))
    for depth in (1, 2):
        check_targets(answer, "documents of 4 and 3", input_ids, labels, depth, documents)
    input_ids, labels, documents = some_rows(1, 7, (1, 4, 2))
    full = torch.where(labels == IGNORE_INDEX, 7, labels)
    words = "documents of 1, 4 and 2, every label counts"
    for depth in (1, 2, 3):
        check_targets(answer, words, input_ids, full, depth, documents)


def stream_of(
    model: Any, input_ids: Tensor, document_ids: Tensor | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """The stream after the last block, (B, T, C), and what a module takes besides: the mask and the
    rotary angles.
    """
    mask = None if document_ids is None else document_mask(document_ids)
    context = dict(mask=mask, position_embeddings=model.rotary(torch.arange(input_ids.shape[1])))
    x = model.embedding(input_ids)
    for layer in model.layers:
        x, _ = layer(x, **context)
    return x, context


def mtp_model(depths: int, **changes: Any) -> DecoderModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=30,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        intermediate_size=24,
        initializer_range=0.4,
    )
    model: Any = DecoderModel(ModelConfig(**(sizes | changes), num_mtp_layers=depths))
    nn.init.uniform_(model.norm.weight, 0.5, 2.0)
    return model


def by_places(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    document_ids: Tensor | None,
    mistake: str | None = None,
) -> list[tuple[Tensor, int, Tensor]]:
    """The sum of the losses and the number of targets for each module, and its loss without the
    last norm.
    """
    stats = []
    x, context = stream_of(model, input_ids, None if mistake == "mask" else document_ids)
    first = x
    if mistake == "context":
        context = {}
    for depth, module in enumerate(model.mtp, start=0 if mistake == "depth" else 1):
        nexts = F.pad(input_ids, (0, depth))[:, depth:]
        targets = F.pad(labels, (0, depth), value=IGNORE_INDEX)[:, depth:]
        if document_ids is not None and mistake != "documents":
            later = F.pad(document_ids, (0, depth), value=-1)[:, depth:]
            targets = torch.where(later == document_ids, targets, IGNORE_INDEX)
        if mistake == "inputs":
            nexts = input_ids
        elif mistake == "labels":
            nexts = labels.clamp(min=0)
        elif mistake == "stream":
            x = first
        elif mistake == "normed" and module is not model.mtp[0]:
            x = model.norm(x)
        x = module(x, model.embedding(nexts), **context)
        places = targets != IGNORE_INDEX
        bare = F.cross_entropy(model.lm_head(x)[places], targets[places], reduction="sum")
        logits = model.lm_head(model.norm(x))[places]
        loss = F.cross_entropy(logits, targets[places], reduction="sum")
        stats.append((loss, int(places.sum()), bare))
    return stats


MTP_MISTAKES = {
    "inputs": "the modules get the embeddings of input_ids; they need those of next_tokens",
    "labels": (
        "the modules get the embeddings of labels; with a prompt or a boundary those are not"
        " next_tokens"
    ),
    "context": "the modules get no context: pass **context on",
    "mask": "stream_of needs the document_ids too",
    "documents": "further_targets needs the document_ids too",
    "stream": "each module gets the model's stream; module 2 needs what module 1 returned",
    "depth": "the depths begin with 0; module 1 gets the tokens of t + 1, so its depth is 1",
    "normed": "a module gets what the one before it returned, without model.norm",
}


def mtp_slips(model: Any, rows: Any) -> dict[str, float]:
    """What each likely mistake would return."""
    stats = by_places(model, rows[0], rows[1], rows[2])
    labels = rows[1]
    targets = max(int((labels != IGNORE_INDEX).sum()), 1)
    share = model.config.mtp_loss_coef / len(stats)
    total = sum(float(loss) for loss, _, _ in stats)
    slips = {
        "it is divided by each module's own targets, not by those in labels": (
            share * sum(float(loss) / max(n, 1) for loss, n, _ in stats)
        ),
        "it is divided by the targets of all modules": (
            share * total / max(sum(n for _, n, _ in stats), 1)
        ),
        "it is divided by all B T places, not by the targets in labels": (
            share * total / labels.numel()
        ),
        "it is not divided by the number of targets": share * total,
        "mtp_loss_coef is missing": total / len(stats) / targets,
        "it is the sum over the modules, not their mean": share * len(stats) * total / targets,
        "model.norm is missing before the head": (
            share * sum(float(bare) for _, _, bare in stats) / targets
        ),
    }
    for mistake, words in MTP_MISTAKES.items():
        wrong = by_places(model, rows[0], rows[1], rows[2], mistake)
        slips[words] = share * sum(float(loss) for loss, _, _ in wrong) / targets
    return slips


def check_mtp(
    answer: Any,
    name: str,
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    document_ids: Tensor | None = None,
) -> None:
    with forbid(DecoderModel.forward, mtp.further_loss, mtp.further_rows):
        found = answer(model, input_ids, labels, document_ids)
    right = model.train()(input_ids, labels=labels, document_ids=document_ids).aux_loss
    value = expect_number(found, f"{name}: what mtp_loss returned")
    assert not math.isnan(value), f"{name}: the loss is NaN: is something divided by 0 targets?"
    for slip, wrong in mtp_slips(model, (input_ids, labels, document_ids)).items():
        assert abs(wrong - right) < 1e-4 or abs(value - wrong) > 1e-5, f"{name}: {slip}"
    assert abs(value - right) < 1e-4, (
        f"{name}: the loss is {value:.4f}, the model's is {right:.4f}. (It needs a further_targets"
        " that passes its own tests.)"
    )
    if not (labels != IGNORE_INDEX).any():
        return  # a plain 0 is right
    assert isinstance(found, Tensor) and found.requires_grad, (
        f"{name}: the value is right, but no gradient can pass: is it detached?"
    )
    weight = model.layers[0].mlp.down_proj.weight
    (ours,) = torch.autograd.grad(found, weight, allow_unused=True)
    (theirs,) = torch.autograd.grad(right, weight)
    assert ours is not None and torch.allclose(ours, theirs, atol=1e-5), (
        f"{name}: the value is right, but its gradient does not reach the model's blocks: is the"
        " stream detached?"
    )


# ------------------------------------------------------------------------------------------- task 6


def parts_of(config: ModelConfig, T: int) -> dict[str, int]:
    """The operations of each part, from the shapes of the model's own parameters."""
    model: Any = DecoderModel(config)
    parts = dict(
        projections=0, scores=0, mlp=0, idle=0, head=6 * model.lm_head.weight.numel(), further=0
    )
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name.startswith(("embedding", "lm_head")):
            continue
        part = "projections" if "self_attn" in name else "mlp"
        part = "further" if name.startswith("mtp") else part
        if parameter.ndim == 3:
            used = config.top_k * parameter[0].numel()
            parts["idle"] += 6 * (parameter.numel() - used)
            parts[part] += 6 * used
        else:
            parts[part] += 6 * parameter.numel()
    each = 3 * 2 * 2 * T * model.layers[0].self_attn.o_proj.in_features
    parts["scores"] = config.num_layers * each
    parts["further"] += config.num_mtp_layers * (parts["head"] + each)
    return parts


def flops_slips(config: ModelConfig, parts: dict[str, int], idle: int) -> dict[str, float]:
    """What each likely mistake would return."""
    real = sum(parts.values())
    scores = parts["scores"]
    head = parts["head"]
    further = config.num_mtp_layers
    routers = 6 * config.num_layers * config.hidden_size * config.use_moe
    shared = (config.num_kv_heads or config.num_heads) / config.num_heads
    return {
        "only the forward pass; backward takes twice as much again": real / 3,
        "backward takes twice as much as forward, so 6 in all, not 4": real * 2 / 3,
        "each weight takes a multiplication and an addition": real / 2,
        "all experts are counted; a token uses top_k of them": real + idle,
        "the router is missing; it scores all E experts": real - routers * config.num_experts,
        "the router scores all E experts, not only the chosen ones": (
            real - routers * (config.num_experts - config.top_k)
        ),
        "keys and values are shared, but each of the H query heads is compared, so H D, not K D": (
            real - scores + scores * shared
        ),
        "the matrix from 2C to C of the further modules is missing": (
            real - 12 * further * config.hidden_size**2
        ),
        "the scores of the further modules' layers are missing": (
            real - further * scores / config.num_layers
        ),
        "the table's lookup is counted, but it multiplies nothing": real + head,
        "the head is missing; tied or not, it multiplies": real - head,
        "half of the scores is missing: the whole square counts, and adding up the values takes as"
        " much as comparing": real - scores / 2,
        "the scores are missing, which grow with T": real - scores,
        "the scores are counted forward only": real - scores * 2 / 3,
        "the modules for further tokens are missing": real - parts["further"],
        "each module for further tokens uses the head once more": real - further * head,
    }


def check_flops(answer: Any, name: str, T: int, **changes: Any) -> None:
    config = ModelConfig(**(TINY | dict(max_position_embeddings=10_000) | changes))
    with forbid(DecoderModel, flops_per_token):
        found = expect_number(answer(config, T), f"{name}: what flops_per_token returned")
    parts = parts_of(config, T)
    idle = parts.pop("idle")
    real = sum(parts.values())
    for slip, wrong in flops_slips(config, parts, idle).items():
        assert abs(wrong - real) < 0.5 or abs(found - wrong) > 0.5, (
            f"{name}: {found:,.0f} instead of {real:,.0f}: {slip}"
        )
    assert abs(found - real) < 0.5, (
        f"{name}: {found:,.0f} operations, the model's matrices make {real:,.0f},"
        f" {found - real:+,.0f}"
    )


def check_share(answers: Any, three_runs: Any) -> None:
    (largest_share,) = written(answers, "largest_share")
    assert isinstance(largest_share, dict) and set(largest_share) == set("ABC"), (
        'largest_share must be a dict with "A", "B", "C"'
    )
    for letter, (config, T) in three_runs.items():
        counted = flops_per_token(config, T)
        parts = {
            "projections": counted.projections,
            "scores": counted.scores,
            "mlp": counted.mlp,
            "head": counted.lm_head,
        }
        answer = largest_share[letter]
        top = max(parts, key=lambda part: parts[part])
        assert answer in parts, (
            f"largest_share[{letter!r}] is {answer!r}, expected one of {', '.join(parts)}"
        )
        shares = {part: f"{size / sum(parts.values()):.0%}" for part, size in parts.items()}
        assert answer == top, (
            f"{letter}: {answer} takes {shares[answer]} of the operations, but {top} takes"
            f" {shares[top]}"
        )


def block_bytes(config: ModelConfig, B: int, T: int) -> int:
    """What one block keeps for backward, measured: the bytes of all that autograd saves, without
    the weights.
    """
    small = replace(config, num_layers=1, vocab_size=1, num_mtp_layers=0, layer_types=None)
    model: Any = DecoderModel(small)
    block = model.layers[0]
    x = torch.ones(B, T, config.hidden_size, requires_grad=True)
    turn = model.rotary(torch.arange(T))
    return kept_bytes(lambda: block(x, position_embeddings=turn), leave_out=block.parameters())


def check_memory(answer: Any, name: str, B: int, T: int, **changes: Any) -> float:
    config = ModelConfig(**(TINY | changes))
    plain, thrifty = (
        expect_number(answer(config, B, T, checkpointing), f"{name}: memory")
        for checkpointing in (False, True)
    )
    P = size_of(DecoderModel(config))
    L = config.num_layers
    block = block_bytes(config, B, T)
    entry = 4 * B * T * config.hidden_size
    slips = {
        "AdamW keeps two numbers for each parameter, beside weight and gradient": 8 * P + L * block,
        "one of four is missing: weight, gradient, two moments": 12 * P + L * block,
        "each number takes 4 bytes": 4 * P + L * block,
        "the activations of one block only; all blocks keep theirs": 16 * P + block,
        "the activations are missing": 16 * P,
        "the parameters are missing": L * block,
    }
    for slip, wrong in slips.items():
        assert L == 1 or abs(plain - wrong) > 1, f"{name}, no checkpointing: {slip}"
    right = 16 * P + L * block
    assert abs(plain - right) < 1, (
        f"{name}, no checkpointing: {plain:,.0f} bytes, expected 4 x 4 x {P:,} + {L} x {block:,} ="
        f" {right:,}"
    )
    right = 16 * P + L * entry + block
    slips = {
        "checkpointing changes nothing": 16 * P + L * block,
        "one block is computed again at a time, and keeps all of its own": 16 * P + L * entry,
        "only one block is computed again at a time": 16 * P + L * (entry + block),
        "each number of a block's input takes 4 bytes": 16 * P + L * entry // 4 + block,
        "each of the L blocks keeps its input": 16 * P + entry + block,
    }
    for slip, wrong in slips.items():
        assert wrong == right or abs(thrifty - wrong) > 1, f"{name}, checkpointing: {slip}"
    assert abs(thrifty - right) < 1, (
        f"{name}, checkpointing: {thrifty:,.0f} bytes, expected 4 x 4 x {P:,} + {L} x {entry:,} +"
        f" {block:,} = {right:,}"
    )
    return plain - L * block


def check_real_step(fixed: float) -> None:
    """What doesn't depend on the batch, against a step that is taken."""
    torch.manual_seed(0)
    model = DecoderModel(ModelConfig(**TINY))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    loss = model(**shift(torch.randint(50, (2, 17)))).loss_sum
    assert loss is not None
    loss.backward()
    optimizer.step()
    held = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    for parameter in model.parameters():
        assert parameter.grad is not None
        held += [parameter, parameter.grad]
    real = sum(t.numel() * t.element_size() for t in held)
    assert fixed == real, (
        f"weights, gradients and moments of a real step take {real:,} bytes, your count is"
        f" {fixed:,.0f}"
    )


def check_largest(
    answer: Any, right: int, base: int, each: int, budget: int, power: int = 1
) -> None:
    asked = []

    def memory_of(n: Any) -> int:
        assert isinstance(n, int) and n >= 1, (
            f"memory_of was called with {n!r}, expected a whole number of at least 1"
        )
        asked.append(n)
        assert len(asked) <= 60, "memory_of was called more than 60 times: double, and then bisect"
        return base + each * n**power

    name = f"memory_of(n) = {base} + {each} n{'²' if power == 2 else ''}, budget {budget}"
    found = answer(memory_of, budget)
    assert isinstance(found, int), f"{name}: largest returned {found!r}, expected a whole number"
    assert found < 1 or base + each * found**power <= budget, (
        f"{name}: n = {found} takes {base + each * found**power}, which does not fit"
    )
    assert found >= right, (
        f"{name}: largest returned {found}, but n = {right} fits too; at most the budget means"
        " that all of it may be used"
    )
    assert found == right, f"{name}: {found}, expected {right}"
