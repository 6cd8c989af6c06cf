"""Capture the attention of a causal language model from a Hugging Face folder."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from sagesim.models.captures import Capture
from sagesim.models.recording import capture


def capture_language_model(
    folder: Path,
    text: str,
    *,
    tokens: int,
    layers: Sequence[int] | None = None,
    title: str = "text",
) -> Capture:
    """Record the attention of a local causal language model on the beginning of a text.

    The model runs once, forward and backward, on the CPU. The loss is the model's own, multiplied
    by a power of two; see `Capture.loss_scale`. Nothing is downloaded, and no code in the folder is
    executed.

    Args:
        folder: a folder with config.json, a tokenizer and safetensors weights.
        tokens: largest number of tokens to use.
        layers: indices of the layers to record; None records all.
        title: name of the text, for `Capture.source` and error messages.

    Raises:
        ValueError: if no model loads from the folder, the text has fewer than two tokens, a layer
            does not exist, or the model's attention cannot be recorded.
        ModuleNotFoundError: if the package transformers is not installed.
    """
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    with _quiet(transformers):
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = auto.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, attn_implementation="sdpa"
            ).train(False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ValueError(f"{folder}: no causal language model loads from it: {error}") from None
        encoded: Any = tokenizer(text, return_tensors="pt", truncation=True, max_length=tokens)
        ids = encoded["input_ids"]
        if ids.shape[1] < 2:
            raise ValueError(f"{title}: {ids.shape[1]} tokens of text; at least 2 are needed")
        # The loss is a mean over tokens, which makes dO small. Multiplying by about their number
        # gives dO the size that it would have for a single token.
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
            raise ValueError(f"{folder}: {error}") from None


@contextlib.contextmanager
def _quiet(transformers: Any) -> Generator[None]:
    """Switch off the progress bars and warnings of transformers."""
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
