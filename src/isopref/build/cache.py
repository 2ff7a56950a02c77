"""`isopref cache`: scores all pairs of a config with its reference, ahead of a run."""

from isopref.build import reference
from isopref.build.data import pair_tables, read_tokenizer, say_tables
from isopref.build.hardware import check_hardware, say_attention
from isopref.build.run import opened_run, quiet_libraries, with_longest
from isopref.config.load import to_yaml
from isopref.config.schema import Config
from isopref.errors import ConfigError


def fill_cache(config: Config, *, name: str) -> None:
    """Score all pairs of a config with its reference, so that a later run hits the cache."""
    with opened_run(config, name) as run:
        quiet_libraries()
        check_hardware(run)
        say_attention(run)
        if not run.loss.needs_reference:
            raise ConfigError(
                f"objective.loss: {to_yaml(config.objective.loss)} has no reference, so there is nothing to score. Run "
                "isopref train."
            )
        if config.objective.reference_moves is not None:
            raise ConfigError(
                f"objective.reference_moves is {list(config.objective.reference_moves)}: a moving reference cannot be "
                "scored ahead of time. Run isopref train."
            )
        tokenizer = read_tokenizer(config, run.display)
        path, setting = reference.path_of(config)
        tables = pair_tables(config, tokenizer, run.display, is_first=run.env.is_first)
        say_tables(tables, run.display)
        run = with_longest(run, tables.all)
        found = reference.of_other_model(run, tokenizer, reference.scored_tables(run, tables), path, setting=setting)
        pairs = sum(map(len, tables.all))
        run.display.say(
            f"cache complete: the reference scores of all {pairs} {tables.train.unit}s are in store "
            f"{str(found.key)[:12]}"
        )
