"""What is generated is what the code says now."""

from pathlib import Path

from isopref.config import objectives_page, starter
from isopref.testing import matrix

ROOT = Path(__file__).parents[2]


def test_config_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == starter.PAGE + starter.reference(), "run: make docs"


def test_objectives_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "objectives.md").read_text() == objectives_page.page(), "run: make docs"


def test_demo_config_is_the_shipped_one() -> None:
    packaged = Path(starter.__file__).with_name("demo.yaml").read_text()
    assert (ROOT / "examples" / "demo" / "demo.yaml").read_text() == packaged


def test_exactness_page_has_every_group() -> None:
    lines = [line.split("|") for line in (ROOT / "docs" / "exactness.md").read_text().splitlines()]
    rows = [[cell.strip() for cell in line[1:-1]] for line in lines if len(line) == 11]
    page = {tuple(row[:5]) for row in rows[2:]}
    groups: dict[tuple[str, ...], int] = {}
    for ranks in matrix.SPREADS:
        for cell in matrix.cells(ranks):
            key = (matrix.precision(cell), cell.architecture, str(ranks), cell.parallel)
            groups[key] = groups.get(key, 0) + 1
    assert page == {(*key, str(count)) for key, count in groups.items()}, "run: make exactness"
    assert all(float(row[5]) <= float(row[8]) for row in rows[2:])
