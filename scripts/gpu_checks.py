"""Run all checks that need a GPU, and record their commands and results.

    python scripts/gpu_checks.py [--out docs/data/gpu_checks.json] [--only NAME ...] [--after LOG]
                                 [--limit SECONDS] [--workers N]

Each check is a command. compute-sanitizer runs in several processes, each with a part of the calls.
Tests of Hopper's kernels marked `exhaustive` are left out; `make gpu-test` runs them. The record
holds a check's exit code, its time, the last lines that it printed, and how often compute-sanitizer
reports each place in the source. Checks that are not run keep the record of an earlier run. Checks
of sm_80 and sm_89 code need a Hopper GPU; see CONTRIBUTING.md.

With --limit a check of pytest is ended after so many seconds. Its record has the numbers of tests
that passed and failed until then, and it counts as not passed.

--workers is the most processes of a check. By default each core has one, up to the number that
suits the check's memory.

To split the fuzz cases over several runs, save the output of pytest -v and pass it as LOG to the
next run. Tests that passed according to LOG are not run again, and the record holds their number.
Make sure that all runs are of the same commit: the script does not check this.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import triton

import sagesim
from sagesim.command import exit_code
from sagesim.files import check_writable, write_text
from sagesim_kernels.bench.machine import sources_hash

ROOT = Path(__file__).parents[1]
CORES = os.cpu_count() or 1
REPORTED = 9
MOST_REPORTS = 2_000_000
"""Reports that compute-sanitizer prints. racecheck reports 50,000 of a call in codes."""

MOST_PARTS = 16
"""Processes of a check of compute-sanitizer, each with a part of the calls."""

HANDED_OVER = ("maps.ds.index(slot).load(query_rows(4))", "maps.ds_maxima.index(slot).load(")
"""Loads of what other warps have stored, told by an mbarrier; see `is_false_positive`."""

TAKEN = "numbers = buffer.index(slot).load(OWN)"
"""Such a load in the controls."""

TOOLS = ("memcheck", "synccheck", "racecheck")
"""Of compute-sanitizer."""

CONTROLS = "racecheck of a control"
"""The check that runs scripts/sanitizer_controls.py."""

FUZZ = "tests/sagesim_kernels/test_fuzz.py"
HOPPER = [
    f"tests/sagesim_kernels/hopper/test_{name}.py"
    for name in ("in_16_bit", "codes", "codes_operands", "forward_codes")
]
CONTRACT = "tests/sagesim_kernels/test_contract.py"
LARGE = "tests/sagesim_kernels/test_gpu.py::TestBeyondInt32"
MODELS = "tests/sagesim_kernels/integrations/test_gpu.py"
CALLS = [
    f"tests/sagesim_kernels/{name}.py"
    for name in (
        "test_backwards_without_codes",
        "test_attention",
        "test_invariance",
        "operands/test_dq_sums",
    )
]
"""Tests of attention calls. A contract test or a fuzz case runs the portable kernels if they have
to write codes of P or dS; a call runs the kernels of its GPU."""


def with_workers(command: list[str], most: int) -> list[str]:
    """Return a command of pytest with at most so many workers; other commands stay.

    >>> with_workers(["pytest", "-n", "16", "tests"], 4)
    ['pytest', '-n', '4', 'tests']
    """
    if "-n" not in command:
        return command
    at = command.index("-n") + 1
    return [*command[:at], str(min(int(command[at]), most)), *command[at + 1 :]]


def pytest(*arguments: str, workers: int = 60) -> list[str]:
    """Return the command of a test run in parallel.

    Each worker takes a core, and one to two gigabytes of GPU memory, or seven with whole models,
    and up to 70 with tensors beyond int32. Some tests take minutes, so idle workers steal tests
    from busy ones.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    return [*command, "-n", str(min(workers, CORES)), "--dist", "worksteal", *arguments]


def sanitizer(tool: str, script: str = "sanitize", *arguments: str) -> list[str]:
    """Return the command of compute-sanitizer, from the PATH or from the CUDA toolkit.

    It runs scripts/{script}.py with the arguments.
    """
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    every = ["--show-backtrace", "no", "--print-limit", str(MOST_REPORTS)]
    every += ["--error-exitcode", str(REPORTED)]
    options = ["--racecheck-report", "hazard"] if tool == "racecheck" else []
    program = [sys.executable, f"scripts/{script}.py", *arguments]
    return [found, "--tool", tool, *options, *every, *program]


