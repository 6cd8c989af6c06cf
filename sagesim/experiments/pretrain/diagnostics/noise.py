"""Gradients of single sequences, and the statistics of their noise and bias.

Source: `theory.noise`, which has the statistics. One sequence is one example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sagesim.experiments.pretrain.run.distributed import World, local_part
from theory.noise import SampleMoments, sample_moments


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of several examples, as far as this process holds them."""

    examples: list[list[Tensor]]  #: by example, then by parameter; float32

    def minus(self, other: Gradients) -> Gradients:
        """The differences self - other, example by example."""
        pairs = zip(self.examples, other.examples, strict=True)
        return Gradients([[x - y for x, y in zip(a, b, strict=True)] for a, b in pairs])


def gradients_of(
    model: nn.Module, loss: Callable[[int], Tensor], examples: Sequence[int]
) -> Gradients:
    """The gradient of the loss of each example. Clears the gradients that the model holds."""
    found: list[list[Tensor]] = []
    for example in examples:
        model.zero_grad(set_to_none=True)
        loss(example).backward()
        gradients: list[Tensor] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None
                gradients.append(local_part(parameter.grad))
        found.append(gradients)
    model.zero_grad(set_to_none=True)
    return Gradients(found)


def inner_products(one: Gradients, other: Gradients, world: World, *, sharded: bool) -> Tensor:
    """The inner products of all pairs of examples, one from each argument: float64 [n, m].

    Args:
        sharded: whether each process holds only a part of each gradient.
    """
    total = torch.zeros(
        len(one.examples), len(other.examples), dtype=torch.float64, device=world.device
    )
    for a, b in zip(
        zip(*one.examples, strict=True), zip(*other.examples, strict=True), strict=True
    ):
        left, right = (torch.stack([x.flatten() for x in each]).double() for each in (a, b))
        total += left @ right.mT
    return world.sum(total) if sharded else total


def moments(gram: Tensor) -> SampleMoments:
    """`theory.noise.sample_moments` of n vectors, from their inner products [n, n].

    The moments depend on the vectors only through their inner products. The function therefore
    builds n vectors of length n with the same inner products. All moments are NaN if an inner
    product is not finite.
    """
    if not gram.isfinite().all():
        return SampleMoments(math.nan, math.nan, math.nan)
    values, vectors = torch.linalg.eigh(gram.cpu())
    return sample_moments(vectors * values.clamp(min=0).sqrt())
