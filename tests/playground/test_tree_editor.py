"""What the Tree page asks the server for, over a tiny target with real heads."""

from __future__ import annotations

import base64
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError, PlaygroundError, TreeError
from engine.tree import ChoiceTree
from engine.tuning.ranks import RankTable
from engine.tuning.search import best_trees
from playground.host.menu import GROUPS
from playground.host.recording import decode_and_record
from playground.host.runner import EngineHost
from playground.trees import measurements
from playground.trees.editor import TreeEditor, TreeRequest, read_tree_choice
from playground.trees.tables import pack, save_table
from playground.web.tree import read_link
from storage import RunLog, RunQuery, StorageError
from tests.engine.drafters.fitted import Malicious
from tests.engine.tuning.tables import made_up_table
from tests.playground.asks import WAIT_S, finished, start, until
from tests.playground.tree_tiny import HEADS, SUITE, tree_catalog

DOCUMENTED = [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]]
MEDUSA = {"target": "tiny", "method": "medusa"}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    folder = tmp_path_factory.mktemp("tree")
    log = RunLog.open(str(folder / "runs.db"))
    with torch.inference_mode():
        catalog = tree_catalog(folder)
    host = EngineHost(log, catalog, cache_dir=folder / "cache", device="cpu")
    # Whichever test runs first, the target is loaded, and the log has a text to measure on.
    finished(start(host, owner="test", method="plain", mode="raw", prompt="Say something."))
    yield host
    host.close()
    log.close()


class Page:
    """Asks an editor as the page does."""

    def __init__(self, editor: TreeEditor) -> None:
        self._editor = editor

    def __getattr__(self, question: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda asked: getattr(self._editor, question)(TreeRequest.parse(asked))


@pytest.fixture(scope="module")
def editor(host: EngineHost) -> Iterator[Page]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurements, "TEXT_TOKENS", 24)
        yield Page(TreeEditor(host))


def done(editor: Page, job: str) -> dict[str, Any]:
    """The job's last state."""
    until(lambda: editor.job({"job": job})["over"])
    return editor.job({"job": job})


def measured(editor: Page, **asked: Any) -> dict[str, Any]:
    """What a measurement that went well brought."""
    asked = {"target": "tiny", "tab": "test", "kind": "ranks", **asked}
    state = done(editor, editor.measure(asked)["job"])
    assert state["error"] is None, state
    end: dict[str, Any] = state["end"]
    return end


@pytest.fixture(scope="module")
def source(editor: Page) -> str:
    """A table measured over the suite, whose texts were written for it with the method itself."""
    return str(measured(editor, method="medusa", source="suite:small")["source"])


def table_of(host: EngineHost, source: str) -> RankTable:
    return RankTable.from_bytes(host.log.artifacts.payload(source.removeprefix("table:")))


def test_menus_have_every_method_with_something_to_tune(editor: Page) -> None:
    menus = editor.start({})
    kinds = {row["key"]: row["kind"] for row in menus["methods"]["tiny"]}
    assert kinds["medusa"] == kinds["eagle"] == kinds["recycling"] == "tree"
    assert kinds["eagle2"] == "dynamic" and kinds["ngram"] == "chain"
    assert "plain" not in kinds
    assert {row["group"] for row in menus["methods"]["tiny"]} <= set(GROUPS.values())
    medusa = next(row for row in menus["methods"]["tiny"] if row["key"] == "medusa")
    assert medusa["tree"] == DOCUMENTED
    assert any(tree["paths"] == DOCUMENTED for tree in menus["trees"])


def test_a_table_is_of_the_runs_that_are_told(host: EngineHost, editor: Page, source: str) -> None:
    table = table_of(host, source)
    rows = host.log.find(RunQuery(decoding_type="Medusa", labels={"suite": "small"})).rows
    assert len(rows) == len(SUITE) == table.num_texts
    assert sorted(table.categories) == ["chat", "chat", "code", "code"]
    assert editor.table({**MEDUSA, "source": source})["table"] == pack(table)
    found = editor.measured({**MEDUSA, "tree": DOCUMENTED})["runs"]
    assert found and {run["prompt"] for run in found} <= {prompt.turns[0] for prompt in SUITE}
    assert all(run["tok_s"] > 0 and run["mat"] >= 1 for run in found)
    assert editor.measured({**MEDUSA, "tree": [[0], [3]]})["runs"] == []


def test_ready_tables_come_before_texts_to_measure(editor: Page, source: str) -> None:
    found = editor.sources(MEDUSA)
    ids = [row["id"] for row in found["sources"]]
    assert ids[0] == source and found["sources"][0]["ready"]
    assert "recent:" in ids and "suite:small" in ids
    assert sum(name.startswith("run:") for name in ids) >= len(SUITE)
    remark = editor.sources({"target": "tiny", "method": "recycling"})
    assert not remark["sources"] and "learns from every step" in remark["remark"]


