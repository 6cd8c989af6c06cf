"""Run jobs at the same time by Ray: on all of one machine, or on the machines of a cluster.

The process that starts the jobs is the driver. It alone gets their results.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final

import torch

import sagesim
from sagesim.experiments.jobs import Job, State, Watch, Workers, one_by_one

LOCAL: Final = "local"
"""The address of this machine alone: Ray starts with the command and ends with it."""

_RETRIES: Final = 20
"""How often a job is run again after its worker or its machine died."""

_EVERY: Final = 0.5
"""Seconds between two looks at the jobs, and between two reports of a job."""

_REACHED_WITHIN: Final = 5.0
"""Seconds within which a cluster must answer. Ray itself waits for two minutes."""


@contextlib.contextmanager
def workers(address: str | None, *, gpu: float = 0.0) -> Generator[Workers]:
    """The workers at an address.

    A job whose worker or machine dies is run again, on any machine that is left. Without GPUs, as
    many jobs run at the same time as there are CPUs.

    Args:
        address: HOST:PORT of a Ray cluster that this machine belongs to; `LOCAL`; or None for
            this process, which runs one job after the other and needs no Ray.
        gpu: the share of a GPU that each job gets, if there are any; a job sees no other GPU.

    Raises:
        ValueError: if the address is not valid, or Ray is not installed.
        ConnectionError: if there is no cluster at the address.
    """
    if address is None:
        yield Workers(one_by_one, torch.cuda.is_available())
        return
    _check(address)
    with _connected(address):
        import ray

        gpu = gpu if ray.cluster_resources().get("GPU", 0) else 0.0
        yield Workers(functools.partial(_run, gpu), gpu > 0)


class _Board:
    """The states of all running jobs. One process keeps it, on the driver's machine."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._is_asked = False

    def tell(self, name: str, state: State) -> bool:
        """Set the state of a job; return whether jobs are asked to return."""
        self._states[name] = state
        return self._is_asked

    def forget(self, name: str) -> None:
        """Forget a job that has ended."""
        self._states.pop(name, None)

    def read(self) -> dict[str, State]:
        """The states of all jobs that have begun and not ended."""
        return self._states

    def ask(self) -> None:
        """Ask all jobs to return."""
        self._is_asked = True


def _run(gpu: float, jobs: Iterable[Job], watch: Watch) -> Iterator[tuple[Job, Any]]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # The board must not die with another machine.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    remote: Any = ray.remote
    board = remote(num_cpus=0, scheduling_strategy=here)(_Board).remote()
    task = remote(num_cpus=0 if gpu else 1, num_gpus=gpu, max_retries=_RETRIES)(_work)
    sent: dict[int, tuple[Any, Any]] = {}  # arguments by their id, which is unique while they live
    left: dict[Any, Job] = {}
    for job in jobs:
        for x in job.arguments:
            if id(x) not in sent:
                sent[id(x)] = x, ray.put(x)
        arguments = (sent[id(x)][1] for x in job.arguments)
        left[task.remote(sagesim.__version__, board, job.name, job.work, *arguments)] = job
    ended = 0
    while left:
        if watch(ray.get(board.read.remote()), ended):
            ray.get(board.ask.remote())
        done, _ = ray.wait(list(left), num_returns=len(left), timeout=_EVERY)
        for reference in done:
            job = left.pop(reference)
            # Ray crashes if it shuts down before the answer to a call arrives.
            ray.get(board.forget.remote(job.name))
            for result in _results(reference, job):
                ended += 1
                yield job, result
    watch({}, ended)


def _results(reference: Any, job: Job) -> list[Any]:
    """The result of a job that has ended, or its exception; nothing if it was never begun."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        error.cause.add_note(str(error))  # the traceback in the worker
        return [error.cause]
    except RayError as error:
        return [RuntimeError(f"{job.name}: its worker died {_RETRIES + 1} times: {error}")]


def _work(
    version: str, board: Any, name: str, work: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Run a job in a worker; its result is alone in the list, which is empty if it was not begun.

    version: of sagesim in the driver.
    """
    import ray

    if version != sagesim.__version__:
        raise ValueError(
            f"{socket.gethostname()} has sagesim {sagesim.__version__}, the driver {version}"
        )
    due = -math.inf
    is_asked: Any = False

    def report(done: int, total: int, words: str) -> bool:
        nonlocal due, is_asked
        if time.monotonic() >= due:
            is_asked = ray.get(board.tell.remote(name, State(done, total, words)))
            due = time.monotonic() + _EVERY
        return is_asked

    if report(0, 1, "starts"):
        return []
    return [work(report, *arguments)]


def _check(address: str) -> None:
    if find_spec("ray") is None:
        raise ValueError("a cluster needs the package ray: pip install 'sagebwd[cluster]'")
    if address == LOCAL:
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ValueError(f"cluster {address!r} is neither {LOCAL} nor HOST:PORT")
    try:
        socket.create_connection((host, int(port)), timeout=_REACHED_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"{address}: no Ray cluster answers: {error}") from None


_TOKEN: Final = secrets.token_hex(32)
"""Without it, whoever reaches a port of a local Ray could run code in it."""


@contextlib.contextmanager
def _connected(address: str) -> Generator[None]:
    wanted = {"RAY_USAGE_STATS_ENABLED": "0"}
    if address == LOCAL:
        wanted |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
    with _environment(wanted):
        import ray

        try:
            ray.init(
                address,
                include_dashboard=False if address == LOCAL else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, RuntimeError, SystemExit) as error:
            # After two minutes without an answer Ray exits.
            raise ConnectionError(f"{address}: no Ray cluster to run on: {error}") from None
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
