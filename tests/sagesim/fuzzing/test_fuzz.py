"""Fuzzing passes correct kernels, and finds and diagnoses wrong ones."""

import functools
import itertools
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sagesim
from sagesim import (
    FACTORED,
    FPA,
    SAGE_FORWARD,
    SAGEBWD,
    AttentionSpec,
    Delta,
    FuzzCase,
    Smoothing,
    attention,
    fuzz,
)
from sagesim.cli import main
from sagesim.fuzzing.calls import call
from sagesim.fuzzing.diagnosis import factor, infer
from sagesim.fuzzing.fresh_process import FreshProcesses
from sagesim.fuzzing.hypothesis_search import find
from sagesim.fuzzing.mistakes import mistakes
from sagesim.fuzzing.strategies import cases, specs_for_kernels
from sagesim.fuzzing.tolerance import ORDER, Contract
from tests.support import examples, tiled_kernel
from tests.support.tiled_kernel import BUGS, kernel

CORRECT = [
    "sagebwd",
    "sagebwd_all_int8",
    "sage_forward",
    "factored",
    "factored_pv16",
    "factored_qk",
    "causal_safe",
    "fpa_fp16",
    "fpa",
    "factored smooth=qk",
    "sagebwd smooth=q block=128x32",
    "sagebwd round=half_away block=32x32",
]

BOTH = replace(FACTORED, smoothing=Smoothing(q=True, k=True), delta=Delta.FROM_O)
TOKENS_OF_K = AttentionSpec.parse("factored qk=int8@token,block qk_recompute=int8@token,block")
TOKENS_OF_QK = AttentionSpec.parse("fpa qk=int8@token,token qk_recompute=int8@token,token smooth=k")
SPEC_OF_BUG = {
    "mean of K over the padded block": TOKENS_OF_QK,
    "keys that no query attends to in the mean of K": TOKENS_OF_QK,
    "P rounded by its tile": replace(SAGEBWD, block_q=32, block_k=32),
    "delta from O before it is rounded": SAGE_FORWARD,
    "tail reads the next head": TOKENS_OF_K,
}
"""Specs under which these bugs change the results; the other bugs do under `BOTH`."""


MISTAKES = {
    "K not smoothed": "other smoothing: 'factored smooth=q delta=o'",
    "logit scale lost": "the logits are not scaled",
    "logit scale of the padded head size": "1/sqrt of the head size padded to a power of two",
    "ties away from zero": "other rounding: 'factored smooth=qk round=half_away delta=o'",
    "codes truncated": "the codes of Q, K, V, P, dO, dS are truncated, not rounded",
    "mean of K over the padded block": "means count the zeros that fill the last block",
    "keys that no query attends to in the mean of K": "keys that no query attends to count in",
    "head of K by remainder": "query head i uses head i % h_kv of k and v, but adds to dk and dv",
    "heads of K by remainder, also in dK": "query head i uses head i % h_kv of k and v, not",
    "dK of one query head of the group": "dk and dv of the first query head of a group",
    "delta from O before it is rounded": "delta uses o before it is rounded to 16 bits",
    "delta forgotten": "dS = P dP: delta is not subtracted",
    "dP in 8 bit": "other precision: 'factored dp=int8 smooth=qk delta=o'",
    "dP in bfloat16": "other precision: 'factored dp=bf16 smooth=qk delta=o'",
    "dS per tile": "other scales of ds: 'factored dq=int8@tile,block_channel dk=int8@tile,",
    "dS in bfloat16": "dS is in bfloat16",
    "codes of dS truncated": "the codes of dS are truncated, not rounded",
    "dQ not scaled": "dq not multiplied by the logit scale",
    "dQ with unsmoothed K": "dQ uses K before its mean is subtracted",
    "dK not scaled": "dk not multiplied by the logit scale",
}
"""Bugs of `BUGS`, and the beginning of the words that the report has for them."""

SIMILAR = {
    *("mean of K over the batch", "mean of K over all heads", "epsilon in the scale"),
    *("running sum not corrected", "dV rounded to 16 bit for each tile"),
    *("ties away from zero", "K not smoothed", "dP in bfloat16"),  # the words are another spec's
    *("codes truncated", "head of K by remainder", "logit scale of the padded head size"),
    *("keys that no query attends to in the mean of K", "delta from O before it is rounded"),
    "dQ not scaled",
}
"""Bugs whose site is that of another bug, and whose words are found like those of another."""


OFFSET = ("gaussian", "offset", "offset", "gaussian")
"""Kinds of tensors: the keys have a mean, which FACTORED subtracts."""

# More threads slow down such small calls.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def stop_early(monkeypatch):
    """Stop after 5 failing cases, to save time."""
    monkeypatch.setattr("sagesim.fuzzing.search.ENOUGH", 5)


