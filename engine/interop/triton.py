"""Triton: config.pbtxt parameters of the engine backend, model.yaml of the LLM API backend.

The engine backend (inflight_batcher_llm) went away in July 2026 with TensorRT-LLM's TensorRT
backend; containers up to TensorRT-LLM 1.2 have it. Its parameters name the decoding mode and the
choice tree in braces; the weights are built into the engine before. What replaces it serves
through TensorRT-LLM's LLM API and takes the same `speculative_config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.interop import trtllm
from engine.interop.conversion import Reader, Writer
from engine.interop.fields import Engine, Field, Method, NotTakenError, Values, const
from engine.interop.handoff import File, ReadYaml, command, yaml_block
from engine.interop.trees import format_tree, is_pbtxt, parse_tree, pbtxt_parameter
from engine.tree import ChoiceTree

MODE = "decoding_mode"
WHERE = "all_models/llmapi/tensorrt_llm/1/model.yaml"
ENGINE_WHERE = "all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt"
HEADS = "EAGLE-3 heads for the same target."
NO_WEIGHTS = "config.pbtxt names no drafter weights: they are in the engine. Set speculative_model."
PLAIN_MODES = ("top_k", "top_p", "top_k_top_p", "beam_search", "auto")
_PARAMETER = re.compile(
    r"key\s*:\s*\"([^\"]*)\"\s*(?:,\s*)?value\s*(?::\s*)?\{\s*string_value\s*:\s*\"([^\"]*)\""
)
_SPECULATIVE = re.compile("decoding_mode|medusa|eagle|lookahead|redrafter|speculative|draft")
"""In the names of parameters that bear on drafting; a template has fifty others."""


# ---- the engine backend's build


LLAMA = "models/core/llama"


def _convert(example: str, options: Values, output: str = "checkpoint") -> str:
    """The command that converts weights."""
    options = {**options, "output_dir": output, "dtype": "float16"}
    script = f"python examples/{example}/convert_checkpoint.py"
    return command(script, *((f"--{name}", value) for name, value in options.items()))


def _build(writer: Writer, convert: str, mode: str, **options: object) -> None:
    """Adds the commands that turn the weights into an engine."""
    folders = {"checkpoint_dir": "checkpoint", "output_dir": "engine"}
    options = {**folders, "speculative_decoding_mode": mode, **options}
    made = command("trtllm-build", *((f"--{name}", value) for name, value in options.items()))
    writer.files.append(File("build.sh", f"set -e\n{convert}{made}", "bash"))


def _write_medusa(writer: Writer, values: Values) -> None:
    depth, heads = ChoiceTree(writer.config.medusa_choices).depth, writer.take("num_medusa_heads")
    if heads is None:
        writer.notes.append(f"build.sh converts {depth} heads, as many as the tree is deep.")
    convert: Values = {"model_dir": writer.target, "medusa_model_dir": writer.model()}
    convert["num_medusa_heads"] = heads or depth
    _build(writer, _convert("medusa", convert), "medusa")


def _write_eagle(writer: Writer, values: Values) -> None:
    if writer.take("use_dynamic_tree"):
        raise NotTakenError(
            "Triton's config.pbtxt has no parameter for a dynamic tree (EAGLE-2).",
            "A drawn tree (EAGLE-1), or TensorRT-LLM 1.2's own server.",
        )
    tree = ChoiceTree(writer.config.eagle_choices)
    convert = {"model_dir": writer.target, "eagle_model_dir": writer.model()}
    convert |= trtllm.static_tree(tree)
    _build(writer, _convert("eagle", convert), "eagle", max_draft_len=len(tree))


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
    convert = {
        "base_model_checkpoint_dir": "base",
        "drafter_model_dir": writer.model(),
        "redrafter_num_beams": width,
        "redrafter_draft_len_per_beam": length - 1,
    }
    _build(writer, base + _convert("redrafter", convert), "explicit_draft_tokens")


# ---- the table


def _method(ours: str, what: str, nearest: str, *rows: Field, **rest: Any) -> Method:
    """A method of the engine backend."""
    removed = (
        f"Triton served {what} through TensorRT-LLM's engine backend, which was removed in July "
        "2026; containers with TensorRT-LLM 1.2 still have it."
    )
    mode = const(MODE, ours.lower())
    return Method(ours, "", (mode, *rows), until=(1, 3), outside=(removed, nearest), **rest)


def _tree(name: str) -> Field:
    """A tree in braces."""
    return Field(
        name,
        name,
        out=lambda paths: format_tree(ChoiceTree(paths), "triton"),
        back=lambda text: parse_tree(text, format="triton").paths,
        note=f"{name} is not set; the tree of the method's defaults is taken here.",
    )


MODES = {
    "medusa": _method(
        "Medusa",
        "Medusa",
        HEADS,
        _tree("medusa_choices"),
        read_notes=(NO_WEIGHTS,),
        write=_write_medusa,
    ),
    "eagle": _method(
        "Eagle",
        "EAGLE-1 and EAGLE-2",
        HEADS,
        _tree("eagle_choices"),
        read_notes=(NO_WEIGHTS,),
        write=_write_eagle,
    ),
    "lookahead": _method(
        "Lookahead",
        "lookahead",
        "NGram: it needs no weights either.",
        Field("max_window_size", "lookahead_window_size"),
        Field("max_ngram_size", "lookahead_ngram_size"),
        Field("max_verification_set_size", "lookahead_verification_set_size"),
        write=_write_lookahead,
    ),
    "redrafter": _method(
        "ReDrafter",
        "ReDrafter",
        HEADS,
        read_notes=(NO_WEIGHTS, "Its beams are fixed in the engine; the defaults are taken here."),
        write=_write_redrafter,
    ),
}
LLM_API = tuple(method for method in trtllm.METHODS if method.ours not in trtllm.LEGACY)


def _files(writer: Writer, values: Values) -> tuple[File, ...]:
    if MODE in values:
        writer.notes += [
            f"Put these parameters into {ENGINE_WHERE}, in place of the ones it has.",
            "The drafter's weights are built into the engine by build.sh, not named here.",
        ]
        lines = [pbtxt_parameter(key, str(value)) for key, value in values.items()]
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
    if not is_pbtxt(text):
        return trtllm.parse(text, read_yaml)
    found = {key: value.strip() for key, value in _PARAMETER.findall(text)}
    values = {
        key: value
        for key, value in found.items()
        if value and "${" not in value and _SPECULATIVE.search(key)
    }
    trees = [mode for mode in ("medusa", "eagle") if f"{mode}_choices" in values]
    mode = values.get(MODE) or (trees[0] if len(trees) == 1 else "none")
    return {**values, MODE: mode}, None


def _pick(reader: Reader) -> Method:
    mode = reader.values.get(MODE)
    if mode is None:
        return trtllm.pick(reader)
    reader.known.update(key for method in MODES.values() for key in method.keys)
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
    key=trtllm.TYPE,
    plain="speculative_config",
    drafters=trtllm.ENGINE.drafters,
    methods=(*MODES.values(), *LLM_API),
    refused=trtllm.ENGINE.refused,
    files=_files,
    parse=_parse,
    pick=_pick,
    known=trtllm.COMMON | {"speculative_decoding_fast_logits"},
    reasons={
        **trtllm.ENGINE.reasons,
        "acceptance": "Triton's parameters know no typical acceptance.",
    },
)
