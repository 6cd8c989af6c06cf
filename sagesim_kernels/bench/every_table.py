"""Every table of a record, for the terminal."""

from __future__ import annotations

from typing import Any

from sagesim_kernels.bench import tables
from sagesim_kernels.bench.cases import PASSES, SIGMAS
from sagesim_kernels.bench.machine import foreign
from sagesim_kernels.bench.mask_tables import mask_tables
from sagesim_kernels.bench.model_tables import model_tables


def every_table(document: dict[str, Any]) -> list[tables.Table]:
    """Every table of the record that has rows, details first and relative speeds last.

    Titles name the code that was timed, if it is not that of the GPU itself.
    """
    found: list[tables.Table] = []
    timed = tables.panels(document, "speed")
    for make in (tables.memory, tables.times, tables.preparation):
        found += [make(document, panel) for panel in timed]
    found += [
        tables.accuracy(document, k)
        for k, c in document["cases"].items()
        if c["part"] == "accuracy"
    ]
    for panel in tables.panels(document, "payoff"):
        sigmas = tables.sigmas(document, panel) or SIGMAS[:1]
        found += [tables.payoff(document, panel, sigma) for sigma in sigmas]
    found += [tables.waits(document), tables.not_run(document)]
    for make in (tables.speed, tables.ratios):
        found += [make(document, panel, which) for which in PASSES for panel in timed]
    if timed:
        found += [tables.ranges(document, which) for which in PASSES]
    found += model_tables(document) + mask_tables(document)
    code = foreign(document)
    if code is not None:
        found = [table._replace(title=f"{table.title} ({code})") for table in found]
    return [table for table in found if table.rows]
