"""Functions with other libraries' signatures, and attention of chosen modules."""

import copy
import inspect
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sagesim
from sagesim_kernels.integrations import attend
from sagesim_kernels.integrations.torch import Functions, apply, remove
from tests.support.assertions import assert_bitwise, assert_within_budget

EXACT = Functions(sagesim.FPA)

FLASH = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
OURS = "s_aux=None"
SIGNATURES = {
    "sdpa": re.search(
        r"scaled_dot_product_attention\((.*?)\)", F.scaled_dot_product_attention.__doc__, re.S
    ).group(1),
    "flash_attn_func": f"q, k, v, {FLASH}, {OURS}",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"{FLASH}, block_table=None, {OURS}",
}
"""SDPA's of the installed PyTorch; FlashAttention's of flash-attn 2.8.3, and sinks at the end."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_libraries(name):
    """Names, order and defaults; SDPA's is read from its documentation."""
    found = inspect.signature(getattr(EXACT, name)).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in found]
    written = re.sub(r": *[A-Za-z.]+( *\| *None)?", "", SIGNATURES[name])
    expected = inspect.signature(eval(f"lambda {' '.join(written.split())}: 0"))
    assert [(p.name, p.default) for p in plain] == [
        (p.name, p.default) for p in expected.parameters.values() if p.name != "*"
    ]


def draw(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [..., heads, n, d]: two heads of q for each of k and v."""
    generator = torch.Generator().manual_seed(seed)
    *batch, heads, n, d = shape
    sizes = [(*batch, h, n, d) for h in (heads, heads // 2, heads // 2)]
    return tuple(torch.randn(size, generator=generator) for size in sizes)


def with_gradients(function: Callable[..., Tensor], leaves: Any) -> list[Tensor]:
    """The output and the gradients of its weighted sum."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    o = function(*leaves)
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(9))
    return [o.detach(), *torch.autograd.grad(o, leaves, weights.to(o.dtype))]


def assert_equals(actual: list[Tensor], sdpa: Callable[..., Tensor], leaves: Any) -> None:
    """Assert that the results are SDPA's up to float32 rounding."""
    exact = with_gradients(sdpa, [x.double() for x in leaves])
    yardstick = with_gradients(sdpa, leaves)
    for name, *found in zip(("o", "dq", "dk", "dv"), actual, exact, yardstick, strict=True):
        a, e, y = found
        assert_within_budget(actual=a, exact=e, yardstick=y, factor=4.0, band=2.0**-20, what=name)


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.5},
    "padded keys": {"attn_mask": torch.arange(9) > torch.tensor([2, 5]).view(2, 1, 1, 1)},
    "one mask": {"attn_mask": torch.arange(9)[None] > 3},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", [(2, 4, 9, 8), (4, 9, 8), (3, 2, 4, 9, 8)])
def test_sdpa(call, shape):
    options = CALLS[call]
    if call == "padded keys" and shape[0] != 2:
        pytest.skip("this mask has two sequences")
    leaves = draw(*shape)
    actual = with_gradients(lambda *x: EXACT.sdpa(*x, enable_gqa=True, **options), leaves)
    assert_equals(actual, lambda *x: sdpa(*x, **options), leaves)


def test_autocast_gives_q_k_and_v_one_dtype():
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = EXACT.sdpa(q, k, v.bfloat16())
    wanted = EXACT.sdpa(*(x.bfloat16() for x in (q, k, v)))
    assert_bitwise(actual=found, expected=wanted, what="o")


def test_sdpa_aligns_its_causal_mask_at_the_first_key():
    q, k, v = draw(2, 4, 9, 8)
    leaves = (q[:, :, :5], k, v)
    actual = with_gradients(lambda *x: EXACT.sdpa(*x, enable_gqa=True, is_causal=True), leaves)
    assert_equals(actual, lambda *x: sdpa(*x, is_causal=True), leaves)


def lower_right(n_q: int, n_k: int, left: int = -1, right: int = 0) -> Tensor:
    offset = torch.arange(n_k) - torch.arange(n_q)[:, None] - (n_k - n_q)
    near = torch.ones_like(offset, dtype=torch.bool)
    if left >= 0:
        near &= offset >= -left
    return near & (offset <= right) if right >= 0 else near


FLASHES = {
    "plain": ({}, (-1, -1)),
    "causal": ({"causal": True}, (-1, 0)),
    "window": ({"window_size": (2, 1)}, (2, 1)),
    "causal window": ({"causal": True, "window_size": (2, 3)}, (2, 0)),
}


