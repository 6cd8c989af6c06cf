"""One contender on one problem: what is timed of it, what it returns, and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim_kernels.bench.contenders import Attend


@dataclass(frozen=True, slots=True)
class Step:
    """q, k, v, which require gradients, and do, the gradient of o: [batch, heads, tokens, d]."""

    attend: Attend
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor

    def forward(self) -> Tensor:
        """o, with the graph that its backward needs."""
        return self.attend(self.q, self.k, self.v)

    def both(self) -> tuple[Tensor, ...]:
        """dq, dk, dv."""
        return self._backward(self.forward())

    def results(self) -> dict[str, Tensor]:
        """o, dq, dk and dv by their names."""
        o = self.forward()
        dq, dk, dv = self._backward(o)
        return {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}

    def prepared(self, which: str) -> Callable[[], object]:
        """One of `cases.PASSES` as a function; what it needs has been run before."""
        if which == "backward":
            # A forward for each: compiled graphs do not keep what a second backward would need.
            o = self.forward()
            return lambda: self._backward(o)
        return {"forward": self.forward, "both": self.both}[which]

    def saved_bytes(self) -> int:
        """What the forward keeps for the backward, q, k and v included, shared storage once."""
        storages: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return x.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            o = self.forward()
        del o
        return sum(storages.values())

    def _backward(self, o: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, (self.q, self.k, self.v), self.do)


def laid_out(x: Tensor, *, tokens_first: bool) -> Tensor:
    """x [batch, heads, tokens, d], in memory as a contender has it, and no part of a graph."""
    if tokens_first:
        return x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    return x.detach().contiguous()
