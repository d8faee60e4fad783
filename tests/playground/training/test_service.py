"""Trainings on a tiny random target: in turns with other runs, stopped, killed, resumed, used."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import presets
from engine.drafters import methods as decoding_types
from engine.drafters import parse_method
from engine.errors import ConfigError
from engine.metrics import Metrics, measure
from engine.model.corpus import Corpus
from engine.steps import Record
from engine.training import trainer
from engine.training.session import Question
from playground.host.runner import EngineHost
from playground.training import work
from playground.training.figures import FIGURES
from playground.training.folder import TrainingFolder
from playground.training.plan import TrainPlan, corpus_folder, plan_of_form, prompts_of_runs
from playground.training.service import Trainings
from playground.training.work import Speeds, TrainingWork, outlook, predicted_mat
from playground.web.train import card_html
from storage import RunLog
from tests.models import build_context, tiny_target
from tests.playground.asks import WAIT_S, finished, start, until
from tests.playground.tiny import tiny_catalog
from tests.storage.conftest import NUM_THREADS, errors_at_once

RECIPE = {"pack_tokens": 256, "packs_per_step": 1, "heads": 2, "epochs": 6.0}
SESSION = {"evals": 2, "eval_prompts": 1, "eval_tokens": 8, "looks": 3}


@pytest.fixture(scope="module")
def host(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    folder = tmp_path_factory.mktemp("host")
    catalog = replace(tiny_catalog(tiny_folder), types=decoding_types())
    with RunLog.open(str(folder / "runs.db")) as log:
        host = EngineHost(log, catalog, cache_dir=folder / "cache", device="cpu")
        yield host
        host.close()


@pytest.fixture(scope="module")
def trainings(host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """All learn from the same texts, which none may extend."""
    return Trainings(host, tmp_path_factory.mktemp("training"))


@pytest.fixture(autouse=True)
def note_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny training is over before a second note is due."""
    monkeypatch.setattr(work, "NOTE_S", 0.0)


@pytest.fixture(scope="module")
def whole(trainings: Trainings, host: EngineHost) -> str:
    """A training that nothing came between, and that is done."""
    name = trainings.start(plan_for(trainings, host))
    assert ended(trainings, name) == "completed"
    return name


def plan_for(trainings: Trainings, host: EngineHost, **changes: Any) -> TrainPlan:
    form = {
        "target": "tiny",
        "dtype": "float32",
        "method": "medusa",
        "learn_from": "shipped",
        "budget": {"minutes": "", "tokens": "1500"},
        "training": RECIPE,
        "session": SESSION,
    }
    return plan_of_form(host.catalog, host.log, trainings.corpora, {**form, **changes})


def ended(trainings: Trainings, name: str) -> str:
    """The status that a training ended with."""
    job = trainings.look(name).task
    if job is not None:
        until(job.over.is_set)
    state = trainings.look(name)
    assert state.progress.error == "" or state.progress.status == "failed"
    return state.progress.status


def test_the_card_of_a_training_shows_its_newest_figures(trainings: Trainings, whole: str) -> None:
    state = trainings.look(whole)
    card, measured = card_html(state), state.curve["measured"][-1]
    assert f'<b data-figure="mat">{measured["mat"]:.2f}</b>' in card
    assert state.card is not None and f"{state.card.num_parameters:,} parameters" in card


