"""Comparisons: the headline in each of its forms, where two runs part, who carries the difference, oracles."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from small_studies import small_file

from simcore.experiments.compare import Comparison, _headline, compare
from simcore.experiments.report import print_comparison
from simcore.experiments.statistics import METRICS, Difference


@pytest.fixture(scope="module")
def seeds(tmp_path_factory) -> Comparison:
    """Three arms under four seeds."""
    file = small_file(
        tmp_path_factory.mktemp("seeds"), seeds=[1, 2, 3, 4],
        compare__vary={"policies.replica_routing": ["round-robin", "least-loaded", "prefix-aware"]})
    return compare(file, processes=1)


def compared(folder, **changes) -> Comparison:
    return compare(small_file(folder, **changes), processes=1)


def test_a_best_arm_is_named_with_confidence(tmp_path):
    c = compared(tmp_path, compare__vary={"engine.max_num_seqs": [2, 16]}, seeds=[1, 2, 3, 4, 5])
    verdict, detail = c.headline
    (ttft,) = c.best
    assert c.best_label == "16" and ttft.known and ttft.better
    assert verdict == f"16 is best: TTFT mean {ttft.b:,.4g} ms; better than 2 with 95% confidence."
    assert detail.startswith(f"16 against 2: TTFT mean {ttft.a:,.4g} -> {ttft.b:,.4g} ms, {ttft.difference:+,.4g} (")
    assert detail.endswith("over 5 seeds.")


def test_an_arm_that_leads_but_overlaps_another_says_so(tmp_path):
    """Two arms that differ by nothing, and one that is far worse."""
    c = compared(tmp_path, seeds=[1, 2, 3, 4, 5], compare__vary={"engine.max_num_seqs": [2, 200, 256]})
    assert c.headline[0].startswith("200 leads with TTFT mean ")
    assert c.headline[0].endswith(
        "better than 2 with 95% confidence, but the interval of its difference to 256 includes zero.")
    assert len(c.headline) == 3 and len(c.best) == 2


def test_nothing_shown(tmp_path):
    c = compared(tmp_path, seeds=[1, 2, 3], compare__vary={"sample_every": [1.0, 2.0]})
    assert c.headline[0].startswith("No difference at all: TTFT mean ")
    assert c.headline[1].endswith("+0 (+0.0%), 95% interval +0 to +0 over 3 seeds: no difference shown.")
    assert all(d.difference == d.low == d.high == 0 and not d.known for d in c.differences["2.0"])
    assert c.parting == {"2.0": "none: every decision is the same"}
    assert c.carriers["2.0"]["change"].eq(0).all() and c.carriers["2.0"]["share_of_change"].isna().all()


def test_no_interval_names_its_reason(tmp_path):
    c = compared(tmp_path, workload__generate__requests=30)
    assert "leads with TTFT mean" in c.headline[0]
    assert "no policy is shown better: no interval can be given (trace of" in c.headline[0]
    assert "; no interval: trace of" in c.headline[1]


SHORT = "trace of 3 s; an interval needs 9 s"


@pytest.mark.parametrize(
    ("low", "high", "whys", "verdict"),
    [
        ((-3, -2), (-1, -1), ("", ""), "a is best: M 8 ms; better than b and c with 95% confidence."),
        ((-3, -1), (-1, 1), ("", ""),
         "a leads with M 8 ms: better than b with 95% confidence, but the interval of its difference to c includes zero."),
        ((-3, np.nan), (-1, np.nan), ("", SHORT),
         "a leads with M 8 ms: better than b with 95% confidence, but not shown better than c: an interval is missing "
         f"({SHORT})."),
        ((-3, np.nan), (3, np.nan), ("", SHORT),
         f"a leads with M 8 ms, but no policy is shown better: no interval can be given ({SHORT})."),
        ((-3, -1), (3, 1), ("", ""), "The intervals overlap: no policy is shown better by M (a leads with M 8 ms)."),
    ],
)
def test_the_verdict_in_each_form(low, high, whys, verdict):
    rows = list(zip(low, high, whys, strict=True))
    best = [Difference("m", "M", "ms", 10, 8, -2, a, b, 9, "seeds", True, why) for a, b, why in rows]
    judged = [Difference("m", "M", "ms", 8, 10, 2, -b, -a, 9, "seeds", True, why) for a, b, why in rows]
    assert _headline(["a", "b", "c"], 0, judged, best, ["b", "c"])[0] == verdict


def test_one_trace_uses_blocks_of_time_and_several_seeds_use_seeds(tmp_path, seeds):
    one = compared(tmp_path, workload__generate__requests=600)
    assert {d.method for d in one.differences["least-loaded"]} == {"time blocks"}
    assert {d.method for d in seeds.differences["least-loaded"]} == {"seeds"}


def test_every_arm_is_compared_with_the_first_by_every_metric(seeds):
    assert list(seeds.differences) == ["least-loaded", "prefix-aware"]
    for label, ds in seeds.differences.items():
        assert [d.metric for d in ds] == [m.name for m in METRICS]
        k = [a.label for a in seeds.arms].index(label)
        means = [[1e3 * run.requests["ttft"].mean() for run in seeds.results[arm]] for arm in (0, k)]
        assert ds[0].a == pytest.approx(np.mean(means[0])) and ds[0].b == pytest.approx(np.mean(means[1]))
    assert len(seeds.table) == 2 * len(METRICS)
    assert set(seeds.table.columns) >= {"arm", "metric", "difference", "low", "high", "known", "why"}


def test_the_best_arm_is_compared_with_every_other(seeds):
    values = {arm.label: np.mean([run.requests["ttft"].mean() for run in runs])
              for arm, runs in zip(seeds.arms, seeds.results, strict=True)}
    assert seeds.best_label == min(values, key=values.get)
    assert len(seeds.best) == len(seeds.arms) - 1
    others = [label for label in values if label != seeds.best_label]
    for label, d in zip(others, seeds.best, strict=True):
        assert d.b == pytest.approx(1e3 * values[seeds.best_label]) and d.a == pytest.approx(1e3 * values[label])


def test_where_more_is_better_the_highest_leads(tmp_path):
    c = compared(
        tmp_path, seeds=[1, 2, 3, 4], compare__headline="hit_rate",
        compare__vary={"engine.enable_prefix_caching": [False, True]})
    assert c.best_label == "True" and c.best[0].a == 0 and c.best[0].b > 0
    assert c.headline[0].startswith("True is best: Prefix hit rate ")


# --- why ------------------------------------------------------------------------------------------------------------


def brute_parting(a, b) -> tuple | None:
    """The first row of the decision tables at which they are not equal, looked for one by one."""
    columns = ["time", "kind", "replica", "request", "answer"]
    x, y = a.decisions, b.decisions
    for k in range(min(len(x), len(y))):
        if any(x[c].iloc[k] != y[c].iloc[k] for c in columns):
            return x.iloc[k], y.iloc[k]
    return None


def test_the_first_parting_decision_is_the_first(seeds):
    for k, label in enumerate(seeds.differences, 1):
        one, other = brute_parting(seeds.results[0][0], seeds.results[k][0])
        text = seeds.parting[label]
        assert text.startswith(f"t={one['time']:.3f} s: {one['kind']} of request {one['request']}: {one['answer']} against ")
        assert f"{other['kind']} of request {other['request']}: {other['answer']}" in text
        # before it the runs are the same: every request that ended by then ended alike
        a, b = seeds.results[0][0].requests, seeds.results[k][0].requests
        ended = a["ended"] < one["time"]
        pd.testing.assert_frame_equal(a[ended], b[ended])


def test_carriers_are_the_largest_changes_and_their_shares_sum_up(seeds):
    for k, label in enumerate(seeds.differences, 1):
        a, b = seeds.results[0][0].requests, seeds.results[k][0].requests
        change = b["e2e"] - a["e2e"]
        frame = seeds.carriers[label]
        assert len(frame) == 5
        assert frame["request"].tolist() == change.abs().sort_values(ascending=False, kind="stable").index[:5].tolist()
        np.testing.assert_allclose(frame["change"], frame["e2e_other"] - frame["e2e_first"])
        np.testing.assert_allclose(frame["change"], change.loc[frame["request"]])
        np.testing.assert_allclose(frame["share_of_change"].sum(), frame["change"].sum() / change.abs().sum())
        assert (frame["cached_first"].to_numpy() == a["cached_tokens"].loc[frame["request"]]).all()


def test_common_random_numbers(seeds):
    """Arms under one seed meet the same requests; other seeds bring others."""
    columns = ["request", "arrival", "input_tokens", "output_tokens", "program", "turn"]
    for seed in range(4):
        first = seeds.results[0][seed].requests[columns]
        for arm in (1, 2):
            pd.testing.assert_frame_equal(first, seeds.results[arm][seed].requests[columns], check_exact=True)
    assert not seeds.results[0][0].requests["arrival"].equals(seeds.results[0][1].requests["arrival"])


def test_rates_and_other_lengths_under_one_seed_meet_the_same_prompts(tmp_path):
    c = compared(tmp_path, compare__vary={"workload.generate.rate": [10, 20]})
    slow, fast = (runs[0].requests for runs in c.results)
    assert slow["input_tokens"].equals(fast["input_tokens"]) and slow["output_tokens"].equals(fast["output_tokens"])
    np.testing.assert_allclose(slow["arrival"], 2 * fast["arrival"])


# --- what is printed ------------------------------------------------------------------------------------------------


def printed(c: Comparison) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_comparison(console, c, ["one assumption"])
    return console.export_text()


def test_an_oracle_is_printed(tmp_path):
    policies = ["fcfs", {"name": "shortest-first", "by": "total"}, "shortest-first"]
    c = compared(tmp_path, compare__vary={"policies.admission": policies})
    assert c.oracles == {"shortest-first(by=total)": ["ShortestFirst"]}
    assert "ORACLE: shortest-first(by=total) uses the true future (ShortestFirst)" in printed(c)
    assert c.summary()["oracles"] == c.oracles


def test_the_report_shows_all_of_it(seeds):
    text = printed(seeds)
    for part in (*seeds.headline, "one assumption", "First parting of prefix-aware: t=", "Time To First Token (ms)",
                 "Prefix Hit Rate", "small | seed 1", "Paired difference to round-robin (95% interval)"):
        assert part in text
    assert "ORACLE" not in text


def test_report_of_runs_in_which_nothing_finishes(tmp_path):
    c = compared(tmp_path, horizon=0.001, compare__headline="e2e_mean")
    assert all(run.summary["completed"] == 0 for runs in c.results for run in runs)
    text = printed(c)
    assert "no interval" in text and "N/A" in text
    assert "no request has this metric in both runs" in c.headline[0]


def test_requests_too_long_for_the_pool_are_refused_and_left_out(tmp_path):
    c = compared(tmp_path, compare__vary={"engine.num_gpu_blocks": [60, 2000]}, seeds=[1, 2])
    small, large = (runs[0] for runs in c.results)
    refused = small.requests["status"] == "refused"
    assert refused.any() and (large.requests["status"] == "finished").all()
    assert small.summary["refused"] == refused.sum() == small.summary["failed"]
    e2e = next(d for d in c.differences["2000"] if d.metric == "e2e_mean")
    means = []
    for a, b in zip(*c.results, strict=True):
        both = a.requests["e2e"].notna() & b.requests["e2e"].notna()
        means.append((a.requests["e2e"][both].mean() * 1e3, b.requests["e2e"][both].mean() * 1e3))
    assert (e2e.a, e2e.b) == pytest.approx(tuple(np.mean(means, axis=0)))


def test_no_verdict_where_the_arms_did_not_finish_the_same_requests():
    best = [Difference("m", "M", "ms", 10, 8, -2, -3, -1, 9, "seeds", True, "", 3)]
    judged = [Difference("m", "M", "ms", 8, 10, 2, 1, 3, 9, "seeds", True, "", 3)]
    verdict = _headline(["a", "b"], 0, judged, best, ["b"])[0]
    assert verdict.startswith("No verdict by M: 3 requests did not finish under every policy")


def test_being_best_of_many_needs_more_than_beating_each():
    d = Difference("m", "M", "ms", 10, 8, -2, -3.9, -0.1, 9, "seeds", True)
    assert d.known and d.clear_of_zero(1) and not d.clear_of_zero(5)
