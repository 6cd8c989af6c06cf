"""Write tables from docs/data between the `table` marks of README.md and docs/*.md,
and the figure of README.md.

python docs/build/render.py           write the pages
python docs/build/render.py --check   write nothing; exit 1 if a page is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import aims
import experiment
import experiment_outcome
import pretraining
import promises
import records
import several_gpus
import smollm2
import smollm2_seeds
import time_and_error
import torchtitan_steps
from grid import markdown

from sagesim import PRESETS, SITES, AttentionSpec, Precision
from sagesim.analysis import COLUMNS, PAPER_TABLE_1, TITLES
from sagesim.command import exit_code
from sagesim.files import write_text
from sagesim_kernels.bench.machine import card, one_line
from sagesim_kernels.bench.model_tables import extremes
from sagesim_kernels.bench.tables import cases, ratio

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
OUTPUTS = ("o", "ds", "dq", "dk", "dv")
FINE = "sagebwd dv=int8@tile_column,block dq=int8@tile_row,block dk=int8@tile_column,block"


def load(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((ROOT / "docs" / "data" / f"{name}.json").read_text())
    return result


def source(data: dict[str, Any]) -> str:
    note = f" {data['note']}" if "note" in data else ""
    file = f"`{data['file']}`: " if "file" in data else ""
    return f"\n\n{file}`{data['command']}` on {data['machine']}.{note}"


def finding() -> str:
    """From the paper's scheme to ours on the shipped capture."""
    data = load("finding")
    by_label = {row["label"]: row["rel_l2"] for row in data["rows"]}
    gain = {t: by_label["sagebwd"][t] / by_label["factored"][t] for t in OUTPUTS}
    rows = [
        [row["scheme"], str(row["int8"]), *(f"{row['rel_l2'][t]:.4f}" for t in OUTPUTS)]
        for row in data["rows"]
    ]
    head = ["scheme", "INT8 products", *(TITLES[t] for t in OUTPUTS)]
    gains = ", ".join(f"{TITLES[t]} {gain[t]:.1f}x" for t in ("ds", "dq", "dk", "dv"))
    return (
        f"{markdown(head, rows)}\n\nOn this capture, the errors of `FACTORED` against full "
        f"precision are smaller than those of the paper's scheme by: {gains}." + source(data)
    )


TRAINED, LARGE = "capture", "Gaussian, sigma 5.6"


def gains() -> str:
    """What `FACTORED` gains in dQ in both metrics, on ordinary and on large logits."""
    data = load("both_metrics")
    dq = {(r["inputs"], r["label"], m): r[m]["dq"] for r in data["rows"] for m in ("exact", "own")}

    def gain(inputs: str, label: str, metric: str) -> str:
        return f"{dq[inputs, 'sagebwd', metric] / dq[inputs, label, metric]:.1f}x"

    cells = []
    for label, words in (
        ("factored", "`FACTORED`"),
        ("sagebwd delta=p", "the paper's scheme with delta from P"),
        (FINE, "the paper's scheme with finer scales of P and dS"),
        ("factored_qk16", "`FACTORED_QK16`"),
    ):
        cells.append(
            [words]
            + [gain(inputs, label, m) for inputs in (TRAINED, LARGE) for m in ("exact", "own")]
        )
    head = ["dQ error of the paper's scheme over that of"]
    head += [
        f"{inputs}: {metric}"
        for inputs in ("shipped capture", "large logits")
        for metric in ("full precision", "own forward")
    ]
    worst = dq["Gaussian, sigma 8", "sage_forward", "exact"]
    return (
        markdown(head, cells)
        + "\n\nLarge logits are Gaussian Q and K of standard deviation 5.6, causal, "
        f"{data['setting']['tokens']} tokens. There, the dQ error of the paper's scheme is "
        f"{dq[LARGE, 'sagebwd', 'exact']:.3f} against full precision and "
        f"{dq[LARGE, 'sagebwd', 'own']:.3f} against its own forward. `SAGE_FORWARD` should not be "
        f"used with large logits: its dQ error is {dq[LARGE, 'sage_forward', 'exact']:.2f} there, "
        f"and {worst:.2f} at a standard deviation of 8." + source(data)
    )


