"""Chat completions from an OpenAI-compatible server: vLLM, SGLang, llama.cpp, `transformers serve`, a hosted one.

Handles requests, retries and the API key. The key comes from the environment and goes only into a header; it is removed
from every message. Standard library only.
"""

import email.utils
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.client import HTTPException
from typing import IO, Any, NamedTuple, NoReturn, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from isopref.errors import ConfigError, UserError

KEYS = ("ISOPREF_API_KEY", "OPENAI_API_KEY")  # environment variables; the first one that is set counts
ATTEMPTS = 8
TIMEOUT_S = 300.0  # for one complete reply
LONGEST_WAIT_S = 60.0  # between two attempts, unless the server asks for more
LONGEST_ASKED_S = 600.0
BLOCK = 65536
SHOWN = 300  # characters of a reply quoted in a message

Result = TypeVar("Result")


class RemoteError(UserError):
    """The server cannot be reached, refuses a request, or does not answer it after several attempts."""


class _TransientError(Exception):
    """(what, wait_s): a failure that is worth retrying."""


class Reply(NamedTuple):
    """A completion. `tokens`: as the server counts them, None if it does not."""

    text: str
    ended: bool  # otherwise it was cut at max_tokens
    tokens: int | None


class _NoRedirects(HTTPRedirectHandler):
    """Refuses redirects, which would send the API key to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_open = build_opener(_NoRedirects).open


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server. Every method may be called from several threads."""

    url: str  # with /v1, or whatever comes before /chat/completions
    key: str | None = field(default=None, repr=False)
    timeout_s: float = TIMEOUT_S
    attempts: int = ATTEMPTS
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    def models(self) -> list[str]:
        """The names of the models it serves. Raises RemoteError."""

        def parse(content: Any) -> list[str]:
            return [str(one["id"]) for one in content["data"]]

        return self._ask("/models", None, parse)

    def complete(self, model: str, messages: Sequence[Mapping[str, Any]], **settings: Any) -> Reply:
        """One answer to a conversation. Settings are fields of the API; those that are None are omitted.

        Raises RemoteError.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        return self._ask("/chat/completions", {"model": model, "messages": list(messages), **given}, _reply)

    def _ask(self, path: str, body: Any, parse: Callable[[Any], Result]) -> Result:
        what = ""
        for attempt in range(self.attempts):
            try:
                return self._ask_once(path, body, parse)
            except _TransientError as error:
                what, asked_s = error.args
                if attempt + 1 < self.attempts:
                    backoff_s = min(LONGEST_WAIT_S, 0.5 * 2**attempt) * random.uniform(0.5, 1.0)
                    self.sleep(min(LONGEST_ASKED_S, max(backoff_s, asked_s)))
        raise RemoteError(
            f"{self.url}{path}: no usable reply after {self.attempts} attempts; the last one: {what}. Earlier replies "
            "are saved: run the command again to continue."
        )

    def _ask_once(self, path: str, body: Any, parse: Callable[[Any], Result]) -> Result:
        headers = {"Content-Type": "application/json", "User-Agent": "isopref"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        until = time.monotonic() + self.timeout_s
        try:
            with _open(Request(self.url + path, data, headers), timeout=self.timeout_s) as reply:
                content = _read(reply, until)
        except HTTPError as error:
            with error:
                self._refused(path, error, until)
        except (OSError, HTTPException) as error:  # unreachable, dropped, or too slow
            raise _TransientError(self._shown(f"{type(error).__name__}: {error}"), 0.0) from error
        try:
            return parse(json.loads(content))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            text = content.decode(errors="replace")
            raise _TransientError(self._shown(f"not a chat completion ({error}): {text}"), 0.0) from error

    def _refused(self, path: str, error: HTTPError, until: float) -> NoReturn:
        """Raise for a status other than 200: _TransientError if a retry may help, otherwise RemoteError."""
        try:
            text = _read(error, until).decode(errors="replace")
        except (OSError, HTTPException):
            text = ""
        what = self._shown(f"status {error.code} {error.reason}: {text}")
        if error.code in (408, 425, 429) or error.code >= 500:
            raise _TransientError(what, _retry_after(error.headers.get("Retry-After"))) from error
        way_out = f" Set the environment variable {KEYS[0]}." if error.code in (401, 403) else ""
        raise RemoteError(f"{self.url}{path}: the server refuses the request, {what}.{way_out}") from error

    def _shown(self, text: str) -> str:
        text = text.replace(self.key, "***") if self.key else text
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def server(url: str, *, setting: str, environment: Mapping[str, str] = os.environ) -> Server:
    """The server at a URL, with the API key from the environment. Raises ConfigError. `setting` names the URL."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and _is_plain(url)
    except ValueError:  # a port that is no number, or half an IPv6 address
        is_usable = False
    if not is_usable:
        found = "" if "@" in url or "?" in url else f"; found {url!r}"  # do not print a password or a key
        raise ConfigError(f"{setting}: must be a URL such as http://localhost:8000/v1{found}.")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"{setting}: the URL of {parts.hostname} must have no password, query or fragment. For an API key, set the "
            f"environment variable {KEYS[0]}."
        )
    name = next((name for name in KEYS if environment.get(name, "").strip()), None)
    key = None if name is None else environment[name].strip()  # a key read from a file may end in a line feed
    if key is not None and not _is_plain(key):
        raise ConfigError(f"{name}: contains a space, a line break or another character that no API key has. Fix it.")
    return Server(url.rstrip("/").removesuffix("/chat/completions"), key)


def _is_plain(text: str) -> bool:
    """Whether a text can go into a request. Otherwise http.client raises an error that quotes it, even if secret."""
    return text.isascii() and text.isprintable() and " " not in text


def _read(reply: IO[bytes], until: float) -> bytes:
    """The complete reply. Raises TimeoutError if it takes too long, even if it keeps trickling in."""
    parts = []
    while part := reply.read1(BLOCK):  # type: ignore[attr-defined]  # what the server has sent, without waiting for more
        parts.append(part)
        if time.monotonic() > until:
            raise TimeoutError("the reply takes too long")
    content = b"".join(parts)
    declared = reply.headers.get("Content-Length")  # type: ignore[attr-defined]
    if declared is not None and declared.isdigit() and len(content) < int(declared):
        raise ConnectionError(f"the connection was cut after {len(content)} of {declared} bytes")
    return content


def _reply(content: Any) -> Reply:
    choice = content["choices"][0]
    text = choice["message"]["content"]
    if text is not None and not isinstance(text, str):
        raise TypeError(f"the content is a {type(text).__name__}")
    usage = content.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Reply(text or "", choice.get("finish_reason") != "length", tokens if isinstance(tokens, int) else None)


def _retry_after(value: str | None) -> float:
    """Seconds that a server asks the client to wait, given as a number or a date."""
    if value is None:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (email.utils.parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
