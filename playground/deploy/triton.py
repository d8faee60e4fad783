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

import re
from collections.abc import Mapping
from typing import Any

from engine.drafters import methods
from engine.errors import ConfigError
from engine.tree import ChoicePaths, ChoiceTree
from playground.deploy import table, tensorrt_backend, trees, trtllm
from playground.deploy.conversion import Reader, Writer
from playground.deploy.files import ReadYaml, read_mapping
from playground.deploy.table import Field, Ignored, Values, load_engine, method
from playground.deploy.tensorrt_backend import LEGACY
from playground.deploy.trtllm import TYPE, document

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


# ---- what the templates of the engine backend read


def _family(name: str) -> str:
    folders = (f for f, words in FAMILIES.items() if re.search(words, name.lower()))
    return next(folders, "")


def _converter(writer: Writer, name: str) -> str:
    """The folder of the script that converts a model; warns where it is unknown."""
    if not (folder := _family(name)):
        writer.warnings.append(
            f"The family of {name} is unknown here. Put its folder in place of FAMILY in build.sh."
        )
    return folder or "FAMILY"


def _pair(writer: Writer, values: Values) -> Values:
    """Two engines, and a repository in which one drafts for the other."""
    draft = writer.model()
    families = {"draft_family": _converter(writer, draft)}
    families["family"] = _converter(writer, writer.target)
    return {"draft": draft, "logits": bool(values["use_draft_logits"]), **families}


def _medusa(writer: Writer, values: Values) -> Values:
    depth, heads = ChoiceTree(writer.config.medusa_choices).depth, writer.take("num_medusa_heads")
    if heads is None:
        writer.notes.append(f"build.sh converts {depth} heads, as many as the tree is deep.")
    limits = writer.notes if _family(writer.target) == LLAMA else writer.warnings
    limits.append(tensorrt_backend.MEDUSA_NOTE)
    return {"sizes": {"num_medusa_heads": heads or depth}}


def _eagle(writer: Writer, values: Values) -> Values:
    if writer.take("use_dynamic_tree"):
        raise table.UnsupportedError(
            "Triton's config.pbtxt has no parameter for a dynamic tree (EAGLE-2).",
            "A drawn tree (EAGLE-1), or TensorRT-LLM 1.2's own server.",
        )
    return {"sizes": trees.tensorrt_sizes(ChoiceTree(writer.config.eagle_choices))}


def _lookahead(writer: Writer, values: Values) -> Values:
    config = writer.config
    size, columns = config.max_ngram_size, config.max_window_size + config.max_verification_set_size
    # Rows that one step verifies: the window's and the candidate n-grams', N - 1 tokens each.
    rows = max(size - 2, 0) + (columns - 1) * (size - 1)
    return {"family": _converter(writer, writer.target), "rows": rows}


def _redrafter(writer: Writer, values: Values) -> Values:
    width, length = writer.take("beam_width"), writer.take("beam_length")
    writer.notes.append(
        f"beam_width={width} and beam_length={length} are fixed when build.sh builds the engine; "
        "config.pbtxt does not have them."
    )
    sizes = {"redrafter_num_beams": width, "redrafter_draft_len_per_beam": length - 1}
    return {"family": _converter(writer, writer.target), "sizes": sizes}


def _prepare(writer: Writer, values: Values) -> Values:
    kind = writer.config.decoding_type
    if TYPE in values:
        whole = {
            "model": writer.target,
            "backend": "pytorch",
            **document(writer, values),
            "triton_config": {"max_batch_size": 0, "decoupled": False},
        }
        writer.notes.append(f"Copy it over {MODEL_YAML} of TensorRT-LLM's triton_backend.")
        return {"document": whole}
    mode = values.get(MODE, "pair")
    prepared = {"document": None, "draft": "", "mode": mode, **BUILDS[mode](writer, values)}
    if _has_weights(kind) and mode != "pair":
        prepared["draft"] = writer.model()
    writer.notes.append(
        "settings.sh has the options of build.sh and serve.sh: dtype, FP8, GPUs (several = tensor "
        "parallel), batch size, lengths and the fraction of memory for the KV cache."
    )
    if mode == "pair":
        writer.notes.append(
            "Each request says how many tokens are drafted: send one like request.json to "
            "/v2/models/tensorrt_llm_bls/generate."
        )
    else:
        writer.notes += [
            f"serve.sh puts these parameters into {CONFIG_PBTXT}, in place of the ones it has.",
            "The drafter's weights are built into the engine by build.sh, not named here.",
        ]
    return prepared


BUILDS = {
    "pair": _pair,
    "medusa": _medusa,
    "eagle": _eagle,
    "lookahead": _lookahead,
    "redrafter": _redrafter,
}


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
)


def _has_weights(decoding_type: str) -> bool:
    return "speculative_model" in methods()[decoding_type].model_fields


def _mode(decoding_type: str, what: str, *rows: table.Row, note: str = "") -> table.Method:
    """A method of the engine backend; `note` is an additional note on reading."""
    has_weights = _has_weights(decoding_type)
    nearest = "EAGLE-3 heads for the same target." if has_weights else NGRAM_INSTEAD
    return method(
        decoding_type,
        "",
        table.const(MODE, decoding_type.lower()),
        *rows,
        PARAMETERS,
        until=tensorrt_backend.CURRENT,
        removal=(REMOVED.format(what), nearest),
        read_notes=tuple(filter(None, (NO_WEIGHTS * has_weights, note))),
    )


def _braces(paths: ChoicePaths) -> str:
    return trees.format_tree(ChoiceTree(paths), "triton")


MEDUSA_TREE = tensorrt_backend.tree_rows("medusa_choices", _braces)
EAGLE_TREE = tensorrt_backend.tree_rows("eagle_choices", _braces)
MODES = {
    "medusa": _mode("Medusa", "Medusa", *MEDUSA_TREE),
    "eagle": _mode("Eagle", "EAGLE-1 and EAGLE-2", *EAGLE_TREE),
    "lookahead": _mode("Lookahead", "lookahead", *LOOKAHEAD),
    "redrafter": _mode("ReDrafter", "ReDrafter", note=NO_BEAMS),
}
DRAFT_TARGET = method("Draft_Target", "", *REQUEST, until=(1, 3), read_notes=(ENGINE_NOTE,))
NOT_SERVED = (*LEGACY, "User_Provided")
LLM_API = tuple(one for one in trtllm.METHODS if one.decoding_type not in NOT_SERVED)


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


ENGINE = load_engine(
    "triton",
    methods=(*MODES.values(), DRAFT_TARGET, *LLM_API),
    prepare=_prepare,
    parse=_parse,
    find_method=_find_method,
    base=trtllm.ENGINE,
)