def both_metrics() -> str:
    """The error of dQ of every scheme on all inputs, in both metrics."""
    data = load("both_metrics")
    inputs = list(dict.fromkeys(row["inputs"] for row in data["rows"]))
    short = [name.replace("Gaussian, ", "") for name in inputs]
    parts = []
    for metric, words in (("exact", "full precision"), ("own", "the own forward")):
        rows = []
        for label in dict.fromkeys(row["label"] for row in data["rows"]):
            own = {r["inputs"]: r for r in data["rows"] if r["label"] == label}
            spec = AttentionSpec.parse(label)
            int8 = sum(spec.site(s).precision is Precision.INT8 for s in SITES)
            name = f"`{label}`" if label in PRESETS else own[inputs[0]]["words"]
            rows.append([name, str(int8), *(f"{own[x][metric]['dq']:.4f}" for x in inputs)])
        parts.append(
            f"Error of dQ against {words}:\n\n"
            + markdown(["scheme", "INT8 products", *short], rows)
        )
    setting = data["setting"]
    return (
        "\n\n".join(parts)
        + f"\n\nsigma: Gaussian Q and K of this standard deviation, {setting['tokens']} tokens, "
        f"head size {setting['head_dim']}, causal, {setting['draws']} draws." + source(data)
    )


def budget_line() -> str:
    """How far the predicted errors are from the measured ones."""
    data = load("budget")
    ratios = [row["measured"][t] / row["predicted"][t] for row in data["rows"] for t in OUTPUTS]
    within = sum(0.75 <= x <= 1.25 for x in ratios)
    least, most = smollm2.budget_ends()
    return (
        f"On the inputs of the paper's Table 1, {within} of {len(ratios)} measured errors are "
        "within a quarter of the predicted ones. In single layers of SmolLM2-135M, measured errors "
        f"are {least:.2f} to {most:.2f} times the predicted ones "
        "([more](docs/integrations.md#a-pretrained-model))."
    )


def input16() -> str:
    """The errors of float32 inputs if INPUT16 is FP16, BF16, and what it is."""
    data = load("input16")
    meanings = {"fp16": "all FP16", "bf16": "all BF16", "input16": "INPUT16"}
    found = {(r["inputs"], r["label"], r["precision"]): r for r in data["rows"]}
    rows = [
        [name, f"`{label}`"]
        + [f"{found[name, label, p][m]:.4f}" for m in ("exact", "own") for p in meanings]
        for name, label in dict.fromkeys((r["inputs"], r["label"]) for r in data["rows"])
    ]
    head = ["inputs", "spec"]
    head += [
        f"{words}: {m}" for m in ("full precision", "own forward") for words in meanings.values()
    ]
    return "Relative L2 error of dQ:\n\n" + markdown(head, rows) + source(data)


def statements_of_the_paper() -> str:
    """What the emulator says about three statements of the paper."""
    data = load("statements_of_the_paper")
    rows = [
        [f"`{row['label']}`", *(f"{row['rel_l2'][t]:.4f}" for t in OUTPUTS)] for row in data["rows"]
    ]
    by_length = ", ".join(f"{x['dq']:.3f} for {x['tokens']}" for x in data["lengths"])
    return (
        markdown(["on the capture", *(TITLES[t] for t in OUTPUTS)], rows)
        + "\n\nErrors hardly grow with the length. The dQ error of SageBwd on Gaussian inputs of "
        f"sigma 1 is {by_length} tokens." + source(data)
    )


