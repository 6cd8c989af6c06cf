"""The time of short calls in loops, forward and backward, host included, beside PyTorch's.

    python scripts/host_time.py --out docs/data/host_loops.json

PyTorch runs a backward in a thread of its own, so that a loop of calls changes between two threads.
Each loop is also timed with `torch.autograd.set_multithreading_enabled(False)`, in one thread.
`nothing` is an autograd function in Python that launches no kernel. Calls are eager, in bfloat16.
Contenders take turns; a figure is the median of all loops. Nothing clears the GPU's caches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from sagesim.command import exit_code  # noqa: E402
from sagesim_kernels.bench.contenders import Attend, Contender, contender  # noqa: E402
from sagesim_kernels.bench.run import Setup  # noqa: E402
from sagesim_kernels.bench.shape import Shape  # noqa: E402
from sagesim_kernels.bench.step import Step  # noqa: E402
from sagesim_kernels.bench.timing import looped  # noqa: E402
from scripts.timed_runs import write_runs  # noqa: E402

SHAPES: Final = {
    "b1 h4 n256 d64 causal": Shape(1, 4, 256, 64, True),
    "b8 h16 n1024 d64 causal": Shape(8, 16, 1024, 64, True),
    "b32 h12 n512 d64 full": Shape(32, 12, 512, 64, False),
}

USUAL: Final = 1e-4
"""Seconds of a call. Fewer than any contender takes, so that all loops have as many calls."""


class _Nothing(torch.autograd.Function):
    """Allocates an output and gradients, and does not compute them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def _nothing(tokens: int, is_causal: bool, device: torch.device) -> Attend:
    return _Nothing.apply


CONTENDERS: Final = (
    *map(contender, ("factored_qk", "sdpa flash", "sdpa cudnn")),
    Contender("nothing", _nothing),
)


def measure(setup: Setup, contenders: Sequence[Contender] = CONTENDERS) -> list[dict[str, Any]]:
    """Microseconds of a call by contender, for each shape with two threads and with one."""
    selected = {each.name: each.selected for each in contenders}
    rows: list[dict[str, Any]] = []
    for call, shape in SHAPES.items():
        problem, steps = setup.inputs(shape), dict[str, Step]()
        for each in contenders:
            with each.selected():
                steps[each.name] = Step.of(each, problem)
                steps[each.name].both()  # compiles
        for threads, are_several in (("two threads", True), ("one thread", False)):
            with torch.autograd.set_multithreading_enabled(are_several):
                found = looped(
                    {name: step.both for name, step in steps.items()},
                    dict.fromkeys(steps, USUAL),
                    setup.meter,
                    setup.rounds,
                    on_error=_fail,
                    within=lambda name: selected[name](),
                )
            us = {name: round(1e3 * run["ms"], 1) for name, run in found.runs.items()}
            rows.append({"call": call, "threads": threads, "us": us})
    return rows


def _fail(name: str, error: Exception) -> None:
    raise error


def main() -> None:
    assert __doc__ is not None
    write_runs("host_time.py", __doc__, measure, 10)


if __name__ == "__main__":
    sys.exit(exit_code("host_time.py", main, {}))
