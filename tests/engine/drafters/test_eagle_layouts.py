"""EAGLE checkpoints in every published layout and with every setting; wrong ones are refused."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import rms_norm

from engine.config import Limits
from engine.drafters import parse_method
from engine.drafters.eagle.methods import Eagle3Config, EagleDrafter
from engine.drafters.texts import TargetTrace, Text
from engine.errors import DrafterError, TreeError, VocabularyError
from engine.model.target import Target
from engine.proposal import Needs
from engine.training.methods.eagle import write_speculators
from tests.engine.drafters import judges
from tests.engine.drafters.eagle_heads import (
    LayerFormula,
    config_of,
    save_eagle,
    save_eagle3,
    write,
)
from tests.engine.drafters.golden import ROOT, golden_case
from tests.models import build_context, plain_greedy

GOLDEN3 = ROOT / "eagle" / "eagle3" / "head"

# ---- layouts


def built(target: Target, head: Path, **settings: Any) -> EagleDrafter:
    config = Eagle3Config.parse({"speculative_model": str(head), **settings})
    return config.build(build_context(target))


def draft(target: Target, head: Path) -> tuple[list[Any], tuple[str, ...]]:
    """First steps' draft trees, and the drafter's remarks."""
    drafter = built(target, head, use_dynamic_tree=True)
    text = judges.write(target, drafter, [40, 53, 98, 53, 57], tokens=8)
    return [(step.tokens, step.parents) for step in text.steps], drafter.notes


def published() -> tuple[Target, dict[str, Tensor], dict[str, Any]]:
    """A target, and the tensors and config of its head."""
    tensors = torch.load(GOLDEN3 / "pytorch_model.bin", weights_only=True)
    settings = json.loads((GOLDEN3 / "config.json").read_text())
    return golden_case("eagle/eagle3").target, tensors, settings


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}


def test_nvidia_s_layout_drafts_what_yuhuili_s_does(tmp_path: Path) -> None:
    target, tensors, settings = published()
    del tensors["t2d"]
    # NVIDIA counts outputs: 1, 3, 4 are the inputs 2, 4, 5 of an eight-layer target.
    settings["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
    }
    nvidia = write(tmp_path / "nvidia", renamed(tensors), settings)
    assert draft(target, nvidia) == draft(target, GOLDEN3)
    settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2, 4]
    other = write(tmp_path / "other", renamed(tensors), settings)
    assert draft(target, other)[0] != draft(target, GOLDEN3)[0]


def speculators_config(settings: dict[str, Any], verifier: str, **more: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": settings.pop("draft_vocab_size"),
        "transformer_layer_config": settings,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": verifier}},
        **more,
    }


def test_the_speculators_layout_names_its_verifier(tmp_path: Path) -> None:
    target, tensors, settings = published()
    tensors["embed_tokens.weight"] = target.embedding.get_parameter("weight").clone()
    options = {"norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    named = speculators_config(dict(settings), "org/eagle3", **options)
    fits = write(tmp_path / "fits", renamed(tensors), named)
    assert target.name == "eagle/eagle3"
    assert draft(target, fits) == draft(target, GOLDEN3) == (draft(target, fits)[0], ())
    silent = {key: value for key, value in named.items() if key != "norm_before_residual"}
    normed = write(tmp_path / "normed", renamed(tensors), silent)
    assert draft(target, normed)[0] != draft(target, GOLDEN3)[0]
    named = speculators_config(dict(settings), "meta-llama/Llama-3.1-8B-Instruct", **options)
    other = write(tmp_path / "other", renamed(tensors), named)
    trees, notes = draft(target, other)
    assert trees == draft(target, GOLDEN3)[0], "another name is a remark, no refusal"
    assert len(notes) == 1 and "meta-llama/Llama-3.1-8B-Instruct" in notes[0]


def test_a_head_written_for_speculators_drafts_the_same(tmp_path: Path) -> None:
    target, tensors, settings = published()
    ours = write(tmp_path / "ours", tensors, settings)
    write_speculators(ours, tmp_path / "theirs", verifier="eagle/eagle3", draft_len=3)
    assert draft(target, tmp_path / "theirs") == draft(target, GOLDEN3)
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert "hidden_size" in written["transformer_layer_config"] and "hidden_size" not in written


def test_a_head_without_lm_head_uses_the_target_s(tmp_path: Path) -> None:
    target, tensors, settings = published()
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    settings["draft_vocab_size"] = None
    head = write(tmp_path, renamed(tensors), settings)
    outputs = torch.randn(3, 48)
    normed = rms_norm(outputs, (48,), tensors["norm.weight"], 1e-5)
    with torch.inference_mode():
        logits = built(target, head).head.logits(outputs)
        torch.testing.assert_close(logits, target.lm_head(normed))


def test_unknown_weights_are_remarked_on(tmp_path: Path) -> None:
    target, tensors, settings = published()
    tensors["mystery.weight"] = torch.zeros(3)
    notes = draft(target, write(tmp_path, renamed(tensors), settings))[1]
    assert len(notes) == 1 and "mystery.weight" in notes[0]


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 100.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 100.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}},
    ],
)
def test_rotary_settings_are_read_in_every_spelling(
    spelling: dict[str, Any], tmp_path: Path
) -> None:
    target, tensors, settings = published()
    head = write(tmp_path, tensors, {**settings, **spelling})
    drafter = built(target, head)
    pairs = torch.arange(6)
    wanted = 100.0 ** (-pairs / 6) / 4
    torch.testing.assert_close(drafter.head.layer._frequencies, wanted)


# ---- every setting of a published config changes the drafts as its formula says

PROMPT = [7, 8, 9, 7, 8, 9, 7, 8, 4, 3]
TREE = {"use_dynamic_tree": True, "max_draft_len": 4, "dynamic_tree_max_topK": 2}
TREE |= {"max_total_draft_tokens": 9}


@dataclass
class Formula(LayerFormula):
    """What a head computes, a row at a time; `normed` has the norms of EAGLE-3.1."""

    window: int = 10**6
    last_state: bool = False
    normed: bool = False

    def sees(self, at: int, j: int) -> bool:
        return at - j < self.window

    def output(
        self, w: dict[str, Tensor], target: Target, rows: list[tuple[Tensor, int]]
    ) -> Tensor:
        """Of the last of rows `(hidden, token)`, which sees the last ones in its window."""
        embedding, inputs = target.embedding.get_parameter("weight"), list[Tensor]()
        for hidden, token in rows:
            embedded = self.norm(embedding[token], w["midlayer.input_layernorm.weight"])
            residual = self.norm(hidden, w["midlayer.hidden_norm.weight"])
            inputs.append(torch.cat([embedded, residual]))
        residual = residual if self.normed else rows[-1][0]
        (out,) = self.layer(w, "midlayer", inputs, [residual], self.sees)
        return self.norm(out, w["norm.weight"]) if self.normed else out

    def base(
        self, w: dict[str, Tensor], target: Target, text: list[int]
    ) -> list[tuple[Tensor, int]]:
        """The base entries of a text."""
        states = target.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        if self.last_state:
            return list(zip(states[-1][0], text[1:], strict=True))
        features = torch.cat([states[i][0] for i in (1, 2)], dim=-1)
        if self.normed:
            parts = self.norm(features, w["input_norm.weight"]).chunk(2, dim=-1)
            normed = [self.norm(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
            features = torch.cat(normed, dim=-1)
        return list(zip(features @ w["fc.weight"].T, text[1:], strict=True))

    def probs(
        self, w: dict[str, Tensor], target: Target, rows: list[tuple[Tensor, int]]
    ) -> tuple[Tensor, Tensor]:
        """The last row's output, and probabilities of all tokens of the target after it."""
        out = self.output(w, target, rows)
        logits = w["lm_head.weight"] @ (out if self.normed else self.norm(out, w["norm.weight"]))
        ids = torch.arange(len(logits)) + w["d2t"]
        return out, torch.zeros(target.vocab_size).index_copy(0, ids, logits.softmax(-1))


