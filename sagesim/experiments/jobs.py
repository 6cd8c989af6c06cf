"""Independent jobs, and how they are run: here, one after the other (`one_by_one`).

`sagesim.experiments.cluster` runs the same jobs at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Report = Callable[[int, int, str], bool]
"""What a job calls with its steps done, all its steps, and words. If the answer is true, the job
should save and return."""


class Job(NamedTuple):
    """A job: the call `work(report, *arguments)`.

    A job may be killed and called again, so it continues from what it has saved, or starts anew.
    Names are unique. On a cluster, `work`, `arguments` and the result are pickled. An argument that
    several jobs share is sent once. A result is small: Ray leaves one of more than 100 kB on the
    machine that computed it, and runs the job again if it is lost with that machine.
    """

    name: str
    work: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """How far a running job is."""

    done: int  #: steps
    total: int  #: steps
    words: str


Watch = Callable[[Mapping[str, State], int], bool]
"""Is called again and again with the states of the running jobs by their names, and the number of
jobs that have ended. If the answer is true, running jobs are asked to return, and no other job is
started."""


@dataclass(frozen=True, slots=True)
class Workers:
    """What runs jobs.

    run(jobs, watch): yields each job that has ended, once, with its result, or with the exception
    that it raised. A job that raises does not stop the others.
    """

    run: Callable[[Iterable[Job], Watch], Iterator[tuple[Job, Any]]]
    has_gpu: bool  #: whether jobs run on GPUs


def one_by_one(jobs: Iterable[Job], watch: Watch) -> Iterator[tuple[Job, Any]]:
    """Run jobs in this process, one after the other; see `Workers.run`."""
    ended = 0
    for job in jobs:
        if watch({}, ended):
            return
        yield job, _result(job, watch, ended)
        ended += 1
    watch({}, ended)


def _result(job: Job, watch: Watch, ended: int) -> Any:
    def report(done: int, total: int, words: str) -> bool:
        return watch({job.name: State(done, total, words)}, ended)

    try:
        return job.work(report, *job.arguments)
    except Exception as error:
        return error
