import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

from sagesim.models.sdpa_mode import SdpaCall, sdpa_calls
from tests.support.assertions import assert_bitwise


class Attend(nn.Module):
    """Self-attention of [n, 8] in two heads, applied `times` times."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.qkv, self.times = nn.Linear(8, 24), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            q, k, v = self.qkv(x).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
            x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x


class Checkpointed(nn.Module):
    """Checkpointed blocks in sequence: the backward recomputes them."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Recorder:
    """A handler that runs every call unchanged and records it."""

    def __init__(self) -> None:
        self.calls: list[SdpaCall] = []

    def __call__(self, call, run) -> Tensor:
        self.calls.append(call)
        return run()

    @property
    def locations(self) -> list[tuple[int | None, str]]:
        return [(call.index, call.name) for call in self.calls]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_arguments_are_bound_by_position_and_by_name():
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    mask = torch.ones(5, 5, dtype=torch.bool)
    recorder = Recorder()
    with sdpa_calls(recorder):
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale=0.5)
        F.scaled_dot_product_attention(
            value=v, key=k, query=q, is_causal=True, dropout_p=0.25, enable_gqa=True
        )
        torch.ops.aten.scaled_dot_product_attention(q, k, v, mask)
        torch.ops.aten.scaled_dot_product_attention.default(q, k, v, scale=2.0)
    found = [
        (c.attn_mask is mask, c.dropout_p, c.is_causal, c.scale, c.enable_gqa)
        for c in recorder.calls
    ]
    assert all(c.q is q and c.k is k and c.v is v for c in recorder.calls)
    assert found == [
        (False, 0.0, False, None, False),
        (True, 0.0, False, 0.5, False),
        (False, 0.25, True, None, True),
        (True, 0.0, False, None, False),
        (False, 0.0, False, 2.0, False),
    ]


def test_an_unknown_argument_raises():
    q = torch.randn(1, 2, 5, 4)
    with sdpa_calls(Recorder()), pytest.raises(TypeError, match="softcap"):
        F.scaled_dot_product_attention(q, q, q, softcap=30.0)


def test_the_handler_gives_the_result_and_its_run_makes_the_call():
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_calls(lambda call, run: run()):
        unchanged = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_calls(lambda call, run: call.v):
        replaced = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_bitwise(actual=unchanged, expected=expected, what="o")
    assert replaced is v


def test_a_later_forward_has_the_same_indices_and_names(x):
    net = nn.Sequential(Attend(), nn.Sequential(nn.ReLU(), Attend()))
    recorder = Recorder()
    with sdpa_calls(recorder):
        for _ in range(3):
            net(x)
    assert recorder.locations == [(0, "0"), (1, "1.1")] * 3


def test_a_submodule_called_on_its_own_keeps_index_and_name(x):
    net = nn.Sequential(Attend(), Attend())
    recorder = Recorder()
    with sdpa_calls(recorder):
        net(x)
        net[1](x)
        net(x)
    assert recorder.locations == [(0, "0"), (1, "1"), (1, "1"), (0, "0"), (1, "1")]


def test_modules_called_one_by_one_have_an_index_each(x):
    modules = [Attend(), Attend()]
    recorder = Recorder()
    with sdpa_calls(recorder):
        for _ in range(2):
            for module in modules:
                module(x)
    assert recorder.locations == [(0, ""), (1, "")] * 2


def test_calls_of_one_module_are_numbered_in_order(x):
    net = nn.Sequential(Attend(times=2), Attend())
    recorder = Recorder()
    with sdpa_calls(recorder):
        net(x)
        net(x)
    assert recorder.locations == [(0, "0"), (1, "0"), (2, "1")] * 2


def test_calls_outside_of_modules_have_different_indices(x):
    q = torch.randn(1, 2, 5, 4)
    recorder = Recorder()
    with sdpa_calls(recorder):
        F.scaled_dot_product_attention(q, q, q)
        Attend()(x)
        F.scaled_dot_product_attention(q, q, q)
    assert recorder.locations == [(0, ""), (1, ""), (2, "")]


def test_an_unregistered_module_has_the_name_of_the_enclosing_one(x):
    class Unregistered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [Attend(), Attend()]

        def forward(self, x: Tensor) -> Tensor:
            return self.hidden[1](self.hidden[0](x))

    net = nn.Sequential(Unregistered())
    recorder = Recorder()
    with sdpa_calls(recorder):
        net(x)
        net(x)
    assert recorder.locations == [(0, "0"), (1, "0")] * 2


@pytest.mark.parametrize(
    ("name", "key", "expected"),
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
def test_a_key_matches_index_module_and_enclosing_modules(name, key, expected):
    q = torch.zeros(1)
    call = SdpaCall(
        q=q,
        k=q,
        v=q,
        do=None,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
        index=4,
        name=name,
        recomputed=False,
    )
    assert call.matches(key) is expected


def test_the_call_inside_multihead_attention_is_intercepted():
    """PyTorch passes multi_head_attention_forward to modes as a whole, not the call inside it."""
    layer = nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True)
    x = torch.randn(1, 5, 8)
    expected = layer(x)
    recorder = Recorder()
    with sdpa_calls(recorder):
        found = layer(x)
    assert recorder.locations == [(0, "self_attn")]
    assert_bitwise(actual=found, expected=expected, what="output")


