"""The page on traces of one's own: its example gives what it shows, its studies are read, its table names the options."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
import yaml

from simcore.errors import ConfigError
from simcore.experiments.run import build_workload
from simcore.experiments.study import WorkloadConfig
from simcore.experiments.trace_files import options, run_trace_export, run_trace_import
from simcore.traces.exporting import TARGETS
from simcore.traces.read import FORMATS, options_of

PAGE = (Path(__file__).parents[2] / "docs" / "bring-your-own.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gateway.jsonl").write_text(blocks("json")[0], encoding="utf-8")
    return tmp_path


def test_the_example_gives_what_the_page_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_trace_import("gateway.jsonl", Path("trace.jsonl.gz"), json=Path("info.json"))
    assert gzip.decompress(Path("trace.jsonl.gz").read_bytes()).decode().split("\n", 1)[1] == blocks("text")[0]
    said = capsys.readouterr().out
    assert "sessions  1, turns mean 2.00" in said and "written to trace.jsonl.gz" in said
    assert json.loads(Path("info.json").read_text())["requests"] == 2


def test_its_exports(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_trace_import("gateway.jsonl", Path("trace.jsonl.gz"))
    run_trace_export("trace.jsonl.gz", Path("out.jsonl"), to="mooncake")
    run_trace_export("trace.jsonl.gz", Path("out.jsonl"), to="agentic-mooncake", block_tokens=8)
    run_trace_export("trace.jsonl.gz", Path("out.csv"), to="csv", json=Path("done.json"))
    said = capsys.readouterr().out
    assert "2 requests written to out.jsonl; read it with format=mooncake, block_tokens=16" in said
    assert "block_tokens=8" in said and "lost: 21 tokens of 2 outputs were identified" in said
    assert "lost: token identity of 2 requests" in said
    assert json.loads(Path("done.json").read_text())["read_with"] == {"format": "csv"}


def test_nothing_lost_is_said_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.csv").write_text("arrival,input_tokens,output_tokens\n0,5,5\n1.5,6,6\n")
    run_trace_export("a.csv", Path("out.jsonl"), to="agentic-mooncake", settings=[])
    assert "nothing lost: a run of it is a run of the original" in capsys.readouterr().out


def test_options_come_as_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_trace_import("gateway.jsonl", Path("t.jsonl"), format="gateway", settings=["clock=recorded", "block_tokens=8"],
                     json=Path("-"))
    assert json.loads(capsys.readouterr().out)["trace_block_tokens"] == 8
    assert options(["a=1", "b=x", "c=[1, 2]"]) == {"a": 1, "b": "x", "c": [1, 2]}
    with pytest.raises(ConfigError, match="--set clock: allowed: option=value"):
        options(["clock"])


def test_its_studies_are_read(folder: Path) -> None:
    run_trace_import("gateway.jsonl", Path("trace.jsonl.gz"))
    made = [WorkloadConfig(**yaml.safe_load(text)["workload"]) for text in blocks("yaml")]
    kinds = [config.generate.kind if config.generate else "trace" for config in made]
    assert kinds == ["trace", "gamma", "diurnal", "fitted"]
    assert len(build_workload(made[0], folder, 1)) == 2
    assert len(build_workload(made[1], folder, 1)) == 1000 and len(build_workload(made[2], folder, 1)) == 50_000


def test_its_tables_name_the_formats_and_their_options() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `") and not line.startswith("| `--")]
    formats = {name: re.findall(r"`(\w+)`", row[4])
               for row in rows if len(row) == 5 for name in re.findall(r"`([\w-]+)`", row[0])}
    for name, named in formats.items():
        assert sorted(options_of(name)) == sorted(named), name
    agents = {"coding-agents", "lmcache-agents", "tau-bench", "tracelab"}  # on the page of agents
    assert set(formats) == set(FORMATS) - agents
    assert [re.findall(r"`([\w-]+)`", row[0])[0] for row in rows if len(row) == 4] == list(TARGETS)
