"""What all config sections share: strictness and number types."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

NO_PATH = "no_path"  # error type for text that cannot be a path; its message says what a path must be
NAME_BYTES = 255  # Linux's limit
PATH_BYTES = 3500  # Linux allows 4095; leave room for file names
VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


def path_must(text: str) -> str | None:
    """What a path must be, if `text` cannot be one; None if it can."""
    if "\0" in text:
        return "a path without NUL characters"
    if len(text.encode(errors="surrogatepass")) > PATH_BYTES:
        return f"a path of at most {PATH_BYTES} bytes"
    if any(len(name.encode(errors="surrogatepass")) > NAME_BYTES for name in text.split("/")):
        return f"a path with names of at most {NAME_BYTES} bytes"
    if VARIABLE.search(text):
        return "a path without variables such as $HOME: isopref expands only ~"
    try:
        Path(text).expanduser()
    except RuntimeError:
        return "a path in a home folder that exists"
    return None


def _check_path(text: str) -> str:
    must = path_must(text)
    if must is not None:
        raise PydanticCustomError(NO_PATH, "{must}", {"must": must})
    return text


Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[Text, AfterValidator(_check_path)]  # a file, a folder or a hub name
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """One section: rejects unknown fields, converts nothing (`yes` is not a number), immutable once loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
