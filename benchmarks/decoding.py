"""Greedy decoding beside Hugging Face's `generate`, with the same weights and the same prompt."""

from collections.abc import Iterator

import torch

from benchmarks.measure import BF16, Row, alternate, bandwidth, cpu_kind
from benchmarks.models import SMALL, hugging_face, ours
from llm_course.model.decoder import DecoderModel
from llm_course.model.generation import generate

NEW = 200
PROMPT = 16


def rows(*, full: bool) -> Iterator[Row]:
    model = ours(SMALL).eval()
    peer = hugging_face(model).eval()
    peer.generation_config.eos_token_id = peer.generation_config.pad_token_id = None
    best = ours(SMALL).eval()
    best_name = "fp32, compiled"
    if cpu_kind() != "no bf16 instructions":
        best = best.to(BF16)
        best_name = "bf16, compiled"
    compiled = torch.compile(best, dynamic=True)
    speed = bandwidth()
    for B in (1, 16):
        prompt = torch.randint(
            SMALL.vocab_size or 0, (B, PROMPT), generator=torch.Generator().manual_seed(0)
        )
        mask = torch.ones_like(prompt)

        def theirs(prompt: torch.Tensor = prompt, mask: torch.Tensor = mask) -> torch.Tensor:
            return peer.generate(
                prompt, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False
            )

        candidates = {
            "fp32 eager": lambda prompt=prompt: generate(model, prompt, max_new_tokens=NEW),
            f"our best ({best_name})": lambda prompt=prompt: generate(
                compiled, prompt, max_new_tokens=NEW
            ),
        }
        assert torch.equal(candidates["fp32 eager"]()[:, : PROMPT + 20], theirs()[:, : PROMPT + 20])
        for candidate in candidates.values():
            assert_greedy(model, candidate())
        seconds = alternate({**candidates, "theirs": theirs}, rounds=9 if full else 5)
        for name in candidates:
            mine, other = (1e3 * seconds[key] / NEW for key in (name, "theirs"))
            goals = {(1, True): (1.3, 1.4), (16, True): (1.3, 1.4), (1, False): (4.0, 3.0)}.get(
                (B, name == "fp32 eager")
            )
            share = 1e3 * read_bytes(model if name == "fp32 eager" else best) / speed / mine
            limit = f"{share:.2f} of the memory bandwidth" if B == 1 else ""
            yield Row(
                f"decoding, batch {B}, {name}",
                "HF generate, default cache",
                mine,
                other,
                "ms a token",
                goals,
                limit,
            )


@torch.no_grad()
def assert_greedy(model: DecoderModel, ids: torch.Tensor) -> None:
    """Each new token is the best one of `model`, in plain float32, up to rounding."""
    logits = model(ids).logits[:, PROMPT - 1 : -1]
    chosen = logits.gather(-1, ids[:, PROMPT:, None]).squeeze(-1)
    assert (logits.amax(dim=-1) - chosen).max() < 0.05


def read_bytes(model: DecoderModel) -> int:
    """What a token has to read: all weights but the embedding table, of which it looks up a row."""
    return sum(p.nbytes for p in model.parameters()) - model.embedding.embed_tokens.weight.nbytes
