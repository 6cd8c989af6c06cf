"""Reproducible attention calls: a `FuzzCase` defines the same tensors on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sagesim.fuzzing.calls import INPUTS, Called, Outputs, call
from sagesim.fuzzing.inputs import KINDS
from sagesim.problem import NO_WINDOW, AttentionProblem, CausalAlignment

DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""The dtypes of q, k, v and dO, by name."""

LAYOUTS: Final = ("contiguous", "token_major", "sliced", "expanded")
"""Memory layouts of a tensor [B, H, N, D].

contiguous: as `torch.empty` gives it.
token_major: a transposed [B, N, H, D].
sliced: a slice of a larger tensor of NaN; only the last axis is dense.
expanded: dO only: one number with strides of 0, as the backward of a sum gives it.
"""

FEATURES: Final = {
    "full": "calls without a causal mask",
    "causal": "is_causal=True",
    "cross": "different numbers of queries and keys",
    "tails": "lengths that are not multiples of the spec's blocks",
    "gqa": "more heads of q than of k and v",
    "scale": "a scale other than the default",
    "strides": "tensors that are not contiguous, including an expanded dO",
}
"""Features of calls, by the name that `without` excludes them by."""

EXTRAS: Final = {
    "window": "window=(left, right) and causal_alignment",
    "padding": "key_mask",
    "seqused_k": "the number of keys of each sequence; no case has key_mask and seqused_k",
    "sinks": "sinks; their gradient is compared too",
    "softcap": "softcap",
}
"""Arguments that SDPA does not have, by the name that `extras` includes them by."""

KEY_MASKS: Final = ("right", "left", "random")
PADDINGS: Final = ("none", *KEY_MASKS, "seqused_k")
"""Which keys of a sequence are padding.

right, left, random: key_mask excludes those from a length on, before one, or any.
seqused_k: as right, but the function gets the lengths. Many are 0 or all keys.
"""

