import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sagesim.experiments.pretrain.run.log import FILE, Log, LogWriter, Row, check_log


def writer(folder, run, step=-1):
    return LogWriter(folder, run, {"device": "none"}, step=step)


def test_a_log_reads_the_rows_that_were_written(make_run, tmp_path):
    run = make_run()
    log = writer(tmp_path, run)
    log.add(1, "train", {"loss": 2.5, "lr": 0.1})
    log.add(2, "layer", {"dq_rel_l2": float("inf")}, attention="emulator:sagebwd", layer=3)
    log.save()
    log.save()
    read = Log.read(tmp_path)
    assert read == Log.read(tmp_path / FILE)
    assert read.rows == [
        Row(1, "train", "", -1, "loss", 2.5),
        Row(1, "train", "", -1, "lr", 0.1),
        Row(2, "layer", "emulator:sagebwd", 3, "dq_rel_l2", float("inf")),
    ]
    assert (read.run, read.about, read.stop) == (run, {"device": "none"}, "")
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_resumed_run_replaces_the_rows_of_later_steps(make_run, tmp_path):
    log = writer(tmp_path, make_run())
    for step in range(1, 5):
        log.add(step, "train", {"loss": float(step)})
    log.set_stop("nan")
    log.save()
    log = writer(tmp_path, make_run(), step=2)
    for step in range(3, 5):
        log.add(step, "train", {"loss": 10.0 * step})
    log.save()
    read = Log.read(tmp_path)
    assert read.curve("train", "loss") == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    assert read.stop == "" and read.is_finished


def test_a_log_keeps_the_reason_of_a_stop(make_run, tmp_path):
    log = writer(tmp_path, make_run())
    log.add(4, "train", {"loss": 1.0})
    log.set_stop("step 5: loss nan")
    log.save()
    assert Log.read(tmp_path).stop == "step 5: loss nan"
    assert not Log.read(tmp_path).is_finished


def test_the_log_of_another_run_raises(make_run, tmp_path):
    check_log(tmp_path, make_run(), is_begun=False)
    writer(tmp_path, make_run()).save()
    check_log(tmp_path, make_run(), is_begun=True)
    with pytest.raises(ValueError, match=r"lr 0\.001 and 0\.1, seed 0 and 1"):
        check_log(tmp_path, make_run(seed=1, lr=0.1), is_begun=True)


def test_a_file_that_is_not_a_log_raises(tmp_path):
    with pytest.raises(ValueError, match="not the log of a run"):
        Log.read(tmp_path)
    pq.write_table(pa.table({"step": [1]}), tmp_path / FILE)
    with pytest.raises(ValueError, match="not the log of a run"):
        Log.read(tmp_path)
