"""A stand-in for the Hugging Face hub, and processes that use it as if there were a network."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

Asked = list[tuple[str, str]]  # methods and paths


@contextmanager
def hub(*, answers: bool) -> Iterator[tuple[str, Asked]]:
    """A hub that has nothing, or one behind a network that drops every connection: its address, what it is asked."""
    asked: Asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.command, self.path))
            if answers:
                self.send_error(404)
            else:
                self.close_connection = True  # without a word

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def run_online(code: str, endpoint: str) -> str:
    """What Python code prints in a process that may use the network and takes `endpoint` for the hub."""
    left_out = {"HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"}
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**env, "HF_ENDPOINT": endpoint},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
