"""The sequences of each training step, as a function of the seed and the step alone.

The number of processes and the micro-batch size only divide a step's sequences; they do not change
which sequences the step uses. Resuming at a step therefore needs no saved state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sagesim.experiments.pretrain.text.corpus import Corpus


@dataclass(frozen=True, slots=True)
class Share:
    """The part of every step that one process computes."""

    sequences: int  #: sequences of one micro-batch
    micro_batches: int  #: micro-batches of one step, computed one after the other
    first: int  #: index in the step of the process' first sequence

    @classmethod
    def of(
        cls, *, tokens_per_step: int, context: int, micro_batch: int, rank: int, processes: int
    ) -> Share:
        """The share of process `rank` of `processes`.

        Raises:
            ValueError: if the tokens do not divide into sequences, or the sequences do not divide
                into micro-batches. The message names the numbers.

        >>> Share.of(tokens_per_step=2**19, context=1024, micro_batch=32, rank=1, processes=4)
        Share(sequences=32, micro_batches=4, first=128)
        """
        sequences, rest = divmod(tokens_per_step, context)
        if rest or not sequences:
            raise ValueError(
                f"tokens_per_step={tokens_per_step} is not a multiple of context={context}"
            )
        at_once = micro_batch * processes
        if micro_batch < 1 or sequences % at_once:
            raise ValueError(
                f"{sequences} sequences a step do not divide into micro-batches of {micro_batch} "
                f"on {processes} process{'es' if processes > 1 else ''} ({at_once} at a time)"
            )
        own = sequences // processes
        return cls(micro_batch, own // micro_batch, rank * own)


def step_windows(step: int, sequences: int, windows: int, seed: int) -> NDArray[np.int64]:
    """The window indices of one step, int64 [sequences].

    An epoch uses every window once, in an order of its own. A step may start in one epoch and end
    in the next.

    Raises:
        ValueError: if `windows` is 0.
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
    """A permutation of the windows. It sorts hashes, so it does not depend on numpy's version."""
    key = _mix(_mix(np.array([seed], np.uint64)) ^ np.uint64(epoch))
    return np.argsort(_mix(np.arange(windows, dtype=np.uint64) ^ key), kind="stable")


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64, a bijection. Source: Steele, Lea, Flood, OOPSLA 2014."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def micro_batches(
    corpus: Corpus, share: Share, *, step: int, sequences: int, context: int, seed: int
) -> Iterator[Tensor]:
    """The micro-batches of one process in one step: tokens, int64 [share.sequences, context + 1].

    Args:
        sequences: sequences of the whole step, over all processes.
    """
    chosen = step_windows(step, sequences, corpus.windows("train", context), seed)
    for index in range(share.micro_batches):
        start = share.first + index * share.sequences
        yield stack_windows(corpus, "train", context, chosen[start : start + share.sequences])


def stack_windows(corpus: Corpus, split: str, context: int, indices: NDArray[np.int64]) -> Tensor:
    """The windows with these indices, int64 [sequences, context + 1]."""
    windows = [corpus.window(split, context, int(index)) for index in indices]
    return torch.from_numpy(np.stack(windows))
