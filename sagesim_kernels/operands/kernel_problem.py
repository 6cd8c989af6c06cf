"""An attention call, laid out for the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sagesim.problem import NO_WINDOW, check_scale
from sagesim.spec import AttentionSpec
from sagesim_kernels.launching import Specialized
from sagesim_kernels.operands.grid import Grid, Sequences
from sagesim_kernels.operands.key_padding import LiveKeys, find_live_keys
from sagesim_kernels.operands.layout import Lengths


class Packing(NamedTuple):
    """Where packed sequences start, and bounds on their lengths; all None if none are packed."""

    cu_q: Tensor | None = None  #: int32 [sequences + 1], first query of each, and the total
    cu_k: Tensor | None = None  #: None with cu_q: keys lie as queries do
    longest_q: int | None = None
    longest_k: int | None = None


class Extras(NamedTuple):
    """What a call adds to plain causal or full attention; see `sagesim.AttentionOptions`."""

    window: tuple[int, int] = NO_WINDOW
    key_mask: Tensor | None = None  #: bool [sequences, n_k]
    seqused_k: Tensor | None = None  #: integers [sequences]
    sinks: Tensor | None = None  #: [heads]
    softcap: float | None = None

    @property
    def is_none(self) -> bool:
        """Whether nothing is added."""
        return self.window == NO_WINDOW and all(x is None for x in self[1:])


NO_EXTRAS: Final = Extras()

_TOO_WIDE: Final = 2**29
"""Keys. A side of a window must have fewer, because kernels compute indices in 32 bits."""


def _without_wide_sides(window: tuple[int, int], longest: int) -> tuple[int, int]:
    """Return the window with -1 for a side of `_TOO_WIDE` keys or more.

    longest: the most tokens of a sequence.

    Raises:
        ValueError: if such a side may exclude a key.
    """
    if any(_TOO_WIDE <= side < longest - 1 for side in window):
        raise ValueError(
            f"window is {window}: the kernels compute no side of {_TOO_WIDE:,} keys or more that "
            f"is narrower than the longest sequence, which may have {longest:,} tokens"
        )
    left, right = (-1 if side >= _TOO_WIDE else side for side in window)
    return left, right


@dataclass(frozen=True, slots=True)
class KernelProblem:
    """An attention call, laid out for the kernels: four axes, a resolved spec and known lengths.

    q is [sequences, heads, n_q, d], k and v are [sequences, kv heads, n_k, d or d_v], with any
    strides. Packed sequences form a batch of one; cu_q and cu_k hold their first tokens. What a
    user describes is a `sagesim.problem.AttentionProblem`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec  #: without INPUT16
    scale: float
    is_causal: bool
    lower_right: bool
    cu_q: Tensor | None
    cu_k: Tensor | None
    has_equal_lengths: bool  #: whether packed sequences have as many queries as keys each
    longest_q: int
    longest_k: int
    extras: Extras
    live_keys: LiveKeys | None  #: None without a key mask

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        spec: AttentionSpec,
        scale: float,
        is_causal: bool,
        lower_right: bool,
        packing: Packing | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> KernelProblem:
        """Lay out a call.

        q, k, v: [sequences, heads, tokens, channels]. spec: without INPUT16.

        Raises:
            ValueError: if a window is too wide for 32 bits and narrower than the longest sequence.
        """
        cu_q, cu_k, longest_q, longest_k = packing or Packing()
        has_equal_lengths = cu_q is not None and cu_k is None
        longest_q = q.shape[2] if longest_q is None else min(longest_q, q.shape[2])
        longest_k = k.shape[2] if longest_k is None else min(longest_k, k.shape[2])
        window = _without_wide_sides(extras.window, max(longest_q, longest_k))
        seqused_k = None if extras.seqused_k is None else extras.seqused_k.contiguous()
        extras = extras._replace(window=window, seqused_k=seqused_k)
        return cls(
            q=q,
            k=k,
            v=v,
            spec=spec,
            scale=scale,
            is_causal=is_causal,
            lower_right=lower_right,
            cu_q=cu_q,
            cu_k=cu_q if has_equal_lengths else cu_k,
            has_equal_lengths=has_equal_lengths,
            longest_q=longest_q,
            longest_k=longest_k,
            extras=extras,
            live_keys=None if extras.key_mask is None else find_live_keys(extras.key_mask),
        )

    @property
    def lengths(self) -> Lengths:
        """The sequence lengths and the masks as a kernel argument."""
        left, right = self.extras.window
        has_right = self.is_causal or right >= 0
        lengths = self.q.shape[2], self.k.shape[2]
        if self.cu_q is None:
            lengths = map(Specialized.if_aligned, lengths)
        return Lengths(
            self.cu_q,
            self.cu_k,
            *lengths,
            tl.constexpr(has_right),
            tl.constexpr(self.lower_right and (has_right or left >= 0)),
            left if left >= 0 else None,
            right if has_right and not self.is_causal else None,
            self.extras.seqused_k,
            *(self.live_keys or (None, None, None)),
        )

    def query_grid(self, rows: int, *, together: int = 1) -> Grid:
        """Return a launch with tiles of `rows` queries of each head of Q; see `Grid.of_tokens`."""
        return self.token_grid(False, rows, self.q.shape[1], together=together)

    def key_grid(self, rows: int, heads: int | None = None) -> Grid:
        """Return a launch with tiles of `rows` keys. heads: those of K by default."""
        return self.token_grid(True, rows, heads or self.k.shape[1])

    def token_grid(self, is_key: bool, rows: int, heads: int, *, together: int = 1) -> Grid:
        """Return a launch with tiles of `rows` keys or queries; see `Grid.of_tokens`."""
        x, cu, longest = (
            (self.k, self.cu_k, self.longest_k) if is_key else (self.q, self.cu_q, self.longest_q)
        )
        lengths = Sequences(cu, self.sequences, longest, x.shape[2])
        return Grid.of_tokens(lengths, rows, heads, together=together)

    @property
    def longest_offset(self) -> int | None:
        """The last diagonal of the longest sequence: query i attends to no key after i + offset.

        None without such a limit.
        """
        right = 0 if self.is_causal else self.extras.window[1]
        return self._longest_alignment + right if right >= 0 else None

    @property
    def longest_lowest(self) -> int | None:
        """The first diagonal of the longest sequence: query i attends to no key before i + lowest.

        None without such a limit.
        """
        left = self.extras.window[0]
        return self._longest_alignment - left if left >= 0 else None

    @property
    def _longest_alignment(self) -> int:
        return self.longest_k - self.longest_q if self.lower_right else 0

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_q is None else self.cu_q.shape[0] - 1

    @property
    def groups(self) -> int:
        """Query heads for each head of k and v."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether there are no queries or no keys at all, whatever the mask."""
        return 0 in (self.sequences, self.q.shape[1], self.longest_q, self.longest_k)


