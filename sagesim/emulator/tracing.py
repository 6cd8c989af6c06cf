"""Run the emulator and record every intermediate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Unpack

import torch
from torch import Tensor

from sagesim.emulator.forward import SmoothedQK
from sagesim.emulator.hooks import Hooks, Place
from sagesim.emulator.layout import FlatProblem, flatten
from sagesim.emulator.passes import run
from sagesim.emulator.quantization import Operand, QTensor, as_qtensor, from_tiles
from sagesim.emulator.tiling import Panel
from sagesim.problem import AttentionOptions, AttentionProblem
from sagesim.read_only import reduce_read_only
from sagesim.shapes import Float
from sagesim.short_repr import short_repr
from sagesim.spec import AttentionSpec

_MASKED_VALUE: Final = {
    "s": -math.inf,
    "s_recompute": -math.inf,
    "p_recompute": 0.0,
    "dp": 0.0,
    "ds": 0.0,
}
"""The maps that can be recorded, and the value of their masked entries."""


class Vanished(NamedTuple):
    """The shares of an operand that become 0 when it is rounded to codes."""

    numbers: float  #: of the numbers that are not 0: those whose code is 0
    rows: float  #: of the rows (tokens, queries) that are not 0: those of which every code is 0

    @classmethod
    def of(cls, x: Tensor, codes: Tensor) -> Vanished:
        """Of x [..., n, m], before it is rounded, and its codes. 0 if all of x is 0."""
        some = x != 0
        # FP8 has two zeros, which differ in the top bit.
        bits = codes.view(torch.uint8) & 0x7F if codes.dtype.is_floating_point else codes
        kept = (bits != 0).logical_and_(some)
        rows, numbers = some.any(-1), int(some.count_nonzero())
        lost = rows & ~kept.any(-1)
        return cls(
            (numbers - int(kept.count_nonzero())) / max(numbers, 1),
            int(lost.count_nonzero()) / max(int(rows.count_nonzero()), 1),
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """Every intermediate of one emulated attention; maps are [*heads, n_q, n_k].

    Float32 (float64 for float64 inputs), except o and the gradients dq, dk, dv and dsinks, which
    have the dtypes of the inputs. No tensor requires a gradient.
    Masked entries are -inf in s and 0 in p, dp and ds. With a softcap, s is the capped logits, and
    ds the gradient of the logits before the cap.
    """

    spec: AttentionSpec
    s: Tensor  #: the forward's logits; the constant that smoothing K subtracts is added back
    p: Tensor  #: softmax of s, before it is rounded for PV
    o: Tensor
    lse: Tensor  #: logsumexp of s, natural logarithm
    delta: Tensor
    dp: Tensor
    ds: Tensor  #: before it is rounded for dQ and dK
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None  #: [heads]; None without sinks
    s_recompute: Tensor  #: the backward's logits; equal to s if qk_recompute equals qk
    p_recompute: Tensor  #: the backward's P, exp(s_recompute - lse), before it is rounded for dV
    operands: Mapping[str, QTensor]
    """Codes and scales of every quantized operand, by "site.tensor", such as "dq.ds".

    Operands k and v have the leading shape of k; the others have that of q. With scales per row
    bound, "dv.do" and "dk.q" are dO and Q with the rows multiplied by the scales of P and dS.
    """
    vanished: Mapping[str, Vanished]
    """By the same keys, how much of each operand becomes 0 when it is rounded to codes."""

    __repr__ = short_repr
    __reduce__ = reduce_read_only


def trace(
    q: Float[Tensor, "*heads n_q d"] | AttentionProblem,
    k: Float[Tensor, "*kv_heads n_k d"] | None = None,
    v: Float[Tensor, "*kv_heads n_k d_v"] | None = None,
    do: Float[Tensor, "*heads n_q d_v"] | None = None,
    *,
    spec: AttentionSpec,
    **options: Unpack[AttentionOptions],
) -> Trace:
    """Run attention and its backward under `spec` and return every intermediate.

    o, dq, dk, dv and dsinks are bit-identical to those of `attention` and its backward for the
    gradient do of o, also under autocast. Whole maps are stored: memory grows with n_q * n_k, by
    about 45 bytes per entry, and by 60 while it runs.

    Args: those of `sagesim.attention`, and do, the gradient of o. Or one `AttentionProblem`.

    Raises: as `sagesim.attention`. Also TypeError if do is no dense tensor, and ValueError if it is
        missing or differs from o in shape, dtype or device.

    >>> from sagesim import SAGEBWD
    >>> t = trace(*torch.randn(4, 1, 1, 8, 4), spec=SAGEBWD)
    >>> t.operands["dq.ds"].codes.shape, t.operands["dq.ds"].codes.dtype
    (torch.Size([1, 1, 8, 8]), torch.int8)
    """
    problem = AttentionProblem.of(q, k, v, do, **options)
    x = flatten(problem, spec)
    problem.check_gradient()
    recorder = Recorder(x, maps=frozenset(_MASKED_VALUE), operands=True)
    passes = run(x, problem.gradient, recorder)
    forward = ForwardSoftmax.of(x, recorder.maps["s"], passes.lse_smoothed, passes.lse)
    dsinks = passes.dsinks
    if dsinks is not None and problem.sinks is not None:
        dsinks = dsinks.to(problem.sinks.dtype)
    operands = recorder.quantized()
    before = recorder.before_rounding(problem.gradient)
    return Trace(
        spec=spec,
        s=forward.s,
        p=forward.p,
        o=passes.o,
        lse=forward.lse,
        delta=x.query_heads(recorder.row_delta),
        dp=x.query_heads(recorder.maps["dp"]),
        ds=x.query_heads(recorder.maps["ds"]),
        dq=passes.dq,
        dk=passes.dk,
        dv=passes.dv,
        dsinks=dsinks,
        s_recompute=x.query_heads(_before_smoothing(x, recorder.maps["s_recompute"])),
        p_recompute=x.query_heads(recorder.maps["p_recompute"]),
        operands=MappingProxyType(operands),
        vanished=MappingProxyType(
            {key: Vanished.of(before[key.split(".")[1]], y.codes) for key, y in operands.items()}
        ),
    )


@dataclass(frozen=True, slots=True)
class ForwardSoftmax:
    """S, P and L of a forward, with the caller's leading shape of q; see the fields of `Trace`."""

    s: Tensor
    p: Tensor
    lse: Tensor

    @classmethod
    def of(
        cls, x: FlatProblem, s_smoothed: Tensor, lse_smoothed: Tensor, lse: Tensor
    ) -> ForwardSoftmax:
        """From the recorded map "s" and the results of `run` or `run_forward`."""
        p = torch.exp(s_smoothed - _finite_lse(lse_smoothed)[..., None])
        s = _before_smoothing(x, s_smoothed)
        return cls(x.query_heads(s), x.query_heads(p), x.query_heads(lse))


