"""Whole models train on a GPU with the kernels: 2048 tokens, bfloat16.

The model is SmolLM2-135M with random weights and fewer words. Each result is held to float64, and
may have the error of the emulator, which the same name runs on CPUs.
"""

import copy
import gc
import inspect
import math
import runpy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import sagesim
from sagesim_kernels import attention
from sagesim_kernels.integrations import attend
from sagesim_kernels.integrations.torch import Functions
from sagesim_kernels.integrations.torch_flash import flash_attention
from sagesim_kernels.integrations.transformers import register, unregister
from tests.support.assertions import assert_bitwise, assert_within_budget
from theory import error_budget
from theory.checks.budget import WITHIN

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SPEED = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "smollm2_speed.py"))
TOKENS, HEADS, KV_HEADS, HEAD, WORDS = 2048, 9, 3, 64, 4096
SPECS = ("factored_qk", "factored", "sagebwd")
OTHER_ROUNDINGS = 1.5
"""Kernels and emulator round a few inputs of later layers differently, with errors of one size."""


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for label in SPECS:
        register(label, spec=sagesim.AttentionSpec.parse(label))
    yield
    for label in SPECS:
        unregister(label)
    gc.collect()
    torch.cuda.empty_cache()


def smollm2(layers: int = 30) -> Any:
    """The same weights at each call. Those of Q and K are scaled: else all keys weigh the same."""
    torch.manual_seed(0)
    sizes = SPEED["SIZES"] | {"num_hidden_layers": layers, "vocab_size": WORDS}
    with torch.device("cuda"):
        made = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa"))
    for name, parameter in made.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data *= 3
    return made.train()


def inputs(layout: str) -> dict[str, Any]:
    """ "dense": one row. Others: three documents."""
    generator = torch.Generator().manual_seed(0)
    lengths = (TOKENS,) if layout == "dense" else (TOKENS, 700, 1301)
    parts = [torch.randint(WORDS, (n,), generator=generator) for n in lengths]
    if layout == "dense":
        found = {"input_ids": parts[0][None], "labels": parts[0][None], "use_cache": False}
    else:
        found = SPEED["LAYOUTS"][layout](parts, TOKENS)
    return {n: x.to("cuda") if isinstance(x, Tensor) else x for n, x in found.items()}


def gradients(model: Any, given: dict[str, Any], attention: str) -> dict[str, Tensor]:
    """Of the loss, under bfloat16 autocast unless the weights are float64."""
    model.set_attn_implementation(attention)
    model.zero_grad()
    is_exact = next(model.parameters()).dtype is torch.float64
    with nullcontext() if is_exact else torch.autocast("cuda", torch.bfloat16):
        loss = model(**given).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_gradients_as_accurate(
    actual: dict[str, Tensor], exact: dict[str, Tensor], yardstick: dict[str, Tensor]
) -> None:
    """Assert that no error is much larger than the yardstick's."""
    for name in exact:
        assert_within_budget(
            actual=actual[name],
            exact=exact[name],
            yardstick=yardstick[name],
            factor=OTHER_ROUNDINGS,
            band=0.0,
            what=name,
        )


