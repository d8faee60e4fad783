"""TensorRT-LLM: the `speculative_config` block of its YAML file.

Two lines of releases: from 1.3 on only the PyTorch backend is left, with NGram, SA, Draft_Target,
Eagle3, MTP, PARD, DFlash and DSpark. Until 1.2 there was the TensorRT backend beside it, with
Medusa, Lookahead and EAGLE-1/2 and their choice trees. Source: tensorrt_llm/llmapi/llm_args.py of
both lines.

A dynamic tree must satisfy max_draft_len ≤ max_total_draft_tokens ≤ topK · max_draft_len there.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.interop import fields, serving, trtllm_legacy
from engine.interop.conversion import DYNAMIC, Reader, Writer
from engine.interop.fields import (
    IGNORED,
    Engine,
    Field,
    Loss,
    Method,
    Refusal,
    Values,
    const,
    same,
)
from engine.interop.handoff import File, ReadYaml, command, read_mapping, yaml_block
from engine.interop.trtllm_legacy import CURRENT, EAGLE_KEYS, TYPICAL, WEIGHTS

TYPE = "decoding_type"
LEGACY = tuple(method.theirs for method in trtllm_legacy.METHODS)
SUFFIX_SECOND = "sa_config use_sa_spec sa_spec_threshold".split()
"""Suffix lookup before another method: as the code has it, and as the guide of 1.3 has it."""
COMMON = frozenset(
    "decoding_type max_draft_len max_total_draft_tokens speculative_model speculative_model_dir "
    "max_concurrency draft_len_schedule load_format acceptance_rate_window_size "
    "acceptance_rate_threshold use_rejection_sampling advanced_sampling_mode enable_penalty "
    "allow_advanced_sampling acceptance_window acceptance_length_threshold".split()
)
REFUSES = dict.fromkeys(
    ("acceptance_rate_threshold", "acceptance_length_threshold"),
    Refusal("drafting ends for good once less is accepted", ("0", "0.0", "none")),
)
NO_TREE = {"eagle_choices": Refusal("EAGLE-3 drafts a drawn tree, here a chain or a dynamic one")}
RELAXED = "relaxed_topk relaxed_delta begin_thinking_phase_token end_thinking_phase_token"
SUFFIX_ONLY = "max_spec_factor min_token_prob max_tree_depth"


# ---- what no row can say


def _write_draft_target(writer: Writer, values: Values) -> None:
    if not writer.at_least(1, 2):
        values[TYPE] = "DraftTarget"
    elif not writer.at_least(*CURRENT):
        writer.notes.append("Some 1.2 builds spell the type DraftTarget.")
    if "use_rejection_sampling" in values:
        writer.notes.append(
            "use_rejection_sampling is a prototype feature; greedy requests ignore it."
        )


def _for_one(schedule: dict[Any, Any]) -> object:
    """The draft length that a schedule by batch size has for one request."""
    try:
        return {int(size): int(length) for size, length in schedule.items()}[1]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"draft_len_schedule must map batch sizes, 1 among them, to lengths, got "
            f"{schedule!r:.80}."
        ) from error


def _write_eagle3(writer: Writer, values: Values) -> None:
    """A dynamic tree within TensorRT-LLM's bounds; every change is told."""
    if not writer.config.use_dynamic_tree:
        return
    names = ("max_draft_len", "max_total_draft_tokens", "dynamic_tree_max_topK")
    levels, keep, topk = (values[name] for name in names)
    if keep > topk * levels:
        writer.warnings.append(
            f"max_total_draft_tokens is lowered from {keep} to {topk * levels}: TensorRT-LLM takes "
            f"at most dynamic_tree_max_topK × max_draft_len = {topk} × {levels}. MAT may fall."
        )
    elif keep < levels:
        writer.warnings.append(
            f"max_draft_len is lowered from {levels} to {keep}: TensorRT-LLM takes no fewer nodes "
            "than levels. The trees stay the same, for one of so few nodes is never deeper."
        )
    values["max_total_draft_tokens"] = min(keep, topk * levels)
    values["max_draft_len"] = min(levels, keep)
    writer.notes.append("Dynamic trees do not run on targets with sliding-window or MLA attention.")


