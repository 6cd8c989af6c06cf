"""Tables of variants of Hopper's kernels that were timed, for docs/kernel_variants.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from grid import markdown
from IPython.display import Markdown
from tables import Row, call, call_of, data, pivot, sourced

from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K
from sagesim_kernels.hopper.tile_scheduler import MOST_QUERY_HEADS, has_few_steps
from sagesim_kernels.operands import OVERHEAD, query_heads_per_program, steps_of_key_tiles

_SHAPES: Final = ("64 full", "64 causal", "128 full", "128 causal")
"""Head sizes and masks, as records of the backward in codes name them."""

_KERNELS: Final = ("wgmma", "mma_sync")
"""The instructions by which `codes_head_sizes` names kernels."""

_TIMES: Final = ("rows_us", "backward_us")
"""The times of `row_sums`."""

_PARTS: Final = {
    "main kernel": "backward_us",
    "preparation": "preparation_us",
    "forward": "forward_us",
}
"""The times of `fp8_trial`."""


def fixed_reference(kernel: str) -> Markdown:
    """Kernels of a forward with a running maximum and with a fixed reference of P.

    kernel: the beginning of the kernels' names.
    """
    record = data("fixed_reference")
    rows = [
        [
            f"`{row['kernel']}`",
            f"`{row['spec']}`",
            *(str(row[key]) for key in ("d", "n", "mask")),
            *_change(row),
        ]
        for row in record["kernels_us"]
        if row["kernel"].startswith(kernel)
    ]
    head = ["kernel", "spec", "d", "tokens", "mask", "running maximum, us", "fixed, us", "change"]
    return sourced(markdown(head, rows), record["about"], machine=record["machine"])


def fixed_reference_forwards() -> Markdown:
    """Whole forwards with a running maximum and with a fixed reference of P."""
    record = data("fixed_reference")
    rows = [[row["what"], *_change(row), f"{row['looking']:.1f}"] for row in record["forwards_us"]]
    head = [
        "forward of `factored_qk`",
        "running maximum, us",
        "fixed, us",
        "change",
        "`failed_rows_kernel`, us",
    ]
    return Markdown(markdown(head, rows))


def _change(row: Row) -> list[str]:
    return _pair(row["running"], row["fixed"], digits=0)


def found_tiles() -> Markdown:
    """The main kernel of each pass if each warp finds its tiles, and if the producer does."""
    record = data("found_tiles")
    rows = [
        [which, _call(row), *_pair(row["by_each_warp"], row["by_the_producer"])]
        for which in ("forward", "backward")
        for row in record[f"{which}_us"]
    ]
    head = ["pass", "call", "each warp, us", "the producer, us", "change"]
    return sourced(markdown(head, rows), record["about"], machine=record["machine"])


def dealt_tiles() -> Markdown:
    """The backward with a program for each tile, and with tiles that are dealt to programs."""
    record = data("dealt_tiles")
    rows = [
        [_call(row), *_pair(row["one_tile"], row["present"]), "yes" if row["is_dealt"] else "no"]
        for row in record["kernels_us"]
    ]
    head = ["call", "a program for each tile, us", "as built, us", "change", "several tiles"]
    return sourced(markdown(head, rows), record["about"], machine=record["machine"])


def _call(row: Row) -> str:
    heads, tokens = (row["heads"], row["kv_heads"]), (row["n_q"], row["n_k"])
    return call(row["batch"], heads, tokens, row["d"], row["mask"])


def _pair(before: float, after: float, digits: int = 1) -> list[str]:
    """Microseconds before and after a change, and the change in percent with so many digits."""
    return [f"{before:.0f}", f"{after:.0f}", f"{after / before - 1:+.{digits}%}"]


def used_channels() -> Markdown:
    """Each pass with products that leave out the zeros behind a head's channels, by product."""
    record = data("used_channels")
    texts = [
        pivot(
            f"products without the zeros, {which}",
            record[which],
            lambda row: row["variant"],
            lambda row: f"{call_of(row)}, us",
            lambda row, key=f"{which}_us": ", ".join(f"{us:.0f}" for us in row[key]),
        )
        for which in ("backward", "forward")
    ]
    return sourced("\n\n".join(texts), record["about"], machine=record["machine"])