class Recorder(Hooks):
    """Records whole maps, and every quantized operand if `operands` is True.

    maps: names of the maps to record, such as "ds"; the attribute `maps` holds them,
        [Z, n_q, n_k].
    """

    def __init__(self, x: FlatProblem, *, maps: frozenset[str], operands: bool) -> None:
        self._x = x
        shape = (x.q.shape[0], x.grid.n_q, x.grid.n_k)
        self.maps = {name: x.q.new_full(shape, _MASKED_VALUE[name]) for name in maps}
        self.row_delta = x.q.new_zeros(shape[:2])
        self._operands: dict[str, QTensor] | None = {} if operands else None

    def map(self, name: str, place: Place, tiles: Tensor) -> Tensor:
        if name in self.maps:
            self._record_map(name, place, tiles)
        return tiles

    def ds(self, place: Place, ds: Tensor, p: Tensor) -> Tensor:
        return self.map("ds", place, ds)

    def delta(self, heads: slice, delta: Tensor) -> None:
        self.row_delta[heads] = delta

    def operand(self, site: str, tensor: str, place: Place, operand: Operand) -> Operand:
        if self._operands is not None and operand.scale is not None:
            self._record_operand(self._operands, f"{site}.{tensor}", place, operand)
        return operand

    def _record_map(self, name: str, place: Place, tiles: Tensor) -> None:
        panel = place.panel
        assert panel is not None
        if panel.masked is not None:
            tiles = tiles.masked_fill(panel.masked, _MASKED_VALUE[name])
        rows, columns = self._extent(panel)
        self.maps[name][place.heads, rows, columns] = from_tiles(
            tiles, rows.stop - rows.start, columns.stop
        )

    def _record_operand(
        self, recorded: dict[str, QTensor], key: str, place: Place, operand: Operand
    ) -> None:
        grid, heads = self._x.grid, place.heads
        if place.panel is None:
            n = grid.n_k if key.endswith((".k", ".v")) else grid.n_q
            part = as_qtensor(operand, n, operand.values.shape[-1])
            shape, scale_shape = part.codes.shape[1:], part.scale.shape[1:]
            rows, columns = slice(None), slice(None)
        else:
            rows, columns = self._extent(place.panel)
            part = as_qtensor(operand, rows.stop - rows.start, columns.stop)
            shape = scale_shape = (grid.n_q, grid.n_k)
        if key not in recorded:
            z, device = self._x.q.shape[0], part.codes.device
            recorded[key] = QTensor(
                torch.zeros(z, *shape, dtype=part.codes.dtype, device=device),
                torch.ones(z, *scale_shape, device=device),
            )
        recorded[key].codes[heads, rows, columns] = part.codes
        recorded[key].scale[heads, rows, columns] = part.scale

    @torch.no_grad()
    def before_rounding(self, do: Tensor) -> dict[str, Tensor]:
        """The tensors that are rounded, by name, in the shapes of `quantized`.

        P is the backward's, without the factor of a row that the forward's P has.
        """
        x, smoothed = self._x, SmoothedQK.of(self._x, slice(None))
        found = {"q": smoothed.q, "k": smoothed.k, "v": x.v, "do": x.flatten_queries(do)}
        found |= {"p": self.maps["p_recompute"], "ds": self.maps["ds"]}
        return {name: self._shaped(name, y) for name, y in found.items()}

    def _shaped(self, name: str, y: Tensor) -> Tensor:
        """With the caller's leading shape, that of k for k and v."""
        y = self._x.query_heads(y)
        if name in ("k", "v") and self._x.groups > 1:
            y = y[..., :: self._x.groups, :, :]
        return y

    def quantized(self) -> dict[str, QTensor]:
        """The recorded operands. k and v have the caller's leading shape of k, the others q's."""
        shaped: dict[str, QTensor] = {}
        for key, whole in (self._operands or {}).items():
            name = key.split(".")[1]
            shaped[key] = QTensor(self._shaped(name, whole.codes), self._shaped(name, whole.scale))
        return shaped

    def _extent(self, panel: Panel) -> tuple[slice, slice]:
        """The rows and columns of the map that a panel covers, without padding."""
        grid = self._x.grid
        rows = slice(panel.rows.start, min(panel.rows.stop, grid.n_q))
        return rows, slice(0, min(panel.key_blocks * grid.block_k, grid.n_k))


@torch.no_grad()
def _before_smoothing(x: FlatProblem, s: Tensor) -> Tensor:
    """Add to the map S what smoothing K subtracts from its rows."""
    if not (x.spec.smoothing.k and x.softcap is None and x.grid.n_q and x.grid.n_k):
        return s
    shift = SmoothedQK.of(x, slice(None)).shift
    assert shift is not None
    return s + shift[..., None]


def _finite_lse(lse: Tensor) -> Tensor:
    """lse with 0 instead of -inf for queries that attend to no key; exp(-inf - 0) is 0, not NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)
