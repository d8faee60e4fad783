"""vLLM: `--speculative-config` JSON, in a file, in YAML, or in a whole command.

What changed between releases, read from the releases' own vllm/config/speculative.py:

    0.11.1  suffix; every *_mtp method is spelled mtp
    0.16    draft_model works again (the V1 engine refused it until 0.14); parallel_drafting
    0.18    rejection_sample_method strict / probabilistic; gone again with 0.21
    0.20    dflash; the last with speculative_token_tree
    0.21    draft_sample_method (gumbel); 0.22 calls it probabilistic
    0.33    medusa and mlp_speculator are gone
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.interop import fields
from engine.interop.conversion import Reader, Writer
from engine.interop.fields import (
    IGNORED,
    Engine,
    Field,
    Loss,
    Method,
    Refusal,
    Values,
    const,
    drops_block_tree,
)
from engine.interop.handoff import File, ReadYaml, command, read_flags, read_mapping
from engine.interop.trees import children_per_depth, format_tree, parse_tree
from engine.tree import ChoiceTree

LENGTH = "num_speculative_tokens"
TREE = "speculative_token_tree"
KNOWN = frozenset(
    "method model num_speculative_tokens draft_tensor_parallel_size quantization kv_cache_dtype "
    "moe_backend attention_backend revision code_revision max_model_len enforce_eager "
    "prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth "
    "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
    "suffix_decoding_min_token_prob parallel_drafting use_heterogeneous_vocab draft_load_config "
    "num_speculative_tokens_per_batch_size rejection_sample_method synthetic_acceptance_rates "
    "synthetic_acceptance_length draft_sample_method disable_padded_drafter_batch "
    "disable_eagle_block_drop use_local_argmax_reduction enable_adaptive_verification "
    "index_share_for_mtp_iteration dspark_draft_topk disable_lookahead_block_hashes "
    "draft_lm_head_quantization xpress_topc fly_window_size fly_entropy_threshold "
    "fly_entropy_top_k speculative_token_tree disable_by_batch_size disable_logprobs".split()
)
"""Keys of any release from 0.10 to 0.33."""
ONE_LENGTH = "the draft's length follows the batch; set num_speculative_tokens for one request"
REFUSES = {
    "num_speculative_tokens_per_batch_size": Refusal(ONE_LENGTH),
    "rejection_sample_method": Refusal(
        "drafts are accepted by another rule", ("none", "standard", "strict", "probabilistic")
    ),
    "synthetic_acceptance_rates": Refusal("acceptance is made up, for testing a server"),
    "synthetic_acceptance_length": Refusal("acceptance is made up, for testing a server"),
    "enable_adaptive_verification": Refusal("it verifies less of a draft than was drafted"),
    "tensor_parallel_size": Refusal("the drafter's setting is draft_tensor_parallel_size"),
    "index_share_for_mtp_iteration": Refusal("MTP layers share what they attend to"),
}
PARALLEL = Refusal("one forward drafts a whole block (PARD, P-EAGLE), which its method cannot do")
NO_COUNTERPART = {
    "mlp_speculator": "an MLP speculator",
    "custom_class": "a proposer class of your own; register a drafter here instead",
    "extract_hidden_states": "no drafting at all, it writes training data",
}
DRAWN = {TREE: Refusal("it drafts a drawn tree, here a chain")}
FEWER = {"dspark_draft_topk": Refusal("its small head corrects few tokens only", ("0", "none"))}
ASSISTANT = "gemma4_mtp"
BLOCKS = ("dflash", "dspark")
"""Methods that draft in one forward whether the config says so or not."""
SAMPLED = (
    "When sampling, vLLM drafts the likeliest token; here EAGLE-1 draws its drafts. The law of the "
    "output is the same, acceptance differs."
)
POOL = 10_000
"""Requests that vLLM's global suffix tree keeps by default."""


