"""The engines' documented examples: read as methods, and written back to the letter."""

from __future__ import annotations

import json

import pytest
import yaml

import presets
from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.interop import ENGINES, export_method, import_config
from engine.tree import ChoiceTree

EAGLE3 = {"decoding_type": "Eagle3", "speculative_model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def read(engine: str, text: str) -> MethodConfig:
    return import_config(ENGINES[engine], text, yaml.safe_load).config


def written(engine: str, config: MethodConfig, version: str | None = None) -> dict[str, str]:
    export = export_method(config, ENGINES[engine], target=LLAMA, version=version)
    return {file.name: file.text for file in export.files}


@pytest.mark.parametrize(
    ("version", "example"),
    [
        ("0.33", '{"method":"eagle3","model":"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",'
                 '"num_speculative_tokens":3}'),
        ("0.33", '{"method":"draft_model","model":"Qwen/Qwen3-0.6B","num_speculative_tokens":5}'),
        ("0.33", '{"method":"draft_model","model":"amd/PARD-Qwen3-0.6B",'
                 '"num_speculative_tokens":12,"parallel_drafting":true}'),
        ("0.33", '{"method":"eagle3","model":"amazon/gpt-oss-120b-p-eagle",'
                 '"num_speculative_tokens":5,"parallel_drafting":true}'),
        ("0.33", '{"method":"mtp","num_speculative_tokens":1}'),
        ("0.33", '{"method":"dflash","model":"z-lab/Qwen3-4B-DFlash","num_speculative_tokens":15}'),
        ("0.33", '{"method":"dspark","model":"deepseek-ai/dspark_qwen3_4b_block7",'
                 '"num_speculative_tokens":7}'),
        ("0.32", '{"method":"medusa","model":"FasterDecoding/medusa-vicuna-7b-v1.3",'
                 '"num_speculative_tokens":4}'),
        ("0.20", '{"method":"eagle","model":"x/y","num_speculative_tokens":2,'
                 '"speculative_token_tree":"[(0,), (1,)]"}'),
    ],
)  # fmt: skip
def test_vllm_examples_come_back_to_the_letter(version: str, example: str) -> None:
    files = written("vllm", read("vllm", example), version)
    assert f"--speculative-config '{example}'" in files["serve.sh"]
    assert json.loads(files["speculative_config.json"]) == json.loads(example)


def test_vllm_ngram_example() -> None:
    example = (
        '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":2,"prompt_lookup_max":5}'
    )
    found = import_config(ENGINES["vllm"], example, yaml.safe_load)
    assert found.config == parse_method(
        {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 5}
    )
    assert found.notes == ("Here matches go down to 1 token, there they end at 2.",)
    assert written("vllm", found.config)["serve.sh"] == (
        f"vllm serve {LLAMA} \\\n  --speculative-config '"
        '{"method":"ngram","num_speculative_tokens":4,'
        '"prompt_lookup_min":1,"prompt_lookup_max":5}\'\n'
    )


def test_tensorrt_llm_s_safe_hand_off() -> None:
    example = (
        "speculative_config:\n"
        "  decoding_type: Eagle3\n"
        "  max_draft_len: 4\n"
        "  speculative_model: yuhuili/EAGLE3-LLaMA3.1-Instruct-8B\n"
    )
    config = read("trtllm", example)
    assert config == parse_method({**EAGLE3, "max_draft_len": 4})
    files = written("trtllm", config)
    assert files["config.yaml"] == example
    assert files["serve.sh"] == (
        f"trtllm-serve {LLAMA} \\\n  --backend pytorch \\\n  --config config.yaml\n"
    )


def test_a_parallel_draft_model_goes_from_vllm_to_tensorrt_llm() -> None:
    config = read("vllm", '{"model":"a/b","num_speculative_tokens":12,"parallel_drafting":true}')
    example = (
        "speculative_config:\n"
        "  decoding_type: PARD\n"
        "  max_draft_len: 12\n"
        "  speculative_model: a/b\n"
    )
    assert written("trtllm", config)["config.yaml"] == example
    assert read("trtllm", example + "  mask_token_id: 7\n") == config.replace(mask_token_id=7)


def test_tensorrt_llm_s_dynamic_tree() -> None:
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 10, "max_total_draft_tokens": 40}
    config = parse_method({**EAGLE3, "max_draft_len": 4, **tree})
    assert written("trtllm", config)["config.yaml"] == (
        "speculative_config:\n"
        "  decoding_type: Eagle3\n"
        "  max_draft_len: 4\n"
        "  speculative_model: yuhuili/EAGLE3-LLaMA3.1-Instruct-8B\n"
        "  use_dynamic_tree: true\n"
        "  dynamic_tree_max_topK: 10\n"
        "  max_total_draft_tokens: 40\n"
    )