def attribution() -> str:
    """Each product's share of the error on the shipped capture."""
    data = load("attribution")
    rows = [
        [f"`{site}`", f"{data['gradient_share'][site]:.0%}", *(f"{share[t]:.0%}" for t in OUTPUTS)]
        for site, share in data["share"].items()
    ]
    errors = [data["gradient_error"], *(data["error"][t] for t in OUTPUTS)]
    rows.append(["relative L2 error", *(f"{error:.4f}" for error in errors)])
    head = ["share of the squared error", "dQ, dK, dV together", *(TITLES[t] for t in OUTPUTS)]
    table = markdown(head, rows)
    by_part: dict[str, list[str]] = {}
    for index, layer in enumerate(data["layers"]):
        by_part.setdefault(layer["largest"], []).append(str(index))
    largest = "; ".join(
        f"`{part}` in layer{'s' * (len(n) > 1)} {', '.join(n)}" for part, n in by_part.items()
    )
    return (
        f"**{data['summary']}** This is the mean over the layers. The product with the largest "
        f"share in each layer: {largest}.\n\n{table}\n\nThe error of dQ, dK and dV together is "
        f"the root mean square of their relative errors.{source(data)}"
    )


def table1() -> str:
    """Table 1 of the paper: our errors beside the printed ones."""
    data = load("table1")
    parts = []
    by_setting: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in data["rows"]:
        by_setting.setdefault((row["label"], json.dumps(row["setting"])), []).append(row)
    for (label, setting_json), measured in by_setting.items():
        setting = json.loads(setting_json)
        rows, worst = [], 0.0
        for row in measured:
            cells = [f"{row['sigma']:g}"]
            for t, (_, theirs) in zip(COLUMNS, PAPER_TABLE_1[row["sigma"]], strict=True):
                ours = row[t]["rel_l2"]
                worst = max(worst, abs(ours - theirs))
                cells += [f"{ours:.4f} ± {row['rel_l2_standard_error'][t]:.4f}", f"{theirs:.4f}"]
            rows.append(cells)
        head = ["sigma"] + [c for t in COLUMNS for c in (TITLES[t], "paper")]
        mask = "causal" if setting["is_causal"] else "full"
        parts.append(
            f"`{label}`, {setting['tokens']} tokens, head size {setting['head_dim']}, {mask} mask, "
            f"{setting['draws']} draws. Largest difference from the paper: {worst:.4f}.\n\n"
            + markdown(head, rows)
        )
    return "\n\n".join(parts) + source(data)


def causality() -> str:
    """The influence of later tokens on earlier rows."""
    data = load("causality")
    rows = [
        [f"`{name}`", *(f"{row[t]:.2g}" for t in ("o", "dq"))] for name, row in data["rows"].items()
    ]
    return markdown(["preset", "O", "dQ"], rows) + source(data)


def frontier() -> str:
    """Errors of specs with 8-bit products in the backward, relative to the paper's scheme."""
    data = load("frontier")
    inputs = list(dict.fromkeys(row["inputs"] for row in data["rows"]))
    by = {(row["inputs"], row["label"]): row for row in data["rows"]}
    (reference, *schemes) = {row["label"]: row["words"] for row in data["rows"]}.items()
    parts = []
    for metric, words, tensors in (
        ("exact", "full precision", ("o", "dq", "dk", "dv")),
        ("own", "the own forward", ("dq", "dk", "dv")),
    ):
        rows = []
        for label, scheme in schemes:
            cells = []
            for t in tensors:
                ratios = [by[x, label][metric][t] / by[x, reference[0]][metric][t] for x in inputs]
                cell = f"{min(ratios):.2f} to {max(ratios):.2f}"
                cells.append(f"**{cell}**" if max(ratios) > 1 else cell)
            worse = sum(bool(by[x, label]["worse"][metric]) for x in inputs)
            rows.append([scheme, f"`{label}`", *cells, str(worse)])
        head = ["scheme", "label", *(TITLES[t] for t in tensors), "inputs with a larger error"]
        parts.append(
            f"Errors against {words}, relative to those of `{reference[0]}`, over all inputs:\n\n"
            + markdown(head, rows)
        )
    setting = data["setting"]
    return (
        "\n\n".join(parts)
        + f"\n\nBold: larger than the error of `{reference[0]}` on some input. The "
        f"{len(inputs)} inputs: {'; '.join(inputs)}. sigma is the standard deviation of Q and K. "
        f"An error is a geometric mean over the layers of a capture, or over {setting['draws']} "
        f"draws of Gaussian inputs of {setting['tokens']} tokens if nothing else is said, head "
        f"size {setting['head_dim']}. `docs/data/frontier.json` has every error." + source(data)
    )


