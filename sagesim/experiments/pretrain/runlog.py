"""What a run saw, in one Parquet file: a number a row.

| column | |
| --- | --- |
| step | steps done when it was seen; 0 before the first |
| group | train, evaluation, model, layer, gradient |
| attention | which attention it is about, where several are measured; else empty |
| layer | which layer, or -1 |
| name | of the number |
| value | float64 |
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from sagesim._atomic import replacing
from sagesim.experiments.pretrain.settings import Run

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
"""Seconds of rows that a kill may lose; they are made again from the checkpoint before."""


class Row(NamedTuple):
    """A number."""

    step: int
    group: str
    attention: str
    layer: int
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Log:
    """A run's file, read."""

    run: Run
    about: Mapping[str, str]  #: machine and versions, of the process that wrote last
    stop: str  #: why the run ended before its last step; empty where it did not
    table: pa.Table

    @classmethod
    def read(cls, path: Path) -> Log:
        """The log of a run's folder, or the file itself.

        Raises:
            ValueError: naming the path, where it is none.
        """
        path = path / FILE if path.is_dir() else path
        try:
            table = pq.read_table(path)
            found = table.schema.metadata or {}
            run, about = Run.from_json(found[_RUN].decode()), json.loads(found[_ABOUT])
            stop = found[_STOP].decode()
        except (OSError, pa.ArrowException, KeyError, ValueError) as error:
            raise ValueError(f"{path}: not the log of a run: {error}") from error
        if table.schema.names != [name for name, _ in _COLUMNS]:
            raise ValueError(f"{path}: a Parquet file with other columns than a run's")
        return cls(run, about, stop, table)

    @property
    def rows(self) -> list[Row]:
        """All of them, as they were written."""
        columns = [self.table.column(name).to_pylist() for name, _ in _COLUMNS]
        return [Row(*row) for row in zip(*columns, strict=True)]

    @property
    def is_finished(self) -> bool:
        """Whether its last step was made, and measured."""
        return self.last_step == self.run.steps and not self.stop

    @property
    def last_step(self) -> int:
        """The last step whose training loss is there."""
        steps = [step for step, _ in self.curve("train", "loss")]
        return steps[-1] if steps else 0

    def curve(self, group: str, name: str) -> list[tuple[int, float]]:
        """(step, value) of one number of the whole model."""
        return [(r.step, r.value) for r in self.rows if r.group == group and r.name == name]


class Writer:
    """Appends rows to a run's file. The file is replaced as a whole, and so is always complete.

    Args:
        step: rows of later steps, which a run that goes on from here makes again, are dropped.
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
        """A row for each of the values."""
        for name, value in values.items():
            self._new.append(Row(step, group, attention, layer, name, float(value)))

    def stopped(self, reason: str) -> None:
        """Say why the run ends here."""
        self._stop = reason

    def tick(self) -> None:
        """Save if it was long ago."""
        if time.monotonic() - self._saved > _SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Write every row."""
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
            pq.write_table(self._table.replace_schema_metadata(about), file, compression="zstd")
        self._saved = time.monotonic()


def check_log(folder: Path, run: Run, *, is_begun: bool) -> None:
    """Raise ValueError where a folder's log is that of another run, naming what differs, or where
    it is not there although the run is begun."""
    path = folder / FILE
    if not path.exists():
        if is_begun:
            raise ValueError(f"{folder}: has checkpoints, and no {FILE}")
        return
    old = Log.read(path).run
    if old != run:
        raise ValueError(f"{path}: the log of other settings: {difference(old, run)}")


def difference(one: Run, other: Run) -> str:
    """The fields in which two runs differ, with both values."""
    names = Run.__slots__
    return ", ".join(
        f"{name} {getattr(one, name)!r} and {getattr(other, name)!r}"
        for name in names
        if getattr(one, name) != getattr(other, name)
    )
