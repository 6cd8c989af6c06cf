"""Tables that code cells of the pages compute when the site is built."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from grid import markdown
from IPython.display import HTML, Markdown, display

from sagesim import SITES, AttentionSpec, Delta, Precision
from sagesim_kernels.bench.tables import Table

DATA: Final = Path(__file__).parents[1] / "data"

Row = Mapping[str, Any]
"""A row of a record in docs/data."""

_SHORT = {
    Precision.INT8: "INT8",
    Precision.FP8_E4M3: "FP8",
    Precision.INPUT16: "16 bit",
    Precision.FP16: "FP16",
    Precision.BF16: "BF16",
    Precision.FP32: "FP32",
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Markdown:
    """A table for display; see `grid.markdown`."""
    return Markdown(markdown(head, rows))


def data(name: str) -> dict[str, Any]:
    """The record docs/data/NAME.json."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def show(*several: Table) -> None:
    """Display tables of the benchmark that have rows, each below its title."""
    for each in several:
        if each.rows:
            title = f"{each.title[0].upper()}{each.title[1:]}"
            display(Markdown(f"**{title}**"), table(each.head, each.rows))


def ratios_first(several: Sequence[Table]) -> list[Table]:
    """Tables of models: first the worst and the best ratio, then all ratios, then times."""
    return sorted(
        several, key=lambda each: ("worst case" not in each.head, "times as fast" not in each.title)
    )


def sourced(text: str, *notes: str, machine: str) -> Markdown:
    """Tables, and a paragraph below them: how the figures were measured, and on which machine."""
    return Markdown(f"{text}\n\n{' '.join([*filter(None, notes), machine])}.")


def pivot(
    corner: str,
    rows: Sequence[Mapping[str, Any]],
    row: Callable[[Mapping[str, Any]], str],
    column: Callable[[Mapping[str, Any]], str],
    cell: Callable[[Mapping[str, Any]], str],
) -> str:
    """A Markdown table of records: a row and a column for each value of `row` and `column`.

    Several records of one cell are listed in it. A cell without one is empty.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for each in rows:
        found.setdefault(row(each), {}).setdefault(column(each), []).append(cell(each))
    columns = list(dict.fromkeys(map(column, rows)))
    cells = [[name, *(", ".join(of.get(c, [])) for c in columns)] for name, of in found.items()]
    return markdown([corner, *columns], cells)


def call_of(row: Row) -> str:
    """The call of a row of a record, as `call` has it."""
    heads = row["heads"], row.get("kv_heads", row["heads"])
    mask = "causal" if row["is_causal"] else "full"
    if row["window"] is not None:
        mask = f"window of {row['window']}"
    return call(row["batch"], heads, (row["queries"], row["keys"]), row["head_size"], mask)


def call(
    batch: int, heads: tuple[int, int], tokens: tuple[int, int], head_size: int, mask: str
) -> str:
    """The shape and the mask of a call, as "b1 h32/8 n4096 d64 causal".

    heads: of Q, and of K and V. tokens: of Q, and of K and V.
    """
    of_heads, of_tokens = "/".join(_differing(heads)), "x".join(_differing(tokens))
    return f"b{batch} h{of_heads} n{of_tokens} d{head_size} {mask}"


def _differing(pair: tuple[int, int]) -> list[str]:
    """Both numbers, or one if they are equal."""
    return [str(x) for x in dict.fromkeys(pair)]


def precisions(specs: Mapping[str, AttentionSpec]) -> HTML:
    """A row for each spec: its products coloured by precision, its smoothing, its delta."""
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


def decisions(document: Mapping[str, Any], *names: str) -> Markdown:
    """Design decisions with the figures that decided them: a row for each head size and mask.

    document: of docs/data/design_decisions.json. Figures are of the fewest tokens, and the change
    is over all numbers of tokens.
    """
    chosen = {name: document["decisions"][name] for name in names}
    cells: list[list[str]] = []
    for name, each in chosen.items():
        change = f": {each['alternative']} → {each['chosen']}"
        for kind in dict.fromkeys(_kind(row) for row in each["rows"]):
            of_kind = f", `{kind}`" if kind else ""
            what = f"**{name}** ({each['measured']}{of_kind}, {each['unit']}){change}"
            change = ""
            own = [row for row in each["rows"] if _kind(row) == kind]
            for panel in sorted({_panel(row) for row in own}, key=lambda p: (p[0], bool(p[1]))):
                rows = [row for row in own if _panel(row) == panel]
                cells.append(
                    [what, str(panel[0]), _MASKS[panel[1]], *_compared(rows, each["unit"])]
                )
                what = ""
    text = markdown(
        [
            "what was timed: alternative → as built",
            "d",
            "mask",
            "alternative",
            "as built",
            "change",
        ],
        cells,
    )
    machines = "; ".join(dict.fromkeys(each["machine"] for each in chosen.values()))
    return Markdown(f"{text}\n\n{machines[0].upper()}{machines[1:]}.")


_MASKS: Final = {None: "", True: "causal", False: "full"}


def _panel(row: Mapping[str, Any]) -> tuple[int, bool | None]:
    """Head size, and whether the mask is causal if the measurement has one."""
    return row["head_size"], row.get("is_causal")


def _kind(row: Mapping[str, Any]) -> str:
    """The spec or the kernel that was measured; empty if the decision has only one."""
    return row.get("spec", row.get("part", ""))


def _compared(rows: Sequence[Mapping[str, Any]], unit: str) -> list[str]:
    """The figures at the fewest tokens, and the smallest and the largest change."""
    first = min(rows, key=lambda row: row.get("tokens", 0))
    number = {"share": ".0%", "instructions": ".0f"}.get(unit, ".3g")
    figures = [f"{first[which]:{number}}" for which in ("alternative", "chosen")]
    changes = [row["chosen"] / row["alternative"] - 1 for row in rows]
    ends = dict.fromkeys(f"{change:+.1%}" for change in (min(changes), max(changes)))
    return [*figures, "\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}".join(ends)]
