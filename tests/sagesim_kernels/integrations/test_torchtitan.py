"""torchtitan's models compute their attention by the override, document by document."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sagesim
from tests.support.assertions import assert_bitwise, assert_within_budget

INSTALLED = Path(__file__).parents[3] / ".venv" / ".torchtitan"
"""Without its dependencies, which need older versions of what other frameworks need."""
SAGEBWD = "sagesim_kernels.integrations.torchtitan.sagebwd"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def installed():
    if not INSTALLED.exists():
        pytest.skip("torchtitan is not installed: make .venv/.torchtitan")
    sys.path.append(str(INSTALLED))
    yield
    sys.path.remove(str(INSTALLED))


def overridden(*targets: Any, **changes: Any) -> Any:
    """The configuration of torchtitan's small Llama after overrides."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.llama3 import model_registry

    config = model_registry("debugmodel", attn_backend="varlen").model
    config.layers = config.layers[:2]
    for layer in config.layers:
        for name, value in changes.items():
            setattr(layer.attention.inner_attention, name, value)
    apply_overrides(OverrideConfig(imports=list(targets)), config)
    return config


def attention(label: str, **changes: Any) -> Any:
    return overridden((SAGEBWD, {"spec": label}), **changes).layers[0].attention.inner_attention


def documents(positions: Tensor) -> Any:
    from torchtitan.models.common.attention import create_varlen_metadata_for_document

    return create_varlen_metadata_for_document(positions)


POSITIONS = torch.tensor([[*range(5), *range(9)], [*range(11), *range(3)]])
N = POSITIONS.shape[1]


def draw() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, N, heads, 16, generator=generator) for heads in (4, 2, 2)]


def with_gradients(function: Any, leaves: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    o = function(*leaves)
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).to(o.dtype)
    return [o.detach(), *torch.autograd.grad(o, leaves, weights)]


@pytest.mark.parametrize("window, reach", [((-1, 0), (N, 0)), ((-1, -1), (N, N)), ((2, 0), (2, 0))])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_it_is_attention_inside_each_document(window, reach, scale):
    starts = (POSITIONS == 0).cumsum(1)
    back = torch.arange(N)[:, None] - torch.arange(N)
    mask = (back <= reach[0]) & (-back <= reach[1])
    mask = mask & (starts[:, :, None] == starts[:, None])

    def reference(*qkv: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in qkv)
        return F.scaled_dot_product_attention(
            *heads_first, attn_mask=mask[:, None], scale=scale, enable_gqa=True
        ).transpose(1, 2)

    module = attention("fpa", window_size=window).build()
    masks = documents(POSITIONS)

    def run(*qkv: Tensor) -> Tensor:
        return module(*qkv, attention_masks=masks, scale=scale, enable_gqa=True)

    actual = with_gradients(run, draw())
    exact = with_gradients(reference, [x.double() for x in draw()])
    yardstick = with_gradients(reference, draw())
    for name, *found in zip(("o", "dq", "dk", "dv"), actual, exact, yardstick, strict=True):
        a, e, y = found
        assert_within_budget(actual=a, exact=e, yardstick=y, factor=4.0, band=2.0**-20, what=name)


def test_a_model_trains_and_a_document_sees_no_other():
    torch.manual_seed(0)
    model = overridden(SAGEBWD).build()
    model.init_states()
    tokens = torch.randint(2048, (1, N))
    positions = POSITIONS[:1]
    both = model(tokens, positions, documents(positions))
    alone = [
        model(part, place, documents(place))
        for part, place in zip(tokens.split([5, 9], 1), positions.split([5, 9], 1), strict=True)
    ]
    assert_bitwise(actual=both, expected=torch.cat(alone, 1), what="logits")
    F.cross_entropy(both.flatten(0, 1), tokens.flatten().roll(-1)).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_the_spec_is_that_of_the_override():
    calls = {}
    for label in ("fpa", "factored", "sagebwd"):
        module = attention(label).build()
        calls[label] = with_gradients(
            lambda *qkv, module=module: module(
                *qkv, attention_masks=documents(POSITIONS), enable_gqa=True
            ),
            draw(),
        )
    q, k, v = (x[0, :5].transpose(0, 1) for x in draw())
    expected = sagesim.attention(q, k, v, spec=sagesim.SAGEBWD, is_causal=True, enable_gqa=True)
    first = calls["sagebwd"][0][0, :5].transpose(0, 1)
    assert_bitwise(actual=first, expected=expected, what="the first document")
    assert not torch.equal(calls["fpa"][1], calls["factored"][1])
    assert overridden(SAGEBWD).layers[0].attention.inner_attention.spec == "factored_qk"
    with pytest.raises(ValueError, match="no_such_spec"):
        attention("no_such_spec")


def test_every_argument_is_honoured_or_refused():
    """Those of the module that it replaces; the first test gives the others values."""
    import inspect

    from torchtitan.models.common.attention import VarlenAttention

    module = attention("fpa").build()
    ours = inspect.signature(type(module).forward).parameters
    theirs = inspect.signature(VarlenAttention.forward).parameters
    assert ours.keys() - {"enable_gqa"} == theirs.keys() - {"kwargs"}
    q, k, v = draw()
    masks = documents(POSITIONS)
    with pytest.raises(ValueError, match="out_transform is given"):
        module(q, k, v, attention_masks=masks, enable_gqa=True, out_transform=torch.add)
    with pytest.raises(TypeError, match="attention_masks is a Tensor"):
        module(q, k, v, attention_masks=POSITIONS, enable_gqa=True)
    with pytest.raises(ValueError, match="q has 4 heads and k 2; enable_gqa is False"):
        module(q, k, v, attention_masks=masks)
    with pytest.raises(TypeError, match="score_mod"):
        module(q, k, v, attention_masks=masks, enable_gqa=True, score_mod=None)


def test_building_it_activates_no_flash_attention(monkeypatch):
    from torchtitan.models.common import attention as stock

    calls: list[str] = []
    monkeypatch.setattr(stock, "activate_flash_attention_impl", calls.append)
    monkeypatch.setattr("torchtitan.tools.utils.get_cuda_flash_attention_impl", lambda: "FA3")
    attention("fpa").build()
    assert calls == []
    stock.VarlenAttention(stock.VarlenAttention.Config())
    assert calls == ["FA3"]
