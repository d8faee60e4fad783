"""TensorRT-LLM's files: YAML, the commands that use it, and an equivalent Python program."""

from __future__ import annotations

import ast
import shlex

from engine.drafters.user_provided import tensorrt_llm_class
from engine.errors import ConfigError
from playground.deploy.conversion import Writer
from playground.deploy.files import Files, command, read_python, yaml_block
from playground.deploy.legacy import CURRENT, EAGLE_1, LEGACY
from playground.deploy.table import Values

TYPE = "decoding_type"
CONFIG_CLASS = "DecodingConfig"
"""Suffix of the names of the Python classes."""
BENCHMARK = """# dataset.jsonl: specdec suites export humaneval --to trtllm-bench
trtllm-bench --model {model} latency \\
  --backend pytorch \\
  --dataset dataset.jsonl \\
  --report_json report.json \\
  {option} config.yaml
"""
"""One request at a time, where drafting gains most."""
DISAGGREGATED = ("Eagle3", "MTP")
"""Methods for which TensorRT-LLM and Dynamo document disaggregated serving."""
DISAGGREGATED_FILES = {
    "disagg_config.yaml": """hostname: localhost
port: 8000
backend: pytorch
context_servers:
  num_instances: 1
  urls: ["localhost:8001"]
generation_servers:
  num_instances: 1
  urls: ["localhost:8002"]
""",
    "disaggregated.sh": """set -e
CUDA_VISIBLE_DEVICES=0 trtllm-serve {model} --backend pytorch \\
  --host localhost --port 8001 {option} prefill.yaml &
CUDA_VISIBLE_DEVICES=1 trtllm-serve {model} --backend pytorch \\
  --host localhost --port 8002 {option} decode.yaml &
trtllm-serve disaggregated -c disagg_config.yaml
""",
    "dynamo.sh": """set -e
python3 -m dynamo.frontend --http-port 8000 &
CUDA_VISIBLE_DEVICES=0 python3 -m dynamo.trtllm --model-path {model} --served-model-name {model} \\
  --disaggregation-mode prefill --extra-engine-args prefill.yaml &
CUDA_VISIBLE_DEVICES=1 python3 -m dynamo.trtllm --model-path {model} --served-model-name {model} \\
  --disaggregation-mode decode --extra-engine-args decode.yaml &
wait
""",
}
"""Prefill and decode on different GPUs, behind trtllm-serve or NVIDIA Dynamo.

Source: TensorRT-LLM, examples/disaggregated and docs/source/performance/perf-benchmarking.md;
Dynamo, examples/backends/trtllm/engine_configs/llama4/eagle.
"""
WORKER: Values = {
    "backend": "pytorch",
    "disable_overlap_scheduler": True,
    "cache_transceiver_config": {"backend": "DEFAULT", "max_tokens_in_buffer": 16384},
}
"""Both workers need the `speculative_config`, since the drafter's cache is transferred, too."""
PYTHON_PROGRAM = """from tensorrt_llm{package} import LLM
from tensorrt_llm.llmapi import {name}
{drafter}
llm = LLM(
    {model!r},
    speculative_config={name}(
{arguments}    ),
{beside})
print(llm.generate("Write a haiku.").outputs[0].text)
"""
"""The quick start of TensorRT-LLM's guide."""


def _python_program(writer: Writer, values: Values, whole: Values) -> str:
    """The method as a Python program."""
    beside = {key: value for key, value in whole.items() if key != "speculative_config"}
    arguments = {key: repr(value) for key, value in values.items() if key != TYPE}
    drafter = ""
    if writer.config.decoding_type == "User_Provided":
        module, name = tensorrt_llm_class(writer.config.drafter) or ("", "")
        drafter, arguments["drafter"] = f"from {module} import {name}\n", f"{name}()"
    return PYTHON_PROGRAM.format(
        package="._tensorrt_engine" if writer.config.decoding_type in LEGACY else "",
        name=values[TYPE].replace("_", "") + CONFIG_CLASS,
        drafter=drafter,
        model=writer.target,
        arguments="".join(f"        {key}={value},\n" for key, value in arguments.items()),
        beside="".join(f"    {key}={value!r},\n" for key, value in beside.items()),
    )


def document(writer: Writer, values: Values) -> Values:
    """The YAML file's content: `speculative_config`, and the settings beside it."""
    beside = {}
    if writer.config.decoding_type in ("NGram", "Draft_Target"):
        beside["disable_overlap_scheduler"] = True
        writer.notes.append(
            "TensorRT-LLM's documentation switches the overlap scheduler off for it."
        )
    return {**beside, "speculative_config": values}


def write_files(writer: Writer, values: Values) -> Files:
    model, kind = shlex.quote(writer.target), writer.config.decoding_type
    backend = f"--backend {'tensorrt' if kind in LEGACY else 'pytorch'}"
    option = "--config" if writer.version >= CURRENT else "--extra_llm_api_options"
    serve = command(f"trtllm-serve {model}", backend, f"{option} config.yaml")
    whole = document(writer, values)
    offline = {"llm.py": _python_program(writer, values, whole)}
    if kind == "User_Provided":
        return offline
    files = {"config.yaml": yaml_block(whole), "serve.sh": serve, **offline}
    if kind not in LEGACY:
        files["bench.sh"] = BENCHMARK.format(model=model, option=option)
    if kind in DISAGGREGATED:
        writer.notes.append(
            "In prefill.yaml and decode.yaml, max_tokens_in_buffer must exceed the longest prompt."
        )
        block = values | ({"eagle3_one_model": False} if kind == "Eagle3" else {})
        worker = yaml_block({**WORKER, "speculative_config": block})
        files |= {"prefill.yaml": worker, "decode.yaml": worker}
        for name, text in DISAGGREGATED_FILES.items():
            files[name] = text.format(model=model, option=option)
    return files


def read_program(text: str) -> tuple[Values, str | None]:
    """The arguments of a Python program's `…DecodingConfig`, and the model of its `LLM`.

    Raises:
        ConfigError: it is not Python, or has no such call.
    """
    nodes, value_of = read_python(text)
    calls: dict[str, Values] = {}
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        words = {word.arg: value_of(word.value) for word in call.keywords if word.arg}
        words |= {"model": value_of(call.args[0])} if call.args else {}
        calls.setdefault(ast.unparse(call.func).rpartition(".")[2], words)
    llm = calls.get("LLM", {})
    config = next((name for name in calls if name.endswith(CONFIG_CLASS)), None)
    if config is None:
        raise ConfigError(f"The program calls no …{CONFIG_CLASS}.")
    kind = config.removesuffix(CONFIG_CLASS)
    if kind == "Eagle" and ("_tensorrt_engine" in text or llm.get("backend") == "tensorrt"):
        kind = EAGLE_1
    target = llm.get("model")
    values = {TYPE: "AUTO" if kind == "Auto" else kind, **calls[config]}
    return values, target if isinstance(target, str) else None
