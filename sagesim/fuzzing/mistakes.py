"""Likely mistakes of a kernel, each as what the emulator would compute if it made the mistake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from sagesim.emulator import FlatProblem, Hooks, Operand, Place, encode, to_tiles
from sagesim.fuzzing.calls import Outputs
from sagesim.fuzzing.changes import NO_CHANGE, Change
from sagesim.fuzzing.misrounding import ds_in, in_dtype, rounded_by, truncated
from sagesim.problem import NO_WINDOW, AttentionProblem
from sagesim.spec import (
    HALF_AWAY,
    HALF_EVEN,
    OPERANDS,
    PRESETS,
    SITES,
    AttentionSpec,
    Delta,
    Granularity,
    Precision,
    Smoothing,
    with_precision,
)


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in words, and the spec and the change of the emulator that amount to it."""

    words: str
    spec: AttentionSpec
    change: Change = NO_CHANGE


def mistakes(spec: AttentionSpec) -> Iterator[Mistake]:
    """Mistakes that an implementation of `spec` may contain, the most likely first.

    Some are no mistake under some specs: they change nothing.
    """
    for preset in PRESETS.values():
        other = replace(preset, block_q=spec.block_q, block_k=spec.block_k)
        yield Mistake(f"another spec: {other.label()!r}", other)
    for words, change in _CHANGES.items():
        yield Mistake(words, spec, change)
    filled = _padded(spec.block_q, spec.block_k)
    yield Mistake("means count the zeros that fill the last block", spec, filled)
    yield from _truncations(spec)
    tried = {spec}
    for words, changed in _other_specs(spec):
        if changed not in tried:
            tried.add(changed)
            yield Mistake(f"other {words}: {changed.label()!r}", changed)


def _other_specs(spec: AttentionSpec) -> Iterator[tuple[str, AttentionSpec]]:
    """Specs that differ from `spec` in one decision, and the name of the decision."""
    smoothing = spec.smoothing
    for q, k in ((smoothing.q, not smoothing.k), (not smoothing.q, smoothing.k)):
        yield "smoothing", replace(spec, smoothing=Smoothing(q=q, k=k))
    for rounding in (HALF_EVEN, HALF_AWAY):
        yield "rounding", replace(spec, rounding=rounding)
    other = Delta.FROM_P if spec.delta is Delta.FROM_O else Delta.FROM_O
    yield "delta", replace(spec, delta=other)
    for block_q, block_k in (
        (spec.block_k, spec.block_q),
        *((spec.block_q, size) for size in (16, 32, 64, 128)),
        *((size, spec.block_k) for size in (16, 32, 64, 128)),
        *((size, size) for size in (16, 32, 64, 128)),
    ):
        yield "blocks", replace(spec, block_q=block_q, block_k=block_k)
    for sites in (*((site,) for site in SITES), *_TOGETHER):
        for precision in _PRECISIONS:
            yield "precision", with_precision(spec, precision, *sites)
    halves = [site for site in SITES if not spec.site(site).precision.is_scaled]
    for precision in (Precision.FP16, Precision.BF16, Precision.FP32):
        if halves:
            yield "precision", with_precision(spec, precision, *halves)
    for tensor in ("q", "k", "v", "do", "p", "ds"):
        using = tuple(site for site in SITES if tensor in OPERANDS[site])
        for sites in (*((site,) for site in using), *(t for t in _TOGETHER if set(t) <= {*using})):
            for how in Granularity:
                if all(how in Granularity.of(site, tensor) for site in sites):
                    yield f"scales of {tensor}", _with_scales(spec, tensor, how, sites)


_PRECISIONS: Final = (
    Precision.INT8,
    Precision.INPUT16,
    Precision.FP16,
    Precision.BF16,
    Precision.FP32,
)

_TOGETHER: Final = (("qk", "qk_recompute"), ("dq", "dk"))
"""Sites that a kernel often computes from the same operand."""


