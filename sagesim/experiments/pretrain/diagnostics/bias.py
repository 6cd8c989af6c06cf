"""The bias of the gradient by group of parameters, from two interleaved halves of the sequences.

The bias b is the mean error of the gradient under an attention, against 16-bit attention. The
square of an estimate of b is too large by the estimate's own noise. The estimates of two halves of
the sequences have independent noise, so their inner product is an unbiased estimate of |b|^2. It
may be negative. In Adam's metric, each component is divided by the root of Adam's second moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from sagesim.experiments.pretrain.diagnostics.monitor import SDPA, Measured
from sagesim.experiments.pretrain.model.attention import Attention, use_attention
from sagesim.experiments.pretrain.model.llama import Llama
from sagesim.experiments.pretrain.run.distributed import World, local_part

_EPS: Final = 1e-8
"""Of Adam."""

Gradient = dict[str, Tensor]
"""By parameter; what this process holds of it."""


def group_of(name: str) -> str:
    """The group of a parameter of `Llama`: embedding, attention, mlp or norms.

    >>> group_of("layers.3.feed_forward.down.weight"), group_of("layers.3.attention_norm.weight")
    ('mlp', 'norms')
    """
    if "norm" in name:
        return "norms"
    if "attention." in name:
        return "attention"
    return "mlp" if "feed_forward." in name else "embedding"


def measure_bias(
    model: Llama,
    loss: Callable[[int], Tensor],
    attentions: Sequence[Attention],
    second_moment: Callable[[nn.Parameter], Tensor],
    world: World,
    *,
    sequences: int,
    sharded: bool,
) -> list[Measured]:
    """Measure the square of the gradient and of each attention's bias. Every process gets both.

    Clears the gradients that the model holds.

    Args:
        loss: computes the mean loss of the held-out sequence with a given index.
        attentions: the attentions to measure.
        second_moment: Adam's, without its bias towards 0; what this process holds of it.
        sequences: an even number of held-out sequences.
        sharded: whether each process holds only a part of the weights.
    """
    halves = (range(0, sequences, 2), range(1, sequences, 2))  # both of all parts of the text
    weights = {
        name: 1.0 / (second_moment(p).sqrt() + _EPS)
        for name, p in model.named_parameters()
        if p.requires_grad
    }

    def gradients(attention: Attention) -> list[Gradient]:
        with use_attention(model.cores(), attention):
            return [_mean_gradient(model, loss, half) for half in halves]

    def squares(prefix: str, first: Gradient, second: Gradient) -> Iterator[tuple[str, float]]:
        for metric, factors in (("", None), ("_adam", weights)):
            by_group = _inner_products(first, second, factors, world, sharded=sharded)
            yield from ((f"{prefix}{metric}_{group}", x) for group, x in by_group.items())

    with torch.compiler.set_stance("force_eager"):
        plain = gradients(SDPA)
        found = [Measured("bias", dict(squares("square", *plain)))]
        for attention in attentions:
            errors = [
                {name: x - exact[name] for name, x in half.items()}
                for half, exact in zip(gradients(attention), plain, strict=True)
            ]
            values = dict(squares("bias_square", *errors))
            found.append(Measured("bias", values, attention=attention.name))
    return found


def _mean_gradient(
    model: Llama, loss: Callable[[int], Tensor], examples: Sequence[int]
) -> Gradient:
    model.zero_grad(set_to_none=True)
    for example in examples:
        loss(example).backward()
    found: Gradient = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            found[name] = local_part(parameter.grad) / len(examples)
    model.zero_grad(set_to_none=True)
    return found


def _inner_products(
    first: Gradient, second: Gradient, weights: Gradient | None, world: World, *, sharded: bool
) -> dict[str, float]:
    """The inner product of two gradients in each group."""
    groups = sorted({group_of(name) for name in first})
    total = torch.zeros(len(groups), dtype=torch.float64, device=world.device)
    for name, x in first.items():
        y = second[name]
        if weights is not None:
            x, y = x * weights[name], y * weights[name]
        total[groups.index(group_of(name))] += (x.double() * y.double()).sum()
    if sharded:
        total = world.sum(total)
    return dict(zip(groups, total.tolist(), strict=True))
