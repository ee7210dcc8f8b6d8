"""The one line through the whole package, as a person types it: train, stop, go on, write; and what
bad input is told.
"""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm
import yaml

from llm_course.cli import main
from llm_course.text.data import TextDataModule, load_corpus, split_documents
from llm_course.training.callbacks import read_metrics
from llm_course.training.checkpointing import CheckpointManager, load_checkpoint, verify
from llm_course.training.config import Config
from llm_course.training.engine import TrainingEngine
from llm_course.training.sources import load_config
from llm_course.training.task import LanguageModelingTask

ROOT = Path(__file__).resolve().parent.parent
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 200
SMALL = """\
data: {files: [text.txt], vocab_size: 300, sequence_length: 32}
model: {hidden_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1, max_position_embeddings: 32}
training: {max_steps: 12, batch_size: 4, eval_interval: 6, precision: fp32}
checkpoint: {save_interval: 5}
logging: {log_interval: 3, sample_tokens: 10}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of the user's own with a text and a small configuration."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    Path("small.yaml").write_text(SMALL, encoding="utf-8")
    return tmp_path


def llm_course(*words: str) -> subprocess.CompletedProcess:
    """In a Python of its own, which has to import PyTorch: `here` and `warm` are faster."""
    code = "import sys; from llm_course.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=env)


@pytest.fixture
def here(capsys):
    """The same command in this process."""

    def call(*words: str) -> subprocess.CompletedProcess:
        capsys.readouterr()
        status = main(list(words))
        return subprocess.CompletedProcess(words, status, *capsys.readouterr())

    return call


def test_train_then_refuse_then_generate(folder, here):
    first = llm_course("train", "--config", "small.yaml", "--run-dir", "run")
    assert first.returncode == 0, first.stderr
    assert "nats per token" in first.stdout and "bits per byte" in first.stdout
    assert (
        "next: llm-course generate --run run" in first.stdout
        and "tokens_per_second" in first.stderr
    )
    run = Path("run")
    expected = set(
        ".lock checkpoints config.yaml data log.txt loss.png metrics.jsonl tensorboard"
        " tokenizer.json".split()
    )
    assert {path.name for path in run.iterdir()} == expected
    assert all(line[20:] in first.stderr for line in (run / "log.txt").read_text().splitlines())
    assert (run / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == [
        "step_00000010",
        "step_00000012",
    ]
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [3, 6, 9, 12] and [
        row["step"] for row in rows if "val_loss" in row
    ] == [6, 12]

    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    again = here("train", "--config", "small.yaml", "--run-dir", "run")
    assert again.returncode == 2 and "holds a finished run (step 12 of 12)" in again.stderr
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before

    words = (
        "generate",
        "--run",
        "run",
        "--prompt",
        "It was ",
        "--max-new-tokens",
        "5",
        "--seed",
        "1",
    )
    one = warm.llm_course(*words)
    wrote, _ = one.communicate()
    assert one.returncode == 0 and wrote.startswith("It was ") and len(wrote) > len("It was \n")
    assert here(*words).stdout == wrote

    # generate needs the run's folder only, and of it neither text nor token files
    (run / "data").rename("elsewhere")
    assert here(*words).stdout == wrote


def test_the_saved_configuration_gives_the_same_run(folder):
    assert main(["train", "--config", "small.yaml", "--run-dir", "a"]) == 0
    assert main(["train", "--config", "a/config.yaml", "--run-dir", "b"]) == 0
    a, b = (read_metrics(Path(name, "metrics.jsonl")) for name in "ab")
    assert [row["loss"] for row in a] == [row["loss"] for row in b]


def test_print_config_prints_what_can_be_read_back(folder, here):
    words = ["--config", "small.yaml", "--model.dropout", "0.25"]
    Path("all.yaml").write_text(here("train", *words, "--print-config").stdout)
    assert load_config(["--config", "all.yaml"]) == load_config(words) and not Path("runs").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send SIGINT to one process")
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_same_command_goes_on(folder, here, number, status):
    long = ("--training.max_steps", "2000", "--training.eval_interval", "2000")
    words = ("train", "--config", "small.yaml", "--run-dir", "run", *long)
    process = warm.llm_course(*words)
    deadline = time.monotonic() + 120
    while (
        not (Path("run", "metrics.jsonl").is_file() and read_metrics("run/metrics.jsonl"))
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == status, stderr
    step = load_checkpoint(CheckpointManager("run/checkpoints").latest())["state"]["step"]
    assert (
        f"stopped by {number.name} after step {step}" in stdout
        and "type the same command again" in stdout
    )

    resumed = here(*words, "--training.max_steps", str(step + 3), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming the unfinished run in run at step {step} of {step + 3}" in resumed.stderr
    steps = [row["step"] for row in read_metrics("run/metrics.jsonl")]
    assert steps == sorted(set(steps)) and steps[-1] == step + 3


def make_engine(run_dir: str, max_steps: int) -> TrainingEngine:
    words = [
        "--config",
        "small.yaml",
        "--run-dir",
        run_dir,
        "--model.dropout",
        "0.1",
        "--training.max_steps",
        str(max_steps),
    ]
    config, _ = load_config(
        [
            *words,
            "--optimization.schedule",
            "constant",
            "--training.gradient_accumulation_steps",
            "3",
        ]
    )
    task = LanguageModelingTask(config)
    engine = TrainingEngine(config, task, task.build_data())
    engine.setup()
    return engine


def test_files_are_found_by_name_and_by_glob(folder):
    Path("deep/er").mkdir(parents=True)
    for name in ("br[1].txt", "deep/a.txt", "deep/er/b.txt"):
        Path(name).write_text(name)
    assert load_corpus(files=["br[1].txt"]).documents == ["br[1].txt"]
    assert load_corpus(files=["deep/**"]).documents == ["deep/a.txt", "deep/er/b.txt"]
    with pytest.raises(ValueError, match="must be a list"):
        TextDataModule("run", files="text.txt")


# 86 batches in windows of 3: the epoch ends with step 29
@pytest.mark.parametrize("stop", [1, 10, 11, 14])
def test_resume_is_exact(folder, stop):
    import torch

    straight = make_engine("run", 31 if stop == 14 else 15)
    straight.run()
    half = make_engine("run", stop)
    half.run()
    manager = CheckpointManager("checkpoints")
    path = manager.save(half.state_dict(), step=stop)
    resumed = make_engine("run", straight.config.training.max_steps)
    resumed.load_state_dict(load_checkpoint(path))
    resumed.run()
    assert resumed.state == straight.state
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    flat = zip(straight.optimizer.state.values(), resumed.optimizer.state.values(), strict=True)
    assert all(torch.equal(a[key], b[key]) for a, b in flat for key in a)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--data.files", "missing/*.txt"], "no file matches 'missing/*.txt'"),
        (["--data.files", "empty.txt"], "empty.txt is empty: it holds no text"),
        (["--data.files", "latin.txt"], "latin.txt is not UTF-8: byte 0xe9 at offset 3"),
        (["--data.files", "marked.txt"], "marked.txt is not UTF-8: byte 0xe9 at offset 6"),
        (["--data.files", "short.txt"], "12 characters are too few for val_fraction=0.05"),
        (["--data.files", "."], "is a directory"),
        (["--data.corpus", "wikipedia"], "no corpus is called 'wikipedia'"),
        (
            ["--data.vocab_size", "100"],
            "vocab_size=100 is too small for 256 bytes and 3 special tokens",
        ),
        (["--task", "chess"], "task='chess' is not one of ['lm', 'regression']"),
        (["--task", "nowhere:Task"], "cannot be loaded"),
        (["--resume"], "holds no checkpoint"),
        (["--training.max_stepz", "3"], "max_stepz"),
        (["--model.num_kv_heads", "3"], "num_heads=2 must be a multiple of num_kv_heads=3"),
        (["--training.device", "abacus"], "training.device='abacus' cannot be used here"),
        (
            ["--model.initializer_range", "-1"],
            "initializer_range=-1 must be positive and finite",
        ),
        (["--optimization.beta1", "1.0"], "optimization.beta1=1.0 must be at least 0 and below 1"),
        (["--data.sequence_length", "64"], "does not fit model.max_position_embeddings=32"),
    ],
)
def test_bad_input_is_one_clear_line_and_leaves_nothing(folder, words, message, capsys):
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("marked.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9")
    Path("short.txt").write_text("A short one.")
    files = [] if "--data.files" in words else ["--data.files", "text.txt"]
    if words[:1] == ["--data.corpus"]:
        files = ["--data.files", "[]"]
    assert main(["train", "--config", "small.yaml", "--run-dir", "run", *files, *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert not Path("run").exists() or not list(Path("run").rglob("*.tokens"))


def contents(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_refused_resume_changes_nothing(folder, here):
    words = ("train", "--config", "small.yaml", "--run-dir", "run")
    assert here(*words).returncode == 0
    before = contents("run")
    wider = here(*words, "--model.hidden_size", "64", "--training.max_steps", "20")
    assert wider.returncode == 2 and "model.hidden_size=32 there, 64 now" in wider.stderr
    Path("text.txt").write_text(TEXT + "And then some.", encoding="utf-8")
    other = here(*words, "--training.max_steps", "20")
    assert other.returncode == 2 and "corpus_sha256 was" in other.stderr
    assert contents("run") == before


def test_a_resume_takes_the_new_learning_rate(folder):
    half = make_engine("run", 4)
    half.run()
    config, _ = load_config(
        ["--config", "small.yaml", "--run-dir", "run", "--optimization.learning_rate", "1e-5"]
    )
    task = LanguageModelingTask(config)
    engine = TrainingEngine(config, task, task.build_data())
    with pytest.raises(ValueError, match="batch_size was"):
        other, _ = load_config(
            ["--config", "small.yaml", "--run-dir", "run", "--training.batch_size", "2"]
        )
        TrainingEngine(
            other, LanguageModelingTask(other), LanguageModelingTask(other).build_data()
        ).setup(half.state_dict())
    engine.setup(half.state_dict())
    assert engine.optimizer.param_groups[0]["lr"] < 1e-5 and engine.state.step == 4


def test_a_run_is_read_back_whatever_the_environment_says(folder, here, monkeypatch):
    words = ("train", "--config", "small.yaml", "--run-dir", "run")
    assert here(*words).returncode == 0
    monkeypatch.setenv("LLM_COURSE_MODEL__HIDDEN_SIZE", "64")
    assert main(["generate", "--run", "run", "--prompt", "It", "--max-new-tokens", "2"]) == 0
    resumed = here(*words, "--training.max_steps", "20")
    assert resumed.returncode == 2 and "model.hidden_size=32 there, 64 now" in resumed.stderr


def test_the_sample_survives_a_terminal_without_unicode(folder, monkeypatch):
    Path("text.txt").write_text("深層学習 — naïve café. " * 300, encoding="utf-8")
    said = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(said, "ascii", write_through=True))
    words = ["train", "--config", "small.yaml", "--run-dir", "my run"]
    assert main([*words, "--logging.sample_prompt", "it's 深"]) == 0
    assert b"next: llm-course generate --run 'my run' --prompt" in said.getvalue()


def test_split_of_one_long_and_one_tiny_document_holds_out_the_end_of_the_long_one():
    train, val = split_documents(["x" * 1_000_000, "y" * 20], val_fraction=0.05, seed=0)
    assert (len(train), len(train[0]), val) == (2, 950_000 - 1, ["x" * 50_001])
    with pytest.raises(ValueError, match="no document"):
        split_documents([], val_fraction=0.1, seed=0)


def test_a_lost_token_file_is_made_again(folder):
    make_engine("run", 1)
    before = contents("run")
    Path("run/data/val.tokens").unlink()
    train = Path("run/data/train.tokens")
    train.write_bytes(train.read_bytes()[:-2] + b"\0\0")
    make_engine("run", 1)
    assert contents("run") == before


def test_a_torn_checkpoint_is_passed_over(folder):
    manager = CheckpointManager("checkpoints")
    state = make_engine("run", 1).state_dict()
    manager.save(state, step=1)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"):
        path = manager.save(state, step=2) / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(ValueError):
            verify(path.parent)
        assert manager.latest().name == "step_00000001"
    manager.keep_last = 1
    # of a run that went on from step 1: the broken step 3 must not push out the good one
    manager.save(state, step=2)
    path = manager.save(state, step=3)
    (path / "state.json").unlink()
    manager.save(state, step=2)
    assert manager.latest().name == "step_00000002"


def test_python_docs_is_prose_and_the_same_each_time():
    corpus = load_corpus()
    again = load_corpus()
    assert corpus == again and corpus.sha256 == again.sha256
    assert 1_500_000 < corpus.num_bytes < 6_000_000 and sys.version.split()[0] in corpus.source
    letters = sum(c.isalpha() or c.isspace() for document in corpus.documents for c in document)
    assert letters / sum(map(len, corpus.documents)) > 0.8


def test_the_tokenizer_sees_the_training_split_only(folder):
    train = ["alpha beta gamma. " * 50] * 9
    Path("texts").mkdir()
    for index, text in enumerate([*train, "zzqq zzqq zzqq " * 20]):
        Path("texts", f"{index}.txt").write_text(text)
    data = TextDataModule(
        "run", files=["texts/*.txt"], vocab_size=400, sequence_length=8, val_fraction=0.05, seed=0
    )
    data.prepare_data()
    data.setup()
    held_out = split_documents(data_documents(), val_fraction=0.05, seed=0)[1]
    assert held_out == ["zzqq zzqq zzqq " * 20]
    assert len(data.tokenizer.encode(" zzqq")) == 5 and len(data.tokenizer.encode(" gamma")) == 1


def data_documents() -> list[str]:
    return load_corpus(files=["texts/*.txt"]).documents


def test_preparing_twice_uses_the_files_again(folder):
    make_engine("run", 1)
    before = {p: p.stat().st_mtime_ns for p in Path("run").rglob("*") if p.is_file()}
    make_engine("run", 1)
    assert {p: p.stat().st_mtime_ns for p in Path("run").rglob("*") if p.is_file()} == before
    info = json.loads(Path("run/data/info.json").read_text())
    assert info["documents"] == {"train": 1, "val": 1} and info["bytes"]["train"] + info["bytes"][
        "val"
    ] == len(TEXT)


def test_a_text_that_became_too_short_costs_nothing(folder):
    make_engine("run", 1)
    before = contents("run")
    Path("text.txt").write_text("A short one.")
    with pytest.raises(ValueError, match="too few"):
        make_engine("run", 1)
    assert contents("run") == before


def test_first_run_configuration_is_complete_and_valid():
    config, _ = load_config(["--config", str(ROOT / "configs" / "first_run.yaml")])
    assert isinstance(config, Config) and config.run_dir == "runs/first_run"
    assert (
        yaml.safe_load((ROOT / "configs" / "first_run.yaml").read_text())["data"]["corpus"]
        == "python-docs"
    )


def test_the_same_text_under_another_name_is_the_same_data(folder):
    words = ["train", "--config", "small.yaml", "--run-dir", "run", "--training.max_steps"]
    assert main([*words, "2", "--data.files", "text.txt"]) == 0
    assert main([*words, "3", "--data.files", "./text.txt", "--data.num_proc", "2"]) == 0
    Path("text.txt").write_text(TEXT + "One more line.")
    assert main([*words, "4", "--data.files", "text.txt"]) == 2