def cost(name: str) -> str:
    """The emulator's time and memory."""
    data = load(name)
    batch, heads, tokens, head_dim = data["shape"]
    rows = [
        [
            f"`{run}`",
            f"{1000 * r['seconds']:.0f} ms",
            f"{r['ratio']:.2f}",
            f"{r['bytes'] / 1e6:.0f} MB",
        ]
        for run, r in data["runs"].items()
    ]
    many = "s" * (heads > 1)
    return (
        f"{batch} x {heads} head{many}, {tokens} tokens, head size {head_dim}, float32, "
        f"forward and backward, medians of {data['rounds']}.\n\n"
        + markdown(["", "time", "x eager", "memory added"], rows)
        + (source(data) if name == "cost_cpu" else records.with_age(source(data), data["machine"]))
    )


def table1_kernels() -> str:
    """Table 1 through the kernels and the emulator."""
    data = load("table1_kernels")
    parts = []
    for dtype in dict.fromkeys(row["dtype"] for row in data["rows"]):
        measured = [row for row in data["rows"] if row["dtype"] == dtype]
        rows = [
            [
                f"`{row['label']}`",
                f"{row['sigma']:g}",
                *(f"{row[t][who]:.4f}" for t in COLUMNS for who in ("kernels", "emulator")),
                f"{max(row[t]['between'] for t in COLUMNS):.0e}",
            ]
            for row in measured
        ]
        head = ["spec", "sigma"]
        head += [cell for t in COLUMNS for cell in (TITLES[t], "emulator")] + ["between"]
        parts.append(f"{dtype} inputs:\n\n{markdown(head, rows)}")
    setting = data["setting"]
    return (
        "\n\n".join(parts)
        + f"\n\nRelative L2 against float64, {setting['tokens']} tokens, head size "
        f"{setting['head_dim']}, full mask, {setting['draws']} draws. `between` is the largest "
        "relative L2 distance between kernels and emulator."
        + records.with_age(source(data), data["machine"])
    )


GPU_CHECKS = {
    "gpu tests": "every test marked `gpu`, without those of other rows",
    "tensors beyond int32": "tensors with more than 2**31 elements",
    "whole models": "training of whole models in the frameworks",
    "tests of Hopper's kernels": "Hopper's own kernels",
    "20,000 fuzz cases": "kernels against the emulator on drawn calls",
    **{
        f"{check}, {code} code": f"{looks_for}, in the code that {gpus} get"
        for code, gpus in (("sm_80", "A100 GPUs"), ("sm_89", "RTX 40 GPUs"))
        for check, looks_for in (
            ("contract tests", "kernels against the emulator on chosen calls"),
            ("attention calls", "accuracy, symmetries and repeated runs of attention calls"),
            ("20,000 fuzz cases", "kernels against the emulator on drawn calls"),
        )
    },
    "memcheck": "invalid memory accesses",
    "synccheck": "invalid use of barriers",
    "racecheck": "races in shared memory",
    "memcheck, sm_80 code": "invalid memory accesses, in the code that A100 GPUs get",
    "synccheck, sm_80 code": "invalid use of barriers, in that code",
    "racecheck, sm_80 code": "races in shared memory, in that code",
    "racecheck of a control": "the same false positives in correct kernels",
}
"""What each check of scripts/gpu_checks.py looks for."""


def gpu_checks() -> str:
    """What was run on a GPU, and its result."""
    data = load("gpu_checks")
    rows: list[list[str]] = []
    versions: set[str] = set()
    for name, c in data["checks"].items():
        gpus, software = c["machine"].split(", ", 1)
        versions.add(software)
        has_not_ended = c.get("until_cut_off", {"failed": 1})["failed"] == 0
        passed = "yes" if c["passed"] else "**not ended**" if has_not_ended else "**no**"
        rows.append([name, GPU_CHECKS[name], passed, _result(c), gpus])
    return (
        markdown(["check", "looks for", "passed", "result", "GPUs"], rows)
        + f"\n\n`{data['command']}` with {'; '.join(sorted(versions))}. "
        "`docs/data/gpu_checks.json` has the command of each check."
        + _age_of_checks(data["checks"])
    )


