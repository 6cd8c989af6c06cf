"""The command line `sagesim COMMAND`.

Each command is a module with the text `HELP` and the functions `add` and `run`. The module's
docstring is the description in the command's help.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import sagesim
from sagesim.allocator import keep_freed_memory
from sagesim.command import exit_code
from sagesim.terminal import Failure

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
    "triton": "kernels",
    "transformers": "cli",
    "gguf": "gguf",
    "accelerate": "gguf",
    "hypothesis": "cli",
}
"""The extra of the distribution that installs each package."""

_DESCRIPTION: Final = """\
Emulate low-bit attention, with a precision of your choice for each of its seven matrix products.

examples:
  sagesim attribute llama --report report.html
      find which of the seven products causes the error, on recorded tensors of a real model
  sagesim capture MODEL TEXT_FILE mine.safetensors
      record the attention tensors of your own model
  sagesim fuzz my_kernels:attention --spec factored --device cuda
      test whether your own kernel computes what a spec says
  sagesim pretrain run CORPUS RUN --attention kernels:factored
      train a language model with low-bit attention
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Failure(f"{message} (see {self.prog} --help)")


class _CommandParser(_Parser):
    """The parser of a command. It reports unknown options itself, with the help of the command."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            close = difflib.get_close_matches(unknown[0], options, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the words after `sagesim`; None takes those of the process.

    Returns:
        The exit code: 0; 1 if `fuzz` found a difference, training stopped, or the reader of a pipe
        closed it; 2 for invalid input or output that cannot be written; 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)

    def command() -> int | None:
        keep_freed_memory()
        args = _parser().parse_args(arguments)
        args.command_line = shlex.join(["sagesim", *arguments])
        return importlib.import_module(f"sagesim.cli.{args.command}").run(args)

    return exit_code("sagesim", command, _EXTRAS)


def _parser() -> argparse.ArgumentParser:
    form = functools.partial(argparse.RawDescriptionHelpFormatter, width=100, max_help_position=24)
    parser = _Parser(prog="sagesim", description=_DESCRIPTION, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"sagesim {sagesim.__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    for name in COMMANDS:
        module = importlib.import_module(f"sagesim.cli.{name}")
        command = commands.add_parser(
            name, help=module.HELP, description=module.__doc__, formatter_class=form
        )
        module.add(command)
    return parser
