import math
import os
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch

import sagesim
import sagesim.cli.trace
from sagesim import AttentionProblem, AttentionSpec, attribute, trace
from sagesim.analysis import (
    PAPER_TABLE_1,
    Setting,
    errors,
    errors_of_both,
    gaussian_errors,
    measure,
    pool,
    range_losses,
    range_warnings,
)
from sagesim.cli import COMMANDS, main
from sagesim.cli.inputs import GRAMMAR, SHIPPED, load
from sagesim.data import LLAMA
from sagesim.models import Call, Capture
from sagesim.spec import FPA_FP16, PRESETS, SAGEBWD, SITES, Granularity, Precision, RoundingMode
from tests.support.full_disk import full_disk
from tests.support.language_models import llama, save


def call(index, **changes):
    generator = torch.Generator().manual_seed(index)
    q, k, v, do = torch.randn(4, 1, 2, 20, 8, generator=generator)
    fields = {
        "q": q,
        "k": k,
        "v": v,
        "do": do,
        "attn_mask": None,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
        "index": index,
        "name": f"layer.{index}",
    }
    return Call(**(fields | changes))


@pytest.fixture
def capture():
    return Capture(
        calls=(call(0), call(3)), loss_scale=1.0, source={"model": "noise"}, torch_version="2"
    )


@pytest.fixture
def file(tmp_path, capture):
    path = tmp_path / "in.safetensors"
    capture.save(path)
    return path


@pytest.fixture(autouse=True)
def no_progress_lines(monkeypatch):
    """On a busy machine, a command says how far it is."""
    monkeypatch.setattr("sagesim.progress_lines.FIRST_AFTER", math.inf)


