"""The tables of a record's models: shapes of their attention calls, and training steps.

Ratios are to the faster of the backends `models.SDPA` that ran. They are given for the device's
time, and for the time of a call in a loop, host included ("wall").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from sagesim_kernels.bench.models import MODEL_PEERS, MODEL_SPECS, MODELS, SDPA
from sagesim_kernels.bench.tables import Table

FIGURES: Final = ("GPU", "wall")
"""The two times of a run."""

_NOT_RUN: Final = "-"
_SHAPE: Final = "B, heads, tokens, d, mask"
_TRAINED: Final = "layers, width, d, tokens"
_GROUPED: Final = ("grouped", "ungrouped")


def milliseconds(run: dict[str, Any], figure: str) -> float:
    """One of `FIGURES` of a run of the part "models" or "training"."""
    device = run["both"] if "both" in run else run["step"]
    return device["ms"] if figure == "GPU" else run["wall"]["ms"]


def fastest_sdpa(case: dict[str, Any], figure: str) -> float | None:
    """Milliseconds of the faster backend; None if none ran."""
    runs = case["runs"]
    return min((milliseconds(runs[name], figure) for name in SDPA if name in runs), default=None)


def ratio(case: dict[str, Any], name: str, figure: str) -> float | None:
    """How many times as fast as the faster SDPA; None if one of the two did not run."""
    least = fastest_sdpa(case, figure)
    if least is None or name not in case["runs"]:
        return None
    return least / milliseconds(case["runs"][name], figure)


def shapes(document: dict[str, Any], group: str) -> dict[str, dict[str, Any]]:
    """The results of a group of `MODELS`, by their shape in words."""
    head = f"models {group} "
    found = document["cases"].items()
    return {key.removeprefix(head): case for key, case in found if key.startswith(head)}


def group_times(document: dict[str, Any], group: str) -> Table:
    """A table of times at the shapes of a group: device, wall, and the host's time to launch."""

    def cell(case: dict[str, Any], name: str) -> str:
        run = case["runs"][name]
        device, wall = (f"{milliseconds(run, figure):.3g}" for figure in FIGURES)
        return f"{device} / {wall} ({run['both']['host_ms']:.2g})"

    names = (*MODEL_SPECS, *MODEL_PEERS)
    title = f"ms, forward and backward: GPU / wall (host's time to launch both), {group}"
    return _rows(title, shapes(document, group), _SHAPE, names, cell)


def group_ratios(document: dict[str, Any], group: str) -> Table:
    """A table of speeds relative to the faster SDPA at the shapes of a group."""
    names = (*MODEL_SPECS, *MODEL_PEERS[len(SDPA) :])
    title = f"times as fast as the faster SDPA, forward and backward: GPU / wall, {group}"
    return _rows(title, shapes(document, group), _SHAPE, names, _ratios)


def grouped_queries(document: dict[str, Any]) -> Table:
    """A table of what heads of k and v that serve several heads of q cost in device time."""
    several, alike = (shapes(document, group) for group in _GROUPED)
    names = (*MODEL_SPECS, *MODEL_PEERS)
    rows: list[list[str]] = []
    for words, case in several.items():
        heads = f"h{case['heads']}"
        other = alike.get(words.replace(f"{heads}/{case['kv_heads']}", heads))
        if other is not None:
            rows.append([words, *(_cost(case["runs"], other["runs"], name) for name in names)])
    title = "time relative to as many heads of k and v as of q, forward and backward, GPU"
    return Table(title, [_SHAPE, *names], rows)


def training_times(document: dict[str, Any]) -> Table:
    """A table of the times of a training step."""

    def cell(case: dict[str, Any], name: str) -> str:
        return " / ".join(f"{milliseconds(case['runs'][name], f):.3g}" for f in FIGURES)

    title = "ms, training step: GPU / wall"
    return _rows(title, _trained(document), _TRAINED, (*MODEL_SPECS, *SDPA), cell)


def training_ratios(document: dict[str, Any]) -> Table:
    """A table of the speeds of a training step relative to the faster SDPA."""
    title = "times as fast as the faster SDPA, training step: GPU / wall"
    return _rows(title, _trained(document), _TRAINED, MODEL_SPECS, _ratios)


def extremes(document: dict[str, Any]) -> Table:
    """A table of the smallest and largest ratio to the faster SDPA, and where they are.

    All shapes of `MODELS` count but the tiny one, which is there for the host's time.
    """
    timed = {
        key.removeprefix("models ").partition(" ")[2]: case
        for key, case in document["cases"].items()
        if case["part"] == "models" and not key.startswith("models tiny ")
    }
    rows: list[list[str]] = []
    for name in MODEL_SPECS:
        for figure in FIGURES:
            found = {words: x for words, c in timed.items() if (x := ratio(c, name, figure))}
            if found:
                ends = (min(found, key=found.__getitem__), max(found, key=found.__getitem__))
                cells = [f"{found[words]:.2f} ({words})" for words in ends]
                slower = sum(x < 1 for x in found.values())
                rows.append([name, figure, *cells, f"{slower} of {len(found)}"])
    head = ["spec", "time", "worst case", "best case", "slower at"]
    return Table("times as fast as the faster SDPA, shapes of models", head, rows)


def model_tables(document: dict[str, Any]) -> list[Table]:
    """Every table of models that has rows, times first."""
    found = [make(document, group) for make in (group_times, group_ratios) for group in MODELS]
    found += [grouped_queries(document), training_times(document), training_ratios(document)]
    return [each for each in (*found, extremes(document)) if each.rows]


def _cost(runs: dict[str, Any], other: dict[str, Any], name: str) -> str:
    if name not in runs or name not in other:
        return _NOT_RUN
    return f"{milliseconds(runs[name], 'GPU') / milliseconds(other[name], 'GPU'):.3f}"


def _trained(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = document["cases"].items()
    return {k.removeprefix("training "): c for k, c in found if c["part"] == "training"}


def _ratios(case: dict[str, Any], name: str) -> str:
    found = [ratio(case, name, figure) for figure in FIGURES]
    return _NOT_RUN if None in found else " / ".join(f"{x:.2f}" for x in found)


def _rows(
    title: str,
    timed: dict[str, dict[str, Any]],
    first: str,
    names: Sequence[str],
    cell: Callable[[dict[str, Any], str], str],
) -> Table:
    """A table with a row for each case. A contender that ran in none of them has no column."""
    ran = [name for name in names if any(name in case["runs"] for case in timed.values())]

    def cells(case: dict[str, Any]) -> Iterable[str]:
        return (cell(case, name) if name in case["runs"] else _NOT_RUN for name in ran)

    return Table(title, [first, *ran], [[words, *cells(case)] for words, case in timed.items()])
