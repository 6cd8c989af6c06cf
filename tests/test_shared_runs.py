"""scripts/shared_runs.py: of several processes, one makes a run."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sagesim.files import WriteError, write_text

ROOT = Path(__file__).parents[1]
claimed = runpy.run_path(str(ROOT / "scripts" / "shared_runs.py"))["claimed"]

WORKER = """
import sys, time
from pathlib import Path
from sagesim.files import write_text
from scripts.shared_runs import claimed
folder, made = Path(sys.argv[1]), []
for run in range(12):
    with claimed(folder / f"run{run}.json") as is_mine:
        if is_mine:
            made.append(run)
            time.sleep(0.05)
            write_text(folder / f"run{run}.json", "done")
print(*made)
"""

HOLDER = """
import sys, time
from pathlib import Path
from scripts.shared_runs import claimed
with claimed(Path(sys.argv[1])) as is_mine:
    print(is_mine, flush=True)
    time.sleep(600)
"""


def start(code, path):
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_every_run_is_made_once(tmp_path):
    workers = [start(WORKER, tmp_path) for _ in range(3)]
    made = [run for each in workers for run in each.communicate()[0].split()]
    assert sorted(map(int, made)) == list(range(12))
    assert sorted(x.name for x in tmp_path.iterdir()) == sorted(f"run{i}.json" for i in range(12))


def test_a_recorded_run_is_not_made(tmp_path):
    record = tmp_path / "records" / "run.json"
    with claimed(record) as is_mine:
        assert is_mine
        with claimed(record) as again:
            assert not again
        write_text(record, "done")
    with claimed(record) as is_mine:
        assert not is_mine
    assert [x.name for x in record.parent.iterdir()] == ["run.json"]


def test_the_claim_of_a_killed_process_ends(tmp_path):
    record = tmp_path / "run.json"
    holder = start(HOLDER, record)
    assert holder.stdout.readline() == "True\n"
    with claimed(record) as is_mine:
        assert not is_mine
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with claimed(record) as is_mine:
        assert is_mine


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(WriteError, match="cannot be written"),
        claimed(tmp_path / "file" / "run.json"),
    ):
        pass
