"""Recompute the files in docs/data that need no GPU. The figures in the docs come from docs/data.

    python docs/build/results.py [--add] [NAME ...]

With --add, a file that consists of rows keeps those that it has, and only the missing rows are
computed. It gives the same file as without if the emulator is the same.

`python -m sagesim_kernels.bench.emulator --out FILE` makes cost_cpu.json and cost_h200.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import captures
import torch
from errors_on_cpu import errors_on_cpu

import sagesim
from sagesim import Precision
from sagesim.analysis import (
    COLUMNS,
    OUTPUTS,
    PAPER_TABLE_1,
    Setting,
    attribute,
    errors,
    errors_of_both,
    gaussian_errors,
    influence,
    pool,
    pool_errors,
)
from sagesim.command import exit_code
from sagesim.files import check_writable, write_text
from sagesim.terminal import Failure
from theory import error_budget
from theory.checks import budget as budget_checks
from theory.checks.samples import captured, gaussian

DATA = Path(__file__).parents[1] / "data"

PER_ROW = "dv=int8@tile_column,block dq=int8@tile_row,block dk=int8@tile_column,block"
LADDER = (
    ("the paper's: per tile and per block", "sagebwd"),
    ("P and dS with a scale per tile row (dQ) or tile column (dK, dV)", f"sagebwd {PER_ROW}"),
    ("and delta from the backward's own P and dP", f"sagebwd {PER_ROW} delta=p"),
    (
        "and Q, K per token in QK",
        f"sagebwd qk=int8@token,token qk_recompute=int8@token,token {PER_ROW} delta=p",
    ),
    ("and right operands per channel and block: `FACTORED`", "factored"),
    ("PV in 16 bit and delta from O: `FACTORED_PV16`", "factored_pv16"),
    ("the same, tiles 128x128", "factored_pv16 block=128x128"),
    ("QK alone in INT8: `FACTORED_QK`, the default", "factored_qk"),
    ("QK in 16 bit, dP in INT8: `FACTORED_QK16`", "factored_qk16"),
    ("FP16 everywhere", "fpa_fp16"),
)
"""Schemes from the paper's to ours. Up to `FACTORED`, each changes one thing in the scheme before
it."""

LARGE_SIGMAS = (3.0, 5.6, 8.0)
LOSS_SCALE_LOG2 = 16
"""Of the shipped capture; see sagesim/data/README.md."""

BOTH = Setting(tokens=1024, draws=8, is_causal=True)
SCHEMES = (
    ("the paper's", "sagebwd"),
    ("the paper's, delta from P", "sagebwd delta=p"),
    ("the paper's, finer scales of P and dS", f"sagebwd {PER_ROW}"),
    ("the paper's, dP in INT8", "sagebwd_all_int8"),
    ("the forward alone in INT8", "sage_forward"),
    ("factored", "factored"),
    ("factored, delta from O", "factored delta=o"),
    ("factored, dP in INT8", "factored dp=int8"),
    ("factored, PV in 16 bit", "factored_pv16"),
    ("QK alone in INT8: the default", "factored_qk"),
    ("factored, QK in 16 bit, dP in INT8", "factored_qk16"),
    ("causal", "causal_safe"),
    ("16 bit", "fpa_fp16"),
)
"""Presets, and what separates the paper's scheme from ours."""

MATCHED = (
    "sagebwd dv=int8@tile_row,block dq=int8@tile_row,block dk=int8@tile_column,block block=128x64"
)
CAUSAL = Setting(tokens=1024, draws=64, is_causal=True)
TABLE_1 = (
    ("sagebwd", Setting()),
    (f"sagebwd {PER_ROW}", Setting()),
    ("sagebwd", CAUSAL),
    (MATCHED, CAUSAL),
    ("factored", Setting()),
    ("factored", CAUSAL),
    ("factored_qk", Setting()),
    ("factored_qk", CAUSAL),
    ("factored_qk16", Setting()),
    ("factored_qk16", CAUSAL),
)

