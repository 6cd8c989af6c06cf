"""The gradient's noise over sequences, and the mean error that quantized attention puts into it.

Source: theory.noise, which has the statistics. One sequence is one example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sagesim.experiments.pretrain.distributed import World, part
from theory.noise import SampleMoments, sample_moments


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of several examples, a list of float32 tensors each: this process' part."""

    examples: list[list[Tensor]]

    def less(self, other: Gradients) -> Gradients:
        """Example by example, self - other."""
        pairs = zip(self.examples, other.examples, strict=True)
        return Gradients([[x - y for x, y in zip(a, b, strict=True)] for a, b in pairs])


def gradients_of(
    model: nn.Module, loss: Callable[[int], Tensor], examples: Sequence[int]
) -> Gradients:
    """The gradient of each example's loss. Gradients that the model holds are lost."""
    found: list[list[Tensor]] = []
    for example in examples:
        model.zero_grad(set_to_none=True)
        loss(example).backward()
        here: list[Tensor] = []
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            here.append(part(gradient))
        found.append(here)
    model.zero_grad(set_to_none=True)
    return Gradients(found)


def products(one: Gradients, other: Gradients, here: World, *, sharded: bool) -> Tensor:
    """[n, m] inner products of each example of one with each of the other, float64.

    Args:
        sharded: whether each process holds a part of the gradients, and not all of them.
    """
    total = torch.zeros(
        len(one.examples), len(other.examples), dtype=torch.float64, device=here.device
    )
    for a, b in zip(
        zip(*one.examples, strict=True), zip(*other.examples, strict=True), strict=True
    ):
        left, right = (torch.stack([x.flatten() for x in each]).double() for each in (a, b))
        total += left @ right.mT
    return here.sum(total) if sharded else total


def moments(gram: Tensor) -> SampleMoments:
    """`theory.noise.sample_moments` of the vectors with these inner products.

    They depend on the vectors by their inner products only: any others that have the same will
    do, and n of n numbers always exist. NaN where the products are not finite.
    """
    if not gram.isfinite().all():
        return SampleMoments(math.nan, math.nan, math.nan)
    values, vectors = torch.linalg.eigh(gram.cpu())
    return sample_moments(vectors * values.clamp(min=0).sqrt())
