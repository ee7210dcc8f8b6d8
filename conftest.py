"""Let nbval read the notebooks as nbdev stores and runs them, begin with what takes longest, and
look for garbage only in what the tests make.
"""

import configparser
import gc
import re
from pathlib import Path

import pytest

_settings = configparser.ConfigParser()
_settings.read(Path(__file__).with_name("settings.ini"), encoding="utf-8")
# nbdev does not run cells that begin with `#| eval: false` or with one of these flags, as in `#|
# slow`.
_skipped = re.compile(
    rf"^#\|\s*(eval:\s*false|{'|'.join(_settings['DEFAULT']['tst_flags'].split())})\s*$",
    re.M | re.I,
)


def pytest_itemcollected(item):
    cell = getattr(item, "cell", None)  # only nbval's items have one
    if cell is None:
        return
    # nbdev_clean takes the count out; nbval reads None as "never executed"
    if cell.execution_count is None:
        cell.execution_count = 0
    if _skipped.search(cell.source):
        item.options["skip"] = True


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collecting makes millions of objects, none of them garbage: looking through them all, again
    and again, would take half of its time, and copy them in each process that a test forks.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    """A test that takes minutes begins first: at the end the other workers would wait for it."""
    items.sort(key=lambda item: item.get_closest_marker("wheel") is None)
