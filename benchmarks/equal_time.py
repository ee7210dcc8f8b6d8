"""The same seconds on the same text: a plain GPT recipe against the package's best, and the levers between them one by one.

python -m benchmarks.equal_time [--seconds 60] [--seeds 3] [--only NAME ...]
"""

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.sources import load_config
from llm_course.training.task import LanguageModelingTask, learning_rate_factor

# Words of `llm-course train`, so each recipe can be typed. Warmup is counted in thousandths of the time.
PLAIN = {
    "model.position_type": "learned", "model.use_glu": "false", "model.norm_type": "layernorm", "model.attention_bias": "true",
    "model.mlp_bias": "true", "model.max_position_embeddings": "128", "data.sequence_length": "128", "data.vocab_size": "2048",
    "model.hidden_size": "256", "model.num_layers": "4", "model.num_heads": "4", "training.batch_size": "8",
    "training.precision": "fp32", "optimization.optimizer": "adamw", "optimization.learning_rate": "1e-3",
    "optimization.schedule": "cosine", "optimization.warmup_steps": "50",
}  # fmt: skip
LEVERS: dict[str, dict[str, str]] = {
    "plain": {},
    "rotary positions": {"model.position_type": "rope"},
    "gated MLP": {"model.use_glu": "true"},
    "RMSNorm, no biases": {"model.norm_type": "rmsnorm", "model.attention_bias": "false", "model.mlp_bias": "false"},
    "QK-norm": {"model.qk_norm": "true"},
    "grouped heads": {"model.num_kv_heads": "2"},
    "larger first weights": {"model.initializer_range": "0.05"},
    "linear to zero": {"optimization.schedule": "linear", "optimization.min_lr_ratio": "0"},
    "learning rate 3e-3": {"optimization.learning_rate": "3e-3"},
    "Muon": {"optimization.optimizer": "muon"},
    "bf16 where it pays": {"training.precision": "auto"},
}


class ByTheClock(LanguageModelingTask):
    """Follows the schedule by the share of `seconds` that is gone, so that every recipe ends at its lowest rate."""

    seconds, start = 0.0, 0.0

    def gone(self) -> float:
        return min((time.perf_counter() - self.start) / self.seconds, 1.0)

    def build_scheduler(self, optimizer: Optimizer, *, max_steps: int) -> LambdaLR:
        config = self.config.optimization
        return LambdaLR(optimizer, lambda step: learning_rate_factor(int(999 * self.gone()), config, max_steps=1000))


class Deadline(Callback):
    def on_train_start(self, engine: TrainingEngine) -> None:
        engine.task.start = time.perf_counter()

    def on_step_end(self, engine: TrainingEngine, metrics: dict[str, Any]) -> None:
        if engine.task.gone() >= 1:
            engine.stop("the time is over")


@torch.no_grad()
def bits_per_byte(engine: TrainingEngine) -> float:
    outputs = [engine.task.validation_step(engine.model.eval(), batch) for batch in engine.data.val_dataloader()]
    loss = sum(float(output.loss_sum) for output in outputs) / sum(int(output.num_targets) for output in outputs)
    return engine.task.metrics(loss, engine.data)["bits_per_byte"]


def run(words: dict[str, str], *, seconds: float, seed: int, folder: str) -> tuple[float, int]:
    """Bits per byte of held-out text after `seconds` of training, compiling included, and the steps taken."""
    ends = {"training.max_steps": "1000000", "training.eval_interval": "1000000", "training.seed": str(seed)}
    argv = [word for name, value in (words | ends).items() for word in (f"--{name}", value)]
    config, _ = load_config([*argv, "--run-dir", folder])
    task = ByTheClock(config)
    task.seconds, task.start = seconds, time.perf_counter()
    engine = TrainingEngine(config, task, task.build_data(), [Deadline()])
    engine.run()
    return bits_per_byte(engine), engine.state.step


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equal_time")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(LEVERS), help="levers up to which to go, each with all before it")
    options = parser.parse_args()
    words: dict[str, str] = dict(PLAIN)
    with tempfile.TemporaryDirectory() as folder:  # one folder: tokenizer and token files are made once
        for name, changes in LEVERS.items():
            words |= changes
            if name not in options.only:
                continue
            found = [run(words, seconds=options.seconds, seed=seed, folder=folder) for seed in range(options.seeds)]
            bits, steps = zip(*found, strict=True)
            spread = max(bits) - min(bits)
            print(f"{name:24} {statistics.mean(bits):.3f} bits per byte (spread {spread:.3f}), {steps[0]} steps", flush=True)


if __name__ == "__main__":
    main()
