"""Whether the kernels are faster than PyTorch's attention for a call, from measured calls.

`measured_speed.json` beside this file has the measured ratios of each GPU that was measured.
`python -m sagesim_kernels.bench.export` writes it from a record of the benchmark.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from sagesim.checks import check_type, is_number
from sagesim.problem import check_flag, check_spec
from sagesim.spec import FACTORED_QK, AttentionSpec
from sagesim_kernels.target import cuda_device

MEASURED: Final = Path(__file__).with_suffix(".json")
"""Written by `sagesim_kernels.bench.export`."""

REACH: Final = {"work": 2.0, "queries": 1.0, "keys": 1.0, "head size": 0.25}
"""How far a measured call may be from another one to say something about it, in octaves."""

_HEAD_CLASS: Final = 64
"""Head sizes are in one class if they need the same multiple of it: kernels pad channels."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """The shape of a call: q [batch, heads, queries, head_size], k [batch, kv_heads, keys, ...]."""

    batch: int
    heads: int
    queries: int
    head_size: int
    kv_heads: int
    keys: int
    is_causal: bool

    @property
    def kind(self) -> tuple[bool, bool, bool, int]:
        """What must be equal for a ratio to carry over.

        The mask, whether it is causal over other numbers of queries than keys, whether heads are
        grouped, and the class of the head size.
        """
        uneven = self.is_causal and self.queries != self.keys
        grouped = self.heads != self.kv_heads
        return self.is_causal, uneven, grouped, -(-self.head_size // _HEAD_CLASS)

    def octaves_to(self, other: CallShape) -> dict[str, float]:
        """How far another call is, by the keys of `REACH`. Work is B H N M d."""
        pairs = {
            "work": (self._work(), other._work()),
            "queries": (self.queries, other.queries),
            "keys": (self.keys, other.keys),
            "head size": (self.head_size, other.head_size),
        }
        return {what: abs(math.log2(x / y)) for what, (x, y) in pairs.items()}

    def _work(self) -> int:
        return self.batch * self.heads * self.queries * self.keys * self.head_size


@dataclass(frozen=True, slots=True)
class PaysOff:
    """The expected speed of a call relative to PyTorch's attention. True if it is above 1.

    False also if it is not known: `ratio` is then None, and `reason` says why.
    """

    ratio: float | None
    """The time of PyTorch's fastest backend, divided by that of `attention`."""

    includes_host: bool
    """Whether the times are those of eager calls in a loop, or of the GPU alone."""

    machine: str | None
    """The GPU and the software of the neighbours, of each record that they are from; without
    neighbours, of all records of this GPU. None if it was not measured."""

    neighbours: Mapping[str, float]
    """The measured calls that the ratio comes from, and their ratios."""

    reason: str | None
    """Why the ratio is not known; None if it is."""

    def __bool__(self) -> bool:
        return self.ratio is not None and self.ratio > 1

    def __str__(self) -> str:
        if self.ratio is None:
            return f"not measured: {self.reason}"
        time = "time with the host's" if self.includes_host else "time of the GPU alone"
        return (
            f"{self.ratio:.2f} times as fast as PyTorch's attention, {time}, from "
            f"{len(self.neighbours)} measured calls on {self.machine}"
        )


def pays_off(
    q_shape: Sequence[int],
    k_shape: Sequence[int] | None = None,
    *,
    spec: AttentionSpec = FACTORED_QK,
    is_causal: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    host: bool = True,
    device: torch.device | str | int | None = None,
) -> PaysOff:
    """Return whether `attention` is faster than the fastest backend of PyTorch's SDPA.

    The answer is for a forward and backward, and comes from measured calls, not from a model. A
    measured call counts if spec, dtype and GPU are the same, the mask is the same, heads are or are
    not grouped in both, head sizes need the same multiple of 64, and every quantity of `REACH` is
    near: work within a factor of 4, queries and keys within 2, head sizes within 1.19. The
    logarithm of the ratio is the mean over these calls, weighted by the inverse square of the
    distance. A call that was measured has its own ratio. If no measured call counts, the answer
    is that it is not known.

    Windows, padding, sinks, softcap and packed sequences were not measured. Versions of PyTorch and
    cuDNN other than those of `machine` may have other ratios.

    Args:
        q_shape: [..., heads, n_q, d].
        k_shape: [..., kv heads, n_k, d], of k and v; the shape of q by default.
        spec: as for `attention`.
        is_causal: as for `attention`.
        dtype: of q, k and v.
        host: count the host's time, as in a loop of eager calls. False: GPU time alone, as in a
            CUDA graph, or where other work keeps the GPU busy.
        device: a CUDA device; None for the current one.

    Raises:
        TypeError: if spec is not an AttentionSpec, a shape is no sequence of integers, is_causal or
            host is not True or False, or dtype is not a torch.dtype.
        ValueError: if the shapes do not fit, if the device is not a CUDA device, or if PyTorch sees
            no GPU.

    Source: the part `models` of `python -m sagesim_kernels.bench`; docs/speed.md has its tables.

    >>> from sagesim_kernels import pays_off
    >>> answer = pays_off((2, 32, 4096, 64), is_causal=True)  # doctest: +SKIP
    >>> if answer: ...  # doctest: +SKIP
    """
    check_spec(spec)
    for flag, value in (("is_causal", is_causal), ("host", host)):
        check_flag(flag, value)
    check_type("dtype", dtype, torch.dtype, "a torch.dtype, such as torch.float16")
    _check_shape("q", q_shape)
    if k_shape is None:
        k_shape = q_shape
    _check_shape("k", k_shape)
    call = call_shape(q_shape, k_shape, is_causal)
    gpu = torch.cuda.get_device_properties(cuda_device(device, "pays_off")).name
    return expected(_table(), gpu, call, spec.label(), dtype, includes_host=host)