ATTENTION = {"q_proj.bias": 32, "k_proj.bias": 16, "v_proj.bias": 16, "o_proj.bias": 32}
ATTENTION |= {"q_norm.weight": 8, "k_norm.weight": 8}
OPTIONS = {"input_norm.weight": 64, "fc_norm.0.weight": 32, "fc_norm.1.weight": 32}
OPTIONS |= {f"midlayer.self_attn.{name}": size for name, size in ATTENTION.items()}
"""Tensors that few heads have, and their sizes."""


def save(
    folder: Path, target: Target, *, last_state: bool = False, normed: bool = False, **changes: Any
) -> Path:
    save_eagle3(folder, target, (1, 2), draft_vocab=20)
    tensors = load_file(folder / "m.safetensors")
    if normed:
        generator = torch.Generator().manual_seed(3)
        tensors |= {name: 1 + torch.randn(n, generator=generator) for name, n in OPTIONS.items()}
        changes |= {"norm_before_residual": True, "norm_output": True}
    if last_state:
        del tensors["fc.weight"]
    else:  # inputs: a first layer 1 would count outputs
        changes = {"eagle_aux_hidden_state_layer_ids": [0, 1], **changes}
    return write(folder, tensors, config_of(target, draft_vocab_size=20, **changes))


@torch.inference_mode()
def drafted(folder: Path, changes: dict[str, Any], formula: Formula, **tree: Any) -> list[Any]:
    """First trees of a head with such a config, every node held against the formula."""
    target = judges.target_of("llama")
    settings = tree if formula.last_state else {**tree, "eagle3_layers_to_capture": [0, 1]}
    drafter = built(target, save(folder, target, **changes), **settings)
    assert drafter.notes == ()
    assert drafter.needs == (Needs(hidden=True) if formula.last_state else Needs(layers=(1, 2)))
    weights = load_file(folder / "m.safetensors")
    text = judges.write(target, drafter, PROMPT, tokens=8)
    seen, found = [*PROMPT, text.output[0]], []
    for step in text.steps[:2]:
        # Rows that lead to each node, the node's own token not among them.
        rows = {0: formula.base(weights, target, seen)}
        after = {0: formula.probs(weights, target, rows[0])}
        for node, (token, parent) in enumerate(zip(step.tokens, step.parents, strict=True)):
            if node:
                out, probs = after[parent]
                assert step.draft_probs[node] == pytest.approx(float(probs[token]), abs=1e-4)
                rows[node] = [*rows[parent], (out, token)]
                after[node] = formula.probs(weights, target, rows[node])
        found.append((step.tokens, [round(p or 0, 4) for p in step.draft_probs[1:]]))
        seen += step.committed
    return found


