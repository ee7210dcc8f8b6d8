"""The tree of settings and its four sources: what it takes, what it refuses and with which words,
and that it can be saved.
"""

import dataclasses
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, StrEnum
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from llm_course.checks import type_in_words
from llm_course.model.config import ModelConfig
from llm_course.model.rope_scaling import RopeScaling
from llm_course.training import config as config_module
from llm_course.training import sources
from llm_course.training.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    LoggingConfig,
    OptimizationConfig,
    StoriesConfig,
    SyntheticConfig,
    TrainingConfig,
)
from llm_course.training.sources import load_config, read_config, save_config

SECTIONS = {
    "data": DataConfig,
    "training": TrainingConfig,
    "optimization": OptimizationConfig,
    "distributed": DistributedConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
}
NAN = math.nan
INF = math.inf
# Each example builds a parser, so a failing one is not made smaller.
FAST = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """An empty folder, and no variable of ours in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("LLM_COURSE_")]:
        monkeypatch.delenv(name)


def outcome(words=(), file=None, **environment):
    """The configuration of these sources, or the words of the refusal; any other error goes
    through.
    """
    words = list(words)
    if file is not None:
        Path("run.yaml").write_text(file, encoding="utf-8")
        words = ["--config", "run.yaml", *words]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(f"LLM_COURSE_{name}", value)
        try:
            return load_config(words)[0]
        except ValueError as error:
            return str(error)


# ---------------------------------------------------------------- the tree


def test_defaults_are_valid_and_have_one_length():
    config = Config()
    assert (config.training.max_steps, config.training.max_epochs, config.training.max_tokens) == (
        1000,
        None,
        None,
    )
    assert load_config([]) == (config, False) and load_config(["--resume"]) == (config, True)
    assert not hasattr(config, "__slots__") and config != Config(run_dir="runs/other")


@pytest.mark.parametrize("section", SECTIONS)
def test_sections_take_names_only(section):
    with pytest.raises(TypeError, match="positional"):
        SECTIONS[section](1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        SECTIONS[section](nonsense=1)


def wrong_for(kind) -> list:
    """Values that do not fit an annotation, found by rules of their own."""
    text = repr(kind)
    wrong = [object(), {"a": 1}, [1], 1j]
    wrong += [] if "str" in text and "Literal" not in text else ["two words"]
    wrong += [] if "NoneType" in text or "None" in text else [None]
    wrong += [] if "bool" in text else [True]
    wrong += [] if "float" in text else [1.0]
    wrong += [] if "float" in text or "int" in text else [3]
    return wrong


def is_mapping_for(kind, value) -> bool:
    """Whether the value is to become a dataclass, which then says which key it doesn't know."""
    return dataclasses.is_dataclass(kind) and isinstance(value, dict)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_refuses_every_wrong_type_by_its_path(section):
    for field in dataclasses.fields(SECTIONS[section]):
        for value in wrong_for(field.type):
            with pytest.raises(ValueError) as error:
                SECTIONS[section](**{field.name: value})
            rule = " unexpected keyword " if is_mapping_for(field.type, value) else " must be "
            assert str(error.value).startswith(f"{section}.{field.name}="), value
            assert rule in str(error.value), value


@pytest.mark.parametrize(
    "section, bad",
    [
        (
            "data",
            dict(vocab_size=0, sequence_length=-1, num_proc=0, num_workers=-1, val_fraction=0.0),
        ),
        ("data", dict(val_fraction=1, clean=["nfc", "shout"])),
        ("data", dict(val_fraction=NAN)),
        (
            "training",
            dict(
                max_steps=0,
                max_epochs=-1,
                max_tokens=0,
                batch_size=0,
                gradient_accumulation_steps=0,
                patience=0,
            ),
        ),
        ("training", dict(max_grad_norm=NAN, eval_interval=0, seed=-1)),
        ("training", dict(max_grad_norm=INF, seed=2**63)),
        ("training", dict(max_grad_norm=0)),
        (
            "optimization",
            dict(
                learning_rate=0.0,
                warmup_steps=-1,
                weight_decay=-0.1,
                beta1=1.0,
                beta2=-0.1,
                min_lr_ratio=1.1,
            ),
        ),
        (
            "optimization",
            dict(
                learning_rate=NAN,
                weight_decay=INF,
                beta1=NAN,
                min_lr_ratio=NAN,
                router_bias_rate=-1e-3,
            ),
        ),
        ("optimization", dict(learning_rate=INF)),
        ("distributed", dict(world_size=0, timeout=0, cpu_offload=True)),
        ("distributed", dict(timeout=NAN)),
        ("checkpoint", dict(save_interval=0, keep_last=0, best_metric="null")),
        ("logging", dict(log_interval=0, sample_tokens=0, sample_interval=0, wandb_project="~")),
    ],
)
def test_values_out_of_range_are_refused_by_their_path(section, bad):
    for name, value in bad.items():
        with pytest.raises(ValueError, match=rf"^{section}\.{name}[=:]"):
            SECTIONS[section](**{name: value})


def test_values_at_the_edge_are_taken():
    OptimizationConfig(
        warmup_steps=0, weight_decay=0, beta1=0.0, min_lr_ratio=0, router_bias_rate=0.0
    )
    OptimizationConfig(min_lr_ratio=1.0, beta2=0.9999)
    TrainingConfig(seed=2**63 - 1, max_steps=1, patience=1, max_grad_norm=1e-300)
    DataConfig(val_fraction=1e-9, num_workers=0, sequence_length=1)


@pytest.mark.parametrize(
    "given",
    [("max_steps", "max_epochs"), ("max_steps", "max_tokens"), ("max_epochs", "max_tokens")],
)
def test_a_run_has_one_length(given):
    with pytest.raises(
        ValueError, match=f"training.{given[0]}=2 and training.{given[1]}=2: a run has one length"
    ):
        TrainingConfig(**dict.fromkeys(given, 2))
    for name in given:
        config = Config(training=TrainingConfig(**{name: 2}))
        assert getattr(config.training, name) == 2 and (config.training.max_steps is None) == (
            name != "max_steps"
        )


