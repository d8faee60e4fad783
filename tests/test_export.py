"""`app.py export` and `app.py import`: files out, methods in, faults in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from playground.cli.main import app
from storage import NewRun, RunLog

ENGINES = ("trtllm", "vllm", "sglang", "triton", "llamacpp", "transformers", "mlx", "ollama")


def invoke(*arguments: object, code: int = 0, text: str | None = None) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=text)
    assert result.exit_code == code, result.output
    return result


def test_a_preset_goes_to_its_own_target_and_back() -> None:
    out = invoke("export", "--method", "draft-llama-3.1-8b", "--to", "vllm")
    assert "vllm serve meta-llama/Llama-3.1-8B-Instruct" in out.stdout
    assert "vLLM 0.33: exact" in out.stderr
    config_json = out.stdout.split("speculative_config.json\n")[1].split("# ----")[0]
    back = invoke("import", "-", "--from", "vllm", text=config_json)
    config = yaml.safe_load(back.stdout)["config"]
    assert config == {
        "decoding_type": "Draft_Target",
        "speculative_model": "meta-llama/Llama-3.2-1B-Instruct",
        "max_draft_len": 5,
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_files_are_written_and_read_back(engine: str, tmp_path: Path) -> None:
    name = {"mlx": "Draft_Target", "ollama": "MTP"}.get(engine, "NGram")
    out = invoke(
        "export", "--method", name, "--set", "max_draft_len=6", "--to", engine,
        "--target", "owner/model", "--output", tmp_path / "out",
    )  # fmt: skip
    written = [Path(line) for line in out.stdout.split()]
    assert written and all(file.is_file() for file in written)
    method = tmp_path / "method.yaml"
    invoke("import", written[0], "--from", engine, "--output", method)
    config = yaml.safe_load(method.read_text())["config"]
    assert config["decoding_type"] == name and config["max_draft_len"] == 6


def test_a_run_of_the_log_is_exported(tmp_path: Path) -> None:
    db = tmp_path / "runs.sqlite3"
    log = RunLog.open(str(db))
    run = log.begin(
        NewRun(
            target="qwen3-8b",
            method={"decoding_type": "Suffix", "max_draft_len": 9},
            method_title="Suffix",
            lossless=True,
            sampling={},
            limits={},
            prompt_ids=(1,),
        )
    )
    log.close()
    out = invoke("export", "--run", run, "--to", "vllm", "--db", db)
    head, _, rest = out.stdout.partition("# ---- serve.sh")
    values = json.loads(head.split("speculative_config.json")[1])
    assert values["num_speculative_tokens"] == 9 and "vllm serve Qwen/Qwen3-8B" in rest
    other = invoke("export", "--run", run, "--to", "vllm", "--db", db, "--target", "a/b")
    assert "vllm serve a/b" in other.stdout


def test_losses_and_remarks_go_to_stderr() -> None:
    lost = invoke("export", "--method", "medusa-vicuna-7b", "--to", "vllm",
                  "--engine-version", "0.32")  # fmt: skip
    assert "warning: vLLM runs Medusa as a chain" in lost.stderr
    assert "warning" not in lost.stdout
    text = '{"method": "ngram", "num_speculative_tokens": 2, "enforce_eager": true}'
    read = invoke("import", "-", "--from", "vllm", text=text)
    assert "ignored: enforce_eager has no effect on drafting." in read.stderr
    assert set(yaml.safe_load(read.stdout)) == {"name", "title", "config"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "--to", "vllm"], "Give either --run ID or --method METHOD"),
        (["export", "--to", "vllm", "--run", "a", "--method", "b"], "Give either"),
        (["export", "--to", "vlm", "--method", "ngram"], "Did you mean vllm?"),
        (["export", "--to", "vllm", "--method", "NGran"], "Did you mean NGram?"),
        (["export", "--to", "vllm", "--method", "ngram", "--engine-version", "0.1"], "or newer"),
        (
            ["export", "--to", "vllm", "--method", "lookahead"],
            "Nearest: N-gram lookup, Suffix: without weights",
        ),
        (["export", "--to", "vllm", "--run", "nope", "--set", "a=1"], "as it was"),
        (["export", "--to", "vllm", "--run", "nope"], "No run nope is in the log"),
        (
            ["export", "--method", "ngram", "--to", "vllm", "--output", __file__],
            "cannot be written",
        ),
        (["import", "no/such/file", "--from", "vllm"], "could not be read"),
        (["import", "-", "--from", "vllm"], "Nothing to read"),
        (["import", "-", "--from", "tgi"], "The engine must be one of"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], words: str, tmp_path: Path) -> None:
    db = ["--db", tmp_path / "none.db"] if "--run" in arguments else []
    result = invoke(*arguments, *db, code=2)
    error = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and words in error[0] and "Traceback" not in result.output