def _with_scales(
    spec: AttentionSpec, tensor: str, how: Granularity, sites: tuple[str, ...]
) -> AttentionSpec:
    for site in sites:
        if spec.site(site).precision.is_scaled:
            side = "lhs" if OPERANDS[site][0] == tensor else "rhs"
            spec = replace(spec, **{site: replace(spec.site(site), **{side: how})})
    return spec


# --- changes of the arguments -------------------------------------------------------------------


def _without_mask(problem: AttentionProblem) -> AttentionProblem:
    return replace(problem, is_causal=False)


def _lower_right(problem: AttentionProblem) -> AttentionProblem:
    if not (problem.is_causal or problem.window != NO_WINDOW):
        return problem
    other = "upper_left" if problem.causal_alignment == "lower_right" else "lower_right"
    return replace(problem, causal_alignment=other)


def _masked(problem: AttentionProblem, later: int) -> AttentionProblem:
    """Query i of a causal problem attends to `later` keys more than it should."""
    if not problem.is_causal:
        return problem
    n_q, n_k = problem.q.shape[-2], problem.k.shape[-2]
    highest = later + (n_k - n_q if problem.causal_alignment == "lower_right" else 0)
    attends = replace(problem, is_causal=False).attends
    return _with_mask(problem, attends & torch.ones_like(attends).tril(highest))


def _with_mask(problem: AttentionProblem, attends: Tensor) -> AttentionProblem:
    """The problem with this mask in place of its own."""
    return replace(problem, is_causal=False, window=NO_WINDOW, key_mask=None, attn_mask=attends)


def _window(left: int, right: int) -> Change:
    """A window whose sides are so many keys longer, where they have a limit."""

    def widen(problem: AttentionProblem) -> AttentionProblem:
        sides = zip(problem.window, (left, right), strict=True)
        moved = tuple(n if n < 0 else max(0, n + by) for n, by in sides)
        return replace(problem, window=moved)

    return Change(problem=widen)


def _unpadded(problem: AttentionProblem) -> AttentionProblem:
    return replace(problem, key_mask=None)


def _without_scale(problem: AttentionProblem) -> AttentionProblem:
    return replace(problem, scale=1.0)


def _default_scale(problem: AttentionProblem) -> AttentionProblem:
    return replace(problem, scale=None)


def _padded_scale(problem: AttentionProblem) -> AttentionProblem:
    if problem.scale is not None:
        return problem
    return replace(problem, scale=(1 << (problem.q.shape[-1] - 1).bit_length()) ** -0.5)


# --- heads --------------------------------------------------------------------------------------


def _interleaved(problem: AttentionProblem) -> Tensor:
    """The heads of q in an order in which head i of k serves the heads i, i + h_kv, ... of q."""
    h, h_kv = problem.q.shape[1], problem.k.shape[1]
    return torch.arange(h, device=problem.q.device).view(-1, h_kv).mT.flatten()


def _interleave(problem: AttentionProblem) -> AttentionProblem:
    order = _interleaved(problem)
    sinks = None if problem.sinks is None else problem.sinks[order]
    return replace(problem, q=problem.q[:, order], do=problem.gradient[:, order], sinks=sinks)


def _undo_interleave(outputs: Outputs, problem: AttentionProblem) -> Outputs:
    back = _interleaved(problem).argsort()
    return outputs._replace(
        o=outputs.o[:, back], dq=outputs.dq[:, back], dsinks=outputs.dsinks[back]
    )


def _repeat(problem: AttentionProblem) -> AttentionProblem:
    """The interleaved heads of k and v as heads of their own."""
    groups = problem.q.shape[1] // problem.k.shape[1]
    k, v = (x.repeat(1, groups, 1, 1) for x in (problem.k, problem.v))
    return replace(problem, k=k, v=v, enable_gqa=False)


