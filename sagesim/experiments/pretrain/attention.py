"""The attention of a run, by name: `sdpa`, `emulator:LABEL` or `kernels:LABEL`.

The only room that imports the kernels, and only when they are asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sagesim
from sagesim.spec import AttentionSpec, Rounding, RoundingMode

FAMILIES: Final = ("sdpa", "emulator", "kernels")


@dataclass(frozen=True, slots=True)
class Attention:
    """A way to compute causal attention; see `parse`. The spec is None for sdpa only."""

    family: str
    spec: AttentionSpec | None = None

    @classmethod
    def parse(cls, name: str) -> Attention:
        """The attention of a name.

        Raises:
            ValueError: naming what is unknown.

        >>> Attention.parse("emulator:sagebwd  dp=int8").name
        'emulator:sagebwd_all_int8'
        """
        family, colon, label = name.partition(":")
        if family not in FAMILIES:
            raise ValueError(
                f"attention {name!r}: no {family!r}; "
                "there are sdpa, emulator:LABEL and kernels:LABEL"
            )
        if (family == "sdpa") == bool(colon):
            raise ValueError(
                f"attention {name!r}: "
                + ("sdpa takes no label" if colon else f"{family} needs a label: {family}:sagebwd")
            )
        return cls(family, AttentionSpec.parse(label) if colon else None)

    @property
    def name(self) -> str:
        """What `parse` makes this of."""
        return self.family if self.spec is None else f"{self.family}:{self.spec.label()}"

    @property
    def is_stochastic(self) -> bool:
        """Whether it draws random numbers."""
        return self.spec is not None and self.spec.rounding.mode is RoundingMode.STOCHASTIC

    def check(self, *, head_size: int, dtype: torch.dtype, device: str) -> None:
        """Raise ValueError where it cannot be computed there, naming the reason."""
        if self.family != "kernels" or self.spec is None:
            return
        from sagesim_kernels.support import IS_INTERPRETED, supports

        if device != ("cpu" if IS_INTERPRETED else "cuda"):
            raise ValueError(
                f"attention {self.name}: the kernels run on a GPU, or on a CPU with "
                f"TRITON_INTERPRET=1 in the environment, and not here on {device}"
            )
        support = supports(self.spec, head_size=head_size, dtype=dtype)
        if not support:
            raise ValueError(f"attention {self.name}: no kernel: {support}")


class Core(nn.Module):
    """q, k, v [batch, heads, n, d] -> o; causal. What it computes by can be changed at any time.

    Under stochastic rounding, the random numbers are a function of the run's seed, the layer and
    `draw`, which the trainer sets before each forward. A spec's own seed would give every step
    the same numbers, and what they are wrong by on average would be a bias.
    """

    def __init__(self, attention: Attention, layer: int, seed: int) -> None:
        super().__init__()
        self.attention, self.layer, self.seed, self.draw = attention, layer, seed, 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = self.attention.spec
        if spec is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.attention.is_stochastic or self.attention.family == "emulator":
            return self._uncompiled(q, k, v, spec)
        return _attend(self.attention.family, q, k, v, spec)

    # A new seed would be a new graph to the compiler, and the emulator is many small ones.
    @torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]
    def _uncompiled(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if self.attention.is_stochastic:
            spec = replace(spec, rounding=Rounding.stochastic(rounding_seed(self)))
        return _attend(self.attention.family, q, k, v, spec)

    def extra_repr(self) -> str:
        return self.attention.name


def rounding_seed(core: Core) -> int:
    """The seed of a core's next forward: below 2^31 and odd, so that Triton, which compiles a
    kernel again for integers that are wide or multiples of 16, compiles one."""
    assert core.attention.spec is not None
    mixed = core.attention.spec.rounding.seed or 0
    for part in (core.seed, core.layer, core.draw):
        mixed = _mix(mixed ^ _mix(part))
    return (mixed >> 33) | 3


def _mix(x: int) -> int:
    """SplitMix64's finaliser. Source: Steele, Lea, Flood, OOPSLA 2014."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@contextlib.contextmanager
def attending(cores: Sequence[Core], attention: Attention) -> Generator[None]:
    """The cores computing by `attention` inside, and as before afterwards."""
    before = [core.attention for core in cores]
    for core in cores:
        core.attention = attention
    try:
        yield
    finally:
        for core, own in zip(cores, before, strict=True):
            core.attention = own


def _attend(family: str, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    if family == "emulator":
        return sagesim.attention(q, k, v, spec=spec, is_causal=True)
    from sagesim_kernels import attention

    o = attention(q, k, v, spec=spec, is_causal=True)
    assert isinstance(o, Tensor)
    return o
