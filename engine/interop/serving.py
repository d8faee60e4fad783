"""TensorRT-LLM's config at work: its own benchmark, disaggregated serving, and NVIDIA Dynamo.

Prefill and decode workers need the same `speculative_config`: the drafter's cache travels, too.
Source: TensorRT-LLM, examples/disaggregated and docs/source/performance/perf-benchmarking.md;
Dynamo, examples/backends/trtllm/engine_configs/llama4/eagle.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from engine.interop.handoff import File, command, yaml_block

DISAGGREGATED = ("Eagle3", "MTP")
"""Methods for which TensorRT-LLM and Dynamo document it."""
TRANSFER_NOTE = (
    "In prefill.yaml and decode.yaml, max_tokens_in_buffer must exceed the longest prompt."
)
DATASET = "# dataset.jsonl: python app.py suites export humaneval --to trtllm-bench\n"
_WORKERS = (("prefill", 8001), ("decode", 8002))
"""Each on a GPU of its own, and the port where trtllm-serve hears it."""


def benchmark(target: str, *config: tuple[str, object]) -> File:
    """trtllm-bench at one request at a time, where drafting gains most."""
    start = f"trtllm-bench --model {shlex.quote(target)} latency"
    fixed = ("--backend pytorch", "--dataset dataset.jsonl", "--report_json report.json")
    return File("bench.sh", DATASET + command(start, *fixed, *config), "bash")


def disaggregated(target: str, document: Mapping[str, Any], option: str) -> tuple[File, ...]:
    """Prefill and decode on different GPUs, behind trtllm-serve or behind Dynamo.

    Args:
        document: the content of `config.yaml`.
        option: what trtllm-serve calls its config.
    """
    model = shlex.quote(target)
    transfer = {"cache_transceiver_config": {"backend": "DEFAULT", "max_tokens_in_buffer": 16384}}
    worker = {"backend": "pytorch", "disable_overlap_scheduler": True, **transfer, **document}
    router: dict[str, Any] = {"hostname": "localhost", "port": 8000, "backend": "pytorch"}
    serve, dynamo = "set -e\n", "set -e\npython3 -m dynamo.frontend --http-port 8000 &\n"
    for gpu, ((role, port), name) in enumerate(
        zip(_WORKERS, ("context_servers", "generation_servers"), strict=True)
    ):
        router[name] = {"num_instances": 1, "urls": [f"localhost:{port}"]}
        on, config = f"CUDA_VISIBLE_DEVICES={gpu}", f"{role}.yaml"
        serve += command(
            f"{on} trtllm-serve {model} --backend pytorch",
            f"--host localhost --port {port} {option} {config} &",
        )
        dynamo += command(
            f"{on} python3 -m dynamo.trtllm --model-path {model} --served-model-name {model}",
            f"--disaggregation-mode {role} --extra-engine-args {config} &",
        )
    return (
        *(File(f"{role}.yaml", yaml_block(worker), "yaml") for role, _ in _WORKERS),
        File("disagg_config.yaml", yaml_block(router), "yaml"),
        File(
            "disaggregated.sh", f"{serve}trtllm-serve disaggregated -c disagg_config.yaml\n", "bash"
        ),
        File("dynamo.sh", f"{dynamo}wait\n", "bash"),
    )
