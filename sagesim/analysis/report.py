"""An attribution as a self-contained HTML file. It loads nothing from outside."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

import sagesim
from sagesim.analysis.attribution import Attribution, SiteEffect
from sagesim.analysis.metrics import GRADIENTS, SITE_NAMES, TENSORS, TITLES, gradient_error
from sagesim.analysis.number_range import range_warnings
from sagesim.analysis.pooling import pool
from sagesim.analysis.runs import LOGITS, OUTPUTS
from sagesim.models import Call, Capture
from sagesim.printable import printable_lines
from sagesim.problem import NO_WINDOW
from sagesim.spec import (
    FORWARD_SITES,
    OPERANDS,
    SITES,
    AttentionSpec,
    Granularity,
    MatmulSpec,
    Precision,
    RoundingMode,
    with_precision,
)

if TYPE_CHECKING:
    from jinja2 import Environment

_WORTH_IT: Final = 0.01
"""The advice names a change only if it lowers the error by more than this fraction."""

PRODUCTS: Final = {
    "qk": "S = QKᵀ",
    "pv": "O = PV",
    "qk_recompute": "S = QKᵀ",
    "dv": "dV = Pᵀ dO",
    "dp": "dP = dO Vᵀ",
    "dq": "dQ = dS K",
    "dk": "dK = dSᵀ Q",
}
"""The formula of each site."""

MEANINGS: Final = {
    "s": "logits: the products of each query with each key",
    "p": "attention weights: the softmax of each row of S",
    "o": "output: the average of the values by weight",
    "lse": "logsumexp of each row of S, saved for the backward",
    "delta": "one number per query, subtracted from its row of dP",
    "dp": "gradient of the weights",
    "ds": "gradient of the logits, from which dQ and dK are computed",
    "dq": "gradient of the queries",
    "dk": "gradient of the keys",
    "dv": "gradient of the values",
}
"""Each of `TENSORS` in words."""

_MINUS: Final = "\N{MINUS SIGN}"

_PRECISIONS: Final = {
    Precision.INT8: "INT8",
    Precision.FP8_E4M3: "FP8 E4M3",
    Precision.FP8_E5M2: "FP8 E5M2",
    Precision.FP16: "FP16",
    Precision.BF16: "BF16",
    Precision.INPUT16: "16 bit",
    Precision.FP32: "not rounded",
}

_GRANULARITIES: Final = {
    Granularity.PerHead: "one per head",
    Granularity.PerBlock: "one per block of tokens",
    Granularity.PerToken: "one per token",
    Granularity.PerChannel: "one per channel",
    Granularity.PerBlockChannel: "one per channel and block of tokens",
    Granularity.PerTile: "one per tile",
    Granularity.PerTileRow: "one per query row of a tile",
    Granularity.PerTileColumn: "one per key column of a tile",
    Granularity.PerRow: "one per query row",
    Granularity.PerRowBound: "one per query row, from a bound on the row",
}

_ROUNDINGS: Final = {
    RoundingMode.HALF_EVEN: "to the nearest code, ties to the even one",
    RoundingMode.HALF_AWAY: "to the nearest code, ties away from zero",
    RoundingMode.STOCHASTIC: "up or down at random, unbiased",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """A captured call and its attribution."""

    call: Call
    attribution: Attribution


@dataclass(frozen=True, slots=True)
class Advice:
    """A change that lowers the gradients' error, and the label of the changed spec."""

    sentence: str
    label: str | None  #: None if the advice is to change nothing

    def __str__(self) -> str:
        return self.sentence if self.label is None else f'{self.sentence} Try "{self.label}".'


def headline(a: Attribution) -> str:
    """One sentence that names the matmul with the largest share of the gradients' error."""
    if not a.base.is_quantized:
        return "No product is rounded: all errors come from float32 arithmetic."
    return a.verdict()


def limitations(a: Attribution) -> list[str]:
    """Sentences about what limits the meaning of the shares: lost values, and sampling.

    An operand that FP16 cannot hold makes a large error, which its product's share then measures.
    """
    found = range_warnings(a.range_losses)
    if a.measured < 1:
        found.append(
            f"Measured on a sample of {a.measured:.0%} of the elements of S; ± is the standard "
            "error of sampling."
        )
    return found


