import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sagesim.experiments.pretrain.text import preparation
from sagesim.experiments.pretrain.text.corpus import Corpus, check_shards, read_manifest
from sagesim.experiments.pretrain.text.preparation import find_documents, prepare, split_documents
from sagesim.experiments.pretrain.text.tokenizer import load_tokenizer
from tests.sagesim.experiments.pretrain.conftest import TEXT


@pytest.fixture
def folder(tmp_path):
    """A folder with text files and files that are not text."""
    text = tmp_path / "text"
    (text / "deep" / "er").mkdir(parents=True)
    for i in range(6):
        (text / "deep" / f"{i}.txt").write_text(f"page {i}: " + "word " * (10 + i))
    (text / "deep" / "er" / "ü.py").write_text("größer = 'ß'\n" * 20, encoding="utf-8")
    (text / "copy.txt").write_bytes((text / "deep" / "0.txt").read_bytes())
    (text / "image").write_bytes(b"\x89PNG\0\0")
    (text / "latin").write_bytes("größer".encode("latin-1"))
    (text / "nothing").write_bytes(b"")
    (text / "link").symlink_to(text / "deep" / "1.txt")
    return text


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_files_give_the_same_bytes(corpus, tmp_path):
    options = {"vocabulary": 500, "validation": 0.1, "shard_tokens": 9000, "source": "our pages"}
    prepare(TEXT, tmp_path / "again", **options)
    assert files(tmp_path / "again") == files(corpus.folder)


def test_tokens_decode_to_the_text(corpus):
    words = load_tokenizer(corpus.folder / "tokenizer.json")
    found, _ = find_documents(TEXT)
    splits = split_documents(found, 0.1)
    assert corpus.manifest.documents == {name: len(each) for name, each in splits.items()}
    for split, documents in splits.items():
        shards = corpus.manifest.shards[split]
        tokens = np.concatenate([np.load(corpus.folder / shard.file) for shard in shards])
        text = words.decode(tokens.tolist(), skip_special_tokens=False)
        pages = [(TEXT / document.path).read_text(encoding="utf-8") for document in documents]
        assert text == "".join(f"{page}<|endoftext|>" for page in pages)
        assert tokens.dtype == np.uint16


def test_all_shards_but_the_last_are_full(corpus):
    *full, last = corpus.manifest.shards["train"]
    assert full and all(shard.tokens == 9000 for shard in full) and last.tokens <= 9000


def test_windows_overlap_by_one_token_and_stay_in_one_shard(corpus):
    shards = [np.load(corpus.folder / s.file) for s in corpus.manifest.shards["train"]]
    expected = [
        shard[i * 32 : i * 32 + 33] for shard in shards for i in range((len(shard) - 1) // 32)
    ]
    assert corpus.windows("train", 32) == len(expected)
    for index, window in enumerate(expected):
        assert (corpus.window("train", 32, index) == window).all()
    with pytest.raises(IndexError, match=f"no window {len(expected)}"):
        corpus.window("train", 32, len(expected))


def test_skipped_files_are_counted_by_reason(folder):
    found, skipped = find_documents(folder)
    assert [d.path for d in found] == sorted(d.path for d in found)
    assert len(found) == 7
    assert skipped == {"a copy": 1, "binary": 1, "not UTF-8": 1, "empty": 1, "a link": 1}
    found, skipped = find_documents(folder, ["deep/*.txt"])
    assert len(found) == 6 and not skipped


def test_a_document_is_either_trained_on_or_held_out(folder):
    found, _ = find_documents(folder)
    splits = split_documents(found, 0.3)
    assert sorted(splits["train"] + splits["validation"], key=lambda d: d.path) == found
    assert 0 < sum(d.size for d in splits["validation"]) <= 0.3 * sum(d.size for d in found)
    assert len(split_documents(found, 1e-6)["validation"]) == 1
    with pytest.raises(ValueError, match="one document"):
        split_documents(found[:1], 0.3)
    with pytest.raises(ValueError, match=r"fraction of 0\.0; it must be between 0 and 1"):
        split_documents(found, 0.0)


def test_a_failed_preparation_leaves_no_corpus(folder, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="the bytes alone are 257"):
        prepare(folder, out, vocabulary=256)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no text file"):
        prepare(tmp_path / "empty", out)
    with pytest.raises(ValueError, match="not a readable tokenizer"):
        prepare(folder, out, tokenizer=folder / "deep" / "0.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "text"]
    prepare(folder, out, vocabulary=300)
    with pytest.raises(FileExistsError):
        prepare(folder, out, vocabulary=300)


def test_a_corpus_can_use_the_tokenizer_of_another(corpus, folder, tmp_path):
    made = prepare(folder, tmp_path / "out", tokenizer=corpus.folder / "tokenizer.json")
    assert made.tokenizer_sha256 == corpus.manifest.tokenizer_sha256
    assert made.vocabulary == corpus.manifest.vocabulary and made.id != corpus.id


def test_vocabularies_above_65536_use_uint32_tokens(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "vocabulary_size", lambda _tokenizer: 2**16 + 1)
    assert prepare(folder, tmp_path / "out", vocabulary=300).dtype == "uint32"


def test_a_tokenizer_that_cuts_or_pads_texts_gives_whole_documents(corpus, folder, tmp_path):
    path = corpus.folder / "tokenizer.json"
    whole = prepare(folder, tmp_path / "whole", tokenizer=path)
    for name in ("truncation", "padding"):
        words = Tokenizer.from_file(str(path))
        if name == "truncation":
            words.enable_truncation(8)
        else:
            words.enable_padding(length=100)
        words.save(str(tmp_path / f"{name}.json"))
        made = prepare(folder, tmp_path / name, tokenizer=tmp_path / f"{name}.json")
        assert made.shards == whole.shards


def test_ids_may_be_larger_than_the_number_of_tokens(folder, tmp_path):
    ids = {"<|endoftext|>": 0, "page": 1, "word": 2, "[U]": 70_000}
    words = Tokenizer(models.WordLevel(ids, unk_token="[U]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    made = prepare(folder, tmp_path / "out", tokenizer=tmp_path / "words.json", validation=0.3)
    assert (made.vocabulary, made.dtype) == (70_001, "uint32")
    tokens = np.load(tmp_path / "out" / made.shards["train"][0].file)
    assert set(tokens.tolist()) == set(ids.values())


def test_a_folder_without_a_valid_manifest_raises(corpus, tmp_path):
    with pytest.raises(ValueError, match="no prepared corpus"):
        Corpus(tmp_path)
    (tmp_path / "corpus.json").write_text('{"vocabulary": 3}')
    with pytest.raises(ValueError, match="not a readable manifest"):
        read_manifest(tmp_path)


def test_a_changed_shard_raises(corpus, tmp_path):
    for name, data in files(corpus.folder).items():
        (tmp_path / name).write_bytes(data)
    check_shards(tmp_path)
    shard = tmp_path / "train-00000.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ValueError, match="changed since it was prepared"):
        check_shards(tmp_path)
    np.save(shard, np.zeros(5, np.uint16))
    with pytest.raises(ValueError, match=r"uint16 of shape \(5,\)"):
        Corpus(tmp_path)


def test_the_id_does_not_depend_on_the_folder_or_the_source(corpus, tmp_path):
    for name, data in files(corpus.folder).items():
        (tmp_path / name).write_bytes(data)
    manifest = json.loads((tmp_path / "corpus.json").read_text())
    manifest["source"] = "elsewhere"
    (tmp_path / "corpus.json").write_text(json.dumps(manifest))
    assert Corpus(tmp_path).id == corpus.id
