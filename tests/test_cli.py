"""The command line: traces, JSON, and errors that are one sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import presets
from engine.errors import ConfigError
from playground.cli.commands import GenerateOptions
from playground.cli.inputs import sampling_of
from playground.cli.options import EMBEDDED
from storage import RunLog, RunQuery
from tests.commands import invoke, refused
from tests.models import save_tiny

IDS = "72,101,108,108,111,72,101,108,108,111,72,101"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), eos_token_id=None)


def generate(folder: Path, *arguments: object, code: int = 0) -> Any:
    common = ["--target", folder, "--dtype", "float32", "--db", folder / "runs.sqlite3"]
    return invoke("generate", *common, *arguments, code=code)


HELP_OF_ALL = """
import sys, app, typer
def help_of(command, *words):
    try: app.app([*words, "--help"])
    except SystemExit: pass
    for name, inner in getattr(command, "commands", {}).items():
        help_of(inner, *words, name)
help_of(typer.main.get_command(app.app))
heavy = {"torch", "gradio", "transformers", "sqlalchemy"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_of_no_command_imports_torch_or_gradio() -> None:
    root = Path(__file__).parent.parent
    asked = [sys.executable, "-c", HELP_OF_ALL]
    run = subprocess.run(asked, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "generate" in run.stdout and "Print runs, the newest first." in run.stdout


def test_settings_of_the_chat_template_are_those_of_the_options() -> None:
    options = GenerateOptions(
        thinking=False, chat_template_kwarg=["reasoning_effort=low", "tools_in=2", "on=true"]
    )
    assert sampling_of(options).chat_template_kwargs == {
        "enable_thinking": False,
        "reasoning_effort": "low",
        "tools_in": 2,
        "on": True,
    }
    with pytest.raises(ConfigError, match="--chat-template-kwarg must be NAME=VALUE, got 'on'"):
        sampling_of(GenerateOptions(chat_template_kwarg=["on"]))
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        sampling_of(GenerateOptions(chat_template_kwarg=["a b=1"]))


def test_thinking_needs_a_chat_template(folder: Path) -> None:
    for arguments in (("--raw", "x"), ("x",)):
        told = generate(folder, "--no-thinking", *arguments, code=2).stderr
        assert "enable_thinking" in told and told.count("\n") == 1


def test_trace_has_exactly_the_documented_fields(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t" / "steps.jsonl"
    generate(
        *(folder, "--prompt-ids", IDS, "--method", "NGram", "--set", "max_draft_len=3"),
        *("--max-new-tokens", 20, "--trace", trace, "--seed", 5),
    )
    run, *steps, end = [json.loads(line) for line in trace.read_text().splitlines()]
    assert list(run) == ["type", "target", "method", "prompt_ids", "sampling", "dtype", "device"]
    assert run["method"]["max_draft_len"] == 3 and run["sampling"]["seed"] == 5
    assert run["prompt_ids"] == [int(i) for i in IDS.split(",")]
    fields = "type index tokens parents accepted bonus bypass draft_s verify_s other_s".split()
    assert all(list(step) == fields for step in steps)
    assert [step["index"] for step in steps] == list(range(end["steps"]))
    keys = "type output_ids text finish_reason steps mat tok_s ttft_s".split()
    assert list(end) == keys
    committed = [steps[0]["tokens"][0]]
    for step in steps:
        assert step["tokens"][0] == committed[-1] and step["parents"][0] == -1
        committed += [step["tokens"][node] for node in step["accepted"]] + [step["bonus"]]
    assert end["output_ids"] == committed[:20]
    accepted = sum(len(step["accepted"]) for step in steps)
    assert end["mat"] == pytest.approx(1 + accepted / len(steps))


def test_json_summary_and_run_log_tell_the_same(folder: Path) -> None:
    out = generate(folder, "list me", "--json", "--max-new-tokens", 8)
    summary = json.loads(out.stdout)
    with RunLog.open(str(folder / "runs.sqlite3")) as log:
        stored, page = log.get(summary["run_id"]), log.find(RunQuery(text="list me"))
    assert stored is not None and page.total == 1
    assert page.rows[0].decoding_type == "Autoregressive"
    assert list(stored.output_ids) == summary["output_ids"]
    assert stored.text == summary["text"]
    assert stored.environment["versions"]["torch"]


def test_no_save_leaves_no_run(folder: Path, tmp_path: Path) -> None:
    db = tmp_path / "none.sqlite3"
    invoke("generate", "hi", "--target", folder, "--no-save", "--db", db, "--max-new-tokens", 2)
    assert not db.exists()


def test_a_method_file_is_read_with_overrides_or_refused_by_its_line(
    folder: Path, tmp_path: Path
) -> None:
    (good := tmp_path / "mine.yaml").write_text("decoding_type: NGram\nmax_draft_len: 2\n")
    (bad := tmp_path / "bad.yaml").write_text("decoding_type: NGram\nmax_draft_len: [1\n")
    more = ("--set", "max_matching_ngram_size=3", "--json")
    method = json.loads(generate(folder, "hello", "--method", good, *more).stdout)["method"]
    assert (method["max_draft_len"], method["max_matching_ngram_size"]) == (2, 3)
    said = refused("generate", "hi", "--target", folder, "--method", bad)
    assert "bad.yaml, line" in said and "not valid YAML" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "prompt is empty"),
        (["   "], "prompt is empty"),
        (["hi", "--prompt-ids", "1"], "not both"),
        (["--prompt-ids", "1,x"], "must be like 1,2,3"),
        (["--prompt-ids", "1,99999"], "got 99999"),
        (["--prompt-ids", "-5"], "got -5"),
        (["hi", "--temperature", "nan"], "temperature"),
        (["hi", "--method", "NGram", "--set", "max_draft_len=many"], "max_draft_len must be"),
        (["hi", "--method", "NGram", "--set", "max_draft_len"], "--set takes field=value"),
        (["hi", "--dtype", "float8"], "dtype must be one of"),
        (["hi", "--device", "cuda"], "no CUDA device"),
        (["hi", "--target", "no/such/thing"], "No preset, local path or hub id"),
        (["x" * 3000], "context holds 256"),
    ],
)
def test_bad_input_is_one_sentence(folder: Path, arguments: list[str], words: str) -> None:
    common = ("--target", folder, "--dtype", "float32", "--db", folder / "runs.sqlite3")
    assert words in refused("generate", *common, *arguments)


