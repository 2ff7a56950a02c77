"""A folder with a tiny model, a few pairs and a config, and the command line to run in it.

The command runs in the test's own process, because importing the engine takes seconds; what it leaves behind there
(environment, log handlers, random state) is put back. A test whose subject is the process starts one itself.
"""

import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from torch import Tensor

from isopref import __version__
from isopref.cli.main import main
from isopref.script import untouched_process

Record = dict[str, Any]
Weights = dict[str, Tensor]
MakeProject = Callable[..., "Project"]

SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"dtype": "float64"},  # GPT-2 keeps it throughout
    "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
    "optim": {"lr": 1e-3, "batch_size": 5, "epochs": 2},  # five steps an epoch, the last one of three pairs
    "run": {"device": "cpu", "samples": 0},
}
NUM_TRAIN, NUM_EVAL = 23, 8
SCRIPT = Path(sys.executable).with_name("isopref")
TIMEOUT_S = 150
OPENING = f"isopref {__version__}: loading PyTorch and transformers\n"


def make_pairs(count: int, seed: int) -> list[Record]:
    """Pairs that differ in length and weight; what is chosen starts with yes, what is rejected with no."""
    rng = random.Random(seed)

    def word(longest: int) -> str:
        return "".join(rng.choices("abcdefgh", k=rng.randint(2, longest)))

    return [
        {
            "prompt": f"{word(8)}?",
            "chosen": f"yes {word(12)}",
            "rejected": f"no {word(6)}",
            "weight": rng.choice([0.5, 1.0, 2.0]),
        }
        for _ in range(count)
    ]


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str


class Project:
    """A user's folder. Every command runs there, with a cache of its own."""

    def __init__(self, folder: Path, model: Path, settings: Mapping[str, Mapping[str, Any]] | None = None):
        self.folder, self.model = folder, model
        self.extra_env: dict[str, str] = {}
        self.write_pairs("train.jsonl", make_pairs(NUM_TRAIN, seed=0))
        self.write_pairs("eval.jsonl", make_pairs(NUM_EVAL, seed=1))
        sections = {name: {**SETTINGS.get(name, {}), **(settings or {}).get(name, {})} for name in SETTINGS}
        sections["model"]["path"] = str(model)
        (folder / "my.yaml").write_text(yaml.safe_dump(sections))

    @property
    def env(self) -> dict[str, str]:
        """The environment of a command: no ranks, no terminal, one thread, the cache in the folder."""
        left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FORCE_COLOR", "NO_COLOR", "COLUMNS")
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        ours = {"ISOPREF_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return {**kept, **ours, **self.extra_env}

    def write_pairs(self, name: str, pairs: Sequence[Record]) -> None:
        (self.folder / name).write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    def isopref(self, *arguments: str) -> Outcome:
        """Run a command in this process. A fault of ours, which would print a traceback, is raised.

        Without the line that a command opens with, which is the same for all of them.
        """
        out, err = io.StringIO(), io.StringIO()
        code = 0
        with (
            untouched_process(),
            mock.patch.dict(os.environ, self.env, clear=True),
            mock.patch.object(sys, "argv", ["isopref", *arguments]),
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Outcome(code, out.getvalue().removeprefix(OPENING), err.getvalue())

    def train(self, run: str, *arguments: str) -> Path:
        """Train with `run` as the run's folder, which is returned."""
        outcome = self.isopref("train", "my.yaml", f"run.folder={run}", *arguments)
        assert outcome.code == 0, outcome.err
        return self.folder / run

    def refused(self, run: str, *arguments: str) -> str:
        """Train, which must end with exit code 1 and one message; returns the message."""
        outcome = self.isopref("train", "my.yaml", f"run.folder={run}", *arguments)
        assert outcome.code == 1, outcome
        match = re.fullmatch(r"error: (.+)\n", outcome.err)
        assert match, outcome.err
        return match[1]


@dataclass
class Command:
    """A started command, and every process that it started."""

    process: subprocess.Popen[str]
    mark: str

    def family(self) -> dict[int, dict[str, str]]:
        """The living processes of the command by their ids, with their environments."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                text = (folder / "environ").read_text(errors="replace")
                alive = " Z " not in (folder / "stat").read_text()
            except OSError:  # ended meanwhile, or not ours to read
                continue
            if alive and self.mark in text:
                found[int(folder.name)] = dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
        return found

    def rank(self, number: int) -> int:
        """The process id of a rank."""
        (found,) = (pid for pid, env in self.family().items() if env.get("RANK") == str(number))
        return found

    def wait_for(self, path: Path) -> None:
        """Wait until the command has made a file."""
        give_up = time.monotonic() + TIMEOUT_S
        while not path.exists():
            assert self.process.poll() is None, self.end()
            assert time.monotonic() < give_up, f"no {path}"
            time.sleep(0.02)

    def kill(self) -> None:
        """End every process of the command at once, without a warning."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> tuple[int, str, str]:
        """Wait for the end of the command: its exit code, output and errors."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out, err
