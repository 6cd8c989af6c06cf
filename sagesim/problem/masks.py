"""Which keys each query attends to, as a band of diagonals and masks; and the checks of them."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sagesim.checks import is_number
from sagesim.problem.options import NO_WINDOW

_ALIGNMENTS = (None, "upper_left", "lower_right")


class Band(NamedTuple):
    """The diagonals that a causal mask and a window leave; None: no limit.

    Query i attends to key j if lowest <= j - i <= highest.
    """

    lowest: int | None
    highest: int | None

    @classmethod
    def of(cls, n_q: int, n_k: int, *, is_causal: bool, lower_right: bool, window: tuple[int, int]):
        """The band of a call's options."""
        # A side of more keys than there are excludes none, and need not fit 64 bits.
        left, right = (min(side, n_q + n_k) for side in window)
        if is_causal:
            right = 0
        offset = n_k - n_q if lower_right else 0
        return cls(offset - left if left >= 0 else None, offset + right if right >= 0 else None)

    def attends(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Whether each query attends to each key, bool; queries and keys broadcast.

        None if every query attends to every key.
        """
        found = None
        if self.highest is not None:
            found = keys - queries <= self.highest
        if self.lowest is not None:
            above = keys - queries >= self.lowest
            found = above if found is None else found & above
        return found

    def keys_of(self, query: int, n_k: int) -> range:
        """The keys of 0..n_k that a query attends to."""
        first = 0 if self.lowest is None else min(max(0, query + self.lowest), n_k)
        end = n_k if self.highest is None else min(n_k, query + self.highest + 1)
        return range(first, max(first, end))


def check_window(window: object) -> None:
    """Raise unless the window is (left, right), each an integer of at least -1.

    Raises:
        TypeError: if it is not a pair of integers.
        ValueError: if a number is below -1.
    """
    pair = tuple(window) if isinstance(window, (tuple, list)) else ()
    if len(pair) != 2 or not all(is_number(x, int | torch.SymInt) for x in pair):
        raise TypeError(f"window is {reprlib.repr(window)}; it must be (left, right), two integers")
    if min(pair) < -1:
        raise ValueError(f"window is {window!r}; -1 means no limit, and no number is below it")


def check_alignment(alignment: object, window: tuple[int, int], n_q: object, n_k: object) -> None:
    """Raise ValueError for an unknown alignment, or if a window needs one and has none.

    n_q, n_k: numbers of queries and keys, or where packed sequences of them start.
    """
    if alignment not in _ALIGNMENTS:
        raise ValueError(
            f"causal_alignment is {alignment!r}; it must be 'upper_left' or 'lower_right'"
        )
    if alignment is not None or tuple(window) == NO_WINDOW:
        return
    if isinstance(n_q, Tensor):
        if n_q is not n_k:
            raise ValueError(
                f"window={window} needs causal_alignment, because cu_seqlens_q and cu_seqlens_k "
                "are two tensors, which are not compared: pass one tensor twice, or 'upper_left' "
                "or 'lower_right'"
            )
    elif n_q != n_k:
        raise ValueError(
            f"window={window} and different numbers of queries and keys need causal_alignment: "
            "'upper_left' puts query 0 at key 0, 'lower_right' the last query at the last key"
        )


def check_softcap(softcap: object) -> None:
    """Raise unless softcap is None or a number from 2^-7 to 2^126.

    Logits below 2^120 divided by such a number do not overflow float32, and 1 / softcap is not
    flushed to 0.

    Raises:
        TypeError: if it is a tensor, which would get no gradient, or no number at all.
        ValueError: if it is another number.
    """
    if softcap is None:
        return
    if not is_number(softcap, int | float | torch.SymInt | torch.SymFloat):
        raise TypeError(f"softcap is {reprlib.repr(softcap)}; it must be a number or None")
    if not 2.0**-7 <= softcap <= 2.0**126:
        raise ValueError(f"softcap is {softcap}; it must be from 2^-7 to 2^126, or None")


def check_sinks(sinks: object, q: Tensor) -> None:
    """Raise unless sinks is None or floating [heads], on the device of q [*batch, heads, n_q, d].

    Raises:
        TypeError: if it is not a tensor of a floating dtype.
        ValueError: if its shape or device is another.
    """
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        what = sinks.dtype if isinstance(sinks, Tensor) else reprlib.repr(sinks)
        raise TypeError(f"sinks is {what}; it must be a tensor of a floating dtype, or None")
    heads = tuple(q.shape[-3:-2])
    if tuple(sinks.shape) != heads or not heads:
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)}; it must be [heads] of q {tuple(q.shape)}"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks is on {sinks.device}, q on {q.device}")


def broadcasts(x: Tensor, shape: Sequence[int]) -> bool:
    """Whether x.expand(shape) is possible."""
    sizes = zip(reversed(x.shape), reversed(shape), strict=False)
    return x.ndim <= len(shape) and all(size in (1, whole) for size, whole in sizes)


def check_mask(mask: object, q: Tensor, k: Tensor) -> None:
    """Raise unless mask is None or bool, broadcastable to [*heads, n_q, n_k], on the device of q.

    Raises:
        TypeError: if it is not a tensor.
        ValueError: if its dtype, device or shape is another.
    """
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask is {reprlib.repr(mask)}; it must be a tensor or None")
    if mask.dtype is not torch.bool:
        raise ValueError(f"attn_mask is {mask.dtype}; it must be boolean (True attends)")
    if mask.device != q.device:
        raise ValueError(f"attn_mask is on {mask.device}, q on {q.device}")
    full = (*q.shape[:-1], k.shape[-2])
    if not broadcasts(mask, full):
        raise ValueError(f"attn_mask of shape {tuple(mask.shape)} does not broadcast to {full}")


def check_key_padding(key_mask: object, seqused_k: object, q: Tensor, k: Tensor) -> None:
    """Raise unless key_mask is bool [*batch, n_k] or None, and seqused_k integers [*batch] or None.

    Raises:
        TypeError: if a dtype is another.
        ValueError: if a shape or device is another, or both are given.
    """
    if key_mask is not None and seqused_k is not None:
        raise ValueError("key_mask and seqused_k are both given; seqused_k is a form of key_mask")
    batch, n_k = tuple(q.shape[:-3]), k.shape[-2]
    for name, x, shape in (
        ("key_mask", key_mask, (*batch, n_k)),
        ("seqused_k", seqused_k, batch),
    ):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {reprlib.repr(x)}; it must be a tensor or None")
        is_mask = name == "key_mask"
        if (x.dtype is not torch.bool) if is_mask else (x.dtype not in (torch.int32, torch.int64)):
            needed = (
                "torch.bool, True for keys that are attended to" if is_mask else "int32 or int64"
            )
            raise TypeError(f"{name} is {x.dtype}; it must be {needed}")
        if tuple(x.shape) != shape:
            words = "[*batch, n_k]" if is_mask else "[*batch]"
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be {words} = {shape} for "
                f"q {tuple(q.shape)} and k {tuple(k.shape)}"
            )
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}")


def check_lengths(seqused_k: Tensor, n_k: int) -> None:
    """Raise ValueError unless all lengths are in 0..n_k."""
    if not bool(((seqused_k >= 0) & (seqused_k <= n_k)).all()):
        raise ValueError(f"seqused_k is {seqused_k.tolist()}; lengths must be in 0..{n_k}")


def mask_of_lengths(seqused_k: Tensor, n_k: int) -> Tensor:
    """The key mask [*batch, n_k] whose sequences have these numbers of keys.

    Raises:
        ValueError: if a length is not in 0..n_k.
    """
    check_lengths(seqused_k, n_k)
    return torch.arange(n_k, device=seqused_k.device) < seqused_k[..., None]
