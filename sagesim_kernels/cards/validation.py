"""Predictions beside measured times, and the fit of the model's three free numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sagesim_kernels.cards.card import CARDS
from sagesim_kernels.cards.model import Fit, Shape
from sagesim_kernels.cards.passes import Rows, Times, predict


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured pass.

    A profile gives the time of the loops alone. Without one it is the time of the pass, less what
    the model predicts for the rest.
    """

    card: str
    code: int
    spec: str
    shape: Shape
    forward: bool
    pass_ms: float
    loops_ms: float | None

    def loops(self, rows: Rows, fit: Fit) -> float:
        if self.loops_ms is not None:
            return self.loops_ms
        return self.pass_ms - self.predicted(rows, fit).other

    def predicted(self, rows: Rows, fit: Fit) -> Times:
        card = CARDS[self.card]
        return predict(card, rows, self.spec, self.shape, fit, forward=self.forward, code=self.code)

    def error(self, rows: Rows, fit: Fit) -> float:
        """The logarithm of the predicted time of the loops over the measured one."""
        return math.log(self.predicted(rows, fit).loops / self.loops(rows, fit))


def measurements(document: Mapping[str, Any]) -> Iterator[Measured]:
    """Yield the passes in a document like docs/data/cards_measured.json."""
    for run in document["runs"]:
        for row in run["rows"]:
            heads = run["sequences"] * run["channels"] // row["head_size"]
            shape = Shape(heads, run["tokens"], row["head_size"], row["is_causal"])
            for name in ("forward", "backward"):
                yield Measured(
                    run["card"],
                    run["code"],
                    row["spec"],
                    shape,
                    name == "forward",
                    row[f"{name}_ms"],
                    row.get(f"{name}_loops_ms"),
                )


def rms(errors: Iterable[float]) -> float:
    squares = [error**2 for error in errors]
    return math.sqrt(sum(squares) / len(squares))


def fitted(measured: Sequence[Measured], rows: Rows) -> Fit:
    """Return the fit with the least root mean square of the errors."""

    def cost(fit: Fit) -> float:
        return rms(each.error(rows, fit) for each in measured)

    best = Fit(power=3.0, stall=1.5, l2_bytes=24.0)
    for step in (0.2, 0.05, 0.01):  # of each number; the cost falls towards one minimum
        least = math.inf
        while cost(best) < least:
            least = cost(best)
            for name in ("power", "stall", "l2_bytes"):
                best = _walked(cost, best, name, 1 + step)
    return Fit(*(float(f"{x:.4g}") for x in (best.power, best.stall, best.l2_bytes)))


def _walked(cost: Callable[[Fit], float], start: Fit, name: str, factor: float) -> Fit:
    """Multiply or divide one number by a factor while the cost falls."""
    best, least = start, cost(start)
    for by in (factor, 1 / factor):
        while (found := cost(there := replace(best, **{name: getattr(best, name) * by}))) < least:
            best, least = there, found
    return best


def left_out_errors(measured: Sequence[Measured], rows: Rows) -> list[float]:
    """Return the error of each spec and head size under a fit to all the others."""
    groups = dict.fromkeys((each.spec, each.shape.head_size) for each in measured)
    result: list[float] = []
    for group in groups:
        others = [m for m in measured if (m.spec, m.shape.head_size) != group]
        fit = fitted(others, rows)
        result += [m.error(rows, fit) for m in measured if (m.spec, m.shape.head_size) == group]
    return result
