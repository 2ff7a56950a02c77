"""Caches the tokenizer and config of a GGUF file in transformers' own format: reading them from the file takes seconds.

The cache folder is named after the file's content. An entry is kept only if it survives a round trip: loading it and
saving it again must give the same files. Their digest is stored with them: without its chat template, a tokenizer would
still load, but render other prompts.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from isopref.places import cache_folder

HEAD = 2**26  # bytes of the file to hash: its tokenizer and config come first and are smaller
FILES, DIGEST = "files", "digest"  # in an entry's folder
READERS = ("transformers", "tokenizers", "gguf")


def kept_folder(file: Path, what: str) -> Path:
    """Where the converted tokenizer or config of a file belongs."""
    digest = hashlib.blake2b(digest_size=16)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in READERS]
    digest.update("\0".join([*versions, str(file.stat().st_size)]).encode())
    with file.open("rb") as content:
        digest.update(content.read(HEAD))
    return cache_folder() / "gguf" / digest.hexdigest() / what


def is_kept(file: Path, what: str) -> bool:
    return kept_folder(file, what).is_dir()


def kept(kind: Any, file: Path, what: str, read: Callable[[], Any]) -> Any:
    """The result of `read`, from the cache if possible. `kind`: the transformers class that loads a folder."""
    folder = kept_folder(file, what)
    if folder.is_dir():
        if _is_whole(folder):
            return _named(kind.from_pretrained(folder / FILES), file)
        _remove(folder)
    made = read()
    with suppress(OSError):  # a full or read-only cache only costs time
        _keep(kind, made, folder)
    return made


def _keep(kind: Any, made: Any, folder: Path) -> None:
    """Write an object to a temporary folder, and move it into place if it survives a round trip."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        first, second = Path(beside) / "first" / FILES, Path(beside) / "second"
        first.parent.mkdir()
        made.save_pretrained(first)
        again = kind.from_pretrained(first)
        again.save_pretrained(second)
        if type(again) is type(made) and _content(first) == _content(second) and not folder.exists():
            (first.parent / DIGEST).write_text(_digest(first))
            first.parent.rename(folder)


def _is_whole(folder: Path) -> bool:
    """Whether an entry has the files that were written."""
    try:
        return (folder / DIGEST).read_text() == _digest(folder / FILES)
    except (OSError, UnicodeDecodeError):
        return False


def _remove(folder: Path) -> None:
    """Remove an entry atomically: other processes never see a part of it."""
    with suppress(OSError), tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as beside:
        folder.rename(Path(beside) / folder.name)


def _digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, content in sorted(_content(folder).items()):
        digest.update(f"{name} {len(content)}\0".encode() + content)
    return digest.hexdigest()


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _named(loaded: Any, file: Path) -> Any:
    loaded.name_or_path = str(file.parent)  # as if loaded from there
    return loaded
