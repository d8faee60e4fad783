"""The methods to pick from: grouped, none twice, with what was last measured of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from engine.model.sources import TargetSpec
from playground import export
from playground.experiments.forms import first_methods
from playground.host.catalog import Catalog
from playground.host.menu import BASELINE, FURTHER, GROUPS, RECOMMENDED, MethodMenu
from playground.host.plain import PlainStep
from playground.trees.sources import Sources
from playground.web.experiment import ExperimentPage
from playground.web.shell import run_title
from presets import method_preset
from storage import RunLog
from tests.storage.conftest import finish, new_run, request

EMBEDDED = "smollm2-135m-instruct"


def grouped(menu: MethodMenu, target: str) -> dict[str, list[str]]:
    """Keys by group, in the order of the picker."""
    found: dict[str, list[str]] = {}
    for label, key in menu.choices(target):
        found.setdefault(label.rpartition(" · ")[2], []).append(key)
    return found


@pytest.mark.parametrize("target", Catalog.shipped().targets)
def test_groups_stand_together_and_hold_every_method_once(target: str, log: RunLog) -> None:
    catalog = Catalog.shipped()
    choices = MethodMenu(catalog, log).choices(target)
    order = [list(GROUPS).index(label.rpartition(" · ")[2]) for label, _ in choices]
    assert order == sorted(order)
    keys = [key for _, key in choices]
    assert len(set(keys)) == len(keys)
    configs = [catalog.method(key).config for key in keys]
    assert all(one not in configs[:at] for at, one in enumerate(configs))
    offered = {key for _, key in catalog.method_choices(target)}
    assert all(catalog.method(key).config in configs for key in offered - set(keys))


def test_shipped_methods_are_in_the_groups_that_people_look_for(log: RunLog) -> None:
    catalog, first = Catalog.shipped(), "suffix-draft-smollm2-135m"
    found = grouped(MethodMenu(catalog, log), EMBEDDED)
    assert found[RECOMMENDED] == [first] and found[BASELINE] == ["plain"]
    assert "eagle2-smollm2-135m" in found["trained"]
    assert "suffix-smollm2-135m" in found["no weights"]
    assert found["untrained"] == ["pard-smollm2-135m"]
    assert "suffix" in found["no weights"] and "type:Medusa" in found[FURTHER]
    assert catalog.first_method(EMBEDDED) == first
    assert first_methods(catalog, catalog.method_choices(EMBEDDED))[0] == first
    assert catalog.first_method(EMBEDDED, alone=True) == "suffix-smollm2-135m"
    assert catalog.first_method("vicuna-7b-v1.3") == "ngram"


def test_a_head_is_offered_for_its_model_from_any_place() -> None:
    catalog, head = Catalog.shipped(), "head"
    values = {"name": head, "title": "Its head", "target": "qwen2.5-coder-0.5b-instruct"}
    config = {"decoding_type": "Eagle3", "speculative_model": "owner/head"}
    catalog.presets[head] = method_preset({**values, "config": config}, where="a test")
    place = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"
    catalog.targets["own"] = TargetSpec(name="own", hub=place)
    catalog.targets["other"] = TargetSpec(name="other", path="/models/x.gguf", title="Other 1B")
    assert head in [key for _, key in catalog.method_choices("own")]
    assert head not in [key for _, key in catalog.method_choices("other")]
    assert "Its head" not in [title for title, _ in catalog.unavailable("own")]
    assert ("Its head", f"made for {values['target']}") in catalog.unavailable("other")


def test_random_targets_stand_last_and_start_with_their_own_drafter(log: RunLog) -> None:
    catalog = Catalog.shipped()
    labels = [label.rpartition(" · ")[2] for label, _ in catalog.target_choices()]
    assert labels[-3:] == ["random"] * 3 and "random" not in labels[:-3]
    for name, spec in catalog.targets.items():
        key = catalog.first_method(name)
        first = catalog.presets[key]
        assert spec.random is None or (first.untrained and first.target == name)
        assert spec.random is None or key in grouped(MethodMenu(catalog, log), name)["untrained"]


PLACE = {"dtype": "bfloat16", "device": "cpu", "environment": {"device_name": "a", "weights": "w"}}


def measured(log: RunLog, tok_s: float, *, drift: float = 1.0, **changes: Any) -> None:
    """A run of n-gram lookup, 4 tokens a step, compared with plain decoding at 10 tok/s."""
    stored: dict[str, Any] = {"method": settings("ngram"), "target": EMBEDDED, **PLACE, **changes}
    run_id = log.begin(new_run(**stored))
    plain = PlainStep(0.1, 0.0, "around", drift=drift)
    split = {"draft_s": 0.0, "verify_s": 4 / tok_s, "accept_s": 0.0, "other_s": 0.0}
    figures = {"mat": 4.0, "num_steps": 20, "num_new_tokens": 81, "tok_s": tok_s}
    figures["decode_s"] = 80 / tok_s
    finish(log, run_id, {**figures, "time_split": split, "plain": asdict(plain)})


def settings(key: str, **changes: Any) -> dict[str, Any]:
    return Catalog.shipped().method(key).config.replace(**changes).model_dump(mode="json")


def label_of(log: RunLog) -> str:
    """What the menu says after the title of n-gram lookup."""
    menu = MethodMenu(Catalog.shipped(), log)
    label = next(label for label, key in menu.choices(EMBEDDED) if key == "ngram")
    return label.removeprefix(Catalog.shipped().method("ngram").title).removeprefix(" · ")


def test_last_measured_speedup_stands_with_a_method(log: RunLog) -> None:
    measured(log, 30.0)
    measured(log, 15.0)
    measured(log, 20.0, drift=1.4)  # uncertain: the machine's speed changed
    measured(log, 90.0)  # impossible at 4 tokens a step
    assert label_of(log) == f"1.50× · {RECOMMENDED}"
    other = MethodMenu(Catalog.shipped(), log).choices("vicuna-7b-v1.3")
    assert not any("×" in label for label, _ in other)


OTHERS: list[dict[str, Any]] = [
    *({"method": method} for method in (settings("ngram", max_draft_len=6), settings("suffix"))),
    *({"dtype": "float32"}, {"device": "cuda"}),
    *({"environment": {"device_name": name, "weights": w}} for name, w in (("a", "x"), ("b", "w"))),
]


@pytest.mark.parametrize("changes", OTHERS)
def test_other_settings_weights_dtypes_and_devices_label_no_preset(
    log: RunLog, changes: dict[str, Any]
) -> None:
    measured(log, 13.1, method_title="N-gram", **changes)
    measured(log, 9.3, method_title="N-gram")
    assert label_of(log) == "0.93× · no weights"


def experiment(log: RunLog, tok_s: float, **changes: Any) -> None:
    """A comparison: 81 tokens of plain decoding at 10 tok/s, and of n-gram lookup."""
    methods = ((settings("plain"), 10.0, 80), (settings("ngram", **changes), tok_s, 20))
    for method, rate, steps in methods:
        asked = request(method["decoding_type"], experiment_id=f"{tok_s}")
        run_id = log.begin(new_run(method=method, target=EMBEDDED, **asked, **PLACE))
        figures = {"tok_s": rate, "num_steps": steps, "decode_s": 80 / rate}
        finish(log, run_id, figures, output_ids=[5] * 81)


def test_an_experiment_counts_more_than_a_single_run(log: RunLog) -> None:
    experiment(log, 12.5)
    experiment(log, 13.1, max_draft_len=6)  # the last trial of a sweep is not the preset
    measured(log, 30.0)
    assert label_of(log) == f"1.25× · {RECOMMENDED}"


def test_where_the_target_ran_last_decides_which_speedups_are_shown(log: RunLog) -> None:
    measured(log, 5.0)
    assert RECOMMENDED not in grouped(MethodMenu(Catalog.shipped(), log), EMBEDDED), "too slow"
    measured(log, 9.3, dtype="float32")
    assert label_of(log) == "0.93× · no weights"


@pytest.fixture
def half_past_five_ahead() -> Iterator[None]:
    """A local time of UTC+5:30."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "IST-5:30")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("half_past_five_ahead")
def test_pickers_show_the_local_time() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("benchmark_id", "target"))
    texts = dict.fromkeys(("id", "name", "method_title", "prompt_text", "status"), "x")
    at = datetime(2026, 3, 1, 22, 0, tzinfo=UTC)
    row: Any = SimpleNamespace(**texts, **nothing, meta={}, created_at=at)
    log: Any = SimpleNamespace(newest=lambda sweeps: [row])
    page: Any = SimpleNamespace(name="benchmark", experiments=log)
    assert ExperimentPage.choices(page) == [("x · x · 02 Mar 03:30", "x")]
    assert run_title(row) == "x · x · 02 Mar 03:30"
    assert export._title(row, "") == "x · 02 Mar 03:30"
    assert Sources._table_source(page, row).title.endswith(" · Mar 02, 03:30")
