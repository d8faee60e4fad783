"""Page, log, exports, command line and API say why a run drafted nothing, and say the same."""

from __future__ import annotations

import io
import json
from pathlib import Path

from engine.drafters.lookup.ngram import NGramConfig
from engine.steps import BYPASSES
from playground.api.answer import speculative_decoding
from playground.host.live import LiveRuns
from playground.host.runner import EngineHost
from playground.runs.reading import History
from playground.runs.transfer import export_runs
from presets import MethodPreset
from storage import RunLog
from tests.commands import invoke
from tests.playground.asks import finished, start, stored

SENTENCE = (
    "Nothing was drafted: the drafter found nothing to propose (2 of 3 steps); the length limit "
    "leaves no room for a draft (1 of 3 steps)."
)
COUNTS = {"no_match": 2, "room": 1}


def test_a_run_that_drafted_nothing_says_why_on_the_page_in_the_log_and_by_the_api(
    host: EngineHost, log: RunLog
) -> None:
    ngram = MethodPreset(name="ngram", title="N-gram", config=NGramConfig(max_draft_len=1))
    host.catalog.presets["ngram"] = ngram
    limits = {"max_new_tokens": "4"}
    run = finished(start(host, method="ngram", limits=limits, mode="raw", prompt="abcd"))
    assert run.log_id is not None
    for history in (History(host.runs, log), History(LiveRuns(), log)):
        assert history.since(run.log_id, 0)["status"]["warning"] == SENTENCE
        assert history.step(run.log_id, 0)["bypass"] == BYPASSES["no_match"]
        assert history.step(run.log_id, 2)["bypass"] == BYPASSES["room"]
    told = speculative_decoding(run)
    assert stored(host, run).metrics["bypasses"] == COUNTS
    assert told is not None and told["bypass_reasons"] == COUNTS
    list(export_runs(log, [run.log_id], file := io.StringIO(), "json"))
    (exported,) = json.loads(file.getvalue())["runs"]
    assert [step["bypass"] for step in exported["steps"]] == ["no_match", "no_match", "room"]


def test_the_command_line_says_why_too(tiny_folder: Path, tmp_path: Path) -> None:
    words = f"generate --target {tiny_folder} --dtype float32 --raw abcd --method NGram".split()
    words += ["--max-new-tokens", "4", "--ignore-eos", "--no-save"]
    trace = tmp_path / "trace.jsonl"
    assert SENTENCE in invoke(*words, "--trace", trace).stderr
    assert json.loads(invoke(*words, "--json").stdout)["metrics"]["bypasses"] == COUNTS
    steps = [json.loads(line) for line in trace.read_text().splitlines()][1:-1]
    assert [step["bypass"] for step in steps] == ["no_match", "no_match", "room"]