def test_multihead_attention_without_sdpa_raises():
    layer = nn.MultiheadAttention(8, 2)
    x = torch.randn(5, 1, 8)
    with sdpa_calls(Recorder()), pytest.raises(ValueError, match="need_weights=True"):
        layer(x, x, x)


@pytest.mark.parametrize("how", ["tensor", "backward", "grad"])
def test_recomputed_calls_have_the_indices_of_the_forward(x, how):
    net = Checkpointed(nn.Sequential(Attend(), nn.ReLU()), Attend())
    recorder = Recorder()
    with sdpa_calls(recorder):
        loss = net(x).sum()
        match how:
            case "tensor":
                loss.backward()
            case "backward":
                torch.autograd.backward(loss)
            case _:
                torch.autograd.grad(loss, x)
    assert recorder.locations == [
        (0, "blocks.0.0"),
        (1, "blocks.1"),
        (1, "blocks.1"),
        (0, "blocks.0.0"),
    ]
    assert [call.recomputed for call in recorder.calls] == [False, False, True, True]


def test_a_recomputed_call_of_a_module_with_several_calls_has_no_index(x):
    shared = Attend()
    recorder = Recorder()
    with sdpa_calls(recorder):
        Checkpointed(shared, shared)(x).sum().backward()
    assert [call.index for call in recorder.calls] == [0, 1, None, None]


def test_recomputing_a_forward_that_ran_outside_raises(x):
    loss = Checkpointed(Attend())(x).sum()
    with (
        sdpa_calls(Recorder()),
        pytest.raises(RuntimeError, match="forward ran outside this context"),
    ):
        loss.backward()


def test_hooks_and_mode_are_removed_at_the_end(x):
    def state() -> tuple[int, int, int]:
        modes = torch._C._len_torch_function_stack()
        return len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks), modes

    before = state()
    with sdpa_calls(Recorder()):
        Attend()(x)
    assert state() == before
    with pytest.raises(KeyError), sdpa_calls(Recorder()):
        raise KeyError
    assert state() == before


def test_names_are_right_after_an_exception_in_a_forward(x):
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError

    net = nn.Sequential(Attend(), Fails())
    recorder = Recorder()
    with sdpa_calls(recorder):
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                net(x)
    assert recorder.locations == [(0, "0")] * 2


def test_the_context_may_be_entered_inside_a_forward(x):
    recorder = Recorder()

    class Enters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attend()

        def forward(self, x: Tensor) -> Tensor:
            self.context = sdpa_calls(recorder)
            self.context.__enter__()
            return self.inner(x)

    net = Enters()
    net(x)
    Attend()(x)
    net.context.__exit__(None, None, None)
    assert recorder.locations == [(0, ""), (1, "")]


def test_modules_of_other_threads_are_ignored(x):
    inside, done = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert done.wait(10)
            return x

    other = threading.Thread(target=nn.Sequential(Waits(), Attend()), args=(x,))
    recorder = Recorder()
    with sdpa_calls(recorder):
        other.start()
        assert inside.wait(10)
        nn.Sequential(nn.ReLU(), Attend())(x)
        done.set()
        other.join(10)
    assert recorder.locations == [(0, "1")]


def test_nested_contexts_both_receive_a_call_that_is_run(x):
    outer, inner = Recorder(), Recorder()
    with sdpa_calls(outer), sdpa_calls(inner):
        nn.Sequential(nn.ReLU(), Attend())(x)
    assert outer.locations == inner.locations == [(0, "1")]
    outer = Recorder()
    with sdpa_calls(outer), sdpa_calls(lambda call, run: call.v):
        Attend()(x)
    assert outer.locations == []


def test_calls_of_compiled_models_are_intercepted(x):
    net = nn.Sequential(Attend(), Attend())
    net.compile(backend="eager")
    net(x)
    recorder = Recorder()
    with sdpa_calls(recorder):
        net(x)
    assert recorder.locations == [(0, "0"), (1, "1")]


def test_a_context_keeps_no_module_alive(x):
    gone = []
    with sdpa_calls(Recorder()):
        for _ in range(3):
            model = nn.Sequential(Attend())
            gone.append(weakref.ref(model[0]))
            model(x)
            del model
            gc.collect()
        assert [each() for each in gone] == [None] * 3


def test_modules_that_are_gone_do_not_give_their_indices_to_others(x):
    recorder = Recorder()
    with sdpa_calls(recorder):
        for _ in range(3):
            Attend()(x)
            gc.collect()
    assert [call.index for call in recorder.calls] == [0, 1, 2]