@pytest.fixture
def run(capsys):
    """Runs a command that must succeed; returns its output."""

    def run(*argv):
        assert main([str(a) for a in argv]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert "\x1b" not in out, "colours in output that is not a terminal"
        return out

    return run


@pytest.fixture
def fails(capsys):
    """Runs a command that must fail; returns its only line on stderr."""

    def fails(*argv, code=2):
        assert main([str(a) for a in argv]) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("sagesim: ") and err.endswith("\n") and err.count("\n") == 1
        return err

    return fails


def row(out, name):
    """The cells of the first row with a name."""
    for line in out.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if cells[0] == name:
            return cells[1:]
    raise AssertionError(f"no row {name!r} in\n{out}")


def test_attribute_prints_the_attribution(run, file, capture):
    out = run("attribute", file, "--spec", "sagebwd dp=int8")
    base = AttentionSpec.parse("sagebwd dp=int8")
    each = [attribute(c, base=base) for c in capture.calls]
    pooled = pool(each)
    assert row(out, "relative L2 error") == [f"{x:.2e}" for x in pooled.error.values()]
    own, end = pooled.own_forward, out.split("its own forward")[1]
    assert row(end, "relative L2 error") == [f"{x:.2e}" for x in own.error.values()]
    assert row(end, "pv") == [f"{x:.1%}" for x in own.sites[1].share.values()]
    assert row(out, "qk+qk_recompute") == [f"{x:.1%}" for x in pooled.logits.share.values()]
    assert row(out, "delta from P and dP") == [
        f"{x:.2e}" for x in pooled.switches[2].error.values()
    ]
    assert row(out, "3 layer.3")[1] == f"{each[1].error['ds']:.2e}"
    assert pooled.summary() in out
    assert "sagebwd_all_int8" in out


def test_attribute_of_one_layer(run, file, capture):
    out = run("attribute", file, "--layers", "3")
    c = capture.calls[1]
    expected = attribute(c)
    assert row(out, "relative L2 error") == [f"{x:.2e}" for x in expected.error.values()]


def test_attribute_writes_the_report(run, file, tmp_path):
    page = tmp_path / "new" / "folder" / "report.html"
    out = run("attribute", file, "--report", page)
    assert out.splitlines()[-1] == f"report: {page}"
    text = page.read_text(encoding="utf-8")
    assert f"sagesim attribute {file} --report {page}" in text
    assert [p.name for p in page.parent.iterdir()] == ["report.html"]


def test_attribute_of_attention_that_rounds_nothing(run, file):
    assert "No product is rounded" in run("attribute", file, "--spec", "fpa")


def test_trace_prints_table_2_beside_the_papers(run, file, capture):
    out = run("trace", file)
    cosine, rel_l2, own = out.split("rel L2")
    for c in capture.calls:
        e = errors(c, SAGEBWD)
        for table, name in ((cosine, "cosine"), (rel_l2, "rel_l2")):
            assert row(table, f"{c.index} layer.{c.index}") == [
                f"{getattr(e[t], name):.4f}"
                for t in ("delta", "p", "dp", "ds", "o", "dq", "dk", "dv")
            ]
        e = errors_of_both(c, SAGEBWD)[1]
        assert row(own, f"{c.index} layer.{c.index}") == [
            f"{e[t].rel_l2:.4f}" for t in ("delta", "p", "dp", "ds", "o", "dq", "dk", "dv")
        ]
    theirs = "the paper's model, layer 11"
    assert row(cosine, theirs)[3] == "0.9789"
    assert row(rel_l2, theirs)[3:] == ["0.2045", "0.0793", "0.2579", "0.3074", "0.0540"]


def test_trace_prints_the_shares_that_become_0(run, tmp_path):
    """Where there are many: one token of dO sets the scale of its block, far above the others."""
    few, many = call(0), call(3)
    do = many.do.clone()
    do[..., 4, :] *= 1e4
    many = replace(many, do=do)
    for name, calls in (("few", (few,)), ("many", (few, many))):
        Capture(calls=calls, loss_scale=1.0, source={}, torch_version="2").save(tmp_path / name)
    title = "share rounded to 0"
    spec = ("--spec", "fpa dv=int8@tile,block")
    assert title not in run("trace", tmp_path / "few", *spec)
    _, zeros = run("trace", tmp_path / "many", *spec).split(title)
    traced = trace(many, spec=AttentionSpec.parse(spec[1])).vanished["dv.do"]
    assert traced.rows > 0.5
    assert row(zeros, "layer")[-1] == "dv.do"
    assert row(zeros, "3 layer.3")[-1] == f"{traced.numbers:.1%} ({traced.rows:.1%})"
    assert "(" not in row(zeros, "0 layer.0")[-1]


def test_shares_that_become_0_are_means_over_groups_of_heads(monkeypatch):
    problem = call(2)
    whole = measure(problem, SAGEBWD).vanished
    groups = AttentionProblem.head_groups
    monkeypatch.setattr(AttentionProblem, "head_groups", lambda self: groups(self, entries=1))
    parts = [trace(x, spec=SAGEBWD).vanished for x in problem.head_groups()]
    assert len(parts) == 2
    found = measure(problem, SAGEBWD).vanished
    assert [*found] == [*whole]
    for key, share in found.items():
        expected = sum(part[key].numbers for part in parts) / 2
        assert share.numbers == pytest.approx(expected, rel=1e-12)
        assert share.numbers == pytest.approx(whole[key].numbers, rel=1e-6)


def test_sigma_prints_table_1_beside_the_papers(run):
    settings = ("--tokens", 40, "--head-dim", 8, "--draws", 2, "--seed", 5, "--causal")
    out = run("sigma", "--sigmas", 3, 4, *settings)
    setting = Setting(tokens=40, head_dim=8, draws=2, is_causal=True, seed=5)
    ours = gaussian_errors(3.0, SAGEBWD, setting).overall["o"].rel_l2
    theirs = PAPER_TABLE_1[3.0][0][1]
    assert row(out, "3 O")[3:] == [f"{ours:.4f}", f"{theirs:.4f}", f"{ours - theirs:+.4f}"]
    assert row(out, "3 dK")[1] == f"{PAPER_TABLE_1[3.0][2][0]:.4f}"
    assert row(out, "4 dV")[1:3] == ["-", "-"]


def test_sigma_without_arguments_is_the_papers_table():
    from sagesim.cli import _parser

    args = _parser().parse_args(["sigma"])
    assert args.sigmas == list(PAPER_TABLE_1)
    assert Setting() == Setting(
        tokens=args.tokens,
        head_dim=args.head_dim,
        draws=args.draws,
        is_causal=args.causal,
        seed=args.seed,
    )


def test_sweep_prints_a_ranking_and_resumes(run, file, tmp_path):
    path = tmp_path / "out.parquet"
    first = run("sweep", path, file, "--specs", "factored", "sagebwd")
    assert first.splitlines()[-1] == f"4 rows in {path}"
    assert row(first, "sagebwd")[0] == "6"
    assert run("sweep", path, file, "--specs", "factored", "sagebwd") == first
    assert row(run("sweep", path, file), "fpa")[0] == "0"


def test_a_dry_run_of_a_sweep_says_what_is_missing_and_writes_nothing(run, file, tmp_path):
    path = tmp_path / "out.parquet"
    words = ("sweep", path, file, "--specs", "factored", "sagebwd")
    before = sorted(tmp_path.iterdir())
    assert run(*words, "--dry-run") == "4 of 4 rows to compute; 0 GPU hours\n"
    inside = tmp_path / "new" / "sub" / "out.parquet"
    run("sweep", inside, file, "--specs", "factored", "--dry-run")
    assert sorted(tmp_path.iterdir()) == before
    run("sweep", path, file, "--specs", "factored")
    found = run(*words, "--dry-run")
    assert re.fullmatch(r"2 of 4 rows to compute, about 0\.00 CPU hours; 0 GPU hours\n", found)
    run(*words)
    assert run(*words, "--dry-run").startswith("0 of 4 rows to compute, about 0.00 CPU hours")


def test_sweep_of_all_shows_the_best_spec_for_each_number_of_int8_products(run, tmp_path):
    source = tmp_path / "in.safetensors"
    Capture(calls=(call(0),), loss_scale=1.0, source={}, torch_version="2").save(source)
    out = run("sweep", tmp_path / "out.parquet", source, "--all")
    assert "128 rows" in out
    assert len(re.findall(r"^ +sagebwd", out, re.MULTILINE)) + out.count(" sage_forward ") == 8
    assert row(out, "sagebwd_all_int8")[0] == "7"


def test_the_word_llama_loads_the_shipped_capture():
    assert [c.index for c in load("llama").calls] == list(range(6))


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"sagesim {sagesim.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert f"\n  sagesim {command}" in out
    assert (GRAMMAR in out) == (command not in ("capture", "pretrain", "report"))


def test_the_grammar_in_the_help_has_every_word():
    words = GRAMMAR.replace("|", " ").replace("=", " ").replace("@", " ").split()
    enums = [e.value for kind in (Precision, Granularity, RoundingMode) for e in kind]
    assert {*PRESETS, *SITES, *enums} <= set(words)


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "required: COMMAND"),
        (["atribute"], "invalid choice: 'atribute'"),
        (["attribute"], "required: CAPTURE"),
        (["attribute", "FILE", "--layers", "x"], "invalid int value: 'x'"),
        (["attribute", "FILE", "--layers", "1", "3"], "no layer 1 in the capture; it has 0, 3"),
        (["attribute", "FILE", "--spec", "sagebw"], "did you mean 'sagebwd'?"),
        (["attribute", "FILE", "--spec", "sagebwd dp=int9"], "'int9' is not a precision"),
        (["attribute", "FILE", "--report", "TMP"], "cannot be written"),
        (["attribute", "FILE", "--report", "FILE/no/out.html"], "cannot be written"),
        (["attribute", "FILE", "--report", "FILE/out.html"], "cannot be written"),
        (["attribute", "TMP/missing"], "no such file"),
        (["trace", "/dev/null"], "not a regular file"),
        (["attribute", ""], "the path of a capture is empty"),
        (["attribute", "TMP"], "a directory, not a capture; `sagesim capture` makes one from a"),
        (["attribute", "TMP/text"], "not a readable safetensors file"),
        (["trace", "TMP/other"], "not a capture"),
        (["trace", "TMP/nan"], "q holds NaN or Inf"),
        (["trace", "TMP/shapes"], "shapes do not fit"),
        (["attribute", "TMP/empty"], "k, v have no elements"),
        (["trace", "FILE", "--spec", ""], "empty spec label"),
        (["sigma", "--sigmas", "0"], "0 is not a positive number"),
        (["sigma", "--sigmas", "nan"], "nan is not a positive number"),
        (["sigma", "--tokens", "0"], "--tokens 0 is not in 1..2**24"),
        (["sigma", "--head-dim", "-1"], "--head-dim -1 is not in 1..2**24"),
        (["sigma", "--tokens", "9" * 20], f"--tokens {'9' * 20} is not in 1..2**24"),
        (["sigma", "--seed", "-1"], "--seed -1 is not in 0..2**32-1"),
        (["sweep", "TMP/out.parquet", "TMP/missing"], "no such file"),
        (["sweep", "TMP/out.parquet", "FILE", "--specs", "x"], "'x' is not a preset"),
        (["sweep", "TMP/out.parquet", "FILE", "--specs", "fpa", "--all"], "not allowed with"),
        (["sweep", "TMP/text", "FILE"], "not a readable Parquet file"),
        (["sweep", "FILE/out.parquet", "FILE"], "cannot be written"),
        (["sweep", "TMP", "FILE"], "cannot be written: Is a directory"),
        (["trace", "TMP/equal"], "two calls have index 0"),
        (["capture", "TMP", "TMP/text", "TMP/out"], "has no config.json"),
        (["capture", "TMP/none", "TMP/text", "TMP/out"], "no such file or directory"),
        (["capture", "FILE", "TMP/text", "TMP/out"], "neither a directory nor a .gguf file"),
        (["capture", "TMP/model", "TMP/missing", "TMP/out"], "not a readable UTF-8 text"),
        (["capture", "TMP/model", "FILE", "TMP/out"], "not a readable UTF-8 text"),
        (["capture", "TMP/model", "TMP/text", "FILE/out"], "cannot be written"),
        (["capture", "TMP/model", "TMP/text", "TMP/out"], "no causal language model loads"),
        (["capture", "TMP/model", "TMP/text", "TMP/out", "--tokens", "1"], "at least 2"),
    ],
)
def test_invalid_input_prints_one_line(argv, message, fails, file, tmp_path, capture):
    from safetensors.torch import load_file, save_file

    (tmp_path / "text").write_text("no tensors here")
    save_file({"x": torch.ones(1)}, tmp_path / "other")
    with_metadata(file, tmp_path / "nan", lambda x: x.fill_(torch.nan), key="1.q")
    with_metadata(file, tmp_path / "shapes", lambda x: x[:, :1], key="1.k")
    empty = {name: torch.ones(1, 2, 0, 8) for name in ("k", "v")}
    one = Capture(calls=(call(0, **empty),), loss_scale=1.0, source={}, torch_version="2")
    one.save(tmp_path / "empty")
    with_metadata(file, tmp_path / "equal", lambda x: x, key="1.q", index=0)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    argv = [a.replace("TMP", str(tmp_path)).replace("FILE", str(file)) for a in argv]
    assert message in fails(*argv)
    assert sorted(tmp_path.rglob("*")) == before
    assert load_file(file).keys()


