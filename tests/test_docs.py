"""The pages: every relative link and anchor leads somewhere, and pages for users have short paragraphs and lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import names
from harness.sources import modules

pytestmark = pytest.mark.no_mpi

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
READABLE = ["training", "strategies", "communicator", "decomposition", "neural-network", "collectives", "compare", "launching",
            "models", "data", "overlap", "gossip"]
"""Pages whose paragraphs have at most WORDS words each."""

WORDS = 90


def lines_of_text(page: Path) -> Iterator[str]:
    """The lines of a page outside its code blocks."""
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield line


def links(page: Path) -> list[str]:
    """The relative links of a page."""
    text = re.sub(r"`[^`]*`", "", "\n".join(lines_of_text(page)))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    for line in lines_of_text(page):
        if heading := re.match(r"#+ +(.*)", line):
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
    return {slug if not n else f"{slug}-{n}" for slug, count in found.items() for n in range(count + 1)}


def paragraphs(page: Path) -> Iterator[str]:
    """Running text and items of lists, each as one string; no tables, headings or code."""
    paragraph: list[str] = []
    for line in [*lines_of_text(page), ""]:
        if paragraph and (not line.strip() or re.match(r"(- |\d+\. |#|\|)", line)):
            yield " ".join(paragraph)
            paragraph = []
        if line.strip() and not line.startswith(("#", "|")):
            paragraph.append(line.strip())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}: no such file"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}: no such heading"


@pytest.mark.parametrize("name", READABLE)
def test_paragraphs_are_short(name):
    for paragraph in paragraphs(ROOT / "docs" / f"{name}.md"):
        count = len(paragraph.split())
        assert count <= WORDS, f"{name}.md: {count} words, expected {WORDS} or fewer: {paragraph[:70]}..."


def test_headings_in_docstrings_have_a_line_of_their_own():
    for module, path in modules().items():
        joined = re.search(r"^ *[A-Z][A-Za-z ]+ -{4,}.*", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not joined, f"{module}: {joined and joined[0]}"


def test_the_page_of_names_is_that_of_the_registries():
    assert names.PAGE.read_text() == names.page(), "cd tests && python -m harness.names"
