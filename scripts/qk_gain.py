"""Find the gain of QK-norm at which SageBwd has the paper's error of dQ.

    python scripts/qk_gain.py CORPUS docs/data/qk_gain.json --compile

Experiment B of docs/pretraining_experiment.md fixes the gains of QK-norm to this constant. The
script bisects. For each gain it trains the 16-bit model of the cell with 65,536 tokens per step and
200 steps, and measures the relative L2 error of SageBwd's dQ against full precision in every layer,
on held-out sequences. It ends when the error of the worst layer is within 10 % of that in the
paper's Table 2, and prints the line for the plan. Larger gains give larger logits, and larger
errors.

The file has every gain that was tried, and is written after each. A script that was killed goes on
with the next gain. On a GPU; a gain takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from sagesim.command import exit_code  # noqa: E402
from sagesim.experiments.paper_table_2 import PAPER_TABLE_2  # noqa: E402
from sagesim.experiments.pretrain.diagnostics.monitor import (  # noqa: E402
    measure_layer,
    record_attention,
)
from sagesim.experiments.pretrain.model.llama import token_loss  # noqa: E402
from sagesim.experiments.pretrain.plan.plan import Plan  # noqa: E402
from sagesim.experiments.pretrain.run.checks import check_run  # noqa: E402
from sagesim.experiments.pretrain.run.distributed import World, join_processes  # noqa: E402
from sagesim.experiments.pretrain.run.log import Log  # noqa: E402
from sagesim.experiments.pretrain.run.settings import Machine, Run  # noqa: E402
from sagesim.experiments.pretrain.text.corpus import Corpus, check_shards  # noqa: E402
from sagesim.experiments.pretrain.training.evaluation import Evaluation  # noqa: E402
from sagesim.experiments.pretrain.training.trained_model import load_trained  # noqa: E402
from sagesim.experiments.pretrain.training.trainer import autocast, train  # noqa: E402
from sagesim.files import check_writable, write_text  # noqa: E402
from sagesim.spec import SAGEBWD  # noqa: E402
from sagesim.terminal import Failure  # noqa: E402

PLAN: Final = ROOT / "sagesim" / "experiments" / "pretrain" / "plan" / "batch_or_updates.toml"
PART: Final = "small_short"
"""The part of the plan whose 16-bit model is trained."""
TARGET: Final = PAPER_TABLE_2["dq"][1]
TOLERANCE: Final = 0.1
"""The largest distance from the target, as a fraction of it."""
LOWEST, HIGHEST = 1.0, 16.0
"""The gains between which the constant is searched."""
NEAREST: Final = 1.01
"""The ratio of two gains up to which no gain between them is tried."""
SEQUENCES: Final = 8
"""Held-out sequences. The error of a layer is the mean of their errors."""


def bisect(worst: Callable[[float], float], low: float, high: float) -> float:
    """Find a gain for which an error is within `TOLERANCE` of `TARGET`.

    Args:
        worst: the error for a gain; inf where a model with this gain cannot be trained.
        low, high: the gains of the bracket. The error of one is too small, of the other too large.

    Raises:
        ValueError: if the errors of both ends are too small or too large, or the error jumps over
            the target between two gains that are almost equal.
    """

    def is_near(error: float) -> bool:
        return abs(error - TARGET) <= TOLERANCE * TARGET

    target = f"the target is {TARGET} within {TOLERANCE:.0%}"
    ends = {gain: worst(gain) for gain in (low, high)}
    for gain, error in ends.items():
        if is_near(error):
            return gain
    if not ends[low] < TARGET < ends[high]:
        found = " and ".join(f"{error:.4f} with the gain {gain:g}" for gain, error in ends.items())
        raise ValueError(f"the target is outside the bracket: the error is {found}; {target}")
    while high / low > NEAREST:
        gain = float(f"{math.sqrt(low * high):.4g}")
        ends[gain] = worst(gain)
        if is_near(ends[gain]):
            return gain
        low, high = (gain, high) if ends[gain] < TARGET else (low, gain)
    raise ValueError(
        f"the error jumps from {ends[low]:.4f} with the gain {low:g} to {ends[high]:.4f} with "
        f"{high:g}; {target}"
    )


def search(
    out: Path,
    run: Run,
    attempt: Callable[[Run], dict[str, Any]],
    *,
    command: str,
    low: float = LOWEST,
    high: float = HIGHEST,
) -> float:
    """Find the gain, and record every attempt in a file. Gains in the file are not tried again.

    Args:
        run: the run to train, with any gain.
        attempt: trains a run. Returns at least "errors", of dQ by layer, and "stop", why the
            training stopped early, or "".

    Raises:
        ValueError: if the file is of another setting, an error is not finite, or no gain is found;
            see `bisect`.
        WriteError: if the file cannot be written.
    """
    setting = {
        "run": json.loads(replace(run, qk_gain=0.0).to_json()),
        "sequences": SEQUENCES,
        "taken": "evenly spaced",
        "target": TARGET,
        "tolerance": TOLERANCE,
    }
    document: dict[str, Any] = {"command": command, "setting": setting, "gain": None, "tried": []}
    if out.exists():
        document = json.loads(out.read_text(encoding="utf-8"))
        if document["setting"] != setting:
            raise ValueError(f"{out}: of another setting; move it away")
    check_writable(out)
    tried = {each["gain"]: each for each in document["tried"]}

    def save() -> None:
        document["tried"] = list(tried.values())
        write_text(out, json.dumps(document, indent=1) + "\n")

    def worst(gain: float) -> float:
        if gain not in tried:
            found = attempt(replace(run, qk_gain=gain))
            if not all(map(math.isfinite, found["errors"])):
                raise ValueError(f"gain {gain:g}: an error of dQ by layer is in {found['errors']}")
            tried[gain] = {"gain": gain} | found
            save()
        each = tried[gain]
        error = math.inf if each["stop"] else max(each["errors"])
        by_layer = each["stop"] or ", ".join(f"{x:.4f}" for x in each["errors"])
        print(f"gain {gain:g}: worst {error:.4f}; by layer {by_layer}", flush=True)
        return error

    document["gain"] = bisect(worst, low, high)
    save()
    return document["gain"]


def train_and_measure(run: Run, corpus: Corpus, machine: Machine, world: World) -> dict[str, Any]:
    """Train a run, and measure SageBwd in its layers. Returns what the file has of a gain."""
    start = time.monotonic()
    torch.compiler.reset()
    with tempfile.TemporaryDirectory(prefix="sagesim-") as scratch:
        folder = Path(scratch) / "run"
        stop = train(run, folder, corpus, machine, world, progress=_show).stop
        log = Log.read(folder)
        errors = [] if stop else dq_errors(folder, corpus, world)
    return {
        "errors": errors,
        "stop": stop,
        "loss": log.curve("evaluation", "loss")[-1][1],
        "seconds": time.monotonic() - start,
        "about": dict(log.about),
    }


def dq_errors(folder: Path, corpus: Corpus, world: World) -> list[float]:
    """The errors of SageBwd's dQ in the layers of a trained model, as its monitor measures them."""
    run, _, model = load_trained(folder)
    model = model.to(world.device)
    held_out = Evaluation(run, corpus, world, 1)

    def loss(sequence: int, _first: int) -> Tensor:
        tokens = held_out.sequence(sequence, SEQUENCES).to(world.device)
        with autocast(run, world):
            return token_loss(model(tokens[:, :-1]), tokens[:, 1:])

    by_layer: list[list[float]] = [[] for _ in model.layers]
    for sequence in range(SEQUENCES):
        for call in record_attention(model, partial(loss, sequence)).calls:
            for found in measure_layer(call, {"sagebwd": SAGEBWD}):
                if found.attention:
                    by_layer[found.layer].append(found.values["dq_rel_l2"])
    return [fmean(each) for each in by_layer]


