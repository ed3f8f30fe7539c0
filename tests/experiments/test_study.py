"""Study files: what is refused, with which words; arms; and that a study survives being written and read."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_studies import small_file, study_text, write_study

from simcore.errors import BadInput, ConfigError
from simcore.experiments.compare import check, compare
from simcore.experiments.output import write_config
from simcore.experiments.study import Study, read_study
from simcore.models.metrics import Slo


def refusal(folder, text: str | None = None, settings=(), vary=(), goodput=(), **changes: Any) -> str:
    """The message with which a study is refused, at reading or at building what it names; paths without the folder."""
    path = write_study(folder, **changes)
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        file = read_study(path, settings, vary, goodput)
        check(file, file.arms)
    message = str(caught.value).replace(f"{folder}/", "")
    assert "\n" not in message
    return message


# --- keys and values ------------------------------------------------------------------------------------------------

HEAD = "workload:\n  generate: {requests: 9, rate: 1, input_tokens: 9, output_tokens: 9}\nmodel: llama-3.1-8b\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "modle: x\n", r"study.yaml:4: modle: unknown key: allowed: clients, cluster, compare, cost, .*workload"),
        (HEAD + "engine:\n  max_seqs: 3\n", r"study.yaml:5: engine.max_seqs: unknown key: allowed: .*max_num_seqs.*"),
        (HEAD + "engine: {version: 0.5.0}\n", r"study.yaml:4: engine.version: found '0.5.0': allowed: '0.19.0', .*"),
        (HEAD + "engine:\n  version: 0.19.0\n  watermark: 0.1\n",
         r"study.yaml:4: engine: watermark exists from version 0.24.0 on, and engine.version is 0.19.0"),
        (HEAD + "engine: {max_num_active_seqs: 4, version: 0.24.0}\n",
         r"study.yaml:4: engine: max_num_active_seqs exists from version 0.33.0 on, .*"),
        (HEAD + "cluster: {replicas: 0}\n", r"study.yaml:4: cluster.replicas: found 0: allowed: greater than or equal to 1"),
        (HEAD + "cluster: {replicas: yes}\n", r"study.yaml:4: cluster.replicas: true or false .*: allowed: a number"),
        (HEAD + "horizon: 10 minutes\n", r"study.yaml:4: horizon: found '10 minutes': allowed: a duration such as 3s, .*"),
        (HEAD + "horizon: 0\n", r"study.yaml:4: horizon: found 0: allowed: greater than 0"),
        (HEAD + "sample_every: -1s\n", r"study.yaml:4: sample_every: found '-1s': allowed: greater than or equal to 0"),
        (HEAD + "slo: {ttft_ms: -5}\n", r"study.yaml:4: slo.ttft_ms: found -5: allowed: greater than 0"),
        (HEAD + "slo: {ttft: 5}\n", r"study.yaml:4: slo.ttft: unknown key: allowed: e2el_ms, tpot_ms, ttft_ms"),
        (HEAD + "seeds: []\n", r"study.yaml:4: seeds: found \[\]: allowed: List should have at least 1 item.*"),
        (HEAD + "seeds: [1, 2, 1]\n", r"study.yaml:4: seeds: found \[1, 2, 1\]: allowed: each seed once.*"),
        (HEAD + "seeds:\n- 1\n- two\n", r"study.yaml:6: seeds.1: found 'two': allowed: a valid integer.*"),
        (HEAD + "model: other\n", r"study.yaml:4: is not valid YAML: the key 'model' stands twice"),
        (HEAD + "engine: {\n", r"study.yaml:5: is not valid YAML: .*"),
        ("- 1\n", r"study.yaml: found \[1\]: allowed: a mapping of keys to values"),
        (HEAD.replace("model: llama-3.1-8b\n", ""), r"study.yaml: model: is missing"),
        (HEAD.replace("rate: 1, ", ""), r"study.yaml:2: workload.generate.rate: is missing"),
        (HEAD.replace("llama-3.1-8b", "llama-9"), r"study.yaml:3: model: found 'llama-9': allowed: a path .*llama-3.1-8b.*"),
        (HEAD.replace("llama-3.1-8b", "{name: llama-9}"), r"study.yaml:3: model: found 'llama-9': allowed: .*"),
        (HEAD.replace("llama-3.1-8b", "{name: llama-3.1-8b, dtype: fp8}"),
         r"study.yaml:3: model.dtype: unknown key: allowed: kv_cache_dtype, name, weight_dtype"),
        (HEAD.replace("llama-3.1-8b", "{name: llama-3.1-8b, weight_dtype: fp7}"),
         r"study.yaml:3: model.weight_dtype: found 'fp7': allowed: 'bf16', .*"),
        (HEAD + "cluster:\n  gpu: b300\n", r"study.yaml:5: cluster.gpu: found 'b300': allowed: .*h100-sxm.*"),
        (HEAD + "cluster:\n  tensor_parallel_size: 3\n", r"study.yaml:5: cluster.tensor_parallel_size: found 3: allow.*"),
        (HEAD.replace("3.1-8b", "3.1-70b"), r"study.yaml: cluster: llama-3.1-70b leaves .*allowed: more GPUs.*"),
        (HEAD.replace("3.1-8b", "3.1-70b") + "cluster:\n  replicas: 2\n", r"study.yaml:4: cluster: llama-3.1-70b .*"),
        (HEAD + "engine:\n  max_model_len: 200000\n",
         r"study.yaml:5: engine.max_model_len: found 200000: allowed: at most 131072 for llama-3.1-8b"),
        (HEAD + "engine:\n  num_gpu_blocks: 100\n  max_model_len: 2000\n",
         r"study.yaml:6: engine.max_model_len: longer than the KV pool: found 2000: allowed: at most 1584 tokens, .*"),
        (HEAD + "engine: {num_gpu_blocks: 1}\n", r"study.yaml:4: engine.num_gpu_blocks: found 1: allowed: greater .*"),
        (HEAD + "cost_model: {memory_efficiency: 1.5}\n", r"study.yaml:4: cost_model.memory_efficiency: found 1.5: .*"),
    ],
)
def test_bad_studies_are_refused_with_line_key_found_and_allowed(tmp_path, text, message):
    assert re.fullmatch(message, refusal(tmp_path, text))


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("{replica_routing: fastest}",
         r"study.yaml:4: policies.replica_routing: found 'fastest': allowed: least-loaded, .*"),
        ("\n  admission: fcfs\n  retention: mru\n", r"study.yaml:6: policies.retention: found 'mru': allowed: clair.*"),
        ("{routing: fcfs}", r"study.yaml:4: policies.routing: unknown key: allowed: admission, replica_routing, retention"),
        ("{admission: {name: shortest-first, order: total}}",
         r"study.yaml:4: policies.admission: got an unexpected keyword argument 'order': .*: allowed: by, patience"),
        ("{admission: {name: shortest-first, by: size}}",
         r"study.yaml:4: policies.admission: ShortestFirst: by = 'size'; allowed: prompt, uncached, total"),
        ("{admission: {by: total}}", r"study.yaml:4: policies.admission.name: is missing"),
        ("{admission: {name: [fcfs]}}", r"study.yaml:4: policies.admission.name: found \['fcfs'\]: allowed: a valid string"),
        ("{admission: round-robin}", r"study.yaml:4: policies.admission: found 'round-robin': allowed: autellix, fcfs, .*"),
        ("{admission: mine.py:Mine}", r"study.yaml:4: policies.admission: no such file in .*: found 'mine.py:Mine'"),
    ],
)
def test_bad_policies_are_refused(tmp_path, policies, message):
    assert re.fullmatch(message, refusal(tmp_path, HEAD + f"policies: {policies}\n"))


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ("{}", r"study.yaml:1: workload: give either trace or generate"),
        ("{trace: x.csv, generate: {requests: 1, rate: 1, input_tokens: 1, output_tokens: 1}}",
         r"study.yaml:1: workload: give either trace or generate"),
        ("{trace: none.csv}", r"study.yaml:1: workload.trace: no such file in .*: found 'none.csv': allowed: a .*"),
        ("{trace: torn.jsonl}", r"torn.jsonl:2: .*"),
        ("{trace: fine.csv, format: parquet}", r"study.yaml:1: workload.format: found 'parquet': allowed: mooncake, .*"),
        ("{trace: fine.csv, head: 0}", r"study.yaml:1: workload.head: found 0: allowed: greater than or equal to 1"),
        ("{trace: fine.csv, thin: 2}", r"study.yaml:1: workload.thin: found 2: allowed: less than or equal to 1"),
        ("\n  trace: fine.csv\n  slice:\n    start: 1h", r"study.yaml:3: workload.slice: start, end: found \(3600.*"),
        ("\n  trace: fine.csv\n  slice: {begin: 1}", r"study.yaml:3: workload.slice.begin: unknown key: allowed: end.*"),
        ("\n  trace: fine.csv\n  dequantise: -3s", r"study.yaml:3: workload.dequantise: .*found -3.0: allowed: a .*"),
        ("\n  trace: fine.csv\n  dequantise: 0", r"study.yaml:3: workload.dequantise: .*found 0.0: allowed: a .*"),
        ("\n  generate:\n    {requests: 9, rate: 1, input_tokens: {mean: 0, sd: 1}, output_tokens: 1}",
         r"study.yaml:3: workload.generate.input_tokens.mean: found 0: allowed: greater than 0"),
        ("\n  generate: {requests: 9, rate: 1, input_tokens: {mean: 0.5, sd: 1}, output_tokens: 1}",
         r"study.yaml:2: workload.generate: input_tokens: found \(0.5, 1.0\): allowed: .*at least 1.*"),
        ("\n  generate: {requests: 9, rate: 1, input_tokens: 1, output_tokens: 1, prefix_groups: 3}",
         r"study.yaml:2: workload.generate: prefix_groups, prefix_tokens: found \(3, 0\): allowed: both 0 or both above 0"),
        ("\n  generate: {requests: 9, rate: -1, input_tokens: 1, output_tokens: 1}",
         r"study.yaml:2: workload.generate.rate: found -1: allowed: greater than or equal to 0"),
    ],
)
def test_bad_workloads_are_refused(tmp_path, workload, message):
    (tmp_path / "fine.csv").write_text("arrival,input_tokens,output_tokens\n0,5,5\n1,5,5\n")
    (tmp_path / "torn.jsonl").write_text('{"arrival": 0, "input_tokens": 5, "output_tokens": 5}\n{"arrival": 1, "inp\n')
    assert re.fullmatch(message, refusal(tmp_path, f"workload: {workload}\nmodel: llama-3.1-8b\n"))


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": ["cluster.replicas=none"]}, "--set cluster.replicas=none: cluster.replicas: found 'none': allowed: a"),
        ({"settings": ["cluster.gpu=b300"]}, "--set cluster.gpu=b300: cluster.gpu: found 'b300': allowed: "),
        ({"settings": ["model=llama-9"]}, "--set model=llama-9: model: found 'llama-9': allowed: "),
        ({"settings": ["policies.admission={name: sjf}"]}, "--set policies.admission={name: sjf}: policies.admission: "),
        ({"settings": ["engin.block_size=3"]}, "--set engin.block_size=3: engin: unknown key: allowed: clients, cluster, "),
        ({"settings": ["engine.max_model_len=200000"]}, "--set engine.max_model_len=200000: engine.max_model_len: found"),
        ({"settings": ["replicas"]}, "--set replicas: allowed: key.path=value, e.g. cluster.replicas=8"),
        ({"vary": ["cluster.replicas"]}, "--vary cluster.replicas: allowed: key.path=a,b,c, e.g. policies."),
        ({"vary": ["cluster.replicas="]}, "--vary cluster.replicas=: allowed: key.path=a,b,c"),
        ({"vary": ["cluster.replicas=1,,2"]}, "--vary cluster.replicas=1,,2: the value is not valid YAML"),
        ({"vary": ["cluster.replicas=[1"]}, "--vary cluster.replicas=[1: the value is not valid YAML"),
        ({"vary": ["cluster.replicas=1,0"]}, "--vary cluster.replicas=1,0: cluster.replicas: found 0: allowed: greater"),
        ({"vary": ["engin.block_size=1,2"]}, "--vary engin.block_size=1,2: engin: unknown key: allowed: clients, cluster, "),
        ({"vary": ["policies.admission=fcfs,sjf"]}, "--vary policies.admission=fcfs,sjf: policies.admission: found 'sjf'"),
        ({"vary": ["seeds=[1],[1, 2]"]}, "--vary seeds=[1],[1, 2]: compare.vary: arms are paired by seed and request"),
        ({"vary": ["workload.generate.requests=5,6"]}, "--vary workload.generate.requests=5,6: compare.vary: arms"),
        ({"vary": ["cluster.replicas=1,2", "cluster.replicas=3"]}, "--vary cluster.replicas=1,2 cluster.replicas=3: a key"),
        ({"goodput": ["ttft"]}, "--goodput ttft: allowed: ttft:MS, tpot:MS or e2el:MS"),
        ({"goodput": ["itl:5"]}, "--goodput itl:5: allowed: ttft:MS"),
        ({"goodput": ["ttft:5 tpot:x"]}, "--goodput tpot:x: allowed: ttft:MS"),
        ({"goodput": ["ttft:0"]}, "--goodput ttft:0: slo.ttft_ms: found 0.0: allowed: greater than 0"),
        ({"goodput": ["ttft:nan"]}, "--goodput ttft:nan: slo.ttft_ms: found nan: allowed: "),
    ],
)
def test_bad_options_are_refused_under_their_own_name(tmp_path, options, message):
    assert refusal(tmp_path, **options).startswith(message)


def test_lines_stay_right_after_overrides(tmp_path):
    text = HEAD + "cluster:\n  replicas: 2\n  gpu: b300\n"
    assert refusal(tmp_path, text, settings=["cluster.replicas=3"]).startswith("study.yaml:6: cluster.gpu: found 'b300'")
    assert refusal(tmp_path, text, vary=["cluster.replicas=1,2"]).startswith("study.yaml:6: cluster.gpu: found 'b300'")


def test_a_bad_arm_names_the_line_of_its_axis(tmp_path):
    text = HEAD + "compare:\n  vary:\n    cluster.replicas: [1, 2]\n    cluster.gpu:\n    - h100-sxm\n    - b300\n"
    assert refusal(tmp_path, text).startswith("study.yaml:7: cluster.gpu: found 'b300'")
    text = HEAD + "compare:\n  vary:\n    cluster.replicas: []\n"
    assert refusal(tmp_path, text).startswith("study.yaml:6: compare.vary.cluster.replicas: found []: allowed: a list of at")
    text = HEAD + "compare:\n  vary: {cluster.replicas: [1, 1]}\n"
    assert refusal(tmp_path, text).startswith("study.yaml:5: compare.vary: a value stands twice: found ['1', '1']")


def test_a_study_without_arms_cannot_be_compared(tmp_path):
    for changes in ({"compare": {}}, {"compare__vary": {"cluster.replicas": [3]}}):
        file = small_file(tmp_path, **changes)
        assert len(file.arms) == 1
        with pytest.raises(ConfigError) as caught:
            compare(file)
        assert caught.value.key == "compare.vary"
        assert caught.value.allowed == "a key with at least two values, here or as --vary key=a,b"
        assert caught.value.where.startswith(str(tmp_path / "study.yaml"))


def test_an_unknown_headline_is_refused_with_its_line(tmp_path):
    with pytest.raises(ConfigError) as caught:
        compare(small_file(tmp_path, compare__headline="latency"))
    rows = study_text(compare__headline="latency").splitlines()
    assert caught.value.where == f"{tmp_path / 'study.yaml'}:{1 + rows.index('  headline: latency')}"
    assert caught.value.found == "latency" and "ttft_mean, ttft_p50" in caught.value.allowed


# --- arms -----------------------------------------------------------------------------------------------------------


def test_arms_are_the_product_of_the_axes_in_order(tmp_path):
    file = small_file(tmp_path, compare__vary={"cluster.replicas": [1, 2], "policies.admission": [
        "fcfs", {"name": "shortest-first", "by": "total"}]})
    assert [arm.label for arm in file.arms] == [
        "replicas=1, admission=fcfs", "replicas=1, admission=shortest-first(by=total)", "replicas=2, admission=fcfs",
        "replicas=2, admission=shortest-first(by=total)",
    ]
    assert [arm.study.cluster.replicas for arm in file.arms] == [1, 1, 2, 2]
    assert [str(arm.study.policy("admission")) for arm in file.arms] == ["fcfs", "shortest-first(by=total)"] * 2


def test_vary_on_the_command_line_replaces_the_file_and_takes_mappings(tmp_path):
    path = write_study(tmp_path)
    file = read_study(path, vary=["policies.admission=fcfs,{name: shortest-first, by: total}"])
    assert [arm.label for arm in file.arms] == ["fcfs", "shortest-first(by=total)"]
    file = read_study(path, vary=["cluster.replicas=1,2", "engine.block_size=16,32"])
    assert [(a.study.cluster.replicas, a.study.engine.block_size) for a in file.arms] == [(1, 16), (1, 32), (2, 16), (2, 32)]
    assert read_study(path, vary=["policies.replica_routing=mine.py:A,mine.py:B"]).arms[1].label == "mine.py:B"


def test_set_makes_missing_mappings_and_goodput_replaces_the_slo(tmp_path):
    path = write_study(tmp_path)
    changes = ["cost_model.step_overhead=0.002", "policies.admission=priority"]
    file = read_study(path, changes, goodput=["ttft:500", "e2el:9000"])
    assert file.study.cost_model.step_overhead == 0.002 and file.study.policies.admission == "priority"
    assert file.study.limits == Slo(ttft_ms=500, e2el_ms=9000)
    assert all(arm.study.limits == file.study.limits for arm in file.arms)


# --- written and read again -----------------------------------------------------------------------------------------

EXACT = None
POSITIVE = st.floats(1e-6, 1e6)
TOKENS = st.integers(1, 10**6)
SPREAD = st.fixed_dictionaries({"mean": POSITIVE, "sd": st.floats(0, 1e6)})
LENGTHS = TOKENS | st.lists(TOKENS, min_size=1, max_size=3) | SPREAD
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
NAMES = st.text(min_size=1, max_size=12)
POLICY = NAMES | st.dictionaries(
    st.text(min_size=1, max_size=6).filter(lambda key: key != "name"),
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=2), max_leaves=4), max_size=2,
).flatmap(lambda parameters: NAMES.map(lambda name: {"name": name, **parameters}))
GENERATE = st.fixed_dictionaries(
    {"requests": TOKENS, "rate": st.floats(0, 1e6), "input_tokens": LENGTHS, "output_tokens": LENGTHS},
    optional={"prefix_groups": st.integers(0, 9), "prefix_tokens": st.integers(0, 999)},
)
WORKLOAD = st.fixed_dictionaries({"generate": GENERATE}) | st.fixed_dictionaries(
    {"trace": NAMES}, optional={
        "format": st.sampled_from(["mooncake", "azure", "csv", "jsonl", None]), "skip_bad": st.booleans(),
        "dequantise": st.none() | POSITIVE | POSITIVE.map(lambda x: f"{x!r}min"), "thin": st.none() | st.floats(0.01, 1),
        "slice": st.none() | st.fixed_dictionaries({}, optional={"start": POSITIVE, "end": POSITIVE | st.just("2h")}),
        "head": st.none() | TOKENS,
    })
STUDY = st.fixed_dictionaries(
    {"workload": WORKLOAD, "model": NAMES | st.fixed_dictionaries({"name": NAMES}, optional={
        "weight_dtype": st.sampled_from([None, "fp8", "int4"]), "kv_cache_dtype": st.sampled_from(["auto", "fp8"])})},
    optional={
        "name": st.text(max_size=9),
        "cluster": st.fixed_dictionaries({}, optional={"replicas": TOKENS, "gpu": NAMES, "tensor_parallel_size": TOKENS}),
        "engine": st.fixed_dictionaries({}, optional={
            "block_size": TOKENS, "num_gpu_blocks": st.none() | st.integers(2, 10**6), "watermark": st.floats(0, 0.9),
            "enable_prefix_caching": st.booleans(), "room_order": st.sampled_from(["pins_first", "rows_first"])}),
        "cost_model": st.fixed_dictionaries({}, optional={"allreduce_latency": st.floats(0, 1)}),
        "policies": st.fixed_dictionaries({}, optional={"admission": st.none() | POLICY, "replica_routing": POLICY}),
        "slo": st.fixed_dictionaries({}, optional={"ttft_ms": st.none() | POSITIVE}),
        "cost": st.fixed_dictionaries({}, optional={"usd_per_gpu_hour": st.none() | st.floats(0, 1e3)}),
        "compare": st.fixed_dictionaries({}, optional={
            "headline": NAMES, "vary": st.dictionaries(NAMES, st.lists(SCALARS | POLICY, min_size=1), max_size=2)}),
        "seeds": st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=4, unique=True),
        "horizon": POSITIVE | st.just("inf"), "sample_every": st.floats(0, 1e3),
    },
)


@given(STUDY)
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_a_study_survives_being_written_and_read(tmp_path, data):
    study = Study.model_validate(data)
    path = tmp_path / "config.yaml"
    write_config(path, study, tmp_path)
    again = Study.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert again.model_copy(update={"folder": None}) == study
    write_config(tmp_path / "again.yaml", again, tmp_path)
    assert (tmp_path / "again.yaml").read_bytes() == path.read_bytes()


def test_the_shipped_quickstart_survives_too(tmp_path):
    from importlib import resources

    with resources.as_file(resources.files("simcore.experiments") / "quickstart" / "study.yaml") as path:
        file = read_study(path)
    write_config(tmp_path / "config.yaml", file.study, file.folder)
    again = read_study(tmp_path / "config.yaml")
    assert again.folder == file.folder
    assert [arm.label for arm in again.arms] == [arm.label for arm in file.arms] and len(file.arms) == 3
    assert again.study.model_copy(update={"folder": None}) == file.study
