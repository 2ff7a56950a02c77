"""Build the docs as a website that loads nothing from elsewhere: python .ci/docs_site.py OUT. Needs mkdocs-material.

The pages are written for GitHub, where they link to each other and to files across the repository. `stage` copies them
into one folder and rewrites the links; mkdocs builds the site, and a broken link is an error.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FETCHED = re.compile(
    r"""(?:src|srcset)=["']?https?:|<link[^>]+href=["']?https?:(?![^>]*rel=canonical)|url\(["']?https?:|@import"""
)
NAV = """
  - Start:
      - Overview: index.md
      - Getting started: getting-started.md
      - Data: data.md
      - Conversations: conversations.md
      - Config: config.md
      - Examples: examples/index.md
  - Understand:
      - Concepts: concepts.md
      - Objectives: objectives.md
      - Reward models: rewards.md
      - Rounds: rounds.md
      - Exactness: exactness.md
      - Models: models.md
      - Benchmarks: benchmarks/RESULTS.md
  - Operate:
      - Reports: reports.md
      - Troubleshooting: troubleshooting.md
      - Limits: limits.md
      - Several nodes: multi-node.md
      - Scaling: scaling.md
  - Extend:
      - Python API: api.md
      - OLMo-core: olmo-core.md
      - Coming from other trainers: coming-from.md
      - Decisions: decisions.md
      - Contributing: CONTRIBUTING.md
      - Changelog: CHANGELOG.md
"""
CONFIG = """\
site_name: isopref
site_description: Preference tuning of language models whose result does not depend on the layout of the batch.
docs_dir: {pages}
site_dir: {out}
use_directory_urls: false
strict: true
theme:
  name: material
  font: false  # use the reader's fonts instead of fetching some
  features: [navigation.tabs, navigation.indexes, toc.follow, content.code.copy]
  palette:
    - media: "(prefers-color-scheme: light)"
      scheme: default
      toggle: {{icon: material/weather-night, name: Dark}}
    - media: "(prefers-color-scheme: dark)"
      scheme: slate
      toggle: {{icon: material/weather-sunny, name: Light}}
plugins: [search]
markdown_extensions: [tables, toc: {{permalink: true}}, pymdownx.superfences, pymdownx.highlight]
validation: {{links: {{not_found: warn, anchors: warn, absolute_links: warn, unrecognized_links: warn}}}}
nav:{nav}"""


def places() -> dict[Path, str]:
    """The place on the site of each file of the repository that it shows."""
    found = {ROOT / "README.md": "index.md"}
    found |= {path: path.name for path in (ROOT / "docs").iterdir() if path.is_file()}
    found |= {ROOT / name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")}
    shown = [*(ROOT / "benchmarks").glob("*"), *(ROOT / "examples").rglob("*")]
    found |= {path: str(path.relative_to(ROOT)) for path in shown if path.is_file() and "__pycache__" not in path.parts}
    return {**found, ROOT / "examples": "examples/index.md"}


def stage(pages: Path) -> list[str]:
    """Copy every file to its place below `pages`, with rewritten links. Returns links that lead to no file."""
    where, lost = places(), []
    for source, place in list(where.items()):
        target = pages / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            target.write_text(_listing(source), encoding="utf-8")
        elif source.suffix == ".md":
            text, missing = _relinked(source, place, where)
            lost += missing
            target.write_text(text, encoding="utf-8")
    for source, place in where.items():  # now with the files that pages link to, which `_relinked` added
        if source.is_file() and source.suffix != ".md":
            (pages / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, pages / place)
    return lost


def _relinked(page: Path, place: str, where: dict[Path, str]) -> tuple[str, list[str]]:
    lost = []

    def changed(link: re.Match[str]) -> str:
        before, target, anchor, after = link[1], link[2], link[3] or "", link[4]
        if re.match(r"[a-z]+:", target):
            return link[0]
        file = Path(os.path.normpath(page.parent / target))
        if file.is_file() and file.suffix != ".md":
            where.setdefault(file, str(file.relative_to(ROOT)))
        if file not in where:
            lost.append(f"{page.relative_to(ROOT)}: {target}")
            return link[0]
        return f"{before}{os.path.relpath(where[file], Path(place).parent)}{anchor}{after}"

    return LINK.sub(changed, page.read_text(encoding="utf-8")), lost


def _listing(folder: Path) -> str:
    files = sorted(path.relative_to(folder) for path in places() if path.is_file() and folder in path.parents)
    return "# Examples\n\n" + "\n".join(f"- [{file}]({file})" for file in files) + "\n"


def fetched(site: Path) -> list[str]:
    """Everything that pages of a built site would load from elsewhere."""
    found = []
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css"):
            found += [f"{path.name}: {match}" for match in FETCHED.findall(path.read_text(encoding="utf-8"))]
    return found


def main(out: Path) -> None:
    """Stage and build. Exits with a message if a link is broken or a page loads something from elsewhere."""
    work = out.parent / f"{out.name}-pages"
    shutil.rmtree(work, ignore_errors=True)
    lost = stage(work / "docs")
    if lost:
        sys.exit("broken links (they lead to no file of the site):\n" + "\n".join(lost))
    config = work / "mkdocs.yml"
    config.write_text(CONFIG.format(pages=(work / "docs").resolve(), out=out.resolve(), nav=NAV), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(config)], check=True)
    elsewhere = fetched(out)
    if elsewhere:
        sys.exit("pages that load something from elsewhere:\n" + "\n".join(elsewhere))
    print(f"Wrote {out / 'index.html'}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
