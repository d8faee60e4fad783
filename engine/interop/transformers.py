"""transformers: keyword arguments of `generate`, as a script that runs.

`assistant_model` and `prompt_lookup_num_tokens` are in every 4.46+; `use_mtp` and DFlash
(`speculation_type`) since 5.15. What the assistant drafts is set on its own generation config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.dflash import DFlashConfig
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.mtp import MTPConfig
from engine.drafters.ngram import NGramConfig
from engine.interop.handoff import Engine, File, NotTakenError, Sheet, Writer
from engine.interop.transformers_read import read_transformers

NEW = (5, 15)
"""First release known to have MTP and DFlash."""


@dataclass(frozen=True, slots=True)
class Call:
    """What goes into `generate`, and onto the assistant's generation config."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    assistant: str | None = None
    drafting: Mapping[str, Any] = field(default_factory=dict)


def _script(call_of: Callable[[Any, Sheet], Call]) -> Writer:
    """A writer of a whole script from what makes the call."""

    def write(config: Any, sheet: Sheet) -> tuple[File, ...]:
        call = call_of(config, sheet)
        target = repr(sheet.context.target)
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"tokenizer = AutoTokenizer.from_pretrained({target})",
            f'model = AutoModelForCausalLM.from_pretrained({target}, dtype="auto")',
        ]
        kwargs = dict(call.kwargs)
        output = [f"{name}={value!r}" for name, value in kwargs.items()]
        if call.assistant is not None:
            name = repr(call.assistant)
            lines.append(f'assistant = AutoModelForCausalLM.from_pretrained({name}, dtype="auto")')
            for key, value in call.drafting.items():
                lines.append(f"assistant.generation_config.{key} = {value!r}")
            output.insert(0, "assistant_model=assistant")
        arguments = ", ".join(["**inputs", *output, "max_new_tokens=128"])
        lines += [
            'inputs = tokenizer("Write a haiku.", return_tensors="pt")',
            f"output = model.generate({arguments})",
            "print(tokenizer.decode(output[0], skip_special_tokens=True))",
        ]
        return (File("generate.py", "\n".join(lines) + "\n", "python"),)

    return write


def _plain(config: AutoregressiveConfig, sheet: Sheet) -> Call:
    return Call()


def _draft_target(config: DraftTargetConfig, sheet: Sheet) -> Call:
    if not sheet.take("use_draft_probs"):
        sheet.warn(
            "use_draft_probs=false is dropped: when sampling, transformers samples the drafts and "
            "verifies them with their probabilities."
        )
    sheet.note(
        "With scikit-learn installed, transformers moves a confidence threshold above 0 as it goes."
    )
    return Call(
        assistant=sheet.model(),
        drafting={
            "num_assistant_tokens": sheet.take("max_draft_len"),
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": sheet.take("confidence_threshold"),
        },
    )


def _ngram(config: NGramConfig, sheet: Sheet) -> Call:
    if sheet.take("lookup") != "transformers":
        sheet.warn(
            "transformers has look-up rules of its own (lookup=transformers here): the pool rules "
            "(is_keep_all, is_use_oldest, is_public_pool) are dropped; where a pattern occurs more "
            "than once its pick may be another one.",
            *("is_keep_all", "is_use_oldest", "is_public_pool"),
        )
    return Call(
        kwargs={
            "prompt_lookup_num_tokens": sheet.take("max_draft_len"),
            "max_matching_ngram_size": sheet.take("max_matching_ngram_size"),
        }
    )


def _new_enough(sheet: Sheet, what: str) -> None:
    if not sheet.at_least(*NEW):
        raise NotTakenError(
            f"transformers has {what} from 5.15 on.", "--engine-version 5.15, or NGram."
        )


def _mtp(config: MTPConfig, sheet: Sheet) -> Call:
    _new_enough(sheet, "MTP")
    sheet.explain("use_relaxed_acceptance_for_thinking", "transformers verifies exactly.")
    length = sheet.take("max_draft_len")
    if length > 1:
        sheet.warn(
            f"max_draft_len={length} is dropped: transformers drafts one token per MTP layer."
        )
    return Call(kwargs={"use_mtp": True})


def _dflash(config: DFlashConfig, sheet: Sheet) -> Call:
    _new_enough(sheet, "DFlash")
    sheet.explain("max_draft_len", "transformers drafts the whole block.")
    for name in ("mask_token_id", "target_layer_ids"):
        sheet.explain(name, "transformers reads it from the checkpoint.")
    return Call(kwargs={"speculation_type": "dflash"}, assistant=sheet.model())


NEAREST = "Draft_Target or NGram."
ENGINE = Engine(
    name="transformers",
    title="transformers",
    versions=(
        ("5.23", "the newest known here"),
        ("5.15", "the first with MTP and DFlash"),
        ("4.46", "draft models and prompt look-up"),
    ),
    trees="chains only",
    writers={
        "Autoregressive": _script(_plain),
        "Draft_Target": _script(_draft_target),
        "NGram": _script(_ngram),
        "MTP": _script(_mtp),
        "DFlash": _script(_dflash),
    },
    refused={
        "Medusa": ("transformers has no Medusa.", NEAREST),
        "Eagle": ("transformers has no EAGLE.", NEAREST),
        "Eagle3": ("transformers has no EAGLE-3.", NEAREST),
        "ReDrafter": ("transformers has no ReDrafter.", NEAREST),
        "Lookahead": ("transformers has no lookahead decoding.", "NGram: no weights either."),
        "Suffix": ("transformers has no suffix decoding.", "NGram: no weights either."),
        "Token_Recycling": ("transformers has no token recycling.", "NGram: no weights either."),
        "Combined": ("transformers runs one drafting method at a time.", NEAREST),
        "User_Provided": (
            "A drafter written for this playground does not run in transformers.",
            "custom_generate there takes a decoding loop of your own.",
        ),
    },
    read=read_transformers,
)
