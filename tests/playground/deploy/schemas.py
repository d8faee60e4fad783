"""Exports and imports, and what releases of the engines accept (recorded from them)."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from transformers import GenerationConfig

import presets
from engine.drafters.method import MethodConfig
from playground.deploy import ENGINES, export_method, import_config
from playground.deploy.files import Export, ImportedMethod
from presets.reading import parse_yaml

FOLDER = Path(__file__).parent / "recorded"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
TYPES = {"int": int, "float": float, "bool": bool, "str": str, "any": object}
POSITIVE = {"num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}


@cache
def recorded(engine: str, version: str) -> Any:
    """The schema of a release; of an older one than any recorded, that of the oldest."""
    schemas = json.loads((FOLDER / f"{engine}.json").read_text(encoding="utf-8"))
    return schemas.get(version) or [*schemas.values()][-1]


def check(export: Export) -> None:
    """The engine's release would read the files: every key is one of its own, and fits."""
    _CHECKS[export.engine](export, export.files)


def read(engine: str, text: str) -> ImportedMethod:
    return import_config(ENGINES[engine], text, partial(parse_yaml, where="The text"))


def exported(config: MethodConfig, engine: str, version: str = "", target: str = LLAMA) -> Export:
    return export_method(config, ENGINES[engine], target=target, version=version, resolve=named)


def named(weights: str) -> str:
    """What a preset calls its draft model → what an engine can load."""
    preset = presets.targets().get(weights)
    return weights if preset is None else str(preset.hub)


def same_effect(a: MethodConfig, b: MethodConfig) -> bool:
    """Whether two configs draft and accept alike: settings without effect may differ."""
    if type(a) is not type(b) or a.live_settings() != b.live_settings():
        return False
    pairs = [(getattr(a, name), getattr(b, name)) for name in a.live_settings()]
    return all(same_effect(x, y) if isinstance(x, MethodConfig) else x == y for x, y in pairs)


