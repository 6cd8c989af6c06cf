"""Tables of the runs of the next experiment, for docs/pretraining_experiment.md.

docs/data/delta_or_scales has two files for each run, NAME.parquet and NAME.json, as
scripts/plan_in_pieces.py writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from grid import markdown

from sagesim.experiments.pretrain.plan.plan import Plan, PlannedRun
from sagesim.experiments.pretrain.report.rules import CLOSED, REAL, Gap, Losses, decide

ROOT: Final = Path(__file__).parents[2]
RECORDS: Final = ROOT / "docs" / "data" / "delta_or_scales"
PLAN: Final = ROOT / "sagesim" / "experiments" / "pretrain" / "plan" / "delta_or_scales.toml"
VOCABULARY: Final = 16384
REFERENCE, TWIN, SCHEME = "sdpa", "kernels:fpa_bf16", "kernels:sagebwd"

Records = Mapping[tuple[str, int], Mapping[str, Any]]
"""What is recorded of a run, by its attention and seed."""


def planned(part: str) -> list[PlannedRun]:
    """The runs of a part of the plan."""
    plan = Plan.read(PLAN)
    return plan.runs(part, next(iter(plan.scales)), corpus=plan.corpus, vocabulary=VOCABULARY)


def recorded(part: str, folder: Path) -> Records:
    """The runs of a part that are made."""
    found: dict[tuple[str, int], Any] = {}
    for each in planned(part):
        path = folder / f"{each.folder}.json"
        if path.exists():
            found[each.run.attention, each.run.seed] = json.loads(path.read_text(encoding="utf-8"))
    return found


def arms(folder: Path = RECORDS) -> str:
    """The difference of every arm to sdpa, and the verdicts once all runs are made."""
    made, every = recorded("arms", folder), planned("arms")
    if not made:
        return f"**None of the {len(every)} runs has been made.**"
    seeds = sorted({each.run.seed for each in every})
    names = list(dict.fromkeys(each.run.attention for each in every))
    gaps = _verdicts(made, names, seeds) if len(made) == len(every) else {}
    rows: list[list[str]] = []
    for name in names:
        cells = [_difference(made, name, seed) for seed in seeds]
        verdict = f"{gaps[name].verdict}" if name in gaps else ""
        rows.append([f"`{name}`", *cells, *([verdict] if gaps else [])])
    head = ["arm", *(f"seed {seed}" for seed in seeds), *(["verdict"] if gaps else [])]
    said = "Held-out loss in nats, by the arm's own attention and by `sdpa`: of `sdpa` itself, and "
    said += f"of the other arms less that of `sdpa`. {_made(made, every)}"
    if not gaps:
        said += " The rules decide when all runs are made; until then the numbers decide nothing."
    return f"{markdown(head, rows)}\n\n{said}"


def leak(folder: Path = RECORDS) -> str:
    """What later tokens change for the models of each arm, and the verdict."""
    made, every = recorded("leak", folder), planned("leak")
    if not made:
        return f"**None of the {len(every)} runs has been made.**"
    seeds = sorted({each.run.seed for each in every})
    names = list(dict.fromkeys(each.run.attention for each in every))
    leaks: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    for (name, seed), document in made.items():
        found = _evaluation(document, SCHEME)
        if found:
            pairs = zip(found["cut"], found["whole"], strict=True)
            leaks[name][seed] = [cut - whole for cut, whole in pairs]
    rows = [
        [f"`{name}`", *(_signed(_mean(leaks[name].get(seed))) for seed in seeds)] for name in names
    ]
    said = f"The leak under `{SCHEME}` in nats. {_made(made, every)}"
    compared = {name: leaks[name] for name in (REFERENCE, TWIN, SCHEME)}
    if all(each.keys() == set(seeds) for each in compared.values()):
        gap = decide({"leak": compared}, twin=TWIN, scheme=SCHEME)[SCHEME]
        d, s = gap.differences["leak"], gap.deviations["leak"]
        verdict = "Training exploits the leak" if d > REAL * s else "Undecided"
        verdict = "Training does not exploit the leak" if d <= CLOSED * s else verdict
        said += f" {verdict}: d is {d:+.5f} and s is {s:.5f} nats."
    return f"{markdown(['trained with', *(f'seed {x}' for x in seeds)], rows)}\n\n{said}"


def _verdicts(made: Records, names: Sequence[str], seeds: Sequence[int]) -> dict[str, Gap]:
    stopped = [name for name in names if any(made[name, seed]["stop"] for seed in seeds)]
    evaluations: dict[str, Losses] = {}
    for evaluation in ("own", REFERENCE):
        evaluations[evaluation] = {
            name: {
                seed: _evaluation(made[name, seed], name if evaluation == "own" else REFERENCE)[
                    "losses"
                ]
                for seed in seeds
            }
            for name in names
            if name not in stopped
        }
    return decide(evaluations, twin=TWIN, scheme=SCHEME, stopped=stopped)


def _evaluation(document: Mapping[str, Any], attention: str) -> Mapping[str, Any]:
    """One evaluation of a run; empty if the run stopped before its end."""
    return next((e for e in document["evaluations"] if e["attention"] == attention), {})


def _difference(made: Records, name: str, seed: int) -> str:
    document = made.get((name, seed))
    if document is None:
        return "open"
    if document["stop"]:
        return "stopped"
    cells: list[str] = []
    for attention in dict.fromkeys((name, REFERENCE)):
        loss = _mean(_evaluation(document, attention)["losses"])
        exact = made.get((REFERENCE, seed))
        assert loss is not None
        if name == REFERENCE:
            return f"{loss:.4f}"
        if exact is None or exact["stop"]:
            return "no reference"
        reference = _mean(_evaluation(exact, REFERENCE)["losses"])
        assert reference is not None
        cells.append(_signed(loss - reference))
    return ", ".join(cells)


def _made(made: Records, every: Sequence[PlannedRun]) -> str:
    machines = sorted({document["about"]["device"] for document in made.values()})
    return f"{len(made)} of {len(every)} runs are made, on {' and '.join(machines)}."


def _mean(x: Sequence[float] | None) -> float | None:
    return sum(x) / len(x) if x else None


def _signed(x: float | None) -> str:
    return "open" if x is None else f"{x:+.4f}".replace("-", "\u2212")
