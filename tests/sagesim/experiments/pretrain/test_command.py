"""The commands of `sagesim pretrain` and `sagesim report`, from the command line."""

import json
import re
import shutil
import signal
import sys

import pytest
import torch

from sagesim.cli import main
from sagesim.cli.pretrain import COMMANDS
from sagesim.experiments.pretrain.run.guards import locked_folder
from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.text.corpus import Corpus
from sagesim.experiments.pretrain.training import checkpoint, trained_model
from sagesim.experiments.pretrain.training.trainer import Trainer
from sagesim.files import locked
from sagesim.models import Capture
from sagesim.terminal import Training
from tests.sagesim.experiments.pretrain.conftest import ALONE, TEXT
from tests.sagesim.experiments.pretrain.plan.test_plan import FOLDER
from tests.sagesim.experiments.pretrain.plan.test_plan import TEXT as PLAN
from tests.sagesim.experiments.pretrain.training.test_trainer import command
from tests.support.full_disk import full_disk


def test_from_a_folder_of_text_to_a_report(run, corpus, make_run, tmp_path):
    code, out, err = run(
        "pretrain", "prepare", TEXT, tmp_path / "corpus", "--vocabulary", 500, "--validation", 0.1
    )
    assert (code, err) == (0, "")
    assert Corpus(tmp_path / "corpus").manifest.tokens("train") == corpus.manifest.tokens("train")
    assert f"train: {corpus.manifest.tokens('train')} tokens of 5 documents" in out
    held_out = corpus.manifest.tokens("validation")
    share = 100 * held_out / (held_out + corpus.manifest.tokens("train"))
    said = re.search(r"validation: .* ([\d.]+)% of all", out)
    assert float(said[1]) == pytest.approx(share, rel=1e-2)

    wanted = make_run(attention="emulator:factored")
    words = command(corpus, tmp_path / "runs" / "a", wanted)
    code, out, err = run(*words)
    assert code == 0 and out == f"{tmp_path / 'runs' / 'a'}: 4 steps done\n"
    assert err.splitlines()[-1].startswith("step 4/4  a  loss ")
    log = Log.read(tmp_path / "runs" / "a")
    assert log.run.monitor == ("emulator:factored",) and log.run.vocabulary == 512

    run(*command(corpus, tmp_path / "runs" / "b", make_run()))
    page = tmp_path / "out" / "report.html"
    code, out, err = run("report", tmp_path / "runs", "--out", page, "--margin", 0.01)
    assert (code, err) == (0, "") and out.splitlines()[-1] == f"report: {page}"
    assert "sagesim report" in page.read_text(encoding="utf-8")

    code, out, err = run(
        "pretrain", "capture", tmp_path / "runs" / "a", corpus.folder, tmp_path / "x.safetensors",
        "--layers", 1, "--heads", 0,
    )  # fmt: skip
    assert (code, err) == (0, "")
    recorded = Capture.load(tmp_path / "x.safetensors")
    assert [call.name for call in recorded.calls] == ["layers.1.attention.core"]
    assert recorded.calls[0].q.shape == (1, 1, 32, 32)
    assert recorded.source["data"] == "our pages"


def test_evaluate(run, corpus, make_run, tmp_path):
    for name, attention in (("a", "emulator:sagebwd"), ("b", "sdpa")):
        run(*command(corpus, tmp_path / name, make_run(attention=attention)))
    out_file = tmp_path / "losses.json"
    code, out, err = run(
        "pretrain", "evaluate", corpus.folder, out_file, tmp_path / "a", tmp_path / "b",
        "--cuts", 2,
    )  # fmt: skip
    assert (code, err) == (0, "")
    lines = [line.split(": ")[0] for line in out.splitlines()]
    assert lines == ["a  by emulator:sagebwd", "a  by sdpa", "b  by sdpa"]
    found = json.loads(out_file.read_text())
    assert found["cuts"] == 2 and "torch" in found["machine"]
    first = found["evaluations"][0]
    assert (first["attention"], first["run"]["attention"]) == ("emulator:sagebwd",) * 2
    assert {len(first[name]) for name in ("losses", "whole", "cut")} == {5}