@pytest.mark.parametrize(
    "parts, words",
    [
        (dict(run_dir=""), "run_dir='' is not a folder: name one"),
        (
            dict(data=DataConfig(sequence_length=257)),
            "data.sequence_length=257 does not fit model.max_position_embeddings=256",
        ),
        (
            dict(training=TrainingConfig(precision="fp16")),
            "training.precision=fp16 does not go with distributed.strategy=fsdp",
        ),
        (
            dict(training=TrainingConfig(compile=True)),
            "training.compile=True does not go with distributed.strategy=fsdp",
        ),
        (
            dict(optimization=OptimizationConfig(optimizer="muon")),
            "optimization.optimizer=muon does not go with",
        ),
        (
            dict(logging=LoggingConfig(sample_interval=5)),
            "logging.sample_interval=5 does not go with distributed.strategy=fsdp",
        ),
        (
            dict(
                distributed=DistributedConfig(backend="nccl"), training=TrainingConfig(device="cpu")
            ),
            (
                "distributed.backend=nccl connects GPUs, and does not go with training.device=cpu:"
                " use gloo"
            ),
        ),
        (
            dict(optimization=OptimizationConfig(router_bias_rate=0.01)),
            "router_bias_rate=0.01 needs model.use_moe=True",
        ),
        (dict(model={"hidden_siz": 64}), "model={'hidden_siz': 64}: "),
        (dict(model=64), "model=64 must be a ModelConfig"),
        (dict(run_dir=None), "run_dir=None must be a string"),
    ],
)
def test_impossible_combinations_say_a_way_out(parts, words):
    fsdp = (
        {"distributed": DistributedConfig(strategy="fsdp")}
        if "fsdp" in words or "muon" in words
        else {}
    )
    with pytest.raises(ValueError) as error:
        Config(**parts, **fsdp)
    assert words in str(error.value)
    if fsdp:  # each half alone is taken
        Config(**parts)
        Config(**fsdp)


def test_combinations_that_go_together_are_taken():
    Config(model=ModelConfig(use_moe=True), optimization=OptimizationConfig(router_bias_rate=0.01))
    fsdp = DistributedConfig(strategy="fsdp", cpu_offload=True, backend="gloo")
    Config(distributed=fsdp, training=TrainingConfig(device="cpu"))
    Config(data=DataConfig(sequence_length=256))


def test_nothing_is_shared():
    one = Config()
    other = Config()
    names = ["a.txt"]
    for field in dataclasses.fields(Config):
        if dataclasses.is_dataclass(field.type):
            assert getattr(one, field.name) is not getattr(other, field.name)
    one.data.files.append("b.txt")
    mine = DataConfig(files=names)
    names.append("b.txt")
    assert other.data.files == [] and mine.files == ["a.txt"]
    training = TrainingConfig()
    # the caller's stays as it was
    assert Config(training=training).training.max_steps == 1000 and training.max_steps is None


def test_whatever_can_be_made_can_be_saved():
    config = Config(
        run_dir=Path("runs/x"),
        data=DataConfig(
            files=(Path("a.txt"), "b.txt"),
            val_fraction=np.float32(0.5),
            vocab_size=np.int64(300),
            clean="nfc",
        ),
        optimization=OptimizationConfig(weight_decay=0, learning_rate=np.float64(1e-7)),
        model=ModelConfig(
            hidden_size=np.int32(64),
            rope_scaling=RopeScaling(rope_type="linear", factor=np.float64(2)),
        ),
    )
    save_config(config, "config.yaml")
    assert read_config("config.yaml") == config
    assert config.data.files == ["a.txt", "b.txt"] and config.data.clean == ["nfc"]


@pytest.mark.parametrize(
    "enum",
    [StrEnum("Schedule", {"LINEAR": "linear"}), Enum("Schedule", {"LINEAR": "linear"}, type=str)],
)
def test_texts_of_other_kinds_become_plain(enum):
    config = Config(
        run_dir=np.str_("runs/x"),
        data=DataConfig(corpus=np.str_("a"), files=list(np.array(["a.txt"]))),
        optimization=OptimizationConfig(schedule=enum.LINEAR),
    )
    data = config.data
    optimization = config.optimization
    texts = [config.run_dir, data.corpus, *data.files, optimization.schedule]
    assert texts == ["runs/x", "a", "a.txt", "linear"] and {type(text) for text in texts} == {str}
    save_config(config, "config.yaml")
    assert read_config("config.yaml") == config


@pytest.mark.parametrize(
    "section, name, value, words",
    [
        (TrainingConfig, "batch_size", 10**400, "training.batch_size: int too large"),
        # Python would not even print it
        (TrainingConfig, "max_steps", 10**5000, "training.max_steps: int too large"),
        (
            OptimizationConfig,
            "learning_rate",
            Fraction(10**400),
            "optimization.learning_rate: integer division result too large",
        ),
        (OptimizationConfig, "schedule", np.array(["a", "b"]), "optimization.schedule=array"),
        (Config, "run_dir", "\udc80x", "run_dir: 'utf-8' codec can't encode"),
        (DataConfig, "files", [Path("\udc80x")], "data.files: 'utf-8' codec can't encode"),
    ],
    ids=["large", "huge", "fraction", "array", "half a character", "half a character in a path"],
)
def test_what_no_file_can_hold_is_refused_by_its_path(section, name, value, words):
    with pytest.raises(ValueError) as error:
        section(**{name: value})
    assert str(error.value).startswith(words)


