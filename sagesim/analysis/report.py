"""An attribution as one HTML file that explains itself: nothing outside the file is loaded."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

import sagesim
from sagesim.analysis.attribution import LOGITS, OUTPUTS, SITE_NAMES, Attribution, SiteEffect, pool
from sagesim.analysis.layers import pool_errors
from sagesim.analysis.metrics import GRADIENTS, TENSORS, TITLES, Error, gradient_error
from sagesim.models import Call, Capture
from sagesim.spec import (
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
"""A change that lowers the error by less is not advised."""

PRODUCTS: Final = {
    "qk": "S = QKᵀ",
    "pv": "O = PV",
    "qk_recompute": "S = QKᵀ again",
    "dv": "dV = Pᵀ dO",
    "dp": "dP = dO Vᵀ",
    "dq": "dQ = dS K",
    "dk": "dK = dSᵀ Q",
}
"""Each site as a formula."""

MEANINGS: Final = {
    "s": "logits: how well each query matches each key",
    "p": "attention weights: the softmax of each row of S",
    "o": "the output: values averaged by weight",
    "lse": "log of the sum of each row's exponentials, kept for the backward",
    "delta": "one number for each query, subtracted from its row of dP",
    "dp": "gradient of the weights",
    "ds": "gradient of the logits, from which dQ and dK are made",
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
    Granularity.PerHead: "one for a head",
    Granularity.PerBlock: "one for each block of tokens",
    Granularity.PerToken: "one for each token",
    Granularity.PerChannel: "one for each channel",
    Granularity.PerBlockChannel: "one for each channel and block of tokens",
    Granularity.PerTile: "one for each tile",
    Granularity.PerTileRow: "one for each query row of a tile",
    Granularity.PerTileColumn: "one for each key column of a tile",
    Granularity.PerRow: "one for each query row",
}

_ROUNDINGS: Final = {
    RoundingMode.HALF_EVEN: "to the nearest code, ties to the even one",
    RoundingMode.HALF_AWAY: "to the nearest code, ties away from zero",
    RoundingMode.STOCHASTIC: "up or down at random, right on average",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """What the report shows of one captured call."""

    call: Call
    attribution: Attribution
    errors: Mapping[str, Error]  #: of `measure.errors`, under the attribution's base


@dataclass(frozen=True, slots=True)
class Advice:
    """What to change, in a sentence, and the label of the spec that does."""

    sentence: str
    label: str | None

    def __str__(self) -> str:
        return self.sentence if self.label is None else f'{self.sentence} Try "{self.label}".'


def headline(a: Attribution) -> str:
    """The finding in one sentence: which product carries most of the gradients' error."""
    if not a.base.is_quantized:
        return "No product is rounded: the errors here are those of float32 arithmetic."
    return a.summary()


def advice(a: Attribution) -> list[Advice]:
    """The one product and the one switch that would lower the gradients' error most.

    A product is judged by leaving it unrounded, which 16 bit comes close to.
    """
    found: list[Advice] = []
    if not a.base.is_quantized:
        return found
    rounded = [effect for effect in a.parts if _scaled_sites(a.base, effect)]
    if rounded:
        best = min(rounded, key=lambda effect: _change(a, effect.without))
        change = _change(a, best.without)
        if change < -_WORTH_IT:
            spec = with_precision(a.base, Precision.INPUT16, *_scaled_sites(a.base, best))
            found.append(
                Advice(
                    f"Compute {SITE_NAMES[best.site]} in 16 bit: without its rounding the "
                    f"gradients' error is {-change:.0%} lower ({_from_to(a, best.without)}).",
                    spec.label(),
                )
            )
        else:
            found.append(
                Advice("No single product in 16 bit would lower the gradients' error by 1%.", None)
            )
    switch = min(a.switches, key=lambda effect: _change(a, effect.error))
    change = _change(a, switch.error)
    if change < -_WORTH_IT:
        found.append(
            Advice(
                f"Without any more bits, {switch.title} lowers the gradients' error by "
                f"{-change:.0%} ({_from_to(a, switch.error)}).",
                switch.spec.label(),
            )
        )
    return found


