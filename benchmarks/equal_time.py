"""The same seconds on the same text: a plain GPT recipe against the package's best, and the levers
between them one by one.

python -m benchmarks.equal_time goal [--seconds 60] [--seeds 3] [--size NAME ...]   plain in T
seconds, ours in T / 5 python -m benchmarks.equal_time levers [--seconds 60] [--seeds 3]
from the one to the other
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.optim import learning_rate_factor
from llm_course.training.sources import load_config
from llm_course.training.task import LanguageModelingTask


def size(layers: int, width: int, length: int) -> dict[str, str]:
    """The words of `llm-course train` for so many layers of this width, and rows of `length`
    tokens.
    """
    return {
        "model.num_layers": str(layers),
        "model.hidden_size": str(width),
        "model.num_heads": "4",
        "model.max_position_embeddings": str(length),
        "data.sequence_length": str(length),
        "data.vocab_size": "2048",
    }


def rates(batch: int, learning_rate: str) -> dict[str, str]:
    return {"training.batch_size": str(batch), "optimization.learning_rate": learning_rate}


# Warmup is counted in thousandths of the time.
PLAIN = {
    "model.position_type": "learned",
    "model.use_glu": "false",
    "model.norm_type": "layernorm",
    "model.attention_bias": "true",
    "model.mlp_bias": "true",
    "training.precision": "fp32",
    "optimization.optimizer": "adamw",
    "optimization.schedule": "cosine",
    "optimization.warmup_steps": "50",
}
ARCHITECTURE = {
    "model.position_type": "rope",
    "model.use_glu": "true",
    "model.norm_type": "rmsnorm",
    "model.attention_bias": "false",
    "model.mlp_bias": "false",
    "model.qk_norm": "true",
    "model.num_kv_heads": "2",
}
SCHEDULE = {"optimization.schedule": "linear", "optimization.min_lr_ratio": "0"}
MUON = {"optimization.optimizer": "muon"}
PRECISION = {"training.precision": "auto"}
OWN_HEAD = {"model.tie_word_embeddings": "false"}
OURS = PLAIN | ARCHITECTURE | SCHEDULE | MUON | PRECISION

# For each size the batch and the learning rate of either recipe that did best there.
SIZES = {
    "4 layers of 256, rows of 128": (size(4, 256, 128), rates(8, "1e-3"), rates(16, "1e-2")),
    "2 layers of 128, rows of 128": (size(2, 128, 128), rates(8, "3e-3"), rates(16, "1e-2")),
    "1 layer of 128, rows of 32": (
        size(1, 128, 32),
        rates(32, "3e-3"),
        rates(64, "2e-2") | OWN_HEAD,
    ),
}
# Each stands on all before it, but for those that begin with "or": they change the one before and
# are left again.
LEVERS: dict[str, dict[str, str]] = {
    "plain, 4 layers of 256": (
        SIZES["4 layers of 256, rows of 128"][0] | SIZES["4 layers of 256, rows of 128"][1]
    ),
    "architecture": ARCHITECTURE,
    "schedule: linear to zero": SCHEDULE,
    "optimizer: Muon, its rate": MUON | {"optimization.learning_rate": "1e-2"},
    "precision: auto": PRECISION,
    "batch of 16": {"training.batch_size": "16"},
    "or compiled": {"training.compile": "true"},
    "or tokenizer of 4096": {"data.vocab_size": "4096"},
    "or tokenizer of 1024": {"data.vocab_size": "1024"},
    "size: 2 layers of 128": SIZES["2 layers of 128, rows of 128"][0],
    "size: 1 layer, rows of 32": SIZES["1 layer of 128, rows of 32"][0] | rates(64, "2e-2"),
    "a head of its own": OWN_HEAD,
}


class ByTheClock(LanguageModelingTask):
    """Follows the schedule by the share of `seconds` that is gone, so that every recipe ends at its
    lowest rate.
    """

    seconds = 0.0
    start = 0.0

    def gone(self) -> float:
        return min((time.perf_counter() - self.start) / self.seconds, 1.0)

    def build_scheduler(self, optimizer: Optimizer, *, max_steps: int) -> LambdaLR:
        config = self.config.optimization
        return LambdaLR(
            optimizer,
            lambda step: learning_rate_factor(int(999 * self.gone()), config, max_steps=1000),
        )


class Deadline(Callback):
    def on_train_start(self, engine: TrainingEngine) -> None:
        engine.task.start = time.perf_counter()

    def on_step_end(self, engine: TrainingEngine, metrics: dict[str, Any]) -> None:
        if engine.task.gone() >= 1:
            engine.stop("the time is over")


@torch.no_grad()
def bits_per_byte(engine: TrainingEngine) -> float:
    outputs = [
        engine.task.validation_step(engine.model.eval(), batch)
        for batch in engine.data.val_dataloader()
    ]
    loss = sum(float(output.loss_sum) for output in outputs) / sum(
        int(output.num_targets) for output in outputs
    )
    return engine.task.metrics(loss, engine.data)["bits_per_byte"]


def run(words: dict[str, str], *, seconds: float, seed: int, folder: str) -> tuple[float, int]:
    """Bits per byte of held-out text after `seconds` of training, compiling included, and the steps
    taken.
    """
    ends = {
        "training.max_steps": "1000000",
        "training.eval_interval": "1000000",
        "training.seed": str(seed),
    }
    argv = [word for name, value in (words | ends).items() for word in (f"--{name}", value)]
    config, _ = load_config([*argv, "--run-dir", folder])
    task = ByTheClock(config)
    task.seconds = seconds
    task.start = time.perf_counter()
    engine = TrainingEngine(config, task, task.build_data(), [Deadline()])
    engine.run()
    return bits_per_byte(engine), engine.state.step


def report(
    name: str, words: dict[str, str], seconds: float, seeds: Iterable[int], folder: str
) -> None:
    found = [
        run(words, seconds=seconds, seed=seed, folder=f"{folder}/{words['data.vocab_size']}")
        for seed in seeds
    ]
    bits, steps = zip(*found, strict=True)
    print(
        f"{name:38} {seconds:4.0f} s  {statistics.mean(bits):.3f} bits per byte ({min(bits):.3f} to"
        f" {max(bits):.3f}), {min(steps)} to {max(steps)} steps",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equal_time")
    parser.add_argument("what", choices=["goal", "levers"])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--size", nargs="*", default=list(SIZES), choices=list(SIZES), help="for `goal`"
    )
    options = parser.parse_args()
    # one folder for each vocabulary: token files are made once
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "goal":
            for name in options.size:
                shape, plain_rates, our_rates = SIZES[name]
                report(
                    f"plain, {name}",
                    PLAIN | shape | plain_rates,
                    options.seconds,
                    range(options.seeds),
                    folder,
                )
                report(
                    f"ours, {name}",
                    OURS | shape | our_rates,
                    options.seconds / 5,
                    range(options.seeds),
                    folder,
                )
        else:
            words = dict(PLAIN)
            for name, changes in LEVERS.items():
                report(name, words | changes, options.seconds, range(options.seeds), folder)
                words |= {} if name.startswith("or ") else changes


if __name__ == "__main__":
    main()
