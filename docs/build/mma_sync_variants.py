"""Tables of variants of the kernels for mma.sync, for docs/kernel_variants.md."""

from __future__ import annotations

import statistics
from typing import Final

from grid import markdown
from IPython.display import Markdown
from tables import Row, call_of, data, pivot, sourced

_COLUMNS: Final = {"backward": "backward_us", "forward": "forward_us", "row_sums": "rows_us"}
"""What `variants` shows, and the field of its times."""


def variants(which: str) -> Markdown:
    """A table of milliseconds for each run of a kernel's variants, one of `_COLUMNS`."""
    record = data("sm80_variants")
    rows = record[which]
    texts = []
    for run in sorted({row["run"] for row in rows}):
        own = [row | {"us": row[_COLUMNS[which]]} for row in rows if row["run"] == run]
        flash = {
            (row["spec"], _shape(row)): row | {"variant": "FlashAttention-2", "us": row["flash_us"]}
            for row in own
            if "flash_us" in row
        }
        several = [*own, *flash.values()]
        specs = list(dict.fromkeys(row["spec"] for row in several))
        several.sort(key=lambda row, specs=specs: specs.index(row["spec"]))
        texts.append(
            pivot(
                f"run {run}, ms",
                several,
                lambda row: f"`{row['spec']}`: {row['variant']}",
                _shape,
                lambda row: f"{row['us'] / 1e3:.2f}",
            )
        )
    return Markdown("\n\n".join(texts))


def _shape(row: Row) -> str:
    mask = "causal" if row["is_causal"] else "full"
    return f"d {row['head_size']}, {row['tokens']} {mask}"


def about_variants() -> Markdown:
    """How the times of `variants` were measured."""
    record = data("sm80_variants")
    return Markdown(f"{record['about']} {record['machine']}.")


def keys_at_a_time() -> Markdown:
    """The forward of factored_qk at head size 128, by how many keys P is computed for at a time."""
    record = data("sm80_variants")["parts"]
    calls = ("8192 full", "8192 causal", "1024 full", "1024 causal")
    rows = [
        [str(row["rows"]), str(row["keys"]), row["q"], *(f"{row['us'][x]:,.0f}" for x in calls)]
        for row in record["rows"]
    ]
    head = ["rows of a warp", "keys", "Q", *(f"{call}, us" for call in calls)]
    return sourced(markdown(head, rows), record["about"], machine=record["machine"])


def masks() -> Markdown:
    """Windows and padded keys by the kernels for mma.sync and by the portable ones."""
    record = data("sm80_variants")
    own = record["masks"]
    rows = [
        [
            f"`{row['spec']}`",
            *(str(row[key]) for key in ("head_size", "batch", "tokens", "mask")),
            *(f"{row[key]:.2f}" for key in ("mma_sync_ms", "portable_ms")),
            f"{row['portable_ms'] / row['mma_sync_ms']:.2f}",
        ]
        for row in own["rows"]
    ]
    head = ["spec", "d", "sequences", "tokens", "mask", "`mma.sync`, ms", "portable, ms"]
    text = markdown([*head, "times as fast"], rows)
    return sourced(text, own["about"], machine=record["machine"])


def channels() -> Markdown:
    """Passes that leave out the zeros behind a head's channels, beside FlashAttention-2."""
    record = data("mma_sync_channels")
    rows = []
    for row in record["rows"]:
        if row["code"] == "sm80":
            pairs = [_medians(row[key]) for key in ("forward_us", "backward_us")]
            of_flash = [sum(row["flash_us"]) / sum(us) for us in zip(*pairs, strict=True)]
            cells = [f"{before:.0f} → {after:.0f}" for before, after in pairs]
            ratios = " → ".join(f"{x:.2f}" for x in of_flash)
            rows.append([call_of(row), f"`{row['spec']}`", *cells, ratios])
    head = ["call", "spec", "forward, us", "backward, us", "both, as fast as FlashAttention-2"]
    return sourced(markdown(head, rows), record["about"], machine=record["machine"])


def _medians(several: list[list[float]]) -> list[float]:
    return [statistics.median(each) for each in several]
