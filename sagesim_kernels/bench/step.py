"""One contender on one problem: its timed passes, its results, and the memory that it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim.problem import AttentionProblem
from sagesim_kernels.bench.contenders import Attend, Contender


@dataclass(frozen=True, slots=True)
class Step:
    """A contender's function and its inputs.

    q: [batch, heads, tokens, d]. k, v: [batch, kv heads, keys, d]. They require gradients.
    do: the gradient of o.
    """

    attend: Attend
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor

    @classmethod
    def of(cls, contender: Contender, problem: AttentionProblem) -> Step:
        """A contender on a problem with one axis for the batch, in the contender's own layout."""
        tensors = (laid_out(x, tokens_first=contender.tokens_first) for x in problem.qkvdo)
        q, k, v, do = tensors
        attend = contender.make(q.shape[2], problem.is_causal, q.device)
        return cls(attend, *(x.requires_grad_() for x in (q, k, v)), do)

    def forward(self) -> Tensor:
        """o, with the graph that its backward needs."""
        return self.attend(self.q, self.k, self.v)

    def both(self) -> tuple[Tensor, ...]:
        """dq, dk, dv."""
        return self._backward(self.forward())

    def results(self) -> dict[str, Tensor]:
        """o, dq, dk and dv by name."""
        o = self.forward()
        dq, dk, dv = self._backward(o)
        return {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}

    def prepared(self, which: str) -> Callable[[], object]:
        """A function that runs one of `cases.PASSES`; a backward's forward has run already."""
        if which == "backward":
            # Each backward gets its own forward: a compiled graph frees its tensors after one.
            o = self.forward()
            return lambda: self._backward(o)
        return {"forward": self.forward, "both": self.both}[which]

    def saved_bytes(self) -> int:
        """Bytes that the forward saves for the backward, q, k and v included.

        A storage counts once.
        """
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
    """x [batch, heads, tokens, d], detached, in the memory layout of a contender."""
    if tokens_first:
        return x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    return x.detach().contiguous()
