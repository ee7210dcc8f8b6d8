"""Operations that go wrong from a certain call on, for the page on the doctor, and its picture."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def from_call(number: int, owner: Any, name: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """Inside, `owner.name` is right for `number` calls; then `wrong(right, *arguments)` answers."""
    right = getattr(owner, name)
    calls = itertools.count()

    def answer(*arguments: Any, **options: Any) -> Any:
        if next(calls) < number:
            return right(*arguments, **options)
        return wrong(right, *arguments, **options)

    with patch.object(owner, name, answer):
        yield


def one_percent_more(attention: Any, *arguments: Any, **options: Any) -> Tensor:
    """Attention that is off by one percent."""
    result: Tensor = 1.01 * attention(*arguments, **options)
    return result


def bad_attention(after: int) -> Any:
    """Attention is off by one percent, `after` so many right calls."""
    return from_call(after, F, "scaled_dot_product_attention", one_percent_more)


def other_order(after: int) -> Any:
    """Matrix products add up from the other end, as a sound device might, after `after` calls."""

    def flipped(linear: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = linear(x.flip(-1), weight.flip(-1), bias)
        return result

    return from_call(after, F, "linear", flipped)


def lost_writes(after: int) -> Any:
    """`addcdiv_` loses what it writes into a tensor that isn't contiguous, after `after` calls."""
    right = torch.Tensor.addcdiv_
    calls = itertools.count()

    def answer(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if not tensor.is_contiguous() and next(calls) >= after:
            return tensor
        return right(tensor, *arguments, **options)

    return patch.object(torch.Tensor, "addcdiv_", answer)


def show_differences(differences: Mapping[str, float], *, tolerance: float) -> None:
    """The loss, the logits and some gradients, against the tolerance."""
    bars = {"loss": differences["loss"], "logits": differences["logits"]}
    for layer, matrix in itertools.product((0, 1), ("self_attn.o_proj", "mlp.down_proj")):
        name = f"gradient of layers.{layer}.{matrix}.weight"
        bars[f"layer {layer}, {matrix.split('.')[1]}"] = differences[name]
    plt.figure(figsize=(6, 2.4), layout="constrained")
    plt.barh(list(bars), list(bars.values()))
    plt.axvline(tolerance, color="red", linewidth=1, label="tolerance")
    plt.gca().set(
        xscale="log",
        xlabel="difference, as a share of the largest number",
        title="The loss alone hides the fault",
    )
    plt.gca().invert_yaxis()
    plt.legend(fontsize=8, loc="upper right")
    plt.show()
