"""Sweep: the errors of many specs on many captured attention problems, in one Parquet file."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import torch

import sagesim
from sagesim.analysis import GRADIENTS, TENSORS, errors, geometric_mean, gradient_error
from sagesim.emulator import exact
from sagesim.experiments.cluster import workers
from sagesim.experiments.jobs import Job, Report, State
from sagesim.experiments.parquet import encode_table, read_table
from sagesim.files import replacing
from sagesim.models import Call, Capture
from sagesim.problem import NO_WINDOW
from sagesim.spec import SAGEBWD, SITES, AttentionSpec, Precision, with_precision

Row = dict[str, Any]
"""The values of one row, by the columns of `SCHEMA`. A row is one spec on one captured call."""

MEASURES: Final = ("rel_l2", "cosine", "sqnr_db")
"""The fields of each tensor's `sagesim.analysis.Error` that a row stores."""

SCHEMA: Final = pa.schema(
    [
        ("label", pa.string()),
        ("capture", pa.string()),
        ("capture_hash", pa.string()),
        ("layer", pa.int64()),
        ("name", pa.string()),
        *((f"{t}_{m}", pa.float64()) for t in TENSORS for m in MEASURES),
        ("seconds", pa.float64()),
        ("sagesim_version", pa.string()),
        ("torch_version", pa.string()),
    ]
)
"""The columns of the file.

layer and name are those of the captured call. seconds is the computing time, with that of the
float64 reference if the row computes it; see `_exactly`.
"""

_SAVE_EVERY: Final = 2.0
"""Seconds between two writes of the file; a killed sweep loses at most this much work."""


def int8_or_16_bit() -> list[AttentionSpec]:
    """The 128 specs that compute each of SageBwd's seven products in INT8 or in 16 bit.

    >>> len(int8_or_16_bit()), SAGEBWD in int8_or_16_bit()
    (128, True)
    """
    specs: list[AttentionSpec] = []
    for choice in itertools.product((Precision.INT8, Precision.INPUT16), repeat=len(SITES)):
        spec = SAGEBWD
        for site, precision in zip(SITES, choice, strict=True):
            spec = with_precision(spec, precision, site)
        specs.append(spec)
    return specs


def content_hash(capture: Capture) -> str:
    """A hash of a capture's tensors and options, 16 hexadecimal digits.

    Names and `source` do not change it.
    """
    digest = hashlib.sha256()
    for call in capture.calls:
        options: list[Any] = [call.index, call.is_causal, call.scale, call.enable_gqa]
        others = [call.causal_alignment, list(call.window), call.softcap]
        if others != [None, list(NO_WINDOW), None]:  # hashes of other calls stay what they were
            options += others
        shapes = {name: (str(x.dtype), list(x.shape)) for name, x in call.tensors.items()}
        digest.update(json.dumps([options, shapes]).encode())
        for x in call.tensors.values():
            data = x.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(data.numpy().tobytes())
    return digest.hexdigest()[:16]


