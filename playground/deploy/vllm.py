"""vLLM: `--speculative-config` JSON, in a file, in YAML, or in a whole command.

Newer releases also take --spec-method, --spec-model and --spec-tokens in its place. Token trees are
gone since 0.21, Medusa since 0.33. Source: vllm/config/speculative.py of each release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.tree import ChoiceTree
from playground.deploy import table
from playground.deploy.conversion import Reader, Writer
from playground.deploy.files import ReadYaml, read_flags, read_mapping
from playground.deploy.table import Codec, DroppedSetting, Field, load_engine, method

LENGTH = "num_speculative_tokens"
LOOKUP_KEYS = ("prompt_lookup_max", "prompt_lookup_min")
PARALLEL = "parallel_drafting"
ASSISTANT = "gemma4_mtp"
BLOCKS = ("dflash", "dspark")
"""Methods that always draft in one forward, regardless of `parallel_drafting`."""
CONFIG_OPTIONS = ("speculative_config", "spec_config", "sc")
SHORT_OPTIONS = {"spec_method": "method", "spec_model": "model", "spec_tokens": LENGTH}
"""Options of the server, without dashes, for the whole config and for single keys."""
EXPECTED = (
    'A vLLM config must be an object such as {"method": "ngram", …}, or a command with '
    "--speculative-config"
)


# ---- the table


def _read_ngram(reader: Reader) -> None:
    """A missing length equals the other; if both are missing, vLLM uses 5."""
    keys = [key for key in LOOKUP_KEYS if reader.find(key)]
    most, least = (reader.typed(keys[i], int) if keys else 5 for i in (0, -1))
    if least > most:
        raise ConfigError(
            f"prompt_lookup_min={least} is more than prompt_lookup_max={most}. Lower it."
        )
    reader.settings["max_matching_ngram_size"] = most
    if least > 1:
        reader.notes.append(f"Here, matches may be as short as 1 token; in vLLM, {least}.")
    reader.used.update(LOOKUP_KEYS)


def _read_suffix(reader: Reader) -> None:
    reader.settings.setdefault("max_draft_len", reader.settings.get("max_tree_depth", 24))


def _chain(length: int) -> object:
    return ChoiceTree.chain(length).paths


def _eagle_len(writer: Writer) -> int:
    if writer.config.use_dynamic_tree:
        return int(writer.take("max_draft_len"))
    return writer.chain_of_tree("eagle_choices", "vLLM runs EAGLE")


WEIGHTS = table.weights("model")
LENGTH_ROW = Field("max_draft_len", LENGTH)
BLOCK_LENGTH = Field("max_draft_len", LENGTH, requirement=table.BLOCK)
ONE_FORWARD = table.const(PARALLEL, True)
ALL_TOKENS = table.refusals({"dspark_draft_topk=0|none": "its Markov head corrects few tokens"})
DRAFT_MODEL = (
    WEIGHTS,
    LENGTH_ROW,
    Field(
        "vocabulary",
        "use_heterogeneous_vocab",
        encode=lambda kind: kind != "same" or None,
        decode=lambda on: "intersection" if on else "same",
        kind=bool,
        since=(0, 32),
    ),
    DroppedSetting(
        "",
        "vocabulary=text becomes use_heterogeneous_vocab: in vLLM the draft model proposes only "
        "tokens of both vocabularies; acceptance may fall.",
        lambda config: config.vocabulary == "text",
        since=(0, 32),
    ),
    table.sampled("draft_sample_method", "probabilistic"),
    table.sampled("rejection_sample_method"),
)
NGRAM = (
    table.const("prompt_lookup_min", 1),
    Field("max_matching_ngram_size", "prompt_lookup_max", decode=None),
    table.drops_pool("vLLM copies what followed the longest match in the request's own text"),
    Codec(LOOKUP_KEYS, read=_read_ngram),
)
POOL_NOTE = "Here the pool of earlier runs is limited in tokens, not in requests."
SUFFIX = (
    *(
        Field(name, f"suffix_decoding_{name}")
        for name in ("max_tree_depth", "max_spec_factor", "min_token_prob")
    ),
    Field(
        "use_global_pool",
        "suffix_decoding_max_cached_requests",
        encode=lambda pooled: 10_000 if pooled else 0,  # vLLM's own default
        decode=lambda requests: requests > 0,
        kind=int,
        default=True,
        note=POOL_NOTE,
        read_note=POOL_NOTE,
    ),
    Codec((), read=_read_suffix),
)
MEDUSA_CHAIN = Field(
    "medusa_choices",
    LENGTH,
    build=lambda writer: writer.chain_of_tree("medusa_choices", "vLLM runs Medusa"),
    decode=_chain,
    kind=int,
)
EAGLE = Field("eagle_choices", LENGTH, build=_eagle_len, decode=_chain, kind=int)
NO_MEDUSA = ("vLLM 0.33 removed Medusa.", "vLLM 0.32 runs it as a chain: --engine-version 0.32.")
ARCTIC = "vLLM needs the package arctic-inference for it: pip install arctic-inference."
BLOCK_RULE = (
    "Sampled drafts are verified as one block here (verification: block); in vLLM, from 0.32 on, "
    "with rejection_sample_method block."
)
GREEDY = (
    "When sampling, vLLM drafts the most probable token; here EAGLE-1 samples. The law of the "
    "output is the same, acceptance differs."
)
SPELLING = "vLLM's guide spells the method mtp; the name of the assistant makes it this one."
METHODS: tuple[table.Method, ...] = (
    method("Draft_Target", "draft_model", *DRAFT_MODEL, notes=(BLOCK_RULE,)),
    method("NGram", "ngram", LENGTH_ROW, *NGRAM, aliases=("ngram_gpu",)),
    method("Suffix", "suffix", LENGTH_ROW, *SUFFIX, notes=(ARCTIC,)),
    method("Medusa", "medusa", WEIGHTS, MEDUSA_CHAIN, until=(0, 33), removal=NO_MEDUSA),
    method("Eagle", "eagle", WEIGHTS, EAGLE, notes=(GREEDY,)),
    method("Eagle3", "eagle3", WEIGHTS, LENGTH_ROW),
    method("PARD", "draft_model", WEIGHTS, LENGTH_ROW, ONE_FORWARD),
    method("P_EAGLE", "eagle3", WEIGHTS, LENGTH_ROW, ONE_FORWARD),
    method("MTP", "mtp", LENGTH_ROW),
    method("MTP_Assistant", ASSISTANT, WEIGHTS, LENGTH_ROW, notes=(SPELLING,)),
    method("DFlash", "dflash", WEIGHTS, BLOCK_LENGTH),
    method("DSpark", "dspark", WEIGHTS, BLOCK_LENGTH, *ALL_TOKENS, since=(0, 32)),
)


# ---- files


def _parse(text: str, read_yaml: ReadYaml) -> tuple[Mapping[str, Any], str | None]:
    """The speculative config as plain data, and the target if the text names it."""
    flags = read_flags("" if text.lstrip().startswith("{") else text)
    options: Mapping[str, Any] = flags.options
    if not any(map(_drafting_option, options)):
        options = read_mapping(text, read_yaml, EXPECTED)
    drafting = {key: value for key, value in options.items() if _drafting_option(key)}
    if not drafting:
        return {key.replace("-", "_"): value for key, value in options.items()}, None
    words = flags.arguments
    served = words[words.index("serve") + 1 :] if "serve" in words else ()
    target = options.get("--model", options.get("model", next(iter(served), None)))
    return _config_of_options(drafting, read_yaml), target if isinstance(target, str) else None


def _drafting_option(name: str) -> str:
    """The name of a server option that affects drafting, without dashes and key; else ""."""
    head = name.lstrip("-").replace("-", "_").partition(".")[0]
    return head if head in (*CONFIG_OPTIONS, *SHORT_OPTIONS) else ""


def _config_of_options(options: Mapping[str, Any], read_yaml: ReadYaml) -> dict[str, Any]:
    """The config in a server's options: as a whole, by dotted keys, or by short options."""
    values: dict[str, Any] = {}
    for name, value in options.items():
        option, key = _drafting_option(name), name.partition(".")[2]
        value = read_yaml(value) if isinstance(value, str) else value
        if option in SHORT_OPTIONS or key:
            values[SHORT_OPTIONS.get(option, key)] = value
        elif isinstance(value, Mapping):
            values |= {str(k): v for k, v in value.items()}
        else:
            raise ConfigError(f"--speculative-config must be a JSON object, got {value!r:.80}.")
    return {key.replace("-", "_"): value for key, value in values.items()}


