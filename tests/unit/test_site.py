"""The website of the docs: what can be checked without mkdocs. `make site` builds it."""

import re
from pathlib import Path
from types import ModuleType

import pytest

import isopref
from isopref.testing import api_page
from support.ci_script import ci_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    return ci_script("docs_site")


def test_api_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == api_page.page(), "run: make docs"


def test_api_page_has_every_public_name() -> None:
    listed = {name.partition(":")[2] for _, names in api_page.SECTIONS.values() for name in names}
    assert set(isopref.__all__) <= listed


def test_every_link_of_the_site_leads_to_a_file_of_it(site: ModuleType, tmp_path: Path) -> None:
    assert site.stage(tmp_path) == []
    for page in tmp_path.rglob("*.md"):
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", page.read_text()):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).is_file(), (page, target)


def test_every_page_is_in_the_navigation(site: ModuleType) -> None:
    listed = set(re.findall(r": (\S+\.md)$", site.NAV, flags=re.MULTILINE))
    pages = {place for place in site.places().values() if place.endswith(".md") and not place.startswith("benchmarks/")}
    assert pages - {"examples/demo/README.md"} <= listed
    assert listed <= set(site.places().values())


def test_what_a_page_would_fetch_is_found(site: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<a href="https://elsewhere">a link</a><img src="here.png">')
    assert site.fetched(tmp_path) == []
    (tmp_path / "bad.html").write_text('<script src="https://elsewhere/a.js"></script>')
    (tmp_path / "bad.css").write_text("@font-face { src: url(https://elsewhere/font) }")
    assert len(site.fetched(tmp_path)) == 2