def _check_shape(name: str, shape: Any) -> None:
    if isinstance(shape, torch.Tensor):
        raise TypeError(f"{name}_shape is a tensor; pass {name}.shape")
    if not isinstance(shape, Sequence) or not all(is_number(n, int) for n in shape):
        raise TypeError(f"{name}_shape is {reprlib.repr(shape)}; it must be a sequence of integers")


def call_shape(q_shape: Sequence[int], k_shape: Sequence[int], is_causal: bool) -> CallShape:
    """Return the shape of a call.

    Raises:
        ValueError: if an axis is missing or empty, or if the shapes do not fit; it names them.
    """
    q, k = tuple(q_shape), tuple(k_shape)
    for name, shape in (("q", q), ("k", k)):
        if len(shape) < 3 or any(n < 1 for n in shape):
            raise ValueError(
                f"{name} has shape {shape}; it must be [..., heads, tokens, d] above 0"
            )
    (*batch, heads, queries, d), (*k_batch, kv_heads, keys, k_d) = q, k
    if batch != k_batch or d != k_d or heads % kv_heads:
        raise ValueError(
            f"q has shape {q} and k has shape {k}; the leading axes and the head size must be "
            "equal, and the heads of q a multiple of those of k"
        )
    return CallShape(math.prod(batch), heads, queries, d, kv_heads, keys, is_causal)


def expected(
    table: Mapping[str, Any],
    gpu: str,
    call: CallShape,
    label: str,
    dtype: torch.dtype,
    *,
    includes_host: bool,
) -> PaysOff:
    """Return the answer of `pays_off` from a table of measured calls.

    Args:
        table: by GPU, as in `MEASURED`.
        gpu: its name, as PyTorch gives it.
        label: of the spec.
    """

    def unknown(reason: str, machine: str | None = None) -> PaysOff:
        return PaysOff(None, includes_host, machine, {}, reason)

    if gpu not in table:
        measured = ", ".join(table) or "no GPU"
        return unknown(f"the table has measurements of {measured}, none of {gpu}")
    calls = table[gpu]["calls"]
    machine = _machines(table[gpu], calls)
    if str(dtype) != f"torch.{table[gpu]['dtype']}":
        return unknown(f"{dtype}; the measured calls are in {table[gpu]['dtype']}", machine)
    figure = "wall" if includes_host else "gpu"
    points = {
        key: (CallShape(**each["shape"]), each[figure][label])
        for key, each in calls.items()
        if label in each[figure]
    }
    if not points:
        return unknown(f"spec {label!r} was not measured", machine)
    near = _near(call, points.items())
    if not near:
        return unknown(f"no measured call is near {call}", machine)
    ratios = {key: points[key][1] for key in near}
    exact = [key for key, distance in near.items() if distance == 0]
    weights = dict.fromkeys(exact, 1.0) or {key: x**-2 for key, x in near.items()}
    logs = sum(w * math.log(ratios[key]) for key, w in weights.items()) / sum(weights.values())
    used = {key: ratios[key] for key in weights}
    return PaysOff(math.exp(logs), includes_host, _machines(table[gpu], used), used, None)


def _machines(one: Mapping[str, Any], keys: Iterable[str]) -> str:
    """The GPU and the software of some calls, of each of their records."""
    numbers = sorted({one["calls"][key]["record"] for key in keys})
    return "; ".join(dict.fromkeys(one["records"][i]["machine"] for i in numbers))


def _near(
    call: CallShape, points: Iterable[tuple[str, tuple[CallShape, float]]]
) -> dict[str, float]:
    """The measured calls that count, and their distances: 1 for each reach in one quantity."""
    found: dict[str, float] = {}
    for key, (shape, _) in points:
        if shape.kind != call.kind:
            continue
        octaves = call.octaves_to(shape)
        reaches = [octaves[what] / reach for what, reach in REACH.items()]
        if max(reaches) <= 1:
            found[key] = math.hypot(*reaches)
    return found


@cache
def _table() -> dict[str, Any]:
    return json.loads(MEASURED.read_text(encoding="utf-8"))