class TestCorrectKernels:
    @pytest.mark.slow
    @pytest.mark.parametrize("label", CORRECT)
    def test_a_kernel_with_another_order_of_sums_passes(self, label):
        spec = AttentionSpec.parse(label)
        report = fuzz(kernel(spec), spec=spec, cases=25, seed=1, dtypes=("float32", "bfloat16"))
        assert report.failure is None, report
        assert report.cases == 25 or report.cases > 20

    @given(st.data())
    @examples(40)
    def test_a_kernel_of_any_spec_passes(self, data):
        spec = data.draw(specs_for_kernels(supported=tiled_kernel.supported))
        case = data.draw(cases(block_q=spec.block_q, block_k=spec.block_k, longest=130))
        outputs = case.run(kernel(spec))._asdict()
        for d in Contract(case, spec, "cpu").compare(outputs).values():
            assert not d.is_outside, d

    @given(cases(longest=70), st.sampled_from(CORRECT))
    @examples(30)
    def test_the_emulator_itself_has_no_difference(self, case, label):
        spec = AttentionSpec.parse(label)
        outputs = case.run(attention, spec=spec)._asdict()
        for d in Contract(case, spec, "cpu").compare(outputs).values():
            assert d.found == 0


class TestWrongKernels:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "bug",
        [pytest.param(x, marks=pytest.mark.exhaustive) if x in SIMILAR else x for x in BUGS],
    )
    def test_a_planted_bug_is_found_at_its_site_and_named(self, bug, monkeypatch):
        # Shrinking takes most of the time and has tests of its own.
        def find_without_shrinking(*args, shrink=False, **kwargs):
            return find(*args, **kwargs)

        monkeypatch.setattr("sagesim.fuzzing.hypothesis_search.find", find_without_shrinking)
        # With fewer failing cases, none may change the first output that the bug reaches.
        monkeypatch.setattr("sagesim.fuzzing.search.ENOUGH", 12)
        if bug not in MISTAKES:  # only the mistakes have an explanation to look for
            none = "sagesim.fuzzing.shrinking.explanations"
            monkeypatch.setattr(none, lambda *args, **options: ())
        spec = SPEC_OF_BUG.get(bug, BOTH)
        narrow = {"head_sizes": (16, 40)}
        if bug == "delta from O before it is rounded":  # O is not rounded in float32
            narrow["dtypes"] = ("bfloat16",)
        report = fuzz(kernel(spec, bug), spec=spec, cases=500, **narrow)
        failure = report.failure
        assert failure is not None
        tensor, site = BUGS[bug]
        assert failure.tensor == tensor and failure.site is not None
        assert site in failure.site.names
        assert failure.is_reproducible and failure.error is None
        if bug in MISTAKES:
            assert failure.explanations[0].startswith(MISTAKES[bug])
            assert f"looks like {MISTAKES[bug]}" in str(report)
            assert "inferred" not in str(report)

    @pytest.mark.slow
    def test_a_causal_mask_of_the_lower_right_corner_is_named(self):
        def lower_right(q, k, v, is_causal, **options):
            n_q, n_k = q.shape[2], k.shape[2]
            mask = torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q) if is_causal else None
            return attention(q, k, v, spec=FACTORED, attn_mask=mask, **options)

        failure = fuzz(lower_right, spec=FACTORED, head_sizes=(16,), max_length=40).failure
        assert failure is not None
        words = "the causal mask is aligned to the lower right corner"
        assert failure.explanations[0] == words

    def test_a_preset_is_named_with_the_blocks_that_are_tried(self):
        tried = {x.words: x.spec for x in mistakes(AttentionSpec.parse("factored block=128x128"))}
        for words, spec in tried.items():
            if words.startswith("another spec: "):
                assert words == f"another spec: {spec.label()!r}"
        assert "another spec: 'sagebwd block=128x128'" in tried

    @pytest.mark.slow
    def test_a_kernel_of_another_preset_is_named(self):
        report = fuzz(functools.partial(attention, spec=FPA), spec=SAGEBWD, max_length=40)
        assert report.failure is not None
        assert report.failure.explanations[0] == "another spec: 'fpa'"


def broken(change):
    """The emulator under FACTORED, with its output changed."""

    def function(q, k, v, **options):
        return change(attention(q, k, v, spec=FACTORED, **options), q, k, v)

    return function