CHECKS = {
    "gpu tests": pytest(
        "-m",
        "gpu",
        *(f"--ignore={path}" for path in (FUZZ, *HOPPER, MODELS)),
        f"--deselect={LARGE}",
    ),
    "tensors beyond int32": pytest(LARGE, workers=1),
    "whole models": pytest("-m", "gpu", MODELS, workers=8),
    "tests of Hopper's kernels": pytest("-m", "not exhaustive", *HOPPER),
    "20,000 fuzz cases": pytest("--device", "cuda", FUZZ),
    "contract tests, sm_80 code": pytest("--code", "sm80", CONTRACT),
    "attention calls, sm_80 code": pytest("-m", "gpu", "--code", "sm80", *CALLS),
    "20,000 fuzz cases, sm_80 code": pytest("--device", "cuda", "--code", "sm80", FUZZ),
    "contract tests, sm_89 code": pytest("--code", "sm89", CONTRACT),
    "attention calls, sm_89 code": pytest("-m", "gpu", "--code", "sm89", *CALLS),
    "20,000 fuzz cases, sm_89 code": pytest("--device", "cuda", "--code", "sm89", FUZZ),
    **{tool: sanitizer(tool) for tool in TOOLS},
    **{f"{tool}, sm_80 code": sanitizer(tool, "sanitize", "--code", "sm80") for tool in TOOLS},
    CONTROLS: sanitizer("racecheck", "sanitizer_controls"),
}

READ = re.compile(r"=+ +(?:Read Thread \(.*\) )?at (\w+)\+0x\w+ in (\w+\.py):(\d+)")
"""Matches the place of a read in a report of racecheck."""

PASSED = re.compile(r"PASSED (tests/\S+::.+?) *$|^(tests/\S+::.+?) PASSED", re.M)
"""Matches a line of pytest -v, on several workers or on one, and a test that passed. Names of tests
may contain spaces."""

ENDED = re.compile(r"(PASSED|FAILED) (tests/\S+::[^\n]+?) *$")
"""Matches a line of pytest -v on several workers: how a test ended, and the test."""

COLLECTED = re.compile(r"workers \[(\d+) items\]")
"""Matches the line in which pytest says how many tests it runs on several workers."""


def reads(lines: Iterable[str]) -> Counter[tuple[str, ...]]:
    """Return how often each place is reported: the kernel, the file and the line."""
    return Counter(match.groups() for line in lines if (match := READ.fullmatch(line)))


def is_false_positive(tool: str, kernel: str, file: str, line: str) -> bool:
    """Return whether docs/kernels.md explains why the reported read is correct.

    racecheck reports reads of the arguments that Triton itself passes to the warps of a
    warp-specialised kernel, at the line of the kernel's `def`. It does not know that warps that
    wait for an mbarrier see what others stored before they arrived there.
    """
    source = _line(ROOT / "sagesim_kernels" / "hopper" / file, line)
    if tool != "racecheck":
        return False
    is_handed_over = kernel == "hopper_codes_backward" and any(x in source for x in HANDED_OVER)
    return source.startswith(f"def {kernel}(") or is_handed_over


