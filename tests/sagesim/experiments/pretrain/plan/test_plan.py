import hashlib
import inspect
import json
import shutil
from pathlib import Path

import pytest

import sagesim
from sagesim.experiments.cluster import workers
from sagesim.experiments.jobs import Workers, one_by_one
from sagesim.experiments.pretrain.model.attention import Attention
from sagesim.experiments.pretrain.plan.execution import (
    CAPTURE,
    DONE,
    INTERRUPTED,
    execute,
    has_work,
)
from sagesim.experiments.pretrain.plan.plan import Plan, merge_runs, with_families
from sagesim.experiments.pretrain.run.guards import locked_folder
from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.run.settings import Machine
from sagesim.experiments.pretrain.training.checkpoint import CHECKPOINTS, path_of
from sagesim.files import locked
from tests.sagesim.experiments.pretrain.conftest import ALONE

FOLDER = Path(sagesim.__file__).parent / "experiments" / "pretrain" / "plan"
DATA = Path(sagesim.__file__).parents[1] / "docs" / "data"
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
small = { tokens_per_step = 128, steps = 4 }
large = { tokens_per_step = 256, steps = 2 }

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
        for seed in (0, 1)
        for attention in ("sdpa", "kernels:sagebwd_all_int8")
        for per_step in (256, 128)
    ]
    assert [x.capture_heads for x in one] == [(1,)] * 4 + [()] * 4
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
        ("{ tokens_per_step = 256", "{ tokens = 256", "no setting is called 'tokens'"),
        ('question = "Is it shared?"', "questions = 1", "a part has no 'questions'"),
        ("seeds = [0, 1]", "seeds = [0, 1", "not a readable plan"),
        ("[base]", "base = 3\n[basis]", "a plan has no 'basis'"),
        ("[part.one]", "[part]\none = 3\n[part.one_]", "not a readable plan"),
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
        ("tokens_per_step = 256", "tokens_per_step = 250", "tokens_per_step=250 is not a multiple"),
        ('size = "tiny"', 'sizes = "tiny"', "no setting is called 'sizes'"),
        ('"sdpa"', '"flash"', "unknown family 'flash'"),
        ('regime = "large"', 'regime = "huge"', "regime='huge' is not one of small, large"),
        ('regime = "large"', "regime = [[1]]", r"regime: \[1\] is not a text"),
        ('regime = "large"', "", "a run lacks 'regime'"),
        ('"sdpa"', "3", "attention: 3 is not a text"),
        ('["kernels:sagebwd"]', "[1]", "monitor: 1 is not a text"),
        ('["kernels:sagebwd"]', '"kernels:sagebwd"', "is not a list of attentions"),
        ("warmup = 0.5", "", "a run lacks 'warmup'"),
        ("evaluate_every = 0.5", 'evaluate_every = "0.5"', "evaluate_every='0.5' is not a frac"),
        ("evaluate_every = 0.5", "evaluate_every = 100", "=100 is not a fraction of the steps"),
        ("monitor_every = 1.0", "monitor_every = -0.1", "monitor_every=-0.1 is not a fraction"),
        ("warmup = 0.5", "warmup = nan", "warmup=nan is not a fraction"),
        ("capture_heads = [1]", "capture_heads = [2]", "2 is no head of a model with 2 heads"),
        ("capture_heads = [1]", "capture_heads = [-1]", "-1 is no head of a model with 2 heads"),
    ],
)
def test_a_plan_with_an_invalid_run_raises(old, new, message, tmp_path, corpus):
    path = tmp_path / "plan.toml"
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(ValueError, match=message):
        for part in ("one", "two"):
            runs(Plan.read(path), part, corpus)


def test_a_fraction_of_0_stays_0_and_any_other_is_at_least_one_step(tmp_path, corpus):
    path = tmp_path / "plan.toml"
    path.write_text(
        TEXT.replace("= 0.5", "= 0").replace("monitor_every = 1.0", "monitor_every = 1e-9")
    )
    found = {
        (x.run.warmup, x.run.evaluate_every, x.run.monitor_every)
        for x in runs(Plan.read(path), "one", corpus)
    }
    assert found == {(0, 0, 1)}


def test_a_plan_can_be_for_one_corpus_only(tmp_path, corpus):
    path = tmp_path / "plan.toml"
    path.write_text(f"corpus = '{corpus.id}'\n{TEXT}")
    Plan.read(path).check_corpus(corpus.id)
    path.write_text(f"corpus = '0123'\n{TEXT}")
    with pytest.raises(ValueError, match=f"for corpus 0123; this corpus is {corpus.id}"):
        Plan.read(path).check_corpus(corpus.id)
    assert runs(Plan.read(path), "two", corpus), "it can be listed"


