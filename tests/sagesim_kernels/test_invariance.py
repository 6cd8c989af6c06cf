"""Every number depends on the inputs and the spec alone, not on run, process, batch or tile."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from sagesim import HALF_AWAY, PRESETS, SAGEBWD, AttentionSpec, Rounding
from sagesim_kernels import trace
from sagesim_kernels.portable.tiles import Tile
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.calls import run_exact
from tests.support.combinations import crossed
from tests.support.inputs import Case
from tests.support.kernels import (
    DEVICE,
    FEW,
    HERE,
    SPECS,
    Results,
    assert_same,
    kernel_case,
    poisoned,
    run_kernels,
)

pytestmark = HERE

U = 2.0**-24
ON_CPU = DEVICE == "cpu"


def digest(results: Results) -> str:
    data = b"".join(x.cpu().contiguous().view(torch.uint8).numpy().tobytes() for x in results)
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("changed", ["dtype", "device"])
def test_a_trace_is_of_one_dtype_and_device(changed):
    c = kernel_case(seed=0, n_q=20, n_k=33, d=16)
    do = c.do.half() if changed == "dtype" else c.do.to("meta")
    with pytest.raises(ValueError, match="do is") as raised:
        trace(c.q, c.k, c.v, do)
    assert str(do.dtype) in str(raised.value) and str(do.device) in str(raised.value)


class TestRuns:
    """Results are the same bytes in every run and in every process."""

    @pytest.mark.slow
    @pytest.mark.parametrize("spec", FEW.values(), ids=FEW)
    def test_repeat(self, spec):
        """5 runs in the interpreter; 1,000 on a GPU, with 40 programs a launch."""
        runs, shape = (5, (20, 33)) if ON_CPU else (1000, (500, 600))
        heads = (1,) if ON_CPU else (2, 5)
        c = kernel_case(seed=0, n_q=shape[0], n_k=shape[1], d=16, heads=heads, is_causal=True)
        d_lse = torch.ones(c.q.shape[:-1], device=DEVICE)
        once = run_kernels(c, spec, d_lse=d_lse)
        for _ in range(runs - 1):
            again = run_kernels(c, spec, d_lse=d_lse)
            for x, y, name in zip(again, once, Results._fields, strict=True):
                assert_bitwise(actual=x, expected=y, what=name)

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "is_causal"), crossed([*SPECS], [False, True]))
    def test_memory_is_written_before_it_is_read(self, name, is_causal):
        spec = SPECS[name]
        dtype = torch.float32 if ON_CPU else torch.float16
        c = kernel_case(dtype, seed=3, n_q=70, n_k=100, d=24, heads=(2,), is_causal=is_causal)
        d_lse = torch.ones(c.q.shape[:-1], device=DEVICE)
        once = run_kernels(c, spec, d_lse=d_lse)
        with poisoned():
            assert_same(run_kernels(c, spec, d_lse=d_lse), once)

    @pytest.mark.slow
    @pytest.mark.parametrize("spec", [SPECS["factored"]], ids=["factored"])
    def test_fresh_processes_agree(self, spec, compile_alike):
        """Two processes in the interpreter, five on a GPU, each with its own hash seed."""
        script = f"""
{compile_alike}
from sagesim import AttentionSpec
from tests.sagesim_kernels.test_invariance import digest
from tests.support.kernels import kernel_case, run_kernels
c = kernel_case(seed=0, n_q=70, n_k=40, d=16, is_causal=True)
print(digest(run_kernels(c, AttentionSpec.parse({spec.label()!r}))))
"""
        found = {
            subprocess.run(
                [sys.executable, "-c", script],
                check=True,
                capture_output=True,
                text=True,
                env=os.environ
                | {"PYTHONHASHSEED": "random", "PYTHONPATH": os.pathsep.join(sys.path)},
            ).stdout.strip()
            for _ in range(2 if ON_CPU else 5)
        }
        c = kernel_case(seed=0, n_q=70, n_k=40, d=16, is_causal=True)
        assert found == {digest(run_kernels(c, spec))}


class TestHeads:
    """The results of a head do not depend on the other heads of the batch."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "n"), crossed([*FEW], [70, 15, 1]))
    def test_run_alone(self, name, n):
        spec = FEW[name]
        c = kernel_case(seed=n, n_q=n, n_k=n, d=24, heads=(2, 2), is_causal=True)
        together = run_kernels(c, spec)
        for b, h in ((0, 1), (1, 0), (1, 1)):
            alone = run_kernels(c.map(lambda x: x[b, h].clone()), spec)  # noqa: B023
            assert_same(alone, Results(*(x[b, h] for x in together)))

    def test_draw_the_same_random_numbers(self):
        spec = replace(SAGEBWD, rounding=Rounding.stochastic(7))
        c = kernel_case(seed=0, n_q=20, n_k=33, d=16, heads=(2, 2))
        together = run_kernels(c, spec)
        alone = run_kernels(c.map(lambda x: x[1, 1].clone()), spec)
        assert_same(alone, Results(*(x[1, 1] for x in together)))

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "grouped"), crossed([*FEW], [(1, False), (2, True)]))
    def test_grouped_are_repeated(self, name, grouped):
        """o, lse and dq are bitwise those of repeated heads; dk and dv are sums over each group.

        Each of the two sums has n_q * groups products in float32. The terms of dv are at most
        P |dO|, those of dk at most |dS| |Q|, times two for the rounding of P and dS to INT8.
        """
        (kv_heads, is_causal), spec = grouped, FEW[name]
        c = kernel_case(seed=5, n_q=40, n_k=33, d=16, heads=(1, 4), is_causal=is_causal)
        groups = 4 // kv_heads
        k, v = c.k[:, :kv_heads], c.v[:, :kv_heads]
        grouped = run_kernels(replace(c, k=k, v=v, enable_gqa=True), spec)
        wide = replace(c, k=k.repeat_interleave(groups, 1), v=v.repeat_interleave(groups, 1))
        repeated, exact = run_kernels(wide, spec), run_exact(wide)
        assert_same(grouped, repeated, "o", "lse", "dq")
        sizes = {
            "dv": exact.p.mT @ c.do.double().abs(),
            "dk": exact.ds.abs().mT @ c.q.double().abs() / 4,
        }
        for name, size in sizes.items():
            parts = getattr(repeated, name).unflatten(1, (kv_heads, groups))
            assert_within_bound(
                actual=getattr(grouped, name),
                exact=parts.double().sum(2),
                bound=2 * 2 * 40 * groups * U * size.unflatten(1, (kv_heads, groups)).sum(2),
                what=name,
            )


