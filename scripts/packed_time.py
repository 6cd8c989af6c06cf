"""The time of attention on packed sequences, beside FlashAttention-2 as PyTorch has it.

flash-attn-4 is timed, too, if it is installed.

    python scripts/packed_time.py --out docs/data/packed_times.json

Times are the GPU's, in bfloat16 with a causal mask. Before each pass the GPU's cache is filled, and
the host runs ahead. Contenders take turns; a figure is the median of all rounds.
"""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from sagesim.command import exit_code  # noqa: E402
from sagesim_kernels.api import attention_varlen  # noqa: E402
from sagesim_kernels.bench.contenders import Contender  # noqa: E402
from sagesim_kernels.bench.machine import installed  # noqa: E402
from sagesim_kernels.bench.run import Setup  # noqa: E402
from sagesim_kernels.bench.shape import Shape  # noqa: E402
from sagesim_kernels.bench.step import Step  # noqa: E402
from sagesim_kernels.bench.timing import interleaved, summary  # noqa: E402
from scripts.timed_runs import write_runs  # noqa: E402


class Heads(NamedTuple):
    """The heads of a call."""

    q: int
    kv: int
    size: int


def text_length(draw: random.Random) -> int:
    """The tokens of a text: lognormal, most texts are short."""
    return min(max(round(draw.lognormvariate(5.5, 1.0)), 16), 4096)


def _texts(count: int) -> list[int]:
    """The lengths of `count` texts."""
    draw = random.Random(0)
    return [text_length(draw) for _ in range(count)]


LENGTHS: Final = {
    "texts": _texts(48),
    "one long, others short": [4096, *[128] * 63],
    "halves": [2048, 1024, 512, 256, 128, 128] * 4,
    "equal": [2048] * 8,
}
HEADS: Final = (Heads(16, 16, 64), Heads(32, 8, 128))
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""Takes q, k and v [tokens, heads, size], `cu_seqlens` and the longest length; returns o."""


def _ours(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
    options = {"is_causal": True, "enable_gqa": q.shape[1] != k.shape[1]}
    o = attention_varlen(q, k, v, cu, cu, longest, longest, **options)
    assert isinstance(o, Tensor)
    return o


def _flash_2(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
    lengths = (cu, cu, longest, longest)
    return torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, True, False)[0]


def _flash_4(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
    attend: Any = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    lengths = {f"cu_seqlens_{x}": cu for x in "qk"} | {f"max_seqlen_{x}": longest for x in "qk"}
    found = attend(q, k, v, **lengths, causal=True)
    return found[0] if isinstance(found, tuple) else found


CONTENDERS: Final = {"factored_qk": _ours, "FlashAttention-2": _flash_2} | (
    {"flash-attn-4": _flash_4} if installed("flash-attn-4") else {}
)


def _contender(name: str, attend: Attend, lengths: Sequence[int]) -> Contender:
    def make(tokens: int, is_causal: bool, device: torch.device) -> Any:
        cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)

        def attend_packed(*qkv: Tensor) -> Tensor:
            flat = (x.squeeze(0).transpose(0, 1) for x in qkv)
            return attend(*flat, cu, max(lengths)).transpose(0, 1)[None]

        return attend_packed

    return Contender(name, make, tokens_first=True)


def measure(setup: Setup, contenders: Mapping[str, Attend] = CONTENDERS) -> list[dict[str, Any]]:
    """Microseconds of the forward and the backward by contender, for each call."""
    rows: list[dict[str, Any]] = []
    for (call, lengths), heads in itertools.product(LENGTHS.items(), HEADS):
        shape = Shape(1, heads.q, sum(lengths), heads.size, True, kv_heads=heads.kv)
        problem, steps = setup.inputs(shape), dict[str, Step]()
        for name, attend in contenders.items():
            steps[name] = Step.of(_contender(name, attend, lengths), problem)
            steps[name].both()  # compiles
        found = interleaved(steps, setup.meter, setup.rounds, on_error=_fail)
        us = {
            name: {which: round(1e3 * summary(times)["ms"], 1) for which, times in passes.items()}
            for name, passes in found.times.items()
        }
        rows.append({"call": call, "lengths": lengths, **heads._asdict(), "us": us})
    return rows


def _fail(name: str, error: Exception) -> None:
    raise error


def main() -> None:
    assert __doc__ is not None
    write_runs("packed_time.py", __doc__, measure, 15)


if __name__ == "__main__":
    sys.exit(exit_code("packed_time.py", main, {}))
