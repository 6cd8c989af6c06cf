"""Launches by the CUDA driver's function: a stand-in for the driver reads what a kernel gets."""

from __future__ import annotations

import ctypes
import gc
import time
from collections import Counter
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from sagesim_kernels import driver_launch
from sagesim_kernels.driver_launch import is_plain_launch, prepare_launch


class Pair(NamedTuple):
    ptr: Any
    count: Any
    CONSTANT: Any


class EncodedMap:
    """As large as Triton's object with an encoded descriptor: the map is at its end."""

    __slots__ = tuple(f"x{i:02}" for i in range(30))


TENSORS = [torch.zeros(4), torch.zeros(2)]
DESCRIPTOR = SimpleNamespace(base=TENSORS[1], block_shape=[1, 2], shape=[7, 64], strides=[80, 1])
SIGNATURE = {
    "x": ("*fp32", "i32", "constexpr"),
    "map": "tensordesc<bf16[1, 2]>",
    "scale": "fp32",
    "absent": "constexpr",
    "large": "i64",
    "flag": "u1",
    "y": "*i8",
}
ARGS = (Pair(TENSORS[0], -3, 5), DESCRIPTOR, 0.1, None, 2**40, True, TENSORS[1])
SIZES = (8, 4, 128, 4, 4, 8, 8, 4, 8, 1, 8, 8, 8)
"""Bytes of the parameters: the descriptor is followed by its shape and strides; scratch is last."""


def compiled(signature: dict[str, Any] = SIGNATURE, **launcher: Any) -> Any:
    usual = {"launch_cooperative_grid": False, "launch_pdl": False}
    scratch = {"global_scratch_size": 0, "profile_scratch_size": 0}
    return SimpleNamespace(
        src=SimpleNamespace(signature=signature),
        packed_metadata=(8, launcher.pop("clusters", 1), 1000),
        function=0x7777,
        name="some_kernel",
        run=SimpleNamespace(**{**usual, **scratch, **launcher}),
    )


class Driver:
    """Reads a launch as the driver does: from the addresses of the parameters."""

    def __init__(self) -> None:
        self.error = 0
        self.context: int | None = 0x55
        self.launches: list[tuple[Any, ...]] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: None) -> int:
        if self.context is None:
            return 201
        time.sleep(1e-5)  # other threads run, as they may during a call of the driver
        c = config._obj
        attributes = [(x.id, x.value) for x in c.attributes[: c.attribute_count]]
        shape = (*c.grid, *c.block, c.shared_bytes, c.stream, attributes)
        read = [ctypes.string_at(x, n) for x, n in zip(pointers, SIZES, strict=True)]
        self.launches.append((shape, function.value, read))
        return self.error

    def cuCtxGetCurrent(self, context: Any) -> None:
        context._obj.value = self.context

    def cuDeviceGet(self, device: Any, index: int) -> None:
        device._obj.value = index + 100

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        context._obj.value = device.value + 1000

    def cuCtxSetCurrent(self, context: Any) -> None:
        self.context = context.value

    def cuGetErrorString(self, error: int, text: Any) -> None:
        text._obj.value = f"error {error} of the driver".encode()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(driver_launch, "_driver", lambda: found)
    return found


def number(kind: Any, x: Any) -> bytes:
    return bytes(kind(x))


def expected(first: int, second: int, encoded: EncodedMap) -> list[bytes]:
    size = type(encoded).__basicsize__
    return [
        number(ctypes.c_uint64, first),
        number(ctypes.c_int32, -3),
        ctypes.string_at(id(encoded) + size - 128, 128),
        *(number(ctypes.c_int32, x) for x in (7, 64)),
        *(number(ctypes.c_int64, x) for x in (80, 1)),
        number(ctypes.c_float, 0.1),
        number(ctypes.c_int64, 2**40),
        number(ctypes.c_uint8, 1),
        number(ctypes.c_uint64, second),
        bytes(8),
        bytes(8),
    ]


def test_parameters_are_those_of_the_call(driver: Driver) -> None:
    launch = prepare_launch(compiled(), 12, ARGS)
    assert [id(x) for x in launch.tensors] == [id(x) for x in TENSORS]
    assert launch.descriptors == [DESCRIPTOR]
    maps = EncodedMap(), EncodedMap()
    for stream, first, second, encoded in ((5, 2**63 + 1, 16, maps[0]), (6, 32, 48, maps[1])):
        launch.run(stream, first, second, encoded)
        shape, function, read = driver.launches[-1]
        assert shape == (12, 1, 1, 256, 1, 1, 1000, stream, [])
        assert function == 0x7777
        assert read == expected(first, second, encoded)


def test_a_dependent_launch_has_the_attribute(driver: Driver) -> None:
    launch = prepare_launch(compiled(launch_pdl=True), 12, ARGS)
    gc.collect()  # the attribute stays
    launch.run(5, 1, 2, EncodedMap())
    ((*_, attributes),) = (shape for shape, _, _ in driver.launches)
    programmatic_stream_serialization = 6
    assert attributes == [(programmatic_stream_serialization, 1)]


def test_threads_do_not_mix_their_addresses(driver: Driver) -> None:
    launch = prepare_launch(compiled(), 1, ARGS)
    encoded, threads, calls = EncodedMap(), 4, 300
    start = Barrier(threads)

    def repeat(mark: int) -> None:
        start.wait()
        for _ in range(calls):
            launch.run(mark, mark, mark, encoded)

    several = [Thread(target=repeat, args=(i,)) for i in range(1, threads + 1)]
    for x in several:
        x.start()
    for x in several:
        x.join()
    streams = Counter(shape[7] for shape, _, _ in driver.launches)
    assert streams == dict.fromkeys(range(1, threads + 1), calls)
    for shape, _, read in driver.launches:
        assert read == expected(shape[7], shape[7], encoded)


def test_an_error_of_the_driver_is_raised(driver: Driver) -> None:
    launch = prepare_launch(compiled(), 1, ARGS)
    driver.error = 700
    with pytest.raises(RuntimeError, match="some_kernel was not launched: error 700 of the driver"):
        launch.run(0, 1, 2, EncodedMap())


def test_a_thread_without_a_context_gets_that_of_the_current_device(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    driver.context = None
    encoded = EncodedMap()
    prepare_launch(compiled(), 1, ARGS).run(5, 1, 2, encoded)
    assert driver.context == 1103
    ((_, _, read),) = driver.launches
    assert read == expected(1, 2, encoded)


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(ValueError, match=r"an argument 1\.5 of the type 'fp16'"):
        prepare_launch(compiled({"x": "fp16"}), 1, (1.5,))


@pytest.mark.parametrize(
    "launcher",
    [
        {"clusters": 2},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
    ],
)
def test_other_launches_are_left_to_triton(launcher: dict[str, Any]) -> None:
    assert is_plain_launch(compiled())
    assert not is_plain_launch(compiled(**launcher))