Row = Mapping[str, Any]


def rows_of(
    heads: Iterable[Row], earlier: Sequence[Row], measure: Callable[[Any], Row]
) -> list[Row]:
    """A row for each head, which is the row's first entries and says what is measured.

    earlier: rows that are taken as they are.
    measure: from the place of a head to the rest of its row.
    """
    rows: list[Row] = []
    for place, head in enumerate(heads):
        kept = [row for row in earlier if all(row.get(key) == x for key, x in head.items())]
        if not kept:
            kept = [{**head, **measure(place)}]
            print(f"  {kept[0]}", flush=True)
        rows.append(kept[0])
    return rows


def finding() -> dict[str, Any]:
    calls = captures.shipped()
    rows = []
    for scheme, label in LADDER:
        spec = sagesim.AttentionSpec.parse(label)
        pooled = pool_errors([errors(call, spec) for call in calls])
        int8 = sum(spec.site(s).precision is Precision.INT8 for s in sagesim.SITES)
        relative = {t: pooled[t].rel_l2 for t in OUTPUTS}
        rows.append({"scheme": scheme, "label": spec.label(), "int8": int8, "rel_l2": relative})
    return {"rows": rows}


def attribution() -> dict[str, Any]:
    calls = captures.shipped()
    layers = [attribute(call) for call in calls]
    pooled = pool(layers)
    return {
        "label": pooled.base.label(),
        "summary": pooled.summary(),
        "error": pooled.error,
        "gradient_error": pooled.gradient_error,
        "share": {part.site: part.share for part in pooled.parts},
        "gradient_share": {part.site: pooled.gradient_share(part) for part in pooled.parts},
        "layers": [
            {"name": c.name, "summary": a.summary(), "largest": a.largest().site}
            for c, a in zip(calls, layers, strict=True)
        ],
    }


def smollm2_capture(earlier: Sequence[Row] = ()) -> dict[str, Any]:
    """The schemes of `finding` on SmolLM2, a model that others trained, in both metrics."""
    part = captures.smollm2()
    specs = [sagesim.AttentionSpec.parse(label) for _, label in LADDER]

    def measure(place: int) -> Row:
        both = [errors_of_both(call, specs[place]) for call in part.calls]
        pooled = (pool_errors(each) for each in zip(*both, strict=True))
        return {
            metric: {t: each[t].rel_l2 for t in OUTPUTS}
            for metric, each in zip(("exact", "own"), pooled, strict=True)
        }

    heads = [
        {"scheme": scheme, "label": spec.label()}
        for (scheme, _), spec in zip(LADDER, specs, strict=True)
    ]
    return smollm2_about(part) | {"rows": rows_of(heads, earlier, measure)}


def smollm2_shares(earlier: Sequence[Row] = ()) -> dict[str, Any]:
    """The share of each product in the error of each layer of SmolLM2, in both metrics."""
    part = captures.smollm2(every=1)

    def measure(place: int) -> Row:
        found = attribute(part.calls[place])
        own = found.own_forward
        assert own is not None
        row: dict[str, Any] = {}
        for metric, each in (("exact", found), ("own", own)):
            row[metric] = {
                "error": {t: each.error[t] for t in OUTPUTS},
                "gradient_error": each.gradient_error,
                "gradient_share": {x.site: each.gradient_share(x) for x in each.parts},
                "largest": each.largest().site,
            }
        return row

    heads = [{"name": call.name} for call in part.calls]
    label = sagesim.SAGEBWD.label()
    return smollm2_about(part) | {"label": label, "rows": rows_of(heads, earlier, measure)}


def smollm2_about(part: captures.Part) -> dict[str, Any]:
    """Which part of the model's attention is measured, and on which text."""
    return {
        "model": captures.SMOLLM2.name,
        "text": captures.TEXT,
        "tokens": captures.TOKENS,
        "layers": [int(call.name.split(".")[2]) for call in part.calls],
        "layers_of_model": part.layers,
        "query_heads": part.calls[0].q.shape[1],
        "kv_heads_of_model": part.kv_heads,
    }


