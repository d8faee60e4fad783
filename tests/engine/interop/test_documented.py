"""The engines' documented examples: read as methods, and written back to the letter."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.interop import ENGINES, export_method, import_config

EAGLE3 = {"decoding_type": "Eagle3", "speculative_model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def read(engine: str, text: str) -> MethodConfig:
    return import_config(ENGINES[engine], text, yaml.safe_load).config


def written(engine: str, config: MethodConfig, version: str = "") -> dict[str, str]:
    export = export_method(config, ENGINES[engine], target=LLAMA, version=version)
    return export.files


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
    files = written("vllm", read("vllm", example), version)
    assert f"--speculative-config '{example}'" in files["serve.sh"]
    assert json.loads(files["speculative_config.json"]) == json.loads(example)


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
            "trtllm",
            {"decoding_type": "NGram"},
            "disable_overlap_scheduler: true\n"
            "speculative_config:\n"
            "  decoding_type: NGram\n"
            "  max_draft_len: 10\n"
            "  max_matching_ngram_size: 2\n"
            "  is_keep_all: true\n"
            "  is_use_oldest: true\n"
            "  is_public_pool: true\n",
        ),
        (
            "trtllm",
            {"decoding_type": "PARD", "speculative_model": "a/b", "max_draft_len": 12},
            "speculative_config:\n"
            "  decoding_type: PARD\n"
            "  max_draft_len: 12\n"
            "  speculative_model: a/b\n",
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
        (
            "mlx",
            {"decoding_type": "Draft_Target", "speculative_model": "mlx-community/Qwen3-0.6B-4bit",
             "max_draft_len": 4, "use_draft_probs": False},
            f"mlx_lm.server --model {LLAMA} \\\n"
            "  --draft-model mlx-community/Qwen3-0.6B-4bit \\\n"
            "  --num-draft-tokens 4\n",
        ),
        (
            "ollama",
            {"decoding_type": "MTP_Assistant", "speculative_model": "/m/mtp-gemma.gguf",
             "max_draft_len": 4},
            "FROM Llama-3.1-8B-Instruct.gguf\n"
            "DRAFT /m/mtp-gemma.gguf\n"
            "PARAMETER draft_num_predict 4\n",
        ),
    ],
)  # fmt: skip
def test_documented_files_are_written_to_the_letter(
    engine: str, settings: dict[str, object], example: str
) -> None:
    config = parse_method(settings)
    assert next(iter(written(engine, config).values())) == example
    assert read(engine, example) == config


def test_a_release_candidate_is_written_for_where_it_is_named() -> None:
    model = "google/gemma-4-E4B-assistant"
    values = {"decoding_type": "MTP_Assistant", "speculative_model": model, "max_draft_len": 4}
    config, head = parse_method(values), "speculative_config:\n  decoding_type: MTP\n"
    example = f"{head}  max_draft_len: 4\n  speculative_model: {model}\n"
    assert ENGINES["trtllm"].default == "1.3" and not written("trtllm", config)
    assert next(iter(written("trtllm", config, "1.4").values())) == example
    assert read("trtllm", example) == config


def test_the_converter_of_an_unknown_family_is_no_exact_export() -> None:
    config = parse_method({"decoding_type": "Draft_Target", "speculative_model": LLAMA})
    export = export_method(config, ENGINES["triton"], target="a/b", version="1.2")
    assert export.verdict == "with losses" and "family of a/b is unknown" in export.warnings[0]


def test_prefill_and_decode_workers_draft_alike() -> None:
    """As Dynamo's and TensorRT-LLM's examples: both sides have the speculative block."""
    files = written("trtllm", parse_method({**EAGLE3, "max_draft_len": 3}))
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
    assert "prefill.yaml" not in written("trtllm", parse_method({"decoding_type": "NGram"}))


def test_triton_s_lookahead_and_redrafter_builds() -> None:
    files = written("triton", parse_method({"decoding_type": "Lookahead"}), "1.2")
    for key, value in (("window", 4), ("ngram", 3), ("verification_set", 4)):
        line = f'key: "lookahead_{key}_size"  value: {{ string_value: "{value}" }}'
        assert line in files["config.pbtxt"]
    assert "--max_draft_len 15" in files["build.sh"]  # (N - 2) + (W - 1 + G)(N - 1) = 1 + 7 · 2
    config = {"decoding_type": "ReDrafter", "speculative_model": "./vicuna-7b-drafter"}
    files = written("triton", parse_method({**config, "beam_width": 4, "beam_length": 6}), "1.2")
    for option in ("num_beams 4", "draft_len_per_beam 5"):  # without the root
        assert f"--redrafter_{option}" in files["build.sh"]


@pytest.mark.parametrize("decoding_type", ["Eagle3", "NGram", "MTP", "Draft_Target", "Medusa"])
def test_a_python_program_is_written_and_read_back(decoding_type: str) -> None:
    extra: dict[str, Any] = (
        {} if decoding_type in ("NGram", "MTP") else {"speculative_model": "a/b"}
    )
    extra |= {"use_draft_probs": False} if decoding_type == "Draft_Target" else {}
    config = parse_method({"decoding_type": decoding_type, **extra})
    program = written("trtllm", config, "1.2")["llm.py"]
    compile(program, "llm.py", "exec")
    result = import_config(ENGINES["trtllm"], program, yaml.safe_load)
    assert (result.target, result.config) == (LLAMA, config)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("Medusa\nmax_draft_len: 2\nmedusa_choices: [[0], [1], [0, 0]]",
         "max_draft_len must be at least 3 for the tree of 3 nodes (medusa_choices), got 2"),
        ("Medusa\nnum_medusa_heads: 1\nmedusa_choices: [[0], [1], [0, 0]]",
         "num_medusa_heads must be at least 2"),
        ("Medusa\nmax_draft_len: 9", "(medusa_choices is not set), got 9"),
        ("Eagle\nnum_eagle_layers: 1\neagle_choices: [[0], [0, 0]]",
         "num_eagle_layers must be at least 2"),
        ("Eagle\nmax_non_leaves_per_layer: 1\neagle_choices: [[0], [1], [0, 0], [1, 0]]",
         "max_non_leaves_per_layer must be at least 2"),
    ],
)  # fmt: skip
def test_sizes_are_checked_against_the_tree(more: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read("trtllm", f"decoding_type: {more}\nspeculative_model: a/b")
    assert words in str(caught.value)


def test_mtp_names_both_lengths() -> None:
    config = parse_method({"decoding_type": "MTP", "max_draft_len": 3})
    for version in ("1.3", "1.2"):
        block = yaml.safe_load(written("trtllm", config, version)["config.yaml"])
        block = block["speculative_config"]
        assert block["max_draft_len"] == block["num_nextn_predict_layers"] == 3


def test_ngram_that_keeps_one_value_says_where_guide_and_code_differ() -> None:
    ngram = parse_method({"decoding_type": "NGram", "is_keep_all": False})
    for lookup, verdict in (("pool_as_coded", "exact"), ("pool", "with losses")):
        config = ngram.replace(lookup=lookup)
        assert export_method(config, ENGINES["trtllm"], target=LLAMA).verdict == verdict


class OwnDrafter:
    """A drafter of TensorRT-LLM's interface."""

    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        """Drafts nothing."""


def test_a_drafter_of_tensorrt_llm_s_interface_is_exported(monkeypatch: Any) -> None:
    drafters = {"mine": OwnDrafter, "other": lambda: None}
    monkeypatch.setattr("engine.drafters.user_provided._factories", drafters)
    config = parse_method({"decoding_type": "User_Provided", "drafter": "mine"})
    files = written("trtllm", config)
    assert f"from {__name__} import OwnDrafter\n" in files["llm.py"]
    assert "speculative_config=UserProvidedDecodingConfig(" in files["llm.py"]
    assert "drafter=OwnDrafter()," in files["llm.py"] and [*files] == ["llm.py"]
    other = export_method(config.replace(drafter="other"), ENGINES["trtllm"], target=LLAMA)
    assert "method prepare_draft_tokens" in other.refusal
