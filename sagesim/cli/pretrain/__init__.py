"""Pretrain a language model to measure the effect of low-bit attention on its loss.

examples:
  sagesim pretrain prepare FOLDER corpus
      convert a folder of text or code to tokens
  sagesim pretrain run corpus runs/mine --attention kernels:factored --size 36m
      train; the same command resumes a run that was interrupted
  torchrun --nproc-per-node 4 -m sagesim.cli pretrain run corpus runs/mine ...
      train on four GPUs
  sagesim pretrain plan sagesim/experiments/pretrain/plan/five_questions.toml corpus runs
      list the runs of a plan; with --part, train those that are not done
  sagesim pretrain capture runs/mine corpus mine.safetensors
      record the attention tensors of the trained model, for the other commands
  sagesim pretrain evaluate corpus losses.json runs/*
      compute the held-out losses of finished runs, by sequence and under sdpa too
  sagesim report runs
      compare the runs
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any, Final

HELP: Final = "train a language model with low-bit attention"

COMMANDS: Final = {
    "prepare": "prepare",
    "run": "training",
    "plan": "plan",
    "capture": "capture",
    "evaluate": "evaluate",
}
"""The module of each command. A module named `run` would hide the function `run`."""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the commands."""
    commands = parser.add_subparsers(dest="pretrain", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = _module(name)
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=parser.formatter_class,
        )
        module.add(command)


def run(args: argparse.Namespace) -> int | None:
    """Run the command."""
    return _module(args.pretrain).run(args)


def _module(command: str) -> Any:
    return importlib.import_module(f"sagesim.cli.pretrain.{COMMANDS[command]}")