class TestInvalidOutputs:
    @pytest.fixture(autouse=True)
    def no_explanations(self, monkeypatch):
        monkeypatch.setattr("sagesim.fuzzing.shrinking.explanations", lambda *args, **options: ())

    def fuzz(self, function, **options):
        report = fuzz(function, spec=FACTORED, cases=40, max_length=20, **options)
        assert report.failure is not None
        return report, report.failure

    def test_an_exception_is_shrunk_to_the_smallest_call_that_raises(self):
        def raises(o, q, k, v):
            if k.shape[2] > 6:
                raise NotImplementedError("no more than 6 keys")
            return o

        report, failure = self.fuzz(broken(raises))
        assert failure.error == "NotImplementedError: no more than 6 keys"
        assert (failure.case.n_k, failure.case.n_q, failure.case.kv_heads) == (7, 7, 1)
        assert failure.site is None and failure.tensor is None
        assert "raised     NotImplementedError: no more than 6 keys" in str(report)

    def test_an_exit_is_reported_as_an_exception(self):
        def leaves(o, q, k, v):
            if k.shape[2] > 6:
                raise SystemExit("no kernel for more than 6 keys")
            return o

        _, failure = self.fuzz(broken(leaves))
        assert failure.error == "SystemExit: no kernel for more than 6 keys"
        assert failure.case.n_k == 7

    def test_an_exception_of_the_backward_is_reported(self):
        class Raises(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, x):
                raise ZeroDivisionError

        _, failure = self.fuzz(broken(lambda o, q, k, v: Raises.apply(o)))
        assert failure.error == "ZeroDivisionError: "

    @pytest.mark.parametrize(
        "change, tensor, words",
        [
            (lambda o, q, k, v: o * float("nan"), "o", "is nan, the emulator's"),
            (lambda o, q, k, v: o.double(), "o", "o: dtype torch.float64, not torch.float32"),
            (lambda o, q, k, v: o[..., :1], "o", "o: shape (1, 1, 1, 1), not (1, 1, 1, 16)"),
        ],
    )
    def test_an_invalid_output_is_reported(self, change, tensor, words):
        def changed(q, k, v, **options):
            return Reshaped.apply(q, k, v, change, options)

        report, failure = self.fuzz(changed, dtypes=["float32"])
        assert failure.tensor == tensor
        assert words in str(report)

    def test_a_missing_gradient_is_reported(self):
        def detached(q, k, v, **options):
            return attention(q, k.detach(), v, spec=FACTORED, **options)

        report, failure = self.fuzz(detached)
        assert failure.tensor == "dk"
        assert "dk: no gradient; to autograd, o does not depend on k" in str(report)
        assert failure.site is None

    def test_an_o_that_is_no_tensor_is_reported(self):
        report, failure = self.fuzz(broken(lambda o, q, k, v: (o, 0)))
        assert failure.tensor == "o"
        assert "o: the function returned a tuple, not a tensor" in str(report)

    def test_a_function_without_a_backward_is_reported(self):
        report, failure = self.fuzz(broken(lambda o, q, k, v: o.detach()))
        assert failure.tensor == "o"
        assert "o: requires_grad is False; the function must support autograd" in str(report)

    def test_outputs_that_are_not_contiguous_are_allowed(self):
        def transposed(q, k, v, **options):
            x = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
            o = attention(*x, spec=FACTORED, **options)
            return o.transpose(2, 3).contiguous().transpose(2, 3)

        report = fuzz(transposed, spec=FACTORED, cases=20, max_length=20)
        assert report.failure is None, report

    def test_results_that_change_from_run_to_run_are_reported(self):
        report, failure = self.fuzz(broken(wrong_in_the_first_call()))
        assert not failure.is_reproducible
        assert failure.site is None and failure.explanations == ()
        assert "change from run to run" in str(report)


class Reshaped(torch.autograd.Function):
    """Attention with a changed o, also of another shape or dtype; the gradients are unchanged."""

    @staticmethod
    def forward(ctx, q, k, v, change, options):
        ctx.save_for_backward(q, k, v)
        ctx.options = options
        return change(attention(q, k, v, spec=FACTORED, **options), q, k, v)

    @staticmethod
    def backward(ctx, do):
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            o = attention(*leaves, spec=FACTORED, **ctx.options)
        return (*torch.autograd.grad(o, leaves, torch.ones_like(o)), None, None)


def wrong_in_the_first_call():
    """A change of the output that is made in the first call only."""
    calls = []

    def change(o, q, k, v):
        calls.append(0)
        return o * 2 if len(calls) == 1 else o

    return change


class Overwrites(torch.autograd.Function):
    """Attention that calls a function on q, k, v (and dO in the backward) before it returns."""

    @staticmethod
    def forward(ctx, q, k, v, change, phase, options):
        ctx.saved, ctx.arguments = [x.clone() for x in (q, k, v)], (change, phase, options)
        o = attention(q, k, v, spec=FACTORED, **options)
        if phase == "forward":
            change(q, k, v)
        ctx.save_for_backward(q, k, v)
        return o

    @staticmethod
    def backward(ctx, do):
        change, phase, options = ctx.arguments
        leaves = [x.detach().requires_grad_() for x in ctx.saved]
        with torch.enable_grad():
            o = attention(*leaves, spec=FACTORED, **options)
        gradients = torch.autograd.grad(o, leaves, do)
        if phase == "backward":
            change(*(x.detach() for x in ctx.saved_tensors), do)
        return (*gradients, None, None, None)


