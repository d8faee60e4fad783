"""Exported scripts as they run: Triton's commands and templates, a program for transformers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from engine.drafters import parse_method
from playground import deploy
from playground.deploy import ENGINES
from playground.deploy.files import render
from tests.engine.drafters.test_draft_by_text import learned
from tests.models import save_tiny, tiny_model
from tests.playground.deploy.schemas import LLAMA, exported, read


def test_every_template_is_a_file_of_an_engine_and_every_table_describes_one() -> None:
    folder = Path(deploy.__file__).parent
    written = {f"{one.name}/{name}.jinja" for one in ENGINES.values() for name in one.files}
    templates = (folder / "templates").rglob("*.jinja")
    assert {path.relative_to(folder / "templates").as_posix() for path in templates} == written
    assert {path.stem for path in (folder / "tables").iterdir()} == ENGINES.keys()


def test_triton_s_documented_parameters(tmp_path: Path) -> None:
    text = (
        'parameters: { key: "decoding_mode"  value: { string_value: "medusa" } }\n'
        'parameters: { key: "medusa_choices" value: { string_value: "{0}, {0, 0}, {1}, {0, 1}" } }'
    )
    config = read("triton", text).config
    assert config.model_dump()["medusa_choices"] == ((0,), (1,), (0, 0), (0, 1))
    config = config.replace(speculative_model="FasterDecoding/medusa-vicuna-7b-v1.3")
    files = exported(config, "triton", "1.2").files
    assert files["config.pbtxt"] == (
        'parameters: { key: "decoding_mode"  value: { string_value: "medusa" } }\n'
        'parameters: { key: "medusa_choices"  value: '
        '{ string_value: "{0}, {1}, {0, 0}, {0, 1}" } }\n'
    )
    convert, build = built(files, tmp_path)
    assert convert.startswith("python3 app/examples/medusa/convert_checkpoint.py --model_dir meta-")
    assert "--medusa_model_dir FasterDecoding/medusa-vicuna-7b-v1.3" in convert
    assert "--num_medusa_heads 2" in convert and "--dtype float16" in convert
    assert "--speculative_decoding_mode medusa" in build and "--gemm_plugin float16" in build
    models, _ = repository(files, tmp_path)
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
    "speculative_decoding_fast_logits enable_kv_cache_reuse kv_cache_free_gpu_mem_fraction",
}
FILL = """import string, sys
name, pairs = sys.argv[2:]
values = dict(pair.split(":") for pair in pairs.split(","))
text = open(name).read()
open(name, "w").write(string.Template(text).safe_substitute(values))
"""
LOG = """#!/bin/sh
echo "$(basename "$0") $@" >> calls
"""


def built(files: dict[str, str], folder: Path, **options: str) -> list[str]:
    """The commands that build.sh gives, weights fetched first, of stand-ins that log them."""
    (folder / "bin").mkdir(parents=True)
    (folder / "app/all_models").mkdir(parents=True)
    (folder / "app/examples").mkdir()
    for name in ("python3", "git", "trtllm-build"):
        (folder / "bin" / name).write_text(LOG)
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    shell(files, "build.sh", folder, {"PATH": path, "APP": "app", **options})
    calls = (folder / "calls").read_text().splitlines()
    assert calls[0] == "git lfs install"
    assert calls[1] == f"git clone https://huggingface.co/{LLAMA} {LLAMA}"
    return [call for call in calls if not call.startswith("git")]


def shell(files: dict[str, str], script: str, folder: Path, env: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)
    subprocess.run(["bash", script], cwd=folder, env={**os.environ, **env}, check=True)


def repository(
    files: dict[str, str], folder: Path, **options: str
) -> tuple[dict[str, dict[str, str]], str]:
    """What serve.sh makes of the container's templates: parameters by model; how it launches."""
    app = folder / "app"
    for model, names in TEMPLATES.items():
        file = app / "all_models/inflight_batcher_llm" / model / "config.pbtxt"
        file.parent.mkdir(parents=True)
        lines = [f"{name}=${{{name}}}" for name in names.split()]
        file.write_text("\n".join([f'name: "{model}"', *lines]))
    launch = "import sys; open('launched', 'w').write(' '.join(sys.argv[1:]))"
    for name, text in (
        ("tools/fill_template.py", FILL),
        ("scripts/launch_triton_server.py", launch),
    ):
        (app / name).parent.mkdir()
        (app / name).write_text(text)
    shell(files, "serve.sh", folder, {"APP": str(app), **options})
    configs = (folder / "model_repository").glob("*/config.pbtxt")
    models = {file.parent.name: file.read_text().split("\n") for file in configs}
    assert all(lines[0] == f'name: "{model}"' for model, lines in models.items())
    parameters = {m: dict(line.split("=", 1) for line in lines[1:]) for m, lines in models.items()}
    return parameters, (folder / "launched").read_text()