class Gate:
    """Holds a training at each of its first steps until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, num_steps: int) -> None:
        self._reached, self._opened = threading.Semaphore(0), threading.Semaphore(0)
        note, numbers = TrainingWork._note_step, iter(range(num_steps))

        def held(training: TrainingWork, *step: Any) -> None:
            note(training, *step)
            if next(numbers, None) is not None:
                self._reached.release()
                assert self._opened.acquire(timeout=WAIT_S)

        patch.setattr(TrainingWork, "_note_step", held)

    def wait(self) -> None:
        """Until the training is held."""
        assert self._reached.acquire(timeout=WAIT_S)

    def open(self) -> None:
        self._opened.release()


def weights(trainings: Trainings, name: str) -> bytes:
    return next((trainings.folder / "heads" / name).glob("*.safetensors")).read_bytes()


def test_a_training_writes_learns_and_stands_among_the_methods(
    trainings: Trainings, host: EngineHost, whole: str, tmp_path: Path
) -> None:
    name, state = whole, trainings.look(whole)
    assert state.progress.corpus_tokens >= 1500 and state.progress.text
    steps = [point["step"] for point in state.curve["loss"]]
    assert steps == sorted(set(steps)) and steps[-1] == state.progress.num_steps
    assert len(state.curve["held out"]) == 3 and len(state.curve["measured"]) == 2
    for point in state.curve["measured"]:  # no number where the machine was busy with other tests
        assert point["mat"] >= 1 and (point["speedup"] is None or point["speedup"] > 0)
    target, method = trainings.method(name)
    assert (target, method) == ("tiny", name)
    assert name in [key for _, key in host.menu.choices("tiny")]
    run = start(host, method=name, prompt="Say hello.")
    assert finished(run).state == "completed"
    with zipfile.ZipFile(trainings.export(name, tmp_path / "out")) as archive:
        files = {Path(one).name for one in archive.namelist()}
        assert {"config.json", "card.json", "README.md"} < files
        card = archive.read(f"{name}/README.md").decode()
    assert "minutes; last loss" in card and "Settings: seed 0; epochs" in card
    del host.catalog.presets[name]
    Trainings(host, trainings.folder)  # as another server finds it
    assert name in host.catalog.presets


def test_stopped_or_killed_and_resumed_it_ends_with_the_same_weights(
    trainings: Trainings, host: EngineHost, whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, 2)
    cut = trainings.start(plan_for(trainings, host))
    assert cut != whole
    gate.wait()
    with pytest.raises(ConfigError, match="is being trained"):
        trainings.start(plan_for(trainings, host))
    gate.open()
    gate.wait()
    trainings.stop(cut)
    gate.open()
    assert ended(trainings, cut) == "cancelled"
    stopped_at = trainings.look(cut).progress.step
    assert 2 <= stopped_at < trainings.look(whole).progress.num_steps
    folder = TrainingFolder(trainings.folder / "heads" / cut)
    folder.write_progress(folder.progress.replace(status="running"))  # as a kill leaves it
    with (folder.path / "training" / "curve.jsonl").open("a") as file:
        file.write('{"kind": "lo')
    later = Trainings(host, trainings.folder)
    assert later.look(cut).progress.status == "interrupted"
    with folder.running():
        assert later.look(cut).progress.status == "running"
    later.resume(cut)
    assert ended(later, cut) == "completed"
    assert weights(trainings, cut) == weights(trainings, whole)
    steps = [point["step"] for point in trainings.look(cut).curve["held out"]]
    assert steps == [point["step"] for point in trainings.look(whole).curve["held out"]]


def test_runs_of_the_page_come_first_and_change_nothing(
    trainings: Trainings, host: EngineHost, whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither do those on the target in another dtype, for which it is loaded anew."""
    gate = Gate(monkeypatch, 4)  # held once more after the last run
    name = trainings.start(plan_for(trainings, host))
    for dtype in ("float32", "bfloat16", "float32"):
        gate.wait()
        run = start(host, method="plain", prompt="Say hello.", dtype=dtype)
        gate.open()
        assert finished(run).state == "completed"
    gate.open()
    assert ended(trainings, name) == "completed"
    assert weights(trainings, name) == weights(trainings, whole)


def test_pauses_for_other_runs_are_not_charged(
    trainings: Trainings, host: EngineHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0], perf_counter=lambda: now_s[0])
    monkeypatch.setattr(work, "time", clock)
    monkeypatch.setattr(trainer, "time", clock)
    plan = plan_for(trainings, host, budget={"minutes": "", "tokens": "400"})
    folder, speeds = TrainingFolder(tmp_path / "heads" / "paused-1"), Speeds(tmp_path / "speeds")
    job = TrainingWork(plan.replace(corpus=tmp_path / "corpus"), folder, speeds, cache_dir=tmp_path)
    with job.recorded(), closing(job.run(tiny_target())) as events:
        for _ in events:
            now_s[0] += 10.0
    assert folder.card is not None
    assert folder.progress.seconds == folder.card.seconds == 0 < now_s[0]


@pytest.mark.slow
def test_minutes_are_kept_by_fitting_the_passes(
    trainings: Trainings, host: EngineHost, tmp_path: Path
) -> None:
    budget = {"minutes": "0.15", "tokens": ""}
    plan = plan_for(trainings, host, budget=budget).replace(corpus=tmp_path / "corpus")
    name = trainings.start(plan)
    assert ended(trainings, name) == "completed"
    state = trainings.look(name)
    assert state.plan.fitted and state.plan.settings["epochs"] != RECIPE["epochs"]
    assert trainings.speeds.read(plan)["train"] > 0
    text = outlook(plan, host.catalog, host.log, trainings.speeds)
    assert "of training, which reads" in text and "MB of disk" in text and "reached MAT" in text


