"""The engines' documented examples: read as methods, and written back to the letter."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

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
        (
            "trtllm",
            {"decoding_type": "MTP_Assistant", "speculative_model": "google/gemma-4-E4B-assistant",
             "max_draft_len": 4},
            "speculative_config:\n"
            "  decoding_type: MTP\n"
            "  max_draft_len: 4\n"
            "  speculative_model: google/gemma-4-E4B-assistant\n",
        ),
    ],
)  # fmt: skip
def test_documented_files_are_written_to_the_letter(
    engine: str, settings: dict[str, object], example: str
) -> None:
    config = parse_method(settings)
    assert next(iter(written(engine, config).values())) == example
    assert read(engine, example) == config


def test_sglang_s_default_sizes_are_a_chain_of_three() -> None:
    text = "--speculative-algorithm EAGLE --speculative-draft-model-path x/y"
    result = import_config(ENGINES["sglang"], text, yaml.safe_load)
    assert result.config.model_dump()["eagle_choices"] == ChoiceTree.chain(3).paths
    assert any("3, 1, 4 is used here" in note for note in result.notes)


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


def test_triton_s_documented_parameters(tmp_path: Path) -> None:
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
    assert "--gemm_plugin float16" in files["build.sh"]
    models = repository(files["serve.sh"], tmp_path)
    assert models["preprocessing"]["tokenizer_dir"] == LLAMA
    engine = models["tensorrt_llm"]
    assert engine["decoding_mode"] == "medusa"
    assert engine["medusa_choices"] == "{0}, {1}, {0, 0}, {0, 1}"
    assert engine["engine_dir"] == f"{tmp_path}/engine"


TEMPLATES = {
    "preprocessing": "tokenizer_dir tokenizer_type triton_max_batch_size",
    "postprocessing": "tokenizer_dir triton_max_batch_size",
    "ensemble": "triton_max_batch_size logits_datatype",
    "tensorrt_llm_bls": "tensorrt_llm_model_name tensorrt_llm_draft_model_name bls_instance_count",
    "tensorrt_llm": "engine_dir decoding_mode medusa_choices gpu_device_ids participant_ids "
    "speculative_decoding_fast_logits enable_kv_cache_reuse",
}
FILL = """import string, sys
name, pairs = sys.argv[2:]
values = dict(pair.split(":") for pair in pairs.split(","))
text = open(name).read()
open(name, "w").write(string.Template(text).safe_substitute(values))
"""
"""Parts values as the container's fill_template.py does."""


def repository(script: str, folder: Path) -> dict[str, dict[str, str]]:
    """What serve.sh makes of the container's templates: parameters by model."""
    app = folder / "app"
    for model, names in TEMPLATES.items():
        file = app / "all_models/inflight_batcher_llm" / model / "config.pbtxt"
        file.parent.mkdir(parents=True)
        lines = [f"{name}=${{{name}}}" for name in names.split()]
        file.write_text("\n".join([f'name: "{model}"', *lines]))
    for name, text in (("tools/fill_template.py", FILL), ("scripts/launch_triton_server.py", "")):
        (app / name).parent.mkdir()
        (app / name).write_text(text)
    run = {"cwd": folder, "env": {**os.environ, "APP": str(app)}, "check": True}
    subprocess.run(["bash", "-c", script], **run)  # type: ignore[call-overload]
    files = (folder / "model_repository").glob("*/config.pbtxt")
    models = {file.parent.name: file.read_text().split("\n") for file in files}
    assert all(lines[0] == f'name: "{model}"' for model, lines in models.items())
    return {m: dict(line.split("=", 1) for line in lines[1:]) for m, lines in models.items()}


