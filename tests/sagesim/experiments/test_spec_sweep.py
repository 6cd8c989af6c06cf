import functools
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch

import sagesim.experiments.spec_sweep
from sagesim import PRESETS, SAGEBWD, SITES, Precision, compare, exact, trace
from sagesim.analysis import TENSORS, Comparison, errors
from sagesim.experiments.spec_sweep import (
    content_hash,
    int8_or_16_bit,
    missing,
    ranking,
    read_rows,
    sweep,
)
from sagesim.files import WriteError
from sagesim.models import Call, Capture
from tests.support.full_disk import full_disk

SPECS = [PRESETS[name] for name in ("fpa", "sagebwd", "factored")]


def problem(seed=0, layers=2, tokens=20, **changes):
    generator = torch.Generator().manual_seed(seed)
    calls = []
    for index in range(layers):
        q, k, v, do = torch.randn(4, 1, 2, tokens, 8, generator=generator)
        fields = {
            "q": q,
            "k": k,
            "v": v,
            "do": do,
            "attn_mask": None,
            "is_causal": True,
            "scale": None,
            "enable_gqa": False,
            "index": index,
            "name": f"layer.{index}",
        }
        calls.append(Call(**(fields | changes)))
    return Capture(calls=tuple(calls), loss_scale=1.0, source={}, torch_version="2")


def untimed(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_the_128_specs_differ_from_the_paper_only_in_precision():
    specs = int8_or_16_bit()
    assert len({spec.label() for spec in specs}) == 128
    assert {spec.site(s).precision for spec in specs for s in SITES} == {
        Precision.INT8,
        Precision.INPUT16,
    }
    assert {(spec.smoothing, spec.delta, spec.qk.lhs) for spec in specs} == {
        (SAGEBWD.smoothing, SAGEBWD.delta, SAGEBWD.qk.lhs)
    }


def test_a_row_holds_the_errors_of_its_run(tmp_path):
    capture = problem()
    rows = sweep(tmp_path / "out.parquet", SPECS, {"mine": capture})
    assert [(r["label"], r["layer"]) for r in rows] == [
        (spec.label(), layer) for layer in (0, 1) for spec in SPECS
    ]
    call = capture.calls[1]
    x = (call.q, call.k, call.v, call.do)
    expected = compare(trace(*x, spec=SAGEBWD, is_causal=True), exact(*x, is_causal=True)).overall
    row = rows[4]
    assert (row["label"], row["capture"], row["name"]) == ("sagebwd", "mine", "layer.1")
    assert row["capture_hash"] == content_hash(capture)
    assert row["seconds"] > 0
    for t in TENSORS:
        assert row[f"{t}_rel_l2"] == expected[t].rel_l2
        assert row[f"{t}_cosine"] == expected[t].cosine
        assert row[f"{t}_sqnr_db"] == expected[t].sqnr_db


def test_the_file_holds_the_returned_rows(tmp_path):
    path = tmp_path / "out.parquet"
    rows = sweep(path, SPECS, {"mine": problem()})
    assert pq.read_table(path).to_pylist() == rows == read_rows(path)
    assert [p.name for p in tmp_path.iterdir()] == ["out.parquet"]


def counting(monkeypatch, stop_after=None):
    """Record the runs, and interrupt after `stop_after` of them."""
    ran = []
    measure = sagesim.experiments.spec_sweep.errors

    def errors(call, spec, exactly):
        if len(ran) == stop_after:
            raise KeyboardInterrupt
        ran.append((spec.label(), call.index))
        return measure(call, spec, exactly)

    monkeypatch.setattr(sagesim.experiments.spec_sweep, "errors", errors)
    return ran


def test_an_interrupted_sweep_resumes(tmp_path, monkeypatch):
    whole = sweep(tmp_path / "whole.parquet", SPECS, {"mine": problem()})
    path = tmp_path / "out.parquet"
    with monkeypatch.context() as patch:
        counting(patch, stop_after=4)
        with pytest.raises(KeyboardInterrupt):
            sweep(path, SPECS, {"mine": problem()})
    assert len(read_rows(path)) == 4
    ran = counting(monkeypatch)
    rows = sweep(path, SPECS, {"mine": problem()})
    assert ran == [("sagebwd", 1), ("factored", 1)]
    assert untimed(rows) == untimed(whole) == untimed(read_rows(path))


def test_rows_in_the_file_are_not_computed_again(tmp_path, monkeypatch):
    path = tmp_path / "out.parquet"
    before = sweep(path, SPECS, {"mine": problem(), "same": problem()})
    assert len(before) == 6
    ran = counting(monkeypatch)
    seen = []
    after = sweep(path, SPECS, {"renamed": problem()}, progress=lambda *x: seen.append(x))
    assert after == before
    assert ran == []
    assert set(seen) == {(6, 6)}


def test_the_time_that_is_missing_follows_from_the_rows_with_the_same_calls(tmp_path):
    """The second capture's rows count in proportion to the square of its tokens."""
    path, small, large = tmp_path / "out.parquet", problem(), problem(tokens=40)
    sweep(path, SPECS, {"other": problem(seed=1)})
    assert missing(path, SPECS, {"small": small}) == (6, 6, None)
    rows = sweep(path, SPECS[:1], {"small": small})
    mean = sum(row["seconds"] for row in rows) / 2
    assert missing(path, SPECS[:1], {"small": small}) == (0, 2, 0.0)
    count, total, seconds = missing(path, SPECS, {"small": small, "large": large})
    assert (count, total) == (10, 12) and math.isclose(seconds, (4 + 6 * 4) * mean)


def test_other_rows_are_kept_and_not_returned(tmp_path):
    path = tmp_path / "out.parquet"
    sweep(path, SPECS[:1], {"mine": problem()})
    rows = sweep(path, SPECS[1:2], {"mine": problem(seed=1)})
    assert {row["label"] for row in rows} == {"sagebwd"}
    assert len(read_rows(path)) == 4


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"tokens": 21}, {"is_causal": False}, {"scale": 0.5}, {"layers": 1}]
)
def test_different_problems_have_different_hashes(changes):
    assert content_hash(problem(**changes)) != content_hash(problem())


