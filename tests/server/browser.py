"""A headless Chromium, driven through a pipe by its DevTools protocol: no package beside the browser itself."""

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
SECONDS = 60
"""Timeout in seconds of every operation."""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for number, end in enumerate(ends, 3):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands from descriptor 3 and writes to 4."""


def find() -> str | None:
    """Finds a browser; None without one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """A browser process.

    Args:
        profile: an empty folder.
    """

    def __init__(self, program: str, profile: Path):
        commands, self.write_end = os.pipe()
        self.read_end, answers = os.pipe()
        start = [sys.executable, "-c", START, str(commands), str(answers), program, *FLAGS, f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(start, pass_fds=(commands, answers), stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(answers)
        self.rest = b""
        self.number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """A command's result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.write_end, data) :]
        while True:
            answer = self.next_message()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def next_message(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.read_end], [], [], SECONDS)
            assert ready, "the browser says nothing"
            data = os.read(self.read_end, 1 << 20)
            assert data, "the browser has gone"
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def page(self, width: int = 1000, height: int = 800, scheme: str = "light") -> "Page":
        return Page(self, width, height, scheme)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(SECONDS)
        os.close(self.write_end)
        os.close(self.read_end)


class Page:
    """A tab of this size and colour scheme ("light" or "dark")."""

    def __init__(self, browser: Browser, width: int, height: int, scheme: str):
        self.browser = browser
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Evaluates JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Waits until it is true."""
        until = time.monotonic() + SECONDS
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < until, f"still not {expression}; the page says {self.value('document.body.innerText')}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector: str) -> str:
        return self.value(f"document.querySelector({json.dumps(selector)}).textContent")

    def texts(self, selector: str) -> list[str]:
        return self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)")

    def fill(self, selector: str, text: str) -> None:
        """Types into a field, as a user does."""
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self.value("document.activeElement.select()")
        self.call("Input.insertText", text=text)
        self.value("document.activeElement.dispatchEvent(new Event('change'))")

    def press(self, key: str, shift: bool = False) -> None:
        codes = {"Enter": 13, "Escape": 27}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": "\r"} if key == "Enter" else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Errors in the page: violations of its policy and uncaught exceptions."""
        self.value("0")
        messages = [each for each in self.browser.events if each.get("sessionId") == self.session]
        entries = [each["params"]["entry"] for each in messages if each["method"] == "Log.entryAdded"]
        thrown = [
            each["params"]["exceptionDetails"]["text"] for each in messages if each["method"] == "Runtime.exceptionThrown"
        ]
        return thrown + [each["text"] for each in entries if each["level"] != "verbose" and each["source"] != "network"]

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)
