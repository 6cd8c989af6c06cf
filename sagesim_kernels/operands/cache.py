"""The operands of one pass over a problem, each rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from torch import Tensor

from sagesim.spec import MAPS, OPERANDS, Granularity, Precision
from sagesim_kernels.operands.casting import DTYPES, cast, operand_of_values
from sagesim_kernels.operands.kernel_problem import KernelProblem
from sagesim_kernels.operands.layout import Rows
from sagesim_kernels.operands.means import (
    Means,
    SubtractedMeans,
    compute_k_means,
    compute_q_means,
)
from sagesim_kernels.operands.operand import Operand
from sagesim_kernels.operands.quantization import (
    TokenTensor,
    Wanted,
    memory_of_codes,
    quantize,
)
from sagesim_kernels.operands.row_bounds import FoldedRows, fold

Quantize = Callable[[KernelProblem, Sequence[Wanted]], list[Operand]]
"""`quantize`, or another function that does the same."""


class _Code(NamedTuple):
    """A tensor in codes."""

    tensor: str
    precision: Precision
    granularity: Granularity
    contract_tokens: bool  #: whether the product sums over tokens
    folded: str  #: the map whose bounds multiply its rows, see `row_bounds`; or ""


class Copied(NamedTuple):
    """Which operands in 16 bit are copied to padded storage."""

    queries: bool = False  #: Q and dO
    keys: bool = False  #: K and V


_NOTHING_COPIED: Final = Copied()
_OF_KEYS: Final = ("k", "v")


class OperandCache:
    """The operands of one forward or backward; each is rounded once, at the latest when asked for.

    Products that need a tensor in the same format share one operand. Q and K are smoothed as the
    spec says, and `q_mean` and `k_mean` are the means that were subtracted.

    Args:
        problem: the call.
        do: the gradient of o, for a backward.
        k_mean: the mean of K that the forward computed; None computes it.
        copied: which 16-bit operands are copied to padded storage [1, heads, tokens, d], as codes
            are. There zeros follow each sequence, and replace queries that attend to no key and
            keys that no query attends to.
        k_in_pairs: see `quantization.memory_of_codes`.
    """

    def __init__(
        self,
        problem: KernelProblem,
        do: Tensor | None = None,
        *,
        k_mean: Tensor | None = None,
        copied: Copied = _NOTHING_COPIED,
        k_in_pairs: bool = False,
    ) -> None:
        self._problem, self.copied, self._k_in_pairs = problem, copied, k_in_pairs
        self.tensors = {"q": problem.q, "k": problem.k, "v": problem.v, "do": do}
        self._codes: dict[_Code, Operand] = {}
        self._values: dict[tuple[str, Precision], Operand] = {}
        self.q_mean = self.k_mean = None
        if k_mean is not None:
            self.k_mean = Means.of_heads(k_mean)
        elif problem.spec.smoothing.k:
            self.k_mean = compute_k_means(problem)
        if problem.spec.smoothing.q:
            self.q_mean = compute_q_means(problem)

    @property
    def subtracted(self) -> SubtractedMeans:
        """The means that were subtracted from Q and K, and K before the subtraction."""
        return SubtractedMeans.of(self.q_mean, self.k_mean, self._problem.k)

    def are_packed(self, *, keys: bool) -> bool:
        """Return whether keys or queries in 16 bit are packed sequences without a gap between them.

        keys: whether to look at the keys; else at the queries.
        """
        is_copied = self.copied.keys if keys else self.copied.queries
        return self._problem.cu_q is not None and not is_copied

    def precision(self, site: str) -> Precision:
        """Return the precision of a site."""
        return self._problem.spec.site(site).precision

    def quantize(self, *sites: str, by: Quantize = quantize) -> None:
        """Round the operands of these sites to codes, in one launch.

        Without those whose rows are multiplied by the bounds of a map, see `fold`.

        by: the function that launches the kernel.
        """
        wanted: dict[_Code, None] = {}
        for site in sites:
            if self._problem.spec.site(site).precision.is_scaled:
                wanted |= dict.fromkeys(
                    self._code(site, tensor) for tensor in OPERANDS[site] if tensor not in MAPS
                )
        self._quantize([x for x in wanted if x not in self._codes and not x.folded], by)

    def fold(self, site: str, bound: Rows) -> FoldedRows:
        """Round dO of dv or Q of dk with its rows multiplied by the bounds of the site's map.

        `get` returns the operand from now on.
        """
        _, tensor = OPERANDS[site]
        matmul = self._problem.spec.site(site)
        operand, rows = fold(self._problem, self._source(tensor), matmul, bound)
        self._codes[self._code(site, tensor)] = operand
        return rows

    def reserve(self, site: str, tensor: str) -> tuple[Operand, TokenTensor]:
        """Return memory for the codes that `site` has for a tensor, and what to round.

        The caller's kernel fills the memory. `get` returns it from now on. If the tensor was
        rounded before, the kernel stores the same codes to the same memory.
        """
        code, source = self._code(site, tensor), self._source(tensor)
        assert not code.folded
        if code not in self._codes:
            self._codes[code] = memory_of_codes(
                source, code.precision, code.granularity, code.contract_tokens
            )
        return self._codes[code], source

    def get(self, site: str, tensor: str) -> Operand:
        """Return q, k, v or do in the format that `site` has for it."""
        precision = self._problem.spec.site(site).precision
        if precision.is_scaled:
            code = self._code(site, tensor)
            if code not in self._codes:
                assert not code.folded, f"{tensor} of {site} before its bounds"
                self._quantize([code], quantize)
            return self._codes[code]
        key = tensor, precision
        if key not in self._values:
            self._values[key] = cast(
                self._problem,
                self._source(tensor),
                DTYPES[precision],
                stored=self._is_copied(tensor),
            )
        return self._values[key]

    def _code(self, site: str, tensor: str) -> _Code:
        left, matmul = OPERANDS[site][0], self._problem.spec.site(site)
        granularity = matmul.lhs if left == tensor else matmul.rhs
        is_folded = tensor != "k" and matmul.lhs is Granularity.PerRowBound
        folded = left if is_folded else ""
        return _Code(tensor, matmul.precision, granularity, left in MAPS, folded)

    def _quantize(self, wanted: list[_Code], by: Quantize) -> None:
        needed = [
            Wanted(
                self._source(x.tensor),
                x.precision,
                x.granularity,
                x.contract_tokens,
                self._k_in_pairs,
            )
            for x in wanted
        ]
        self._codes |= dict(zip(wanted, by(self._problem, needed), strict=True))

    def get_unsmoothed(self, site: str, tensor: str) -> tuple[Operand, Means | None]:
        """Return a tensor before smoothing, and the mean that the kernel has to subtract itself.

        If there is no mean, or the caller's tensor cannot be loaded directly because it has another
        dtype or has to be copied, return what `get` returns, and None.
        """
        source = self._source(tensor)
        dtype = DTYPES.get(self._problem.spec.site(site).precision)
        if source.mean is None or self._is_copied(tensor) or dtype != source.x.dtype:
            return self.get(site, tensor), None
        return operand_of_values(source.x), source.mean

    def _is_copied(self, tensor: str) -> bool:
        return self.copied.keys if tensor in _OF_KEYS else self.copied.queries

    def _source(self, tensor: str) -> TokenTensor:
        x, problem = self.tensors[tensor], self._problem
        assert x is not None, f"{tensor} is not an operand of the forward"
        mean = {"q": self.q_mean, "k": self.k_mean}.get(tensor)
        is_key = tensor in _OF_KEYS
        spec = problem.spec
        return TokenTensor(
            name=tensor,
            x=x,
            mean=mean,
            is_key=is_key,
            block=spec.block_k if is_key else spec.block_q,
            longest=problem.longest_k if is_key else problem.longest_q,
            cu=problem.cu_k if is_key else problem.cu_q,
        )
