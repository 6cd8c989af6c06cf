"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A new file beside `path` to write to, which takes its place if the block ends well.

    Folders that are not there are made.

    Raises:
        OSError: before the block runs, where no file can be written there.

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
        # Where touch itself failed, unlink may too: for a parent that is a file.
        with contextlib.suppress(OSError):
            temporary.unlink()