def test_names_and_strides_do_not_change_the_hash():
    capture = problem(name="another")
    call = capture.calls[0]
    assert content_hash(capture) == content_hash(problem())
    assert not call.q.mT.is_contiguous()
    a, b = ({"q": x, "k": x} for x in (call.q.mT, call.q.mT.contiguous()))
    v = {"v": call.v.mT, "do": call.do.mT}
    assert content_hash(problem(**a, **v)) == content_hash(problem(**b, **v))


def test_tensors_that_require_a_gradient_have_the_same_hash():
    call = problem().calls[0]
    assert content_hash(problem(q=call.q.clone().requires_grad_())) == content_hash(
        problem(q=call.q)
    )


def test_bfloat16_and_masks_have_a_hash():
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    with_mask = problem(attn_mask=mask, is_causal=False)
    assert content_hash(with_mask) != content_hash(problem(is_causal=False))
    assert len(content_hash(problem().to(torch.bfloat16))) == 16


def test_the_ranking_sorts_by_the_error_of_the_gradients(tmp_path):
    ranked = ranking(sweep(tmp_path / "out.parquet", SPECS, {"mine": problem(tokens=128)}))
    assert ranked[0]["label"] == "fpa"
    assert [row["gradients"] for row in ranked] == sorted(row["gradients"] for row in ranked)
    assert {row["label"]: row["int8"] for row in ranked} == {"fpa": 0, "sagebwd": 6, "factored": 6}


def test_a_call_without_gradients_is_left_out_of_the_ranking(tmp_path):
    one = problem(tokens=128)
    empty = problem(tokens=128, do=torch.zeros(1, 2, 128, 8))
    alone = ranking(sweep(tmp_path / "one.parquet", SPECS, {"mine": one}))
    both = ranking(sweep(tmp_path / "both.parquet", SPECS, {"mine": one, "empty": empty}))
    for name in ("ds", "dq", "dk", "dv", "gradients"):
        assert [row[name] for row in both] == [row[name] for row in alone]