def negate(x):
    """Change x as a kernel does: autograd does not notice."""
    x.data.neg_()


def write_nan(x):
    x.data[0, 0, 0, 0] = torch.nan


def write_before(x):
    """Write to the memory in front of a tensor, if there is any."""
    if x.storage_offset():
        x.data.as_strided((1,), (1,), x.storage_offset() - 1).fill_(1.0)


class TestLengths:
    def test_the_emulator_passes(self):
        report = fuzz(
            functools.partial(attention, spec=FACTORED),
            spec=FACTORED,
            cases=30,
            max_length=40,
            extras=("seqused_k", "window", "sinks", "softcap"),
        )
        assert report.failure is None, str(report)

    def test_lengths_that_are_ignored_are_found(self):
        def function(q, k, v, *, seqused_k=None, **options):
            k, v = (x.nan_to_num(0.0) for x in (k, v))
            return attention(q, k, v, spec=FACTORED, **options)

        report = fuzz(function, spec=FACTORED, cases=30, max_length=40, extras=("seqused_k",))
        assert report.failure is not None
        assert report.failure.case.padding == "seqused_k"

    @pytest.mark.slow
    def test_a_key_too_many_is_found(self):
        def function(q, k, v, *, seqused_k=None, **options):
            if seqused_k is not None:
                seqused_k = (seqused_k + 1).clamp(max=k.shape[2])
                k, v = (x.nan_to_num(0.0) for x in (k, v))
            return attention(q, k, v, spec=FACTORED, seqused_k=seqused_k, **options)

        report = fuzz(function, spec=FACTORED, cases=30, max_length=40, extras=("seqused_k",))
        assert report.failure is not None
        assert report.failure.case.padding == "seqused_k"


class TestOverwrittenInputs:
    def call(self, change, phase, **fields):
        def function(q, k, v, **options):
            return Overwrites.apply(q, k, v, change, phase, options)

        return call(function, FuzzCase(n_q=3, n_k=5, d=16, **fields).problem()).problems

    @pytest.mark.parametrize(
        "change, phase, expected",
        [
            (lambda q, k, v: negate(k), "forward", {"k": "the kernel overwrote it in the forward"}),
            (
                lambda q, k, v, do: negate(q),
                "backward",
                {"q": "the kernel overwrote it in the backward"},
            ),
            (
                lambda q, k, v, do: negate(do),
                "backward",
                {"do": "the kernel overwrote it in the backward"},
            ),
            (
                lambda q, k, v: write_nan(v),
                "forward",
                {"v": "the kernel overwrote it in the forward"},
            ),
            (lambda q, k, v: None, "forward", {}),
        ],
    )
    def test_an_overwritten_input_is_named(self, change, phase, expected):
        assert self.call(change, phase) == expected

    def test_the_memory_around_an_input_is_compared_as_well(self):
        found = self.call(lambda q, k, v: write_before(k), "forward", layout="sliced")
        assert found == {"k": "the kernel overwrote the memory around it in the forward"}
        # The memory around a slice is NaN, which equals itself here.
        assert self.call(lambda q, k, v: None, "forward", layout="sliced") == {}

    def test_a_kernel_that_overwrites_an_input_does_not_agree(self):
        def function(q, k, v, **options):
            change = (lambda q, k, v: negate(k)) if k.shape[2] > 6 else (lambda *_: None)
            return Overwrites.apply(q, k, v, change, "forward", options)

        report = fuzz(function, spec=FACTORED, cases=40, max_length=20)
        failure = report.failure
        assert failure is not None
        assert failure.tensor == "k" and failure.site is None and failure.explanations == ()
        assert failure.case.n_k == 7 and not failure.differences["o"].is_outside
        assert str(report).startswith("the function overwrites its inputs under 'factored'")
        assert "wrong      k: the kernel overwrote it in the forward" in str(report)
        with pytest.raises(ValueError, match="k: the kernel overwrote it in the forward"):
            failure.case.run(function)


