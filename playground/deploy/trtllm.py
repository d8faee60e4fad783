"""TensorRT-LLM: the `speculative_config` block of its YAML file.

There are two lines of releases: from 1.3 on, only the PyTorch backend, with NGram, SA,
Draft_Target, Eagle3, MTP (since 1.4 also with an assistant's weights), PARD, DFlash and DSpark.
Until 1.2 there was also the TensorRT backend, with Medusa, Lookahead and EAGLE-1/2 and their choice
trees. Source: tensorrt_llm/llmapi/llm_args.py of both lines.

A dynamic tree must satisfy max_draft_len ≤ max_total_draft_tokens ≤ topK · max_draft_len there.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from engine.drafters.user_provided import tensorrt_llm_class
from engine.errors import ConfigError
from playground.deploy import table, tensorrt_backend
from playground.deploy.conversion import Reader, Writer
from playground.deploy.files import ReadYaml, read_mapping, read_python
from playground.deploy.table import (
    Codec,
    Field,
    Ignored,
    Refusal,
    Values,
    load_engine,
    method,
    same_name,
)
from playground.deploy.tensorrt_backend import CURRENT, EAGLE_1, EAGLE_ROWS, LEGACY, WEIGHTS

TYPE = "decoding_type"
CONFIG_CLASS = "DecodingConfig"
"""Suffix of the names of the Python classes."""
DISAGGREGATED = ("Eagle3", "MTP")
"""Methods for which TensorRT-LLM and Dynamo document disaggregated serving."""
SUFFIX_FIRST = ("sa_config", "use_sa_spec", "sa_spec_threshold")
"""Suffix lookup before another method, by the keys of the code and of 1.3's guide."""
SUFFIX_ONLY = "max_spec_factor min_token_prob max_tree_depth"


# ---- codecs


def _one_request(schedule: dict[Any, Any]) -> object:
    """The draft length for one request: that of the smallest batch size in the schedule."""
    try:
        lengths = {int(size): int(length) for size, length in schedule.items()}
        return lengths[min(lengths)]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"draft_len_schedule must map batch sizes to lengths, got {schedule!r:.80}."
        ) from error


def _write_eagle3(writer: Writer, values: Values) -> None:
    """Limits a dynamic tree to TensorRT-LLM's bounds; warns of every change."""
    if not writer.config.use_dynamic_tree:
        return
    names = ("max_draft_len", "max_total_draft_tokens", "dynamic_tree_max_topK")
    levels, nodes, topk = (values[name] for name in names)
    if nodes > topk * levels:
        writer.warnings.append(
            f"max_total_draft_tokens is lowered from {nodes} to {topk * levels}: TensorRT-LLM "
            "takes at most dynamic_tree_max_topK × max_draft_len = "
            f"{topk} × {levels}. MAT may fall."
        )
    elif nodes < levels:
        writer.warnings.append(
            f"max_draft_len is lowered from {levels} to {nodes}: TensorRT-LLM takes no fewer nodes "
            "than levels. The trees stay the same, for one of so few nodes is never deeper."
        )
    values["max_total_draft_tokens"] = min(nodes, topk * levels)
    values["max_draft_len"] = min(levels, nodes)
    writer.notes.append("Dynamic trees do not run on targets with sliding-window or MLA attention.")


def _read_eagle3(reader: Reader) -> None:
    settings = reader.settings
    if reader.values.get(TYPE) == "Eagle":
        reader.notes.append("Eagle on the PyTorch backend is EAGLE-3.")
    if settings.get("use_dynamic_tree") and "max_total_draft_tokens" not in settings:
        topk, levels = settings.get("dynamic_tree_max_topK", 10), settings.get("max_draft_len", 5)
        settings["max_total_draft_tokens"] = topk * levels


def _write_user(writer: Writer, values: Values) -> None:
    if tensorrt_llm_class(writer.config.drafter) is None:
        raise table.UnsupportedError(
            "TensorRT-LLM runs a drafter that is a class with its method prepare_draft_tokens; "
            "this one has another interface.",
            "engine/drafters/trtllm_drafter.py shows the interface, which runs here, too.",
        )
    writer.notes.append("A drafter cannot be named in YAML; run llm.py beside its module.")