def _line(path: Path, line: str) -> str:
    """Return a line of a file, by its number; "" if there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return "".join(lines[int(line) - 1 : int(line)])


def is_reported_of_controls(lines: Iterable[str]) -> bool:
    """Return whether racecheck reports the hand-over of both controls, the right and the wrong."""
    script = ROOT / "scripts" / "sanitizer_controls.py"
    taken = {kernel for kernel, _, line in reads(lines) if TAKEN in _line(script, line)}
    return taken == {"handed_over", "handed_over_early"}


def verdict(name: str, exit_code: int, lines: list[str]) -> dict[str, object]:
    """Return whether the check passed, and the places that compute-sanitizer reported.

    A check of compute-sanitizer passes if every report is a false positive. The check of the
    controls passes if both are reported: if not, false positives need another explanation, or none.
    """
    if name == CONTROLS:
        return {"passed": exit_code == REPORTED and is_reported_of_controls(lines)}
    if "sanitizer" not in CHECKS[name][0] or exit_code != REPORTED:
        return {"passed": exit_code == 0}
    places = reads(lines)
    # A report of racecheck names one read, unless it is about two writes; then the numbers differ
    # and the check fails.
    reports = sum("hazard detected" in line for line in lines)
    explained = all(is_false_positive(name, *place) for place in places)
    named = {"{} in {}:{}".format(*place): count for place, count in places.items()}
    return {"passed": 0 < reports == places.total() and explained, "reports": named}


def until_cut_off(lines: Iterable[str]) -> dict[str, int]:
    """Return how many tests passed and failed, and of how many, by these lines of pytest -v."""
    lines = list(lines)
    ended = {test: word for line in lines for word, test in ENDED.findall(line)}
    counts = {name: list(ended.values()).count(name.upper()) for name in ("passed", "failed")}
    collected = [int(n) for line in lines for n in COLLECTED.findall(line)]
    return counts | ({"of": collected[0]} if collected else {})


def parts_of(name: str, workers: int) -> list[list[str]]:
    """Return the commands of a check, which run at the same time, on at most so many workers."""
    command = with_workers(CHECKS[name], workers)
    if "scripts/sanitize.py" not in command:
        return [command]
    parts = min(MOST_PARTS, workers)
    return [[*command, "--part", f"{i}/{parts}"] for i in range(parts)]


def worst(exit_codes: Sequence[int]) -> int:
    """Return the exit code of a check by those of its commands.

    >>> worst([0, REPORTED, 0]) == REPORTED, worst([REPORTED, 1, -9])
    (True, 1)
    """
    return next((code for code in exit_codes if code not in (0, REPORTED)), max(exit_codes))


def output_of(
    commands: Sequence[Sequence[str]], env: Mapping[str, str], limit: float | None
) -> tuple[list[list[str]], list[int], bool]:
    """Run commands at the same time, and print what they print.

    Each runs on one GPU of this machine if there are several commands, and sees all GPUs if not.

    Returns each command's lines and exit code, and whether the limit, in seconds, ended them.
    """
    outputs: list[list[str]] = [[] for _ in commands]
    is_cut_off = threading.Event()
    processes: list[subprocess.Popen[str]] = []

    def kill(number: int) -> None:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, number)

    def end() -> None:
        is_cut_off.set()
        kill(signal.SIGKILL)

    def read(process: subprocess.Popen[str], lines: list[str]) -> None:
        assert process.stdout is not None
        with process.stdout as printed:
            for line in filter(str.strip, printed):
                print(line, end="", flush=True)
                lines.append(line.rstrip())

    for number, command in enumerate(commands):
        if len(commands) > 1:
            env = {**env, "CUDA_VISIBLE_DEVICES": str(number % torch.cuda.device_count())}
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
    readers = [
        threading.Thread(target=read, args=both, daemon=True)
        for both in zip(processes, outputs, strict=True)
    ]
    timer = threading.Timer(threading.TIMEOUT_MAX if limit is None else limit, end)
    timer.daemon = True
    for thread in (timer, *readers):
        thread.start()
    try:
        for thread in readers:
            thread.join()
        exit_codes = [process.wait() for process in processes]
    except KeyboardInterrupt:  # sessions of their own do not get it
        kill(signal.SIGINT)
        raise
    finally:
        timer.cancel()
    return outputs, exit_codes, is_cut_off.is_set()


def run(
    name: str, passed: set[str], limit: float | None = None, workers: int = CORES
) -> dict[str, object]:
    """Run one check and return its record.

    passed: tests that are not run again. limit: seconds, or None. workers: see `parts_of`.
    """
    commands = parts_of(name, workers)
    env = dict(os.environ)
    if "sanitizer" in commands[0][0]:
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    deselected = [f"--deselect={test}" for test in sorted(passed)]
    start = time.perf_counter()
    outputs, exit_codes, is_cut_off = output_of([[*c, *deselected] for c in commands], env, limit)
    seconds = time.perf_counter() - start
    lines = [line for output in outputs for line in output]
    words = [Path(w).name if w.startswith("/") else w for w in commands[0]]
    return {
        "command": " ".join(words),
        **({"parts_at_a_time": len(commands)} if len(commands) > 1 else {}),
        **({"passed_in_a_run_before": len(passed)} if passed else {}),
        "exit_code": worst(exit_codes),
        **verdict(name, worst(exit_codes), lines),
        **({"until_cut_off": until_cut_off(lines)} if is_cut_off else {}),
        "printed": [line for output in outputs for line in output[-2:]],
        "seconds": round(seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "data" / "gpu_checks.json")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--after", type=Path, metavar="LOG", help="output of pytest -v")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end checks after this time")
    parser.add_argument("--workers", type=int, default=CORES, metavar="N", help="at most")
    args = parser.parse_args()
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: at least 1")
    if args.limit is not None and any("pytest" not in CHECKS[name] for name in args.only):
        parser.error("--limit needs --only with checks that run pytest")
    passed: set[str] = set()
    if args.after is not None:
        if len(args.only) != 1 or "pytest" not in CHECKS[args.only[0]]:
            parser.error("--after needs --only with one check that runs pytest")
        passed = {a or b for a, b in PASSED.findall(args.after.read_text(errors="replace"))}
        if not passed:
            parser.error(f"{args.after} names no test that passed; write it with pytest -v")
    check_writable(args.out)
    checks = json.loads(args.out.read_text())["checks"] if args.out.exists() else {}
    for name in args.only:
        record = run(name, passed, args.limit, args.workers)
        print(f"{name}: exit code {record['exit_code']}, {record['seconds']} s")
        checks[name] = record | {
            "machine": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, "
            f"torch {torch.__version__}, triton {triton.__version__}, "
            f"sagebwd {sagesim.__version__}, kernels {sources_hash()}"
        }
    document = {"command": "python scripts/gpu_checks.py", "checks": checks}
    write_text(args.out, json.dumps(document, indent=1) + "\n")
    return int(not all(checks[name]["passed"] for name in args.only))


if __name__ == "__main__":
    sys.exit(exit_code("gpu_checks.py", main, {}))