STICKY = """
import os, signal, sys
import sagesim

damaged = False

def sticky(q, k, v, **options):
    global damaged
    print("a kernel may print")
    if damaged or k.shape[2] > 6:
        damaged = True
        raise RuntimeError("CUDA error: an illegal memory access\\nCompile with more words")
    return sagesim.attention(q, k, v, spec=sagesim.FACTORED, **options)

def crashes(q, k, v, **options):
    if "fuzzing_parent" not in sys.modules and k.shape[2] > 6:
        os.kill(os.getpid(), signal.SIGSEGV)
    return sticky(q, k, v, **options)

def only_here(q, k, v, **options):
    if "fuzzing_parent" not in sys.modules:
        return sagesim.attention(q, k, v, spec=sagesim.FACTORED, **options)
    return sticky(q, k, v, **options)
"""
"""Kernels after whose first failure every call in the process raises, if k has more than 6 tokens.
The module `fuzzing_parent` exists only in the process of the tests."""


class TestDamagedProcesses:
    @pytest.fixture
    def fuzz(self, tmp_path, monkeypatch):
        (tmp_path / "sticky_kernels.py").write_text(STICKY)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, "fuzzing_parent", sys)
        monkeypatch.delitem(sys.modules, "sticky_kernels", raising=False)
        starts = []
        start = FreshProcesses._start
        monkeypatch.setattr(FreshProcesses, "_start", lambda x: starts.append(0) or start(x))

        def run(kernel_name, **options):
            import sticky_kernels

            function = getattr(sticky_kernels, kernel_name)
            options = {"cases": 60, "max_length": 12, "head_sizes": (16,)} | options
            report = sagesim.fuzz(function, spec=FACTORED, **options)
            assert report.failure is not None and report.failing == 1
            assert report.failure.error is not None
            return report, report.failure, starts

        yield run
        sys.modules.pop("sticky_kernels", None)

    @pytest.mark.slow
    @pytest.mark.exhaustive  # the next test shrinks in fresh processes as well
    def test_a_sticky_error_is_shrunk_in_fresh_processes(self, fuzz):
        report, failure, starts = fuzz("sticky")
        assert failure.case == FuzzCase(n_q=7, n_k=7, d=16)
        assert failure.is_shrunk and failure.is_reproducible and starts
        assert failure.error.startswith("RuntimeError: CUDA error")
        assert "raised     RuntimeError: CUDA error: an illegal memory access\n" in str(report)
        assert failure.note == "later calls raised as well; shrunk in fresh processes"

    @pytest.mark.slow
    def test_a_crash_of_a_fresh_process_does_not_end_this_one(self, fuzz):
        # The shortest lengths that fail: each step of shrinking that crashes takes a process.
        _, failure, starts = fuzz("crashes", max_length=7)
        assert failure.error == "the process crashed: SIGSEGV"
        assert failure.case == FuzzCase(n_q=7, n_k=7, d=16) and failure.is_reproducible
        assert failure.is_shrunk and starts
        assert failure.note == "later calls raised as well; shrunk in fresh processes"

    def test_a_failure_that_a_fresh_process_does_not_show_is_not_shrunk(self, fuzz):
        report, failure, _ = fuzz("only_here")
        assert not failure.is_shrunk and not failure.is_reproducible
        assert failure.case.n_k > 6 and "\nfirst      q [" in str(report)
        assert "note       not shrunk: in a fresh process the call passes" in str(report)

    def test_a_function_without_a_name_is_not_shrunk(self):
        damaged = []

        def sticky(q, k, v, **options):
            if damaged or k.shape[2] > 6:
                damaged.append(0)
                raise RuntimeError("sticky")
            return attention(q, k, v, spec=FACTORED, **options)

        report = sagesim.fuzz(sticky, spec=FACTORED, cases=60, max_length=12)
        failure = report.failure
        assert failure is not None and report.failing == 1
        assert failure.error == "RuntimeError: sticky" and failure.case.n_k > 6
        assert failure.note == (
            "not shrunk: later calls raised as well, "
            "and the function has no name that a fresh process can import"
        )

    def test_a_name_that_cannot_be_imported_is_not_shrunk(self, fuzz):
        _, failure, _ = fuzz("sticky", name="no_such_module:f")
        assert not failure.is_shrunk and failure.case.n_k > 6
        assert "ModuleNotFoundError: No module named 'no_such_module'" in failure.note

    def test_an_ordinary_exception_starts_no_process(self, monkeypatch):
        monkeypatch.setattr(FreshProcesses, "_start", None)

        def function(q, k, v, **options):
            if k.shape[2] > 6:
                raise ValueError("no more than 6 keys")
            return attention(q, k, v, spec=FACTORED, **options)

        failure = fuzz(function, spec=FACTORED, cases=40, max_length=20).failure
        assert failure is not None and failure.note == "" and failure.case.n_k == 7


class _WrongSinkGradient(torch.autograd.Function):
    """The identity, with a gradient that is multiplied by a factor."""

    @staticmethod
    def forward(ctx, sinks, factor):
        ctx.factor = factor
        return sinks.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def with_sink_gradient(change):
    """A kernel of FACTORED whose sinks are replaced by what `change` returns."""

    def function(q, k, v, *, sinks=None, **options):
        sinks = None if sinks is None else change(sinks)
        return attention(q, k, v, sinks=sinks, spec=FACTORED, **options)

    return function