def test_unknown_parts_and_scales_raise(plan, corpus):
    with pytest.raises(ValueError, match="no part is called 'three'; the parts are one, two"):
        runs(plan, "three", corpus)
    with pytest.raises(ValueError, match="no scale is called 'maxi'; the scales are mini"):
        plan.runs("one", "maxi", corpus=corpus.id, vocabulary=512)


def test_runs_that_are_done_are_not_trained_again(plan, corpus, tmp_path):
    # Both seeds of the first setting.
    planned = with_families(runs(plan, "one", corpus), {"kernels": "emulator"})[::4]
    root, begun = tmp_path / "runs", []

    def make(is_asked=False):
        begun.clear()

        def watch(running, _ended):
            begun.extend(name for name in running if name not in begun)
            return is_asked and any("waits" in state.words for state in running.values())

        left = [each for each in planned if has_work(each, root)]
        with workers(None) as here:
            return list(execute(left, root, corpus, Machine(micro_batch=4), here, watch))

    assert make() == [(each, DONE) for each in planned]
    assert begun == [each.folder for each in planned]
    assert Log.read(root / planned[0].folder).is_finished
    captures = [(root / each.folder / CAPTURE).exists() for each in planned]
    assert captures == [True, False]
    (root / planned[0].folder / CAPTURE).unlink()
    # A log is complete shortly before the last checkpoint. Until then the folder is locked.
    with locked_folder(root / planned[0].folder, ALONE):
        assert make(is_asked=True) == [(planned[0], INTERRUPTED)]
    assert not (root / planned[0].folder / CAPTURE).exists()
    assert make() == [(planned[0], DONE)] and (root / planned[0].folder / CAPTURE).exists()
    assert make() == [] == begun


def test_a_run_without_its_last_checkpoint_is_not_done(plan, corpus, tmp_path):
    """It was killed after its log was written."""
    (planned,) = runs(plan, "two", corpus)[:1]
    machine = Machine(micro_batch=4, checkpoint_every=1)

    def make():
        with workers(None) as here:
            every = execute([planned], tmp_path, corpus, machine, here, lambda *_: False)
            assert list(every) == [(planned, DONE)]
        return Log.read(tmp_path / planned.folder).curve("train", "loss")

    folder = tmp_path / planned.folder / CHECKPOINTS
    losses, steps = make(), planned.run.steps
    path_of(folder, steps).rename(path_of(folder, steps - 1))
    assert not planned.is_done(tmp_path)
    shutil.rmtree(folder)
    assert planned.is_done(tmp_path), "checkpoints may be removed"
    assert steps == 2 and len(losses) == 2


def test_a_folder_in_which_another_command_trains_a_plan_is_refused(plan, corpus, tmp_path):
    planned = runs(plan, "two", corpus)[:1]
    root = tmp_path / "runs"
    message = "runs: another command trains a plan there"
    with workers(None) as here, locked(root), pytest.raises(BlockingIOError, match=message):
        list(execute(planned, root, corpus, Machine(), here, lambda *_: False))


def test_a_machine_that_does_not_share_the_folder_of_the_runs_trains_nothing(
    plan, corpus, tmp_path
):
    """Here the folder has no lock, as on a machine with a folder of its own."""
    planned = runs(plan, "two", corpus)[0]

    def elsewhere(jobs, watch):
        (job,) = jobs
        *_, text, machine = job.arguments
        yield from one_by_one([job._replace(arguments=(planned, tmp_path, text, machine))], watch)

    here = Workers(elsewhere, has_gpu=False)
    machine = Machine(micro_batch=4)
    ((_, end),) = execute([planned], tmp_path / "runs", corpus, machine, here, lambda *_: False)
    assert isinstance(end, ValueError) and "does not share this folder and its locks" in str(end)
    assert not (tmp_path / planned.folder).exists()


