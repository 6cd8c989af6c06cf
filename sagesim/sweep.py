"""Many specs on many captured attention problems, kept in a Parquet file of one row a run."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import sagesim
from sagesim._atomic import replacing
from sagesim._exact import Exact
from sagesim.captured import Call, Capture
from sagesim.measure import GRADIENTS, errors, gradient_error, reference
from sagesim.metrics import TENSORS, geometric_mean
from sagesim.presets import SAGEBWD, with_precision
from sagesim.spec import SITES, AttentionSpec, Precision

Row = dict[str, Any]
"""One run, by the names of `SCHEMA`."""

MEASURES: Final = ("rel_l2", "cosine", "sqnr_db")
"""What is kept of each tensor's `sagesim.metrics.Error`."""

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
"""The columns of the file: layer and name are those of the captured call, seconds is the time of
the run, with the reference if it is the call's first."""

_SAVE_EVERY: Final = 2.0
"""Seconds of work that a kill may lose."""


def int8_or_16_bit() -> list[AttentionSpec]:
    """The 128 ways to compute each of SageBwd's products in INT8 or in the inputs' 16 bits.

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
    """16 hexadecimal digits of what is computed on: tensors and options, not names or source."""
    digest = hashlib.sha256()
    for call in capture.calls:
        options = [call.index, call.is_causal, call.scale, call.enable_gqa]
        shapes = {name: (str(x.dtype), list(x.shape)) for name, x in call.tensors.items()}
        digest.update(json.dumps([options, shapes]).encode())
        for x in call.tensors.values():
            digest.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def sweep(
    path: Path,
    specs: Sequence[AttentionSpec],
    captures: Mapping[str, Capture],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Run every spec on every call of every capture, and keep the errors in a Parquet file.

    Rows that the file already has (same label, content of the capture, layer and version of
    sagesim) are not run again. The file is replaced every `_SAVE_EVERY` seconds and at the end,
    however it comes, so that it is complete whenever it is read.

    Args:
        path: the file, made where it is not there; its other rows are kept.
        captures: by the names that the rows should give them.
        progress: called with the number of runs that are done, and of all, as it goes.

    Returns: the rows that were asked for, whether run now or before.

    Raises:
        ValueError: where the file is something else.
        OSError: where it cannot be written; before anything is run.
    """
    rows = read(path) if path.exists() else []
    done = {_key(row): row for row in rows}
    _write(path, rows)
    hashes = {name: content_hash(capture) for name, capture in captures.items()}
    runs = list(_runs(specs, captures, hashes))
    count = sum(key in done for key, *_ in runs)
    saved, unsaved = time.monotonic(), False
    # A call's runs follow each other: one reference serves them all.
    exactly = functools.lru_cache(maxsize=1)(reference)
    try:
        for key, spec, name, call in runs:
            if progress is not None:
                progress(count, len(runs))
            if key in done:
                continue
            row = _run(spec, call, exactly)
            row |= {"label": key[0], "capture": name, "capture_hash": key[1]}
            done[key] = row
            rows.append(row)
            count, unsaved = count + 1, True
            if time.monotonic() - saved > _SAVE_EVERY:
                _write(path, rows)
                saved, unsaved = time.monotonic(), False
    finally:
        if unsaved:
            _write(path, rows)
    if progress is not None:
        progress(count, len(runs))
    return [done[key] for key, *_ in runs]


def read(path: Path) -> list[Row]:
    """The rows of a sweep's file.

    Raises:
        ValueError: naming the path, where it is no such file.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: not a readable Parquet file: {error}") from error
    if not table.schema.equals(SCHEMA):
        raise ValueError(f"{path}: a Parquet file with other columns than a sweep's")
    return table.to_pylist()


def ranking(rows: Sequence[Row]) -> list[Row]:
    """One row for each label, the most accurate gradients first.

    Each has the label, int8 (how many of the seven products are in 8 bits), the geometric mean
    over the rows of rel_l2 of o, ds and each of `GRADIENTS`, and gradients, the `gradient_error`
    of those.
    """
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        by_label.setdefault(row["label"], []).append(row)
    ranked: list[Row] = []
    for label, ours in by_label.items():
        spec = AttentionSpec.parse(label)
        means = {
            t: geometric_mean([row[f"{t}_rel_l2"] for row in ours]) for t in ("o", "ds", *GRADIENTS)
        }
        ranked.append(
            {
                "label": label,
                "int8": sum(spec.site(s).precision.is_scaled for s in SITES),
                **means,
                "gradients": gradient_error(means),
            }
        )
    return sorted(ranked, key=lambda row: (row["gradients"], row["label"]))


_Key = tuple[str, str, int, str]


def _key(row: Row) -> _Key:
    return row["label"], row["capture_hash"], row["layer"], row["sagesim_version"]


def _runs(
    specs: Sequence[AttentionSpec], captures: Mapping[str, Capture], hashes: Mapping[str, str]
) -> Iterator[tuple[_Key, AttentionSpec, str, Call]]:
    """What is asked for, each once, a call's runs together."""
    labels = {spec.label(): spec for spec in specs}
    seen: set[_Key] = set()
    for name, capture in captures.items():
        for call in capture.calls:
            for label, spec in labels.items():
                key = (label, hashes[name], call.index, sagesim.__version__)
                if key not in seen:
                    seen.add(key)
                    yield key, spec, name, call


def _run(spec: AttentionSpec, call: Call, exactly: Callable[[Call], Exact]) -> Row:
    start = time.perf_counter()
    measured = errors(call, spec, exactly)
    seconds = time.perf_counter() - start
    return {
        "layer": call.index,
        "name": call.name,
        **{f"{t}_{m}": getattr(measured[t], m) for t in TENSORS for m in MEASURES},
        "seconds": seconds,
        "sagesim_version": sagesim.__version__,
        "torch_version": torch.__version__,
    }


def _write(path: Path, rows: Sequence[Row]) -> None:
    with replacing(path) as file:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), file)