def test_weights_of_the_log_serve_a_method_without_any(editor: Page, source: str) -> None:
    found = editor.sources({"target": "tiny", "method": "type:Medusa"})
    assert found["sources"][0]["id"] == source
    assert found["weights"].endswith("medusa")


def test_an_example_is_the_text_of_the_run(host: EngineHost, editor: Page, source: str) -> None:
    table = table_of(host, source)
    row = table.texts[1] + 3
    asked = {"source": source, "position": row, "depth": 2}
    found = editor.example(asked)
    run = host.log.get(str(table.about["sources"][1]))
    assert run is not None and run.text.startswith(found["before"] + "".join(found["tokens"]))
    assert len(found["tokens"]) == 2
    last = editor.example({**asked, "position": table.num_positions - 1, "depth": 5})
    assert last["tokens"] == []


def test_the_best_tree_is_better_and_within_bounds(editor: Page, host: EngineHost) -> None:
    table = made_up_table(positions=2000, texts=8)
    config = host.catalog.method("eagle").config
    kept = f"table:{save_table(host.log, config, table)}"
    asked = {"target": "tiny", "method": "eagle", "source": kept, "category": "code"}
    found = editor.optimise({**asked, "nodes": 12, "max_depth": 3, "max_width": 4})
    tree = ChoiceTree.parse(found["tree"], form="candidates")
    assert len(tree) == 12 and tree.depth <= 3 and tree.max_rank < 4
    within = table.limited_to(max_depth=3, max_width=4)
    (best,), (of_all,) = best_trees(within.only("code"), (12,)), best_trees(within, (12,))
    assert tree == best.tree != of_all.tree
    points = editor.curve({**asked, "category": None})["points"]
    assert [point["mat"] for point in points] == sorted(point["mat"] for point in points)


