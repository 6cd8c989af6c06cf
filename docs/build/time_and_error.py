"""The figure of time against error in README.md, and the paragraph on the default spec beside it.

The figure is docs/_static/frontier.svg. It contains a digest of what it was drawn from, so that
`render.py --check` finds a figure that is out of date without comparing pixels.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence, Set
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, Final

import default_spec
import matplotlib as mpl
import matplotlib.pyplot as plt
import plots  # noqa: F401 - sets the style
import records
from grid import listed
from records import DEFAULT

from sagesim.spec import PRESETS
from sagesim_kernels import supports
from sagesim_kernels.bench.machine import card
from sagesim_kernels.bench.plots import frontier
from sagesim_kernels.bench.record import read
from sagesim_kernels.bench.tables import (
    FRONTIER_LENGTHS,
    FRONTIER_PEER,
    GRADIENTS,
    OUTPUTS,
    Point,
    cases,
    frontier_points,
    ratio,
)

TIMES: Final = ("bench_default", "bench_codes", "bench_long", "bench_int8", "bench_qk16", "bench")
"""The records with times, the newest first; `timed` leaves out those with few cases."""

NEEDED: Final = frozenset(product((64, 128), (4096, 8192)))
"""The head sizes and lengths that a record must have to be used."""

ERRORS: Final = "bench"
"""The record with errors."""

CAPTURED: Final = "bench_errors"
"""The record with errors on the shipped capture."""

INPUTS: Final = "frontier"
"""The emulator's errors of more specs and inputs; see frontier.py."""

EMULATED: Final = "errors_on_cpu"
"""The emulator's errors of the specs that the record lacks; see errors_on_cpu.py."""

FIGURE: Final = Path(__file__).parents[1] / "_static" / "frontier.svg"
PAPER: Final = "sagebwd"
HEAD_SIZES: Final = tuple(sorted({head_dim for head_dim, _ in NEEDED}))
_DIGEST = re.compile(r"digest ([0-9a-f]{16})")


def timed() -> dict[str, dict[str, Any]]:
    """The records of `TIMES` with all head sizes and lengths of `NEEDED`, the newest first."""
    every = {name: records.load(name) for name in TIMES}
    return {name: document for name, document in every.items() if _has(document, NEEDED)}


def long_records(head_size: int) -> list[dict[str, Any]]:
    """The records of long sequences with all lengths of `NEEDED` at a head size, newest first."""
    needed = {(d, tokens) for d, tokens in NEEDED if d == head_size}
    return [document for document in default_spec.long_records() if _has(document, needed)]


def _has(document: dict[str, Any], needed: Set[tuple[int, int]]) -> bool:
    """Whether a record has times of all these head sizes and lengths."""
    return {(case["head_dim"], case["tokens"]) for case in cases(document, "speed")} >= needed


def record() -> dict[str, Any]:
    """The record of the figure: errors, and times of each contender from the newest of `timed`.

    Times in the figure are relative to a peer in the same run, so that runs can be compared. Errors
    do not change with kernels, which are held to the same numbers.
    """
    errors = read(records.DATA / f"{ERRORS}.json")
    made = {key: case for key, case in errors["cases"].items() if case["part"] != "speed"}
    for key, case in _emulated()["cases"].items():
        made[key] = made[key] | {"errors": case["errors"] | made[key]["errors"]}
    sources, known = [], set()
    for name, document in timed().items():
        newest = {}
        for key, case in document["cases"].items():
            runs = {x: run for x, run in case.get("runs", {}).items() if x not in known}
            is_shown = case["part"] == "speed" and case["tokens"] in FRONTIER_LENGTHS
            if is_shown and FRONTIER_PEER in case["runs"] and runs:
                peer = {FRONTIER_PEER: case["runs"][FRONTIER_PEER]}
                newest[f"{key}, {name}"] = case | {"runs": runs | peer}
        made |= newest
        known |= {x for case in newest.values() for x in case["runs"]}
        sources += [document] if newest else []
    contenders = {
        kind: list(dict.fromkeys(x for each in sources for x in each["settings"][kind]))
        for kind in ("specs", "peers")
    }
    return {"cases": made, "settings": errors["settings"] | contenders, "sources": sources}


def _emulated() -> dict[str, Any]:
    """The record of the emulator's errors."""
    return json.loads((records.DATA / f"{EMULATED}.json").read_text(encoding="utf-8"))