def test_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("USERPROFILE", "/home/me")
    config = outcome(["--run-dir=~/runs/x"])
    assert config == Config(run_dir="~/runs/x") and Path(config.run_dir) == Path("/home/me/runs/x")
    assert [Config(run_dir=path).run_dir for path in ("a/~", "~no such user/x")] == [
        "a/~",
        "~no such user/x",
    ]


NOTHING = ["#llm", "# x", "&a", "null ", "!!null x", "null # x", "---", "\ufeff"]


@pytest.mark.parametrize("text", NOTHING)
def test_a_text_that_is_nothing_in_yaml_is_a_text_where_texts_are_asked_and_refused_elsewhere(text):
    for key in ("training.max_steps", "model.rope_scaling"):
        section, name = key.split(".")
        quoted = yaml.safe_dump({section: {name: text}})
        for said in (
            outcome([f"--{key}={text}"]),
            outcome([], quoted),
            outcome([], **{f"{section}__{name}".upper(): text}),
        ):
            assert f"{key}={text!r} means null in YAML" in str(said)
    for key in ("logging.sample_prompt", "logging.wandb_project"):
        name = key.partition(".")[2]
        config = outcome([f"--{key}={text}"])
        assert getattr(config.logging, name) == text
        save_config(config, "config.yaml")
        assert read_config("config.yaml") == config


@pytest.mark.parametrize("text", ["null", "Null", "NULL", "~"])
def test_the_word_null_is_none_from_every_source_and_refused_in_python(text):
    quoted = yaml.safe_dump({"logging": {"wandb_project": text}})
    for config in (
        outcome([f"--logging.wandb_project={text}"], "logging: {wandb_project: mine}"),
        outcome([], quoted),
        outcome([], "logging: {wandb_project: mine}", LOGGING__WANDB_PROJECT=text),
    ):
        assert config.logging.wandb_project is None
    with pytest.raises(ValueError, match="logging.wandb_project=.* means null in YAML"):
        LoggingConfig(wandb_project=text)


def test_null_and_blank_texts_are_taken():
    for text in ("null", "~"):
        assert outcome([f"--checkpoint.best_metric={text}"]).checkpoint.best_metric is None
    assert LoggingConfig(wandb_project="[" * 3000).wandb_project
    for text in ("", " ", "\n", "\u2028"):
        config = Config(logging=LoggingConfig(wandb_project=text))
        save_config(config, "config.yaml")
        assert read_config("config.yaml") == config


def test_words_for_annotations():
    words = type_in_words
    assert words(int | None) == "a whole number or null" and words(bool) == "true or false"
    assert (
        words(list[str] | str) == "a list of strings or a string"
        and words(Literal["a"] | None) == "a or null"
    )
    assert words(ModelConfig.__dataclass_fields__["layer_types"].type).startswith(
        "a list of sliding_attention or full_attention"
    )


# ---------------------------------------------------------------- precedence


def test_every_pair_and_every_set_of_sources():
    """All subsets of the four sources, for a key that all of them name and one that only the file
    names.
    """
    for file, environment, words in product((False, True), repeat=3):
        config = outcome(
            ["--training.max_steps", "300"] if words else [],
            "training: {max_steps: 100, batch_size: 3}" if file else None,
            **({"TRAINING__MAX_STEPS": "200"} if environment else {}),
        )
        assert config.training.max_steps == (
            300 if words else 200 if environment else 100 if file else 1000
        )
        assert config.training.batch_size == (3 if file else 16)


def test_of_several_files_the_later_wins_key_by_key(monkeypatch):
    Path("a.yaml").write_text("training: {max_steps: 1, batch_size: 5}\ndata: {files: [a]}")
    Path("b.yaml").write_text("training: {max_steps: 2}\ndata: {files: [b]}")
    both = load_config(["--config", "a.yaml", "--config=b.yaml"])[0]
    assert (both.training.max_steps, both.training.batch_size, both.data.files) == (2, 5, ["b"])
    monkeypatch.setenv("LLM_COURSE_CONFIG", "b.yaml")  # lies below the files of the command line
    named = load_config(["--config", "a.yaml"])[0]
    assert (named.training.max_steps, load_config([])[0].training.max_steps) == (1, 2)
    assert read_config("a.yaml").training.max_steps == 1
    monkeypatch.setenv("LLM_COURSE_CONFIG", "c.yaml")
    assert "c.yaml: there is no such file" in outcome()


def test_the_last_word_wins_and_dashes_are_underscores():
    words = [
        "--training.max_steps",
        "5",
        "--run-dir",
        "my-runs/a",
        "--training.max-steps=7",
        "--logging.sample_prompt=--a-b",
    ]
    config = outcome(words)
    assert (config.training.max_steps, config.run_dir, config.logging.sample_prompt) == (
        7,
        "my-runs/a",
        "--a-b",
    )


def test_resume_may_name_a_path():
    for words, expected in (
        (["--resume", "runs/a", "--run-dir", "b"], "runs/a"),
        (["--run-dir", "b", "--resume=runs/a"], "runs/a"),
        (["--resume", "--run-dir", "b"], True),
        (["--run-dir", "b", "--resume"], True),
    ):
        config, resume = load_config(words)
        assert (config.run_dir, resume) == ("b", expected)


def test_model_from_is_another_name_in_every_source():
    assert outcome(["--model.from", "runs/a"]).init_from == "runs/a"
    file = outcome([], "model: {from: runs/a}")
    assert file == outcome(["--model.from=runs/a"]) == outcome([], "init_from: runs/a")
    assert file == outcome([], MODEL__FROM="runs/a")
    assert outcome(["--model.from", "null"], "init_from: a").init_from is None
    # a higher source wins, whichever name it takes
    assert outcome(["--model.from=b"], "init_from: a", INIT_FROM="c").init_from == "b"
    assert outcome(["--init_from=b"], "model: {from: a}").init_from == "b"