def _read_eagle3(reader: Reader) -> None:
    settings = reader.settings
    if reader.values.get(TYPE) == "Eagle":
        reader.notes.append("Eagle on the PyTorch backend is EAGLE-3.")
    if settings.get("use_dynamic_tree") and "max_total_draft_tokens" not in settings:
        topk, levels = settings.get("dynamic_tree_max_topK", 10), settings.get("max_draft_len", 5)
        settings["max_total_draft_tokens"] = topk * levels


def _write_combined(writer: Writer, values: Values) -> None:
    """Suffix lookup before Eagle3 or MTP is `sa_config`."""
    first, second = writer.take("retrieval"), writer.take("model")
    fits = first.decoding_type == "Suffix" and second.decoding_type in ("Eagle3", "MTP")
    if not writer.at_least(*CURRENT) or not fits:
        raise fields.NotTakenError(
            f"TensorRT-LLM cannot combine {first.decoding_type} with {second.decoding_type}.",
            "From 1.3 on it combines Suffix with Eagle3 or MTP (sa_config).",
        )
    writer.warnings.append(
        f"sa_config drafts as many tokens as {second.decoding_type} does, not "
        f"{first.max_draft_len}, and knows no max_spec_factor, min_token_prob or max_tree_depth: "
        "these settings of Suffix are dropped."
    )
    look_up, model = writer.part(first), writer.part(second)
    values |= model.values()
    pool = look_up.take("use_global_pool")
    values["sa_config"] = {"threshold": writer.take("min_match_len"), "enable_global_pool": pool}
    look_up.used.update(["max_draft_len", *SUFFIX_ONLY.split()])
    look_up.finish("Suffix: ")
    model.finish(f"{second.decoding_type}: ")


def _read_combined(reader: Reader) -> None:
    reader.notes.append("Suffix lookup before the method (sa_config) is Combined here.")
    named = reader.values.get("sa_config")
    extra = dict(named) if isinstance(named, Mapping) else {}
    model = reader.read(_named(reader))
    pool = {"decoding_type": "Suffix", "use_global_pool": extra.pop("enable_global_pool", False)}
    matched = extra.pop("threshold", reader.values.get("sa_spec_threshold") or 4)
    if extra:
        raise ConfigError(f"TensorRT-LLM has no setting sa_config.{next(iter(extra))!s:.40}.")
    reader.settings = {"retrieval": pool, "model": model, "min_match_len": matched}
    reader.used.update(SUFFIX_SECOND)


# ---- the table


def _switch(name: str, theirs: str = "", **rest: Any) -> Field:
    return Field(name, theirs or name, out=lambda on: on or None, **rest)


