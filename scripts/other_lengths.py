"""The host's time of calls whose lengths differ from call to call, as in a training on texts.

    python scripts/other_lengths.py --out docs/data/other_lengths.json

Each call is a forward and a backward in bfloat16 with a causal mask, on a GPU that is idle when it
begins. All calls are made once, and kernels are compiled. Then, in each round, they are made twice:
after all plans are forgotten, as first calls of their lengths, and again.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from triton import knobs  # noqa: E402

from sagesim.command import exit_code  # noqa: E402
from sagesim_kernels import attention, attention_varlen  # noqa: E402
from sagesim_kernels.bench.run import Setup  # noqa: E402
from sagesim_kernels.launching import forget_plans  # noqa: E402
from scripts.packed_time import text_length  # noqa: E402
from scripts.timed_runs import write_runs  # noqa: E402

HEADS: Final = 16
HEAD_SIZE: Final = 64
CALLS: Final = 24

Call = Callable[[], Tensor]
"""Computes o of its own q, k and v, which need gradients."""


def _packed(draw: random.Random, device: torch.device) -> Call:
    """Return a call with texts of lognormal lengths, 5,000 to 20,000 tokens in all."""
    total = draw.randrange(5000, 20000)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(min(text_length(draw), total - sum(lengths)))
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    longest, (q, k, v) = max(lengths), _inputs(device, total, HEADS, HEAD_SIZE)
    return lambda: _only(attention_varlen(q, k, v, cu, cu, longest, longest, is_causal=True))


def _dense(draw: random.Random, device: torch.device) -> Call:
    """Return a call with 1 to 4 sequences of 300 to 3,000 tokens."""
    q, k, v = _inputs(device, draw.randint(1, 4), HEADS, draw.randrange(300, 3000), HEAD_SIZE)
    return lambda: _only(attention(q, k, v, is_causal=True))


def _only(o: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Return o, without a logsumexp."""
    assert isinstance(o, Tensor)
    return o


def _inputs(device: torch.device, *shape: int) -> list[Tensor]:
    like = {"dtype": torch.bfloat16, "device": device}
    return [torch.randn(shape, **like, requires_grad=True) for _ in range(3)]


KINDS: Final = {"packed": _packed, "dense": _dense}


def measure(setup: Setup) -> list[dict[str, Any]]:
    """The kernels compiled in the first calls, and the host's milliseconds of the later ones."""
    compiled: list[str] = []

    def note(*, src: Any, **_: Any) -> None:
        compiled.append(src.name)

    knobs.compilation.listener = note
    rows: list[dict[str, Any]] = []
    for kind, make in KINDS.items():
        draw = random.Random(0)
        calls = [make(draw, setup.device) for _ in range(CALLS)]
        stalls: list[int] = []
        for call in calls:
            before = len(compiled)
            _timed(call)
            stalls.append(len(compiled) - before)
        times: dict[str, list[dict[str, float]]] = {"first": [], "again": []}
        for _ in range(setup.rounds):
            forget_plans()
            for found in times.values():
                found += [_timed(call) for call in calls]
        ms = {
            name: {
                which: round(statistics.median(x[which] for x in found), 3) for which in found[0]
            }
            for name, found in times.items()
        }
        rows.append({"kind": kind, "compiled": stalls, "ms": ms})
    return rows


def _timed(call: Call) -> dict[str, float]:
    """Return the host's milliseconds of the forward and of the backward."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    o = call()
    middle = time.perf_counter()
    o.backward(o.detach())
    end = time.perf_counter()
    torch.cuda.synchronize()
    return {"forward": 1e3 * (middle - start), "backward": 1e3 * (end - middle)}


def main() -> None:
    assert __doc__ is not None
    write_runs("other_lengths.py", __doc__, measure, 3)


if __name__ == "__main__":
    sys.exit(exit_code("other_lengths.py", main, {}))
