"""The client of OpenAI-compatible servers: what passes is tried again, what does not is said, the key stays secret."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from isopref.errors import ConfigError
from isopref.remote import RemoteError, Server, _reply, server
from support.chat_server import ChatServer, Fault, chat_server, made_of

MESSAGES = [{"role": "user", "content": "why?"}]
SECRET = "sk-very-secret"


@pytest.fixture
def remote() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


def client(remote: ChatServer, waits: list[float], attempts: int = 3) -> Server:
    return Server(remote.url, SECRET, timeout_s=3.0, attempts=attempts, sleep=waits.append)


@pytest.mark.parametrize("fault", ["500", "429", "truncated", "slow", "dripping", "cut", "no choices", "not json"])
def test_a_fault_that_passes_costs_nothing_but_another_attempt(remote: ChatServer, fault: Fault) -> None:
    remote.faults = [fault, fault]
    waits: list[float] = []
    reply = client(remote, waits).complete("first", MESSAGES, seed=3, tools=None)
    assert reply == (made_of({"messages": MESSAGES, "model": "first", "seed": 3}), True, 2)
    assert len(remote.requests) == 3
    assert "tools" not in remote.requests[0]
    assert len(waits) == 2
    assert 0 < waits[0] <= 0.5
    assert 0 < waits[1] <= 1


def test_it_gives_up_and_says_why(remote: ChatServer) -> None:
    remote.faults = ["500"] * 3
    waits: list[float] = []
    with pytest.raises(RemoteError, match=r"after 3 attempts; the last one: status 500 .*run the command again"):
        client(remote, waits).complete("first", MESSAGES)
    assert len(waits) == 2


@pytest.mark.parametrize("as_date", [False, True])
def test_it_waits_as_long_as_the_server_asks(remote: ChatServer, as_date: bool) -> None:
    remote.faults = ["429"]
    remote.retry_after = format_datetime(datetime.now(UTC) + timedelta(seconds=7), usegmt=True) if as_date else "7"
    waits: list[float] = []
    client(remote, waits).complete("first", MESSAGES)
    assert 5 < waits[0] <= 7


@pytest.mark.parametrize("fault", ["400", "401", "redirect"])
def test_what_does_not_pass_is_not_tried_again(remote: ChatServer, fault: Fault) -> None:
    remote.faults = [fault]
    with pytest.raises(RemoteError, match="the server refuses the request"):
        client(remote, []).complete("first", MESSAGES)
    assert len(remote.requests) == 1


@pytest.mark.parametrize("fault", ["500", "400", "401", "truncated"])
def test_the_key_is_in_the_header_and_in_no_message(remote: ChatServer, fault: Fault) -> None:
    """The server of these tests repeats the header in what it says."""
    remote.faults = [fault] * 3
    with pytest.raises(RemoteError) as caught:
        client(remote, []).complete("first", MESSAGES)
    assert remote.keys[0] == f"Bearer {SECRET}"
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(client(remote, []))


def test_the_key_comes_from_the_environment() -> None:
    assert server("http://localhost/v1/", setting="--url", environment={}).key is None
    both = {"OPENAI_API_KEY": "b", "ISOPREF_API_KEY": "a"}
    assert server("http://localhost/v1/", setting="--url", environment=both) == Server("http://localhost/v1", "a")


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://host/v1",
        "https://u:secret@host/v1",
        "http://h/v1?key=secret",
        "ftp://u:secret@host",
        "http://host:port/v1",
        "http://[::1/v1",
        "http://:8000/v1",
        "http://host/v1 ",
        "http://host/\u00e9",
        "http://h:0",
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url: ") as caught:
        server(url, setting="--url")
    assert "secret" not in str(caught.value)


def test_a_key_that_no_header_can_have_is_refused_and_not_shown(remote: ChatServer) -> None:
    """http.client says what is wrong with a header by repeating it."""
    trailing = server(remote.url, setting="--url", environment={"OPENAI_API_KEY": f" {SECRET}\r\n"})
    trailing.complete("first", MESSAGES)
    assert remote.keys == [f"Bearer {SECRET}"]
    for bad in (f"{SECRET}\nsecond", f"{SECRET} second", f"{SECRET}\u2026", f"{SECRET}\x7f"):
        with pytest.raises(ConfigError, match="OPENAI_API_KEY: ") as caught:
            server(remote.url, setting="--url", environment={"ISOPREF_API_KEY": " ", "OPENAI_API_KEY": bad})
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("usage", ['"none"', "[1]", '{"completion_tokens": "2"}', "{}", "null"])
def test_a_server_that_does_not_count_tokens(usage: str) -> None:
    content = f'{{"choices": [{{"message": {{"content": "x"}}}}], "usage": {usage}}}'
    assert _reply(json.loads(content)) == ("x", True, None)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(RemoteError, match="Connection refused"):
        Server("http://127.0.0.1:9/v1", attempts=2, sleep=lambda s: None).models()


def test_models(remote: ChatServer) -> None:
    assert client(remote, []).models() == ["first", "second"]
