from pathlib import Path

import pytest

from simcore.errors import TraceError
from simcore.traces.azure import read_azure

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "azure_llm_2023"


def test_both_time_formats_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(HEADER + "2023-11-16 23:59:59.9999999,374,44\r\n2023-11-17 00:00:00,396,109\n")
    workload = read_azure(path)
    assert workload.arrival.tolist() == [0.0, 1e-7]
    assert workload.input_tokens.tolist() == [374, 396]
    assert workload.output_tokens.tolist() == [44, 109]
    assert not workload.known_tokens.any()
    path.write_text(HEADER + "2024-05-10 00:00:00.009930+00:00,1,2\n2024-05-10 02:00:01.009930+02:00,1,2\n")
    assert read_azure(path).arrival.tolist() == [0.0, 1.0]


BAD = [
    ("2023-11-16 18:15:46.1,3", "cells: found 2: allowed: 3"),
    ("2023-13-16 18:15:46.1,3,4", "TIMESTAMP: found '2023-13-16 18:15:46.1': allowed: YYYY-MM-DD hh:mm:ss"),
    ("yesterday,3,4", "TIMESTAMP: found 'yesterday'"),
    ("2023-11-16 18:15:40,3,4", "TIMESTAMP: time goes backwards: found '2023-11-16 18:15:40'"),
    ("2023-11-16 18:15:46,3,0", "GeneratedTokens: found 0: allowed: a whole number, 1 to"),
    ("2023-11-16 18:15:46,-3,4", "ContextTokens: found -3: allowed: a whole number, 1 to"),
    ("2023-11-16 18:15:46,3.5,4", "ContextTokens: found 3.5: allowed: a whole number, 1 to"),
    ("2023-11-16 18:15:46,,4", "ContextTokens: found '': allowed: a whole number, 1 to"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_row_is_refused_or_skipped_and_listed(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{HEADER}2023-11-16 18:15:45,1,1\n{line}\n2023-11-16 18:15:50,1,1\n")
    with pytest.raises(TraceError) as refused:
        read_azure(path)
    assert str(refused.value).startswith(f"{path}:3: ")
    assert message in str(refused.value)
    workload = read_azure(path, skip_bad=True)
    assert (len(workload), workload.skipped) == (2, (str(refused.value),))


def test_a_wrong_header_is_refused_in_any_case(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens\n")
    with pytest.raises(TraceError, match=":1: GeneratedTokens: missing: allowed: TIMESTAMP, ContextTokens, GeneratedTokens"):
        read_azure(path, skip_bad=True)
    path.write_text(HEADER)
    with pytest.raises(TraceError, match="no requests"):
        read_azure(path)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no {SHARED}")
def test_the_real_trace() -> None:
    workload = read_azure(SHARED / "AzureLLMInferenceTrace_code.csv.gz")
    assert len(workload) == 8819
    assert workload.input_tokens[0] == 4808
    assert workload.arrival[1] == 0.052
