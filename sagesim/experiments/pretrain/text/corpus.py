"""A prepared corpus: memory-mapped shards of tokens, and a manifest that describes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MANIFEST: Final = "corpus.json"
TOKENIZER: Final = "tokenizer.json"
SPLITS: Final = ("train", "validation")

_VOCABULARY_MULTIPLE: Final = 64
"""GPUs compute matrix products of other sizes more slowly."""

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Shard:
    """A one-dimensional .npy file of tokens, with its expected length and hash."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a corpus that `sagesim pretrain prepare` writes."""

    vocabulary: int  #: the largest id of a token, plus 1
    dtype: str  #: uint16 or uint32
    tokenizer_sha256: str
    shards: Mapping[str, tuple[Shard, ...]]  #: by split
    documents: Mapping[str, int]  #: number of documents by split
    bytes: int  #: size of the text
    skipped: Mapping[str, int]  #: number of files left out, by reason
    source: str  #: the user's description of the text

    @property
    def id(self) -> str:
        """A hash of the tokens and their order, 16 hexadecimal digits.

        File names and `source` do not change it.
        """
        shards = [[s.sha256 for s in self.shards[split]] for split in SPLITS]
        described = [self.vocabulary, self.dtype, self.tokenizer_sha256, shards]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    def tokens(self, split: str) -> int:
        """The number of tokens of a split."""
        return sum(shard.tokens for shard in self.shards[split])

    def save(self, folder: Path) -> None:
        """Write the manifest file. It is written last: a folder without it is not a corpus."""
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


class Corpus:
    """The tokens of a prepared folder, memory-mapped.

    Raises:
        ValueError: if the folder has no readable manifest, or a shard is not readable or has
            another length or dtype than the manifest says. The message names the folder or file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._shards = {
            split: [_open(folder, shard, self.manifest.dtype) for shard in shards]
            for split, shards in self.manifest.shards.items()
        }

    @property
    def id(self) -> str:
        """`Manifest.id`."""
        return self.manifest.id

    @property
    def padded_vocabulary(self) -> int:
        """Rows of an embedding for this corpus: its vocabulary, rounded up to a multiple of 64."""
        return -(-self.manifest.vocabulary // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE

    def windows(self, split: str, context: int) -> int:
        """The number of windows of a split.

        A window is context + 1 consecutive tokens of one shard. Its first token is the last token
        of the window before it. Tokens at the end of a shard that do not fill a window are unused.
        """
        return sum((len(shard) - 1) // context for shard in self._shards[split])

    def window(self, split: str, context: int, index: int) -> NDArray[np.int64]:
        """The tokens of one window, int64 [context + 1].

        Raises:
            IndexError: if `index` is negative, or not below `windows(split, context)`.
        """
        left = index
        for shard in self._shards[split]:
            count = (len(shard) - 1) // context
            if 0 <= left < count:
                return shard[left * context : (left + 1) * context + 1].astype(np.int64)
            left -= count
        raise IndexError(f"{split} has no window {index} of {context} tokens")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        ValueError: if the folder has no manifest, or the manifest is not readable.
    """
    path = folder / MANIFEST
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        listed = data.pop("shards")
        shards = {split: tuple(Shard(**shard) for shard in listed[split]) for split in SPLITS}
        return Manifest(**data, shards=shards)
    except FileNotFoundError:
        raise ValueError(
            f"{folder}: no prepared corpus (no {MANIFEST}); "
            "`sagesim pretrain prepare` makes one from a folder of text"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: not a readable manifest: {error}") from error


def check_shards(folder: Path) -> None:
    """Compare every shard's hash with the manifest.

    Raises:
        ValueError: if a shard differs. The message names the file.
    """
    manifest = read_manifest(folder)
    for shards in manifest.shards.values():
        for shard in shards:
            if file_hash(folder / shard.file) != shard.sha256:
                raise ValueError(f"{folder / shard.file}: changed since it was prepared")


def file_hash(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(folder: Path, shard: Shard, dtype: str) -> Tokens:
    path = folder / shard.file
    try:
        tokens: Tokens = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable shard: {error}") from error
    if tokens.shape != (shard.tokens,) or tokens.dtype.name != dtype:
        raise ValueError(
            f"{path}: {tokens.dtype.name} of shape {tokens.shape}; "
            f"the manifest says {dtype} of ({shard.tokens},)"
        )
    return tokens