@pytest.mark.parametrize("call", FLASHES)
def test_flash_attn_func(call):
    """Tokens before heads, grouped heads, and masks aligned at the last key."""
    options, window = FLASHES[call]
    q, k, v = (x.transpose(1, 2) for x in draw(2, 4, 9, 8))
    leaves = (q[:, :5], k, v)
    mask = lower_right(5, 9, *window)

    def reference(*x: Tensor) -> Tensor:
        return sdpa(*(y.transpose(1, 2) for y in x), attn_mask=mask).transpose(1, 2)

    actual = with_gradients(lambda *x: EXACT.flash_attn_func(*x, **options), leaves)
    assert_equals(actual, reference, leaves)


@pytest.mark.parametrize("call", FLASHES)
def test_flash_attn_varlen_func(call):
    options, window = FLASHES[call]
    q, k, v = (x.transpose(0, 1) for x in draw(4, 12, 8))
    leaves = (q[:9], k, v)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 9], [0, 5, 12]))

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for i in range(2):
            queries, keys = (slice(*cu[i : i + 2].tolist()) for cu in (cu_q, cu_k))
            part = [x.transpose(0, 1) for x in (q[queries], k[keys], v[keys])]
            mask = lower_right(part[0].shape[1], part[1].shape[1], *window)
            parts.append(sdpa(*(x[None] for x in part), attn_mask=mask)[0].transpose(0, 1))
        return torch.cat(parts)

    def run(*x: Tensor) -> Tensor:
        return EXACT.flash_attn_varlen_func(*x, cu_q, cu_k, 6, 7, **options)

    assert_equals(with_gradients(run, leaves), reference, leaves)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax_scale": ({"softmax_scale": 0.7}, {"scale": 0.7}),
    "causal": ({"causal": True}, {"mask": lower_right(9, 9)}),
    "window_size": ({"window_size": (2, 1)}, {"mask": lower_right(9, 9, 2, 1)}),
    "softcap": ({"softcap": 0.5}, {"cap": 0.5}),
    "deterministic": ({"deterministic": True}, {}),  # what it always is
    "s_aux": ({"s_aux": SINKS}, {"sinks": SINKS}),
}
"""Each option that is honoured, and the same for `attention_of`."""


