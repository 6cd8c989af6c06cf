"""Jobs in one process, and the addresses of clusters. test_cluster has those on a cluster."""

import pytest

from sagesim.experiments.cluster import workers
from sagesim.experiments.jobs import Job, State, one_by_one
from sagesim.terminal import jobs_shown


def double(report, x):
    report(1, 2, f"doubles {x}")
    if x < 0:
        raise ValueError(f"x={x} is negative")
    return 2 * x


def test_jobs_run_one_after_the_other_and_one_that_raises_stops_no_other():
    jobs = [Job(str(x), double, (x,)) for x in (1, -1, 3)]
    seen = []

    def watch(running, ended):
        seen.append((dict(running), ended))
        return False

    found = list(one_by_one(jobs, watch))
    assert [job for job, _ in found] == jobs
    assert (found[0][1], found[2][1]) == (2, 6) and str(found[1][1]) == "x=-1 is negative"
    for ended, x in enumerate((1, -1, 3)):
        assert ({str(x): State(1, 2, f"doubles {x}")}, ended) in seen
    assert seen[-1] == ({}, 3)


def test_a_job_is_asked_to_return_and_no_other_is_started():
    def count(report):
        return next(step for step in range(10) if report(step, 10, ""))

    is_asked = False

    def watch(running, _ended):
        nonlocal is_asked
        is_asked = is_asked or any(state.done == 4 for state in running.values())
        return is_asked

    jobs = [Job(name, count) for name in "ab"]
    assert [(job.name, x) for job, x in one_by_one(jobs, watch)] == [("a", 4)]


@pytest.mark.parametrize(
    "address, message",
    [
        ("auto", "cluster 'auto' is neither local nor HOST:PORT"),
        ("ray://here:10001", "cluster 'ray://here:10001' is neither local nor HOST:PORT"),
        (":6379", "cluster ':6379' is neither"),
        ("here:", "cluster 'here:' is neither"),
    ],
)
def test_an_address_of_another_form_raises(address, message, monkeypatch):
    monkeypatch.setattr("sagesim.experiments.cluster.find_spec", lambda _: True)
    with pytest.raises(ValueError, match=message), workers(address):
        pass


def test_a_cluster_that_does_not_answer_raises_at_once(monkeypatch):
    monkeypatch.setattr("sagesim.experiments.cluster.find_spec", lambda _: True)
    message = r"127\.0\.0\.1:1: no Ray cluster answers"
    with pytest.raises(ConnectionError, match=message), workers("127.0.0.1:1"):
        pass


def test_a_view_has_a_line_for_each_running_job(capsys, monkeypatch):
    monkeypatch.setattr("sagesim.terminal._LINE_EVERY", -1.0)
    with jobs_shown(3) as view:
        view.show({"a": (1, 4, "loss 2"), "b": (0, 9, "")}, 0)
        view.show({"b": (5, 9, "loss 1")}, 1)
    assert [line.rstrip() for line in capsys.readouterr().err.splitlines()] == [
        "0 of 3 jobs ended, 2 running",
        "  a  1/4  loss 2",
        "  b  0/9",
        "1 of 3 jobs ended, 1 running",
        "  b  5/9  loss 1",
    ]


def test_without_ray_the_message_names_the_extra(monkeypatch):
    monkeypatch.setattr("sagesim.experiments.cluster.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'sagebwd\[cluster\]'"), workers("local"):
        pass
