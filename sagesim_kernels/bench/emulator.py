"""Time and memory of the emulator beside eager float32 attention, on a CPU or a GPU.

Eager attention is an explicit softmax. Every scheme runs forward and backward on the same float32
inputs in one process. A round times each scheme once; a time is the median of the rounds, and a
ratio is a ratio of medians. Memory is what one forward and backward adds above its inputs: to the
process on a CPU, where each scheme gets a process of its own, and to the allocator on a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import sagesim
from sagesim.command import exit_code
from sagesim.files import check_writable, write_text
from sagesim.terminal import Failure

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k and v [batch, heads, tokens, head size] to o, differentiable."""

_PROGRAM: Final = "python -m sagesim_kernels.bench.emulator"
_SPECS: Final = ("sagebwd", "factored", "fpa")
_NUMBERS: Final = ("heads", "tokens", "head_dim", "rounds")
_SETTINGS: Final = ("device", *_NUMBERS)
"""Arguments that a record's command repeats, besides the specs."""


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full attention with an explicit softmax."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def emulated(label: str) -> Attend:
    """The emulator's attention under the spec with this label.

    Raises:
        ValueError: if the label is not a spec's.
    """
    spec = sagesim.AttentionSpec.parse(label)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sagesim.attention(q, k, v, spec=spec)

    return attend


def forward_and_backward(attend: Attend, qkvdo: Sequence[Tensor]) -> None:
    """Run attention and its backward once on q, k, v, do."""
    q, k, v = (x.detach().requires_grad_() for x in qkvdo[:3])
    attend(q, k, v).backward(qkvdo[3])


def gaussian_inputs(
    heads: int, tokens: int, head_dim: int, device: torch.device
) -> tuple[Tensor, ...]:
    """q, k, v, do [1, heads, tokens, head_dim], float32, the same each time."""
    torch.manual_seed(0)
    shape = (1, heads, tokens, head_dim)
    return tuple(torch.randn(shape, device=device) for _ in range(4))


def seconds(attend: Attend, qkvdo: Sequence[Tensor]) -> float:
    """Wall-clock seconds of one forward and backward, until the device has finished it."""
    device = qkvdo[0].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    forward_and_backward(attend, qkvdo)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def peak_rss() -> int:
    """The largest resident size of this process so far, in bytes. Linux only."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def added_memory(attend: Attend, qkvdo: Sequence[Tensor]) -> int:
    """Bytes that one forward and backward adds above its inputs, at the peak."""
    device = qkvdo[0].device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        forward_and_backward(attend, qkvdo)
        return torch.cuda.max_memory_allocated(device) - before
    # A short run first: libraries that it loads are not memory of the scheme.
    forward_and_backward(attend, [x[:, :, :64] for x in qkvdo])
    before = peak_rss()
    forward_and_backward(attend, qkvdo)
    return peak_rss() - before


def machine(device: torch.device) -> str:
    """The device and the version of PyTorch."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu = names[0] if names else platform.processor()
    return f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: write the record if --out is given, and print one line for each scheme.

    Raises:
        Failure: if an argument is wrong.
        WriteError: if the record cannot be written. An unusable path raises before the first run.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(arguments)
    for name in _NUMBERS:
        if (value := getattr(args, name)) < 1:
            raise Failure(f"{_option(name)} {value}: not a positive number")
    try:
        schemes: dict[str, Attend] = {"eager": eager, **{s: emulated(s) for s in args.specs}}
    except ValueError as error:
        raise Failure(f"--specs: {error}") from None
    device = _device(args.device)
    qkvdo = gaussian_inputs(args.heads, args.tokens, args.head_dim, device)
    if args.memory_of:
        print(added_memory(schemes[args.memory_of], qkvdo))
        return

    if args.out is not None:
        check_writable(args.out)
    for attend in schemes.values():
        seconds(attend, qkvdo)  # warm-up
    times: dict[str, list[float]] = {name: [] for name in schemes}
    for _ in range(args.rounds):
        for name, attend in schemes.items():
            times[name].append(seconds(attend, qkvdo))
    medians = {name: statistics.median(t) for name, t in times.items()}

    runs: dict[str, dict[str, float]] = {}
    for name, attend in schemes.items():
        if device.type == "cpu":
            added = _added_memory_in_a_new_process(arguments, name)
        else:
            added = added_memory(attend, qkvdo)
        ratio = medians[name] / medians["eager"]
        runs[name] = {"seconds": medians[name], "ratio": ratio, "bytes": added}
    if args.out is not None:
        settings = (f"{_option(key)} {getattr(args, key)}" for key in _SETTINGS)
        record: dict[str, Any] = {
            "command": " ".join([_PROGRAM, *settings, "--specs", shlex.join(args.specs)]),
            "machine": machine(device),
            "shape": [1, args.heads, args.tokens, args.head_dim],
            "rounds": args.rounds,
            "runs": runs,
        }
        write_text(args.out, json.dumps(record, indent=1) + "\n")
    for name, run in runs.items():
        print(
            f"{name:12} {run['seconds']:8.3f} s  {run['ratio']:5.2f} x eager  "
            f"{run['bytes'] / 1e6:8.0f} MB added"
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _device(name: str) -> torch.device:
    """The device with this name.

    Raises:
        Failure: if it is not a CPU or a CUDA device of this machine.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Failure(f"--device {name}: not a device; cpu, cuda and cuda:N are") from None
    if device.type not in ("cpu", "cuda"):
        raise Failure(f"--device {name}: neither cpu nor cuda")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= found:
        raise Failure(f"--device {name}: this machine has {found} CUDA devices")
    return device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--specs",
        nargs="+",
        default=list(_SPECS),
        metavar="LABEL",
        help=f"specs to emulate (default: {' '.join(_SPECS)})",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda or cuda:N (default: cpu)")
    for name, value, what in (
        ("--heads", 1, "heads, in a batch of 1"),
        ("--tokens", 8192, "queries and keys"),
        ("--head-dim", 64, "channels of a head"),
        ("--rounds", 5, "times that each scheme is timed"),
    ):
        parser.add_argument(
            name, type=int, default=value, metavar="N", help=f"{what} (default: %(default)s)"
        )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="the record to write")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)  # for the process of one scheme
    return parser


def _added_memory_in_a_new_process(arguments: Sequence[str], name: str) -> int:
    """The peak of a process includes all that ran in it before, so each scheme gets its own."""
    command = [sys.executable, *_PROGRAM.split()[1:], *arguments, "--memory-of", name]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    sys.exit(exit_code("sagesim_kernels.bench.emulator", main, {}))
