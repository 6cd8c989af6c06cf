"""Replacing files: complete or not at all, one writer at a time, one line for each failure."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sagesim import files
from sagesim.files import WriteError, check_writable, locked, making_folder, replacing, write_text
from tests.support.full_disk import full_disk


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_block_that_fails_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "out.txt"
    write_text(path, "earlier")
    with pytest.raises(KeyError), replacing(path) as file:
        file.write_text("half")
        raise KeyError
    assert path.read_text() == "earlier" and names(tmp_path) == ["out.txt"]


def test_a_full_disk_leaves_the_earlier_file_and_no_other(tmp_path):
    path = tmp_path / "out.txt"
    write_text(path, "earlier")
    with full_disk(), pytest.raises(WriteError) as failure:
        write_text(path, "new")
    assert str(failure.value) == f"{path}: cannot be written: {os.strerror(errno.EFBIG)}"
    assert path.read_text() == "earlier" and names(tmp_path) == ["out.txt"]


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(handle):
        events.append(os.fstat(handle).st_ino)
        fsync(handle)

    def noted_replace(source, target):
        events.append("name")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    write_text(tmp_path / "out.txt", "new")
    assert events == [(tmp_path / "out.txt").stat().st_ino, "name", tmp_path.stat().st_ino]


KILLED = """
import os, runpy, signal, sys
from pathlib import Path

with runpy.run_path(sys.argv[1])[sys.argv[2]](Path(sys.argv[3])) as place:
    (place if place.is_file() else place / "part").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_inside(block, path):
    """Run a process that is killed inside a block of `sagesim.files`."""
    words = [sys.executable, "-c", KILLED, files.__file__, block, str(path)]
    assert subprocess.run(words, timeout=60).returncode == -signal.SIGKILL


def test_a_killed_process_leaves_the_earlier_file_and_blocks_nothing(tmp_path):
    """The next write removes what the process left."""
    path = tmp_path / "out.txt"
    write_text(path, "earlier")
    kill_inside("replacing", path)
    assert path.read_text() == "earlier"
    kill_inside("replacing", path)
    assert len(names(tmp_path)) == 3, "every killed process left files of its own"
    write_text(path, "later")
    assert path.read_text() == "later" and names(tmp_path) == ["out.txt"]


def test_a_killed_process_leaves_no_folder_under_the_final_name(tmp_path):
    path = tmp_path / "out"
    kill_inside("making_folder", path)
    assert not path.exists() and len(names(tmp_path)) == 2
    with making_folder(path) as folder:
        (folder / "whole").touch()
    assert names(tmp_path) == ["out"] and names(path) == ["whole"]


def test_a_folder_that_another_process_makes_is_refused(tmp_path):
    with making_folder(tmp_path / "out") as folder:
        folder.joinpath("ours").touch()
        with (
            pytest.raises(WriteError, match="out: cannot be written: another process uses it"),
            making_folder(tmp_path / "out"),
        ):
            pass
    assert names(tmp_path / "out") == ["ours"]


def test_changes_by_several_writers_are_all_kept(tmp_path):
    """Locks are held by open files, so threads exclude each other as processes do."""
    path = tmp_path / "count"
    write_text(path, "0")
    failures = []

    def add():
        try:
            for _ in range(25):
                with replacing(path) as file:
                    file.write_text(str(int(path.read_text()) + 1))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and path.read_text() == "100"
    assert names(tmp_path) == ["count"]


def test_a_lock_that_is_held_raises_without_waiting(tmp_path):
    with locked(tmp_path / "run"):
        with pytest.raises(BlockingIOError), locked(tmp_path / "run", wait=False):
            pass
        (tmp_path / "link").symlink_to("run")
        with pytest.raises(BlockingIOError), locked(tmp_path / "link", wait=False):
            pass
    with locked(tmp_path / "run", wait=False):
        pass


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    path = tmp_path / "folder" / "file"
    write_text(path, "earlier")
    (tmp_path / "link").symlink_to(path)
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and path.read_text() == "new"
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize("write", [check_writable, lambda path: write_text(path, "text")])
def test_only_regular_files_are_replaced(write, tmp_path):
    """A pipe or a device such as /dev/null would become a file."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WriteError, match=r"pipe: cannot be written: it is not a regular file"):
        write(tmp_path / "pipe")
    with pytest.raises(WriteError, match="cannot be written: Is a directory"):
        write(tmp_path)
    write_text(tmp_path / "file", "")
    with pytest.raises(WriteError, match=r"file/out: cannot be written: Not a directory"):
        write(tmp_path / "file" / "out")
    assert names(tmp_path) == ["file", "pipe"] and (tmp_path / "pipe").is_fifo()


def test_a_check_changes_nothing(tmp_path):
    write_text(tmp_path / "file", "text")
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "other")
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize("mode", [0o600, 0o444])
def test_a_replaced_file_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "out.txt"
    write_text(path, "earlier")
    path.chmod(mode)
    write_text(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == mode
