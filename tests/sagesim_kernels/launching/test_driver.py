"""Launches by the CUDA driver's function: a stand-in for the driver reads what a kernel gets."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections import Counter
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from sagesim_kernels.launching import driver as driver_module
from sagesim_kernels.launching.driver import is_plain_launch, joined, prepare_launch


class Pair(NamedTuple):
    ptr: Any
    count: Any
    CONSTANT: Any


class EncodedMap:
    """As large as Triton's object with an encoded descriptor: the map is at its end.

    It has the addresses of other objects, so that each one has its own bytes.
    """

    __slots__ = tuple(f"x{i:02}" for i in range(30))

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, object())

    def map(self) -> bytes:
        return ctypes.string_at(id(self) + type(self).__basicsize__ - 128, 128)


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


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, with a value that is an integer."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class Seen(NamedTuple):
    """What the driver gets at a launch."""

    shape: tuple[Any, ...]  #: grid, block, shared memory, stream, attributes
    function: int
    parameters: list[bytes]

    @property
    def stream(self) -> int:
        return self.shape[7]


class Driver:
    """Reads a launch as the driver does: from the addresses of the parameters."""

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] = SIZES
        self.error = 0
        self.context: int | None = 0x55
        self.launches: list[Seen] = []
        pointer = ctypes.c_void_p
        function = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(Config), pointer, ctypes.POINTER(pointer), pointer
        )
        self.cuLaunchKernelEx = function(self._launch)

    def _launch(self, config: Any, function: int, pointers: Any, extra: None) -> int:
        if self.context is None:
            return 201
        time.sleep(1e-5)  # other threads run, as they may during a call of the driver
        c = config.contents
        attributes = [(x.id, x.value[0]) for x in c.attributes[: c.attribute_count]]
        shape = (*c.grid, *c.block, c.shared_bytes, c.stream, attributes)
        read = [ctypes.string_at(pointers[i], n) for i, n in enumerate(self.sizes)]
        self.launches.append(Seen(shape, function, read))
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
    monkeypatch.setattr(driver_module, "_driver", lambda: found)
    return found


def number(kind: Any, x: Any) -> bytes:
    return bytes(kind(x))


class Memory:
    """A tensor, as far as a launch asks."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class Repeated:
    """The launch of ARGS, as part of a plan."""

    def __init__(self, launches: int = 1, **launcher: Any) -> None:
        self.encoded: dict[int, EncodedMap] = {}
        self.encodings = 0
        launch = prepare_launch(compiled(**launcher), 12, ARGS)
        x, y = (id(x) for x in TENSORS)
        changing = {x: (0, 0), id(DESCRIPTOR): (1, 64, self._encode), y: (1, 16)}
        parameters = tuple(changing.get(id(x), x) for x in launch.parameters)
        self._run = joined([launch._replace(parameters=parameters)] * launches)

    def _encode(self, address: int) -> EncodedMap:
        self.encodings += 1
        return self.encoded.setdefault(address, EncodedMap())

    def __call__(self, stream: int, x: int, y: int) -> None:
        self._run(stream, Memory(x), Memory(y))

    def expected(self, x: int, y: int) -> list[bytes]:
        """The parameters, for tensors at these addresses."""
        return [
            number(ctypes.c_uint64, x),
            number(ctypes.c_int32, -3),
            self.encoded[y + 64].map(),
            *(number(ctypes.c_int32, x) for x in (7, 64)),
            *(number(ctypes.c_int64, x) for x in (80, 1)),
            number(ctypes.c_float, 0.1),
            number(ctypes.c_int64, 2**40),
            number(ctypes.c_uint8, 1),
            number(ctypes.c_uint64, y + 16),
            bytes(8),
            bytes(8),
        ]