def test_captured_gradients_are_multiplied_by_their_loss_scale(
    run, corpus, make_run, tmp_path, monkeypatch
):
    """The loss scale is a power of two, so the gradients are equal bit for bit."""
    run(*command(corpus, tmp_path / "a", make_run()))
    scaled = trained_model.capture_trained(tmp_path / "a", corpus, ALONE)
    monkeypatch.setattr(trained_model, "LOSS_SCALE", 1.0)
    plain = trained_model.capture_trained(tmp_path / "a", corpus, ALONE)
    assert (scaled.loss_scale, plain.loss_scale) == (65536.0, 1.0)
    for one, other in zip(scaled.calls, plain.calls, strict=True):
        assert torch.equal(one.do, 65536 * other.do) and torch.equal(one.q, other.q)


def test_a_plan_is_listed_and_trained(run, corpus, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.replace("seeds = [0, 1]", "seeds = [0]"))
    words = ["pretrain", "plan", plan, corpus.folder, tmp_path / "runs", "--emulate"]
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert "one: Does it run?" in out and "5 runs, an estimated" in out and "as above" in out
    assert not (tmp_path / "runs").exists()
    code, out, _ = run(*words, "--part", "two", "--dry-run")
    assert code == 0 and "one: Does it run?" not in out
    assert "2 runs, an estimated 0 minutes on one GPU; 0.01 GPU hours are left" in out
    assert not (tmp_path / "runs").exists()
    code, out, err = run(*words, "--part", "two", "--micro-batch", 4)
    assert code == 0 and out.count(": done\n") == 2 and err.startswith("0 of 2 jobs ended")
    code, out, _ = run(*words, "--part", "two", "--dry-run")
    assert "; 0.00 GPU hours are left" in out
    code, out, _ = run(*words, "--part", "two", "--micro-batch", 4)
    assert code == 0
    assert out == f"2 runs in {tmp_path / 'runs'}; 0 stopped at a non-finite number\n"


def test_a_plan_that_cannot_be_trained_is_listed_with_a_warning(run, corpus, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(f"corpus = '0123'\n{PLAN}")
    message = f"the plan is for corpus 0123; this corpus is {corpus.id}"
    words = ["pretrain", "plan", plan, corpus.folder, tmp_path / "runs", "--emulate"]
    for more in ([], ["--part", "two", "--dry-run"]):
        code, out, err = run(*words, *more)
        assert code == 0 and "minutes on one GPU" in out
        assert err.startswith("sagesim: warning: no run can be trained: ")
        assert message in err and err.count("\n") == 1
    code, out, err = run(*words, "--part", "two")
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["five_questions", "delta_or_scales", "batch_or_updates"])
def test_the_shipped_plans_can_be_listed_with_any_corpus(name, run, corpus, tmp_path):
    words = ["pretrain", "plan", FOLDER / f"{name}.toml", corpus.folder, tmp_path / "runs"]
    code, out, err = run(*words)
    assert code == 0 and "runs, an estimated" in out and "warning" in err


def test_a_plan_refuses_what_it_cannot_do(run, corpus, tmp_path, monkeypatch):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    words = ["pretrain", "plan", plan, corpus.folder, tmp_path / "runs", "--part", "two"]
    for more, message in (
        (["--jobs-per-gpu", 2], "--jobs-per-gpu 2: at least 1, and above 1 with --cluster"),
        (["--jobs-per-gpu", 0, "--cluster", "local"], "--jobs-per-gpu 0: at least 1"),
        (["--cluster", "127.0.0.1:1"], "127.0.0.1:1: no Ray cluster answers"),
        (["--cluster", "all"], "cluster 'all' is neither local nor HOST:PORT"),
    ):
        code, out, err = run(*words, *more)
        assert (code, out) == (2, "") and err.startswith(f"sagesim: {message}"), err
    with locked(tmp_path / "runs"):
        code, _, err = run(*words, "--micro-batch", 4)
    assert code == 2 and err.endswith("runs: another command trains a plan there\n")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run(*words)
    assert code == 2 and "use --cluster instead of torchrun" in err
    assert not list((tmp_path / "runs").iterdir())


def test_a_run_that_fails_stops_no_other_run_of_a_plan(run, corpus, tmp_path, monkeypatch):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    words = ["pretrain", "plan", plan, corpus.folder, tmp_path / "runs", "--part", "two"]
    update = Trainer.update

    def failing(trainer, lr):
        if trainer.run.seed == 0 and trainer.run.qk_norm:
            raise ValueError("no step")
        update(trainer, lr)

    monkeypatch.setattr(Trainer, "update", failing)
    code, out, err = run(*words, "--micro-batch", 4, "--emulate")
    assert code == 2 and err.endswith("sagesim: no step\n")
    assert out.count(": done\n") == 3 and out.count(": failed: ValueError: no step\n") == 1