SCHEDULE = Field(
    "max_draft_len", "draft_len_schedule", write=lambda writer: None, back=_for_one, kind=dict
)
NO_LENGTH = "TensorRT-LLM asks for max_draft_len, which is missing here: add it before serving."
LENGTH = (Field("max_draft_len", "max_draft_len", note=NO_LENGTH), SCHEDULE)
VANILLA = Field(
    "",
    "use_mtp_vanilla",
    write=lambda writer: None,
    back=lambda on: IGNORED if on else None,
    kind=bool,
    note="here a layer drafts again with its one cache, there by copies of itself.",
)
CAPTURED = Field("eagle3_layers_to_capture", "eagle3_layers_to_capture", out=list)
COMBINED = Method("Combined", "", write=_write_combined, read=_read_combined)
METHODS = (
    Method(
        "Draft_Target",
        "Draft_Target",
        (
            *LENGTH,
            *WEIGHTS,
            _switch("use_draft_probs", "use_rejection_sampling", since=CURRENT, absent=False),
            fields.drops_draft_probs(
                ": this release accepts a drafted token only where the target draws the same one; "
                "when sampling, acceptance falls.",
                until=CURRENT,
            ),
        ),
        also=("DraftTarget",),
        write=_write_draft_target,
    ),
    Method(
        "NGram", "NGram", (*LENGTH, *same("max_matching_ngram_size", *fields.POOL_RULES.split()))
    ),
    Method(
        "Suffix",
        "SA",
        (
            *LENGTH,
            const("max_matching_ngram_size", -1),
            Field("use_global_pool", "enable_global_pool"),
            Loss(
                SUFFIX_ONLY,
                "SA copies {c.max_draft_len} tokens after the longest match, however long it is: "
                "max_spec_factor, min_token_prob and max_tree_depth are dropped.",
            ),
        ),
        since=CURRENT,
        read_notes=(
            "SA copies max_draft_len tokens always; Suffix here as long as it is confident.",
        ),
        known=frozenset({"global_pool_size"}),
        refuses={"max_matching_ngram_size": Refusal("n-grams of one size are looked up", ("-1",))},
    ),
    *trtllm_legacy.METHODS,
    Method(
        "Eagle3",
        "Eagle3",
        (
            *LENGTH,
            *WEIGHTS,
            _switch("use_dynamic_tree"),
            *same(*DYNAMIC.split(), given="use_dynamic_tree"),
            CAPTURED,
        ),
        since=CURRENT,
        takes=tuple(SUFFIX_SECOND),
        known=EAGLE_KEYS,
        refuses=TYPICAL | NO_TREE,
        write=_write_eagle3,
        read=_read_eagle3,
    ),
    Method(
        "Eagle3",
        "Eagle",
        (
            Field(
                "max_draft_len",
                "max_draft_len",
                write=lambda w: w.chain_of_levels("The PyTorch backend drafts until 1.2"),
            ),
            *WEIGHTS,
            CAPTURED,
        ),
        until=CURRENT,
    ),
    Method(
        "MTP",
        "MTP",
        (
            Field("max_draft_len", "max_draft_len", since=CURRENT),
            SCHEDULE,
            Field("max_draft_len", "num_nextn_predict_layers", until=CURRENT),
            _switch("use_relaxed_acceptance_for_thinking"),
            *same(*RELAXED.split(), given="use_relaxed_acceptance_for_thinking"),
            VANILLA,
        ),
        takes=tuple(SUFFIX_SECOND),
        known=frozenset({"mtp_eagle_one_model"}),
        refuses=dict.fromkeys(
            ("use_dynamic_tree", "dynamic_tree_max_topK"),
            Refusal("MTP layers draft a tree, here a chain"),
        ),
    ),
    Method(
        "PARD",
        "PARD",
        (*LENGTH, *WEIGHTS, *same("mask_token_id"), fields.drops_block_tree("TensorRT-LLM")),
        since=CURRENT,
    ),
    *(
        Method(
            name,
            name,
            (
                Field("max_draft_len", "max_draft_len", needed=fields.BLOCK, note=NO_LENGTH),
                SCHEDULE,
                *WEIGHTS,
                *same("mask_token_id"),
                Field("target_layer_ids", "target_layer_ids", out=list),
                fields.drops_block_tree("TensorRT-LLM"),
            ),
            since=CURRENT,
            known=frozenset({"attention_backend", *checkpoint}),
        )
        for name, checkpoint in (
            ("DFlash", ()),
            ("DSpark", ("block_size", "markov_rank", "markov_head_type")),
        )
    ),
    COMBINED,
)
READ_ONLY = (
    # Source: tensorrt_llm/_torch/speculative/auto_heuristic.py
    Method(
        "NGram",
        "AUTO",
        fixed={"max_draft_len": 5, "max_matching_ngram_size": 3},
        read_notes=("AUTO is NGram, with these sizes for up to 4 requests at once.",),
    ),
    Method(
        "User_Provided",
        "User_Provided",
        same("max_draft_len", "drafter"),
        also=("UserProvided",),
        read_notes=("The drafter itself is named at the start: --drafter module:Class.",),
        known=frozenset({"resource_manager"}),
    ),
)
"""What a file may say and no export does."""


def document(writer: Writer, values: Values) -> Values:
    """The YAML file's content: `speculative_config`, and what must stand beside it."""
    if not values:
        return {}
    beside = {}
    if writer.config.decoding_type in ("NGram", "Draft_Target"):
        beside["disable_overlap_scheduler"] = True
        writer.notes.append(
            "TensorRT-LLM's documentation switches the overlap scheduler off for it."
        )
    return {**beside, "speculative_config": values}


