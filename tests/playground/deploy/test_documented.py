"""The engines' documented examples: read as methods, and written back to the letter."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from engine.drafters import parse_method
from tests.playground.deploy.schemas import LLAMA, exported, read

EAGLE3 = {"decoding_type": "Eagle3", "speculative_model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}


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
    ],
)  # fmt: skip
def test_vllm_examples_come_back_to_the_letter(version: str, example: str) -> None:
    export = exported(read("vllm", example).config, "vllm", version)
    assert f"--speculative-config '{example}'" in export.files["serve.sh"]
    assert json.loads(export.files["speculative_config.json"]) == json.loads(example)
    assert export.verdict == "exact"


@pytest.mark.parametrize(
    ("engine", "settings", "example"),
    [
        (
            "trtllm",
            {**EAGLE3, "max_draft_len": 4, "use_dynamic_tree": True, "dynamic_tree_max_topK": 10,
             "max_total_draft_tokens": 40},
            "speculative_config:\n"
            "  decoding_type: Eagle3\n"
            "  max_draft_len: 4\n"
            "  speculative_model: yuhuili/EAGLE3-LLaMA3.1-Instruct-8B\n"
            "  use_dynamic_tree: true\n"
            "  dynamic_tree_max_topK: 10\n"
            "  max_total_draft_tokens: 40\n",
        ),
        (
            "trtllm 1.4",
            {"decoding_type": "MTP_Assistant", "speculative_model": "google/gemma-4-E4B-assistant",
             "max_draft_len": 4},
            "speculative_config:\n"
            "  decoding_type: MTP\n"
            "  max_draft_len: 4\n"
            "  speculative_model: google/gemma-4-E4B-assistant\n",
        ),
        (
            "sglang",
            {**EAGLE3, "max_draft_len": 5, "use_dynamic_tree": True, "dynamic_tree_max_topK": 4,
             "max_total_draft_tokens": 15},
            f"python -m sglang.launch_server --model-path {LLAMA} \\\n"
            "  --speculative-algorithm EAGLE3 \\\n"
            "  --speculative-draft-model-path yuhuili/EAGLE3-LLaMA3.1-Instruct-8B \\\n"
            "  --speculative-num-steps 5 \\\n"
            "  --speculative-eagle-topk 4 \\\n"
            "  --speculative-num-draft-tokens 16\n",  # the root is counted
        ),
        (
            "llamacpp",
            {"decoding_type": "Draft_Target", "speculative_model": "/m/draft.gguf",
             "max_draft_len": 8, "use_draft_probs": False},
            "llama-server -m Llama-3.1-8B-Instruct.gguf \\\n"
            "  --spec-type draft-simple \\\n"
            "  -md /m/draft.gguf \\\n"
            "  --spec-draft-n-max 8 \\\n"
            "  --spec-draft-n-min 0 \\\n"
            "  --spec-draft-p-min 0.0\n",
        ),
    ],
)  # fmt: skip
def test_documented_files_are_written_to_the_letter(
    engine: str, settings: dict[str, object], example: str
) -> None:
    """Until its release, what only a release candidate reads is written for where it is named."""
    config, (name, _, version) = parse_method(settings), engine.partition(" ")
    assert next(iter(exported(config, name, version).files.values())) == example
    assert read(name, example).config == config
    assert not version or exported(config, name).refusal


def test_the_converter_of_an_unknown_family_is_no_exact_export() -> None:
    config = parse_method({"decoding_type": "Draft_Target", "speculative_model": LLAMA})
    export = exported(config, "triton", "1.2", target="a/b")
    assert export.verdict == "with losses" and "family of a/b is unknown" in export.warnings[0]


def test_prefill_and_decode_workers_draft_alike() -> None:
    """As Dynamo's and TensorRT-LLM's examples: both sides have the speculative block."""
    files = exported(parse_method({**EAGLE3, "max_draft_len": 3}), "trtllm").files
    for role in ("prefill", "decode"):
        worker = yaml.safe_load(files[f"{role}.yaml"])
        assert worker["speculative_config"]["eagle3_one_model"] is False
        assert worker["cache_transceiver_config"]["backend"] == "DEFAULT"
        for script in ("disaggregated.sh", "dynamo.sh"):
            assert f"{role}.yaml" in files[script]
    router = yaml.safe_load(files["disagg_config.yaml"])
    for name in ("context_servers", "generation_servers"):
        (url,) = router[name]["urls"]
        assert f"--port {url.split(':')[1]}" in files["disaggregated.sh"]
    assert "latency" in files["bench.sh"] and "--config config.yaml" in files["bench.sh"]
    ngram = parse_method({"decoding_type": "NGram"})
    assert "prefill.yaml" not in exported(ngram, "trtllm").files


def test_triton_s_lookahead_and_redrafter_builds() -> None:
    files = exported(parse_method({"decoding_type": "Lookahead"}), "triton", "1.2").files
    for key, value in (("window", 4), ("ngram", 3), ("verification_set", 4)):
        line = f'key: "lookahead_{key}_size"  value: {{ string_value: "{value}" }}'
        assert line in files["config.pbtxt"]
    assert "--max_draft_len 15" in files["build.sh"]  # (N - 2) + (W - 1 + G)(N - 1) = 1 + 7 · 2
    sizes = {"beam_width": 4, "beam_length": 6}
    redrafter = parse_method({"decoding_type": "ReDrafter", "speculative_model": "./a", **sizes})
    files = exported(redrafter, "triton", "1.2").files
    for option in ("num_beams 4", "draft_len_per_beam 5"):  # without the root
        assert f"--redrafter_{option}" in files["build.sh"]


def test_ngram_that_keeps_one_value_says_where_guide_and_code_differ() -> None:
    ngram = parse_method({"decoding_type": "NGram", "is_keep_all": False})
    for lookup, verdict in (("pool_as_coded", "exact"), ("pool", "with losses")):
        assert exported(ngram.replace(lookup=lookup), "trtllm").verdict == verdict


class OwnDrafter:
    """A drafter of TensorRT-LLM's interface."""

    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        """Drafts nothing."""


def test_a_drafter_of_tensorrt_llm_s_interface_is_exported(monkeypatch: Any) -> None:
    drafters = {"mine": OwnDrafter, "other": lambda: None}
    monkeypatch.setattr("engine.drafters.user_provided._factories", drafters)
    config = parse_method({"decoding_type": "User_Provided", "drafter": "mine"})
    files = exported(config, "trtllm").files
    assert f"from {__name__} import OwnDrafter\n" in files["llm.py"]
    assert "speculative_config=UserProvidedDecodingConfig(" in files["llm.py"]
    assert "drafter=OwnDrafter()," in files["llm.py"] and [*files] == ["llm.py"]
    other = exported(config.replace(drafter="other"), "trtllm")
    assert "method prepare_draft_tokens" in other.refusal