def test_parameters_are_those_of_the_call(driver: Driver) -> None:
    run = Repeated(launches=2)
    for stream, x, y in ((5, 2**63 + 1, 16), (6, 32, 48), (7, 32, 16)):
        run(stream, x, y)
        for seen in driver.launches[-2:]:
            assert seen.shape == (12, 1, 1, 256, 1, 1, 1000, stream, [])
            assert seen.function == 0x7777
            assert seen.parameters == run.expected(x, y)
    assert len(driver.launches) == 6
    assert run.encodings == 4  # two addresses, in two launches


def test_encoded_descriptors_are_kept_for_the_latest_addresses(driver: Driver) -> None:
    run = Repeated()
    for _ in range(2):
        for i in range(100):
            run(1, 8, 128 * i)
            assert driver.launches[-1].parameters == run.expected(8, 128 * i)
    assert run.encodings == 200


def test_a_dependent_launch_has_the_attribute(driver: Driver) -> None:
    run = Repeated(launch_pdl=True)
    gc.collect()  # the attribute stays
    run(5, 1, 2)
    (seen,) = driver.launches
    programmatic_stream_serialization = 6
    assert seen.shape[-1] == [(programmatic_stream_serialization, 1)]


def test_threads_do_not_mix_their_addresses(driver: Driver) -> None:
    run, threads, calls = Repeated(launches=2), 4, 150
    start = Barrier(threads)

    def repeat(mark: int) -> None:
        start.wait()
        for _ in range(calls):
            run(mark, mark, mark)

    several = [Thread(target=repeat, args=(i,)) for i in range(1, threads + 1)]
    for x in several:
        x.start()
    for x in several:
        x.join()
    streams = Counter(seen.stream for seen in driver.launches)
    assert streams == dict.fromkeys(range(1, threads + 1), 2 * calls)
    for seen in driver.launches:
        assert seen.parameters == run.expected(seen.stream, seen.stream)


def test_an_error_of_the_driver_is_raised(driver: Driver) -> None:
    run = Repeated(launches=2)
    driver.error = 700
    with pytest.raises(RuntimeError, match="some_kernel was not launched: error 700 of the driver"):
        run(0, 1, 2)
    assert len(driver.launches) == 1


def test_errors_of_the_call_are_raised(driver: Driver) -> None:
    def fail(address: int) -> None:
        raise ArithmeticError(f"no descriptor of {address}")

    launch = prepare_launch(compiled({"x": "*fp32"}), 1, TENSORS[:1])
    with pytest.raises(ArithmeticError, match="no descriptor of 40"):
        joined([launch._replace(parameters=((0, 32, fail),))])(0, Memory(8))
    run = joined([launch._replace(parameters=((1, 0),))])
    with pytest.raises(AttributeError, match="data_ptr"):
        run(0, None, Memory(8))
    with pytest.raises(TypeError, match="all tensors of the plan"):
        run(0, Memory(8))
    assert not driver.launches


def test_a_thread_without_a_context_gets_that_of_the_current_device(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    driver.context = None
    run = Repeated(launches=2)
    run(5, 1, 2)
    assert driver.context == 1103
    assert [seen.parameters for seen in driver.launches] == [run.expected(1, 2)] * 2


def test_a_context_that_cannot_be_bound_is_an_error(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(driver, "cuDevicePrimaryCtxRetain", lambda context, device: 2)
    driver.context = None
    with pytest.raises(RuntimeError, match="some_kernel was not launched: error 201"):
        Repeated()(5, 1, 2)


def test_a_plan_releases_what_it_kept(driver: Driver) -> None:
    encoded = EncodedMap()

    def encode(address: int) -> EncodedMap:
        return encoded

    driver.sizes = 128, 8
    before = sys.getrefcount(encode), sys.getrefcount(encoded)
    launch = prepare_launch(compiled({"x": "*fp32"}), 1, TENSORS[:1])
    run = joined([launch._replace(parameters=((0, 32, encode), 2**64 - 1))])
    with pytest.raises(OverflowError):
        joined([launch._replace(parameters=((0, 32, encode), 2**64))])
    for i in range(100):
        run(5, Memory(i))
    del run
    gc.collect()
    assert (sys.getrefcount(encode), sys.getrefcount(encoded)) == before


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
