"""An OpenAI-compatible server on loopback that misbehaves as told: tests give it a list of faults for its next replies.

Its answers depend on the request alone, so a client that retries gets what it would have got at first.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Literal

Fault = Literal[
    "500", "429", "truncated", "slow", "dripping", "cut", "no choices", "not json", "400", "401", "redirect"
]
Answer = Callable[[dict[str, Any]], str]
SLOW_S = 7.5  # longer than the time-out of the tests' clients


def made_of(request: dict[str, Any]) -> str:
    """A text that depends on the conversation, the model and the seed."""
    content = json.dumps([request["messages"], request["model"], request.get("seed")], sort_keys=True)
    return f"answer {blake2b(content.encode(), digest_size=4).hexdigest()}"


class ChatServer:
    """What the server was asked, and what goes wrong next: the first fault for the next request, and so on."""

    def __init__(self, answer: Answer = made_of):
        self.answer = answer
        self.faults: list[Fault] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answered = 0
        self.retry_after = "0"
        self.lock = threading.Lock()
        self.url = ""

    def next_fault(self, request: dict[str, Any], key: str | None) -> Fault | None:
        with self.lock:
            self.requests.append(request)
            self.keys.append(key)
            return self.faults.pop(0) if self.faults else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: ClassVar[ChatServer]

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode())

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.state.next_fault(request, self.headers.get("Authorization"))
        message = {"role": "assistant", "content": self.state.answer(request)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        content = json.dumps({"choices": [choice], "usage": {"completion_tokens": 2}}).encode()
        if fault is None:
            with self.state.lock:
                self.state.answered += 1
            self._send(200, content)
        elif fault in ("500", "400", "401"):
            self._send(int(fault), f"no: {self.headers.get('Authorization')}".encode())
        elif fault == "429":
            self._send(429, b"slow down", {"Retry-After": self.state.retry_after})
        elif fault == "redirect":
            self._send(302, b"", {"Location": "http://127.0.0.1:9/elsewhere"})
        elif fault == "truncated":  # valid HTTP, half a JSON
            self._send(200, content[: len(content) // 2])
        elif fault == "not json":
            self._send(200, b"<html>busy</html>")
        elif fault == "no choices":
            self._send(200, b'{"choices": []}')
        elif fault == "slow":
            time.sleep(SLOW_S)
            self._send(200, content)
        else:
            self._send_part(content, dripping=fault == "dripping")

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _send_part(self, content: bytes, *, dripping: bool) -> None:
        """Cut the connection in the middle; or never get there, byte by byte."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.close_connection = True
        if not dripping:
            self.wfile.write(content[: len(content) // 2])
            return
        for byte in content[:20]:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            time.sleep(SLOW_S / 10)


@contextmanager
def chat_server(answer: Answer = made_of) -> Iterator[ChatServer]:
    """A running server, stopped at the end."""
    state = ChatServer(answer)
    handler = type("Handler", (_Handler,), {"state": state})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    httpd.daemon_threads = True
    httpd.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that went away
    state.url = f"http://127.0.0.1:{httpd.server_port}/v1"
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
