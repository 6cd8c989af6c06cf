"""Train the runs of a plan in pieces, and keep of each run what docs/data holds.

    PLAN=sagesim/experiments/pretrain/plan/delta_or_scales.toml
    python scripts/plan_in_pieces.py $PLAN CORPUS docs/data/delta_or_scales --minutes 9

For a GPU that is lent for minutes: a run leaves its log and its losses, two small files, and no
checkpoint. A run whose files are there is not repeated, so the next piece goes on where this one
ended, on another machine as well. A run that has not ended in time leaves nothing.

Several processes with the same RECORDS share the runs, on one GPU or with one GPU each: a process
takes the next run that no other process makes. Two or three on an H100 are faster than one, because
compilation and measurements leave the GPU idle. They measure gradients in turns, which takes
half of the memory.

Runs come in the order of the plan's cells, which are tokens per step and steps. In a cell they come
in the order of their seeds, so that all arms have run when the first seed is through. At the end
the script prints how many runs of each cell are recorded.

Every run is evaluated by its own attention and by sdpa. Runs of the part `leak` are evaluated by
sagebwd too, and without later tokens; see docs/pretraining_experiment.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from sagesim.command import exit_code  # noqa: E402
from sagesim.experiments.pretrain.model.attention import Attention  # noqa: E402
from sagesim.experiments.pretrain.plan.plan import (  # noqa: E402
    Plan,
    PlannedRun,
    merge_runs,
    with_families,
)
from sagesim.experiments.pretrain.report.rules import Cell  # noqa: E402
from sagesim.experiments.pretrain.run.checks import check_run  # noqa: E402
from sagesim.experiments.pretrain.run.distributed import World, join_processes  # noqa: E402
from sagesim.experiments.pretrain.run.log import FILE, Log  # noqa: E402
from sagesim.experiments.pretrain.run.settings import Machine  # noqa: E402
from sagesim.experiments.pretrain.text.corpus import Corpus, check_shards  # noqa: E402
from sagesim.experiments.pretrain.training.held_out import HeldOut, held_out_losses  # noqa: E402
from sagesim.experiments.pretrain.training.trainer import train  # noqa: E402
from sagesim.files import locked, replacing, write_text  # noqa: E402
from sagesim.terminal import Failure  # noqa: E402
from scripts.shared_runs import claimed  # noqa: E402
from scripts.time_budget import TimeBudget  # noqa: E402

LEAK: Final = "leak"
"""The part of the plan whose runs are evaluated without later tokens."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run, and the attentions that evaluate it beside its own."""

    planned: PlannedRun
    attentions: tuple[Attention, ...]
    cuts: int  #: places per sequence at which later tokens are removed

    @property
    def name(self) -> str:
        """The name of its files, without their suffixes."""
        return self.planned.folder

    @property
    def cell(self) -> Cell:
        """Its tokens per step and steps."""
        return self.planned.run.tokens_per_step, self.planned.run.steps

    def record(self, records: Path) -> Path:
        """The file with the losses, which is written last."""
        return records / f"{self.name}.json"


def pieces(
    plan: Plan, corpus: Corpus, scale: str, families: dict[str, str], cuts: int
) -> list[Piece]:
    """All runs of a plan in the order of its cells, and in a cell in that of their seeds."""
    parts = {
        part: with_families(
            plan.runs(part, scale, corpus=corpus.id, vocabulary=corpus.padded_vocabulary), families
        )
        for part in plan.parts
    }
    leaking = {each.run for each in parts.get(LEAK, ())}
    scheme = f"{families.get('kernels', 'kernels')}:sagebwd"
    found: list[Piece] = []
    for each in merge_runs(each for runs in parts.values() for each in runs):
        is_leaking = each.run in leaking
        names = ("sdpa", scheme) if is_leaking else ("sdpa",)
        attentions = tuple(Attention.parse(name) for name in names)
        found.append(Piece(each, attentions, cuts if is_leaking else 0))
    cells = list(dict.fromkeys(piece.cell for piece in found))
    return sorted(found, key=lambda piece: (cells.index(piece.cell), piece.planned.run.seed))


