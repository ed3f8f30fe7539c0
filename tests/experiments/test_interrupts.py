"""Ctrl-C leaves what was finished, marked as a part."""

from __future__ import annotations

import json
import os
import signal

import pytest
from small_studies import study_text

from simcore.experiments import cli
from simcore.experiments import compare as compares
from simcore.experiments.compare import compare
from simcore.experiments.run import Job, build_workload, play
from simcore.experiments.study import read_study
from simcore.interrupt import stops_on_interrupt
from simcore.parallel import fan_out
from simcore.simulation import Simulation


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "study.yaml"
    path.write_text(study_text())
    return path


def after(share: float):
    """A progress callback that presses Ctrl-C once."""
    pressed = []

    def press(done: float) -> None:
        if done >= share and not pressed:
            pressed.append(done)
            os.kill(os.getpid(), signal.SIGINT)

    return press


def test_a_run_is_cut_as_by_a_horizon(study):
    file = read_study(study)
    work = build_workload(file.study.workload, file.folder, 1)
    cut = play(Job(file.study, file.folder, 1), after(0.5), work, interruptible=True)
    at = cut.summary["interrupted_at"]
    again = play(Job(file.study.model_copy(update={"horizon": at}), file.folder, 1), None, work)
    assert 0 < at < again.summary["duration"] + 1 and 0.4 < cut.summary["completed"] / len(work) < 0.7
    assert cut.requests.equals(again.requests) and cut.decisions.equals(again.decisions)
    whole = play(Job(file.study, file.folder, 1), None, work, interruptible=True)
    assert "interrupted_at" not in whole.summary


def test_the_command_writes_it_and_says_so(study, tmp_path, monkeypatch, capsys):
    from simcore.experiments import commands

    real = commands.play
    monkeypatch.setattr(commands, "play", lambda job, progress, **more: real(job, after(0.5), **more))
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", str(study)])
    assert caught.value.code == 130 and "PARTIAL: interrupted at" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/small/summary.json").read_text())["interrupted_at"] > 0
    assert "interrupted" in (tmp_path / "out/small/report.html").read_text()


def test_only_the_first_ctrl_c_is_caught():
    sim = Simulation()
    with stops_on_interrupt(sim):
        os.kill(os.getpid(), signal.SIGINT)
        assert sim.halted
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 1)


def works(job: int, progress) -> int:
    if job == 2:
        raise KeyboardInterrupt
    return job * 10


def test_finished_jobs_are_kept_on_request():
    assert fan_out(works, [0, 1, 2, 3], processes=1, keep=True) == [0, 10, None, None]
    with pytest.raises(KeyboardInterrupt):
        fan_out(works, [0, 1, 2, 3], processes=1)


@pytest.mark.parametrize("seeds, finished, arms, kept", [
    ([1, 2, 3], 5, 2, [1, 2]),  # arms x seeds are played arm by arm: a 1 2 3, b 1 2
    ([1], 2, 2, [1]),
])
def test_a_comparison_of_what_was_finished(study, monkeypatch, seeds, finished, arms, kept):
    axis = {"policies.replica_routing": ["round-robin", "least-loaded", "prefix-aware"][: 3 if len(seeds) == 1 else 2]}
    study.write_text(study_text(seeds=seeds, compare__vary=axis))
    real = compares.play_arms

    def some(file, of, **more):
        flat = [run for runs in real(file, of, **more) for run in runs]
        flat = [run if n < finished else None for n, run in enumerate(flat)]
        return [flat[k : k + len(seeds)] for k in range(0, len(flat), len(seeds))]

    monkeypatch.setattr(compares, "play_arms", some)
    found = compare(read_study(study), processes=1)
    assert len(found.arms) == arms and found.file.study.seeds == kept and found.partial.startswith("interrupted: ")
    assert [len(runs) for runs in found.results] == [len(kept)] * arms and found.summary()["partial"] == found.partial


def test_nothing_is_compared_with_nothing(study, monkeypatch):
    monkeypatch.setattr(compares, "play_arms", lambda file, of, **more: [[None], [None]])
    with pytest.raises(KeyboardInterrupt):
        compare(read_study(study), processes=1)