def test_a_training_speed_holds_for_its_recipe_dtype_and_device(
    trainings: Trainings, host: EngineHost, tmp_path: Path
) -> None:
    plan, file = plan_for(trainings, host), tmp_path / "speeds.json"
    speeds = Speeds(file, "cpu")
    speeds.note(plan, "write", 20.0)
    speeds.note(plan, "train", 100.0)
    longer = plan.replace(seed=5, settings={**plan.settings, "epochs": 9.0})
    assert speeds.read(plan) == speeds.read(longer) == {"write": 20.0, "train": 100.0}
    larger = plan.replace(settings={**plan.settings, "heads": 4})
    assert speeds.read(larger) == {"write": 20.0}
    assert speeds.read(plan.replace(dtype="bfloat16")) == Speeds(file, "cuda").read(plan) == {}


def test_speeds_that_trainings_note_at_once_are_all_kept(
    trainings: Trainings, host: EngineHost, tmp_path: Path
) -> None:
    plan, file = plan_for(trainings, host), tmp_path / "new" / "speeds.json"

    def note(number: int) -> None:
        for tok_s in (1.0, 2.0, 3.0):
            Speeds(file, f"cuda:{number}").note(plan, "write", tok_s)

    assert errors_at_once(note) == []
    for number in range(NUM_THREADS):
        assert Speeds(file, f"cuda:{number}").read(plan) == {"write": 3.0}


def test_it_learns_from_answers_to_the_prompts_of_a_file_and_of_the_log(
    trainings: Trainings, host: EngineHost, tmp_path: Path
) -> None:
    (file := tmp_path / "mine.jsonl").write_text('{"category": "mine", "turns": ["Tea?"]}\n')
    plan = plan_for(trainings, host, learn_from="prompts", file=str(file))
    assert [(one.category, one.turns) for one in plan.prompts] == [("mine", ("Tea?",))]
    with RunLog.open() as empty, pytest.raises(ConfigError, match="no run of tiny"):
        prompts_of_runs(empty, "tiny")
    for prompt in ("Say hello.", "Count to ten.", "Say hello."):
        finished(start(host, method="plain", prompt=prompt))
    plan = plan_for(trainings, host, learn_from="runs", budget={"minutes": "", "tokens": "400"})
    assert sorted(one.turns[0] for one in plan.prompts) == ["Count to ten.", "Say hello."]
    assert plan.corpus != plan_for(trainings, host).corpus
    name = trainings.start(plan)
    assert ended(trainings, name) == "completed"
    card = json.loads((trainings.look(name).where / "card.json").read_text())
    assert set(card["data"]["categories"]) == {"runs"}


def test_a_shipped_corpus_is_copied_before_it_is_extended(
    trainings: Trainings, host: EngineHost, whole: str, tmp_path: Path
) -> None:
    shipped, corpora = tmp_path / "shipped" / "tiny", tmp_path / "corpora"
    shutil.copytree(
        trainings.look(whole).plan.corpus, shipped, ignore=shutil.ignore_patterns("features")
    )
    before = {file: file.read_bytes() for file in shipped.iterdir()}
    more = Corpus.open(shipped).num_tokens + 500
    plan = plan_for(trainings, host, budget={"minutes": "", "tokens": str(more)})
    name = trainings.start(plan.replace(corpus=shipped, corpora=corpora))
    assert ended(trainings, name) == "completed"
    assert {file: file.read_bytes() for file in shipped.iterdir()} == before
    own = trainings.look(name).plan.corpus
    assert own == corpora / "tiny" and trainings.look(name).progress.corpus_tokens >= more
    texts = [(folder / "dialogues.jsonl").read_bytes() for folder in (own, shipped)]
    assert texts[0].startswith(texts[1]) and texts[0] != texts[1]


def test_other_weights_of_the_same_name_write_a_corpus_of_their_own(
    trainings: Trainings, host: EngineHost, whole: str, tmp_path: Path
) -> None:
    plan = plan_for(trainings, host).replace(corpora=tmp_path, corpus=tmp_path / "tiny")
    shutil.copytree(trainings.look(whole).plan.corpus, plan.corpus)
    manifest = json.loads((plan.corpus / "corpus.json").read_text()) | {"hidden_size": 1}
    (plan.corpus / "corpus.json").write_text(json.dumps(manifest))
    corpora = set[Path]()
    for _ in range(2):
        name = trainings.start(plan)
        assert ended(trainings, name) == "completed"
        corpora.add(trainings.look(name).plan.corpus)
    assert len(corpora) == 1 and plan.corpus not in corpora
    name = trainings.start(plan.replace(corpora=None))
    assert ended(trainings, name) == "failed"
    assert "Give another folder" in trainings.look(name).progress.error