def forward_codes() -> Markdown:
    """Variants of the forward with P in codes, and that forward without parts of its work."""
    record = data("hopper_variants")["forward_codes"]
    rows = [
        {"variant": f"d {d}, `{spec}`: {row['variant']}", "call": call, "ms": ms}
        for d in ("64", "128")
        for spec in ("factored", "sagebwd")
        for row in record["rows"]
        for call, ms in row.get(d, {}).get(spec, {}).items()
    ]
    text = pivot(
        "variant, ms",
        rows,
        lambda row: row["variant"],
        lambda row: row["call"],
        lambda row: f"{row['ms']:.2f}",
    )
    without = record["without, wrong on purpose"]
    parts = [[part, f"{ms:.2f}"] for part, ms in without.items() if part != "about"]
    text += f"\n\n{markdown(['without (results are wrong)', 'ms'], parts)}"
    return sourced(
        text,
        record["about"],
        f"The second table is of {without['about']}.",
        machine=record["machine"],
    )


def stages_released() -> Markdown:
    """Runs with wrong results, by when a warp releases a stage of buffers."""
    record = data("hopper_variants")
    forward, wide = record["stages_released"], record["stages_of_wide_heads"]
    rows = [
        ["forward", row["release"], f"`{row['spec']}`", row["dtype"], *_counted(row)]
        for row in forward["rows"]
    ]
    rows += [
        ["backward", row["release"], "`factored_qk`", "", *_counted(row)] for row in wide["rows"]
    ]
    head = ["pass", "release", "spec", "dtype", "d", "wrong", "of runs"]
    notes = (forward["about"], f"{forward['machine']}.", wide["about"])
    return sourced(markdown(head, rows), *notes, machine=wide["machine"])


def _counted(row: Row) -> list[str]:
    return [str(row["head_size"]), str(row["wrong"]), f"{row['runs']:,}"]


def codes() -> Markdown:
    """Variants of the backward in codes, with the kernel for mma.sync that it replaced."""
    record = data("hopper_variants")["codes"]
    replaced = {"variant": "the kernel for `mma.sync` that it replaced", **record["mma_sync"]}

    def cell(of: Mapping[str, float] | None) -> str:
        return "" if of is None else f"{of['factored']:.2f} / {of['sagebwd']:.2f}"

    rows = [
        [row["variant"], *(cell(row.get(shape)) for shape in _SHAPES)]
        for row in [*record["rows"], replaced]
    ]
    head = ["variant; ms of `factored` / `sagebwd`", *(f"d {shape}" for shape in _SHAPES)]
    return sourced(markdown(head, rows), record["about"], machine=record["machine"])


def codes_later(which: str) -> Markdown:
    """Later variants of the backward in codes ("main") or of its row sums ("row_sums")."""
    record = data("hopper_variants")["codes_later"]
    counts = ["instructions"] if which == "row_sums" else []
    rows = [
        [
            str(row["run"]),
            row["variant"],
            *(str(row.get(key, "")) for key in counts),
            *(f"{row[shape]:.2f}" if shape in row else "" for shape in _SHAPES),
        ]
        for row in record[which]
    ]
    head = ["run", "variant", *counts, *(f"d {shape}, ms" for shape in _SHAPES)]
    return Markdown(markdown(head, rows))


def about_codes_later() -> Markdown:
    """How the times of `codes_later` were measured."""
    record = data("hopper_variants")["codes_later"]
    return Markdown(f"{record['about']} {record['machine']}.")


