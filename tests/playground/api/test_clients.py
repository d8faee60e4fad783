"""A client that nobody here wrote, installed from the package index into a folder of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import httpx
import pytest

from tests.playground.api.test_openai import idle
from tests.playground.api.test_prometheus import samples
from tests.playground.serving import Served

pytestmark = [pytest.mark.network, pytest.mark.slow]
QUESTIONS = ("Say hello.", "Name three rivers.", "Count to ten.", "What is tea?")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the client's programs, in a virtual environment of its own."""
    folder = tmp_path_factory.mktemp("clients")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "aiperf>=0.13,<1"], check=True, timeout=1200)
    return folder / "bin"


def test_aiperf_measures_acceptance_as_the_log_has_it(
    served: Served, http: httpx.Client, programs: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps({"text": text}) for text in QUESTIONS))
    idle(served)
    known = {row.id for row in served.log.find().rows}
    before = samples(http)
    line = f"""
        profile --model tiny:scripted --url {served.url} --endpoint-type chat --streaming
        --tokenizer {served.host.catalog.targets["tiny"].path} --input-file {questions}
        --custom-dataset-type single_turn --request-count 8 --concurrency 2
        --extra-inputs temperature:0 --extra-inputs max_tokens:24 --extra-inputs ignore_eos:true
        --use-server-token-count --server-metrics {served.url}/metrics
        --ui simple --output-artifact-dir {tmp_path / "out"}"""
    done = subprocess.run(
        [programs / "aiperf", *line.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    idle(served)
    runs = [served.log.get(row.id) for row in served.log.find().rows if row.id not in known]
    figures = [run.metrics for run in runs if run is not None]
    assert len(figures) == found["request_count"]["avg"] == 8
    assert found["spec_decode_acceptance_length"]["count"] == 8
    lengths = [one["mat"] for one in figures]
    assert found["spec_decode_acceptance_length"]["avg"] == pytest.approx(fmean(lengths))
    for name, key in (("steps", "num_steps"), ("accepted_draft_tokens", "num_accepted")):
        assert found[f"spec_decode_{name}"]["sum"] == sum(one[key] for one in figures)
    assert found["output_sequence_length"]["avg"] == 24
    counted = "vllm:spec_decode_num_accepted_tokens_total", ""
    grown = samples(http)[counted] - before[counted]
    assert grown == found["spec_decode_accepted_draft_tokens"]["sum"]
