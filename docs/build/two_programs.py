"""Hopper's forward with one and with two programs a multiprocessor; docs/kernel_variants.md."""

from __future__ import annotations

from statistics import median

from grid import markdown
from IPython.display import Markdown
from tables import Row, call_of, data, pivot, sourced

from sagesim_kernels.hopper.forward import CONFIGS
from sagesim_kernels.hopper.forward_tiles import BLOCK
from sagesim_kernels.hopper.tile_scheduler import prefers_two_programs

_MULTIPROCESSORS = 132
"""Of the H200 of the record."""


def times() -> Markdown:
    """Kernel and whole forward by programs, and which of the two a call gets."""
    record = data("two_programs")
    rows = [
        [
            call_of(row),
            *(_pair(**row[of]) for of in ("kernel_us", "forward_us")),
            "two" if _has_two(row) else "one",
        ]
        for row in record["two_programs"]
    ]
    head = ["call", "kernel, us: one / two", "forward, us: one / two", "built"]
    return sourced(markdown(head, rows), record["about"], machine=record["machine"])


def _pair(one: list[float], two: list[float]) -> str:
    before, after = median(one), median(two)
    return f"{before:.1f} / {after:.1f} ({after / before - 1:+.0%})"


def _has_two(row: Row) -> bool:
    rows = CONFIGS[row["head_size"]].consumers * BLOCK.value
    return prefers_two_programs(
        row["queries"],
        row["keys"],
        0 if row["is_causal"] else None,
        rows,
        row["batch"] * row["heads"],
        _MULTIPROCESSORS,
        3 * row["head_size"] * row["keys"],
    )


def trials() -> Markdown:
    """What else was tried, beside one program a multiprocessor."""
    record = data("two_programs")
    trials = record["trials"]
    table = pivot("call", trials["rows"], call_of, lambda row: row["variant"], _after)
    return sourced(table, trials["about"], machine=record["machine"])


def _after(row: Row) -> str:
    return f"{row['after_us']:.1f} ({row['after_us'] / row['before_us'] - 1:+.0%})"


def instruction_cache() -> Markdown:
    """Misses of the instruction cache, by kernel."""
    record = data("two_programs")["instruction_cache"]
    rows = [
        [
            call_of(row),
            f"`{row['kernel']}`",
            row["variant"],
            f"{row['misses'] / row['lookups']:.0%}",
            f"{row['no_instruction'] / row['samples']:.0%}",
        ]
        for row in record["rows"]
    ]
    head = ["call", "kernel", "variant", "misses", "waiting for an instruction"]
    machine = data("two_programs")["machine"]
    return sourced(markdown(head, rows), record["about"], machine=machine)
