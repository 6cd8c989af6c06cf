"""The loss on held-out sequences, which are the same for all runs on a corpus."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sagesim.experiments.pretrain.run.distributed import World
from sagesim.experiments.pretrain.run.settings import Run
from sagesim.experiments.pretrain.text.batches import stack_windows
from sagesim.experiments.pretrain.text.corpus import Corpus


class Evaluation:
    """The held-out sequences of a run: evenly spaced in the split, divided over the processes."""

    def __init__(self, run: Run, corpus: Corpus, world: World, micro_batch: int) -> None:
        self._corpus, self._context, self._world = corpus, run.context, world
        self._micro_batch, self._count = micro_batch, run.evaluate_sequences
        self._windows = corpus.windows("validation", run.context)

    def sequence(self, index: int, count: int) -> Tensor:
        """One of `count` held-out sequences, evenly spaced in the split: int64 [1, context + 1].

        Neighbouring sequences are often of one document or of similar ones.
        """
        chosen = self._spaced(count)[index : index + 1]
        return stack_windows(self._corpus, "validation", self._context, chosen)

    def sequences(self) -> Tensor:
        """All held-out sequences of the run, int64 [evaluate_sequences, context + 1]."""
        return stack_windows(self._corpus, "validation", self._context, self._spaced(self._count))

    def loss(self, mean_loss: Callable[[Tensor], Tensor]) -> float:
        """The mean loss over the sequences. Every process gets the same value.

        Args:
            mean_loss: computes the mean loss of sequences, int64 [batch, context + 1].
        """
        chosen = self._spaced(self._count)
        world = self._world
        mine = chosen[world.rank :: world.processes]
        # All processes must run the same number of forwards: each gathers sharded weights.
        rounds = -(-self._count // (world.processes * self._micro_batch))
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        for index in range(rounds):
            part = mine[index * self._micro_batch : (index + 1) * self._micro_batch]
            taken = part if len(part) else chosen[:1]
            loss = mean_loss(stack_windows(self._corpus, "validation", self._context, taken))
            total += loss.double() * len(part)
        return float(world.sum(total)) / self._count

    def _spaced(self, count: int) -> NDArray[np.int64]:
        return np.arange(count) * self._windows // count
