"""The HTML report: what it draws from tables, how the page is built, that it loads nothing, and how a browser takes it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import small_studies as small
from hypothesis import given
from hypothesis import strategies as st

from simcore.experiments import html_report as report
from simcore.experiments import html_report_data as tables
from simcore.experiments.compare import compare
from simcore.experiments.html_report_charts import Series, area_chart, bar_rows, forest, line_chart, scale
from simcore.experiments.html_report_page import SPEED_BEGINS, SPEED_ENDS
from simcore.experiments.output import study_facts
from simcore.experiments.run import Job, build_workload, play
from simcore.experiments.study import read_study
from simcore.experiments.sweep import begin_folder, plan_sweep

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
HOSTILE = "<script>alert(1)</script>.py:Mine"
POLICY = """
from simcore.policies.replica_routing.least_loaded import LeastLoaded


class Mine(LeastLoaded):
    pass
"""
AGENTS = """
name: "agents & <b>friends</b>"
workload:
  generate: {kind: agents, name: bfcl, programs: 70}
  start: {rate: 2}
model: llama-3.1-8b
engine: {num_gpu_blocks: 9000, max_num_seqs: 16}
compare:
  headline: jct_mean
  vary:
    policies:
      - {retention: lru}
      - {admission: program-fcfs, retention: {name: static-ttl, seconds: 3}}
"""
VOID = {"meta", "br", "hr", "input", "img", "link", "area", "base", "col", "embed", "source", "track", "wbr"}
SECTIONS = ["headline", "assumed", "metrics", "latency", "throughput", "kv", "replicas", "programs", "parting", "decisions",
            "speed"]


class Page(HTMLParser):
    """A parsed page; every element must be closed where it was opened."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.values, self.text, self.scripts = [], Counter(), [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        self.words = " ".join(self.text)

    def handle_starttag(self, tag, attributes):
        self.note(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.note(tag, attributes)

    def note(self, tag, attributes):
        self.tags[tag] += 1
        self.values += [(tag, name, value or "") for name, value in attributes]
        self.ids += [value for name, value in attributes if name == "id"]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] in ("script", "style") else self.text).append(data)


