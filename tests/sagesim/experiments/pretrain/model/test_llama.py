import math

import pytest
import torch

from sagesim.experiments.pretrain.model.attention import Attention
from sagesim.experiments.pretrain.model.llama import SIZES, Llama, rotate, rotations, token_loss
from tests.support.assertions import assert_bitwise, assert_within_bound

SDPA = Attention("sdpa")


def llama(size="tiny", **changes):
    arguments = {"vocabulary": 300, "context": 16, "attention": SDPA} | changes
    return Llama(SIZES[size], **arguments)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("size", ["tiny", "8m"])
def test_size_counts_the_parameters_of_the_model(size, tied, qk_norm):
    model = llama(size, tied=tied, qk_norm=qk_norm)
    counted = SIZES[size].parameters(300, tied=tied, qk_norm=qk_norm)
    assert sum(p.numel() for p in model.parameters()) == counted


@pytest.mark.parametrize("name", [name for name in SIZES if name != "tiny"])
def test_the_name_of_a_size_is_its_number_of_parameters(name):
    vocabulary = 50257 if name == "325m" else 16384
    count = SIZES[name].parameters(vocabulary) / 1e6
    assert abs(count - float(name.removesuffix("m"))) < 1
    assert SIZES[name].head_size == 64


def test_flops_are_six_per_weight_of_a_matrix():
    size = SIZES["36m"]
    weights = size.parameters(16384) - size.width * (2 * size.layers + 1)  # without the norms
    assert size.flops(16384, 0) == 6 * weights
    assert size.flops(16384, 2048) - size.flops(16384, 1024) == 6 * 8 * 512 * 1024


def test_initial_weights_depend_on_the_seed_and_not_on_the_attention():
    one, other = llama(seed=3), llama(seed=3, attention=Attention.parse("emulator:sagebwd"))
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert_bitwise(actual=a, expected=b, what=name)
    assert not torch.equal(llama(seed=4).head.weight, one.head.weight)


def test_the_first_loss_is_that_of_a_uniform_guess():
    tokens = torch.randint(300, (8, 17), generator=torch.Generator().manual_seed(0))
    loss = token_loss(llama()(tokens[:, :-1]), tokens[:, 1:])
    # Logits with standard deviation 0.02 sqrt(64) = 0.16 add half their variance.
    assert loss.item() == pytest.approx(math.log(300), abs=0.05)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_later_tokens_do_not_change_earlier_logits(qk_norm):
    model = llama(qk_norm=qk_norm)
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 9:] += 100
    before, after = model(tokens)[0], model(changed)[0]
    assert_bitwise(actual=after[:9], expected=before[:9], what="logits before the change")
    assert not torch.equal(before[9:], after[9:])


def test_products_of_rotated_vectors_depend_only_on_the_distance():
    cos, sin = rotations(64, 8)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    q, k = (rotate(x.expand(64, 8), cos.double(), sin.double()) for x in (q, k))
    products = q @ k.mT
    for distance in (0, 1, 17):
        along = products.diagonal(-distance)
        assert_within_bound(
            actual=along,
            exact=along[0].expand(along.shape),
            # Cosines and sines are rounded to float32; a product has 16 terms of about 1.
            bound=torch.tensor(16 * 4 * 2.0**-24 * float(q[0].norm() * k[0].norm())),
            what=f"products at distance {distance}",
        )


def test_qk_norm_removes_the_scale_of_q_and_k():
    model = llama(qk_norm=True)
    tokens = torch.arange(16)[None]
    before = model(tokens)
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.qkv.weight[: 2 * 64] *= 8.0
    after = model(tokens)
    # The eps of 1e-6 is small against a mean square of about 1e-2, but not zero.
    difference = (after - before).abs().max() / before.std()
    assert difference.item() < 1e-3


def test_a_sequence_longer_than_the_context_raises():
    with pytest.raises(ValueError, match="17 tokens in a context of 16"):
        llama()(torch.zeros(1, 17, dtype=torch.int64))
