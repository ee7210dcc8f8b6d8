"""The site holds all pages and modules, and each of its links leads to a place on it."""

import os
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "_docs" / "html"
needs_site = pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="no site: `make docs`")


class Page(HTMLParser):
    """The links of a page, and the names that a link may lead to."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.undescribed = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.links += [attributes[key] or "" for key in ("href", "src") if key in attributes]
        self.names |= {attributes[key] or "" for key in ("id", "name") if key in attributes}
        self.undescribed += tag == "img" and not attributes.get("alt")


def pages() -> list[Path]:
    return sorted(path for path in SITE.rglob("*.html") if "_static" not in path.parts)


@cache
def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@cache
def find(path: str) -> Path | None:
    """The file that a link without its name leads to; most pages have the same ones."""
    found = Path(path, "index.html") if os.path.isdir(path) else Path(path)
    return found if found.is_file() else None


def dead_links(path: Path) -> list[str]:
    """The links of a page to files or names that aren't there; those to elsewhere are not tried."""
    dead = []
    for link in set(read(path).links):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = path
        if parts.path:
            target = find(os.path.normpath(path.parent / unquote(parts.path)))
        name = unquote(parts.fragment)
        if target is None or (name and target.suffix == ".html" and name not in read(target).names):
            dead.append(link)
    return sorted(dead)


@needs_site
def test_each_link_leads_somewhere():
    dead = {str(page.relative_to(SITE)): dead_links(page) for page in pages()}
    assert {page: links for page, links in dead.items() if links} == {}
    assert sum(len(read(page).links) for page in pages()) > 10_000


@needs_site
def test_all_pages_are_there_with_their_pictures_described():
    pages = sorted((ROOT / "nbs").glob("*.ipynb"))
    built = [SITE / "nbs" / f"{page.stem}.html" for page in pages]
    assert [page.name for page in built if not page.is_file()] == []
    assert {page.name: read(page).undescribed for page in built if read(page).undescribed} == {}


@needs_site
def test_no_mark_for_a_tool_is_shown():
    """Neither nbdev's directives nor nbval's, and no solution of an exercise."""
    for page in sorted(SITE.glob("nbs/*.html")):
        text = re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))
        assert not re.search(r"(?m)^\s*(#\| |# NBVAL_)", text), page
        assert "### BEGIN SOLUTION" not in text, page


def test_each_module_has_its_place_in_the_reference():
    reference = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs/api").glob("*.md"))
    shown = re.findall(r"automodule:: (\S+)", reference)
    hidden = {"__init__.py", "_modidx.py"}
    paths = [p for p in (ROOT / "llm_course").rglob("*.py") if p.name not in hidden]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    assert sorted(shown) == sorted(modules)


def test_planted_links(tmp_path):
    (tmp_path / "there.html").write_text('<h1 id="part">x</h1>')
    page = tmp_path / "page.html"
    page.write_text(
        '<a href="there.html#part"></a><a href="there.html#gone"></a><img src="gone.png">'
        '<a href="https://example.org/gone"></a><a href="#top"></a>'
    )
    assert dead_links(page) == ["#top", "gone.png", "there.html#gone"]
    assert read(page).undescribed == 1
