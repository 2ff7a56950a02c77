"""What a run would train on, without the model: sources, counts, lengths and a few pairs as the model sees them."""

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedConfig

from isopref.build.data import SourceUse, Tables, pair_tables, read_tokenizer
from isopref.build.planner import reaches
from isopref.build.run import check_scores, say_trust
from isopref.build.run_plan import Hardware
from isopref.config.schema import Config
from isopref.data.statistics import ExampleText, TableFigures, figures, samples
from isopref.engine.display import Display
from isopref.errors import UserError
from isopref.models import conversion, hf
from isopref.plan.long_rows import Reach


@dataclass(frozen=True)
class Report:
    """Everything `isopref data` shows."""

    sources: list[SourceUse]
    warnings: list[str]
    context_length: int | None  # of the model, in tokens; None if its config sets none
    num_left_out: int  # pairs of data.train that are in neither table, because data.eval has their prompt
    train: TableFigures
    held_out: TableFigures | None
    samples: list[ExampleText]  # of the training examples
    card: str | None = None  # the requested hardware, in words
    reaches: list[Reach] | None = None  # how long an example may be there, by setting


def inspect(config: Config, display: Display, hardware: Hardware | None = None) -> Report:
    """Tokenise the data as a run would, and inspect it. Reads only the tokenizer and config of model.path.

    With `hardware`, also predict how long an example may be on it.
    """
    say_trust(config, display)
    tokenizer = read_tokenizer(config, display)
    context = hf.context_length(_model_config(config))
    tables = pair_tables(config, tokenizer, display)
    return Report(
        sources=tables.sources,
        warnings=[*tables.warnings, *_refusal(config, tables)],
        context_length=context,
        num_left_out=tables.num_left_out,
        train=figures(tables.train, context=context),
        held_out=None if tables.held_out is None else figures(tables.held_out, context=context),
        samples=samples(tables.train, tokenizer),
        card=None if hardware is None else f"{hardware.gpus} x {hardware.card_name}",
        reaches=None if hardware is None else reaches(config, hardware, tables.train),
    )


def _refusal(config: Config, tables: Tables) -> Iterator[str]:
    """Why the loss cannot be trained on the data, if it cannot."""
    try:
        check_scores(config, tables.all)
    except UserError as error:
        yield f"isopref train refuses this data: {error}"


def _model_config(config: Config) -> PreTrainedConfig:
    path = config.model.path
    if hf.is_olmo_core(path):
        return conversion.checkpoint_config(path)
    return hf.read_config(path, trust_remote_code=config.model.trust_remote_code)
