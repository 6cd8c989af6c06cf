"""Specs as labels, which operators of PyTorch and torch.compile can take."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch

from sagesim.spec import (
    SITES,
    AttentionSpec,
    Delta,
    Granularity,
    MatmulSpec,
    Precision,
    Rounding,
    RoundingMode,
    Smoothing,
)

_labels: Final[dict[int, tuple[AttentionSpec, str]]] = {}
"""id of a spec -> the spec, which keeps the id its own, and its label. Its hash takes 10 us."""
_MOST_LABELS: Final = 256
parse = lru_cache(maxsize=256)(AttentionSpec.parse)


def label_of(spec: AttentionSpec) -> str:
    """Return spec.label(), cached. torch.compile treats it as a constant and guards every field."""
    if not torch.compiler.is_compiling():
        known = _labels.get(id(spec))
        return _remember(spec) if known is None else known[1]
    # Dynamo does not treat an AttentionSpec as a constant, but it traces strings.
    words: list[str] = []
    for site in SITES:
        matmul: MatmulSpec = getattr(spec, site)
        words += [matmul.precision.value, matmul.lhs.value, matmul.rhs.value]
    words += ["1" if spec.smoothing.q else "0", "1" if spec.smoothing.k else "0"]
    seed = spec.rounding.seed
    words += [spec.rounding.mode.value, "-" if seed is None else _bits(seed)]
    words += [spec.delta.value, _bits(spec.block_q), _bits(spec.block_k)]
    return _label_of_fields(" ".join(words))


def _bits(number: int) -> str:
    """Return the number as 32 binary digits.

    torch.compile guards every digit of this string, while it may make an integer dynamic.
    """
    return "".join("1" if number // 2**i % 2 == 1 else "0" for i in reversed(range(32)))


@torch.compiler.assume_constant_result
def _label_of_fields(fields: str) -> str:
    """Return the label of the spec whose fields `label_of` has joined."""
    *words, q, k, mode, seed, delta, block_q, block_k = fields.split()
    triples = [words[i : i + 3] for i in range(0, len(words), 3)]
    matmuls = {
        site: MatmulSpec(Precision(precision), Granularity(lhs), Granularity(rhs))
        for site, (precision, lhs, rhs) in zip(SITES, triples, strict=True)
    }
    spec = AttentionSpec(
        **matmuls,
        smoothing=Smoothing(q=q == "1", k=k == "1"),
        rounding=Rounding(RoundingMode(mode), None if seed == "-" else int(seed, 2)),
        delta=Delta(delta),
        block_q=int(block_q, 2),
        block_k=int(block_k, 2),
    )
    return spec.label()


def _remember(spec: AttentionSpec) -> str:
    if len(_labels) >= _MOST_LABELS:
        _labels.clear()
    label = spec.label()
    _labels[id(spec)] = spec, label
    return label
