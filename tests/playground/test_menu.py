"""The methods to pick from: grouped, none twice, with what was last measured of each."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from playground.host.catalog import TYPE_PREFIX, Catalog
from playground.host.menu import BASELINE, FURTHER, GROUPS, RECOMMENDED, MethodMenu
from playground.host.plain import PLAIN, PlainStep
from playground.web.components import static_text
from storage import RunLog
from tests.storage.conftest import new_run

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


def test_plain_decoding_has_one_name() -> None:
    catalog = Catalog.shipped()
    asked = (key for key in (*catalog.presets, f"{TYPE_PREFIX}{PLAIN}"))
    plain = [one for one in map(catalog.method, asked) if one.config.decoding_type == PLAIN]
    assert len(plain) == 2 and {one.title for one in plain} == {"Plain decoding"}


def test_shipped_methods_are_in_the_groups_that_people_look_for(log: RunLog) -> None:
    found = grouped(MethodMenu(Catalog.shipped(), log), EMBEDDED)
    assert found[RECOMMENDED] == ["suffix-draft-smollm2-135m"] and found[BASELINE] == ["plain"]
    assert "eagle2-smollm2-135m" in found["trained"]
    assert "suffix-smollm2-135m" in found["no weights"]
    assert found["untrained"] == ["pard-smollm2-135m"]
    assert "suffix" in found["no weights"] and "type:Medusa" in found[FURTHER]


def test_random_targets_stand_last_and_start_with_their_own_drafter(log: RunLog) -> None:
    catalog = Catalog.shipped()
    labels = [label.rpartition(" · ")[2] for label, _ in catalog.target_choices()]
    assert labels[-3:] == ["random"] * 3 and "random" not in labels[:-3]
    for name, spec in catalog.targets.items():
        key = catalog.first_method(name)
        first = catalog.presets[key]
        assert spec.random is None or (first.untrained and first.target == name)
        assert spec.random is None or key in grouped(MethodMenu(catalog, log), name)["untrained"]


def measured(
    log: RunLog, title: str, tok_s: float, plain_tok_s: float, *, drift: float = 1.0
) -> None:
    """A run that was compared with plain decoding."""
    method = {"decoding_type": "NGram"}
    run_id = log.begin(new_run(target=EMBEDDED, method=method, method_title=title))
    plain = PlainStep(1 / plain_tok_s, 0.0, "around", drift=drift)
    split = {"draft_s": 0.0, "verify_s": 2 / tok_s, "accept_s": 0.0, "other_s": 0.0}
    counts = {"mat": 2.0, "num_steps": 20, "num_new_tokens": 41}
    metrics = {"tok_s": tok_s, "time_split": split, "plain": asdict(plain), **counts}
    log.finish(
        run_id,
        status="completed",
        output_ids=[5, 6],
        text="ab",
        finish_reason="length",
        metrics=metrics,
    )


def test_last_measured_speedup_stands_with_a_method(log: RunLog) -> None:
    catalog = Catalog.shipped()
    menu, title = MethodMenu(catalog, log), catalog.method("ngram").title
    assert menu.speedup(EMBEDDED, "ngram") is None
    measured(log, title, 30.0, 10.0)
    measured(log, title, 15.0, 10.0)
    measured(log, title, 90.0, 10.0, drift=1.4)  # uncertain: the machine's speed changed
    labels = {key: label for label, key in menu.choices(EMBEDDED)}
    assert labels["ngram"] == f"{title} · 1.50× · {RECOMMENDED}"
    assert menu.speedup("vicuna-7b-v1.3", "ngram") is None


def test_what_was_slower_than_plain_decoding_is_not_recommended(log: RunLog) -> None:
    catalog = Catalog.shipped()
    measured(log, catalog.method("ngram").title, 5.0, 10.0)
    found = grouped(MethodMenu(catalog, log), EMBEDDED)
    assert RECOMMENDED not in found and "ngram" in found["no weights"]


def test_an_experiment_counts_more_than_a_single_run(log: RunLog) -> None:
    catalog = Catalog.shipped()
    title = catalog.method("ngram").title
    of = {"target": EMBEDDED, "labels": {"compare": "c"}}
    for decoding_type, name, tok_s in (
        ("Autoregressive", "Plain decoding", 10.0),
        ("NGram", title, 12.5),
    ):
        method = {"decoding_type": decoding_type}
        run_id = log.begin(new_run(method=method, method_title=name, **of))
        log.finish(
            run_id,
            status="completed",
            output_ids=[5, 6],
            text="ab",
            finish_reason="length",
            metrics={"tok_s": tok_s},
        )
    measured(log, title, 90.0, 10.0)
    labels = {key: label for label, key in MethodMenu(catalog, log).choices(EMBEDDED)}
    assert labels["ngram"] == f"{title} · 1.25× · {RECOMMENDED}"


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_has_its_heading_in_the_list(group: str) -> None:
    label = f'[aria-label$=" · {group}"]'
    heading = f'{label}:not(li{label} + li)::before {{ content: "{GROUPS[group]}"'
    assert heading in static_text("page.css")