class KernelSizes(NamedTuple):
    """Head sizes and block sizes of a kernel; every field is a constexpr."""

    GROUPS: Any  #: query heads for each head of K and V
    D: Any  #: channels of Q and K
    DV: Any  #: channels of V
    D_PAD: Any  #: channels of a tile of Q or K, see `padded`
    DV_PAD: Any  #: channels of a tile of V
    BLOCK_Q: Any  #: queries of a block of the spec
    BLOCK_K: Any  #: keys of a block of the spec
    TILE: Any  #: queries or keys that a program owns

    @classmethod
    def of(cls, problem: KernelProblem, tile: int, *, block_q: int | None = None) -> KernelSizes:
        """The sizes for a problem, if a program owns `tile` queries or keys.

        block_q: in place of the spec's, for a kernel to which the scales of Q and dO do not matter.
        """
        d, d_v, spec = problem.q.shape[3], problem.v.shape[3], problem.spec
        heads = (problem.groups, d, d_v, padded(d), padded(d_v))
        return cls(*map(tl.constexpr, (*heads, block_q or spec.block_q, spec.block_k, tile)))


def logit_scale(q: Tensor, scale: float | None) -> float:
    """Return the factor of the logits: `scale`, or 1/sqrt(d) of the unpadded head size."""
    check_scale(scale)
    # -0.0 becomes 0.0: calls whose options are equal share a plan.
    return 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale) + 0.0


def padded(channels: int) -> int:
    """Return the channels of a tile: a power of two, and at least the 32 of an INT8 product."""
    return max(32, triton.next_power_of_2(channels))