def test_a_call_with_a_huge_error_is_ranked():
    rows = [
        {"label": label, "capture_hash": "c", "layer": 0}
        | {f"{t}_rel_l2": error for t in ("o", "ds", "dq", "dk", "dv")}
        for label, error in (("factored", 1e200), ("fpa", 1e-6), ("sagebwd", math.nan))
    ]
    ranked = ranking(rows)
    assert [row["label"] for row in ranked] == ["fpa", "factored", "sagebwd"]
    assert ranked[1]["gradients"] == pytest.approx(1e200, rel=1e-12)


@pytest.mark.parametrize("content", [b"", b"not parquet", b"PAR1" * 10])
def test_another_file_raises_and_stays_unchanged(tmp_path, content):
    path = tmp_path / "out.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"out\.parquet: not a readable Parquet file"):
        sweep(path, SPECS, {"mine": problem()})
    assert path.read_bytes() == content


def test_a_table_with_other_columns_raises(tmp_path):
    path = tmp_path / "out.parquet"
    pq.write_table(read_table_of_one_column(), path)
    with pytest.raises(ValueError, match="not the file of a sweep: it has other columns"):
        sweep(path, SPECS, {"mine": problem()})


def read_table_of_one_column():
    import pyarrow as pa

    return pa.table({"label": ["sagebwd"]})


def test_an_unwritable_file_raises_before_any_computation(tmp_path, monkeypatch):
    ran = counting(monkeypatch)
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        sweep(tmp_path / "file" / "out.parquet", SPECS, {"mine": problem()})
    assert ran == []


def test_two_calls_of_one_index_are_refused(tmp_path):
    """The second one would have no row of its own."""
    with pytest.raises(ValueError, match=r"index|indices"):
        sweep(tmp_path / "out.parquet", SPECS, {"mine": problem(index=3)})
    assert list(tmp_path.iterdir()) == []


def test_sweeps_into_one_file_at_the_same_time_keep_all_rows(tmp_path, monkeypatch):
    """A second sweep runs while the first one has computed three of its twelve rows.

    The first one then finds a row of its own in the file, and does not compute it again.
    """
    path, ours, theirs = tmp_path / "out.parquet", problem(layers=4), problem(seed=1, layers=4)
    ran = counting(monkeypatch)
    measure = sagesim.experiments.spec_sweep.errors

    def errors(call, spec, exactly):
        if len(ran) == 3:
            monkeypatch.setattr(sagesim.experiments.spec_sweep, "errors", measure)
            sweep(path, SPECS, {"theirs": theirs})
            sweep(path, SPECS[-1:], {"ours": ours})
        return measure(call, spec, exactly)

    monkeypatch.setattr(sagesim.experiments.spec_sweep, "errors", errors)
    monkeypatch.setattr(sagesim.experiments.spec_sweep, "_SAVE_EVERY", 0.0)
    rows = sweep(path, SPECS, {"ours": ours})
    assert [row["label"] for row in rows] == [spec.label() for spec in SPECS] * 4
    assert len(ran) == 24
    stored = read_rows(path)
    assert len(stored) == 24 and all(row in stored for row in rows)


SWEEPS = """
import sys
from pathlib import Path
from sagesim import PRESETS
from sagesim.experiments.spec_sweep import sweep
from sagesim.models import Capture

specs = [PRESETS[name] for name in ("fpa", "sagebwd", "factored")]
sys.stdin.read(1)
sweep(Path(sys.argv[1]), specs, {"mine": Capture.load(sys.argv[2])})
"""


@pytest.mark.slow
def test_two_processes_sweep_into_one_file(tmp_path):
    path, processes = tmp_path / "out.parquet", []
    for seed in (0, 1):
        source = tmp_path / f"{seed}.safetensors"
        problem(seed=seed, layers=4).save(source)
        words = [sys.executable, "-c", SWEEPS, path, source]
        processes.append(subprocess.Popen(words, stdin=subprocess.PIPE))
    for process in processes:
        process.stdin.close()
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert len(read_rows(path)) == 24


