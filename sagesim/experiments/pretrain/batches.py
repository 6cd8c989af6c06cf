"""Which sequences a step trains on: a function of the seed and the step, and of nothing else.

Not of the number of processes, nor of how many sequences fit at a time: these only say who takes
which part of a step's sequences. Resuming at a step needs no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sagesim.experiments.pretrain.corpus import Corpus


@dataclass(frozen=True, slots=True)
class Share:
    """The part of every step that a process takes: `micro_batches` of `sequences` each, one after
    the other, beginning at sequence `first` of the step."""

    sequences: int
    micro_batches: int
    first: int

    @classmethod
    def of(
        cls, *, tokens_per_step: int, context: int, micro_batch: int, rank: int, processes: int
    ) -> Share:
        """The share of one of several processes.

        Raises:
            ValueError: naming the numbers, where they do not divide.

        >>> Share.of(tokens_per_step=2**19, context=1024, micro_batch=32, rank=1, processes=4)
        Share(sequences=32, micro_batches=4, first=128)
        """
        sequences, rest = divmod(tokens_per_step, context)
        if rest or not sequences:
            raise ValueError(
                f"tokens_per_step={tokens_per_step} is no multiple of context={context}"
            )
        at_once = micro_batch * processes
        if micro_batch < 1 or sequences % at_once:
            raise ValueError(
                f"{sequences} sequences a step do not divide into micro-batches of {micro_batch} "
                f"on {processes} process{'es' if processes > 1 else ''} ({at_once} at a time)"
            )
        here = sequences // processes
        return cls(micro_batch, here // micro_batch, rank * here)


def step_windows(step: int, sequences: int, windows: int, seed: int) -> NDArray[np.int64]:
    """The indices of the windows of a step. Each is used once in an epoch; an epoch's order is
    drawn anew, and a step may begin in one epoch and end in the next.

    Raises:
        ValueError: where there are no windows.
    """
    if windows < 1:
        raise ValueError("the corpus has no window of this context")
    places = np.arange(step * sequences, (step + 1) * sequences)
    order = [
        _order(int(epoch), windows, seed)[places % windows][places // windows == epoch]
        for epoch in np.unique(places // windows)
    ]
    return np.concatenate(order)


@lru_cache(maxsize=2)
def _order(epoch: int, windows: int, seed: int) -> NDArray[np.int64]:
    """A permutation: windows by their hashes, which do not change with a version of numpy."""
    key = _mix(_mix(np.array([seed], np.uint64)) ^ np.uint64(epoch))
    return np.argsort(_mix(np.arange(windows, dtype=np.uint64) ^ key), kind="stable")


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, a bijection. Source: Steele, Lea, Flood, OOPSLA 2014."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def micro_batches(
    corpus: Corpus, share: Share, *, step: int, sequences: int, context: int, seed: int
) -> Iterator[Tensor]:
    """A process' share of a step: tokens int64 [share.sequences, context + 1], one micro-batch
    after the other.

    Args:
        sequences: of the whole step.
    """
    chosen = step_windows(step, sequences, corpus.windows("train", context), seed)
    for index in range(share.micro_batches):
        start = share.first + index * share.sequences
        yield stack(corpus, "train", context, chosen[start : start + share.sequences])


def stack(corpus: Corpus, split: str, context: int, indices: NDArray[np.int64]) -> Tensor:
    """The windows of these indices, int64 [sequences, context + 1]."""
    windows = [corpus.window(split, context, int(index)) for index in indices]
    return torch.from_numpy(np.stack(windows))
