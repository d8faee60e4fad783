"""Triton: config.pbtxt parameters of the engine backend, model.yaml of the LLM API backend.

The engine backend (inflight_batcher_llm) went away in July 2026 with TensorRT-LLM's TensorRT
backend; containers up to TensorRT-LLM 1.2 have it. Its parameters name the decoding mode and the
choice tree in braces; the weights are built into the engine before. What replaces it serves
through TensorRT-LLM's LLM API and takes the same `speculative_config`.
"""

from __future__ import annotations

import shlex
from typing import Any

from engine.drafters.eagle import EagleConfig
from engine.drafters.lookahead import LookaheadConfig
from engine.drafters.medusa import MedusaConfig
from engine.drafters.redrafter import ReDrafterConfig
from engine.interop.handoff import Engine, File, NotTakenError, Sheet, Writer
from engine.interop.plain import command, yaml_block
from engine.interop.tree_writers import braces, pbtxt_parameter
from engine.interop.triton_read import read_triton
from engine.interop.trtllm import BLOCKS, REFUSED, non_leaves_per_layer, speculative_values
from engine.tree import ChoiceTree

Files = tuple[File, ...]
TRITON_PART = {"triton_config": {"max_batch_size": 0, "decoupled": False}}
MODEL_YAML = "model.yaml"
WHERE = "all_models/llmapi/tensorrt_llm/1/model.yaml"
ENGINE_WHERE = "all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt"


def _model_yaml(config: Any, sheet: Sheet) -> Files:
    """The LLM API backend's file, for every method that TensorRT-LLM takes."""
    plain = config.decoding_type == "Autoregressive"
    values = {} if plain else speculative_values(config, sheet)
    whole = {"model": sheet.context.target, "backend": "pytorch", **values, **TRITON_PART}
    sheet.note(f"Copy it over {WHERE} of TensorRT-LLM's triton_backend.")
    return (File(MODEL_YAML, yaml_block(whole), "yaml"),)


def _parameters(sheet: Sheet, **values: object) -> File:
    lines = [pbtxt_parameter(key, str(value)) for key, value in values.items()]
    sheet.note(f"Put these parameters into {ENGINE_WHERE}, in place of the ones it has.")
    sheet.note("The drafter's weights are built into the engine by build.sh, not named here.")
    return File("config.pbtxt", "\n".join(lines) + "\n", "protobuf")


def _build(
    sheet: Sheet, example: str, convert: dict[str, object], build: dict[str, object]
) -> File:
    """Commands that turn the weights into an engine."""
    script = f"python examples/{example}/convert_checkpoint.py"
    weights = command(
        script,
        *((f"--{name}", value) for name, value in convert.items()),
        ("--output_dir", "checkpoint"),
        ("--dtype", "float16"),
    )
    made = command(
        "trtllm-build",
        ("--checkpoint_dir", "checkpoint"),
        ("--output_dir", "engine"),
        *((f"--{name}", value) for name, value in build.items()),
    )
    return File("build.sh", f"set -e\n{weights}{made}", "bash")


def _only_with_engines(sheet: Sheet, what: str, nearest: str) -> None:
    if sheet.at_least(1, 3):
        raise NotTakenError(
            f"Triton served {what} through TensorRT-LLM's engine backend, which was removed in "
            "July 2026; containers with TensorRT-LLM 1.2 still have it.",
            nearest,
        )


def _medusa(config: MedusaConfig, sheet: Sheet) -> Files:
    _only_with_engines(sheet, "Medusa", "EAGLE-3 heads for the same target.")
    sheet.explain("acceptance", "Triton's parameters know no typical acceptance.")
    tree = ChoiceTree(sheet.take("medusa_choices"))
    heads = sheet.take("num_medusa_heads")
    if heads is None:
        sheet.note(f"build.sh converts {tree.depth} heads, as many as the tree is deep.")
    return (
        _parameters(sheet, decoding_mode="medusa", medusa_choices=braces(tree)),
        _build(
            sheet,
            "medusa",
            {
                "model_dir": sheet.context.target,
                "medusa_model_dir": sheet.model(),
                "num_medusa_heads": heads or tree.depth,
            },
            {"speculative_decoding_mode": "medusa"},
        ),
    )


