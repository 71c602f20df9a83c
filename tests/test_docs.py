# The examples in docs/ print what they say, and every file that the pages link is there.
from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def test_the_teaching_example_prints_every_number_of_both_losses() -> None:
    results = doctest.testfile(str(DOCS / "corrections.md"), module_relative=False)
    assert results.failed == 0
    assert results.attempted == 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_links_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
