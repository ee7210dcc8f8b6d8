"""The messages that TROUBLESHOOTING.md explains are the ones that the code raises."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
OURS = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
HOLE = "\0"  # what an f-string fills in


@cache
def texts_in_the_code() -> list[str]:
    """Every text of the package and the scripts, with a hole for each value."""
    texts = []
    for folder in ("llm_course", "scripts"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else HOLE for p in node.values]
                    texts.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return texts


def is_raised(message: str) -> bool:
    """Whether one text of the code has all the words of the message, in order."""
    pattern = "(.|\n)*".join(map(re.escape, filter(None, map(str.strip, message.split("...")))))
    return any(re.search(pattern, text) for text in texts_in_the_code())


@pytest.mark.parametrize("message", OURS)
def test_the_message_is_one_of_the_code(message):
    assert is_raised(message)


def test_there_are_enough_and_a_message_of_nobody_is_found_out():
    assert len(OURS) >= 20 and len(set(OURS)) == len(OURS)
    assert not is_raised("the run cannot be resumed, its moon differs")
    assert PAGE.count("\n**") >= 8  # questions


def test_the_keys_that_it_names_exist():
    from llm_course.training.sources import load_config

    keys = set(re.findall(r"--((?:data|training|model|optimization|checkpoint)\.\w+)", PAGE))
    for key in sorted(keys - {"model.from"}):
        value = {"checkpoint.allow_changes": "true", "training.compile": "true"}.get(key, "256")
        value = "true" if key == "training.activation_checkpointing" else value
        load_config([f"--{key}={value}"], use_environment=False)
