"""List the runs of a plan, or train the runs of one part of it.

A plan is a TOML file that fixes the model, data, seeds and margin of several questions. Each part
of the plan is a question and the runs that answer it. Without --part the command lists all runs,
with estimated times. With --part it trains the runs that are not done. A run that two parts share
is trained once. After Ctrl-C the command finishes the step and saves a checkpoint; the same command
continues.

With --cluster, Ray trains many runs at the same time, each on one GPU. A run whose worker or
machine dies continues from its last checkpoint elsewhere. CORPUS and RUNS must be folders that all
machines of the cluster share.

The package has three plans, in sagesim/experiments/pretrain/plan. They are for one corpus. With
another one they are only listed, with a warning.

examples:
  sagesim pretrain plan plan.toml corpus runs --scale 10M
  sagesim pretrain plan plan.toml corpus runs --scale 10M --part tps --compile
  sagesim pretrain plan plan.toml corpus runs --scale 100M --part tps --cluster local
  sagesim pretrain plan plan.toml corpus runs --scale 100M --part tps --dry-run
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sagesim.cli.cluster import add_cluster
from sagesim.cli.pretrain.interruption import asked_to_stop
from sagesim.cli.pretrain.machine import add_machine, machine_of
from sagesim.terminal import Failure, jobs_shown, stdout, table

if TYPE_CHECKING:
    from sagesim.experiments.jobs import State
    from sagesim.experiments.pretrain.plan.plan import Plan, PlannedRun
    from sagesim.experiments.pretrain.text.corpus import Corpus

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
    add_cluster(parser)
    parser.add_argument(
        "--jobs-per-gpu",
        type=int,
        default=1,
        metavar="N",
        help="with --cluster: runs that share a GPU, for models that do not keep it busy "
        "(default: 1)",
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

    if args.jobs_per_gpu < 1 or (args.jobs_per_gpu > 1 and args.cluster is None):
        raise Failure(f"--jobs-per-gpu {args.jobs_per_gpu}: at least 1, and above 1 with --cluster")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise Failure("a run of a plan uses one process: use --cluster instead of torchrun")
    try:
        plan, corpus = Plan.read(args.plan), Corpus(args.corpus)
        is_listing = args.part is None or args.dry_run
        _check(plan, corpus, is_listing=is_listing)
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
        if is_listing:
            _list(plan, planned, args.root)
            return 0
        check_shards(args.corpus)
        every = merge_runs(each for name in parts for each in planned[name])
        return _train(every, args, corpus)
    except (ValueError, ConnectionError, BlockingIOError) as error:
        raise Failure(str(error)) from None


def _check(plan: Plan, corpus: Corpus, *, is_listing: bool) -> None:
    """Check that the plan's runs can be trained; for a list, only warn that they cannot."""
    try:
        plan.check_corpus(corpus.id)
    except ValueError as error:
        if not is_listing:
            raise
        print(f"sagesim: warning: no run can be trained: {error}", file=sys.stderr)


def _list(plan: Plan, planned: dict[str, list[PlannedRun]], root: Path) -> None:
    console = stdout()
    seen: set[str] = set()
    total = left = 0.0
    for name, runs in planned.items():
        console.print(f"{name}: {plan.parts[name].question}")
        shown = table("", "run", "steps", "tokens", "minutes", "done")
        for each in runs:
            seconds = plan.seconds(each.run)
            is_repeated = each.folder in seen
            seen.add(each.folder)
            total += 0 if is_repeated else seconds
            left += 0 if is_repeated or each.is_done(root) else seconds
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
        f"{left / 3600:.2f} GPU hours are left; margin {plan.margin} nats"
    )


def _train(planned: list[PlannedRun], args: argparse.Namespace, corpus: Corpus) -> int:
    from sagesim.experiments.cluster import workers
    from sagesim.experiments.pretrain.plan.execution import INTERRUPTED, STOPPED, execute, has_work

    console = stdout()
    jobs = [each for each in planned if has_work(each, args.root)]
    stopped, failed = 0, list[Exception]()
    # Ray replaces handlers of signals, so it is started first.
    with (
        workers(args.cluster, gpu=1 / args.jobs_per_gpu) as here,
        asked_to_stop(shown=True) as asked,
        jobs_shown(len(jobs)) as view,
    ):

        def watch(running: Mapping[str, State], ended: int) -> bool:
            states = {name: (x.done, x.total, x.words) for name, x in running.items()}
            try:
                view.show(states, ended)
            except BrokenPipeError:
                asked.set()
            return asked.is_set()

        for each, end in execute(jobs, args.root, corpus, machine_of(args), here, watch):
            if isinstance(end, Exception):
                failed.append(end)
                end = f"failed: {type(end).__name__}: {end}"
            stopped += end.startswith(STOPPED)
            if end != INTERRUPTED:
                console.print(f"{each.folder}: {end}")
    if failed:
        raise failed[0]
    if asked.is_set():
        raise KeyboardInterrupt(f"{args.root}: interrupted; the same command continues the plan")
    console.print(f"{len(planned)} runs in {args.root}; {stopped} stopped at a non-finite number")
    return 0
