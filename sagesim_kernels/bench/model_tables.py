"""The tables of a record's models: shapes of their attention calls, and training steps.

Ratios are to the faster of the backends `models.SDPA` that ran. They are given for the device's
time, and for the time of a call in a loop, host included ("wall").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from sagesim_kernels.bench.machine import card
from sagesim_kernels.bench.models import MODEL_PEERS, MODEL_SPECS, SDPA
from sagesim_kernels.bench.tables import Table

FIGURES: Final = ("GPU", "wall")
"""The two times of a run."""

_NOT_RUN: Final = "-"
_SHAPE: Final = "B, heads, tokens, d, mask"
_IN_GROUPS: Final = f"group, {_SHAPE}"
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


def shapes(document: dict[str, Any], group: str = "") -> dict[str, dict[str, Any]]:
    """The results of the shapes of models, by group and shape in words; of a group, by shape."""
    head = f"models {group} " if group else "models "
    found = document["cases"].items()
    return {key.removeprefix(head): case for key, case in found if key.startswith(head)}


def times(document: dict[str, Any]) -> Table:
    """A table of times at the shapes of models: device, wall, and the host's time to launch."""

    def cell(case: dict[str, Any], name: str) -> str:
        run = case["runs"][name]
        device, wall = (f"{milliseconds(run, figure):.3g}" for figure in FIGURES)
        return f"{device} / {wall} ({run['both']['host_ms']:.2g})"

    names = (*MODEL_SPECS, *MODEL_PEERS)
    title = "shapes of models, ms, forward and backward: GPU / wall (host's time to launch both)"
    return _rows(title, shapes(document), _IN_GROUPS, names, cell)


def ratios(document: dict[str, Any]) -> Table:
    """A table of speeds relative to the faster SDPA at the shapes of models."""
    names = (*MODEL_SPECS, *MODEL_PEERS[len(SDPA) :])
    title = "shapes of models, times as fast as the faster SDPA, forward and backward: GPU / wall"
    return _rows(title, shapes(document), _IN_GROUPS, names, _ratios)


def grouped_queries(document: dict[str, Any]) -> Table:
    """A table of what heads of k and v that serve several heads of q cost in device time."""
    several, alike = (shapes(document, group) for group in _GROUPED)
    pairs: dict[str, dict[str, Any]] = {}
    for words, case in several.items():
        heads = f"h{case['heads']}"
        other = alike.get(words.replace(f"{heads}/{case['kv_heads']}", heads))
        if other is not None:
            both_ran = case["runs"].keys() & other["runs"].keys()
            pairs[words] = {"runs": dict.fromkeys(both_ran, (case, other))}

    def cell(pair: dict[str, Any], name: str) -> str:
        grouped, not_grouped = (milliseconds(c["runs"][name], "GPU") for c in pair["runs"][name])
        return f"{grouped / not_grouped:.3f}"

    title = "time relative to as many heads of K and V as of Q, forward and backward, GPU"
    return _rows(title, pairs, _SHAPE, (*MODEL_SPECS, *MODEL_PEERS), cell)


def training_times(document: dict[str, Any]) -> Table:
    """A table of the times of a training step."""

    def cell(case: dict[str, Any], name: str) -> str:
        return " / ".join(f"{milliseconds(case['runs'][name], f):.3g}" for f in FIGURES)

    title = "training step, ms: GPU / wall"
    return _rows(title, _trained(document), _TRAINED, (*MODEL_SPECS, *SDPA), cell)


def training_ratios(document: dict[str, Any]) -> Table:
    """A table of the speeds of a training step relative to the faster SDPA."""
    title = "training step, times as fast as the faster SDPA: GPU / wall"
    return _rows(title, _trained(document), _TRAINED, MODEL_SPECS, _ratios)


def extremes(*documents: dict[str, Any]) -> Table:
    """A table of the smallest and largest ratio to the faster SDPA, and where they are.

    Of a shape that is in several records, the first counts. If the records are of several GPUs,
    each shape names its own.
    """
    several = len({card(document["machine"]) for document in documents}) > 1
    timed: dict[str, dict[str, Any]] = {}
    known: set[str] = set()
    for document in documents:
        found = {words.partition(" ")[2]: case for words, case in shapes(document).items()}
        gpu = f", {card(document['machine'])}" if several else ""
        timed |= {words + gpu: case for words, case in found.items() if words not in known}
        known |= found.keys()
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
    return Table("shapes of models, times as fast as the faster SDPA", head, rows)


def model_tables(document: dict[str, Any]) -> list[Table]:
    """Every table of models that has rows, times first."""
    makes = (times, ratios, grouped_queries, training_times, training_ratios, extremes)
    return [each for each in (make(document) for make in makes) if each.rows]


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
