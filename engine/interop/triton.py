"""Triton: config.pbtxt parameters of the engine backend, model.yaml of the LLM API backend.

The engine backend (inflight_batcher_llm) went away in July 2026 with TensorRT-LLM's TensorRT
backend; containers up to TensorRT-LLM 1.2 have it. Its parameters name the decoding mode and the
choice tree in braces; the weights are built into the engine before. A draft model is a second
engine there: a model in Python (BLS) lets one draft for the other, and each request says how many
tokens. What replaces it serves through TensorRT-LLM's LLM API and takes the same
`speculative_config`.
Source: Triton's tutorial Feature_Guide/Speculative_Decoding/TRT-LLM; TensorRT-LLM 0.18,
examples/draft_target_model.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.interop import table, trtllm
from engine.interop.conversion import Reader, Writer
from engine.interop.export_files import File, ReadYaml, command, read_mapping, yaml_block
from engine.interop.table import Codec, Engine, Field, Ignored, UnsupportedError, Values, method
from engine.interop.trees import format_tree, is_pbtxt, parse_tree, pbtxt_parameter, tensorrt_sizes
from engine.tree import ChoiceTree

MODE = "decoding_mode"
DRAFTS = "num_draft_tokens"
WHERE = "all_models/llmapi/tensorrt_llm/1/model.yaml"
ENGINE_WHERE = "all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt"
PLAIN_MODES = ("top_k", "top_p", "top_k_top_p", "beam_search", "auto")
_PARAMETER = re.compile(
    r"key\s*:\s*\"([^\"]*)\"\s*(?:,\s*)?value\s*(?::\s*)?\{\s*string_value\s*:\s*\"([^\"]*)\""
)
_SPECULATIVE = re.compile("decoding_mode|medusa|eagle|lookahead|redrafter|speculative|draft")
"""In the names of parameters that bear on drafting; a template has fifty others."""


# ---- file templates of the engine backend; at most 4 requests at once, as in the tutorial


LLAMA = "models/core/llama"
REPOSITORY = """set -e
APP=${APP:-/app}
TOKENIZER=%(tokenizer)s
cp -r "$APP/all_models/inflight_batcher_llm" model_repository
%(before)s\
fill() { python3 "$APP/tools/fill_template.py" -i "model_repository/$1/config.pbtxt" "$2"; }
fill preprocessing "tokenizer_dir:$TOKENIZER,tokenizer_type:auto,\
triton_max_batch_size:4,preprocessing_instance_count:1"
fill postprocessing "tokenizer_dir:$TOKENIZER,tokenizer_type:auto,\
triton_max_batch_size:4,postprocessing_instance_count:1"
fill ensemble "triton_max_batch_size:4,logits_datatype:TYPE_FP32"
fill tensorrt_llm_bls "triton_max_batch_size:4,decoupled_mode:false,logits_datatype:TYPE_FP32,\
bls_instance_count:1%(bls)s"
"""
ENGINE_MODEL = """fill %(model)s "triton_backend:tensorrtllm,triton_max_batch_size:4,\
decoupled_mode:false,logits_datatype:TYPE_FP32,max_queue_delay_microseconds:0,\
batching_strategy:inflight_fused_batching,encoder_input_features_data_type:TYPE_FP16,\
engine_dir:$PWD/%(engine)s%(more)s"
"""
LAUNCH = 'python3 "$APP/scripts/launch_triton_server.py" --model_repo=model_repository'
TWO_MODELS = """DRAFT_GPU=${DRAFT_GPU:-0}
TARGET_GPU=${TARGET_GPU:-1}
cp -r model_repository/tensorrt_llm model_repository/tensorrt_llm_draft
sed -i 's/name: "tensorrt_llm"/name: "tensorrt_llm_draft"/' \
model_repository/tensorrt_llm_draft/config.pbtxt
"""
TWO_MODELS_BLS = (
    ",accumulate_tokens:false,tensorrt_llm_model_name:tensorrt_llm,"
    "tensorrt_llm_draft_model_name:tensorrt_llm_draft"
)


def _repository(writer: Writer, *, before: str = "", bls: str = "") -> str:
    """The repository with every template filled that does not depend on the decoding mode."""
    tokenizer = shlex.quote(writer.target)
    return REPOSITORY % {"tokenizer": tokenizer, "before": before, "bls": bls}


def _convert(example: str, options: Values, output: str = "checkpoint") -> str:
    """The command that converts weights."""
    options = {**options, "output_dir": output, "dtype": "float16"}
    script = f"python examples/{example}/convert_checkpoint.py"
    return command(script, *((f"--{name}", value) for name, value in options.items()))


def _engine(checkpoint: str, output: str, **options: object) -> str:
    """The command that builds an engine."""
    paths = {"checkpoint_dir": checkpoint, "output_dir": output}
    options = {**paths, "gemm_plugin": "float16", "max_batch_size": 4, **options}
    return command("trtllm-build", *((f"--{name}", value) for name, value in options.items()))


def _build(writer: Writer, convert: str, mode: str, **options: object) -> None:
    """Adds the commands that turn the weights into an engine."""
    build = _engine("checkpoint", "engine", speculative_decoding_mode=mode, **options)
    writer.files.append(File("build.sh", f"set -e\n{convert}{build}", "bash"))


def _serve(writer: Writer, values: Values) -> File:
    """Fills the repository, the parameters of the decoding mode included, and starts the server."""
    script = _repository(writer)
    script += ENGINE_MODEL % {"model": "tensorrt_llm", "engine": "engine", "more": ""}
    for key, value in values.items():  # commas in a tree would part fill_template's values
        script += f"sed -i 's/${{{key}}}/{value}/' model_repository/tensorrt_llm/config.pbtxt\n"
    return File("serve.sh", script + command(LAUNCH, "--world_size=1"), "bash")


# ---- codecs


def _write_draft_target(writer: Writer, values: Values) -> None:
    """Two engines, and a repository in which one drafts for the other."""
    logits, length = bool(values["use_draft_logits"]), values[DRAFTS]
    fmha = {"use_paged_context_fmha": "enable"}  # the cache is reused from draft to draft
    target = {"speculative_decoding_mode": "draft_tokens_external", "max_draft_len": length}
    build = (
        _convert(LLAMA, {"model_dir": writer.model()}, "checkpoint-draft")
        + _convert(LLAMA, {"model_dir": writer.target}, "checkpoint")
        + _engine("checkpoint-draft", "engine-draft", **fmha)
        + _engine("checkpoint", "engine", **fmha, **target)
    )
    script = _repository(writer, before=TWO_MODELS, bls=TWO_MODELS_BLS)
    for rank, (suffix, gpu) in enumerate((("_draft", "DRAFT"), ("", "TARGET")), 1):
        more = f",gpu_device_ids:${gpu}_GPU,enable_kv_cache_reuse:true"
        more += ",kv_cache_free_gpu_mem_fraction:0.5"
        more += f",participant_ids:{rank},speculative_decoding_fast_logits:1" if logits else ""
        names = {"model": f"tensorrt_llm{suffix}", "engine": f"engine{suffix.replace('_', '-')}"}
        script += ENGINE_MODEL % {**names, "more": more}
    # Rank 0 directs; with logits, every engine is a rank that sends or receives them.
    ranks = "--disable-spawn-processes --world_size=3" if logits else "--world_size=1"
    writer.files += [
        File("build.sh", f"set -e\n{build}", "bash"),
        File("serve.sh", script + command(LAUNCH, f"--multi-model {ranks}"), "bash"),
    ]
    writer.notes += [
        "Each request says how many tokens are drafted: send one like request.json to "
        "/v2/models/tensorrt_llm_bls/generate.",
        "serve.sh puts the draft model on GPU 0 and the target on GPU 1; set DRAFT_GPU and "
        "TARGET_GPU to change it.",
    ]


def _write_medusa(writer: Writer, values: Values) -> None:
    depth, heads = ChoiceTree(writer.config.medusa_choices).depth, writer.take("num_medusa_heads")
    if heads is None:
        writer.notes.append(f"build.sh converts {depth} heads, as many as the tree is deep.")
    options = {"model_dir": writer.target, "medusa_model_dir": writer.model()}
    convert = _convert("medusa", {**options, "num_medusa_heads": heads or depth})
    _build(writer, convert, "medusa")


def _write_eagle(writer: Writer, values: Values) -> None:
    if writer.take("use_dynamic_tree"):
        raise UnsupportedError(
            "Triton's config.pbtxt has no parameter for a dynamic tree (EAGLE-2).",
            "A drawn tree (EAGLE-1), or TensorRT-LLM 1.2's own server.",
        )
    sizes = tensorrt_sizes(ChoiceTree(writer.config.eagle_choices))
    options = {"model_dir": writer.target, "eagle_model_dir": writer.model(), **sizes}
    _build(writer, _convert("eagle", options), "eagle", use_paged_context_fmha="enable")


def _write_lookahead(writer: Writer, values: Values) -> None:
    config = writer.config
    size, columns = config.max_ngram_size, config.max_window_size + config.max_verification_set_size
    # What one step verifies: the window's rows and the guesses, N - 1 tokens each.
    rows = max(size - 2, 0) + (columns - 1) * (size - 1)
    convert = _convert(LLAMA, {"model_dir": writer.target})
    _build(writer, convert, "lookahead_decoding", max_draft_len=rows)


def _write_redrafter(writer: Writer, values: Values) -> None:
    width, length = writer.take("beam_width"), writer.take("beam_length")
    writer.notes.append(
        f"beam_width={width} and beam_length={length} are fixed when build.sh builds the engine; "
        "config.pbtxt does not have them."
    )
    base = _convert(LLAMA, {"model_dir": writer.target}, "base")
    options = {
        "base_model_checkpoint_dir": "base",
        "drafter_model_dir": writer.model(),
        "redrafter_num_beams": width,
        "redrafter_draft_len_per_beam": length - 1,
    }
    _build(writer, base + _convert("redrafter", options), "explicit_draft_tokens")


# ---- the table


NO_WEIGHTS = "config.pbtxt names no drafter weights: they are in the engine. Set speculative_model."
NO_BEAMS = "Its beams are fixed in the engine; the defaults are used here."
NO_MODEL = "A request names no draft model: it is an engine. Set speculative_model."
LOOKAHEAD = tuple(
    Field(f"max_{name}_size", f"lookahead_{name}_size")
    for name in ("window", "ngram", "verification_set")
)
PARAMETERS = Ignored("medusa_choices eagle_choices " + " ".join(row.key for row in LOOKAHEAD))
REQUEST = (
    Field("max_draft_len", DRAFTS),
    Field("use_draft_probs", "use_draft_logits", default=False),
    Ignored(
        "text_input max_tokens stream bad_words stop_words end_id pad_id top_k top_p temperature "
        "length_penalty repetition_penalty min_length presence_penalty frequency_penalty "
        "random_seed return_log_probs return_context_logits return_generation_logits beam_width"
    ),
    Codec((), _write_draft_target),
)


def _mode(
    decoding_type: str, what: str, write: Any, *rows: Field, read_notes: tuple[str, ...] = ()
) -> table.Method:
    """A method of the engine backend."""
    mode = table.const(MODE, decoding_type.lower())
    removed = (
        f"Triton served {what} through TensorRT-LLM's engine backend, which was removed in July "
        "2026; containers with TensorRT-LLM 1.2 still have it."
    )
    heads = "EAGLE-3 heads for the same target."
    nearest = heads if read_notes else "NGram: it needs no weights either."
    rest: Any = {"until": (1, 3), "removal": (removed, nearest), "read_notes": read_notes}
    return method(decoding_type, "", mode, *rows, PARAMETERS, Codec((), write), **rest)


def _tree(name: str) -> Field:
    """A tree in braces."""
    return Field(
        name,
        name,
        encode=lambda paths: format_tree(ChoiceTree(paths), "triton"),
        decode=lambda text: parse_tree(text, format="triton").paths,
        note=f"{name} is not set; the tree of the method's defaults is used here.",
    )


MEDUSA, EAGLE = _tree("medusa_choices"), _tree("eagle_choices")
HEADS = (NO_WEIGHTS,)
BEAMS = (NO_WEIGHTS, NO_BEAMS)
MODES = {
    "medusa": _mode("Medusa", "Medusa", _write_medusa, MEDUSA, read_notes=HEADS),
    "eagle": _mode("Eagle", "EAGLE-1 and EAGLE-2", _write_eagle, EAGLE, read_notes=HEADS),
    "lookahead": _mode("Lookahead", "lookahead", _write_lookahead, *LOOKAHEAD),
    "redrafter": _mode("ReDrafter", "ReDrafter", _write_redrafter, read_notes=BEAMS),
}
DRAFT_TARGET = method("Draft_Target", "", *REQUEST, until=(1, 3), read_notes=(NO_MODEL,))
LLM_API = tuple(own for own in trtllm.METHODS if own.decoding_type not in trtllm.LEGACY)


def _files(writer: Writer, values: Values) -> tuple[File, ...]:
    if DRAFTS in values:
        request = {"text_input": "Write a haiku.", "max_tokens": 128, **values, "stream": False}
        return (File("request.json", json.dumps(request, indent=2) + "\n", "json"),)
    if MODE in values:
        writer.notes += [
            f"serve.sh puts these parameters into {ENGINE_WHERE}, in place of the ones it has.",
            "The drafter's weights are built into the engine by build.sh, not named here.",
        ]
        lines = [pbtxt_parameter(key, str(value)) for key, value in values.items()]
        writer.files.append(_serve(writer, values))
        return (File("config.pbtxt", "\n".join(lines) + "\n", "protobuf"),)
    whole = {
        "model": writer.target,
        "backend": "pytorch",
        **trtllm.document(writer, values),
        "triton_config": {"max_batch_size": 0, "decoupled": False},
    }
    writer.notes.append(f"Copy it over {WHERE} of TensorRT-LLM's triton_backend.")
    return (File("model.yaml", yaml_block(whole), "yaml"),)


def _parse(text: str, read_yaml: ReadYaml) -> tuple[Mapping[str, Any], str | None]:
    if DRAFTS in text and trtllm.TYPE not in text:
        return read_mapping(text, read_yaml, (), f"A request must have {DRAFTS}")
    if not is_pbtxt(text):
        return trtllm.parse(text, read_yaml)
    parameters = {key: value.strip() for key, value in _PARAMETER.findall(text)}
    values = {
        key: value
        for key, value in parameters.items()
        if value and "${" not in value and _SPECULATIVE.search(key)
    }
    trees = [mode for mode in ("medusa", "eagle") if f"{mode}_choices" in values]
    mode = values.get(MODE) or (trees[0] if len(trees) == 1 else "none")
    return {**values, MODE: mode}, None


def _find_method(reader: Reader) -> table.Method:
    mode = reader.values.get(MODE)
    if reader.find(DRAFTS):
        return DRAFT_TARGET
    if mode is None:
        return trtllm.find_method(reader)
    if mode not in MODES:
        hint = " It drafts nothing." if mode in PLAIN_MODES else ""
        raise ConfigError(
            "decoding_mode must be one of medusa, eagle, lookahead and redrafter, got "
            f"{mode}.{hint}"
        )
    return MODES[mode]


ENGINE = Engine(
    name="triton",
    title="Triton",
    versions=(
        ("1.3", "TensorRT-LLM's LLM API backend: model.yaml"),
        ("1.2", "TensorRT-LLM 1.2, the last with engines and config.pbtxt"),
        ("1.0", "TensorRT-LLM 1.0 and 1.1"),
    ),
    trees="dynamic trees for EAGLE-3; drawn trees until TensorRT-LLM 1.2",
    sample='parameters: { key: "decoding_mode" value: { string_value: "medusa" } } …',
    key=trtllm.TYPE,
    plain="speculative_config",
    drafters=trtllm.ENGINE.drafters,
    methods=(*MODES.values(), DRAFT_TARGET, *LLM_API),
    unsupported=trtllm.ENGINE.unsupported,
    files=_files,
    parse=_parse,
    find_method=_find_method,
    rows=(*trtllm.COMMON, Ignored("speculative_decoding_fast_logits")),
    strict=True,
    reasons={
        **trtllm.ENGINE.reasons,
        "acceptance": "Triton's parameters know no typical acceptance.",
    },
)
