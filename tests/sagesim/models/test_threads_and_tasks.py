"""Contexts of several threads and asyncio tasks, entered and left in any order."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import sagesim
from sagesim import FPA_BF16, SAGEBWD
from sagesim.emulator.passes import plain_float32
from sagesim.models import capture, emulate
from sagesim.models.sdpa_mode import sdpa_calls
from sagesim.process_wide import ProcessWide
from tests.support.assertions import assert_bitwise

X = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
SPECS = {"a": SAGEBWD, "b": FPA_BF16}
PATIENCE = 60


def attend() -> Tensor:
    return F.scaled_dot_product_attention(X, X, X)


def emulated(spec) -> Tensor:
    return sagesim.attention(X, X, X, spec=spec)


def state() -> tuple:
    """What a context changes in the process and in this thread."""
    return (
        eval_frame._stance.stance,
        len(hooks._global_forward_pre_hooks),
        len(hooks._global_forward_hooks),
        _get_current_function_mode_stack(),
    )


@pytest.fixture(autouse=True)
def unchanged():
    """After all contexts are left, the process is as before."""
    before = state()
    yield
    assert state() == before


class Turns:
    """Lets several threads take turns: `take(n)` waits until n turns have been taken."""

    def __init__(self) -> None:
        self.taken, self.condition = 0, threading.Condition()

    def take(self, number: int) -> None:
        with self.condition:
            assert self.condition.wait_for(lambda: self.taken == number, PATIENCE)

    def done(self) -> None:
        with self.condition:
            self.taken += 1
            self.condition.notify_all()


def in_threads(*steps) -> list:
    with ThreadPoolExecutor(len(steps)) as pool:
        return [each.result(PATIENCE) for each in [pool.submit(step) for step in steps]]


def test_threads_that_overlap_have_a_spec_each():
    turns = Turns()

    def run(name: str, enter: int, leave: int) -> Tensor:
        turns.take(enter)
        with emulate(SPECS[name]):
            turns.done()
            o = attend()
            turns.take(leave)
        turns.done()
        return o

    a, b = in_threads(lambda: run("a", 0, 2), lambda: run("b", 1, 3))
    for o, spec in ((a, SAGEBWD), (b, FPA_BF16)):
        assert_bitwise(actual=o, expected=emulated(spec), what="o")


def test_compiled_code_is_compiled_again_after_overlapping_threads():
    compiled: list[int] = []

    def backend(graph, _):
        compiled.append(1)
        return graph.forward

    turns = Turns()

    def run(enter: int, leave: int) -> None:
        turns.take(enter)
        with sdpa_calls(lambda call, run: run()):
            turns.done()
            turns.take(leave)
        turns.done()

    in_threads(lambda: run(0, 2), lambda: run(1, 3))
    torch.compile(lambda x: x + 1, backend=backend)(X)
    assert compiled == [1]


def interleaved(*tasks) -> list:
    """Run tasks that give way to each other at each `await asyncio.sleep(0)`."""

    async def gather():
        return await asyncio.gather(*(task() for task in tasks))

    return asyncio.run(gather())


def test_tasks_that_overlap_have_a_spec_each():
    """A second task enters before the first leaves, and leaves after it. The third enters none."""

    def task(name: str | None):
        async def run() -> list[Tensor]:
            found = []
            if name is None:
                for _ in range(6):
                    await asyncio.sleep(0)
                    found.append(attend())
                return found
            if name == "b":
                await asyncio.sleep(0)
            with emulate(SPECS[name]):
                for _ in range(3):
                    await asyncio.sleep(0)
                    found.append(attend())
            await asyncio.sleep(0)
            return found

        return run

    a, b, plain = interleaved(task("a"), task("b"), task(None))
    expected = emulated(SAGEBWD), emulated(FPA_BF16), attend()
    for found, wanted in zip((a, b, plain), expected, strict=True):
        for o in found:
            assert_bitwise(actual=o, expected=wanted, what="o")


def test_a_task_that_is_created_inside_a_context_belongs_to_it():
    async def child() -> Tensor:
        return attend()

    async def parent() -> tuple[Tensor, Tensor]:
        with emulate(SAGEBWD):
            inside = await asyncio.create_task(child())
            late = asyncio.create_task(child())
        return inside, await late

    inside, late = asyncio.run(parent())
    assert_bitwise(actual=inside, expected=emulated(SAGEBWD), what="o inside")
    assert_bitwise(actual=late, expected=attend(), what="o after the context")


def test_names_do_not_depend_on_modules_of_other_tasks():
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    inner = nn.Sequential(Attend())
    outer = nn.ModuleDict({"inner": inner})
    outer.forward = lambda x: inner(x)
    names: list[str] = []

    async def other() -> None:
        await asyncio.sleep(0)
        outer(X)

    async def records() -> None:
        with sdpa_calls(lambda call, run: names.append(call.name) or run()):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            inner(X)

    interleaved(records, other)
    assert names == ["0"]


def test_tasks_may_capture_at_the_same_time():
    def task(scale: float):
        async def run():
            x = (X * scale).requires_grad_()
            with capture() as recording:
                await asyncio.sleep(0)
                o = F.scaled_dot_product_attention(x, x, x)
                await asyncio.sleep(0)
                o.sum().backward()
                await asyncio.sleep(0)
            return recording.result()

        return run

    for scale, found in zip((1.0, 2.0), interleaved(task(1.0), task(2.0)), strict=True):
        (call,) = found.calls
        assert_bitwise(actual=call.q, expected=X * scale, what="q")


def test_modes_of_the_caller_stay_where_they_are():
    class Mine(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    first = sdpa_calls(lambda call, run: run())
    first.__enter__()
    with Mine() as mine:
        first.__exit__(None, None, None)
        assert _get_current_function_mode_stack()[-1] is mine


def test_leaving_in_another_thread_raises():
    context = sdpa_calls(lambda call, run: run())
    context.__enter__()
    mode = _get_current_function_mode_stack()[-1]
    with pytest.raises(RuntimeError, match="was entered in another thread"):
        in_threads(lambda: context.__exit__(None, None, None))
    assert attend().shape == X.shape
    assert _get_current_function_mode_stack()[-1] is mode
    torch.overrides._pop_mode()


class Deep(torch.autograd.Function):
    """Its backward runs a backward inside a backward, `depth` times, and then `last`.

    PyTorch moves backwards that are nested more than 60 deep to a thread of its autograd engine.
    """

    @staticmethod
    def forward(ctx, x: Tensor, depth: int, last) -> Tensor:
        ctx.depth, ctx.last = depth, last
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        with torch.enable_grad():
            if ctx.depth:
                # Tensor.backward would call each mode: too many Python frames at this depth.
                x = Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.last)
                torch.autograd.graph._engine_run_backward(
                    (x,),
                    (torch.ones(1),),
                    False,
                    False,
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
            else:
                ctx.last()
        return grad, None, None


def deep_backward(last) -> None:
    Deep.apply(torch.ones(1, requires_grad=True), 70, last).backward()


def test_a_recomputation_in_a_thread_of_the_autograd_engine_belongs_to_the_task():
    """The engine's threads know no tasks: the context of the backward's caller applies."""
    here = threading.get_ident()

    def task(name: str, seen: list[tuple[str, bool, bool]]):
        async def run() -> None:
            x = X.clone().requires_grad_()

            def handler(call, run) -> Tensor:
                seen.append((name, call.recomputed, threading.get_ident() == here))
                return run()

            with sdpa_calls(handler):
                await asyncio.sleep(0)
                o = checkpoint(F.scaled_dot_product_attention, x, x, x, use_reentrant=False)
                await asyncio.sleep(0)
                deep_backward(lambda: o.sum().backward())
                await asyncio.sleep(0)

        return run

    seen: list[tuple[str, bool, bool]] = []
    interleaved(task("a", seen), task("b", seen))
    expected = [(name, False, True) for name in "ab"] + [(name, True, False) for name in "ab"]
    assert seen == expected


class TestPlainFloat32:
    def test_threads_that_overlap_compute_in_float32_and_restore_the_setting(self):
        setting = torch.backends.cuda.matmul
        before = setting.fp32_precision
        setting.fp32_precision = "tf32"
        turns, seen = Turns(), []

        def run(enter: int, leave: int) -> None:
            turns.take(enter)
            with plain_float32("cpu"):
                turns.done()
                seen.append(setting.fp32_precision)
                turns.take(leave)
                seen.append(setting.fp32_precision)
            turns.done()

        try:
            in_threads(lambda: run(0, 2), lambda: run(1, 3))
            assert (seen, setting.fp32_precision) == (["ieee"] * 4, "tf32")
        finally:
            setting.fp32_precision = before


class TestProcessWide:
    def test_the_first_changes_and_the_last_restores(self):
        made = []

        class Change:
            def __enter__(self):
                made.append("changed")

            def __exit__(self, *_):
                made.append("restored")

        shared = ProcessWide(Change)
        for _ in range(2):
            shared.__enter__()
            shared.__enter__()
            assert made == ["changed"]
            shared.__exit__()
            assert made == ["changed"]
            shared.__exit__()
            assert made == ["changed", "restored"]
            made.clear()

    def test_a_change_that_fails_leaves_nobody_inside(self):
        fails = [True]

        class Change:
            def __enter__(self):
                if fails.pop():
                    raise ArithmeticError
                fails.append(False)

            def __exit__(self, *_):
                fails.append(False)

        shared = ProcessWide(Change)
        with pytest.raises(ArithmeticError), shared:
            pass
        fails.append(False)
        with shared:
            pass
        assert fails == [False, False]