@pytest.mark.parametrize(
    "sources_, place",
    [
        ((["--model.from=a", "--init_from=b"],), "command line: "),
        ((["--init_from=b", "--model.from=a"],), "command line: "),
        (([], "init_from: b\nmodel: {from: a}"), "run.yaml: "),
    ],
)
def test_two_names_with_two_values_in_one_source_are_refused(sources_, place):
    said = outcome(*sources_)
    assert said == f"{place}model.from=a and init_from=b are two names of one key: keep one of them"


def test_two_names_with_two_values_in_the_environment_are_refused():
    said = outcome(MODEL__FROM="a", INIT_FROM="b")
    assert said.startswith("environment: model.from=a and init_from=b are two names")
    assert outcome(MODEL__FROM="a", INIT_FROM="a").init_from == "a"
    assert outcome(["--model.from=a", "--init_from=a", "--model.from=a"]).init_from == "a"


@pytest.mark.parametrize(
    "name, key", [("compile", "compile"), ("precision", "precision"), ("amp", "precision")]
)
def test_what_is_sought_among_the_optimization_settings_is_named(name, key):
    assert f"do you mean 'training.{key}'?" in outcome([f"--optimization.{name}=true"])


def test_what_other_libraries_call_a_key_is_named():
    assert set(sources._OURS.values()) <= set(sources.KEY_TYPES)
    assert not set(sources._OURS) & set(sources.KEY_TYPES)
    for theirs, key in sources._OURS.items():
        assert f"do you mean {key!r}?" in outcome([f"--{theirs}=1"])


def test_a_length_is_changed_by_setting_the_other_to_null():
    file = "training: {max_steps: 7}"
    assert "set the others to null" in outcome(["--training.max_tokens", "5"], file)
    assert (
        outcome(
            ["--training.max_tokens", "5", "--training.max_steps", "null"], file
        ).training.max_tokens
        == 5
    )


def test_a_saved_run_ignores_the_environment(monkeypatch):
    save_config(Config(model=ModelConfig(hidden_size=64)), "config.yaml")
    monkeypatch.setenv("LLM_COURSE_MODEL__HIDDEN_SIZE", "32")
    assert read_config("config.yaml").model.hidden_size == 64
    assert load_config(["--config", "config.yaml"])[0].model.hidden_size == 32
    monkeypatch.setenv("LLM_COURSE_NONSENSE", "1")
    assert read_config("config.yaml").model.hidden_size == 64


def test_resume_from_the_environment(monkeypatch):
    for text, expected in (("", False), ("false", False), ("true", True), ("runs/a", "runs/a")):
        monkeypatch.setenv("LLM_COURSE_RESUME", text)
        assert load_config([])[1] == expected
        assert load_config([], use_environment=False)[1] is False
        assert load_config(["--resume", "runs/b"])[1] == "runs/b"
        assert load_config(["--resume"])[1] is True and load_config(["--resume="])[1] is True


def test_print_config_can_be_read_back(capsys):
    words = [
        "--data.files",
        "a: b.txt",
        "--training.max_epochs",
        "3",
        "--model.rope_scaling",
        "{rope_type: linear, factor: 2}",
    ]
    expected = outcome(words)
    with pytest.raises(SystemExit) as leave:
        load_config([*words, "--print-config"])
    assert leave.value.code == 0
    printed = capsys.readouterr().out
    keys = [line.partition(":")[0] for line in printed.splitlines() if line[0].isalpha()]
    assert keys == [field.name for field in dataclasses.fields(Config)]  # in the order of the class
    assert outcome([], printed) == expected and not Path("runs").exists()


def test_help_shows_every_key_with_its_words(capsys):
    with pytest.raises(SystemExit) as leave:
        load_config(["--help"])
    assert leave.value.code == 0
    text = capsys.readouterr().out
    leaves = [
        key for key in sources.KEY_TYPES if key not in sources.SECTIONS and key.count(".") <= 1
    ]
    assert [key for key in leaves if f"--{key} " not in text] == []
    assert "decoupled decay, on matrices only" in text and "passes over the training data" in text


# ---------------------------------------------------------------- what is refused, with its words


