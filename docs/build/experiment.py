"""Tables of the runs of experiments A and B, for docs/pretraining_experiment.md.

docs/data has a folder for each plan. It has two files for each run, NAME.parquet and NAME.json, as
scripts/plan_in_pieces.py writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from grid import markdown

from sagesim.experiments.pretrain.plan.plan import Plan, PlannedRun
from sagesim.experiments.pretrain.report.rules import (
    CLOSED,
    REAL,
    Cell,
    Gap,
    Losses,
    Verdict,
    batch_or_updates,
    decide,
)

ROOT: Final = Path(__file__).parents[2]
DATA: Final = ROOT / "docs" / "data"
PLANS: Final = ROOT / "sagesim" / "experiments" / "pretrain" / "plan"
A, B = "delta_or_scales", "batch_or_updates"
"""The plans of the experiments, and the folders of their records."""
VOCABULARY: Final = 16384
REFERENCE, TWIN, SCHEME = "sdpa", "kernels:fpa_bf16", "kernels:sagebwd"

Records = Mapping[tuple[str, int], Mapping[str, Any]]
"""What is recorded of a run, by its attention and seed."""


@cache
def planned(part: str, experiment: str = A) -> tuple[PlannedRun, ...]:
    """The runs of a part of an experiment's plan."""
    plan = Plan.read(PLANS / f"{experiment}.toml")
    scale = next(iter(plan.scales))
    return tuple(plan.runs(part, scale, corpus=plan.corpus, vocabulary=VOCABULARY))


def recorded(every: Sequence[PlannedRun], folder: Path) -> Records:
    """The runs that are made."""
    found: dict[tuple[str, int], Any] = {}
    for each in every:
        path = folder / f"{each.folder}.json"
        if path.exists():
            found[each.run.attention, each.run.seed] = json.loads(path.read_text(encoding="utf-8"))
    return found


def arms(folder: Path = DATA / A) -> str:
    """The difference of every arm to sdpa, and the verdicts once all runs are made."""
    every = planned("arms")
    made = recorded(every, folder)
    if not made:
        return f"**None of the {len(every)} runs has been made.**"
    seeds = sorted({each.run.seed for each in every})
    names = list(dict.fromkeys(each.run.attention for each in every))
    is_complete = len(made) == len(every)
    gaps = verdicts(made, names, seeds) if is_complete else {}
    rows: list[list[str]] = []
    for name in names:
        cells = [_difference(made, name, seed) for seed in seeds]
        if gaps:
            cells += [_mean_difference(gaps, name), f"{gaps[name].verdict}" if name in gaps else ""]
        rows.append([f"`{name}`", *cells])
    head = ["arm", *(f"seed {seed}" for seed in seeds), *(["d", "verdict"] if gaps else [])]
    said = "Held-out loss in nats, by the arm's own attention and by `sdpa`: of `sdpa` itself, and "
    said += f"of the other arms less that of `sdpa`. {_made(made.values(), len(every))}"
    if gaps:
        deviations = " and ".join(f"{s:.4f}" for s in gaps[SCHEME].deviations.values())
        said += f" d is the mean over seeds. The deviation s of the twin is {deviations} nats."
    elif is_complete:
        said += f" {NO_VERDICT}"
    else:
        said += " The rules decide when all runs are made; until then the numbers decide nothing."
    return f"{markdown(head, rows)}\n\n{said}"


def leak(folder: Path = DATA / A) -> str:
    """What later tokens change for the models of each arm, and the verdict."""
    every = planned("leak")
    made = recorded(every, folder)
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
        [f"`{name}`"]
        + [signed(_mean(leaks[name].get(seed))) for seed in seeds]
        + [_mean_loss(made, name, seeds)]
        for name in names
    ]
    said = f"The leak under `{SCHEME}`, and the held-out loss by `{REFERENCE}` as the mean over "
    said += f"seeds, both in nats. {_made(made.values(), len(every))}"
    compared = {name: leaks[name] for name in (REFERENCE, TWIN, SCHEME)}
    if all(each.keys() == set(seeds) for each in compared.values()):
        gap = decide({"leak": compared}, twin=TWIN, scheme=SCHEME)[SCHEME]
        d, s = gap.differences["leak"], gap.deviations["leak"]
        verdict = "Training exploits the leak" if d > REAL * s else "Undecided"
        verdict = "Training does not exploit the leak" if d <= CLOSED * s else verdict
        said += f" {verdict}: d is {d:+.5f} and s is {s:.5f} nats.".replace("-", "\u2212")
        below = [seed for seed in seeds if fmean(leaks[SCHEME][seed]) < -REAL * s]
        if below:
            said += (
                f" The loss of {len(below)} of the {len(seeds)} models of `{SCHEME}` is smaller "
            )
            said += "if later tokens are removed, by more than 3 s. No rule was written for this."
    head = ["trained with", *(f"seed {x}" for x in seeds), f"loss by {REFERENCE}"]
    return f"{markdown(head, rows)}\n\n{said}"


