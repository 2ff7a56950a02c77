"""Stores: log-probabilities of one reference for any number of answers, on disk. Knows no model and no torch.

A store is a folder named by its key. `manifest.json` says what the key was made of. Everything else is in shards: files
that are written atomically, once, and never changed. A shard is

    magic, 8 bytes | key of the store, 16 | number of records, 8 | records of 28 bytes:
    id of the answer, 16 | its log-probability, float64 | its tokens, uint32

(little-endian), named by the digest of its content. So any number of processes may write to one store at a time, a
process may be killed at any moment, and no damaged byte goes undetected.
"""

import hashlib
import json
import os
import re
import shutil
import struct
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isopref.errors import CacheError
from isopref.places import write_whole

FORMAT = 2  # in format 1, a record was a pair
MAGIC = b"isoprefA"
HEADER = struct.Struct("<8s16sQ")
RECORD = np.dtype([("id", "V16"), ("logp", "<f8"), ("num_tokens", "<u4")])
KEY_BYTES = 16
KEY = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")
ABANDONED_S = 3600  # a temporary file this old belongs to a process that died: writing one takes moments

Records = NDArray[np.void]  # of dtype RECORD
Identity = Mapping[str, Any]  # what a key is made of; plain data


def key_of(identity: Identity) -> str:
    """The key: a digest of the identity's content, whatever the order of its names."""
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=KEY_BYTES).hexdigest()


def records(ids_A16: NDArray[np.uint8], logp_A: NDArray[Any], num_tokens_A: NDArray[Any]) -> Records:
    """Records of A answers."""
    made = np.empty(len(ids_A16), RECORD)
    made["id"] = as_keys(ids_A16)
    made["logp"] = logp_A
    made["num_tokens"] = num_tokens_A
    return made


def as_keys(ids_A16: NDArray[np.uint8]) -> NDArray[np.void]:
    """Ids as values that can be sorted and compared: A."""
    return np.ascontiguousarray(ids_A16).view("V16").ravel()


