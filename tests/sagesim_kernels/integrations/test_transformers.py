"""`attn_implementation="sagebwd"` computes what eager attention does, in every form of call."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

import sagesim
from sagesim_kernels.integrations import attend
from sagesim_kernels.integrations.transformers import register, unregister
from tests.sagesim_kernels.integrations.models import (
    TOKENS,
    assert_equals_eager,
    exact_results,
    model,
    results,
    softmax_in_float64,
    tokens,
)
from tests.support.assertions import assert_bitwise, assert_within_budget

DECODERS = ["llama", "mistral", "gemma2", "gpt_oss"]
"""Without and with windows, with a softcap, with sinks."""
KINDS = [*DECODERS, "bert", "modernbert"]


@pytest.fixture(autouse=True)
def registered():
    """ "exact" rounds nothing; "sagebwd" has the default spec."""
    register("exact", spec=sagesim.FPA)
    register()
    yield
    unregister("exact")
    unregister()


def padding(side: str) -> Tensor:
    """Of the first of two sequences, five tokens are padding."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, slice(5) if side == "left" else slice(-5, None)] = 0
    return mask


def labels(mask: Tensor, *, causal: bool = True) -> Tensor:
    """The tokens that a token predicts; -100 if either is padding."""
    before = mask.roll(1, 1) if causal else mask
    return tokens().masked_fill((mask == 0) | (before == 0), -100)


POSITIONS = torch.tensor([[*range(5), *range(TOKENS - 5)], [*range(9), *range(TOKENS - 9)]])
"""Each row packs two sequences."""
CU = torch.tensor([0, 5, TOKENS], dtype=torch.int32)
FLASH = {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "max_length_q": 9, "max_length_k": 9}


@pytest.mark.parametrize("kind", KINDS)
def test_dense(kind):
    assert_equals_eager(kind, "exact", input_ids=tokens(), labels=tokens())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding(kind, side):
    mask = padding(side)
    wanted = labels(mask, causal="bert" not in kind)
    inputs = {"input_ids": tokens(), "labels": wanted, "attention_mask": mask}
    assert_equals_eager(kind, "exact", kept=mask.bool(), **inputs)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_positions(kind, use_cache):
    """Models train with use_cache=True by default; eager attention then forgets the packing."""
    inputs = {"input_ids": tokens(), "labels": tokens(), "position_ids": POSITIONS}
    eager = {**inputs, "use_cache": False}
    assert_equals_eager(kind, "exact", eager=eager, **inputs, use_cache=use_cache)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_packed_cu_seq_lens(kind):
    inputs = {"input_ids": tokens(1), "labels": tokens(1), "position_ids": POSITIONS[:1]}
    eager = {**inputs, "use_cache": False}
    assert_equals_eager(kind, "exact", eager=eager, **inputs, **FLASH)


def assert_each_alone(kind: str, logits: Tensor, sequences: list[Tensor]) -> None:
    """Assert that logits [tokens, words] are those of eager attention to one sequence at a time."""
    with softmax_in_float64():
        models = model(kind, "eager").double(), model(kind, "eager")
        exact, yardstick = (torch.cat([m(x[None]).logits[0] for x in sequences]) for m in models)
    assert_within_budget(
        actual=logits,
        exact=exact,
        yardstick=yardstick,
        factor=4.0,
        band=2.0**-20,
        what="logits",
    )


def test_packed_sequences_are_those_of_each_alone():
    """transformers 5.23 makes gpt-oss's masks without its positions: eager mixes the sequences."""
    both = tokens(1)
    ours = model("gpt_oss", "exact")
    for arguments in ({}, FLASH):
        actual = ours(both, position_ids=POSITIONS[:1], **arguments).logits
        assert_each_alone("gpt_oss", actual[0], list(both[0].split([5, TOKENS - 5])))


PADDED_PACKS = {
    "one padded token in another row": ["aaaaabbbbbbbbb", "aaaaaaaabbbbb_"],
    "left": ["___aabbbbbbbbb", "aaaaaaaaaaaaaa"],
    "between sequences": ["aaaaa_bbbbbbbb", "aaaabbbb__cccc"],
}
"""Two rows of sequences; _ is padding."""


