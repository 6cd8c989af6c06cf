"""The loss on held-out sequences, which are the same for every run on a corpus."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sagesim.experiments.pretrain.batches import stack
from sagesim.experiments.pretrain.corpus import Corpus
from sagesim.experiments.pretrain.distributed import World
from sagesim.experiments.pretrain.settings import Run


class Evaluation:
    """Held-out sequences, evenly spread over those that there are, and shared by the processes."""

    def __init__(self, run: Run, corpus: Corpus, here: World, micro_batch: int) -> None:
        self._corpus, self._context, self._here = corpus, run.context, here
        self._micro_batch, self._count = micro_batch, run.evaluate_sequences
        self._windows = corpus.windows("validation", run.context)

    def sequence(self, index: int) -> Tensor:
        """One held-out sequence, int64 [1, context + 1]."""
        return stack(self._corpus, "validation", self._context, np.array([index]))

    def loss(self, mean_loss: Callable[[Tensor], Tensor]) -> float:
        """The mean over the sequences, in every process.

        Args:
            mean_loss: of sequences, int64 [batch, context + 1].
        """
        chosen = np.arange(self._count) * self._windows // self._count
        here = self._here
        mine = chosen[here.rank :: here.processes]
        # Every process makes as many forwards: sharded weights are gathered by all together.
        rounds = -(-self._count // (here.processes * self._micro_batch))
        total = torch.zeros((), dtype=torch.float64, device=here.device)
        for index in range(rounds):
            part = mine[index * self._micro_batch : (index + 1) * self._micro_batch]
            taken = part if len(part) else chosen[:1]
            loss = mean_loss(stack(self._corpus, "validation", self._context, taken))
            total += loss.double() * len(part)
        return float(here.sum(total)) / self._count
