"""Run cases in processes of their own, which a kernel may damage or crash.

`FreshProcesses` is used by the process that searches. `main` is what the other process runs.
"""

from __future__ import annotations

import os
import pickle
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from sagesim.fuzzing.cases import FuzzCase
from sagesim.fuzzing.judge import Outcome, judge
from sagesim.spec import AttentionSpec

CRASH = "crash"
"""The kind of an `Outcome` whose process ended."""


class CannotStart(Exception):
    """A fresh process cannot import the function. The message says why."""


class FreshProcesses:
    """Runs cases in another process, and in a new one after each exception or crash.

    Args:
        function: "package.module:function".
        spec, device: see `sagesim.fuzz`.
    """

    def __init__(self, function: str, spec: AttentionSpec, device: str) -> None:
        self._setup = (function, spec, device)
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, case: FuzzCase) -> Outcome:
        """Run a case.

        Raises:
            CannotStart: if the process cannot import the function.
        """
        process = self._process or self._start()
        try:
            _send(process.stdin, case)
            outcome: Outcome = pickle.load(process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError, pickle.UnpicklingError):
            process.communicate()
            outcome = Outcome(case, error=_words(process.returncode), kind=CRASH)
        if outcome.kind is not None:
            self.stop()
        return outcome

    def stop(self) -> None:
        """End the process. The next case gets a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": paths},
        )
        self._process = process
        try:
            _send(process.stdin, self._setup)
            problem: str | None = pickle.load(process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError, pickle.UnpicklingError):
            process.communicate()
            problem = _words(process.returncode)
        if problem is not None:
            self.stop()
            raise CannotStart(problem)
        return process


def main() -> None:
    """Read the setup and then cases from stdin, and write an outcome for each to stdout."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints must not mix with the outcomes
    function, spec, device = pickle.load(sys.stdin.buffer)
    try:
        attention: Any = pkgutil.resolve_name(function)
    except (Exception, SystemExit) as error:  # whatever the import of the user's module raises
        _send(results, f"{type(error).__name__}: {error}")
        return
    _send(results, None)
    while True:
        try:
            case = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _send(results, judge(case, attention, spec, device))


def _send(stream: Any, message: object) -> None:
    pickle.dump(message, stream)
    stream.flush()


def _words(code: int) -> str:
    """How a process ended."""
    if code >= 0:
        return f"the process ended with exit code {code}"
    return f"the process crashed: {signal.Signals(-code).name}"
