"""The tables of a run: built, mixed, and split into training and held-out examples."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from isopref.build.run import Run
from isopref.config.schema import Config
from isopref.config.values import SourceConfig, Sources
from isopref.data.chat import TokenizeOptions
from isopref.data.memory import MemoryData
from isopref.data.mixing import mix, split_by_prompt, without
from isopref.data.pairs import all_cores, build_table
from isopref.data.shapes import SHAPES
from isopref.data.sources import SourceSpec
from isopref.data.table import ExampleTable
from isopref.data.table_stats import SourceStats
from isopref.engine.display import Advance, Display
from isopref.errors import ConfigError, DataError
from isopref.models import hf
from isopref.places import table_folder
from isopref.types import IntArray

# The held-out set is the same for every optim.seed: runs with different seeds are comparable, and none trains on what
# another was evaluated on.
SPLIT_SEED = 0
# Only the first rank shows a progress bar, so it should be the one that tokenises; the others start this much later.
HEAD_START_S = 2.0
SAMPLES = 3
MANY_DROPPED = 0.2  # dropped share of a source's records that triggers a warning
SHARE_OFF = 0.2  # relative deviation from data.eval that triggers a warning

NO_MEMORY: Mapping[str, MemoryData] = MappingProxyType({})

log = logging.getLogger(__name__)


def read_tokenizer(config: Config, display: Display) -> Any:
    """The tokenizer of the starting model. Raises ModelError."""
    model = config.model
    if hf.is_slow_to_read(model.path):
        display.say(f"converting the tokenizer of {model.path}; later commands find it in the cache")
    return hf.load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)


@dataclass(frozen=True)
class SourceUse:
    """One source: the field that names it, what was found in it, and where its pairs go."""

    field: str  # data.train or data.eval
    path: str
    found: SourceStats
    prompt_from: str  # where the prompt comes from
    mixed: int  # pairs in the mix
    train: int  # of those: trained on
    held_out: int  # of those: evaluated on


@dataclass(frozen=True)
class Tables:
    """What a run trains on and what it holds out. No prompt and no pair is in both."""

    train: ExampleTable
    held_out: ExampleTable | None
    sources: list[SourceUse]
    warnings: list[str]  # what a user would want to know before training

    @property
    def all(self) -> list[ExampleTable]:
        return [self.train] if self.held_out is None else [self.train, self.held_out]

    @property
    def num_left_out(self) -> int:
        """Pairs of data.train that are in neither table, because data.eval has their prompt."""
        return sum(source.mixed - source.train - source.held_out for source in self.sources)


def pair_tables(
    config: Config,
    tokenizer: Any,
    display: Display,
    *,
    is_first: bool = True,
    memory: Mapping[str, MemoryData] = NO_MEMORY,
) -> Tables:
    """The pairs of data.train and data.eval: tokenised or loaded from the cache, mixed and split. Raises DataError.

    `memory` is data passed by a script, keyed by its name in the config.
    """
    data = config.data
    mixed = _mixed_table(config, data.train, tokenizer, display, is_first, seed=config.optim.seed, memory=memory)
    if data.eval_share is not None:
        train, held_out = (mixed.select(side) for side in split_by_prompt(mixed, data.eval_share, SPLIT_SEED))
        return _tables(config, train, held_out, _uses("data.train", mixed, train, held_out))
    if data.eval_sources is None:
        return _tables(config, mixed, None, _uses("data.train", mixed, mixed, None))
    held_out = _mixed_table(config, data.eval_sources, tokenizer, display, is_first, seed=SPLIT_SEED, memory=memory)
    train = mixed.select(without(mixed, held_out))
    if len(train) == 0:
        raise DataError(
            f"data.eval: contains the prompts of all {len(mixed)} pairs of data.train, so none is left to train on. "
            "Use other held-out pairs, or hold out a share of the prompts: data.eval: "
            f"0.05.{mixed.stats.dropped_note}"
        )
    uses = _uses("data.train", mixed, train, None) + _uses("data.eval", held_out, None, held_out)
    return _tables(config, train, held_out, uses)


def held_out_table(config: Config, tokenizer: Any, display: Display, *, is_first: bool = True) -> ExampleTable:
    """The held-out pairs alone; data.train is read only if they are a share of it. Raises ConfigError for none."""
    if (sources := config.data.eval_sources) is not None:
        return _mixed_table(config, sources, tokenizer, display, is_first, seed=SPLIT_SEED)
    if config.data.eval_share is None:
        raise ConfigError(
            "data.eval is null: there are no held-out pairs. Set it to a file, or to a share such as 0.05."
        )
    held_out = pair_tables(config, tokenizer, display, is_first=is_first).held_out
    assert held_out is not None
    return held_out


def say_tables(tables: Tables, display: Display) -> None:
    """What was found in the sources, and where it went."""
    for source in tables.sources:
        found = source.found
        dropped = "".join(f", {count} dropped ({reason})" for reason, count in found.dropped.items())
        mixed = f", {source.mixed} in the mix" if source.mixed < found.kept else ""
        kept = f"{found.kept} {'prompts with ' if found.grouped else ''}{found.holds}"
        display.say(f"data  {source.path}: {kept} ({found.format}, {found.shape}){dropped}{mixed}")
        for note in source_notes(found):
            display.say(f"      {note}")
    if tables.num_left_out:
        display.say(f"data  {left_out_note(tables.num_left_out, tables.train.unit)}")
    if tables.held_out is not None and any(
        source.field == "data.train" and source.held_out for source in tables.sources
    ):
        display.say(
            f"data  {len(tables.train)} {tables.train.unit}s to train on, {len(tables.held_out)} held out (data.eval)"
        )
    say_warnings(tables, display)


def say_warnings(tables: Tables, display: Display) -> None:
    for warning in tables.warnings:
        display.say(f"warning: {warning}")


def left_out_note(count: int, unit: str) -> str:
    """The message about examples of data.train that are not trained on; `unit` is what one is called."""
    examples = f"1 {unit} of data.train is" if count == 1 else f"{count} {unit}s of data.train are"
    return f"{examples} excluded from training, because data.eval has the same prompt"


def sample_prompts(run: Run, table: ExampleTable | None) -> list[IntArray]:
    """The first few different held-out prompts, in the order of the data."""
    if table is None or not run.config.run.export or run.loss.readout == "reward":  # a reward model writes no text
        return []
    _, first_of_prompt = np.unique(table.question_ids, return_index=True)
    asked = run.config.run.samples
    rows = np.sort(first_of_prompt)[: SAMPLES if asked is None else asked]
    return [table.example(int(row)).prompt for row in rows]


def _tables(config: Config, train: ExampleTable, held_out: ExampleTable | None, sources: list[SourceUse]) -> Tables:
    warnings = [
        f"{source.path}: {text}"
        for source in sources
        for text in source_warnings(source.found, cut=config.data.truncation != "drop")
    ]
    if len(train) < (batch := config.optim.batch_size):
        warnings.append(
            f"optim.batch_size: {batch} exceeds the number of {train.unit}s to train on, {len(train)}: an epoch is one "
            "step"
        )
    if config.data.group_by_prompt and not any(source.found.grouped for source in sources):
        warnings.append("data.group_by_prompt: no two records of a source have the same prompt, so it has no effect")
    if not any(source.found.holds == "lists" for source in sources):
        if config.data.compare != "all":
            warnings.append("data.compare: there are no lists of answers, so it has no effect")
        if config.data.min_gap and all(np.isnan(table.gaps).all() for table in (train, held_out) if table is not None):
            warnings.append("data.min_gap: the data has no scores, so it has no effect")
    if config.data.eval_share is not None and held_out is not None:
        warnings += _share_warning(config.data.eval_share, len(held_out), len(train) + len(held_out), train.unit)
    return Tables(train, held_out, sources, warnings)


def _share_warning(asked: float, held_out: int, examples: int, unit: str) -> list[str]:
    """A warning if the held-out share of examples is far from the requested one."""
    found = held_out / examples
    if abs(found - asked) <= SHARE_OFF * asked:
        return []
    return [
        f"data.eval: {asked} holds out {held_out} of {examples} {unit}s ({found:.0%}): a hash of each prompt decides, "
        "so with few prompts the share can be far off. Use more data, or a file of held-out data (data.eval: FILE)"
    ]


def _uses(
    field: str, mixed: ExampleTable, train: ExampleTable | None, held_out: ExampleTable | None
) -> list[SourceUse]:
    counts = (_pairs_of_source(mixed, table) for table in (mixed, train, held_out))
    found = zip(mixed.source_names, mixed.stats.sources, *counts, strict=True)
    return [SourceUse(field, path, stats, SHAPES[stats.shape].prompt_from, *numbers) for path, stats, *numbers in found]


def _pairs_of_source(whole: ExampleTable, part: ExampleTable | None) -> list[int]:
    """How many pairs `part` has of each source of `whole`."""
    sources = np.empty(0, np.int64) if part is None else part.sources
    counts: list[int] = np.bincount(sources, minlength=len(whole.source_names)).tolist()
    return counts


def _mixed_table(
    config: Config,
    sources: Sources,
    tokenizer: Any,
    display: Display,
    is_first: bool,
    *,
    seed: int,
    memory: Mapping[str, MemoryData] = NO_MEMORY,
) -> ExampleTable:
    specs = _specs(sources, config.data.columns, memory)
    table = _whole_table(config, specs, tokenizer, display, is_first)
    return table.select(mix(_pairs_of_source(table, table), specs, seed, why_few=table.stats.dropped_note))


def _specs(sources: Sources, columns: dict[str, str], memory: Mapping[str, MemoryData]) -> list[SourceSpec]:
    listed = sources if isinstance(sources, list) else [sources]
    return [_spec(SourceConfig(path=one) if isinstance(one, str) else one, columns, memory) for one in listed]


def _spec(source: SourceConfig, columns: dict[str, str], memory: Mapping[str, MemoryData]) -> SourceSpec:
    held = memory.get(source.path)
    return SourceSpec(
        source.path if held is None else held.label,
        columns if source.columns is None else source.columns,
        source.weight,
        source.count,
        name=source.name,
        split=source.split,
        revision=source.revision,
        memory=held,
    )


def _whole_table(
    config: Config, specs: Sequence[SourceSpec], tokenizer: Any, display: Display, is_first: bool
) -> ExampleTable:
    """Every usable pair of the sources."""
    data = config.data
    options = TokenizeOptions(
        template=data.template,
        max_length=data.max_length,
        truncation=data.truncation,
        on_bad=data.on_bad,
        stops=hf.stop_tokens(tokenizer.name_or_path),
        compare=data.compare,
        min_gap=data.min_gap,
        train_on=data.train_on,
    )
    what = Path(specs[0].path).name if len(specs) == 1 else f"{len(specs)} sources"
    bar: Advance | None = None  # none if the table is cached
    done = 0
    with ExitStack() as stack:

        def progress(count: int, total: int | None) -> None:
            nonlocal bar, done
            bar = bar or stack.enter_context(display.bar(f"tokenise {what}", total))
            bar(count - done, "")
            done = count

        folder = table_folder()
        try:
            return build_table(
                specs,
                tokenizer,
                folder=folder,
                options=options,
                group_by_prompt=data.group_by_prompt,
                progress=progress,
                workers=all_cores(),
                head_start_s=0.0 if is_first else HEAD_START_S,
                say=(lambda text: display.say(f"warning: {text}")) if is_first else log.warning,
            )
        except OSError as error:
            if error.filename is not None and not _is_in_or_above(folder, Path(error.filename)):
                raise  # about the data, not the cache
            raise ConfigError(
                f"{folder}: cannot be written ({error}). Set ISOPREF_CACHE to a writable folder with free space."
            ) from error


def _is_in_or_above(folder: Path, path: Path) -> bool:
    """Whether a path is the folder, lies in it, or contains it."""
    return path.is_relative_to(folder) or folder.is_relative_to(path)


def source_notes(stats: SourceStats) -> list[str]:
    """What may surprise a user about a source."""
    unused = ", ".join(stats.unused_columns)
    notes = {
        f"{stats.grouped} records joined to an earlier one with the same prompt": stats.grouped,
        f"{stats.truncated} truncated to data.max_length": stats.truncated,
        f"{stats.boundary_backoffs} whose prompt ends inside a token of the answer": stats.boundary_backoffs,
        f"{stats.generation_prompt_backoffs} whose prompt ends early: the template's generation prompt differs from "
        "how it renders an answer": stats.generation_prompt_backoffs,
        f"{stats.double_bos} that begin with two BOS tokens": stats.double_bos,
        f"{stats.added_ends} with an added end token: the template writes none": stats.added_ends,
        f"{stats.missing_eos} without an end token: the template ends answers with plain text": stats.missing_eos,
        f"columns not used: {unused}": len(stats.unused_columns),
    }
    return [note for note, told in notes.items() if told]


def source_warnings(stats: SourceStats, *, cut: bool) -> list[str]:
    """Likely mistakes in a source. `cut`: prompts were truncated, so a pair is too long only if its answers are."""
    warnings = []
    if special := sum(stats.special_tokens.values()):
        way_out = (
            "if a template was already applied, set data.template: none"
            if SHAPES[stats.shape].has_raw
            else "the template writes them around each message, so remove them from the text"
        )
        warnings.append(
            f"{special} of {stats.read} records contain the tokenizer's special tokens, such as "
            f"'{next(iter(stats.special_tokens))}': {way_out}"
        )
    if 2 * stats.repeated_prompts > stats.kept + stats.grouped:
        every = {"pairs": "both answers begin", "lists": "all answers begin", "labels": "the answer begins"}[
            stats.holds
        ]
        warnings.append(
            f"in {stats.repeated_prompts} of {stats.read} records {every} with the prompt, which would be learnt as "
            "part of the answer: remove it there"
        )
    if SHAPES[stats.shape].is_guess:
        warnings.append(
            "there is no column 'prompt', so the prompt is guessed: the text that 'chosen' and 'rejected' both begin "
            "with, up to the end of a line or else of a sentence. Check the pairs that isopref data shows, or add a "
            "column 'prompt'"
        )
    if stats.unused_inputs:
        warnings.append(
            f"{stats.unused_inputs} of {stats.read} records have text in the column 'input' or 'history', which is "
            "ignored next to a 'prompt' that may already contain it. If it does not, read the prompt's column as "
            "'instruction', as in Alpaca's data: data.columns={instruction: COLUMN}"
        )
    dropped = sum(stats.dropped.values())
    if dropped > MANY_DROPPED * stats.read:
        reason, count = max(stats.dropped.items(), key=lambda item: item[1])
        if reason != "too_long":
            way_out = "set data.on_bad: error to see the first one"
        elif cut:
            way_out = "their answers alone leave no room for a prompt, so raise data.max_length"
        else:
            way_out = "set data.truncation: keep_end or keep_start to cut them, or raise data.max_length"
        warnings.append(f"{dropped} of {stats.read} records were dropped, {count} as {reason}: {way_out}")
    return warnings
