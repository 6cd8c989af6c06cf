"""How `scripts/gpu_checks.py` judges the reports of compute-sanitizer."""

import importlib.util
import runpy
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from sagesim import AttentionSpec
from sagesim_kernels import hopper
from tests.sagesim_kernels.untraced import has_codes_backward
from tests.support.inputs import case

PATH = Path(__file__).parents[1] / "scripts" / "gpu_checks.py"
HOPPER = PATH.parents[1] / "sagesim_kernels" / "hopper"


@pytest.fixture(scope="module")
def gpu_checks():
    spec = importlib.util.spec_from_file_location("gpu_checks", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line_of(file: str, start: str) -> int:
    lines = (HOPPER / file).read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if line.startswith(start))


def hazard(read_at: str) -> list[str]:
    return [
        "========= Error: Potential RAW hazard detected at __shared__ 0x1e4ee in block (0,0,0) :",
        "=========     Write Thread (31,0,0) at hopper_forward+0x196c0 in forward.py:64",
        f"=========     Read Thread (576,0,0) at {read_at}",
        "=========     Current Value : 3",
        "========= ",
    ]


def inside(file: str, kernel: str) -> list[str]:
    """A hazard at the line behind the kernel's `def`."""
    return hazard(f"{kernel}+0x2b0 in {file}:{line_of(file, f'def {kernel}(') + 1}")


def test_hazards_of_triton_itself_are_counted_and_pass(gpu_checks):
    line = line_of("forward.py", "def hopper_forward(")
    lines = 3 * hazard(f"hopper_forward+0x2b0 in forward.py:{line}")
    expected = {"passed": True, "reports": {f"hopper_forward in forward.py:{line}": 3}}
    assert gpu_checks.verdict("racecheck", 9, lines) == expected
    assert gpu_checks.verdict("synccheck", 9, lines)["passed"] is False


def with_text(path: Path, text: str) -> int:
    """The number of the only line of a file with this text."""
    (line,) = (i for i, x in enumerate(path.read_text().splitlines(), 1) if text in x)
    return line


@pytest.mark.parametrize(("i", "file"), [(0, "codes_warps.py"), (1, "codes_maps.py")])
def test_loads_of_what_other_warps_stored_pass_in_one_kernel(gpu_checks, i, file):
    line = with_text(HOPPER / file, gpu_checks.HANDED_OVER[i])
    known = hazard(f"hopper_codes_backward+0x730 in {file}:{line}")
    assert gpu_checks.verdict("racecheck", 9, known)["passed"] is True
    for other in (
        hazard(f"hopper_codes_backward+0x730 in {file}:{line + 1}"),
        hazard(f"hopper_backward+0x730 in {file}:{line}"),
        hazard(f"hopper_codes_backward+0x730 in {file}:100000"),
    ):
        assert gpu_checks.verdict("racecheck", 9, known + other)["passed"] is False


def test_both_controls_have_to_be_reported(gpu_checks):
    script = PATH.with_name("sanitizer_controls.py")
    at = f"sanitizer_controls.py:{with_text(script, gpu_checks.TAKEN)}"
    right, early = (hazard(f"{x}+0x1 in {at}") for x in ("handed_over", "handed_over_early"))
    name = "racecheck of a control"
    assert gpu_checks.verdict(name, 9, right + early) == {"passed": True}
    for lines in ([], right, early, hazard("handed_over+0x1 in sanitizer_controls.py:1")):
        assert gpu_checks.verdict(name, 9, lines) == {"passed": False}


def test_reports_of_memcheck_fail(gpu_checks):
    lines = [
        "========= Invalid __global__ read of size 8 bytes",
        "=========     at finish_dq_kernel+0x870 in dq_sums.py:113",
        "=========     by thread (64,0,0) in block (1,0,0)",
        "========= ",
    ]
    assert gpu_checks.verdict("memcheck", 9, 2 * lines)["passed"] is False


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("racecheck", inside("forward.py", "hopper_forward")),
        ("racecheck", inside("dq_parts.py", "store_dq")),
        ("racecheck", hazard("key_tiles+0x2b0 in dkdv.py:40")),
        ("racecheck", [x for x in hazard("a+0x1 in b.py:1") if "Read" not in x]),
    ],
)
def test_one_other_report_fails(gpu_checks, name, more):
    line = line_of("forward.py", "def hopper_forward(")
    known = hazard(f"hopper_forward+0x2b0 in forward.py:{line}")
    assert gpu_checks.verdict(name, 9, known)["passed"] is True
    assert gpu_checks.verdict(name, 9, known + more)["passed"] is False


def test_an_interrupted_run_fails(gpu_checks):
    assert gpu_checks.verdict("racecheck", 0, []) == {"passed": True}
    assert gpu_checks.verdict("racecheck", 1, []) == {"passed": False}
    assert gpu_checks.verdict("racecheck", 9, []) == {"passed": False, "reports": {}}


