"""A fake device: its clock returns given numbers, and its contenders are small functions."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sagesim import AttentionSpec
from sagesim_kernels.bench.cases import CaptureCase, GaussianCase, Shape, TimedCase
from sagesim_kernels.bench.contenders import Attend, Contender, contender
from sagesim_kernels.bench.meter import Elapsed, Kernel
from sagesim_kernels.bench.models import ModelCase, TrainingCase
from sagesim_kernels.bench.record import Record
from sagesim_kernels.bench.run import Setup

MACHINE = {"gpu": "Fake 1", "torch": "2.0", "driver": None}
SETTINGS = {
    "specs": ["factored", "sagebwd"],
    "peers": ["sdpa flash", "slow", "absent"],
    "quick": False,
    "dtype": "bfloat16",
}


@dataclass
class FakeMeter:
    """Runs what it times, and reports the next number of `seconds` as the time."""

    seconds: Callable[[], float] = lambda: 0.001
    runs: int = 0
    is_lost: bool = False
    loops: list[int] = field(default_factory=list)  #: calls of each loop
    launched: list[Kernel] = field(default_factory=lambda: [Kernel("forward_kernel", 0.001)])

    def elapsed(self, prepare: Callable[[], Callable[[], object]]) -> Elapsed:
        prepare()()
        self.runs += 1
        seconds = self.seconds()
        return Elapsed(seconds, seconds / 2)

    def loop(self, run: Callable[[], object], calls: int) -> float:
        for _ in range(calls):
            run()
        self.loops.append(calls)
        return self.seconds()

    def added_bytes(self, run: Callable[[], object]) -> int:
        run()
        return 5_000_000

    def kernels(self, run: Callable[[], object]) -> list[Kernel]:
        run()
        return self.launched

    def clock_mhz(self) -> int | None:
        return 1980

    def synchronize(self) -> None:
        if self.is_lost:
            raise RuntimeError("an illegal memory access was encountered")


def explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with an explicit softmax and no mask; k and v may have fewer heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def fake(name: str, attend: Attend, *, is_ours: bool = False) -> Contender:
    """A contender that computes `attend`."""
    spec = AttentionSpec.parse(name) if is_ours else None
    return Contender(name, lambda tokens, is_causal, device: attend, spec)


def absent(tokens: int, is_causal: bool, device: torch.device) -> Attend:
    """The `make` of a contender that is not installed."""
    raise ModuleNotFoundError("No module named 'absent'")


def find(name: str) -> Contender:
    """A contender of any name. All compute the same attention; "absent" is not installed."""
    if name == "absent":
        return Contender(name, absent)
    if name in ("sdpa flash", "slow"):
        return fake(name, explicit)
    spec = contender(name).spec
    return Contender(name, lambda tokens, is_causal, device: explicit, spec)


def timed(*contenders: str, tokens: int = 16, part: str = "speed", head_dim: int = 8) -> TimedCase:
    return TimedCase(part, Shape(2, 3, tokens, head_dim, False), contenders)


def model(*contenders: str, group: str = "cross") -> ModelCase:
    return ModelCase(group, Shape(1, 4, 16, 8, False, kv_heads=2, keys=12), contenders)


def training(*contenders: str, is_compiled: bool = False) -> TrainingCase:
    return TrainingCase(2, 32, 16, 8, 3, is_compiled, contenders)


def gaussian(*contenders: str, sigma: float = 1.0) -> GaussianCase:
    return GaussianCase(sigma, 8, False, contenders, tokens=16, draws=2)


def capture(*contenders: str) -> CaptureCase:
    return CaptureCase(contenders)


def cpu_setup(meter: FakeMeter, rounds: int = 3, dtype: torch.dtype = torch.float32) -> Setup:
    return Setup(torch.device("cpu"), dtype, meter, rounds)


def record(path, **changes) -> Record:
    arguments = {"machine": MACHINE, "settings": SETTINGS, "command": "test"} | changes
    return Record.open(path, **arguments)