def relative_error(actual: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    error = sum((actual[n].double() - x).square().sum() for n, x in exact.items())
    return float((error / sum(x.square().sum() for x in exact.values())).sqrt())


@pytest.mark.parametrize("layout", ["dense", "padded", "packed"])
@pytest.mark.parametrize("label", SPECS)
def test_transformers(layout, label, monkeypatch):
    given = inputs(layout)
    model = smollm2()
    exact_model = copy.deepcopy(model).double()
    exact_model.gradient_checkpointing_enable({"use_reentrant": False})
    exact = gradients(exact_model, given, "sdpa")
    del exact_model
    sdpa = gradients(model, given, "sdpa")
    actual = gradients(model, given, label)
    again = gradients(model, given, label)
    with monkeypatch.context() as patch:
        patch.setattr(attend, "uses_kernels", lambda q: False)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        emulated = gradients(model, given, label)
    errors = [relative_error(x, exact) for x in (actual, emulated, sdpa)]
    print(f"{layout} {label}: {errors[0]:.4f}, emulator {errors[1]:.4f}, sdpa {errors[2]:.4f}")
    for name in exact:
        assert_bitwise(actual=again[name], expected=actual[name], what=name)
    assert_gradients_as_accurate(actual, exact, emulated)


@pytest.mark.parametrize("label", SPECS)
def test_bert_with_padding(label, monkeypatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    heads = {"num_attention_heads": 4, "max_position_embeddings": TOKENS}
    config = BertConfig(vocab_size=WORDS, **sizes, **heads, **no_dropout)
    model, given = BertForMaskedLM(config).to("cuda").train(), inputs("padded")
    exact = gradients(copy.deepcopy(model).double(), given, "sdpa")
    actual = gradients(model, given, label)
    with monkeypatch.context() as patch:
        patch.setattr(attend, "uses_kernels", lambda q: False)
        emulated = gradients(model, given, label)
    assert_gradients_as_accurate(actual, exact, emulated)


def test_a_saved_model_repeats_the_bits_and_holds_nothing_of_ours(tmp_path):
    given, model = inputs("packed"), smollm2(layers=3)
    expected = gradients(model, given, "factored")
    model.save_pretrained(tmp_path)
    for file in tmp_path.glob("*.json"):
        assert "factored" not in file.read_text(), file
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="factored")
    assert loaded.state_dict().keys() == model.state_dict().keys()
    # The frequencies of positions are not saved. A CPU computes other last bits of them than a GPU.
    loaded.model.rotary_emb = model.model.rotary_emb
    actual = gradients(loaded.to("cuda").train(), given, "factored")
    for name in expected:
        assert_bitwise(actual=actual[name], expected=expected[name], what=name)


@pytest.mark.parametrize("label", SPECS)
def test_errors_of_a_layer_are_the_error_budget(label):
    """Of three heads of the middle layer."""
    model, given, spec = smollm2(), inputs("dense"), sagesim.AttentionSpec.parse(label)
    with sagesim.capture(model, loss_scale=float(TOKENS)) as recording:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**given).loss * TOKENS
        loss.backward()
    call = recording.result().calls[15]
    assert call.is_causal
    q, do = (x[:, :3].bfloat16() for x in (call.q, call.do))
    k, v = (x[:, :1].bfloat16() for x in (call.k, call.v))
    one = sagesim.AttentionProblem(q=q, k=k, v=v, do=do, is_causal=True, enable_gqa=True)
    predicted, exact = error_budget(one, spec=spec).error, sagesim.exact(one)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = attention(*leaves, spec=spec, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(o, leaves, do)
    for name, x in zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=True):
        e = getattr(exact, name)
        measured = float((x.double() - e).norm() / e.norm())
        # The budget is of results that are not rounded to the inputs' dtype.
        rounding = float((e.to(x.dtype).double() - e).norm() / e.norm())
        expected = math.hypot(predicted[name], rounding)
        print(f"{label} {name}: measured {measured:.5f}, predicted {expected:.5f}")
        assert measured == pytest.approx(expected, rel=WITHIN), name


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("layout", ["dense", "padded", "packed"])
def test_gradient_checkpointing_repeats_the_bits(layout, use_reentrant):
    given, model = inputs(layout), smollm2(layers=3)
    expected = gradients(model, given, "factored")
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    actual = gradients(model, given, "factored")
    for name in expected:
        assert_bitwise(actual=actual[name], expected=expected[name], what=name)


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_torch_compile_makes_one_graph(layout):
    given, model = inputs(layout), smollm2(layers=2)
    given["use_cache"] = True  # else the mask function reads the positions, which breaks the graph
    exact_model = copy.deepcopy(model).double()
    exact = gradients(exact_model, given | {"use_cache": False}, "sdpa")
    expected = gradients(model, given, "factored_qk")
    torch._dynamo.reset()
    model.compile(fullgraph=True)
    actual = gradients(model, given, "factored_qk")
    assert_gradients_as_accurate(actual, exact, expected)


def test_cached_decoding():
    """With padding on the left; each logit is that of the whole sequence."""
    model = smollm2(layers=4)
    ids = inputs("dense")["input_ids"].view(2, -1)
    mask = torch.ones_like(ids)
    mask[0, :300] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ends = (900, 1000, 1001, 1002)

    def logits(model: Any, name: str) -> Tensor:
        model.set_attn_implementation(name)
        cache, start, parts = None, 0, []
        for end in ends:
            out = model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                past_key_values=cache,
                use_cache=True,
            )
            cache, start = out.past_key_values, end
            parts.append(out.logits)
        return torch.cat(parts, 1)[mask[:, : ends[-1]].bool()]

    with torch.no_grad():
        exact = logits(copy.deepcopy(model).double(), "sdpa")
        yardstick = logits(copy.deepcopy(model).bfloat16(), "sdpa")
        register("factored_qk", spec=sagesim.FPA_BF16)
        actual = logits(model.bfloat16(), "factored_qk")
    assert_within_budget(
        actual=actual, exact=exact, yardstick=yardstick, factor=1.5, band=0.0, what="logits"
    )


