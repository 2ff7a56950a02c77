"""`--resume`, an option with an optional value."""

from pathlib import Path
from typing import Literal, cast, get_args

from isopref.errors import ConfigError

Resume = Literal["no", "must", "auto"]


def spelled_out(arguments: list[str]) -> list[str]:
    """Rewrite a bare `--resume` as `--resume=must`: the parser does not support optional values."""

    def is_value(after: str) -> bool:
        # A config is an existing file, and an override has an equals sign.
        return after == "auto" or (after.isalnum() and not Path(after).exists())

    following = [*arguments, ""][1:]
    alone = (one == "--resume" and not is_value(after) for one, after in zip(arguments, following, strict=True))
    return ["--resume=must" if it_is else one for one, it_is in zip(arguments, alone, strict=True)]


def parse_resume(told: str) -> Resume:
    """Not the option's own parser, because some versions of typer pass None to that instead of the default."""
    if told not in get_args(Resume):
        raise ConfigError(
            f'--resume: takes no value or "auto"; found "{told}". --resume resumes from the last intact checkpoint; '
            "--resume auto resumes the run if it exists and starts it otherwise."
        )
    return cast(Resume, told)