def _write_combined(writer: Writer, values: Values) -> None:
    """Suffix lookup before Eagle3, MTP or PARD is `sa_config`."""
    first, second = writer.take("retrieval"), writer.take("model")
    fits = first.decoding_type == "Suffix" and second.decoding_type in ("Eagle3", "MTP", "PARD")
    if writer.version < CURRENT or not fits:
        raise table.UnsupportedError(
            f"TensorRT-LLM cannot combine {first.decoding_type} with {second.decoding_type}.",
            "From 1.3 on it combines Suffix with Eagle3, MTP or PARD (sa_config).",
        )
    writer.warnings.append(
        f"sa_config drafts as many tokens as {second.decoding_type} does, not "
        f"{first.max_draft_len}, and knows no max_spec_factor, min_token_prob or max_tree_depth: "
        "these settings of Suffix are dropped."
    )
    look_up, model = writer.nested(first), writer.nested(second)
    values |= model.values()
    pool = look_up.take("use_global_pool")
    values["sa_config"] = {"threshold": writer.take("min_match_len"), "enable_global_pool": pool}
    look_up.used.update(["max_draft_len", *SUFFIX_ONLY.split()])
    look_up.finish("Suffix: ")
    model.finish(f"{second.decoding_type}: ")


def _read_combined(reader: Reader) -> None:
    reader.notes.append("Suffix lookup before the method (sa_config) is Combined here.")
    config = reader.values.get("sa_config")
    extra = dict(config) if isinstance(config, Mapping) else {}
    model = reader.read(_method_by_name(reader))
    pool = {"decoding_type": "Suffix", "use_global_pool": extra.pop("enable_global_pool", False)}
    threshold = extra.pop("threshold", reader.values.get("sa_spec_threshold") or 4)
    if extra:
        raise ConfigError(f"TensorRT-LLM has no setting sa_config.{next(iter(extra))!s:.40}.")
    reader.settings = {"retrieval": pool, "model": model, "min_match_len": threshold}
    reader.used.update(SUFFIX_FIRST)


# ---- the table


def _switch_field(name: str, key: str = "", **rest: Any) -> Field:
    return Field(name, key or name, encode=lambda on: on or None, **rest)


