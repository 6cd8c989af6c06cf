"""A training step of a language model in which only the attention differs.

The model is a pre-norm Transformer with a vocabulary of 32768. A step is the forward and backward
under autocast, the clearing of the gradients, and fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from sagesim_kernels.bench.contenders import Attend, Contender
from sagesim_kernels.bench.models import TrainingCase

VOCABULARY: Final = 32768


class Block(nn.Module):
    """Attention, then a layer of 4 times the width."""

    def __init__(self, width: int, head_dim: int, attend: Attend) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attend = attend
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads_last = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, self.head_dim))
        q, k, v = heads_last.transpose(1, 3).unbind(2)  # [batch, heads, tokens, head size]
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Tokens [batch, tokens] to the mean cross entropy of the tokens that follow, [batch, tokens].

    Its weights are the same each time.
    """

    def __init__(self, case: TrainingCase, attend: Attend) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, case.width)
            several = [Block(case.width, case.head_dim, attend) for _ in range(case.layers)]
            self.blocks = nn.Sequential(*several)
            self.norm = nn.RMSNorm(case.width)
            self.head = nn.Linear(case.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return nn.functional.cross_entropy(x.flatten(0, 1), following.flatten())


def _with_selection(attend: Attend, selected: Callable[[], AbstractContextManager[Any]]) -> Attend:
    """Return attend in the context of its contender, which torch.compile then traces with it.

    The choice of a backend for SDPA is not a part of compiled code if it is made outside. Code that
    was compiled for one backend then serves all of them.
    """

    def attend_selected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with selected():
            return attend(q, k, v)

    return attend_selected


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """The training step of one contender. A call runs the next step."""

    model: Model
    compiled: Any  #: the model, compiled if the case is
    optimizer: torch.optim.Optimizer
    tokens: Tensor  #: [batch, tokens]
    following: Tensor  #: [batch, tokens]
    dtype: torch.dtype  #: of autocast

    @classmethod
    def of(
        cls, contender: Contender, case: TrainingCase, device: torch.device, dtype: torch.dtype
    ) -> TrainingStep:
        """The step of a contender, on random tokens."""
        attend = contender.make(case.tokens, True, device)
        if case.is_compiled:
            attend = _with_selection(attend, contender.selected)
        model = Model(case, attend).to(device)
        generator = torch.Generator().manual_seed(0)
        size = (case.batch, case.tokens + 1)
        text = torch.randint(VOCABULARY, size, generator=generator).to(device)
        compiled = torch.compile(model, dynamic=False) if case.is_compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        return cls(model, compiled, optimizer, text[:, :-1], text[:, 1:], dtype)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the weights that make q, k and v, of every block.

        The weights do not change.
        """
        self._differentiate()
        found = {name: x.grad for name, x in self.model.named_parameters() if "qkv" in name}
        self.optimizer.zero_grad()
        return {name: x for name, x in found.items() if x is not None}

    def __call__(self) -> None:
        self._differentiate()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _differentiate(self) -> None:
        with torch.autocast(self.tokens.device.type, self.dtype):
            loss = self.compiled(self.tokens, self.following)
        loss.backward()
