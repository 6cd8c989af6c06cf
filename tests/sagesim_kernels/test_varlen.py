"""`sagesim_kernels.attention_varlen` computes each packed sequence as if it were alone."""

import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sagesim import SAGEBWD, AttentionSpec
from sagesim_kernels import attention, attention_varlen
from sagesim_kernels.operands import Grid
from sagesim_kernels.operands.grid import Sequences
from tests.support.assertions import assert_bitwise
from tests.support.combinations import crossed
from tests.support.kernels import DEVICE, FEW, HERE, Results, assert_same

pytestmark = HERE

LENGTHS_Q = (5, 0, 40, 3, 0)
LENGTHS_K = (12, 4, 33, 0, 0)
BLOCKS = {name: replace(spec, block_q=32, block_k=32) for name, spec in FEW.items()}
"""The third sequence has two blocks of queries and two of keys."""

MASKS = {
    "full": {},
    "upper_left": {"is_causal": True},
    "lower_right": {"is_causal": True, "causal_alignment": "lower_right"},
}


def beginnings(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def packed(lengths: tuple[int, ...], heads: int, d: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), heads, d, generator=generator).to(DEVICE)


class PackedCase:
    """q, k, v, do and d_lse of packed sequences, with two heads of q for each head of k and v."""

    def __init__(self, q: tuple[int, ...] = LENGTHS_Q, k: tuple[int, ...] = LENGTHS_K) -> None:
        self.lengths = q, k
        self.q, self.do = packed(q, 2, 16, 0), packed(q, 2, 24, 3)
        self.k, self.v = packed(k, 1, 16, 1), packed(k, 1, 24, 2)
        self.d_lse = packed(q, 2, 1, 4)[..., 0].T.contiguous()
        cu = beginnings(q)
        self.cu = cu, cu if k == q else beginnings(k)

    def together(self, spec: AttentionSpec, **options: object) -> Results:
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        longest = tuple(max(lengths, default=0) for lengths in self.lengths)
        o, lse = attention_varlen(
            *leaves, *self.cu, *longest, spec=spec, enable_gqa=True, return_lse=True, **options
        )
        grads = torch.autograd.grad((o, lse), leaves, (self.do, self.d_lse))
        return Results(o.detach(), lse.detach(), *grads)

    def one_by_one(self, spec: AttentionSpec, **options: object) -> Results:
        """The results of `attention` for each sequence, concatenated."""
        parts: list[Results] = []
        q_parts = (x.split(self.lengths[0]) for x in (self.q, self.do, self.d_lse.T))
        k_parts = (x.split(self.lengths[1]) for x in (self.k, self.v))
        for q, do, d_lse, k, v in zip(*q_parts, *k_parts, strict=True):
            leaves = [x.detach().transpose(0, 1).requires_grad_() for x in (q, k, v)]
            o, lse = attention(*leaves, spec=spec, enable_gqa=True, return_lse=True, **options)
            grads = torch.autograd.grad((o, lse), leaves, (do.transpose(0, 1), d_lse.T))
            results = (o.detach(), lse.detach()[..., None], *grads)
            parts.append(Results(*(x.transpose(0, 1) for x in results)))
        o, lse, *grads = (torch.cat(xs) for xs in zip(*parts, strict=True))
        return Results(o, lse[..., 0].T, *grads)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mask"), crossed([*BLOCKS], [*MASKS]))