@functools.cache
def unchanged(tree: bool) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return drafted(Path(folder) / "plain", {}, Formula(), **(TREE if tree else {}))


WINDOW: dict[str, Any] = {"layer_types": ["sliding_attention"], "sliding_window": 3}
OFF = {"sliding_window": 3, "use_sliding_window": False, "max_window_layers": 28}
CASES: dict[str, tuple[dict[str, Any], Formula]] = {
    "sliding_window": (WINDOW, Formula(window=3)),
    "a window of one row": ({**WINDOW, "sliding_window": 1}, Formula(window=1)),
    "partial_rotary_factor": ({"partial_rotary_factor": 0.5}, Formula(turned=4)),
    "use_aux_hidden_state": (
        {"last_state": True, "eagle_config": {"use_aux_hidden_state": False}},
        Formula(last_state=True),
    ),
    "biases, norms and rotary base of its own": (
        {"normed": True, "rope_theta": 500.0},
        Formula(normed=True, theta=500.0),
    ),
    "windows that are off": (OFF, Formula()),
    "a window without sliding layers": ({**WINDOW, "layer_types": ["full_attention"]}, Formula()),
}


@pytest.mark.parametrize("tree", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", CASES)
def test_drafts_change_as_the_formula_says(tmp_path: Path, name: str, tree: dict[str, Any]) -> None:
    changes, formula = CASES[name]
    same = drafted(tmp_path, changes, formula, **tree) == unchanged(bool(tree))
    assert same == (formula == Formula())


@torch.inference_mode()
def test_ranks_along_a_text_see_the_window_alone(tmp_path: Path) -> None:
    target = judges.target_of("llama")
    drafter = built(target, save(tmp_path, target, **WINDOW), eagle3_layers_to_capture=(0, 1))
    output = plain_greedy(target, PROMPT, 12)
    tokens = [*PROMPT, *output]
    layers = target.prefill(tokens, target.new_cache(len(tokens)), drafter.needs).layers
    text = Text(tuple(PROMPT), tuple(output), limits=Limits())
    reading = TargetTrace(text, torch.tensor(tokens), layers=layers, context_len=target.context_len)
    ids = drafter.head.vocabulary.ids
    assert ids is not None
    found, wanted = drafter.ranks(reading, 3), reading.true_tokens(3)
    weights, formula = load_file(tmp_path / "m.safetensors"), Formula(window=3)
    for root in range(3):
        rows = formula.base(weights, target, tokens[: len(PROMPT) + root + 1])
        for depth in range(3):
            out, probs = formula.probs(weights, target, rows)
            true = int(wanted[root, depth])
            if true in ids:
                assert int(found[root, depth]) == int((probs > probs[true]).sum())
            rows = [*rows, (out, true)]


# ---- wrong heads


def refuse(error: type[Exception], match: str, target: Target, **values: Any) -> None:
    with pytest.raises(error, match=match):
        parse_method(values).build(build_context(target))


@pytest.mark.parametrize(
    ("case", "head", "kind", "error", "words"),
    [
        ("eagle1", "eagle2", "Eagle", DrafterError, "must be 64, got 48"),
        ("eagle3", "eagle2", "Eagle", VocabularyError, "256 tokens.*240"),
        ("eagle2", "eagle3", "Eagle3", VocabularyError, "240 tokens.*256"),
    ],
)
def test_a_head_for_another_model_names_both_sizes(
    case: str, head: str, kind: str, error: type[Exception], words: str
) -> None:
    location, target = str(ROOT / "eagle" / head / "head"), golden_case(f"eagle/{case}").target
    refuse(error, words, target, decoding_type=kind, speculative_model=location)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "7 layers.*has 3"),
        ({"eagle3_layers_to_capture": [0, 1]}, "3 layers.*0, 1 are"),
        ({"eagle3_layers_to_capture": [0, 1, 3]}, "0 to 2.*0, 1, 3 are"),
        (
            {"eagle3_layers_to_capture": [0, 1, 2], "use_dynamic_tree": True},
            "topK is 10.*from 6 tokens",
        ),
    ],
)
def test_settings_beyond_the_head_and_the_target_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    target = judges.target_of("llama")
    head = str(save_eagle3(tmp_path, target, (1, 2, 3), draft_vocab=6))
    values = {"decoding_type": "Eagle3", "speculative_model": head, **settings}
    refuse(DrafterError, words, target, **values)


