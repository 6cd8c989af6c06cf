"""Tables in Parquet files that a process may replace while others read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def read_table(path: Path) -> Any:
    """Read a `pyarrow.Table`, with the metadata of its schema.

    The file is opened once. `pyarrow.parquet.read_table(path)` opens it several times, and fails if
    another process replaces it in between.

    Raises:
        ValueError: if the file is not a readable Parquet file. The message does not name it.
    """
    try:
        with path.open("rb") as file, pq.ParquetFile(file) as parquet:
            return parquet.read()
    except (OSError, pa.ArrowException) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ValueError(f"not a readable Parquet file: {reason}") from error


def encode_table(table: Any) -> bytes:
    """The bytes of a Parquet file with a `pyarrow.Table` and the metadata of its schema."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()
