"""A plain Llama: RMSNorm, rotary positions, SwiGLU, and one attention core a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagesim.experiments.pretrain.attention import Attention, Core
from sagesim.qk_norm import QKNorm

NORM_EPS: Final = 1e-6
"""Source: arXiv 2603.02170."""

ROPE_BASE: Final = 10000.0
"""Source: Su et al., arXiv 2104.09864."""

_DEVIATION: Final = 0.02
"""Of initial weights. Source: GPT-2; as there, what is added to the residual stream is smaller."""


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a model. Heads have 64 channels, and the feed-forward is three times as wide
    as the model, as in the paper's 325M; `tiny` is for tests."""

    layers: int
    width: int
    heads: int

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Width of the feed-forward."""
        return 3 * self.width

    def parameters(self, vocabulary: int, *, tied: bool = True, qk_norm: bool = False) -> int:
        """How many numbers are trained.

        >>> SIZES["325m"].parameters(50257)
        324134912
        """
        layer = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        layer += 2 * self.head_size if qk_norm else 0
        return self.layers * layer + self.width + vocabulary * self.width * (1 if tied else 2)

    def flops(self, vocabulary: int, context: int) -> float:
        """Floating-point operations to train on one token: 6 a weight that multiplies, and the
        products of causal attention, two in the forward and four in the backward, each over half
        of the context on average. Recomputation is not counted."""
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
"""By the number of parameters with a tied head: with a vocabulary of 16384, for 325m with the
50257 of GPT-2's tokenizer. The paper gives its model's 325M parameters, and a "hidden" of 3072;
this is the shape of arXiv 2505.11594 (width 1024, 20 layers, 16 heads) that has as many."""


class Llama(nn.Module):
    """tokens [batch, n] -> logits [batch, n, vocabulary].

    Args:
        attention: of every layer, to begin with.
        seed: of the weights, which do not depend on the device, nor on the attention.
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

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each position's next token.

        Raises:
            ValueError: for more tokens than the context.
        """
        n = tokens.shape[1]
        if n > self.context:
            raise ValueError(f"{n} tokens in a context of {self.context}")
        x = self.embedding(tokens)
        cos, sin = self.get_buffer("cos")[:n], self.get_buffer("sin")[:n]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))

    def cores(self) -> list[Core]:
        """The attention of each layer."""
        return [module for module in self.modules() if isinstance(module, Core)]

    def qk_norms(self) -> list[QKNorm]:
        """Of each layer, if the model has them."""
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
    """Attention, then the feed-forward, each of the normalised stream and added to it."""

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
    """Causal; Q and K normalised if asked for, then rotated."""

    def __init__(
        self, size: Size, attention: Attention, index: int, *, qk_norm: bool, seed: int
    ) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.qk_norm = QKNorm(size.head_size, eps=NORM_EPS) if qk_norm else None
        self.core = Core(attention, index, seed)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        o = self.core(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.out(o.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU. Source: Shazeer, arXiv 2002.05202."""

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
    """x [..., n, d] with channel i and channel i + d/2 turned by the angle of their position.

    In float32, in the dtype of x afterwards: an angle rounded to 16 bit would be wrong by whole
    turns at late positions.
    """
    first, second = x.to(cos.dtype).chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of logits [batch, n, vocabulary] and targets [batch, n]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
