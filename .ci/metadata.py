"""Hatchling's hook for what a package index shows: README and the links of the project.

README's links only work inside the repository. `make dist URL=https://...` passes the repository's address as
ISOPREF_URL: then README's links become absolute, and the package links to the repository, the docs, the changelog and
the issues. Without an address, README stays as it is.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

README = Path(__file__).resolve().parents[1] / "README.md"
LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")
IMAGES = (".png", ".svg")
PAGES = {"Documentation": "tree/main/docs", "Changelog": "blob/main/CHANGELOG.md", "Issues": "issues"}


class Links(MetadataHookInterface):
    """Sets `readme` and `urls`, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        url = os.environ.get("ISOPREF_URL", "").rstrip("/")
        text = README.read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, url) if url else text}
        metadata["urls"] = {"Repository": url, **{name: f"{url}/{page}" for name, page in PAGES.items()}} if url else {}


def absolute(text: str, url: str) -> str:
    """A page with its links to files of the repository at that address: images as files, the rest as pages."""

    def replaced(link: re.Match[str]) -> str:
        return f"]({url}/{'raw' if link[1].endswith(IMAGES) else 'blob'}/main/{link[1]})"

    return LINK.sub(replaced, text)
