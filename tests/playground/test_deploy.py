"""What the Deploy page asks, without a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import presets
from engine.drafters import methods, parse_method
from engine.errors import ConfigError
from engine.interop import ENGINES
from engine.interop.fields import same_effect
from engine.model.sources import TargetSpec
from playground.host.catalog import Catalog
from playground.host.methods import choose_method
from playground.web.deploy import read_link
from playground.web.deploy_desk import DeployDesk
from playground.web.deploying import Handed, hand_over, method_yaml, model_name, of_run, read_config
from storage import NewRun, RunLog


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    log = RunLog.open(str(tmp_path / "runs.db"))
    yield log
    log.close()


@pytest.fixture
def desk(log: RunLog) -> DeployDesk:
    return DeployDesk(log, Catalog.shipped())


def stored(log: RunLog, target: str = "llama-3.1-8b-instruct", **settings: Any) -> str:
    """A run of EAGLE-3 in the log."""
    config = parse_method(
        {"decoding_type": "Eagle3", "speculative_model": "owner/heads", **settings}
    )
    return log.begin(
        NewRun(
            target=target,
            method=config.model_dump(mode="json"),
            method_title="EAGLE-3",
            lossless=True,
            sampling={},
            limits={},
            prompt_ids=(1, 2),
        )
    )


def test_a_stored_run_is_handed_over_with_the_target_s_hub_id(log: RunLog) -> None:
    run = stored(log, max_draft_len=4)
    handed = of_run(log, run)
    values = yaml.safe_load(hand_over(handed, "triton").files[0].text)
    assert values["model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert values["speculative_config"]["max_draft_len"] == 4


def test_layers_and_trees_of_a_run_come_back_from_the_log_as_they_were(log: RunLog) -> None:
    run = stored(log, eagle3_layers_to_capture=(2, 5), use_dynamic_tree=True)
    shown = of_run(log, run).config.model_dump()
    assert shown["eagle3_layers_to_capture"] == (2, 5) and shown["use_dynamic_tree"] is True


def test_looking_tells_every_engine_s_verdict_and_the_chosen_one_s_files(
    desk: DeployDesk, log: RunLog
) -> None:
    run = stored(log)
    found = desk.look({"run": run, "engine": "vllm", "version": "0.20"})
    assert [row["name"] for row in found["engines"]] == list(ENGINES)
    assert found["export"]["version"] == "0.20" and found["export"]["verdict"] == "exact"
    assert json.loads(found["export"]["files"][0]["text"])["method"] == "eagle3"
    rows = {row["name"]: row for row in found["engines"]}
    assert rows["transformers"]["words"] == "transformers has no EAGLE-3."
    assert rows["sglang"]["verdict"] == "exact" and rows["vllm"]["version"] == "0.20"
    json.dumps(found)


def test_a_method_of_the_menu_is_looked_at_with_its_target(desk: DeployDesk) -> None:
    asked = {"method": "medusa-vicuna-7b", "target": "vicuna-7b-v1.3", "engine": "trtllm"}
    found = desk.look(asked)
    assert found["export"]["refusal"].startswith("TensorRT-LLM removed Medusa")
    older = desk.look({**asked, "version": "1.2"})["export"]
    assert "lmsys/vicuna-7b-v1.3" in older["files"][1]["text"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"run": "nope"}, "No run nope is in the log"),
        ({"run": 7}, "run must be the id of a run"),
        ({"method": "ngram", "target": "nowhere"}, "target must be one of"),
        ({"method": "nothing"}, "method must be one of"),
        ({"method": "ngram", "target": "qwen3-8b", "engine": "x"}, "The engine must be one of"),
        ({"method": "ngram", "target": "qwen3-8b", "version": 3}, "version must be the release"),
        ({"method": "ngram", "target": "qwen3-8b", "version": "9" * 99}, "version must be the rel"),
        ({"method": "ngram", "target": "qwen3-8b", "version": "old"}, "must be like"),
    ],
)
def test_malformed_questions_are_one_sentence(
    desk: DeployDesk, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        desk.look(asked)


def test_the_table_has_every_method_and_tells_each_refusal(desk: DeployDesk) -> None:
    found = desk.matrix({})
    assert [row["name"] for row in found["rows"]] == list(methods())
    for row in found["rows"]:
        assert len(row["cells"]) == len(ENGINES)
        for cell in row["cells"]:
            assert cell["verdict"] == "exact" or cell["words"]
            assert "is not set" not in cell["words"]


def test_a_pasted_config_becomes_a_method_file_that_the_command_line_takes(
    desk: DeployDesk, tmp_path: Path
) -> None:
    text = "{0}, {0, 0}, {1}"
    pasted = f'parameters: {{ key: "medusa_choices" value: {{ string_value: "{text}" }} }}'
    found = desk.read({"engine": "triton", "text": pasted})
    assert found["title"] == "Medusa" and found["decoding_type"] == "Medusa"
    file = tmp_path / "method.yaml"
    file.write_text(found["yaml"])
    config = choose_method(str(file))
    assert config.model_dump()["medusa_choices"] == ((0,), (1,), (0, 0))
    assert "medusa_choices: [[0], [1], [0, 0]]" in found["yaml"]


@pytest.mark.parametrize("name", [n for n, p in presets.methods().items() if n != "plain"])
def test_every_preset_survives_its_method_file(name: str, tmp_path: Path) -> None:
    config = presets.methods()[name].config
    file = tmp_path / "m.yaml"
    file.write_text(method_yaml(config, "vllm"))
    assert choose_method(str(file)) == config


def test_used_in_generate_needs_a_target_that_fits(desk: DeployDesk) -> None:
    ngram = {"engine": "vllm", "text": '{"method": "ngram", "num_speculative_tokens": 5}'}
    assert desk.used(ngram, "qwen3-8b") == (
        "qwen3-8b",
        "type:NGram",
        {"max_draft_len": 5, "max_matching_ngram_size": 5},
    )
    mtp = {"engine": "vllm", "text": '{"method": "mtp", "num_speculative_tokens": 1}'}
    with pytest.raises(ConfigError, match="MTP does not fit the target qwen3-8b"):
        desk.used(mtp, "qwen3-8b")
    assert desk.used(mtp, "deepseek-v3")[1] == "type:MTP"


def test_the_embedded_target_is_a_file_and_engines_are_told(log: RunLog) -> None:
    handed = Handed(parse_method({"decoding_type": "NGram"}), "smollm2-135m-instruct", "NGram")
    vllm, llama = hand_over(handed, "vllm"), hand_over(handed, "llamacpp")
    assert any("model's original weights instead" in note for note in vllm.notes)
    assert "-m SmolLM2-135M-Instruct.Q4_1.gguf" in llama.files[0].text
    assert not any("original weights" in note for note in llama.notes)


def test_names_of_weights_are_what_an_engine_can_load(tmp_path: Path) -> None:
    assert model_name("llama-3.2-1b-instruct") == "meta-llama/Llama-3.2-1B-Instruct"
    assert model_name("owner/heads") == "owner/heads"
    assert model_name(str(tmp_path)) == str(tmp_path)
    assert model_name("nothing of that name") == "nothing of that name"

    def resolve(name: str) -> TargetSpec:
        return TargetSpec(name=name, hub="o/m", revision="abc")

    handed = Handed(parse_method({"decoding_type": "NGram"}), "mine", "NGram")
    assert any("revision abc of o/m" in n for n in hand_over(handed, "vllm", None, resolve).notes)


def test_imports_from_each_export_keep_the_run_s_method(log: RunLog) -> None:
    handed = of_run(log, stored(log, max_draft_len=6))
    for engine in ("vllm", "sglang", "trtllm", "triton"):
        export = hand_over(handed, engine)
        assert export.verdict == "exact"
        assert same_effect(read_config(engine, export.files[0].text).config, handed.config)


def test_malformed_yaml_names_its_line() -> None:
    with pytest.raises(ConfigError, match="not valid YAML in line 2"):
        read_config("trtllm", "a: 1\nb: [")


@pytest.mark.parametrize(
    ("params", "link"),
    [
        ({}, None),
        ({"run": "x", "deploy": "vllm"}, None),
        ({"tree": "x", "deploy": "vllm"}, None),
        ({"deploy": "vllm"}, {"deploy": "vllm", "of": "", "target": "", "version": ""}),
        (
            {"deploy": "vllm", "of": "run:1", "version": "0.20", "other": "x"},
            {"deploy": "vllm", "of": "run:1", "target": "", "version": "0.20"},
        ),
    ],
)
def test_links_are_read(params: dict[str, str], link: dict[str, str] | None) -> None:
    assert read_link(params) == link
    if link is not None:
        long = read_link({"deploy": "v" * 999})
        assert long is not None and len(long["deploy"]) == 200


def test_menus_name_everything_that_can_be_picked(desk: DeployDesk, log: RunLog) -> None:
    run = stored(log)
    menus = desk.menus({})
    assert [engine["name"] for engine in menus["engines"]] == list(ENGINES)
    assert menus["runs"][0]["id"] == run and set(menus["formulas"]) == {"mat", "tok_s"}
    keys = {key for _, key in desk.methods({"target": "qwen3-8b"})["methods"]}
    assert "eagle3-qwen3-8b" in keys and "type:NGram" in keys
