"""A real browser for tests of the report: headless Chromium, driven by the DevTools protocol over two pipes.

`python -m support.browser report.html picture.png` takes the picture of a report for the docs.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """The browser's command; None where none is installed."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Tab:
    """One page in the browser. `problems` are console errors, exceptions, and requests that the page made."""

    def __init__(self, to_browser: BinaryIO, from_browser: BinaryIO):
        self._out, self._in = to_browser, from_browser
        self._last = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while (answer := self._next()).get("id") != self._last:
            pass
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def show(self, page: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of some size, light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._next()

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, as plain data."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press a key such as "ArrowRight"."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def picture(self) -> bytes:
        """A PNG of the window."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])

    def _next(self) -> dict[str, Any]:
        parts = []
        while (byte := self._in.read(1)) != b"\0":
            assert byte, "the browser has ended"
            parts.append(byte)
        message: dict[str, Any] = json.loads(b"".join(parts))
        if "method" in message:
            self._events.append(message)
            self._note(message["method"], message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"]))
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "about:")):
            self.problems.append(f"asked for {params['request']['url']}")


@contextmanager
def browser() -> Iterator[Tab]:
    """A tab in a browser of its own, which ends with the block."""
    command = chromium()
    assert command is not None, "no Chromium is installed"
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = f"--headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir={profile}"
        # The browser takes commands from its file 3 and answers on its file 4.
        line = f"exec {command} {options} --remote-debugging-pipe 3<&{read_commands} 4>&{write_answers}"
        process = subprocess.Popen(
            ["/bin/bash", "-c", line],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        try:
            with os.fdopen(write_commands, "wb") as to_browser, os.fdopen(read_answers, "rb") as from_browser:
                yield Tab(to_browser, from_browser)
        finally:
            process.terminate()
            process.wait(timeout=30)


if __name__ == "__main__":
    report, picture = map(Path, sys.argv[1:])
    with browser() as tab:
        tab.show(report, width=1320, height=1490)
        picture.write_bytes(tab.picture())