def _read_ngram(reader: Reader) -> None:
    """Of the two lengths, a missing one is the other; vLLM takes 5 where both are missing."""
    given = [key for key in ("prompt_lookup_max", "prompt_lookup_min") if reader.values.get(key)]
    most, least = (reader.typed(given[i], int) if given else 5 for i in (0, -1))
    if least > most:
        raise ConfigError(
            f"prompt_lookup_min={least} is more than prompt_lookup_max={most}. Lower it."
        )
    reader.settings["max_matching_ngram_size"] = most
    if least > 1:
        reader.notes.append(f"Here matches go down to 1 token, there they end at {least}.")
    reader.used |= {"prompt_lookup_max", "prompt_lookup_min"}


def _read_suffix(reader: Reader) -> None:
    if reader.settings["use_global_pool"]:
        reader.notes.append(
            "Here the pool of earlier runs is limited in tokens, there in requests."
        )
    reader.settings.setdefault("max_draft_len", reader.settings.get("max_tree_depth", 24))


def _write_eagle(writer: Writer, values: Values) -> None:
    """A drawn tree as a token tree where the release has them, else as a chain."""
    if writer.config.use_dynamic_tree:
        values[LENGTH] = writer.chain_of_levels("vLLM drafts")
        return
    tree = ChoiceTree(writer.config.eagle_choices)
    writer.take("use_dynamic_tree")
    writer.notes.append(SAMPLED)
    takes_trees = not writer.at_least(0, 21) and tree != ChoiceTree.chain(tree.depth)
    if takes_trees and children_per_depth(tree) is not None:
        writer.take("eagle_choices")
        values |= {LENGTH: len(tree), TREE: format_tree(tree, "tuples")}
        writer.notes.append("vLLM 0.21 removed token trees; stay on 0.20 or older for this one.")
        return
    values[LENGTH] = writer.chain_of_tree("eagle_choices", "vLLM runs EAGLE")
    if takes_trees:
        writer.notes.append(
            "vLLM 0.20 takes trees in which every node of a depth has equally many children, e.g. "
            f"{format_tree(parse_tree('[1, 2, 2]'), 'tuples')}; this one is not of that kind."
        )


def _read_eagle(reader: Reader) -> None:
    given = reader.values.get(TREE)
    tree = parse_tree(str(given)) if given else ChoiceTree.chain(reader.typed(LENGTH, int))
    reader.settings["eagle_choices"] = tree.paths
    reader.used |= {LENGTH, TREE}


RULES = (
    "vLLM copies what followed the longest match in the request's own text: the pool rules "
    "(lookup, is_keep_all, is_use_oldest, is_public_pool) are dropped; where a pattern occurs more "
    "than once its pick may be another one."
)


def _sampled(theirs: str, word: str, **releases: Any) -> Field:
    """Whether drafts are sampled and verified with their probabilities, as a word."""
    ours = {"probabilistic": True, "gumbel": True, "greedy": False, "strict": False}

    def back(given: str) -> object:
        return ours.get(given, IGNORED)

    out = {True: word}.get
    return Field("use_draft_probs", theirs, out=out, back=back, kind=str, absent=False, **releases)