def facts_of(file):
    return [study_facts(arm.study, build_workload(arm.study.workload, file.folder, arm.study.seeds[0]), file.folder)
            for arm in file.arms]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A comparison with a policy whose file has a name that would be a script."""
    folder = tmp_path_factory.mktemp("hostile")
    path = folder / HOSTILE.split(":")[0]
    path.parent.mkdir()
    path.write_text(POLICY)
    file = small.small_file(folder, name="a < b & <script>c", sample_every=0.05, compare__vary={
        "policies.replica_routing": ["round-robin", HOSTILE]})
    return compare(file, processes=1), facts_of(file)


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    path = tmp_path_factory.mktemp("agents") / "study.yaml"
    path.write_text(AGENTS)
    file = read_study(path)
    return compare(file, processes=1), facts_of(file)


@pytest.fixture(scope="module")
def pages(hostile, agents, tmp_path_factory):
    """The reports of both comparisons and of a run, as paths."""
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, (comparison, facts) in {"hostile": hostile, "agents": agents}.items():
        found[name] = folder / f"{name}.html"
        report.write_report(found[name], comparison, facts, ["assumed: <i>that</i>"])
    comparison, facts = agents
    found["run"] = folder / "run.html"
    arm = comparison.arms[1]
    report.write_run_report(found["run"], arm.study, comparison.results[1][0], facts[1], ["one"], label=arm.label,
                            oracles=["Oracle"], partial="cut at 3 s")
    return found


def drawn_without_speed(path):
    text = path.read_text()
    assert text.count(SPEED_BEGINS) == text.count(SPEED_ENDS) == 1
    return re.sub(f"{re.escape(SPEED_BEGINS)}.*?{re.escape(SPEED_ENDS)}", "", text, flags=re.DOTALL)


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hostile", "agents", "run"])
def test_a_page_is_whole_and_loads_nothing(pages, name):
    text = pages[name].read_text()
    page = Page(text)
    assert len(set(page.ids)) == len(page.ids)
    expected = SECTIONS if name == "run" else [*SECTIONS[:2], "differences", *SECTIONS[2:]]
    assert [i for i in page.ids if i in set(expected)] == expected
    links = [value for tag, key, value in page.values if tag == "a" and key == "href"]
    assert links == [f"#{i}" for i in expected]
    assert not set(page.tags) & {"img", "iframe", "link", "object", "embed", "base", "form", "audio", "video", "image"}
    loads = {"src", "srcset", "xlink:href", "action", "data", "poster"}
    assert [(tag, key) for tag, key, _ in page.values if key in loads] == []
    assert not [value for _, key, value in page.values if key.startswith("on") or "javascript:" in value]
    assert not re.search(r"https?:|//[a-z]|@import|url\(", "".join(page.scripts).replace("</", ""))
    assert "default-src 'none'" in next(value for tag, key, value in page.values if key == "content" and "src" in value)
    assert page.tags["script"] == 2 and page.tags["svg"] >= 6
    assert "NaN" not in text and ">nan" not in text and "Infinity" not in text
    assert len(text) < 3_000_000


def test_labels_stay_text(pages, hostile):
    text = pages["hostile"].read_text()
    assert "<script>alert" not in text and "<i>that</i>" not in text
    page = Page(text)
    assert HOSTILE in page.words and "a < b & <script>c" in page.words and "assumed: <i>that</i>" in page.words
    log = json.loads(next(s for s in page.scripts if s.startswith("{")))
    assert log["arms"] == ["round-robin", HOSTILE]
    assert any(tag == "svg" and HOSTILE in value for tag, key, value in page.values if key == "aria-label")


def test_the_headline_the_intervals_and_what_was_assumed_are_there(pages, agents):
    comparison, _ = agents
    words = Page(pages["agents"].read_text()).words
    for line in [*comparison.headline, *comparison.parting.values()]:
        assert line in words
    assert "first 60 of 70 programs" in words and "agents & <b>friends</b>" in words
    d = comparison.differences[comparison.arms[1].label][0]
    assert d.label in words and "Job completion time" in words
    run = Page(pages["run"].read_text()).words
    assert "PARTIAL RESULT: cut at 3 s" in run and "ORACLE: Oracle" in run and "One run has no interval" in run


def test_equal_results_are_equal_bytes_but_for_the_speed(hostile, pages, tmp_path):
    comparison, facts = hostile
    again = compare(comparison.file, processes=1)
    report.write_report(tmp_path / "again.html", again, facts, ["assumed: <i>that</i>"])
    assert drawn_without_speed(tmp_path / "again.html") == drawn_without_speed(pages["hostile"])
    shown = Page(pages["hostile"].read_text()).words
    assert "Simulated s per wall s" in shown and "no result and the only part of this page that differs" in shown


@pytest.mark.parametrize("changes", [
    {"horizon": 0.001}, {"horizon": 0.5, "cluster__replicas": 1}, {"sample_every": 1e9}, {"workload__generate__requests": 1},
])
def test_runs_that_show_little_have_a_page(tmp_path, changes):
    file = small.small_file(tmp_path, **changes)
    study = file.arms[0].study
    result = play(Job(study, file.folder, 1))
    report.write_run_report(tmp_path / "run.html", study, result, facts_of(file)[0])
    assert "Headline" in Page((tmp_path / "run.html").read_text()).words


def test_arms_without_a_steady_state_are_named_and_not_drawn(tmp_path):
    file = small.small_file(tmp_path, window="steady", compare__vary={"workload.generate.rate": [20, 4000]},
                            workload__generate__requests=400)
    comparison = compare(file, processes=1)
    report.write_report(tmp_path / "r.html", comparison, facts_of(file))
    words = Page((tmp_path / "r.html").read_text()).words
    assert "4000 shows no steady state and no distribution" in words and "Window of 4000" in words
    assert "Without a point, since there is no such mean: 4000" in words


def test_a_sweep_over_a_rate_shows_its_knee(tmp_path):
    rates = [10, 40, 80, 160, 320]
    file = small.small_file(tmp_path, seeds=[1, 2], compare__vary={
        "policies.replica_routing": ["round-robin", "least-loaded"], "workload.generate.rate": rates})
    sweep = plan_sweep(file, tmp_path / "sweep")
    begin_folder(sweep.folder)
    assert not sweep.play(sweep.missing(), processes=1)
    arms = sweep.arms()
    report.write_sweep_report(tmp_path / "r.html", file.study, arms, ["this"], speed={"wall_seconds": 987.654},
                              partial="2 of 9")
    page = Page((tmp_path / "r.html").read_text())
    assert "Lowest mean_ttft_ms of 10 arms" in page.words and "95% interval" in page.words
    assert page.words.count("workload.generate.rate=") >= 30 and "knee at workload.generate.rate=" in page.words
    assert page.tags["circle"] >= 30 and "PARTIAL RESULT: 2 of 9" in page.words
    assert "987.654" not in drawn_without_speed(tmp_path / "r.html")
    points = tables.points_of_sweep(file.study, arms)
    assert {p.series for p in points} == {"replica_routing=round-robin", "replica_routing=least-loaded"}
    assert [p.rate for p in points[:5]] == rates


# --- a browser --------------------------------------------------------------------------------------------------------


def browse(path, *, anchor="", folder):
    """(the page's elements after its script has run, what it wrote to the console) in a headless browser, or skip."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser is installed (looked for {', '.join(BROWSERS)})")
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,2000",
               f"--user-data-dir={folder}", "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom",
               f"file://{path}{anchor}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if not done.stdout:
        pytest.skip(f"{browser} does not run here: {done.stderr.strip()[-300:]}")
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_a_browser_draws_the_pages_without_a_complaint(pages, tmp_path):
    for name, anchor, expected in (("hostile", "", "rows match"), ("agents", "#filter=PIN%20until", "rows match")):
        elements, said = browse(pages[name], anchor=anchor, folder=tmp_path)
        assert said == []
        assert elements.count("<svg") >= 6 and "alert(1)</script>.py" not in elements.split('id="decision-data"')[0]
        rows = elements.split('id="decision-rows">')[1].split("</tbody>")[0]
        assert expected in elements and rows.count("<tr>") > 10
        if anchor:
            assert "pin until" in rows and "replica_routing" not in rows


def test_a_complaint_would_be_seen(pages, tmp_path):
    """What the test above looks at does show an error of the script and a load that the page's policy forbids."""
    text = pages["run"].read_text()
    bad = tmp_path / "bad.html"
    bad.write_text(text.replace("</body>", "<script>nowhere()</script><img src='http://127.0.0.1:9/x.png'></body>"))
    _, said = browse(bad, folder=tmp_path)
    assert any("nowhere" in line for line in said) and any("Content Security Policy" in line for line in said)


# --- what is drawn ----------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.floats(-1, 1e6), st.just(float("nan"))), max_size=60), st.integers(2, 20))
def test_a_cdf_is_one(values, most):
    x, share = tables.cdf(np.array(values, dtype=float), most)
    kept = sorted(v for v in values if v > 0)
    assert len(x) <= most and (np.diff(x) >= 0).all() and (np.diff(share) > 0).all()
    if kept:
        assert (x[0], x[-1], share[-1]) == (kept[0], kept[-1], 1.0)
        assert all(abs(s * len(kept) - round(s * len(kept))) < 1e-9 for s in share)


def steps_table(rows, **more):
    columns = ["time", "replica", "free_blocks"]
    return pd.DataFrame(rows, columns=[*columns, *more]).astype({"time": float})


LOG = {"time": float, "kind": "string", "replica": int, "request": int, "answer": "string"}


def log_of(rows):
    return pd.DataFrame(rows, columns=list(LOG)).astype(LOG)


REQUESTS = pd.DataFrame({"program": [0, 0, 1], "input_tokens": [10, 30, 60], "generated_tokens": [7, 3, 5]})


def test_states_of_the_pool_add_up_to_it():
    steps = steps_table([(1.0, 0, 60), (1.0, 1, 100), (3.0, 0, 20), (4.0, 1, 100)])
    log = log_of([(2.0, "retention", 0, 0, "pin until 9.0"), (3.5, "unpin", 0, 0, "room"), (3.5, "retention", 0, 2, "lru")])
    found = tables.occupancy(steps, log, REQUESTS, usable=100, replicas=2, block_size=4, points=8)
    assert set(found.states) == {"held", "pinned", "free"} and found.usable == 200
    np.testing.assert_allclose(sum(found.states.values()), 200)
    np.testing.assert_allclose(found.states["pinned"], [0, 0, 0, 0, 4, 4, 4, 0])
    np.testing.assert_allclose(found.states["free"], [200, 200, 160, 160, 160, 160, 120, 120])
    np.testing.assert_allclose(found.of_replica[0], [0, 0, 0.4, 0.4, 0.4, 0.4, 0.8, 0.8])
    assert "no column cached_free_blocks" in " ".join(found.notes) and "no column pinned_blocks" in " ".join(found.notes)


def test_columns_of_the_steps_table_split_the_pool_further():
    rows = [(1.0, 0, 60, 25, 15), (2.0, 0, 60, 25, 15)]
    found = tables.occupancy(steps_table(rows, cached_free_blocks=0, pinned_blocks=0), log_of([]), REQUESTS, usable=100,
                             replicas=1, block_size=4, points=2)
    assert {name: float(v[-1]) for name, v in found.states.items()} == {"held": 25, "pinned": 15, "cached": 25, "free": 35}
    assert len(found.notes) == 1


def test_pins_are_followed_through_the_log():
    log = log_of([
        (1.0, "retention", 0, 0, "pin until 5.0"), (2.0, "retention", 0, 1, "pin until 6.0"),  # of one program: this stands
        (2.5, "retention", 0, 0, "extend until 8.0"), (3.0, "retention", 1, 2, "pin until 9.0"),
        (4.0, "unpin", 0, 0, "expired"), (5.0, "unpin", 1, 1, "consumed"), (6.0, "unpin", 1, 1, "consumed"),
    ])
    at = np.array([0.5, 1.5, 2.7, 3.5, 4.5, 5.5, 6.5])
    assert tables.pinned_by_log(log, REQUESTS, 4, at).tolist() == [0, 4, 8, 24, 16, 0, 0]


@pytest.fixture(scope="module")
def pinned_run(agents):
    comparison, _ = agents
    return comparison.results[1][0], comparison.arms[1].study


def test_pins_of_the_log_never_exceed_what_is_not_free(pinned_run):
    _, study = pinned_run
    full = play(Job(study.model_copy(update={"sample_every": 0.0}), Path(), 1))
    at = full.steps["time"].to_numpy() - 1e-12
    pinned = tables.pinned_by_log(full.decisions, full.requests, study.engine.block_size, at)
    not_free = study.engine.num_gpu_blocks - 1 - full.steps["free_blocks"].to_numpy()
    assert pinned.max() > 0
    assert (pinned <= not_free).mean() > 0.9  # what two pins share counts twice


def test_replicas_add_up_to_the_run(hostile):
    comparison, _ = hostile
    result = comparison.results[1][0]
    rows = tables.replica_rows(result.requests, 2)
    assert sum(row["requests"] for row in rows) == len(result.requests)
    assert sum(row["preemptions"] for row in rows) == result.summary["preemptions"]
    admitted = result.requests
    hits = [admitted.loc[admitted["replica"] == r, ["cached_tokens", "input_tokens"]].sum() for r in (0, 1)]
    assert [row["hit_rate"] for row in rows] == [h["cached_tokens"] / h["input_tokens"] for h in hits]
    assert np.isnan(tables.replica_rows(result.requests, 3)[2]["hit_rate"])


def test_the_waterfall_spends_all_time_of_programs_whose_turns_do_not_overlap(agents):
    comparison, _ = agents
    result = comparison.results[0][0]
    found = tables.waterfall(result.requests)
    assert len(found.rows) == 60 and found.of == 70
    programs = result.programs.set_index("program")
    spent = Counter()
    for pieces in found.parts.values():
        for row, start, stop in pieces:
            assert 0 <= start < stop <= found.longest + 1e-9
            spent[row] += stop - start
    done = [k for k in range(60) if programs["jct"].notna()[int(found.rows[k][0])]]
    assert len(done) > 30
    for k in done:
        assert spent[k] == pytest.approx(programs["jct"][int(found.rows[k][0])])


def test_the_place_of_the_parting_is_that_of_the_comparison(agents):
    comparison, _ = agents
    a, b = (results[0].decisions for results in comparison.results)
    place = tables.parting_place(a, b)
    assert f"t={min(a['time'][place], b['time'][place]):.3f} s" in comparison.parting[comparison.arms[1].label]
    assert tables.parting_place(a, a) is None and tables.parting_place(a, a.iloc[:-1]) == len(a) - 1


def test_the_log_of_the_page_is_bounded_and_shared_out():
    log = log_of([(float(k), "retention", 0, k, "lru") for k in range(50)])
    held = tables.decision_data({"a": log, "b": log.iloc[:5], "c": log}, most=30)
    assert Counter(row[0] for row in held["rows"]) == {0: 10, 1: 5, 2: 10} and held["answers"] == ["lru"]


@pytest.mark.parametrize(("latency", "place"), [
    ([10, 11, 12, 14, 20, 90, 300], 4), ([10, 10, 10, 200, 390], 2), ([10, 20, 30, 40, 50], None), ([10, 11, 12, 13], None),
    ([10, 100, 900], None),
])
def test_the_knee(latency, place):
    found, why = tables.knee(np.arange(1.0, len(latency) + 1), np.array(latency, dtype=float))
    assert found == place and bool(why) == (place is None)


@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=5), st.booleans())
def test_scales_hold_their_data_between_round_ticks(values, log):
    found = scale(np.array(values), 0, 100, log=log)
    ticks = [t for t, _ in found.ticks]
    assert ticks == sorted(set(ticks)) and 1 <= len(ticks) <= 13
    pixels = found(np.array(values))
    assert ((pixels >= -1e-6) & (pixels <= 100 + 1e-6)).all()


def test_charts_of_nothing_say_so():
    nothing = np.zeros(0)
    assert "nothing to draw" in line_chart([Series("a", nothing, nothing)], title="t", x_label="x", y_label="y")
    assert "nothing to draw" in area_chart(nothing, [], title="t", x_label="x", y_label="y", top=1)
    assert bar_rows([], [("tool", [])], title="t", x_label="x", longest=0.0)[1] == 0
    nan = float("nan")
    Page(forest([("m", [(1, nan, nan, nan, "n")]), ("k", [(1, 2.0, nan, nan, "n")])], title="<t>", x_label="x"))


def test_lines_break_where_nothing_is_known():
    chart = line_chart([Series("a", np.arange(4.0), np.array([1, np.nan, 2, 3]))], title="t", x_label="x", y_label="y")
    line = re.search(r'class="line" d="([^"]+)"', chart).group(1)
    assert line.count("M") == 2 and "nan" not in line


def test_the_page_about_reports_runs(tmp_path, monkeypatch):
    small.write_study(tmp_path)
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "reports.md"
    space = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.M):
        exec(compile(block, str(page), "exec"), space)
    assert {path.name for path in tmp_path.iterdir()} == {"study.yaml", "report.html", "run.html", "timeline.json"}
