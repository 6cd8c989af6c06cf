"""A difference of final losses, and whether it may be chance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from scipy.special import stdtr

CHANCE: Final = 0.05
"""A difference may be chance if its probability without an effect is at least this."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The final held-out loss minus that of the reference, paired by seed."""

    mean: float
    low: float  #: the smallest difference of a seed
    high: float  #: the largest difference of a seed
    seeds: int  #: number of seeds
    error: float | None = None  #: standard error of the mean; see `compare.seed_deviation`
    degrees: int = 0  #: degrees of freedom of the error; 0 without an error

    @property
    def probability(self) -> float:
        """Of a mean at least as far from 0 if the attention had no effect; 1 without an error.

        By Student's t. It assumes that seeds differ normally.
        """
        if self.error is None or not self.degrees:
            return 1.0
        if not self.error:
            return 0.0 if self.mean else 1.0
        return 2 * float(stdtr(self.degrees, -abs(self.mean) / self.error))

    @property
    def is_chance(self) -> bool:
        """Whether the mean may be chance.

        It may be if it has no error, if its `probability` is at least `CHANCE`, or if the seeds
        disagree on the sign.
        """
        return self.probability >= CHANCE or self.low <= 0 <= self.high

    def verdict(self, margin: float | None) -> str:
        """The verdict of a plan's rule; empty without a margin.

        A difference counts if its mean exceeds the margin and all seeds have the same sign.

        Args:
            margin: nats.

        Raises:
            ValueError: if the margin is not a finite number of at least 0.
        """
        if margin is None:
            return ""
        if not (math.isfinite(margin) and margin >= 0):
            raise ValueError(f"margin={margin} is not a finite number of at least 0")
        one_sign = self.low > 0 or self.high < 0
        if abs(self.mean) <= margin:
            return "within the margin"
        if not one_sign:
            return "seeds disagree"
        return "worse" if self.mean > 0 else "better"
