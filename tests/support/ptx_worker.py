"""Run the kernels of a GPU on the CPU, in a process of their own; see `ptx`.

`PtxRunner` starts this program, because the interpreter that other tests use excludes compiling. It
reads one request a line and writes one reply a line; all lines are JSON. A request names files:
one with the arguments of a call, and one for its results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sagesim.spec import AttentionSpec
from tests.support.compiler import OLDEST, ROOT
from tests.support.many_steps import in_many_steps

if TYPE_CHECKING:
    from sagesim_kernels.operands import KernelProblem


class KernelRun(NamedTuple):
    """What the kernels computed."""

    o: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_sinks: Tensor | None
    kernels: list[str]  #: for mma.sync or Hopper that ran
    config: dict[str, int]  #: of the kernels that have a `Config`: its fields
    races: list[str]  #: of the backward; see `Program.races_without_barriers`


class PreparedRun(NamedTuple):
    """What `prepare_forward` computed."""

    k_mean: Tensor
    q: Tensor  #: codes, in padded storage
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor


class PreparedBackward(NamedTuple):
    """What the preparation of a backward computed."""

    delta: Tensor
    unit: Tensor  #: in padded storage, as all that follow
    sums: Tensor  #: of dQ
    row_stats: Tensor
    q: Tensor  #: codes
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor
    deltas: Tensor  #: `delta_words`; no elements unless TMA adds the sums of dQ


class PtxRunner:
    """A process that runs kernels. folder: for its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (OLDEST, ROOT)))
        environment["TRITON_CACHE_DIR"] = str(folder / "triton")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.support.ptx_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(
        self,
        tensors: dict[str, Tensor],
        spec: AttentionSpec,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        lower_right: bool = False,
        window: tuple[int, int] = (-1, -1),
        capability: int = 80,
        softcap: float | None = None,
        removes_barriers: bool = False,
        keeps_operands: bool = False,
        has_many_steps: bool = False,
    ) -> KernelRun:
        """Run a forward and its backward.

        tensors: q, k, v and do, [batch, heads, tokens, channels], and any of the tensors of
            `Extras`. With cu_q and cu_k, int32 [sequences + 1], the tokens are packed sequences;
            with cu_q alone, those of keys and queries have equal lengths.
            d_lse, float32 [batch, heads, tokens]: the gradient of the logsumexp.
        lower_right: how the causal mask is aligned.
        capability: compute capability of the GPU for which the kernels are compiled, of those in
            `compile_worker.SHARED_MEMORY`. Tiles depend on its shared memory.
        keeps_operands: the backward gets the operands that the forward rounded, as in a trace.
        has_many_steps: see `tests.support.many_steps`.
        removes_barriers: find the races of the backward without its barriers. This spoils dq.
        """
        reply, results = self._ask(
            tensors,
            spec,
            job="run",
            scale=tensors["q"].shape[3] ** -0.5 if scale is None else scale,
            is_causal=is_causal,
            lower_right=lower_right,
            window=window,
            softcap=softcap,
            capability=capability,
            removes_barriers=removes_barriers,
            keeps_operands=keeps_operands,
            has_many_steps=has_many_steps,
        )
        return KernelRun(**results, **reply)

    def prepare(
        self, tensors: dict[str, Tensor], spec: AttentionSpec, **options: Any
    ) -> PreparedRun:
        """Run `prepare_forward`. options: those of `_prepare`."""
        return PreparedRun(**self._prepare("prepare", tensors, spec, scale=1.0, **options))

    def prepare_backward(
        self,
        tensors: dict[str, Tensor],
        spec: AttentionSpec,
        *,
        by_tma: bool,
        tile: int,
        **options: Any,
    ) -> PreparedBackward:
        """Run `prepare_backward_in_one_pass`; see `prepared_backward`.

        tensors: o and lse2 as well, and k_mean if K is smoothed. options: those of `_prepare`.
        """
        options |= {"by_tma": by_tma, "tile": tile}
        return PreparedBackward(**self._prepare("prepare_backward", tensors, spec, **options))

    def _prepare(
        self,
        job: str,
        tensors: dict[str, Tensor],
        spec: AttentionSpec,
        *,
        scale: float,
        is_causal: bool,
        lower_right: bool,
        window: tuple[int, int],
        capability: int = 80,
        **more: Any,
    ) -> dict[str, Tensor]:
        """Run one job; see `run`. more: fields of the request that this job alone has."""
        _, results = self._ask(
            tensors,
            spec,
            job=job,
            scale=scale,
            is_causal=is_causal,
            lower_right=lower_right,
            window=window,
            softcap=None,
            capability=capability,
            removes_barriers=False,
            **more,
        )
        return results

    def _ask(
        self, tensors: dict[str, Tensor], spec: AttentionSpec, **request: Any
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Send a request; return the reply and the results."""
        files = {name: str(self._folder / f"{name}.pt") for name in ("arguments", "results")}
        torch.save(tensors, files["arguments"])
        request |= {**files, "spec": spec.label()}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process ended without a reply; its stderr says why")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply, torch.load(files["results"])

    def close(self) -> None:
        self._process.communicate()


def problem_of(
    tensors: dict[str, Tensor],
    spec: AttentionSpec,
    *,
    scale: float,
    is_causal: bool,
    lower_right: bool,
    window: tuple[int, int],
    softcap: float | None = None,
) -> KernelProblem:
    """Return a problem; see `PtxRunner.run`. tensors: without do and d_lse."""
    from sagesim.problem import resolve_input16
    from sagesim_kernels.operands import Extras, KernelProblem, Packing

    rest = dict(tensors)
    q, k, v = (rest.pop(name) for name in ("q", "k", "v"))
    packing = None
    if "cu_q" in rest:
        cu_q, cu_k = rest.pop("cu_q"), rest.pop("cu_k", None)
        longest = [int(x.diff().max()) for x in (cu_q, cu_q if cu_k is None else cu_k)]
        packing = Packing(cu_q, cu_k, *longest)
    return KernelProblem.of(
        q,
        k,
        v,
        spec=resolve_input16(spec, q.dtype),
        scale=scale,
        is_causal=is_causal,
        lower_right=lower_right,
        packing=packing,
        extras=Extras(window=window, softcap=softcap, **rest),
    )


def _problem(request: dict[str, Any], tensors: dict[str, Tensor]) -> KernelProblem:
    return problem_of(
        tensors,
        AttentionSpec.parse(request["spec"]),
        scale=request["scale"],
        is_causal=request["is_causal"],
        lower_right=request["lower_right"],
        window=tuple(request["window"]),
        softcap=request["softcap"],
    )


def prepared(problem: KernelProblem) -> PreparedRun:
    """Run `prepare_forward`."""
    from sagesim_kernels.operands import Copied
    from sagesim_kernels.preparation.forward import prepare_forward

    operands = prepare_forward(problem, copied=Copied())
    q, k = (operands.get("qk", name) for name in ("q", "k"))
    assert operands.k_mean is not None
    return PreparedRun(operands.k_mean.ptr, q.ptr, q.scale, k.ptr, k.scale)


def _prepare(request: dict[str, Any]) -> dict[str, Tensor]:
    return prepared(_problem(request, torch.load(request["arguments"])))._asdict()


def prepared_backward(
    problem: KernelProblem,
    o: Tensor,
    do: Tensor,
    lse2: Tensor,
    *,
    k_mean: Tensor | None = None,
    d_lse: Tensor | None = None,
    by_tma: bool = True,
    tile: int = 64,
    prepare: Callable[..., Any] | None = None,
) -> PreparedBackward:
    """Prepare a backward, in memory that was filled with -7.

    lse2, d_lse: float32 [batch, heads, n_q]. k_mean: of K. by_tma: whether TMA adds the sums of dQ.
    tile: keys that a product of dQ sums over.
    prepare: a function in place of `prepare_backward_in_one_pass`, with the same arguments.
    """
    from sagesim_kernels.operands import DqSums, OperandCache, Rows, RowStatistics, padded

    if prepare is None:
        from sagesim_kernels.preparation.one_pass import prepare_backward_in_one_pass as prepare
    statistics = RowStatistics(Rows.of(lse2), Rows.of(torch.full_like(lse2, -7.0)))
    channels = padded(problem.q.shape[3])
    if by_tma:
        sums = DqSums.by_tma(problem, channels)
    else:
        sums = DqSums.by_threads(problem, 64, channels, 4)
    sums.sums.fill_(-7)
    sums.unit.fill_(-7.0)
    operands = OperandCache(problem, do, k_mean=k_mean)
    row_stats = torch.full((lse2.shape[1] * sums.tokens * 4,), -7.0, device=lse2.device)
    rows = None if d_lse is None else Rows.of(d_lse)
    # Bits of -7 are a NaN in bfloat16.
    words = row_stats.new_full((row_stats.numel() // 4 if by_tma else 0, 4), -7, dtype=torch.int32)
    deltas = words if by_tma else None
    prepare(problem, operands, o, do, statistics, rows, sums, row_stats, tile=tile, deltas=deltas)
    q, k = (operands.get("qk_recompute", name) for name in ("q", "k"))
    return PreparedBackward(
        statistics.delta.ptr, sums.unit, sums.sums, row_stats, q.ptr, q.scale, k.ptr, k.scale, words
    )


def _prepare_backward(request: dict[str, Any]) -> dict[str, Tensor]:
    tensors = torch.load(request["arguments"])
    given = {name: tensors.pop(name, None) for name in ("o", "do", "lse2", "k_mean", "d_lse")}
    problem = _problem(request, tensors)
    options = {name: request[name] for name in ("by_tma", "tile")}
    return prepared_backward(problem, **given, **options)._asdict()


def _run(request: dict[str, Any]) -> dict[str, Tensor]:
    from sagesim.spec import Delta
    from sagesim_kernels.dispatch import backward, forward
    from sagesim_kernels.operands import Gradients, OperandCache, natural_lse

    tensors = torch.load(request["arguments"])
    do, d_lse = tensors.pop("do"), tensors.pop("d_lse", None)
    problem = _problem(request, tensors)
    o = torch.empty_like(do)
    operands = OperandCache(problem, do) if request["keeps_operands"] else None
    grads = Gradients(*map(torch.empty_like, (problem.q, problem.k, problem.v)))
    is_from_o = problem.spec.delta is Delta.FROM_O
    o_of_delta = o if is_from_o else None
    with in_many_steps(request["has_many_steps"]):
        result = forward(problem, o, operands=operands)
        d_sinks, delta = backward(problem, do, d_lse, o_of_delta, result, grads, operands=operands)
    lse = natural_lse(problem, result)
    return {"o": o, "lse": lse, "delta": delta, "d_sinks": d_sinks, **grads._asdict()}


def main() -> None:
    from tests.support.garbage import collect_garbage_rarely
    from tests.support.ptx_device import PtxLaunches

    collect_garbage_rarely()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep output of the compiler out of the replies
    launches = PtxLaunches()
    for line in sys.stdin:
        request = json.loads(line)
        launches.kernels, launches.races, launches.config = [], [], {}
        launches.removes_barriers = request["removes_barriers"]
        launches.compile_for(request["capability"])
        try:
            jobs = {"run": _run, "prepare": _prepare, "prepare_backward": _prepare_backward}
            torch.save(jobs[request["job"]](request), request["results"])
            fields = ("kernels", "config", "races")
            reply = {name: getattr(launches, name) for name in fields}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