def _find_method(reader: Reader) -> table.Method:
    """The method, inferred by vLLM's rules if it is not named."""
    name, methods, what = _method_name(reader), METHODS, "method"
    if name not in BLOCKS and reader.find(PARALLEL) and reader.typed(PARALLEL, bool):
        methods = tuple(m for m in METHODS if PARALLEL in m.keys)
        what = f"method beside {PARALLEL}"
    counterpart = table.method_named(methods, what, name)
    if name != "suffix" and reader.find(LENGTH) is None:
        raise ConfigError(f"{LENGTH} is missing. Add it: how many tokens to draft.")
    if reader.find("method") is None:
        reader.notes.append(f"No method is named; vLLM's own rules make it {name}.")
    return counterpart


def _method_name(reader: Reader) -> str:
    model = str(reader.values.get("model") or "").lower()
    if reader.find("method"):
        name = str(reader.values["method"]).strip("[]")
        if "assistant" in model and name == "mtp":
            return ASSISTANT
        if "xpress" in model and name == "dflash":
            return "xpress"
        return "mtp" if name.endswith("_mtp") and name != ASSISTANT else name
    if reader.find("model") is None:
        raise ConfigError("The config names neither method nor model. Add one of them.")
    if model.strip("[]") == "ngram":
        reader.used.add("model")
        return "ngram"
    names = {"eagle-": "eagle", **{s: s for s in ("eagle3", "xpress", *BLOCKS, "medusa")}}
    return next((name for part, name in names.items() if part in model), "draft_model")


ENGINE = load_engine(
    "vllm",
    methods=METHODS,
    parse=_parse,
    find_method=_find_method,
)
