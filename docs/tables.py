"""Tables that a page computes when it is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grid import markdown
from IPython.display import HTML, Markdown

from sagesim import SITES, AttentionSpec, Delta, Precision

_SHORT = {
    Precision.INT8: "INT8",
    Precision.INPUT16: "16 bit",
    Precision.FP16: "FP16",
    Precision.BF16: "BF16",
    Precision.FP32: "FP32",
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Markdown:
    """As `grid.markdown`."""
    return Markdown(markdown(head, rows))


def precisions(specs: Mapping[str, AttentionSpec]) -> HTML:
    """A row for each spec: the precisions of its products as colours, smoothing and delta."""
    head = ["", *(f"<code>{site}</code>" for site in SITES), "smoothed", "delta from"]
    return HTML(
        "<div class='table-wrapper'><table class='precisions'><thead><tr>"
        + "".join(f"<th scope='col'>{cell}</th>" for cell in head)
        + "</tr></thead><tbody>"
        + "".join(f"<tr>{_precisions(name, spec)}</tr>" for name, spec in specs.items())
        + "</tbody></table></div>"
    )


def _precisions(name: str, spec: AttentionSpec) -> str:
    cells = [f"<th scope='row'><code>{name}</code></th>"]
    for site in SITES:
        precision = spec.site(site).precision
        cells.append(f"<td class='{precision.value}'>{_SHORT[precision]}</td>")
    smoothed = [x for x, on in (("Q", spec.smoothing.q), ("K", spec.smoothing.k)) if on]
    source = "O" if spec.delta is Delta.FROM_O else "P, dP"
    return "".join([*cells, f"<td>{' and '.join(smoothed) or '-'}</td>", f"<td>{source}</td>"])
