"""Attention problems for tests, made of the kinds of tensor that fuzzing uses as well."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sagesim import AttentionProblem
from sagesim.fuzzing.inputs import (
    Builder,
    constant,
    gaussian,
    half_integer_ties,
    huge_gain,
    offset,
    outlier_channel,
    outlier_token,
    subnormal,
    tiny_gain,
    zero_block,
    zeros,
)

MODERATE: dict[str, Builder] = {f.__name__: f for f in (gaussian, zero_block, constant)}
"""Kinds with logits so small that a first-order analysis of float32's errors applies."""

MILD: dict[str, Builder] = {
    f.__name__: f for f in (gaussian, outlier_channel, zero_block, half_integer_ties, constant)
}
"""Kinds that neither overflow nor underflow in attention under any spec."""

NASTY: dict[str, Builder] = MILD | {
    f.__name__: f for f in (outlier_token, zeros, offset, tiny_gain, subnormal)
}
"""Kinds that float16 represents, with extreme values."""

EXTREME: dict[str, Builder] = NASTY | {huge_gain.__name__: huge_gain}
"""Kinds for tests that quantize a single tensor."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Case(AttentionProblem):
    """An attention problem whose repr gives its shapes and the kinds of its tensors."""

    do: Tensor
    seqused_k: Tensor | None = None  #: lengths of which key_mask is the mask
    kinds: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """A short description for failing examples, without the elements."""
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in self.tensors.items())
        plain = {name: value for name, value in self.options.items() if name not in self.tensors}
        return f"Case({shapes}, {'/'.join(self.kinds)}, {plain})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The text that hypothesis prints."""
        printer.text(repr(self))

    @property
    def kernel_options(self) -> dict[str, Any]:
        """The options as keyword arguments of the kernels, with the lengths if there are any."""
        if self.seqused_k is None:
            return self.options
        return self.options | {"key_mask": None, "seqused_k": self.seqused_k}

    @property
    def sdpa_options(self) -> dict[str, Any]:
        """The options that SDPA has, as its keyword arguments."""
        names = ("is_causal", "attn_mask", "scale", "enable_gqa")
        return {name: getattr(self, name) for name in names}

    def to(self, dtype: torch.dtype) -> "Case":
        return self.map(lambda x: x.to(dtype))


def case(
    *,
    seed: int,
    n_q: int,
    n_k: int,
    d: int,
    heads: tuple[int, ...] = (1, 1),
    d_v: int | None = None,
    kinds: tuple[Builder, Builder, Builder, Builder] = (gaussian,) * 4,
    **options: Any,
) -> Case:
    """A case whose q, k, v and do have these kinds."""
    rng = np.random.default_rng(seed)
    d_v = d if d_v is None else d_v
    shapes = ((n_q, d), (n_k, d), (n_k, d_v), (n_q, d_v))
    q, k, v, do = (
        torch.from_numpy(build(rng, (*heads, *shape)))
        for build, shape in zip(kinds, shapes, strict=True)
    )
    names = tuple(f"{build.__name__}" for build in kinds)
    return Case(q=q, k=k, v=v, do=do, kinds=names, **options)


def random_mask(seed: int, shape: tuple[int, ...], *, density: float) -> Tensor:
    """A random boolean mask. About a tenth of its rows attend to nothing."""
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < density
    mask &= rng.random((*shape[:-1], 1)) < 0.9
    return torch.from_numpy(mask)
