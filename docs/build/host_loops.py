"""The host's time of attention calls; docs/speed.md shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import records
from grid import markdown
from IPython.display import Markdown
from tables import data

from sagesim_kernels.bench.machine import one_line
from sagesim_kernels.bench.tables import cases

_NAMES: Final = ("factored_qk", "sdpa flash", "sdpa cudnn", "nothing")
_THREADS: Final = ("two threads", "one thread")


def launches(document: dict[str, Any]) -> str:
    """How long the host takes to launch a forward and backward of long sequences."""
    timed = cases(document, "speed")
    said = []
    for name in ("factored_qk", "sdpa flash", "flash-attn-4"):
        ms = [case["runs"][name]["both"]["host_ms"] for case in timed if name in case["runs"]]
        said += [f"{min(ms):.1f} to {max(ms):.1f} ms with `{name}`"] if ms else []
    return (
        f"Launching a forward and backward takes the host {', '.join(said)}. If the GPU needs less "
        "than that, the host decides the speed. A CUDA graph, or `torch.compile` with "
        '`mode="reduce-overhead"`, launches all kernels at once.'
    )


def tables() -> Markdown:
    """The time of short calls in a loop, with the backward in two threads and in one."""
    record = data("host_loops")
    parts = [
        _table(record),
        "Medians of loops of 300 eager calls, forward and backward, bfloat16. `nothing` is an "
        "autograd function in Python that launches no kernel. "
        f"{one_line(record['machine'])}. {record['about']}",
    ]
    if before := record.get("before"):
        parts += [_table(before), before["about"]]
    two, one = (
        [row["us"]["nothing"] for row in record["runs"] if row["threads"] == threads]
        for threads in _THREADS
    )
    slower = sorted(x / y for x, y in zip(two, one, strict=True))
    parts.append(
        "PyTorch runs a backward on a GPU in a thread of its own. In a loop of single attention "
        "calls each thread sleeps while the other works. On this virtual machine even `nothing` "
        f"then takes {slower[0]:.1f} to {slower[-1]:.1f} times as long as in one thread."
    )
    return Markdown("\n\n".join(parts))


def of_machines() -> Markdown:
    """The host's times of one contender in the two newest records with shapes of models."""
    newest, before = records.of_part("models")[:2]
    name = "sdpa cudnn"
    calls = [key for key in newest["cases"] if key in before["cases"]]
    pairs = [
        [document["cases"][key]["runs"][name]["both"]["host_ms"] for document in (newest, before)]
        for key in calls
    ]
    ratios = sorted(found / earlier for found, earlier in pairs)
    return Markdown(
        f"For the same code of cuDNN, host times of `{newest['file']}` are {ratios[0]:.1f} to "
        f"{ratios[-1]:.1f} times those of `{before['file']}`, in {len(calls)} calls."
    )


def _table(found: Mapping[str, Any]) -> str:
    rows = [
        [row["call"], row["threads"], *(f"{row['us'][name]:.0f}" for name in _NAMES)]
        for row in found["runs"]
    ]
    head = ["call", "forward and backward in", *(f"`{name}`, us" for name in _NAMES)]
    return markdown(head, rows)
