"""Errors of attention during training: of every intermediate of each layer, and of the gradient.

Errors are measured on held-out sequences, with the current weights. All other layers use 16-bit
attention, so a layer's inputs and dO are not quantized: the measured error is that of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim.analysis import TENSORS, Comparison, compare
from sagesim.emulator import Exact, QKNorm, exact, trace
from sagesim.experiments.pretrain.diagnostics.noise import (
    Gradients,
    gradients_of,
    inner_products,
    moments,
)
from sagesim.experiments.pretrain.model.attention import Attention, use_attention
from sagesim.experiments.pretrain.model.llama import Llama
from sagesim.experiments.pretrain.run.distributed import World, full_tensor
from sagesim.models import Call, Capture, capture
from sagesim.problem import AttentionProblem
from sagesim.spec import AttentionSpec
from theory.noise import SampleMoments, noise_scale, visible_batch

SDPA = Attention("sdpa")


@dataclass(frozen=True, slots=True)
class Measured:
    """Numbers about one layer or attention; see `sagesim.experiments.pretrain.run.log`."""

    group: str
    values: Mapping[str, float]  #: by name
    attention: str = ""  #: the measured attention; empty if the numbers are not about one
    layer: int = -1  #: index of the layer; -1 if the numbers are not about one

    def key(self, name: str) -> str:
        """The name of one of the numbers among all those of a step.

        >>> Measured("layer", {}, "emulator:sagebwd", 3).key("dq_rel_l2")
        'layer/emulator:sagebwd/3/dq_rel_l2'
        >>> Measured("train", {}).key("loss")
        'train/loss'
        """
        layer = str(self.layer) if self.layer >= 0 else ""
        return "/".join(filter(None, (self.group, self.attention, layer, name)))


def measure(
    model: Llama,
    loss: Callable[[int], Tensor],
    attentions: Sequence[Attention],
    world: World,
    *,
    sequences: int,
    sharded: bool,
) -> list[Measured]:
    """Measure the errors of attentions. Every process gets all numbers.

    Clears the gradients that the model holds. If a loss under 16-bit attention is not finite, there
    is no reference: the only number is then `not_finite`.

    Args:
        loss: computes the mean loss of the held-out sequence with a given index.
        attentions: the attentions to measure; each has a spec.
        sequences: number of held-out sequences. Errors of layers use only the first.
        sharded: whether each process holds only a part of the weights.
    """
    with torch.compiler.set_stance("force_eager"):
        if not all(_is_finite(model, loss, index) for index in range(sequences)):
            return [Measured("gradient", {"not_finite": 1.0})]
        calls = record_attention(model, loss).calls
        specs = {each.name: each.spec for each in attentions if each.spec is not None}
        norms = model.qk_norms()
        mine = [
            found
            for call in calls[world.rank :: world.processes]
            for found in measure_layer(call, specs)
        ]
        gammas = [_gamma(norm, index) for index, norm in enumerate(norms)]
        noise = list(_gradient(model, loss, attentions, world, sequences, sharded))
    by_layer = sorted(
        (each for part in world.gather(mine) for each in part), key=lambda m: (m.layer, m.attention)
    )
    return by_layer + gammas + noise


def record_attention(model: Llama, loss: Callable[[int], Tensor]) -> Capture:
    """Record every layer's attention on the first sequence, under 16-bit attention."""
    with use_attention(model.cores(), SDPA), capture(model) as recording:
        loss(0).backward()
    model.zero_grad(set_to_none=True)
    return recording.result()


def _is_finite(model: Llama, loss: Callable[[int], Tensor], index: int) -> bool:
    with torch.no_grad(), use_attention(model.cores(), SDPA):
        return bool(loss(index).isfinite())


