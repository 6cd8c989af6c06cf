"""What the commands of `sagesim pretrain` check before they begin."""

import json
import shutil

import numpy as np
import pytest

from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.training import held_out
from tests.sagesim.experiments.pretrain.training.test_trainer import command


def test_every_command_compares_the_tokens_with_their_hashes(run, corpus, make_run, tmp_path):
    words = command(corpus, tmp_path / "a", make_run(steps=1))
    assert run(*words)[0] == 0
    changed = tmp_path / "changed"
    shutil.copytree(corpus.folder, changed)
    shard = changed / "validation-00000.npy"
    np.save(shard, np.load(shard)[::-1])
    for refused in (
        ["run", changed, tmp_path / "b", *words[4:]],
        ["evaluate", changed, tmp_path / "out.json", tmp_path / "a"],
        ["capture", tmp_path / "a", changed, tmp_path / "out.safetensors"],
    ):
        code, out, err = run("pretrain", *refused)
        assert (code, out) == (2, "")
        assert f"sagesim: {shard}: changed since it was prepared" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "changed"]


def test_all_runs_are_checked_before_one_is_evaluated(run, corpus, make_run, tmp_path, monkeypatch):
    for name in "ab":
        run(*command(corpus, tmp_path / name, make_run(steps=1)))
    shutil.rmtree(tmp_path / "b" / "checkpoints")
    losses = held_out._losses
    monkeypatch.setattr(held_out, "_losses", None)
    words = ["pretrain", "evaluate", corpus.folder, tmp_path / "out.json", tmp_path / "a"]
    code, out, err = run(*words, tmp_path / "b")
    assert (code, out) == (2, "") and err.endswith("b: no checkpoint in it\n")
    assert not (tmp_path / "out.json").exists()

    def fails_at_the_second(*arguments):
        monkeypatch.setattr(held_out, "_losses", None)
        return losses(*arguments)

    monkeypatch.setattr(held_out, "_losses", fails_at_the_second)
    with pytest.raises(TypeError):
        run(*words, tmp_path / "a")
    found = json.loads((tmp_path / "out.json").read_text())
    assert [each["attention"] for each in found["evaluations"]] == ["sdpa"]


@pytest.mark.parametrize("option", ["--monitor-every", "--bias-sequences"])
def test_measurements_need_an_attention_to_measure(option, run, corpus, make_run, tmp_path):
    words = command(corpus, tmp_path / "a", make_run(), option, "2")
    code, out, err = run(*words)
    assert (code, out) == (2, "") and not (tmp_path / "a").exists()
    assert err == (
        f"sagesim: {option} 2: a run with sdpa measures nothing unless --monitor names attentions\n"
    )


def test_a_run_with_a_spec_measures_after_its_last_step(run, corpus, make_run, tmp_path):
    wanted = make_run(attention="emulator:sagebwd")
    assert run(*command(corpus, tmp_path / "a", wanted, "--monitor-sequences", "2"))[0] == 0
    measured = {row.step for row in Log.read(tmp_path / "a").rows if row.group == "layer"}
    assert measured == {4}
