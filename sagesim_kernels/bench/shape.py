"""The shape of an attention problem, and its operation count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention problem: q is [batch, heads, tokens, head_dim].

    k and v are [batch, kv_heads, keys, head_dim]. None: as many heads or tokens as q.
    """

    batch: int
    heads: int
    tokens: int
    head_dim: int
    is_causal: bool
    kv_heads: int | None = None
    keys: int | None = None

    def __post_init__(self) -> None:
        if self.is_causal and self.keys not in (None, self.tokens):
            raise ValueError(f"{self}: a causal mask with other numbers of keys is not counted")

    @property
    def q_size(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.tokens, self.head_dim

    @property
    def kv_size(self) -> tuple[int, int, int, int]:
        heads = self.heads if self.kv_heads is None else self.kv_heads
        keys = self.tokens if self.keys is None else self.keys
        return self.batch, heads, keys, self.head_dim

    @property
    def mask(self) -> str:
        return "causal" if self.is_causal else "full"

    def flop(self, which: str) -> float:
        """Operations of one of `PASSES`, by the count of the FlashAttention papers.

        The forward has 4 B H N M d for N queries and M keys, half of that under a causal mask. The
        backward has 2.5 times as many: five products for the forward's two. Recomputed products do
        not count.

        >>> Shape(2, 3, 8, 4, True).flop("both") == 3.5 * 2 * 2 * 3 * 8**2 * 4
        True
        """
        keys = self.kv_size[2]
        forward = 4.0 * self.batch * self.heads * self.tokens * keys * self.head_dim
        forward *= 0.5 if self.is_causal else 1.0
        return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[which]