def _age_of_checks(checks: dict[str, Any]) -> str:
    """Which checks were not made with the present kernels."""
    old = [name for name, check in checks.items() if records.age(check["machine"])]
    if not old:
        return ""
    which = "All rows" if len(old) == len(checks) else f"The rows {', '.join(map(repr, old))}"
    return f"\n\n**{which} are of earlier kernels**: their sources have changed since."


def whole_models(checks: dict[str, Any] | None = None) -> str:
    """The result of the frameworks' tests on a GPU."""
    checks = load("gpu_checks")["checks"] if checks is None else checks
    if "whole models" not in checks:
        return "They have not run on a GPU yet."
    check = checks["whole models"]
    failure = "" if check["passed"] else "**They did not all pass**: "
    return f"{failure}{_result(check)}.\n\n`{check['command']}` on {check['machine']}."


def _result(check: dict[str, Any]) -> str:
    """The counts that a check printed last, and what compute-sanitizer reported of each kernel."""
    if ended := check.get("until_cut_off"):
        of = f" of {ended['of']}" if "of" in ended else ""
        tests = f"{ended['passed']}{of} tests passed, {ended['failed']} failed"
        before = check.get("passed_in_a_run_before")
        earlier = f"; {before:,} others passed in earlier runs" if before else ""
        return f"{tests}, others did not end in {round(check['seconds'])} s{earlier}"
    printed = " ".join(line for line in check["printed"] if not line.startswith("[gw"))

    def counts(pattern: str, what: str) -> list[str]:
        found = map(int, re.findall(rf"(\d+) {pattern}", printed))
        return [f"{n:,} {what.replace('tests', 'test') if n == 1 else what}" for n in found]

    found = counts("failed", "tests failed") + counts("passed", "tests passed")
    if before := check.get("passed_in_a_run_before"):
        found.append(f"{before:,} in earlier runs")
    found += counts("skipped in", "skipped")
    if problems := re.findall(r"(\d+) configurations", printed):
        found.append(f"{sum(map(int, problems))} small problems")
    is_clean = "ERROR SUMMARY: 0 errors" in printed or "0 hazards displayed" in printed
    if is_clean and check["exit_code"] == 0:
        found.append("no report")
    places = {where.split(" in ")[0]: n for where, n in check.get("reports", {}).items()}
    found += [f"reports of {n:,} reads in `{kernel}`" for kernel, n in places.items()]
    if not places and "no report" not in found:
        found += counts("hazards? displayed", "reports")
    return ", ".join(found)


def speed() -> str:
    """Speed relative to three peers from 4096 tokens on, and at shapes of models.

    A row is of one record. A record has a row if it is the newest with a peer of that row.
    """
    peers = {
        "sdpa flash": "FlashAttention-2 (SDPA)",
        "sdpa cudnn": "cuDNN (SDPA)",
        "flash-attn-4": "FlashAttention-4",
    }
    rows: list[list[str]] = []
    used: dict[str, dict[str, Any]] = {}
    for spec, head_size in product(("factored_qk", "sagebwd", "factored"), (64, 128)):
        known: set[str] = set()
        for data in time_and_error.long_records(head_size):
            timed = [x for x in cases(data, "speed") if x["head_dim"] == head_size]
            ours = [x for x in timed if x["tokens"] >= 4096 and spec in x["runs"]]
            new = [x for x in peers if x not in known and any(x in case["runs"] for case in ours)]
            if not new:
                continue
            lengths = [case["tokens"] for case in ours]
            kernels = "earlier" if records.age(data["machine"]) else "present"
            tokens = f"{min(lengths)} to {max(lengths)}"
            cells = [f"`{spec}`", str(head_size), tokens]
            for peer in peers:
                found = [ratio(x, spec, peer) for x in ours if peer in new and peer in x["runs"]]
                cells.append(f"{min(found):.2f} to {max(found):.2f}" if found else "")
            rows.append([*cells, card(data["machine"]), kernels])
            known.update(new)
            used[data["file"]] = data
    of_models, before = records.of_models(), records.of_models_besides()
    sources = [source(x | {"machine": one_line(x["machine"])}) for x in used.values()]
    head = ["spec", "head size", "tokens", *peers.values(), "GPU", "kernels"]
    return (
        markdown(head, rows)
        + "\n\nEach range is over these numbers of tokens, causal and full masks; bfloat16. The "
        "sources of *earlier* kernels have changed since they were measured."
        + "".join(sources)
        + "\n\n"
        + model_speed(of_models, before)
        + f"\n\n{aims.summary()} ([which](docs/speed.md#aims-and-what-was-reached))."
    )


