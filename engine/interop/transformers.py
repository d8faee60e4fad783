"""transformers: keyword arguments of `generate`, as a script that runs; a script is never run here.

`assistant_model` and `prompt_lookup_num_tokens` are in every 4.46+; `use_mtp` and DFlash
(`speculation_type`) since 5.15. What the assistant drafts is set on its own generation config.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.interop import table
from engine.interop.conversion import Reader, Writer
from engine.interop.export_files import File, ReadYaml
from engine.interop.table import Codec, DroppedSetting, Engine, Field, Values, const, method

NEW = (5, 15)
ASSISTANT = "assistant_model"
TOKENIZER = "assistant_tokenizer"
DRAFTING = ("num_assistant_tokens", "assistant_confidence")
"""How fields of the assistant's generation config begin."""
WORDS = ("assist", "lookup", "lookbehind", "matching_ngram", "specul", "mtp", "custom", "do_sample")
"""Arguments of `generate` with none of them are about what is generated, whoever drafts."""
ROWS = (
    table.Ignored("is_assistant assistant_lookbehind target_lookbehind do_sample"),
    *table.refuse(
        {
            "assistant_ensemble_weight": "the assistant influences which tokens are sampled",
            "assistant_early_exit": "the target's own lower layers draft (LayerSkip)",
            "custom_generate": "a custom decoding loop runs instead",
        }
    ),
)


def _write_draft_model(writer: Writer, values: Values) -> None:
    """Another vocabulary; without do_sample, transformers passes text between the models."""
    if writer.config.vocabulary == "text":
        writer.take("vocabulary")
        values[TOKENIZER] = writer.model()
        writer.notes.append("When sampling (do_sample), transformers drafts by shared tokens.")


def _read_draft_model(reader: Reader) -> None:
    if reader.find(TOKENIZER):
        sampled = reader.values.get("do_sample") is True
        reader.settings["vocabulary"] = "intersection" if sampled else "text"
        reader.used.add(TOKENIZER)


ONE_TOKEN = "transformers drafts one token per MTP layer; 1 is used here."
MTP = (
    const("use_mtp", True),
    DroppedSetting(
        "max_draft_len",
        "max_draft_len={c.max_draft_len} is dropped: transformers drafts one token per MTP layer.",
        lambda config: config.max_draft_len > 1,
    ),
)
NGRAM = (
    Field("max_draft_len", "prompt_lookup_num_tokens"),
    *table.same("max_matching_ngram_size"),
    table.drops_pool(
        "transformers has lookup rules of its own (lookup=transformers here)",
        lambda config: config.lookup != "transformers",
    ),
)
DRAFT_MODEL = (
    table.weights(ASSISTANT),
    Field(
        "max_draft_len",
        "num_assistant_tokens",
        default=20,
        note="num_assistant_tokens is not set: 20, transformers' default, is used.",
    ),
    const("num_assistant_tokens_schedule", "constant", note="here the length stays constant."),
    Field(
        "confidence_threshold",
        "assistant_confidence_threshold",
        default=0.4,
        note="assistant_confidence_threshold is not set: 0.4, its default, is used.",
    ),
    DroppedSetting(
        "",
        "Where scikit-learn is installed, transformers moves confidence_threshold="
        "{c.confidence_threshold} as it goes.",
        lambda config: config.confidence_threshold > 0,
    ),
    DroppedSetting(
        "use_draft_probs",
        "use_draft_probs=false is dropped: when sampling, transformers samples the drafts and "
        "verifies them with their probabilities.",
        lambda config: not config.use_draft_probs,
    ),
    Codec((TOKENIZER,), _write_draft_model, _read_draft_model),
)
DFLASH = (
    table.weights(ASSISTANT),
    const("speculation_type", "dflash"),
    table.drops_block_tree("transformers"),
)
METHODS = {
    "model": method("Draft_Target", "", *DRAFT_MODEL),
    "lookup": method("NGram", "", *NGRAM, implied={"lookup": "transformers"}),
    "mtp": method("MTP", "", *MTP, since=NEW, read_notes=(ONE_TOKEN,)),
    "dflash": method("DFlash", "", *DFLASH, since=NEW),
}

