"""Text for docs/pretraining.md: the held-out sequences on which gradients were measured."""

from __future__ import annotations

from collections.abc import Sequence

from experiment import DATA

from sagesim.experiments.pretrain.report.compare import Group, TrainedRun
from sagesim.experiments.pretrain.report.tables import tokens
from sagesim.experiments.pretrain.run.log import Log


def paragraph(exact: Group) -> str:
    """What other sequences of the same text say about 16-bit attention's gradient.

    exact: runs in 16 bit, of a cell that experiment A repeats with the same seeds.
    """
    later = [Log.read(path) for path in sorted((DATA / "delta_or_scales").glob("sdpa*.parquet"))]
    again = {log.run.seed: TrainedRun("", log) for log in later}
    pairs = [(run, again[run.run.seed]) for run in exact.runs]
    count, more = (runs[0].run.monitor_sequences for runs in zip(*pairs, strict=True))
    squares, scales = _of_pairs(pairs, "square"), _of_pairs(pairs, "noise_scale")
    context = exact.runs[0].run.context
    of_first, of_more = (" and ".join(tokens(x * context) for x in each) for each in scales)
    first, second = (" and ".join(f"{x:.3f}" for x in each) for each in squares)
    return f"""**Gradients were measured on few documents.** All numbers about G and b on this page
        are from the first {count} sequences of the held-out text. Their standard errors assume
        independent sequences, so they are too small. Experiment A trained the models of the cell
        above again in 16 bit, with the same seeds, and measured on the first {more} sequences. |G|²
        is {second} there and {first} here. The noise scale is {of_more} tokens there and {of_first}
        here. A run takes evenly spaced sequences now; no run on this page did."""


def _of_pairs(
    pairs: Sequence[tuple[TrainedRun, TrainedRun]], name: str
) -> tuple[list[float], list[float]]:
    """A number about the gradient, of the first and of the second runs."""
    found = [[run.last("gradient", "", -1, name) for run in pair] for pair in pairs]
    first, second = zip(*found, strict=True)
    return [x for x in first if x is not None], [x for x in second if x is not None]
