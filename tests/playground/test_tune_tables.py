"""Rank tables and latency curves in the run log: measured on stored runs, kept, found again."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import Limits, Sampling
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.lookup.ngram import NGramConfig
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.tree import ChoiceTree
from playground.host.live import LiveRun
from playground.host.recording import Prompt, decode_and_record
from playground.trees.tables import find_tables, make_table, texts_of_runs
from storage import RequestKey, RunLog, RunQuery
from tests.engine.tuning.runs import Case, golden
from tests.models import build_context, tiny_target
from tests.storage.conftest import begun_benchmark

LIMITS = Limits(max_new_tokens=14)


@pytest.fixture(scope="module")
def case() -> Case:
    return golden("medusa")


def tables_for(log: RunLog, case: Case, config: MethodConfig) -> list[str]:
    """Ids of the tables that answer for a method on the case's target."""
    return [table.id for table in find_tables(log, target=case.bench.target.name, config=config)]


def stored_run(
    log: RunLog, case: Case, prompt: list[int], config: MethodConfig | None = None, **more: Any
) -> str:
    """A real run in the log; returns its id."""
    config = config or AutoregressiveConfig()
    run = LiveRun(owner="")
    decode_and_record(
        log,
        case.bench.target,
        config.build(case.bench),
        config,
        Prompt("", (), tuple(prompt)),
        sampling=Sampling(),
        limits=LIMITS,
        cancelled=lambda: False,
        **more,
        run=run,
    )
    assert run.log_id is not None
    return run.log_id


def test_a_benchmark_s_table_has_one_text_per_prompt_and_its_categories(
    log: RunLog, case: Case
) -> None:
    benchmark = begun_benchmark(log, "test")
    for prompt, category in zip(case.prompts, "xyx", strict=False):
        for config in (AutoregressiveConfig(), NGramConfig()):
            labels, of = {"category": category}, RequestKey(experiment_id=benchmark)
            stored_run(log, case, prompt, config, request=of, labels=labels)
    ids = log.ids(RunQuery(experiment_id=benchmark, descending=False))
    artifact_id, table = make_table(
        log, case.config, case.bench, run_ids=ids, benchmark_id=benchmark
    )
    assert table.categories == ("x", "y", "x")
    (found,) = find_tables(log, target=case.bench.target.name, config=case.config)
    assert found.id == artifact_id and found.benchmark_id == benchmark
    assert found.meta == {"positions": table.num_positions, "texts": 3}


def test_measuring_again_replaces_the_table_and_other_trees_find_it(
    log: RunLog, case: Case
) -> None:
    run_ids = [stored_run(log, case, prompt) for prompt in case.prompts[:2]]
    older, _ = make_table(log, case.config, case.bench, run_ids=run_ids, depths=2)
    newer, _ = make_table(log, case.config, case.bench, run_ids=run_ids, depths=3)
    other_tree = case.config.with_tree(ChoiceTree.chain(3))
    assert tables_for(log, case, other_tree) == [newer] != [older]
    one, _ = make_table(log, case.config, case.bench, run_ids=run_ids[:1])
    again, _ = make_table(log, case.config, case.bench, run_ids=run_ids[:1])
    assert {*tables_for(log, case, other_tree)} == {newer, again}
    of_run = [a.id for a in log.artifacts.find("ranks") if a.key["runs"] == run_ids[:1]]
    assert of_run == [again] != [one]
    weights = case.config.replace(speculative_model="other")
    assert tables_for(log, case, weights) == []
    assert find_tables(log, target="other", config=case.config) == []


def test_runs_that_cannot_be_used_are_left_out_or_named(log: RunLog, case: Case) -> None:
    good = stored_run(log, case, case.prompts[0])
    same = stored_run(log, case, case.prompts[0], NGramConfig())
    lossy = case.config.replace(acceptance="typical")
    unusable = stored_run(log, case, case.prompts[1], lossy)
    target = case.bench.target.name
    texts = texts_of_runs(log, [unusable, same, good], target=target)
    assert [text.source for text in texts] == [same], "one text per prompt, and no lossy one"
    assert texts[0].limits == LIMITS and len(texts[0].output_ids) == 14
    with pytest.raises(ConfigError, match="None of these runs can be used"):
        texts_of_runs(log, [unusable], target=target)
    with pytest.raises(ConfigError, match="nowhere"):
        texts_of_runs(log, [good, "nowhere"], target=target)
    with pytest.raises(ConfigError, match="medusa/case_a, but tiny-llama is loaded"):
        make_table(log, NGramConfig(), build_context(tiny_target()), run_ids=[good])