def on_a_grid(seed: int) -> Case:
    """A case of multiples of 1/256 below 8, which halving, doubling and negating never round.

    Logits are small, so that P is near 1/33. dO is large, so that dS is not subnormal in FP16.
    """
    c = kernel_case(seed=seed, n_q=20, n_k=33, d=16)
    c = c.map(lambda x: (x * 256).round() / 256)
    return replace(c, q=c.q / 8, do=c.do * 64)


SYMMETRIC = SPECS | {"half_away": replace(SAGEBWD, rounding=HALF_AWAY)}


@pytest.mark.parametrize(("name", "gain"), crossed([*SYMMETRIC], [2.0, -0.5]))
class TestSymmetries:
    """Scaling inputs by powers of two or -1 scales results exactly; 0 and -0 count as equal."""

    @staticmethod
    def check(name: str, change: dict[str, float], gains: dict[str, float]) -> None:
        c, spec = on_a_grid(0), SYMMETRIC[name]
        before = run_kernels(c, spec)
        changed = replace(c, **{name: getattr(c, name) * gain for name, gain in change.items()})
        after = run_kernels(changed, spec)
        expected = Results(
            *(x * gains.get(name, 1.0) + 0.0 for name, x in before._asdict().items())
        )
        assert_same(Results(*(x + 0.0 for x in after)), expected)

    @pytest.mark.slow
    def test_of_v(self, name, gain):
        self.check(name, {"v": gain}, {"o": gain, "dq": gain, "dk": gain})

    def test_of_do(self, name, gain):
        self.check(name, {"do": gain}, {"dq": gain, "dk": gain, "dv": gain})

    def test_of_q_against_k(self, name, gain):
        self.check(name, {"q": gain, "k": 1 / gain}, {"dq": 1 / gain, "dk": gain})


@pytest.mark.parametrize("name", ["o", "dq", "dk", "dv"])
def test_broken_symmetries_are_detected(name):
    """A factor of 3 does not scale results exactly."""
    c = on_a_grid(0)
    before, after = (run_kernels(replace(c, v=c.v * g, q=c.q * g), SAGEBWD) for g in (1.0, 3.0))
    assert not torch.equal(getattr(after, name), getattr(before, name) * 3)


