"""Predictions beside measured times, and the fit of the model's free numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from sagesim_kernels.cards.card import CARDS, Card
from sagesim_kernels.cards.model import Fit, Shape
from sagesim_kernels.cards.passes import FLASH, Rows, Times, predict

FLASH_CONTENDER: Final = "sdpa flash"
"""The name of FlashAttention-2 in a record of `sagesim_kernels.bench`."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured pass, with all that it launches."""

    card: Card
    code: int  #: the capability that our kernels were compiled for
    spec: str  #: the name of a preset, or `FLASH`
    shape: Shape
    forward: bool
    ms: float

    def predicted(self, rows: Rows, fit: Fit) -> Times:
        return predict(
            self.card, rows, self.spec, self.shape, fit, forward=self.forward, code=self.code
        )

    def error(self, rows: Rows, fit: Fit) -> float:
        """The logarithm of the predicted time over the measured one."""
        return math.log(self.predicted(rows, fit).total / self.ms)


def measurements(
    document: Mapping[str, Any],
    specs: Collection[str],
    *,
    least_tokens: int = 0,
    cards: Mapping[str, Card] = CARDS,
) -> Iterator[Measured]:
    """Yield the passes of some specs in a record of `sagesim_kernels.bench`.

    Args:
        specs: names of presets, or `FLASH`.
        least_tokens: shorter sequences are left out.
        cards: by name; the record's GPU is the one whose name contains it.

    Raises:
        ValueError: if the GPU is none of the cards.
    """
    gpu = document["machine"]["gpu"]
    card = next((card for name, card in cards.items() if name in gpu), None)
    if card is None:
        raise ValueError(f"{gpu} is none of {', '.join(cards)}")
    code = int(document["settings"].get("code", f"sm{card.code}").removeprefix("sm"))
    for case in document["cases"].values():
        if case["part"] != "speed" or case["tokens"] < least_tokens:
            continue
        heads = case["batch"] * case["heads"]
        shape = Shape(heads, case["tokens"], case["head_dim"], case["is_causal"])
        for spec in specs:
            run = case["runs"].get(FLASH_CONTENDER if spec == FLASH else spec)
            for name in ("forward", "backward") if run else ():
                yield Measured(card, code, spec, shape, name == "forward", run[name]["ms"])


def rms(errors: Iterable[float]) -> float:
    squares = [error**2 for error in errors]
    return math.sqrt(sum(squares) / len(squares))


def fitted(measured: Sequence[Measured], rows: Rows) -> Fit:
    """Return the fit with the least root mean square of the errors."""

    def cost(fit: Fit) -> float:
        return rms(each.error(rows, fit) for each in measured)

    best = Fit(power=3.0, stall=1.5, spilled=8.0)
    for step in (0.2, 0.05, 0.01):  # of each number; the cost falls towards one minimum
        least = math.inf
        while cost(best) < least:
            least = cost(best)
            for name in (field.name for field in fields(Fit)):
                best = _walked(cost, best, name, 1 + step)
    return Fit(**{name: float(f"{x:.4g}") for name, x in asdict(best).items()})


def _walked(cost: Callable[[Fit], float], start: Fit, name: str, factor: float) -> Fit:
    """Multiply or divide one number by a factor while the cost falls."""
    best, least = start, cost(start)
    for by in (factor, 1 / factor):
        while (found := cost(there := replace(best, **{name: getattr(best, name) * by}))) < least:
            best, least = there, found
    return best


def fits_without_each(measured: Sequence[Measured], rows: Rows) -> dict[str, Fit]:
    """Return for each spec the fit to the passes of all others."""
    return {
        spec: fitted([each for each in measured if each.spec != spec], rows)
        for spec in dict.fromkeys(each.spec for each in measured)
    }
