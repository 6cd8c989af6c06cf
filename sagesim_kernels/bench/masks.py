"""The cases of sliding windows and padded keys.

The keys of a padded batch that count are a prefix of each sequence; every query counts. In a packed
call the same keys lie one behind the other, so that it computes the same without padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sagesim_kernels.bench.shape import Shape

FLASH_2: Final = "FlashAttention-2"
"""That of PyTorch, called with a window or packed sequences, which SDPA does not have."""

WINDOW_CONTENDERS: Final = ("factored_qk", FLASH_2, "flash-attn-4")
PADDED_CONTENDERS: Final = (
    "factored_qk seqused_k",
    "factored_qk key_mask",
    "factored_qk packed",
    f"{FLASH_2} packed",
)

_WINDOWS: Final = ((16384, 1024), (32768, 4096))
_HEADS: Final = ((16, 16), (32, 8))
_HEAD_DIMS: Final = (64, 128)
_PADDED_TOKENS: Final = (8, 4096)
"""Sequences of a padded batch, and the tokens of the longest."""


@dataclass(frozen=True, slots=True)
class MaskCase:
    """Contenders that are timed under a window and a causal mask, or with padded keys.

    window: keys that a query attends to, its own included; None for padded keys.
    """

    shape: Shape
    window: int | None
    contenders: tuple[str, ...]
    part: str = "masks"

    @property
    def key(self) -> str:
        """The name of the case in a record.

        >>> MaskCase(Shape(1, 32, 16384, 64, True, kv_heads=8), 1024, ()).key
        'masks b1 h32/8 n16384 d64 window1024'
        >>> MaskCase(Shape(8, 16, 4096, 64, False), None, ()).key
        'masks b8 h16 n4096 d64 padded'
        """
        s = self.shape
        heads = f"{s.heads}" if s.kv_heads is None else f"{s.heads}/{s.kv_heads}"
        how = "padded" if self.window is None else f"window{self.window}"
        return f"masks b{s.batch} h{heads} n{s.tokens} d{s.head_dim} {how}"

    @property
    def used(self) -> list[int]:
        """The keys of each sequence that are no padding, from half of the keys to all of them."""
        n, count = self.shape.tokens, self.shape.batch
        return [n - i * (n // 2) // max(count - 1, 1) for i in range(count)]

    def flop(self, which: str) -> float:
        """Operations of one of `PASSES`, those of the entries of the map that count.

        >>> MaskCase(Shape(1, 1, 8, 4, True), 8, ()).flop("forward") == 4 * 4 * 36
        True
        """
        s = self.shape
        if self.window is None:
            entries = s.tokens * sum(self.used)
        else:
            before = s.tokens - self.window
            entries = s.batch * (before * self.window + self.window * (self.window + 1) // 2)
        forward = 4.0 * s.heads * s.head_dim * entries
        return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[which]


def mask_cases() -> list[MaskCase]:
    """Windows of a sixteenth and an eighth of the tokens, and batches of padded sequences."""
    windows = [
        MaskCase(
            Shape(1, heads, n, d, True, kv_heads=None if heads == kv_heads else kv_heads),
            window,
            WINDOW_CONTENDERS,
        )
        for n, window in _WINDOWS
        for heads, kv_heads in _HEADS
        for d in _HEAD_DIMS
    ]
    batch, tokens = _PADDED_TOKENS
    padded = [
        MaskCase(Shape(batch, 1024 // d, tokens, d, False), None, PADDED_CONTENDERS)
        for d in _HEAD_DIMS
    ]
    return [*windows, *padded]
