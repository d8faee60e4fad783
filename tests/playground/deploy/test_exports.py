"""Every method is exported unchanged, with a warning per loss, or with the reason why not."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

import presets
from engine.drafters import methods, parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from playground.deploy import ENGINES, read_version
from playground.deploy.files import Export, yaml_block
from tests.playground.deploy.schemas import LLAMA, check, exported, named, read, same_effect

WEIGHTS = {"speculative_model": "owner/drafter"}


def config_of(decoding_type: str, **settings: Any) -> MethodConfig:
    has_weights = "speculative_model" in methods()[decoding_type].model_fields
    return parse_method(
        {"decoding_type": decoding_type, **(WEIGHTS if has_weights else {}), **settings}
    )


def main_files(export: Export) -> list[str]:
    """Files that hold the config, not how to build or to start."""
    written = (".yaml", ".json", ".pbtxt", "Modelfile", ".py")
    names = [name for name in export.files if name.endswith(written)]
    return [export.files[name] for name in names or export.files if name != "disagg_config.yaml"]


def as_engine_names_it(config: MethodConfig, export: Export) -> MethodConfig:
    """The config with its weights named as the engine's file names them."""
    weights = getattr(config, "speculative_model", None)
    if weights is None:
        return config
    if {"config.pbtxt", "request.json"} & export.files.keys():
        return config.replace(speculative_model=None)
    model = named(weights)
    if export.engine in ("llamacpp", "ollama"):
        model = model.split("/")[-1] + ".gguf"
    return config.replace(speculative_model=model)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_method_exports_and_parses_back_or_says_why_not(engine: str) -> None:
    taken = set()
    for version, _ in ENGINES[engine].versions:
        configs = [preset.config for preset in presets.methods().values()]
        for config in (*configs, *map(config_of, methods())):
            taken.add(checked(config, engine, version))
    assert taken >= {"exact", "not supported"}


def checked(config: MethodConfig, engine: str, version: str) -> str:
    """The verdict of an export whose every part was looked at."""
    export = exported(config, engine, version)
    assert (export.verdict == "not supported") == (not export.files) == bool(export.refusal)
    if not export.files:
        assert export.refusal.endswith(".") and export.nearest.endswith(".")
        return export.verdict
    check(export)
    assert all(text.endswith(".") for text in (*export.notes, *export.warnings))
    for text in main_files(export):
        back = read(engine, text)
        assert back.target in (None, LLAMA, f"{LLAMA.partition('/')[2]}.gguf")
        if export.verdict == "exact":
            assert same_effect(back.config, as_engine_names_it(config, export)), config
    return export.verdict


def other_value(config: MethodConfig, name: str) -> Any:
    """A value that a setting does not have by default, or None if there is none to be had."""
    value = getattr(config, name)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return 0.25
    extra = {
        "lookup": "transformers",
        "acceptance": "typical",
        "mask_token_id": 7,
        "draft_dtype": "bfloat16",
        "draft_device": "cpu",
        "vocabulary": "intersection",
        "num_medusa_heads": 4,
        "speculative_token_map": "map.pt",
        "max_non_leaves_per_layer": 5,
        "target_layer_ids": (1, 2),
        "eagle3_layers_to_capture": (1, 2),
        "medusa_choices": [[0], [1]],
        "eagle_choices": [[0], [1], [2]],
    }
    return extra.get(name)