def model_speed(data: dict[str, Any] | None, before: Sequence[dict[str, Any]] = ()) -> str:
    """Speed relative to the faster SDPA at the worst and the best shape of models.

    before: earlier records, each with the cases that newer ones lack.
    """
    if data is None:
        return (
            "These are long sequences. Shapes of models, and times that include the host's, are "
            "not in the record yet."
        )
    _, head, rows = extremes(data, *before)
    shapes = [sum(case["part"] == "models" for case in each["cases"].values()) for each in before]
    lacking = "".join(
        f" {n} {'shape is' if n == 1 else 'shapes are'} from an earlier record, on "
        f"{each['machine']['gpu']}, of kernels {each['machine']['kernels']}."
        for n, each in zip(shapes, before, strict=True)
        if n
    )
    text = (
        "The worst and the best of the shapes of models, relative to the faster of "
        "FlashAttention-2 (SDPA) and cuDNN (SDPA). `wall` is the time of a call in a loop of eager "
        "calls, with the host's time included:\n\n"
        + markdown(head, [[f"`{spec}`", *cells] for spec, *cells in rows])
        + source(data | {"machine": one_line(data["machine"])})
        + lacking
    )
    return records.with_age(text, data["machine"])


def qk16_speed() -> str:
    """The times of `factored_qk16` beside those of the default spec and of cuDNN."""
    data = records.load("bench_qk16")
    ours, default = data["settings"]["specs"]
    head = ["head size", "mask", "tokens", f"`{ours}`", f"`{default}`", "cuDNN (SDPA)", "ratio"]
    rows: list[list[str]] = []
    for case in sorted(cases(data, "speed"), key=lambda x: (x["head_dim"], x["is_causal"])):
        times = [case["runs"][x]["both"]["ms"] for x in (ours, default, "sdpa cudnn")]
        mask = "causal" if case["is_causal"] else "full"
        shape = [str(case["head_dim"]), mask, str(case["tokens"])]
        rows.append([*shape, *(f"{x:.2f}" for x in times), f"{times[0] / times[1]:.2f}"])
    return (
        markdown(head, rows)
        + f"\n\nForward and backward in milliseconds. The ratio is `{ours}` to `{default}`. "
        + f"`{ours}` runs on the portable kernels, and `{default}` on those for Hopper."
        + records.with_age(source(data | {"machine": one_line(data["machine"])}), data["machine"])
    )


def _caught(name: str) -> str:
    """How many planted bugs of a record the tests caught, and which they missed."""
    data = load(name)
    missed = [bug["name"] for bug in data["bugs"] if not bug["caught"]]
    words = f"**{data['caught']} of {len(data['bugs'])} planted bugs are caught.**"
    return words + (f" Missed: {_names(missed)}." if missed else "")


def _names(names: list[str]) -> str:
    return "; ".join(f"*{name}*" for name in names)


def mutations() -> str:
    """How many planted bugs the tests caught, and how many of the script's are not recorded."""
    data = load("mutations")
    recorded = {bug["name"]: bug.get("commit") for bug in data["bugs"]}
    script = runpy.run_path(str(ROOT / "scripts" / "mutate.py"))
    every = [bug.name for bug in script["BUGS"]]
    words = _caught("mutations")
    if unknown := [name for name in every if name not in recorded]:
        words += f" {len(unknown)} of the script's {len(every)} are not recorded yet."
    if old := sum(commit is None for commit in recorded.values()):
        words += f" {old} of the record were planted in earlier commits than the others."
    return words + source(data)