def test_the_copy_of_a_shipped_corpus_is_used_from_then_on(tmp_path: Path) -> None:
    target = presets.resolve("smollm2-135m-instruct")
    own, shipped = tmp_path / target.name, presets.FOLDER / "corpora" / target.name
    assert corpus_folder(tmp_path, target, ()) == shipped
    own.mkdir()
    shutil.copy(shipped / "corpus.json", own)
    assert corpus_folder(tmp_path, target, ()) == own


# ---- damaged files


DAMAGED = [b"", b"{", b"[]", b"{}", b"\xff", b'{"method": 3, "status": 4, "held_out": "overall"}']
"""Contents of a file of settings."""


@pytest.fixture
def copied(trainings: Trainings, whole: str, tmp_path: Path) -> Path:
    """The folder of a copy of the whole training."""
    folder = tmp_path / "heads" / "damaged-1"
    return shutil.copytree(trainings.folder / "heads" / whole, folder)


def without(part: str, card: dict[str, Any]) -> bytes:
    """The card without one of its parts."""
    *within, last = part.split(".")
    owner = card
    for name in within:
        owner = owner[name]
    del owner[last]
    return json.dumps(card).encode()


@pytest.mark.parametrize(
    "damage",
    [
        *DAMAGED,
        *"method num_parameters seconds data data.num_tokens settings.epochs held_out.overall "
        "held_out.overall.mat evaluated_with evaluated_with.decoding_type".split(),
    ],
    ids=str,
)
def test_a_damaged_card_hinders_neither_start_nor_look(
    damage: bytes | str, trainings: Trainings, host: EngineHost, whole: str, copied: Path
) -> None:
    file = copied / "card.json"
    sound = json.loads(file.read_text())
    file.write_bytes(damage if isinstance(damage, bytes) else without(damage, sound))
    later = Trainings(host, copied.parents[1])
    assert later.newest() == ["damaged-1"] and "damaged-1" not in host.catalog.presets
    state = later.look("damaged-1")
    assert state.card is None and state.curve == trainings.look(whole).curve
    card_html(state)
    assert state.can_resume and "card.json is missing or damaged; Resume" in state.text
    with pytest.raises(ConfigError, match="no sound card.json yet. Wait, or resume it"):
        later.method("damaged-1")


def test_a_training_whose_card_is_damaged_is_measured_again(
    host: EngineHost, copied: Path, whole: str, trainings: Trainings
) -> None:
    (copied / "card.json").write_text("{}")
    later = Trainings(host, copied.parents[1])
    later.resume("damaged-1")
    assert ended(later, "damaged-1") == "completed"
    state, sound = later.look("damaged-1"), trainings.look(whole)
    assert state.text == "done" and not state.can_resume
    assert state.card is not None and sound.card is not None and state.card.mat == sound.card.mat
    del host.catalog.presets["damaged-1"]


@pytest.mark.parametrize("content", DAMAGED[:3] + DAMAGED[4:])
def test_a_training_whose_progress_is_damaged_says_so_and_is_resumed(
    content: bytes, host: EngineHost, copied: Path
) -> None:
    (copied / "training" / "standing.json").write_bytes(content)
    later = Trainings(host, copied.parents[1])
    state = later.look("damaged-1")
    assert state.status == "interrupted" and state.can_resume
    assert "standing.json" in state.error and state.error.endswith(". Resume writes it anew.")
    later.resume("damaged-1")
    assert ended(later, "damaged-1") == "completed"
    del host.catalog.presets["damaged-1"]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_training_whose_plan_is_damaged_says_what_to_do(
    content: bytes, host: EngineHost, copied: Path
) -> None:
    (copied / "training" / "plan.json").write_bytes(content)
    later = Trainings(host, copied.parents[1])
    for use in (later.look, later.resume):
        with pytest.raises(ConfigError, match="This training cannot go on; start a new one"):
            use("damaged-1")