def table1(earlier: Sequence[Row] = ()) -> dict[str, Any]:
    measured = [(label, setting, sigma) for label, setting in TABLE_1 for sigma in PAPER_TABLE_1]

    def measure(place: int) -> Row:
        label, setting, sigma = measured[place]
        comparison = gaussian_errors(sigma, sagesim.AttentionSpec.parse(label), setting)
        overall, heads = comparison.overall, comparison.per_head
        row: dict[str, Any] = {t: asdict(overall[t]) for t in COLUMNS}
        row["rel_l2_standard_error"] = {
            t: statistics.stdev(e.rel_l2 for e in heads[t]) / len(heads[t]) ** 0.5 for t in COLUMNS
        }
        return row

    heads = [
        {"label": label, "setting": asdict(setting), "sigma": sigma}
        for label, setting, sigma in measured
    ]
    return {"rows": rows_of(heads, earlier, measure)}


def causality() -> dict[str, Any]:
    return {"rows": {name: asdict(influence(spec)) for name, spec in sagesim.PRESETS.items()}}


def budget() -> dict[str, Any]:
    """Predicted and measured errors on the inputs of Table 1."""
    setting = Setting(draws=4)
    rows = []
    for sigma in PAPER_TABLE_1:
        draws = [setting.problem(sigma, draw).qkvdo for draw in range(setting.draws)]
        q, k, v, do = (torch.stack(x) for x in zip(*draws, strict=True))
        for label in ("sagebwd", "factored"):
            spec = sagesim.AttentionSpec.parse(label)
            predicted = error_budget(q, k, v, do, spec=spec)
            problem = sagesim.AttentionProblem(q=q, k=k, v=v, do=do)
            measured, own = errors_of_both(problem, spec)
            row = {"label": label, "sigma": sigma, "predicted": dict(predicted.error)}
            row["measured"] = {t: measured[t].rel_l2 for t in OUTPUTS}
            row["own_predicted"] = dict(predicted.own_error)
            row["own_measured"] = {t: own[t].rel_l2 for t in OUTPUTS}
            rows.append(row | {"share": predicted.share})
    return {"setting": asdict(setting), "rows": rows}


def shares() -> dict[str, Any]:
    """Predicted and measured share of every product in every error."""
    rows = []
    for spec in budget_checks.SPECS:
        for sample in budget_checks.samples():
            for t, part, predicted, measured in budget_checks.shares(
                sample, error_budget(sample, spec=spec)
            ):
                row = {"label": spec.label(), "inputs": sample.name, "tensor": t, "part": part}
                rows.append(row | {"predicted": predicted, "measured": measured})
    return {"rows": rows}


def both_metrics() -> dict[str, Any]:
    """Errors against full precision and against the own forward, on ordinary and large logits."""
    calls = captures.shipped()
    inputs = {"capture": list(calls)}
    for sigma in (1.0, *LARGE_SIGMAS):
        draws = [BOTH.problem(sigma, draw) for draw in range(BOTH.draws)]
        stacked = {n: torch.stack([getattr(x, n) for x in draws]) for n in ("q", "k", "v", "do")}
        problem = sagesim.AttentionProblem(**stacked, is_causal=BOTH.is_causal)
        inputs[f"Gaussian, sigma {sigma:g}"] = [problem]
    rows = []
    for name, problems in inputs.items():
        for words, label in SCHEMES:
            spec = sagesim.AttentionSpec.parse(label)
            both = zip(*(errors_of_both(x, spec) for x in problems), strict=True)
            exact, own = (pool_errors(each) for each in both)
            row = {"inputs": name, "words": words, "label": spec.label()}
            row["exact"] = {t: exact[t].rel_l2 for t in OUTPUTS}
            rows.append(row | {"own": {t: own[t].rel_l2 for t in OUTPUTS}})
    return {"setting": asdict(BOTH), "rows": rows}


