"""Greedy decoding beside Hugging Face's `generate`, with the same weights and the same prompt."""

from collections.abc import Iterator

import torch

from benchmarks.measure import Row, alternate, bandwidth
from benchmarks.models import SMALL, hugging_face, ours
from llm_course.model.generation import generate

NEW, PROMPT = 200, 16


def rows(*, full: bool) -> Iterator[Row]:
    model = ours(SMALL).eval()
    peer = hugging_face(model).eval()
    peer.generation_config.eos_token_id = peer.generation_config.pad_token_id = None
    # each row of the embedding table is looked up, not read whole
    read = sum(p.nbytes for p in model.parameters()) - model.embedding.embed_tokens.weight.nbytes
    limit = read / bandwidth()
    for B in (1, 16):
        prompt = torch.randint(SMALL.vocab_size or 0, (B, PROMPT), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(prompt)

        def mine(prompt: torch.Tensor = prompt) -> torch.Tensor:
            return generate(model, prompt, max_new_tokens=NEW)

        def theirs(prompt: torch.Tensor = prompt, mask: torch.Tensor = mask) -> torch.Tensor:
            return peer.generate(prompt, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)

        assert torch.equal(mine()[:, : PROMPT + 20], theirs()[:, : PROMPT + 20])
        seconds = alternate({"ours": mine, "theirs": theirs}, rounds=9 if full else 5)
        per_token = {name: 1e3 * value / NEW for name, value in seconds.items()}
        share = f"{1e3 * limit / per_token['ours']:.2f} of the memory bandwidth" if B == 1 else ""
        peer_name = "HF generate, default cache"
        yield Row(f"decoding, batch {B}, fp32 eager", peer_name, **per_token, unit="ms a token", goals=(1.3, 1.4), share=share)
