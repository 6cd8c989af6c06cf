"""The type of an attention problem: the tensors and options of one attention call."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar, Unpack

import torch
from torch import Tensor

from sagesim.problem.arguments import (
    DTYPES,
    autocast,
    check_flag,
    check_is_tensor,
    check_scale,
    check_tensors,
)
from sagesim.problem.masks import (
    Band,
    check_alignment,
    check_key_padding,
    check_mask,
    check_sinks,
    check_softcap,
    check_window,
    mask_of_lengths,
)
from sagesim.problem.options import NO_WINDOW, AttentionOptions, CausalAlignment
from sagesim.short_repr import short_repr

Problem = TypeVar("Problem", bound="AttentionProblem")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionProblem:
    """The tensors and options of one attention call, and the gradient of its output.

    q: [*heads, n_q, d].
    k: [*kv_heads, n_k, d]; the leading shape of q, or with enable_gqa fewer heads on its last axis.
    v: [*kv_heads, n_k, d_v].
    do: [*heads, n_q, d_v], the gradient of the output o; None if there is no backward.
    The other fields are options; `AttentionOptions` describes them.

    The constructor checks nothing; functions that take a problem check it. Functions of this
    project that take q, k, v, do and these options also accept one AttentionProblem instead.

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
    causal_alignment: CausalAlignment | None = None
    window: tuple[int, int] = NO_WINDOW
    attn_mask: Tensor | None = None
    key_mask: Tensor | None = None
    sinks: Tensor | None = None
    softcap: float | None = None
    scale: float | None = None
    enable_gqa: bool = False

    __repr__ = short_repr

    @classmethod
    def of(
        cls,
        q: Tensor | AttentionProblem,
        k: Tensor | None,
        v: Tensor | None,
        do: Tensor | None = None,
        **options: Unpack[AttentionOptions],
    ) -> AttentionProblem:
        """The problem that the arguments of a public function describe, cast as `autocast` says.

        If q is an AttentionProblem, this is it; else the problem is made from the arguments, and
        seqused_k becomes a key_mask.

        Raises:
            TypeError: if q is a problem and there are other arguments, if q, k or v is missing or
                no tensor, or if there is no such option.
            ValueError: if seqused_k is given, and the tensors do not fit each other.
        """
        if isinstance(q, AttentionProblem):
            if options or not all(x is None for x in (k, v, do)):
                words = f": {', '.join(options)}" if options else ""
                raise TypeError(
                    f"q is an AttentionProblem; no other tensor or option is accepted{words}"
                )
            return q.autocast()
        if k is None or v is None:
            missing = "k" if v is not None else "v" if k is not None else "k and v"
            raise TypeError(
                f"no {missing} given; q, k and v, or one AttentionProblem, are needed{_hint(q)}"
            )
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_is_tensor(name, x)
        fields: dict[str, Any] = {**options}
        seqused_k = fields.pop("seqused_k", None)
        for name in fields.keys() - _DEFAULTS.keys():
            raise TypeError(_unknown(name))
        problem = AttentionProblem(q=q, k=k, v=v, do=do, **fields).autocast()
        if seqused_k is None:
            return problem
        check_tensors(problem.q, problem.k, problem.v, enable_gqa=problem.enable_gqa)
        check_key_padding(problem.key_mask, seqused_k, q, k)
        return replace(problem, key_mask=mask_of_lengths(seqused_k, k.shape[-2]))

    def autocast(self: Problem) -> Problem:
        """The problem with q, k and v as SDPA casts them, and do in the dtype of o.

        Without autocast it is the problem itself.

        Raises:
            TypeError: if q, k or v is no dense tensor.
        """
        q, k, v = autocast(self.q, self.k, self.v)
        if q is self.q and k is self.k and v is self.v:
            return self
        do = self.do.to(q.dtype) if isinstance(self.do, Tensor) else self.do
        return replace(self, q=q, k=k, v=v, do=do)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, by name: q, k, v, do, attn_mask, key_mask, sinks."""
        names = ("q", "k", "v", "do", "attn_mask", "key_mask", "sinks")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    @property
    def options(self) -> dict[str, Any]:
        """The options, as keyword arguments of functions that take q, k and v."""
        return {name: getattr(self, name) for name in _DEFAULTS}

    @property
    def given_options(self) -> dict[str, Any]:
        """The options that do not have the values that they have if they are omitted."""
        return changed_options(self.options)

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
    def band(self) -> Band:
        """The diagonals that is_causal and window leave."""
        return Band.of(
            self.q.shape[-2],
            self.k.shape[-2],
            is_causal=self.is_causal,
            lower_right=self.causal_alignment == "lower_right",
            window=self.window,
        )

    @property
    def is_masked(self) -> bool:
        """Whether an option may keep a query from attending to a key."""
        return self.attn_mask is not None or self.is_masked_otherwise

    @property
    def is_masked_otherwise(self) -> bool:
        """Whether an option besides attn_mask may keep a query from attending to a key."""
        return self.band != Band(None, None) or self.key_mask is not None

    def check(self) -> int:
        """Check all but do; return the query heads per head of k.

        Raises:
            TypeError: if dtypes differ or are not of `DTYPES`, or an option has another type.
            ValueError: if shapes or devices do not fit each other, or an option does not fit the
                tensors or the other options. The message names it.
        """
        groups = check_tensors(self.q, self.k, self.v, enable_gqa=self.enable_gqa)
        if self.q.dtype not in DTYPES:
            raise TypeError(
                f"q, k and v are {self.q.dtype}; float16, bfloat16, float32 or float64 needed"
            )
        self.check_options()
        return groups

    def check_gradient(self) -> None:
        """Raise unless do is a tensor like the output o. For a problem that `check` has passed.

        Raises:
            TypeError: if do is no dense tensor.
            ValueError: if do is None, or has another shape, dtype or device.
        """
        do, q, shape = self.gradient, self.q, (*self.q.shape[:-1], self.v.shape[-1])
        check_is_tensor("do", do)
        if do.shape != shape or do.dtype != q.dtype:
            raise ValueError(
                f"do is {do.dtype} {tuple(do.shape)}; the gradient of o is {q.dtype} {shape}"
            )
        if do.device != q.device:
            raise ValueError(f"do is on {do.device}, q on {q.device}")

    def check_options(self) -> None:
        """Raise TypeError or ValueError, naming the option, unless the options fit the tensors."""
        check_scale(self.scale)
        for name in ("is_causal", "enable_gqa"):
            check_flag(name, getattr(self, name))
        check_window(self.window)
        n_q, n_k = self.q.shape[-2], self.k.shape[-2]
        check_alignment(self.causal_alignment, self.window, n_q, n_k)
        check_key_padding(self.key_mask, None, self.q, self.k)
        check_sinks(self.sinks, self.q)
        check_softcap(self.softcap)
        check_mask(self.attn_mask, self.q, self.k)
        if self.attn_mask is None:
            return
        others = {"is_causal": self.is_causal, "window": tuple(self.window) != NO_WINDOW}
        others["key_mask"] = self.key_mask is not None
        for name in (name for name, given in others.items() if given):
            raise ValueError(f"attn_mask and {name} exclude each other; combine them in attn_mask")

    @property
    def attends(self) -> Tensor:
        """Which keys each query attends to, bool [n_q, n_k] or with the leading axes of a mask.

        Raises:
            TypeError, ValueError: as `check_options`.
        """
        self.check_options()
        n_q, n_k, device = self.q.shape[-2], self.k.shape[-2], self.q.device
        attends = torch.ones(n_q, n_k, dtype=torch.bool, device=device)
        queries = torch.arange(n_q, device=device)[:, None]
        by_band = self.band.attends(queries, torch.arange(n_k, device=device))
        if by_band is not None:
            attends = by_band
        if self.key_mask is not None:
            by_key = self.key_mask[..., None, None, :] if self.q.ndim > 2 else self.key_mask
            attends = attends & by_key
        return attends if self.attn_mask is None else attends & self.attn_mask

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
        mask, key_mask, sinks = self.attn_mask, self.key_mask, self.sinks
        if mask is not None:
            mask = mask.expand(*heads, n_q, n_k).reshape(z, groups, n_q, n_k)
        if key_mask is not None:
            key_heads = self.k.shape[:-2] or (1,)
            key_mask = key_mask[..., None, :].expand(*key_heads, n_k).reshape(z, n_k)
        step = max(1, entries // max(1, groups * n_q * n_k))
        if sinks is not None:
            sinks, step = sinks.expand(heads).reshape(z, groups), 1  # one tensor for each part
        for start in range(0, z, step):
            part = slice(start, start + step)
            yield AttentionProblem(
                q=q[part],
                k=k[part],
                v=v[part],
                do=do[part],
                is_causal=self.is_causal,
                causal_alignment=self.causal_alignment,
                window=self.window,
                attn_mask=None if mask is None else mask[part],
                key_mask=None if key_mask is None else key_mask[part],
                sinks=None if sinks is None else sinks[start],
                softcap=self.softcap,
                scale=self.scale,
                enable_gqa=groups > 1,
            )


_DEFAULTS: Final = {
    each.name: each.default for each in fields(AttentionProblem) if each.default is not MISSING
}
"""The options that are fields of a problem, and their values if they are omitted."""


def _hint(q: object) -> str:
    """What to pass in place of something that has or names problems."""
    if isinstance(q, (str, Path)):
        return f"; q is {str(q)!r}: pass one of the calls of sagesim.Capture.load(path)"
    if hasattr(q, "calls"):
        return f"; q is a {type(q).__name__}: pass one of its calls"
    return ""


def _unknown(name: str) -> str:
    """Why there is no such option, and the nearest one."""
    names = [*_DEFAULTS, "seqused_k"]
    near = difflib.get_close_matches(name, names, n=1) or [x for x in names if name in x]
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{name!r} is no option of an attention call{hint} (options: {', '.join(names)})"


def changed_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that do not have the values that they have if they are omitted."""
    return {name: x for name, x in options.items() if not _is_default(name, x)}


def _is_default(name: str, value: object) -> bool:
    default = _DEFAULTS.get(name)  # seqused_k, which is no field, is None
    return value is None if default is None else value == default
