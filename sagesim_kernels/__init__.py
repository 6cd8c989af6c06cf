"""Trainable INT8 attention on GPUs, in Triton and Gluon: the kernels that `sagesim` emulates.

The functions need triton and are imported when they are first used. `sagesim_kernels.integrations`
works without triton, with the emulator.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sagesim_kernels.api import attention, attention_varlen
    from sagesim_kernels.cards import default_spec
    from sagesim_kernels.measured_speed import PaysOff, pays_off
    from sagesim_kernels.support import Support, supports
    from sagesim_kernels.tracing import Coded, KernelTrace, trace

__all__ = [
    "Coded",
    "KernelTrace",
    "PaysOff",
    "Support",
    "attention",
    "attention_varlen",
    "default_spec",
    "pays_off",
    "supports",
    "trace",
]

_HOMES = {
    "attention": "api",
    "attention_varlen": "api",
    "default_spec": "cards",
    "PaysOff": "measured_speed",
    "pays_off": "measured_speed",
    "Support": "support",
    "supports": "support",
    "Coded": "tracing",
    "KernelTrace": "tracing",
    "trace": "tracing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("triton") is None:
        raise ModuleNotFoundError(
            "sagesim_kernels needs triton: pip install 'sagebwd[kernels]'", name="triton"
        )
    found = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
