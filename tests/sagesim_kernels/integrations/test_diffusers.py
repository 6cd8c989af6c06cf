"""The backend "sagebwd" of diffusers: in one model, with gradients, never of all models."""

import inspect
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    ContextParallelConfig,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    UNet2DConditionModel,
)
from diffusers.models._modeling_parallel import ParallelConfig
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    attention_backend,
    dispatch_attention_fn,
)
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

import sagesim
from sagesim_kernels.integrations.diffusers import register, set_attention_backend, unregister
from sagesim_kernels.integrations.torch import apply
from tests.sagesim_kernels.integrations.flux import flux, results, run
from tests.support.assertions import assert_bitwise, assert_within_budget


@pytest.fixture(autouse=True)
def registered():
    register("exact", spec=sagesim.FPA)
    register()
    yield
    unregister("exact")
    unregister()


def test_flux_trains_with_the_gradients_of_sdpa():
    exact, yardstick = results(flux().double()), results(flux())
    model = flux()
    set_attention_backend(model, "exact")
    actual = results(model)
    for name in exact:
        assert_within_budget(
            actual=actual[name],
            exact=exact[name],
            yardstick=yardstick[name],
            factor=4.0,
            band=2.0**-20,
            what=name,
        )


def test_it_is_the_emulated_sdpa_bit_by_bit_and_reset_undoes_it():
    with sagesim.emulate(sagesim.FACTORED_QK):
        emulated = results(flux())
    plain, model = results(flux()), flux()
    set_attention_backend(model)
    for expected in (emulated, plain):
        actual = results(model)
        for name in expected:
            assert_bitwise(actual=actual[name], expected=expected[name], what=name)
        model.reset_attention_backend()


def test_lora_of_a_pipeline_trains_its_adapters_alone(tmp_path):
    """Of diffusers' own pipeline, saved and loaded again: its file holds nothing of ours."""
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=flux(),
    )
    found = {}
    for backend in ("native", "sagebwd"):
        model = flux()
        torch.manual_seed(1)
        model.requires_grad_(False)
        # Of a rank alone, without alpha, the file does not say the scale.
        lora = LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_k", "to_v"])
        model.add_adapter(lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, which would hide the gradients of A
                torch.nn.init.normal_(parameter)
        emulated = sagesim.emulate(sagesim.FACTORED_QK) if backend == "native" else nullcontext()
        if backend == "sagebwd":
            set_attention_backend(model)
        with emulated:
            found[backend] = {n: x for n, x in results(model).items() if x is not None}
    assert found["sagebwd"].keys() == found["native"].keys()
    assert all("lora" in name for name in found["sagebwd"].keys() - {"out"})
    for name, expected in found["native"].items():
        assert_bitwise(actual=found["sagebwd"][name], expected=expected, what=name)

    layers = {n: x for n, x in model.state_dict().items() if "lora" in n}
    pipeline.save_lora_weights(tmp_path, get_peft_model_state_dict(model))
    saved = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    assert len(saved) == len(layers)
    assert not any("sagebwd" in name or "attention_backend" in name for name in saved)
    pipeline.load_lora_weights(tmp_path)
    set_attention_backend(pipeline.transformer)
    with torch.no_grad():
        again = run(pipeline.transformer)
    assert_bitwise(actual=again, expected=found["sagebwd"]["out"], what="out")


def test_other_models_keep_their_attention():
    before = _AttentionBackendRegistry.get_active_backend()
    set_attention_backend(flux())
    assert _AttentionBackendRegistry.get_active_backend() == before
    sizes = {"block_out_channels": (8,), "norm_num_groups": 2, "latent_channels": 2}
    vae = AutoencoderKL(**sizes)
    image = torch.randn(1, 3, 4, 4)
    with torch.no_grad():
        expected = vae(image).sample
        set_attention_backend(flux())
        assert_bitwise(actual=vae(image).sample, expected=expected, what="image")


def test_a_backend_of_what_is_no_model_of_diffusers():
    with pytest.raises(ValueError, match=r"no module of Linear has .*torch\.apply"):
        set_attention_backend(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"model is 'x'; it must be a torch\.nn\.Module"):
        set_attention_backend("x")
    with pytest.raises(TypeError, match="name is 5; it must be a str"):
        set_attention_backend(flux(), 5)


def unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32,),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=16,
        attention_head_dim=8,
    )


def test_a_model_without_backends_is_refused_and_apply_changes_it():
    before = _AttentionBackendRegistry._active_backend
    model = unet().eval()
    inputs = (torch.randn(1, 4, 8, 8), 1, torch.randn(1, 5, 16))
    with pytest.raises(ValueError, match=r"UNet2DConditionModel has .*torch\.apply\(model\)"):
        set_attention_backend(model)
    assert _AttentionBackendRegistry._active_backend == before
    with pytest.raises(ValueError, match="no module of AutoencoderKL has an attention backend"):
        set_attention_backend(AutoencoderKL(block_out_channels=(8,), norm_num_groups=2))
    with torch.no_grad():
        plain = model(*inputs).sample
        with sagesim.emulate(sagesim.FACTORED_QK):
            expected = model(*inputs).sample
        with apply(model):
            found = model(*inputs).sample
    assert_bitwise(actual=found, expected=expected, what="sample")
    assert not torch.equal(found, plain)


