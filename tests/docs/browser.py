"""A headless Chromium, driven through a pair of pipes by the DevTools protocol."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # nothing is fetched from anywhere
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """The browser of this machine, if it has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. Whatever its scripts throw or log as an error is in `errors`."""

    def __init__(self, commands: Any, answers: Any) -> None:
        self._commands, self._answers = commands, answers
        self._session: str | None = None
        self._count = 0
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go there, and wait until it is loaded."""
        # From elsewhere, as a change of the part behind # loads nothing.
        for each in ("about:blank", url):
            self._call("Page.navigate", url=each)
            while self._read().get("method") != "Page.loadEventFired":
                pass

    def run(self, script: str) -> Any:
        """The value of an expression."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """The left button, at the middle of an element, wherever it is."""
        x, y = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        """A key of the keyboard, by its name and its Windows code."""
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has gone"
            text += byte
        message: dict[str, Any] = json.loads(text)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        is_logged = message.get("method") == "Runtime.consoleAPICalled"
        if is_logged and message["params"]["type"] == "error":
            self.errors.append(str(message["params"]["args"]))
        return message


@contextlib.contextmanager
def browse(patience: float = 60.0) -> Iterator[Page]:
    """A browser with one empty page, ended on leaving or after so many seconds."""
    chromium = find()
    assert chromium is not None
    its_input, ours_out = os.pipe()
    ours_in, its_output = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The protocol's pipes are descriptors 3 and 4.
        shell = f'exec "$0" "$@" 8<&{its_input} 9>&{its_output} 3<&8 4>&9'
        process = subprocess.Popen(
            ["bash", "-c", shell, chromium, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(its_input, its_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_input)
        os.close(its_output)
        timer = threading.Timer(patience, process.kill)
        timer.start()
        with os.fdopen(ours_out, "wb") as commands, os.fdopen(ours_in, "rb") as answers:
            try:
                yield Page(commands, answers)
            finally:
                timer.cancel()
                process.terminate()
                process.wait()