SCRIPT = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({target!r})
model = AutoModelForCausalLM.from_pretrained({target!r}, dtype="auto")
{setup}inputs = tokenizer("Write a haiku.", return_tensors="pt")
output = model.generate({arguments}, max_new_tokens=128)
print(tokenizer.decode(output[0], skip_special_tokens=True))
"""


def _files(writer: Writer, values: Values) -> tuple[File, ...]:
    setup, arguments = "", ["**inputs"]
    for key, value in values.items():
        if key == ASSISTANT:
            setup += f'assistant = AutoModelForCausalLM.from_pretrained({value!r}, dtype="auto")\n'
            arguments.append(f"{ASSISTANT}=assistant")
        elif key == TOKENIZER:
            setup += f"{TOKENIZER} = AutoTokenizer.from_pretrained({value!r})\n"
            arguments += ["tokenizer=tokenizer", f"{TOKENIZER}={TOKENIZER}"]
        elif key.startswith(DRAFTING):
            setup += f"assistant.generation_config.{key} = {value!r}\n"
        else:
            arguments.append(f"{key}={value!r}")
    text = SCRIPT.format(target=writer.target, setup=setup, arguments=", ".join(arguments))
    return (File("generate.py", text, "python"),)


def _parse(text: str, read_yaml: ReadYaml) -> tuple[Mapping[str, Any], str | None]:
    """Keyword arguments of `generate`: of a mapping, or of a script's calls and assignments."""
    if "(" not in text:
        values = read_yaml(text)
        if not isinstance(values, Mapping):
            raise ConfigError("Paste a script that calls generate(…), or its keyword arguments.")
        return _drafting(values), None
    try:
        nodes = list(ast.walk(ast.parse(text.strip())))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"The script is not valid Python{place}.") from error
    loaded: dict[str, str] = {}
    drafting, kwargs = dict[str, Any](), dict[str, Any]()
    owner = ""
    for node in nodes:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(
                    func=ast.Attribute(attr="from_pretrained"),
                    args=[ast.Constant(value=str(model)), *_],
                ),
            ):
                loaded[name] = model
            case ast.Assign(targets=[ast.Attribute(attr=key, value=config)], value=value):
                if _name(config) == "generation_config":
                    drafting[key] = _constant(value)
            case ast.Call(func=func, keywords=keywords):
                if _name(func) in ("generate", "GenerationConfig"):
                    kwargs |= {word.arg: _constant(word.value) for word in keywords if word.arg}
                if isinstance(func, ast.Attribute) and func.attr == "generate":
                    owner = _name(func.value)
    if isinstance(kwargs.get(ASSISTANT), str):
        kwargs[ASSISTANT] = loaded.get(kwargs[ASSISTANT], kwargs[ASSISTANT])
    return _drafting(drafting | kwargs), loaded.get(owner)


def _drafting(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(k): value for k, value in values.items() if any(word in str(k) for word in WORDS)}


def _name(node: ast.expr) -> str:
    """Of a variable or an attribute."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _constant(node: ast.expr) -> Any:
    """A literal's value, or the name of a variable."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return _name(node) or None


def _find_method(reader: Reader) -> table.Method:
    if reader.find("prompt_lookup_num_tokens"):
        return METHODS["lookup"]
    if reader.values.get("use_mtp"):
        return METHODS["mtp"]
    if reader.find(ASSISTANT) is None:
        raise ConfigError(
            "The call drafts nothing: it has none of assistant_model, prompt_lookup_num_tokens and "
            "use_mtp."
        )
    return METHODS["dflash" if reader.values.get("speculation_type") == "dflash" else "model"]


ENGINE = Engine(
    name="transformers",
    title="transformers",
    versions=(
        ("5.24", "the newest known here"),
        ("5.15", "the first with MTP and DFlash"),
        ("4.46", "draft models and prompt lookup"),
    ),
    sample="model.generate(**inputs, prompt_lookup_num_tokens=10)",
    drafters="custom_generate there takes a custom decoding loop.",
    methods=tuple(METHODS.values()),
    files=_files,
    parse=_parse,
    find_method=_find_method,
    rows=ROWS,
    reasons={"max_draft_len": "transformers drafts the whole block."},
)
