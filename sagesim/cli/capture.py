"""Record the attention tensors of your own model, gradients included.

Reads a causal language model from a local directory (Hugging Face's layout, safetensors weights),
runs it once, forward and backward, on the beginning of a text, and keeps q, k, v and the gradient
dO of every attention layer. dO is that of the model's own loss, times a power of two that keeps it
in the range of 16 bit. Nothing is downloaded, and nothing of the directory is executed.

  sagesim capture path/to/model book.txt mine.safetensors --tokens 512
  sagesim attribute mine.safetensors
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sagesim.cli.inputs import check_writable
from sagesim.cli.terminal import Failure

if TYPE_CHECKING:
    from sagesim.captured import Capture

HELP: Final = "record the attention tensors of a local model on a text"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("text", type=Path, metavar="TEXT_FILE", help="UTF-8")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors")
    parser.add_argument(
        "--tokens", type=int, default=1024, metavar="N", help="of the text (default: 1024)"
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", metavar="N", help="only these layers (default: all)"
    )


def run(args: argparse.Namespace) -> None:
    """Run the model, and write the capture."""
    if args.tokens < 2:
        raise Failure("--tokens has to be at least 2: the loss predicts the second from the first")
    if not (args.model / "config.json").is_file():
        raise Failure(f"{args.model}: not a model directory: it has no config.json")
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{args.text}: not a readable UTF-8 text: {error}") from None
    check_writable(args.out)
    recorded = _record(args.model, text, args.tokens, args.layers, args.text.name)
    recorded.save(args.out)
    tokens = recorded.calls[0].q.shape[2]
    print(f"{args.out}: {len(recorded.calls)} layers, {tokens} tokens")


def _record(folder: Path, text: str, tokens: int, layers: list[int] | None, title: str) -> Capture:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sagesim._capture import capture

    auto: Any = AutoModelForCausalLM
    with _quiet(transformers):
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = auto.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, attn_implementation="sdpa"
            ).train(False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise Failure(f"{folder}: no causal language model loads from it: {error}") from None
        ids: Any = tokenizer(text, return_tensors="pt", truncation=True, max_length=tokens)
        ids = ids["input_ids"]
        if ids.shape[1] < 2:
            raise Failure(f"{title}: {ids.shape[1]} tokens of text; at least 2 are needed")
        # The loss is a mean over tokens: times about their number, dO has the size of one term.
        loss_scale = float(2 ** ids.shape[1].bit_length())
        source = {
            "model": folder.resolve().name,
            "architecture": type(model).__name__,
            "text": title,
            "tokens": int(ids.shape[1]),
            "loss": "causal language model, mean over tokens",
            "transformers": str(transformers.__version__),
        }
        try:
            with capture(layers=layers, loss_scale=loss_scale, source=source) as recording:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                (loss * loss_scale).backward()
            return recording.result()
        except (ValueError, RuntimeError) as error:
            raise Failure(f"{folder}: {error}") from None


@contextlib.contextmanager
def _quiet(transformers: Any) -> Generator[None]:
    """Without that package's own bars and notes."""
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