@pytest.mark.parametrize("logits", [True, False])
def test_triton_s_two_models_of_the_documented_example(logits: bool, tmp_path: Path) -> None:
    """Rank 1 drafts, rank 2 verifies, rank 0 directs; without logits nobody needs a rank."""
    small = "Qwen/Qwen3-0.6B"
    values = {"speculative_model": small, "max_draft_len": 10, "use_draft_probs": logits}
    config = parse_method({"decoding_type": "Draft_Target", **values})
    export = exported(config, "triton", "1.2")
    assert export.verdict == "exact"
    files = export.files
    back = read("triton", files["request.json"]).config
    assert back == config.replace(speculative_model=None)
    converted, target, draft_engine, engine = built(files, tmp_path)
    script = "python3 app/examples/models/core/{}/convert_checkpoint.py --model_dir {} --output_dir"
    assert converted.startswith(script.format("qwen", small))
    assert target.startswith(script.format("llama", LLAMA))
    for option in ("max_batch_size 4", "max_input_len 3200", "max_seq_len 4800"):
        assert f"--{option}" in draft_engine and f"--{option}" in engine
    assert "--speculative_decoding_mode draft_tokens_external --max_draft_len 10" in engine
    assert all(("--gather_generation_logits" in e) == logits for e in (draft_engine, engine))
    models, launched = repository(files, tmp_path / "one")
    assert "--multi-model --tensorrt_llm_model_name=tensorrt_llm,tensorrt_llm_draft" in launched
    assert launched.endswith("--disable-spawn-processes --world_size=3" if logits else "_size=1")
    assert models["tensorrt_llm_bls"]["tensorrt_llm_model_name"] == "tensorrt_llm"
    assert models["tensorrt_llm_bls"]["tensorrt_llm_draft_model_name"] == "tensorrt_llm_draft"
    for rank, model, gpu in ((1, "tensorrt_llm_draft", "0"), (2, "tensorrt_llm", "1")):
        own = models[model]
        assert (own["gpu_device_ids"], own["enable_kv_cache_reuse"]) == (gpu, "true")
        assert (own["participant_ids"] == str(rank)) == logits
        assert (own["speculative_decoding_fast_logits"] == "1") == logits


def test_triton_s_two_models_in_fp8_on_five_gpus(tmp_path: Path) -> None:
    """The options of the documented example: device lists, FP8, batch, lengths, KV fraction."""
    values = {"speculative_model": "google/gemma-3-1b-it", "max_draft_len": 4}
    config = parse_method({"decoding_type": "Draft_Target", **values, "use_draft_probs": True})
    files = exported(config, "triton", "1.2").files
    options = {"TARGET_DEVICE_IDS": "1,2,3,4", "FP8": "1", "MAX_BATCH_SIZE": "1"}
    draft, target, *engines = built(files, tmp_path, **options)
    assert "quantization/quantize.py" in draft and "--qformat fp8 --kv_cache_dtype fp8" in target
    assert draft.endswith("--tp_size 1") and target.endswith("--tp_size 4")
    assert all("--max_batch_size 1 " in engine for engine in engines)
    models, launched = repository(files, tmp_path / "two", **options, KV_FRACTION="0.3")
    assert models["tensorrt_llm"]["gpu_device_ids"] == "1,2,3,4"
    assert models["tensorrt_llm"]["participant_ids"] == "2,3,4,5"
    assert models["tensorrt_llm"]["kv_cache_free_gpu_mem_fraction"] == "0.3"
    assert launched.endswith("--world_size=6")
    own = built(files, tmp_path / "three")[0]
    assert "gemma/convert_checkpoint.py --ckpt-type hf --model-dir google/gemma-3-1b-it" in own


# ---- transformers


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("small"), seed=1)


@pytest.fixture(scope="module")
def of_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    tiny_model(seed=1, vocab_size=330).save_pretrained(folder)
    learned(330).save_pretrained(folder)
    return folder


def printed(settings: dict[str, object], target: Path, capsys: pytest.CaptureFixture[str]) -> str:
    export = exported(parse_method(settings), "transformers", target=str(target))
    return output_of(export.files["generate.py"], capsys)


def output_of(script: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a script prints, shortened to 12 tokens."""
    text = script.replace("max_new_tokens=128", "max_new_tokens=12")
    assert text != script
    exec(compile(text, "generate.py", "exec"), {})
    return capsys.readouterr().out


def test_drafting_scripts_print_the_plain_script_s_text(
    target: Path, small: Path, of_words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = render("transformers", ["generate.py"], target=str(target), values={})["generate.py"]
    plain = output_of(script, capsys)
    draft = {"decoding_type": "Draft_Target", "speculative_model": str(small), "max_draft_len": 3}
    assert printed(draft, target, capsys) == plain != ""
    other = {**draft, "speculative_model": str(of_words), "vocabulary": "text"}
    assert printed(other, target, capsys) == plain
    lookup = {"decoding_type": "NGram", "lookup": "transformers", "max_matching_ngram_size": 3}
    assert printed(lookup, target, capsys) == plain
