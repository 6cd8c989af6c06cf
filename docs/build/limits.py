"""Tables of what limits the kernels; docs/kernel_limits.md shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grid import markdown
from IPython.display import Markdown
from tables import call_of, data, sourced


def instructions() -> Markdown:
    """The instructions of the loops of the kernels for mma.sync, and of FlashAttention-2's."""
    counted, flash = data("instructions"), data("instructions_flash")
    rows = [
        [
            _spec(row),
            str(row["head_size"]),
            f"`{_short(row['kernel'])}`",
            *(str(row[key]) for key in ("tile", "warps", "per_64x64", "registers", "stack")),
        ]
        for row in [*counted["rows"], *flash["rows"]]
        if row["capability"] == 80 and not row["is_causal"] and row["loop"] != "masked"
    ]
    head = ["spec", "d", "kernel", "tile", "warps", "instructions", "registers", "stack, bytes"]
    made = (f"`{each['command']}`, {each['machine']}." for each in (counted, flash))
    return Markdown("\n\n".join([markdown(head, rows), *made]))


def _spec(row: Mapping[str, Any]) -> str:
    return "FlashAttention-2" if row["kernel"].startswith("flash") else f"`{row['spec']}`"


def _short(kernel: str) -> str:
    """The name of a kernel; FlashAttention-2's backward has a long one."""
    return "flash_bwd_kernel" if kernel.startswith("flash_bwd") else kernel


def counters() -> Markdown:
    """Hardware counters of the kernels for mma.sync, and of FlashAttention-2's."""
    record = data("counters_sm80")
    rows: dict[tuple[str, int, str], list[str]] = {}
    for row in record["rows"]:
        spec = _spec(row)
        is_forward = "fwd" in row["kernel"] or "forward" in row["kernel"]
        which = "forward" if is_forward else "backward"
        reasons = [f"`{reason}` {share:.0%}" for reason, share in list(row["stalls"].items())[:2]]
        cells = [
            f"{row['cycles'] / 1e6:.2f}",
            *(f"{row[key]:.0%}" for key in ("tensor", "shared", "issue")),
            ", ".join(reasons),
        ]
        key = (spec, row["head_size"], row["kernel"])
        rows.setdefault(key, [spec, str(row["head_size"]), which, *cells])
    head = ["spec", "d", "pass", "cycles, millions", "tensor", "shared memory", "issue"]
    text = markdown([*head, "warps wait for"], [*rows.values()])
    return Markdown(f"{text}\n\n`{record['command']}` on {record['machine']}.")


def stalls() -> Markdown:
    """What a warp of the backward for mma.sync waits for."""
    record = data("sm80_variants")
    rows = [
        [name, ", ".join(f"`{reason}` {share:.0%}" for reason, share in of.items())]
        for name, of in record["stalls"]["kernels"].items()
    ]
    text = markdown(["backward", "a warp's states, as shares of its time"], rows)
    return sourced(text, record["stalls"]["about"], machine=record["machine"])


def least_of_exponentials(document: dict[str, Any], spec: str, aimed_at: float) -> Markdown:
    """The share of a forward's time that its exponentials take at least, at head size 64.

    document: a record from `records.load`. aimed_at: how many times as fast as FlashAttention-2.
    """
    key, flash = "speed d64 full n16384", "sdpa flash"
    case = document["cases"].get(key, {"runs": {}})
    if not {flash, spec} <= case["runs"].keys():
        return Markdown("Not measured.")
    # 32 heads of 16384 tokens; a multiprocessor computes 16 exponentials in a cycle
    cycles = 32 * 16384**2 / (16 * document["machine"]["multiprocessors"])
    least = cycles / (1e3 * float(document["machine"]["largest_sm_clock"]))  # ms
    of_flash, ours = (case["runs"][name]["forward"]["ms"] for name in (flash, spec))
    return Markdown(
        f"In `{document['file']}`, at {case['tokens']} tokens without a mask, the exponentials "
        f"alone take at least {least / ours:.0%} of the forward's time. They would take "
        f"{least / (of_flash / aimed_at):.0%} of the time of a forward that is "
        f"{aimed_at:g} times as fast as FlashAttention-2, which is [the aim]"
        "(speed.md#aims-and-what-was-reached)."
    )


def launched_kernels() -> Markdown:
    """The kernels of a call of factored_qk: those with the loops, and those that prepare."""
    record = data("kernel_times")
    rows = []
    for row in record["rows"]:
        kernels = row["kernels_us"]
        products = [kernels[name] for name in ("hopper_forward", "hopper_backward")]
        whole = sum(kernels.values())
        rest = whole - sum(products)
        both = " + ".join(f"{us:.0f}" for us in products)
        rows.append([call_of(row), both, f"{rest:.0f}", f"{rest / whole:.0%}"])
    head = ["call", "main kernels, forward + backward, us", "preparation, us", "share"]
    return sourced(markdown(head, rows), record["about"], machine=record["machine"])