@pytest.mark.parametrize(
    "argv, message",
    [
        (["prepare", "nowhere", "out"], "nowhere: no such folder"),
        (["run", "nowhere", "out"], "nowhere: no prepared corpus"),
        (["run", "CORPUS", "out", "--attention", "flash"], "unknown family 'flash'"),
        (["run", "CORPUS", "out", "--attention", "emulator:x"], "'x'"),
        (["run", "CORPUS", "out", "--tokens-per-step", "1000"], "not a multiple of context=1024"),
        (["run", "CORPUS", "out", "--evaluate-sequences", "64"], "64 needed"),
        (["plan", "nowhere.toml", "CORPUS", "out"], "nowhere.toml: not a readable plan"),
        (["capture", "nowhere", "CORPUS", "out.safetensors"], "not the log of a run"),
        (["evaluate", "CORPUS", "out.json", "nowhere"], "not the log of a run"),
        (["evaluate", "CORPUS", "out.json", "nowhere", "--cuts", "-1"], "--cuts -1 is negative"),
        (["evaluate", "CORPUS", "o.json", "x", "--attention", "y"], "unknown family 'y'"),
        (["evaluate", "nowhere", "o.json", "x"], "nowhere: no prepared corpus"),
        (["start"], "invalid choice: 'start'"),
    ],
)
def test_invalid_input_prints_one_line(argv, message, run, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [str(corpus.folder) if word == "CORPUS" else word for word in argv]
    code, out, err = run("pretrain", *words)
    assert (code, out) == (2, "")
    assert err.startswith("sagesim: ") and err.count("\n") == 1 and message in err
    assert list(tmp_path.iterdir()) == []


def test_a_report_without_runs_fails(run, tmp_path):
    code, _, err = run("report", tmp_path, "--out", tmp_path / "out.html")
    assert code == 2 and "neither a run nor a folder of runs" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("margin", ["nan", "inf", "-0.01"])
def test_a_report_refuses_a_margin_that_is_no_size(run, tmp_path, margin):
    words = ("report", tmp_path, "--out", tmp_path / "out.html", f"--margin={margin}")
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err == f"sagesim: --margin {margin} is not a finite number of at least 0\n"
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_stops_exits_with_1(run, corpus, make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "gradient", lambda _self: (float("nan"), 1.0))
    code, out, _ = run(*command(corpus, tmp_path / "a", make_run()))
    assert code == 1
    assert out.startswith("stopped at step 1: loss nan; first bad: nothing")


def signals_in_step(monkeypatch, step, *numbers):
    """Send signals to this process while a step updates the weights."""
    update = Trainer.update

    def signalled(trainer, lr):
        if trainer.step + 1 == step:
            for number in numbers:
                signal.raise_signal(number)
        update(trainer, lr)

    monkeypatch.setattr(Trainer, "update", signalled)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_finishes_the_step_and_the_same_command_resumes(
    number, run, corpus, make_run, tmp_path, monkeypatch
):
    folder = tmp_path / "a"
    words = command(corpus, folder, make_run())
    with monkeypatch.context() as patch:
        signals_in_step(patch, 3, number)
        # Without it, a command that does not handle SIGTERM would end the tests.
        before = signal.signal(number, signal.default_int_handler)
        try:
            code, out, err = run(*words)
        finally:
            signal.signal(number, before)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == (
        f"sagesim: {folder}: interrupted after step 3 of 4; the same command resumes the run"
    )
    assert checkpoint.steps_in(folder / "checkpoints") == [2, 3]
    assert Log.read(folder).last_step == 3
    with monkeypatch.context() as patch:
        signals_in_step(patch, 3, signal.SIGINT)  # the third step is not repeated
        assert run(*words)[:2] == (0, f"{folder}: 4 steps done\n")


def test_a_second_ctrl_c_stops_at_once(run, corpus, make_run, tmp_path, monkeypatch):
    signals_in_step(monkeypatch, 3, signal.SIGINT, signal.SIGINT)
    code, _, err = run(*command(corpus, tmp_path / "a", make_run()))
    assert code == 130 and err.splitlines()[-1] == "sagesim: interrupted"
    assert checkpoint.steps_in(tmp_path / "a" / "checkpoints") == [2]
    assert Log.read(tmp_path / "a").last_step == 2


def test_progress_that_nobody_reads_ends_a_run_like_ctrl_c(
    run, corpus, make_run, tmp_path, monkeypatch
):
    """As in `sagesim pretrain run ... 2>&1 | head -1`."""

    def show(_bar, step, _loss, _speed):
        if step == 2:
            raise BrokenPipeError

    monkeypatch.setattr(Training, "show", show)
    code, _, err = run(*command(corpus, tmp_path / "a", make_run()))
    assert code == 130 and "interrupted after step 3 of 4" in err
    assert checkpoint.steps_in(tmp_path / "a" / "checkpoints") == [2, 3]


def test_ctrl_c_ends_a_plan_after_a_step(run, corpus, tmp_path, monkeypatch):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.replace("seeds = [0, 1]", "seeds = [0]"))
    words = ["pretrain", "plan", plan, corpus.folder, tmp_path / "runs", "--emulate"]
    words += ["--part", "two", "--micro-batch", 4]
    with monkeypatch.context() as patch:
        signals_in_step(patch, 1, signal.SIGINT)
        code, out, err = run(*words)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1].endswith("runs: interrupted; the same command continues the plan")
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert checkpoint.steps_in(folder / "checkpoints") == [1]
    code, out, _ = run(*words)
    assert code == 0 and out.count(": done\n") == 2