REFUSED = [
    # unknown keys and the nearest name
    (["--training.max_stepz", "3"], None, {}, "command line: 'training.max_stepz' is not a key"),
    (["--max_steps", "3"], None, {}, "do you mean 'training.max_steps'?"),
    (
        ["--training.max_step", "3"],
        None,
        {},
        "'training.max_step' is not a key",
    ),  # no abbreviations
    (
        ["--qqq", "3"],
        None,
        {},
        "'qqq' is not a key of the configuration; --print_config shows all of them",
    ),
    (["--model.rope_scaling.factr=4"], None, {}, "do you mean 'model.rope_scaling.factor'?"),
    # the right word in another section
    (["--model.patience", "3"], None, {}, "do you mean 'training.patience'?"),
    (
        ["--training", "{max_steps: 3, max_steps: 4}"],
        None,
        {},
        "set its keys one by one, such as training.max_steps",
    ),
    (
        [],
        "training: {max_stepz: 3}",
        {},
        "run.yaml: line 1: 'training.max_stepz' is not a key of the configuration; do you mean",
    ),
    ([], "learning_rate: 3", {}, "do you mean 'optimization.learning_rate'?"),
    ([], "optimisation: {learning_rate: 3}", {}, "configuration; do you mean 'optimization'?"),
    (
        [],
        "model: {rope_scaling: {rope_type: linear, factr: 2}}",
        {},
        "'model.rope_scaling.factr' is not a key",
    ),
    ([], "resume: true", {}, "'resume' is not a key"),
    ([], "{1: 2}", {}, "'1' is not a key"),
    (
        [],
        "training.max_steps: 5\ntraining: {max_steps: 6}",
        {},
        "'training.max_steps' must be nested",
    ),
    (
        [],
        None,
        {"TRAINING__MAX_STEPZ": "3"},
        "environment variable LLM_COURSE_TRAINING__MAX_STEPZ: 'training.max_s",
    ),
    ([], None, {"MAX_STEPS": "3"}, "do you mean 'training.max_steps'?"),
    ([], None, {"TRAINING": "{max_steps: 3}"}, "'training' is a section; set its keys one by one"),
    (
        [],
        None,
        {"MODEL__ROPE_SCALING__FACTOR": "3"},
        "'model.rope_scaling' is one value here; set it as a whole",
    ),
    ([], None, {"PRINT_CONFIG": "1"}, "'print_config' is not a key"),
    # doubled keys
    (
        [],
        "training: {max_steps: 1}\ndata: {}\ntraining: {batch_size: 2}",
        {},
        "run.yaml: the key 'training' is set in line 1 and again in line 3: keep one of them",
    ),
    (
        [],
        "training:\n  seed: 1\n  max_steps: 1\n  seed: 1\n",
        {},
        "the key 'seed' is set in line 2 and again in line 4: keep one",
    ),
    (
        [],
        "model: {rope_scaling: {factor: 1,\n factor: 2}}",
        {},
        "the key 'factor' is set in line 1 and again in line 2",
    ),
    (
        [],
        "training:\n  <<: {seed: 1}\n  <<: {seed: 2}\n",
        {},
        "the key '<<' is set in line 2 and again in line 3: keep one",
    ),
    # wrong types
    (
        ["--training.max_steps", "many"],
        None,
        {},
        "training.max_steps=many must be a whole number or null",
    ),
    (
        ["--training.max_steps", "1e3"],
        None,
        {},
        "training.max_steps=1e3 must be a whole number or null",
    ),
    (
        [],
        "training: {max_steps: true}",
        {},
        "line 1: training.max_steps=true must be a whole number or null",
    ),
    ([], "training: {batch_size: 2.5}", {}, "training.batch_size=2.5 must be a whole number"),
    ([], "training: {batch_size: null}", {}, "training.batch_size=null must be a whole number"),
    (
        [],
        "training: {max_steps: {a: 1}}",
        {},
        "training.max_steps={'a': 1} must be a whole number or null",
    ),
    (
        [],
        "optimization: {learning_rate: fast}",
        {},
        "optimization.learning_rate=fast must be a number",
    ),
    (
        [],
        "optimization: {schedule: cosin}",
        {},
        "optimization.schedule=cosin must be cosine or linear or wsd or constant",
    ),
    (
        [],
        "data: {corpus: no}",
        {},
        "run.yaml: line 1: data.corpus=no must be a string: in quotes it is a string, without them"
        " YAML reads False",
    ),
    ([], "run_dir: 1.10", {}, "run_dir=1.10 must be a string: in quotes it is a string"),
    ([], "data: {files: [1, a]}", {}, "data.files=[1, 'a'] must be a list of strings or a string"),
    ([], "logging: {sample_prompt: null}", {}, "logging.sample_prompt=null must be a string"),
    ([], None, {"TRAINING__COMPILE": "perhaps"}, "training.compile=perhaps must be true or false"),
    (
        [],
        "training: {max_steps: 010}",
        {},
        "line 1: training.max_steps: 010 is 8 in YAML; write 8 if you mean that, or quotes for",
    ),
    ([], "training:\n  max_steps: 1:30", {}, "line 2: training.max_steps: 1:30 is 90 in YAML"),
    ([], "optimization:\n  learning_rate: 1:30.5", {}, "learning_rate: 1:30.5 is 90.5 in YAML"),
    # ... whichever way they come
    ([], "training: {max_steps: '010'}", {}, "run.yaml: line 1: training.max_steps: 010 is 8"),
    ([], "training: {max_steps: '1:30'}", {}, "run.yaml: line 1: training.max_steps: 1:30 is 90"),
    (["--training.max_steps=010"], None, {}, "command line: training.max_steps: 010 is 8 in YAML"),
    (
        ["--training.max_steps", "1:30"],
        None,
        {},
        "command line: training.max_steps: 1:30 is 90 in YAML",
    ),
    (
        [],
        None,
        {"OPTIMIZATION__LEARNING_RATE": "1:30.5"},
        "OPTIMIZATION__LEARNING_RATE: optimization.learning_rate: 1:30.5",
    ),
    (
        ["--model.rope_scaling.factor=010"],
        None,
        {},
        "command line: model.rope_scaling.factor: 010 is 8",
    ),
    (
        ["--model.rope_scaling={rope_type: linear, factor: 1:30}"],
        None,
        {},
        "model.rope_scaling: 1:30 is 90 in YAML",
    ),
    # doubled and unknown keys in a value with keys of its own
    (
        ["--model.rope_scaling", "{rope_type: linear, factor: 2, factor: 8}"],
        None,
        {},
        "command line: model.rope_scaling: the key 'factor' is set in line 1 and again in line 1",
    ),
    (
        [],
        None,
        {"MODEL__ROPE_SCALING": "{rope_type: linear, factor: 2, factor: 8}"},
        "model.rope_scaling: the key 'factor'",
    ),
    (
        [],
        None,
        {"MODEL__ROPE_SCALING": "{rope_type: linear, factr: 2}"},
        "'model.rope_scaling.factr' is not a key",
    ),
    ([], "model: {hidden_size: null}", {}, "model.hidden_size=null must be a whole number"),
    (
        [],
        "model: {layer_types: [full]}",
        {},
        "model.layer_types=['full'] must be a list of sliding",
    ),
    ([], "model: {rope_scaling: {rope_type: linear}}", {}, "model.rope_scaling.factor is missing"),
    (
        [],
        "model: {rope_scaling: {rope_type: cubic, factor: 2}}",
        {},
        "rope_scaling.rope_type=cubic must be linear or dynamic or llama3",
    ),
    (
        [],
        "model: {rope_scaling: {rope_type: linear, factor: null}}",
        {},
        "line 1: model.rope_scaling.factor=null must be a number",
    ),
    ([], None, {"MODEL__ROPE_SCALING": "{factor: 8}"}, "model.rope_scaling.rope_type is missing"),
    # impossible values and combinations, with the path also where the model's own check speaks
    ([], "model: {num_heads: 3}", {}, "model.hidden_size=256 must be a multiple of num_heads=3"),
    (
        [],
        "model: {rope_scaling: {rope_type: linear, factor: 0.5}}",
        {},
        "model.rope_scaling.factor=0.5 must be finite and at least 1",
    ),
    (
        [],
        "optimization: {learning_rate: .nan}",
        {},
        "optimization.learning_rate=.nan must be positive and finite",
    ),
    (
        ["--data.sequence_length", "300"],
        None,
        {},
        "data.sequence_length=300 does not fit model.max_position_embeddings=256",
    ),
    # too large, too deep
    (
        [],
        f"training:\n  batch_size: 1{'0' * 400}",
        {},
        "run.yaml: line 2: training.batch_size: int too large",
    ),
    (
        [f"--optimization.learning_rate=1{'0' * 400}"],
        None,
        {},
        "command line: optimization.learning_rate: int too large",
    ),
    ([], "[" * 3000, {}, "run.yaml is nested too deeply"),
    (
        [f"--model.rope_scaling={'[' * 3000}"],
        None,
        {},
        "command line: model.rope_scaling is nested too deeply",
    ),
    # what a callback cannot be given
    (
        ["--callbacks=[{class: a:B, n: {m: 1}}]"],
        None,
        {},
        "command line: callbacks=[{class: a:B, n: {m: 1}}] must be a list of",
    ),
    (
        [],
        "callbacks: [{class: a:B, n: [[1]]}]",
        {},
        "callbacks=[{'class': 'a:B', 'n': [[1]]}] must",
    ),
    # files that are none
    ([], "training:", {}, "run.yaml: line 1: training=null must hold keys and values of its own"),
    ([], "- 1", {}, "it must hold keys and values"),
    ([], "training: [", {}, "run.yaml: line 1: while parsing a flow node, expected"),
    ([], "a: 1\n---\nb: 2", {}, "expected a single document"),
    ([], "? [a, b]\n: 1", {}, "run.yaml: "),
    (
        [],
        "run_dir: !!python/object/apply:os.system ['touch owned']",
        {},
        "could not determine a constructor",
    ),
    (["--config", "missing.yaml"], None, {}, "--config missing.yaml: there is no such file"),
    (["--config", "."], None, {}, "--config .: there is no such file"),
    (["--config"], None, {}, "command line: --config needs a value"),
    (["--training.max_steps"], None, {}, "command line: --training.max_steps needs a value"),
    (["--run-dir", "--task=lm"], None, {}, "--run_dir needs a value; one that begins with --"),
    (
        ["--progress"],
        None,
        {},
        "'progress' is not a key of the configuration; do you mean 'logging",
    ),
    (["training.max_steps=5"], None, {}, "command line: 'training.max_steps=5' is not an option"),
    (["-x"], None, {}, "command line: '-x' is not an option: write --key value"),
    (["--training.max_steps=-5"], None, {}, "training.max_steps=-5 must be positive and finite"),
    (
        [],
        None,
        {"TRAINING__SEED": "-1"},
        "environment variable LLM_COURSE_TRAINING__SEED: training",
    ),
]