def test_measured_influence_of_later_tokens_is_what_the_emulator_has():
    """Later tokens of the same block change earlier rows by less than their RMS, but do change
    them."""
    cut, later = 70, kernel_case(seed=8, n_q=60, n_k=60, d=16)
    c = kernel_case(seed=7, n_q=130, n_k=130, d=16, is_causal=True)
    tensors = {
        name: torch.cat([getattr(c, name)[..., :cut, :], getattr(later, name)], -2)
        for name in ("q", "k", "v", "do")
    }
    for name in ("sagebwd_all_int8", "sage_forward", "factored_pv16"):
        before = run_kernels(c, PRESETS[name])
        after = run_kernels(Case(**tensors, is_causal=True), PRESETS[name])
        for x, y in ((before.o, after.o), (before.dq, after.dq)):
            influence = (x - y)[..., :cut, :].abs().max() / x.square().mean().sqrt()
            assert 0 < influence < 1, name


class TestTiles:
    """The size of a program's tile changes no bit."""

    @pytest.fixture(autouse=True)
    def sums_have_no_order(self, unplanned, monkeypatch):
        """Sum in float64 in the interpreter. Its float32 sums come from BLAS, whose order depends
        on the number of rows."""
        if not ON_CPU:
            return

        def create_dot(_, a, b, d, *rest):
            x = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
            return TensorHandle((x + d.data).astype(d.data.dtype), d.dtype.scalar)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)

    @staticmethod
    def run(monkeypatch, case: Case, spec: AttentionSpec, rows: int, stages: int) -> list[Tensor]:
        used = set()

        def tiles(*_, exactly=None, within=None):
            used.add(exactly or min(rows, within or rows))
            yield Tile(exactly or min(rows, within or rows), 4, stages)

        monkeypatch.setattr("sagesim_kernels.portable.forward.tiles", tiles)
        monkeypatch.setattr("sagesim_kernels.portable.p_rows.tiles", tiles)
        d_lse = torch.ones(case.q.shape[:-1], device=DEVICE)
        results = run_kernels(case, spec, d_lse=d_lse)
        traced = trace(*case.qkvdo, spec=spec, is_causal=case.is_causal)
        assert rows in used or spec.smoothing.q
        return [*results, *(x for name in sorted(traced.operands) for x in traced.operands[name])]

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "is_causal"), crossed([*FEW], [False, True]))
    def test_change_nothing(self, monkeypatch, name, is_causal):
        """Outputs, gradients, codes and scales are the same at 32, 64 and 128 rows a program."""
        spec = FEW[name]
        c = kernel_case(seed=1, n_q=70, n_k=100, d=16, is_causal=is_causal)
        expected = self.run(monkeypatch, c, spec, 64, 1)
        for rows, stages in ((32, 1), (128, 1), (64, 2)):
            for x, y in zip(self.run(monkeypatch, c, spec, rows, stages), expected, strict=True):
                assert_bitwise(actual=x, expected=y, what=f"{rows} rows, {stages} stages")


def test_importing_touches_nothing():
    """Importing changes no flags, defaults, environment, random state or hooks."""
    script = """
import os, random, sys
import numpy, torch, triton, sagesim
def state():
    return {
        "environment": dict(os.environ),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "precision": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_initialized(),
        "random": (torch.get_rng_state().sum().item(), random.getstate(),
                   numpy.random.get_state()[1].sum()),
        "sdpa": id(torch.nn.functional.scaled_dot_product_attention),
        "excepthook": id(sys.excepthook),
        "path": list(sys.path),
    }
before = state()
import sagesim_kernels
after = state()
assert before == after, {k: (before[k], after[k]) for k in before if before[k] != after[k]}
"""
    path = os.pathsep.join(sys.path)
    subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )


@pytest.mark.slow
def test_strides_beyond_int32():
    """Offsets beyond 2**31 are right: tokens are 2**26 or channels 2**28 elements apart, in sparse
    files. The test has its own process, because a wrong pointer would end it."""
    if not ON_CPU:
        pytest.skip("see test_gpu")
    script = """
import tempfile
import torch
from tests.support.assertions import assert_bitwise
from tests.support.kernels import FEW, assert_same, kernel_case, run_kernels
c = kernel_case(torch.float16, seed=0, n_q=40, n_k=40, d=16)
for strides in ((2**26, 1), (1, 2**28)):
    extent = 39 * strides[0] + 15 * strides[1] + 1
    def far(x):
        file = tempfile.NamedTemporaryFile(dir=".")
        storage = torch.UntypedStorage.from_file(file.name, True, 2 * extent)
        y = torch.empty(0, dtype=x.dtype).set_(storage).as_strided(x.shape, (0, 0, *strides))
        return y.copy_(x)
    for spec in (FEW["sagebwd"], FEW["factored_qk"]):
        assert_same(run_kernels(c.map(far), spec), run_kernels(c, spec))
"""
    path = os.pathsep.join(sys.path)
    subprocess.run(
        [sys.executable, "-c", script], check=True, env=os.environ | {"PYTHONPATH": path}
    )
