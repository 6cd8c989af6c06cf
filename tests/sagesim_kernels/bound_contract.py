"""The contract of scales from bounds, and of sums of FP8 products; see `contract`.

The bound of a row is a ball, and so is everything that is multiplied by it. The top code of a row
follows from the kernel's scale of the row: neighbouring ones differ by more than the ball.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim import MatmulSpec, Precision, Rounding
from sagesim.emulator import SHARED_AXES, from_tiles, to_tiles
from sagesim.emulator.rounding import CODE_MAX, round_codes_
from sagesim.emulator.row_bounds import TOP_CODES
from sagesim_kernels import Coded
from tests.sagesim_kernels.error_balls import TENSOR_CORE_U, Ball
from tests.support.assertions import assert_within_bound
from tests.support.float32_bound import U, gamma
from tests.support.kernels import DEVICE
from theory.fp8_sums import ADA, BLACKWELL, HOPPER, relative_bound

NORM_ROUNDINGS = 12
"""Of a norm of up to 256 numbers: a square, 8 additions, a root; and two of the numbers."""

SAME_LOSS = 2.0**-20
"""Top codes with losses that differ by less than this share of themselves are equally good."""

_SMALLEST_NORMAL = {Precision.FP8_E4M3: 2.0**-6, Precision.FP8_E5M2: 2.0**-14}
_MANTISSA_BITS = {Precision.FP8_E4M3: 3, Precision.FP8_E5M2: 2}


def between(*, actual: Tensor, lowest: Tensor, highest: Tensor, what: str) -> None:
    """Assert lowest <= actual <= highest; a failure reports the nearest end as expected."""
    x = actual.double()
    nearest = torch.minimum(
        torch.maximum(x.nan_to_num(0.0, torch.inf, -torch.inf), lowest), highest
    )
    assert_within_bound(actual=x, exact=nearest, bound=torch.zeros(()).double(), what=what)


def rounded_codes(y: Tensor, precision: Precision, rounding: Rounding, tensor: str) -> Tensor:
    """Round float64 to codes, as the emulator does; this is monotone. Too large a number is
    the largest code."""
    most = CODE_MAX[precision]
    known = y.nan_to_num(most, most, -most).clamp(-most, most).float()
    return round_codes_(known, precision, rounding, tensor).double()


def step(y: Tensor, precision: Precision) -> Tensor:
    """The distance between the codes around y."""
    if precision is Precision.INT8:
        return torch.ones_like(y)
    size = y.abs().clamp(_SMALLEST_NORMAL[precision], CODE_MAX[precision])
    return torch.exp2(torch.frexp(size).exponent.double() - 1 - _MANTISSA_BITS[precision])


def product_error(left: Tensor, right: Tensor, tile: int, precision: Precision) -> Tensor:
    """The most by which sums of products of codes, [..., m, tile] @ [..., tile, n], may be off."""
    if precision is Precision.INT8:
        return torch.zeros(()).double()
    floor = _SMALLEST_NORMAL[precision]
    left, right = (
        x.abs().clamp(min=floor).masked_fill(x == 0, 0.0) for x in (left.double(), right.double())
    )
    return (left @ right) * fp8_sum_error(tile)


def fp8_sum_error(tile: int) -> float:
    """Return how much of the sum of the products' magnitudes may be lost.

    See docs/numerics.md, "Sums of FP8 products"; Triton's interpreter adds in float32.
    """
    if DEVICE == "cpu":
        return gamma(tile, U)
    from sagesim_kernels.target import compute_capability

    capability = compute_capability()
    if capability < 89:
        return gamma(tile, TENSOR_CORE_U)
    how = ADA if capability == 89 else HOPPER if capability == 90 else BLACKWELL
    return relative_bound(tile, how)


def p_bound(p: Ball) -> Ball:
    """The bound on each row of P, [..., n_q]."""
    top = p.max(-1)
    return Ball(top.mid.squeeze(-1), top.radius.squeeze(-1))


def ds_bound(of_p: Ball, do: Tensor, v: Tensor, delta: Tensor) -> Ball:
    """The bound on each row of dS, [..., n_q]. do, v: of dp, in float64."""
    norms = do.norm(dim=-1) * v.norm(dim=-1).amax(-1, keepdim=True)
    inner = Ball.exactly(norms + delta.double().abs()).rounded(2 * NORM_ROUNDINGS + 2)
    return of_p.times(inner).rounded(1)


@dataclass(frozen=True)
class Rows:
    """A kernel's scales of the rows of a map."""

    scale: Tensor  #: [..., n_q], 1 where a row vanishes or has no keys
    top: Tensor  #: the top code of each row; the largest one where the scale does not tell
    is_known: Tensor  #: whether the scale tells the top code


