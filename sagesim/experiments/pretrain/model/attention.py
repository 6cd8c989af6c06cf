"""The attention of a run, by name: `sdpa`, `emulator:LABEL` or `kernels:LABEL`.

Only this module of `pretrain` imports the kernels, and only when a run uses them.
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
    """An implementation of causal attention: one of `FAMILIES`, and a spec unless it is sdpa."""

    family: str
    spec: AttentionSpec | None = None

    @classmethod
    def parse(cls, name: str) -> Attention:
        """The attention that a name means: sdpa, emulator:LABEL or kernels:LABEL.

        Raises:
            ValueError: if the family or the label is unknown, the label is missing, or sdpa has
                one.

        >>> Attention.parse("emulator:sagebwd  dp=int8").name
        'emulator:sagebwd_all_int8'
        """
        family, colon, label = name.partition(":")
        if family not in FAMILIES:
            raise ValueError(
                f"attention {name!r}: unknown family {family!r}; "
                "use sdpa, emulator:LABEL or kernels:LABEL"
            )
        if (family == "sdpa") == bool(colon):
            raise ValueError(
                f"attention {name!r}: "
                + ("sdpa takes no label" if colon else f"{family} needs a label: {family}:sagebwd")
            )
        return cls(family, AttentionSpec.parse(label) if colon else None)

    @property
    def name(self) -> str:
        """The shortest name that `parse` reads as this attention."""
        return self.family if self.spec is None else f"{self.family}:{self.spec.label()}"

    @property
    def is_stochastic(self) -> bool:
        """Whether the spec rounds stochastically, and so draws random numbers."""
        return self.spec is not None and self.spec.rounding.mode is RoundingMode.STOCHASTIC

    def check(self, *, head_size: int, dtype: torch.dtype, device: str) -> None:
        """Check that this attention can be computed on a device.

        Raises:
            ValueError: if no kernel supports the spec, head size and dtype, or the device cannot
                run the kernels. The message gives the reason.
        """
        if self.family != "kernels" or self.spec is None:
            return
        from sagesim_kernels.interpreter import IS_INTERPRETED
        from sagesim_kernels.support import supports

        if device != ("cpu" if IS_INTERPRETED else "cuda"):
            raise ValueError(
                f"attention {self.name}: the kernels need a GPU, or a CPU and "
                f"TRITON_INTERPRET=1 in the environment; the device here is {device}"
            )
        support = supports(self.spec, head_size=head_size, dtype=dtype)
        if not support:
            raise ValueError(f"attention {self.name}: no kernel: {support}")


class AttentionCore(nn.Module):
    """The causal attention of one layer: q, k, v [batch, heads, n, d] -> o [batch, heads, n, d].

    `attention` can be replaced between forwards; see `use_attention`.

    Stochastic rounding is seeded from the run's seed, the layer and `draw`. The trainer sets `draw`
    before each forward. The fixed seed of a spec would repeat the same random numbers in every
    step, and their average error would bias the gradient.
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

    # torch.compile would compile a new graph for each seed, and many small graphs of the emulator.
    @torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]
    def _uncompiled(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if self.attention.is_stochastic:
            spec = replace(spec, rounding=Rounding.stochastic(rounding_seed(self)))
        return _attend(self.attention.family, q, k, v, spec)

    def extra_repr(self) -> str:
        return self.attention.name


def rounding_seed(core: AttentionCore) -> int:
    """The seed of stochastic rounding in the core's next forward.

    It is odd and below 2^31: Triton compiles a kernel again for integer arguments that are
    multiples of 16 or need 64 bits.
    """
    assert core.attention.spec is not None
    mixed = core.attention.spec.rounding.seed or 0
    for part in (core.seed, core.layer, core.draw):
        mixed = _mix(mixed ^ _mix(part))
    return (mixed >> 33) | 3


def _mix(x: int) -> int:
    """The finaliser of SplitMix64. Source: Steele, Lea, Flood, OOPSLA 2014."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@contextlib.contextmanager
def use_attention(cores: Sequence[AttentionCore], attention: Attention) -> Generator[None]:
    """Let the cores compute `attention` inside the block, and their own attention afterwards."""
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
