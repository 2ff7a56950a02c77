"""`isopref score`: rewards or log-probabilities of the answers in a file, as JSON lines in its order.

The examples are tokenised into a table on disk and scored chunk by chunk, so memory does not grow with the file. Scores
go to a temporary file next to the output until they are complete: a killed command resumes after its last complete
chunk, and since chunk boundaries never change, the result is that of an uninterrupted command.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from isopref.build.data import held_out_table
from isopref.build.hardware import check_hardware, say_attention
from isopref.build.model import answer_progress, load_policy, settle_padding, spread
from isopref.build.reference import policy_identity
from isopref.build.run import Run, check_score_budget, opened_run, quiet_libraries, with_longest
from isopref.config.load import load_config
from isopref.config.schema import Config
from isopref.data.table import ExampleTable
from isopref.errors import ConfigError, RunError
from isopref.models import hf
from isopref.models.reward import RewardModel, is_reward_model
from isopref.places import write_whole
from isopref.reference.store import key_of
from isopref.score import score_table
from isopref.types import FloatArray

CHUNK = 1024  # examples
SECTIONS = ("model", "data", "layout", "run")  # sections that overrides may set
ARGUMENTS = {  # fields that the command line sets already
    "model.path": "loads --model",
    "data.train": "reads FILE",
    "data.eval": "reads FILE",
}


def score_file(file: str, model: str, out: Path, overrides: Sequence[str] = (), *, is_kept: bool = True) -> None:
    """Score every answer of a file with a reward model, or with a language model, and write `out`.

    `is_kept`: name `out` at the end; a caller may remove it.
    Raises UserError.
    """
    config = _config(file, model, overrides)
    with opened_run(config, "score") as run:
        quiet_libraries()
        check_hardware(run)
        say_attention(run)
        if run.env.is_first:
            _check_out(out)
        tokenizer = hf.load_tokenizer(model, trust_remote_code=config.model.trust_remote_code, setting="--model")
        table = held_out_table(config, tokenizer, run.display, is_first=run.env.is_first)
        run = with_longest(run, [table])
        check_score_budget(run, table)
        policy = load_policy(run, model, setting="--model")
        if isinstance(policy, RewardModel):
            settle_padding(run, policy, tokenizer)
        hf.check_fits(policy.model, tokenizer, table.lengths, table.origin, sharing=run.config.layout.context_parallel)
        made_of = {"examples": table.digest, "model": key_of(policy_identity(run, policy)), "chunk": CHUNK}
        part = Unfinished(out, made_of)
        start = _agreed(part.resume() if run.env.is_first else 0)
        if start:
            run.display.say(f"resume after {start} of {len(table)} {table.unit}s")
        scored = spread(run, policy, trained=False).eval()
        what = "rewards" if isinstance(policy, RewardModel) else "logps"
        for first, answers in _chunks(run, scored, table, start):
            if run.env.is_first:
                part.append(_lines(table, first, answers, what))
        if run.env.is_first:
            part.finish()
        if is_kept:
            run.display.say(
                f"wrote {out}: the {policy.scores} of {len(table.lengths.answer)} answers.{table.stats.dropped_note}"
            )


def _config(file: str, model: str, overrides: Sequence[str]) -> Config:
    """The settings of a run that only scores. Raises ConfigError."""
    for one in overrides:
        if one.split(".")[0] not in SECTIONS:
            raise ConfigError(f"{one}: isopref score takes settings of {', '.join(SECTIONS)}. Remove it.")
        field = ".".join(one.partition("=")[0].split(".")[:2])
        if field in ARGUMENTS:
            raise ConfigError(f"{field}: isopref score {ARGUMENTS[field]}. Remove it.")

    def with_loss(loss: str) -> Config:
        sections: Mapping[str, Any] = {
            "model": {"path": model},
            "data": {"train": file, "eval": file},  # the held-out data is what is scored
            "objective": {"loss": loss},  # a loss without a reference
        }
        return load_config(sections, overrides)

    plain = with_loss("simpo")
    trust = plain.model.trust_remote_code
    is_reward = is_reward_model(model, trust_remote_code=trust, setting="--model")
    return with_loss("bradley_terry") if is_reward else plain


def _agreed(start: int) -> int:
    """The first rank's value."""
    said = [start]
    if dist.is_initialized():
        dist.broadcast_object_list(said)
    return said[0]


def _chunks(run: Run, model: Any, table: ExampleTable, start: int) -> Iterator[tuple[int, FloatArray]]:
    """The index of the first example of each chunk, beginning at `start`, and the scores of the chunk's answers."""
    lengths = table.lengths
    left = int(lengths.num_answers[start:].sum())
    with answer_progress(run, "score", left) as progress:
        for first in range(start, len(table), CHUNK):
            some = table.select(np.arange(first, min(first + CHUNK, len(table))))
            found = score_table(model, some, run.score_budget, device=run.env.device, progress=progress)
            yield first, found.answers


def _lines(table: ExampleTable, first: int, answers: FloatArray, what: str) -> str:
    """The scored examples as JSON lines; `first` is the index of the first one."""
    lengths, lines, done = table.lengths, [], 0
    index = first
    while done < len(answers):
        count, begin = int(lengths.num_answers[index]), int(lengths.first_answer[index])
        content = {
            "index": index,
            "origin": table.origin(index),
            what: answers[done : done + count].tolist(),
            "tokens": lengths.answer[begin : begin + count].tolist(),
        }
        lines.append(json.dumps(content) + "\n")
        done, index = done + count, index + 1
    return "".join(lines)


@dataclass(frozen=True)
class Unfinished:
    """The scores so far, next to the output, with a record of what they were computed from."""

    out: Path
    made_of: Mapping[str, Any]

    @property
    def lines(self) -> Path:
        return self.out.with_name(f".{self.out.name}.partial")

    @property
    def about(self) -> Path:
        return self.out.with_name(f".{self.out.name}.partial.json")

    def resume(self) -> int:
        """Keep the complete chunks of an earlier command. Returns how many examples they hold.

        Raises RunError if they come from another model or other examples.
        """
        if not self.about.exists() or not self.lines.exists():
            write_whole(self.about, json.dumps(self.made_of).encode())
            self.lines.write_bytes(b"")
            return 0
        if json.loads(self.about.read_bytes()) != self.made_of:
            raise RunError(
                f"{self.lines} was left by a command that was stopped, with another model or other data. Run that "
                "command again to finish it, choose another --out, or remove the file."
            )
        done = size = seen = 0
        with self.lines.open("rb") as file:
            for number, line in enumerate(file, start=1):
                seen += len(line)
                if line.endswith(b"\n") and number % CHUNK == 0:
                    done, size = number, seen
        os.truncate(self.lines, size)  # the rest belongs to a chunk that was being written
        return done

    def append(self, lines: str) -> None:
        with self.lines.open("ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        self.lines.replace(self.out)
        self.about.unlink(missing_ok=True)


def _check_out(out: Path) -> None:
    """Raise ConfigError early if the result cannot be written."""
    if out.exists():
        raise ConfigError(
            f"--out: {out} already exists and will not be overwritten. Choose another name, or remove the file."
        )
    if not os.access(out.absolute().parent, os.W_OK):
        raise ConfigError(
            f"--out: the folder {out.absolute().parent} does not exist or is not writable. Create it, or choose "
            "another --out."
        )
