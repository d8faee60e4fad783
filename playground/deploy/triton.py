"""Triton: config.pbtxt parameters of the engine backend, model.yaml of the LLM API backend.

The engine backend (inflight_batcher_llm) was removed in July 2026 with TensorRT-LLM's TensorRT
backend; containers up to TensorRT-LLM 1.2 have it. Its parameters name the decoding mode and the
choice tree in braces; the weights are built into the engine. A draft model is a second engine: a
Python model (BLS) drafts with it, and each request gives the number of tokens. Its replacement
serves through TensorRT-LLM's LLM API and takes the same `speculative_config`.
Source: Triton's tutorial Feature_Guide/Speculative_Decoding/TRT-LLM; TensorRT-LLM 0.18,
examples/draft_target_model.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from engine.drafters import methods
from engine.errors import ConfigError
from engine.tree import ChoicePaths, ChoiceTree
from playground.deploy import legacy, table, trees, trtllm
from playground.deploy.conversion import Reader, Writer
from playground.deploy.files import Files, ReadYaml, command, read_mapping, yaml_block
from playground.deploy.legacy import LEGACY
from playground.deploy.table import Codec, Engine, Field, Ignored, Values, method
from playground.deploy.trtllm_files import TYPE, document

MODE = "decoding_mode"
N_DRAFT = "num_draft_tokens"
MODEL_YAML = "all_models/llmapi/tensorrt_llm/1/model.yaml"
CONFIG_PBTXT = "all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt"
FAST_LOGITS = "speculative_decoding_fast_logits"
PAIR_KEYS = (FAST_LOGITS, "participant_ids", "tensorrt_llm_draft_model_name")
"""Parameters of a pair of engines, one of which drafts for the other."""
PLAIN_MODES = ("top_k", "top_p", "top_k_top_p", "beam_search", "auto")
_SPECULATIVE = re.compile(
    "decoding_mode|medusa|eagle|lookahead|redrafter|speculative|draft|participant"
)
"""Matches names of parameters that affect drafting; a template has fifty others."""
_PARAMETER = re.compile(
    r"key\s*:\s*\"([^\"]*)\"\s*(?:,\s*)?value\s*(?::\s*)?\{\s*string_value\s*:\s*\"([^\"]*)\""
)


# ---- file templates of the engine backend, as in the tutorial


SETTINGS = """# Options of build.sh and serve.sh; variables of the environment come first. Run both
# in nvcr.io/nvidia/tritonserver:<xx.yy>-trtllm-python-py3, which has TensorRT-LLM in /app.
APP=${{APP:-/app}}
TARGET=${{TARGET:-{target}}}
DRAFT=${{DRAFT:-{draft}}}
DTYPE=${{DTYPE:-float16}}
FP8=${{FP8:-}}  # 1 = weights and KV cache in FP8, of models that are converted without heads
TARGET_DEVICE_IDS=${{TARGET_DEVICE_IDS:-{device}}}  # 1,2 = tensor parallel on two GPUs
DRAFT_DEVICE_IDS=${{DRAFT_DEVICE_IDS:-0}}
MAX_BATCH_SIZE=${{MAX_BATCH_SIZE:-4}}
MAX_INPUT_LEN=${{MAX_INPUT_LEN:-3200}}
MAX_SEQ_LEN=${{MAX_SEQ_LEN:-4800}}
KV_FRACTION=${{KV_FRACTION:-{fraction}}}
if [ ! -d "$APP/all_models" ]; then  # elsewhere
  git clone --branch rel --recurse-submodules \\
    https://github.com/triton-inference-server/tensorrtllm_backend
  APP=tensorrtllm_backend
fi
EXAMPLES=$APP/examples
[ -d "$EXAMPLES" ] || EXAMPLES=$APP/tensorrt_llm/examples
count() {{ echo "$1" | tr , '\\n' | wc -l; }}
TARGET_TP=$(count "$TARGET_DEVICE_IDS")
DRAFT_TP=$(count "$DRAFT_DEVICE_IDS")
"""
BUILD = """set -e
. ./settings.sh
fetch() { [ -e "$1" ] || git clone "https://huggingface.co/$1" "$1"; }
git lfs install
for model in "$TARGET" ${DRAFT:+"$DRAFT"}; do fetch "$model"; done
"""
WEIGHTS = """if [ "$FP8" ]; then
  python3 "$EXAMPLES/quantization/quantize.py" --model_dir "${model}" --output_dir {out} \\
    --dtype "$DTYPE" --qformat fp8 --kv_cache_dtype fp8 --tp_size "${model}_TP"
