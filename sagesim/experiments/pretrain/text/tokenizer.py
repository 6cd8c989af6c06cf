"""A byte-level BPE tokenizer, trained on the corpus: it encodes every string without loss."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT: Final = "<|endoftext|>"
"""The token after every document. Its id is 0 in a tokenizer of `train_tokenizer`."""

SMALLEST: Final = 257
"""The smallest vocabulary: all 256 bytes and `END_OF_TEXT`."""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a tokenizer with at most `vocabulary` tokens.

    The same texts in the same order give the same tokenizer. It has fewer tokens if the texts have
    too few pairs to merge.

    Raises:
        ValueError: if `vocabulary` is below `SMALLEST`.

    Source: Sennrich et al., arXiv 1508.07909, on bytes as in GPT-2.
    """
    if vocabulary < SMALLEST:
        raise ValueError(f"a vocabulary of {vocabulary} tokens; the bytes alone are {SMALLEST}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a tokenizer.json file, without its truncation and padding.

    A model's tokenizer may cut or fill up texts to the length of its sequences. A corpus has whole
    documents.

    Raises:
        ValueError: if the file is not a readable tokenizer, or has no token `END_OF_TEXT`.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: not a readable tokenizer: {error}") from error
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise ValueError(f"{path}: has no token {END_OF_TEXT}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """The largest id of a token, plus 1. It exceeds the number of tokens if ids are left out."""
    return 1 + max(tokenizer.get_vocab().values())