@pytest.mark.parametrize(
    "line",
    [
        *(one for one in DAMAGED if one),
        b'{"kind": "loss", "loss": 1.0, "seconds": 1.0}',
        b'{"kind": "loss", "step": "3", "loss": 1.0, "seconds": 1.0}',
        b'{"kind": "loss", "step": 3, "loss": null}',
        b'{"kind": "held out", "step": 3, "top1": 0.5}',
        b'{"kind": "held out", "step": 3, "top1": [null]}',
        b'{"kind": "measured", "step": 3, "mat": null, "speedup": 1.0, "top1": [0.5]}',
        b'{"kind": "anything", "step": 3}',
    ],
    ids=str,
)
def test_a_damaged_line_of_a_curve_is_named_and_the_curve_is_there_without_it(
    line: bytes, host: EngineHost, copied: Path
) -> None:
    file = copied / "training" / "curve.jsonl"
    sound = file.read_bytes()
    lines = sound.split(b"\n")
    file.write_bytes(b"\n".join([*lines[:2], line, *lines[2:]]))
    later = Trainings(host, copied.parents[1])
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"curve\.jsonl has a damaged line: .*\. Delete it\."):
            later.look("damaged-1")
    file.write_bytes(sound)
    assert later.look("damaged-1").curve == TrainingFolder(copied).curve() != {}


def test_points_without_some_of_their_values_are_drawn(
    trainings: Trainings, whole: str, tmp_path: Path
) -> None:
    state, folder = trainings.look(whole), TrainingFolder(tmp_path)
    with folder.running():
        for step, top1 in enumerate(([0.5], [0.5, 0.25], [])):
            folder.add("held out", step, top1=top1)
        for kind in ("loss", "held out", "measured"):
            folder.add(kind, 3)
    lines = FIGURES["guesses"](folder.curve()).data
    assert [line.y for line in lines] == [(0.5, 0.5, None, None), (None, 0.25, None, None)]
    assert "nan" in card_html(replace(state, curve=folder.curve()))
    for draw in FIGURES.values():
        draw(folder.curve())


# ---- mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learn_from": "prompts"}, "Add a file of prompts"),
        ({"budget": {"minutes": "", "tokens": ""}}, "minutes or tokens must be given"),
        ({"training": {"begin_with": "/etc"}}, "command line only"),
        ({"target": "nobody"}, "nobody"),
    ],
)
def test_mistakes_are_one_sentence(
    changes: Mapping[str, Any], message: str, trainings: Trainings, host: EngineHost
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_for(trainings, host, **changes)


def test_a_target_that_cannot_be_trained_for_fails_with_its_sentence(
    trainings: Trainings, host: EngineHost
) -> None:
    plan = plan_for(trainings, host, method="eagle3", training={})
    name = trainings.start(plan)
    assert ended(trainings, name) == "failed"
    assert "at least 7" in trainings.look(name).progress.error
    for wrong in ("../heads", "", "none", "a/b"):
        with pytest.raises(ConfigError, match="No training is named"):
            trainings.look(wrong)


@pytest.mark.parametrize(
    ("left_s", "tok_s", "is_written"),
    [(-1.0, None, True), (60.0, None, False), (60.0, 1e3, False), (60.0, 1.0, True)],
)
def test_texts_are_written_until_the_minutes_are_needed_for_training(
    left_s: float, tok_s: float | None, is_written: bool, trainings: Trainings, host: EngineHost
) -> None:
    plan = plan_for(trainings, host, budget={"minutes": "2", "tokens": ""})
    assert plan.is_written(5000, left_s, tok_s) == is_written


def test_predicted_mat_of_a_chain() -> None:
    assert predicted_mat([0.5, 0.5], 2) == 1 + 0.5 + 0.25
    assert predicted_mat([0.5], 3) == 1 + 0.5 + 0.25 + 0.125
    assert predicted_mat([], 3) == 1.0


@pytest.mark.parametrize(("plain_step_s", "is_given"), [(1.0, True), (10.0, False)])
def test_no_speedup_is_given_over_plain_decoding_that_was_slowed_down(
    monkeypatch: pytest.MonkeyPatch, plain_step_s: float, is_given: bool
) -> None:
    """A step of two rows that takes less time than one of one row ran on a faster machine."""
    steps_s = itertools.cycle([1.0, plain_step_s])

    def timed(records: Iterable[Record]) -> Metrics:
        metrics = measure(records)
        return replace(metrics, decode_s=next(steps_s) * metrics.num_steps)

    context = build_context(tiny_target(eos_token_id=None))
    config = parse_method({"decoding_type": "NGram", "drafting": "as set"})
    assert work.speed_beside_plain(context, config, [], 32) is None
    monkeypatch.setattr(work, "measure", timed)
    speedup = work.speed_beside_plain(context, config, [Question("any", (5, 6) * 8)], 32)
    assert (speedup is not None) == is_given