def attention_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float = 8**-0.5,
    mask: Tensor | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """In plain PyTorch: [heads, tokens, d]. A sink is a key more, with a logit and no value."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    logits = q @ k.mT * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.to(q.dtype).view(-1, 1, 1).expand(-1, q.shape[1], 1)
        logits = torch.cat([logits, column], -1)
    return logits.softmax(-1)[..., : k.shape[1]] @ v


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_an_option_is_honoured(name, option):
    given, meaning = OPTIONS[option]
    assert option in HONOURED[name]
    cu = torch.tensor([0, 9], dtype=torch.int32)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens_first = [x.transpose(0, 1) for x in (q, k, v)]
        if name == "flash_attn_func":
            o = EXACT.flash_attn_func(*(x[None] for x in tokens_first), **given)[0]
        else:
            o = EXACT.flash_attn_varlen_func(*tokens_first, cu, cu, 9, 9, **given)
        return o.transpose(0, 1)

    leaves = draw(4, 9, 8)
    assert_equals(with_gradients(run, leaves), lambda *x: attention_of(*x, **meaning), leaves)


def test_sinks_have_gradients():
    def run(q: Tensor, sinks: Tensor) -> Tensor:
        x = q.transpose(0, 1)[None]
        return EXACT.flash_attn_func(x, x, x, s_aux=sinks)[0].transpose(0, 1)

    def reference(q: Tensor, sinks: Tensor) -> Tensor:
        return attention_of(q, q, q, sinks=sinks)

    leaves = (draw(4, 9, 8)[0], SINKS)
    actual, yardstick = with_gradients(run, leaves), with_gradients(reference, leaves)
    exact = with_gradients(reference, [x.double() for x in leaves])
    for name, *found in zip(("o", "dq", "ds"), actual, exact, yardstick, strict=True):
        a, e, y = found
        assert_within_budget(actual=a, exact=e, yardstick=y, factor=4.0, band=2.0**-20, what=name)


REFUSED: dict[str, dict[str, Any]] = {
    "sdpa": {"dropout_p": 0.1, "attn_mask": torch.zeros(9, 9)},
    "flash_attn_func": {
        "dropout_p": 0.1,
        "alibi_slopes": torch.ones(2),
        "return_attn_probs": True,
    },
}
REFUSED["flash_attn_varlen_func"] = REFUSED["flash_attn_func"] | {"block_table": torch.zeros(1)}
HONOURED = {
    "sdpa": {"is_causal", "scale", "enable_gqa", "attn_mask"},
    "flash_attn_func": {
        "softmax_scale",
        "causal",
        "window_size",
        "softcap",
        "deterministic",
        "s_aux",
    },
}
HONOURED["flash_attn_varlen_func"] = HONOURED["flash_attn_func"]


@pytest.mark.parametrize("name", REFUSED)
def test_every_option_is_honoured_or_refused(name):
    parameters = inspect.signature(getattr(EXACT, name)).parameters.values()
    options = {p.name for p in parameters if p.default is not p.empty}
    assert options == HONOURED[name] | REFUSED[name].keys()
    if name != "sdpa":  # whose options are in CALLS
        assert HONOURED[name] == OPTIONS.keys()


@pytest.mark.parametrize(
    "name, argument", [(name, x) for name, arguments in REFUSED.items() for x in arguments]
)
def test_an_option_is_refused_by_name(name, argument):
    q, k, v = draw(1, 2, 9, 8)
    cu = torch.tensor([0, 9], dtype=torch.int32)
    tensors = {
        "sdpa": (q, q, q),
        "flash_attn_func": (q, k, v),
        "flash_attn_varlen_func": (*(x[0].transpose(0, 1) for x in (q, k, v)), cu, cu, 9, 9),
    }[name]
    with pytest.raises(ValueError, match=argument):
        getattr(EXACT, name)(*tensors, **{argument: REFUSED[name][argument]})


@pytest.mark.parametrize("window", [3, (1, 2, 3), None])
def test_a_window_is_a_pair(window):
    q, k, v = draw(1, 2, 9, 8)
    with pytest.raises(ValueError, match=rf"window_size is {re.escape(repr(window))}; it must be"):
        EXACT.flash_attn_func(q, k, v, window_size=window)


def packed(*longest: object, cu: tuple[int, ...] = (0, 10, 40)) -> Tensor:
    q = torch.randn(40, 2, 32)
    starts = torch.tensor(cu)
    return EXACT.flash_attn_varlen_func(q, q, q, starts, starts, *longest)


@pytest.mark.parametrize("longest", [30.9, "30", True, None, float("nan"), torch.tensor(30.0)])
def test_bounds_on_lengths_are_integers(longest):
    for given in ((longest, 30), (30, longest)):
        with pytest.raises(TypeError, match=r"max_seqlen_[qk] is .*; it must be an integer"):
            packed(*given)
    assert packed(torch.tensor(30), torch.tensor([30], dtype=torch.int32)).shape == (40, 2, 32)


def test_starts_beyond_int32_are_refused():
    with pytest.raises(ValueError, match=r"int32 does not hold: \[0, 4294967306, 8589934632\]"):
        packed(30, 30, cu=(0, 2**32 + 10, 2**33 + 40))


@pytest.mark.parametrize("softcap", [False, "", [], torch.tensor(0.0)])
def test_only_the_number_0_is_no_softcap(softcap):
    q = torch.randn(1, 8, 2, 16)
    assert_bitwise(
        actual=EXACT.flash_attn_func(q, q, q, softcap=0),
        expected=EXACT.flash_attn_func(q, q, q),
        what="o",
    )
    with pytest.raises(TypeError, match="softcap"):
        EXACT.flash_attn_func(q, q, q, softcap=softcap)


def test_masks_of_other_types_and_devices():
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(TypeError, match=r"attn_mask is a builtins\.list"):
        EXACT.sdpa(q, q, q, attn_mask=[True])
    with pytest.raises(ValueError, match="attn_mask is on meta, q on cpu"):
        EXACT.sdpa(q, q, q, attn_mask=torch.ones(8, dtype=torch.bool, device="meta"))


def test_sdpa_refuses_what_sdpa_refuses():
    q, k, v = draw(1, 4, 9, 8)
    with pytest.raises(ValueError, match="enable_gqa=True repeats k's heads"):
        EXACT.sdpa(q, k, v)
    with pytest.raises(ValueError, match="attn_mask and is_causal=True"):
        EXACT.sdpa(q, q, q, attn_mask=torch.ones(9, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match="only a boolean mask of padded keys"):
        EXACT.sdpa(q, q, q, attn_mask=torch.ones(9, 9, dtype=torch.bool))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(
            2
        )


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention(), nn.Linear(16, 16))


def run(model: Callable[[Tensor], Tensor], parameters: Any) -> list[Tensor]:
    x = torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
    o = model(x)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), [x, *parameters])]


def backward(model: nn.Module, forward: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """As `run`, by backward(): a reentrant checkpoint supports that alone.

    forward: computes the output, if not the model itself.
    """
    x = torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
    o = (forward or model)(x)
    o.square().sum().backward()
    return [o.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise(actual=a, expected=e, what=f"result {i}")


def emulated(layers: Any = None) -> list[Tensor]:
    model = stack()
    with sagesim.emulate(sagesim.FPA if layers else sagesim.SAGEBWD, layers=layers):
        return run(model, list(model.parameters()))


def test_apply_is_emulate_of_the_whole_model():
    model = stack()
    apply(model, sagesim.SAGEBWD)
    assert_same(run(model, list(model.parameters())), emulated())


def test_apply_changes_the_chosen_modules_alone_and_remove_puts_back():
    model = stack()
    plain = run(model, list(model.parameters()))
    state, names = model.state_dict().keys(), [n for n, _ in model.named_modules()]
    applied = apply(model, sagesim.FPA, lambda name, module: name == "0")
    other = apply(model, sagesim.SAGEBWD, lambda name, module: name == "1")
    assert_same(run(model, list(model.parameters())), emulated({"1": sagesim.SAGEBWD}))
    assert (model.state_dict().keys(), [n for n, _ in model.named_modules()]) == (state, names)
    applied.remove()
    other.remove()
    assert_same(run(model, list(model.parameters())), plain)
    with apply(model, sagesim.SAGEBWD):
        pass
    assert_same(run(model, list(model.parameters())), plain)


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize("make", [copied, saved_and_loaded])


@COPIES
def test_a_copy_computes_with_its_own_weights(make):
    """Its gradients are its own too."""
    model = stack()
    apply(model, sagesim.SAGEBWD)
    other = make(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(backward(other), emulated())
    assert all(parameter.grad is None for parameter in model.parameters())


@COPIES
def test_a_copy_and_its_original_are_put_back_apart(make):
    model = stack()
    plain = run(model, list(model.parameters()))
    applied = apply(model, sagesim.SAGEBWD)
    other = make(model)
    applied.remove()
    assert_same(run(model, list(model.parameters())), plain)
    assert_same(run(other, list(other.parameters())), emulated())
    for _ in range(2):
        remove(other)
        assert_same(run(other, list(other.parameters())), plain)


def test_apply_keeps_the_signature_of_a_forward():
    """Trainer of transformers chooses the columns of a data set by it."""
    model = stack()
    expected = inspect.signature(model[0].forward)
    apply(model, filter=lambda name, module: name == "0")
    assert inspect.signature(model[0].forward) == expected


class Checkpointed(nn.Module):
    """A model that computes its blocks again in the backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.use_reentrant = stack(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_blocks_of_a_chosen_model_may_be_checkpointed(use_reentrant):
    """A block is computed again outside the forward of the chosen model."""
    model = Checkpointed(use_reentrant)
    apply(model, sagesim.SAGEBWD)
    assert_same(backward(model), emulated())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo, after a graph break
def test_compiling_a_checkpoint_to_one_graph_is_refused_with_a_hint(monkeypatch):
    monkeypatch.setattr(attend, "uses_kernels", lambda q: True)
    torch._dynamo.reset()
    model = Checkpointed(use_reentrant=False)
    apply(model, sagesim.FACTORED)
    expected = backward(model)
    model.zero_grad()
    assert_same(backward(torch.compile(model, backend="aot_eager")), expected)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="compile without fullgraph, or choose the checkpointed"):
        whole(torch.randn(2, 12, 16, requires_grad=True))
    remove(model)
    model.zero_grad()
    apply(model, sagesim.FACTORED, lambda name, module: isinstance(module, Attention))
    for block in model.blocks[:2]:
        block.compile(backend="aot_eager", fullgraph=True)
    assert_same(backward(model), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_apply_survives_checkpointing(use_reentrant):
    model = stack()
    apply(model, sagesim.SAGEBWD)
    actual = backward(model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant))
    assert_same(actual, emulated())


@pytest.mark.slow
def test_apply_compiles_to_one_graph(monkeypatch):
    """With the kernels; the emulator breaks the graph."""
    monkeypatch.setattr(attend, "uses_kernels", lambda q: True)
    torch._dynamo.reset()
    model = stack()
    apply(model, sagesim.FACTORED)
    expected = run(model, list(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(run(compiled, list(model.parameters())), expected)


def test_apply_refuses_modules_without_sdpa():
    model = stack()
    with pytest.raises(ValueError, match=r"chooses none of the 6 modules: '', '0', '0.qkv'"):
        apply(model, filter=lambda name, module: False)
    apply(model, filter=lambda name, module: name == "2")
    with pytest.raises(RuntimeError, match="was not called in 2"):
        model(torch.randn(1, 3, 16))
    with pytest.raises(ValueError, match="the forward of '2' is already replaced"):
        apply(model, filter=lambda name, module: name == "2")


def test_apply_refuses_multihead_attention():
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    apply(layer)
    x = torch.randn(1, 3, 16)
    with pytest.raises(ValueError, match=r"contains nn.MultiheadAttention"):
        layer(x, x, x, need_weights=False)
