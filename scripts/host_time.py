"""The time of short calls in loops, forward and backward, host included, beside PyTorch's.

    python scripts/host_time.py --out docs/data/host_loops.json

PyTorch runs a backward in a thread of its own, so that a loop of calls changes between two threads.
Each loop is also timed with `torch.autograd.set_multithreading_enabled(False)`, in one thread.
`nothing` is an autograd function in Python that launches no kernel. The call is bfloat16, eager.
Contenders take turns; a figure is the median of all loops. Nothing clears the GPU's caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from sagesim.command import Failure, exit_code  # noqa: E402
from sagesim.files import check_writable, write_text  # noqa: E402
from sagesim_kernels.api import attention  # noqa: E402
from sagesim_kernels.bench.machine import describe  # noqa: E402

CALLS: Final = {
    "b1 h4 n256 d64 causal": ((1, 4, 256, 64), True),
    "b8 h16 n1024 d64 causal": ((8, 16, 1024, 64), True),
    "b32 h12 n512 d64 full": ((32, 12, 512, 64), False),
}
"""Batch, heads, tokens and head size, and whether the mask is causal."""

UNTIMED: Final = 60
"""Calls before each loop: the first of all compiles kernels."""

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


class Nothing(torch.autograd.Function):
    """Allocates an output and gradients, and does not compute them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (*map(torch.empty_like, ctx.saved_tensors), None)


def _ours(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    o = attention(q, k, v, is_causal=is_causal)
    assert isinstance(o, Tensor)
    return o


def _sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def _selected(backend: SDPBackend) -> AbstractContextManager[Any]:
    return sdpa_kernel(backend)


CONTENDERS: Final[dict[str, tuple[Attend, Callable[[], AbstractContextManager[Any]]]]] = {
    "factored_qk": (_ours, nullcontext),
    "sdpa flash": (_sdpa, partial(_selected, SDPBackend.FLASH_ATTENTION)),
    "sdpa cudnn": (_sdpa, partial(_selected, SDPBackend.CUDNN_ATTENTION)),
    "nothing": (Nothing.apply, nullcontext),
}
"""Each with the context in which it runs, which is entered once for each loop."""


def loops(
    contenders: Mapping[str, tuple[Attend, Callable[[], AbstractContextManager[Any]]]],
    size: tuple[int, ...],
    is_causal: bool,
    device: torch.device,
    *,
    calls: int,
    rounds: int,
) -> dict[str, float]:
    """Microseconds of a forward and backward in a loop of so many calls, by contender."""
    q, k, v, do = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, (attend, within) in contenders.items():
            with within():
                for _ in range(UNTIMED):
                    torch.autograd.grad(attend(q, k, v, is_causal), leaves, do)
                torch.cuda.synchronize(device)
                begun = time.perf_counter()
                for _ in range(calls):
                    torch.autograd.grad(attend(q, k, v, is_causal), leaves, do)
                torch.cuda.synchronize(device)
                found[name].append(1e6 * (time.perf_counter() - begun) / calls)
    return {name: round(statistics.median(us), 1) for name, us in found.items()}


def measure(device: torch.device, calls: int, rounds: int) -> dict[str, Any]:
    """The loops of each call, with the backward in a thread of its own and in the same one."""
    rows: dict[str, Any] = {}
    for call, (size, is_causal) in CALLS.items():
        rows[call] = {}
        for threads, are_several in (("two threads", True), ("one thread", False)):
            with torch.autograd.set_multithreading_enabled(are_several):
                rows[call][threads] = loops(
                    CONTENDERS, size, is_causal, device, calls=calls, rounds=rounds
                )
    return rows


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--calls", type=int, default=300, help="of a loop (default: 300)")
    parser.add_argument("--rounds", type=int, default=10, help="loops of each (default: 10)")
    options = parser.parse_args()
    for name in ("calls", "rounds"):
        if getattr(options, name) < 1:
            raise Failure(f"--{name} {getattr(options, name)}: must be at least 1")
    if not torch.cuda.is_available():
        raise Failure("PyTorch sees no GPU")
    check_writable(options.out)
    rows = measure(torch.device("cuda"), options.calls, options.rounds)
    record = {
        "command": f"python scripts/host_time.py --calls {options.calls} --rounds {options.rounds}",
        "machine": describe(),
        "loops_us": rows,
    }
    write_text(options.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code("host_time.py", main, {}))