def ampere_mutations() -> str:
    """How many bugs planted in the kernels for mma.sync the tests caught, and which they missed."""
    return _caught("mutations_ampere") + source(load("mutations_ampere"))


def hopper_mutations() -> str:
    """How many bugs planted in the kernels for Hopper the tests caught, and which they missed."""
    data = load("mutations_hopper")
    bugs = data["bugs"]
    endless = [bug for bug in bugs if bug["by"].startswith("no end")]
    missed = [bug["name"] for bug in bugs if not bug["caught"]]
    script = runpy.run_path(str(ROOT / "scripts" / "mutate.py"))
    every = [bug.name for bug in script["HOPPER_BUGS"]]
    unknown = {*every} - {bug["name"] for bug in bugs}
    caught = data["caught"] - len(endless)
    words = f"**{caught} of {len(bugs)} planted bugs are caught by a test that fails.**"
    if endless:
        words += f" With {len(endless)} the tests did not end in their time."
    if missed:
        words += f" Missed: {_names(missed)}."
    if unknown:
        words += f" {len(unknown)} of the script's {len(every)} are not recorded yet."
    return words + source(data)


TABLES: dict[str, Callable[[], str]] = {
    "delta_or_scales": experiment.arms,
    "delta_or_scales_outcome": experiment_outcome.outcome,
    "delta_or_scales_line": experiment_outcome.in_one_line,
    "delta_or_scales_models": experiment_outcome.models,
    "leak": experiment.leak,
    "batch_or_updates": experiment.cells,
    "qk_gain": experiment.gains,
    "pretraining": pretraining.finals,
    "pretraining_outcome": pretraining.outcome,
    "pretraining_settings": pretraining.settings,
    "table2": pretraining.table_2,
    **{
        f.__name__: f
        for f in (
            finding,
            gains,
            both_metrics,
            statements_of_the_paper,
            attribution,
            budget_line,
            table1,
            causality,
            input16,
            frontier,
        )
    },
    **{
        f.__name__: f
        for f in (
            table1_kernels,
            gpu_checks,
            whole_models,
            mutations,
            ampere_mutations,
            hopper_mutations,
            speed,
            qk16_speed,
        )
    },
    **{mark: partial(promises.listed, group) for mark, group in promises.GROUPS.items()},
    "smollm2_losses": smollm2.losses,
    "smollm2_budget": smollm2.budget,
    "smollm2_interpreted": smollm2.interpreted,
    "smollm2_seeds": smollm2_seeds.finals,
    "smollm2_seeds_by_step": smollm2_seeds.by_step,
    "smollm2_seeds_findings": smollm2_seeds.findings,
    "smollm2_speed": smollm2.speed,
    "smollm2_speed_line": smollm2.speed_line,
    "several_gpus": several_gpus.compared,
    "time_and_error": time_and_error.figure,
    "default_spec": time_and_error.choice,
    "torchtitan_steps": torchtitan_steps.losses,
    "smollm2_capture": smollm2.captured,
    "smollm2_shares": smollm2.captured_shares,
    "smollm2_gains": smollm2.captured_gains,
    "cost_cpu": lambda: cost("cost_cpu"),
    "cost_h200": lambda: cost("cost_h200"),
}


def render(page: str) -> str:
    """The page with the current content between its marks."""
    return MARK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", page)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        page = path.read_text(encoding="utf-8")
        new = render(page)
        if new != page:
            stale.append(path)
            if not args.check:
                write_text(path, new)
    record = time_and_error.record()
    if not time_and_error.is_current(record):
        stale.append(time_and_error.FIGURE)
        if not args.check:
            write_text(time_and_error.FIGURE, time_and_error.svg(record))
    for path in stale:
        what = "stale, run docs/build/render.py" if args.check else "written"
        print(f"{path.relative_to(ROOT)}: {what}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(exit_code("render.py", main, {}))