else
  python3 "$EXAMPLES/{family}/convert_checkpoint.py" {options} --dtype "$DTYPE"
fi
"""
OPTIONS = '--model_dir "${model}" --output_dir {out} --tp_size "${model}_TP"'
GEMMA = '--ckpt-type hf --model-dir "${model}" --output-model-dir {out} --world-size "${model}_TP"'
HEADS = """python3 "$EXAMPLES/{example}/convert_checkpoint.py" {options} \\
  --output_dir checkpoint --dtype "$DTYPE" --tp_size "$TARGET_TP"
"""
ENGINE_BUILD = """trtllm-build --checkpoint_dir {checkpoint} --output_dir {out} \\
  --gemm_plugin "$DTYPE" --max_batch_size "$MAX_BATCH_SIZE" \\
  --max_input_len "$MAX_INPUT_LEN" --max_seq_len "$MAX_SEQ_LEN" \\
  {options}
"""
REPOSITORY = """set -e
. ./settings.sh
rm -rf model_repository
cp -r "$APP/all_models/inflight_batcher_llm" model_repository
{before}CONFIG=config.pbtxt
fill() {{ python3 "$APP/tools/fill_template.py" -i "model_repository/$1/$CONFIG" "$2"; }}
put() {{ sed -i "s/\\${{$2}}/$3/" "model_repository/$1/$CONFIG"; }}  # fill parts at commas
for model in preprocessing postprocessing; do
  fill $model "tokenizer_dir:$TARGET,tokenizer_type:auto,\
triton_max_batch_size:$MAX_BATCH_SIZE,${{model}}_instance_count:1"
done
fill ensemble "triton_max_batch_size:$MAX_BATCH_SIZE,logits_datatype:TYPE_FP32"
fill tensorrt_llm_bls "triton_max_batch_size:$MAX_BATCH_SIZE,decoupled_mode:false,\
logits_datatype:TYPE_FP32,bls_instance_count:1{bls}"
"""
ENGINE_MODEL = """fill {model} "triton_backend:tensorrtllm,triton_max_batch_size:$MAX_BATCH_SIZE,\
decoupled_mode:false,max_beam_width:1,engine_dir:$PWD/{engine},logits_datatype:TYPE_FP32,\
batching_strategy:inflight_fused_batching,encoder_input_features_data_type:TYPE_FP16,\
max_queue_delay_microseconds:0,kv_cache_free_gpu_mem_fraction:$KV_FRACTION{more}"
put {model} gpu_device_ids "${gpu}_DEVICE_IDS"
"""
LAUNCH = 'python3 "$APP/scripts/launch_triton_server.py" --model_repo=model_repository'
TWO_MODELS = """cp -r model_repository/tensorrt_llm model_repository/tensorrt_llm_draft
sed -i 's/name: "tensorrt_llm"/name: "tensorrt_llm_draft"/' \
model_repository/tensorrt_llm_draft/config.pbtxt
"""
TWO_MODELS_BLS = (
    ",accumulate_tokens:false,tensorrt_llm_model_name:tensorrt_llm,"
    "tensorrt_llm_draft_model_name:tensorrt_llm_draft"
)
RANKS = """put tensorrt_llm_draft participant_ids "$(seq -s, 1 "$DRAFT_TP")"
put tensorrt_llm participant_ids "$(seq -s, $((DRAFT_TP + 1)) $((DRAFT_TP + TARGET_TP)))"
"""
"""Rank 0 directs; with draft logits, every GPU is a rank that sends or receives them."""
LLAMA = "models/core/llama"
FAMILIES = {
    "models/core/qwen": "qwen|qwq",
    "models/core/gemma": "gemma",
    "models/core/phi": "phi-",
    "models/contrib/opt": "opt-",
    "models/contrib/gptneox": "pythia|neox",
    "models/contrib/falcon": "falcon",
    LLAMA: "llama|vicuna|mistral|mixtral|smollm",
}
"""Folder of a family's convert_checkpoint.py, by words of a model's name."""


def _family(name: str) -> str:
    folders = (f for f, words in FAMILIES.items() if re.search(words, name.lower()))
    return next(folders, "")


def _weights_command(writer: Writer, model: str, name: str, out: str) -> str:
    """The command that converts a model by its family's script."""
    folder = _family(name)
    if not folder:
        writer.warnings.append(
            f"The family of {name} is unknown here. Put its folder in place of FAMILY in build.sh."
        )
    options = (GEMMA if folder.endswith("gemma") else OPTIONS).format(model=model, out=out)
    return WEIGHTS.format(model=model, family=folder or "FAMILY", options=options, out=out)