def _files(writer: Writer, values: Values) -> tuple[File, ...]:
    serve = f"trtllm-serve {shlex.quote(writer.target)}"
    if not values:
        plain = File("serve.sh", command(serve, "--backend pytorch"), "bash")
        return plain, serving.benchmark(writer.target)
    kind = writer.config.decoding_type
    backend = "tensorrt" if kind in LEGACY else "pytorch"
    option = "--config" if writer.at_least(*CURRENT) else "--extra_llm_api_options"
    config, whole = (option, "config.yaml"), document(writer, values)
    files = [
        File("config.yaml", yaml_block(whole), "yaml"),
        File("serve.sh", command(serve, f"--backend {backend}", config), "bash"),
    ]
    if backend == "pytorch":
        files.append(serving.benchmark(writer.target, config))
    if kind in serving.DISAGGREGATED:
        writer.notes.append(serving.TRANSFER_NOTE)
        files += serving.disaggregated(writer.target, whole, option)
    return tuple(files)


def parse(text: str, read_yaml: ReadYaml) -> tuple[Mapping[str, Any], str | None]:
    """A YAML file with `speculative_config`, or the block alone."""
    expected = "A TensorRT-LLM file must have speculative_config with decoding_type"
    values, target = read_mapping(text, read_yaml, ("speculative_config",), expected)
    if not isinstance(values.get(TYPE), str):
        raise ConfigError(f"{expected}, got {text.strip()[:60]!r}.")
    return values, target


def pick(reader: Reader) -> Method:
    """The method of a `speculative_config`."""
    method = _named(reader)
    if reader.find("draft_len_schedule"):
        reader.notes.append("draft_len_schedule: the length for one request is drafted here.")
    grown = reader.find("dynamic_tree_max_topK") and not reader.find("eagle_choices")
    if method.ours in ("Eagle", "Eagle3") and grown:
        reader.values = {**reader.values, "use_dynamic_tree": True}  # as TensorRT-LLM takes it
    combines = isinstance(reader.values.get("sa_config"), Mapping) or (
        reader.find("use_sa_spec") and reader.typed("use_sa_spec", bool)
    )
    return COMBINED if combines and set(SUFFIX_SECOND) <= set(method.takes) else method


def _named(reader: Reader) -> Method:
    """By name; Eagle means EAGLE-1/2 only with what the TensorRT backend alone had."""
    name = str(reader.values[TYPE])
    model = str(reader.values.get("speculative_model", reader.values.get("speculative_model_dir")))
    if name == "Eagle" and (
        reader.find("eagle_choices", "num_eagle_layers") is None
        or "eagle3" in model.lower().replace("-", "").replace("_", "")
    ):
        name = "Eagle3"
    return fields.require_named((*METHODS, *READ_ONLY), TYPE, name)


ENGINE = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    versions=(
        ("1.3", "PyTorch backend only"),
        ("1.2", "the last with the TensorRT backend: Medusa, Lookahead, EAGLE-1/2"),
        ("1.0", "1.0 and 1.1"),
    ),
    trees="dynamic trees for EAGLE-3; drawn trees until 1.2",
    key=TYPE,
    plain="speculative_config",
    drafters="User_Provided there takes a Drafter object from Python, not from YAML.",
    methods=METHODS,
    refused={
        "ReDrafter": (
            "TensorRT-LLM's LLM API never had ReDrafter; it was an engine built for Triton.",
            "Export to Triton for TensorRT-LLM 1.2, or use EAGLE-3 heads.",
        ),
        "MTP_Assistant": (
            "TensorRT-LLM 1.3 has no Gemma 4 assistant; its sources have one since (#15833).",
            "vLLM and SGLang run it.",
        ),
    },
    files=_files,
    parse=parse,
    pick=pick,
    drawn="use_rejection_sampling",
    known=COMMON,
    refuses=REFUSES,
    reasons={
        "lookup": "TensorRT-LLM looks up by its pool's rules (lookup=pool here).",
        "relaxed_rule": "TensorRT-LLM compares probabilities, whatever its guide says.",
    },
)
