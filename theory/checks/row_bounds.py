"""Measurements of `theory.row_bounds`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from sagesim import FP8_GRADIENTS, AttentionSpec, Precision
from theory.checks.check import Check, bounded
from theory.checks.samples import Sample, captured, gaussian, outlier_channels
from theory.row_bounds import ds_bound, excess, p_bound

TOPIC: Final = "row_bounds"
_TOKENS: Final = 256
INT8: Final = AttentionSpec.parse(
    "fp8_gradients dv=int8@row_bound,block dq=int8@row_bound,block dk=int8@row_bound,block"
)


def attained(tokens: int = _TOKENS) -> Sample:
    """A row of dS that reaches its bound but for 1 / tokens.

    One key has almost the whole of a query's P, and a delta of almost its dP. The other keys have
    V of the same length and the opposite sign, and P of 1 / tokens each.
    """
    q, k, v, do = (torch.zeros(1, 1, tokens, 8) for _ in range(4))
    k[..., 0] = torch.linspace(-1e-3, 1e-3, tokens)
    q[..., 0], do[..., 0] = 1.0, 1.0
    v[..., 0] = 1.0
    v[..., tokens // 2 :, 0] = -1.0
    return Sample(name="V of two signs, parallel to dO", q=q, k=k, v=v, do=do)


def checks() -> Iterator[Check]:
    """Codes, and the elements of the maps, against their bounds."""
    inputs: dict[str, tuple[Sample, ...]] = {
        s.name: (s,)
        for s in (
            gaussian(1.0, _TOKENS),
            gaussian(5.0, _TOKENS, is_causal=True),
            outlier_channels(_TOKENS),
            attained(),
        )
    }
    inputs[f"capture, all layers, N {_TOKENS}"] = captured(_TOKENS)
    for name, samples in inputs.items():
        for precision, spec in ((Precision.FP8_E4M3, FP8_GRADIENTS), (Precision.INT8, INT8)):
            yield _codes(f"{precision.value}, {name}", samples, spec)
        yield from _maps(name, samples)


def _codes(name: str, samples: tuple[Sample, ...], spec: AttentionSpec) -> Check:
    largest = {Precision.INT8: 127.0}.get(spec.dv.precision, 448.0)
    codes = [
        x.codes.float().abs().amax()
        for sample in samples
        for key, x in sample.trace(spec).operands.items()
        if key.startswith("d")
    ]
    return bounded(
        TOPIC,
        "no code above the largest",
        name,
        bound=torch.tensor(largest),
        measured=torch.stack(codes).amax(),
    )


def _maps(name: str, samples: tuple[Sample, ...]) -> Iterator[Check]:
    """The float32 maps of the emulator against the exact bounds of these maps."""
    for tensor in ("p", "ds"):
        parts, bounds = list[torch.Tensor](), list[torch.Tensor]()
        for sample in samples:
            t = sample.trace(FP8_GRADIENTS)
            x = t.p_recompute if tensor == "p" else t.ds
            do, v = (y.half().double() for y in (sample.do, sample.v))
            bound = (p_bound(x) if tensor == "p" else ds_bound(t.p_recompute, do, v, t.delta)) * (
                1 + excess(do.shape[-1])
            )
            parts.append(x.abs().amax(-1).double().flatten())
            bounds.append(bound.flatten())
        yield bounded(
            TOPIC,
            f"rows of {'P' if tensor == 'p' else 'dS'} below the bound",
            name,
            bound=torch.cat(bounds),
            measured=torch.cat(parts),
        )
