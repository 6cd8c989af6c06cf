"""Find which of the seven matrix products causes the error of attention on your tensors.

The command emulates attention under the spec. It then emulates it with only one product rounded,
and with all but one product rounded, for each product. From these it computes each product's share
of the squared error of O, dS, dQ, dK and dV. Errors are relative L2 errors against float64,
|error| / |exact|. Pooled over layers, an error is a geometric mean and a share is a mean.

The table ends with errors and shares against the exact gradients of the spec's own forward: those
for the P that its forward computed. They show how well the backward fits the forward.

A large model takes minutes. --layers, --heads and --rows measure a part of it; the standard error
of the largest share that comes from the sample is printed with it.

examples:
  sagesim attribute llama
  sagesim attribute mine.safetensors --spec "sagebwd dp=int8" --layers 0 11
  sagesim attribute llama --report report.html
  sagesim attribute mine.safetensors --heads 1 --rows 512

The report is one HTML file with explanations. It needs no network.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sagesim.cli.inputs import (
    add_capture,
    add_spec,
    load,
    parse_spec,
    path_of,
    require_writable,
    select,
)
from sagesim.terminal import Failure, progress, stdout, table

if TYPE_CHECKING:
    from rich.table import Table

    from sagesim.analysis import Attribution, Layer, SiteEffect

HELP: Final = "find which of the seven products causes the error (start here)"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_capture(parser)
    add_spec(parser)
    parser.add_argument("--report", type=Path, metavar="OUT.html", help="also write a report")
    for name, what in (
        ("--heads", "heads of K and V of each layer, evenly spaced"),
        ("--rows", "queries of each head, in evenly spaced blocks"),
    ):
        parser.add_argument(
            name, type=int, metavar="N", help=f"measure only N {what} (default: all)"
        )


def run(args: argparse.Namespace) -> None:
    """Attribute the error of each layer, write the report, and print the tables."""
    spec = parse_spec(args.spec)
    for name in ("heads", "rows"):
        number = getattr(args, name)
        if number is not None and number < 1:
            raise Failure(f"--{name} {number} is not a positive number")
    capture = load(args.capture)
    calls = select(capture, args.layers)
    for name, what, most in (
        ("heads", "heads of K and V", max(call.k.shape[:-2].numel() for call in calls)),
        ("rows", "queries", max(call.q.shape[-2] for call in calls)),
    ):
        if (number := getattr(args, name) or 0) > most:
            raise Failure(f"--{name} {number}: no measured layer has more than {most} {what}")
    if args.report is not None:
        require_writable(args.report, inputs=[path_of(args.capture)])

    from sagesim.analysis import (
        Layer,
        Sample,
        advice,
        attribute,
        headline,
        limitations,
        memory,
        pool,
        render,
        run_count,
    )
    from sagesim.files import write_text

    sample = Sample(args.heads, args.rows) if args.heads or args.rows else None
    gigabytes = max(memory(call, spec, sample) for call in calls) / 1e9
    hint = f"{gigabytes:.1f} GB besides the capture; --layers, --heads and --rows measure less"
    layers: list[Layer] = []
    with progress(f"attributing the error of {len(calls)} layers", hint) as bar:
        task = bar.add_task("", total=sum(run_count(call, spec, sample) for call in calls))
        for call in calls:
            found = attribute(call, base=spec, sample=sample, progress=lambda: bar.advance(task))
            layers.append(Layer(call, found))
    pooled = pool([layer.attribution for layer in layers])
    # Before the tables, because the reader of a pipe may stop reading in their middle.
    if args.report is not None:
        page = render(layers, capture=capture, name=args.capture, command=args.command_line)
        write_text(args.report, page)

    console = stdout()
    console.print(f"{args.capture} under {spec.label()}\n")
    console.print(_pooled_table(pooled))
    if len(layers) > 1:
        console.print(_layers_table(layers))
    console.print("\n".join([headline(pooled), *limitations(pooled), *map(str, advice(pooled))]))
    if args.report is not None:
        console.print(f"report: {args.report}")


def _pooled_table(pooled: Attribution) -> Table:
    from sagesim.analysis import OUTPUTS, TITLES

    rows = table("pooled over layers", "", *(TITLES[t] for t in OUTPUTS))

    def row(name: str, values: Mapping[str, float], form: str) -> None:
        rows.add_row(name, *(format(values[t], form) for t in OUTPUTS))

    def section(
        title: str, of: Callable[[SiteEffect], Mapping[str, float]], effects: tuple[SiteEffect, ...]
    ) -> None:
        rows.add_section()
        rows.add_row(title, style="bold")
        for effect in effects:
            row(f"  {effect.site}", of(effect), ".1%" if effects is parts else ".2e")

    parts, every = pooled.parts, (*pooled.sites, pooled.logits)
    row("relative L2 error", pooled.error, ".2e")
    section("share of the squared error", lambda e: e.share, parts)
    row("  interaction", {t: pooled.interaction(t) for t in OUTPUTS}, ".1%")
    section("error with only this product rounded", lambda e: e.only, every)
    section("error with all other products rounded", lambda e: e.without, every)
    rows.add_section()
    rows.add_row("error with this option changed", style="bold")
    for effect in pooled.switches:
        row(f"  {effect.title}", effect.error, ".2e")
    own = pooled.own_forward
    assert own is not None
    rows.add_section()
    rows.add_row("against the exact gradients of its own forward", style="bold")
    row("relative L2 error", own.error, ".2e")
    for effect in own.parts:
        row(f"  {effect.site}", effect.share, ".1%")
    row("  interaction", {t: own.interaction(t) for t in OUTPUTS}, ".1%")
    return rows


def _layers_table(layers: list[Layer]) -> Table:
    from sagesim.analysis import OUTPUTS, TITLES

    rows = table("relative L2 error by layer", "layer", *(TITLES[t] for t in OUTPUTS))
    rows.add_column("largest share of the gradients' error")
    for layer in layers:
        a = layer.attribution
        top = a.largest()
        rows.add_row(
            layer.call.title,
            *(f"{a.error[t]:.2e}" for t in OUTPUTS),
            f"{top.site} {a.gradient_share(top):.0%}" if a.is_finite else "not finite",
        )
    return rows