def backward_blocks() -> Markdown:
    """Variants of the backward with 64 channels, run by run, and hardware counters of two."""
    record = data("backward_blocks")
    counters = record["counters"]
    found = [
        [
            row["variant"],
            f"{row['cycles']:,}",
            f"{row['wavefronts']:,}",
            *(f"{row[f'{unit}_percent']:.0f}%" for unit in ("shared", "tensor", "issue")),
        ]
        for row in counters["rows"]
    ]
    head = ["variant", "cycles", "wavefronts", "shared memory", "tensor cores", "issue"]
    return sourced(
        f"{variants_of(record)}\n\n{markdown(head, found)}",
        record["about"],
        f"The second table: {counters['about']}",
        machine=record["machine"],
    )


def backward_variants(name: str) -> Markdown:
    """Variants of a kernel of a backward in the record of this name, for each call."""
    record = data(name)
    return sourced(variants_of(record), record["about"], machine=record["machine"])


def steps_of_tiles() -> Markdown:
    """The two backwards with 128 channels by the steps of a tile, and which of them is chosen."""
    record = data("free_warpgroups")
    rows = []
    for row in record["by_steps"]["rows"]:
        kv_heads = row["kv_heads"]
        groups = query_heads_per_program(kv_heads, row["heads"] // kv_heads, MOST_QUERY_HEADS)
        offset = 0 if row["is_causal"] else None
        lowest = None if row["window"] is None else 1 - row["window"]
        tile = (row["queries"], row["keys"], offset, TILE_K.value, groups, lowest)
        steps = float((steps_of_key_tiles(*tile) - OVERHEAD).mean())
        in_step, free = row["in_step_us"], row["free_us"]
        cells = [
            str(row["run"]),
            call_of(row),
            f"{steps:.0f}",
            _several(in_step, digits=0),
            _several(free, digits=0),
            f"{median(in_step) / median(free):.2f}",
            "in step" if has_few_steps(*tile) else "free",
        ]
        rows.append((steps, cells))
    head = ["run", "call", "steps", "in step, us", "free, us", "free: times as fast", "chosen"]
    text = markdown(head, [cells for _, cells in sorted(rows, key=lambda row: row[0])])
    meaning = (
        f"Steps are those of a tile on average: blocks of {BLOCK_Q.value} queries, for each query "
        "head of a program."
    )
    return sourced(text, meaning, record["by_steps"]["about"], machine=record["machine"])


def variants_of(record: Row) -> str:
    """A table of the variants of a record, with runs and spilled registers if it has them."""
    rows = record["rows"]
    calls = [*dict.fromkeys(call for row in rows for call in row["us"])]
    has_runs = "run" in rows[0]
    cells = [
        [
            *([str(row["run"])] if has_runs else []),
            row["variant"],
            *(_several(row["us"].get(call, ()), digits=0) for call in calls),
            *map(str, row.get("spilled", {}).values()),
        ]
        for row in rows
    ]
    head = ["run"] if has_runs else []
    spilled = [f"`{spec}`, spilled" for spec in rows[0].get("spilled", {})]
    return markdown([*head, "variant", *(f"{call}, us" for call in calls), *spilled], cells)


def codes_waits() -> Markdown:
    """Places of a wait in the backward in codes, and what is spilled where any is."""
    record = data("codes_waits")
    names = ("int8_d128", "fp8_d128", "int8_d64", "others_d64")
    tables = "\n\n".join(variants_of(record[name]) for name in names)
    return sourced(tables, record["about"], machine=record["machine"])


def load_order() -> Markdown:
    """Kernels whose loads of row statistics or fences were changed, before and after."""
    record = data("load_order")
    rows = [
        [
            row["kernel"],
            f"`{row['spec']}`",
            str(row["head_size"]),
            row["change"],
            _several(row["us"], digits=0),
            _several(row["changed_us"], digits=0),
            ", ".join(f"{a} to {b} ({name})" for name, (a, b) in row.get("spills", {}).items()),
        ]
        for row in record["rows"]
    ]
    times = ["as built, us", "changed, us"]
    head = ["kernel", "spec", "d", "change", *times, "spill instructions in a step"]
    counters = record["counters"]
    waits = (
        f"The loads of the backward with 128 channels take {counters['cycles_of_loads']:,} of the "
        f"{counters['cycles_of_step']:,} cycles of a step ({counters['about']})."
    )
    table = f"{waits}\n\n{markdown(head, rows)}"
    return sourced(table, record["about"], machine=record["machine"])


def codes_head_sizes() -> Markdown:
    """The backward in codes at head sizes that are padded, beside the kernels for mma.sync."""
    record = data("hopper_variants")["codes"]["head_sizes"]
    rows = [
        [str(row["head_size"]), f"`{row['spec']}`", *(_several(row[x]) for x in _KERNELS)]
        for row in record["rows"]
    ]
    head = ["d", "spec", "in codes, with `wgmma`, ms", "with `mma.sync`, ms"]
    return sourced(markdown(head, rows), record["about"], machine=record["machine"])


def first_row_sums() -> Markdown:
    """The kernels that could compute the row sums of P when the backward in codes was written."""
    record = data("hopper_variants")["codes"]
    rows = [
        [kernel, *(f"{of[shape]:.2f}" if shape in of else "" for shape in _SHAPES)]
        for kernel, of in record["row_sums"].items()
    ]
    head = ["row sums of P and delta, `factored`", *(f"d {shape}, ms" for shape in _SHAPES)]
    return sourced(markdown(head, rows), machine=record["machine"])


def row_sums() -> Markdown:
    """The kernel of the row sums of P before and after its last change."""
    record = data("row_sums_variants")
    pairs: dict[str, list[Row]] = {}
    for row in record["rows"]:
        mask = "causal" if row["is_causal"] else "full"
        call = f"`{row['spec']}`, d {row['head_size']}, {row['tokens']} tokens, {mask}"
        pairs.setdefault(call, []).append(row)
    rows = [
        [
            call,
            *(_several([us / 1e3 for us in row[key]]) for key in _TIMES for row in pair),
        ]
        for call, pair in pairs.items()
    ]
    head = ["call", "row sums before, ms", "after", "whole backward before, ms", "after"]
    return sourced(markdown(head, rows), record["about"], machine=record["machine"])


def _several(times: Sequence[float], digits: int = 2) -> str:
    return " / ".join(f"{x:.{digits}f}" for x in times)


_BESIDE: Final = {
    "FP8, eight warps in step": "factored_qk, beside eight warps in step",
    "FP8, two free warpgroups": "factored_qk, beside two free warpgroups",
    "FP8, two free warpgroups, 128 queries a step": "factored_qk, beside 128 queries a step",
}
"""The variants of the first backward in FP8, and the rows of factored_qk of the same run."""


def fp8_trial() -> Markdown:
    """The first backward in FP8, beside that of factored_qk in the same run."""
    record = data("hopper_variants")["fp8_gradients"]
    by_shape = {(row["variant"], *_shape(row)): row for row in record["rows"]}
    rows = []
    for (variant, *shape), row in by_shape.items():
        other = by_shape.get((_BESIDE.get(variant, ""), *shape))
        if other is not None:
            pairs = [f"{other[key] / 1e3:.2f} / {row[key] / 1e3:.2f}" for key in _PARTS.values()]
            head_size, tokens, is_causal = shape
            mask = "causal" if is_causal else "full"
            rows.append([variant, str(head_size), str(tokens), mask, *pairs])
    head = ["variant; ms of `factored_qk` / FP8", "d", "tokens", "mask", *_PARTS]
    text = markdown(head, rows)
    return sourced(text, record["about"], machine=record["machine"])


def _shape(row: Row) -> tuple[int, int, bool]:
    return row["head_size"], row["tokens"], row["is_causal"]


def fp8_cycles() -> Markdown:
    """The cycles of the parts of a step of the first backward in FP8."""
    record = data("hopper_variants")["fp8_gradients"]
    parts = record["cycles"]["parts"] | {"the whole step": record["cycles"]["step"]}
    rows = [[part, f"{low:,} to {high:,}"] for part, (low, high) in parts.items()]
    text = markdown(["part of a step at head size 128", "cycles"], rows)
    return sourced(text, record["cycles"]["about"], machine=record["machine"])