def _add_neighbours(outputs: Outputs, problem: AttentionProblem) -> Outputs:
    dk, dv = (x.unflatten(1, (problem.k.shape[1], -1)).sum(2) for x in (outputs.dk, outputs.dv))
    return outputs._replace(dk=dk, dv=dv)


def _ungrouped(problem: AttentionProblem) -> AttentionProblem:
    groups = problem.q.shape[1] // problem.k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (problem.k, problem.v))
    return replace(problem, k=k, v=v, enable_gqa=False)


def _one_head_of_a_group(*names: str, index: int) -> Change:
    """dk, dv or both of one query head of each group, instead of the sum."""

    def select(outputs: Outputs, problem: AttentionProblem) -> Outputs:
        grouped = {
            name: getattr(outputs, name).unflatten(1, (problem.k.shape[1], -1))
            for name in ("dk", "dv")
        }
        return outputs._replace(
            **{name: x[:, :, index] if name in names else x.sum(2) for name, x in grouped.items()}
        )

    return Change(problem=_ungrouped, outputs=select)


# --- padding ------------------------------------------------------------------------------------


def _count_all_keys(x: FlatProblem, problem: AttentionProblem) -> FlatProblem:
    """No key is padding, also if no query attends to it."""
    k, v = (y.repeat_interleave(x.groups, 1).flatten(0, 1) for y in (problem.k, problem.v))
    valid_q, valid_k = x.valid
    every_key = torch.ones_like(valid_k)
    return replace(x, k=k.to(x.k.dtype), v=v.to(x.v.dtype), valid=(valid_q, every_key))


def _padded(block_q: int, block_k: int) -> Change:
    """Zeros fill the last blocks, and the means count them as tokens."""

    def lengthen(problem: AttentionProblem) -> AttentionProblem:
        n_q, n_k = problem.q.shape[-2], problem.k.shape[-2]
        q, do = (pad(x, (0, 0, 0, -n_q % block_q)) for x in (problem.q, problem.gradient))
        k, v = (pad(x, (0, 0, 0, -n_k % block_k)) for x in (problem.k, problem.v))
        attends = pad(problem.attends, (0, -n_k % block_k, 0, -n_q % block_q))
        return _with_mask(replace(problem, q=q, k=k, v=v, do=do), attends)

    def count(x: FlatProblem, problem: AttentionProblem) -> FlatProblem:
        return replace(x, valid=tuple(torch.ones_like(valid) for valid in x.valid))

    def shorten(outputs: Outputs, problem: AttentionProblem) -> Outputs:
        n_q, n_k = problem.q.shape[-2], problem.k.shape[-2]
        lengths = {"o": n_q, "dq": n_q, "dk": n_k, "dv": n_k}
        return outputs._replace(
            **{name: getattr(outputs, name)[:, :, :n] for name, n in lengths.items()}
        )

    return Change(problem=lengthen, layout=count, outputs=shorten)


# --- the backward -------------------------------------------------------------------------------


def _keep_o_in_float32(x: FlatProblem, problem: AttentionProblem) -> FlatProblem:
    return replace(x, dtype=torch.float32)


class _UnsmoothedK(Hooks):
    """dQ = dS K, with K before its mean is subtracted."""

    def __init__(self, x: FlatProblem, problem: AttentionProblem) -> None:
        self._x = x

    def operand(self, site: str, tensor: str, place: Place, operand: Operand) -> Operand:
        if (site, tensor) != ("dq", "k"):
            return operand
        k, spec = to_tiles(self._x.k[place.heads], *operand.values.shape[2::2]), self._x.spec
        return encode(k, spec.dq.precision, spec.dq.rhs, spec.rounding, "k")


class _NoDelta(Hooks):
    """dS = P dP."""

    def __init__(self, x: FlatProblem, problem: AttentionProblem) -> None:
        self._dp = x.q

    def map(self, name: str, place: Place, tiles: Tensor) -> Tensor:
        if name == "dp":
            self._dp = tiles.clone()
        return tiles

    def ds(self, place: Place, ds: Tensor, p: Tensor) -> Tensor:
        return p * self._dp


