"""What the emulator costs: time against eager float32 attention, and the memory it adds.

    python benchmarks/emulator.py [--device cuda] [--heads 32] [--out FILE.json]

Both are timed forward and backward on the same inputs in one process, taking turns; ratios are
of medians. Memory is what one forward and backward adds to the process (CPU) or to the device's
allocator (GPU) above the inputs, each measured in a process of its own on the CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import sagesim


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with an explicit softmax, as written on paper."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def emulated(label: str) -> Callable[..., Tensor]:
    spec = sagesim.AttentionSpec.parse(label)
    return lambda q, k, v: sagesim.attention(q, k, v, spec=spec)


def step(attend: Callable[..., Tensor], x: tuple[Tensor, ...]) -> None:
    q, k, v = (y.detach().requires_grad_() for y in x[:3])
    attend(q, k, v).backward(x[3])


def inputs(args: argparse.Namespace) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shape = (1, args.heads, args.tokens, args.head_dim)
    return tuple(torch.randn(shape, device=args.device) for _ in range(4))


def seconds(attend: Callable[..., Tensor], x: tuple[Tensor, ...]) -> float:
    if x[0].is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    step(attend, x)
    if x[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_rss() -> int:
    """Bytes; the high-water mark of this process since it was started (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def added_memory(attend: Callable[..., Tensor], x: tuple[Tensor, ...]) -> int:
    """Bytes that one step adds above its inputs."""
    if x[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(attend, x)
        return torch.cuda.max_memory_allocated() - before
    step(attend, tuple(y[:, :, :64] for y in x))  # load what is loaded once
    before = peak_rss()
    step(attend, x)
    return peak_rss() - before


def machine(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu = names[0] if names else platform.processor()
    return f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--specs", nargs="+", default=["sagebwd", "factored", "fpa"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()

    attends = {"eager": eager, **{label: emulated(label) for label in args.specs}}
    x = inputs(args)
    if args.memory_of:
        print(added_memory(attends[args.memory_of], x))
        return

    for attend in attends.values():
        seconds(attend, x)  # warm-up
    times: dict[str, list[float]] = {name: [] for name in attends}
    for _ in range(args.rounds):
        for name, attend in attends.items():
            times[name].append(seconds(attend, x))
    medians = {name: statistics.median(t) for name, t in times.items()}
    keys = ("device", "heads", "tokens", "head_dim", "rounds")
    settings = " ".join(f"--{key.replace('_', '-')} {getattr(args, key)}" for key in keys)
    result = {
        "command": "python benchmarks/emulator.py " + settings,
        "machine": machine(args.device),
        "shape": [1, args.heads, args.tokens, args.head_dim],
        "rounds": args.rounds,
        "runs": {},
    }
    for name, attend in attends.items():
        if args.device == "cpu":
            command = [sys.executable, *sys.argv, "--memory-of", name]
            memory = int(subprocess.run(command, check=True, capture_output=True).stdout)
        else:
            memory = added_memory(attend, x)
        ratio = medians[name] / medians["eager"]
        result["runs"][name] = {"seconds": medians[name], "ratio": ratio, "bytes": memory}
        print(
            f"{name:12} {medians[name]:8.3f} s  {ratio:5.2f} x eager  {memory / 1e6:8.0f} MB added"
        )
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