@dataclass(frozen=True)
class Store:
    """The store of one reference."""

    folder: Path
    repaired: tuple[str, ...] = ()  # what was damaged or outdated when the store was opened, and what was done
    identity: Identity = field(default_factory=dict)  # as given to `open`
    setting: str = "ISOPREF_CACHE"  # the variable or option that sets where the store is

    @property
    def key(self) -> str:
        return self.folder.name

    @property
    def manifest_file(self) -> Path:
        return self.folder / "manifest.json"

    @classmethod
    def open(cls, root: Path, identity: Identity, hints: Mapping[str, str]) -> "Store":
        """The store of an identity, created if needed. `hints` are for human readers and not part of the key.

        Raises CacheError if the manifest must be written and cannot be.
        """
        store = cls(root / key_of(identity), identity=identity)
        problem = store.manifest_problem()
        if problem is None:
            with suppress(OSError):  # a read-only store cannot record its last use
                os.utime(store.manifest_file)
            return store
        repaired = (f"{problem}. Rewritten",) if store.manifest_file.exists() else ()
        manifest = {"format": FORMAT, **hints, "identity": identity}
        with store._refusing():
            store.folder.mkdir(parents=True, exist_ok=True)
            if store.is_outdated():
                for shard in store.shards():
                    shard.unlink(missing_ok=True)
                repaired = (
                    f"{store.folder}: written by an earlier version of isopref, in another format. Scored again",
                )
            write_whole(store.manifest_file, (json.dumps(manifest, indent=2) + "\n").encode())
        return replace(store, repaired=repaired)

    def manifest(self) -> dict[str, Any]:
        """The content of the manifest; empty if it cannot be read."""
        try:
            found = json.loads(self.manifest_file.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def is_outdated(self) -> bool:
        """Whether the store was written by an earlier version, whose records can no longer be read."""
        found = self.manifest()
        return found.get("format") in range(1, FORMAT) and key_of(found.get("identity", {})) == self.key

    def manifest_problem(self) -> str | None:
        """What is wrong with the manifest, or None: it must be of this format, and its identity must give the key."""
        found = self.manifest()
        if found.get("format") == FORMAT and isinstance(found.get("identity"), dict):
            return None if key_of(found["identity"]) == self.key else f"{self.manifest_file}: belongs to another store"
        if self.is_outdated():
            return (
                f"{self.manifest_file}: written by an earlier version of isopref; the next run that needs the store "
                "scores its answers again"
            )
        return f"{self.manifest_file}: {'damaged' if self.manifest_file.exists() else 'missing'}"

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("*.shard"))

    def write(self, some: Records) -> None:
        """Add a shard. Raises CacheError if that is impossible."""
        if not len(some):
            return
        content = HEADER.pack(MAGIC, bytes.fromhex(self.key), len(some)) + some.tobytes()
        with self._refusing():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / f"{_digest(content)}.shard", content)

    def read(self, *, repair: bool = False) -> tuple[Records, list[str]]:
        """All records of intact shards, and what is wrong with damaged ones. `repair` removes the damaged ones."""
        parts, damage = [np.empty(0, RECORD)], []
        for path in self.shards():
            try:
                parts.append(self._read(path))
            except FileNotFoundError:  # another process repaired the store
                continue
            except OSError as error:  # the shard may be intact, so it is not removed
                damage.append(f"{path}: cannot be read ({error.strerror or error})")
            except ValueError as error:
                damage.append(f"{path}: {error}")
                if repair:
                    with suppress(OSError):  # if it cannot be removed, it is still ignored
                        path.unlink()
        return np.concatenate(parts), damage

    def _read(self, path: Path) -> Records:
        content = path.read_bytes()
        if _digest(content) != path.stem:
            raise ValueError("damaged: its content does not match its name")
        magic, key, count = HEADER.unpack_from(content)
        if magic != MAGIC or key.hex() != self.key or len(content) != HEADER.size + count * RECORD.itemsize:
            raise ValueError("not a shard of this store")
        return np.frombuffer(content, RECORD, offset=HEADER.size)

    def look_up(self, ids_A16: NDArray[np.uint8]) -> tuple[NDArray[np.bool_], Records, list[str]]:
        """Which of A answers are known, their records (undefined for unknown ones), and descriptions of damage.

        Removes damaged shards.
        """
        found, damage = self.read(repair=True)
        wanted = as_keys(ids_A16)
        if not len(found):
            return np.zeros(len(wanted), np.bool_), np.zeros(len(wanted), RECORD), damage
        keys, first = np.unique(found["id"], return_index=True)
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return keys[at] == wanted, found[first[at]], damage

    def sweep(self) -> None:
        """Remove partial files left by dead processes."""
        for path in self.folder.glob("*.tmp"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED_S:
                    path.unlink()

    def num_answers(self) -> int:
        """How many different answers are known."""
        return len(np.unique(self.read()[0]["id"]))

    def size(self) -> int:
        """Bytes of all its files."""
        size = 0
        for path in self.folder.glob("*"):
            with suppress(FileNotFoundError):
                size += path.stat().st_size
        return size

    def last_use(self) -> float | None:
        """When a run last opened the store, in seconds since 1970."""
        with suppress(OSError):
            return self.manifest_file.stat().st_mtime
        return None

    def problems(self) -> list[str]:
        """Everything wrong with the store; changes nothing."""
        manifest = self.manifest_problem()
        return ([] if manifest is None else [manifest]) + self.read()[1]

    def remove(self) -> None:
        """Remove the store atomically. Raises CacheError."""
        hidden = self.folder.with_name(f".{self.key}-{uuid.uuid4().hex}")
        with self._refusing():
            self.folder.rename(hidden)
            shutil.rmtree(hidden)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CacheError(
                f"{self.folder}: cannot be written ({error.strerror or error}). Set {self.setting} to a "
                "writable folder with free space."
            ) from error


def stores(root: Path) -> list[Store]:
    """All stores under a folder, by key. Entries not named by a key are ignored."""
    return [Store(path) for path in sorted(root.glob("*")) if KEY.fullmatch(path.name) and path.is_dir()]


def find_store(root: Path, key: str) -> Store:
    """The store whose key is, or starts with, `key`. Raises CacheError."""
    every = stores(root)
    found = [store for store in every if key and store.key.startswith(key)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise CacheError(f"no store {key!r} in {root}, which has {len(every)} stores. To list them: isopref cache ls")
    raise CacheError(f"{key!r} is the beginning of {len(found)} keys in {root}. Use a longer prefix.")


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=KEY_BYTES).hexdigest()
