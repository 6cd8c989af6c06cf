"""Runs and rows on a cluster of two nodes, one of which is killed midway; jobs on a node with GPUs,
which need not be there; and runs on Ray embedded."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sagesim import PRESETS
from sagesim.experiments import spec_sweep
from sagesim.experiments.cluster import workers
from sagesim.experiments.jobs import Job
from sagesim.experiments.pretrain.plan.execution import DONE, execute
from sagesim.experiments.pretrain.plan.plan import PlannedRun
from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.run.settings import Machine
from sagesim.experiments.pretrain.training.checkpoint import CHECKPOINTS, steps_in
from sagesim.experiments.pretrain.training.trainer import train
from sagesim.experiments.spec_sweep import read_rows, sweep
from sagesim.models import Call, Capture
from tests.sagesim.experiments.pretrain.conftest import ALONE
from tests.sagesim.experiments.pretrain.plan.test_plan import TEXT as PLAN

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    # Ray leaves files and sockets of its processes to the end of the process.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

DEADLINE = 300
"""Seconds after which something that should happen has not happened. It takes a few."""

DEATH_IS_NOTICED = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 5,
}
"""A node that is killed refuses connections, and is dead after 2.5 s instead of 15. One that only
has no time to answer is dead after 25 s."""


PATIENCE = {
    "RAY_gcs_server_port_wait_time_s": str(DEADLINE),
    "RAY_raylet_start_wait_time_s": str(DEADLINE),
    "RAY_agent_register_timeout_ms": str(1000 * DEADLINE),
    "RAY_worker_register_timeout_seconds": str(DEADLINE),
}
"""Ray gives up a node that has not started within 30 s, and a busy machine takes longer."""


def patient(get_node):
    """Ray's `get_node`, which waits for a node that starts. Ray itself calls it for 30 s."""

    def found(*arguments):
        end = time.monotonic() + DEADLINE
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.2)

    return found


@pytest.fixture(scope="module")
def cluster():
    """A cluster of one node with one CPU, on which the driver is."""
    from ray._private import services
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "get_node", patient(services.get_node))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in PATIENCE.items():
            patch.setenv(name, value)
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": DEATH_IS_NOTICED}
        found = Cluster(initialize_head=True, head_node_args=head)
        yield found
        found.shutdown()


def node():
    """In a job: the id of its node."""
    import ray

    return ray.get_runtime_context().get_node_id()


class Doomed:
    """A second node of the cluster. As a `Watch`, it is killed when a job on it waits for that."""

    def __init__(self, cluster, folder):
        self._cluster, self._waits = cluster, folder / "waits"
        self._node = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes(DEADLINE)
        self.id, self.is_alive = self._node.node_id, True

    def __call__(self, running, ended):
        if self.is_alive and self.is_awaited():
            self._cluster.remove_node(self._node, allow_graceful=False)
            self.is_alive = False
        return False

    def is_awaited(self):
        """Whether a job has begun to wait for the end of this node."""
        return self._waits.exists()

    def wait(self):
        """In a job: wait for the end of this node."""
        self._waits.touch()
        time.sleep(DEADLINE)
        raise AssertionError("the node was not killed")

    def __reduce__(self):
        return _in_job, (self._waits, self.id)


def _in_job(waits, node_id):
    doomed = object.__new__(Doomed)
    doomed._waits, doomed.id = waits, node_id
    return doomed


def noted(report, job, checkpoints, note, doomed):
    """Run a job, and let a doomed node be killed after the third checkpoint.

    The note gets the job's node, and if the job ends the number of its steps.
    """
    steps = 0
    with note.open("a") as file:
        file.write(f"{node()} ")

    def reported(done, total, words):
        nonlocal steps
        steps += not words.startswith("waits")
        if node() == doomed.id and steps_in(checkpoints) == [10, 15]:
            doomed.wait()
        return report(done, total, words)

    end = job.work(reported, *job.arguments)
    with note.open("a") as file:
        file.write(f"{steps} ")
    return end