def test_is_a_loop_over_sequences(name, mask):
    """Outputs, lse and gradients are bitwise those of a loop over sequences: empty ones, ones
    without keys or without queries, and ones with unequal numbers of both."""
    packed_case, spec = PackedCase(), BLOCKS[name]
    assert_same(
        packed_case.together(spec, **MASKS[mask]), packed_case.one_by_one(spec, **MASKS[mask])
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lengths"), crossed([*BLOCKS], [(0, 32, 1, 32), (31, 1, 32)]))
def test_sequences_of_whole_blocks_do_not_overlap(name, lengths):
    packed_case, spec = PackedCase(lengths, lengths), BLOCKS[name]
    assert_same(packed_case.together(spec), packed_case.one_by_one(spec))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mask"), crossed([*BLOCKS], [*MASKS]))
def test_tiles_of_unequal_sequences_follow_each_other(name, mask):
    """Lengths are so unequal that a launch has as many programs as there are tiles."""
    packed_case, spec = PackedCase((5, 0, 300, 3), (12, 4, 140, 9)), BLOCKS[name]
    lengths = Sequences(packed_case.cu[0], 4, 300, 308)
    assert Grid.of_tokens(lengths, 256, 2).cu is packed_case.cu[0]
    assert_same(
        packed_case.together(spec, **MASKS[mask]), packed_case.one_by_one(spec, **MASKS[mask])
    )


def test_the_gradient_of_o_is_not_copied():
    """Autograd copies a gradient to zeros behind an index, such as o[0]."""
    packed_case = PackedCase()
    leaves = [x.detach().requires_grad_() for x in (packed_case.q, packed_case.k, packed_case.v)]
    o, lse = attention_varlen(
        *leaves, *packed_case.cu, 40, 33, spec=BLOCKS["sagebwd"], enable_gqa=True, return_lse=True
    )
    for result in (o, lse):
        names, node = [], result.grad_fn
        while node is not None and node.next_functions:
            names.append(node.name())
            node = node.next_functions[0][0]
        assert names and not any(name.startswith("Select") for name in names)


@pytest.mark.parametrize(("q", "k"), [((), ()), ((0, 0), (0, 0)), ((0,), (3,)), ((3,), (0,))])
def test_nothing_to_attend_to(q, k):
    found = PackedCase(q, k).together(FEW["sagebwd"])
    assert not any(bool(x.any()) for x in (found.o, *found[2:]))
    assert bool((found.lse == -math.inf).all())


@pytest.mark.parametrize("spec", [BLOCKS["sagebwd"]], ids=["sagebwd"])
def test_max_seqlen_is_only_a_bound(spec):
    packed_case = PackedCase()
    tensors = (packed_case.q, packed_case.k, packed_case.v, *packed_case.cu)
    for bounds in ((200, 999), (2**31, 2**40)):
        o = attention_varlen(*tensors, *bounds, spec=spec, enable_gqa=True)
        assert_bitwise(actual=o, expected=packed_case.together(spec).o, what="o")


def test_fake_tensors_have_a_shape():
    """Their numbers are not read."""
    with FakeTensorMode():
        x = torch.empty(9, 2, 16, device=DEVICE)
        cu = torch.empty(3, dtype=torch.int32, device=DEVICE)
        assert attention_varlen(x, x, x, cu, cu, 9, 9).shape == x.shape


def test_one_long_sequence_does_not_make_the_others_long(unplanned, monkeypatch):
    """The memory of K's means is bounded by all tokens, not by sequences times the longest one."""
    allocated = []

    def empty(*args, **options):
        out = torch.Tensor.new_empty(torch.zeros(()), *args, **options)
        allocated.append(out)
        return out

    packed_case = PackedCase((1,) * 5, (390, 1, 1, 1, 1))
    monkeypatch.setattr("sagesim_kernels.operands.means.torch.empty", empty)
    attention_varlen(
        packed_case.q,
        packed_case.k,
        packed_case.v,
        *packed_case.cu,
        1,
        390,
        spec=SAGEBWD,
        enable_gqa=True,
    )
    (sums,) = (x for x in allocated if x.dtype is torch.float64)
    assert sums.numel() == (394 // 128 + 5) * 16


@pytest.mark.parametrize("spec", [BLOCKS["sagebwd"]], ids=["sagebwd"])
def test_strides(spec):
    """Strides of q, k, v and do change no bit: they may be slices of one tensor."""
    packed_case = PackedCase()
    expected = packed_case.together(spec)
    for name in ("q", "k", "v", "do"):
        x = getattr(packed_case, name)
        setattr(packed_case, name, torch.stack([x, x + 1, x], 1)[:, 2].mT.contiguous().mT)
    assert_same(packed_case.together(spec), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("spec", BLOCKS.values(), ids=BLOCKS)
def test_gradients_of_rows_without_keys_reach_nothing(spec):
    """The gradient of lse = -inf is often NaN; it must not reach any gradient."""
    packed_case = PackedCase()
    expected = packed_case.together(spec)
    first = sum(LENGTHS_Q[:3])  # of a sequence that has no keys
    packed_case.d_lse[:, first : first + 3] = math.nan
    packed_case.do[first : first + 3] = math.nan
    packed_case.q[first : first + 3] = math.nan
    assert_same(packed_case.together(spec), expected)


@pytest.mark.parametrize("spec", [BLOCKS["sagebwd"]], ids=["sagebwd"])
def test_sequences_do_not_influence_each_other(spec):
    """Other values in one sequence change no bit of the others: K's mean is per sequence."""
    packed_case = PackedCase()
    before = packed_case.together(spec)
    packed_case.k[:12] *= 100
    packed_case.v[:12] += 7
    after = packed_case.together(spec)
    for name in ("o", "dq"):
        expected, actual = getattr(before, name)[5:], getattr(after, name)[5:]
        assert_bitwise(actual=actual, expected=expected, what=name)
    for name in ("dk", "dv"):
        expected, actual = getattr(before, name)[12:], getattr(after, name)[12:]
        assert_bitwise(actual=actual, expected=expected, what=name)
    assert not torch.equal(after.o, before.o)


class TestRefusals:
    """Invalid arguments raise an error that names the value, before a kernel is launched."""

    TOKENS = 7
    GOOD = (0, 3, 7)

    def refuse(self, words, *, error=ValueError, cu_q=None, cu_k=None, longest=(7, 7), **options):
        x = options.pop("x", torch.zeros(self.TOKENS, 1, 8, device=DEVICE))
        good = torch.tensor(self.GOOD, dtype=torch.int32, device=DEVICE)
        cu_q, cu_k = (good if cu is None else cu for cu in (cu_q, cu_k))
        with pytest.raises(error) as raised:
            attention_varlen(x, x, x, cu_q, cu_k, *longest, **options)
        for word in words:
            assert word in str(raised.value), raised.value

    def test_accepts_what_is_right(self):
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            self.refuse([])

    @pytest.mark.parametrize("side", ["q", "k"])
    def test_other_kinds(self, side):
        self.refuse(["cu_seqlens_", "[0, 3, 7]"], error=TypeError, **{f"cu_{side}": [0, 3, 7]})
        for longest in (None, 7.5, True):
            both = (longest, 7) if side == "q" else (7, longest)
            self.refuse([f"max_seqlen_{side}", repr(longest)], error=TypeError, longest=both)

    @pytest.mark.parametrize("side", ["q", "k"])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
    def test_other_dtypes(self, side, dtype):
        cu = torch.tensor(self.GOOD, device=DEVICE).to(dtype)
        self.refuse([f"cu_seqlens_{side}", str(dtype), "int32"], **{f"cu_{side}": cu})

    @pytest.mark.parametrize("shape", [(), (0,), (1, 3)])
    def test_other_shapes(self, shape):
        cu = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
        self.refuse(["cu_seqlens_q", str(shape)], cu_q=cu)

    def test_strided_beginnings(self):
        cu = torch.zeros(6, dtype=torch.int32, device=DEVICE)[::2]
        self.refuse(["cu_seqlens_q", "contiguous"], cu_q=cu)

    def test_beginnings_on_another_device(self):
        cu = torch.zeros(3, dtype=torch.int32, device="meta")
        self.refuse(["cu_seqlens_k", "meta", DEVICE], cu_k=cu)

    def test_another_number_of_sequences(self):
        cu = torch.tensor([0, 7], dtype=torch.int32, device=DEVICE)
        self.refuse(["cu_seqlens_q", "(3,)", "cu_seqlens_k", "(2,)"], cu_k=cu)

    @pytest.mark.skipif(DEVICE == "cuda", reason="looking would wait for the device; see test_gpu")
    @pytest.mark.parametrize("side", ["q", "k"])
    @pytest.mark.parametrize("cu", [(0, 5, 3, 7), (1, 7), (0, 6), (0, 8), (-1, 7), (0, 7, 7, 8)])
    def test_beginnings_that_do_not_describe_the_tensor(self, side, cu):
        beginnings = torch.tensor(cu, dtype=torch.int32)
        other = torch.zeros(len(cu), dtype=torch.int32)
        other[-1] = self.TOKENS
        sides = {f"cu_{side}": beginnings, f"cu_{'k' if side == 'q' else 'q'}": other}
        self.refuse([f"cu_seqlens_{side}", str(list(cu)), "7 tokens"], **sides)

    @pytest.mark.skipif(DEVICE == "cuda", reason="looking would wait for the device; see test_gpu")
    @pytest.mark.parametrize("side", ["q", "k"])
    def test_a_longest_that_is_shorter(self, side):
        longest = (3, 7) if side == "q" else (7, 3)
        self.refuse([f"max_seqlen_{side}=3", "[0, 3, 7]"], longest=longest)

    def test_the_lengths_of_self_attention_are_checked_once(self, monkeypatch):
        checked = []
        monkeypatch.setattr(
            "sagesim_kernels.packing.check_starts", lambda _, cu, *words: checked.append(cu)
        )
        x = torch.zeros(self.TOKENS, 1, 8, device=DEVICE)
        cu = torch.tensor(self.GOOD, dtype=torch.int32, device=DEVICE)
        for cu_k, longest_k, expected in ((cu, 7, 1), (cu, 6, 2), (cu.clone(), 7, 2)):
            checked.clear()
            attention_varlen(x, x, x, cu, cu_k, 7, longest_k)
            assert len(checked) == expected

    @pytest.mark.parametrize("shape", [(7, 8), (1, 7, 1, 8)])
    def test_axes(self, shape):
        self.refuse([str(shape), "[tokens, heads"], x=torch.zeros(shape, device=DEVICE))

    def test_options(self):
        self.refuse(["dropout_p=0.5"], dropout_p=0.5)
        self.refuse(["'bottom'"], causal_alignment="bottom")
        self.refuse(["attn_mask"], error=TypeError, attn_mask=torch.ones(7, 7))
        self.refuse(["layout"], error=TypeError, layout="NHD")