NO_LENGTH = "TensorRT-LLM asks for max_draft_len, which is missing here: add it before serving."
SCHEDULE = table.read_only("max_draft_len", "draft_len_schedule", decode=_one_request, kind=dict)
LENGTH = (Field("max_draft_len", "max_draft_len", note=NO_LENGTH), SCHEDULE)
BLOCK = (
    Field("max_draft_len", "max_draft_len", requirement=table.BLOCK, note=NO_LENGTH),
    SCHEDULE,
    *WEIGHTS,
    *same_name("mask_token_id"),
    Field("target_layer_ids", "target_layer_ids", encode=list),
)
DRAFT_MODEL = (
    *LENGTH,
    *WEIGHTS,
    _switch_field("use_draft_probs", "use_rejection_sampling", since=CURRENT, default=False),
    table.drops_draft_probs(
        ": this release accepts a drafted token only where the target draws the same one; when "
        "sampling, acceptance falls.",
        until=CURRENT,
    ),
)
SUFFIX = (
    *LENGTH,
    table.const("max_matching_ngram_size", -1),
    Field("use_global_pool", "enable_global_pool"),
    table.DroppedSetting(
        SUFFIX_ONLY,
        "SA copies {c.max_draft_len} tokens after the longest match, however long it is: "
        "max_spec_factor, min_token_prob and max_tree_depth are dropped.",
    ),
    Ignored("global_pool_size"),
    Refusal("max_matching_ngram_size", "n-grams of one size are looked up", ("-1",)),
)
CAPTURED_LAYERS = Field("eagle3_layers_to_capture", "eagle3_layers_to_capture", encode=list)
EAGLE3 = (
    *LENGTH,
    *WEIGHTS,
    _switch_field("use_dynamic_tree"),
    *same_name(*table.DYNAMIC.split(), switch="use_dynamic_tree"),
    CAPTURED_LAYERS,
    *EAGLE_ROWS,
    Refusal("eagle_choices", "EAGLE-3 drafts a drawn tree, here a chain or a dynamic one"),
    Codec(SUFFIX_FIRST, _write_eagle3, _read_eagle3),
)
EAGLE3_CHAIN = (*same_name("max_draft_len"), *WEIGHTS, CAPTURED_LAYERS)
RELAXED = "relaxed_topk relaxed_delta begin_thinking_phase_token end_thinking_phase_token"
NEXTN = "num_nextn_predict_layers"
MTP = (
    Field("max_draft_len", "max_draft_len", (NEXTN,)),
    Field("max_draft_len", NEXTN, decode=None),  # the guide: it must equal max_draft_len
    SCHEDULE,
    _switch_field(
        "use_relaxed_acceptance_for_thinking",
        read_note="relaxed_rule is probability: TensorRT-LLM's code compares probabilities, though "
        "its guide describes logarithms; log_probability does as the guide says.",
    ),
    *same_name(*RELAXED.split(), switch="use_relaxed_acceptance_for_thinking"),
    table.read_only(
        "",
        "use_mtp_vanilla",
        decode=lambda on: table.IGNORED if on else None,
        kind=bool,
        note="here a layer drafts again with its one cache, there by copies of itself.",
    ),
    Ignored("mtp_eagle_one_model"),
    Refusal("use_dynamic_tree dynamic_tree_max_topK", "MTP layers draft a tree, here a chain"),
    Codec(SUFFIX_FIRST),
)
DFLASH_KEYS = Ignored("attention_backend context_recompute_tail skip_ctx_buffer_budget_check")
DSPARK_KEYS = Ignored(f"{DFLASH_KEYS.keys} block_size markov_rank markov_head_type")
PARD = (*LENGTH, *WEIGHTS, *same_name("mask_token_id"), Codec(SUFFIX_FIRST))
ASSISTANT_NOTE = "MTP with speculative_model is read as the target's assistant."
ASSISTANT = method(
    "MTP_Assistant", "MTP", *LENGTH, *WEIGHTS, since=(1, 4), read_notes=(ASSISTANT_NOTE,)
)
NGRAM = (
    *LENGTH,
    *same_name("max_matching_ngram_size", *table.POOL_RULES.split()),
    table.DroppedSetting(
        "lookup",
        "lookup={c.lookup} is dropped: TensorRT-LLM looks up by its pool's rules (lookup=pool "
        "here).",
        lambda config: config.lookup == "transformers",
    ),
    # Without is_keep_all, TensorRT-LLM's guide and code differ.
    table.DroppedSetting(
        "",
        "is_keep_all=false keeps one continuation here, as TensorRT-LLM's guide says; its code "
        "keeps all of the longest length (lookup=pool_as_coded here).",
        lambda config: config.lookup == "pool" and not config.is_keep_all,
    ),
    table.read_only(
        "lookup",
        "is_keep_all",
        decode=lambda is_kept: table.IGNORED if is_kept else "pool_as_coded",
        kind=bool,
        read_note="lookup is pool_as_coded: TensorRT-LLM's code keeps all continuations of the "
        "longest length, though its guide says only one is kept (lookup=pool).",
    ),
)
AUTO_NOTE = "AUTO is NGram, with these sizes for up to 4 requests at once."
AUTO_SIZES = {"max_draft_len": 5, "max_matching_ngram_size": 3}
"""Source: tensorrt_llm/_torch/speculative/auto_heuristic.py"""
MTP_NOTE = "TensorRT-LLM's guide names DeepSeek alone for MTP; check another target with a release."
USER = (*same_name("max_draft_len", "drafter"), Ignored("resource_manager"), Codec((), _write_user))
USER_NOTE = "The drafter itself is named at the start: --drafter module:Class."
COMBINED = method("Combined", "", Codec((), _write_combined, _read_combined))
SUFFIX_NOTE = "SA copies max_draft_len tokens always; Suffix here as long as it is confident."
METHODS = (
    method(
        "Draft_Target",
        "Draft_Target",
        *DRAFT_MODEL,
        aliases=("DraftTarget",),
        notes=("Sampled drafts (use_rejection_sampling) are a prototype feature since 1.3.",),
    ),
    method("NGram", "NGram", *NGRAM),
    method("NGram", "AUTO", implied=AUTO_SIZES, read_notes=(AUTO_NOTE,)),  # only read
    method("Suffix", "SA", *SUFFIX, since=CURRENT, read_notes=(SUFFIX_NOTE,)),
    *tensorrt_backend.METHODS,
    method("Eagle3", "Eagle3", *EAGLE3, since=CURRENT),
    method("Eagle3", "Eagle", *EAGLE3_CHAIN, until=CURRENT),
    method("MTP", "MTP", *MTP, notes=(MTP_NOTE,)),
    ASSISTANT,
    method("PARD", "PARD", *PARD, since=CURRENT),
    method("DFlash", "DFlash", *BLOCK, DFLASH_KEYS, since=CURRENT),
    method("DSpark", "DSpark", *BLOCK, DSPARK_KEYS, since=CURRENT),
    method(
        "User_Provided",
        "User_Provided",
        *USER,
        aliases=("UserProvided",),
        read_notes=(USER_NOTE,),
    ),
    COMBINED,
)