HEAD_SIZES: Final = (16, 32, 64, 128, 40, 80, 96)
"""Powers of two first, because failures shrink to the first. Most kernels pad the other sizes."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FuzzCase:
    """The arguments of one attention, and the gradient dO of its output.

    Numbers are drawn by numpy on the CPU and then moved, so that a case is the same everywhere.
    Prints as the call that makes it, without the fields that are at their defaults.

    Raises: ValueError naming the field that is wrong.

    >>> case = FuzzCase(n_q=3, n_k=5, d=8, dtype="float16", is_causal=True)
    >>> [list(x.shape) for x in case.problem().qkvdo]
    [[1, 1, 3, 8], [1, 1, 5, 8], [1, 1, 5, 8], [1, 1, 3, 8]]
    >>> case
    FuzzCase(n_q=3, n_k=5, d=8, dtype='float16', is_causal=True)
    """

    n_q: int
    n_k: int
    d: int
    dtype: str = "float32"  #: one of `DTYPES`
    batch: int = 1
    kv_heads: int = 1
    groups: int = 1  #: number of query heads per head of k and v
    is_causal: bool = False
    causal_alignment: CausalAlignment | None = None
    window: tuple[int, int] = NO_WINDOW
    padding: str = "none"  #: of the keys: one of `PADDINGS`
    sinks: bool = False
    softcap: float | None = None
    scale: float | None = None
    kinds: tuple[str, str, str, str] = ("gaussian", "gaussian", "gaussian", "gaussian")
    """The kinds of q, k, v and do: names in `sagesim.fuzzing.inputs.KINDS`."""
    gains: tuple[int, int, int, int] = (0, 0, 0, 0)
    """q, k, v and do are multiplied by 2 to the power of these."""
    layout: str = "contiguous"  #: of q, k and v: one of `LAYOUTS`, but not "expanded"
    do_layout: str = "contiguous"  #: one of `LAYOUTS`
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n_q", "n_k", "d", "batch", "kv_heads", "groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a positive number")
        words = [("dtype", self.dtype, tuple(DTYPES)), ("do_layout", self.do_layout, LAYOUTS)]
        words.append(("layout", self.layout, LAYOUTS[:-1]))
        words.append(("padding", self.padding, PADDINGS))
        words += [("kinds", kind, tuple(KINDS)) for kind in self.kinds]
        for name, word, known in words:
            if word not in known:
                raise ValueError(f"{name}: {word!r} is not one of {', '.join(known)}")

    def __repr__(self) -> str:
        return f"FuzzCase({', '.join(f'{name}={value!r}' for name, value in self._given())})"

    @property
    def heads(self) -> int:
        """Heads of q."""
        return self.kv_heads * self.groups

    def problem(self, device: str | torch.device = "cpu") -> AttentionProblem:
        """The tensors and options of the call; q, k, v and do are [batch, heads, tokens, d]."""
        rng = np.random.default_rng(self.seed)
        of_queries = (self.batch, self.heads, self.n_q, self.d)
        of_keys = (self.batch, self.kv_heads, self.n_k, self.d)
        shapes = (of_queries, of_keys, of_keys, of_queries)
        layouts = (self.layout,) * 3 + (self.do_layout,)
        q, k, v, do = (
            _lay_out(
                torch.from_numpy(KINDS[kind](rng, shape) * np.float32(2.0**gain))
                .to(DTYPES[self.dtype])
                .to(device),
                layout,
            )
            for kind, shape, gain, layout in zip(
                self.kinds, shapes, self.gains, layouts, strict=True
            )
        )
        key_mask, sinks = self._key_mask(rng), None
        if key_mask is not None:
            is_padding = ~key_mask[:, None, :, None].to(device)
            k.masked_fill_(is_padding, torch.nan)
            v.masked_fill_(is_padding, torch.nan)
            key_mask = key_mask.to(device)
        if self.sinks:
            sinks = torch.from_numpy(rng.standard_normal(self.heads, dtype=np.float32)).to(device)
        return AttentionProblem(
            q=q,
            k=k,
            v=v,
            do=do,
            is_causal=self.is_causal,
            causal_alignment=self.causal_alignment,
            window=self.window,
            key_mask=key_mask,
            sinks=sinks,
            softcap=self.softcap,
            scale=self.scale,
            enable_gqa=self.groups > 1,
        )

    def _key_mask(self, rng: np.random.Generator) -> Tensor | None:
        """A mask [batch, n_k] that excludes some keys, or all keys of a sequence."""
        shape = (self.batch, self.n_k)
        match self.padding:
            case "none":
                return None
            case "random":
                return torch.from_numpy(rng.random(shape) < 0.7)
            case "seqused_k":
                lengths = rng.integers(0, self.n_k + 1, self.batch)
                ends = rng.choice(np.array([0, self.n_k]), self.batch)
                lengths = np.where(rng.random(self.batch) < 0.5, lengths, ends)
                return torch.from_numpy(np.arange(self.n_k) < lengths[:, None])
            case _:
                mask = np.arange(self.n_k) < rng.integers(0, self.n_k + 1, (self.batch, 1))
                return torch.from_numpy(mask[:, ::-1].copy() if self.padding == "left" else mask)

    def run(
        self, attention: Callable[..., Tensor], device: str | torch.device = "cpu", **options: Any
    ) -> Outputs:
        """Call `attention` and its backward through autograd, and return o and the gradients.

        Args:
            attention: called as `fn(q, k, v, is_causal=..., scale=..., enable_gqa=...)`.
            device: the device of the tensors.
            options: further arguments for `attention`.

        Raises:
            Exception: what `attention` or its backward raises.
            ValueError: if it overwrites an input, if o is not a tensor like do that requires grad,
                or if a gradient is missing.
        """
        called = call_with(self, attention, device, **options)
        for tensor, problem in called.problems.items():
            raise ValueError(f"{tensor}: {problem}")
        without_sinks = {"dsinks": torch.zeros(self.heads, device=device)}
        return Outputs(**(without_sinks | called.outputs))

    def describe(self) -> Iterator[str]:
        """The case in words: the shapes, then every field that is not the default."""
        yield f"q [{self.batch}, {self.heads}, {self.n_q}, {self.d}]"
        yield f"k, v [{self.batch}, {self.kv_heads}, {self.n_k}, {self.d}]"
        yield self.dtype
        if self.is_causal:
            yield "causal"
        if self.causal_alignment is not None:
            yield f"aligned {self.causal_alignment}"
        if self.window != NO_WINDOW:
            yield f"window {self.window}"
        if self.padding == "seqused_k":
            yield "seqused_k"
        elif self.padding != "none":
            yield f"{self.padding} padding of keys"
        if self.sinks:
            yield "sinks"
        if self.softcap is not None:
            yield f"softcap {self.softcap:g}"
        if self.scale is not None:
            yield f"scale {self.scale:g}"
        for name, kind, gain in zip(INPUTS, self.kinds, self.gains, strict=True):
            if name == "do" and self.do_layout == "expanded":
                yield "do one number, expanded"
            elif kind != "gaussian" or gain:
                yield f"{name} {kind}" + (f" * 2**{gain}" if gain else "")
        if self.layout != "contiguous":
            yield f"q, k, v {self.layout}"
        if self.do_layout not in ("contiguous", "expanded"):
            yield f"do {self.do_layout}"

    def _given(self) -> Iterator[tuple[str, object]]:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                yield field.name, value


def _lay_out(x: Tensor, layout: str) -> Tensor:
    match layout:
        case "token_major":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "sliced":
            b, h, n, d = x.shape
            # With 16 more channels, rows stay aligned for vector loads.
            whole = x.new_full((b, h + 1, n + 3, d + 16), torch.nan)
            return whole[:, :h, 1 : n + 1, :d].copy_(x)
        case "expanded":
            return x[:1, :1, :1, :1].clone().reshape(()).expand(x.shape)
        case _:
            return x


def call_with(
    case: FuzzCase,
    attention: Callable[..., Tensor],
    device: str | torch.device = "cpu",
    **options: Any,
) -> Called:
    """Call `attention` and its backward through autograd, and note what it does wrong.

    The arguments are those of `FuzzCase.run`.

    Raises:
        Exception: what `attention` or its backward raises.
    """
    problem = case.problem(device)
    lengths = None
    if case.padding == "seqused_k" and problem.key_mask is not None:
        lengths = problem.key_mask.sum(-1, dtype=torch.int32)
    return call(attention, problem, seqused_k=lengths, **options)
