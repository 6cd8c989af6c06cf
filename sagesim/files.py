"""Files that are written completely or not at all, by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Generator
from pathlib import Path


class WriteError(OSError):
    """A file or folder cannot be written. The message is one line with its path and the reason."""

    @classmethod
    def of(cls, path: Path, error: OSError) -> WriteError:
        """The error for the output `path`, with the reason of an operating system's error."""
        return cls(error.errno, error.strerror or str(error), str(path))

    def __str__(self) -> str:
        return f"{self.filename}: cannot be written: {self.strerror}"


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A temporary file to write to, which replaces `path` when the block ends without an error.

    Other processes that replace the same path wait until the block ends. A block that reads `path`
    and writes a changed copy therefore loses no change of another process. The bytes are on the
    disk before the file gets its name, so a process that is killed, or a power failure, leaves the
    earlier file. Missing parent folders are created. If `path` is a link, its target is replaced.
    A file that is replaced keeps its permissions.

    Raises:
        WriteError: if the file cannot be written. If no file can be written in the folder, it is
            raised before the block runs. An OSError of the block becomes a WriteError.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "out.txt") as file:
    ...         _ = file.write_text("whole")
    ...     [p.name for p in Path(folder).iterdir()]
    ['out.txt']
    """
    with _reporting(path):
        target = _target(path)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file")
        with locked(target):
            temporary = _temporary(target)
            # A process that was killed may have left one.
            temporary.unlink(missing_ok=True)
            try:
                temporary.touch(exist_ok=False)
                yield temporary
                _flush(temporary)
                if target.exists():
                    shutil.copymode(target, temporary)
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
            _flush_folder(target.parent)


@contextlib.contextmanager
def making_folder(path: Path) -> Generator[Path]:
    """A temporary folder to fill, which gets the name `path` when the block ends without an error.

    Raises:
        WriteError: if `path` has files in it, another process makes the same folder, or a file
            cannot be written. An OSError of the block becomes a WriteError.
    """
    with _reporting(path):
        target = _target(path)
        with locked(target, wait=False):
            temporary = _temporary(target)
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                temporary.mkdir()
                yield temporary
                for file in temporary.iterdir():
                    _flush(file)
                temporary.rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            _flush_folder(target.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a file by a UTF-8 text; see `replacing`.

    Raises:
        WriteError: if the file cannot be written. The earlier file is unchanged.
    """
    with replacing(path) as file:
        file.write_text(text, encoding="utf-8")


def check_writable(path: Path) -> None:
    """Check that `replacing` can write to a path, without changing the file.

    Raises:
        WriteError: if it cannot.
    """
    with contextlib.suppress(_LeaveUnchanged), replacing(path):
        raise _LeaveUnchanged


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Generator[None]:
    """Keep out other processes and threads that lock the same path.

    The lock is held on the file `.NAME.lock` beside `path`. The operating system ends it with the
    process. The file that a killed process leaves locks nothing.

    Args:
        wait: wait for another process that has the lock.

    Raises:
        BlockingIOError: if another process has the lock and `wait` is not set.
        OSError: if the lock's file cannot be written.
    """
    # Windows has no fcntl. Whatever writes no file still works there.
    import fcntl

    target = Path(os.path.realpath(path))
    lock = target.with_name(f".{target.name}.lock")
    while True:
        handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise BlockingIOError(errno.EWOULDBLOCK, "another process uses it") from None
            if not _has_name(handle, lock):
                continue  # its last holder removed it while this process waited
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return
        finally:
            os.close(handle)


class _LeaveUnchanged(Exception):
    """Ends a block of `replacing` without replacing the file."""


@contextlib.contextmanager
def _reporting(path: Path) -> Generator[None]:
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError.of(path, error) from error


def _target(path: Path) -> Path:
    """The path without links, in a folder that exists."""
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    return target


def _temporary(target: Path) -> Path:
    """The name is always the same, so the next write removes what a killed process left."""
    return target.with_name(f".{target.name}.new")


def _has_name(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _flush(path: Path) -> None:
    """Write to the disk what the operating system has buffered of a file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flush_folder(folder: Path) -> None:
    """Write names to the disk. Some file systems cannot; the files are complete all the same."""
    with contextlib.suppress(OSError):
        _flush(folder)