def sweep(
    path: Path,
    specs: Sequence[AttentionSpec],
    captures: Mapping[str, Capture],
    *,
    progress: Callable[[int, int], None] | None = None,
    cluster: str | None = None,
) -> list[Row]:
    """Run every spec on every call of every capture, and store the errors in a Parquet file.

    A row that the file already has is not computed again. Such a row has the same label, content of
    the capture, layer and version of sagesim. The new rows are added to the file every
    `_SAVE_EVERY` seconds, and at the end or at an error, so it is complete at any time.

    Several processes may sweep into one file. Each adds its rows to those of the others. It does
    not compute rows that it finds there when it saves.

    Args:
        path: the file. It is created if missing; its other rows stay.
        captures: captures by the name to store in their rows.
        progress: called with the number of rows done and the number of all rows.
        cluster: where to compute the rows at the same time; see
            `sagesim.experiments.cluster.workers`. None computes one row after the other.

    Returns:
        The rows of the given specs and captures, both new and old ones.

    Raises:
        ValueError: if the file is not the file of a sweep, or two calls of a capture have the same
            index. It is raised before any computation.
        ConnectionError: if there is no cluster at the address.
        WriteError: if the file cannot be written. It is raised before any computation.
    """
    runs = list(_runs(specs, captures))
    done, new = _add(path, []), list[Row]()
    saved = time.monotonic()

    def jobs() -> Iterator[Job]:
        for key, spec, name, call in runs:
            if key not in done:
                yield Job(f"{name}, layer {call.index}, {key[0]}", _row, (key, spec, name, call))

    def watch(_running: Mapping[str, State], _ended: int) -> bool:
        if progress is not None:
            progress(sum(key in done for key, *_ in runs), len(runs))
        return False

    try:
        with workers(cluster) as here:
            for _, row in here.run(jobs(), watch):
                if isinstance(row, Exception):
                    raise row
                done[_key(row)] = row
                new.append(row)
                if time.monotonic() - saved > _SAVE_EVERY:
                    done, new = _add(path, new), []
                    saved = time.monotonic()
    finally:
        _exactly.cache_clear()
        _latest.clear()
        if new:
            done = _add(path, new)
    return [done[key] for key, *_ in runs]


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a sweep's file.

    Raises:
        ValueError: if the file is not readable or not the file of a sweep.
    """
    try:
        table = read_table(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not table.schema.equals(SCHEMA):
        raise ValueError(f"{path}: not the file of a sweep: it has other columns")
    return table.to_pylist()


def ranking(rows: Sequence[Row]) -> list[Row]:
    """One row per label, sorted by the error of the gradients, smallest first.

    A row has these keys:

    - label;
    - int8: how many of the seven products are in 8 bits;
    - o, ds and each of `GRADIENTS`: the geometric mean of rel_l2 over the label's rows;
    - gradients: the `gradient_error` of these means.

    A call in which no label has an error of a tensor is left out for this tensor: if dO is zero, so
    are the gradients.
    """
    tensors = ("o", "ds", *GRADIENTS)
    with_error = {t: {_call_of(row) for row in rows if row[f"{t}_rel_l2"] != 0} for t in tensors}
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        by_label.setdefault(row["label"], []).append(row)
    ranked: list[Row] = []
    for label, ours in by_label.items():
        spec = AttentionSpec.parse(label)
        means = {
            t: geometric_mean(
                [row[f"{t}_rel_l2"] for row in ours if _call_of(row) in with_error[t]]
            )
            for t in tensors
        }
        ranked.append(
            {
                "label": label,
                "int8": sum(spec.site(s).precision.is_scaled for s in SITES),
                **means,
                "gradients": gradient_error(means),
            }
        )
    # Comparisons with NaN are false, so that NaN could be anywhere in the order.
    return sorted(
        ranked, key=lambda row: (math.isnan(row["gradients"]), row["gradients"], row["label"])
    )


def _call_of(row: Row) -> tuple[str, int]:
    return row["capture_hash"], row["layer"]


def best_per_int8_count(ranked: Sequence[Row]) -> list[Row]:
    """The first row of `ranking` for each number of products in 8 bits, by that number."""
    counts = sorted({row["int8"] for row in ranked})
    return [next(row for row in ranked if row["int8"] == count) for count in counts]


_Key = tuple[str, str, int, str]
_Run = tuple[_Key, AttentionSpec, str, Call]


def missing(
    path: Path, specs: Sequence[AttentionSpec], captures: Mapping[str, Capture]
) -> tuple[int, int, float | None]:
    """What `sweep` would compute: the number of rows, of how many, and the estimated seconds.

    The seconds are those of one CPU, by the rows of the file with these calls; None without any.
    A row takes as long in proportion to the elements of the maps of its call, times its channels.

    Raises:
        ValueError: as `sweep`.
    """
    runs = list(_runs(specs, captures))
    rows = {_key(row): row for row in (read_rows(path) if path.exists() else [])}
    work = {(key[1], key[2]): _work_of(call) for key, _, _, call in runs}
    timed = [row for row in rows.values() if (row["capture_hash"], row["layer"]) in work]
    left = [key for key, *_ in runs if key not in rows]
    if not timed:
        return len(left), len(runs), None if left else 0.0
    rate = sum(row["seconds"] for row in timed) / sum(
        work[row["capture_hash"], row["layer"]] for row in timed
    )
    return len(left), len(runs), rate * sum(work[key[1], key[2]] for key in left)


def _work_of(call: Call) -> int:
    return math.prod(call.q.shape) * call.k.shape[-2]


_exactly: Final = functools.lru_cache(maxsize=1)(exact)
"""The reference of a group of heads; see `AttentionProblem.head_groups`.

The runs of a call follow each other. If a call is one group, a process computes its reference for
the first of them only. If a call is several groups, each run computes the references anew: to keep
them all would need memory that grows with the number of heads.
"""

_latest: Final[dict[tuple[str, int], Call]] = {}
"""The call of this process' latest row. A worker of a cluster gets a call anew for each row, and
`_exactly` knows calls by their identity."""


def _row(_: Report, key: _Key, spec: AttentionSpec, name: str, call: Call) -> Row:
    """The row of a run."""
    if key[1:3] not in _latest:
        _latest.clear()
    call = _latest.setdefault(key[1:3], call)
    start = time.perf_counter()
    measured = errors(call, spec, _exactly)
    seconds = time.perf_counter() - start
    return {
        "label": key[0],
        "capture": name,
        "capture_hash": key[1],
        "layer": call.index,
        "name": call.name,
        **{f"{t}_{m}": getattr(measured[t], m) for t in TENSORS for m in MEASURES},
        "seconds": seconds,
        "sagesim_version": sagesim.__version__,
        "torch_version": torch.__version__,
    }


def _key(row: Row) -> _Key:
    return row["label"], row["capture_hash"], row["layer"], row["sagesim_version"]


def _runs(
    specs: Sequence[AttentionSpec], captures: Mapping[str, Capture]
) -> Iterator[tuple[_Key, AttentionSpec, str, Call]]:
    """All runs; the runs of a call follow each other. Captures with equal content run once."""
    labels = {spec.label(): spec for spec in specs}
    hashes: set[str] = set()
    for name, capture in captures.items():
        digest = content_hash(capture)
        if digest in hashes:
            continue
        hashes.add(digest)
        for index, times in Counter(call.index for call in capture.calls).items():
            if times > 1:
                raise ValueError(f"{name}: {times} calls have index {index}; a row needs its own")
        for call in capture.calls:
            for label, spec in labels.items():
                yield (label, digest, call.index, sagesim.__version__), spec, name, call


def _add(path: Path, new: Sequence[Row]) -> dict[_Key, Row]:
    """Add rows to the file, and return all its rows by their key. A row of the file stays."""
    with replacing(path) as file:
        rows = {_key(row): row for row in (read_rows(path) if path.exists() else [])}
        for row in new:
            rows.setdefault(_key(row), row)
        file.write_bytes(encode_table(pa.Table.from_pylist(list(rows.values()), schema=SCHEMA)))
    return rows
