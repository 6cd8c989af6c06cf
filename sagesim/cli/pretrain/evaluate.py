"""Compute the losses of finished runs on single held-out sequences, under several attentions.

Each run is evaluated by its own attention and by those of --attention, on the same sequences. With
--cuts N, N tokens of each sequence are predicted twice: with the whole sequence as input, and
without the tokens after the predicted one. Under a causal mask the loss should be the same.

The JSON file has the losses of every sequence in nats: `losses` are means over all tokens, `whole`
and `cut` over the N tokens with and without the later ones. All runs are checked before the first
is evaluated, and the file is written after each run.

examples:
  sagesim pretrain evaluate corpus losses.json runs/*
  sagesim pretrain evaluate corpus leak.json runs/mine --cuts 64
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from sagesim.cli.inputs import require_writable
from sagesim.terminal import Failure, progress, stdout

HELP: Final = "compute the held-out losses of finished runs, by sequence"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="the corpus of the runs")
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the file to write")
    parser.add_argument("folders", type=Path, metavar="RUN", nargs="+", help="folders of runs")
    parser.add_argument(
        "--attention",
        nargs="+",
        default=["sdpa"],
        metavar="NAME",
        help="attentions beside each run's own (default: sdpa)",
    )
    parser.add_argument(
        "--cuts",
        type=int,
        default=0,
        metavar="N",
        help="tokens of each sequence to predict without the later ones too (default: 0)",
    )


def run(args: argparse.Namespace) -> None:
    """Evaluate the runs, and print the mean losses."""
    import torch

    from sagesim.experiments.pretrain.model.attention import Attention
    from sagesim.experiments.pretrain.run.distributed import join_processes
    from sagesim.experiments.pretrain.run.log import FILE
    from sagesim.experiments.pretrain.text.corpus import Corpus, check_shards
    from sagesim.experiments.pretrain.training.checkpoint import CHECKPOINTS
    from sagesim.experiments.pretrain.training.held_out import check_evaluation, held_out_losses
    from sagesim.files import write_text

    read = [args.corpus, *(folder / x for folder in args.folders for x in (FILE, CHECKPOINTS))]
    require_writable(args.out, inputs=read)
    if args.cuts < 0:
        raise Failure(f"--cuts {args.cuts} is negative")
    try:
        others = [Attention.parse(each) for each in args.attention]
    except ValueError as error:
        raise Failure(str(error)) from None
    evaluations: list[dict[str, object]] = []
    lines: list[str] = []
    with join_processes() as world, progress("evaluating runs") as bar:
        if world.processes > 1:
            raise Failure("one process evaluates; start the command without torchrun")
        name = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
        head = {"machine": f"{name}, torch {torch.__version__}", "cuts": args.cuts}
        try:
            corpus = Corpus(args.corpus)
            for folder in args.folders:
                check_evaluation(folder, corpus, world, others, cuts=args.cuts)
            check_shards(args.corpus)
        except ValueError as error:
            raise Failure(str(error)) from None
        for folder in bar.track(args.folders):
            try:
                found = held_out_losses(
                    folder,
                    corpus,
                    world,
                    others,
                    cuts=args.cuts,
                )
            except ValueError as error:
                raise Failure(str(error)) from None
            for each in found:
                evaluations.append(asdict(each))
                line = f"{folder.name}  by {each.attention}: loss {_mean(each.losses):.4f}"
                if each.cut:
                    line += f"; at {args.cuts} cuts {_mean(each.whole):.4f}, and without later "
                    line += f"tokens {_mean(each.cut):.4f}"
                lines.append(line)
            # Every run takes long, and a later one may fail.
            write_text(args.out, json.dumps(head | {"evaluations": evaluations}, indent=1) + "\n")
    for line in lines:
        stdout().print(line)


def _mean(x: tuple[float, ...]) -> float:
    return sum(x) / len(x)