def test_runs_that_need_a_gpu_are_refused_where_there_is_none(plan, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("sagesim_kernels.interpreter.IS_INTERPRETED", False)
    planned = runs(plan, "one", corpus)

    def never(_jobs, _watch):
        raise AssertionError("a job was started")

    with pytest.raises(ValueError, match="the kernels need a GPU"):
        here = Workers(never, has_gpu=False)
        list(execute(planned, tmp_path / "runs", corpus, Machine(micro_batch=4), here, never))


def test_the_plan_of_experiment_a_is_valid():
    """It repeats an earlier cell, has the default spec and a twin, and kernels for all arms."""
    from sagesim_kernels import supports

    earlier, ours = Plan.read(OURS), Plan.read(FOLDER / "delta_or_scales.toml")
    measured = {"evaluate_sequences", "monitor_sequences", "monitor_every", "monitor"}
    changed = {name for name in earlier.base if ours.base[name] != earlier.base[name]}
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


def test_the_plan_of_batch_or_updates_is_valid():
    """The model of experiment A with QK-norm; the arms, seeds, cells and bias of its page."""
    ours, earlier = (
        Plan.read(FOLDER / f"{name}.toml") for name in ("batch_or_updates", "delta_or_scales")
    )
    changed = {name for name in earlier.base if ours.base[name] != earlier.base[name]}
    assert changed == {"qk_norm", "monitor"}
    assert ours.base.keys() == earlier.base.keys() | {"qk_gain"}
    assert ours.speed == earlier.speed and ours.corpus == earlier.corpus
    arms = ["sdpa", "kernels:fpa_bf16"]
    arms += [f"kernels:{x}" for x in ("sagebwd", "sagebwd delta=p", "factored", "factored_qk")]
    cells, every = [], []
    for part in ours.parts:
        runs = [x.run for x in ours.runs(part, "cells", corpus=ours.corpus, vocabulary=16384)]
        seen = [(x.seed, x.attention) for x in runs]
        assert seen == [(seed, arm) for seed in range(4) for arm in arms]
        assert len({(x.tokens_per_step, x.steps, x.lr, x.warmup) for x in runs}) == 1
        assert {x.monitor for x in runs} == {tuple(arms[2:])}
        # Of 1,024 sequences on the page: the corpus has 621.
        assert {x.bias_sequences for x in runs if x.attention == "sdpa"} == {620}
        assert {x.bias_sequences for x in runs if x.attention != "sdpa"} == {0}
        cells.append((runs[0].tokens_per_step, runs[0].steps, runs[0].warmup))
        every += runs
    assert cells == [(524_288, 1600, 43), (65_536, 1600, 43), (65_536, 200, 5), (524_288, 200, 5)]
    assert len(set(every)) == len(every) == 96


def test_the_gain_of_batch_or_updates_is_the_measured_one():
    measured = json.loads((DATA / "qk_gain.json").read_text())
    assert Plan.read(FOLDER / "batch_or_updates.toml").base["qk_gain"] == measured["gain"]


def test_the_shipped_plan_is_valid():
    """All its runs are valid and have kernels, and the estimated time is what its comment says."""
    ours = Plan.read(OURS)
    seconds = {}
    for part in ours.parts:
        for scale in ours.scales:
            for each in ours.runs(part, scale, corpus=ours.corpus, vocabulary=16384):
                run = each.run
                assert run.tokens == ours.scales[scale]["large"].tokens
                assert len(ours.seeds) >= 2
                spec = Attention.parse(run.attention).spec
                if spec is not None:
                    from sagesim_kernels import supports

                    # On a GPU INPUT16 is bfloat16. On a CPU only float16 has a kernel.
                    assert supports(spec, head_size=64), run.attention
                seconds[scale, each.folder] = ours.seconds(run)
    smallest = sum(s for (scale, _), s in seconds.items() if scale == "10M")
    assert 15 * 60 < smallest < 25 * 60
    large, small = (ours.scales["100M"][name].tokens_per_step for name in ("large", "small"))
    assert large == 8 * small


@pytest.mark.parametrize(
    "name, count, digest",
    [
        ("five_questions", 144, "07d891559ecfa5b0dc2b5bead0154969e172394d2c677421043ef9a975de6d05"),
        ("delta_or_scales", 52, "0ef5b5034bfbc745675c6c7e6f3b4addd7f1c07d0bd83d7ad4d699ec199bac89"),
    ],
)
def test_the_runs_of_plans_that_have_begun_are_those_of_before(name, count, digest):
    """Records of their runs are found by the folders' names."""
    ours = Plan.read(FOLDER / f"{name}.toml")
    every = [
        f"{part} {scale} {x.folder} {x.capture_heads} {x.run.to_json()}"
        for part in ours.parts
        for scale in ours.scales
        for x in ours.runs(part, scale, corpus=ours.corpus, vocabulary=16384)
    ]
    assert len(every) == count
    assert hashlib.sha256("\n".join(every).encode()).hexdigest() == digest