def input16() -> dict[str, Any]:
    """The error of dQ of float32 inputs for three meanings of INPUT16, and two sizes of dO."""
    capture = [x.map(torch.Tensor.float) for x in captured(512)]
    inputs = {"capture": capture}
    inputs["capture, dO without loss scaling"] = [
        replace(x, do=x.do * 2.0**-LOSS_SCALE_LOG2) for x in capture
    ]
    for sigma in (1.0, 5.6):
        inputs[f"Gaussian, sigma {sigma:g}"] = [gaussian(sigma, 512, is_causal=True)]
    rows = []
    for name, problems in inputs.items():
        for label in ("sagebwd", "factored", "factored_qk", "factored_qk16"):
            spec = sagesim.AttentionSpec.parse(label)
            sites = [s for s in sagesim.SITES if spec.site(s).precision is Precision.INPUT16]
            for precision in (Precision.FP16, Precision.BF16, Precision.INPUT16):
                written = sagesim.with_precision(spec, precision, *sites)
                both = zip(*(errors_of_both(x, written) for x in problems), strict=True)
                exact, own = (pool_errors(each)["dq"].rel_l2 for each in both)
                row = {"inputs": name, "label": label, "precision": precision.value}
                rows.append(row | {"exact": exact, "own": own})
    return {"rows": rows}


def statements_of_the_paper() -> dict[str, Any]:
    """Smoothing Q and INT8 dP on the capture; errors by length on Gaussian inputs."""
    calls = captures.shipped()
    rows = []
    for label in ("factored", "factored smooth=qk", "factored dp=int8"):
        spec = sagesim.AttentionSpec.parse(label)
        pooled = pool_errors([errors(call, spec) for call in calls])
        rows.append({"label": label, "rel_l2": {t: pooled[t].rel_l2 for t in OUTPUTS}})
    lengths = []
    for tokens, draws in ((256, 64), (1024, 16), (4096, 2)):
        setting = Setting(tokens=tokens, draws=draws)
        found = gaussian_errors(1.0, sagesim.SAGEBWD, setting).overall
        lengths.append(asdict(setting) | {t: found[t].rel_l2 for t in OUTPUTS})
    return {"rows": rows, "lengths": lengths}


RESULTS: dict[str, Callable[[], dict[str, Any]]] = {
    f.__name__: f
    for f in (
        finding,
        both_metrics,
        input16,
        statements_of_the_paper,
        attribution,
        smollm2_capture,
        smollm2_shares,
        table1,
        causality,
        budget,
        shares,
        errors_on_cpu,
    )
}

CONTINUED: dict[str, Callable[[Sequence[Row]], dict[str, Any]]] = {
    f.__name__: f for f in (smollm2_capture, smollm2_shares, table1)
}
"""Those that take rows of an earlier file."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help="all by default")
    parser.add_argument(
        "--add", action="store_true", help=f"compute missing rows only: {', '.join(CONTINUED)}"
    )
    args = parser.parse_args()
    unknown = set(args.names) - set(RESULTS)
    if unknown:
        parser.error(f"no result is called {', '.join(unknown)}; there are {', '.join(RESULTS)}")
    for name in args.names or RESULTS:
        path = DATA / f"{name}.json"
        check_writable(path)
        print(f"{name} ...", flush=True)
        head = {
            "command": f"python docs/build/results.py {name}",
            "machine": f"CPU, torch {torch.__version__}, sagebwd {sagesim.__version__}",
        }
        if args.add and name in CONTINUED and path.exists():
            earlier = json.loads(path.read_text(encoding="utf-8"))
            if earlier["machine"] != head["machine"]:
                raise Failure(f"{path} is of {earlier['machine']}, and this is {head['machine']}")
            found = CONTINUED[name](earlier["rows"])
        else:
            found = RESULTS[name]()
        write_text(path, json.dumps(head | found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code("results.py", main, {}))
