"""What a run can begin with, where it keeps its files, and whose callbacks it calls."""

import json
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.run as torchrun
from warm import Warm, warm_processes

from llm_course.cli import main as cli
from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.pretrained import save_pretrained
from llm_course.text.tokenization import BPETokenizer, SimpleCharacterTokenizer
from llm_course.training import run as run_module
from llm_course.training.callbacks import LRSchedulerCallback, WandbLogger, read_metrics
from llm_course.training.checkpointing import CheckpointManager, load_checkpoint
from llm_course.training.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    LoggingConfig,
    OptimizationConfig,
    SyntheticConfig,
    TrainingConfig,
)
from llm_course.training.engine import TrainingEngine
from llm_course.training.folder import load_run
from llm_course.training.named import find_task
from llm_course.training.optim import build_optimizer
from llm_course.training.run import train_worker
from llm_course.training.sources import read_config
from llm_course.training.task import RegressionTask
from llm_course.training.train import LargeScaleLLMTrainer, LLMTrainer

ROOT = Path(__file__).resolve().parent.parent
SMALL = ModelConfig(hidden_size=32, num_layers=1, num_heads=2, max_position_embeddings=32)
MINE = """
from llm_course.training.engine import Callback
from llm_course.training.task import TrainingTask

class First(Callback):
    losses = []

    def on_train_start(self, engine):
        self.losses.append(engine.validate()["val_loss"])

class Tag(Callback):
    def __init__(self, *, value, every=1):
        self.value, self.every = value, every

    def on_step_end(self, engine, metrics):
        if engine.state.step % self.every == 0:
            metrics["tag"] = self.value

class Half(TrainingTask):
    def build_model(self, data):
        return None

class NoData(Half):
    def train_step(self, model, batch):
        return None
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("mine", None)
    Path("mine.py").write_text(MINE)
    text = "The cat sat on the mat. A dog ran to the cat, and the cat ran away.\n\n"
    Path("text.txt").write_text(text * 60)
    return tmp_path


def settings(run_dir, *, steps=6, model=SMALL, **parts) -> Config:
    logging = LoggingConfig(progress=False, tensorboard=False, log_interval=1)
    return Config(
        **dict(
            run_dir=run_dir,
            model=model,
            data=DataConfig(files=["text.txt"], vocab_size=300, sequence_length=16),
            training=TrainingConfig(
                max_steps=steps, batch_size=4, eval_interval=3, precision="fp32", device="cpu"
            ),
            optimization=OptimizationConfig(learning_rate=5e-3, warmup_steps=1),
            checkpoint=CheckpointConfig(save_interval=2, keep_last=9),
            logging=logging,
        )
        | parts
    )


def weights(folder) -> dict[str, torch.Tensor]:
    return load_checkpoint(CheckpointManager(folder).latest())["model"]


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def first_loss() -> float:
    """The loss that the callback `First` measured before the first step."""
    return sys.modules["mine"].First.losses[-1]


# ---------------------------------------------------------------- a model to begin with


def test_a_run_begins_with_the_model_and_the_tokenizer_of_another(folder):
    source = train_worker(settings("source"))
    begun = settings(
        "begun", init_from="source", model=ModelConfig(), callbacks=["mine:First"], steps=4
    )
    assert train_worker(begun).step == 4
    assert first_loss() == source.metrics["val_loss"]  # the step 0 of one is the end of the other
    assert BPETokenizer.load("begun") == BPETokenizer.load("source")
    assert read_config("begun/config.yaml").model.hidden_size == 32
    model, _ = load_run("begun")
    assert model.config.hidden_size == 32


def test_a_run_begins_with_a_folder_of_hugging_face(folder):
    source = train_worker(settings("source"))
    model, tokenizer = load_run("source")
    save_pretrained(model, "exported", tokenizer=tokenizer)
    begun = settings(
        "begun", init_from="exported", model=ModelConfig(), callbacks=["mine:First"], steps=2
    )
    train_worker(begun)
    assert first_loss() == pytest.approx(source.metrics["val_loss"], abs=1e-6)
    assert cli(["train", "--config", "begun/config.yaml", "--training.max_steps", "3"]) == 0


def test_it_is_resumed_exactly_also_without_its_source(folder):
    train_worker(settings("source"))
    begun = settings("straight", init_from="source", model=ModelConfig())
    train_worker(begun)
    train_worker(replace(begun, run_dir="cut", training=replace(begun.training, max_steps=4)))
    # a schedule of six steps from the beginning
    assert not same(weights("straight/checkpoints"), weights("cut/checkpoints"))
    shutil.rmtree("cut")

    stopped = replace(begun, run_dir="cut", callbacks=["stops:Stops"])
    Path("stops.py").write_text(
        "from llm_course.training.engine import Callback\n"
        "class Stops(Callback):\n"
        "    def on_step_end(self, engine, metrics):\n"
        "        if engine.state.step == 4:\n"
        "            engine.stop('test')\n"
    )
    assert train_worker(stopped).step == 4
    shutil.rmtree("source")
    assert train_worker(replace(begun, run_dir="cut"), resume=True).step == 6
    assert same(weights("straight/checkpoints"), weights("cut/checkpoints"))


def test_a_run_killed_before_its_first_checkpoint_begins_with_the_source_again(folder):
    source = train_worker(settings("source"))
    begun = settings("begun", init_from="source", model=ModelConfig(), callbacks=["mine:First"])
    train_worker(begun)
    shutil.rmtree("begun/checkpoints")
    train_worker(begun)
    assert first_loss() == source.metrics["val_loss"]


@pytest.mark.parametrize(
    "parts, words",
    [
        (
            dict(model=replace(SMALL, hidden_size=64)),
            "model.hidden_size=64 does not go with init_from=source, whose model has 32: leave",
        ),
        (
            dict(data=DataConfig(tokenizer="other", sequence_length=16)),
            "data.tokenizer=other does not go with init_from=source",
        ),
        (dict(init_from="nowhere"), "nowhere"),
        (dict(task="regression"), "init_from=source needs a task that trains a DecoderModel"),
        (
            dict(data=DataConfig(sequence_length=64)),
            "data.sequence_length=64 does not fit model.max_position_embeddings=32",
        ),
    ],
)
def test_what_does_not_fit_the_source_is_refused(folder, parts, words):
    train_worker(settings("source", steps=2))
    begun = settings("begun", **dict(init_from="source", model=ModelConfig()) | parts)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        train_worker(begun)
    assert not Path("begun/checkpoints").exists()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@warm_processes()
def test_every_process_begins_with_the_model(folder, strategy):
    source = train_worker(settings("source"))
    two = DistributedConfig(world_size=2, strategy=strategy)
    training = replace(settings("begun").training, max_steps=1, batch_size=2, eval_interval=1)
    # a rate so small that the first validation is that of the source
    still = OptimizationConfig(learning_rate=1e-30, weight_decay=0.0)
    parts = dict(distributed=two, training=training, optimization=still, model=ModelConfig())
    result = train_worker(settings("begun", init_from="source", **parts))
    assert result.metrics["val_loss"] == pytest.approx(source.metrics["val_loss"], abs=1e-5)


def test_dropout_is_the_run_s_own(folder):
    train_worker(settings("source", steps=2))
    dropped = settings("begun", init_from="source", model=ModelConfig(dropout=0.3), steps=2)
    train_worker(dropped)
    assert read_config("begun/config.yaml").model.dropout == 0.3


def test_a_tokenizer_is_used_again(folder):
    train_worker(settings("source", steps=2))
    again = settings("again", steps=2)
    train_worker(replace(again, data=replace(again.data, tokenizer="source", vocab_size=999)))
    assert BPETokenizer.load("again") == BPETokenizer.load("source")
    assert load_run("again")[0].config.vocab_size == BPETokenizer.load("source").vocab_size


def test_a_run_of_characters_is_trained_resumed_measured_and_writes(folder, capsys):
    def of_characters(run_dir, **parts):
        config = settings(run_dir, **parts)
        return replace(config, data=replace(config.data, tokenizer="characters"))

    train_worker(of_characters("straight"))
    tokenizer = load_run("straight")[1]
    text = Path("text.txt").read_text()
    assert isinstance(tokenizer, SimpleCharacterTokenizer)
    assert tokenizer.vocab_size <= 4 + len(set(text))
    assert tokenizer.eos_token_id is not None
    assert tokenizer.decode(tokenizer.encode(text[:50])) == text[:50]
    step_4 = "straight/checkpoints/step_00000004"
    assert train_worker(of_characters("halves"), resume=step_4).step == 6
    assert same(weights("straight/checkpoints"), weights("halves/checkpoints"))

    assert cli(["generate", "--run", "straight", "--prompt", "th", "--max-new-tokens", "5"]) == 0
    assert "th" in capsys.readouterr().out
    assert cli(["evaluate", "--run", "straight"]) == 0
    model, _ = load_run("straight")
    again = of_characters("again", steps=2)
    train_worker(replace(again, data=replace(again.data, tokenizer="straight")))
    assert load_run("again")[1] == tokenizer
    began = replace(settings("began", steps=2, model=ModelConfig()), init_from="straight")
    train_worker(began)
    assert load_run("began")[1] == tokenizer
    assert load_run("began")[0].config.vocab_size == model.config.vocab_size

    broken = json.loads(Path("straight/tokenizer.json").read_text())
    broken["characters"] += "\N{SNOWMAN}"
    Path("straight/tokenizer.json").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match="is not the tokenizer that the model was trained with"):
        load_run("straight")


# ---------------------------------------------------------------- going on from a path


def test_a_run_goes_on_from_a_checkpoint_in_a_new_folder(folder):
    train_worker(settings("straight"))
    step_4 = "straight/checkpoints/step_00000004"
    before = sorted(Path("straight").rglob("*"))
    assert train_worker(settings("branch"), resume=step_4).step == 6
    assert same(weights("straight/checkpoints"), weights("branch/checkpoints"))
    assert sorted(Path("straight").rglob("*")) == before
    rows = [row["step"] for row in read_metrics("branch/metrics.jsonl")]
    assert rows == list(range(1, 7))
    # a run's folder means its newest checkpoint
    assert train_worker(settings("longer", steps=8), resume="straight").step == 8


def test_the_command_takes_both_paths(folder, capsys):
    train_worker(settings("source"))
    words = ["--config", "source/config.yaml", "--run-dir", "branch", "--training.max_steps", "8"]
    assert cli(["train", *words, "--resume", "source"]) == 0
    assert [row["step"] for row in read_metrics("branch/metrics.jsonl")] == list(range(1, 9))
    words = ["--data.files", "text.txt", "--data.sequence_length", "16", "--run-dir", "begun"]
    words += ["--training.max_steps", "1", "--logging.tensorboard", "false"]
    assert cli(["train", "--model.from", "source", *words]) == 0
    assert read_config("begun/config.yaml").init_from == "source"


@pytest.mark.parametrize(
    "words, resume, model",
    [
        ("there is no checkpoint; name the folder of one", "nowhere", SMALL),
        ("branch has checkpoints of its own", "straight", SMALL),
        ("straight holds another run: model.hidden_size=32 there, 64 now", "straight", "wide"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(folder, words, resume, model):
    train_worker(settings("straight", steps=2))
    shape = replace(SMALL, hidden_size=64) if model == "wide" else model
    if "own" in words:
        train_worker(settings("branch", steps=2))
    with pytest.raises(ValueError, match=words):
        train_worker(settings("branch", steps=4, model=shape), resume=resume)


# ---------------------------------------------------------------- folders of one's own


def test_checkpoints_and_logs_have_folders_of_their_own(folder, capsys):
    def elsewhere(run_dir, **parts):
        config = settings(run_dir, **parts)
        return replace(
            config,
            checkpoint=replace(config.checkpoint, dir="big/disk"),
            logging=replace(config.logging, dir="notes", sample_interval=2),
        )

    train_worker(elsewhere("run", steps=4))
    found = {path.name for path in Path("notes").iterdir()}
    assert {"metrics.jsonl", "loss.png", "log.txt", "samples.txt"} <= found
    assert {path.name for path in Path("run").iterdir()} == {
        ".lock",
        "config.yaml",
        "data",
        "tokenizer.json",
    }
    assert [path.name for path in sorted(Path("big/disk").glob("step_*"))] == [
        "step_00000002",
        "step_00000004",
    ]
    assert train_worker(elsewhere("run"), resume=True).step == 6
    assert cli(["evaluate", "--run", "run"]) == 0 and "step 6" in capsys.readouterr().out
    with pytest.raises(ValueError, match="checkpoint.dir=big/disk holds checkpoints of another"):
        train_worker(elsewhere("other"))
    # the way out that it names
    assert train_worker(elsewhere("other", steps=8), resume="big/disk/step_00000006").step == 8


def test_one_checkpoint_an_epoch(folder):
    config = settings("run", steps=None)
    training = replace(config.training, max_steps=None, max_epochs=2, eval_interval="epoch")
    by_epoch = replace(
        config,
        training=training,
        checkpoint=replace(config.checkpoint, save_interval="epoch"),
        logging=replace(config.logging, log_interval="epoch"),
    )
    result = train_worker(by_epoch)
    ends = [result.step // 2, result.step]
    assert [row["step"] for row in read_metrics("run/metrics.jsonl")] == ends
    names = [path.name for path in sorted(Path("run/checkpoints").glob("step_*"))]
    assert names == [f"step_{step:08d}" for step in ends]


def test_details_go_to_the_file(folder, capsys):
    config = settings("run", steps=2)
    train_worker(replace(config, logging=replace(config.logging, level="debug")))
    assert "saved run" in Path("run/log.txt").read_text() and "saved run" not in (
        capsys.readouterr().err
    )
    quiet = settings("quiet", steps=2)
    train_worker(replace(quiet, logging=replace(quiet.logging, level="warning")))
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------- callbacks, tasks, data


def test_own_callbacks_are_made_with_their_arguments(folder):
    tagged = settings("run", callbacks=[{"class": "mine:Tag", "value": 7, "every": 2}], steps=4)
    train_worker(tagged)
    assert [row.get("tag") for row in read_metrics("run/metrics.jsonl")] == [None, 7, None, 7]


@pytest.mark.parametrize(
    "entry, words",
    [
        ("mine:Missing", "callbacks='mine:Missing' cannot be loaded"),
        ("mine", "callbacks='mine' must name a class as package.module:Class"),
        ("pathlib:Path", "is not a subclass of Callback"),
        ("mine:Tag", "callbacks='mine:Tag' cannot be constructed: .*'value'"),
        ({"value": 1}, "names no class: write it as {class: package.module:Class"),
    ],
)
def test_callbacks_that_cannot_be_made_are_refused(folder, entry, words):
    with pytest.raises(ValueError, match=words):
        train_worker(settings("run", callbacks=[entry]))
    assert not Path("run/data").exists()  # before any slow work


def test_a_mistake_inside_a_callback_shows_its_place(folder, capsys):
    Path("mine.py").write_text(
        MINE + "\nclass Wrong(Callback):\n    def __init__(self):\n        len(3)\n"
    )
    with pytest.raises(TypeError, match="has no len"):
        train_worker(settings("run", callbacks=["mine:Wrong"]))


def test_a_plateau_lowers_the_rate_of_a_run(folder):
    config = settings("run", steps=12, task="regression")
    flat = OptimizationConfig(
        learning_rate=1e-9,
        warmup_steps=0,
        schedule="constant",
        plateau_factor=0.5,
        plateau_patience=1,
    )
    training = replace(config.training, eval_interval=2, patience=9)
    never_better = replace(config, optimization=flat, training=training)
    made = run_module._callbacks(
        never_better,
        CheckpointManager("run/checkpoints"),
        runtime=run_module.Runtime(),
        logger=run_module.Logger(),
    )
    assert sum(isinstance(callback, LRSchedulerCallback) for callback in made) == 1
    # with a rate of 0 but for rounding, no validation is better
    train_worker(replace(never_better, optimization=replace(flat, learning_rate=1e-30)))
    rates = [row["learning_rate"] for row in read_metrics("run/metrics.jsonl")]
    assert len(rates) == 12 and rates[-1] < rates[0] / 8


class Noting(dict):
    """Metrics that note what they are asked for."""

    def __init__(self, metrics):
        super().__init__(metrics)
        self.asked = set()

    def __contains__(self, name):
        self.asked.add(name)
        return super().__contains__(name)

    def __getitem__(self, name):
        self.asked.add(name)
        return super().__getitem__(name)

    def items(self):
        self.asked |= {*self, "all metrics"}
        return super().items()


def noted(callback, hook, notes):
    """`hook` of a callback, which also notes (who, what it asked for, what it added).

    The states that go into a checkpoint pass from one to the other as well: `engine.state_dict`
    asks for them, and who changes its own where the saving takes place has added to them.
    """

    def spy(engine, metrics):
        seen, state = Noting(metrics), callback.state_dict()
        with patch.object(engine, "state_dict", wraps=engine.state_dict) as states:
            hook(engine, seen)
        added = set(seen) - set(metrics)
        added |= {"all metrics"} if added else set()
        if callback.state_dict() != state and hook.__name__ == "on_step_end":
            added.add("the states")
        notes.append(
            (
                type(callback).__name__,
                seen.asked | {"the states"} if states.called else seen.asked,
                added,
            )
        )
        metrics.update(seen)

    return spy


def out_of_order(folder, reorder):
    """(who, what, from whom) wherever somebody asks for what a later callback adds."""
    shutil.rmtree("recorded", ignore_errors=True)
    config = settings("recorded", steps=4, task="regression")
    config.training.eval_interval = 4
    config.training.patience = 3
    config.checkpoint.save_interval = 2
    config.logging = LoggingConfig(log_interval=2, sample_interval=4, progress=False)
    made = run_module._callbacks(
        config,
        CheckpointManager("recorded/checkpoints"),
        runtime=run_module.Runtime(),
        logger=run_module.Logger(rank=1),
    )
    callbacks, notes = reorder(made), []
    for callback in callbacks:
        for hook in ("on_validation_end", "on_step_end"):
            setattr(callback, hook, noted(callback, getattr(callback, hook), notes))
    task = RegressionTask(config)
    TrainingEngine(config, task, task.build_data(), callbacks).run()
    place = {who: number for number, who in enumerate(dict.fromkeys(who for who, _, _ in notes))}
    return {
        (who, what, other)
        for who, asked, _ in notes
        for other, _, added in notes
        for what in asked & added
        if place[other] > place[who]
    }


@pytest.mark.parametrize(
    "name, last, right",
    [
        (None, False, True),
        ("PerformanceMonitor", True, False),
        ("TensorBoardLogger", False, False),
        ("Checkpointer", False, False),
        ("EarlyStopping", True, True),  # it counts in the validation, before any saving
    ],
)
def test_no_callback_asks_for_what_a_later_one_adds(folder, monkeypatch, name, last, right):
    """As they ship nobody does; moved to the wrong end of the list, most of them do."""
    monkeypatch.setattr(run_module, "_sample", lambda model, **_: "a text")
    found = out_of_order(
        folder,
        lambda made: sorted(made, key=lambda each: (type(each).__name__ == name) is last),
    )
    assert (found == set()) is right


def test_a_wrong_best_metric_is_found_at_the_start(folder):
    config = settings("run")
    wrong = replace(config, checkpoint=replace(config.checkpoint, best_metric="val_accuracy"))
    with pytest.raises(ValueError, match="'val_accuracy' is not a result.*val_loss, val_bits"):
        train_worker(wrong)
    assert not Path("run/metrics.jsonl").exists() and not Path("run/config.yaml").exists()


def test_an_unfinished_task_is_refused(folder):
    with pytest.raises(ValueError, match="task='mine:Half' must define build_data, train_step"):
        find_task("mine:Half")
    with pytest.raises(ValueError, match="task='mine:NoData' must define build_data$"):
        find_task("mine:NoData")


@pytest.mark.parametrize("corpus", ["copy", "reverse", "modular_addition"])
def test_made_up_data_trains_in_a_run(folder, corpus):
    sizes = SyntheticConfig(num_examples=64, num_symbols=5, length=3)
    config = settings(
        "run", steps=2, data=DataConfig(corpus=corpus, synthetic=sizes, sequence_length=32)
    )
    assert "val_loss" in train_worker(config).metrics
    saved = weights("run/checkpoints")
    assert saved["embedding.embed_tokens.weight"].shape == (7, 32)


def test_a_regression_has_the_sizes_that_are_asked_for(folder):
    words = ["--data.synthetic.num_examples=64", "--data.synthetic.num_features=3"]
    quiet = ["--logging.tensorboard=false", "--logging.progress=false", "--training.max_steps=5"]
    assert cli(["train", "--task=regression", "--run-dir=run", *words, *quiet]) == 0
    assert weights("run/checkpoints")["weight"].shape == (1, 3)


# ---------------------------------------------------------------- from Python


def test_a_trainer_is_a_run(folder):
    trainer = LLMTrainer(settings("object", steps=4))
    assert trainer.train().step == 4 and trainer.result.metrics["val_loss"] > 0
    train_worker(settings("command", steps=4))
    assert same(weights("object/checkpoints"), weights("command/checkpoints"))
    assert trainer.generate("The cat", temperature=0.0, max_new_tokens=3).startswith("The cat")
    with pytest.raises(ValueError, match="holds a finished run"):
        trainer.train(resume=True)


@warm_processes()
def test_a_large_scale_trainer_shares_the_model_out(folder):
    alone = settings("alone", steps=4)
    both = replace(alone, run_dir="both", training=replace(alone.training, batch_size=2))
    large = LargeScaleLLMTrainer(both, world_size=2)
    assert large.config.distributed.strategy == "fsdp"
    result = large.train()
    expected = LLMTrainer(alone).train()
    assert result.metrics["val_loss"] == pytest.approx(expected.metrics["val_loss"], abs=1e-4)


@warm_processes()
def test_processes_meet_where_they_are_told(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = settings("run", steps=2, task="regression")
        busy = DistributedConfig(world_size=2, master_port=port)
        with pytest.raises(ValueError, match=f"master_port={port}: .* Give an address of this"):
            train_worker(replace(config, distributed=busy))
    free = DistributedConfig(world_size=2, master_addr="localhost", master_port=port)
    assert train_worker(replace(config, distributed=free)).step == 2


# ---------------------------------------------------------------- what cannot work, at the start


def test_a_model_that_no_machine_holds_is_refused_in_a_line(folder, capsys):
    shape = ["--model.hidden_size", "1048576", "--model.num_heads", "16"]
    assert cli(["train", *shape, "--run-dir", "run"]) == 2
    said = capsys.readouterr().err
    assert "GB for weights, gradients and optimizer, and cpu has" in said
    assert "Traceback" not in said and not Path("run").exists()


class OnAGPU(run_module.Runtime):
    def __init__(self, world_size=1):
        self.world_size = world_size

    def device(self, name):
        return torch.device("cuda")


def refused(config, runtime, monkeypatch, *, gpu, cpu):
    there = {"cuda": gpu, "cpu": cpu}
    monkeypatch.setattr(run_module, "memory_bytes", lambda device: there[device.type])
    try:
        run_module._check_memory(config, runtime)
    except ValueError as error:
        assert "needs at least" in str(error)
        return True
    return False


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, use_moe=True, mlp_bias=False)])
def test_what_is_counted_is_what_a_step_holds(folder, monkeypatch, name, shape):
    """At least the bytes of weights, gradients and moments, and none that isn't there."""
    shape = replace(shape, vocab_size=256, max_position_embeddings=256)
    model = DecoderModel(shape)
    optimization = OptimizationConfig(optimizer=name)
    optimizer = build_optimizer(model, optimization)
    model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    for parameter in model.parameters():  # of experts that were not used, too
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = [p.numel() for p in model.parameters()] * 2
    held += [t.numel() for state in optimizer.state.values() for t in state.values() if t.ndim]
    config = Config(model=shape, optimization=optimization)
    exact = 4 * sum(held)
    runtime = run_module.Runtime()
    assert not refused(config, runtime, monkeypatch, gpu=0, cpu=exact)
    assert refused(config, runtime, monkeypatch, gpu=0, cpu=0.98 * exact)