def make(
    piece: Piece,
    records: Path,
    corpus: Corpus,
    machine: Machine,
    world: World,
    budget: TimeBudget,
) -> str:
    """Train and evaluate a run, and write its files. Returns what happened."""
    run, start = piece.planned.run, time.monotonic()
    # Graphs that were compiled for the previous run of this process contain its attention.
    torch.compiler.reset()
    scratch = Path(tempfile.mkdtemp(prefix="sagesim-"))
    try:
        folder = scratch / piece.name
        with contextlib.ExitStack() as stack:

            def progress(step: int, loss: float, speed: float) -> None:
                _show(step, loss, speed)
                if step == run.steps - 1:
                    stack.enter_context(_turn(world.device))

            done = train(
                run, folder, corpus, machine, world, progress=progress, interrupted=budget.is_over
            )
        if done.is_interrupted:
            return f"given up after {done.step} of {run.steps} steps: no time is left"
        trained = time.monotonic()
        losses: list[HeldOut] = []
        if not done.stop:
            losses = held_out_losses(folder, corpus, world, piece.attentions, cuts=piece.cuts)
        evaluated = time.monotonic()
        document = {
            "about": dict(Log.read(folder).about),
            "run": json.loads(run.to_json()),
            "stop": done.stop,
            "cuts": piece.cuts,
            "seconds": {"training": trained - start, "evaluation": evaluated - trained},
            "evaluations": [_as_json(each) for each in losses],
        }
        records.mkdir(parents=True, exist_ok=True)
        with replacing(records / f"{piece.name}.parquet") as file:
            shutil.copyfile(folder / FILE, file)
        write_text(piece.record(records), json.dumps(document) + "\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    words = [f"{each.attention} {sum(each.losses) / len(each.losses):.4f}" for each in losses]
    ended = done.stop or f"held-out loss by {', '.join(words)}"
    return f"{ended}; trained in {trained - start:.0f} s, evaluated in {evaluated - trained:.0f} s"


@contextlib.contextmanager
def _turn(device: torch.device) -> Generator[None]:
    """A turn on a GPU: the other processes that want one wait. It begins and ends without a cache.

    The last step of a run needs one: it holds the gradients of all monitored sequences, and their
    errors.
    """
    if device.type != "cuda":
        yield
        return
    name = f"sagesim-{torch.cuda.get_device_properties(device).uuid}"
    with locked(Path(tempfile.gettempdir()) / name):
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()


def _show(step: int, loss: float, speed: float) -> None:
    if step in (1, 10, 100) or step % 400 == 0:
        print(f"  step {step}: loss {loss:.4f}, {speed:,.0f} tokens/s", flush=True)


def _as_json(found: HeldOut) -> dict[str, Any]:
    parts = {"losses": found.losses, "whole": found.whole, "cut": found.cut}
    return {"attention": found.attention} | {name: x for name, x in parts.items() if x}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path, metavar="PLAN.toml")
    parser.add_argument("corpus", type=Path, metavar="CORPUS")
    parser.add_argument("records", type=Path, metavar="RECORDS")
    parser.add_argument("--scale", help="a scale of the plan (default: its first)")
    parser.add_argument("--minutes", type=float, required=True, help="end by then")
    parser.add_argument(
        "--first", type=float, default=3, help="minutes to expect for the first run"
    )
    parser.add_argument(
        "--cuts", type=int, default=64, help="tokens per sequence, of the part leak"
    )
    parser.add_argument("--micro-batch", type=int, default=32, metavar="N")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--emulate", action="store_true", help="the emulator, not the kernels")
    args = parser.parse_args()
    budget = TimeBudget(args.minutes, args.first)
    try:
        plan, corpus = Plan.read(args.plan), Corpus(args.corpus)
        check_shards(args.corpus)
    except ValueError as error:
        raise Failure(str(error)) from None
    families = {"kernels": "emulator"} if args.emulate else {}
    try:
        plan.check_corpus(corpus.id)
        every = pieces(plan, corpus, args.scale or next(iter(plan.scales)), families, args.cuts)
    except ValueError as error:
        raise Failure(f"{args.plan}: {error}") from None
    left = [each for each in every if not each.record(args.records).exists()]
    # Only the last step has a checkpoint: an earlier one would not survive this machine.
    last = max((each.planned.run.steps for each in every), default=1)
    machine = Machine(micro_batch=args.micro_batch, compile=args.compile, checkpoint_every=last + 1)
    print(f"{len(every) - len(left)} of {len(every)} runs are recorded", flush=True)
    with join_processes() as world:
        try:
            for piece in left:
                check_run(piece.planned.run, corpus, machine, world)
        except ValueError as error:
            raise Failure(str(error)) from None
        for piece in left:
            if not budget.fits():
                print("another run does not fit into the time")
                break
            with claimed(piece.record(args.records)) as is_mine:
                if not is_mine:
                    continue
                ended = make(piece, args.records, corpus, machine, world, budget)
            print(f"{piece.name}: {ended}; {budget.ended():.0f} s in all", flush=True)
    missing = sum(not each.record(args.records).exists() for each in every)
    for tokens_per_step, steps in dict.fromkeys(each.cell for each in every):
        cell = [each for each in every if each.cell == (tokens_per_step, steps)]
        made = sum(each.record(args.records).exists() for each in cell)
        state = "complete" if made == len(cell) else "open"
        print(f"cell of {tokens_per_step:,} tokens per step, {steps:,} steps: {state}, ", end="")
        print(f"{made} of {len(cell)} runs are recorded")
    print(f"{missing} of {len(every)} runs are missing")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("plan_in_pieces.py", main, {}))
