"""NVIDIA's Triton server in front of the engine, asked by Triton's own client over gRPC."""

from __future__ import annotations

import json
import os
import signal
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import presets
from playground.deploy import ENGINES, export_method
from storage import RunLog
from tests.playground.serving import free_port

pytestmark = [pytest.mark.network, pytest.mark.slow]
APP = Path(__file__).parents[3] / "app.py"
PROMPT = "The capital of France is"
PROMPT_IDS = [504, 3575, 282, 4649, 314]
CLIENT = """
import json, queue, sys
import numpy as np
import tritonclient.grpc as grpc
client = grpc.InferenceServerClient(sys.argv[1])
def tensor(name, value, kind):
    numpy = {"BYTES": object, "INT32": np.int32, "BOOL": bool}[kind]
    made = grpc.InferInput(name, [1, 1], kind)
    made.set_data_from_numpy(np.array([[value]], dtype=numpy))
    return made
def inputs(text, bad=""):  # those of the tutorial's client
    return [tensor("text_input", text, "BYTES"), tensor("max_tokens", 12, "INT32"),
            tensor("stop_words", "", "BYTES"), tensor("bad_words", bad, "BYTES"),
            tensor("stream", True, "BOOL"), tensor("beam_width", 1, "INT32")]
def refused(call, *given):
    try:
        call(*given)
    except grpc.InferenceServerException as error:
        return str(error)
prompt = sys.argv[2]
whole = client.infer("ensemble", inputs(prompt)).as_numpy("text_output").item().decode()
answers = queue.Queue()
client.start_stream(lambda result, error: answers.put((result, error)))
client.async_stream_infer("tensorrt_llm_bls", inputs(prompt), enable_empty_final_response=True)
pieces = []
while True:
    result, error = answers.get(timeout=120)
    assert error is None, error
    text = result.as_numpy("text_output")
    if text is not None:
        pieces.append(text.item().decode())
    if result.get_response().parameters["triton_final_response"].bool_param:
        break
client.stop_stream()
drafted = tensor("num_draft_tokens", 2, "INT32"), tensor("use_draft_logits", True, "BOOL")
once = client.infer("ensemble", [*inputs(prompt), *drafted]).as_numpy("text_output").item().decode()
def array(name, values, kind):
    made = grpc.InferInput(name, values.shape, kind)
    made.set_data_from_numpy(values)
    return made
ids = np.array([json.loads(sys.argv[3])], dtype=np.int32)
tokens = client.infer("tensorrt_llm", [  # those of inflight_batcher_llm_client
    array("input_ids", ids, "INT32"), tensor("input_lengths", ids.size, "INT32"),
    tensor("request_output_len", 12, "INT32"), tensor("beam_width", 1, "INT32"),
    array("temperature", np.array([[1.0]], dtype=np.float32), "FP32"),
    tensor("streaming", False, "BOOL"), tensor("end_id", 2, "INT32"), tensor("pad_id", 2, "INT32"),
    tensor("return_log_probs", False, "BOOL"), tensor("runtime_top_k", 1, "INT32"),
    array("runtime_top_p", np.array([[0.0]], dtype=np.float32), "FP32")])
told = tokens.as_numpy("output_ids"), tokens.as_numpy("sequence_length")
assert told[0].shape == (1, 1, told[1][0][0]) and told[1].shape == (1, 1), told
counted = client.get_inference_statistics("ensemble").model_stats[0].inference_count
print(json.dumps([once, told[0].ravel().tolist(), counted, whole, pieces,
                  refused(client.infer, "ensemble", inputs(prompt, "no")),
                  refused(client.unload_model, "ensemble")]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with nvidia-pytriton (which wants an older numpy) before what is here."""
    folder = tmp_path_factory.mktemp("triton")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "ours.pth").write_text("\n".join([*site.getsitepackages(), str(APP.parent)]))
    pip = f"{folder}/bin/python -m pip install -q --disable-pip-version-check".split()
    subprocess.run([*pip, "nvidia-pytriton>=0.7,<1", "numpy<2"], check=True, timeout=600)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def triton(
    python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, int, str, str]]:
    """Ports of HTTP and gRPC, the header HTTP wants, and the log of the runs."""
    log = str(tmp_path_factory.mktemp("log") / "runs.sqlite3")
    http, grpc, metrics = (free_port() for _ in range(3))
    line = f"triton --http-port {http} --grpc-port {grpc} --metrics-port {metrics} --db {log}"
    model = ["--model", "smollm2-135m-instruct:draft-smollm2-135m"]
    process = subprocess.Popen(
        [python, APP, *line.split(), *model], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")  # Triton writes there too
        header = next(line for line in lines if "send the header" in line).partition("header")[2]
        yield http, grpc, header, log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()  # type: ignore[union-attr]
    with pytest.raises(httpx.ConnectError):  # Triton has ended too
        httpx.get(f"http://127.0.0.1:{http}/v2/health/live")


def test_grpc_client_of_the_tutorial(triton: tuple[int, int, str, str], python: Path) -> None:
    _, grpc, _, log = triton
    done = subprocess.run(
        [python, "-c", CLIENT, f"127.0.0.1:{grpc}", PROMPT, json.dumps(PROMPT_IDS)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    once, ids, counted, whole, pieces, refusal, administration = json.loads(done.stdout)
    assert len(pieces) > 1 and whole == PROMPT + "".join(pieces)
    assert "bad_words must be" in refusal and "got ['no']: it is not supported." in refusal
    assert "restricted" in administration
    with RunLog.open(log) as runs:
        stored = [runs.get(row.id) for row in runs.find().rows]
    by_ids, drafting_two, *others = stored
    assert all(run and PROMPT + run.text == whole for run in (drafting_two, *others)) and by_ids
    assert once == whole and counted == 2  # what genai-perf asks for
    assert drafting_two and drafting_two.method["max_draft_len"] == 2
    assert drafting_two.method["use_draft_probs"] and others[0]
    assert not others[0].method["use_draft_probs"]
    assert tuple(ids) == (*PROMPT_IDS, *by_ids.output_ids) and len(by_ids.output_ids) == 12
    assert by_ids.prompt_text == "" and PROMPT + by_ids.text == whole


def test_the_guides_curl_of_the_bls_model_answers_once_to_who_has_the_key(
    triton: tuple[int, int, str, str],
) -> None:
    """With DECOUPLED_MODE off the guide asks `tensorrt_llm_bls` by `generate`."""
    http, _, header, log = triton
    name, _, key = header.strip().partition(": ")
    address = f"http://127.0.0.1:{http}/v2/models/tensorrt_llm_bls/generate"
    body = {"text_input": PROMPT, "max_tokens": 12, "bad_words": "", "stop_words": ""}
    drafting = {"num_draft_tokens": 1, "use_draft_logits": True, "stream": False}
    assert httpx.post(address, json=body).status_code == 403
    told = [
        httpx.post(address, json={**body, **more}, headers={name: key}, timeout=60)
        .raise_for_status()
        .json()["text_output"]
        for more in ({}, drafting, {"num_draft_tokens": 0})
    ]
    assert told[0].startswith(PROMPT) and len(told[0]) > len(PROMPT) and len(set(told)) == 1
    with RunLog.open(log) as runs:
        newest = [runs.get(row.id) for row in runs.find().rows[:2]]
    methods = {run.decoding_type: run.method.get("max_draft_len") for run in newest if run}
    assert methods == {"Autoregressive": None, "Draft_Target": 1}


def test_triton_reads_what_is_exported(python: Path, tmp_path: Path) -> None:
    """It has no TensorRT-LLM backend to run it with, and says so only after it has read it."""
    own = next(python.parents[1].glob("lib/python*/site-packages"))
    model = tmp_path / "models" / "tensorrt_llm"
    (model / "1").mkdir(parents=True)
    medusa = presets.methods()["medusa-smollm2-135m"].config
    export = export_method(medusa, ENGINES["triton"], version="1.2", target="llama")
    exported = export.files["config.pbtxt"]

    def told(text: str) -> str:
        (model / "config.pbtxt").write_text(text)
        binary = own / "pytriton" / "tritonserver" / "bin" / "tritonserver"
        ports = f"--http-port {free_port()} --grpc-port {free_port()} --allow-metrics false"
        done = subprocess.run(
            [binary, "--model-repository", tmp_path / "models", *ports.split()],
            env={**os.environ, "LD_LIBRARY_PATH": str(own / "nvidia_pytriton.libs")},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stdout + done.stderr

    head = 'name: "tensorrt_llm" backend: "tensorrtllm" max_batch_size: 4\n'
    tensors = "input [{name: 'input_ids' data_type: TYPE_INT32 dims: [-1]}]\n"
    tensors += "output [{name: 'output_ids' data_type: TYPE_INT32 dims: [-1]}]\n"
    assert "unable to find backend library for backend 'tensorrtllm'" in told(
        head + tensors + exported
    )
    assert "failed to read text proto" in told(head + tensors + exported[:-4])
