"""What attention does to a model in training: errors of every intermediate, and of the gradient.

All is measured on held-out sequences, with weights as they are and 16-bit attention upstream: a
layer's inputs and its dO are those of exact training, and its errors are its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim._capture import capture
from sagesim._exact import Exact, exact
from sagesim._trace import trace
from sagesim.captured import Call, Capture
from sagesim.experiments.pretrain.attention import Attention, attending
from sagesim.experiments.pretrain.distributed import World, whole
from sagesim.experiments.pretrain.model import Llama
from sagesim.experiments.pretrain.noise import gradients_of, moments, products
from sagesim.measure import head_groups
from sagesim.metrics import TENSORS, Comparison, compare
from sagesim.qk_norm import QKNorm
from sagesim.spec import AttentionSpec
from theory.noise import noise_scale, visible_batch

SDPA = Attention("sdpa")


@dataclass(frozen=True, slots=True)
class Measured:
    """Numbers of one place, as `runlog.Writer.add` takes them."""

    group: str
    values: Mapping[str, float]
    attention: str = ""
    layer: int = -1


def measure(
    model: Llama,
    loss: Callable[[int], Tensor],
    attentions: Sequence[Attention],
    here: World,
    *,
    sequences: int,
    sharded: bool,
) -> list[Measured]:
    """Every number, in every process. Gradients that the model holds are lost.

    Where exact attention gives the held-out sequences numbers that are not finite, there is
    nothing to measure against: the only number is then `not_finite`.

    Args:
        loss: the mean loss of one of the held-out sequences, by its number.
        attentions: to measure; each has a spec.
        sequences: how many there are; errors by layer are those of the first.
        sharded: whether each process has a part of the weights only.
    """
    with torch.compiler.set_stance("force_eager"):
        if not all(_is_finite(model, loss, index) for index in range(sequences)):
            return [Measured("gradient", {"not_finite": 1.0})]
        calls = record(model, loss).calls
        specs = {each.name: each.spec for each in attentions if each.spec is not None}
        norms = model.qk_norms()
        mine = [
            found for call in calls[here.rank :: here.processes] for found in layer(call, specs)
        ]
        gammas = [_gamma(norm, index) for index, norm in enumerate(norms)]
        noise = list(_gradient(model, loss, attentions, here, sequences, sharded))
    by_layer = sorted(
        (each for part in here.gather(mine) for each in part), key=lambda m: (m.layer, m.attention)
    )
    return by_layer + gammas + noise


def record(model: Llama, loss: Callable[[int], Tensor]) -> Capture:
    """The attention problems of the first sequence, under exact attention."""
    with attending(model.cores(), SDPA), capture(model) as recording:
        loss(0).backward()
    model.zero_grad(set_to_none=True)
    return recording.result()


def _is_finite(model: Llama, loss: Callable[[int], Tensor], index: int) -> bool:
    with torch.no_grad(), attending(model.cores(), SDPA):
        return bool(loss(index).isfinite())


def layer(call: Call, specs: Mapping[str, AttentionSpec]) -> Iterator[Measured]:
    """Errors of a layer under each spec, by its name, and the layer's own numbers.

    sigma_q and sigma_k are deviations as attention gets them, after norm and rotation; rms_p,
    rms_dp and rms_ds are over the entries that take part, for a loss that is a mean over tokens.
    """
    squares = dict.fromkeys(("p", "dp", "ds"), 0.0)
    count = 0
    parts: dict[str, list[Comparison]] = {name: [] for name in specs}
    for of in head_groups(call):
        reference = exact(of.q, of.k, of.v, of.do, **of.options)
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


def _compare(call: Call, spec: AttentionSpec, reference: Exact) -> Comparison:
    return compare(trace(call.q, call.k, call.v, call.do, spec=spec, **call.options), reference)


def _gamma(norm: QKNorm, index: int) -> Measured:
    values: dict[str, float] = {}
    for name in ("gamma_q", "gamma_k"):
        gamma = whole(getattr(norm, name).detach())
        values[f"{name}_rms"] = float(gamma.square().mean().sqrt())
        values[f"{name}_max"] = float(gamma.abs().max())
    return Measured("layer", values, layer=index)


def _gradient(
    model: Llama,
    loss: Callable[[int], Tensor],
    attentions: Sequence[Attention],
    here: World,
    sequences: int,
    sharded: bool,
) -> Iterator[Measured]:
    """noise_scale and visible are in sequences; see `theory.noise`."""
    examples = range(sequences)
    with attending(model.cores(), SDPA):
        plain = gradients_of(model, loss, examples)
    own = moments(products(plain, plain, here, sharded=sharded))
    # An unbiased estimate of a square can come out below 0: the mean gradient is then not seen.
    seen = own.mean_square > 0
    yield Measured(
        "gradient",
        {
            "square": own.mean_square,
            "square_error": own.mean_square_error,
            "trace": own.trace,
            "noise_scale": noise_scale(own.trace, own.mean_square) if seen else math.inf,
        },
    )
    for attention in attentions:
        with attending(model.cores(), attention):
            error = gradients_of(model, loss, examples).less(plain)
        bias = moments(products(error, error, here, sharded=sharded))
        along = products(error, plain, here, sharded=sharded)
        apart = float(along.sum() - along.diagonal().sum()) / (sequences * (sequences - 1))
        yield Measured(
            "gradient",
            {
                "bias_square": bias.mean_square,
                "bias_square_error": bias.mean_square_error,
                "bias_trace": bias.trace,
                "bias_along": apart / own.mean_square if seen else math.nan,
                "visible": visible_batch(bias.mean_square, own.trace, bias.trace),
            },
            attention=attention.name,
        )
