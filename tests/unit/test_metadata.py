"""What a package index shows of the project, with and without the repository's address. `make dist` builds it."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from support.ci_script import ROOT, ci_script

README = (ROOT / "README.md").read_text()
HOOK = mock.Mock(MetadataHookInterface=object)  # hatchling is installed only where packages are built


@pytest.fixture(scope="module")
def metadata() -> ModuleType:
    with mock.patch.dict(sys.modules, {"hatchling.metadata.plugin.interface": HOOK}):
        return ci_script("metadata")


def test_links_lead_to_files_of_the_repository(metadata: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setenv("ISOPREF_URL", "https://example.org/me/isopref/")
    metadata.Links().update(found)
    links = re.findall(r"\]\(([^)#]+)", found["readme"]["text"])
    assert len(links) == len(re.findall(r"\]\(([^)#]+)", README))
    for link in (*links, found["urls"]["Changelog"], found["urls"]["Documentation"]):
        match = re.fullmatch(r"https://example\.org/me/isopref/(blob|raw|tree)/main/(.+)", link)
        assert match, link
        assert (ROOT / match[2]).exists(), link
        assert (match[1] == "raw") == (Path(match[2]).suffix in (".png", ".svg")), link
    assert found["urls"]["Repository"] == "https://example.org/me/isopref"


def test_without_an_address_nothing_is_made_up(metadata: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    monkeypatch.delenv("ISOPREF_URL", raising=False)
    metadata.Links().update(found)
    assert found == {"readme": {"content-type": "text/markdown", "text": README}, "urls": {}}