def run_to_train(plan: Plan, corpus: Corpus) -> Run:
    """The plan's 16-bit run of `PART` with the first seed, measured at its end only."""
    (scale,) = plan.scales
    runs = plan.runs(PART, scale, corpus=corpus.id, vocabulary=corpus.padded_vocabulary)
    run = next(each.run for each in runs if each.run.attention == "sdpa")
    return replace(run, monitor=(), monitor_every=0, bias_sequences=0, evaluate_every=0)


def _show(step: int, loss: float, speed: float) -> None:
    if step in (1, 10, 50, 100, 200):
        print(f"  step {step}: loss {loss:.4f}, {speed:,.0f} tokens/s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="the corpus of the plan")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--plan", type=Path, default=PLAN, metavar="PLAN.toml")
    parser.add_argument("--micro-batch", type=int, default=32, metavar="N")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    command = "python scripts/qk_gain.py CORPUS docs/data/qk_gain.json"
    command += f" --micro-batch {args.micro_batch}" + " --compile" * args.compile
    try:
        plan, corpus = Plan.read(args.plan), Corpus(args.corpus)
        plan.check_corpus(corpus.id)
        check_shards(args.corpus)
        run = run_to_train(plan, corpus)
        # A checkpoint at the last step only, which is measured.
        machine = Machine(
            micro_batch=args.micro_batch, compile=args.compile, checkpoint_every=run.steps + 1
        )
        with join_processes() as world:
            check_run(run, corpus, machine, world)
            attempt = partial(train_and_measure, corpus=corpus, machine=machine, world=world)
            gain = search(args.out, run, attempt, command=command)
    except ValueError as error:
        raise Failure(str(error)) from None
    print(f"Put this line into [base] of {args.plan.name}:")
    print(f"qk_gain = {gain}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("qk_gain.py", main, {}))
