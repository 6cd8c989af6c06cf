"""The arguments that commands share: captures, layers, spec labels, files to write."""

from __future__ import annotations

import argparse
import importlib.resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sagesim._atomic import replacing
from sagesim.cli.terminal import Failure
from sagesim.presets import PRESETS
from sagesim.spec import AttentionSpec

if TYPE_CHECKING:
    from sagesim.captured import Call, Capture

SHIPPED: Final = ("llama",)
"""Captures that come with the package, by the word that stands for their path."""

GRAMMAR: Final = f"""\
spec labels:
  A preset, then a word for each difference from it, all in one pair of quotes:
    "sagebwd dp=int8 dq=fp16 qk=int8@token,token smooth=qk delta=p block=128x64"
  presets
    {" ".join(PRESETS)}
  SITE=PRECISION[@LEFT,RIGHT]
    sites        qk pv (forward)   qk_recompute dv dp dq dk (backward)
    precisions   int8 fp8_e4m3 fp8_e5m2 fp16 bf16 input16 fp32
    @LEFT,RIGHT  which elements of each operand share a scale
                 q k v do: head block token channel block_channel
                 p ds:     tile tile_row tile_column row
  smooth=none|q|k|qk   round=half_even|half_away|stochastic@SEED   delta=o|p   block=QxK
"""


def add_capture(parser: argparse.ArgumentParser) -> None:
    """The positional argument CAPTURE, and --layers."""
    parser.add_argument(
        "capture",
        metavar="CAPTURE",
        help="a file made by `sagesim capture`, or the word llama for the one that comes along",
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", metavar="N", help="only these layers (default: all)"
    )


def add_spec(parser: argparse.ArgumentParser) -> None:
    """--spec, and the grammar of labels at the end of the help."""
    parser.add_argument(
        "--spec",
        default="sagebwd",
        metavar="LABEL",
        help="what to emulate; see the labels below (default: sagebwd, the paper's scheme)",
    )
    parser.epilog = GRAMMAR


def parse_spec(label: str) -> AttentionSpec:
    """The spec that a label names."""
    try:
        return AttentionSpec.parse(label)
    except ValueError as error:
        raise Failure(str(error)) from None


def load(name: str) -> Capture:
    """The capture of a path, or of one of `SHIPPED`."""
    from sagesim.captured import Capture

    shipped = importlib.resources.files("sagesim") / "data" / f"{name}.safetensors"
    try:
        if name not in SHIPPED:
            capture = Capture.load(name)
        else:
            with importlib.resources.as_file(shipped) as path:
                capture = Capture.load(path)
    except (ValueError, OSError) as error:
        raise Failure(str(error)) from None
    for call in capture.calls:
        if empty := [tensor for tensor, x in call.tensors.items() if not x.numel()]:
            raise Failure(f"{name}: {call}: {', '.join(empty)} have no elements")
    return capture


def select(capture: Capture, layers: list[int] | None) -> tuple[Call, ...]:
    """The calls of the given layers, in the order of the capture."""
    known = [call.index for call in capture.calls]
    if missing := [n for n in layers or () if n not in known]:
        raise Failure(
            f"no layer {', '.join(map(str, missing))} in the capture; "
            f"it has {', '.join(map(str, known))}"
        )
    return tuple(call for call in capture.calls if layers is None or call.index in layers)


def check_writable(path: Path) -> None:
    """Fail now where `path` could not be written later."""
    try:
        with replacing(path) as file:
            file.touch()
            raise _Writable
    except _Writable:
        return
    except OSError as error:
        raise Failure(f"{path}: cannot be written: {error.strerror or error}") from None


class _Writable(Exception):
    """Leaves `replacing` without replacing anything."""
