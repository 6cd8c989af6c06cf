"""The operands of products. Sites that use a tensor in the same format share one rounding."""

from __future__ import annotations

from torch import Tensor

from sagesim.emulator.hooks import Hooks, Place
from sagesim.emulator.quantization import Operand, encode, encode_within, to_tiles
from sagesim.emulator.row_bounds import RowBound
from sagesim.spec import OPERANDS, AttentionSpec, Granularity, Precision


class RoundedOperands:
    """Rounds the operands of some heads or of one panel, and caches them by format.

    tensors: what to round, by name ("q", "k", "v", "do", "p", "ds"), in tiles
        [Z, row blocks, rows, column blocks, columns].
    bound: the bounds on all rows of a map, if a site needs them.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        place: Place,
        hooks: Hooks,
        tensors: dict[str, Tensor],
        bound: RowBound | None = None,
    ) -> None:
        self._spec, self._place, self._hooks, self._tensors = spec, place, hooks, tensors
        self._bound = bound
        self._rounded: dict[tuple[str, Precision, Granularity], Operand] = {}

    def at(self, site: str, tensor: str) -> Operand:
        """`tensor` in the format that `site` multiplies it in."""
        matmul = self._spec.site(site)
        granularity = matmul.lhs if OPERANDS[site][0] == tensor else matmul.rhs
        key = (tensor, matmul.precision, granularity)
        operand = self._rounded.get(key)
        if operand is None:
            panel = self._place.panel
            first_row = 0 if panel is None else panel.rows.start
            x, rounding = self._tensors[tensor], self._spec.rounding
            precision = matmul.precision
            if precision.is_scaled and granularity is Granularity.PerRowBound:
                assert self._bound is not None
                rows = slice(first_row, first_row + x.shape[1] * x.shape[2])
                bound, top = (
                    y[:, rows].unflatten(1, x.shape[1:3])[..., None, None]
                    for y in (self._bound.bound, self._bound.top_of(precision))
                )
                operand = encode_within(x, bound, top, precision, rounding, tensor, first_row)
            else:
                operand = encode(x, precision, granularity, rounding, tensor, first_row)
        # The cache holds what the hook returned, so that later sites of this format use it too.
        operand = self._hooks.operand(site, tensor, self._place, operand)
        self._rounded[key] = operand
        return operand


def round_tokens(
    spec: AttentionSpec, place: Place, hooks: Hooks, **tensors: Tensor
) -> RoundedOperands:
    """The `RoundedOperands` of q, k, v or do, each given as [Z, n, channels]."""
    blocks = {"q": spec.block_q, "do": spec.block_q, "k": spec.block_k, "v": spec.block_k}
    tiles = {name: to_tiles(x, blocks[name], x.shape[-1]) for name, x in tensors.items()}
    return RoundedOperands(spec, place, hooks, tiles)
