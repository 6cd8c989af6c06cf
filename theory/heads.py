"""The heads of an attention problem in float64: masks, padding, and grouped queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim import AttentionProblem
from sagesim.problem import check_tensors


@dataclass(frozen=True, slots=True)
class Heads:
    """An attention problem with as many heads of k and v as of q, in float64.

    q, do [*heads, n_q, d], k [*heads, n_k, d] and v [*heads, n_k, d_v] are 0 at padding: at queries
    that attend to no key, and at keys that no query attends to.

    Source: docs/numerics.md, "From numbers to codes".
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    attends: Tensor  #: bool [*heads, n_q, n_k]
    groups: int  #: consecutive heads of q that share a head of k and v

    @classmethod
    def of(cls, problem: AttentionProblem) -> Heads:
        """The heads of a problem.

        Raises:
            TypeError, ValueError: if dtypes, devices or shapes do not fit each other, a mask is not
                boolean, or a mask comes with is_causal.
        """
        q, k, v, do = (x.detach().double() for x in problem.qkvdo)
        groups = check_tensors(problem.q, problem.k, problem.v, enable_gqa=problem.enable_gqa)
        if groups > 1:
            k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
        attends = problem.attends.expand(*q.shape[:-1], k.shape[-2])
        valid_q, valid_k = attends.any(-1)[..., None], attends.any(-2)[..., None]
        return cls(
            q=q.masked_fill(~valid_q, 0.0),
            k=k.masked_fill(~valid_k, 0.0),
            v=v.masked_fill(~valid_k, 0.0),
            do=do.masked_fill(~valid_q, 0.0),
            attends=attends,
            groups=groups,
        )

    def split(self) -> Iterator[Heads]:
        """Each query head alone, with tensors [tokens, d]."""
        fields = (self.q, self.k, self.v, self.do, self.attends)
        flat = (x.reshape(-1, *x.shape[-2:]) for x in fields)
        for q, k, v, do, attends in zip(*flat, strict=True):
            yield Heads(q, k, v, do, attends, groups=1)

    def key_means(self) -> Tensor:
        """The mean of each head's keys, [*heads, n_k, d]: the same at every key, 0 at padding."""
        return _means(self.k, self.attends.any(-2), self.k.shape[-2])

    def query_block_means(self, block: int) -> Tensor:
        """The mean of each block of `block` queries, at every query of the block; 0 at padding."""
        return _means(self.q, self.attends.any(-1), block)

    def sum_groups(self, x: Tensor) -> Tensor:
        """x [*heads, n, d] summed over the heads that share a head of k, in k's leading shape."""
        if self.groups == 1:
            return x
        return x.unflatten(-3, (-1, self.groups)).sum(-3)


def _means(x: Tensor, valid: Tensor, block: int) -> Tensor:
    """The means of the valid tokens of blocks of x [..., n, d]; valid is bool [..., n]."""
    means = [
        (part.sum(-2, keepdim=True) / count.sum(-1).clamp(min=1)[..., None, None]).expand_as(part)
        for part, count in zip(x.split(block, -2), valid.split(block, -1), strict=True)
    ]
    return torch.cat(means, -2).masked_fill(~valid[..., None], 0.0)
