"""A stand-in for the Hugging Face hub on this machine: as much of its API as an upload uses."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

LARGE = (".safetensors", ".bin")  # files that go to the hub's store of large files


class Hub(ThreadingHTTPServer):
    """What was put there: repositories by name, each with its settings, commits and files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, bytes] = {}  # large files by their digest
        self.files: dict[str, dict[str, bytes]] = {}
        self.refuses: int | None = None  # a status that every request gets
        self.bad_card = ""  # what it says about the metadata of a card

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_PUT(self) -> None:
        self.server.stored[self.path.rpartition("/")[2]] = self._body()
        self._answer(200, {})

    def do_POST(self) -> None:
        hub, body = self.server, self._body()
        if hub.refuses is not None:
            self._answer(hub.refuses, {"error": "you may not write here"})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            known = name in hub.repos
            is_private = bool(asked.get("private")) or asked.get("visibility") == "private"  # older and newer clients
            hub.repos.setdefault(name, {"private": is_private, "commits": []})
            hub.files.setdefault(name, {})
            self._answer(409 if known else 200, {"url": f"{hub.address}/{name}", "name": name})
        elif self.path == "/api/validate-yaml":
            errors = [{"message": hub.bad_card}] if hub.bad_card else []
            self._answer(400 if errors else 200, {"errors": errors, "warnings": []})
        elif self.path.endswith("/preupload/main"):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.address}/store/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        else:
            self._commit(body)

    def _commit(self, body: bytes) -> None:
        _, _, _, owner, name, action, _ = self.path.split("/")
        assert action == "commit", self.path
        repo, files = self.server.repos[f"{owner}/{name}"], self.server.files[f"{owner}/{name}"]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repo["commits"].append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.stored[value["oid"]]
        self._answer(200, {"commitUrl": f"{self.server.address}/{owner}/{name}/commit/abc", "commitOid": "abc"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that ends with the block."""
    with Hub() as hub:
        thread = Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