def check_row_scales(
    name: str, found: Coded, bound: Ball, attends: Tensor, tops: tuple[float, ...]
) -> Rows:
    """Check the scales of a map's rows, and return them. tops: the top codes that are allowed.

    Tiles that are masked entirely are not computed. There the codes are 0 and the scale may be 1.
    """
    scale = found.scale.double().expand(found.codes.shape)
    has_keys = attends.any(-1)
    of_row = scale.masked_fill(~attends, -torch.inf).amax(-1)
    least = scale.masked_fill(~attends, torch.inf).amin(-1)
    of_row, least = (x.masked_fill(~has_keys, 1.0) for x in (of_row, least))
    assert bool((of_row == least).all()), f"{name} scale: one of a row differs from the others"
    elsewhere = (scale == 1) | (scale == of_row[..., None])
    assert bool(elsewhere[~attends].all()), f"{name} scale: another one where all is masked"

    top = torch.full_like(of_row, tops[0])
    fits = torch.zeros_like(has_keys)
    for code in tops:
        low, high = ((x / code).float().double() for x in (bound.lowest, bound.highest))
        here = ~fits & (low <= of_row) & (of_row <= high)
        top, fits = top.masked_fill(here, code), fits | here
    may_vanish = (bound.lowest <= tops[0] * 2.0**-128) & (of_row == 1)
    wrong = has_keys & ~fits & ~may_vanish
    if bool(wrong.any()):
        raise AssertionError(
            f"{name} scale: {int(wrong.sum())} rows have no top code; scale times the largest one "
            f"{(of_row * tops[0])[wrong][:4].tolist()}, bound {bound.mid[wrong][:4].tolist()}"
        )
    is_known = has_keys & fits & ~may_vanish
    return Rows(of_row, top, is_known)


def check_folded(
    name: str,
    found: Coded,
    x: Tensor,
    bound: Ball,
    rows: Rows,
    matmul: MatmulSpec,
    rounding: Rounding,
    block: int,
) -> None:
    """Check dO of dv or Q of dk, whose rows were multiplied by bounds, and the choice of the rows'
    top codes.

    x: the tensor before, [..., n_q, channels]. rows: what `check_row_scales` returned.
    """
    precision, tops = matmul.precision, TOP_CODES[matmul.precision]
    tensor = name.rpartition(".")[2]
    z = Ball.exactly(x).times(Ball(bound.mid[..., None], bound.radius[..., None])).rounded(1)
    most = CODE_MAX[precision] * tops[-1]

    def top(size: Tensor) -> Tensor:
        tiles = to_tiles(size, block, size.shape[-1])
        found = tiles.amax(SHARED_AXES[matmul.rhs], keepdim=True).expand(tiles.shape)
        return from_tiles(found, *size.shape[-2:])

    least, largest = top((z.mid.abs() - z.radius).clamp(min=0.0)), top(z.size)
    scale = found.scale.double().expand(found.codes.shape)
    vanishes = (largest <= most * 2.0**-128) | ((least <= most * 2.0**-128) & (scale == 1))
    low = (least.clamp(min=most * 2.0**-128) / most).float().double().masked_fill(vanishes, 1.0)
    high = (largest / most).float().double().masked_fill(vanishes, 1.0)
    between(actual=scale, lowest=low, highest=high, what=f"{name} scale")

    # The bound, the inverse and the product, and a subnormal scale, which has fewer digits.
    y = Ball(z.mid / scale, z.radius / scale).rounded(3)
    y = y.widened(y.size * 2.0**-149 / scale).where(~vanishes, 0.0)
    code = y.over(Ball.exactly(rows.top[..., None].expand(y.mid.shape))).rounded(1)
    low, high = (
        rounded_codes(end, precision, rounding, tensor) for end in (code.lowest, code.highest)
    )
    between(actual=found.codes, lowest=low, highest=high, what=f"{name} codes")

    if len(tops) == 1:
        return
    # A loss is the square of a distance, which moves by no more than y does.
    moved = (y.radius + 4 * U * y.size).norm(dim=-1)
    losses = []
    for t in tops:
        nearest = (y.mid / t).float().to(found.codes.dtype).double() * t
        losses.append((nearest - y.mid).norm(dim=-1))
    loss = torch.stack(losses)
    chosen = loss.gather(0, torch.stack([rows.top == t for t in tops]).int().argmax(0)[None])[0]
    excess = chosen - (loss.amin(0) * (1 + SAME_LOSS) + 2 * moved)
    wrong = rows.is_known & (excess > 0)
    assert not bool(wrong.any()), f"{name} top codes: {int(wrong.sum())} rows have a better one"
