"""The four assertions that compare tensors. All arguments are keywords without defaults.

| assertion | use | rule |
| --- | --- | --- |
| `assert_bitwise` | codes, scales, invariance | the same bytes |
| `assert_within_bound` | a derived bound | abs(actual - exact) <= bound, elementwise |
| `assert_within_budget` | another computation | error <= factor * its error + band, max and RMS |
| `assert_sqnr_at_least` | presets end to end | signal-to-noise ratio of at least a floor |

A failure reports the error relative to the reference's RMS, and the worst elements.
"""

import math

import torch
from torch import Tensor

_WORST = 5
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise(*, actual: Tensor, expected: Tensor, what: str) -> None:
    """Assert that actual and expected have the same bytes, shape and dtype."""
    _same_shape(actual, expected, what)
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{what}: dtype {actual.dtype}, expected {expected.dtype}")
    differs = _bits(actual) != _bits(expected)
    if bool(differs.any()):
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} elements differ in bits; "
            + _report(actual.double(), expected.double(), differs.double())
        )


def assert_within_bound(*, actual: Tensor, exact: Tensor, bound: Tensor, what: str) -> None:
    """Assert |actual - exact| <= bound, elementwise. Infinities must be equal; NaN fails.

    Args:
        exact: float64.
        bound: finite float64, broadcastable to exact.
    """
    _same_shape(actual, exact, what)
    _reference(exact, what)
    bound = bound.double().expand(exact.shape)
    if not bool((bound.isfinite() & (bound >= 0)).all()):
        raise AssertionError(f"{what}: the bound must be finite and >= 0 everywhere")
    error = _error(actual, exact)
    # `error > bound` would be False for a NaN.
    exceeds = ~(error <= bound)
    if bool(exceeds.any()):
        excess = torch.where(exceeds, (error - bound).nan_to_num(math.inf, math.inf), 0.0)
        ratio = (error / bound)[exceeds]
        raise AssertionError(
            f"{what}: {int(exceeds.sum())} of {exceeds.numel()} elements exceed the bound, "
            f"by up to a factor {_max(ratio):.3g}; " + _report(actual.double(), exact, excess)
        )


def assert_within_budget(
    *, actual: Tensor, exact: Tensor, yardstick: Tensor, factor: float, band: float, what: str
) -> None:
    """Assert that actual's error is at most factor times the yardstick's plus band * RMS of exact.

    Both the maximum and the RMS of the errors are compared.

    Args:
        exact: float64.
        yardstick: another approximation of exact.
        band: in units of the RMS of exact.
    """
    _same_shape(actual, exact, what)
    _same_shape(yardstick, exact, what)
    _reference(exact, what)
    error, allowed = _error(actual, exact), _error(yardstick, exact)
    if not bool(allowed.isfinite().all()):
        raise AssertionError(f"{what}: the yardstick's error must be finite")
    rms = _reference_rms(exact)
    for name, measure in (("maximum", _max), ("RMS", _rms)):
        found, limit = measure(error), factor * measure(allowed) + band * rms
        if not found <= limit:
            raise AssertionError(
                f"{what}: {name} error {found:.3g} exceeds {factor} * {measure(allowed):.3g} "
                f"(the yardstick's) + {band:.3g} * {rms:.3g}; "
                + _report(actual.double(), exact, error)
            )


def assert_sqnr_at_least(*, actual: Tensor, exact: Tensor, floor_db: float, what: str) -> None:
    """Assert 10 log10(sum exact^2 / sum (actual - exact)^2) >= floor_db."""
    _same_shape(actual, exact, what)
    _reference(exact, what)
    error = _error(actual, exact)
    noise, signal = _rms(error), _rms(exact.masked_fill(exact.isinf(), 0.0))
    if noise == 0:
        sqnr = math.inf
    else:
        ratio = signal / noise  # 0 if the noise is infinite
        sqnr = 20 * math.log10(ratio) if ratio > 0 else -math.inf if ratio == 0 else math.nan
    if not sqnr >= floor_db:
        raise AssertionError(
            f"{what}: SQNR {sqnr:.2f} dB is below the floor of {floor_db:.2f} dB; "
            + _report(actual.double(), exact, error)
        )


def _same_shape(actual: Tensor, expected: Tensor, what: str) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(
            f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )


def _reference(exact: Tensor, what: str) -> None:
    if exact.dtype is not torch.float64:
        raise AssertionError(f"{what}: the reference is {exact.dtype}, not float64")
    if bool(exact.isnan().any()):
        raise AssertionError(f"{what}: the reference holds NaN")


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(_BITS[x.element_size()])


def _error(actual: Tensor, exact: Tensor) -> Tensor:
    """|actual - exact| in float64, and 0 if both are the same infinity."""
    actual = actual.detach().double()
    return torch.where(actual == exact, 0.0, (actual - exact).abs())


def _max(x: Tensor) -> float:
    return x.max().item() if x.numel() else 0.0


def _rms(x: Tensor) -> float:
    """The root mean square, infinite or NaN if an element is."""
    largest = _max(x.abs())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * (x / largest).square().mean().sqrt().item()


def _reference_rms(exact: Tensor) -> float:
    """RMS of the finite elements."""
    return _rms(exact[exact.isfinite()])


def _report(actual: Tensor, expected: Tensor, severity: Tensor) -> str:
    """Describe the error; list the elements of the largest severity."""
    rms = _reference_rms(expected)
    error = _error(actual, expected).flatten()
    order = severity.nan_to_num(math.inf).flatten().argsort(descending=True)[:_WORST].tolist()
    unit = rms if rms > 0 else 1.0
    head = "absolute error" if rms == 0 else f"error / RMS of the reference ({rms:.3g})"
    lines = [f"{head}: max {_max(error) / unit:.3g}, RMS {_rms(error) / unit:.3g}; worst:"]
    for index in order:
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), actual.shape))
        lines.append(
            f"  {list(where)}: {actual.flatten()[index].item():.9g}, "
            f"expected {expected.flatten()[index].item():.9g} "
            f"({error[index].item() / unit:.3g})"
        )
    return "\n".join(lines)
