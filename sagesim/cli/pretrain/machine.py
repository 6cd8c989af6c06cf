"""The options for the execution of runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sagesim.experiments.pretrain.run.settings import Machine


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Declare an option for each field of `Machine`, with the same default."""
    group = parser.add_argument_group("execution (does not change the numbers, except by rounding)")
    group.add_argument(
        "--micro-batch",
        type=int,
        default=8,
        metavar="N",
        help="sequences of one forward and backward in a process (default: 8)",
    )
    group.add_argument(
        "--compile", action="store_true", help="compile the layers and the loss (torch.compile)"
    )
    group.add_argument(
        "--fsdp",
        action="store_true",
        help="shard the weights over processes (FSDP2) instead of copying them (DDP)",
    )
    group.add_argument(
        "--any-order",
        action="store_true",
        help="allow non-deterministic algorithms: faster, but not reproducible bit for bit",
    )
    group.add_argument(
        "--checkpoint-every",
        type=int,
        default=500,
        metavar="N",
        help="steps between checkpoints (default: 500)",
    )
    group.add_argument(
        "--tracker",
        default="none",
        metavar="NAME",
        help="also send the numbers to tensorboard or trackio",
    )


def machine_of(args: argparse.Namespace) -> Machine:
    """The `Machine` of the parsed arguments."""
    from sagesim.experiments.pretrain.run.settings import Machine

    return Machine(
        micro_batch=args.micro_batch,
        compile=args.compile,
        fsdp=args.fsdp,
        deterministic=not args.any_order,
        checkpoint_every=args.checkpoint_every,
        tracker=args.tracker,
    )
