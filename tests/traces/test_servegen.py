"""ServeGen's client files: what is drawn has the fitted rates, burstiness and lengths; chunks and joined files; refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.read import detect, read

HEADER = "client_id,timestamp_s,rate_rps,cv,pattern,param_1,param_2"
LAWS = {"0": {"input_tokens": "{100: 0.5, 200: 0.5}", "output_tokens": "{10: 0.25, 20: 0.75}", "reason_ratio": "{}"},
        "1200": {"input_tokens": "{7: 1.0}", "output_tokens": "{3.0: 1e-5, 4: 1}"}}


def chunks(folder: Path) -> Path:
    folder.mkdir()
    rows = ["0,2.0,1,Gamma,1,0.5", "600,0,0,,0,0", "1200,1.0,3,Weibull,0.5,0.5"]
    (folder / "chunk-1-trace.csv").write_text("\n".join(rows) + "\n")
    (folder / "chunk-1-dataset.json").write_text(json.dumps(LAWS))
    (folder / "chunk-2-trace.csv").write_text("0,0,0,,0,0\n600,4,2,Gamma,0.25,1\n1200,0,0,,0,0\n")
    (folder / "chunk-2-dataset.json").write_text(json.dumps(LAWS))
    return folder


def test_chunks_of_a_folder(tmp_path: Path) -> None:
    folder = chunks(tmp_path / "m-large")
    w = read(folder, "servegen", seed=3)
    assert detect(folder / "chunk-1-trace.csv") == "servegen"
    counts = np.bincount((w.arrival // 600).astype(int))
    assert counts == pytest.approx([1200, 2400, 600], rel=0.25)
    early, late = w.arrival < 600, w.arrival >= 1200
    assert set(w.input_tokens[early].tolist()) == {100, 200} and set(w.input_tokens[late].tolist()) == {7}
    assert (w.output_tokens[early] == 20).mean() == pytest.approx(0.75, abs=0.05)
    gaps = np.diff(w.arrival[early])
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.1)
    middle = np.diff(w.arrival[(w.arrival >= 600) & (w.arrival < 1200)])
    assert middle.std() / middle.mean() == pytest.approx(2, abs=0.3)
    assert (np.diff(w.arrival) >= 0).all()


def test_parts_rates_clients_and_seeds(tmp_path: Path) -> None:
    folder = chunks(tmp_path / "m")
    part = read(folder, "servegen", start=600, end=900, rate=10.0)
    assert len(part) == pytest.approx(3000, rel=0.15) and part.arrival.max() < 300
    one = read(folder, "servegen", clients=1)
    assert len(one) == pytest.approx(2400, rel=0.25) and one.arrival.min() >= 600
    a, b, c = (read(folder, "servegen", seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(a.arrival, b.arrival) and not np.array_equal(a.arrival[:9], c.arrival[:9])
    alone = read(folder / "chunk-1-trace.csv", "servegen", start=0, end=600)
    both = read(folder, "servegen", start=0, end=600)
    assert np.array_equal(alone.arrival, both.arrival)  # a client's draws do not depend on the others


def test_many_clients_in_one_file(tmp_path: Path) -> None:
    trace = tmp_path / "x_clients_day1.csv"
    rows = (HEADER, "5,0,1,1,Gamma,1,1", "5,600,1,1,Gamma,1,1", "6,0,3,1,Gamma,1,1", "6,600,0,0,,0,0")
    trace.write_text("\n".join(rows) + "\n")
    (tmp_path / "x_token_pdfs_day1.jsonl").write_text(json.dumps({"client_id": 5, "dataset": LAWS}) + "\n")
    assert detect(trace) == "servegen"
    w = read(trace)
    assert len(w) == pytest.approx(1200, rel=0.15)
    assert "1 clients without token histograms left out: 60.0% of the requests" in w.source.notes


def test_the_published_files() -> None:
    folder = Path(__file__).parents[3] / "shared" / "data" / "servegen"
    if not folder.is_dir():
        pytest.skip("the data set is not at hand")
    w = read(folder / "deepseek-r1_clients_day1.csv.gz", start=36_000, end=36_600, rate=5.0)
    assert len(w) == pytest.approx(3000, rel=0.3) and w.output_tokens.mean() > 300


@pytest.mark.parametrize(("change", "message"), [
    ({"chunk-1-trace.csv": "0,2,1,Pareto,1,1\n600,1,1,Gamma,1,1"}, "pattern: found ('Pareto', 1.0): allowed: Gamma or"),
    ({"chunk-1-trace.csv": "0,2,1,Gamma,0,1\n600,1,1,Gamma,1,1"}, "pattern: found ('Gamma', 0.0)"),
    ({"chunk-1-trace.csv": "0,-2,1,Gamma,1,1\n600,1,1,Gamma,1,1"}, "rate_rps: found -2"),
    ({"chunk-1-trace.csv": "0,2,1,Gamma,1,1\n0,1,1,Gamma,1,1"}, "timestamp_s: a window stands twice"),
    ({"chunk-1-trace.csv": "0,2,1,Gamma,1\n"}, "cells: found 5: allowed: 6"),
    ({"chunk-1-dataset.json": '{"0": {"input_tokens": "{a: 1}", "output_tokens": "{}"}}'}, "no histogram"),
    ({"chunk-1-dataset.json": '{"0": {"input_tokens": "{1: 1}"}}'}, "output_tokens: no histogram"),
    ({"chunk-1-dataset.json": '{"soon": {}}'}, "allowed: a window's start"),
    ({"chunk-1-dataset.json": '{"0": {"input_tokens": "{99999999: 1}", "output_tokens": "{1: 1}"}}'}, "tokens"),
])
def test_what_is_refused(tmp_path: Path, change: dict[str, str], message: str) -> None:
    folder = chunks(tmp_path / "m")
    for name, text in change.items():
        (folder / name).write_text(text)
    with pytest.raises(TraceError) as error:
        read(folder, "servegen")
    assert message in str(error.value)


def test_options_that_are_refused(tmp_path: Path) -> None:
    folder = chunks(tmp_path / "m")
    for options, message in (({"start": 9.0, "end": 3.0}, "start, end"), ({"rate": 0.0}, "rate"),
                             ({"clients": 0}, "clients"), ({"start": 5000.0}, "found 'no client with requests"),
                             ({"rate": 1e9}, "at most 5000000"),
                             ({"lengths": "nowhere.json"}, "lengths: no token histograms: allowed: nowhere.json")):
        with pytest.raises(TraceError, match=message):
            read(folder, "servegen", **options)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="found 'no files'"):
        read(tmp_path / "empty", "servegen")