def _eagle(config: EagleConfig, sheet: Sheet) -> Files:
    _only_with_engines(sheet, "EAGLE-1 and EAGLE-2", "EAGLE-3 heads for the same target.")
    if sheet.take("use_dynamic_tree"):
        raise NotTakenError(
            "Triton's config.pbtxt has no parameter for a dynamic tree (EAGLE-2).",
            "A drawn tree (EAGLE-1), or TensorRT-LLM 1.2's own server.",
        )
    tree = ChoiceTree(sheet.take("eagle_choices"))
    return (
        _parameters(sheet, decoding_mode="eagle", eagle_choices=braces(tree)),
        _build(
            sheet,
            "eagle",
            {
                "model_dir": sheet.context.target,
                "eagle_model_dir": sheet.model(),
                "max_draft_len": len(tree),
                "num_eagle_layers": tree.depth,
                "max_non_leaves_per_layer": non_leaves_per_layer(tree),
            },
            {"speculative_decoding_mode": "eagle", "max_draft_len": len(tree)},
        ),
    )


def _lookahead(config: LookaheadConfig, sheet: Sheet) -> Files:
    _only_with_engines(sheet, "lookahead", "NGram: it needs no weights either.")
    sheet.explain("pool_from_text", "TensorRT-LLM also fills its pool from the prompt.")
    window, size = sheet.take("max_window_size"), sheet.take("max_ngram_size")
    guesses = sheet.take("max_verification_set_size")
    # What one step verifies: the window's rows and the guesses, N - 1 tokens each.
    rows = max(size - 2, 0) + (window - 1 + guesses) * (size - 1)
    return (
        _parameters(
            sheet,
            decoding_mode="lookahead",
            lookahead_window_size=window,
            lookahead_ngram_size=size,
            lookahead_verification_set_size=guesses,
        ),
        _build(
            sheet,
            "models/core/llama",
            {"model_dir": sheet.context.target},
            {"speculative_decoding_mode": "lookahead_decoding", "max_draft_len": rows},
        ),
    )


def _redrafter(config: ReDrafterConfig, sheet: Sheet) -> Files:
    _only_with_engines(sheet, "ReDrafter", "EAGLE-3 heads for the same target.")
    width, length = sheet.take("beam_width"), sheet.take("beam_length")
    sheet.note(
        f"beam_width={width} and beam_length={length} are fixed when build.sh builds the engine; "
        "config.pbtxt does not have them."
    )
    target = shlex.quote(sheet.context.target)
    built = _build(
        sheet,
        "redrafter",
        {
            "base_model_checkpoint_dir": "base",
            "drafter_model_dir": sheet.model(),
            "redrafter_num_beams": width,
            "redrafter_draft_len_per_beam": length - 1,
        },
        {"speculative_decoding_mode": "explicit_draft_tokens"},
    )
    base = (
        f"python examples/models/core/llama/convert_checkpoint.py --model_dir {target} \\\n"
        "  --output_dir base --dtype float16\n"
    )
    text = built.text.replace("set -e\n", f"set -e\n{base}")
    return (_parameters(sheet, decoding_mode="redrafter"), File(built.name, text, "bash"))


WRITERS: dict[str, Writer] = {
    **dict.fromkeys(("Autoregressive", *BLOCKS), _model_yaml),
    "Medusa": _medusa,
    "Eagle": _eagle,
    "Lookahead": _lookahead,
    "ReDrafter": _redrafter,
}
ENGINE = Engine(
    name="triton",
    title="Triton",
    versions=(
        ("1.3", "TensorRT-LLM's LLM API backend: model.yaml"),
        ("1.2", "TensorRT-LLM 1.2, the last with engines and config.pbtxt"),
        ("1.0", "TensorRT-LLM 1.0 and 1.1"),
    ),
    trees="dynamic trees for EAGLE-3; drawn trees until TensorRT-LLM 1.2",
    writers=WRITERS,
    refused={key: value for key, value in REFUSED.items() if key != "ReDrafter"},
    read=read_triton,
)