def advice(a: Attribution) -> list[Advice]:
    """The changes that lower the gradients' error most: one of a product, and one of an option.

    The first is to compute a product in 16 bit, the second to change smoothing or delta.

    The gain of 16 bit is taken from the run in which the product is not rounded at all, because
    rounding to 16 bit adds little error.
    """
    found: list[Advice] = []
    if not a.base.is_quantized or not a.is_finite:
        return found
    rounded = [effect for effect in a.parts if _scaled_sites(a.base, effect)]
    if rounded:
        best = min(rounded, key=lambda effect: _change(a, effect.without))
        change = _change(a, best.without)
        if change < -_WORTH_IT:
            spec = with_precision(a.base, Precision.INPUT16, *_scaled_sites(a.base, best))
            found.append(
                Advice(
                    f"Compute {SITE_NAMES[best.site]} in 16 bit. Without rounding there, the "
                    f"gradients' error is {-change:.0%} lower ({_from_to(a, best.without)}).",
                    spec.label(),
                )
            )
        else:
            found.append(
                Advice(
                    "Computing a single product in 16 bit lowers the gradients' error by less "
                    "than 1%.",
                    None,
                )
            )
    switch = min(a.switches, key=lambda effect: _change(a, effect.error))
    change = _change(a, switch.error)
    if change < -_WORTH_IT:
        found.append(
            Advice(
                f"At the same precision, {switch.title} makes the gradients' error "
                f"{-change:.0%} lower ({_from_to(a, switch.error)}).",
                switch.spec.label(),
            )
        )
    return found


def templates(package: str = "sagesim.analysis") -> Environment:
    """The HTML templates of a package, which may include those of `sagesim.analysis`.

    Values are escaped, control characters included. A name that is used in a template but not
    passed to it raises an error.

    Raises:
        ModuleNotFoundError: if the package jinja2 is not installed.
    """
    import jinja2

    return jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader(package), jinja2.PackageLoader("sagesim.analysis")]
        ),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(layers: Sequence[Layer], *, capture: Capture, name: str, command: str) -> str:
    """Render the report as HTML.

    Args:
        layers: the layers to show; their attributions have one base spec.
        capture: the capture that the calls come from, for its provenance.
        name: name of the capture, as the user gave it.
        command: the command line that made the report.

    Raises:
        ValueError: if there are no layers, or their base specs differ.
        ModuleNotFoundError: if the package jinja2 is not installed.
    """
    environment = templates()
    environment.filters |= {"number": number, "percent": percent}
    pooled = pool([layer.attribution for layer in layers])
    spec = pooled.base
    largest = max(
        (x for y in layers for x in y.attribution.error.values() if math.isfinite(x)), default=0.0
    )
    return environment.get_template("report.html.j2").render(
        headline=headline(pooled).replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}"),
        advice=advice(pooled),
        limitations=limitations(pooled),
        label=spec.label(),
        name=name,
        command=command,
        spec=spec,
        pooled=pooled,
        own=pooled.own_forward,
        layers=layers,
        errors=pooled.errors,
        shares={effect.site: pooled.gradient_share(effect) for effect in pooled.parts},
        largest_error=largest,
        provenance=list(_provenance(capture, layers)),
        versions={
            "sagesim": sagesim.__version__,
            "PyTorch": torch.__version__,
            "Python": platform.python_version(),
        },
        sites=[_site(site, spec.site(site)) for site in SITES],
        rounding=_ROUNDINGS[spec.rounding.mode],
        outputs=OUTPUTS,
        tensors=TENSORS,
        titles=TITLES | {"delta": "δ"},
        meanings=MEANINGS,
        site_names=SITE_NAMES,
        products=PRODUCTS,
        precisions={site: _PRECISIONS[spec.site(site).precision] for site in SITES},
        logits=LOGITS,
        changes={e.switch: _change(pooled, e.error) for e in pooled.switches},
        gradient_share=Attribution.gradient_share,
        gradients=pooled.gradient_error,
    )