def templates(package: str = "sagesim.analysis") -> Environment:
    """The HTML templates of a package, and those of `sagesim.analysis` that it includes.

    Values are escaped, and a name that a template uses and does not get is an error.

    Raises:
        ModuleNotFoundError: without the package jinja2.
    """
    import jinja2

    return jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader(package), jinja2.PackageLoader("sagesim.analysis")]
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(layers: Sequence[Layer], *, capture: Capture, name: str, command: str) -> str:
    """The report as HTML.

    Args:
        layers: of one base spec.
        capture: where the calls come from; its provenance is shown.
        name: what the user calls it.
        command: the command line that made the report.

    Raises:
        ModuleNotFoundError: without the package jinja2.
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
        label=spec.label(),
        name=name,
        command=command,
        spec=spec,
        pooled=pooled,
        layers=layers,
        errors=pool_errors([layer.errors for layer in layers]),
        blame={part.site: pooled.gradient_share(part) for part in pooled.parts},
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
    """Three significant digits, or two and an exponent.

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
    """Whole percents with a true minus sign, and no minus zero.

    >>> percent(0.624), percent(-0.001)
    ('62%', '0%')
    """
    whole = round(100 * x) if math.isfinite(x) else 0
    return f"{_MINUS if whole < 0 else ''}{abs(whole)}%"


def _scaled_sites(spec: AttentionSpec, effect: SiteEffect) -> list[str]:
    """The sites of an effect that are in 8 bits."""
    return [site for site in effect.site.split("+") if spec.site(site).precision.is_scaled]


def _change(a: Attribution, errors: Mapping[str, float]) -> float:
    """How much the `gradient_error` differs from the base's; -0.3 is 30% less."""
    before = a.gradient_error
    return gradient_error(errors) / before - 1 if before and math.isfinite(before) else 0.0


def _from_to(a: Attribution, errors: Mapping[str, float]) -> str:
    return ", ".join(f"{TITLES[t]} {number(a.error[t])} → {number(errors[t])}" for t in GRADIENTS)


def _site(name: str, matmul: MatmulSpec) -> dict[str, str]:
    """A row of the spec's table."""
    left, right = (TITLES.get(t, t.upper() if t != "do" else "dO") for t in OPERANDS[name])
    scaled = matmul.precision.is_scaled
    return {
        "name": name,
        "product": PRODUCTS[name],
        "where": "forward" if name in ("qk", "pv") else "backward",
        "precision": _PRECISIONS[matmul.precision],
        "left": f"{left}: {_GRANULARITIES[matmul.lhs]}" if scaled else "no scales",
        "right": f"{right}: {_GRANULARITIES[matmul.rhs]}" if scaled else "no scales",
    }


def _provenance(capture: Capture, layers: Sequence[Layer]) -> Iterator[tuple[str, str]]:
    for key, value in capture.source.items():
        yield key.replace("_", " "), value if isinstance(value, str) else json.dumps(value)
    yield "recorded with", f"PyTorch {capture.torch_version}"
    yield "loss scale", f"{capture.loss_scale:g} (the loss was multiplied by it; errors are not)"
    yield "layers shown", f"{len(layers)} of {len(capture.calls)}"
    for shape in dict.fromkeys(_shape(layer.call) for layer in layers):
        yield "tensors", shape


def _shape(call: Call) -> str:
    batch, heads, tokens, size = call.q.shape
    keys = call.k.shape[2]
    mask = "causal" if call.is_causal else "full" if call.attn_mask is None else "given"
    length = f"{tokens} tokens" if keys == tokens else f"{tokens} queries, {keys} keys"
    shared = f" ({call.k.shape[1]} of keys)" if call.k.shape[1] != heads else ""
    dtype = str(call.q.dtype).removeprefix("torch.")
    return f"batch {batch}, {heads} heads{shared}, {length}, head size {size}, {dtype}, {mask} mask"