def _unscaled(*names: str) -> Change:
    """dq, dk or both without the factor of the logits."""

    def divide(outputs: Outputs, problem: AttentionProblem) -> Outputs:
        changed = {name: getattr(outputs, name) / problem.logit_scale for name in names}
        return outputs._replace(**changed)

    return Change(outputs=divide)


def _truncations(spec: AttentionSpec) -> Iterator[Mistake]:
    """Codes of some of the tensors that the spec rounds to INT8 are truncated."""
    rounded = {
        tensor
        for site in SITES
        if spec.site(site).precision is Precision.INT8
        for tensor in OPERANDS[site]
    }
    groups = ("q k v p do ds", "q k v do", "q k", "p ds", "q", "k", "v", "p", "do", "ds")
    distinct = dict.fromkeys(" ".join(x for x in group.split() if x in rounded) for group in groups)
    for tensors in filter(None, distinct):
        names = ", ".join({"do": "dO", "ds": "dS"}.get(x, x.upper()) for x in tensors.split())
        words = f"the codes of {names} are truncated, not rounded"
        yield Mistake(words, spec, rounded_by(truncated, tensors))


_CHANGES: Final = {
    "no causal mask": Change(problem=_without_mask),
    "the causal mask is aligned to the lower right corner": Change(problem=_lower_right),
    "query i attends to keys 0..i+1, not 0..i": Change(problem=lambda x: _masked(x, 1)),
    "query i attends to keys 0..i-1, not 0..i": Change(problem=lambda x: _masked(x, -1)),
    "the window is one key longer on the left": _window(1, 0),
    "the window is one key shorter on the left": _window(-1, 0),
    "the window is one key longer on the right": _window(0, 1),
    "the window is one key shorter on the right": _window(0, -1),
    "key_mask or seqused_k is ignored": Change(problem=_unpadded),
    "sinks are ignored": Change(problem=lambda x: replace(x, sinks=None)),
    "the softcap is ignored": Change(problem=lambda x: replace(x, softcap=None)),
    "the logits are not scaled": Change(problem=_without_scale),
    "the scale argument is ignored": Change(problem=_default_scale),
    "1/sqrt of the head size padded to a power of two": Change(problem=_padded_scale),
    "query head i uses head i % h_kv of k and v, not i // (h / h_kv)": Change(
        problem=_interleave, outputs=_undo_interleave
    ),
    "query head i uses head i % h_kv of k and v, but adds to dk and dv of i // (h / h_kv)": Change(
        problem=_repeat, outputs=_add_neighbours
    ),
    **{
        f"{' and '.join(names)} of the {which} query head of a group, not the sum over the group": (
            _one_head_of_a_group(*names, index=index)
        )
        for names in (("dk", "dv"), ("dk",), ("dv",))
        for which, index in (("first", 0), ("last", -1))
    },
    "dQ uses K before its mean is subtracted": Change(hooks=_UnsmoothedK),
    "dS = P dP: delta is not subtracted": Change(hooks=_NoDelta),
    "delta uses o before it is rounded to 16 bits": Change(layout=_keep_o_in_float32),
    **{
        f"{' and '.join(names)} not multiplied by the logit scale": _unscaled(*names)
        for names in (("dq", "dk"), ("dq",), ("dk",))
    },
    "keys that no query attends to count in scales and means": Change(layout=_count_all_keys),
    "dS is rounded to bfloat16 before anything else": ds_in(torch.bfloat16),
    "dS is rounded to float16 before anything else": ds_in(torch.float16),
    "dS is in bfloat16": rounded_by(in_dtype(torch.bfloat16, Precision.BF16), "ds"),
    "dS is in float16": rounded_by(in_dtype(torch.float16, Precision.FP16), "ds"),
}
