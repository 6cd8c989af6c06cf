"""From a folder of text or code to a `corpus`: which files, which split, tokens, shards."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from sagesim.experiments.pretrain.corpus import (
    SPLITS,
    TOKENIZER,
    Manifest,
    Shard,
    file_hash,
)
from sagesim.experiments.pretrain.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHARD_TOKENS: Final = 2**26
"""Tokens of a full shard."""

TOKENIZER_BYTES: Final = 2**27
"""Text that a tokenizer is trained on: of more, the documents that come first by hash."""

_BATCH: Final = 256
"""Documents tokenized at a time, on all cores."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text file, by its path in the folder and the SHA-256 of its bytes."""

    path: str
    size: int  #: bytes
    sha256: str


def find_documents(
    folder: Path, patterns: Sequence[str] = ("**/*",)
) -> tuple[list[Document], Counter[str]]:
    """The files of a folder that are text, by path; and how many others there are, by reason.

    Text is UTF-8 without zero bytes. A file with the bytes of one that comes before is left out,
    or copies of a held-out document would be trained on.

    Raises:
        ValueError: where the folder holds no text.
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
        if reason := _unfit(data):
            skipped[reason] += 1
        elif digest in found:
            skipped["a copy"] += 1
        else:
            found[digest] = Document(path.relative_to(folder).as_posix(), len(data), digest)
    if not found:
        raise ValueError(f"{folder}: no file of text in it ({dict(skipped)})")
    return list(found.values()), skipped


def split_documents(documents: Sequence[Document], validation: float) -> dict[str, list[Document]]:
    """The documents to train on, and those held out: the first by hash, up to a fraction of the
    bytes, and at least one. Both in the order of their paths.

    Raises:
        ValueError: for fewer than two documents, or a fraction that is not between 0 and 1.
    """
    if len(documents) < 2:
        raise ValueError("one document cannot be both trained on and held out")
    if not 0 < validation < 1:
        raise ValueError(f"a fraction of {validation} cannot be held out")
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
    """Make the corpus `out` of the text files of `folder`. The same files give the same bytes.

    Args:
        out: new; it is there when it is whole.
        vocabulary: of the tokenizer that is trained on the documents to train on.
        tokenizer: the file of one to use instead.
        patterns: of `Path.glob`, which files to take.
        validation: the fraction of bytes held out.
        source: what the text is and where it comes from; kept.
        progress: called with the number of bytes that are done, and of all, as it goes.

    Raises:
        ValueError: as `find_documents`, `split_documents` and `train_tokenizer`; where a split
            has fewer than two tokens.
        FileExistsError: where `out` is there.
    """
    if out.exists():
        raise FileExistsError(f"{out} is there already")
    documents, skipped = find_documents(folder, patterns)
    splits = split_documents(documents, validation)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        if tokenizer is None:
            trained = train_tokenizer(_sample(folder, splits["train"]), vocabulary)
            trained.save(str(temporary / TOKENIZER))
        else:
            shutil.copyfile(tokenizer, temporary / TOKENIZER)
        words = load_tokenizer(temporary / TOKENIZER)
        size = words.get_vocab_size()
        dtype = "uint16" if size <= 2**16 else "uint32"
        total, done = sum(d.size for d in documents), 0
        shards: dict[str, tuple[Shard, ...]] = {}
        for split in SPLITS:
            writer = _Writer(temporary, split, dtype, shard_tokens)
            for texts in _batches(folder, splits[split]):
                writer.add(_encode(words, texts))
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
        temporary.chmod(0o755)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


class _Writer:
    """Appends tokens to shards of one split, each written when it is full."""

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
        np.save(self._folder / name, tokens)
        self._shards.append(Shard(name, len(tokens), file_hash(self._folder / name)))


def _unfit(data: bytes) -> str | None:
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
    return (folder / document.path).read_bytes().decode()


def _encode(words: Tokenizer, texts: Sequence[str]) -> NDArray[np.int64]:
    """The tokens of the texts, each followed by the end of text. A text that holds the words of
    the special token gets its id, as it would in GPT-2's."""
    end = words.token_to_id(END_OF_TEXT)
    assert end is not None
    parts: list[int] = []
    for encoding in words.encode_batch_fast(list(texts), add_special_tokens=False):
        parts += encoding.ids
        parts.append(end)
    return np.asarray(parts, np.int64)