@pytest.mark.parametrize(
    "words, file, environment, message", REFUSED, ids=[case[3][:50] for case in REFUSED]
)
def test_refused_with_these_words(words, file, environment, message):
    said = outcome(words, file, **environment)
    assert isinstance(said, str), said
    assert message in said and "\n" not in said
    assert {path.name for path in Path().iterdir()} <= {"run.yaml"}  # nothing was started


def test_a_variable_in_small_letters_is_refused():
    if sys.platform != "win32":
        assert outcome(**{"training__max_steps": "3"}).endswith("its name must be in capitals")
    assert outcome(XYLOPHONE="x").endswith("shows all of them") and isinstance(outcome(), Config)


@pytest.mark.parametrize(
    "file", ["", " \n", "# training: {max_steps: 5}\n", "---\n", "null", "~", "{}"]
)
def test_a_file_that_sets_nothing_is_taken(file):
    assert outcome([], file) == Config()
    Path("more.yaml").write_text("training: {max_steps: 5}")
    assert outcome(["--config=more.yaml"], file).training.max_steps == 5


def test_files_in_odd_encodings():
    Path("latin.yaml").write_bytes(b"run_dir: caf\xe9")
    assert "latin.yaml: 'utf-8' codec can't decode" in outcome(["--config", "latin.yaml"])
    Path("weird [1] name.yaml").write_text(
        "run_dir: café\nlogging: {sample_prompt: '深'}", encoding="utf-8"
    )
    config = outcome(["--config", "weird [1] name.yaml"])
    assert (config.run_dir, config.logging.sample_prompt) == ("café", "深")


@pytest.mark.parametrize(
    "key, text, value",
    [
        ("optimization.learning_rate", "5e-4", 5e-4),
        ("optimization.learning_rate", "1", 1.0),
        ("training.max_steps", "1_000", 1000),
        ("training.max_steps", "'10'", 10),
        ("data.corpus", "'010'", "010"),
        ("training.compile", "yes", True),
        ("data.files", "a.txt", ["a.txt"]),
        ("data.files", "[a.txt, 'no']", ["a.txt", "no"]),
        ("data.corpus", "'no'", "no"),
        ("checkpoint.best_metric", "null", None),
        ("model.layer_types", "null", None),
    ],
)
def test_what_a_file_gives(key, text, value):
    section, name = key.split(".")
    got = getattr(getattr(outcome([], f"{section}: {{{name}: {text}}}"), section), name)
    assert got == value and type(got) is type(value)


