"""What `scripts/gpu_checks.py` makes of the reports of compute-sanitizer."""

import importlib.util
from pathlib import Path

import pytest

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
        "=========     Write Thread (31,0,0) at _forward+0x196c0 in forward.py:64",
        f"=========     Read Thread (576,0,0) at {read_at}",
        "=========     Current Value : 3",
        "========= ",
    ]


def uninitialized(read_at: str) -> list[str]:
    return [
        "========= Uninitialized __global__ memory read of size 8 bytes",
        f"=========     at {read_at}",
        "=========     by thread (64,0,0) in block (1,0,0)",
        "=========     Address 0x7fd80b444208",
        "========= ",
    ]


def test_what_triton_itself_does_is_counted_and_passes(gpu_checks):
    line = line_of("forward.py", "def _forward(")
    lines = 3 * hazard(f"_forward+0x2b0 in forward.py:{line}")
    expected = {"passed": True, "reports": {f"_forward in forward.py:{line}": 3}}
    assert gpu_checks.verdict("racecheck", 9, lines) == expected
    assert gpu_checks.verdict("synccheck", 9, lines)["passed"] is False


def test_what_tma_has_written_is_counted_and_passes(gpu_checks):
    lines = 2 * uninitialized("_finish+0x870 in backward.py:113")
    expected = {"passed": True, "reports": {"_finish in backward.py:113": 2}}
    assert gpu_checks.verdict("initcheck", 9, lines) == expected
    assert gpu_checks.verdict("memcheck", 9, lines)["passed"] is False


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("racecheck", hazard("_forward+0x2b0 in forward.py:80")),
        ("racecheck", hazard("send+0x2b0 in turns.py:120")),
        ("racecheck", hazard("key_tiles+0x2b0 in key_tiles.py:40")),
        ("racecheck", [x for x in hazard("a+0x1 in b.py:1") if "Read" not in x]),
        ("initcheck", uninitialized("one_pass+0x870 in partitions.py:113")),
        ("initcheck", uninitialized("void at::native::vectorized_elementwise_kernel<8>+0xd0")),
    ],
)
def test_one_other_report_fails(gpu_checks, name, more):
    line = line_of("forward.py", "def _forward(")
    known = {
        "racecheck": hazard(f"_forward+0x2b0 in forward.py:{line}"),
        "initcheck": uninitialized("_finish+0x870 in backward.py:113"),
    }
    assert gpu_checks.verdict(name, 9, known[name])["passed"] is True
    assert gpu_checks.verdict(name, 9, known[name] + more)["passed"] is False


def test_a_run_that_broke_off_fails(gpu_checks):
    assert gpu_checks.verdict("racecheck", 0, []) == {"passed": True}
    assert gpu_checks.verdict("racecheck", 1, []) == {"passed": False}
    assert gpu_checks.verdict("racecheck", 9, []) == {"passed": False, "reports": {}}
