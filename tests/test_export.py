"""`app.py export` and `app.py import`: files out, methods in, faults in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from storage import RunLog
from tests.commands import invoke, refused
from tests.storage.conftest import new_run


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


def test_files_are_written_and_read_back(tmp_path: Path) -> None:
    asked = ("--method", "NGram", "--set", "max_draft_len=6", "--target", "owner/model")
    out = invoke("export", *asked, "--to", "trtllm", "--output", tmp_path / "out")
    written = [Path(line) for line in out.stdout.split()]
    assert len(written) == 4 and all(file.is_file() for file in written)
    method = tmp_path / "method.yaml"
    invoke("import", written[0], "--from", "trtllm", "--output", method)
    config = yaml.safe_load(method.read_text())["config"]
    assert (config["decoding_type"], config["max_draft_len"]) == ("NGram", 6)


def test_a_run_of_the_log_is_exported(tmp_path: Path) -> None:
    db, suffix = tmp_path / "runs.sqlite3", {"decoding_type": "Suffix", "max_draft_len": 9}
    with RunLog.open(str(db)) as log:
        run = log.begin(new_run(target="qwen3-8b", method=suffix))
    out = invoke("export", "--run", run, "--to", "vllm", "--db", db)
    head, _, rest = out.stdout.partition("# ---- serve.sh")
    values = json.loads(head.split("speculative_config.json")[1])
    assert values["num_speculative_tokens"] == 9 and "vllm serve Qwen/Qwen3-8B" in rest
    other = invoke("export", "--run", run, "--to", "vllm", "--db", db, "--target", "a/b")
    assert "vllm serve a/b" in other.stdout


def test_dropped_settings_and_remarks_go_to_stderr() -> None:
    lost = invoke("export", "--method", "medusa-vicuna-7b", "--to", "vllm",
                  "--engine-version", "0.32")  # fmt: skip
    assert "warning: vLLM runs Medusa as a chain" in lost.stderr
    assert "warning" not in lost.stdout
    text = '{"method": "ngram", "num_speculative_tokens": 2, "enforce_eager": true}'
    read = invoke("import", "-", "--from", "vllm", text=text)
    assert "ignored: enforce_eager has no effect on drafting." in read.stderr
    assert set(yaml.safe_load(read.stdout)) == {"name", "title", "config"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("export --to vllm", "Give either --run ID or --method METHOD"),
        ("export --to vllm --run a --method b", "Give either"),
        ("export --to vlm --method ngram", "Did you mean vllm?"),
        ("export --to vllm --method NGran", "Did you mean NGram?"),
        ("export --to vllm --method ngram --engine-version 0.1", "or newer"),
        ("export --to vllm --method lookahead", "Nearest: N-gram lookup, Suffix: without weights"),
        ("export --to vllm --run nope --set a=1", "as it was"),
        ("export --to vllm --run nope --db sqlite://", "No run nope is in the log"),
        (f"export --to vllm --method ngram --output {__file__}", "cannot be written"),
        ("import no/such/file --from vllm", "could not be read"),
        ("import - --from vllm", "Nothing to read"),
        ("import - --from tgi", "The engine must be one of"),
    ],
)
def test_bad_input_is_one_sentence(line: str, words: str) -> None:
    assert words in refused(*line.split())
