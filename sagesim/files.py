"""Files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A temporary file to write to, which replaces `path` when the block ends without an error.

    Missing parent folders are created.

    Raises:
        OSError: if no file can be written in the folder. It is raised before the block runs.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "out.txt") as file:
    ...         _ = file.write_text("whole")
    ...     [p.name for p in Path(folder).iterdir()]
    ['out.txt']
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        yield temporary
        temporary.replace(path)
    finally:
        # If touch failed, for example because the parent is a file, unlink fails too.
        with contextlib.suppress(OSError):
            temporary.unlink()


def check_writable(path: Path) -> None:
    """Check that `replacing` can write to a path, without changing the file.

    Raises:
        OSError: if it cannot.
    """
    try:
        with replacing(path):
            raise _LeaveUnchanged
    except _LeaveUnchanged:
        return


class _LeaveUnchanged(Exception):
    """Ends a block of `replacing` without replacing the file."""