def measure_layer(call: Call, specs: Mapping[str, AttentionSpec]) -> Iterator[Measured]:
    """The errors of one layer under each spec, and the size of its tensors.

    sigma_q and sigma_k are the standard deviations of attention's inputs, after norm and rotation.
    rms_p, rms_dp and rms_ds are root mean squares over the entries that are not masked. The loss is
    a mean over tokens, which sets the scale of dP and dS.

    Args:
        specs: specs by the name to report them under.
    """
    squares = dict.fromkeys(("p", "dp", "ds"), 0.0)
    count = 0
    parts: dict[str, list[Comparison]] = {name: [] for name in specs}
    for of in call.head_groups():
        reference = exact(of)
        count += int((reference.s != -torch.inf).sum())
        for name in squares:
            squares[name] += float(getattr(reference, name).square().sum())
        for name, spec in specs.items():
            parts[name].append(_compare(of, spec, reference))
    sigmas = {f"sigma_{x}": float(getattr(call, x).double().std()) for x in ("q", "k")}
    roots = {f"rms_{name}": (total / count) ** 0.5 for name, total in squares.items()}
    yield Measured("layer", sigmas | roots, layer=call.index)
    for name, several in parts.items():
        overall = Comparison.joined(several).overall
        values = {f"{t}_rel_l2": overall[t].rel_l2 for t in TENSORS}
        values |= {f"{t}_cosine": overall[t].cosine for t in TENSORS}
        yield Measured("layer", values, attention=name, layer=call.index)


def _compare(problem: AttentionProblem, spec: AttentionSpec, reference: Exact) -> Comparison:
    return compare(trace(problem, spec=spec), reference)


def _gamma(norm: QKNorm, index: int) -> Measured:
    values: dict[str, float] = {}
    for name in ("gamma_q", "gamma_k"):
        gamma = full_tensor(getattr(norm, name).detach())
        values[f"{name}_rms"] = float(gamma.square().mean().sqrt())
        values[f"{name}_max"] = float(gamma.abs().max())
    return Measured("layer", values, layer=index)


def _gradient(
    model: Llama,
    loss: Callable[[int], Tensor],
    attentions: Sequence[Attention],
    world: World,
    sequences: int,
    sharded: bool,
) -> Iterator[Measured]:
    """Noise and bias of the gradient; noise_scale and visible are in sequences."""
    with use_attention(model.cores(), SDPA):
        plain = gradients_of(model, loss, range(sequences))
    own = moments(inner_products(plain, plain, world, sharded=sharded))
    # An unbiased estimate of a square can be negative. Then the mean gradient is below the noise.
    is_positive = own.mean_square > 0
    yield Measured(
        "gradient",
        {
            "square": own.mean_square,
            "square_error": own.mean_square_error,
            "trace": own.trace,
            "noise_scale": noise_scale(own.trace, own.mean_square) if is_positive else math.inf,
        },
    )
    for attention in attentions:
        # A function of its own holds the errors, which take as much memory as the gradients. They
        # are freed before those of the next attention are computed.
        bias, along = _bias(model, loss, attention, world, plain, sharded)
        yield Measured(
            "gradient",
            {
                "bias_square": bias.mean_square,
                "bias_square_error": bias.mean_square_error,
                "bias_trace": bias.trace,
                "bias_along": along / own.mean_square if is_positive else math.nan,
                "visible": visible_batch(bias.mean_square, own.trace, bias.trace),
            },
            attention=attention.name,
        )


def _bias(
    model: Llama,
    loss: Callable[[int], Tensor],
    attention: Attention,
    world: World,
    plain: Gradients,
    sharded: bool,
) -> tuple[SampleMoments, float]:
    """The moments of an attention's errors of the gradient, and their component along the gradient.

    The component is the mean inner product of an error and a gradient of different sequences.

    Args:
        plain: the gradients of the first sequences under 16-bit attention.
    """
    sequences = len(plain.examples)
    with use_attention(model.cores(), attention):
        error = gradients_of(model, loss, range(sequences), less=plain)
    bias = moments(inner_products(error, error, world, sharded=sharded))
    along = inner_products(error, plain, world, sharded=sharded)
    # Without the diagonal: the noise of an example's error and gradient is not independent.
    return bias, float(along.sum() - along.diagonal().sum()) / (sequences * (sequences - 1))