def _add_build_files(writer: Writer, draft: str, *commands: str) -> None:
    """Add the script that builds the engines, and the settings of both scripts."""
    two = int(writer.config.decoding_type == "Draft_Target")
    models = {"target": shlex.quote(writer.target), "draft": shlex.quote(draft) if draft else ""}
    settings = SETTINGS.format(**models, device=two, fraction=0.5 if two else 0.9)
    writer.files |= {"settings.sh": settings, "build.sh": BUILD + "".join(commands)}
    writer.notes.append(
        "settings.sh has the options of build.sh and serve.sh: dtype, FP8, GPUs (several = tensor "
        "parallel), batch size, lengths and the fraction of memory for the KV cache."
    )


def _heads_command(example: str, models: str, **sizes: object) -> str:
    """The command that converts a target with its heads."""
    words = [f"--{key} {value}" for key, value in sizes.items()]
    return HEADS.format(example=example, options=" ".join([models, *words]))


def _serve_script(values: Values) -> str:
    """The script that fills the model repository and starts the server."""
    script = REPOSITORY.format(before="", bls="")
    script += ENGINE_MODEL.format(model="tensorrt_llm", engine="engine", more="", gpu="TARGET")
    script += "".join(f"put tensorrt_llm {key} '{value}'\n" for key, value in values.items())
    return script + command(LAUNCH, '--world_size="$TARGET_TP"')


# ---- codecs


def _write_draft_target(writer: Writer, values: Values) -> None:
    """Writes scripts for two engines, and a repository in which one drafts for the other."""
    logits, length, draft = bool(values["use_draft_logits"]), values[N_DRAFT], writer.model()
    both = "--use_paged_context_fmha enable" + " --gather_generation_logits" * logits
    target = f"{both} --speculative_decoding_mode draft_tokens_external --max_draft_len {length}"
    _add_build_files(
        writer,
        draft,
        _weights_command(writer, "DRAFT", draft, "checkpoint-draft"),
        _weights_command(writer, "TARGET", writer.target, "checkpoint"),
        ENGINE_BUILD.format(checkpoint="checkpoint-draft", out="engine-draft", options=both),
        ENGINE_BUILD.format(checkpoint="checkpoint", out="engine", options=target),
    )
    script = REPOSITORY.format(before=TWO_MODELS, bls=TWO_MODELS_BLS)
    more = ",exclude_input_in_output:true,enable_kv_cache_reuse:true"
    more += ",speculative_decoding_fast_logits:1" if logits else ""
    for suffix, gpu in (("_draft", "DRAFT"), ("", "TARGET")):
        names = {"model": f"tensorrt_llm{suffix}", "engine": f"engine{suffix.replace('_', '-')}"}
        script += ENGINE_MODEL.format(**names, more=more, gpu=gpu)
    launch = (
        "--multi-model",
        '--tensorrt_llm_model_name="tensorrt_llm,tensorrt_llm_draft"',
        *(["--disable-spawn-processes"] if logits else []),
        "--world_size=" + ("$((1 + DRAFT_TP + TARGET_TP))" if logits else "1"),
    )
    script += (RANKS if logits else "") + command(LAUNCH, *launch)
    writer.files["serve.sh"] = script
    writer.notes.append(
        "Each request says how many tokens are drafted: send one like request.json to "
        "/v2/models/tensorrt_llm_bls/generate."
    )


def _build_medusa(writer: Writer) -> tuple[str, str]:
    depth, heads = ChoiceTree(writer.config.medusa_choices).depth, writer.take("num_medusa_heads")
    if heads is None:
        writer.notes.append(f"build.sh converts {depth} heads, as many as the tree is deep.")
    limits = writer.notes if _family(writer.target) == LLAMA else writer.warnings
    limits.append(legacy.MEDUSA_NOTE)
    models = '--model_dir "$TARGET" --medusa_model_dir "$DRAFT"'
    return _heads_command("medusa", models, num_medusa_heads=heads or depth), "medusa"