def test_a_full_disk_loses_no_row_of_the_file(tmp_path, monkeypatch):
    path = tmp_path / "out.parquet"
    before = sweep(path, SPECS[:1], {"mine": problem()})
    with full_disk(), pytest.raises(WriteError, match=r"out\.parquet: cannot be written: File too"):
        sweep(path, SPECS, {"mine": problem()})
    assert read_rows(path) == before and [p.name for p in tmp_path.iterdir()] == ["out.parquet"]


def test_a_file_can_be_read_while_it_is_replaced(tmp_path):
    """A reader sees the rows before a replacement or after it, and never half of each."""
    path = tmp_path / "out.parquet"
    rows = sweep(path, SPECS, {"mine": problem()})
    whole = path.read_bytes()
    sweep(path, SPECS, {"other": problem(seed=1)})
    contents, done = (whole, path.read_bytes()), threading.Event()

    def replace():
        for number in itertools.count():
            new = tmp_path / "new"
            new.write_bytes(contents[number % 2])
            new.replace(path)
            if done.is_set():
                return

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        for _ in range(500):
            assert read_rows(path)[: len(rows)] == rows
    finally:
        done.set()
        writer.join()


KILLED = """
import sys
from sagesim.experiments import spec_sweep
from pathlib import Path
from sagesim.models import Capture
spec_sweep._SAVE_EVERY = 0.0
captures = {"mine": Capture.load(sys.argv[2])}
spec_sweep.sweep(Path(sys.argv[1]), spec_sweep.int8_or_16_bit(), captures)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_sweep_leaves_a_complete_file(tmp_path):
    path, source = tmp_path / "out.parquet", tmp_path / "in.safetensors"
    problem(layers=4, tokens=128).save(source)
    process = subprocess.Popen([sys.executable, "-c", KILLED, path, source])
    try:
        deadline = time.monotonic() + 60
        while not (path.exists() and read_rows(path)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert 0 < len(read_rows(path)) < 512


def test_taking_heads_in_groups_changes_no_error():
    generator = torch.Generator().manual_seed(0)
    q, do = torch.randn(2, 3, 6, 20, 8, generator=generator)
    k, v = torch.randn(2, 3, 3, 20, 8, generator=generator)
    mask = torch.rand(3, 1, 20, 20, generator=generator) < 0.7
    (call,) = problem(layers=1, q=q, k=k, v=v, do=do, enable_gqa=True, is_causal=False).calls
    for limit, count in ((2**24, 1), (1600, 5), (1, 9)):
        for masked in (call, replace(call, attn_mask=mask)):
            parts = list(masked.head_groups(limit))
            assert len(parts) == count
            compared = [compare(trace(c, spec=SAGEBWD), exact(c)) for c in parts]
            joined, whole = Comparison.joined(compared).overall, errors(masked, SAGEBWD)
            for t in TENSORS:
                assert math.isclose(joined[t].rel_l2, whole[t].rel_l2, rel_tol=1e-6), t
                assert math.isclose(joined[t].cosine, whole[t].cosine, rel_tol=1e-9), t


@pytest.mark.parametrize(("entries", "references"), [(2 * 20 * 20, 1), (20 * 20, 2 * len(SPECS))])
def test_a_reference_is_kept_for_calls_of_one_group_of_heads(
    tmp_path, monkeypatch, entries, references
):
    """docs/sweep.md says which rows compute the float64 reference."""
    whole, computed = sagesim.AttentionProblem.head_groups, []

    def counted(problem):
        computed.append(problem)
        return exact(problem)

    monkeypatch.setattr(sagesim.AttentionProblem, "head_groups", lambda x: whole(x, entries))
    cached = functools.lru_cache(maxsize=1)(counted)
    monkeypatch.setattr(sagesim.experiments.spec_sweep, "_exactly", cached)
    sweep(tmp_path / "out.parquet", SPECS, {"a": problem(layers=1)})
    assert len(computed) == references


def test_rows_of_another_version_are_computed_again(tmp_path, monkeypatch):
    path, capture = tmp_path / "out.parquet", {"c": problem()}
    old = sweep(path, [SAGEBWD], capture)
    monkeypatch.setattr(sagesim, "__version__", "another")
    new = sweep(path, [SAGEBWD], capture)
    assert {row["sagesim_version"] for row in new} == {"another"}
    assert len(read_rows(path)) == len(old) + len(new)