def test_words_and_variables_are_texts_where_texts_are_asked():
    for text in ("no", "1.10", "null", "010", "12:30", "{a: b}", "[x", "it's: 深"):
        assert outcome(["--logging.sample_prompt", text]).logging.sample_prompt == text
    assert outcome(LOGGING__SAMPLE_PROMPT="no").logging.sample_prompt == "no"


def test_nested_values_from_every_source():
    file = "model: {rope_scaling: {rope_type: linear, factor: 2.0}}"
    two = RopeScaling(rope_type="linear", factor=2.0)
    assert outcome([], file).model.rope_scaling == two
    assert (
        outcome(["--model.rope_scaling", "{rope_type: linear, factor: 2}"]).model.rope_scaling
        == two
    )
    assert (
        outcome([], MODEL__ROPE_SCALING="{rope_type: linear, factor: 2}").model.rope_scaling == two
    )
    assert outcome(["--model.rope_scaling.factor=8"], file).model.rope_scaling.factor == 8
    assert outcome(["--model.rope_scaling", "null"], file).model.rope_scaling is None


def test_a_nested_value_is_replaced_by_a_variable_and_merged_by_the_others():
    yarn = "{rope_type: yarn, factor: 2.0, original_max_position_embeddings: 128}"
    yarn = f"model: {{rope_scaling: {yarn}}}"
    linear = "{rope_type: linear, factor: 4}"
    Path("later.yaml").write_text(f"model: {{rope_scaling: {linear}}}")
    Path("none.yaml").write_text("model: {rope_scaling: null}")
    clash = "original_max_position_embeddings=128 means nothing to rope_type='linear'"
    assert outcome([], yarn, MODEL__ROPE_SCALING=linear).model.rope_scaling == RopeScaling(
        rope_type="linear", factor=4.0
    )
    assert clash in outcome([f"--model.rope_scaling={linear}"], yarn) and clash in outcome(
        ["--config=later.yaml"], yarn
    )
    both = outcome(["--config=none.yaml", "--config=later.yaml"], yarn)
    assert both.model.rope_scaling == RopeScaling(rope_type="linear", factor=4.0)
    assert (
        outcome(["--model.rope_scaling={factor: 8}"], yarn).model.rope_scaling.rope_type == "yarn"
    )


def test_strict_loader_gives_what_pyyaml_gives():
    text = "b: &b {x: 1, y: [0, -0, +5, 0x1F, 1_000, '010', 0.5, 2001-01-01]}\n"
    text += "m: {<<: *b, x: 2}\nn: {<<: [*b, {z: 1}]}\n? null\n: 1"
    assert sources.StrictLoader(text).get_single_data() == yaml.safe_load(text)
    assert yaml.safe_load("{a: 1, a: 010}") == {"a": 8}  # what the plain one takes silently


def test_nearest_name_finds_every_slip_of_one_letter():
    """Drop, double or swap a letter of a key's last word: the key is named, alone or beside those
    with the same last word.
    """
    for key in sorted(set(sources.KEY_TYPES) - sources.SECTIONS):
        section, _, leaf = key.rpartition(".")
        if len(leaf) < 5:
            continue
        for slip in (
            leaf[:2] + leaf[3:],
            leaf[:3] + leaf[2:],
            leaf[:1] + leaf[2] + leaf[1] + leaf[3:],
        ):
            for name in (f"{section}.{slip}".lstrip("."), slip):
                if name not in sources.KEY_TYPES and slip != leaf:
                    assert f"'{key}'" in sources._nearest(name), (name, sources._nearest(name))
    assert sources._nearest("vocab_siz").endswith(
        "do you mean 'model.vocab_size' or 'data.vocab_size'?"
    )
    assert sources._nearest("roe_type").endswith("do you mean 'model.rope_scaling.rope_type'?")


# ---------------------------------------------------------------- round trip


def values_of(kind, name):
    """Values of an annotation; what is refused for its range is left out by the caller."""
    odd = ["no", "1e3", "-1.5e3", "._5", "-._5e+3", "._"]
    odd += [
        "010",
        "[a]",
        "{b",
        "a: b",
        "- x",
        "",
        " ",
        "null ",
        "2024-01-01",
        "é\n\t\x85\u2028\ufeff",
    ]
    text = st.sampled_from(odd) | st.text()
    number = st.floats(min_value=1e-300, max_value=0.999, exclude_max=True)
    table = {
        int: st.integers(1, 2**40),
        float: number,
        bool: st.booleans(),
        int | None: st.none() | st.integers(1, 2**40),
        str: text.filter(lambda value: name != "run_dir" or value),
        str | None: st.none() | text,
        list[str] | str: st.lists(text, max_size=3),
        int | Literal["epoch"]: st.sampled_from([7, "epoch"]),
        float | None: st.none() | st.floats(0.01, 0.99),
        SyntheticConfig: st.builds(SyntheticConfig, num_examples=st.integers(16, 99)),
        StoriesConfig: st.builds(StoriesConfig, num_bytes=st.integers(1, 9999)),
    }
    if name == "master_port":
        return st.none() | st.integers(1, 65535)
    if name == "clean":
        return st.lists(st.sampled_from(list(config_module.CLEANING_STEPS)), max_size=3)
    return table[kind] if kind in table else st.sampled_from(kind.__args__)