def test_measuring_stops_on_demand_and_keeps_no_table(
    editor: Page, host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, stopped, numbers = threading.Event(), threading.Event(), itertools.count(1)

    def held(*values: Any, **more: Any) -> None:
        if next(numbers) == 2:
            second.set()
            assert stopped.wait(WAIT_S)
        decode_and_record(*values, **more)

    def kept() -> tuple[int, int]:
        rows = host.log.find(RunQuery(labels={"suite": "small"}))
        return rows.total, len(host.log.artifacts.find("ranks"))

    monkeypatch.setattr(measurements, "decode_and_record", held)
    num_runs, num_tables = kept()
    asked = {"target": "tiny", "method": "eagle", "tab": "t", "kind": "ranks"}
    job = editor.measure({**asked, "source": "suite:small"})["job"]
    assert second.wait(WAIT_S)
    editor.stop({"job": job})
    stopped.set()
    state = done(editor, job)
    assert state["end"] is None and state["error"] is None
    assert "stopped" in state["text"].lower()
    assert kept() == (num_runs + 2, num_tables)


def test_latency_is_measured_kept_and_read_by_another_editor(
    editor: Page, host: EngineHost, source: str
) -> None:
    speed = measured(editor, method="medusa", kind="latency")["speed"]
    assert list(speed["verify"]["rows"][:3]) == [1, 2, 3]
    assert all(ms > 0 for ms in speed["verify"]["ms"]) and speed["level_ms"] >= 0
    assert Page(TreeEditor(host)).table({**MEDUSA, "source": source})["speed"] == speed


def test_look_up_methods_get_chains_by_length(editor: Page, host: EngineHost) -> None:
    asked = {"target": "tiny", "method": "ngram"}
    made = measured(editor, **asked, source="recent:")["source"]
    packed = editor.table({**asked, "source": made})["table"]
    assert packed["depths"] == 0 and {row["length"] for row in packed["chains"]} >= {1, 2, 4}
    assert packed == pack(table_of(host, made))


def test_dynamic_trees_are_run_and_read_from_the_record(editor: Page, host: EngineHost) -> None:
    """Fewer nodes would have accepted what trees that the drafter cuts to one node do."""
    asked = {"target": "tiny", "method": "eagle2"}
    settings = {"max_total_draft_tokens": 5, "dynamic_tree_max_topK": 2, "max_draft_len": 3}
    ran = measured(editor, **asked, kind="runs", source="suite:small", settings=settings)
    small = ran["drafted"]
    assert small["counts"]["nodes"] == [[5, small["steps"]]]
    assert "as set by 4 runs" in small["text"]
    first = sum(count for path, count, _ in small["paths"] if len(path) == 1)
    assert small["steps"] < first <= 2 * small["steps"]
    rows = host.log.find(RunQuery(decoding_type="Eagle", labels={"suite": "small"})).rows
    ids = [row.id for row in rows if row.method["use_dynamic_tree"]]
    likeliest, steps = Counter[bool](), [step for one in ids for step in host.log.steps(one)]
    for step in steps:
        probs = [1.0]
        for parent, prob in zip(step.parents[1:], step.draft_probs[1:], strict=True):
            probs.append(probs[parent] * (prob or 0.0))
        likeliest[step.accepted[:1] == (max(range(1, len(probs)), key=probs.__getitem__),)] += 1
    mats = [mat for _, mat in small["smaller"]]
    assert likeliest[True] and mats[0] == pytest.approx(1 + likeliest[True] / len(steps))
    assert len(mats) == 5 and mats == sorted(mats) and mats[-1] == small["mat"] > mats[0]
    recorded = editor.drafted({**asked, "source": "recent:"})["drafted"]
    assert recorded == small
    found = editor.measured({**asked, "settings": settings})["runs"]
    assert {row["how"] for row in found} == {"as set"}
    other = editor.measured({**asked, "settings": {**settings, "max_draft_len": 4}})
    assert not other["runs"] and "No greedy run" in other["text"]


def test_runs_of_other_settings_are_not_taken_for_this_trees(
    editor: Page, host: EngineHost
) -> None:
    sizes = {"max_draft_len": 4, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 12}
    static = finished(start(host, owner="a", method="eagle", mode="raw", prompt="A fixed tree."))
    grown = finished(start(host, owner="a", method="eagle2", mode="raw", prompt="A grown tree."))
    typical = {"acceptance": "typical"}
    lossy = start(host, owner="a", method="medusa", mode="raw", prompt="Lossy.", settings=typical)
    assert None not in (static.log_id, grown.log_id, finished(lossy).log_id)

    def found(**asked: Any) -> set[str]:
        """Which of the three are among the newest runs that go with the question."""
        runs = editor.measured({"target": "tiny", **asked})["runs"]
        return {"A fixed tree.", "A grown tree.", "Lossy."} & {run["prompt"] for run in runs}

    assert found(method="eagle2", settings=sizes) == {"A grown tree."}
    assert found(method="eagle2", settings={**sizes, "max_total_draft_tokens": 5}) == set()
    eagle = host.catalog.method("eagle").config.model_dump(mode="json")["eagle_choices"]
    assert found(method="eagle", tree=eagle) == {"A fixed tree."}
    assert found(method="medusa", tree=DOCUMENTED) == set()


def test_saved_trees_join_the_menu_and_leave_it(editor: Page) -> None:
    asked = {"name": "  My   tree ", "tree": DOCUMENTED, **MEDUSA}
    saved = editor.save(asked)
    first = saved["trees"][0]
    assert (first["title"], first["group"]) == ("My tree", "Saved here")
    assert first["paths"] == DOCUMENTED and "Tiny Medusa" in first["note"]
    again = editor.save({**asked, "tree": [[0]]})["trees"]
    assert [row["title"] for row in again if row["group"] == "Saved here"] == ["My tree"]
    assert editor.forget({"name": "My tree"})["trees"][0]["group"] == "Shipped"
    with pytest.raises(ConfigError, match="No tree is saved as 'My tree'"):
        editor.forget({"name": "My tree"})


@pytest.mark.parametrize(
    ("question", "asked", "says"),
    [
        ("sources", {"method": "medusa"}, "target must be one of"),
        ("sources", {"target": "tiny", "method": "plain"}, "no tree and no draft length"),
        ("table", {**MEDUSA, "source": "table:none"}, "No artifact"),
        ("table", {**MEDUSA, "source": "shipped:../medusa"}, "no rank table"),
        ("optimise", {**MEDUSA, "source": "table:none", "nodes": "9"}, "nodes must be a valid int"),
        ("curve", {**MEDUSA, "max_depth": 0}, "max_depth must be greater than or equal to 1"),
        ("curve", {**MEDUSA, "max_width": 0}, "max_width must be greater than or equal to 1"),
        ("write", {"tree": DOCUMENTED, "format": "pdf"}, "format must be one of"),
        ("write", {"tree": [[rank] for rank in range(2000)], "format": "lists"}, "at most 1024"),
        ("save", {"tree": DOCUMENTED, "name": " "}, "name must have 1 to 80"),
        ("measure", {**MEDUSA, "kind": "speed", "tab": "t"}, "kind must be 'latency'"),
        ("measure", {**MEDUSA, "kind": "runs", "tab": "t"}, "must list paths"),
        (
            "measure",
            {"target": "tiny", "method": "eagle2", "kind": "runs", "tab": "t", "source": "x",
             "settings": {"temperature": 1}},
            "A dynamic tree's settings are",
        ),
        ("job", {"job": "none"}, "measurement no longer exists"),
    ],
)  # fmt: skip
def test_a_bad_question_is_one_sentence(
    editor: Page, question: str, asked: dict[str, Any], says: str
) -> None:
    with pytest.raises((PlaygroundError, StorageError), match=says):
        getattr(editor, question)(asked)


def test_sampled_texts_are_refused(editor: Page, host: EngineHost) -> None:
    run = start(host, owner="sampler", method="plain", mode="raw", sampling={"temperature": "0.9"})
    finished(run)
    asked = {**MEDUSA, "tab": "t", "kind": "ranks", "source": f"run:{run.log_id}"}
    state = done(editor, editor.measure(asked)["job"])
    assert "temperature 0" in state["error"]


def test_what_a_drafter_can_take_is_known_and_held_to(editor: Page) -> None:
    medusa, recycling = MEDUSA, {"target": "tiny", "method": "recycling"}
    assert editor.sources(medusa)["limits"] == {
        "depth": HEADS, "ranks": None, "what": "Tiny Medusa with 5 heads"
    }  # fmt: skip
    assert editor.sources(recycling)["limits"]["ranks"] == 8
    assert editor.sources({"target": "tiny", "method": "eagle"})["limits"] is None
    deep, wide = "[[1], [0, 0, 0, 0, 0, 0]]", "[[0],\n [8]]"
    with pytest.raises(
        TreeError, match=r"\[0, 0, 0, 0, 0, 0\] has depth 6, but Tiny Medusa with 5"
    ):
        editor.read({**medusa, "text": deep})
    with pytest.raises(TreeError, match=r"\[8\] uses rank 8, .* ranks 0 to 7"):
        editor.read({**recycling, "text": wide})
    for asked in ({**recycling, "text": deep}, {**medusa, "text": wide}, {"text": deep}):
        assert editor.read(asked)["tree"]


def test_a_tree_becomes_settings_of_its_method(host: EngineHost) -> None:
    catalog = host.catalog
    target, key, settings = read_tree_choice(catalog, {**MEDUSA, "tree": [[0], [2]]})
    assert (target, key) == ("tiny", "medusa")
    assert settings["medusa_choices"] == ((0,), (2,))
    chain = read_tree_choice(catalog, {"target": "tiny", "method": "ngram", "tree": [[0], [0, 0]]})
    assert chain[2]["max_draft_len"] == 2
    asked = {"target": "tiny", "method": "eagle2", "settings": {"max_total_draft_tokens": 7}}
    assert read_tree_choice(catalog, asked)[2]["max_total_draft_tokens"] == 7
    plain = {"target": "tiny", "method": "type:Medusa", "tree": DOCUMENTED, "weights": "some/heads"}
    assert read_tree_choice(catalog, plain)[2]["speculative_model"] == "some/heads"
    with pytest.raises(TreeError, match="needs its parent"):
        read_tree_choice(catalog, {**MEDUSA, "tree": [[0], [1, 1]]})
    with pytest.raises(ConfigError, match="method must be one of"):
        read_tree_choice(catalog, {"target": "tiny", "method": "nothing", "tree": DOCUMENTED})


def test_a_link_opens_the_page_only_with_a_tree() -> None:
    link = {"tree": "0_1", "method": "medusa"}
    assert read_link(link) == {**link, "target": ""}
    assert read_link({"tree": "0", "run": "abc"}) is read_link({"method": "medusa"}) is None


def test_a_growmap_file_is_read_without_running_it(editor: Page, tmp_path: Path) -> None:
    def sent(values: object) -> dict[str, str]:
        torch.save(values, tmp_path / "map.pt")
        return {"file": base64.b64encode((tmp_path / "map.pt").read_bytes()).decode()}

    growmap = {"Successors": [[1, 2], [3], [], []], "depth": torch.tensor([0, 1, 1, 2])}
    assert editor.read(sent(growmap))["tree"] == [[0], [1], [0, 0]]
    deep = {"Successors": [[node] for node in range(1, 7)] + [[]]}
    assert len(editor.read(sent(deep))["tree"]) == 6
    with pytest.raises(TreeError, match="Tiny Medusa with 5 heads drafts 5"):
        editor.read({**MEDUSA, **sent(deep)})
    with pytest.raises(TreeError, match="holds more than tensors"):
        editor.read(sent(Malicious(tmp_path / "made")))
    assert not (tmp_path / "made").exists()
    with pytest.raises(TreeError, match="No growmap could be read: The file is damaged"):
        editor.read({"file": base64.b64encode(b"no archive").decode()})
    with pytest.raises(TreeError, match="upload was incomplete"):
        editor.read({"file": "***"})
