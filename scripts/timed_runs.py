"""The command line of scripts that time calls on a GPU and write what they found."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sagesim.command import Failure
from sagesim.files import check_writable, write_text
from sagesim_kernels.bench.cuda import CudaMeter
from sagesim_kernels.bench.machine import describe
from sagesim_kernels.bench.run import Setup


def write_runs(
    script: str, about: str, measure: Callable[[Setup], list[dict[str, Any]]], rounds: int
) -> None:
    """Parse the arguments, measure in bfloat16, and write the machine, the command and the rows.

    Args:
        script: its file name, for the command in the record.
        about: its docstring, of which the first line is the description.
        measure: returns the rows.
        rounds: the default of --rounds.

    Raises:
        Failure: if an argument is wrong, or without a GPU.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"times of each contender (default: {rounds})"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        raise Failure(f"--rounds {options.rounds}: must be at least 1")
    if not torch.cuda.is_available():
        raise Failure("PyTorch sees no GPU")
    check_writable(options.out)
    setup = Setup(torch.device("cuda"), torch.bfloat16, CudaMeter(), options.rounds)
    record = {
        "machine": describe(),
        "about": f"`python scripts/{script} --rounds {options.rounds}`.",
        "runs": measure(setup),
    }
    write_text(options.out, json.dumps(record, indent=1) + "\n")
