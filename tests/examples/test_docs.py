"""What the pages for readers point at is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_first_page_leads_to_all_others():
    links = set(re.findall(r"\]\((docs/[^)#]+)", PAGES[0].read_text(encoding="utf-8")))
    assert links == {f"docs/{page.name}" for page in PAGES[1:]}
