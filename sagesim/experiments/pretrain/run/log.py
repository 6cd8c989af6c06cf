"""The log of a run: one Parquet file with one number per row.

| column | content |
| --- | --- |
| step | number of steps done at that time; 0 before the first step |
| group | train, evaluation, layer, gradient or bias |
| attention | the measured attention; empty if the number is not about one |
| layer | index of the layer; -1 if the number is not about one |
| name | name of the number |
| value | the number, float64 |
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from sagesim.experiments.parquet import encode_table, read_table
from sagesim.experiments.pretrain.run.settings import Run
from sagesim.files import replacing

FILE: Final = "log.parquet"

_COLUMNS: Final = [
    ("step", pa.int64()),
    ("group", pa.string()),
    ("attention", pa.string()),
    ("layer", pa.int64()),
    ("name", pa.string()),
    ("value", pa.float64()),
]
_RUN, _ABOUT, _STOP = b"sagesim.run", b"sagesim.about", b"sagesim.stop"

_SAVE_EVERY: Final = 20.0
"""Seconds between two writes. A killed run loses later rows; resuming computes them again."""


class Row(NamedTuple):
    """One number of the log."""

    step: int
    group: str
    attention: str
    layer: int
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Log:
    """The content of a log file."""

    run: Run
    about: Mapping[str, str]  #: device and versions of the process that wrote last
    stop: str  #: why the run stopped at a number that is not finite; empty if it did not
    table: pa.Table

    @classmethod
    def read(cls, path: Path) -> Log:
        """Read the log of a run.

        Args:
            path: the run's folder, or the log file.

        Raises:
            ValueError: if the file is not readable or not the log of a run.
        """
        path = path / FILE if path.is_dir() else path
        try:
            table = read_table(path)
            found = table.schema.metadata or {}
            run, about = Run.from_json(found[_RUN].decode()), json.loads(found[_ABOUT])
            stop = found[_STOP].decode()
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: not the log of a run: {error}") from error
        if table.schema.names != [name for name, _ in _COLUMNS]:
            raise ValueError(f"{path}: not the log of a run: the columns are other ones")
        return cls(run, about, stop, table)

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order in which they were written."""
        columns = [self.table.column(name).to_pylist() for name, _ in _COLUMNS]
        return [Row(*row) for row in zip(*columns, strict=True)]

    @property
    def is_finished(self) -> bool:
        """Whether the run has done all its steps."""
        return self.last_step == self.run.steps and not self.stop

    @property
    def last_step(self) -> int:
        """The last step with a training loss; 0 without one."""
        steps = [step for step, _ in self.curve("train", "loss")]
        return steps[-1] if steps else 0

    def curve(self, group: str, name: str) -> list[tuple[int, float]]:
        """All (step, value) of one number."""
        return [(r.step, r.value) for r in self.rows if r.group == group and r.name == name]


class LogWriter:
    """Appends rows to the log of a run. Each save replaces the file, so it is always complete.

    Args:
        step: the step that the run resumes from. Rows of later steps are dropped.
    """

    def __init__(self, folder: Path, run: Run, about: Mapping[str, str], *, step: int = 0) -> None:
        self._path, self._run, self._about, self._stop = folder / FILE, run, about, ""
        self._saved = time.monotonic()
        self._new: list[Row] = []
        self._table = pa.table({name: pa.array([], kind) for name, kind in _COLUMNS})
        if self._path.exists():
            old = Log.read(self._path)
            keep = pa.array(
                [each <= step for each in old.table.column("step").to_pylist()], pa.bool_()
            )
            self._table = old.table.filter(keep).replace_schema_metadata(None)

    def add(
        self,
        step: int,
        group: str,
        values: Mapping[str, float],
        *,
        attention: str = "",
        layer: int = -1,
    ) -> None:
        """Append one row per value."""
        for name, value in values.items():
            self._new.append(Row(step, group, attention, layer, name, float(value)))

    def set_stop(self, reason: str) -> None:
        """Store why the run stops at a number that is not finite."""
        self._stop = reason

    def save_if_due(self) -> None:
        """Save if the last save is more than `_SAVE_EVERY` seconds ago."""
        if time.monotonic() - self._saved > _SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Write all rows to the file."""
        if self._new:
            columns = zip(*self._new, strict=True)
            arrays = [
                pa.array(list(values), kind)
                for values, (_, kind) in zip(columns, _COLUMNS, strict=True)
            ]
            new = pa.table(dict(zip((name for name, _ in _COLUMNS), arrays, strict=True)))
            self._table, self._new = pa.concat_tables([self._table, new]).combine_chunks(), []
        about: dict[bytes, Any] = {
            _RUN: self._run.to_json(),
            _ABOUT: json.dumps(dict(self._about)),
            _STOP: self._stop,
        }
        with replacing(self._path) as file:
            file.write_bytes(encode_table(self._table.replace_schema_metadata(about)))
        self._saved = time.monotonic()


def check_log(folder: Path, run: Run, *, is_begun: bool) -> None:
    """Check that a folder's log belongs to a run.

    Args:
        is_begun: whether the folder has checkpoints, and therefore must have a log.

    Raises:
        ValueError: if the log has other settings, or is missing although `is_begun`.
    """
    path = folder / FILE
    if not path.exists():
        if is_begun:
            raise ValueError(f"{folder}: has checkpoints but no {FILE}")
        return
    old = Log.read(path).run
    if old != run:
        raise ValueError(f"{path}: the log of other settings: {differing_settings(old, run)}")


def differing_settings(one: Run, other: Run) -> str:
    """The fields in which two runs differ, with both values."""
    names = Run.__slots__
    return ", ".join(
        f"{name} {getattr(one, name)!r} and {getattr(other, name)!r}"
        for name in names
        if getattr(one, name) != getattr(other, name)
    )
