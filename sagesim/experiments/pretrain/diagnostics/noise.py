"""Gradients of single sequences, and the statistics of their noise and bias.

Source: `theory.noise`, which has the statistics. One sequence is one example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from sagesim.experiments.pretrain.run.distributed import World, local_part
from theory.noise import RELIABLE_SAMPLES, SampleMoments, sample_moments

RELIABLE_SEQUENCES: Final = RELIABLE_SAMPLES
"""The number of sequences from which on the standard errors are reliable."""

_PART: Final = 2**19
"""Elements of a parameter that are in float64 at once, of each example."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of several examples, as far as this process holds them."""

    examples: list[list[Tensor]]  #: by example, then by parameter; float32


def gradients_of(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    examples: Sequence[int],
    *,
    less: Gradients | None = None,
) -> Gradients:
    """The gradient of the loss of each example. Clears the gradients that the model holds.

    Args:
        less: gradients of the same examples, which are subtracted. The memory holds one example
            without them at a time.
    """
    found: list[list[Tensor]] = []
    for index, example in enumerate(examples):
        model.zero_grad(set_to_none=True)
        loss(example).backward()
        gradients: list[Tensor] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None
                gradients.append(local_part(parameter.grad))
        if less is not None:
            pairs = zip(gradients, less.examples[index], strict=True)
            gradients = [x - y for x, y in pairs]
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
        for part in range(0, a[0].numel(), _PART):
            left, right = (
                torch.stack([x.flatten()[part : part + _PART] for x in each]).double()
                for each in (a, b)
            )
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
