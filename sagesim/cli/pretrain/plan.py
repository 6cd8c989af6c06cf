"""Make the runs of a part of a plan, less those that are done; without --part, list them.

A plan is a TOML file that fixes model, data, seeds and margin of several questions. Runs are kept
by what they are: one that two parts share is made once, and any number of processes may work on
the same folder, each taking runs that no other holds.

  sagesim pretrain plan experiments/pretrain.toml corpus runs --scale 10M
  sagesim pretrain plan experiments/pretrain.toml corpus runs --scale 10M --part tps --compile
  sagesim pretrain plan experiments/pretrain.toml corpus runs --scale 100M --part tps --gpus 4
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sagesim.cli.pretrain.machine import add_machine, machine_of, padded_vocabulary
from sagesim.cli.terminal import Failure, stdout, table, training

if TYPE_CHECKING:
    from sagesim.experiments.pretrain.corpus import Corpus
    from sagesim.experiments.pretrain.plan import Plan, Planned
    from sagesim.experiments.pretrain.train import Outcome

HELP: Final = "make the runs of a plan"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("plan", type=Path, metavar="PLAN.toml")
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="made by prepare")
    parser.add_argument("root", type=Path, metavar="RUNS", help="each run gets a folder in it")
    parser.add_argument("--part", metavar="NAME", help="whose runs are made; or all")
    parser.add_argument("--scale", metavar="NAME", help="of the plan (default: its first)")
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="work on so many side by side (default: 1)"
    )
    parser.add_argument(
        "--emulate", action="store_true", help="the emulator for the kernels, which need a GPU"
    )
    add_machine(parser)


def run(args: argparse.Namespace) -> int:
    """List, or make the runs."""
    from sagesim.experiments.pretrain.corpus import Corpus, check_shards
    from sagesim.experiments.pretrain.plan import Plan, union

    try:
        plan, corpus = Plan.read(args.plan), Corpus(args.corpus)
        scale = args.scale or next(iter(plan.scales))
        parts = [args.part] if args.part not in (None, "all") else list(plan.parts)
        planned = _planned(plan, parts, scale, corpus, emulate=args.emulate)
        if args.part is None:
            _list(plan, planned, args.root)
            return 0
        check_shards(args.corpus)
        if args.gpus > 1:
            return _side_by_side(args)
        every = union(each for name in parts for each in planned[name])
        return _make(every, args, corpus)
    except ValueError as error:
        raise Failure(str(error)) from None


def _planned(
    plan: Plan, parts: list[str], scale: str, corpus: Corpus, *, emulate: bool
) -> dict[str, list[Planned]]:
    from sagesim.experiments.pretrain.plan import on_device

    found = {
        name: plan.runs(name, scale, corpus=corpus.id, vocabulary=padded_vocabulary(corpus))
        for name in parts
    }
    families = {"kernels": "emulator"} if emulate else {}
    return {name: on_device(runs, families) for name, runs in found.items()}


def _list(plan: Plan, planned: dict[str, list[Planned]], root: Path) -> None:
    console = stdout()
    seen: set[str] = set()
    total = 0.0
    for name, runs in planned.items():
        console.print(f"{name}: {plan.parts[name].question}")
        shown = table("", "run", "steps", "tokens", "minutes", "done")
        for each in runs:
            seconds = plan.seconds(each.run)
            again = each.folder in seen
            seen.add(each.folder)
            total += 0 if again else seconds
            shown.add_row(
                each.folder,
                str(each.run.steps),
                f"{each.run.tokens:,}",
                "as above" if again else f"{seconds / 60:.1f}",
                "yes" if each.is_done(root) else "no",
            )
        console.print(shown)
    console.print(
        f"{len(seen)} runs, an estimated {total / 60:.0f} minutes of one GPU; "
        f"margin {plan.margin} nats"
    )


def _side_by_side(args: argparse.Namespace) -> int:
    import shlex

    from sagesim.experiments.pretrain.execute import side_by_side

    words = shlex.split(args.command_line)[1:]
    return side_by_side([*words, "--gpus", "1"], args.gpus)


def _make(planned: list[Planned], args: argparse.Namespace, corpus: Corpus) -> int:
    from sagesim.experiments.pretrain.distributed import world
    from sagesim.experiments.pretrain.execute import execute

    console = stdout()
    stopped = 0
    with world() as here, training(shown=True) as bar:
        if here.processes > 1:
            raise ValueError("a plan's runs take a process each; --gpus starts several")

        def started(each: Planned) -> None:
            bar.begin(each.folder, each.run.steps)

        def ended(each: Planned, outcome: Outcome) -> None:
            nonlocal stopped
            stopped += bool(outcome.stop)
            end = f"stopped at {outcome.stop}" if outcome.stop else "done"
            console.print(f"{each.folder}: {end}")

        execute(
            planned,
            args.root,
            corpus,
            machine_of(args),
            here,
            started=started,
            progress=bar.show,
            ended=ended,
        )
    console.print(f"{len(planned)} runs in {args.root}, {stopped} of them stopped now")
    return 0
