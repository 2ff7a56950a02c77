"""Pair tables of a run."""

from pathlib import Path
from typing import Any

import numpy as np

from isopref.build.run import Run
from isopref.data.chat import TokenizeOptions
from isopref.data.pairs import build_table
from isopref.data.sources import SourceSpec
from isopref.data.table import PairTable
from isopref.errors import ConfigError, DataError
from isopref.places import cache_folder
from isopref.types import IntArray


def pair_table(run: Run, tokenizer: Any, path: str) -> PairTable:
    """The pairs of a source, tokenised now or earlier; says what was found."""
    data = run.config.data
    options = TokenizeOptions(
        template=data.template,
        max_length=data.max_length,
        truncation=data.truncation,
        on_bad=data.on_bad,
    )
    done = 0
    with run.display.bar(f"tokenise {Path(path).name}", None) as advance:

        def progress(count: int, _total: int | None) -> None:
            nonlocal done
            advance(count - done, "")
            done = count

        folder = cache_folder() / "tables"
        try:
            table = build_table(
                [SourceSpec(path, data.columns)], tokenizer, folder=folder, options=options, progress=progress
            )
        except PermissionError as error:
            raise ConfigError(
                f"{folder}: cannot be written ({error}). Set ISOPREF_CACHE to a folder of yours."
            ) from error
    stats = table.stats
    dropped = "".join(f", {count} dropped ({reason})" for reason, count in stats.dropped.items())
    found = ", ".join(f"{source.format}, {source.shape}" for source in stats.sources)
    run.display.say(f"data  {path}: {len(table)} pairs ({found}){dropped}")
    unused = sorted({column for source in stats.sources for column in source.unused_columns})
    notes = {
        f"{stats.truncated} cut to data.max_length": stats.truncated,
        f"{stats.boundary_backoffs} whose prompt ends inside a token of the answer": stats.boundary_backoffs,
        f"{stats.double_bos} that begin with two BOS tokens": stats.double_bos,
        f"{stats.missing_eos} without an end token from the template": stats.missing_eos,
        f"columns not used: {', '.join(unused)}": unused,
    }
    for note in (note for note, told in notes.items() if told):
        run.display.say(f"      {note}")
    if len(table) == 0:
        raise DataError(f"{path}: no pair is left to use{dropped}. Change data.max_length or data.on_bad.")
    return table


def sample_prompts(run: Run, table: PairTable | None) -> list[IntArray]:
    """A few different held-out prompts, the same ones for the same data."""
    if table is None or not run.config.run.export:
        return []
    _, first_of_prompt = np.unique(table.prompt_ids, return_index=True)
    return [table.tokens(int(row)).prompt for row in first_of_prompt[: run.config.run.samples]]
