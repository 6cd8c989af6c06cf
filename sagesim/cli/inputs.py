"""Arguments that several commands share: captures, layers, spec labels and output files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sagesim.data import LLAMA
from sagesim.files import check_writable
from sagesim.spec import PRESETS, AttentionSpec
from sagesim.terminal import Failure

if TYPE_CHECKING:
    from sagesim.models import Call, Capture

SHIPPED: Final = {"llama": LLAMA}
"""The captures that come with the package, by the word that replaces their path."""

CAPTURE_HELP: Final = "a file made by `sagesim capture`, or llama for the capture in the package"

GRAMMAR: Final = f"""\
spec labels:
  A preset, followed by one word for each difference from it, in one pair of quotes:
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
        help=CAPTURE_HELP,
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", metavar="N", help="use only these layers (default: all)"
    )


def add_spec(parser: argparse.ArgumentParser) -> None:
    """The option --spec, and the grammar of labels at the end of the help."""
    parser.add_argument(
        "--spec",
        default="sagebwd",
        metavar="LABEL",
        help="the spec to emulate; see below (default: sagebwd, the paper's scheme)",
    )
    parser.epilog = GRAMMAR


def parse_spec(label: str) -> AttentionSpec:
    """The spec of a label.

    Raises:
        Failure: if the label is not valid.
    """
    try:
        return AttentionSpec.parse(label)
    except ValueError as error:
        raise Failure(str(error)) from None


def load(name: str) -> Capture:
    """Load the capture of a path, or of a word of `SHIPPED`.

    Raises:
        Failure: if the file is not a readable capture, or has a tensor without elements.
    """
    from sagesim.models import Capture

    try:
        capture = Capture.load(SHIPPED.get(name, name))
    except (ValueError, OSError) as error:
        raise Failure(str(error)) from None
    for call in capture.calls:
        if empty := [tensor for tensor, x in call.tensors.items() if not x.numel()]:
            raise Failure(f"{name}: {call}: {', '.join(empty)} have no elements")
    return capture


def select(capture: Capture, layers: list[int] | None) -> tuple[Call, ...]:
    """The calls of the given layers, in the order of the capture; None gives all calls.

    Raises:
        Failure: if the capture does not have one of the layers.
    """
    known = [call.index for call in capture.calls]
    if missing := [n for n in layers or () if n not in known]:
        raise Failure(
            f"no layer {', '.join(map(str, missing))} in the capture; "
            f"it has {', '.join(map(str, known))}"
        )
    return tuple(call for call in capture.calls if layers is None or call.index in layers)


def require_writable(path: Path) -> None:
    """Check before a long computation that its output can be written.

    Raises:
        Failure: if it cannot.
    """
    try:
        check_writable(path)
    except OSError as error:
        raise Failure(f"{path}: cannot be written: {error.strerror or error}") from None
