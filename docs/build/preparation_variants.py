"""Tables of variants of the preparing kernels and of launches, for docs/kernel_variants.md."""

from __future__ import annotations

from typing import Any, Final

import records
from grid import markdown
from IPython.display import Markdown
from tables import Row, call, call_of, data, pivot, sourced

from sagesim_kernels.bench import model_tables

_WAITS: Final = ("at the start", "later")


def forward_preparation() -> Markdown:
    """The kernel that prepares a forward, block by block and several blocks at once."""
    return _by_variant("forward_preparation", {"us": "Q and K", "k_us": "K alone"})


def queries() -> Markdown:
    """Variants of the kernel that prepares queries, with the whole backward."""
    return _with_backward("queries")


def keys() -> Markdown:
    """Variants of the kernel that prepares keys, with the whole backward."""
    return _with_backward("keys")


def divided_sums() -> Markdown:
    """The kernel that divides the sums of K, with the whole forward."""
    return _by_variant("divided_sums", {"us": "kernel", "forward_us": "forward"})


def _with_backward(name: str) -> Markdown:
    """Times of a kernel's variants and of the backward, call by call."""
    record = data("launch_variants")[name]
    rows = []
    for case in dict.fromkeys(row["case"] for row in record["rows"]):
        of_case = [row for row in record["rows"] if row["case"] == case]
        for i, row in enumerate(of_case):
            times = (f"{row[key]:.1f}" for key in ("us", "backward_us"))
            rows.append(["" if i else case, row["variant"], *times])
    text = markdown(["call", "variant", "kernel, us", "backward, us"], rows)
    return sourced(text, record["about"], machine=record["machine"])


def _by_variant(name: str, times: dict[str, str]) -> Markdown:
    """Times of a kernel's variants, in microseconds, a row for each call.

    times: names of numbers in the record, and what they are.
    """
    record = data("launch_variants")[name]
    rows = [
        {"call": row["case"], "what": f"{what}, {row['variant']}, us", "us": row[key]}
        for key, what in times.items()
        for row in record["rows"]
    ]
    text = pivot(
        "call",
        rows,
        lambda row: row["call"],
        lambda row: row["what"],
        lambda row: f"{row['us']:.1f}",
    )
    return sourced(text, record["about"], machine=record["machine"])


def calls_with_forward_preparation() -> Markdown:
    """Short calls with the kernel that rounds several blocks at once, and with the one before."""
    after, before = map(records.load, ("bench_forward_preparation", "bench_models_4"))

    def ratio(record: dict[str, Any], key: str) -> str:
        return f"{model_tables.ratio(record['cases'][key], records.DEFAULT, 'GPU'):.2f}"

    rows = [
        [key.removeprefix("models "), ratio(before, key), ratio(after, key)]
        for key in after["cases"]
    ]
    text = markdown(["call; times as fast as the faster SDPA, GPU", "before", "after"], rows)
    notes = [f"{name}: {records.made_by(x)}." for name, x in (("Before", before), ("After", after))]
    return Markdown(f"{text}\n\nForward and backward. {' '.join(notes)}")


def registers() -> Markdown:
    """Variants of kernels that prepare a pass of factored_qk, kernel by kernel."""
    record = data("hopper_variants")["preparation"]
    kernels = (("prepare_queries",), ("prepare_keys",), ("sum_chunks", "divide_sums"))
    texts = [_of_kernels(record, *several) for several in kernels]
    return sourced("\n\n".join(texts), record["about"], machine=record["machine"])


def _of_kernels(record: Row, *kernels: str) -> str:
    rows = [row for row in record["rows"] if any(f"{kernel}_us" in row for kernel in kernels)]

    def cell(row: Row) -> str:
        keys = [f"{kernel}_us" for kernel in kernels]
        return ", ".join(f"{row[key]:.0f}" for key in keys if key in row)

    names = ", ".join(f"`{kernel}`" for kernel in kernels)
    return pivot(f"{names}, us", rows, lambda row: row["variant"], lambda row: row["case"], cell)


def smaller_changes() -> Markdown:
    """Later changes of the kernels that prepare a pass of factored_qk."""
    record = data("launch_variants")["preparation"]
    pairs: dict[tuple[str, str], list[str]] = {}
    for row in record["rows"]:
        found = f"{row['us']:.1f} ({row['variant']})"
        pairs.setdefault((row["case"], row["kernel"]), []).append(found)
    rows = [[call, f"`{kernel}`", *found] for (call, kernel), found in pairs.items()]
    text = markdown(["call", "kernel", "before, us", "after, us"], rows)
    return sourced(text, record["about"], machine=record["machine"])


