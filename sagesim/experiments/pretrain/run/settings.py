"""The settings of a run: `Run` determines its numbers, `Machine` only how they are computed."""

from __future__ import annotations

import json
import math
import types
import typing
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, TypeVar

import torch

from sagesim.experiments.pretrain.model.attention import Attention
from sagesim.experiments.pretrain.model.llama import SIZES

DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""The dtype of matrix products, by name. bf16 uses autocast; weights are float32 in both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that the numbers of a run depend on.

    Two runs that differ in one field therefore show the effect of that field.

    Raises:
        ValueError: if a field has an invalid value. The message names the field and the value.
    """

    attention: str  #: see `sagesim.experiments.pretrain.model.attention.Attention.parse`
    size: str  #: a key of `SIZES`
    corpus: str  #: `Manifest.id`
    vocabulary: int  #: rows of the embedding
    context: int  #: tokens of a sequence
    tokens_per_step: int
    steps: int
    warmup: int  #: steps in which the learning rate rises linearly to `lr`
    lr: float = 1e-3  #: the largest learning rate
    final_lr: float = 0.1  #: see `learning_rate`, as a fraction of `lr`
    weight_decay: float = 0.1  #: of matrices; vectors have no weight decay
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  #: the largest norm of a step's gradient
    tied: bool = True  #: whether the head uses the embedding's weights
    qk_norm: bool = False
    qk_gain: float = 0.0  #: the gains of QK-norm, which are then not trained; 0: they are trained
    seed: int = 0  #: of weights, order of data, and stochastic rounding
    precision: str = "bf16"  #: a key of `DTYPES`
    evaluate_every: int = 100  #: steps; 0 evaluates after the last step only
    evaluate_sequences: int = 64  #: held-out sequences, the same each time
    monitor_every: int = 0  #: steps; 0 measures after the last step only
    monitor: tuple[str, ...] = ()  #: attentions to measure; empty measures nothing
    monitor_sequences: int = 8
    """Sequences for the noise of the gradient; errors of layers use the first.

    Standard errors are reliable from 256 sequences on (`theory.noise.sample_moments`)."""
    bias_sequences: int = 0
    """Sequences for the bias of the gradient after the first and the last step; 0: no measurement.

    See `sagesim.experiments.pretrain.diagnostics.bias`. The attentions are those of `monitor`."""

    def __post_init__(self) -> None:
        for each in (self.attention, *self.monitor):
            Attention.parse(each)
        if "sdpa" in self.monitor:
            raise ValueError("monitor: sdpa is the reference of the errors; it cannot be measured")
        if self.size not in SIZES:
            raise ValueError(f"size={self.size!r} is not one of {', '.join(SIZES)}")
        if self.precision not in DTYPES:
            raise ValueError(f"precision={self.precision!r} is not one of {', '.join(DTYPES)}")
        for name, least in _MINIMUM.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{name}={value} is not a finite number of at least {least}")
        if not 0 <= self.final_lr <= 1:
            raise ValueError(f"final_lr={self.final_lr} is not between 0 and 1")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not at least 0 and below 1")
        if not 0 < self.lr < math.inf or not self.clip > 0:
            raise ValueError(f"lr={self.lr} and clip={self.clip} must be positive, and lr finite")
        if self.tokens_per_step % self.context:
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} is not a multiple of "
                f"context={self.context}"
            )
        if self.qk_gain and not self.qk_norm:
            raise ValueError(f"qk_gain={self.qk_gain} is of QK-norm, and qk_norm is not set")
        if self.bias_sequences % 2:
            raise ValueError(f"bias_sequences={self.bias_sequences} has no two equal halves")
        if self.warmup > self.steps:
            raise ValueError(f"warmup={self.warmup} is longer than steps={self.steps}")

    @property
    def sequences(self) -> int:
        """The number of sequences of a step."""
        return self.tokens_per_step // self.context

    @property
    def tokens(self) -> int:
        """The number of tokens of the whole run."""
        return self.steps * self.tokens_per_step

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0.

        It rises linearly to `lr` over the warmup, then falls by half a cosine to `final_lr * lr` in
        the last step. If at most one step follows the warmup, it does not fall.
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        rest = max(1, self.steps - 1 - self.warmup)
        cosine = (1 + math.cos(math.pi * (step - self.warmup) / rest)) / 2
        return self.lr * (self.final_lr + (1 - self.final_lr) * cosine)

    def to_json(self) -> str:
        """All fields as a JSON object, which `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Run:
        """The run that `to_json` wrote.

        Raises:
            ValueError: if the text is not JSON or not the fields of a run.
        """
        return from_mapping(cls, json.loads(text))


_MINIMUM: Final = {
    "vocabulary": 2, "context": 1, "tokens_per_step": 1, "steps": 1, "warmup": 0,
    "weight_decay": 0, "evaluate_every": 0, "evaluate_sequences": 1, "monitor_every": 0,
    "monitor_sequences": 2, "bias_sequences": 0, "qk_gain": 0, "seed": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How a run is executed. It changes the numbers only by the order of floating-point sums."""

    micro_batch: int = 8
    """Sequences of one forward and backward in a process.

    With stochastic rounding the sequences of a micro-batch share random numbers. Then the
    micro-batch size does change the numbers.
    """
    compile: bool = False  #: whether torch.compile compiles the layers and the loss
    fsdp: bool = False  #: shard the weights over processes (FSDP2) instead of copying them (DDP)
    deterministic: bool = True  #: raise an error instead of running a non-deterministic algorithm
    checkpoint_every: int = 500  #: steps; the last step always writes a checkpoint
    tracker: str = "none"  #: one of `sagesim.experiments.pretrain.run.trackers.TRACKERS`


_T = TypeVar("_T")


def from_mapping(kind: type[_T], values: dict[str, Any]) -> _T:
    """Make a dataclass of settings from the values of a JSON or TOML object.

    Lists become tuples, and an int becomes a float where the field is a float.

    Raises:
        ValueError: if a field is unknown, missing or of another type. The message names the field.
    """
    hints = typing.get_type_hints(kind)
    known = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    if unknown := [name for name in values if name not in known]:
        raise ValueError(
            f"no setting is called {unknown[0]!r}; the settings are {', '.join(sorted(known))}"
        )
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
    for name, value in values.items():
        wanted = hints[name]
        if wanted is float and type(value) is int:
            values[name] = value = float(value)
        plain = tuple if isinstance(wanted, types.GenericAlias) else wanted
        if type(value) is not plain:
            raise ValueError(f"{name}={value!r} is not of type {plain.__name__}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(str(error).partition(") ")[2] or str(error)) from None