@pytest.mark.parametrize("logits", [True, False])
def test_triton_s_two_models_of_the_documented_example(logits: bool, tmp_path: Path) -> None:
    """Rank 1 drafts, rank 2 verifies, rank 0 directs; without logits nobody needs a rank."""
    values = {"speculative_model": "small", "max_draft_len": 10, "use_draft_probs": logits}
    config = parse_method({"decoding_type": "Draft_Target", **values})
    export = export_method(config, ENGINES["triton"], target=LLAMA, version="1.2")
    assert export.verdict == "exact"
    files = {file.name: file.text for file in export.files}
    back = read("triton", files["request.json"])
    assert back == config.replace(speculative_model=None)
    assert "--speculative_decoding_mode draft_tokens_external" in files["build.sh"]
    assert "--model_dir small" in files["build.sh"] and "--max_draft_len 10" in files["build.sh"]
    ranks = "--disable-spawn-processes --world_size=3" if logits else "--world_size=1"
    assert f"--multi-model {ranks}" in files["serve.sh"]
    models = repository(files["serve.sh"], tmp_path)
    assert models["tensorrt_llm_bls"]["tensorrt_llm_model_name"] == "tensorrt_llm"
    assert models["tensorrt_llm_bls"]["tensorrt_llm_draft_model_name"] == "tensorrt_llm_draft"
    for rank, model, gpu in ((1, "tensorrt_llm_draft", "0"), (2, "tensorrt_llm", "1")):
        own = models[model]
        assert (own["gpu_device_ids"], own["enable_kv_cache_reuse"]) == (gpu, "true")
        assert (own["participant_ids"] == str(rank)) == logits
        assert (own["speculative_decoding_fast_logits"] == "1") == logits


def test_prefill_and_decode_workers_draft_alike() -> None:
    """As Dynamo's and TensorRT-LLM's examples: both sides have the speculative block."""
    files = written("trtllm", parse_method({**EAGLE3, "max_draft_len": 3}))
    block = yaml.safe_load(files["config.yaml"])["speculative_config"]
    for role in ("prefill", "decode"):
        worker = yaml.safe_load(files[f"{role}.yaml"])
        assert worker["speculative_config"] == block
        assert worker["cache_transceiver_config"]["backend"] == "DEFAULT"
        for script in ("disaggregated.sh", "dynamo.sh"):
            assert f"{role}.yaml" in files[script]
    router = yaml.safe_load(files["disagg_config.yaml"])
    for name in ("context_servers", "generation_servers"):
        (url,) = router[name]["urls"]
        assert f"--port {url.split(':')[1]}" in files["disaggregated.sh"]
    assert "latency" in files["bench.sh"] and "--config config.yaml" in files["bench.sh"]
    assert "prefill.yaml" not in written("trtllm", parse_method({"decoding_type": "NGram"}))


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


def test_one_dspark_block_for_three_engines() -> None:
    """As each engine's guide launches it."""
    block = "deepseek-ai/dspark_qwen3_4b_block7"
    config = parse_method(
        {"decoding_type": "DSpark", "speculative_model": block, "max_draft_len": 7}
    )
    sglang = f"DSPARK --speculative-draft-model-path {block} --speculative-dspark-block-size 7"
    llama = "-m Qwen3-4B.gguf -md {} --spec-type draft-dspark --spec-draft-n-max 7"
    assert read("sglang", f"--speculative-algorithm {sglang}") == config
    assert read("sglang", written("sglang", config)["launch.sh"]) == config
    assert read("llamacpp", f"llama-server {llama.format(block)}") == config
    file = f"{block.split('/')[1]}.gguf"
    assert f"-md {file}" in written("llamacpp", config)["serve.sh"]


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


def test_an_assistant_is_recognized_by_its_name_as_the_engines_do() -> None:
    model = "google/gemma-4-E4B-it-assistant"
    assistant = parse_method(
        {"decoding_type": "MTP_Assistant", "speculative_model": model, "max_draft_len": 5}
    )
    size = "--speculative-num-steps 5 --speculative-num-draft-tokens 6 --speculative-eagle-topk 1"
    for name in ("NEXTN", "EAGLE", "FROZEN_KV_MTP"):
        flags = f"--speculative-algorithm {name} --speculative-draft-model-path {model} {size}"
        assert read("sglang", flags) == assistant
    vllm = f'{{"method":"mtp","model":"{model}","num_speculative_tokens":5}}'
    assert read("vllm", vllm) == assistant
