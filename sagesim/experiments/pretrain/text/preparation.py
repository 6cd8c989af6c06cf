"""Preparation of a corpus: select text files, split off validation, tokenize, write shards."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from sagesim.experiments.pretrain.text.corpus import (
    SPLITS,
    TOKENIZER,
    Manifest,
    Shard,
    file_hash,
)
from sagesim.experiments.pretrain.text.tokenizer import (
    END_OF_TEXT,
    load_tokenizer,
    train_tokenizer,
    vocabulary_size,
)
from sagesim.files import making_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHARD_TOKENS: Final = 2**26
"""Tokens of a full shard."""

TOKENIZER_BYTES: Final = 2**27
"""Bytes of text to train a tokenizer on. A larger corpus uses its first documents by hash."""

_BATCH: Final = 256
"""Documents tokenized in one call, which uses all cores."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text file."""

    path: str  #: relative to the folder
    size: int  #: bytes
    sha256: str


def find_documents(
    folder: Path, patterns: Sequence[str] = ("**/*",)
) -> tuple[list[Document], Counter[str]]:
    """The text files of a folder, sorted by path, and the number of skipped files by reason.

    Text is non-empty UTF-8 without zero bytes. A copy of an earlier file is skipped: otherwise the
    model could be trained on a copy of a held-out document.

    Raises:
        ValueError: if the folder has no text file.
    """
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    skipped: Counter[str] = Counter()
    found: dict[str, Document] = {}
    for path in sorted(paths, key=lambda path: path.relative_to(folder).as_posix()):
        if path.is_symlink():
            skipped["a link"] += 1
            continue
        if not path.is_file():
            continue
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        if reason := _reason_to_skip(data):
            skipped[reason] += 1
        elif digest in found:
            skipped["a copy"] += 1
        else:
            found[digest] = Document(path.relative_to(folder).as_posix(), len(data), digest)
    if not found:
        raise ValueError(f"{folder}: no text file in it ({dict(skipped)})")
    return list(found.values()), skipped


def split_documents(documents: Sequence[Document], validation: float) -> dict[str, list[Document]]:
    """Split documents into "train" and "validation", each in the given order.

    The validation documents are the first by hash: at least one, and otherwise as many as have
    together at most the fraction `validation` of all bytes. The first one that does not fit ends
    them, so with a few large documents they can have much less than this fraction.

    Raises:
        ValueError: if there are fewer than two documents, or `validation` is not between 0 and 1.
    """
    if len(documents) < 2:
        raise ValueError("one document cannot be both trained on and held out; at least 2 needed")
    if not 0 < validation < 1:
        raise ValueError(f"cannot hold out a fraction of {validation}; it must be between 0 and 1")
    wanted = validation * sum(document.size for document in documents)
    held: set[str] = set()
    size = 0
    for document in sorted(documents, key=lambda d: d.sha256)[:-1]:
        if held and size + document.size > wanted:
            break
        held.add(document.sha256)
        size += document.size
    return {
        "train": [d for d in documents if d.sha256 not in held],
        "validation": [d for d in documents if d.sha256 in held],
    }


