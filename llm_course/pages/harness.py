"""What the page on lm-evaluation-harness needs of it: its own numbers, and a stand-in for it."""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from llm_course.training.evaluation_tasks import Item, MultipleChoice
from llm_course.training.scoring import Scorer


def is_installed() -> bool:
    """Whether this Python has the harness."""
    return find_spec("lm_eval") is not None


@contextmanager
def base_class() -> Iterator[None]:
    """Where the harness is missing, an empty class in place of its `LM`."""
    if is_installed():
        yield
        return
    api = ModuleType("lm_eval.api.model")
    api.LM = object  # type: ignore[attr-defined]
    names = {"lm_eval": ModuleType("lm_eval"), "lm_eval.api": ModuleType("lm_eval.api")}
    with patch.dict(sys.modules, names | {"lm_eval.api.model": api}):
        yield


def ask(method: Any, *arguments: Any) -> Any:
    """Call a method of a model as the harness does: a list of requests, each with its `args`."""
    [answer] = method([SimpleNamespace(args=arguments)])
    return answer


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and messages."""
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def their_marks(model: Any, task: MultipleChoice) -> dict[str, float]:
    """What the harness makes of a multiple-choice task: its `acc` and its `acc_norm`."""
    import lm_eval
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

    rows = [
        {"context": item.context, "choices": list(item.choices), "answer": item.answer}
        for item in task.items
    ]

    mean = {"aggregation": "mean", "higher_is_better": True}

    class Stories(ConfigurableTask):
        VERSION = 1

        def __init__(self, config: Any = None):
            super().__init__(
                config={
                    "task": "stories",
                    "output_type": "multiple_choice",
                    "test_split": "test",
                    "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
                    "doc_to_text": "{{context}}",
                    "doc_to_choice": "{{choices}}",
                    "doc_to_target": "answer",
                    "target_delimiter": "",
                    "metric_list": [{"metric": "acc"} | mean, {"metric": "acc_norm"} | mean],
                }
            )

    with _quiet():
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=[Stories()],
            task_manager=TaskManager(include_defaults=False),  # it knows thousands, and reads them
            bootstrap_iters=0,
            log_samples=False,
        )
    return {name: found["results"]["stories"][f"{name},none"] for name in ("acc", "acc_norm")}


def their_cut(scorer: Scorer, context: str, continuation: str) -> list[int]:
    """The tokens that the harness scores of a continuation."""
    from lm_eval.api.model import TemplateLM

    model = SimpleNamespace(backend="causal", tok_encode=scorer.encode)
    return TemplateLM._encode_pair(model, context, continuation)[1]


def with_the_space_moved(task: MultipleChoice) -> MultipleChoice:
    """The same questions; the space that begins each choice ends the context instead."""

    def moved(item: Item) -> Item:
        assert all(choice.startswith(" ") for choice in item.choices)
        choices = tuple(choice[1:] for choice in item.choices)
        return item._replace(context=item.context + " ", choices=choices)

    return MultipleChoice(task.name, [moved(item) for item in task.items], task.metrics)
