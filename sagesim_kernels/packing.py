"""The check of packed sequences, which the kernels and the emulated integrations share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sagesim.checks import is_number
from sagesim_kernels.traced import is_traced


def check_packing(
    q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int
) -> None:
    """Raise TypeError or ValueError unless these describe packed sequences.

    q, k: [tokens, heads, head size]. The others: see `attention_varlen`.
    """
    _check_types("q", cu_q, longest_q)
    _check_types("k", cu_k, longest_k)
    _check_packed("q", q, cu_q, longest_q)
    is_same = not is_traced(cu_q) and cu_k is cu_q and k.device == q.device
    if not (is_same and (k.shape[0], longest_k) == (q.shape[0], longest_q)):
        _check_packed("k", k, cu_k, longest_k)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seqlens_q has shape {tuple(cu_q.shape)} and cu_seqlens_k {tuple(cu_k.shape)}; "
            "they must have the same number of sequences"
        )


def _check_types(name: str, cu: object, longest: object) -> None:
    if not isinstance(cu, Tensor):
        raise TypeError(f"cu_seqlens_{name} is {cu!r}; it must be a tensor")
    if not is_number(longest, int | torch.SymInt):
        raise TypeError(f"max_seqlen_{name} is {longest!r}; it must be an integer")


def check_starts(fits: Tensor, cu: Tensor, message: str, found: Callable[[], str]) -> None:
    """Raise ValueError unless fits, a tensor with one bool that was computed from cu, is True.

    On a CUDA device or in a traced call, assert it on the device instead, with the message alone.

    found: returns the numbers at fault, to follow the message. They are read from the device.
    """
    if cu.is_cuda or is_traced(cu):
        torch._assert_async(fits, message)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
    elif not fits:
        raise ValueError(message + found())


def _check_packed(name: str, x: Tensor, cu: Tensor, longest: int) -> None:
    what = f"cu_seqlens_{name}"
    if cu.dtype is not torch.int32 or cu.ndim != 1 or cu.shape[0] == 0 or cu.stride(0) != 1:
        raise ValueError(
            f"{what} is {cu.dtype} of shape {tuple(cu.shape)}; it must be contiguous int32 "
            "[sequences + 1]"
        )
    if cu.device != x.device:
        raise ValueError(f"{what} is on {cu.device}, {name} on {x.device}")
    fits = _is_packing(cu, x.shape[0], min(longest, x.shape[0]))
    message = (
        f"{what} must ascend from 0 to the tokens of {name} in steps of at most max_seqlen_{name}"
    )
    check_starts(
        fits, cu, message, lambda: f"={longest}; got {cu.tolist()} for {x.shape[0]} tokens"
    )


def _is_packing(cu: Tensor, tokens: int, most: int) -> Tensor:
    """Return, as a bool tensor [], whether cu ascends from 0 to `tokens` in steps up to `most`."""
    if cu.is_cuda and not is_traced(cu):
        from sagesim_kernels import packing_kernel  # needs Triton; one launch in place of a dozen

        return packing_kernel.is_packing(cu, tokens, most)
    steps = cu.long().diff()
    return (cu[0] == 0) & (cu[-1] == tokens) & (steps >= 0).all() & (steps <= most).all()
