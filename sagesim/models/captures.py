"""Recorded attention calls, and the safetensors file that stores them."""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from sagesim.files import replacing
from sagesim.printable import printable
from sagesim.problem import DTYPES, AttentionProblem, check_is_tensor
from sagesim.read_only import reduce_read_only
from sagesim.short_repr import short_repr

_KEY: Final = "sagesim.capture"
"""The metadata key that holds the description of all calls, as JSON.

There is only one key, because safetensors does not keep the order of keys.
"""

_VERSION: Final = 2
"""Version 1 has no key_mask, window, causal_alignment, sinks and softcap; it is read, too."""

_FLOATS: Final = ("q", "k", "v", "do")
_OPTIONAL: Final = ("attn_mask", "key_mask", "sinks")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Call(AttentionProblem):
    """A recorded SDPA call: an attention problem with the gradient that reached its output.

    q [b, h, n_q, d], k [b, h_kv, n_k, d], v [b, h_kv, n_k, d_v] and do [b, h, n_q, d_v] are
    finite and of one dtype of `sagesim.problem.DTYPES`. attn_mask is boolean with four axes,
    broadcastable to [b, h, n_q, n_k]. sinks has a dtype of `DTYPES`. The other options fit the
    tensors.

    index: number of the call in the recorded forward, from 0; see `sagesim.capture`.
    name: name of the module that made the call.

    Raises:
        ValueError: if a field breaks one of these rules. The message is one line and names the call
            and the field.

    >>> import sagesim
    >>> q, k, v, do = torch.randn(4, 1, 2, 10, 16)
    >>> call = Call(q=q, k=k, v=v, do=do, is_causal=True, index=0, name="layer.0")
    >>> sagesim.trace(call, spec=sagesim.SAGEBWD).s.shape
    torch.Size([1, 2, 10, 10])
    """

    do: Tensor
    index: int
    name: str

    def __post_init__(self) -> None:
        if not _is_text(self.name):
            raise ValueError(f"name {self.name!r} of a call is not Unicode text")
        if type(self.index) is not int or not 0 <= self.index < 2**31:
            raise ValueError(f"index {self.index!r} of a call is not in 0..2**31-1")
        try:
            self._check()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self}: {error}") from None
        if self.scale is not None:
            object.__setattr__(self, "scale", float(self.scale))  # JSON has no NumPy numbers

    def _check(self) -> None:
        q, k, v, do = given = tuple(getattr(self, name) for name in _FLOATS)
        for name, x in (*zip(_FLOATS, given, strict=True), *self.tensors.items()):
            check_is_tensor(name, x)
            if x.ndim != 4 and name not in ("key_mask", "sinks"):
                raise ValueError(f"{name} has shape {tuple(x.shape)}, not [b, h, n, d]")
            if name in (*_FLOATS, "sinks") and x.dtype not in DTYPES:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
                raise ValueError(f"{name} is {x.dtype}; the emulator takes {known}")
            if name in _FLOATS and x.dtype != q.dtype:
                raise ValueError(f"{name} is {x.dtype}, q is {q.dtype}")
            if not x.isfinite().all():
                raise ValueError(f"{name} holds NaN or Inf")
        h, h_kv = q.shape[1], k.shape[1]
        is_grouped = self.enable_gqa and h_kv > 0 and h % h_kv == 0
        if (
            k.shape[:3] != v.shape[:3]
            or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3])
            or do.shape != (*q.shape[:3], v.shape[3])
            or not (h == h_kv or is_grouped)
        ):
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in self.tensors.items())
            raise ValueError(f"shapes do not fit: {shapes}, enable_gqa={self.enable_gqa}")
        self.check_options()

    __repr__ = short_repr

    def __str__(self) -> str:
        return f"call {self.index}" + (f" in {printable(self.name)}" if self.name else "")

    @property
    def title(self) -> str:
        """Index and name in one line, for tables."""
        return f"{self.index} {printable(self.name)}".rstrip()

    def to(self, dtype: torch.dtype) -> Call:
        """Return the call with q, k, v and do converted to `dtype`; see `Capture.to`."""
        return replace(
            self,
            **{name: _convert(self.tensors[name], dtype, f"{self}: {name}") for name in _FLOATS},
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Capture:
    """The recorded attention calls of a model, in order, and where they come from.

    calls: at least one; their indices differ.
    loss_scale: the power of two that the loss was multiplied by before backward. Every do is the
        gradient of the unscaled loss times loss_scale.
    source: the provenance that the caller of `sagesim.capture` gave; JSON values.
    torch_version: version of the PyTorch that computed the tensors.

    Raises:
        ValueError: if a field breaks one of these rules. The message is one line.
    """

    calls: tuple[Call, ...]
    loss_scale: float
    source: Mapping[str, Any]
    torch_version: str

    __repr__ = short_repr
    __reduce__ = reduce_read_only

    def __post_init__(self) -> None:
        if not self.calls:
            raise ValueError("a capture needs at least one call")
        first: dict[int, Call] = {}
        for call in self.calls:
            if (other := first.setdefault(call.index, call)) is not call:
                raise ValueError(f"two calls have index {call.index}: {other} and {call}")
        check_loss_scale(self.loss_scale)
        object.__setattr__(self, "loss_scale", float(self.loss_scale))
        if not _is_text(self.torch_version):
            raise ValueError(f"torch_version {self.torch_version!r} is not Unicode text")
        object.__setattr__(self, "source", MappingProxyType(json_copy(self.source)))

    def to(self, dtype: torch.dtype) -> Capture:
        """Return the capture with q, k, v and do of every call converted to `dtype`.

        Rounding to the nearest normal number changes a value by at most eps/2 of itself. A head
        that changes by more than eps/2 of its L2 norm has lost values to underflow.

        Raises:
            ValueError: if a value overflows or a head underflows. The message names call and
                tensor.
        """
        return replace(self, calls=tuple(call.to(dtype) for call in self.calls))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file. Equal captures give equal bytes.

        If writing fails, a file that is already at `path` stays as it is.

        Raises:
            ModuleNotFoundError: if the package safetensors is not installed.
            OSError: if the file cannot be written.
        """
        import safetensors.torch

        tensors: dict[str, Tensor] = {}
        entries: list[dict[str, Any]] = []
        for number, call in enumerate(self.calls):
            for name, x in call.tensors.items():
                # Copies, because safetensors refuses tensors that share memory.
                layout = torch.contiguous_format
                tensors[f"{number}.{name}"] = x.to("cpu", copy=True, memory_format=layout)
            entries.append(
                {
                    "index": call.index,
                    "name": call.name,
                    "is_causal": call.is_causal,
                    "causal_alignment": call.causal_alignment,
                    "window": list(call.window),
                    "softcap": call.softcap,
                    "scale": call.scale,
                    "enable_gqa": call.enable_gqa,
                    "tensors": {name: _describe(x) for name, x in call.tensors.items()},
                }
            )
        description = {
            "version": _VERSION,
            "torch": self.torch_version,
            "loss_scale": self.loss_scale,
            "source": dict(self.source),
            "calls": entries,
        }
        data = safetensors.torch.save(tensors, {_KEY: json.dumps(description, sort_keys=True)})
        with replacing(Path(path)) as temporary:
            temporary.write_bytes(data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Capture:
        """Read a file that `save` wrote. The file cannot contain code.

        Raises:
            ModuleNotFoundError: if the package safetensors is not installed.
            ValueError: if there is no such file, it cannot be read, it is not a safetensors file,
                its metadata do not describe a capture, or a tensor is missing, surplus, of another
                shape or dtype than the metadata say, or not finite. The message is one line and
                names the path and the problem.
        """
        import safetensors

        path = Path(path)
        shown = printable(str(path))
        try:
            if path.is_dir():
                raise ValueError(
                    f"{shown}: a directory, not a capture; `sagesim capture` makes one from a model"
                )
            if not path.is_file():
                what = "not a regular file" if path.exists() else "no such file"
                raise ValueError(f"{shown}: {what}")
            with safetensors.safe_open(path, framework="pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise ValueError(f"{shown}: cannot be read: {error.strerror or error}") from error
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{shown}: not a readable safetensors file: {printable(str(error))}"
            ) from error
        if _KEY not in metadata:
            raise ValueError(f"{shown}: not a capture: its metadata have no key {_KEY!r}")
        try:
            return cls._parse(_read_json(metadata[_KEY]), tensors)
        except ValueError as error:
            raise ValueError(f"{shown}: {printable(str(error))}") from error
        except RecursionError:
            raise ValueError(f"{shown}: its metadata are nested too deeply") from None

    @classmethod
    def _parse(cls, description: Any, tensors: dict[str, Tensor]) -> Capture:
        if not 1 <= (version := _field(description, "version", int)) <= _VERSION:
            raise ValueError(f"version {version} of the format; this sagesim reads 1 to {_VERSION}")
        calls: list[Call] = []
        for number, entry in enumerate(_field(description, "calls", list)):
            found: dict[str, Tensor] = {}
            for name, expected in _field(entry, "tensors", dict).items():
                x = tensors.pop(f"{number}.{name}", None)
                if x is None or _describe(x) != expected:
                    actual = "missing" if x is None else _describe(x)
                    raise ValueError(
                        f"tensor {number}.{name} is {actual}; "
                        f"the metadata say {reprlib.repr(expected)}"
                    )
                found[name] = x
            if set(found) - set(_OPTIONAL) != set(_FLOATS):
                raise ValueError(
                    f"call {number} has tensors {', '.join(sorted(found))}; it needs "
                    f"{', '.join(_FLOATS)} and may have {', '.join(_OPTIONAL)}"
                )
            optional: dict[str, Any] = {name: found.get(name) for name in _OPTIONAL}
            if version > 1:
                optional |= _options_of_version_2(entry)
            calls.append(
                Call(
                    q=found["q"],
                    k=found["k"],
                    v=found["v"],
                    do=found["do"],
                    index=_field(entry, "index", int),
                    name=_field(entry, "name", str),
                    is_causal=_field(entry, "is_causal", bool),
                    scale=None if entry.get("scale", 0) is None else _float(entry, "scale"),
                    enable_gqa=_field(entry, "enable_gqa", bool),
                    **optional,
                )
            )
        if tensors:
            raise ValueError(f"tensors that belong to no call: {', '.join(sorted(tensors))}")
        return cls(
            calls=tuple(calls),
            loss_scale=_float(description, "loss_scale"),
            source=_field(description, "source", dict),
            torch_version=_field(description, "torch", str),
        )


def check_loss_scale(loss_scale: object) -> None:
    """Raise ValueError unless it is a number that is a power of two."""
    number: Any = loss_scale
    if not (isinstance(loss_scale, Real) and number > 0 and math.frexp(number)[0] == 0.5):
        raise ValueError(f"loss_scale={loss_scale!r} is not a power of two")


def json_copy(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `source` as JSON reads it back. Raise ValueError if the copy differs."""
    try:
        text = json.dumps(dict(source), allow_nan=False, ensure_ascii=False)
        text.encode()  # fails for half of a surrogate pair, which no file can hold
        copy = json.loads(text)
        is_same = copy == source
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"source is not JSON: {error}") from None
    if not is_same:
        raise ValueError(f"source is not JSON: it would be read back as {reprlib.repr(copy)}")
    return copy