WITH_SINKS = {"spec": FACTORED, "cases": 20, "max_length": 40, "extras": ("sinks",)}


class TestSinks:
    @pytest.mark.parametrize("factor", [-1.0, 0.0, 1.01])
    def test_a_wrong_gradient_of_the_sinks_is_found(self, factor):
        wrong = with_sink_gradient(lambda x: _WrongSinkGradient.apply(x, factor))
        report = fuzz(wrong, **WITH_SINKS)
        failure = report.failure
        assert failure is not None and failure.tensor == "dsinks" and failure.case.sinks
        assert set(failure.differences) == set(ORDER)
        assert report.outside["dsinks"] == report.failing
        assert failure.site is not None and failure.site.names == ("dsinks",)
        text = str(report)
        assert f"dsinks in {report.failing}" in text and "P_sink delta" in text
        if factor == -1.0:
            assert "dsinks is the emulator's times -1" in text

    def test_a_missing_gradient_of_the_sinks_is_found(self):
        failure = fuzz(with_sink_gradient(torch.Tensor.detach), **WITH_SINKS).failure
        assert failure is not None and failure.tensor == "dsinks"
        assert failure.differences["dsinks"].problem.endswith("o does not depend on sinks")

    def test_a_right_gradient_passes(self):
        report = fuzz(with_sink_gradient(torch.clone), **WITH_SINKS)
        assert report.failure is None
        assert str(report).endswith("o, dv, dq, dk and dsinks within the contract")

    def test_another_order_of_float32_sums_is_allowed(self):
        """P_sink delta of other implementations: in base 2, and summed one row after another."""
        for seed, label in itertools.product(range(8), ("factored", "sagebwd", "fpa")):
            case = FuzzCase(n_q=200, n_k=60, d=32, batch=2, sinks=True, kinds=OFFSET, seed=seed)
            problem, spec = case.problem(), AttentionSpec.parse(label)
            trace = sagesim.trace(problem, spec=spec)
            assert problem.sinks is not None and trace.dsinks is not None
            log2e = torch.tensor(math.log2(math.e))
            p_sink = (problem.sinks[:, None] * log2e - trace.lse * log2e).exp2()
            terms = (p_sink * trace.delta).transpose(0, 1).flatten(1)
            found = -terms.cumsum(-1)[:, -1]
            contract = Contract(case, spec, "cpu")
            assert not contract.compare({"dsinks": found})["dsinks"].is_outside
            wrong = contract.compare({"dsinks": found * 1.01})["dsinks"]
            assert wrong.is_outside or spec is not sagesim.FPA

    def test_programs_of_earlier_reports_run(self, capsys):
        """They zip the fields of the outputs."""
        for sinks in (False, True):
            case = FuzzCase(n_q=3, n_k=5, d=16, sinks=sinks)
            one, two = (case.run(attention, spec=FACTORED) for _ in range(2))
            for name, ours, theirs in zip(one._fields, one, two, strict=True):
                print(name, (ours.double() - theirs.double()).abs().max().item())
        assert capsys.readouterr().out.count(" 0.0") == 10


class TestContract:
    CASE = FuzzCase(n_q=100, n_k=70, d=16, kv_heads=2, seed=3)

    def test_the_allowed_noise_is_less_than_half_of_the_specs_error(self):
        """A larger one would allow any other rounding too. The gradient of a sink is one sum over
        all rows, in which the spec's errors average out."""
        contract = Contract(self.CASE, SAGEBWD, "cpu")
        for name in ORDER[:-1]:
            assert 0 < 2 * contract.noise[name][1] < 0.5 * contract.rounding(name)

    def test_a_spec_that_rounds_nothing_allows_only_float32_errors(self):
        contract = Contract(replace(self.CASE, sinks=True), FPA, "cpu")
        for name in ORDER[:-1]:
            size = getattr(contract.emulator, name).abs().max()
            assert contract.noise[name][0] < 1e-4 * float(size)
        assert contract.noise["dsinks"][0] < 1e-3 * float(contract.emulator.dsinks.abs().max())

    def test_an_infinity_breaks_the_contract_if_the_emulator_is_finite(self):
        contract = Contract(self.CASE, FPA, "cpu")
        outputs = {k: v.clone() for k, v in contract.emulator._asdict().items()}
        outputs["dk"][0, 1, 2, 3] = torch.inf
        found = contract.compare(outputs)["dk"]
        assert found.is_outside and found.worst == (0, 1, 2, 3) and found.ratio == torch.inf

    def test_any_result_is_allowed_if_the_emulator_overflows(self):
        kinds = ("gaussian", "gaussian", "offset", "offset")
        case = replace(self.CASE, dtype="float16", gains=(0, 0, 6, 6), kinds=kinds)
        contract = Contract(case, FPA, "cpu")
        assert not contract.emulator.dq.isfinite().all()
        outputs = {
            k: v.nan_to_num(1.0, 65504, -65504) for k, v in contract.emulator._asdict().items()
        }
        assert not any(d.is_outside for d in contract.compare(outputs).values())

    def test_one_wrong_row_breaks_the_contract(self):
        contract = Contract(self.CASE, SAGEBWD, "cpu")
        outputs = {k: v.clone() for k, v in contract.emulator._asdict().items()}
        outputs["o"][0, 0, 99] *= 1.2
        found = contract.compare(outputs)
        assert [name for name in ORDER if found[name].is_outside] == ["o"]
        assert found["o"].worst[:3] == (0, 0, 99)