@st.composite
def configurations(draw):
    def part(kind, keep=()):
        chosen = [
            field
            for field in dataclasses.fields(kind)
            if field.name not in keep and draw(st.booleans())
        ]
        return {field.name: draw(values_of(field.type, field.name)) for field in chosen}

    training = part(TrainingConfig)
    for name in draw(st.permutations(["max_steps", "max_epochs", "max_tokens"]))[1:]:
        training.pop(name, None)
    distributed = part(DistributedConfig, keep=("strategy", "cpu_offload", "model_parallel_size"))
    yarn = RopeScaling(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=64,
        attention_factor=0.1 + 0.2,
    )
    shapes = [
        ModelConfig(),
        ModelConfig(rope_scaling=yarn),
        ModelConfig(use_moe=True, num_experts=3, top_k=1),
        ModelConfig(dropout=1e-5, layer_types=["full_attention"] * 4, sliding_window=7),
    ]
    return dict(
        run_dir=draw(values_of(str, "run_dir")),
        task=draw(values_of(str, "task")),
        init_from=draw(st.sampled_from([None, "runs/a", "1e3", "no", "~x"])),
        callbacks=draw(
            st.sampled_from(
                [
                    [],
                    ["a:B", "1e3"],
                    [{"class": "a:B", "n": [1, "1e3", 0.5], "x": "null", "y": "no", "z": None}],
                ]
            )
        ),
        model=draw(st.sampled_from(shapes)),
        data=part(DataConfig, keep=("sequence_length",)),
        training=training,
        optimization=part(OptimizationConfig, keep=("router_bias_rate",)),
        distributed=distributed,
        checkpoint=part(CheckpointConfig),
        logging=part(LoggingConfig),
    )


TEXTS = (
    "1e3 -1.5e3 ._5 +._5 -._5e+3 ._ _ _1 -_1 1_ .5 . .. .e1 .inf -.INF .nan inf nan 0x1F 0b1 0o7"
    " 1:30 1:30.5 =".split()
)


@pytest.mark.parametrize(
    "text",
    [
        *TEXTS,
        ".gitignore",
        "y",
        "no",
        "~x",
        "<<",
        "2024-01-01",
        "-",
        "- x",
        "#",
        "a #b",
        "'",
        '"',
        "!",
        "&a",
    ],
)
def test_every_text_comes_back_as_it_was(text):
    config = Config(
        run_dir=text,
        task=text,
        data=DataConfig(files=[text], corpus=text),
        logging=LoggingConfig(sample_prompt=text),
    )
    save_config(config, "config.yaml")
    assert read_config("config.yaml") == config


@given(parts=configurations())
@settings(FAST, max_examples=20)
def test_round_trip(parts):
    try:
        config = Config(
            **{
                name: SECTIONS[name](**value) if name in SECTIONS else value
                for name, value in parts.items()
            }
        )
    except ValueError as error:
        assert "nccl" in str(error) or "means null in YAML" in str(error)
        return
    save_config(config, "config.yaml")
    assert read_config("config.yaml") == config
    assert [path.name for path in Path().iterdir() if path.suffix == ".tmp"] == []


LEAVES = st.sampled_from(sorted({key.rpartition(".")[2] for key in sources.KEY_TYPES}))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats()
    | st.sampled_from(["", "no", "linear", "auto", "a.txt"])
)
TREES = st.recursive(
    SCALARS,
    lambda part: st.lists(part, max_size=2) | st.dictionaries(LEAVES, part, max_size=3),
    max_leaves=6,
)


@given(tree=TREES, key=st.sampled_from(sorted(sources.KEY_TYPES)))
@settings(FAST, max_examples=30)
def test_any_file_gives_a_configuration_or_a_refusal(tree, key):
    for name in reversed(key.split(".")):
        tree = {name: tree}
    said = outcome([], yaml.safe_dump(tree))  # another kind of error would go through
    assert isinstance(said, Config) or said


def test_a_failed_save_leaves_the_old_file(monkeypatch):
    save_config(Config(run_dir="old"), "config.yaml")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)  # the text is written by then
    with pytest.raises(OSError, match="No space left on device: 'config.yaml'"):
        save_config(Config(run_dir="new"), "config.yaml")
    assert read_config("config.yaml").run_dir == "old" and os.listdir() == ["config.yaml"]


def test_a_save_forces_the_file_to_the_disk_before_it_has_its_name(monkeypatch):
    forced = []
    monkeypatch.setattr(
        os, "fsync", lambda _: forced.append([path.stat().st_size for path in Path().iterdir()])
    )
    save_config(Config(), "config.yaml")
    assert forced == [[Path("config.yaml").stat().st_size]] and os.listdir() == ["config.yaml"]


def test_a_save_touches_no_other_file():
    for name in ("config.tmp", ".tmp", "config.yaml.tmp"):
        Path(name).write_text("mine")
    save_config(Config(), "config.yaml")
    assert {Path(name).read_text() for name in ("config.tmp", ".tmp", "config.yaml.tmp")} == {
        "mine"
    }
    Path("folder.yaml").mkdir()
    for path in ("folder.yaml", "no/such.yaml"):
        with pytest.raises(OSError) as error:
            save_config(Config(), path)
        assert error.value.filename == path
    assert len(os.listdir()) == 5


def test_a_save_refuses_what_could_not_be_read_again():
    config = Config()
    config.training.max_epochs = 3
    with pytest.raises(
        ValueError, match="training.max_steps=1000 and training.max_epochs=3: a run has one length"
    ):
        save_config(config, "config.yaml")
    assert os.listdir() == []


def test_threads_read_their_own_files():
    for i in range(4):
        save_config(Config(run_dir=f"runs/{i}"), f"{i}.yaml")
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda k: read_config(f"{k % 4}.yaml").run_dir, range(48)))
    assert read == [f"runs/{k % 4}" for k in range(48)]


def test_a_path_may_begin_with_a_dash():
    save_config(Config(run_dir="-run"), "-run.yaml")
    assert read_config("-run.yaml").run_dir == "-run"