def test_a_rank_beyond_the_vocabulary_names_the_path(tmp_path: Path) -> None:
    target = judges.sampled_target()
    values = {"speculative_model": str(save_eagle(tmp_path, target)), "eagle_choices": [[12]]}
    refuse(TreeError, r"\[12\].*12", target, decoding_type="Eagle", **values)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"fc.weight": torch.zeros(48, 150)}, "150.*48"),
        ({"norm.weight": None}, "norm.weight"),
        ({"d2t": None}, "d2t"),
        ({"d2t": torch.full((152,), 200)}, "token 351.*239"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(1)}, "2 layers"),
        ({"midlayer.self_attn.k_proj.weight": torch.zeros(12, 96)}, "12×96.*24×96"),
        ({"lm_head.weight": None}, "lacks lm_head.weight"),
        ({"fc.weight": None, "use_aux_hidden_state": False}, "eagle3_layers_to_capture out"),
    ],
)
def test_damaged_heads_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, Any], words: str
) -> None:
    """Tensors replaced, left out (None), or contradicted by a setting."""
    target, ours, config = published()
    changed = {**ours, **tensors}
    config |= {name: changed.pop(name) for name in tensors if isinstance(tensors[name], bool)}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    values = {"decoding_type": "Eagle3", "eagle3_layers_to_capture": [1, 3, 4]}
    values["speculative_model"] = str(write(tmp_path, kept, config))
    refuse(DrafterError, words, target, **values)
