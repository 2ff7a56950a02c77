"""`--resume`, an option that may have a value: what it may be, and how it is read."""

from enum import Enum
from pathlib import Path

from isopref.errors import ConfigError


class Resume(Enum):
    no = "no"
    must = "must"
    auto = "auto"


def spelled_out(arguments: list[str]) -> list[str]:
    """`--resume` as an option with a value, which a command line cannot have beside one without."""

    def is_value(after: str) -> bool:
        # A config would be a file, and an override has an equals sign.
        return after == "auto" or (after.isalnum() and not Path(after).exists())

    following = [*arguments, ""][1:]
    alone = (one == "--resume" and not is_value(after) for one, after in zip(arguments, following, strict=True))
    return ["--resume=must" if it_is else one for one, it_is in zip(arguments, alone, strict=True)]


def parse_resume(told: str | Resume) -> Resume:
    try:
        return Resume(told)
    except ValueError:
        raise ConfigError(
            f'--resume: takes no value, or auto; found "{told}". Alone it goes on from the last whole checkpoint; '
            "--resume auto also starts a run where there is none."
        ) from None
