"""Record the attention tensors of your own model, including gradients.

The command loads a causal language model from a local directory in Hugging Face's layout, with
safetensors weights. It runs the model once, forward and backward, on the beginning of a text. The
output file holds q, k, v and the gradient dO of every attention layer. The loss is the model's own,
times a power of two that keeps dO in the range of 16 bit. Nothing is downloaded, and no code in the
directory is executed.

examples:
  sagesim capture path/to/model book.txt mine.safetensors --tokens 512
  sagesim attribute mine.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from sagesim.cli.inputs import require_writable
from sagesim.terminal import Failure

HELP: Final = "record the attention tensors of your own model on a text"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="directory of the model")
    parser.add_argument("text", type=Path, metavar="TEXT_FILE", help="a UTF-8 text file")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors", help="the file to write")
    parser.add_argument(
        "--tokens",
        type=int,
        default=1024,
        metavar="N",
        help="largest number of tokens of the text (default: 1024)",
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", metavar="N", help="record only these layers (default: all)"
    )


def run(args: argparse.Namespace) -> None:
    """Run the model and write the capture."""
    if args.tokens < 2:
        raise Failure(
            f"--tokens {args.tokens}: at least 2 are needed; the first predicts the second"
        )
    if not (args.model / "config.json").is_file():
        raise Failure(f"{args.model}: not a model directory: it has no config.json")
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{args.text}: not a readable UTF-8 text: {error}") from None
    require_writable(args.out, inputs=[args.text, args.model])

    from sagesim.models import capture_language_model

    try:
        recorded = capture_language_model(
            args.model, text, tokens=args.tokens, layers=args.layers, title=args.text.name
        )
    except ValueError as error:
        raise Failure(str(error)) from None
    recorded.save(args.out)
    tokens = recorded.calls[0].q.shape[2]
    print(f"{args.out}: {len(recorded.calls)} layers, {tokens} tokens")