def prepare(
    folder: Path,
    out: Path,
    *,
    vocabulary: int = 16384,
    tokenizer: Path | None = None,
    patterns: Sequence[str] = ("**/*",),
    validation: float = 0.01,
    shard_tokens: int = SHARD_TOKENS,
    source: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Make the corpus `out` from the text files of `folder`. The same files give the same bytes.

    Args:
        out: a new folder. It appears only when the corpus is complete.
        vocabulary: largest size of the tokenizer that is trained on the training documents.
        tokenizer: a tokenizer.json to use instead of a new tokenizer.
        patterns: patterns of `Path.glob` that select files.
        validation: the largest fraction of the bytes to hold out; see `split_documents`.
        shard_tokens: tokens of a full shard.
        source: a description of the text, stored in the manifest.
        progress: called with the bytes tokenized so far and the bytes of all documents.

    Raises:
        ValueError: if the text, the split, the vocabulary or the tokenizer file is not valid; see
            `find_documents`, `split_documents`, `train_tokenizer` and `load_tokenizer`.
        FileExistsError: if `out` exists.
        WriteError: if a file of the corpus cannot be written, or another process makes `out`.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists already")
    documents, skipped = find_documents(folder, patterns)
    splits = split_documents(documents, validation)
    if tokenizer is None:
        loaded = train_tokenizer(_sample(folder, splits["train"]), vocabulary)
        written = loaded.to_str(pretty=True).encode()
    else:
        loaded, written = load_tokenizer(tokenizer), tokenizer.read_bytes()
    with making_folder(out) as temporary:
        (temporary / TOKENIZER).write_bytes(written)
        size = vocabulary_size(loaded)
        dtype = "uint16" if size <= 2**16 else "uint32"
        total, done = sum(d.size for d in documents), 0
        shards: dict[str, tuple[Shard, ...]] = {}
        for split in SPLITS:
            writer = _Writer(temporary, split, dtype, shard_tokens)
            for texts in _batches(folder, splits[split]):
                writer.add(_encode(loaded, texts))
                done += sum(len(text.encode()) for text in texts)
                if progress is not None:
                    progress(done, total)
            shards[split] = writer.finish()
        manifest = Manifest(
            vocabulary=size,
            dtype=dtype,
            tokenizer_sha256=file_hash(temporary / TOKENIZER),
            shards=shards,
            documents={split: len(splits[split]) for split in SPLITS},
            bytes=total,
            skipped=dict(skipped),
            source=source,
        )
        manifest.save(temporary)
    return manifest


class _Writer:
    """Collects the tokens of one split and writes each shard when it is full."""

    def __init__(self, folder: Path, split: str, dtype: str, size: int) -> None:
        self._folder, self._split, self._dtype, self._size = folder, split, dtype, size
        self._waiting: list[NDArray[Any]] = []
        self._shards: list[Shard] = []

    def add(self, tokens: NDArray[np.int64]) -> None:
        self._waiting.append(tokens.astype(self._dtype))
        if sum(map(len, self._waiting)) < self._size:
            return
        left = np.concatenate(self._waiting)
        while len(left) >= self._size:
            self._write(left[: self._size])
            left = left[self._size :]
        self._waiting = [left]

    def finish(self) -> tuple[Shard, ...]:
        if sum(map(len, self._waiting)):
            self._write(np.concatenate(self._waiting))
        return tuple(self._shards)

    def _write(self, tokens: NDArray[Any]) -> None:
        name = f"{self._split}-{len(self._shards):05}.npy"
        # np.save to a file does not say why a write fails.
        data = io.BytesIO()
        np.save(data, tokens)
        (self._folder / name).write_bytes(data.getbuffer())
        self._shards.append(Shard(name, len(tokens), file_hash(self._folder / name)))


def _reason_to_skip(data: bytes) -> str | None:
    if not data:
        return "empty"
    if b"\0" in data:
        return "binary"
    try:
        data.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    return None


def _sample(folder: Path, documents: Sequence[Document]) -> Iterator[str]:
    size = 0
    for document in sorted(documents, key=lambda d: d.sha256):
        if size >= TOKENIZER_BYTES:
            return
        size += document.size
        yield _read(folder, document)


def _batches(folder: Path, documents: Sequence[Document]) -> Iterator[list[str]]:
    for start in range(0, len(documents), _BATCH):
        yield [_read(folder, document) for document in documents[start : start + _BATCH]]


def _read(folder: Path, document: Document) -> str:
    path = folder / document.path
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: changed while it was read: {error}") from error


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> NDArray[np.int64]:
    """The tokens of the texts, with `END_OF_TEXT` after each text.

    A text that contains the string `END_OF_TEXT` gets that token's id there, as in GPT-2.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    parts: list[int] = []
    for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
        parts += encoding.ids
        parts.append(end)
    return np.asarray(parts, np.int64)