def test_tensorrt_llm_s_ngram_with_its_own_names() -> None:
    assert written("trtllm", parse_method({"decoding_type": "NGram"}))["config.yaml"] == (
        "disable_overlap_scheduler: true\n"
        "speculative_config:\n"
        "  decoding_type: NGram\n"
        "  max_draft_len: 10\n"
        "  max_matching_ngram_size: 2\n"
        "  is_keep_all: true\n"
        "  is_use_oldest: true\n"
        "  is_public_pool: true\n"
    )


def test_tensorrt_llm_s_legacy_eagle_example_counts_nodes_and_layers() -> None:
    """The example of the 1.0 line: 63 nodes in max_draft_len, 4 layers."""
    tree = presets.trees()["mc_sim_7b_63-medusa"].tree
    config = parse_method(
        {
            "decoding_type": "Eagle",
            "speculative_model": "yuhuili/EAGLE-Vicuna-7B-v1.3",
            "eagle_choices": tree.as_lists(),
        }
    )
    block = yaml.safe_load(written("trtllm", config, "1.0")["config.yaml"])["speculative_config"]
    assert block["max_draft_len"] == 63 and block["num_eagle_layers"] == 4
    assert block["max_non_leaves_per_layer"] <= 10
    assert block["speculative_model_dir"] == "yuhuili/EAGLE-Vicuna-7B-v1.3"


def test_triton_s_documented_parameters() -> None:
    text = (
        'parameters: { key: "decoding_mode"  value: { string_value: "medusa" } }\n'
        'parameters: { key: "medusa_choices" value: { string_value: "{0}, {0, 0}, {1}, {0, 1}" } }'
    )
    config = read("triton", text)
    assert config.model_dump()["medusa_choices"] == ((0,), (1,), (0, 0), (0, 1))
    config = config.replace(speculative_model="FasterDecoding/medusa-vicuna-7b-v1.3")
    files = written("triton", config, "1.2")
    assert files["config.pbtxt"] == (
        'parameters: { key: "decoding_mode"  value: { string_value: "medusa" } }\n'
        'parameters: { key: "medusa_choices"  value: '
        '{ string_value: "{0}, {1}, {0, 0}, {0, 1}" } }\n'
    )
    assert "--speculative_decoding_mode medusa" in files["build.sh"]


def test_triton_s_lookahead_parameters_and_their_build() -> None:
    files = written("triton", parse_method({"decoding_type": "Lookahead"}), "1.2")
    for key, value in (("window", 4), ("ngram", 3), ("verification_set", 4)):
        line = f'key: "lookahead_{key}_size"  value: {{ string_value: "{value}" }}'
        assert line in files["config.pbtxt"]
    # (N - 2) + (W - 1 + G)(N - 1) = 1 + 7 · 2
    assert "--max_draft_len 15" in files["build.sh"]