def words(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "))


def _vllm(export: Export, files: dict[str, str]) -> None:
    command = words(files["serve.sh"])
    assert command[:2] == ["vllm", "serve"] and "--" not in command[2]
    if "speculative_config.json" not in files:
        assert len(command) == 3
        return
    values = json.loads(files["speculative_config.json"])
    assert json.loads(command[command.index("--speculative-config") + 1]) == values
    for key, value in values.items():
        kind = recorded("vllm", export.version)[key]
        assert value in kind if isinstance(kind, list) else isinstance(value, TYPES[kind]), key
        assert key not in POSITIVE or value > 0
    assert values["method"] in ("ngram", "suffix", "mtp", "deepseek_mtp") or values["model"]


def _sglang(export: Export, files: dict[str, str]) -> None:
    command = words(files["launch.sh"])
    assert command[:3] == ["python", "-m", "sglang.launch_server"]
    flags = dict(zip(command[3::2], command[4::2], strict=True))
    schema = {"--model-path": "str", **recorded("sglang", export.version)}
    args: dict[str, Any] = {}
    for flag, value in flags.items():
        kind = schema[flag]
        assert value in kind if isinstance(kind, list) else kind != "switch", flag
        args[flag.removeprefix("--speculative-")] = TYPES.get(str(kind), str)(value)
    if "num-steps" in args:
        assert {"num-draft-tokens", "eagle-topk"} <= set(args), "all three or none"
        if args["eagle-topk"] == 1:
            assert args["num-draft-tokens"] == args["num-steps"] + 1
    assert args.get("algorithm", "NGRAM") in ("NEXTN", "NGRAM") or args["draft-model-path"]


def _speculative(values: dict[str, Any], version: str) -> None:
    schema = recorded("trtllm", version)
    block = values["speculative_config"]
    kind = block["decoding_type"]
    assert kind in schema["types"], f"{version} has no {kind}"
    assert set(block) <= {*schema["common"], *schema["types"][kind]}
    length, total = block.get("max_draft_len"), block.get("max_total_draft_tokens")
    if block.get("use_dynamic_tree") and version >= "1.3":
        assert length <= total <= block["dynamic_tree_max_topK"] * length
    if kind in ("Draft_Target", "DraftTarget", "Eagle", "Eagle3", "DFlash", "DSpark", "PARD"):
        assert block.get("speculative_model") or block.get("speculative_model_dir")
    if kind not in ("Lookahead", "MTP") or version >= "1.4":
        assert length > 0
    if kind == "MTP" and "speculative_model" not in block:
        assert length == block["num_nextn_predict_layers"] > 0, "the guide wants both"


def _trtllm(export: Export, files: dict[str, str]) -> None:
    command = words(files["serve.sh"])
    assert command[0] == "trtllm-serve"
    if "config.yaml" in files:
        values = yaml.safe_load(files["config.yaml"])
        assert set(values) <= {"speculative_config", "disable_overlap_scheduler"}
        kind = values["speculative_config"]["decoding_type"]
        assert ("disable_overlap_scheduler" in values) == (kind in ("NGram", "Draft_Target"))
        _speculative(values, export.version)
        assert "config.yaml" in command
    for role in ("prefill", "decode"):
        if f"{role}.yaml" in files:
            worker = yaml.safe_load(files[f"{role}.yaml"])
            own = worker["speculative_config"]
            assert own.pop("eagle3_one_model", False) is False
            assert own == values["speculative_config"]


def _triton(export: Export, files: dict[str, str]) -> None:
    if "model.yaml" in files:
        values = yaml.safe_load(files["model.yaml"])
        assert values["model"] and values["triton_config"] == {
            "max_batch_size": 0,
            "decoupled": False,
        }
        if "speculative_config" in values:
            _speculative(values, export.version)
        return
    assert export.version != "1.3"
    assert "trtllm-build" in files["build.sh"] and "world_size" in files["serve.sh"]
    if "request.json" in files:
        assert json.loads(files["request.json"])["num_draft_tokens"] > 0
        return
    lines = files["config.pbtxt"].splitlines()
    assert lines[0].startswith('parameters: { key: "decoding_mode"')
    known = {"medusa", "redrafter", "lookahead", "eagle"}
    assert lines[0].split('"')[3] in known


def _llamacpp(export: Export, files: dict[str, str]) -> None:
    schema = recorded("llamacpp", export.version)
    command = words(files["serve.sh"])
    assert command[:2] == ["llama-server", "-m"] and command[2].endswith(".gguf")
    for flag, value in zip(command[3::2], command[4::2], strict=True):
        assert flag in schema["flags"], flag
        if flag == "--spec-type":
            assert set(value.split(",")) <= set(schema["types"])
    if any("draft-n-max" in flag or flag == "-md" for flag in command):
        assert any(flag.endswith("draft-p-min") for flag in command), "p_min is always explicit"


def _mlx(export: Export, files: dict[str, str]) -> None:
    command = words(files["serve.sh"])
    assert command[:2] == ["mlx_lm.server", "--model"]
    flags = dict(zip(command[3::2], command[4::2], strict=True))
    assert set(flags) in (set(), set(recorded("mlx", export.version)["flags"]))


def _ollama(export: Export, files: dict[str, str]) -> None:
    schema = recorded("ollama", export.version)
    lines = [line.split(" ") for line in files["Modelfile"].splitlines()]
    assert lines[0][0] == "FROM" and lines[0][1].endswith(".gguf")
    for instruction, *values in lines:
        assert instruction in schema["instructions"]
        if instruction == "PARAMETER":
            assert values[0] in schema["parameters"] and int(values[1]) > 0


def _transformers(export: Export, files: dict[str, str]) -> None:
    text = files["generate.py"]
    compile(text, "generate.py", "exec")
    call = text.split("model.generate(")[1].split(")\n")[0]
    names = [part.split("=")[0] for part in call.split(", ")[1:]]
    names += re.findall(r"assistant\.generation_config\.(\w+)", text)
    arguments = ("assistant_model", "assistant_tokenizer", "tokenizer")
    assert all(name in vars(GenerationConfig()) or name in arguments for name in names)


_CHECKS = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "triton": _triton,
    "llamacpp": _llamacpp,
    "transformers": _transformers,
    "mlx": _mlx,
    "ollama": _ollama,
}
