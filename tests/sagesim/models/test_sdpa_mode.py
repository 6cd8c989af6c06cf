import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

from sagesim.models.sdpa_mode import SdpaCall, sdpa_calls
from tests.support.assertions import assert_bitwise


class Attend(nn.Module):
    """Self-attention of [n, 8] in two heads, `times` times over."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.qkv, self.times = nn.Linear(8, 24), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            q, k, v = self.qkv(x).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
            x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x


class Checkpointed(nn.Module):
    """Its blocks one after the other, made again in the backward."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Seen:
    """An answer that lets every call through and keeps where it was made."""

    def __init__(self) -> None:
        self.calls: list[SdpaCall] = []

    def __call__(self, call, run) -> Tensor:
        self.calls.append(call)
        return run()

    @property
    def places(self) -> list[tuple[int | None, str]]:
        return [(call.index, call.name) for call in self.calls]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_arguments_are_bound_by_position_and_by_name():
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    mask = torch.ones(5, 5, dtype=torch.bool)
    seen = Seen()
    with sdpa_calls(seen):
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale=0.5)
        F.scaled_dot_product_attention(
            value=v, key=k, query=q, is_causal=True, dropout_p=0.25, enable_gqa=True
        )
        torch.ops.aten.scaled_dot_product_attention(q, k, v, mask)
        torch.ops.aten.scaled_dot_product_attention.default(q, k, v, scale=2.0)
    found = [
        (c.attn_mask is mask, c.dropout_p, c.is_causal, c.scale, c.enable_gqa) for c in seen.calls
    ]
    assert all(c.q is q and c.k is k and c.v is v for c in seen.calls)
    assert found == [
        (False, 0.0, False, None, False),
        (True, 0.0, False, 0.5, False),
        (False, 0.25, True, None, True),
        (True, 0.0, False, None, False),
        (False, 0.0, False, 2.0, False),
    ]


def test_unknown_arguments_are_refused():
    q = torch.randn(1, 2, 5, 4)
    with sdpa_calls(Seen()), pytest.raises(TypeError, match="softcap"):
        F.scaled_dot_product_attention(q, q, q, softcap=30.0)


def test_the_answer_is_the_result_and_run_makes_the_call():
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_calls(lambda call, run: run()):
        through = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_calls(lambda call, run: call.v):
        replaced = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_bitwise(actual=through, expected=expected, what="o")
    assert replaced is v


def test_a_later_forward_makes_the_same_calls(x):
    net = nn.Sequential(Attend(), nn.Sequential(nn.ReLU(), Attend()))
    seen = Seen()
    with sdpa_calls(seen):
        for _ in range(3):
            net(x)
    assert seen.places == [(0, "0"), (1, "1.1")] * 3


def test_a_part_called_by_itself_keeps_index_and_name(x):
    net = nn.Sequential(Attend(), Attend())
    seen = Seen()
    with sdpa_calls(seen):
        net(x)
        net[1](x)
        net(x)
    assert seen.places == [(0, "0"), (1, "1"), (1, "1"), (0, "0"), (1, "1")]


def test_a_model_called_part_by_part_has_an_index_for_each_part(x):
    parts = [Attend(), Attend()]
    seen = Seen()
    with sdpa_calls(seen):
        for _ in range(2):
            for part in parts:
                part(x)
    assert seen.places == [(0, ""), (1, "")] * 2


def test_calls_of_one_module_are_told_apart_by_their_order(x):
    net = nn.Sequential(Attend(times=2), Attend())
    seen = Seen()
    with sdpa_calls(seen):
        net(x)
        net(x)
    assert seen.places == [(0, "0"), (1, "0"), (2, "1")] * 2


def test_calls_outside_any_module_are_all_different(x):
    q = torch.randn(1, 2, 5, 4)
    seen = Seen()
    with sdpa_calls(seen):
        F.scaled_dot_product_attention(q, q, q)
        Attend()(x)
        F.scaled_dot_product_attention(q, q, q)
    assert seen.places == [(0, ""), (1, ""), (2, "")]


def test_a_module_that_its_model_does_not_know_has_the_name_of_the_one_around_it(x):
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [Attend(), Attend()]

        def forward(self, x: Tensor) -> Tensor:
            return self.hidden[1](self.hidden[0](x))

    net = nn.Sequential(Hides())
    seen = Seen()
    with sdpa_calls(seen):
        net(x)
        net(x)
    assert seen.places == [(0, "0"), (1, "0")] * 2


