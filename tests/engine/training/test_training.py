"""Trainers: acceptance rises, resuming changes nothing, what was saved is what drafters load."""

from __future__ import annotations

import copy
import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.drafters.heads.vocabulary import Vocabulary
from engine.errors import ConfigError
from engine.model.corpus import Corpus, Entry
from engine.model.target import Target
from engine.training.methods import METHODS, training_settings
from engine.training.packs import FeatureStore, Teacher
from engine.training.session import (
    SessionSettings,
    build_context,
    evaluate,
    held_out_questions,
    save_weights,
    score,
    train,
)
from engine.training.trainer import Trainer, TrainMetrics
from tests.engine.drafters.judges import slow, write
from tests.engine.training.conftest import learnable_target
from tests.models import plain_greedy

FAST: dict[str, dict[str, Any]] = {
    "medusa": {"epochs": 4.0},
    "eagle": {"epochs": 4.0, "token_weight": 1.0},
    "eagle3": {"epochs": 2.5, "depths": 5, "draft_vocab": 240},
    "redrafter": {"epochs": 4.0, "exit_dim": 32},
    "draft_target": {"epochs": 8.0, "hidden_size": 32, "layers": 2},
}
ONE_METHOD = [method if method == "eagle" else slow(method) for method in METHODS]


def settings(method: str, **changes: Any) -> Any:
    fast = {"pack_tokens": 256, "packs_per_step": 1, "learning_rate": 0.01}
    return training_settings(method, {**fast, **FAST[method], **changes})


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """The target's features of all packs, for who trains long; they train as fresh ones do."""
    return FeatureStore(tmp_path_factory.mktemp("features"), 1 << 30)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("medusa", {}),
        ("eagle", {}),
        *(slow(method, {}) for method in ("eagle3", "redrafter", "draft_target")),
        slow("eagle3", {"draft_vocab": None, "loss_vocab": 200}),
    ],
)
def test_acceptance_rises_and_what_was_saved_decodes_losslessly(
    method: str,
    changes: dict[str, Any],
    target: Target,
    corpus: Corpus,
    features: FeatureStore,
    tmp_path: Path,
) -> None:
    wanted = settings(method, weights_dtype="float32", **changes)
    trainer = Trainer(target, corpus, wanted, tmp_path / "training", store=features)
    questions = held_out_questions(corpus, [*trainer.held_out, *trainer.train[:3]], 2, 32)
    config = trainer.settings.decoding(tmp_path, [[0.5, 0.2]] * 4)
    save_weights(trainer, tmp_path)
    before = score(target, config, questions, max_new_tokens=24, cache_dir=tmp_path)
    reports = list(trainer.steps())
    after = evaluate(trainer, tmp_path, questions, cache_dir=tmp_path, max_new_tokens=24)
    assert reports[-1].loss < reports[0].loss
    assert after["overall"].mat > before["overall"].mat + 0.3
    prompt = list(questions[0].prompt_ids)
    with build_context(target, tmp_path) as context:
        text, plain = write(target, config.build(context), prompt), plain_greedy(target, prompt, 24)
    assert text.output[: len(plain)] == plain
    assert text.num_accepted > 0


