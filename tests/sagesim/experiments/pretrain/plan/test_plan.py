import inspect
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sagesim
from sagesim.experiments.pretrain.model.attention import Attention
from sagesim.experiments.pretrain.plan.execution import CAPTURE, Reporter, execute, run_on_gpus
from sagesim.experiments.pretrain.plan.plan import Plan, merge_runs, with_families
from sagesim.experiments.pretrain.run.guards import locked_folder
from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.run.settings import Machine
from tests.sagesim.experiments.pretrain.conftest import ALONE

FOLDER = Path(sagesim.__file__).parent / "experiments" / "pretrain" / "plan"
OURS = FOLDER / "five_questions.toml"

TEXT = """
margin = 0.02
seeds = [0, 1]

[base]
size = "tiny"
context = 32
warmup = 0.5
evaluate_every = 0.5
evaluate_sequences = 5
monitor_every = 1.0
monitor_sequences = 2
monitor = ["kernels:sagebwd"]
precision = "fp32"

[scale.mini]
tokens = 512
small = 128
large = 256

[speed]
model = 1e9
sdpa = 1e9
kernels = 5e8
emulator = 1e8
overhead = 10

[part.one]
question = "Does it run?"
capture_heads = [1]

[[part.one.grid]]
attention = ["sdpa", "kernels:sagebwd  dp=int8"]
regime = ["large", "small"]

[part.two]
question = "Is it shared?"

[[part.two.grid]]
attention = "sdpa"
regime = "large"
qk_norm = [false, true]
"""


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(TEXT)
    return Plan.read(path)


def runs(plan, part, corpus):
    return plan.runs(part, "mini", corpus=corpus.id, vocabulary=512)


def test_a_part_has_a_run_for_every_combination_and_seed(plan, corpus):
    one = runs(plan, "one", corpus)
    seen = [(x.run.attention, x.run.tokens_per_step, x.run.steps, x.run.seed) for x in one]
    assert seen == [
        (attention, per_step, 512 // per_step, seed)
        for attention in ("sdpa", "kernels:sagebwd_all_int8")
        for per_step in (256, 128)
        for seed in (0, 1)
    ]
    assert [x.capture_heads for x in one] == [(1,), ()] * 4
    assert {(x.run.warmup, x.run.evaluate_every, x.run.monitor_every) for x in one} == {
        (1, 1, 2),
        (2, 2, 4),
    }


def test_equal_runs_of_two_parts_have_the_same_folder(plan, corpus):
    one, two = ({x.folder for x in runs(plan, part, corpus)} for part in ("one", "two"))
    assert len(one) == 8 and len(two) == 4 and len(one & two) == 2


def test_merge_runs_keeps_each_run_once_and_captures_it_if_any_part_does(plan, corpus):
    one, two = (runs(plan, part, corpus) for part in ("one", "two"))
    for every in (merge_runs([*one, *two]), merge_runs([*two, *one])):
        assert len({x.folder for x in every}) == len(every) == 10
        assert [x for x in every if x.capture_heads] == [x for x in one if x.capture_heads]


def test_the_estimated_time_is_the_flops_divided_by_the_speeds(plan, corpus):
    sdpa, kernels = (
        next(x.run for x in runs(plan, "one", corpus) if x.run.attention == attention)
        for attention in ("sdpa", "kernels:sagebwd_all_int8")
    )
    weights = 2 * (4 * 64**2 + 9 * 64**2) + 512 * 64
    products = 6 * 2 * 64 * 32
    assert plan.seconds(sdpa) == pytest.approx(512 * (6 * weights + products) / 1e9 + 10)
    assert plan.seconds(kernels) == pytest.approx(512 * (6 * weights + 2 * products) / 1e9 + 10)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("margin = 0.02", "", "lacks 'margin'"),
        ("margin = 0.02", "margins = 1\nmargin = 0.02", "a plan has no 'margins'"),
        ("large = 256", "huge = 256", "no setting is called 'huge'"),
        ('question = "Is it shared?"', "questions = 1", "a part has no 'questions'"),
        ("seeds = [0, 1]", "seeds = [0, 1", "not a readable plan"),
    ],
)
def test_an_invalid_plan_raises(old, new, message, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(ValueError, match=message):
        Plan.read(path)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("tokens = 512", "tokens = 500", "tokens=500 is not a multiple of 256"),
        ('size = "tiny"', 'sizes = "tiny"', "no setting is called 'sizes'"),
        ('"sdpa"', '"flash"', "unknown family 'flash'"),
        ('regime = "large"', 'regime = "huge"', "regime='huge' is not small or large"),
    ],
)
def test_a_plan_with_an_invalid_run_raises(old, new, message, tmp_path, corpus):
    path = tmp_path / "plan.toml"
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(ValueError, match=message):
        for part in ("one", "two"):
            runs(Plan.read(path), part, corpus)


def test_a_plan_can_be_for_one_corpus_only(tmp_path, corpus):
    path = tmp_path / "plan.toml"
    path.write_text(f"corpus = '{corpus.id}'\n{TEXT}")
    assert runs(Plan.read(path), "two", corpus)
    path.write_text(f"corpus = '0123'\n{TEXT}")
    with pytest.raises(ValueError, match=f"for corpus 0123; this corpus is {corpus.id}"):
        runs(Plan.read(path), "two", corpus)