def _build_eagle(writer: Writer) -> tuple[str, str]:
    if writer.take("use_dynamic_tree"):
        raise table.UnsupportedError(
            "Triton's config.pbtxt has no parameter for a dynamic tree (EAGLE-2).",
            "A drawn tree (EAGLE-1), or TensorRT-LLM 1.2's own server.",
        )
    sizes = trees.tensorrt_sizes(ChoiceTree(writer.config.eagle_choices))
    models = '--model_dir "$TARGET" --eagle_model_dir "$DRAFT"'
    return _heads_command("eagle", models, **sizes), "eagle --use_paged_context_fmha enable"


def _build_lookahead(writer: Writer) -> tuple[str, str]:
    config = writer.config
    size, columns = config.max_ngram_size, config.max_window_size + config.max_verification_set_size
    # Rows that one step verifies: the window's and the candidate n-grams', N - 1 tokens each.
    rows = max(size - 2, 0) + (columns - 1) * (size - 1)
    convert = _weights_command(writer, "TARGET", writer.target, "checkpoint")
    return convert, f"lookahead_decoding --max_draft_len {rows}"


def _build_redrafter(writer: Writer) -> tuple[str, str]:
    width, length = writer.take("beam_width"), writer.take("beam_length")
    writer.notes.append(
        f"beam_width={width} and beam_length={length} are fixed when build.sh builds the engine; "
        "config.pbtxt does not have them."
    )
    sizes = {"redrafter_num_beams": width, "redrafter_draft_len_per_beam": length - 1}
    convert = _weights_command(writer, "TARGET", writer.target, "base")
    models = '--base_model_checkpoint_dir base --drafter_model_dir "$DRAFT"'
    return convert + _heads_command("redrafter", models, **sizes), "explicit_draft_tokens"


# ---- the table


NO_WEIGHTS = "config.pbtxt names no drafter weights: they are in the engine. Set speculative_model."
NGRAM_INSTEAD = "NGram: it needs no weights either."
REMOVED = (
    "Triton served {} through TensorRT-LLM's engine backend, which was removed in July 2026; "
    "containers with TensorRT-LLM 1.2 still have it."
)
NO_BEAMS = "Its beams are fixed in the engine; the defaults are used here."
ENGINE_NOTE = "A request names no draft model: it is an engine. Set speculative_model."
LOOKAHEAD = tuple(
    Field(f"max_{name}_size", f"lookahead_{name}_size")
    for name in ("window", "ngram", "verification_set")
)
PARAMETERS = Ignored("medusa_choices eagle_choices " + " ".join(row.key for row in LOOKAHEAD))
REQUEST = (
    Field("max_draft_len", N_DRAFT, note=f"Each request says {N_DRAFT}; the default is used here."),
    Field("use_draft_probs", "use_draft_logits", default=False),
    table.read_only("use_draft_probs", FAST_LOGITS, kind=bool),
    Ignored(f"{' '.join(PAIR_KEYS)} {MODE}"),
    Ignored(
        "text_input max_tokens stream bad_words stop_words end_id pad_id top_k top_p temperature "
        "length_penalty repetition_penalty min_length presence_penalty frequency_penalty "
        "random_seed return_log_probs return_context_logits return_generation_logits beam_width"
    ),
    Codec((), _write_draft_target),
)


def _mode(
    decoding_type: str,
    what: str,
    commands: Callable[[Writer], tuple[str, str]],
    *rows: table.Row,
    note: str = "",
) -> table.Method:
    """A method of the engine backend.

    Args:
        commands: returns the command that converts the weights, and trtllm-build's options.
        note: an additional note on reading.
    """
    has_weights = "speculative_model" in methods()[decoding_type].model_fields

    def write(writer: Writer, values: Values) -> None:
        convert, options = commands(writer)
        options = f"--speculative_decoding_mode {options}"
        engine = ENGINE_BUILD.format(checkpoint="checkpoint", out="engine", options=options)
        _add_build_files(writer, writer.model() if has_weights else "", convert, engine)

    nearest = "EAGLE-3 heads for the same target." if has_weights else NGRAM_INSTEAD
    return method(
        decoding_type,
        "",
        table.const(MODE, decoding_type.lower()),
        *rows,
        PARAMETERS,
        Codec((), write),
        until=legacy.CURRENT,
        removal=(REMOVED.format(what), nearest),
        read_notes=tuple(filter(None, (NO_WEIGHTS * has_weights, note))),
    )