@pytest.mark.parametrize("method", ["eagle3", *map(slow, METHODS)])
def test_resuming_gives_the_weights_of_an_uninterrupted_run(
    method: str, target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    wanted = settings(method, epochs=0.4, ema=0.9)

    def trained(folder: str) -> Trainer:
        return Trainer(target, corpus, wanted, tmp_path / folder)

    whole = trained("whole")
    assert whole.num_steps >= 6
    list(whole.steps())
    for _ in range(3):
        part = trained("parts")
        list(islice(part.steps(), 2))
    assert part.step == 6
    last = trained("parts")
    list(last.steps())
    assert last.step == whole.step
    with whole.average.applied(), last.average.applied():
        for name, value in whole.student.state_dict().items():
            assert torch.equal(value, last.student.state_dict()[name]), name
    for name, value in whole.student.state_dict().items():
        assert torch.equal(value, last.student.state_dict()[name]), name


def test_a_run_broken_off_at_every_step_is_measured_as_often(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    wanted = settings("medusa", epochs=0.6)
    session = SessionSettings(evals=2, eval_prompts=1, eval_tokens=2, looks=1)

    def measured(events: Iterable[Any]) -> list[tuple[type, int]]:
        return [(type(e), e.step) for e in events if not isinstance(e, TrainMetrics)]

    def run(folder: str) -> Generator[Any]:
        return train(target, corpus, tmp_path / folder, wanted, session, cache_dir=tmp_path)

    def in_parts() -> Iterator[Any]:
        over = False
        while not over:
            with closing(run("parts")) as events:
                for event in events:
                    yield event
                    if isinstance(event, TrainMetrics):
                        break
                else:
                    over = True

    whole = measured(run("whole"))
    assert len(whole) == 3
    assert measured(in_parts()) == whole


def test_a_run_goes_on_with_the_dialogues_it_began_with(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    early = Corpus(corpus.folder, corpus.manifest, corpus.entries[:8])
    first = Trainer(target, early, settings("medusa"), tmp_path)
    list(islice(first.steps(), 1))
    later = Trainer(target, corpus, settings("medusa"), tmp_path)
    assert later.num_train_tokens == first.num_train_tokens
    assert later.step == 1


def test_what_interrupts_a_step_saves_no_half_updated_weights(
    target: Target, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(target, corpus, settings("medusa"), tmp_path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer._optimizer, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(trainer.steps())
    assert not (tmp_path / "training.pt").exists()


@pytest.mark.parametrize("method", ONE_METHOD)
def test_training_goes_on_from_a_trained_drafter(
    method: str, target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    values: dict[str, Any] = {"weights_dtype": "float32", "epochs": 1.0}
    first = Trainer(target, corpus, settings(method, **values), tmp_path / "first")
    list(first.steps())
    (tmp_path / "weights").mkdir()
    first.student.save(tmp_path / "weights", "float32")
    values["begin_with"] = str(tmp_path / "weights")
    second = Trainer(target, corpus, settings(method, **values), tmp_path / "second")
    for name, value in first.student.named_parameters():
        assert torch.equal(value, second.student.get_parameter(name)), name
    assert list(second.steps())[-1].loss < first.log[0]["loss"]


def test_a_method_reads_the_features_that_another_kept(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    store = FeatureStore(tmp_path / "features", 1 << 30)
    eagle3, medusa = settings("eagle3", epochs=1.0), settings("medusa", epochs=1.0)
    list(Trainer(target, corpus, eagle3, tmp_path / "first", store=store).steps())
    kept = features_in(tmp_path)
    plain = Trainer(target, corpus, medusa, tmp_path / "plain")
    second = Trainer(target, corpus, medusa, tmp_path / "second", store=store)
    list(plain.steps())
    list(second.steps())
    assert kept and features_in(tmp_path) == kept
    for name, value in plain.student.state_dict().items():
        assert torch.equal(value, second.student.state_dict()[name]), name


def test_stored_features_are_of_the_very_tokens_weights_and_dtype(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    """Also where a corpus was made anew in its folder, with the same numbers."""
    store = FeatureStore(tmp_path, 1 << 30)

    def hidden(target: Target, entries: Sequence[Entry], store: FeatureStore | None) -> Tensor:
        everything = Vocabulary(None, target.vocab_size)
        return Teacher(target, corpus, (), everything, store=store).read(entries).hidden

    entries = corpus.entries[:2]
    anew = [replace(entry, token_ids=entry.token_ids[::-1].copy()) for entry in entries]
    joined = np.concatenate([entry.token_ids for entry in entries])
    pairs = zip(entries, np.split(joined, [9]), strict=True)
    parted = [replace(entry, token_ids=tokens, spans=()) for entry, tokens in pairs]
    other = learnable_target()
    with torch.no_grad():
        other.model.get_parameter("model.norm.weight").mul_(2.0)
    other.provenance["weights"] = "another digest"
    half = Target(copy.deepcopy(target.model).bfloat16(), None, name=target.name)
    for by, texts in (
        *((target, one) for one in (entries, anew, parted, entries[::-1], entries)),
        *((one, entries) for one in (other, half)),
    ):
        assert torch.equal(hidden(by, texts, store), hidden(by, texts, None))
    assert len([*tmp_path.glob("*-hidden.safetensors")]) == 6


def features_in(folder: Path) -> list[Path]:
    files = (folder / "features").iterdir()
    return sorted(file for file in files if "likely" not in file.name)


def test_features_are_kept_only_up_to_the_limit(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    store = FeatureStore(tmp_path / "features", 100_000)
    trainer = Trainer(target, corpus, settings("medusa", epochs=1.0), tmp_path, store=store)
    list(trainer.steps())
    used = sum(file.stat().st_size for file in (tmp_path / "features").iterdir())
    assert 0 < used < 110_000


def test_the_card_tells_data_steps_versions_and_mat_keeps_a_curve_and_no_paths(
    target: Target, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "name", str(tmp_path))
    values = {"epochs": 0.2, "begin_with": str(tmp_path / "somebodys-heads")}
    (tmp_path / "somebodys-heads").mkdir()
    first = Trainer(target, corpus, settings("redrafter"), tmp_path / "first")
    first.student.save(tmp_path / "somebodys-heads", "float32")
    trainer = Trainer(target, corpus, settings("redrafter", **values), tmp_path / "training")
    list(trainer.steps())
    trainer.log = [{**trainer.log[-1], "step": step} for step in range(1000)]
    questions = held_out_questions(corpus, trainer.held_out, 1, 32)
    (tmp_path / "card.json").write_text("{}")
    (tmp_path / "in a reader").hardlink_to(tmp_path / "card.json")
    scores = evaluate(trainer, tmp_path, questions, cache_dir=tmp_path, max_new_tokens=8)
    assert (tmp_path / "in a reader").read_text() == "{}", "the card was not replaced at once"
    text = (tmp_path / "card.json").read_text()
    card = json.loads(text)
    assert card["steps"] == trainer.step and card["settings"]["seed"] == 0
    assert card["settings"]["begin_with"] == "somebodys-heads" and str(tmp_path) not in text
    steps = [entry["step"] for entry in card["training_log"]]
    assert steps[:2] == [0, 8] and steps[-1] == 999 and len(steps) < 130
    assert card["data"]["num_tokens"] == trainer.num_train_tokens
    assert card["versions"]["torch"] == torch.__version__
    assert card["held_out"]["overall"]["mat"] == scores["overall"].mat
    assert set(card["held_out"]) == {"overall", *(q.category for q in questions)}
    assert f"| overall | {scores['overall'].mat:.2f} |" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 100, "heads": 3}, "multiple of twice the 3 heads"),
        ({"weights_dtype": "int8"}, "must be float32 or bfloat16"),
    ],
)
def test_a_draft_model_that_cannot_be_made_is_refused(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training_settings("draft_target", values)


def test_other_settings_one_dialogue_and_a_damaged_checkpoint_are_refused(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    list(islice(Trainer(target, corpus, settings("medusa"), tmp_path).steps(), 1))
    for other, message in (
        (settings("medusa", heads=3), "made with settings .*another --output"),
        (settings("eagle"), "made with method = 'medusa', but now it is 'eagle'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Trainer(target, corpus, other, tmp_path)
    one = Corpus(corpus.folder, corpus.manifest, corpus.entries[:1])
    with pytest.raises(ConfigError, match="has 1 dialogues; training needs at least 2"):
        Trainer(target, one, settings("medusa"), tmp_path / "one")
    (tmp_path / "training.pt").write_bytes(b"no checkpoint")
    with pytest.raises(ConfigError, match="could not be read.*Remove it to start anew"):
        Trainer(target, corpus, settings("medusa"), tmp_path)


@pytest.mark.parametrize("method", ONE_METHOD)
def test_a_bfloat16_target_trains_float32_weights(
    method: str, corpus: Corpus, tmp_path: Path
) -> None:
    half = learnable_target()
    half.model.to(torch.bfloat16)
    trainer = Trainer(half, corpus, settings(method, epochs=0.5), tmp_path / "training")
    reports = list(trainer.steps())
    assert reports[-1].loss < reports[0].loss
    assert {p.dtype for p in trainer.student.parameters()} == {torch.float32}
    save_weights(trainer, tmp_path)
    weights = load_file(next(tmp_path.glob("*.safetensors")))
    floating = {t.dtype for t in weights.values() if t.is_floating_point()}
    assert floating == {torch.bfloat16}