# ---- files


def document(writer: Writer, values: Values) -> Values:
    """The YAML file's content: `speculative_config`, and the settings beside it."""
    beside = {}
    if writer.config.decoding_type in ("NGram", "Draft_Target"):
        beside["disable_overlap_scheduler"] = True
        writer.notes.append(
            "TensorRT-LLM's documentation switches the overlap scheduler off for it."
        )
    return {**beside, "speculative_config": values}


def _prepare(writer: Writer, values: Values) -> Values:
    config = writer.config
    kind = config.decoding_type
    drafter = tensorrt_llm_class(config.drafter) if kind == "User_Provided" else None
    if kind in DISAGGREGATED:
        writer.notes.append(
            "In prefill.yaml and decode.yaml, max_tokens_in_buffer must exceed the longest prompt."
        )
    return {
        "document": document(writer, values),
        "config_class": values[TYPE].replace("_", "") + CONFIG_CLASS,
        "drafter_class": drafter,
        "has_yaml": drafter is None,
        "is_disaggregated": kind in DISAGGREGATED,
        "is_legacy": kind in LEGACY,
        "option": "--config" if writer.version >= CURRENT else "--extra_llm_api_options",
    }


def parse(text: str, read_yaml: ReadYaml) -> tuple[Mapping[str, Any], str | None]:
    """A YAML file with `speculative_config`, the block alone, or a Python program with one."""
    expected = "A TensorRT-LLM file must have speculative_config with decoding_type"
    if f"{CONFIG_CLASS}(" in text:
        return _read_program(text)
    whole = read_mapping(text, read_yaml, expected)
    block = whole.get("speculative_config")
    values = whole if block is None else read_yaml(block) if isinstance(block, str) else block
    if not isinstance(values, Mapping) or not isinstance(values.get(TYPE), str):
        raise ConfigError(f"{expected}, got {text.strip()[:60]!r}.")
    values = {str(key): value for key, value in values.items()}
    if whole.get("backend") == "tensorrt" and values[TYPE] == "Eagle":
        values[TYPE] = EAGLE_1
    target = None if block is None else whole.get("model")
    return values, target if isinstance(target, str) else None


def _read_program(text: str) -> tuple[Values, str | None]:
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


def find_method(reader: Reader) -> table.Method:
    """The method of a `speculative_config`."""
    method = _method_by_name(reader)
    if reader.find("draft_len_schedule"):
        reader.notes.append("draft_len_schedule: the length for one request is drafted here.")
    is_dynamic = reader.find("dynamic_tree_max_topK") and not reader.find("eagle_choices")
    if method.decoding_type == "Eagle" and is_dynamic:
        reader.values = {**reader.values, "use_dynamic_tree": True}  # as the TensorRT backend did
    elif method.decoding_type == "Eagle3" and is_dynamic and not reader.find("use_dynamic_tree"):
        reader.notes.append("dynamic_tree_max_topK without use_dynamic_tree is a chain.")
        reader.used.add("dynamic_tree_max_topK")
    combines = isinstance(reader.values.get("sa_config"), Mapping) or (
        reader.find("use_sa_spec") and reader.typed("use_sa_spec", bool)
    )
    return COMBINED if combines and method.keys.issuperset(SUFFIX_FIRST) else method


def _method_by_name(reader: Reader) -> table.Method:
    """The method by name; Eagle is EAGLE-1/2 only with keys of the TensorRT backend."""
    name = str(reader.values[TYPE])
    model = str(reader.values.get("speculative_model", reader.values.get("speculative_model_dir")))
    if name == "Eagle" and (
        reader.find("eagle_choices", "num_eagle_layers") is None
        or "eagle3" in model.lower().replace("-", "").replace("_", "")
    ):
        name = "Eagle3"
    if name == "MTP" and reader.find("speculative_model", "speculative_model_dir"):
        return ASSISTANT
    return table.method_named(METHODS, TYPE, name)


ENGINE = load_engine(
    "trtllm",
    methods=METHODS,
    prepare=_prepare,
    parse=parse,
    find_method=find_method,
)