def raising(report, path):
    """Note that the job was called, and raise."""
    with path.open("a") as file:
        file.write("called\n")
    raise ValueError("it is bad")


def good(report):
    return "good"


def test_a_run_of_a_killed_node_continues_from_its_checkpoint(cluster, corpus, make_run, tmp_path):
    """Each run ends once, with the losses of a run that nobody killed."""
    machine = Machine(micro_batch=8, checkpoint_every=5)
    planned = [PlannedRun(make_run(steps=20, seed=seed)) for seed in (0, 1)]
    root, notes = tmp_path / "runs", tmp_path / "notes"
    notes.mkdir()
    doomed = Doomed(cluster, tmp_path)
    with workers(cluster.address, gpu=1.0) as here:
        assert not here.has_gpu

        def run(jobs, watch):
            paths = {job.name: (root / job.name / CHECKPOINTS, notes / job.name) for job in jobs}
            yield from here.run(
                [Job(job.name, noted, (job, *paths[job.name], doomed)) for job in jobs], watch
            )

        ends = [
            (each.folder, end)
            for each, end in execute(planned, root, corpus, machine, replace(here, run=run), doomed)
        ]
        # Here, because another connection takes seconds.
        bad = Job("bad", raising, (tmp_path / "bad",)), Job("good", good)
        raised = {job.name: end for job, end in here.run(bad, doomed)}
    assert not doomed.is_alive
    assert sorted(ends) == sorted((each.folder, DONE) for each in planned)
    begun = {each.folder: (notes / each.folder).read_text().split() for each in planned}
    (killed,) = (each for each in planned if len(begun[each.folder]) != 2)
    dead, alive, steps = begun.pop(killed.folder)
    assert dead == doomed.id != alive and steps == "5", "it continues after step 15"
    assert all(each == [alive, "20"] for each in begun.values())
    train(killed.run, tmp_path / "alone", corpus, machine, ALONE)
    found, alone = Log.read(root / killed.folder), Log.read(tmp_path / "alone")
    assert [step for step, _ in found.curve("train", "loss")] == list(range(1, 21))
    for group in ("train", "evaluation"):
        assert found.curve(group, "loss") == alone.curve(group, "loss")
    assert isinstance(raised["bad"], ValueError) and str(raised["bad"]) == "it is bad"
    assert raised["good"] == "good", "another job goes on"
    assert (tmp_path / "bad").read_text() == "called\n", "what raises is not run again"


def capture():
    generator = torch.Generator().manual_seed(0)
    calls = []
    for index in range(3):
        q, k, v, do = torch.randn(4, 1, 2, 200, 16, generator=generator)
        calls.append(Call(q=q, k=k, v=v, do=do, is_causal=True, index=index, name=str(index)))
    return Capture(calls=tuple(calls), loss_scale=1.0, source={}, torch_version="2")


def until(is_so):
    """Wait until something is so."""
    end = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def noted_row(report, job, note, doomed):
    """Compute a row of a sweep; the second row of a doomed node waits for its end, the others do
    not begin before. The note gets the nodes that began the row, and a word from one that ended it.
    """
    notes = [path.read_text() for path in note.parent.iterdir()]
    with note.open("a") as file:
        file.write(f"{node()} ")
    if node() != doomed.id:
        until(doomed.is_awaited)
    elif any(doomed.id in text for text in notes):
        doomed.wait()
    row = job.work(report, *job.arguments)
    with note.open("a") as file:
        file.write("ended ")
    return row


