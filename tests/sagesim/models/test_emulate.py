import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers import AttentionInterface, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import sagesim
from sagesim import FPA, FPA_BF16, SAGEBWD, AttentionSpec
from sagesim.models import capture, emulate
from tests.support.assertions import assert_bitwise


class Attend(nn.Module):
    """Causal self-attention of [n, 32] in two heads by `attend`; default: SDPA."""

    def __init__(self, attend=None) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(32, 96), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, -1, 3, 2, 16).permute(2, 0, 3, 1, 4)
        # SDPA is looked up at each call, as in models.
        attend = self.attend or F.scaled_dot_product_attention
        return x + attend(q, k, v, is_causal=True, scale=0.3).transpose(1, 2).reshape(x.shape)


class Stack(nn.Module):
    """Blocks in sequence; each is checkpointed, unless `reentrant` is None."""

    def __init__(self, *blocks: nn.Module, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(blocks), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def blocks(count: int = 3, specs: list[AttentionSpec] | None = None) -> list[Attend]:
    """Blocks with fixed weights; if specs are given, the blocks call sagesim.attention directly."""
    torch.manual_seed(0)
    made = [Attend() for _ in range(count)]
    for block, spec in zip(made, specs or [], strict=False):
        block.attend = lambda *x, spec=spec, **call: sagesim.attention(*x, spec=spec, **call)
    return made


def tokens(n: int = 40) -> Tensor:
    return torch.randn(n, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()


def step(net: nn.Module, backward_in=contextlib.nullcontext) -> list[Tensor]:
    """The output, the input's gradient and the parameters' gradients."""
    x = tokens()
    net.zero_grad()
    o = net(x)
    with backward_in():
        o.square().mean().backward()
    return [o.detach(), x.grad, *(p.grad.clone() for p in net.parameters())]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 2
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_bitwise(actual=a, expected=b, what=f"output or gradient {number}")


def differ(a: list[Tensor], b: list[Tensor]) -> bool:
    return not any(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_model_computes_what_it_would_with_sagesim_attention():
    expected = step(Stack(*blocks(specs=[SAGEBWD] * 3)))
    net = Stack(*blocks())
    with emulate(SAGEBWD):
        found = step(net)
    assert_same(found, expected)
    assert differ(found, step(net)), "only the emulation may change results"


def test_the_backward_is_emulated_after_the_context_too():
    net = Stack(*blocks())
    with emulate(SAGEBWD):
        expected = step(net)
    with emulate(SAGEBWD):
        x = tokens()
        o = net(x)
    net.zero_grad()
    o.square().mean().backward()
    assert_same([o.detach(), x.grad, *(p.grad for p in net.parameters())], expected)


@pytest.mark.parametrize(
    "layers",
    [
        {1: FPA, 2: FPA_BF16},
        {"blocks.1": FPA, "blocks.2": FPA_BF16},
        {1: FPA, "blocks.2": FPA_BF16},
    ],
)
def test_layers_sets_the_spec_of_single_calls_in_every_forward(layers):
    expected = step(Stack(*blocks(specs=[SAGEBWD, FPA, FPA_BF16])))
    net = Stack(*blocks())
    with emulate(SAGEBWD, layers=layers):
        for _ in range(2):
            assert_same(step(net), expected)


def test_a_training_loop_is_emulated():
    def train(net: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(tokens()).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    expected = train(Stack(*blocks(specs=[SAGEBWD, SAGEBWD, FPA])))
    with emulate(SAGEBWD, layers={2: FPA}):
        found = train(Stack(*blocks()))
    assert_same(found, expected)


class TestTransformers:
    """Compares with the same model, whose attention implementation is `sagesim.attention`."""

    def model(self, causal: bool, implementation: str) -> nn.Module:
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 40,
            "attn_implementation": implementation,
        }
        if causal:
            return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **sizes))
        off = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        return BertModel(BertConfig(**off, **sizes))

    def step(self, model: nn.Module, mask: Tensor) -> list[Tensor]:
        ids = torch.arange(72).view(2, 36) % 40
        output = model(input_ids=ids, attention_mask=mask)[0]
        output.square().mean().backward()
        return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("causal", [False, True])
    def test_a_transformers_model_gives_the_same_bytes(self, causal, padded):
        def direct(module, query, key, value, attention_mask, scaling=None, **_):
            assert (attention_mask is not None) is padded
            o = sagesim.attention(
                query,
                key,
                value,
                spec=SAGEBWD,
                is_causal=causal and not padded,
                attn_mask=attention_mask,
                scale=scaling,
                enable_gqa=True,
            )
            return o.transpose(1, 2), None

        AttentionInterface.register("direct", direct)
        masks = transformers_masks()
        masks.register("direct", masks()["sdpa"])
        mask = torch.ones(2, 36, dtype=torch.long)
        if padded:
            mask[1, 20:] = 0
        expected = self.step(self.model(causal, "direct"), mask)
        with emulate(SAGEBWD):
            found = self.step(self.model(causal, "sdpa"), mask)
        assert_same(found, expected)
        assert not torch.equal(found[0], self.step(self.model(causal, "sdpa"), mask)[0])


def transformers_masks():
    from transformers import AttentionMaskInterface

    return AttentionMaskInterface


class TestCheckpointing:
    layers = {1: FPA, "blocks.2": FPA_BF16}  # noqa: RUF012

    def test_checkpointing_changes_no_bit(self):
        with emulate(SAGEBWD, layers=self.layers):
            expected = step(Stack(*blocks()))
        with emulate(SAGEBWD, layers=self.layers):
            found = step(Stack(*blocks(), reentrant=False))
        assert_same(found, expected)

    def test_a_shared_module_without_layers_changes_no_bit(self):
        (shared,) = blocks(1)
        with emulate(SAGEBWD):
            expected = step(Stack(shared, shared))
        with emulate(SAGEBWD):
            found = step(Stack(shared, shared, reentrant=False))
        assert_same(found, expected)

    def test_a_shared_module_with_layers_raises(self):
        (shared,) = blocks(1)
        net = Stack(shared, shared, reentrant=False)
        message = "so `layers` cannot be applied"
        with pytest.raises(RuntimeError, match=message), emulate(SAGEBWD, layers={1: FPA}):
            step(net)

    def test_a_backward_after_the_context_raises(self):
        with emulate(SAGEBWD):
            loss = Stack(*blocks(), reentrant=False)(tokens()).sum()
        with pytest.raises(CheckpointError):
            loss.backward()

    def test_a_forward_before_the_context_raises(self):
        loss = Stack(*blocks(), reentrant=False)(tokens()).sum()
        with pytest.raises(RuntimeError, match="forward ran outside"), emulate(SAGEBWD):
            loss.backward()

    def test_a_reentrant_checkpoint_raises(self):
        net = Stack(*blocks(), reentrant=True)
        message = r"call 0 in blocks\.0: .*use_reentrant=False"
        with pytest.raises(RuntimeError, match=message), emulate(SAGEBWD):
            net(tokens())

    def test_no_grad_without_checkpoints_is_allowed(self):
        with torch.no_grad(), emulate(SAGEBWD):
            Stack(*blocks())(tokens())


def test_autocast_applies_to_emulated_calls():
    expected_net, net = blocks(1, specs=[SAGEBWD])[0], blocks(1)[0]
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(expected_net)
        with emulate(SAGEBWD):
            found = step(net)
    assert_same(found, expected)


def test_the_innermost_context_decides_the_spec():
    net = Stack(*blocks())
    with emulate(FPA_BF16):
        expected = step(net)
    with emulate(SAGEBWD):
        net(tokens())
        with emulate(FPA_BF16):
            found = step(net)
    assert_same(found, expected)


def test_capture_inside_emulate_records_the_calls_and_changes_no_bit():
    net = Stack(*blocks())
    with emulate(SAGEBWD):
        expected = step(net)
    with emulate(SAGEBWD), capture() as recording:
        found = step(net)
    assert_same(found, expected)
    assert [call.name for call in recording.result().calls] == [f"blocks.{i}" for i in range(3)]


def test_capture_around_emulate_raises():
    message = "was emulate entered after capture"
    with pytest.raises(RuntimeError, match=message), capture(), emulate(SAGEBWD):
        step(Stack(*blocks(1)))


q4 = torch.zeros(1, 2, 4, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: F.scaled_dot_product_attention(q4, q4, q4, None, 0.1),
            ValueError,
            "dropout_p=0.1",
        ),
        (
            lambda: F.scaled_dot_product_attention(q4, q4, q4, attn_mask=torch.ones(4, 4)),
            ValueError,
            "call 0: attn_mask is torch.float32 with other numbers than 0 and -inf",
        ),
        (
            lambda: F.scaled_dot_product_attention(*[torch.nested.nested_tensor([q4[0]])] * 3),
            ValueError,
            "query is a nested tensor",
        ),
        (
            lambda: F.scaled_dot_product_attention(*[q4.to(torch.complex64)] * 3),
            TypeError,
            "complex64",
        ),
        (lambda: F.scaled_dot_product_attention(q4, q4[:, :1], q4[:, :1]), ValueError, "heads"),
        (lambda: F.scaled_dot_product_attention(q4, q4, q4, softcap=1.0), TypeError, "softcap"),
        (
            lambda: nn.MultiheadAttention(8, 2)(*[torch.zeros(4, 1, 8)] * 3),
            ValueError,
            "need_weights=True",
        ),
        (lambda: None, RuntimeError, "nothing was emulated"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_unsupported_calls_raise(as_installed, call, error, message):
    with pytest.raises(error, match=message), emulate(SAGEBWD):
        call()


def test_an_error_of_attention_has_a_note_that_names_the_call(as_installed):
    with pytest.raises(TypeError) as caught, emulate(SAGEBWD):
        F.scaled_dot_product_attention(*[q4.to(torch.complex64)] * 3)
    assert caught.value.__notes__ == ["at SDPA call 0"]


def test_a_key_of_layers_that_matches_no_call_raises():
    message = (
        r"no SDPA call matches 3, 'block\.0'; "
        r"the calls were SDPA call 0 in blocks\.0, SDPA call 1 in"
    )
    layers = {3: FPA, 0: FPA, "block.0": FPA}
    with pytest.raises(ValueError, match=message), emulate(SAGEBWD, layers=layers):
        step(Stack(*blocks()))


def test_two_keys_of_layers_that_match_one_call_raise():
    message = r"call 1 in blocks\.1: several keys of layers match it: 1, 'blocks\.1'"
    layers = {1: FPA, "blocks.1": FPA}
    with pytest.raises(ValueError, match=message), emulate(SAGEBWD, layers=layers):
        step(Stack(*blocks()))


def test_an_exception_inside_the_context_is_propagated():
    with pytest.raises(KeyError), emulate(SAGEBWD, layers={5: FPA}):
        raise KeyError


def test_a_label_instead_of_a_spec_raises(as_installed):
    for call in ({"spec": "sagebwd"}, {"spec": SAGEBWD, "layers": {0: "fpa"}}):
        with pytest.raises(TypeError, match=r"AttentionSpec\.parse makes one"), emulate(**call):
            pass


def test_a_message_lists_at_most_20_calls():
    with (
        pytest.raises(ValueError, match=r"SDPA call 0 in 0, .*SDPA call 19 in 19 and 5 more$"),
        emulate(SAGEBWD, layers={25: FPA}),
    ):
        net = nn.Sequential(*blocks(25))
        for _ in range(2):
            net(tokens())


def test_an_outer_context_says_that_an_inner_one_took_its_calls():
    with (
        pytest.raises(RuntimeError, match="another `emulate` inside the context took every call"),
        emulate(FPA),
        emulate(SAGEBWD),
    ):
        nn.Sequential(*blocks(1))(tokens())
    with pytest.raises(RuntimeError, match="was not called inside the context"), emulate(FPA):
        pass
