"""Methods on offer, and those of a file.

The page offers what fits the target, and says why the rest does not. `--method FILE` takes a method
of ours, and an engine's speculative_config as it has it.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import presets
from engine.drafters import parse_method
from engine.errors import ConfigError
from playground.host.catalog import TYPE_PREFIX, Catalog
from playground.host.methods import choose_method, read_method
from playground.web.generate_form import GenerateForm


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "disable_overlap_scheduler: true\nspeculative_config:\n  decoding_type: DraftTarget\n"
            "  max_draft_len: 3\n  speculative_model_dir: c/d\n",
            {"decoding_type": "Draft_Target", "speculative_model": "c/d", "max_draft_len": 3,
             "use_draft_probs": False},
        ),
        (
            "name: a\ntitle: b\nconfig:\n  decoding_type: NGram\n  max_draft_len: 3\n",
            {"decoding_type": "NGram", "max_draft_len": 3},
        ),
        (
            "model: a/b\nspeculative_config:\n  method: suffix\n  num_speculative_tokens: 9\n",
            {"decoding_type": "Suffix", "max_draft_len": 9, "use_global_pool": True},
        ),
    ],
)  # fmt: skip
def test_a_file_is_read_as_whoever_wrote_it_means_it(
    text: str, expected: dict[str, object]
) -> None:
    assert read_method(text)[0] == parse_method(expected)


def test_settings_of_the_command_line_come_on_top(tmp_path: Path) -> None:
    (file := tmp_path / "a.yaml").write_text("speculative_config:\n  decoding_type: AUTO\n")
    heard: list[str] = []
    config = choose_method(str(file), ["max_draft_len=7"], report=heard.append).model_dump()
    assert heard == ["note: AUTO is NGram, with these sizes for up to 4 requests at once."]
    assert (config["max_draft_len"], config["max_matching_ngram_size"]) == (7, 3)


def test_a_shipped_tree_is_set_by_its_name() -> None:
    """The 63 nodes that TensorRT-LLM's documents draft with for EAGLE, too."""
    tree = presets.trees()["mc_sim_7b_63-medusa"]
    config = choose_method("Eagle", ["eagle_choices=mc_sim_7b_63-medusa"], "a/b")
    assert (config.model_dump()["eagle_choices"], len(tree.tree)) == (tree.candidates, 63)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("decoding_type: NGram\nmax_draf_len: 3\n", "did you mean max_draft_len?"),
        ("speculative_config:\n  decoding_type: NGram\n  colour: 3\n", "no setting colour"),
        ("speculative_config: 3\n", "must have speculative_config with decoding_type"),
        ("- 1\n", "must be a mapping with decoding_type"),
    ],
)
def test_an_unreadable_method_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_method(text)


def test_the_page_takes_the_same_file_and_shows_it_in_the_form() -> None:
    """`MethodFile` hands what it read to this; a preset of the same settings is picked."""
    menu = SimpleNamespace(choices=lambda target: [])
    host: Any = SimpleNamespace(catalog=Catalog.shipped(), menu=menu)
    text = "speculative_config:\n  decoding_type: NGram\n  max_draft_len: 4\n"
    config, remarks = read_method(f"{text}  max_concurrency: 4\n")
    assert remarks == ("ignored: max_concurrency has no effect on drafting.",)
    picked, form = GenerateForm(host).of_file("smollm2-135m-instruct", config)
    assert picked["value"] == "type:NGram" == form["method"]
    (group,) = form["groups"]
    assert group["settings"] == "NGramConfig" and group["values"]["max_draft_len"] == 4


EMBEDDED = "smollm2-135m-instruct"


@pytest.mark.parametrize("target", [EMBEDDED, "vicuna-7b-v1.3", "deepseek-v3"])
def test_every_preset_is_either_offered_or_explained(target: str) -> None:
    catalog = Catalog.shipped()
    offered = {key for _, key in catalog.method_choices(target)}
    explained = {title for title, _ in catalog.unavailable(target)}
    for name, preset in catalog.presets.items():
        assert (name in offered) != (preset.title in explained), name
        assert (name in offered) == (preset.target in (None, target))


def test_what_a_method_needs_is_said() -> None:
    catalog, mtp = Catalog.shipped(), TYPE_PREFIX + "MTP"
    reasons = dict(catalog.unavailable(EMBEDDED))
    assert reasons["Medusa heads for Vicuna 7B"] == "made for vicuna-7b-v1.3"
    titles = {key: title for title, key in catalog.method_choices(EMBEDDED)}
    assert mtp not in titles and "MTP" in reasons["MTP"]
    assert mtp in {key for _, key in catalog.method_choices("deepseek-v3")}
    assert titles[TYPE_PREFIX + "Medusa"].endswith("needs weights")
    assert titles[TYPE_PREFIX + "NGram"].endswith("default settings")
