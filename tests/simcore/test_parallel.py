"""Fan-out: the same results on one process and on many, and errors that arrive as they were raised."""

import os
import subprocess
import sys
from pathlib import Path

import fan_out_jobs as work
import pytest

from simcore.errors import BadInput, PolicyError, TraceError
from simcore.parallel import fan_out


def test_results_in_the_order_of_the_jobs_on_one_process_and_on_two():
    one = fan_out(work.square, range(7), processes=1)
    two = fan_out(work.square, range(7), processes=2)
    assert [result[:2] for result in one] == [result[:2] for result in two] == [(job, job**2) for job in range(7)]
    assert {pid for _, _, pid in one} == {os.getpid()}
    assert os.getpid() not in {pid for _, _, pid in two}


@pytest.mark.parametrize("processes", [1, 2])
def test_progress_reaches_the_end_for_every_job_and_never_falls(processes):
    reports = {}
    fan_out(work.square, [1, 2, 3], processes=processes, report=lambda job, share: reports.setdefault(job, []).append(share))
    assert sorted(reports) == [0, 1, 2]
    for shares in reports.values():
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


def test_nothing_is_spawned_for_one_job_and_nothing_happens_for_none():
    assert fan_out(work.square, [5], processes=8) == [(5, 25, os.getpid())]
    assert fan_out(work.square, [], processes=8) == []


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("job", "error", "message", "fields"),
    [
        ("bad input", TraceError, "trace.csv:7: output_tokens: found -3: allowed: at least 1",
         {"where": "trace.csv:7", "key": "output_tokens", "found": -3, "allowed": "at least 1", "why": ""}),
        ("policy", PolicyError, "policy Hold at t=1.500000 s: pin of block 7, which is free",
         {"policy": "Hold", "time": 1.5, "decision": "pin of block 7, which is free"}),
        ("plain", KeyError, "'lost'", {"args": ("lost",)}),
    ],
)
def test_the_error_of_a_job_arrives_with_type_message_and_fields(processes, job, error, message, fields):
    with pytest.raises(error) as caught:
        fan_out(work.refuse, ["fine", job, "fine"], processes=processes)
    assert type(caught.value) is error
    assert str(caught.value) == message
    assert {name: getattr(caught.value, name) for name in fields} == fields


def test_a_failure_does_not_wait_for_the_other_jobs():
    """The endless job would take ten minutes."""
    with pytest.raises(PolicyError):
        fan_out(work.refuse, ["endless", "policy", "fine", "endless", "endless"], processes=2)


def test_of_two_failures_at_one_time_that_of_the_first_job_is_raised():
    for _ in range(3):
        with pytest.raises(TraceError):
            fan_out(work.refuse, ["bad input", "policy"], processes=2)


@pytest.mark.parametrize("job", ["dies", "unsendable"])
def test_a_worker_that_dies_and_an_error_that_cannot_travel_end_the_run(job):
    function, jobs = (work.refuse, ["fine", "dies", "fine"]) if job == "dies" else (work.unsendable, [1, 2, 3])
    with pytest.raises(Exception, match="process"):
        fan_out(function, jobs, processes=2)


def test_work_that_cannot_travel_is_an_error():
    with pytest.raises((AttributeError, TypeError, BadInput), match="pickle"):
        fan_out(lambda job, progress: job, [1, 2], processes=2)


def test_a_failure_among_large_jobs_ends_quietly():
    """In a process of its own, since what used to hang was its end. The timeout is a guard, not a measurement."""
    ran = subprocess.run(
        [sys.executable, "-c", "import fan_out_jobs; fan_out_jobs.fails_among_large_jobs()"],
        capture_output=True, text=True, timeout=120, cwd=Path(work.__file__).parent,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "raised first\n" * 3, "")
