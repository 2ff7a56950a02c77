"""The errors a user can cause. Each prints as one message, without a traceback, and ends with a non-zero exit.

A message says where, what, the value found, and the way out. What is a fault of ours stays an ordinary exception.
"""

from collections.abc import Iterator


class UserError(Exception):
    """Base of everything that the command line prints as one message."""


class ConfigError(UserError):
    """A config file, a command-line override or an argument that cannot be used."""


class DataError(UserError):
    """A data file or a record in it that cannot be used."""


class ModelError(UserError):
    """A model or tokenizer that cannot be loaded, or cannot be trained in the layout asked for."""


class CacheError(UserError):
    """A store of reference log-probabilities that cannot be written, found or trusted."""


class RunError(UserError):
    """A run that cannot start, go on or be trusted."""


class StartAgainError(RunError):
    """A run that had to stop, and goes on when it is started again: at once, unless it was asked to stop anyway."""

    at_once = True
    exit_code = 75  # "try again", in sysexits.h; tells the launcher to
    variable = "ISOPREF_STARTED_AGAIN"  # which it sets for the ranks that it then starts


class FirstStepError(RunError):
    """Policy and reference differ before the first update, though they should be the same model."""

    def __init__(self, what: str, way_out: str):
        super().__init__(f"{what} {way_out}")
        self.what = what  # the way out depends on who asks: a script, or a config


def shorter_pairs(limit: int | None = None) -> str:
    """What `data.max_length` does for pairs that are too long: the same words wherever it is a way out."""
    setting = "data.max_length" if limit is None else f"data.max_length: {limit}"
    return f"{setting} drops longer pairs; with data.truncation: keep_end or keep_start it cuts their prompts."


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An exception, what caused it, what caused that, and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def is_echo(error: BaseException) -> bool:
    """Whether an exception only says that another rank is gone, which is not what a user should read."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "ProcessGroup")
    return any(sign in str(one) for one in chain_of(error) for sign in signs)
