"""A headless Chromium that tests control by the DevTools protocol, through a pair of pipes."""

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
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no network access
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """The path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A browser tab. `errors` has the exceptions and logged errors of its scripts."""

    def __init__(self, commands: Any, messages: Any) -> None:
        self._commands, self._messages = commands, messages
        self._session: str | None = None
        self._count = 0
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Load a page and wait until it is loaded."""
        # First an empty page, because changing only the fragment does not load the page again.
        for each in ("about:blank", url):
            self._call("Page.navigate", url=each)
            while self._read().get("method") != "Page.loadEventFired":
                pass

    def run(self, script: str) -> Any:
        """Evaluate a JavaScript expression and return its value."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Scroll to an element and click its center."""
        x, y = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        """Press a key, given by its name and Windows key code."""
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
            message = self._read()
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._messages.read(1)) != b"\0":
            assert byte, "the browser has exited"
            text += byte
        message: dict[str, Any] = json.loads(text)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        is_logged = message.get("method") == "Runtime.consoleAPICalled"
        if is_logged and message["params"]["type"] == "error":
            self.errors.append(str(message["params"]["args"]))
        return message


@contextlib.contextmanager
def browse(timeout: float = 60.0) -> Iterator[Page]:
    """Context manager: a browser with an empty page. It is killed after `timeout` seconds."""
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
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        with os.fdopen(ours_out, "wb") as commands, os.fdopen(ours_in, "rb") as messages:
            try:
                yield Page(commands, messages)
            finally:
                timer.cancel()
                process.terminate()
                process.wait()
