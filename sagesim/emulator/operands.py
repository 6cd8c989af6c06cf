"""The operands of products, each rounded once for every format it is used in."""

from __future__ import annotations

from torch import Tensor

from sagesim.emulator.hooks import Hooks, Place
from sagesim.emulator.quantization import Operand, encode, to_tiles
from sagesim.spec import OPERANDS, AttentionSpec, Granularity, Precision


class RoundedOperands:
    """A cache of rounded operands at one place of a problem.

    tensors: by name ("q", "k", "v", "do", "p", "ds"), in tiles
        [Z, row blocks, rows, column blocks, columns].
    """

    def __init__(
        self, spec: AttentionSpec, place: Place, hooks: Hooks, tensors: dict[str, Tensor]
    ) -> None:
        self._spec, self._place, self._hooks, self._tensors = spec, place, hooks, tensors
        self._rounded: dict[tuple[str, Precision, Granularity], Operand] = {}

    def at(self, site: str, tensor: str) -> Operand:
        """`tensor` in the format that `site` multiplies it in."""
        matmul = self._spec.site(site)
        how = matmul.lhs if OPERANDS[site][0] == tensor else matmul.rhs
        key = (tensor, matmul.precision, how)
        operand = self._rounded.get(key)
        if operand is None:
            panel = self._place.panel
            first_row = 0 if panel is None else panel.rows.start
            x, rounding = self._tensors[tensor], self._spec.rounding
            operand = encode(x, matmul.precision, how, rounding, tensor, first_row)
        # What a hook returns is kept: the sites that share a format share one rounding.
        operand = self._hooks.operand(site, tensor, self._place, operand)
        self._rounded[key] = operand
        return operand


def round_tokens(
    spec: AttentionSpec, place: Place, hooks: Hooks, **tensors: Tensor
) -> RoundedOperands:
    """The cache for operands with tokens: q, k, v and do, [Z, n, channels]."""
    blocks = {"q": spec.block_q, "do": spec.block_q, "k": spec.block_k, "v": spec.block_k}
    tiles = {name: to_tiles(x, blocks[name], x.shape[-1]) for name, x in tensors.items()}
    return RoundedOperands(spec, place, hooks, tiles)
