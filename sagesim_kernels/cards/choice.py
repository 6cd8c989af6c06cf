"""The spec that is recommended for a GPU."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from sagesim.spec import FACTORED_QK, FPA_BF16, FPA_FP16, PRESETS, AttentionSpec
from sagesim_kernels.target import cuda_device

RECOMMENDED: Final = Path(__file__).with_name("recommended.json")
"""Written by `scripts/cards.py`."""


class DeviceProperties(Protocol):
    """What `torch.cuda.get_device_properties` returns, as far as it is used here."""

    @property
    def name(self) -> str: ...

    @property
    def major(self) -> int: ...

    @property
    def minor(self) -> int: ...


def default_spec(
    device: torch.device | str | int | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> AttentionSpec:
    """Return the spec that is recommended for a GPU.

    The recommendation is a prediction, by a model of the GPU, except on Hopper, where it rests on
    measured times: docs/cards.md. It is the fastest of the presets that are more accurate than the
    paper's scheme. It is a 16-bit preset unless the predicted gain of INT8 is larger than the error
    of the model. GPUs that are not modelled get `FACTORED_QK`. docs/cards.md says which presets are
    considered.

    No other function calls this one: pass its result, or any other spec, as `spec`.

    Args:
        device: a CUDA device; None for the current one.
        dtype: of the inputs; a 16-bit preset for float16 is `FPA_FP16`.

    Raises:
        ValueError: if the device is not a CUDA device, or PyTorch sees no GPU.
    """
    chosen = cuda_device(device, "default_spec")
    return recommended(torch.cuda.get_device_properties(chosen), dtype)


def recommended(properties: DeviceProperties, dtype: torch.dtype = torch.bfloat16) -> AttentionSpec:
    """Return the spec that `default_spec` recommends for a GPU with these properties."""
    found = _table().get(card_class(properties))
    spec = FACTORED_QK if found is None else PRESETS[found["spec"]]
    return FPA_FP16 if spec == FPA_BF16 and dtype is torch.float16 else spec


def card_class(properties: DeviceProperties) -> str:
    """Return the compute capability, and whether it is a consumer card.

    A GeForce multiplies 16-bit matrices with float32 sums at half the rate of other cards with the
    same compute capability.
    """
    kind = "consumer" if "GeForce" in properties.name else "data centre"
    return f"{properties.major}.{properties.minor} {kind}"


@cache
def _table() -> dict[str, dict[str, Any]]:
    return json.loads(RECOMMENDED.read_text(encoding="utf-8"))["classes"]
