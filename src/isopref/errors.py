"""The errors a user can cause. Each prints as one message, without a traceback, and ends with a non-zero exit.

A message says where, what, the value found, and the way out. What is a fault of ours stays an ordinary exception.
"""


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


class StoppedError(RunError):
    """A signal ended the run before its last step; a checkpoint holds where it was."""


class FirstStepError(RunError):
    """Policy and reference differ before the first update, though they should be the same model."""
