"""Record the attention tensors of your own model, including gradients.

MODEL is a causal language model: a local directory in Hugging Face's layout, with safetensors
weights, or a GGUF file. The command runs the model once, forward and backward, on the beginning of
a text. The output file holds q, k, v and the gradient dO of every attention layer. The loss is the
model's own, times a power of two that keeps dO in the range of 16 bit. If the weights are in 16
bit, the model computes in float32, which CPUs do faster, and the tensors are rounded to the dtype
of the weights. Nothing is downloaded, and no code in the directory is executed. Tensors that FP16
cannot hold are named: a product in FP16 would have a large error on them.

examples:
  sagesim capture path/to/model book.txt mine.safetensors --tokens 512
  sagesim attribute mine.safetensors
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sagesim.cli.inputs import require_writable
from sagesim.printable import printable
from sagesim.terminal import Failure, progress, stdout

if TYPE_CHECKING:
    from sagesim.models import LanguageModel, Tokens

_TOKENS: Final = 1024
"""Default of --tokens."""

_ROWS: Final = 256
"""Queries of each head whose dS is looked at, so that long texts take no longer than the model."""

HELP: Final = "record the attention tensors of your own model on a text"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="directory or GGUF file of the model"
    )
    parser.add_argument("text", type=Path, metavar="TEXT_FILE", help="a UTF-8 text file")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors", help="the file to write")
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="number of tokens of the text, at most as many as the model has positions "
        f"(default: {_TOKENS}, or fewer if model or text have fewer)",
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", metavar="N", help="record only these layers (default: all)"
    )


def run(args: argparse.Namespace) -> None:
    """Run the model and write the capture."""
    wanted: int | None = args.tokens
    if wanted is not None and wanted < 2:
        raise Failure(f"--tokens {wanted}: at least 2 are needed; the first predicts the second")
    if args.model.is_dir() and not (args.model / "config.json").is_file():
        raise Failure(f"{args.model}: not a model directory: it has no config.json")
    if args.model.is_file() and args.model.suffix != ".gguf":
        raise Failure(f"{args.model}: not a model: neither a directory nor a .gguf file")
    if not args.model.exists():
        raise Failure(f"{args.model}: no such file or directory")
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{args.text}: not a readable UTF-8 text: {error}") from None
    require_writable(args.out, inputs=[args.text, args.model])

    from sagesim.analysis import Sample, range_losses, range_warnings
    from sagesim.models import LanguageModel
    from sagesim.spec import FPA_FP16

    try:
        with progress("loading the model") as bar:
            bar.add_task("", total=None)
            model = LanguageModel.load(args.model)
        model.check_layers(args.layers)
        tokens = model.encode(
            text, wanted or min(_TOKENS, model.positions or _TOKENS), title=args.text.name
        )
        _tell(f"{_plan(model, tokens, args.layers)}, {_limit(model, tokens, wanted)}")
        if model.unused:
            _tell(f"not part of the language model, not used: {', '.join(model.unused)}")
        with progress("recording layers") as bar:
            task = bar.add_task("", total=2 * len(model.layers))
            recorded = model.capture(tokens, layers=args.layers, progress=lambda: bar.advance(task))
    except ValueError as error:
        raise Failure(str(error)) from None
    recorded.save(args.out)
    stdout().print(f"{args.out}: {len(recorded.calls)} layers, {tokens.count} tokens")
    # Of the formats that a product in 16 bit may have, FP16 has the smallest range.
    losses = range_losses(recorded.calls, FPA_FP16, Sample(rows=_ROWS))
    if sentences := range_warnings(losses):
        stdout().print("\n".join([f"under {FPA_FP16.label()}:", *sentences]))


def _plan(model: LanguageModel, tokens: Tokens, layers: list[int] | None) -> str:
    """What will be recorded."""
    number = len(model.layers) if layers is None else len(set(layers))
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        f"recording {number} of {len(model.layers)} layers in {dtype} on {tokens.count} tokens of "
        f"{tokens.title}"
    )


def _limit(model: LanguageModel, tokens: Tokens, wanted: int | None) -> str:
    """Why there are not more tokens."""
    if tokens.is_whole:
        return "which is all of it"
    if wanted is not None:
        return f"as --tokens {wanted} says"
    if tokens.count == model.positions and tokens.count < _TOKENS:
        return "the number of positions of the model"
    return "the default of --tokens"


def _tell(what: str) -> None:
    print(printable(what), file=sys.stderr, flush=True)