def tokens_in_parts() -> Markdown:
    """Preparing kernels that hold the channels of a token in one tensor, and in parts."""
    record = data("found_tiles")
    kernels = list(record["preparation_us"][0]["one_tensor_us"])
    rows = [
        [
            call(row["batch"], (row["heads"],) * 2, (row["tokens"],) * 2, row["d"], row["mask"]),
            *(f"{row['one_tensor_us'][x]:.0f} → {row['parts_us'][x]:.0f}" for x in kernels),
        ]
        for row in record["preparation_us"]
    ]
    head = ["call; one tensor → parts, us", *(f"`{kernel}`" for kernel in kernels)]
    return Markdown(markdown(head, rows))


def operands_in_codes() -> Markdown:
    """Variants of the kernel that rounds the operands of a pass to codes.

    Of a call that a run timed twice, the later time is shown: two first times are of seconds.
    """
    record = data("hopper_variants")["operands_in_codes"]
    keys = ("run", "variant", "spec", "head_size")
    timed = {tuple(row[key] for key in keys): row for row in record["rows"]}
    text = pivot(
        "variant; us of a forward, backward",
        [*timed.values()],
        lambda row: f"run {row['run']}: {row['variant']}",
        lambda row: f"`{row['spec']}`, d {row['head_size']}",
        lambda row: f"{row['forward_us']:.0f}, {row['backward_us']:.0f}",
    )
    return sourced(text, record["about"], machine=record["machine"])


def reversed_blocks() -> Markdown:
    """Forward and backward if kernels begin with the blocks of the kernel before."""
    record = data("hopper_variants")["reversed_blocks"]
    text = pivot(
        "call",
        record["rows"],
        lambda row: row["case"],
        lambda row: f"{row['variant']}, us",
        lambda row: f"{row['forward_us'] + row['backward_us']:.0f}",
    )
    note = "Forward and backward, three runs of each."
    return sourced(text, note, record["about"], machine=record["machine"])


def short_calls() -> Markdown:
    """Variants of short calls with all their kernels."""
    record = data("hopper_variants")["calls"]
    text = pivot(
        "variant; us of a forward, backward",
        record["rows"],
        lambda row: row["variant"],
        _short_call,
        lambda row: f"{row['forward_us']:.0f}, {row['backward_us']:.0f}",
    )
    return sourced(text, record["about"], machine=record["machine"])


def _short_call(row: Row) -> str:
    return call_of({**row, "queries": row["tokens"], "window": None})


def dependent_launches() -> Markdown:
    """Forward and backward without and with programmatic dependent launch."""
    record = data("launch_variants")
    own = record["dependent_launches"]
    rows = [
        [call_of(row), f"{before:.0f}", f"{after:.0f}", f"{1 - after / before:.1%}"]
        for row in own["rows"]
        for before, after in [row["both_us"]]
    ]
    text = markdown(["call", "without, us", "with, us", "saved"], rows)
    return sourced(text, own["about"], record["about"], machine=record["machine"])


def late_waits() -> Markdown:
    """Forward and backward with the wait at the start of kernels, and later."""
    own = data("launch_variants")["late_waits"]
    rows = [
        [call_of(row), *(f"{us:.1f}" for us in (*row["forward_us"], *row["backward_us"]))]
        for row in own["rows"]
    ]
    head = ["call", *(f"{x}, wait {when}, us" for x in ("forward", "backward") for when in _WAITS)]
    return sourced(markdown(head, rows), own["about"], machine=own["machine"])


def head_ranges() -> Markdown:
    """The backward of all heads at once, and of ranges of heads one after the other."""
    record = data("launch_variants")
    own = record["head_ranges"]
    rows = [
        [
            call_of(row),
            f"{row['both_us'][0]:.0f}",
            *(
                f"{us:.0f} ({count})"
                for us, count in zip(row["both_us"][1:], row["ranges"][1:], strict=True)
            ),
        ]
        for row in own["rows"]
    ]
    head = ["call", "all heads, us", *(f"{mib} MiB" for mib in own["mib"][1:])]
    notes = ("In parentheses: ranges.", own["about"], record["about"])
    return sourced(markdown(head, rows), *notes, machine=record["machine"])