@pytest.fixture
def named(file, tmp_path):
    """A folder with a capture, other names of it, and a folder with a model and a text."""
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "hard").hardlink_to(file)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "weights").write_text("weights")
    (tmp_path / "text").write_text("words")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "attribute in.safetensors --report in.safetensors",
        "attribute in.safetensors --report model/../in.safetensors",
        "attribute in.safetensors --report link",
        "attribute link --report in.safetensors",
        "attribute in.safetensors --report hard",
        "sweep in.safetensors in.safetensors",
        "sweep hard link in.safetensors",
        "capture model text text",
        "capture model text model/../text",
        "capture model text model/weights",
        "capture model text model/config.json",
    ],
)
def test_an_output_that_is_an_input_is_refused(words, fails, named, monkeypatch):
    """Before anything is computed, and whatever the name by which it is given."""
    monkeypatch.chdir(named)
    before = {path: path.read_bytes() for path in named.rglob("*") if path.is_file()}
    assert "cannot be written: it is an input of the command" in fails(*words.split())
    assert {path: path.read_bytes() for path in named.rglob("*") if path.is_file()} == before


def test_an_output_that_is_the_shipped_capture_is_refused(fails, file, monkeypatch):
    assert SHIPPED == {"llama": LLAMA}
    monkeypatch.setitem(SHIPPED, "llama", file)
    assert "it is an input" in fails("attribute", "llama", "--report", file)