def _sources(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The records with the times of `record`; another document is its own."""
    return document.get("sources", [document])


def note(document: dict[str, Any]) -> str:
    """The machines and the kernels of the record, for the figure."""
    machines = [each["machine"] for each in _sources(document)]
    return "; ".join(
        f"{card(each)}, {'earlier ' if records.age(each) else ''}kernels {each.get('kernels')}"
        for each in machines
    )


def digest(document: dict[str, Any]) -> str:
    """Of everything that the figure shows, and of the function that draws it."""
    shown = [[*map(_rounded, frontier_points(document, d))] for d in HEAD_SIZES]
    text = json.dumps([shown, note(document), inspect.getsource(frontier)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_current(document: dict[str, Any], path: Path = FIGURE) -> bool:
    """Whether the committed figure is that of the record; without points there is none."""
    if not any(frontier_points(document, d) for d in HEAD_SIZES):
        return True
    if not path.exists():
        return False
    found = _DIGEST.search(path.read_text(encoding="utf-8"))
    return found is not None and found[1] == digest(document)


def svg(document: dict[str, Any]) -> str:
    """The figure, with its digest."""
    mpl.use("agg")
    figure, buffer = frontier(document, note=note(document)), StringIO()
    metadata: dict[str, Any] = {"Date": None, "Description": f"digest {digest(document)}"}
    figure.savefig(buffer, format="svg", metadata=metadata)
    plt.close(figure)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def figure() -> str:
    """The figure and its caption, for README.md."""
    document = record()
    if not any(frontier_points(document, d) for d in HEAD_SIZES):
        return "Times and errors of one record are not measured."
    lengths = {case["tokens"] for case in cases(document, "speed")}.intersection(FRONTIER_LENGTHS)
    needed = sorted({tokens for _, tokens in NEEDED})
    made = map(records.made_by, _sources(document))
    text = (
        "![Time against the error of the gradients](docs/_static/frontier.svg)\n\n"
        "The figure shows every spec and every peer with times and errors. Further left is faster, "
        "and further down is more accurate. A time is one forward and backward with all "
        "preparation, relative to cuDNN. Each point is a geometric mean over both masks and those "
        f"of the lengths {listed(map(str, sorted(lengths)))} that its record has. The record is "
        f"the newest one that timed the spec or peer at {listed(map(str, needed))} tokens and both "
        "head sizes. A peer is another implementation of attention. Errors are root "
        "mean squares of those of dQ, dK and dV: geometric means over "
        "Gaussian inputs, in which Q and K have a standard deviation of 1 (ordinary logits) or 5 "
        f"(large logits). Thin lines are the ranges.{_of_the_emulator()}{_lacking(document)}\n\n"
        f"{'; '.join(made)}."
    )
    found = records.age_of_several([x["machine"] for x in _sources(document)])
    return records.with_paragraph(text, found)


def _of_the_emulator() -> str:
    """Whose errors are the emulator's, and the command that computed them."""
    emulated, measured = _emulated(), read(records.DATA / f"{ERRORS}.json")["cases"]
    specs = {
        x
        for key, case in emulated["cases"].items()
        for x in case["errors"].keys() - measured[key]["errors"].keys()
    }
    words = listed(f"`{x}`" for x in sorted(specs))
    made = f"`{emulated['command']}`, {emulated['machine']}"
    return f" Errors of {words} are the emulator's ({made})." if specs else ""


def _lacking(document: dict[str, Any]) -> str:
    """The presets with kernels that the figure lacks; empty if it has all."""
    timed = {p.name for d in HEAD_SIZES for p in frontier_points(document, d)}
    lacking = [name for name, spec in PRESETS.items() if name not in timed and supports(spec)]
    return (
        f" Without a time or an error: {listed(f'`{name}`' for name in lacking)}."
        if lacking
        else ""
    )


def choice() -> str:
    """Why the default spec is what it is, with what would be more accurate and what is faster."""
    document = record()
    every = {d: {p.name: p for p in frontier_points(document, d)} for d in HEAD_SIZES}
    by_size = {d: points for d, points in every.items() if {DEFAULT, PAPER} <= points.keys()}
    if not by_size:
        return "Times and errors of the default spec are not measured in one record."
    shown = {name for points in by_size.values() for name in points}
    specs = [name for name in document["settings"]["specs"] if name in shown]
    errors = every_error(document)
    safe = [name for name in specs if name != PAPER and is_safe(name, errors)]
    fastest = all(
        points[DEFAULT].time == min(points[name].time for name in safe if name in points)
        for points in by_size.values()
    )
    paper = [points[DEFAULT].error / points[PAPER].error for points in by_size.values()]
    words = [
        f"**We chose `{DEFAULT}` as the default spec by two rules.** First, a default must have "
        "smaller errors than the paper's scheme in O, dQ, dK and dV on every input that was "
        f"measured. Of the specs of the figure, {listed(f'`{name}`' for name in safe)} do. "
        f"Second, the fastest of them is the default: `{DEFAULT}` is "
        f"{'the fastest' if fastest else '**not** the fastest'}. "
        f"Its gradients' error is {_range(paper)} times that of the paper's scheme.",
        _more_accurate(),
        _faster(by_size),
    ]
    return " ".join(words)


def every_error(document: Mapping[str, Any]) -> list[dict[str, dict[str, float]]]:
    """Errors of specs on each input that was measured, in the figure and elsewhere."""
    cases_of = [document["cases"], read(records.DATA / f"{CAPTURED}.json")["cases"]]
    found = [c["errors"] for each in cases_of for c in each.values() if c["part"] == "accuracy"]
    by_inputs: dict[str, dict[str, dict[str, float]]] = {}
    for row in _inputs()["rows"]:
        by_inputs.setdefault(row["inputs"], {})[row["label"]] = row["exact"]
    return [*found, *by_inputs.values()]


def is_safe(name: str, errors: Sequence[Mapping[str, Mapping[str, float]]]) -> bool:
    """Whether each error of a spec is smaller than the paper's scheme's, on every input with it."""
    return all(
        of_specs[name][output] < of_specs[PAPER][output]
        for of_specs in errors
        if name in of_specs
        for output in OUTPUTS
    )


def _inputs() -> dict[str, Any]:
    """The record of the emulator's errors on more inputs."""
    return json.loads((records.DATA / f"{INPUTS}.json").read_text(encoding="utf-8"))


def _more_accurate() -> str:
    """The specs with smaller errors on some inputs, and what they cost."""
    measured = _inputs()
    errors = {(r["inputs"], r["label"]): _rms(r["exact"]) for r in measured["rows"]}
    inputs = list(dict.fromkeys(row["inputs"] for row in measured["rows"]))
    said: list[str] = []
    for spec, name in (("factored_qk16", "bench_qk16"), ("factored", "bench_long")):
        gains = [errors[x, spec] / errors[x, DEFAULT] for x in inputs]
        better = sum(x < 1 for x in gains)
        slower = [
            ratio(case, DEFAULT, spec)
            for case in cases(read(records.DATA / f"{name}.json"), "speed")
            if {DEFAULT, spec} <= case["runs"].keys() and case["tokens"] in FRONTIER_LENGTHS
        ]
        cost = f"It takes {_range(slower)} times as long" if slower else "It was not timed"
        said.append(
            f"`{spec}` is more accurate than the default on {better} of {len(inputs)} inputs: its "
            f"error is {_range(gains)} times as large. {cost}."
        )
    return f"{' '.join(said)} ([Inputs](docs/products.md#gradients-in-fp8).)"


def _faster(by_size: dict[int, dict[str, Point]]) -> str:
    """What is faster than the default spec, and whether it is more accurate, too."""
    peers: dict[str, list[float]] = {}
    for points in by_size.values():
        own = points[DEFAULT]
        for name, p in points.items():
            if p.time < own.time:
                peers.setdefault(name, []).append(p.time / own.time)
    if not peers:
        return "Nothing in the figure is faster."
    said = [
        f"`{name}`, which takes {_range(times)} of its time"
        + ("" if len(times) == len(by_size) else " at one of the two head sizes")
        + _error_words(by_size, name)
        for name, times in peers.items()
    ]
    return f"Faster than the default {'is' if len(said) == 1 else 'are'} {listed(said)}."


def _error_words(by_size: dict[int, dict[str, Point]], name: str) -> str:
    """Whether the errors of a contender are smaller or larger than the default's."""
    pairs = [(p[name].error, p[DEFAULT].error) for p in by_size.values() if name in p]
    if all(x < y for x, y in pairs):
        return ", with smaller errors"
    return ", with larger errors" if all(x > y for x, y in pairs) else ""


def _rms(errors: dict[str, float]) -> float:
    return (sum(errors[t] ** 2 for t in GRADIENTS) / len(GRADIENTS)) ** 0.5


def _rounded(point: Point) -> list[Any]:
    return [point.name, *(float(f"{x:.4g}") for x in point[1:])]


def _range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{f(values):.2f}" for f in (min, max)))
