"""The cases of models: the shapes of their attention calls, and training steps of whole models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sagesim_kernels.bench.shape import Shape

MODEL_SPECS: Final = ("factored_qk", "fpa_bf16")
"""Specs that are timed at the shapes of models, whatever specs are timed elsewhere."""

SDPA: Final = ("sdpa flash", "sdpa cudnn")
"""The backends of PyTorch's attention that a user gets at these shapes."""

MODEL_PEERS: Final = (*SDPA, "flash-attn-4")

_TOKENS: Final = 16384
"""Tokens of a batch, as in the other timed cases."""

MODELS: Final[Mapping[str, Sequence[Shape]]] = {
    "tiny": [Shape(1, 4, 128, 64, True)],
    "few": [
        Shape(64, 12, 197, 64, False),
        Shape(8, 12, 256, 64, False),
        Shape(8, 16, 512, 64, True),
        Shape(32, 12, 512, 64, False),
        Shape(4, 16, 512, 128, True),
        Shape(2, 32, 512, 128, True, kv_heads=8),
    ],
    "short": [
        Shape(8, 16, 1024, 64, True),
        Shape(16, 12, 1024, 64, True),
        Shape(64, 16, 729, 72, False),
        Shape(4, 32, 2048, 128, True, kv_heads=8),
    ],
    "cross": [
        Shape(1, 24, 4608, 128, False, keys=512),
        Shape(8, 10, 4096, 64, False, keys=77),
    ],
    "grouped": [
        Shape(2, 32, 4096, 64, True, kv_heads=8),
        Shape(2, 28, 4096, 128, True, kv_heads=4),
        Shape(1, 8, 8192, 128, True, kv_heads=1),
        Shape(1, 32, 8192, 128, True, kv_heads=8),
    ],
    "ungrouped": [
        Shape(2, 32, 4096, 64, True),
        Shape(2, 28, 4096, 128, True),
        Shape(1, 8, 8192, 128, True),
        Shape(1, 32, 8192, 128, True),
    ],
    "long": [
        Shape(1, 24, 4608, 128, False),
        Shape(1, 24, 4250, 64, False),
        Shape(1, 12, 32760, 128, False),
    ],
    "sizes": [
        Shape(_TOKENS // n, 16, n, d, is_causal)
        for d in (72, 80, 96, 112)
        for n in (2048, 4096)
        for is_causal in (False, True)
    ],
    "wide": [
        Shape(8192 // n, 16, n, d, True, kv_heads=8) for d in (192, 256) for n in (4096, 8192)
    ],
}
"""Shapes of attention in models, in groups. The first is so small that its time is the host's.
"ungrouped" has the work of "grouped", with as many heads of k and v as of q."""

_TRAINED: Final = ((12, 768, 64, 1024), (12, 1024, 128, 4096), (6, 2048, 128, 16384))
"""Layers, width, head size and tokens of a sequence of the models that are trained."""


@dataclass(frozen=True, slots=True)
class ModelCase:
    """Contenders that are timed on the shape of a model's attention, also in a loop of calls."""

    group: str  #: of `MODELS`
    shape: Shape
    contenders: tuple[str, ...]
    part: str = "models"

    @property
    def key(self) -> str:
        """The name of the case in a record.

        >>> ModelCase("grouped", Shape(2, 32, 4096, 64, True, kv_heads=8), ()).key
        'models grouped b2 h32/8 n4096 d64 causal'
        >>> ModelCase("cross", Shape(8, 10, 4096, 64, False, keys=77), ()).key
        'models cross b8 h10 n4096x77 d64 full'
        """
        s = self.shape
        heads = f"{s.heads}" if s.kv_heads is None else f"{s.heads}/{s.kv_heads}"
        tokens = f"{s.tokens}" if s.keys is None else f"{s.tokens}x{s.keys}"
        return f"models {self.group} b{s.batch} h{heads} n{tokens} d{s.head_dim} {s.mask}"


@dataclass(frozen=True, slots=True)
class TrainingCase:
    """Contenders that are timed in a training step of a whole model, under a causal mask."""

    layers: int
    width: int
    head_dim: int
    tokens: int  #: of a sequence
    batch: int
    is_compiled: bool
    contenders: tuple[str, ...]

    @property
    def key(self) -> str:
        """The name of the case in a record.

        >>> TrainingCase(12, 768, 64, 1024, 16, True, ()).key
        'training l12 w768 d64 n1024 compiled'
        """
        how = "compiled" if self.is_compiled else "eager"
        return f"training l{self.layers} w{self.width} d{self.head_dim} n{self.tokens} {how}"


def model_cases() -> list[ModelCase]:
    """Speed at the shapes of `MODELS`."""
    contenders = (*MODEL_SPECS, *MODEL_PEERS)
    return [ModelCase(group, s, contenders) for group, shapes in MODELS.items() for s in shapes]


def training_cases() -> list[TrainingCase]:
    """A training step of each model, eager and compiled, of as many tokens as a speed case."""
    contenders = (*MODEL_SPECS, *SDPA)
    return [
        TrainingCase(*model, _TOKENS // model[-1], is_compiled, contenders)
        for is_compiled in (False, True)
        for model in _TRAINED
    ]