def test_a_preset_of_another_target_names_it(folder: Path) -> None:
    """Random weights have no name that the hub knows: what failed was a mystery."""
    said = generate(folder, "x", "--method", "mtp-tiny-random", code=2).stderr
    assert said.startswith(
        "note: mtp-tiny-random is made for another target: --target tiny-random-deepseek-v3.\n"
    )
    own = generate(folder, "--prompt-ids", IDS, "--method", "ngram", "--max-new-tokens", 4)
    assert "another target" not in own.stderr


def test_models_and_methods_list_everything() -> None:
    models, methods = invoke("models").stdout, invoke("methods").stdout
    assert all(name in models for name in ("smollm2-135m-instruct", "llama-3.1-8b-instruct"))
    assert all(name in methods for name in ("Autoregressive", "NGram", "Draft_Target"))
    assert "max_matching_ngram_size" in methods


@pytest.mark.parametrize("method", ["Autoregressive", "Suffix"])
def test_a_text_follows_the_schema_expression_or_grammar_it_is_given(
    folder: Path, tmp_path: Path, method: str
) -> None:
    def text(*asked: object) -> str:
        out = generate(folder, "hello", "--json", "--method", method, *asked)
        return str(json.loads(out.stdout)["text"])

    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["left", "right"]}')
    assert text("--json-schema", schema) in ('"left"', '"right"')
    assert text("--json-schema", schema.read_text()) in ('"left"', '"right"')
    assert re.fullmatch("[ab]{4}", text("--regex", "[ab]{4}"))
    assert text("--grammar", 'start: "held"') == "held"
    with RunLog.open(str(folder / "runs.sqlite3")) as log:
        out = generate(folder, "hello", "--json", "--method", method, "--regex", "[ab]{4}")
        stored = log.get(json.loads(out.stdout)["run_id"])
    assert stored is not None and stored.sampling["structured_output"] == "regex"
    assert stored.sampling["grammar"] == "[ab]{4}"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("--regex", "a", "--grammar", 'start: "a"'), "Give one of"),
        (("--json-schema", "none.json"), "could not be read"),
        (("--regex", "("), "unclosed group"),
    ],
)
def test_an_invalid_grammar_is_refused_before_anything_is_loaded(
    asked: tuple[str, ...], why: str
) -> None:
    assert why in invoke("generate", "hello", "--target", "nowhere", *asked, code=2).stderr


WITHOUT_HUB = {
    name: preset.target or EMBEDDED
    for name, preset in presets.methods().items()
    if presets.targets()[preset.target or EMBEDDED].hub is None
}


def test_every_method_with_a_preset_has_one_that_runs_without_a_hub() -> None:
    kinds = {presets.methods()[name].config.decoding_type for name in WITHOUT_HUB}
    assert kinds == {preset.config.decoding_type for preset in presets.methods().values()}


@pytest.mark.network  # the embedded model, from the package index
@pytest.mark.parametrize("name", WITHOUT_HUB)
def test_a_preset_that_needs_no_hub_drafts_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the size fitted to the machine, which the shipped files ask for."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    common = ["--target", WITHOUT_HUB[name], "--method", name, "--db", tmp_path / "runs.sqlite3"]
    common += ["--max-new-tokens", 24, "--ignore-eos", "--json"]
    made = invoke("generate", "Count: one two three one two three one two", *common)
    metrics = json.loads(made.stdout)["metrics"]
    assert metrics["num_new_tokens"] == 24
    assert (metrics["num_drafted"] > 0) == (name != "plain")
