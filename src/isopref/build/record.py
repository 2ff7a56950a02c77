"""What a run records about itself for later: every start, and its state."""

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from olmo_core.train import Trainer

import isopref
from isopref.build.run import Run
from isopref.config.schema import run_id
from isopref.data.table import ExampleTable
from isopref.runs.state import Outcome, State, held_state
from isopref.runs.write import add_start


@contextmanager
def recorded(run: Run, trainer: Trainer, table: ExampleTable, reference_key: str | None) -> Iterator[None]:
    """Record the start of training in the run folder and then, until the block ends, its outcome."""
    if not run.env.is_first:
        yield
        return
    began = time.perf_counter()
    _note_start(run, trainer, table, reference_key)
    with held_state(run.folder) as write:

        def note(outcome: Outcome, error: str = "") -> None:
            write(State(outcome, trainer.global_step, trainer.max_steps or 0, time.perf_counter() - began, error))

        note("running")
        try:
            yield
        except BaseException as error:
            note("failed", " ".join(str(error).split())[:500] or type(error).__name__)
            raise
        note("finished" if trainer.global_step == trainer.max_steps else "stopped")


def _in_memory(run: Run) -> dict[str, Any]:
    """A description of in-memory data; empty for other data."""
    held = [{"field": one.label, "digest": one.digest, "records": one.count} for one in run.memory.values()]
    return {"in_memory": held} if held else {}


def _note_start(run: Run, trainer: Trainer, table: ExampleTable, reference_key: str | None) -> None:
    device = run.env.device
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "run_id": run_id(run.config),
        "data": table.digest,
        "pairs": len(table),
        "unit": table.unit,
        **_in_memory(run),
        "reference": reference_key,
        "after_step": trainer.global_step,
        "ranks": run.env.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
        "microbatch_tokens": trainer.data_loader.budget.tokens,  # type: ignore[attr-defined]  # what fits, once known
        "host": platform.node(),
        "isopref": isopref.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "olmo_core": version("ai2-olmo-core"),
    }
    add_start(run.folder, line)
