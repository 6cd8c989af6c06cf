"""Launch a compiled kernel again, with other addresses, and without what Triton does every time.

Triton's launcher encodes every TMA descriptor anew and goes through the arguments in Python. With a
version whose compiled kernels are known here, it is left out. Encoded descriptors are kept:
PyTorch's allocator gives out the same addresses again and again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import triton

from sagesim_kernels.driver_launch import is_plain_launch, prepare_launch

_IS_KNOWN: Final = triton.__version__.startswith("3.6.") and sys.platform == "linux"
"""Whether `driver_launch` fits this version of Triton, and finds the driver."""

_MOST: Final = 64
"""Encoded descriptors that are kept for each argument of a recorded launch."""


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
    encode: Callable[[Any], Any] | None
    """Makes the arguments that stand for it; None if the launcher takes the descriptor."""

    def cached(self) -> Callable[[int], tuple[Any, ...]]:
        """Return a function from an address to the arguments that stand for the descriptor."""
        known: dict[int, tuple[Any, ...]] = {}
        kind, fields, encode = self.kind, self.fields, self.encode

        def arguments(address: int) -> tuple[Any, ...]:
            found = known.get(address)
            if found is None:
                descriptor = object.__new__(kind)
                descriptor.__dict__.update(fields, base=_Address(address))
                found = (descriptor,) if encode is None else tuple(encode(descriptor))
                if len(known) >= _MOST:
                    known.clear()
                known[address] = found
            return found

        return arguments


class _Address:
    """Memory, as far as a TMA descriptor asks."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def launcher_of(
    compiled: Any, programs: tuple[int], args: tuple[Any, ...]
) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return a function that launches a compiled kernel, and its arguments after the stream.

    args: those of the kernel. TMA descriptors among them become a `Descriptor`.
    """
    if _IS_KNOWN and is_plain_launch(compiled):
        launch = prepare_launch(compiled, programs[0], args)
        encoders = _encoders(compiled.metadata, len(launch.descriptors))
        maps = map(_without_base, launch.descriptors, encoders)
        return launch.run, (*launch.tensors, *maps)
    # Not compiled[programs], which prepares data for Triton's hooks at every launch.
    launcher, grid = compiled.run, (*programs, 1, 1)
    fixed = (compiled.function, compiled.packed_metadata, None, None, None)

    def run(stream: int, *args: Any) -> None:
        launcher(*grid, stream, *fixed, *args)

    return run, tuple(_without_base(x, None) if _is_descriptor(x) else x for x in args)


def _is_descriptor(x: Any) -> bool:
    return hasattr(x, "base") and hasattr(x, "block_shape")


def _without_base(x: Any, encode: Callable[[Any], Any] | None) -> Descriptor:
    fields = {name: value for name, value in vars(x).items() if name != "base"}
    return Descriptor(x.base, type(x), fields, encode)


def _encoders(metadata: Any, count: int) -> list[Callable[[Any], Any]]:
    """Return a function for each TMA descriptor of a kernel that encodes it."""
    if not count:
        return []
    from triton.backends.nvidia import driver

    encode: Any = driver.make_tensordesc_arg  # pyright: ignore[reportAttributeAccessIssue]
    # Its first result is the encoded descriptor. Shape and strides, which follow, are constant.
    return [lambda x, kind=kind: encode(x, kind)[:1] for kind in metadata.tensordesc_meta]
