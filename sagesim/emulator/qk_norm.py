"""RMS normalisation of queries and keys."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagesim.checks import check_number
from sagesim.shapes import Float


class QKNorm(nn.Module):
    """Normalise each token of q and k: x / sqrt(mean(x^2) + eps) * gamma, with the mean over d.

    q and k each have a learned vector gamma [d], which all heads share and which starts at 1. The
    norm bounds the logits, and therefore the errors of INT8. Apply it before rotary embeddings. It
    is computed in float32 (float64 for float64 inputs).

    Args:
        head_dim: d, at least 1.
        eps: added to the mean square; positive, so that a token of zeros stays 0.

    Raises:
        TypeError: if head_dim is not an integer, or eps not a number.
        ValueError: if head_dim is not positive, or eps not positive and finite.

    Source: arXiv 2603.02170, whose models use eps = 1e-6 in their norms.

    >>> q, k = QKNorm(64)(100 * torch.randn(1, 2, 10, 64), torch.randn(1, 1, 10, 64))
    >>> bool((q.square().mean(-1) - 1).abs().max() < 1e-5)
    True
    """

    def __init__(self, head_dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        check_number("head_dim", head_dim, int, "an integer")
        check_number("eps", eps, int | float, "a number")
        if head_dim < 1:
            raise ValueError(f"head_dim={head_dim} is not a positive number of channels")
        if not 0 < eps < math.inf:
            raise ValueError(f"eps={eps} is not positive and finite")
        self.head_dim, self.eps = head_dim, eps
        self.gamma_q = nn.Parameter(torch.ones(head_dim))
        self.gamma_k = nn.Parameter(torch.ones(head_dim))

    def forward(
        self, q: Float[Tensor, "*heads n_q d"], k: Float[Tensor, "*kv_heads n_k d"]
    ) -> tuple[Float[Tensor, "*heads n_q d"], Float[Tensor, "*kv_heads n_k d"]]:
        """Return q and k normalised, each in its own dtype and shape.

        Raises:
            ValueError: if the last axis of q or k is not head_dim.
            TypeError: if the dtype of q or k is not floating.
        """
        return self._normalise("q", q, self.gamma_q), self._normalise("k", k, self.gamma_k)

    def _normalise(self, name: str, x: Tensor, gamma: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(f"{name} is {x.dtype}, not floating")
        if x.shape[-1:] != gamma.shape:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)} has no last axis of head_dim={self.head_dim}"
            )
        compute = torch.float64 if x.dtype is torch.float64 else torch.float32
        return F.rms_norm(x.to(compute), (self.head_dim,), gamma.to(compute), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, eps={self.eps}"