@pytest.mark.parametrize(
    ("name", "place", "is_there"),
    [
        ("encoder.layer.1.self", 4, True),
        ("encoder.layer.1.self", 1, False),
        ("encoder.layer.1.self", "encoder.layer.1.self", True),
        ("encoder.layer.1.self", "encoder.layer.1", True),
        ("encoder.layer.1.self", "", True),
        ("encoder.layer.11.self", "encoder.layer.1", False),
        ("encoder.layer.1.self", "layer.1", False),
        ("encoder", "encoder.layer", False),
    ],
)
def test_places(name, place, is_there):
    q = torch.zeros(1)
    call = SdpaCall(
        q=q,
        k=q,
        v=q,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
        index=4,
        name=name,
        recomputed=False,
    )
    assert call.is_at(place) is is_there


def test_multihead_attention_is_seen_through():
    """PyTorch offers modes the whole of multi_head_attention_forward, not the call inside it."""
    layer = nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True)
    x = torch.randn(1, 5, 8)
    expected = layer(x)
    seen = Seen()
    with sdpa_calls(seen):
        found = layer(x)
    assert seen.places == [(0, "self_attn")]
    assert_bitwise(actual=found, expected=expected, what="output")


def test_multihead_attention_without_sdpa_is_refused():
    layer = nn.MultiheadAttention(8, 2)
    x = torch.randn(5, 1, 8)
    with sdpa_calls(Seen()), pytest.raises(ValueError, match="need_weights=True"):
        layer(x, x, x)


@pytest.mark.parametrize("how", ["tensor", "backward", "grad"])
def test_recomputed_calls_are_known_again(x, how):
    net = Checkpointed(nn.Sequential(Attend(), nn.ReLU()), Attend())
    seen = Seen()
    with sdpa_calls(seen):
        loss = net(x).sum()
        match how:
            case "tensor":
                loss.backward()
            case "backward":
                torch.autograd.backward(loss)
            case _:
                torch.autograd.grad(loss, x)
    assert seen.places == [
        (0, "blocks.0.0"),
        (1, "blocks.1"),
        (1, "blocks.1"),
        (0, "blocks.0.0"),
    ]
    assert [call.recomputed for call in seen.calls] == [False, False, True, True]


def test_a_recomputed_call_that_could_be_several_has_no_index(x):
    shared = Attend()
    seen = Seen()
    with sdpa_calls(seen):
        Checkpointed(shared, shared)(x).sum().backward()
    assert [call.index for call in seen.calls] == [0, 1, None, None]


def test_a_recomputation_of_a_forward_outside_raises(x):
    loss = Checkpointed(Attend())(x).sum()
    with sdpa_calls(Seen()), pytest.raises(RuntimeError, match="forward ran outside this context"):
        loss.backward()


def test_nothing_is_left_behind(x):
    def state() -> tuple[int, int, int]:
        modes = torch._C._len_torch_function_stack()
        return len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks), modes

    before = state()
    with sdpa_calls(Seen()):
        Attend()(x)
    assert state() == before
    with pytest.raises(KeyError), sdpa_calls(Seen()):
        raise KeyError
    assert state() == before


def test_an_exception_in_a_forward_does_not_upset_names(x):
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError

    net = nn.Sequential(Attend(), Fails())
    seen = Seen()
    with sdpa_calls(seen):
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                net(x)
    assert seen.places == [(0, "0")] * 2


def test_a_context_entered_inside_a_forward(x):
    seen = Seen()

    class Enters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attend()

        def forward(self, x: Tensor) -> Tensor:
            self.context = sdpa_calls(seen)
            self.context.__enter__()
            return self.inner(x)

    net = Enters()
    net(x)
    Attend()(x)
    net.context.__exit__(None, None, None)
    assert seen.places == [(0, ""), (1, "")]


def test_other_threads_are_neither_seen_nor_confusing(x):
    inside, done = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert done.wait(10)
            return x

    other = threading.Thread(target=nn.Sequential(Waits(), Attend()), args=(x,))
    seen = Seen()
    with sdpa_calls(seen):
        other.start()
        assert inside.wait(10)
        nn.Sequential(nn.ReLU(), Attend())(x)
        done.set()
        other.join(10)
    assert seen.places == [(0, "1")]


def test_contexts_nest(x):
    outer, inner = Seen(), Seen()
    with sdpa_calls(outer), sdpa_calls(inner):
        nn.Sequential(nn.ReLU(), Attend())(x)
    assert outer.places == inner.places == [(0, "1")]
    outer = Seen()
    with sdpa_calls(outer), sdpa_calls(lambda call, run: call.v):
        Attend()(x)
    assert outer.places == []


def test_compiled_models_are_seen(x):
    net = nn.Sequential(Attend(), Attend())
    net.compile(backend="eager")
    net(x)
    seen = Seen()
    with sdpa_calls(seen):
        net(x)
    assert seen.places == [(0, "0"), (1, "1")]