WEIGHTS = fields.weights("model")
LENGTH_ROW = Field("max_draft_len", LENGTH)
METHODS = (
    Method(
        "Draft_Target",
        "draft_model",
        (
            WEIGHTS,
            LENGTH_ROW,
            Field(
                "vocabulary",
                "use_heterogeneous_vocab",
                out=lambda kind: kind != "same" or None,
                back=lambda on: "intersection" if on else "same",
                kind=bool,
                since=(0, 32),
            ),
            Loss(
                "",
                "vocabulary=text becomes use_heterogeneous_vocab: in vLLM the draft model says "
                "only tokens that both have; acceptance may fall.",
                lambda config: config.vocabulary == "text",
                since=(0, 32),
            ),
            _sampled("draft_sample_method", "probabilistic", since=(0, 22)),
            _sampled("draft_sample_method", "gumbel", since=(0, 21), until=(0, 22)),
            _sampled("rejection_sample_method", "probabilistic", since=(0, 18), until=(0, 21)),
            fields.drops_draft_probs(
                ": when sampling, this release drafts the likeliest token and accepts it with the "
                "target's probability; acceptance falls with the temperature.",
                until=(0, 18),
            ),
        ),
        since=(0, 15),
        outside=(
            "vLLM's V1 engine refuses draft models until 0.14.",
            "Use 0.16 or newer, or NGram.",
        ),
        refuses=DRAWN,
    ),
    Method(
        "NGram",
        "ngram",
        (
            LENGTH_ROW,
            const("prompt_lookup_min", 1),
            Field("max_matching_ngram_size", "prompt_lookup_max", back=None),
            Loss(f"lookup {fields.POOL_RULES}", RULES),
        ),
        also=("ngram_gpu",),
        takes=("prompt_lookup_max", "prompt_lookup_min"),
        read=_read_ngram,
    ),
    Method(
        "Suffix",
        "suffix",
        (
            LENGTH_ROW,
            *(
                Field(name, f"suffix_decoding_{name}")
                for name in ("max_tree_depth", "max_spec_factor", "min_token_prob")
            ),
            Field(
                "use_global_pool",
                "suffix_decoding_max_cached_requests",
                out=lambda pooled: POOL if pooled else 0,
                back=lambda requests: requests > 0,
                kind=int,
                absent=True,
            ),
        ),
        notes=("vLLM needs the package arctic-inference for it: pip install arctic-inference.",),
        read=_read_suffix,
    ),
    Method(
        "Medusa",
        "medusa",
        (
            WEIGHTS,
            Field(
                "medusa_choices",
                LENGTH,
                write=lambda writer: writer.chain_of_tree("medusa_choices", "vLLM runs Medusa"),
                back=lambda length: ChoiceTree.chain(length).paths,
                kind=int,
            ),
        ),
        until=(0, 33),
        outside=(
            "vLLM 0.33 removed Medusa.",
            "vLLM 0.32 runs it as a chain: --engine-version 0.32.",
        ),
    ),
    Method(
        "Eagle",
        "eagle",
        (WEIGHTS,),
        takes=(LENGTH, TREE),
        write=_write_eagle,
        read=_read_eagle,
    ),
    Method(
        "Eagle3",
        "eagle3",
        (WEIGHTS, Field("max_draft_len", LENGTH, write=lambda w: w.chain_of_levels("vLLM drafts"))),
        refuses=DRAWN,
    ),
    *(
        Method(
            ours,
            theirs,
            (WEIGHTS, LENGTH_ROW, const("parallel_drafting", True), drops_block_tree("vLLM")),
            since=(0, 16),
        )
        for ours, theirs in (("PARD", "draft_model"), ("P_EAGLE", "eagle3"))
    ),
    Method("MTP", "mtp", (LENGTH_ROW,), refuses=DRAWN),
    Method(
        "MTP_Assistant",
        ASSISTANT,
        (WEIGHTS, LENGTH_ROW),
        since=(0, 21),
        notes=("vLLM's guide spells the method mtp; the name of the assistant makes it this one.",),
    ),
    *(
        Method(
            ours,
            ours.lower(),
            (
                WEIGHTS,
                Field("max_draft_len", LENGTH, needed=fields.BLOCK),
                drops_block_tree("vLLM"),
            ),
            since=since,
            refuses=refuses,
        )
        for ours, since, refuses in (("DFlash", (0, 20), {}), ("DSpark", (0, 32), FEWER))
    ),
)


def _files(writer: Writer, values: Values) -> tuple[File, ...]:
    serve = f"vllm serve {shlex.quote(writer.target)}"
    if not values:
        return (File("serve.sh", command(serve), "bash"),)
    config = ("--speculative-config", json.dumps(values, separators=(",", ":")))
    tree = [("--attention-backend", "TREE_ATTN")] if TREE in values else []
    return (
        File("speculative_config.json", json.dumps(values, indent=2) + "\n", "json"),
        File("serve.sh", command(serve, config, *tree), "bash"),
    )


def _parse(text: str, read_yaml: ReadYaml) -> tuple[Mapping[str, Any], str | None]:
    """The speculative config as plain data, and the target if the text names it."""
    if not text.lstrip().startswith("{") and "--spec" in text:
        return _parse_command(text, read_yaml)
    return read_mapping(
        text,
        read_yaml,
        ("speculative_config", "speculative-config"),
        'A vLLM config must be an object such as {"method": "ngram", …}, or a command with '
        "--speculative-config",
    )


