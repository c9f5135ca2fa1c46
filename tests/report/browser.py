"""A headless Chromium on a pipe (the DevTools protocol), for tests of the HTML page.

with Browser(tmp_path) as browser:
    page = browser.open(path, width=390, dark=True)
    page.run("document.title")
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Usual paths on Linux distributions.
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 30.0  # maximum time (s) for one answer on a slow machine

# One process without network access, with only the given profile
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
)


def chromium() -> str | None:
    """Return the path of Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """Chromium with an empty profile in ``folder``; a context manager."""

    def __init__(self, folder: Path) -> None:
        program = chromium()
        assert program is not None, "no Chromium"
        self.folder = folder
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # Chromium uses descriptors 3 and 4 for the protocol; dup first, because they may be in use.
        shell = f'exec 8<&{to_read} 9>&{to_write}; exec 3<&8 4>&9 8<&- 9>&-; exec "$@"'
        command = ["bash", "-c", shell, "bash", program, *FLAGS, f"--user-data-dir={folder}"]
        self._process = subprocess.Popen(
            [*command, "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        os.set_blocking(self._read, False)
        self._buffer = b""
        self._target = ""
        self._sent = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._read)
        os.close(self._write)

    def open(self, path: Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> Page:
        """Open a file from disk in a new tab, close the previous tab, and wait until the file has
        loaded.
        """
        if self._target:
            self.call("Target.closeTarget", {"targetId": self._target})
        self._target = target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = Page(self, session["sessionId"])
        page.call("Page.bringToFront")
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.theme(dark=dark)
        page.call("Page.navigate", {"url": path.resolve().as_uri()})
        page.wait("document.readyState === 'complete'")
        return page

    def call(
        self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """Send a command and return its answer; earlier events are stored."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters or {}}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            answers = self._received()
            self.events += [answer for answer in answers if "id" not in answer]
            for answer in answers:
                if answer.get("id") == self._sent:
                    if "error" in answer:
                        raise RuntimeError(f"{method}: {answer['error']}")
                    result: dict[str, Any] = answer["result"]
                    return result
            time.sleep(0.005)
        raise TimeoutError(method)

    def _received(self) -> list[dict[str, Any]]:
        try:
            while chunk := os.read(self._read, 1 << 20):
                self._buffer += chunk
        except BlockingIOError:
            pass
        *messages, self._buffer = self._buffer.split(b"\0")
        return [json.loads(message) for message in messages]


class Page:
    """A tab of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._browser.call(method, parameters, self._session)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate",
            {"expression": script, "returnByValue": True, "awaitPromise": True},
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                raise TimeoutError(condition)
            time.sleep(0.02)

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Wait until the Python function ``happened`` returns true."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.02)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            {
                "width": width,
                "height": height,
                "deviceScaleFactor": 1,
                "mobile": width < 500,
            },
        )
        touches = {"enabled": width < 500, "maxTouchPoints": 2}
        self.call("Emulation.setTouchEmulationEnabled", touches)

    def theme(self, *, dark: bool) -> None:
        value = "dark" if dark else "light"
        self.call(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": value}]},
        )

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a point of the window."""
        self.call("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1},
            )

    def swipe(self, x: float, y: float, up: float = 0.0) -> None:
        """Touch a point, move up by ``up`` pixels (0: tap), and release."""

        def touch(kind: str, *points: dict[str, float]) -> None:
            self.call("Input.dispatchTouchEvent", {"type": kind, "touchPoints": list(points)})

        touch("touchStart", {"x": x, "y": y})
        for part in range(1, 9) if up else ():
            touch("touchMove", {"x": x, "y": y - up * part / 8})
        touch("touchEnd")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", {"type": kind, "key": key, "code": key})

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        answer = self.call(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole}
        )
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self, path: Path) -> None:
        answer = self.call("Page.printToPDF", {"printBackground": True})
        path.write_bytes(base64.b64decode(answer["data"]))

    def _events(self, keep: Callable[[str], bool]) -> list[dict[str, Any]]:
        self.run("0")  # all earlier events have been read
        return [
            event
            for event in self._browser.events
            if event.get("sessionId") == self._session and keep(event["method"])
        ]

    def complaints(self) -> list[str]:
        """Return errors and warnings on the console, and uncaught exceptions."""
        found = []
        for event in self._events(lambda method: method.startswith(("Runtime", "Log"))):
            method, details = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(details["exceptionDetails"])[:500])
            elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning"):
                found.append(json.dumps(details["args"])[:500])
            elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
                found.append(details["entry"]["text"])
        return found

    def requested(self) -> list[str]:
        """Return the URLs that the page requested."""
        return [
            event["params"]["request"]["url"]
            for event in self._events(lambda method: method == "Network.requestWillBeSent")
        ]