def _read_json(text: str) -> Any:
    """The value of a JSON text. Raise ValueError for what other readers may read differently."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"metadata field {key!r} is there twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"its metadata contain {name}, which is not JSON")


def _convert(x: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    y = x.to(dtype)
    if not y.isfinite().all():
        raise ValueError(f"{what} reaches {x.abs().max():.4g}, which overflows {dtype}")
    exact = x.double()
    changes, norms = (y - exact).norm(dim=(-2, -1)), exact.norm(dim=(-2, -1))
    if (changes > norms * (torch.finfo(dtype).eps / 2)).any():
        zeroed = int(((y == 0) & (x != 0)).sum())
        worst = float((changes / norms).nan_to_num().max())
        raise ValueError(
            f"{what} underflows {dtype}: a head changes by {worst:.2g} of its norm, and {zeroed} "
            "numbers become 0 (if dO is too small, use a larger loss scale)"
        )
    return y


def _describe(x: Tensor) -> dict[str, Any]:
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}


def _field(entry: Any, key: str, *kinds: type) -> Any:
    value = entry.get(key) if isinstance(entry, dict) else None
    if type(value) not in kinds:
        raise ValueError(f"metadata field {key!r} is {reprlib.repr(value)}")
    return value


def _options_of_version_2(entry: Any) -> dict[str, Any]:
    alignment = _field(entry, "causal_alignment", str, type(None))
    window = _field(entry, "window", list)
    if len(window) != 2:
        raise ValueError(f"metadata field 'window' is {reprlib.repr(window)}")
    softcap = None if entry.get("softcap", 0) is None else _float(entry, "softcap")
    return {"causal_alignment": alignment, "window": tuple(window), "softcap": softcap}


def _float(entry: Any, key: str) -> float:
    value = _field(entry, key, float, int)
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"metadata field {key!r} is beyond the range of float64") from None


def _is_text(x: object) -> bool:
    """Whether x is a string and no character is half of a surrogate pair."""
    return isinstance(x, str) and not any("\ud800" <= c <= "\udfff" for c in x)
