"""The errors a user can cause. Each prints as one message, without a traceback, and exits with a non-zero code.

A message says where, what is wrong, the value found and how to fix it. Our own bugs remain ordinary exceptions.
"""

from collections.abc import Iterator


class UserError(Exception):
    """Base class of everything that the command line prints as one message."""


class ConfigError(UserError):
    """An unusable config file, command-line override or argument."""


class DataError(UserError):
    """An unusable data file or record."""


class ModelError(UserError):
    """A model or tokenizer that cannot be loaded, or cannot be trained in the requested layout."""


class CacheError(UserError):
    """A store of reference log-probabilities that cannot be written, found or trusted."""


class RunError(UserError):
    """A run that cannot start, continue or be trusted."""


class StartAgainError(RunError):
    """A run that had to stop early, and resumes when it is started again."""

    at_once = True  # whether the launcher restarts it immediately; False if it was asked to stop anyway
    exit_code = 75  # "try again" in sysexits.h; tells the launcher to restart
    variable = "ISOPREF_STARTED_AGAIN"  # set by the launcher for restarted ranks


class FirstStepError(RunError):
    """Policy and reference differ before the first update, though they should be the same model."""

    def __init__(self, what: str, way_out: str):
        super().__init__(f"{what} {way_out}")
        self.what = what  # kept apart, because a config has another way out than a script


def shorter_pairs(limit: int | None = None) -> str:
    """What `data.max_length` does with overlong pairs, worded the same in every message."""
    setting = "data.max_length" if limit is None else f"data.max_length: {limit}"
    return f"{setting} drops longer pairs; with data.truncation: keep_end or keep_start it truncates their prompts."


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An exception, its cause, the cause of that, and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def is_echo(error: BaseException) -> bool:
    """Whether an exception only says that another rank is gone, which does not help the user."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "ProcessGroup")
    return any(sign in str(one) for one in chain_of(error) for sign in signs)
