"""TensorRT-LLM's files: YAML and the commands that take it, and the same as a Python program."""

from __future__ import annotations

import ast
import shlex
import textwrap
from typing import Any

from engine.drafters.user_provided import tensorrt_llm_class
from engine.errors import ConfigError
from engine.interop.conversion import Writer
from engine.interop.export_files import File, command, yaml_block
from engine.interop.table import Values
from engine.interop.trtllm.legacy import CURRENT, EAGLE_1, LEGACY

TYPE = "decoding_type"
CONFIG_CLASS = "DecodingConfig"
"""How the names of the Python classes end."""


BENCHMARK = """# dataset.jsonl: python app.py suites export humaneval --to trtllm-bench
trtllm-bench --model {model} latency \\
  --backend pytorch \\
  --dataset dataset.jsonl \\
  --report_json report.json{option}
"""
"""One request at a time, where drafting gains most."""
DISAGGREGATED = ("Eagle3", "MTP")
"""Methods for which TensorRT-LLM and Dynamo document it."""
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
"""Both workers need the `speculative_config`: the drafter's cache is transferred, too."""


OFFLINE = """from tensorrt_llm{package} import LLM
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


def _offline(writer: Writer, values: Values, beside: Values) -> File:
    """The method as a Python program."""
    arguments = {key: repr(value) for key, value in values.items() if key != TYPE}
    drafter = ""
    if writer.config.decoding_type == "User_Provided":
        module, name = tensorrt_llm_class(writer.config.drafter) or ("", "")
        drafter, arguments["drafter"] = f"from {module} import {name}\n", f"{name}()"
    text = OFFLINE.format(
        package="._tensorrt_engine" if writer.config.decoding_type in LEGACY else "",
        name=values[TYPE].replace("_", "") + CONFIG_CLASS,
        drafter=drafter,
        model=writer.target,
        arguments="".join(f"        {key}={value},\n" for key, value in arguments.items()),
        beside="".join(f"    {key}={value!r},\n" for key, value in beside.items()),
    )
    return File("llm.py", text, "python")


def document(writer: Writer, values: Values) -> Values:
    """The YAML file's content: `speculative_config`, and the settings beside it."""
    if not values:
        return {}
    beside = {}
    if writer.config.decoding_type in ("NGram", "Draft_Target"):
        beside["disable_overlap_scheduler"] = True
        writer.notes.append(
            "TensorRT-LLM's documentation switches the overlap scheduler off for it."
        )
    return {**beside, "speculative_config": values}


def write_files(writer: Writer, values: Values) -> tuple[File, ...]:
    model, kind = shlex.quote(writer.target), writer.config.decoding_type
    bench = File("bench.sh", BENCHMARK.format(model=model, option=""), "bash")
    if not values:
        plain = command(f"trtllm-serve {model}", "--backend pytorch")
        return File("serve.sh", plain, "bash"), bench
    backend = "tensorrt" if kind in LEGACY else "pytorch"
    option = "--config" if writer.at_least(*CURRENT) else "--extra_llm_api_options"
    whole = document(writer, values)
    serve = command(f"trtllm-serve {model}", f"--backend {backend}", f"{option} config.yaml")
    beside = {key: value for key, value in whole.items() if key != "speculative_config"}
    offline = _offline(writer, values, beside)
    if kind == "User_Provided":
        return (offline,)
    files = [File("config.yaml", yaml_block(whole), "yaml"), File("serve.sh", serve, "bash")]
    files.append(offline)
    if backend == "pytorch":
        line = f" \\\n  {option} config.yaml"
        files.append(File("bench.sh", BENCHMARK.format(model=model, option=line), "bash"))
    if kind in DISAGGREGATED:
        writer.notes.append(
            "In prefill.yaml and decode.yaml, max_tokens_in_buffer must exceed the longest prompt."
        )
        block = values | ({"eagle3_one_model": False} if kind == "Eagle3" else {})
        worker = yaml_block({**WORKER, "speculative_config": block})
        files += [File(f"{role}.yaml", worker, "yaml") for role in ("prefill", "decode")]
        for name, text in DISAGGREGATED_FILES.items():
            language = "yaml" if name.endswith(".yaml") else "bash"
            files.append(File(name, text.format(model=model, option=option), language))
    return tuple(files)


def read_program(text: str) -> tuple[Values, str | None]:
    """What a Python program passes to a `…DecodingConfig`, and to `LLM`; it is not run.

    Raises:
        ConfigError: not Python.
    """
    try:
        return _passed(list(ast.walk(ast.parse(textwrap.dedent(text).strip()))), text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"The program is not valid Python: {error!s:.80}.") from error


def _passed(nodes: list[ast.AST], text: str) -> tuple[Values, str | None]:
    names: Values = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                names[name] = value

    def value_of(node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name):
                return names.get(name, name)
            case ast.Call(func=func):
                return ast.unparse(func)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            return None

    calls: dict[str, Values] = {}
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        words = {word.arg: value_of(word.value) for word in call.keywords if word.arg}
        words |= {"model": value_of(call.args[0])} if call.args else {}
        calls.setdefault(ast.unparse(call.func).rpartition(".")[2], words)
    llm = calls.get("LLM", {})
    made = next((made for made in calls if made.endswith(CONFIG_CLASS)), None)
    if made is None:
        raise ConfigError(f"The program calls no …{CONFIG_CLASS}.")
    kind = made.removesuffix(CONFIG_CLASS)
    if kind == "Eagle" and ("_tensorrt_engine" in text or llm.get("backend") == "tensorrt"):
        kind = EAGLE_1
    target = llm.get("model")
    values = {TYPE: "AUTO" if kind == "Auto" else kind, **calls[made]}
    return values, target if isinstance(target, str) else None