def number(x: float) -> str:
    """Format a number with three significant digits, or with two and an exponent.

    >>> number(0.02), number(9.23e-8), number(140.71), number(math.inf)
    ('0.0200', '9.2e-8', '141', '∞')
    """
    if not math.isfinite(x):
        return "not a number" if math.isnan(x) else "∞" if x > 0 else f"{_MINUS}∞"
    if x == 0:
        return "0"
    if 1e-3 <= abs(x) < 1e3:
        return f"{x:#.3g}".rstrip(".")
    mantissa, exponent = f"{x:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def percent(x: float) -> str:
    """Format a fraction in whole percent, with a typographic minus sign and no negative zero.

    What is not finite becomes a dash.

    >>> percent(0.624), percent(-0.001)
    ('62%', '0%')
    """
    if not math.isfinite(x):
        return "\N{EN DASH}"
    whole = round(100 * x)
    return f"{_MINUS if whole < 0 else ''}{abs(whole)}%"


def _visible(value: object) -> object:
    """What a template shows for a value. Text from files may hold control characters."""
    return printable_lines(value) if type(value) is str else value


def _scaled_sites(spec: AttentionSpec, effect: SiteEffect) -> list[str]:
    """The sites of an effect that the spec computes in 8 bits."""
    return [site for site in effect.site.split("+") if spec.site(site).precision.is_scaled]


def _change(a: Attribution, errors: Mapping[str, float]) -> float:
    """Relative change of the `gradient_error` from the base spec's; -0.3 is 30% lower."""
    before = a.gradient_error
    return gradient_error(errors) / before - 1 if before and math.isfinite(before) else 0.0


def _from_to(a: Attribution, errors: Mapping[str, float]) -> str:
    return ", ".join(f"{TITLES[t]} {number(a.error[t])} → {number(errors[t])}" for t in GRADIENTS)


def _site(name: str, matmul: MatmulSpec) -> dict[str, str]:
    """A row of the table of the spec."""
    left, right = (TITLES.get(t, t.upper() if t != "do" else "dO") for t in OPERANDS[name])
    scaled = matmul.precision.is_scaled
    return {
        "name": name,
        "product": PRODUCTS[name],
        "where": "forward" if name in FORWARD_SITES else "backward",
        "precision": _PRECISIONS[matmul.precision],
        "left": f"{left}: {_GRANULARITIES[matmul.lhs]}" if scaled else "no scales",
        "right": f"{right}: {_GRANULARITIES[matmul.rhs]}" if scaled else "no scales",
    }


def _provenance(capture: Capture, layers: Sequence[Layer]) -> Iterator[tuple[str, str]]:
    for key, value in capture.source.items():
        yield key.replace("_", " "), value if isinstance(value, str) else json.dumps(value)
    yield "recorded with", f"PyTorch {capture.torch_version}"
    yield (
        "loss scale",
        f"{capture.loss_scale:g} (does not affect relative errors)",
    )
    yield "layers shown", f"{len(layers)} of {len(capture.calls)}"
    for shape in dict.fromkeys(_shape(layer.call) for layer in layers):
        yield "tensors", shape


def _shape(call: Call) -> str:
    batch, heads, tokens, size = call.q.shape
    keys = call.k.shape[2]
    length = f"{tokens} tokens" if keys == tokens else f"{tokens} queries, {keys} keys"
    shared = f" ({call.k.shape[1]} of K and V)" if call.k.shape[1] != heads else ""
    dtype = str(call.q.dtype).removeprefix("torch.")
    return (
        f"batch {batch}, {heads} heads{shared}, {length}, head size {size}, {dtype}, {_masks(call)}"
    )


def _masks(call: Call) -> str:
    """The masks, sinks and softcap of a call in words."""
    found: list[str] = []
    if call.is_causal:
        found.append("causal mask")
    if call.window != NO_WINDOW:
        found.append(f"window {call.window}")
    if call.causal_alignment == "lower_right" and found:
        found.append("aligned at the lower right")
    if call.attn_mask is not None:
        found.append("attn_mask")
    if call.key_mask is not None:
        found.append("key padding")
    if not found:
        found.append("no mask")
    if call.sinks is not None:
        found.append("sinks")
    if call.softcap is not None:
        found.append(f"softcap {call.softcap:g}")
    return ", ".join(found)
