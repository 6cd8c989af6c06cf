"""Launch a compiled kernel again, with other addresses, and without what Triton does every time.

Triton's launcher encodes every TMA descriptor anew and goes through the arguments in Python. With a
version whose compiled kernels are known here, it is left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import triton

from sagesim_kernels.launching.driver import DriverLaunch, is_plain_launch, prepare_launch

_IS_KNOWN: Final = triton.__version__.startswith("3.6.") and sys.platform == "linux"
"""Whether `launching.driver` fits this version of Triton, and finds the driver."""

_PACKED: Final = re.compile(r"mul\.wide\.u32\s+(%rd\d+), %r\d+, (\d+);")
"""A product of 64 bits in PTX, by a constant."""

_THREADS: Final = 1024
"""The most threads of a block."""

_checked: Final[set[str]] = set()


class CompilerFault(RuntimeError):
    """A kernel that the compiler translated wrongly."""


def check_compiled(compiled: Any) -> None:
    """Look for a fault of Triton 3.6 in a compiled kernel, before it runs.

    LLVM shifts two numbers of a thread as a vector, each by its own constant. One result may have
    no use, and then it need not fit into 32 bits. The vector lies in 64 bits, and the bits that do
    not fit are added to the other number, from which addresses follow. One kernel is known that had
    the fault: it read from misaligned addresses. Triton 3.9 compiles it correctly.

    Raises:
        CompilerFault: if the kernel has the fault.
    """
    if compiled.hash in _checked:
        return
    ptx = compiled.asm["ptx"]
    for register, factor in _PACKED.findall(ptx):
        overflows = int(factor) * (_THREADS - 1) >= 2**32
        if overflows and re.search(rf"or\.b64\s[^;]*, {register}\b", ptx):
            raise CompilerFault(
                f"Triton {triton.__version__} compiled {compiled.name} wrongly for this call: "
                f"a product by {factor} spills into another number. Triton 3.6 was seen to do so, "
                "and 3.9 was not."
            )
    _checked.add(compiled.hash)


class Descriptor(NamedTuple):
    """A TMA descriptor as an argument, without the address of its memory."""

    base: Any  #: the tensor
    kind: type
    fields: dict[str, Any]
    encode: Callable[[Any], Any] | None = None  #: Triton's function from a descriptor to its code

    def at(self, address: int) -> Any:
        """Return Triton's descriptor of memory at an address."""
        descriptor = object.__new__(self.kind)
        descriptor.__dict__.update(self.fields, base=_Address(address))
        return descriptor

    def encoded_at(self, address: int) -> Any:
        """Return Triton's object with the encoded descriptor of memory at an address."""
        assert self.encode is not None
        return self.encode(self.at(address))


class _Address:
    """Memory, as far as a TMA descriptor asks."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class TritonLaunch(NamedTuple):
    """A launch of a kernel by Triton, compiled or interpreted."""

    run: Callable[..., None]  #: takes the arguments; if the kernel is compiled, after the stream
    args: tuple[Any, ...]
    is_compiled: bool  #: then it takes addresses of memory, in place of tensors


def launch_of(
    compiled: Any, programs: tuple[int], args: tuple[Any, ...]
) -> DriverLaunch | TritonLaunch:
    """Return a launch of a compiled kernel, with a `Descriptor` for each TMA descriptor.

    args: those of the kernel.
    """
    if _IS_KNOWN and is_plain_launch(compiled):
        launch = prepare_launch(compiled, programs[0], args)
        encoders = _encoders(compiled.metadata)
        parameters = tuple(
            x if type(x) is int or not _is_descriptor(x) else _without_base(x, next(encoders))
            for x in launch.parameters
        )
        return launch._replace(parameters=parameters)
    # Not compiled[programs], which prepares data for Triton's hooks at every launch.
    launcher, grid = compiled.run, (*programs, 1, 1)
    fixed = (compiled.function, compiled.packed_metadata, None, None, None)

    def run(stream: int, *args: Any) -> None:
        launcher(*grid, stream, *fixed, *args)

    args = tuple(_without_base(x) if _is_descriptor(x) else x for x in args)
    return TritonLaunch(run, args, is_compiled=True)


def _is_descriptor(x: Any) -> bool:
    return hasattr(x, "base") and hasattr(x, "block_shape")


def _without_base(x: Any, encode: Callable[[Any], Any] | None = None) -> Descriptor:
    fields = {name: value for name, value in vars(x).items() if name != "base"}
    return Descriptor(x.base, type(x), fields, encode)


def _encoders(metadata: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield a function for each TMA descriptor of a kernel that encodes it."""
    from triton.backends.nvidia import driver

    encode: Any = driver.make_tensordesc_arg  # pyright: ignore[reportAttributeAccessIssue]
    for kind in metadata.tensordesc_meta:
        # Its first result is the encoded descriptor. Shape and strides, which follow, are constant.
        yield lambda x, kind=kind: encode(x, kind)[0]
