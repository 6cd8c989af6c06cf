"""Train a language model, from its newest checkpoint if there is one.

  sagesim pretrain run corpus runs/a --attention sdpa --size 18m --tokens-per-step 131072
  sagesim pretrain run corpus runs/b --attention "kernels:sagebwd smooth=none" --qk-norm ...
  torchrun --nproc-per-node 4 -m sagesim.cli pretrain run corpus runs/a ...

ATTENTION is sdpa, emulator:LABEL or kernels:LABEL. Nothing else differs between runs that differ
in it. The run's folder gets a log, one Parquet table, and checkpoints. The command can be
interrupted or killed at any time, and given again. A loss that is not finite ends the run and
names the step, the layer and the product that first went bad; the exit code is then 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sagesim.cli.inputs import GRAMMAR
from sagesim.cli.pretrain.machine import add_machine, machine_of, padded_vocabulary
from sagesim.cli.terminal import Failure, stdout, training

if TYPE_CHECKING:
    from sagesim.experiments.pretrain.settings import Run

HELP: Final = "train, or go on training"

_OPTIONS: Final[tuple[tuple[str, Any, str], ...]] = (
    ("--size", "18m", "tiny, 8m, 18m, 36m, 105m, or the paper's 325m"),
    ("--context", 1024, "tokens of a sequence"),
    ("--tokens-per-step", 131072, "over all processes"),
    ("--steps", 1000, "to train"),
    ("--warmup", 25, "steps in which the learning rate rises"),
    ("--lr", 1e-3, "the largest learning rate"),
    ("--weight-decay", 0.1, "of matrices"),
    ("--clip", 1.0, "the largest norm of a gradient"),
    ("--seed", 0, "of weights, order of data, stochastic rounding"),
    ("--precision", "bf16", "bf16 under autocast, or fp32"),
    ("--evaluate-every", 100, "steps; 0 for the end only"),
    ("--evaluate-sequences", 64, "held-out ones"),
    ("--monitor-every", 0, "steps; 0 for the end only"),
    ("--monitor-sequences", 8, "for the noise of the gradient"),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="made by prepare")
    parser.add_argument(
        "folder", type=Path, metavar="RUN", help="of this run alone; new, or its own"
    )
    group = parser.add_argument_group("what is trained (a run keeps these)")
    group.add_argument(
        "--attention", default="sdpa", metavar="ATTENTION", help="see above (default: sdpa)"
    )
    for name, default, what in _OPTIONS:
        group.add_argument(
            name,
            type=type(default),
            default=default,
            metavar="X",
            help=f"{what} (default: {default})",
        )
    group.add_argument("--qk-norm", action="store_true", help="normalise Q and K")
    group.add_argument("--untied", action="store_true", help="a head of its own")
    group.add_argument(
        "--monitor",
        nargs="+",
        default=None,
        metavar="ATTENTION",
        help="attentions whose errors are measured on the way (default: the run's own)",
    )
    add_machine(parser)
    parser.epilog = GRAMMAR


def run(args: argparse.Namespace) -> int:
    """Train, and say how it ended."""
    from sagesim.experiments.pretrain.corpus import Corpus
    from sagesim.experiments.pretrain.distributed import world
    from sagesim.experiments.pretrain.train import train

    machine = machine_of(args)
    with world() as here:
        try:
            corpus = Corpus(args.corpus)
            wanted = _run(args, corpus.id, padded_vocabulary(corpus))
            with training(shown=here.is_first) as bar:
                bar.begin(args.folder.name, wanted.steps)
                outcome = train(wanted, args.folder, corpus, machine, here, progress=bar.show)
        except (ValueError, BlockingIOError) as error:
            raise Failure(str(error)) from None
        if here.is_first:
            console = stdout()
            if outcome.stop:
                console.print(f"stopped at {outcome.stop}")
            else:
                console.print(f"{outcome.step} steps of {args.folder} are done")
    return 1 if outcome.stop else 0


def _run(args: argparse.Namespace, corpus: str, vocabulary: int) -> Run:
    from sagesim.experiments.pretrain.attention import Attention
    from sagesim.experiments.pretrain.settings import Run

    attention = Attention.parse(args.attention)
    own = (attention.name,) if attention.spec is not None else ()
    monitor = own if args.monitor is None else [Attention.parse(x).name for x in args.monitor]
    options = {
        name.removeprefix("--").replace("-", "_"): getattr(
            args, name.removeprefix("--").replace("-", "_")
        )
        for name, _, _ in _OPTIONS
    }
    return Run(
        attention=attention.name,
        corpus=corpus,
        vocabulary=vocabulary,
        qk_norm=args.qk_norm,
        tied=not args.untied,
        monitor=tuple(monitor),
        **options,
    )
