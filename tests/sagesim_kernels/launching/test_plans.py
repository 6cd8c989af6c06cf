"""Plans: a call that is repeated gives the results of a call that is recorded."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sagesim.spec import FACTORED, FACTORED_QK, SAGEBWD
from sagesim_kernels import attention, attention_varlen
from sagesim_kernels.launching import forget_plans, planned, plans
from tests.sagesim_kernels.kernel_cases import DEVICE
from tests.support.assertions import assert_bitwise
from tests.support.combinations import crossed

SPECS = {"factored_qk": FACTORED_QK, "sagebwd": SAGEBWD, "factored": FACTORED}
LENGTH = 70
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "lse": {"return_lse": True},
    "window": {"window": (9, 3)},
    "sinks": {"sinks": torch.tensor([0.5, -1.0], device=DEVICE)},
    "softcap": {"softcap": 3.0},
    "lengths": {"seqused_k": torch.tensor([50], device=DEVICE)},
    "key_mask": {"key_mask": torch.arange(LENGTH, device=DEVICE)[None] % 3 != 1},
    "NHD": {"layout": "NHD"},
}


def tokens(seed: int, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: Any) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    found = attention(q, k, v, enable_gqa=True, **options)
    outputs = found if isinstance(found, tuple) else (found,)
    grads = [do, *(torch.ones_like(x) for x in outputs[1:])]
    return [*outputs, *torch.autograd.grad(outputs, (q, k, v), grads)]


def inputs(seed: int, *, d: int = 40, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    shapes = [(1, heads, LENGTH, d) for heads in (2, 1, 1, 2)]
    return [tokens(10 * seed + i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]


def check_repeated(first: list[Tensor], second: list[Tensor], **options: Any) -> None:
    """Check the second call, which repeats the first, against one that is recorded."""
    run(*first, **options)
    count = len(plans._plans)
    found = run(*second, **options)
    assert len(plans._plans) == count > 0
    forget_plans()
    for i, (x, y) in enumerate(zip(found, run(*second, **options), strict=True)):
        assert_bitwise(actual=x, expected=y, what=f"output {i}")


@pytest.mark.parametrize(("call", "name"), crossed([*OPTIONS], [*SPECS]))
def test_a_repeated_call_computes_what_a_recorded_one_does(name, call):
    spec, options = SPECS[name], OPTIONS[call]
    first, second = inputs(0), inputs(1)
    if options.get("layout") == "NHD":
        first, second = ([x.transpose(1, 2).contiguous() for x in y] for y in (first, second))
    check_repeated(first, second, spec=spec, **options)


@pytest.mark.parametrize("d", [33, 64])
def test_inputs_that_are_converted_or_copied(d):
    """float32 is rounded, and rows that are no whole vectors are copied, by PyTorch."""
    check_repeated(inputs(0, d=d, dtype=torch.float32), inputs(1, d=d, dtype=torch.float32))


def test_one_tensor_as_several_inputs():
    x, *others = (tokens(i, 1, 2, LENGTH, 32) for i in range(5))
    check_repeated([x, x, x, x], others)
    check_repeated(others, [x, x, x, x])


def test_slices_of_one_tensor():
    """Slices share their memory in one call, and not in the next."""
    packed = tokens(0, 1, LENGTH, 4, 2, 32).permute(2, 0, 3, 1, 4)
    apart = [torch.empty_like(packed)[i].copy_(x) for i, x in enumerate(packed + 1)]
    assert apart[1].stride() == packed[1].stride()
    check_repeated(list(packed), apart)
    check_repeated(apart, list(packed))


def test_packed_sequences_of_other_lengths():
    """The lengths of packed sequences are numbers in a tensor: one plan serves all of them."""
    q, k, v = (tokens(i, 30, 2, 32) for i in range(3))
    for starts in ([0, 10, 30], [0, 25, 30]):
        cu = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        found = attention_varlen(q, k, v, cu, cu, 30, 30)
        assert isinstance(found, Tensor)
        for begin, end in ((0, starts[1]), (starts[1], 30)):
            alone = (x[None, begin:end].transpose(1, 2) for x in (q, k, v))
            expected = attention(*alone)
            assert isinstance(expected, Tensor)
            assert_bitwise(actual=found[begin:end].transpose(0, 1), expected=expected[0], what="o")


def test_what_a_plan_depends_on_makes_another_plan():
    q, k, v, _ = inputs(0)
    shifted = torch.cat([q.flatten(), q.flatten()[:1]])[1:].view(q.shape)
    strided = q.mT.contiguous().mT
    calls = [
        ((q, k, v), {}),
        ((q, k, v), {"scale": 0.5}),
        ((q, k, v), {"is_causal": True}),
        ((q, k, v), {"spec": SAGEBWD}),
        ((q, k, v), {"return_lse": True}),
        ((shifted, k, v), {}),  # memory that is not aligned to 16 bytes
        ((strided, k, v), {}),
        ((q[:, :, :-1], k, v), {}),
        ((q.bfloat16(), k.bfloat16(), v.bfloat16()), {})
        if DEVICE == "cuda"
        else ((q.float(), k.float(), v.float()), {}),
    ]
    for n, (tensors, options) in enumerate(calls):
        attention(*tensors, enable_gqa=True, **options)
        assert len(plans._plans) == n + 1
        attention(*tensors, enable_gqa=True, **options)
        assert len(plans._plans) == n + 1


def test_outputs_are_new_memory():
    q, k, v, _ = inputs(0)
    outputs = [attention(q + i, k, v, enable_gqa=True) for i in range(3)]
    kept = [x.clone() for x in outputs if isinstance(x, Tensor)]
    attention(q + 3, k, v, enable_gqa=True)
    assert len({x.data_ptr() for x in outputs if isinstance(x, Tensor)}) == 3
    for x, y in zip(outputs, kept, strict=True):
        assert isinstance(x, Tensor)
        assert_bitwise(actual=x, expected=y, what="an earlier output")


def test_a_plan_keeps_no_tensor():
    q, k, v, _ = inputs(0)
    seen = weakref.ref(q)
    attention(q, k, v, enable_gqa=True)
    del q
    gc.collect()
    assert seen() is None


def test_a_launch_without_programs_does_not_reach_the_driver():
    plans.launch(None, (0,))


def test_the_oldest_plan_goes_first(monkeypatch):
    monkeypatch.setattr(plans, "_MOST", 2)
    for n in (3, 4, 5):
        planned(_double, (torch.ones(n),), None)
    assert [key[2] for key in plans._plans] == [(4,), (5,)]


def _double(tensors: Any, _: Any) -> tuple[Tensor]:
    return (tensors[0] + tensors[0],)


class TestOperationsOfPyTorch:
    """Operations between the launches are part of a plan."""

    @staticmethod
    def check(function: Any, *shapes: tuple[int, ...]) -> None:
        for seed in range(3):
            given = tuple(tokens(seed + i, *shape).float() for i, shape in enumerate(shapes))
            expected = function(given, None)
            for x, y in zip(planned(function, given, None), expected, strict=True):
                assert (x is None) == (y is None)
                if x is not None:
                    assert_bitwise(actual=x, expected=y, what=f"call {seed}")
        assert len(plans._plans) == 1

    def test_results(self):
        self.check(lambda x, _: (x[0] @ x[1], None), (3, 4), (4, 5))

    def test_views_of_inputs_and_results(self):
        def function(x: Any, _: Any) -> Any:
            total = x[0].mT[1:] + x[1].view(2, 3)[:, 1:].sum()
            return (total[1].exp(),)

        self.check(function, (3, 4), (6,))

    def test_changes_in_place(self):
        def function(x: Any, _: Any) -> Any:
            out = x[0].new_empty(4, 3)
            out[1:].copy_(x[0][1:])
            out[:1].zero_()
            sums = torch.zeros(3, device=out.device)
            sums += out.sum(0)
            return out, sums.clone()

        self.check(function, (4, 3))

    def test_lists_of_tensors(self):
        self.check(lambda x, _: (torch.cat([x[1], x[0]]),), (2, 3), (4, 3))

    def test_zeros_are_zeros_again(self):
        def function(x: Any, _: Any) -> Any:
            sums = torch.zeros(x[0].shape, device=x[0].device)
            sums += x[0]
            return (sums * 2,)

        self.check(function, (5,))

    def test_an_output_that_starts_as_zeros(self):
        def function(x: Any, _: Any) -> Any:
            sums = torch.zeros_like(x[0])
            sums += x[0]
            return (sums,)

        self.check(function, (5,))


def test_a_failure_leaves_no_plan():
    def fail(tensors: Any, _: Any) -> Any:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            planned(fail, (torch.ones(1),), None)
    assert not plans._plans


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operators():
    """Selective checkpointing keeps results by the names of operators."""
    given = inputs(0)
    with _Seen() as seen:
        found = run(*given)
    names = [name for name in seen.names if name.startswith("sagesim_kernels::")]
    assert names == [f"sagesim_kernels::flash_attn_{x}" for x in ("forward", "backward")]
    for x, y in zip(found, run(*given), strict=True):
        assert_bitwise(actual=x, expected=y, what="an output")