def _braces(paths: ChoicePaths) -> str:
    return trees.format_tree(ChoiceTree(paths), "triton")


MEDUSA_TREE = legacy.tree_rows("medusa_choices", _braces)
EAGLE_TREE = legacy.tree_rows("eagle_choices", _braces)
MODES = {
    "medusa": _mode("Medusa", "Medusa", _build_medusa, *MEDUSA_TREE),
    "eagle": _mode("Eagle", "EAGLE-1 and EAGLE-2", _build_eagle, *EAGLE_TREE),
    "lookahead": _mode("Lookahead", "lookahead", _build_lookahead, *LOOKAHEAD),
    "redrafter": _mode("ReDrafter", "ReDrafter", _build_redrafter, note=NO_BEAMS),
}
DRAFT_TARGET = method("Draft_Target", "", *REQUEST, until=(1, 3), read_notes=(ENGINE_NOTE,))
NOT_SERVED = (*LEGACY, "User_Provided")
LLM_API = tuple(one for one in trtllm.METHODS if one.decoding_type not in NOT_SERVED)


def _files(writer: Writer, values: Values) -> Files:
    if N_DRAFT in values:
        request = {"text_input": "Write a haiku.", "max_tokens": 128, **values, "stream": False}
        return {"request.json": json.dumps(request, indent=2) + "\n"}
    if MODE in values:
        writer.notes += [
            f"serve.sh puts these parameters into {CONFIG_PBTXT}, in place of the ones it has.",
            "The drafter's weights are built into the engine by build.sh, not named here.",
        ]
        lines = [
            f'parameters: {{ key: "{key}"  value: {{ string_value: "{value}" }} }}\n'
            for key, value in values.items()
        ]
        writer.files["serve.sh"] = _serve_script(values)
        return {"config.pbtxt": "".join(lines)}
    whole = {
        "model": writer.target,
        "backend": "pytorch",
        **document(writer, values),
        "triton_config": {"max_batch_size": 0, "decoupled": False},
    }
    writer.notes.append(f"Copy it over {MODEL_YAML} of TensorRT-LLM's triton_backend.")
    return {"model.yaml": yaml_block(whole)}


def _parse(text: str, read_yaml: ReadYaml) -> tuple[Mapping[str, Any], str | None]:
    if N_DRAFT in text and TYPE not in text:
        return read_mapping(text, read_yaml, f"A request must have {N_DRAFT}"), None
    if "string_value" not in text and not re.search(r"\bparameters\s*(?::\s*)?\{", text):
        return trtllm.parse(text, read_yaml)
    parameters = {key: value.strip() for key, value in _PARAMETER.findall(text)}
    values = {k: v for k, v in parameters.items() if v and "${" not in v and _SPECULATIVE.search(k)}
    if values.get(MODE) in (*PLAIN_MODES, None) and not values.keys().isdisjoint(PAIR_KEYS):
        return {key: value for key, value in values.items() if key != MODE}, None
    modes = [mode for mode in ("medusa", "eagle") if f"{mode}_choices" in values]
    mode = values.get(MODE) or (modes[0] if len(modes) == 1 else "none")
    return {**values, MODE: mode}, None


def _find_method(reader: Reader) -> table.Method:
    mode = reader.values.get(MODE)
    if reader.find(N_DRAFT, *PAIR_KEYS) and mode is None:
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
    ),
    key=TYPE,
    drafters=trtllm.ENGINE.drafters,
    methods=(*MODES.values(), DRAFT_TARGET, *LLM_API),
    unsupported=trtllm.ENGINE.unsupported,
    files=_files,
    parse=_parse,
    find_method=_find_method,
    rows=(*trtllm.COMMON, Ignored(" ".join(PAIR_KEYS))),
    reasons={
        **trtllm.ENGINE.reasons,
        "acceptance": "Triton's parameters know no typical acceptance.",
    },
)