def test_a_new_file_in_the_folder_of_a_model_is_written(run, model, text, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    assert main(["capture", str(folder), str(text), str(folder / "mine.safetensors")]) == 0
    assert Capture.load(folder / "mine.safetensors").source["model"] == "copy"


def test_a_full_disk_ends_every_command_with_one_line(run, capsys, file, model, text, tmp_path):
    """The earlier outputs stay, and no other file appears."""
    (tmp_path / "report").write_text("earlier")
    (tmp_path / "capture").write_text("earlier")
    run("sweep", tmp_path / "sweep", file, "--specs", "fpa_fp16")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for out, words in (
        ("report", ("attribute", file, "--layers", 0, "--report", tmp_path / "report")),
        ("capture", ("capture", model, text, tmp_path / "capture")),
        ("sweep", ("sweep", tmp_path / "sweep", file, "--specs", "fpa")),
    ):
        with full_disk():
            assert main([str(word) for word in words]) == 2
        # `capture` says on stderr what it does before it writes.
        *_, line = capsys.readouterr().err.splitlines()
        assert line == f"sagesim: {tmp_path / out}: cannot be written: File too large"
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_report_is_written_although_nobody_reads_the_output(file, tmp_path, monkeypatch):
    """As in `sagesim attribute ... --report out.html | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        words = ["attribute", str(file), "--layers", "0", "--report", str(tmp_path / "out.html")]
        assert ended(words) == 1
    assert (tmp_path / "out.html").read_text(encoding="utf-8").endswith("</html>")


def ended(words):
    """The exit code of a command; rich ends the process itself if its pipe is closed."""
    try:
        return main(words)
    except SystemExit as end:
        return end.code


def with_metadata(source, target, change, *, key, **entries):
    """Copy a capture's file with one tensor changed, and its new shape in the description.

    entries: other changes of the call's description."""
    import json

    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    tensors = load_file(source)
    tensors[key] = change(tensors[key]).contiguous()
    with safe_open(source, "pt") as opened:
        [(name, value)] = opened.metadata().items()
    description = json.loads(value)
    number, tensor = key.split(".")
    description["calls"][int(number)]["tensors"][tensor]["shape"] = list(tensors[key].shape)
    description["calls"][int(number)] |= entries
    save_file(tensors, target, {name: json.dumps(description)})


HOSTILE = "layer\x1b[2J\x00\u202e.0"


@pytest.fixture
def hostile(tmp_path):
    """A capture whose name and source hold control characters."""
    path = tmp_path / "hostile.safetensors"
    calls = (call(0, name=HOSTILE), call(1, name=HOSTILE))
    Capture(calls=calls, loss_scale=1.0, source={HOSTILE: HOSTILE}, torch_version=HOSTILE).save(
        path
    )
    return path


@pytest.mark.parametrize("command", ["attribute", "trace"])
def test_control_characters_of_files_are_printed_as_escapes(run, hostile, command):
    out = run(command, hostile)
    assert r"0 layer\x1b[2J\x00\u202e.0" in out
    assert all(c.isprintable() or c == "\n" for c in out)


def test_control_characters_of_files_are_escaped_in_the_report(run, hostile, tmp_path):
    page = tmp_path / "report.html"
    run("attribute", hostile, "--report", page)
    text = page.read_text(encoding="utf-8")
    assert r"layer\x1b[2J\x00\u202e.0" in text
    assert not {"\x1b", "\x00", "\u202e"} & set(text)


def test_control_characters_in_failures_are_printed_as_escapes(fails, file, tmp_path):
    with_metadata(file, tmp_path / "nan", lambda x: x.fill_(torch.nan), key="1.q", name=HOSTILE)
    message = fails("trace", tmp_path / "nan")
    assert r"call 3 in layer\x1b[2J\x00\u202e.0: q holds NaN or Inf" in message
    assert message[:-1].isprintable()


@pytest.mark.parametrize("command", ["attribute", "trace"])
def test_a_narrow_terminal_shows_whole_names(command, capsys, tmp_path, monkeypatch):
    name = "model.layers.10.self_attn"
    path = tmp_path / "in.safetensors"
    calls = (call(0, name=name), call(1, name=name))
    Capture(calls=calls, loss_scale=1.0, source={}, torch_version="2").save(path)
    monkeypatch.setattr("sagesim.terminal._WIDE", 80)
    assert main([command, str(path)]) == 0
    out = capsys.readouterr().out
    first = "".join(line.strip().split("  ")[0] for line in out.splitlines())
    assert f"0{name}" in first and f"1{name}" in first
    assert "…" not in out


def test_ctrl_c_prints_one_line(fails, file, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(sagesim.cli.trace, "run", interrupted)
    assert fails("trace", file, code=130) == "sagesim: interrupted\n"


@pytest.mark.parametrize("package, extra", [("rich", "cli"), ("jinja2", "cli")])
def test_a_missing_package_prints_one_line(package, extra, capsys, file, tmp_path, monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    page = tmp_path / "r.html"
    assert main(["attribute", str(file), "--layers", "0", "--report", str(page)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"pip install 'sagebwd[{extra}]'" in err
    assert not page.exists()


def test_a_terminal_shows_a_progress_bar(capsys, file, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["trace", str(file)]) == 0
    assert "measuring layers" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a random Llama of two layers and a tokenizer of twenty words."""
    return save(llama(), tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{i % 19 + 1}" for i in range(0, 90, 3)), encoding="utf-8")
    return path


@pytest.fixture
def record(capsys):
    """Runs `sagesim capture`, which must succeed; returns its output and what it tells before."""

    def record(*argv):
        assert main(["capture", *map(str, argv)]) == 0
        return capsys.readouterr()

    return record


def test_capture_records_a_model(record, run, model, text, tmp_path):
    out = tmp_path / "out.safetensors"
    said, told = record(model, text, out)
    assert said == f"{out}: 2 layers, 30 tokens\n"
    assert told == (
        "recording 2 of 2 layers in float32 on 30 tokens of text.txt, which is all of it\n"
    )
    capture = Capture.load(out)
    assert [c.index for c in capture.calls] == [0, 1]
    assert all(c.q.shape == (1, 2, 30, 8) and c.is_causal for c in capture.calls)
    assert capture.source["model"] == model.name
    assert capture.source["text"] == "text.txt"
    assert capture.loss_scale == 32
    run("attribute", out)


def test_capture_names_tensors_that_fp16_cannot_hold(record, text, tmp_path):
    """With a small projection of O, dO is small; with a large one of V, V is large."""
    for name, factor, sentence in (
        ("o_proj", 1e-8, "dO underflows FP16 in dP = dO Vᵀ: rounding changes it by up to "),
        ("v_proj", 1e9, "V overflows FP16 in O = PV in the forward: elements become infinite."),
    ):
        changed = llama()
        for layer in changed.model.layers:
            getattr(layer.self_attn, name).weight.data.mul_(factor)
        out = tmp_path / f"{name}.safetensors"
        said, _ = record(save(changed, tmp_path / name), text, out)
        first, under, *sentences = said.splitlines()
        assert first == f"{out}: 2 layers, 30 tokens"
        assert under == "under fpa_fp16:"
        assert any(each.startswith(sentence) for each in sentences), said
        expected = range_warnings(range_losses(Capture.load(out).calls, FPA_FP16))
        assert sentences == expected


@pytest.mark.parametrize(
    ("words", "options", "told"),
    [
        (30, ["--tokens", 64], "30 tokens of long.txt, which is all of it"),
        (30, ["--tokens", 12], "12 tokens of long.txt, as --tokens 12 says"),
        (90, [], "64 tokens of long.txt, the number of positions of the model"),
        (90, ["--layers", 1], "recording 1 of 2 layers in float32 on 64 tokens"),
    ],
)
def test_capture_tells_what_limits_the_tokens(record, model, tmp_path, words, options, told):
    text = tmp_path / "long.txt"
    text.write_text("w1 " * words)
    assert told in record(model, text, tmp_path / "out", *options).err


def test_capture_of_more_tokens_than_positions_fails(fails, model, text, tmp_path):
    message = fails("capture", model, text, tmp_path / "out", "--tokens", 65)
    assert f"65 tokens: {model} has 64 positions" in message
    assert not (tmp_path / "out").exists()


def test_capture_tells_which_weights_are_not_used(record, text, tmp_path):
    net = llama(tie_word_embeddings=True)
    net.v_head = torch.nn.Linear(16, 1)
    told = record(save(net, tmp_path / "model"), text, tmp_path / "out").err
    assert "not part of the language model, not used: v_head.bias, v_head.weight\n" in told


def test_capture_shows_its_progress_in_a_terminal(record, model, text, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    told = record(model, text, tmp_path / "out").err
    assert "loading the model" in told
    assert "recording layers" in told


def test_capture_of_a_gguf_file_without_its_reader_names_the_extra(
    fails, text, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    message = fails("capture", tmp_path / "model.gguf", text, tmp_path / "out")
    assert "gguf is not installed: pip install 'sagebwd[gguf]'" in message


def test_the_captured_gradient_is_that_of_the_model_loss(record, model, text, tmp_path):
    from transformers import AutoModelForCausalLM

    from sagesim.models import capture

    out = tmp_path / "out.safetensors"
    record(model, text, out, "--tokens", 12, "--layers", 1)
    (recorded,) = Capture.load(out).calls
    ids = torch.tensor([[i % 19 + 1 for i in range(0, 36, 3)]])
    llama = AutoModelForCausalLM.from_pretrained(model).train(False)
    with capture(layers=[1]) as recording:
        (llama(input_ids=ids, labels=ids).loss * 16).backward()
    (expected,) = recording.result().calls
    for name, tensor in expected.tensors.items():
        assert torch.equal(recorded.tensors[name], tensor), name


def test_capture_of_an_unknown_layer_fails(fails, model, text, tmp_path):
    out = tmp_path / "out.safetensors"
    assert "no layer 7; the model has 0 to 1" in fails("capture", model, text, out, "--layers", 7)
    assert not out.exists()


def test_capture_of_an_empty_text_fails(fails, model, tmp_path):
    (tmp_path / "empty").write_text("")
    assert "0 tokens" in fails("capture", model, tmp_path / "empty", tmp_path / "out")


def test_capture_refuses_pickled_weights(fails, model, text, tmp_path):
    folder = tmp_path / "pickled"
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    torch.save({}, folder / "pytorch_model.bin")
    assert "no causal language model loads" in fails("capture", folder, text, tmp_path / "out")


def test_capture_without_transformers_names_the_extra(fails, model, text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = fails("capture", model, text, tmp_path / "out")
    assert "transformers is not installed: pip install 'sagebwd[cli]'" in message


def test_a_label_in_capitals_is_recognised(fails, file):
    assert "did you mean 'sagebwd'?" in fails("trace", file, "--spec", "SAGEBWD")


def test_an_unknown_option_names_the_help_of_its_command(fails, file):
    message = fails("attribute", file, "--reprot", "x.html")
    assert "unrecognized arguments: --reprot x.html; did you mean --report?" in message
    assert "(see sagesim attribute --help)" in message
    assert "(see sagesim pretrain run --help)" in fails("pretrain", "run", "c", "r", "--nothing")


@pytest.mark.parametrize(("option", "number"), [("--heads", 0), ("--rows", -4)])
def test_a_sample_needs_positive_numbers(fails, file, option, number):
    assert f"{option} {number} is not a positive number" in fails("attribute", file, option, number)


def test_a_sample_is_not_larger_than_the_largest_layer(fails, run, file):
    for option, what in (("--heads", "heads of K and V"), ("--rows", "queries")):
        message = fails("attribute", file, option, 99999)
        assert f"{option} 99999: no measured layer has more than " in message and what in message
        most = message.split("more than ")[1].split()[0]
        assert "comes from" in run("attribute", file, option, most)


def test_attribute_measures_a_sample(run, file):
    out = run("attribute", file, "--heads", 1)
    assert "(with an unknown error of sampling) of the gradients' error comes from" in out
    assert "Measured on a sample of 50% of the elements of S" in out


def test_gradients_that_fp16_cannot_hold_are_named(run, tmp_path):
    """Too small or too large for FP16: no command takes the damage for rounding."""
    small, large = call(0), call(1)
    small, large = replace(small, do=1e-9 * small.do), replace(large, do=1e6 * large.do)
    for name, recorded in (("small", small), ("large", large)):
        Capture(calls=(recorded,), loss_scale=1.0, source={}, torch_version="2").save(
            tmp_path / name
        )
    spec = ("--spec", "sagebwd dp=fp16")
    for command in ("attribute", "trace"):
        assert "dO underflows FP16 in dP = dO Vᵀ" in run(command, tmp_path / "small", *spec)
        assert "dO overflows FP16 in dP = dO Vᵀ" in run(command, tmp_path / "large", *spec)
    assert "dS, dQ, dK are not finite: dP = dO Vᵀ overflows." in run(
        "attribute", tmp_path / "large", *spec
    )
    traced = run("trace", tmp_path / "large", *spec)
    assert "layer 1 layer.1: the error of dP, dS, dQ, dK is not finite" in traced
    assert row(traced, "1 layer.1")[2] == "nan"


def test_progress_is_printed_as_lines_without_a_terminal(capsys, file, monkeypatch):
    """With the time that is left, and once with what the user can do about it."""
    monkeypatch.setattr("sagesim.progress_lines.FIRST_AFTER", 0.0)
    monkeypatch.setattr("sagesim.progress_lines.EVERY", 0.0)
    assert main(["attribute", str(file)]) == 0
    first, *others = capsys.readouterr().err.splitlines()
    assert re.match(
        r"attributing the error of 2 layers: 1 of 42.* \(0\.0 GB besides the capture; --layers, "
        r"--heads and --rows measure less\)",
        first,
    )
    assert any(re.fullmatch(r".*: 30 of 42, about \d+ s left", line) for line in others)