def test_checks_of_other_gpus_code_state_the_code_and_the_number_of_cases(gpu_checks):
    from tests.sagesim_kernels.test_fuzz import CASES

    found = {name: c for name, c in gpu_checks.CHECKS.items() if "--code" in c}
    assert len(found) == 9
    for name, command in found.items():
        code = command[command.index("--code") + 1]
        assert name.endswith(f", {code.replace('sm', 'sm_')} code")
        if gpu_checks.FUZZ in command:
            assert name.startswith(f"{CASES['cuda']:,} fuzz cases, ") and "cuda" in command
        elif gpu_checks.CONTRACT in command:
            assert name.startswith("contract tests, ")
        elif "scripts/sanitize.py" in command:
            assert name.split(",")[0] == command[command.index("--tool") + 1]
        else:
            assert name.startswith("attention calls, ") and {*gpu_checks.CALLS} <= {*command}


def test_the_record_of_a_check_that_is_cut_off_counts_its_tests(gpu_checks, monkeypatch):
    printed = (
        "2 workers [4 items]",
        "[gw0] [ 50%] PASSED tests/test_a.py::test_one[a b] ",
        "tests/test_a.py::test_two ",
        "[gw1] [ 75%] FAILED tests/test_a.py::test_two ",
        "tests/test_a.py::test_three ",
    )
    source = f"print({chr(10).join(printed)!r}, flush=True); import time; time.sleep(60)"
    monkeypatch.setitem(gpu_checks.CHECKS, "a check", [sys.executable, "-c", source])
    record = gpu_checks.run("a check", set(), limit=3)
    assert record["until_cut_off"] == {"passed": 1, "failed": 1, "of": 4}
    assert record["passed"] is False
    assert record["seconds"] < 30


def test_tests_that_passed_are_found_by_their_whole_names(gpu_checks) -> None:
    """--deselect takes prefixes, so a part of a name would deselect other tests too."""
    log = """
[gw0] [ 50%] PASSED tests/test_a.py::test_one[a, (1, 2)]\x20
[gw1] [ 60%] FAILED tests/test_a.py::test_one[a, (1, 3)]\x20
tests/test_b.py::test_two[a, (1, 2)] PASSED                  [100%]
tests/test_b.py::test_two[a, (1, 3)]\x20
"""
    found = {a or b for a, b in gpu_checks.PASSED.findall(log)}
    assert found == {"tests/test_a.py::test_one[a, (1, 2)]", "tests/test_b.py::test_two[a, (1, 2)]"}


def test_workers_are_limited(gpu_checks) -> None:
    for name, command in gpu_checks.CHECKS.items():
        limited = gpu_checks.with_workers(command, 2)
        if "pytest" in command:
            assert int(limited[limited.index("-n") + 1]) <= 2
        else:
            assert limited == command, name


def test_a_sanitizer_runs_parts_of_the_calls(gpu_checks) -> None:
    """Together the parts are all calls."""
    parts = gpu_checks.parts_of("memcheck, sm_80 code", 3)
    assert [command[-1] for command in parts] == ["0/3", "1/3", "2/3"]
    assert all(command[-4:-2] == ["--code", "sm80"] for command in parts)
    assert gpu_checks.parts_of(gpu_checks.CONTROLS, 3) == [gpu_checks.CHECKS[gpu_checks.CONTROLS]]
    assert len(gpu_checks.parts_of("gpu tests", 3)) == 1


def test_a_check_in_parts_fails_with_one_of_them(gpu_checks, monkeypatch) -> None:
    program = "import os, sys; print('1 configurations', flush=True); code = {}; "
    program += "os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)"
    for exit_codes, code in (([0, 0], 0), ([0, 9], 9), ([9, 1], 1), ([9, -9], -9)):
        commands = [[sys.executable, "-c", program.format(c)] for c in exit_codes]
        monkeypatch.setattr(gpu_checks, "parts_of", lambda *_, commands=commands: commands)
        monkeypatch.setattr(gpu_checks.torch.cuda, "device_count", lambda: 1)
        record = gpu_checks.run("memcheck", set())
        assert record["exit_code"] == code
        assert record["printed"] == ["1 configurations"] * 2
        assert record["parts_at_a_time"] == 2


def test_no_workers_are_refused(gpu_checks, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", "--workers", "0"])
    with pytest.raises(SystemExit):
        gpu_checks.main()
    assert "--workers 0: at least 1" in capsys.readouterr().err


def test_sanitizers_run_hoppers_backward_in_codes(monkeypatch) -> None:
    """At three head sizes, with scales of tiles and with scales of rows and columns."""
    monkeypatch.setattr(hopper.support, "IS_INTERPRETED", False)
    monkeypatch.setattr(hopper.support, "is_hopper", lambda: True)
    script = runpy.run_path(str(PATH.with_name("sanitize.py")))
    reached = set()
    for label, (heads, kv_heads, n_q, n_k, d, is_causal) in product(
        script["LABELS"], script["SHAPES"]
    ):
        x = case(seed=0, n_q=n_q, n_k=n_k, d=d, heads=(1, heads), is_causal=bool(is_causal))
        x = replace(x, k=x.k[:, :kv_heads], v=x.v[:, :kv_heads], enable_gqa=True)
        if has_codes_backward(x, AttentionSpec.parse(label)):
            reached.add((label, d))
    assert reached == {*product(("sagebwd", "factored"), (40, 64, 128))}