def cells(folder: Path = DATA / B) -> str:
    """What is made of the cells of experiment B, their verdicts, and the answers of its rules."""
    parts = [planned(part, B) for part in Plan.read(PLANS / f"{B}.toml").parts]
    names = list(dict.fromkeys(each.run.attention for each in parts[0]))
    columns: list[list[str]] = []
    by_cell: dict[Cell, Verdict] = {}
    made: list[Mapping[str, Any]] = []
    for every in parts:
        found = recorded(every, folder)
        made += found.values()
        run, seeds = every[0].run, sorted({each.run.seed for each in every})
        if len(found) == len(every):
            gaps = verdicts(found, names, seeds)
            if gaps:
                by_cell[run.tokens_per_step, run.steps] = gaps[SCHEME].verdict
            column = [_in_complete_cell(found, name, gaps) for name in names]
        else:
            counts = [sum((name, seed) in found for seed in seeds) for name in names]
            column = [f"open, {n} of {len(seeds)}" if n else "open" for n in counts]
        columns.append([f"{run.tokens_per_step:,} x {run.steps:,}", *column])
    head, *rows = ([name, *x] for name, *x in zip(["arm", *_code(names)], *columns, strict=True))
    count = sum(map(len, parts))
    answers = batch_or_updates(by_cell)
    said = "Cells are tokens per step x steps. An open cell has the number of seeds that are made. "
    said += "A complete cell has the held-out loss of `sdpa` in nats, the deviations s of the "
    said += "twin, and of the other arms d and the verdict. s and d are by the arm's own attention "
    said += f"and by `sdpa`. {_made(made, count)} The batch masks the error of `{SCHEME}`: "
    said += f"{_ANSWERS[answers.batch_masks]}. Updates make its gap: "
    said += f"{_ANSWERS[answers.updates_make]}."
    return f"{markdown(head, rows)}\n\n{said}"


_ANSWERS: Final = {True: "yes", False: "no", None: "open"}


def gains(path: Path = DATA / "qk_gain.json") -> str:
    """Every gain of QK-norm that was tried for experiment B, and the errors of dQ by layer."""
    found = json.loads(path.read_text(encoding="utf-8"))
    tried = sorted(found["tried"], key=lambda each: each["gain"])
    layers = range(len(tried[0]["errors"]))
    rows = [
        [f"**{x['gain']:g}**" if x["gain"] == found["gain"] else f"{x['gain']:g}"]
        + [f"{error:.3f}" for error in x["errors"]]
        + [f"{x['loss']:.2f}"]
        for x in tried
    ]
    setting, (device,) = found["setting"], {each["about"]["device"] for each in tried}
    return (
        markdown(["gain", *(f"layer {i}" for i in layers), "held-out loss"], rows)
        + "\n\nRelative L2 error of dQ of `sagebwd`, mean over "
        f"{setting['sequences']} held-out sequences ({setting['taken']}), after "
        f"{setting['run']['steps']} steps in 16 bit. The target of the worst layer is "
        f"{setting['target']:.3f}. With the gain in bold, the error is within "
        f"{setting['tolerance']:.0%} of it.\n\n"
        f"`{found['command']}` on {device}."
    )


NO_VERDICT: Final = "A run of `sdpa` or of the twin stopped, so the rules decide nothing."


def _mean_difference(gaps: Mapping[str, Gap], name: str) -> str:
    if name not in gaps:
        return ""
    return ", ".join(map(signed, gaps[name].differences.values())) or "stopped"


def _code(names: Sequence[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _in_complete_cell(made: Records, name: str, gaps: Mapping[str, Gap]) -> str:
    """The cell of an arm: the loss of sdpa, the twin's deviations, or differences and verdict."""
    if not gaps:
        return "sdpa or the twin stopped"
    if name == REFERENCE:
        losses = [
            _evaluation(document, REFERENCE)["losses"]
            for (attention, _), document in made.items()
            if attention == name
        ]
        return f"{fmean(map(fmean, losses)):.4f}"
    if name == TWIN:
        return ", ".join(f"{s:.4f}" for s in gaps[SCHEME].deviations.values())
    return f"{_mean_difference(gaps, name)}: {gaps[name].verdict}"


def verdicts(made: Records, names: Sequence[str], seeds: Sequence[int]) -> dict[str, Gap]:
    """The gap of every arm but sdpa and the twin, from all their runs.

    Without a run of sdpa or the twin that reached its end for each seed there are no gaps.
    """
    stopped = [name for name in names if any(made[name, seed]["stop"] for seed in seeds)]
    if REFERENCE in stopped or TWIN in stopped:
        return {}
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


def _mean_loss(made: Records, name: str, seeds: Sequence[int]) -> str:
    """The held-out loss of an arm's models by sdpa, once all are made."""
    losses = [
        evaluation["losses"]
        for seed in seeds
        if (name, seed) in made and (evaluation := _evaluation(made[name, seed], REFERENCE))
    ]
    return f"{fmean(map(fmean, losses)):.4f}" if len(losses) == len(seeds) else "open"


def losses(made: Records, name: str, seeds: Sequence[int]) -> list[float]:
    """The held-out loss of an arm's models by their own attention, by seed."""
    return [fmean(_evaluation(made[name, seed], name)["losses"]) for seed in seeds]


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
        cells.append(signed(loss - reference))
    return ", ".join(cells)


def _made(made: Iterable[Mapping[str, Any]], count: int) -> str:
    documents = list(made)
    machines = sorted({document["about"]["device"] for document in documents})
    where = f", on {' and '.join(machines)}" if machines else ""
    return f"{len(documents)} of {count} runs are made{where}."


def _mean(x: Sequence[float] | None) -> float | None:
    return sum(x) / len(x) if x else None


def signed(x: float | None) -> str:
    """A difference in nats; open if there is none."""
    if x is None:
        return "open"
    return f"{round(x, 4) or 0.0:+.4f}".replace("-", "\u2212")