@pytest.mark.parametrize(
    "outside, sites",
    [
        ("o dv dq dk", "qk"),
        ("o dv", "qk"),
        ("o dq dk", "pv dp"),
        ("o", "pv"),
        ("dv dq dk", "qk_recompute"),
        ("dv dk", "dv dk"),
        ("dv", "dv"),
        ("dq dk", "dp dq dk"),
        ("dq", "dq"),
        ("dk", "dk"),
        ("dsinks", "dsinks"),
        ("dq dk dsinks", "dp dq dk"),
    ],
)
def test_the_site_follows_from_the_outputs_that_differ(outside, sites):
    ratios = dict.fromkeys(ORDER, 0.5) | dict.fromkeys(outside.split(), 20.0)
    assert infer([ratios]).names == tuple(sites.split())


def test_a_small_error_of_one_gradient_may_be_that_of_ds():
    ratios = {"o": 0.1, "dv": 0.1, "dq": 0.6, "dk": 1.5}
    site = infer([ratios])
    assert site.names == ("dk", "dp") and "dq may hide it" in site.reason
    assert infer([ratios, ratios | {"dk": 20.0}]).names == ("dk",)


def test_a_constant_factor_is_found():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert factor(x * 8, x) == pytest.approx(8)
    assert factor(x, x) is factor(x + 1, x) is factor(x, x * 0) is None


@pytest.mark.slow
def test_the_same_arguments_give_the_same_report(monkeypatch):
    monkeypatch.setattr("sagesim.fuzzing.shrinking.explanations", lambda *args, **options: ())
    options = {"spec": BOTH, "cases": 8, "head_sizes": (16,), "max_length": 40}
    state = torch.get_rng_state()
    one, two = (fuzz(kernel(BOTH, "dK not scaled"), seed=7, **options) for _ in range(2))
    assert one == two and str(one) == str(two)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cases": 0}, "cases: 0"),
        ({"head_sizes": ()}, "head_sizes"),
        ({"max_length": -1}, "max_length: -1"),
        ({"dtypes": ("float64",)}, "float64"),
        ({"dtypes": ()}, "dtypes: none"),
        ({"without": ("gaq",)}, "gaq"),
        ({"without": ("full", "causal")}, "full and causal together exclude all calls"),
        ({"max_length": 63, "without": ("tails",)}, "max_length=63 is less than 64"),
    ],
)
def test_an_invalid_argument_raises_and_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        fuzz(attention, spec=SAGEBWD, **options)


def test_a_label_instead_of_a_spec_raises(as_installed):
    with pytest.raises(TypeError, match=r"AttentionSpec\.parse"):
        fuzz(attention, spec="sagebwd")


def test_without_hypothesis_the_error_names_the_extra_to_install(monkeypatch):
    for module in ("hypothesis", "sagesim.fuzzing.hypothesis_search", "sagesim.fuzzing.strategies"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "sagesim.fuzzing.hypothesis_search")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'sagebwd\[fuzz\]'") as error:
        fuzz(attention, spec=SAGEBWD)
    assert error.value.name == "hypothesis"


