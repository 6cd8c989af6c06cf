"""A plain Llama: RMSNorm, rotary positions, SwiGLU, and one `AttentionCore` per layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagesim.emulator import QKNorm
from sagesim.experiments.pretrain.model.attention import Attention, AttentionCore

NORM_EPS: Final = 1e-6
"""Source: arXiv 2603.02170."""

ROPE_BASE: Final = 10000.0
"""Source: Su et al., arXiv 2104.09864."""

_DEVIATION: Final = 0.02
"""Standard deviation of the initial weights. Source: GPT-2.

As in GPT-2, layers that add to the residual stream start with smaller weights.
"""


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a model.

    As in the paper's 325M model, heads have 64 channels and the feed-forward is three times as wide
    as the model. `tiny`, with heads of 32 channels, is for tests.
    """

    layers: int
    width: int
    heads: int

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Width of the feed-forward's hidden layer."""
        return 3 * self.width

    def parameters(self, vocabulary: int, *, tied: bool = True, qk_norm: bool = False) -> int:
        """The number of trained parameters.

        >>> SIZES["325m"].parameters(50257)
        324134912
        """
        layer = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        layer += 2 * self.head_size if qk_norm else 0
        return self.layers * layer + self.width + vocabulary * self.width * (1 if tied else 2)

    def flops(self, vocabulary: int, context: int) -> float:
        """Floating-point operations to train on one token.

        These are 6 per weight of a matrix product, and the products of causal attention: two in the
        forward and four in the backward, each over half of the context on average. Recomputation
        is not counted.
        """
        weights = self.layers * (4 * self.width**2 + 3 * self.width * self.hidden)
        return 6.0 * (weights + vocabulary * self.width) + 6.0 * self.layers * self.width * context


SIZES: Final = {
    "tiny": Size(2, 64, 2),
    "8m": Size(4, 256, 4),
    "18m": Size(6, 384, 6),
    "36m": Size(8, 512, 8),
    "105m": Size(12, 768, 12),
    "325m": Size(20, 1024, 16),
}
"""Model shapes, named by their number of parameters with a tied head.

The vocabulary is 16384 tokens; for 325m it is the 50257 tokens of GPT-2. The paper says that its
model has 325M parameters and a "hidden" of 3072. The shape here has as many: it is that of arXiv
2505.11594 (width 1024, 20 layers, 16 heads).
"""


class Llama(nn.Module):
    """A language model: tokens, int64 [batch, n] -> logits [batch, n, vocabulary].

    Args:
        vocabulary: rows of the embedding.
        context: largest number of tokens of a sequence.
        attention: attention of every layer; it can be replaced later.
        tied: whether the head uses the embedding's weights.
        qk_norm: whether each layer normalises Q and K.
        qk_gain: the gains of QK-norm, which are then not trained. 0: they start at 1 and are
            trained.
        seed: seed of the initial weights. The device and the attention do not change them.
    """

    def __init__(
        self,
        size: Size,
        *,
        vocabulary: int,
        context: int,
        attention: Attention,
        tied: bool = True,
        qk_norm: bool = False,
        qk_gain: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.layers = nn.ModuleList(
            Layer(size, attention, index, qk_norm=qk_norm, seed=seed)
            for index in range(size.layers)
        )
        self.norm = nn.RMSNorm(size.width, eps=NORM_EPS)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        cos, sin = rotations(context, size.head_size)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(seed)
        if qk_gain:
            for norm in self.qk_norms():
                for gain in norm.parameters():
                    torch.nn.init.constant_(gain, qk_gain)
                    gain.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token after each position, [batch, n, vocabulary].

        Raises:
            ValueError: if n is larger than the context.
        """
        n = tokens.shape[1]
        if n > self.context:
            raise ValueError(f"{n} tokens in a context of {self.context}")
        x = self.embedding(tokens)
        cos, sin = self.get_buffer("cos")[:n], self.get_buffer("sin")[:n]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))

    def cores(self) -> list[AttentionCore]:
        """The attention core of each layer."""
        return [module for module in self.modules() if isinstance(module, AttentionCore)]

    def qk_norms(self) -> list[QKNorm]:
        """The QK-norm of each layer; empty without QK-norm."""
        return [module for module in self.modules() if isinstance(module, QKNorm)]

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        residual = _DEVIATION / math.sqrt(2 * len(self.layers))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 2:
                    adds = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
                    parameter.normal_(0.0, residual if adds else _DEVIATION, generator=generator)


class Layer(nn.Module):
    """Attention, then the feed-forward; each reads the normalised stream and is added to it."""

    def __init__(
        self, size: Size, attention: Attention, index: int, *, qk_norm: bool, seed: int
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width, eps=NORM_EPS)
        self.attention = SelfAttention(size, attention, index, qk_norm=qk_norm, seed=seed)
        self.feed_forward_norm = nn.RMSNorm(size.width, eps=NORM_EPS)
        self.feed_forward = FeedForward(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class SelfAttention(nn.Module):
    """Causal self-attention. Q and K are normalised (with `qk_norm`), then rotated."""

    def __init__(
        self, size: Size, attention: Attention, index: int, *, qk_norm: bool, seed: int
    ) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.qk_norm = QKNorm(size.head_size, eps=NORM_EPS) if qk_norm else None
        self.core = AttentionCore(attention, index, seed)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        o = self.core(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.out(o.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A SwiGLU feed-forward. Source: Shazeer, arXiv 2002.05202."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_up = nn.Linear(size.width, 2 * size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def rotations(context: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, float32 [context, head_size / 2] each."""
    frequency = ROPE_BASE ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angle = torch.arange(context, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels i and i + d/2 of x [..., n, d] by the angle of their position.

    The rotation is computed in the dtype of cos and sin, float32, and then rounded to the dtype of
    x: at late positions an angle in 16 bit would be wrong by whole turns.
    """
    first, second = x.to(cos.dtype).chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of logits [batch, n, vocabulary] and targets [batch, n]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