BASES = [
    config_of(name)
    for name in methods()
    if name not in ("Autoregressive", "Combined", "User_Provided", "Token_Recycling")
]
BASES += [
    *(config_of(name, max_draft_len=7) for name in ("DFlash", "DSpark")),
    *(config_of(name, use_dynamic_tree=True) for name in ("PARD", "P_EAGLE")),
    config_of("Eagle", use_dynamic_tree=True),
    config_of("Eagle3", use_dynamic_tree=True),
    config_of("MTP", use_relaxed_acceptance_for_thinking=True),
    config_of("Medusa", acceptance="typical"),
    config_of("Suffix", use_tree_spec=True, use_global_pool=True),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_no_setting_is_dropped_in_silence(engine: str) -> None:
    """Any setting that is changed changes a file or the warnings, and a lost one is named."""
    for version, _ in ENGINES[engine].versions:
        for base in BASES:
            plain = exported(base, engine, version)
            for name in sorted(base.live_settings()) if plain.files else ():
                value = other_value(base, name)
                if value is None:
                    continue
                changed = exported(base.replace(**{name: value}), engine, version)
                default = type(base).model_fields[name].default
                where = f"{base.decoding_type} {name}={value} to {engine} {version}"
                if changed.files == plain.files and value != default:
                    told = (*changed.warnings, *changed.notes, *plain.warnings)
                    told += tuple(changed.files.values())
                    assert any(name in text for text in told), where
                assert changed != plain or name in " ".join(plain.warnings), where


@pytest.mark.parametrize("engine", ["trtllm", "sglang"])
@pytest.mark.parametrize("levels", [1, 8])
@pytest.mark.parametrize("top_k", [1, 10])
def test_dynamic_trees_stay_within_the_engine_s_bounds(
    engine: str, levels: int, top_k: int
) -> None:
    candidates = top_k + (levels - 1) * top_k**2
    size = {"max_draft_len": levels, "dynamic_tree_max_topK": top_k}
    for keep in sorted({1, levels, top_k * levels, candidates}):
        if keep > candidates:
            continue
        config = config_of("Eagle3", use_dynamic_tree=True, max_total_draft_tokens=keep, **size)
        export = exported(config, engine)
        check(export)
        if engine == "trtllm" and not levels <= keep <= top_k * levels:
            assert any("is lowered from" in text for text in export.warnings)


@pytest.mark.parametrize(
    ("engine", "retrieval", "model", "words"),
    [
        ("trtllm", {"decoding_type": "Suffix", "use_global_pool": True},
         {"decoding_type": "Eagle3"}, "sa_config:\n    threshold: 6\n    enable_global_pool: true"),
        ("llamacpp", {"decoding_type": "NGram", "max_matching_ngram_size": 3},
         {"decoding_type": "Draft_Target", "max_draft_len": 6},
         "--spec-type ngram-simple,draft-simple"),
    ],
)  # fmt: skip
def test_look_up_before_a_model_is_one_config(
    engine: str, retrieval: dict[str, Any], model: dict[str, Any], words: str
) -> None:
    settings = {"min_match_len": 6} if engine == "trtllm" else {}
    config = config_of("Combined", retrieval=retrieval, model={**model, **WEIGHTS}, **settings)
    export = exported(config, engine)
    check(export)
    assert words in main_files(export)[0]
    back: Any = read(engine, main_files(export)[0]).config
    for part, given in (("retrieval", retrieval), ("model", model)):
        assert given.items() <= getattr(back, part).model_dump().items()
    assert not settings or same_effect(back, config)
    assert exported(config, "vllm").refusal == "vLLM runs one drafting method at a time."


def test_missing_weights_are_told_and_marked_in_the_file() -> None:
    export = exported(parse_method({"decoding_type": "Eagle3"}), "vllm")
    assert '"model": "DRAFTER"' in main_files(export)[0]
    assert any("Put the drafter's path in place of DRAFTER" in w for w in export.warnings)
    back = read("vllm", main_files(export)[0])
    assert back.config.model_dump()["speculative_model"] is None


def test_paths_with_blanks_and_quotes_stay_one_word() -> None:
    config = config_of("Draft_Target", speculative_model="/my models/it's")
    for engine in ("vllm", "sglang", "transformers", "trtllm"):
        export = exported(config, engine)
        check(export)
        back = read(engine, main_files(export)[0])
        assert back.config.model_dump()["speculative_model"] == "/my models/it's"


def test_versions_are_read_or_refused() -> None:
    for engine, text, numbers in (
        ("vllm", "v0.22", (0, 22)),
        ("sglang", "0.5.12.post1", (0, 5, 12)),
        ("llamacpp", "b9300", (9300,)),
        ("trtllm", "1.3.0rc4", (1, 3, 0)),
        ("ollama", "0.32.14", (0, 32, 14)),
    ):
        assert read_version(ENGINES[engine], text) == numbers
    with pytest.raises(ConfigError, match="must be 0.22 or newer, got 0.6.1"):
        read_version(ENGINES["vllm"], "0.6.1")
    with pytest.raises(ConfigError, match="must be like 0.33, got 'newest'"):
        read_version(ENGINES["vllm"], "newest")
    notes = exported(config_of("NGram"), "vllm", "0.99").notes
    assert any("0.99 is newer than 0.33" in note for note in notes)


NUMBER_LIKE = ("1e-05", ".5", "0x1F", "1_000", "12:30", "2026-01-01", ".inf", "yes", "~", "..")
texts = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]))
values = st.one_of(
    *(st.none(), st.booleans(), st.integers(), texts, st.sampled_from(NUMBER_LIKE)),
    st.floats(allow_nan=False, allow_infinity=False),
)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    st.dictionaries(st.sampled_from("abc"), st.one_of(values, st.lists(values)), min_size=1)
)
def test_pyyaml_reads_what_is_written_as_it_was(block: dict[str, Any]) -> None:
    """It reads YAML 1.1, as the engines do: `1e-05` is a text there, and `.5` a number."""
    read = yaml.safe_load(yaml_block({"config": block}))
    assert repr(read) == repr({"config": block})
