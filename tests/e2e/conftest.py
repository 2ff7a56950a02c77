"""Projects to run the command line in, and commands that run as processes of their own (see support/project.py)."""

import json
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from isopref.testing.models import tiny_folder
from support.project import SCRIPT, Command, MakeProject, Project, Weights


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, by architecture: GPT-2 in float64, others in float32."""
    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            dtype = torch.float64 if architecture == "gpt2" else torch.float32
            made[architecture] = tiny_folder(tmp_path_factory.mktemp(architecture), architecture, dtype=dtype)
        return made[architecture]

    return folder


@pytest.fixture(scope="session")
def make_project(tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]) -> MakeProject:
    """Makes a project with a model of some architecture, and with some settings other than SETTINGS."""

    def make(architecture: str = "gpt2", **settings: Mapping[str, Any]) -> Project:
        return Project(tmp_path_factory.mktemp("project"), models(architecture), settings)

    return make


@pytest.fixture
def project(tmp_path: Path, models: Callable[[str], Path]) -> Project:
    """GPT-2 in float64."""
    return Project(tmp_path, models("gpt2"))


@pytest.fixture(scope="session")
def load_weights() -> Callable[[Path], Weights]:
    """The parameters of a model's folder, loaded as a user would."""

    def load(folder: Path) -> Weights:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    return load


@pytest.fixture(scope="session")
def read_metrics() -> Callable[[Path], list[dict[str, float]]]:
    """The lines of a run's metrics.jsonl."""

    def read(run: Path) -> list[dict[str, float]]:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    return read


@pytest.fixture
def start() -> Iterator[Callable[..., Command]]:
    """Starts `isopref COMMAND my.yaml --nproc 2 ...` in a project; what is left of it at the end is killed.

    `launcher`, such as torchrun and its options, starts the processes instead.
    """
    started: list[Command] = []

    def begin(
        project: Project, *arguments: str, command: str = "train", launcher: Sequence[str] | None = None
    ) -> Command:
        mark = f"isopref-test-{uuid.uuid4().hex}"
        process = subprocess.Popen(
            [*(launcher or [str(SCRIPT)]), command, "my.yaml", *(() if launcher else ("--nproc", "2")), *arguments],
            cwd=project.folder,
            env={**project.env, "ISOPREF_TEST_MARK": mark, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Command(process, mark))
        return started[-1]

    yield begin
    for command in started:
        command.kill()
        command.process.communicate()
