"""A headless Chromium, spoken to over its debugging pipe: nothing but the browser is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str | None:
    """The browser's path, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One page. Everything that went wrong on it is kept in ``problems``, each address it asked for in ``asked``."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.asked: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, *, dark: bool = False, width: int = 1200, script: bool = True) -> None:
        """Show a file and wait until it is ready."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self.media("screen", dark=dark)
        self._call("Emulation.setScriptExecutionDisabled", value=not script)
        self._call("Page.navigate", url=path.absolute().as_uri())
        while True:
            message = self._receive()
            if message.get("method") == "Page.loadEventFired":
                return

    def media(self, kind: str, *, dark: bool = False) -> None:
        """Pretend to be a screen or paper, bright or dark."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", media=kind, features=features)

    def run(self, script: str) -> Any:
        """The value of an expression."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def centre(self, selector: str) -> tuple[float, float]:
        """The middle of an element, which is brought into view."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        x, y = box["left"] + box["width"] / 2, box["top"] + box["height"] / 2
        return x, y

    def point(self, x: float, y: float) -> None:
        """Move the mouse."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        x, y = self.centre(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def tip(self) -> str | None:
        """What the tooltip says, if it is there."""
        found = self.run(
            "document.getElementById('tip').hidden ? null : document.getElementById('tip').textContent"
        )
        assert found is None or isinstance(found, str)
        return found

    def picture(self, *, whole: bool = True) -> bytes:
        """A PNG."""
        found = self._call(
            "Page.captureScreenshot",
            format="png",
            captureBeyondViewport=whole,
            **(self._whole() if whole else {}),
        )
        return base64.b64decode(found["data"])

    def _whole(self) -> dict[str, Any]:
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def printed(self) -> bytes:
        """A PDF."""
        self._call("Emulation.setEmulatedMedia", media="")
        return base64.b64decode(self._call("Page.printToPDF", printBackground=True)["data"])

    # -- the pipe ---------------------------------------------------------------------------------

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._back, 1 << 16)
            assert part, "the browser ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.problems.append(str(parameters["args"]))
        elif method == "Network.requestWillBeSent":
            self.asked.append(parameters["request"]["url"])


@contextmanager
def opened(path: str) -> Iterator[Page]:
    """A browser with one page."""
    there, to = os.pipe()
    back, from_ = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-dev-shm-usage --remote-debugging-pipe"
        command = f'exec "$0" {flags} --user-data-dir="$1" about:blank 3<&{there} 4>&{from_}'
        process = subprocess.Popen(
            ["bash", "-c", command, path, profile],
            pass_fds=(there, from_), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(there)
        os.close(from_)
        try:
            yield Page(to, back)
        finally:
            os.close(to)
            os.close(back)
            process.terminate()
            process.wait(20)