def test_a_folder_where_another_process_trains_is_refused(run, corpus, make_run, tmp_path):
    words = command(corpus, tmp_path / "a", make_run())
    run(*words)
    before = contents(tmp_path)
    with locked_folder(tmp_path / "a", ALONE):
        code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err == f"sagesim: {tmp_path / 'a'}: another process trains there\n"
    assert contents(tmp_path) == before


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A folder with a run `a` and a copy `corpus` of the corpus."""
    from sagesim.experiments.pretrain.run.settings import Machine, Run
    from sagesim.experiments.pretrain.training.trainer import train

    root = tmp_path_factory.mktemp("trained")
    shutil.copytree(corpus.folder, root / "corpus")
    run = Run(
        attention="sdpa", size="tiny", corpus=corpus.id, vocabulary=512, context=32,
        tokens_per_step=256, steps=1, warmup=1, precision="fp32", evaluate_sequences=5,
    )  # fmt: skip
    train(run, root / "a", corpus, Machine(micro_batch=8), ALONE)
    (root / "b").symlink_to("a")
    return root


@pytest.mark.parametrize(
    "words, message",
    [
        ("pretrain capture a corpus a/log.parquet", "it is an input"),
        ("pretrain capture a corpus b/checkpoints/step-00000001.pt", "it is an input"),
        ("pretrain capture a corpus a/../corpus/corpus.json", "it is an input"),
        ("pretrain evaluate corpus a/log.parquet a", "it is an input"),
        ("pretrain evaluate corpus a/checkpoints/step-00000001.pt a", "it is an input"),
        ("report a --out a/log.parquet", "it is an input"),
        ("report . --out b/log.parquet", "it is an input"),
        ("pretrain run corpus a/../corpus", "corpus: is the corpus"),
        ("pretrain prepare corpus a", "a exists already"),
    ],
)
def test_an_output_that_is_an_input_is_refused(words, message, run, trained, monkeypatch):
    monkeypatch.chdir(trained)
    before = contents(trained)
    code, out, err = run(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith("sagesim: ") and err.count("\n") == 1 and message in err
    assert contents(trained) == before


def test_a_full_disk_ends_every_command_with_one_line(run, trained, corpus, make_run, monkeypatch):
    monkeypatch.chdir(trained)
    before = contents(trained)
    for words, path in (
        (["pretrain", "prepare", str(TEXT), "new", "--vocabulary", 300], "new"),
        (["pretrain", "capture", "a", "corpus", "out.safetensors"], "out.safetensors"),
        (["pretrain", "evaluate", "corpus", "out.json", "a"], "out.json"),
        (["report", "a", "--out", "out.html"], "out.html"),
        (command(corpus, "c", make_run()), "c/log.parquet"),
    ):
        with full_disk():
            code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert err == f"sagesim: {path}: cannot be written: File too large\n"
        assert contents(trained) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example(name, capsys):
    with pytest.raises(SystemExit) as end:
        main(["pretrain", name, "--help"])
    assert end.value.code == 0
    assert f"\n  sagesim pretrain {name}" in capsys.readouterr().out


def test_it_can_be_run_as_a_module(corpus):
    import subprocess

    words = [sys.executable, "-m", "sagesim.cli", "pretrain", "--help"]
    assert b"torchrun" in subprocess.run(words, capture_output=True, timeout=60, check=True).stdout
    assert json.loads((corpus.folder / "corpus.json").read_text())["source"] == "our pages"
