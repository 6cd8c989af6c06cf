"""Write the table of `sagesim_kernels.pays_off` from a record of the benchmark.

The table has the ratios to the faster SDPA at the shapes of the part "models". It has one entry for
each GPU; the record's replaces an older one of the same GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from sagesim.command import exit_code
from sagesim.files import write_text
from sagesim.terminal import Failure
from sagesim_kernels.bench.machine import one_line
from sagesim_kernels.bench.model_tables import ratio
from sagesim_kernels.bench.models import MODEL_SPECS
from sagesim_kernels.bench.record import read
from sagesim_kernels.bench.tables import Table, cases
from sagesim_kernels.measured_speed import MEASURED, CallShape, expected

_FIGURES: Final = {"gpu": "GPU", "wall": "wall"}
_AXES: Final = {
    "batch": "batch",
    "heads": "heads",
    "queries": "tokens",
    "head_size": "head_dim",
    "kv_heads": "kv_heads",
    "keys": "keys",
    "is_causal": "is_causal",
}
"""Field of `measured_speed.CallShape` -> field of a record's case."""


def entry(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table's entry of a record's GPU.

    Raises:
        ValueError: if the record has no case of the part "models", or if it timed the code of
            another GPU.
    """
    if document["settings"].get("code") is not None:
        raise ValueError("the record timed the code of another GPU")
    if not cases(dict(document), "models"):
        raise ValueError("the record has no case of the part models")
    calls: dict[str, Any] = {}
    for key, case in document["cases"].items():
        if case["part"] == "models":
            calls[key] = {
                "shape": {field: case[name] for field, name in _AXES.items()},
                **{
                    figure: {
                        spec: round(x, 4)
                        for spec in MODEL_SPECS
                        if (x := ratio(case, spec, which)) is not None
                    }
                    for figure, which in _FIGURES.items()
                },
            }
    return {
        "machine": one_line(document["machine"]),
        "command": document["command"],
        "dtype": document["settings"]["dtype"],
        "calls": calls,
    }


def left_out(table: Mapping[str, Any]) -> Table:
    """A table of how well the calls of `MEASURED` predict each one of them that is left out."""
    rows: list[list[str]] = []
    for gpu, one in table.items():
        for figure, words in _FIGURES.items():
            for spec in MODEL_SPECS:
                pairs = list(_left_out(gpu, one, figure, spec))
                known = [(true, answer) for true, answer in pairs if answer is not None]
                if not known:
                    continue
                off = statistics.median(abs(math.log(answer / true)) for true, answer in known)
                right = sum((true > 1) == (answer > 1) for true, answer in known)
                shares = (f"{len(known)} of {len(pairs)}", f"{right} of {len(known)}")
                rows.append([gpu, spec, words, shares[0], f"{math.expm1(off):.0%}", shares[1]])
    head = ["GPU", "spec", "time", "calls with an answer", "median error", "right which is faster"]
    return Table("measured calls predicted from the others", head, rows)


def _left_out(
    gpu: str, one: Mapping[str, Any], figure: str, spec: str
) -> Iterator[tuple[float, float | None]]:
    """The measured ratio of each call, and the one that the others predict."""
    dtype = getattr(torch, one["dtype"])
    for key, call in one["calls"].items():
        if spec in call[figure]:
            others = {k: each for k, each in one["calls"].items() if k != key}
            shape = CallShape(**call["shape"])
            answer = expected(
                {gpu: {**one, "calls": others}},
                gpu,
                shape,
                spec,
                dtype,
                includes_host=figure == "wall",
            )
            yield call[figure][spec], answer.ratio


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        Failure: if the record cannot be used.
        WriteError: if the table cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sagesim_kernels.bench.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("record", type=Path, metavar="RECORD.json")
    parser.add_argument("--out", type=Path, default=MEASURED, help="default: the package's table")
    args = parser.parse_args(argv)
    try:
        document = read(args.record)
        made = entry(document)
    except (OSError, ValueError) as error:
        raise Failure(f"{args.record}: {error}") from None
    table = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    table[document["machine"]["gpu"]] = made
    write_text(args.out, json.dumps(table, indent=1) + "\n")
    print(f"{args.out}: {len(made['calls'])} calls on {made['machine']}")


if __name__ == "__main__":
    sys.exit(exit_code("sagesim_kernels.bench.export", main, {}))