def test_memory_is_counted_where_it_is_used(folder, monkeypatch):
    shape = ModelConfig(vocab_size=256, hidden_size=64, num_heads=2)
    whole = 16 * DecoderModel(shape).num_parameters()
    plain = Config(model=shape)
    assert refused(plain, OnAGPU(), monkeypatch, gpu=whole - 1, cpu=9 * whole)
    assert not refused(plain, OnAGPU(), monkeypatch, gpu=whole, cpu=0)
    sharded = replace(plain, distributed=DistributedConfig(strategy="fsdp"))
    assert not refused(sharded, OnAGPU(2), monkeypatch, gpu=whole / 2, cpu=0)
    away = replace(plain, distributed=DistributedConfig(strategy="fsdp", cpu_offload=True))
    # the shares of both processes lie in one main memory, and none on the GPU
    assert not refused(away, OnAGPU(2), monkeypatch, gpu=0, cpu=whole)
    assert refused(away, OnAGPU(2), monkeypatch, gpu=9 * whole, cpu=whole - 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # on two machines
    assert not refused(away, OnAGPU(2), monkeypatch, gpu=0, cpu=whole / 2)


def test_a_device_without_numbers_is_refused(folder, capsys):
    assert cli(["train", "--training.device", "meta", "--run-dir", "run"]) == 2
    assert "training.device='meta' holds no numbers" in capsys.readouterr().err


def test_an_exchanged_tokenizer_is_named(folder, capsys):
    train_worker(settings("run", steps=2))
    BPETokenizer.train(["another text, another text"], vocab_size=270).save("run")
    assert cli(["generate", "--run", "run", "--prompt", "The"]) == 2
    error = capsys.readouterr().err
    assert "run/tokenizer.json (" in error
    assert ") is not the tokenizer that the model was trained with (" in error


def test_an_import_error_inside_wandb_is_its_own(folder, monkeypatch):
    (folder / "wandb").mkdir()
    (folder / "wandb" / "__init__.py").write_text("import a_part_of_wandb_that_is_missing")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ModuleNotFoundError, match="a_part_of_wandb_that_is_missing"):
        WandbLogger(folder, project="p")
    (folder / "wandb" / "__init__.py").write_text("raise ImportError('libfoo.so is missing')")
    with pytest.raises(ImportError, match="libfoo"):
        WandbLogger(folder, project="p")


@pytest.mark.parametrize(
    "words, error",
    [
        (
            ["--training.max_stepz", "3"],
            "'training.max_stepz' is not a key of the configuration; do",
        ),
        (["--task", "bugs:Buggy", "--run-dir", "run"], "KeyError: 'my own bug'"),
    ],
)
def test_torchrun_ends_with_the_error(folder, words, error):
    Path("bugs.py").write_text(
        "from llm_course.training.task import RegressionTask\n"
        "class Buggy(RegressionTask):\n"
        "    def build_data(self):\n"
        "        raise KeyError('my own bug')\n"
    )
    command = ["--nproc-per-node", "1", "-m", "llm_course.training.train", *words]
    process = Warm(torchrun.main, command, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    _, stderr = process.communicate()
    assert process.returncode == 1
    summary = stderr.partition("Root Cause")[2]
    assert error in summary
    assert "To enable traceback" not in summary
