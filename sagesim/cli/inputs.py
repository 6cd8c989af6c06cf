"""Arguments that several commands share: captures, layers, spec labels and output files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
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
                 p ds:     tile tile_row tile_column row row_bound (not at pv)
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


def path_of(name: str) -> Path:
    """The file of a capture, which is a path or a word of `SHIPPED`."""
    return Path(SHIPPED.get(name, name))


def load(name: str) -> Capture:
    """Load the capture of a path, or of a word of `SHIPPED`.

    Raises:
        Failure: if the file is not a readable capture, or has a tensor without elements.
    """
    if not name:
        raise Failure("the path of a capture is empty")
    from sagesim.models import Capture

    try:
        capture = Capture.load(path_of(name))
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


def require_writable(path: Path, *, inputs: Iterable[Path] = ()) -> None:
    """Check before a long computation that its output can be written and replaces no input.

    Args:
        inputs: files that the command reads, and folders of such files.

    Raises:
        Failure: if the output is one of these files, maybe by another name.
        WriteError: if it cannot be written.
    """
    for file in _files(inputs):
        if is_same(path, file):
            raise Failure(f"{path}: cannot be written: it is an input of the command ({file})")
    check_writable(path)


def is_same(one: Path, other: Path) -> bool:
    """Whether two paths are the same file or folder, also through links or another spelling."""
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist
        return os.path.realpath(one) == os.path.realpath(other)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        yield from (path.rglob("*") if path.is_dir() else [path])