def test_unknown_parts_and_scales_raise(plan, corpus):
    with pytest.raises(ValueError, match="no part is called 'three'; the parts are one, two"):
        runs(plan, "three", corpus)
    with pytest.raises(ValueError, match="no scale is called 'maxi'; the scales are mini"):
        plan.runs("one", "maxi", corpus=corpus.id, vocabulary=512)


def test_runs_that_are_done_are_not_trained_again(plan, corpus, tmp_path):
    planned = with_families(runs(plan, "one", corpus), {"kernels": "emulator"})[:2]
    begun, ended = [], []

    def make(root):
        begun.clear()
        execute(
            planned,
            root,
            corpus,
            Machine(micro_batch=4),
            ALONE,
            Reporter(
                started=begun.append,
                progress=lambda *_: None,
                ended=lambda each, outcome: ended.append((each, outcome.stop)),
            ),
        )

    make(tmp_path / "runs")
    assert begun == planned and ended == [(each, "") for each in planned]
    assert Log.read(tmp_path / "runs" / planned[0].folder).is_finished
    captures = [(tmp_path / "runs" / each.folder / CAPTURE).exists() for each in planned]
    assert captures == [True, False]
    (tmp_path / "runs" / planned[0].folder / CAPTURE).unlink()
    # A log is complete shortly before the last checkpoint. Until then the folder is locked.
    with locked_folder(tmp_path / "runs" / planned[0].folder, ALONE):
        make(tmp_path / "runs")
    assert not (tmp_path / "runs" / planned[0].folder / CAPTURE).exists()
    make(tmp_path / "runs")
    assert begun == [] and (tmp_path / "runs" / planned[0].folder / CAPTURE).exists()


def test_more_gpus_than_the_machine_has_raise():
    with pytest.raises(ValueError, match="4096 GPUs asked for"):
        run_on_gpus([], 4096)


GPU_WORKER = """
import signal, sys

def interrupted(*_):
    sys.exit(130)

signal.signal(signal.SIGINT, interrupted)
print("ready", flush=True)
signal.pause()
"""


def test_ctrl_c_reaches_the_process_of_every_gpu_once(monkeypatch):
    """The command waits until they have ended by themselves."""
    started = []
    popen = subprocess.Popen

    def start(words, **options):
        assert words[1:] == ["-m", "sagesim.cli", "plan"] and options["start_new_session"]
        process = popen(
            [sys.executable, "-c", GPU_WORKER],
            stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        with process.stdout:
            assert process.stdout.readline() == b"ready\n"
        started.append(options["env"]["CUDA_VISIBLE_DEVICES"])
        if len(started) == 1:  # the first one that the command waits for
            wait = process.wait

            def wait_after_ctrl_c():
                signal.raise_signal(signal.SIGINT)
                return wait(timeout=60)

            process.wait = wait_after_ctrl_c
        return process

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(subprocess, "Popen", start)
    assert run_on_gpus(["plan"], 2) == 130
    assert started == ["0", "1"]


def test_the_plan_of_the_next_experiment_is_valid():
    """It repeats an earlier cell, has the default spec and a twin, and kernels for all arms."""
    from sagesim_kernels import supports

    earlier, ours = Plan.read(OURS), Plan.read(FOLDER / "delta_or_scales.toml")
    measured = {"evaluate_sequences", "monitor_sequences", "monitor"}
    changed = {name for name in ours.base if ours.base[name] != earlier.base[name]}
    assert changed == measured | {"qk_norm"} and not ours.base["qk_norm"]
    assert ours.scales["100M"] == earlier.scales["100M"] and ours.speed == earlier.speed
    runs = ours.runs("arms", "100M", corpus=earlier.corpus, vocabulary=16384)
    specs = {name: Attention.parse(name).spec for name in {each.run.attention for each in runs}}
    assert len(runs) == len(specs) * len(ours.seeds)
    assert {each.run.tokens_per_step for each in runs} == {65_536}
    default = inspect.signature(sagesim.attention).parameters["spec"].default
    assert {sagesim.FPA_BF16, sagesim.FACTORED_QK16, default} < set(specs.values())
    assert all(
        supports(spec, head_size=64)
        for spec in specs.values()
        if spec not in (None, sagesim.FPA_BF16)
    )


def test_the_shipped_plan_is_valid():
    """All its runs are valid and have kernels, and the estimated time is what its comment says."""
    ours = Plan.read(OURS)
    seconds = {}
    for part in ours.parts:
        for scale in ours.scales:
            for each in ours.runs(part, scale, corpus=ours.corpus, vocabulary=16384):
                run = each.run
                assert run.tokens == ours.scales[scale].tokens
                assert len(ours.seeds) >= 2
                spec = Attention.parse(run.attention).spec
                if spec is not None:
                    from sagesim_kernels import supports

                    # On a GPU INPUT16 is bfloat16. On a CPU only float16 has a kernel.
                    assert supports(spec, head_size=64), run.attention
                seconds[scale, each.folder] = ours.seconds(run)
    smallest = sum(s for (scale, _), s in seconds.items() if scale == "10M")
    assert 15 * 60 < smallest < 25 * 60
    large, small = ours.scales["100M"].large, ours.scales["100M"].small
    assert large == 8 * small
