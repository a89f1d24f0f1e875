"""A headless Chromium, driven through its debugging pipe; nothing but the browser itself is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--disable-extensions",
)  # fmt: skip
_LAUNCH = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from descriptor 3 and writes what happens to 4."""


def find() -> str | None:
    """The browser's executable; None without one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. What the page asked for and complained about is kept in `requests` and `complaints`.

    folder: for the browser's profile.
    """

    def __init__(self, executable: str, folder: Path) -> None:
        down, self._write = os.pipe()
        self._read, up = os.pipe()
        command = [executable, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(down), str(up), *command],
            pass_fds=(down, up),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(down)
        os.close(up)
        self._buffer, self._count, self._session = b"", 0, ""
        self._replies: dict[int, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        self._session = ""
        try:
            self._send({"id": 0, "method": "Browser.close"})
            self._process.wait(10)
        except BrokenPipeError:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result."""
        self._count += 1
        number = self._count
        self._send({"id": number, "method": method, "params": params})
        limit = time.monotonic() + 60
        while number not in self._replies:
            assert time.monotonic() < limit, f"{method} was not answered"
            self._pump(1.0)
        reply = self._replies.pop(number)
        assert "error" not in reply, f"{method}: {reply.get('error')}"
        return reply["result"]

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page, promises awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> None:
        """Returns when an expression is true."""
        limit = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < limit, f"it did not come: {script}\n{self.run('document.body.innerText')}"
            self._pump(0.05)

    def open(self, url: str, width: int = 1280, height: int = 900, phone: bool = False) -> None:
        """Go to an address, in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Page.navigate", url="about:blank")  # the last page, whose server may be gone, asks for nothing more
        self.wait("document.readyState === 'complete' && location.href === 'about:blank'")
        self.requests.clear()
        self.complaints.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def picture(self, path: Path) -> None:
        """The window as a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _send(self, message: dict[str, Any]) -> None:
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")

    def _pump(self, seconds: float) -> None:
        """Take in what the browser has to say."""
        if not select.select([self._read], [], [], seconds)[0]:
            return
        data = os.read(self._read, 1 << 20)
        assert data, "the browser has ended"
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._replies[message["id"]] = message
            else:
                self._happened(message["method"], message["params"])

    def _happened(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(params["entry"]))
