"""Failures as keys of a study: what is read, what is refused with which line, and that docs/failures.md shows what runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from simcore.errors import ConfigError
from simcore.experiments.run import Job, play
from simcore.experiments.study import Study, read_study
from simcore.models.failures import Event

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
HEAD = """workload:
  generate: {requests: 40, rate: 8, input_tokens: 200, output_tokens: 20}
model: llama-3.1-8b
cluster: {replicas: 2}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_events_are_read_as_they_are_written_and_written_as_they_are_read(tmp_path: Path) -> None:
    text = HEAD + """clients: {timeout: 1min, ttft_timeout: 10s, retries: 2, backoff: 500ms}
events:
- {at: 10min, kill: replica1, for: 120s}
- {at: 900, drain: 0, for: 60s}
- {at: 1200s, rolling_restart: {down: 60s}}
"""
    study = read_study(written(tmp_path, text), ["cluster.view_delay=2s"]).study
    assert study.clients is not None
    assert study.clients.model_dump() == {"timeout": 60.0, "ttft_timeout": 10.0, "retries": 2, "backoff": 0.5}
    assert [(e.at, e.kill, e.drain, e.lasts) for e in study.events] == [
        (600.0, 1, None, 120.0), (900.0, None, 0, 60.0), (1200.0, None, None, None)]
    assert study.cluster.view_delay == 2.0
    again = yaml.safe_load(yaml.safe_dump(study.model_dump()))
    assert Study.model_validate(again) == study


def test_a_study_has_none_of_it_by_default(tmp_path: Path) -> None:
    study = read_study(written(tmp_path, HEAD)).study
    assert (study.clients, study.events, study.cluster.view_delay) == (None, [], 0.0)


@pytest.mark.parametrize(("text", "message"), [
    ("clients: {timeout: 0}\n", r"study.yaml:5: clients.timeout: found 0: allowed: greater than 0"),
    ("clients: {timeout: -1s}\n", r"study.yaml:5: clients.timeout: found '-1s': allowed: greater than 0"),
    ("clients: {timeout: .inf}\n", r"study.yaml:5: clients.timeout: found inf: allowed: .*finite.*"),
    ("clients:\n  retries: 1.5\n", r"study.yaml:6: clients.retries: found 1.5: allowed: .*integer.*"),
    ("clients: {retries: -1}\n", r"study.yaml:5: clients.retries: found -1: .*"),
    ("clients: {patience: 3}\n", r"study.yaml:5: clients.patience: unknown key: allowed: backoff, .*timeout"),
    ("events: {at: 1, kill: 0}\n", r"study.yaml:5: events: .*"),
    ("events:\n- {at: 1, kill: 2}\n", r"study.yaml:6: events.0.kill: found 2: allowed: 0 .. 1 \(cluster.replicas\)"),
    ("events:\n- {at: 1, kill: -1}\n", r"study.yaml:6: events.0.kill: found -1: .*"),
    ("events:\n- {at: 1, kill: gpu0}\n", r"study.yaml:6: events.0.kill: found 'gpu0': .*"),
    ("events:\n- {at: 1, kill: true}\n", r"study.yaml:6: events.0.kill: true or false .*"),
    ("events:\n- {kill: 1}\n", r"study.yaml:.*: events.0.at: is missing"),
    ("events:\n- {at: -1, kill: 1}\n", r"study.yaml:6: events.0.at: found -1: .*"),
    ("events:\n- {at: 1}\n", r"study.yaml:.*events.0: an event is just one of kill, drain and rolling_restart"),
    ("events:\n- {at: 1, kill: 0, drain: 1}\n", r"study.yaml:.*events.0: an event is just one of .*"),
    ("events:\n- {at: 1, kill: 0, fore: 1}\n",
     r"study.yaml:6: events.0.fore: unknown key: allowed: at, drain, for, kill, rolling_restart"),
    ("events:\n- {at: 1, kill: 0, for: 0}\n", r"study.yaml:6: events.0.for: found 0: allowed: greater than 0"),
    ("events:\n- {at: 1, rolling_restart: {down: 1}, for: 3}\n", r"study.yaml:.*events.0: rolling_restart takes no `for`.*"),
    ("events:\n- {at: 1, kill: 0}\n- {at: 2, kill: 0}\n",
     r"study.yaml:.*events.1: it is killed at 1 s and away for good: found 'another event .* at 2 s': allowed: .*"),
])
def test_bad_keys_are_refused_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_study(written(tmp_path, HEAD + text))
    assert re.fullmatch(message, str(caught.value).replace(f"{tmp_path}/", "")), str(caught.value)


def test_an_arm_with_too_few_replicas_for_an_event_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD + "events:\n- {at: 1, kill: 1}\n")
    with pytest.raises(ConfigError, match=r"events.0.kill: found 1: allowed: 0 .. 0"):
        read_study(path, vary=["cluster.replicas=2,1"])


def test_arms_may_differ_in_what_goes_wrong(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD + "clients: {retries: 1}\nevents:\n- {at: 2, kill: 1, for: 1}\n")
    file = read_study(path, vary=["clients.timeout=0.1,10"])
    results = [play(Job(arm.study, tmp_path, 1)) for arm in file.arms]
    assert [r.summary["timed_out"] > 0 for r in results] == [True, False]
    assert all(r.summary["availability"][1] < r.summary["availability"][0] == 1.0 for r in results)


def test_the_studies_of_the_page_run(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    texts = re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.M)
    studies = [t for t in texts if "workload:" in t]
    assert len(studies) == 1 and len(texts) == 1
    for t in studies:
        file = read_study(written(tmp_path, t))
        result = play(Job(file.study, tmp_path, 1))
        assert len(result.speed["why_not_planned"]) == 3
        assert result.summary["retried"] > 0 and min(result.summary["availability"]) < 1


def test_an_event_says_what_it_is() -> None:
    values: dict[str, Any] = {"at": "2min", "kill": "replica 3", "for": "1s"}
    event = Event.model_validate(values)
    assert (event.at, event.replica, event.lasts) == (120.0, 3, 1.0)
    assert event.model_dump()["for"] == 1.0
