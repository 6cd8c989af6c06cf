"""What does low-bit attention do to training? Pretrain a language model and see.

  sagesim pretrain prepare FOLDER corpus
      any folder of text or code becomes tokens
  sagesim pretrain run corpus runs/mine --attention kernels:factored --size 36m
      train; the same command goes on where it was stopped
  torchrun --nproc-per-node 4 -m sagesim.cli pretrain run corpus runs/mine ...
      the same on four GPUs
  sagesim pretrain plan experiments/pretrain.toml corpus runs
      the runs of a plan, less those that are finished
  sagesim pretrain capture runs/mine corpus mine.safetensors
      the trained model's attention problems, for the other commands

`sagesim report RUN...` compares runs.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any, Final

HELP: Final = "train a language model with the attention of a spec"

COMMANDS: Final = {"prepare": "prepare", "run": "training", "plan": "plan", "capture": "capture"}
"""Each command's room; one of the name `run` would hide the function."""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the commands."""
    commands = parser.add_subparsers(dest="pretrain", metavar="COMMAND", required=True)
    for name in COMMANDS:
        room = _room(name)
        command = commands.add_parser(
            name, help=room.HELP, description=room.__doc__, formatter_class=parser.formatter_class
        )
        room.add(command)


def run(args: argparse.Namespace) -> int | None:
    """Run the command."""
    return _room(args.pretrain).run(args)


def _room(command: str) -> Any:
    return importlib.import_module(f"sagesim.cli.pretrain.{COMMANDS[command]}")
