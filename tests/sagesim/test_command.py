"""How a command ends: its exit code, and one line on stderr for each failure."""

import errno
import sys
from pathlib import Path

import pytest

from sagesim.command import exit_code
from sagesim.files import WriteError
from sagesim.terminal import Failure


def raising(error):
    def command():
        raise error

    return command


@pytest.mark.parametrize(
    "error, code, line",
    [
        (Failure("no\n  good"), 2, "no good"),
        (
            WriteError.of(Path("out"), OSError(errno.ENOSPC, "No space left on device")),
            2,
            "out: cannot be written: No space left on device",
        ),
        (ModuleNotFoundError(name="rich.table"), 2, "rich.table is not installed: pip install"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 2, "not enough memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate: you tried to allocate 16 bytes. No"),
            2,
            "not enough memory: tried to allocate 16 bytes",
        ),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"),
            2,
            "not enough memory: tried to allocate 2.50 gib",
        ),
        (KeyboardInterrupt("interrupted after step 3"), 130, "interrupted after step 3"),
    ],
)
def test_a_failure_prints_one_line(error, code, line, capsys):
    assert exit_code("program", raising(error), {"rich": "cli"}) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"program: {line}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError(name="ours"),
        FileNotFoundError(errno.ENOENT, "No such file", "input"),
        OSError(errno.EIO, "Input/output error"),
        RuntimeError("shapes differ"),
    ],
)
def test_other_errors_are_defects_and_keep_their_traceback(error):
    with pytest.raises(type(error)):
        exit_code("program", raising(error), {"rich": "cli"})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_output_on_a_full_disk_prints_one_line(capsys, monkeypatch):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        assert exit_code("program", lambda: print("result"), {}) == 2
    assert capsys.readouterr().err == (
        "program: the output: cannot be written: No space left on device\n"
    )


def test_the_code_of_the_command_is_returned():
    assert [exit_code("program", lambda code=code: code, {}) for code in (None, 0, 1)] == [0, 0, 1]
