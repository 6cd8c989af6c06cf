"""List the runs of a plan, or train the runs of one part of it.

A plan is a TOML file that fixes the model, data, seeds and margin of several questions. Each part
of the plan is a question and the runs that answer it. Without --part the command lists all runs,
with estimated times. With --part it trains the runs that are not done. A run that two parts share
is trained once. Several processes may work on the same folder: each skips runs that another
process is training. After Ctrl-C the command finishes the step and saves a checkpoint; the same
command continues.

The package has one plan: sagesim/experiments/pretrain/plan/five_questions.toml.

examples:
  sagesim pretrain plan plan.toml corpus runs --scale 10M
  sagesim pretrain plan plan.toml corpus runs --scale 10M --part tps --compile
  sagesim pretrain plan plan.toml corpus runs --scale 100M --part tps --gpus 4
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sagesim.cli.pretrain.interruption import asked_to_stop, until_unread
from sagesim.cli.pretrain.machine import add_machine, machine_of
from sagesim.terminal import Failure, stdout, table, training

if TYPE_CHECKING:
    from sagesim.experiments.pretrain.plan.plan import Plan, PlannedRun
    from sagesim.experiments.pretrain.text.corpus import Corpus
    from sagesim.experiments.pretrain.training.trainer import Outcome

HELP: Final = "list or train the runs of a plan"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("plan", type=Path, metavar="PLAN.toml", help="the plan")
    parser.add_argument(
        "corpus", type=Path, metavar="CORPUS", help="a corpus of `sagesim pretrain prepare`"
    )
    parser.add_argument("root", type=Path, metavar="RUNS", help="a folder for the runs' folders")
    parser.add_argument("--part", metavar="NAME", help="the part to train, or all")
    parser.add_argument(
        "--scale", metavar="NAME", help="a scale of the plan (default: the plan's first)"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="number of GPUs, each with a run of its own (default: 1)",
    )
    parser.add_argument(
        "--emulate",
        action="store_true",
        help="replace the kernels, which need a GPU, by the emulator",
    )
    add_machine(parser)


def run(args: argparse.Namespace) -> int:
    """List the runs, or train those of a part."""
    from sagesim.experiments.pretrain.plan.plan import Plan, merge_runs, with_families
    from sagesim.experiments.pretrain.text.corpus import Corpus, check_shards

    try:
        plan, corpus = Plan.read(args.plan), Corpus(args.corpus)
        scale = args.scale or next(iter(plan.scales))
        parts = [args.part] if args.part not in (None, "all") else list(plan.parts)
        families = {"kernels": "emulator"} if args.emulate else {}
        planned = {
            name: with_families(
                plan.runs(name, scale, corpus=corpus.id, vocabulary=corpus.padded_vocabulary),
                families,
            )
            for name in parts
        }
        if args.part is None:
            _list(plan, planned, args.root)
            return 0
        check_shards(args.corpus)
        if args.gpus > 1:
            return _train_on_gpus(args)
        every = merge_runs(each for name in parts for each in planned[name])
        return _train(every, args, corpus)
    except ValueError as error:
        raise Failure(str(error)) from None


def _list(plan: Plan, planned: dict[str, list[PlannedRun]], root: Path) -> None:
    console = stdout()
    seen: set[str] = set()
    total = 0.0
    for name, runs in planned.items():
        console.print(f"{name}: {plan.parts[name].question}")
        shown = table("", "run", "steps", "tokens", "minutes", "done")
        for each in runs:
            seconds = plan.seconds(each.run)
            is_repeated = each.folder in seen
            seen.add(each.folder)
            total += 0 if is_repeated else seconds
            shown.add_row(
                each.folder,
                str(each.run.steps),
                f"{each.run.tokens:,}",
                "as above" if is_repeated else f"{seconds / 60:.1f}",
                "yes" if each.is_done(root) else "no",
            )
        console.print(shown)
    console.print(
        f"{len(seen)} runs, an estimated {total / 60:.0f} minutes on one GPU; "
        f"margin {plan.margin} nats"
    )


def _train_on_gpus(args: argparse.Namespace) -> int:
    import shlex

    from sagesim.experiments.pretrain.plan.execution import run_on_gpus

    words = shlex.split(args.command_line)[1:]
    return run_on_gpus([*words, "--gpus", "1"], args.gpus)


def _train(planned: list[PlannedRun], args: argparse.Namespace, corpus: Corpus) -> int:
    from sagesim.experiments.pretrain.plan.execution import Reporter, execute
    from sagesim.experiments.pretrain.run.distributed import join_processes

    console = stdout()
    stopped = 0
    with (
        join_processes() as world,
        asked_to_stop(shown=True) as asked,
        training(shown=True) as bar,
    ):
        if world.processes > 1:
            raise ValueError("a run of a plan uses one process: use --gpus N instead of torchrun")

        def started(each: PlannedRun) -> None:
            bar.begin(each.folder, each.run.steps)

        def ended(each: PlannedRun, outcome: Outcome) -> None:
            nonlocal stopped
            stopped += bool(outcome.stop)
            if not outcome.is_interrupted:
                end = f"stopped at {outcome.stop}" if outcome.stop else "done"
                console.print(f"{each.folder}: {end}")

        reporter = Reporter(
            started=started,
            progress=until_unread(bar.show, asked),
            ended=ended,
            interrupted=asked.is_set,
        )
        is_complete = execute(planned, args.root, corpus, machine_of(args), world, reporter)
    if not is_complete:
        raise KeyboardInterrupt(f"{args.root}: interrupted; the same command continues the plan")
    console.print(f"{len(planned)} runs in {args.root}; {stopped} stopped at a non-finite number")
    return 0
