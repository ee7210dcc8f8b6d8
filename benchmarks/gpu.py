"""A GPU beside Hugging Face: a training step, experts, decoding; run by name where there is one.

All candidates compute in bfloat16 by autocast, and decode in bfloat16 weights.
"""

from collections.abc import Callable, Iterator

import torch

from benchmarks.experts import TOP_K, C, F, N, both_ways, mixtral
from benchmarks.measure import BF16, Row, alternate
from benchmarks.models import batch_of, hugging_face, loss_on, ours
from benchmarks.training import step_of, their_loss
from llm_course.model.config import ModelConfig
from llm_course.model.estimate import flops_per_token
from llm_course.model.generation import generate
from llm_course.model.mlp import MLP
from llm_course.model.moe import MoE

BASE = ModelConfig(
    vocab_size=32_000,
    hidden_size=768,
    num_layers=12,
    num_heads=12,
    num_kv_heads=4,
    intermediate_size=2048,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
)
B = 16
T = 1024
NEW = 100  # tokens


def waiting(function: Callable[[], object]) -> Callable[[], None]:
    """Call `function`, and wait until the GPU has done what it was told."""

    def run() -> None:
        function()
        torch.cuda.synchronize()

    return run


def seconds_of(candidates: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    waited = {name: waiting(function) for name, function in candidates.items()}
    return alternate(waited, rounds=rounds, warmup=3)


def product_rate(size: int = 8192) -> float:
    """Operations per second of a large product in bfloat16."""
    a = torch.randn(size, size, device="cuda", dtype=BF16)
    return 2 * size**3 / seconds_of({"product": lambda: a @ a}, rounds=20)["product"]


def step_rows(rounds: int) -> Iterator[Row]:
    ids, labels = (one.cuda() for one in batch_of(BASE.vocab_size or 0, B, T))
    model = ours(BASE).cuda()
    peer = hugging_face(model).cuda()
    candidates = {}
    for mode, compiled in (("bf16 eager", False), ("bf16 compiled", True)):
        settings = dict(bf16=True, compiled=compiled)
        candidates[f"{mode}, ours"] = step_of(model, loss_on(ids, labels), **settings)
        candidates[f"{mode}, theirs"] = step_of(peer, their_loss(ids, labels), **settings)
    losses = {name: float(step().detach()) for name, step in list(candidates.items())[:2]}
    assert max(losses.values()) - min(losses.values()) < 0.02, losses
    seconds = seconds_of(candidates, rounds=rounds)
    flops = flops_per_token(BASE, T).training * B * T
    rate = product_rate()
    for mode in ("bf16 eager", "bf16 compiled"):
        mine = seconds[f"{mode}, ours"]
        yield Row(
            f"GPU, training step, {B} x {T} tokens, {mode}",
            "HF Llama, same mode",
            1e3 * mine,
            1e3 * seconds[f"{mode}, theirs"],
            share=f"{flops / mine / rate:.2f} of {rate / 1e12:.0f} TFLOP/s",
            note=f"{torch.cuda.get_device_name()}, {B * T / mine:.0f} tokens/s",
        )


def expert_rows(rounds: int) -> Iterator[Row]:
    dense = both_ways(MLP(C, TOP_K * F).cuda(), bf16=True)
    for E in (8, 64):
        torch.manual_seed(0)
        layer = MoE(C, F, num_experts=E, top_k=TOP_K)
        block = mixtral(layer, "grouped_mm").cuda()
        runs = {"ours": both_ways(layer.cuda(), bf16=True), "dense": dense}
        runs["theirs"] = both_ways(block, bf16=True)
        seconds = seconds_of(runs, rounds=rounds)
        what = f"GPU, MoE layer, {E} experts, {N} tokens, forward and backward, bf16"
        mine = 1e3 * seconds["ours"]
        yield Row(what, "HF Mixtral (grouped_mm)", mine, 1e3 * seconds["theirs"])
        yield Row(what, "a dense layer of equal active size", mine, 1e3 * seconds["dense"])


def decoding_rows(rounds: int) -> Iterator[Row]:
    model = ours(BASE).eval()
    peer = hugging_face(model).eval().to("cuda", BF16)
    peer.generation_config.eos_token_id = peer.generation_config.pad_token_id = None
    model = model.to("cuda", BF16)
    for rows_at_once in (1, 16):
        prompt = batch_of(BASE.vocab_size or 0, rows_at_once, 16)[0].cuda()
        options = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        candidates = {
            "ours": lambda prompt=prompt: generate(model, prompt, max_new_tokens=NEW),
            "theirs": lambda prompt=prompt, options=options: peer.generate(
                prompt, attention_mask=torch.ones_like(prompt), **options
            ),
        }
        seconds = seconds_of(candidates, rounds=rounds)
        mine, other = (1e3 * seconds[name] / NEW for name in ("ours", "theirs"))
        what = f"GPU, decoding, batch {rows_at_once}, bf16 eager"
        yield Row(what, "HF generate, default cache", mine, other, "ms a token")


def rows(*, full: bool) -> Iterator[Row]:
    rounds = 15 if full else 7
    yield from step_rows(rounds)
    yield from expert_rows(2 * rounds)
    yield from decoding_rows(rounds)
