"""`isopref push`, through huggingface_hub's own client, to a stand-in for the hub on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hub import Hub, running_hub
from support.runs import make_run, noisy_metrics

WEIGHTS = b"weights" * 1000


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as one:
        yield one


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "run", noisy_metrics(3))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "model" / "README.md").write_text("a template of another library")
    return folder


def push(hub: Hub, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads the hub's address when it is imported."""
    ours = {"HF_ENDPOINT": hub.address, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", **env}
    command = [sys.executable, "-m", "isopref", "push", *arguments]
    return subprocess.run(command, env={**os.environ, **ours}, capture_output=True, text=True, timeout=120, check=False)


def test_a_model_and_its_card_are_one_commit(hub: Hub, run: Path) -> None:
    done = push(hub, str(run), "me/mine", "--license", "mit", "--private")
    assert done.returncode == 0, done.stderr
    assert f"Uploaded to {hub.address}/me/mine" in done.stdout
    assert hub.repos["me/mine"] == {"private": True, "commits": ["Upload run, made with isopref"]}
    assert hub.files["me/mine"] == {
        "config.json": b"{}",
        "model.safetensors": WEIGHTS,
        "README.md": (run / "card.md").read_bytes(),
    }
    assert b"license: mit" in hub.files["me/mine"]["README.md"]


def test_an_edited_card_is_used_as_it_is(hub: Hub, run: Path) -> None:
    first = push(hub, str(run), "me/mine", "--dry-run")
    assert hub.repos == {}
    assert "Nothing was sent." in first.stdout
    assert "note: the card states no license." in first.stdout
    assert "names another repository" not in first.stdout
    card = run / "card.md"
    assert f"note: {card} names another repository than me/new." in push(hub, str(run), "me/new", "--dry-run").stdout
    card.write_text(card.read_text().replace("# license: fill in", "license: mit #"))
    assert "no license" not in push(hub, str(run), "me/mine").stdout
    assert hub.files["me/mine"]["README.md"] == card.read_bytes()
    again = push(hub, str(run), "me/mine", "--license", "apache-2.0")
    assert again.returncode == 1
    assert again.stderr == f"error: --license: {card} already exists. Edit its license there, or remove it.\n"


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_what_cannot_be_pushed(hub: Hub, run: Path) -> None:
    assert "Write OWNER/NAME." in refusal(push(hub, str(run), "me/mine/other"))
    assert not (run / "card.md").exists()
    assert "HF_HUB_OFFLINE is set" in refusal(push(hub, str(run), "me/mine", HF_HUB_OFFLINE="1"))
    assert "cannot be reached" in refusal(push(hub, str(run), "me/mine", HF_ENDPOINT="http://127.0.0.1:9"))
    hub.bad_card = '"license" must be one of'
    assert '"license" must be one of' in refusal(push(hub, str(run), "me/mine"))
    hub.refuses = 403
    message = refusal(push(hub, str(run), "me/mine"))
    assert "(403: you may not write here). Log in with an account that may write there: hf auth login" in message


def test_a_run_without_a_model(hub: Hub, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", noisy_metrics(3))
    assert "no exported model; the run is finished." in refusal(push(hub, str(run), "me/mine"))
    assert not (run / "card.md").exists()
    assert hub.repos == {}