def draw(n_k: int = TOKENS) -> tuple[Tensor, ...]:
    """q, k, v and do [1, heads, tokens, 64] of bfloat16."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((HEADS, TOKENS), (KV_HEADS, n_k), (KV_HEADS, n_k), (HEADS, TOKENS))
    drawn = [torch.randn(1, *s, HEAD, generator=generator, device="cuda") for s in shapes]
    return tuple(x.bfloat16() for x in drawn)


def with_gradients(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    *leaves, do = (x.detach().requires_grad_() for x in tensors)
    o = function(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do.detach())]


def assert_as_accurate(actual: list[Tensor], yardstick: list[Tensor], wanted: list[Tensor]) -> None:
    for name, a, y, e in zip(("o", "dq", "dk", "dv"), actual, yardstick, wanted, strict=True):
        assert_within_budget(actual=a, exact=e, yardstick=y, factor=1.1, band=2.0**-9, what=name)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("label", ["factored_qk", "sagebwd"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_sdpa_of_pytorch_inside_the_context(is_causal, label, is_compiled):
    tensors, spec = draw(), sagesim.AttentionSpec.parse(label)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    with sdpa_kernel(SDPBackend.MATH):
        exact = with_gradients(sdpa, *(x.double() for x in tensors))
    plain = with_gradients(sdpa, *tensors)
    own = with_gradients(
        lambda *x: attention(*x, spec=spec, is_causal=is_causal, enable_gqa=True), *tensors
    )
    torch._dynamo.reset()
    with flash_attention(spec):
        actual = with_gradients(torch.compile(sdpa) if is_compiled else sdpa, *tensors)
    assert_bitwise(actual=actual[0], expected=own[0], what="o")
    assert_as_accurate(actual, own, exact)
    assert not torch.equal(actual[0], plain[0])
    after = with_gradients(sdpa, *tensors)
    assert_bitwise(actual=after[0], expected=plain[0], what="o after the context")


def test_varlen_attn_of_pytorch_inside_the_context():
    from torch.nn.attention.varlen import varlen_attn

    q, k, v, do = (x[0].transpose(0, 1).contiguous() for x in draw())
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    cu = torch.tensor([0, 700, TOKENS], dtype=torch.int32, device="cuda")
    spec = sagesim.SAGEBWD
    causal = (
        {"is_causal": True}
        if "is_causal" in inspect.signature(varlen_attn).parameters
        else {"window_size": (-1, 0)}
    )

    def flash(attend: Functions) -> Callable[..., Tensor]:
        longest = TOKENS - 700
        return lambda *x: attend.flash_attn_varlen_func(*x, cu, cu, longest, longest, causal=True)

    exact_functions = Functions(sagesim.FPA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "uses_kernels", lambda q: False)
        exact = with_gradients(flash(exact_functions), *(x.double() for x in (q, k, v, do)))
    own = with_gradients(flash(Functions(spec)), q, k, v, do)
    with flash_attention(spec):
        actual = with_gradients(
            lambda *x: varlen_attn(*x, cu, cu, TOKENS - 700, TOKENS - 700, **causal), q, k, v, do
        )
    assert_bitwise(actual=actual[0], expected=own[0], what="o")
    assert_as_accurate(actual, own, exact)


def test_calls_that_flash_attention_does_not_take_raise_inside_the_context():
    q, k, v, _ = draw()
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="cuda")
    with flash_attention(), pytest.raises(RuntimeError, match="No available kernel"):
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_diffusers(is_compiled, monkeypatch):
    """Flux, with images of 1920 tokens and texts of 128."""
    pytest.importorskip("diffusers")
    from sagesim_kernels.integrations import diffusers
    from tests.sagesim_kernels.integrations.flux import flux, results
    from tests.sagesim_kernels.integrations.opaque_emulator import emulate

    sizes = {"image": TOKENS - 128, "text": 128}

    def run(model):
        """A compiled model rounds in other places, so both are compiled or neither is."""
        if is_compiled:
            torch._dynamo.reset()
            model.compile()
        return results(model, **sizes)

    torch.manual_seed(0)
    model = flux(attention_head_dim=64, num_attention_heads=4, axes_dims_rope=[16, 24, 24])
    model = model.to("cuda")
    exact = results(copy.deepcopy(model).double(), **sizes)
    model = model.bfloat16()
    diffusers.register()
    try:
        diffusers.set_attention_backend(model)
        with monkeypatch.context() as patch:
            patch.setattr(attend, "uses_kernels", lambda q: False)
            patch.setattr(attend, "_emulate", emulate)
            emulated = run(copy.deepcopy(model))
        actual = run(model)
    finally:
        diffusers.unregister()
    assert_gradients_as_accurate(actual, exact, emulated)