def test_becoming_the_backend_of_every_model_is_refused():
    before = _AttentionBackendRegistry._active_backend
    model = flux()
    try:
        model.set_attention_backend("sagebwd")  # diffusers' own, which is global
        with pytest.raises(ValueError, match="has become the backend of every model"):
            results(model)
    finally:
        _AttentionBackendRegistry.set_active_backend(before)
    x = torch.randn(1, 6, 2, 8)
    refused = pytest.raises(ValueError, match="and not attention_backend")
    with attention_backend("sagebwd"), refused:
        dispatch_attention_fn(x, x, x)


@pytest.fixture
def every_model():
    """sagebwd is the backend of every model."""
    before = _AttentionBackendRegistry._active_backend
    model = flux()
    model.set_attention_backend("sagebwd")
    yield model
    _AttentionBackendRegistry.set_active_backend(before)


def test_the_remedy_that_the_error_names_works(every_model):
    with pytest.raises(ValueError, match="has become the backend of every model"):
        run(every_model)
    set_attention_backend(every_model)
    with attention_backend("native"):
        expected = run(flux())
    assert_bitwise(actual=run(flux()), expected=expected, what="out")
    assert not torch.equal(run(every_model), expected)


def test_unregister_leaves_a_process_that_works(every_model):
    unregister()
    run(flux())
    register()
    every_model.set_attention_backend("sagebwd")
    register()
    with pytest.raises(ValueError, match="has become the backend of every model"):
        run(flux())


def test_the_backend_of_every_model_is_guarded_under_another_object_of_its_name():
    """A context of diffusers puts back a member that `unregister` has removed."""
    before = _AttentionBackendRegistry._active_backend
    member = AttentionBackendName("sagebwd")
    unregister()
    register()
    try:
        _AttentionBackendRegistry.set_active_backend(member)
        with pytest.raises(ValueError, match="has become the backend of every model"):
            run(flux())
    finally:
        _AttentionBackendRegistry.set_active_backend(before)


def call(**arguments: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 4, 8, generator=generator)
    k, v = torch.randn(2, 2, 6, 4, 8, generator=generator)
    named = set(inspect.signature(dispatch_attention_fn).parameters)
    attention_kwargs = {n: arguments.pop(n) for n in arguments.keys() - named}
    if arguments.get("enable_gqa"):
        k, v = k[:, :, :2], v[:, :, :2]
    backend = arguments.pop("backend", "exact")
    return dispatch_attention_fn(
        q, k, v, backend=backend, attention_kwargs=attention_kwargs, **arguments
    )


HONOURED = {
    "attn_mask": {"attn_mask": (torch.arange(6) < torch.tensor([[2], [5]]))[:, None, None]},
    "is_causal": {"is_causal": True},
    "scale": {"scale": 2.0},
    "enable_gqa": {"enable_gqa": True},
}


def test_a_mask_of_two_axes_is_of_the_batch_and_the_keys():
    mask = torch.arange(6) < torch.tensor([[2], [5]])
    found, expected = call(attn_mask=mask), call(attn_mask=mask[:, None, None])
    assert_bitwise(actual=found, expected=expected, what="o")


def test_windows_and_softcaps_are_those_of_flash_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 6, 4, 8, generator=generator).double()
    distance = torch.arange(6) - torch.arange(6)[:, None]
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    band = (distance >= -2) & (distance <= 1)
    for arguments, s in (
        ({"window_size": (2, 1)}, logits.masked_fill(~band, -torch.inf)),
        ({"window_size": [2, 1]}, logits.masked_fill(~band, -torch.inf)),
        ({"softcap": 0.5}, 0.5 * (logits / 0.5).tanh()),
    ):
        exact = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)
        actual = dispatch_attention_fn(
            *(x.float() for x in (q, k, v)), backend="exact", attention_kwargs=arguments
        )
        assert_within_budget(
            actual=actual,
            exact=exact,
            yardstick=exact.float(),
            factor=1.0,
            band=2.0**-20,
            what="o",
        )
    assert not torch.equal(call(window_size=(2, 1)), call())
    assert not torch.equal(call(softcap=0.5), call())


@pytest.mark.parametrize("window", [3, (1, 2, 3), None])
def test_a_window_is_a_pair(window):
    with pytest.raises(ValueError, match=rf"window_size is {re.escape(repr(window))}; it must be"):
        call(window_size=window)


@pytest.mark.parametrize("name", HONOURED)
def test_an_argument_is_honoured(name):
    actual, native = call(**HONOURED[name]), call(**HONOURED[name], backend="native")
    assert_within_budget(
        actual=actual,
        exact=native.double(),
        yardstick=native,
        factor=1.0,
        band=2.0**-20,
        what="o",
    )
    assert not torch.equal(actual, call())