def test_triton_s_redrafter_counts_the_beam_without_the_root() -> None:
    config = {"decoding_type": "ReDrafter", "speculative_model": "./vicuna-7b-drafter"}
    files = written("triton", parse_method({**config, "beam_width": 4, "beam_length": 6}), "1.2")
    assert "--redrafter_num_beams 4" in files["build.sh"]
    assert "--redrafter_draft_len_per_beam 5" in files["build.sh"]
    assert "explicit_draft_tokens" in files["build.sh"]


def test_triton_s_model_yaml_carries_the_same_block() -> None:
    config = parse_method({**EAGLE3, "max_draft_len": 4})
    assert written("triton", config)["model.yaml"] == (
        f"model: {LLAMA}\n"
        "backend: pytorch\n"
        "speculative_config:\n"
        "  decoding_type: Eagle3\n"
        "  max_draft_len: 4\n"
        "  speculative_model: yuhuili/EAGLE3-LLaMA3.1-Instruct-8B\n"
        "triton_config:\n"
        "  max_batch_size: 0\n"
        "  decoupled: false\n"
    )


def test_sglang_counts_the_root_among_its_draft_tokens() -> None:
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "max_total_draft_tokens": 15}
    config = parse_method({**EAGLE3, "max_draft_len": 5, **tree})
    text = written("sglang", config)["launch.sh"]
    assert text == (
        f"python -m sglang.launch_server --model-path {LLAMA} \\\n"
        "  --speculative-algorithm EAGLE3 \\\n"
        "  --speculative-draft-model-path yuhuili/EAGLE3-LLaMA3.1-Instruct-8B \\\n"
        "  --speculative-num-steps 5 \\\n"
        "  --speculative-eagle-topk 4 \\\n"
        "  --speculative-num-draft-tokens 16\n"
    )
    assert read("sglang", text) == config


def test_sglang_s_default_sizes_are_a_chain_of_three() -> None:
    text = "--speculative-algorithm EAGLE --speculative-draft-model-path x/y"
    found = import_config(ENGINES["sglang"], text, yaml.safe_load)
    assert found.config.model_dump()["eagle_choices"] == ChoiceTree.chain(3).paths
    assert any("3, 1, 4 is taken here" in note for note in found.notes)


def test_llama_cpp_s_new_and_old_names() -> None:
    settings = {"speculative_model": "/m/draft.gguf", "max_draft_len": 8, "use_draft_probs": False}
    config = parse_method({"decoding_type": "Draft_Target", **settings})
    assert written("llamacpp", config)["serve.sh"] == (
        "llama-server -m Llama-3.1-8B-Instruct.gguf \\\n"
        "  --spec-type draft-simple \\\n"
        "  -md /m/draft.gguf \\\n"
        "  --spec-draft-n-max 8 \\\n"
        "  --spec-draft-n-min 0 \\\n"
        "  --spec-draft-p-min 0.0\n"
    )
    old = written("llamacpp", config, "b8000")["serve.sh"]
    assert "--draft-max 8" in old and "--draft-p-min 0.0" in old and "--spec-" not in old
    assert read("llamacpp", old) == config


def test_llama_cpp_s_documented_commands() -> None:
    eagle = read("llamacpp", "llama-server -m Q.gguf -md Q-eagle3.gguf --spec-type draft-eagle3")
    assert eagle.model_dump()["speculative_model"] == "Q-eagle3.gguf"
    dflash = read(
        "llamacpp",
        "llama-server -m Qwen3-4B.gguf -md Qwen3-4B-DFlash.gguf \\\n"
        "    --spec-type draft-dflash --spec-draft-n-max 15 -fa on --jinja",
    )
    assert dflash.model_dump()["max_draft_len"] == 15
    lookup = read(
        "llamacpp",
        "llama-server [...] --spec-type ngram-map-k4v --spec-ngram-map-k4v-size-n 8 "
        "--spec-ngram-map-k4v-size-m 8 --spec-ngram-map-k4v-min-hits 2",
    )
    assert lookup.model_dump()["max_matching_ngram_size"] == 8
