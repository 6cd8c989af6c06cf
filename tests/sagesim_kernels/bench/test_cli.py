"""The command: its errors, a whole run on a fake device, and the tables of a record."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sagesim_kernels.bench.cli as cli
from sagesim_kernels.bench.cli import main
from sagesim_kernels.bench.record import read
from tests.sagesim_kernels.bench.documents import document
from tests.sagesim_kernels.bench.fakes import MACHINE, FakeMeter, find, gaussian, timed
from tests.support.full_disk import full_disk

ROOT = Path(__file__).parents[3]


def one_line(captured) -> str:
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("sagesim_kernels.bench: ")
    return captured.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_as_a_command():
    command = [sys.executable, "-m", "sagesim_kernels.bench"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "no CUDA device" in done.stderr


@pytest.fixture
def shown(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(document()))
    return path


@pytest.mark.slow
def test_show(shown, capsys):
    pytest.importorskip("matplotlib").use("agg")
    assert main(["--show", str(shown)]) == 0
    printed = capsys.readouterr().out
    for words in ("TFLOP/s", "times as fast as", "what INT8 buys", "not run", "Fake 1, torch 2.0"):
        assert words in printed
    assert f"{len(document()['cases'])} cases in {shown}" in printed
    assert {p.name for p in shown.parent.glob("*.png")} == {
        "bench_time.png",
        "bench_frontier.png",
        "bench_payoff.png",
        "bench_ratio_sdpa_flash.png",
        "bench_ratio_sdpa_cudnn.png",
        "bench_ratio_sdpa_efficient.png",
        "bench_ratio_FlexAttention.png",
    }


def test_show_without_matplotlib(shown, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--show", str(shown)]) == 0
    assert "no plots: matplotlib is not installed" in capsys.readouterr().out
    assert not list(shown.parent.glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fast"], ["--fast", "--help"]),
        (["--quick", "--code", "sm80"], ["--code: not allowed with argument --quick"]),
        (["--peers", "cudnn"], ["--peers 'cudnn'", "'sdpa flash', 'sdpa cudnn'"]),
        (["--code", "sm80", "--peers", "sdpa cudnn"], ["--peers 'sdpa cudnn'", "'sdpa flash'"]),
        (["--show", "nowhere.json"], ["nowhere.json"]),
        (
            ["--show", "x.json", "--only", "nothing", "--specs", "typo", "--out", "y.json"],
            ["--show shows the whole record; it takes no --out, --specs, --only"],
        ),
        (["--show", "x.json", "--quick"], ["it takes no --quick"]),
        (["--show", str(ROOT / "pyproject.toml")], ["pyproject.toml", "not a JSON file"]),
    ],
)
def test_wrong_input(arguments, words, capsys):
    assert main(arguments) == 2
    line = one_line(capsys.readouterr())
    assert all(word in line for word in words)


@pytest.fixture
def on_a_fake_device(monkeypatch):
    """The command runs small cases on a fake device."""
    meter = FakeMeter()
    cases = [timed("sdpa flash", "factored", "absent", part="speed"), gaussian("factored")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cli, "IS_INTERPRETED", False)
    monkeypatch.setattr(cli, "supports", lambda spec, dtype: True)
    monkeypatch.setattr(cli, "all_cases", lambda specs, peers: cases)
    monkeypatch.setattr(cli, "code_cases", lambda specs, peers: cases[:1])
    monkeypatch.setattr("sagesim_kernels.bench.cuda.CudaMeter", lambda: meter)
    monkeypatch.setattr("sagesim_kernels.bench.machine.describe", lambda: MACHINE)
    monkeypatch.setattr(torch, "device", lambda name, device=torch.device: device("cpu"))
    import sagesim_kernels.bench.run as room

    run = room.run
    monkeypatch.setattr(room, "run", lambda c, r, s, on_done: run(c, r, s, on_done, find))
    return meter


def test_a_whole_run(on_a_fake_device, tmp_path, capsys):
    pytest.importorskip("matplotlib").use("agg")
    out = tmp_path / "new" / "bench.json"
    assert main(["--out", str(out), "--specs", "factored", "sagebwd", "factored"]) == 0
    captured = capsys.readouterr()
    assert "1 of 2: speed d8 full n16" in captured.err and "TFLOP/s" in captured.out
    assert "absent" in captured.out and "No module named 'absent'" in captured.out
    made = read(out)
    assert list(made["cases"]) == ["speed d8 full n16", "accuracy d8 full sigma1"]
    assert made["settings"]["specs"] == ["factored", "sagebwd"]
    assert made["command"].startswith("python -m sagesim_kernels.bench --out")
    assert made["machine"] == MACHINE

    runs = on_a_fake_device.runs
    assert main(["--out", str(out), "--specs", "factored", "sagebwd"]) == 0
    assert on_a_fake_device.runs == runs, "finished cases were measured again"
    capsys.readouterr()
    assert main(["--out", str(out), "--specs", "factored"]) == 2
    assert "specs of the settings is" in one_line(capsys.readouterr())
    words = ["--specs", "factored", "sagebwd", "--peers", "sdpa cudnn", "sdpa flash"]
    assert main(["--out", str(out), *words]) == 2
    assert "['sdpa flash', 'sdpa cudnn'] now" in one_line(capsys.readouterr())


def test_the_code_of_another_gpu_has_a_record_of_its_own(
    on_a_fake_device, monkeypatch, tmp_path, capsys
):
    pytest.importorskip("matplotlib").use("agg")
    chosen = []
    monkeypatch.setattr("sagesim_kernels.bench.foreign_target.compile_for", chosen.append)
    monkeypatch.chdir(tmp_path)
    machine = MACHINE | {"compute_capability": "9.0"}
    monkeypatch.setattr("sagesim_kernels.bench.machine.describe", lambda: machine)
    assert main(["--code", "sm80", "--specs", "factored"]) == 0
    assert "sm_80 code, assembled for sm_90, on Fake 1" in " ".join(capsys.readouterr().out.split())
    settings = read(Path("out", "bench_sm80.json"))["settings"]
    assert settings["code"] == "sm80" and settings["peers"] == ["sdpa flash"]
    assert chosen == ["sm80"]

    other = ["--code", "sm89", "--specs", "factored", "--out", "out/bench_sm80.json"]
    assert main(other) == 2
    line = one_line(capsys.readouterr())
    assert "code of the settings is 'sm80' in the record and 'sm89' now" in line
    native = ["--specs", "factored"]
    assert main([*native, "--only", "accuracy*"]) == 0
    assert read(Path("out", "bench.json"))["settings"]["code"] is None
    capsys.readouterr()
    assert main([*native, "--out", "out/bench_sm80.json"]) == 2
    assert "'sdpa flash'" in one_line(capsys.readouterr())


def test_some_cases_and_then_the_others(on_a_fake_device, tmp_path, capsys):
    pytest.importorskip("matplotlib").use("agg")
    out = ["--out", str(tmp_path / "bench.json"), "--specs", "factored"]
    assert main([*out, "--only", "speed*n17"]) == 2
    assert "'speed*n17' matches none of the cases 'speed d8" in one_line(capsys.readouterr())
    assert main([*out, "--only", "accuracy*", "*sigma1"]) == 0
    assert list(read(tmp_path / "bench.json")["cases"]) == ["accuracy d8 full sigma1"]
    assert main(out) == 0
    assert "speed d8 full n16" in read(tmp_path / "bench.json")["cases"]


def test_failures_that_end_a_run(on_a_fake_device, tmp_path, capsys):
    out = tmp_path / "bench.json"
    on_a_fake_device.is_lost = True
    assert main(["--out", str(out)]) == 2
    assert "the device was lost" in capsys.readouterr().err

    def interrupt():
        raise KeyboardInterrupt

    on_a_fake_device.is_lost = False
    on_a_fake_device.seconds = interrupt
    assert main(["--out", str(tmp_path / "other.json")]) == 130
    assert "run the same command again" in capsys.readouterr().err
    assert main(["--out", str(tmp_path)]) == 2
    assert str(tmp_path) in one_line(capsys.readouterr())


def test_a_full_disk_ends_the_run_and_keeps_the_record(on_a_fake_device, tmp_path, capsys):
    pytest.importorskip("matplotlib").use("agg")
    out = tmp_path / "bench.json"
    words = ["--out", str(out), "--specs", "factored"]
    assert main([*words, "--only", "accuracy*"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    with full_disk():
        assert main(words) == 2
    line = one_line(capsys.readouterr())
    assert line == f"sagesim_kernels.bench: {out}: cannot be written: File too large\n"
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_plots_that_cannot_be_written_end_the_command(shown, capsys):
    """They are written before the tables are printed, of which a reader may read only the first."""
    pytest.importorskip("matplotlib").use("agg")
    with full_disk():
        assert main(["--show", str(shown)]) == 2
    assert ".png: cannot be written: File too large" in one_line(capsys.readouterr())
    assert [path.name for path in shown.parent.iterdir()] == [shown.name]


def test_labels_that_are_not_specs_or_have_no_kernel(
    on_a_fake_device, tmp_path, capsys, monkeypatch
):
    out = ["--out", str(tmp_path / "bench.json")]
    assert main([*out, "--specs", "sagebw"]) == 2
    assert "sagebw" in one_line(capsys.readouterr())
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cli, "IS_INTERPRETED", False)
    assert main([*out, "--specs", "fpa"]) == 2
    assert "no kernel for 'fpa': " in one_line(capsys.readouterr())
    assert not (tmp_path / "bench.json").exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("sm70", "unknown code 'sm70'; known are sm80, sm86, sm89"),
        ("sm80", "Fake 1 has compute capability 10.0; sm80 code runs on a Hopper GPU"),
    ],
)
def test_code_that_does_not_run_here(on_a_fake_device, monkeypatch, tmp_path, capsys, code, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake 1")
    assert main(["--out", str(tmp_path / "bench.json"), "--code", code]) == 2
    assert f"--code: {words}" in one_line(capsys.readouterr())
    assert not list(tmp_path.iterdir())


def test_the_interpreter_is_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cli, "IS_INTERPRETED", True)
    assert main([]) == 2
    assert "TRITON_INTERPRET" in one_line(capsys.readouterr())


def test_a_missing_package_is_reported_before_anything_runs(on_a_fake_device, monkeypatch, capsys):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", missing)
    assert main([]) == 2
    assert "rich is not installed: pip install 'sagebwd[bench]'" in one_line(capsys.readouterr())
    assert on_a_fake_device.runs == 0