def padded_pack(rows: list[str]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The mask and the positions of the rows, and the tokens of each sequence."""
    positions = torch.zeros(2, TOKENS, dtype=torch.long)
    sequences = []
    for i, row in enumerate(rows):
        for name in sorted(set(row) - {"_"}):
            at = slice(row.index(name), row.rindex(name) + 1)
            positions[i, at] = torch.arange(row.count(name))
            sequences.append(tokens()[i, at])
    mask = torch.tensor([[name != "_" for name in row] for row in rows]).long()
    return {"attention_mask": mask, "position_ids": positions}, sequences


@pytest.mark.parametrize("packs", PADDED_PACKS)
@pytest.mark.parametrize("kind", DECODERS)
def test_packed_positions_in_padded_rows(kind, packs):
    """The positions restart between tokens that are not padding."""
    inputs, sequences = padded_pack(PADDED_PACKS[packs])
    logits = model(kind, "exact")(tokens(), **inputs).logits
    assert_each_alone(kind, logits[inputs["attention_mask"].bool()], sequences)


def test_positions_that_stand_still_over_padding_do_not_restart():
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, 4:6] = 0
    stand, go_on = (mask.cumsum(1) - 1), torch.arange(TOKENS)[None]
    for positions in (stand, go_on):
        inputs = {"input_ids": tokens(), "attention_mask": mask, "position_ids": positions}
        wanted = labels(mask)
        assert_equals_eager("llama", "exact", kept=mask.bool(), labels=wanted, **inputs)


@pytest.mark.parametrize("kind", DECODERS)
def test_cached_decoding(kind):
    """The causal mask and the window are aligned at the last key, with padding too."""
    mask = padding("left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": tokens(), "attention_mask": mask, "position_ids": positions}
    with softmax_in_float64():
        exact = model(kind, "eager").double()(**inputs).logits
    yardstick = model(kind, "eager")(**inputs).logits
    ours, cache, parts = model(kind, "exact"), None, []
    for start, end in ((0, 6), (6, 10), (10, 11), (11, TOKENS)):
        out = ours(
            input_ids=tokens()[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        parts.append(out.logits)
    assert_within_budget(
        actual=torch.cat(parts, 1)[mask.bool()],
        exact=exact[mask.bool()],
        yardstick=yardstick[mask.bool()],
        factor=4.0,
        band=2.0**-20,
        what="logits",
    )


def test_generate():
    options = {"attention_mask": padding("left"), "max_new_tokens": 6, "do_sample": False}
    expected = model("llama", "eager").eval().generate(tokens(), **options)
    assert_bitwise(
        actual=model("llama", "exact").eval().generate(tokens(), **options),
        expected=expected,
        what="tokens",
    )


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_bitwise(actual=actual[name], expected=expected[name], what=name)


def test_it_is_the_emulated_sdpa_bit_by_bit():
    inputs = {"input_ids": tokens(), "labels": tokens()}
    with sagesim.emulate(sagesim.FACTORED_QK):
        expected = results(model("llama", "sdpa"), **inputs)
    assert_same(results(model("llama", "sagebwd"), **inputs), expected)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([1, 2], r"layers is \[1, 2\]; it must be a mapping"),
        (5, "layers is 5; it must be a mapping"),
        ({1: "x"}, r"layers\[1\] is 'x', not an AttentionSpec"),
        ({True: sagesim.SAGEBWD}, "layers has the key True"),
    ],
)
def test_layers_of_other_types(layers, words):
    with pytest.raises(TypeError, match=words):
        register(layers=layers)


def test_layers_have_specs_of_their_own():
    inputs = {"input_ids": tokens(), "labels": tokens()}
    register(layers={1: sagesim.SAGEBWD})
    with sagesim.emulate(sagesim.FACTORED_QK, layers={1: sagesim.SAGEBWD}):
        expected = results(model("llama", "sdpa"), **inputs)
    assert_same(results(model("llama", "sagebwd"), **inputs), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("mask", [None, padding("left")], ids=["dense", "padded"])
def test_gradient_checkpointing(use_reentrant, mask):
    inputs = {"input_ids": tokens(), "labels": tokens(), "attention_mask": mask}
    expected = results(model("llama", "sagebwd"), **inputs)
    checkpointed = model("llama", "sagebwd")
    # Newer versions rename the method and warn; the oldest has only this one.
    enable = getattr(
        checkpointed, "activation_checkpointing_enable", checkpointed.gradient_checkpointing_enable
    )
    enable({"use_reentrant": use_reentrant})
    checkpointed.train()
    assert_same(results(checkpointed, **inputs), expected)


EXHAUSTIVE = pytest.mark.exhaustive

COMPILED = {
    "dense": {},
    "padded": {"attention_mask": padding("left")},
    "packed": {"position_ids": POSITIONS, "use_cache": False},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of graph breaks in many ways
@pytest.mark.parametrize(
    "call", ["padded", *(pytest.param(x, marks=EXHAUSTIVE) for x in COMPILED if x != "padded")]
)
def test_torch_compile(call):
    inputs = {"input_ids": tokens(), "labels": tokens(), **COMPILED[call]}
    torch._dynamo.reset()
    exact = exact_results("llama", **inputs)
    expected = results(model("llama", "exact"), **inputs)
    compiled = model("llama", "exact")
    compiled.compile(backend="aot_eager")
    actual = results(compiled, **inputs)
    for name in expected:
        assert_within_budget(
            actual=actual[name],
            exact=exact[name],
            yardstick=expected[name],
            factor=4.0,
            band=2.0**-20,
            what=name,
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torch_compile_sees_packing_in_padded_rows():
    torch._dynamo.reset()
    inputs, sequences = padded_pack(PADDED_PACKS["left"])
    compiled = model("llama", "exact")
    compiled.compile(backend="aot_eager")
    logits = compiled(tokens(), **inputs).logits
    assert_each_alone("llama", logits[inputs["attention_mask"].bool()], sequences)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torch_compile_refuses_packing_that_the_mask_cannot_see():
    torch._dynamo.reset()
    compiled = model("llama", "exact")
    compiled.compile(backend="aot_eager")
    with pytest.raises(RuntimeError, match="position_ids restart; pass use_cache=False"):
        compiled(tokens(), position_ids=POSITIONS, use_cache=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "arguments",
    [pytest.param({}, marks=EXHAUSTIVE), {"position_ids": POSITIONS[:1], **FLASH}],
)
def test_torch_compile_makes_one_graph_with_the_kernels(arguments, monkeypatch):
    monkeypatch.setattr(attend, "uses_kernels", lambda q: True)
    register(spec=sagesim.FACTORED)
    torch._dynamo.reset()
    inputs = {"input_ids": tokens(1), "labels": tokens(1), **arguments}
    compiled = model("llama", "sagebwd")
    expected = results(compiled, **inputs)
    compiled.compile(backend="aot_eager", fullgraph=True)
    actual = results(compiled, **inputs)
    assert_bitwise(actual=actual["logits"], expected=expected["logits"], what="logits")


INTERPRETED = {
    "sinks, window and padding": {"kind": "gpt_oss", "attention_mask": padding("left")},
    "softcap": {"kind": "gemma2"},
    "dense": {},
    "padded": {"attention_mask": padding("right")},
    "packed": {"position_ids": POSITIONS, "use_cache": False},
}


@pytest.mark.parametrize(
    "call",
    [
        "packed",
        *(pytest.param(x, marks=pytest.mark.slow) for x in [*INTERPRETED][:2]),
        *(pytest.param(x, marks=EXHAUSTIVE) for x in ("dense", "padded")),
    ],
)
def test_the_kernels_in_the_interpreter(call, monkeypatch):
    """On a CUDA device the kernels compute the calls that the emulator computes here."""
    register(spec=sagesim.FACTORED)
    inputs = {"input_ids": tokens(), "labels": tokens(), **INTERPRETED[call]}
    kind = inputs.pop("kind", "llama")
    emulated = results(model(kind, "sagebwd"), **inputs)
    monkeypatch.setattr(attend, "uses_kernels", lambda q: True)
    actual = results(model(kind, "sagebwd"), **inputs)
    exact = exact_results(kind, **inputs)
    for name in emulated:
        assert_within_budget(
            actual=actual[name],
            exact=exact[name],
            yardstick=emulated[name],
            factor=1.1,  # codes of P and dS may differ by 1 in 0.1 % of the elements
            band=2.0**-20,
            what=name,
        )


def test_unregister_puts_back_what_was():
    tables = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before = [dict(table) for table in tables]
    register("another")
    assert all("another" in table for table in tables)
    unregister("another")
    assert [dict(table) for table in tables] == before


def test_importing_registers_nothing_and_needs_no_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch, transformers
from transformers import AttentionInterface, AttentionMaskInterface
tables = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
before = [dict(table) for table in tables]
from sagesim_kernels.integrations.transformers import register
assert [dict(table) for table in tables] == before
register()
config = transformers.LlamaConfig(
    vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    attn_implementation="sagebwd",
)
x = torch.arange(8)[None]
transformers.LlamaForCausalLM(config)(x, labels=x).loss.backward()
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