def test_a_sweep_whose_node_is_killed_has_the_rows_of_one_without_a_cluster(
    cluster, tmp_path, monkeypatch
):
    """The row that was computed when the node died is computed anew, and no other."""
    specs = [PRESETS[name] for name in ("fpa", "sagebwd", "factored")]
    alone = sweep(tmp_path / "alone.parquet", specs, {"a": capture()})
    doomed, notes = Doomed(cluster, tmp_path), tmp_path / "notes"
    notes.mkdir()

    @contextlib.contextmanager
    def noting(address):
        with workers(address) as here:

            def run(jobs, watch):
                named = [(job, notes / str(number)) for number, job in enumerate(jobs)]
                yield from here.run(
                    [Job(job.name, noted_row, (job, note, doomed)) for job, note in named], watch
                )

            yield replace(here, run=run)

    monkeypatch.setattr(spec_sweep, "workers", noting)
    rows = sweep(
        tmp_path / "cluster.parquet",
        specs,
        {"a": capture()},
        cluster=cluster.address,
        progress=doomed,
    )
    assert not doomed.is_alive
    begun = [path.read_text().split() for path in notes.iterdir()]
    (killed,) = (nodes for nodes in begun if nodes[1] != "ended")
    dead, alive, *ends = killed
    assert dead == doomed.id != alive and ends == ["ended"]
    others = Counter(tuple(nodes) for nodes in begun if nodes is not killed)
    assert others == {(doomed.id, "ended"): 1, (alive, "ended"): 7}
    keys = [(row["label"], row["layer"]) for row in rows]
    assert keys == [(row["label"], row["layer"]) for row in alone] and len(set(keys)) == 9
    stored = read_rows(tmp_path / "cluster.parquet")
    assert len(stored) == 9 and all(row in stored for row in rows)
    for one, other in zip(rows, alone, strict=True):
        # Sums of the float64 reference depend on the number of threads.
        assert math.isclose(one["dq_rel_l2"], other["dq_rel_l2"], rel_tol=1e-9)


def gpus_seen(_report, folder, jobs):
    """The GPUs that a job sees while all jobs run."""
    (folder / str(os.getpid())).touch()
    until(lambda: len(list(folder.iterdir())) == jobs)
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.exhaustive
def test_each_job_sees_one_gpu_and_shares_it_with_as_many_as_wanted(cluster, tmp_path):
    """On a node that tells Ray of two GPUs. The jobs do not use them."""
    gpus = cluster.add_node(num_cpus=1, num_gpus=2)
    cluster.wait_for_nodes(DEADLINE)
    try:
        for jobs_per_gpu in (1, 2):
            folder = tmp_path / str(jobs_per_gpu)
            folder.mkdir()
            arguments = folder, 2 * jobs_per_gpu
            jobs = [Job(str(number), gpus_seen, arguments) for number in range(2 * jobs_per_gpu)]
            with workers(cluster.address, gpu=1 / jobs_per_gpu) as here:
                assert here.has_gpu
                seen = Counter(end for _, end in here.run(jobs, lambda *_: False))
            assert seen == {"0": jobs_per_gpu, "1": jobs_per_gpu}
    finally:
        cluster.remove_node(gpus)


def processes_with(variable):
    """The ids of the processes with a variable in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.exhaustive
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes by /proc")
def test_ctrl_c_ends_the_runs_of_an_embedded_ray_after_a_step(corpus, tmp_path):
    """All runs have saved a checkpoint, and no process stays."""
    plan, root = tmp_path / "plan.toml", tmp_path / "runs"
    plan.write_text(PLAN.replace("tokens = 512", "tokens = 25_600_000"))
    words = ["pretrain", "plan", plan, corpus.folder, root, "--part", "two", "--emulate"]
    command = subprocess.Popen(
        [sys.executable, "-m", "sagesim.cli", *words, "--cluster", "local", "--micro-batch", "8"],
        env=os.environ | PATIENCE | {"RAY_TEST": (mark := f"{tmp_path}")},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        end = time.monotonic() + DEADLINE
        while not list(root.glob("*/log.parquet")) and time.monotonic() < end:
            assert command.poll() is None, command.stderr.read()
            time.sleep(0.1)
        begun = len(processes_with(mark))
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=DEADLINE)
    finally:
        command.kill()
    assert command.returncode == 130, err
    assert "interrupted; the same command continues the plan" in err
    assert begun > 1
    until(lambda: not processes_with(mark))  # on a busy machine a worker takes seconds to exit
    logs = list(root.glob("*/log.parquet"))
    assert logs
    for log in logs:
        assert steps_in(log.parent / CHECKPOINTS)[-1] == Log.read(log).last_step