REFUSED = {
    "dropout_p": 0.1,
    "return_lse": True,
    "return_attn_probs": True,
    "sinks": torch.zeros(4),
    "window_sise": (2, 1),  # no backend's
    "parallel_config": ParallelConfig(
        context_parallel_config=ContextParallelConfig(ring_degree=2, ulysses_degree=1)
    ),
}
"""tests/sagesim_kernels/integrations/test_two_processes.py honours another parallel_config."""


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_is_refused(name):
    message = "only Ulysses context parallelism" if name == "parallel_config" else name
    with pytest.raises(ValueError, match=message):
        call(**{name: REFUSED[name]})


KWARGS = {"window_size": (2, 1), "softcap": 0.5, "deterministic": True}
"""Arguments of `attention_kwargs` that are accepted."""


def test_every_argument_is_honoured_or_refused():
    """Those of all backends of diffusers."""
    known = set(inspect.signature(dispatch_attention_fn).parameters)
    for backend, names in _AttentionBackendRegistry._supported_arg_names.items():
        known |= set(names)
        assert backend.value in ("exact", "sagebwd") or names
    tensors, routes = {"query", "key", "value"}, {"backend", "attention_kwargs"}
    private = {"_parallel_config"}
    tables = HONOURED.keys() | KWARGS.keys() | REFUSED.keys()
    assert known <= tensors | routes | private | tables
    for name in known & KWARGS.keys():
        call(**{name: KWARGS[name]})


def test_deterministic_has_no_effect():
    assert_bitwise(actual=call(deterministic=True), expected=call(), what="o")


def test_an_argument_that_is_not_set_is_accepted():
    call(sinks=None, return_attn_probs=False)


MASKS = {
    "per query": torch.ones(2, 1, 6, 6, dtype=torch.bool),
    "per head": torch.ones(2, 4, 1, 6, dtype=torch.bool),
    "float": torch.zeros(2, 1, 1, 6),
}


@pytest.mark.parametrize("mask", MASKS)
def test_other_masks_are_refused(mask):
    with pytest.raises(ValueError, match="only a boolean mask of padded keys"):
        call(attn_mask=MASKS[mask])
    with pytest.raises(ValueError, match="attn_mask and is_causal"):
        call(**HONOURED["attn_mask"], is_causal=True)
    with pytest.raises(ValueError, match="attn_mask and window_size"):
        call(**HONOURED["attn_mask"], window_size=(2, 1))


def test_the_causal_mask_is_aligned_at_the_first_key():
    q, k, v = torch.randn(3, 1, 6, 2, 8, generator=torch.Generator().manual_seed(0))
    found = {
        backend: dispatch_attention_fn(q[:, :4], k, v, is_causal=True, backend=backend)
        for backend in ("native", "exact")
    }
    assert_within_budget(
        actual=found["exact"],
        exact=found["native"].double(),
        yardstick=found["native"],
        factor=1.0,
        band=2.0**-20,
        what="o",
    )


def test_heads_are_not_grouped_unasked():
    x = torch.randn(1, 6, 4, 8)
    with pytest.raises(ValueError, match="query has 4 heads and key 2; enable_gqa is False"):
        dispatch_attention_fn(x, x[:, :, :2], x[:, :, :2], backend="exact")


def test_unregister_puts_back_what_was():
    tables = ("_backends", "_constraints", "_supported_arg_names")

    def state() -> Any:
        return (
            [list(getattr(_AttentionBackendRegistry, table)) for table in tables],
            set(_AttentionBackendRegistry._supports_context_parallel),
            list(AttentionBackendName),
            dict(AttentionBackendName.__members__),
        )

    before = state()
    register("another")
    assert AttentionBackendName("another") in _AttentionBackendRegistry.list_backends()
    unregister("another")
    assert state() == before


def test_names_are_checked():
    with pytest.raises(ValueError, match="'native' is another backend of diffusers"):
        register("native")
    with pytest.raises(ValueError, match="converts names to lower case"):
        register("SageBwd")
    with pytest.raises(ValueError, match="'native' is not registered by sagesim_kernels"):
        unregister("native")
    with pytest.raises(ValueError, match="name is ''; it must not be empty"):
        register("")
    with pytest.raises(TypeError, match="name is 3; it must be a str"):
        register(3)
    with pytest.raises(TypeError, match="not an AttentionSpec"):
        register(spec="sagebwd")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_flux_compiles():
    torch._dynamo.reset()
    model = flux()
    set_attention_backend(model, "exact")
    expected = results(model)["out"]
    model.compile(backend="eager")
    assert_within_budget(
        actual=results(model)["out"],
        exact=results(flux().double())["out"],
        yardstick=expected,
        factor=4.0,
        band=2.0**-20,
        what="out",
    )
