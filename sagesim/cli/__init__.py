"""The command line: `sagesim COMMAND`. Each command is a room with `HELP`, `add` and `run`."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

import sagesim
from sagesim.cli.terminal import Failure

COMMANDS: Final = (
    "attribute",
    "trace",
    "sigma",
    "sweep",
    "capture",
    "fuzz",
    "pretrain",
    "report",
)

_EXTRAS: Final = {
    "rich": "cli",
    "jinja2": "cli",
    "pyarrow": "cli",
    "safetensors": "cli",
    "tokenizers": "pretrain",
    "transformers": "transformers",
    "hypothesis": "fuzz",
}
"""The extra of the distribution that brings each package."""

_DESCRIPTION: Final = """\
Low-bit attention, emulated: each of its seven matrix products in the precision you choose.

  sagesim attribute llama --report report.html
      which of the seven products hurts, on recorded tensors of a real model
  sagesim capture MODEL_DIR TEXT_FILE mine.safetensors
      record the tensors of your own model
  sagesim fuzz my_kernels:attention --spec factored --device cuda
      does your own kernel compute what a spec says
  sagesim pretrain run CORPUS RUN --attention kernels:factored
      train a language model with it
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Failure(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for a difference that `fuzz` found, 2 for wrong
    input, 130 when interrupted."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        args = _parser().parse_args(arguments)
        args.command_line = shlex.join(["sagesim", *arguments])
        code: int | None = importlib.import_module(f"sagesim.cli.{args.command}").run(args)
        sys.stdout.flush()
    except Failure as failure:
        return _end(2, str(failure))
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _end(2, f"{error.name} is not installed: pip install 'sagebwd[{extra}]'")
    except KeyboardInterrupt:
        return _end(130, "interrupted")
    except BrokenPipeError:
        # The reader has gone; what Python flushes at exit must not go to it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0


def _end(code: int, message: str) -> int:
    print(f"sagesim: {' '.join(message.split())}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    form = functools.partial(argparse.RawDescriptionHelpFormatter, width=100, max_help_position=24)
    parser = _Parser(prog="sagesim", description=_DESCRIPTION, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"sagesim {sagesim.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        room = importlib.import_module(f"sagesim.cli.{name}")
        command = commands.add_parser(
            name, help=room.HELP, description=room.__doc__, formatter_class=form
        )
        room.add(command)
    return parser
