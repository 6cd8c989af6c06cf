"""A prepared corpus: shards of tokens, memory-mapped, and a manifest that says what they are."""

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

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Shard:
    """A .npy file of one axis, and what it has to hold."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What `sagesim pretrain prepare` wrote, and from what."""

    vocabulary: int
    dtype: str  #: uint16 or uint32
    tokenizer_sha256: str
    shards: Mapping[str, tuple[Shard, ...]]  #: by split
    documents: Mapping[str, int]  #: by split
    bytes: int  #: of text
    skipped: Mapping[str, int]  #: files that are not in it, by reason
    source: str  #: as the user names it

    @property
    def id(self) -> str:
        """16 hexadecimal digits of the tokens and their order, not of names or source."""
        shards = [[s.sha256 for s in self.shards[split]] for split in SPLITS]
        described = [self.vocabulary, self.dtype, self.tokenizer_sha256, shards]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    def tokens(self, split: str) -> int:
        """Of a split."""
        return sum(shard.tokens for shard in self.shards[split])

    def save(self, folder: Path) -> None:
        """Write the file; the last of a corpus, which is none without."""
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


class Corpus:
    """The tokens of a prepared folder.

    Raises:
        ValueError: naming the folder or file that is no corpus, or not the one it was.
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
        return self.manifest.id

    def windows(self, split: str, context: int) -> int:
        """How many runs of context + 1 tokens there are, each beginning at the last token of the
        one before. None crosses a shard: the tokens at the end of a shard that fill none are not
        used."""
        return sum((len(shard) - 1) // context for shard in self._shards[split])

    def window(self, split: str, context: int, index: int) -> NDArray[np.int64]:
        """The tokens of one window, int64 [context + 1].

        Raises:
            IndexError: where there is no such window.
        """
        left = index
        for shard in self._shards[split]:
            here = (len(shard) - 1) // context
            if 0 <= left < here:
                return shard[left * context : (left + 1) * context + 1].astype(np.int64)
            left -= here
        raise IndexError(f"{split} has no window {index} of {context} tokens")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        ValueError: naming the folder, where it has none that can be read.
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
            "`sagesim pretrain prepare` makes one of a folder of text"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: not a readable manifest: {error}") from error


def check_shards(folder: Path) -> None:
    """Raise ValueError naming a file whose bytes are not those that were prepared."""
    manifest = read_manifest(folder)
    for shards in manifest.shards.values():
        for shard in shards:
            if file_hash(folder / shard.file) != shard.sha256:
                raise ValueError(f"{folder / shard.file}: changed since it was prepared")


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
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
