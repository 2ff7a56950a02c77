"""`isopref sample --url` against a server that is not ours: `transformers serve` with a tiny model, on loopback.

Its packages are those of transformers' extra `serving`. Without them, or without what they import, the test is skipped.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from support.project import Project

START_S = 120


@pytest.fixture(scope="module")
def serving() -> None:
    """Skip without the server's packages. They are imported, because openai is of no use without its HTTP client."""
    for package in ("fastapi", "uvicorn", "openai"):
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            pytest.skip(f"transformers serve needs {package} ({error}): pip install 'transformers[serving]'")


@pytest.fixture
def url(serving: None, project: Project) -> Iterator[str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(project.model), "--device", "cpu"]
    log = (project.folder / "server.log").open("w")
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], env=project.env, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        give_up = time.monotonic() + START_S
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, (project.folder / "server.log").read_text()
            assert time.monotonic() < give_up, (project.folder / "server.log").read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.close()


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (URLError, OSError):
        return False


def test_greedy_answers_are_those_of_the_model_in_process(project: Project, url: str) -> None:
    project.write_pairs("prompts.jsonl", [{"prompt": "why?"}, {"prompt": "how, and when?"}])
    settings = ("--prompts", "prompts.jsonl", "--answers", "2", "--max-tokens", "8", "--temperature", "0")
    own = project.isopref("sample", "my.yaml", *settings, "--out", "own.jsonl")
    assert own.code == 0, own.err
    served = project.isopref(
        "sample", "my.yaml", *settings, "--out", "served.jsonl", "--url", url, "--model", str(project.model)
    )
    assert served.code == 0, served.err + (project.folder / "server.log").read_text()
    mine, theirs = (
        [json.loads(line) for line in (project.folder / name).read_text().splitlines()]
        for name in ("own.jsonl", "served.jsonl")
    )
    assert [one["prompt"] for one in mine] == [one["prompt"] for one in theirs]
    assert [one["responses"] for one in mine] == [one["responses"] for one in theirs]
    drawn = ("--prompts", "prompts.jsonl", "--answers", "3", "--max-tokens", "8", "--url", url, "--parallel", "1")
    outcomes = []
    for out in ("a.jsonl", "b.jsonl"):
        outcome = project.isopref("sample", "my.yaml", *drawn, "--out", out, "--model", str(project.model))
        assert outcome.code == 0, outcome.err
        outcomes.append((project.folder / out).read_text())
    assert outcomes[0] == outcomes[1]  # the server honours seeds