def _parse_command(text: str, read_yaml: ReadYaml) -> tuple[Mapping[str, Any], str | None]:
    flags = read_flags(text)
    given = flags.first("--speculative-config", "--spec-config")
    values = read_yaml(given) if given else {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"--speculative-config must be a JSON object, got {given!r:.80}.")
    merged = {str(key): value for key, value in values.items()}
    for name, value in flags.options.items():
        head, dot, key = name.partition("--speculative-config.")
        merged |= {key.replace("-", "_"): read_yaml(value)} if dot and not head else {}
    if not merged:
        raise ConfigError("The command has no --speculative-config with a JSON object.")
    served = (
        flags.arguments[flags.arguments.index("serve") + 1 :] if "serve" in flags.arguments else ()
    )
    return merged, flags.first("--model") or (served[0] if served else None)


def _pick(reader: Reader) -> Method:
    """The method, inferred as vLLM does where it is not named."""
    name = _name(reader)
    found = _parallel(reader, name) or fields.named(METHODS, name)
    if found is None:
        what = f": {NO_COUNTERPART[name]}" if name in NO_COUNTERPART else ""
        raise ConfigError(f"vLLM's method {name!r:.40} has no counterpart here{what}.")
    if found.ours != "Suffix" and reader.find(LENGTH, TREE) is None:
        raise ConfigError(f"{LENGTH} is missing. Add it: how many tokens to draft.")
    if reader.find("method") is None:
        reader.notes.append(f"No method is named; vLLM's own rules make it {name}.")
    return found


def _parallel(reader: Reader, name: str) -> Method | None:
    """The method of that name that drafts in one forward, if the config asks for it."""
    key = "parallel_drafting"
    if name in BLOCKS or not reader.find(key) or not reader.typed(key, bool):
        return None
    found = next((m for m in METHODS if m.theirs == name and key in m.keys), None)
    if found is None:
        PARALLEL.check("vLLM", key, True)
    return found


def _name(reader: Reader) -> str:
    if reader.find("method"):
        method = str(reader.values["method"]).strip("[]")
        if "assistant" in str(reader.values.get("model", "")).lower() and method == "mtp":
            return ASSISTANT
        return "mtp" if method.endswith("_mtp") and method != ASSISTANT else method
    if reader.find("model") is None:
        raise ConfigError("The config names neither method nor model. Add one of them.")
    model = str(reader.values["model"]).lower()
    if model.strip("[]") == "ngram":
        reader.used.add("model")
        return "ngram"
    signs = ("eagle3", "dflash", "dspark", "medusa")
    guesses = {"eagle-": "eagle", **{sign: sign for sign in signs}}
    return next((name for sign, name in guesses.items() if sign in model), "draft_model")


ENGINE = Engine(
    name="vllm",
    title="vLLM",
    versions=(
        ("0.33", "the newest known here"),
        ("0.32", "the last with Medusa, as a chain"),
        ("0.20", "the last with token trees"),
        ("0.16", "the first V1 release with draft models"),
        ("0.11.1", "the first with suffix decoding"),
    ),
    trees="chains only; token trees until 0.20",
    key="method",
    plain="--speculative-config",
    drafters='Write a proposer class for vLLM: {"method": "custom_class", "model": "module.Class"} '
    "(0.22 and newer).",
    methods=METHODS,
    files=_files,
    parse=_parse,
    pick=_pick,
    drawn="draft_sample_method",
    known=KNOWN,
    refuses=REFUSES,
    reasons={"max_total_draft_tokens": "It only matters with use_tree_spec."},
    hybrid=(
        Loss(
            "",
            "With this target's recurrent layers, prefix caching and drafts go together only under "
            "--mamba-cache-mode align (vllm#39809).",
        ),
        Loss(
            "",
            "N-gram drafts have damaged the text of targets with gated delta layers (vllm#39273, "
            "open); compare a greedy text with plain decoding first.",
            lambda config: config.decoding_type == "NGram",
        ),
    ),
)
