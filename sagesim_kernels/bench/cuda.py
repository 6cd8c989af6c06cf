"""The meter of a CUDA device: events for times, the profiler for kernels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from sagesim_kernels.bench.machine import nvidia_smi
from sagesim_kernels.bench.meter import Elapsed, Kernel

_FLUSHED_BYTES: Final = 2**28
"""Larger than any L2 cache (H200: 50 MB, B200: 126 MB)."""

_FLUSHES: Final = 64
"""Writes of that many bytes before a timed run. They keep an H200 busy for about 4 ms."""

_MOST_FLUSHES: Final = 512
"""More could fill the queue of launches, which has about a thousand places."""


class CudaMeter:
    """A `Meter` of the current CUDA device and stream.

    The device is busy with other writes while the host launches a timed run, as the host runs ahead
    of the device in training. If the device finishes them first, the run is repeated after twice as
    many, and so is every later one. `Elapsed.waited` is true if the most writes do not suffice, for
    example because the run itself waits for the device.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device="cuda")
        self._flushes = _FLUSHES

    def elapsed(self, prepare: Callable[[], Callable[[], object]]) -> Elapsed:
        found = self._elapsed(prepare())
        while found.waited and self._flushes < _MOST_FLUSHES:
            self._flushes *= 2
            found = self._elapsed(prepare())
        return found

    def _elapsed(self, run: Callable[[], object]) -> Elapsed:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(self._flushes):
            self._buffer.zero_()
        begun = time.perf_counter()
        start.record()
        result = run()
        end.record()
        host = time.perf_counter() - begun
        waited = start.query()  # the device was at the first launch before the host was at the last
        torch.cuda.synchronize()
        del result
        return Elapsed(start.elapsed_time(end) / 1e3, host, waited)

    def loop(self, run: Callable[[], object], calls: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / calls

    def added_bytes(self, run: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before

    def kernels(self, run: Callable[[], object]) -> list[Kernel]:
        torch.cuda.synchronize()
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
        ) as profiler:
            run()
            torch.cuda.synchronize()
        return device_kernels(list(profiler.events() or []))

    def clock_mhz(self) -> int | None:
        (clock,) = nvidia_smi("clocks.sm")
        return None if clock is None else int(clock)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def device_kernels(events: list[FunctionEvent]) -> list[Kernel]:
    """The kernels among a profile's events, in order of their start.

    A kernel may start while the one before still runs, and wait for it: see
    `sagesim_kernels.launching.dependent`. The time of this wait does not count.
    """
    on_device = [e for e in events if e.device_type.name == "CUDA"]
    ran = [e for e in on_device if not e.is_user_annotation]
    ran.sort(key=lambda e: e.time_range.start)
    found: list[Kernel] = []
    last = -math.inf
    for e in ran:
        begun, ended = max(e.time_range.start, last), e.time_range.end
        found.append(Kernel(e.name, max(ended - begun, 0) / 1e6))
        last = max(last, ended)
    return found
