"""Write the table of `sagesim_kernels.pays_off` from records of the benchmark.

The table has the ratios to the faster SDPA at the shapes of the part "models". It has one entry for
each GPU of the records, which replaces an older one of the same GPU. Several records of a GPU make
one entry: of a call that is in two of them, the last counts. Each call has the number of its
record.
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
from sagesim.spec import FACTORED_QK
from sagesim.terminal import Failure
from sagesim_kernels.bench.fields import (
    COUNT,
    FLAG,
    NUMBER,
    POSITIVE,
    TEXT,
    Each,
    Every,
    Structure,
    check,
)
from sagesim_kernels.bench.machine import one_line
from sagesim_kernels.bench.model_tables import ratio
from sagesim_kernels.bench.models import MODEL_SPECS
from sagesim_kernels.bench.record import read
from sagesim_kernels.bench.tables import Table, cases
from sagesim_kernels.measured_speed import MEASURED, CallShape, expected

DEFAULT: Final = FACTORED_QK.label()

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

_ENTRY: Final[Structure] = {
    "records": Every({"machine": TEXT, "command": TEXT}),
    "dtype": TEXT,
    "calls": Each(
        {
            "record": NUMBER,
            "shape": {name: FLAG if name == "is_causal" else COUNT for name in _AXES},
            **{figure: Each(POSITIVE) for figure in _FIGURES},
        }
    ),
}


def entry(*documents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table's entry of the GPU of some records. Of a call in two, the last counts.

    Raises:
        ValueError: if a record has no case of the part "models", if it timed the code of another
            GPU, or if the records are of several GPUs or dtypes.
    """
    calls = {key: call for i, each in enumerate(documents) for key, call in _calls(each, i).items()}
    for field, values in {
        "GPUs": [each["machine"]["gpu"] for each in documents],
        "dtypes": [each["settings"]["dtype"] for each in documents],
    }.items():
        if len(set(values)) > 1:
            raise ValueError(f"the records are of several {field}: {', '.join(values)}")
    return {
        "records": [
            {"machine": one_line(each["machine"]), "command": each["command"]} for each in documents
        ],
        "dtype": documents[0]["settings"]["dtype"],
        "calls": calls,
    }


def _calls(document: Mapping[str, Any], record: int) -> dict[str, Any]:
    """Return the shapes and ratios of a record, with its place among the records."""
    if document["settings"].get("code") is not None:
        raise ValueError("the record timed the code of another GPU")
    if not cases(dict(document), "models"):
        raise ValueError("the record has no case of the part models")
    calls: dict[str, Any] = {}
    for key, case in document["cases"].items():
        if case["part"] == "models":
            calls[key] = {
                "record": record,
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
    return calls


def smallest_that_pays(one: Mapping[str, Any], spec: str = DEFAULT) -> str:
    """A sentence on the number of tokens from which measured calls of a GPU pay off."""
    parts: list[str] = []
    for figure, words in (("wall", "with the host's time"), ("gpu", "for the GPU alone")):
        calls = [call for call in one["calls"].values() if spec in call[figure]]
        tokens = [call["shape"]["queries"] for call in calls if call[figure][spec] > 1]
        if not tokens:
            parts.append(f"{words}, at none of {len(calls)} measured shapes")
            continue
        least = min(tokens)
        longer = sum(call["shape"]["queries"] >= least for call in calls)
        parts.append(
            f"{words}, at no measured shape of less than {least} tokens, and at {len(tokens)} of "
            f"the {longer} of {least} tokens and more"
        )
    return f"`{spec}` is faster than the faster SDPA: {'; '.join(parts)}."


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


def _exported(path: Path) -> dict[str, Any]:
    """Read a record that can be exported.

    Raises:
        Failure: if it cannot.
    """
    try:
        document = read(path)
    except OSError as error:
        raise Failure(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Failure(str(error)) from None
    try:
        entry(document)
    except ValueError as error:
        raise Failure(f"{path}: {error}") from None
    return document


def _table(path: Path) -> dict[str, Any]:
    """Read a table that this command has written.

    Raises:
        Failure: if the file is none.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        check(table, Each(_ENTRY), "")
    except OSError as error:
        raise Failure(f"--out {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Failure(f"--out {path}: not a table of this command: {error}") from None
    return table


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
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD.json")
    parser.add_argument("--out", type=Path, default=MEASURED, help="default: the package's table")
    args = parser.parse_args(argv)
    table = _table(args.out) if args.out.exists() else {}
    of_gpus: dict[str, dict[Path, dict[str, Any]]] = {}
    for path in args.records:
        document = _exported(path)
        of_gpus.setdefault(document["machine"]["gpu"], {})[path] = document
    made: dict[str, dict[str, Any]] = {}
    for gpu, documents in of_gpus.items():
        try:
            made[gpu] = entry(*documents.values())
        except ValueError as error:
            raise Failure(f"{', '.join(map(str, documents))}: {error}") from None
    write_text(args.out, json.dumps(table | made, indent=1) + "\n")
    for one in made.values():
        machines = "; ".join(dict.fromkeys(each["machine"] for each in one["records"]))
        print(f"{args.out}: {len(one['calls'])} calls on {machines}")


if __name__ == "__main__":
    sys.exit(exit_code("sagesim_kernels.bench.export", main, {}))
