"""The notebooks in examples/, executed with a tiny model."""

from pathlib import Path

import pytest

from isopref.script import untouched_process
from support.notebook import code_cells, run_notebook
from support.project import Project

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_stored_without_output(path: Path) -> None:
    assert [cell["outputs"] for cell in code_cells(path)] == [[]] * len(code_cells(path))


def test_a_first_run(project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(project.folder)
    for name, value in project.env.items():
        monkeypatch.setenv(name, value)
    with untouched_process():
        names = run_notebook(EXAMPLES / "first_run.ipynb", {"MODEL": str(project.model), "STEPS": 3, "FOLDER": "run"})
    run, printed = names["run"], capsys.readouterr().out
    assert run.status == "finished"
    assert run.last_step == 3
    assert (project.folder / "run" / "report.html").exists()
    assert printed.count("before:") == len(run.samples) > 0
    assert names["largest"] < 1e-4
    assert "largest difference between the losses of 3 steps" in printed
