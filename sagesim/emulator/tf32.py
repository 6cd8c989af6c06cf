"""Turn off PyTorch's reduced precisions of float32 products, TF32 and bfloat16, for a while.

The settings form trees. One that is "none" has the value of its parent: "matmul" of a backend that
of "all" of the backend, and this that of "all" of "generic", which is
`torch.backends.fp32_precision`. Reading gives the value that has effect, not whose it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Final, NamedTuple

import torch

from sagesim.process_wide import ProcessWide


class _Setting(NamedTuple):
    backend: str
    op: str

    @property
    def value(self) -> str:
        """The precision that has effect."""
        # torch.backends.mkldnn.fp32_precision sets that of "generic" (torch 2.13).
        return torch._C._get_fp32_precision_getter(*self)  # pyright: ignore[reportPrivateUsage]

    def set(self, value: str) -> None:
        """Set the precision; "none" follows the parent."""
        torch._C._set_fp32_precision_setter(*self, value)  # pyright: ignore[reportPrivateUsage]

    @property
    def parent(self) -> _Setting | None:
        if self.op != "all":
            return _Setting(self.backend, "all")
        return None if self.backend == "generic" else _Setting("generic", "all")

    def own(self) -> str:
        """The precision that was set here; "none" if the parent's has effect.

        To find out which of two equal values has effect, the parent is "ieee" for a moment: other
        threads may compute more exactly than they asked for, but not less.
        """
        value, parent = self.value, self.parent
        if parent is None or value in ("none", "ieee") or parent.value != value:
            return value
        before = parent.own()
        parent.set("ieee")
        follows = self.value != value
        parent.set(before)
        return "none" if follows else value


_MATMUL: Final = (_Setting("cuda", "matmul"), _Setting("mkldnn", "matmul"))


@contextlib.contextmanager
def _without_tf32() -> Generator[None]:
    changed = {setting: setting.own() for setting in _MATMUL if setting.value != "ieee"}
    for setting in changed:
        setting.set("ieee")
    try:
        yield
    finally:
        for setting, value in changed.items():
            setting.set(value)


WITHOUT_TF32: Final = ProcessWide(_without_tf32)
"""Context manager: float32 products are computed in float32, in all threads."""