MODULE = """
import sagesim

def right(q, k, v, **options):
    return sagesim.attention(q, k, v, spec=sagesim.FACTORED, **options)

class wrong:
    @staticmethod
    def dq(q, k, v, **options):
        return sagesim.attention(q + q - q.detach(), k, v, spec=sagesim.FACTORED, **options)

number = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a module of functions to fuzz."""
    (tmp_path / "fuzzed_kernels.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "fuzzed_kernels", raising=False)
    return tmp_path


NARROW = ["--spec", "factored", "--cases", "12", "--max-length", "70", "--head-sizes", "16"]


class TestCommand:
    def test_exit_code_0_if_no_case_fails(self, here, capsys):
        assert main(["fuzz", "fuzzed_kernels:right", *NARROW]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        first, second = out.splitlines()
        assert first == "fuzzed_kernels:right agrees with the emulator under 'factored'"
        assert second.endswith("cases on cpu, seed 0: o, dv, dq and dk within the contract")

    @pytest.mark.slow
    def test_exit_code_1_if_a_case_fails_and_the_snippet_reproduces_it(self, here, capsys):
        assert main(["fuzz", "fuzzed_kernels:wrong.dq", *NARROW]) == 1
        out, err = capsys.readouterr()
        assert "shrinking the failing call" in err
        assert "inferred   dq: dQ = dS K" in out
        assert "dq is the emulator's times 2 in" in out
        assert max(map(len, out.splitlines())) < 110
        _, _, snippet = out.partition("reproduce with\n\n")
        lines = [line[4:] for line in snippet.splitlines()]
        assert len(lines) < 12
        ran = subprocess.run(
            [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=here
        )
        assert ran.returncode == 0, ran.stderr
        largest = {line.split()[0]: float(line.split()[1]) for line in ran.stdout.splitlines()}
        assert largest["o"] == largest["dk"] == largest["dv"] == 0 and largest["dq"] > 0

    @pytest.mark.slow
    def test_no_file_is_left_in_the_current_folder(self, here):
        """Hypothesis takes the folder in which Python starts for its own."""
        words = ["fuzz", "fuzzed_kernels:right", *NARROW]
        code = f"from sagesim.cli import main; main({words})"
        subprocess.run([sys.executable, "-B", "-c", code], check=True, cwd=here)
        assert [path.name for path in here.iterdir()] == ["fuzzed_kernels.py"]

    @pytest.mark.parametrize(
        "argv, message",
        [
            ([], "required: PACKAGE.MODULE:FUNCTION"),
            (["fuzzed_kernels"], "not of the form package.module:function"),
            (["fuzzed_kernels:"], "not of the form package.module:function"),
            (["no_such_module:f"], "no_such_module cannot be imported"),
            ([".fuzzed_kernels:right"], ".fuzzed_kernels cannot be imported: TypeError: "),
            (["fuzzed_kernels:left"], "fuzzed_kernels has no 'left'"),
            (["fuzzed_kernels:number"], "is of type int, not a function"),
            (["fuzzed_kernels:right", "--spec", "factord"], "did you mean 'factored'?"),
            (["fuzzed_kernels:right", "--cases", "0"], "cases: 0"),
            (["fuzzed_kernels:right", "--max-length", "0"], "max_length: 0"),
            (["fuzzed_kernels:right", "--head-sizes", "16", "0"], "head_sizes: 16, 0"),
            (["fuzzed_kernels:right", "--seed", "-1"], "--seed -1 is not in 0.."),
            (["fuzzed_kernels:right", "--dtypes", "float8"], "invalid choice: 'float8'"),
            (["fuzzed_kernels:right", "--without", "gaq"], "invalid choice: 'gaq'"),
            (
                ["fuzzed_kernels:right", "--without", "full", "causal"],
                "full and causal together exclude all calls",
            ),
            (["fuzzed_kernels:right", "--device", "gpu"], "--device gpu: "),
            (
                ["fuzzed_kernels:right", "--max-length", "40", "--without", "tails"],
                "max_length=40 is less than 64; without tails, lengths are multiples of their",
            ),
        ],
    )
    def test_invalid_input_prints_one_line_and_gives_exit_code_2(self, argv, message, here, capsys):
        assert main(["fuzz", *argv]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("sagesim: ") and err.count("\n") == 1
        assert message in err

    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("raise RuntimeError('no\\ndevice')", "RuntimeError: no device"),
            ("import sys; sys.exit(0)", "SystemExit: 0"),
            ("def broken(:", "SyntaxError: "),
            ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ],
    )
    def test_a_module_that_cannot_be_imported_is_named_with_its_error(
        self, source, words, here, capsys
    ):
        (here / "broken_kernels.py").write_text(source)
        assert main(["fuzz", "broken_kernels:f"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert err.startswith(f"sagesim: broken_kernels cannot be imported: {words}")

    def test_without_hypothesis_the_command_names_the_extra(self, here, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "hypothesis", None)
        for module in ("sagesim.fuzzing.hypothesis_search", "sagesim.fuzzing.strategies"):
            monkeypatch.delitem(sys.modules, module)
        assert main(["fuzz", "fuzzed_kernels:right"]) == 2
        assert "pip install 'sagebwd[cli]'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_snippet_imports_the_function():
    report = fuzz(sagesim.attention, spec=FPA, cases=3, max_length=20)
    assert report.function == "sagesim.emulator.autograd:attention"
    assert report.failure is not None
    assert "from sagesim.emulator.autograd import attention\n" in report.failure.snippet
