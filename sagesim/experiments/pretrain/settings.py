"""What is trained, and how it is run: the first decides the numbers, the second does not."""

from __future__ import annotations

import json
import math
import types
import typing
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, TypeVar

import torch

from sagesim.experiments.pretrain.attention import Attention
from sagesim.experiments.pretrain.model import SIZES

DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""What products are computed in, by the word for it: bf16 under autocast, with float32 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that a run's numbers depend on; two runs that differ in one field show what that
    field does.

    Raises:
        ValueError: naming the field that cannot be, its value and why.
    """

    attention: str  #: see `sagesim.experiments.pretrain.attention.Attention.parse`
    size: str  #: of `SIZES`
    corpus: str  #: `Manifest.id`
    vocabulary: int  #: rows of the embedding
    context: int  #: tokens of a sequence
    tokens_per_step: int
    steps: int
    warmup: int  #: steps in which the learning rate rises from 0 to `lr`
    lr: float = 1e-3
    final_lr: float = 0.1  #: of the last step, in units of lr; a cosine leads there
    weight_decay: float = 0.1  #: of matrices; norms and gammas have none
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  #: the largest norm of a step's gradient
    tied: bool = True
    qk_norm: bool = False
    seed: int = 0  #: of weights, order of data, and stochastic rounding
    precision: str = "bf16"  #: of `DTYPES`
    evaluate_every: int = 100  #: steps; 0 for the end only
    evaluate_sequences: int = 64  #: held-out ones, the same each time
    monitor_every: int = 0  #: steps; 0 for the end only
    monitor: tuple[str, ...] = ()  #: attentions measured; none measures nothing
    monitor_sequences: int = 8  #: for the noise of the gradient; errors are those of the first

    def __post_init__(self) -> None:
        for each in (self.attention, *self.monitor):
            Attention.parse(each)
        if "sdpa" in self.monitor:
            raise ValueError("monitor: sdpa is what errors are measured against")
        if self.size not in SIZES:
            raise ValueError(f"size={self.size!r}; there are {', '.join(SIZES)}")
        if self.precision not in DTYPES:
            raise ValueError(f"precision={self.precision!r}; there are {', '.join(DTYPES)}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{name}={value} is below {least}")
        for name in ("final_lr", "beta1", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is not between 0 and 1")
        if not self.lr > 0 or not self.clip > 0:
            raise ValueError(f"lr={self.lr} and clip={self.clip} have to be positive")
        if self.tokens_per_step % self.context:
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} is no multiple of context={self.context}"
            )
        if self.warmup > self.steps:
            raise ValueError(f"warmup={self.warmup} is longer than steps={self.steps}")

    @property
    def sequences(self) -> int:
        """Of a step."""
        return self.tokens_per_step // self.context

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        return self.steps * self.tokens_per_step

    def learning_rate(self, step: int) -> float:
        """Of a step, counted from 0: linear to `lr` over the warmup, then half a cosine."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        rest = max(1, self.steps - 1 - self.warmup)
        cosine = (1 + math.cos(math.pi * (step - self.warmup) / rest)) / 2
        return self.lr * (self.final_lr + (1 - self.final_lr) * cosine)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Run:
        """What `to_json` wrote.

        Raises:
            ValueError: where it is something else.
        """
        return from_mapping(cls, json.loads(text))


_LEAST: Final = {
    "vocabulary": 2, "context": 1, "tokens_per_step": 1, "steps": 1, "warmup": 0,
    "weight_decay": 0, "evaluate_every": 0, "evaluate_sequences": 1, "monitor_every": 0,
    "monitor_sequences": 2, "seed": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How a run is run. The numbers are the same up to the order in which they are added up."""

    micro_batch: int = 8
    """Sequences that a process takes at a time. Under stochastic rounding they share their draws,
    so that then it does decide the numbers."""
    compile: bool = False  #: layers and loss, by torch.compile
    fsdp: bool = False  #: shard weights over the processes (FSDP2) instead of copying them (DDP)
    deterministic: bool = True  #: refuse what would not give the same bits again
    checkpoint_every: int = 500  #: steps; the last one has a checkpoint whatever this is
    tracker: str = "none"  #: of `sagesim.experiments.pretrain.trackers.TRACKERS`


_T = TypeVar("_T")


def from_mapping(kind: type[_T], values: dict[str, Any]) -> _T:
    """A dataclass of settings from JSON's or TOML's values.

    Raises:
        ValueError: naming the field that is unknown, missing or of another type.
    """
    hints = typing.get_type_hints(kind)
    known = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    if unknown := [name for name in values if name not in known]:
        raise ValueError(
            f"no setting is called {unknown[0]!r}; there are {', '.join(sorted(known))}"
        )
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
    for name, value in values.items():
        wanted = hints[name]
        if wanted is float and type(value) is int:
            values[name] = value = float(value)
        plain = tuple if isinstance(wanted, types.GenericAlias) else wanted
        if type(value) is not plain:
            raise ValueError(f"{name}={value!r} is no {plain.__name__}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(str(error).partition(") ")[2] or str(error)) from None
