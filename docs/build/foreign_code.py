"""The code of other GPUs on a Hopper GPU, beside FlashAttention-2; docs/speed.md shows it."""

from __future__ import annotations

from typing import Final

import records
from IPython.display import Markdown
from tables import pivot

from sagesim_kernels.bench.cases import code_cases
from sagesim_kernels.bench.tables import ratio

_PEER: Final = "sdpa flash"
_PASSES: Final = ("forward", "backward")


def speed(name: str = "bench_sm80") -> Markdown:
    """A row for each shape: the speed of each spec's forward and backward, and of each pass."""
    document = records.load(name)
    rows = [
        {
            "shape": key.removeprefix("speed "),
            "spec": spec,
            "ratios": [ratio(case, spec, _PEER, which) for which in ("both", *_PASSES)],
        }
        for key, case in document["cases"].items()
        for spec in case["runs"]
        if spec != _PEER
    ]
    text = pivot(
        "both (forward, backward)",
        rows,
        lambda row: row["shape"],
        lambda row: f"`{row['spec']}`",
        lambda row: "{:.2f} ({:.2f}, {:.2f})".format(*row["ratios"]),
    )
    settings = document["settings"]
    wanted = [case.key for case in code_cases(settings["specs"], settings["peers"])]
    untimed = [f"`{key}`" for key in wanted if key not in document["cases"]]
    made = f"`sm_{settings['code'][2:]}` code. {records.made_by(document)}."
    made += f" Not timed: {', '.join(untimed)}." if untimed else ""
    return Markdown(f"{text}\n\n{made} {records.age_of_code(document)}")
