"""The type of an attention problem: the tensors and options of one attention call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

Problem = TypeVar("Problem", bound="AttentionProblem")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionProblem:
    """The tensors and options of one attention call, and the gradient of its output.

    q: [*heads, n_q, d].
    k: [*kv_heads, n_k, d]; the leading shape of q, or with enable_gqa fewer heads on its last axis.
    v: [*kv_heads, n_k, d_v].
    do: [*heads, n_q, d_v], the gradient of the output o; None if there is no backward.
    is_causal: query i attends to keys 0..i, aligned top-left also if n_q differs from n_k.
    attn_mask: boolean, broadcastable to [*heads, n_q, n_k]; True attends. Excludes is_causal.
    scale: factor of the logits; None is 1/sqrt(d).
    enable_gqa: each head of k and v serves a group of consecutive heads of q.

    The options are those of `torch.nn.functional.scaled_dot_product_attention`. The constructor
    checks nothing; functions that take a problem check it. Functions of this project that take q,
    k, v, do and these options also accept one AttentionProblem instead.

    >>> import torch, sagesim
    >>> q, k, v, do = torch.randn(4, 1, 2, 10, 16)
    >>> problem = sagesim.AttentionProblem(q=q, k=k, v=v, do=do, is_causal=True)
    >>> sagesim.trace(problem, spec=sagesim.SAGEBWD).s.shape
    torch.Size([1, 2, 10, 10])
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None
    is_causal: bool = False
    attn_mask: Tensor | None = None
    scale: float | None = None
    enable_gqa: bool = False

    @classmethod
    def of(
        cls,
        q: Tensor | AttentionProblem,
        k: Tensor | None,
        v: Tensor | None,
        do: Tensor | None = None,
        *,
        is_causal: bool = False,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> AttentionProblem:
        """The problem that the arguments of a public function describe.

        If q is an AttentionProblem, this is it; else the problem is made from the arguments.

        Raises:
            TypeError: if q is a problem and there are other arguments, or if k or v is missing.
        """
        if isinstance(q, AttentionProblem):
            options = (is_causal, enable_gqa)
            if any(options) or not all(x is None for x in (k, v, do, attn_mask, scale)):
                raise TypeError("q is an AttentionProblem; no other tensor or option is accepted")
            return q
        if k is None or v is None:
            raise TypeError("k or v is missing; q, k and v, or one AttentionProblem, are needed")
        return AttentionProblem(
            q=q,
            k=k,
            v=v,
            do=do,
            is_causal=is_causal,
            attn_mask=attn_mask,
            scale=scale,
            enable_gqa=enable_gqa,
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """q, k, v, do and attn_mask by name; do and attn_mask only if they are given."""
        fields = {"q": self.q, "k": self.k, "v": self.v, "do": self.do, "attn_mask": self.attn_mask}
        return {name: x for name, x in fields.items() if x is not None}

    @property
    def qkvdo(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and do.

        Raises:
            ValueError: if do is None.
        """
        return self.q, self.k, self.v, self.gradient

    @property
    def gradient(self) -> Tensor:
        """do.

        Raises:
            ValueError: if do is None.
        """
        if self.do is None:
            raise ValueError("do is None; the backward needs do, the gradient of the output o")
        return self.do

    @property
    def logit_scale(self) -> float:
        """The factor of the logits: scale, or 1/sqrt(d) if scale is None."""
        return 1 / math.sqrt(self.q.shape[-1]) if self.scale is None else float(self.scale)

    @property
    def attends(self) -> Tensor:
        """Which keys each query attends to, bool [n_q, n_k] or with the leading axes of attn_mask.

        Raises:
            ValueError: if attn_mask is not boolean or comes with is_causal.
        """
        mask = self.attn_mask
        if mask is not None and (self.is_causal or mask.dtype is not torch.bool):
            raise ValueError(
                f"attn_mask is {mask.dtype} with is_causal={self.is_causal}; "
                "it must be boolean, and is_causal False"
            )
        shape = self.q.shape[-2], self.k.shape[-2]
        attends = torch.ones(shape, dtype=torch.bool, device=self.q.device)
        if self.is_causal:
            attends = attends.tril()
        return attends if mask is None else attends & mask

    def map(self: Problem, change: Callable[[Tensor], Tensor]) -> Problem:
        """The problem with `change` applied to q, k, v and do."""
        do = None if self.do is None else change(self.do)
        return replace(self, q=change(self.q), k=change(self.k), v=change(self.v), do=do)

    def head_groups(self, entries: int = 2**24) -> Iterator[AttentionProblem]:
        """Split the problem by heads into parts whose maps have at most about `entries` elements.

        The memory for the maps of a part then does not grow with the number of heads. A part has z
        heads of k and v, at least one, and all query heads that share them: `groups` for each. q
        and do are [z, groups, n, d], k and v are [z, 1, n, d]. A problem whose map has at most
        `entries` elements is not split: it is yielded as it is.
        """
        heads, (n_q, n_k) = self.q.shape[:-2], (self.q.shape[-2], self.k.shape[-2])
        if math.prod(heads) * n_q * n_k <= entries:
            yield self
            return
        z = math.prod(self.k.shape[:-2])
        groups = math.prod(heads) // z
        q, do = (x.reshape(z, groups, *x.shape[-2:]) for x in (self.q, self.gradient))
        k, v = (x.reshape(z, 1, *x.shape[-2:]) for x in (self.k, self.v))
        mask = self.attn_mask
        if mask is not None:
            mask = mask.expand(*heads, n_q, n_k).reshape(z, groups, n_q, n_k)
        step = max(1, entries // max(1, groups * n_q * n_k))
        for start in range(0, z, step):
            part = slice(start, start + step)
            yield AttentionProblem(
                q=q[part],
                k=k[part],
                v=v[part],
                do=do[part],
                is_causal=self.is_causal,
                attn_mask=None if mask is None else mask[part],
                scale=self.scale,
                enable_gqa=groups > 1,
            )
