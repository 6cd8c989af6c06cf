"""Train a language model, from its newest checkpoint if there is one.

ATTENTION is sdpa (16-bit attention of PyTorch), emulator:LABEL or kernels:LABEL, with the label of
a spec. Two runs with different attention and the same options differ in nothing else. The run's
folder gets a log (one Parquet file) and checkpoints. After Ctrl-C, or a signal to end, the command
finishes the step, saves a checkpoint and exits with 130; a second Ctrl-C stops at once. The command
can also be killed at any time. The same command resumes the run.

If a loss, a gradient or a held-out loss is not finite, the run stops and reports the step, the
layer and the product with the first non-finite number. The exit code is then 1.

examples:
  sagesim pretrain run corpus runs/a --attention sdpa --size 18m --tokens-per-step 131072
  sagesim pretrain run corpus runs/b --attention "kernels:sagebwd smooth=none" --qk-norm ...
  torchrun --nproc-per-node 4 -m sagesim.cli pretrain run corpus runs/a ...
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sagesim.cli.inputs import GRAMMAR, is_same
from sagesim.cli.pretrain.interruption import asked_to_stop, until_unread
from sagesim.cli.pretrain.machine import add_machine, machine_of
from sagesim.terminal import Failure, stdout, training

if TYPE_CHECKING:
    from sagesim.experiments.pretrain.run.settings import Run
    from sagesim.experiments.pretrain.text.corpus import Corpus

HELP: Final = "train a model, or resume training"

_OPTIONS: Final[tuple[tuple[str, Any, str], ...]] = (
    ("--size", "18m", "model size: tiny, 8m, 18m, 36m, 105m, or the paper's 325m"),
    ("--context", 1024, "tokens of a sequence"),
    ("--tokens-per-step", 131072, "tokens of a step over all processes"),
    ("--steps", 1000, "number of training steps"),
    ("--warmup", 25, "steps in which the learning rate rises"),
    ("--lr", 1e-3, "largest learning rate"),
    ("--weight-decay", 0.1, "weight decay of matrices"),
    ("--clip", 1.0, "largest norm of a step's gradient"),
    ("--seed", 0, "seed of weights, order of data and stochastic rounding"),
    ("--precision", "bf16", "bf16 (autocast) or fp32"),
    ("--evaluate-every", 100, "steps between evaluations; 0: only after the last step"),
    ("--evaluate-sequences", 64, "held-out sequences of an evaluation"),
    ("--monitor-every", 0, "steps between measurements; 0: only after the last step"),
    (
        "--monitor-sequences",
        8,
        "held-out sequences for the noise; its error is reliable from 256 on",
    ),
    ("--bias-sequences", 0, "held-out sequences for the bias of the gradient, an even number"),
    ("--qk-gain", 0.0, "the gains of QK-norm, not trained; 0: they are trained"),
)
"""Options with the name of a field of `Run`: the option, its default and its help."""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "corpus", type=Path, metavar="CORPUS", help="a corpus of `sagesim pretrain prepare`"
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the folder of this run only")
    group = parser.add_argument_group("settings of the run (the same when it is resumed)")
    group.add_argument(
        "--attention",
        default="sdpa",
        metavar="ATTENTION",
        help="the attention to train with; see above (default: sdpa)",
    )
    for name, default, what in _OPTIONS:
        group.add_argument(
            name,
            type=type(default),
            default=default,
            metavar="X",
            help=f"{what} (default: {default})",
        )
    group.add_argument("--qk-norm", action="store_true", help="normalise Q and K (QK-norm)")
    group.add_argument(
        "--untied", action="store_true", help="do not share weights of embedding and head"
    )
    group.add_argument(
        "--monitor",
        nargs="+",
        default=None,
        metavar="ATTENTION",
        help="attentions to measure during training (default: the run's own, unless it is sdpa)",
    )
    add_machine(parser)
    parser.epilog = GRAMMAR


def run(args: argparse.Namespace) -> int:
    """Train the run and print how it ended."""
    from sagesim.experiments.pretrain.run.distributed import join_processes
    from sagesim.experiments.pretrain.text.corpus import Corpus, check_shards
    from sagesim.experiments.pretrain.training.trainer import train

    if is_same(args.corpus, args.folder):
        raise Failure(f"{args.folder}: is the corpus; the run needs a folder of its own")
    machine = machine_of(args)
    with join_processes() as world, asked_to_stop(shown=world.is_first) as asked:
        try:
            corpus = Corpus(args.corpus)
            settings = _settings(args, corpus)
            if world.is_first:
                check_shards(args.corpus)
            with training(shown=world.is_first) as bar:
                bar.begin(args.folder.name, settings.steps)
                outcome = train(
                    settings,
                    args.folder,
                    corpus,
                    machine,
                    world,
                    progress=until_unread(bar.show, asked),
                    interrupted=asked.is_set,
                )
        except (ValueError, BlockingIOError) as error:
            raise Failure(str(error)) from None
    if not outcome.is_interrupted:
        if world.is_first:
            done = f"{args.folder}: {outcome.step} steps done"
            stdout().print(f"stopped at {outcome.stop}" if outcome.stop else done)
        return 1 if outcome.stop else 0
    if world.is_first:
        raise KeyboardInterrupt(
            f"{args.folder}: interrupted after step {outcome.step} of {settings.steps}; "
            "the same command resumes the run"
        )
    return 130


def _settings(args: argparse.Namespace, corpus: Corpus) -> Run:
    from sagesim.experiments.pretrain.model.attention import Attention
    from sagesim.experiments.pretrain.run.settings import Run, from_mapping

    attention = Attention.parse(args.attention)
    own = (attention.name,) if attention.spec is not None else ()
    monitor = own if args.monitor is None else [Attention.parse(x).name for x in args.monitor]
    for option in ("monitor_every", "bias_sequences"):
        if getattr(args, option) and not monitor:
            raise ValueError(
                f"--{option.replace('_', '-')} {getattr(args, option)}: a run with sdpa measures "
                "nothing unless --monitor names attentions"
            )
    fields = [option.removeprefix("--").replace("-", "_") for option, _, _ in _OPTIONS]
    values = {name: getattr(args, name) for name in fields} | {
        "attention": attention.name,
        "corpus": corpus.id,
        "vocabulary": corpus.padded_vocabulary,
        "qk_norm": args.qk_norm,
        "tied": not args.untied,
        "monitor": tuple(monitor),
    }
    return from_mapping(Run, values)
