"""What the Deploy page asks, without a browser."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import gradio as gr
import pytest

import presets
from engine.drafters import methods, parse_method
from engine.errors import ConfigError
from engine.model.sources import TargetSpec
from playground.deploy import ENGINES
from playground.experiments.forms import closest_method
from playground.export import (
    ExportForm,
    ExportSource,
    engines_of,
    export_source,
    exports_of,
    matrix,
    method_yaml,
    model_name,
    offered_runs,
)
from playground.host.catalog import Catalog
from playground.host.methods import choose_method, read_method
from playground.host.runner import EngineHost
from playground.web.deploy import MAX_FILES, DeployPage, engine_choice, verdict_html
from storage import RunLog
from tests.playground.asks import finished, start
from tests.playground.serving import built
from tests.storage.conftest import new_run, request, timed_run


@pytest.fixture
def shipped() -> Catalog:
    return Catalog.shipped()


LLAMA = "llama-3.1-8b-instruct"
COMBINED = {
    "decoding_type": "Combined",
    "retrieval": {"decoding_type": "Suffix", "max_draft_len": 7},
    "model": {"decoding_type": "Draft_Target", "speculative_model": "org/draft"},
}


def test_a_combination_is_exported_by_its_parts(log: RunLog, shipped: Catalog) -> None:
    """What no engine takes as a whole opens on the part that one takes, and that engine."""
    run = log.begin(new_run(target=LLAMA, method=COMBINED))
    exports = exports_of(ExportForm(of=f"run:{run}"), log, shipped)
    assert (
        exports.is_automatic and exports.form.part == "retrieval" and not exports.selected.refusal
    )
    assert [name for _, name in exports.parts] == ["whole", "retrieval", "model"]
    assert [title for title, _ in exports.parts][1] == "Suffix alone"
    assert "7" in next(iter(exports.selected.files.values()))
    model = exports_of(ExportForm(of=f"run:{run}", part="model", engine="vllm"), log, shipped)
    assert "org/draft" in next(iter(model.selected.files.values())) and not model.is_automatic
    whole = exports_of(ExportForm(of=f"run:{run}", part="whole"), log, shipped)
    assert whole.selected.refusal and all(one.refusal for one in whole.engines)
    assert "part=model" in model.form.link and "--part model" in model.form.command
    single = log.begin(new_run(target=LLAMA))
    assert "part" not in exports_of(ExportForm(of=f"run:{single}"), log, shipped).form.link
    with pytest.raises(ConfigError, match="part must be one of whole, retrieval, model"):
        exports_of(ExportForm(of=f"run:{run}", part="x"), log, shipped)


METHOD = {"of": "method:ngram", "target": "qwen3-8b"}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (METHOD | {"target": "v" * 999}, "target must have at most 200 characters"),
        (METHOD | {"target": "nowhere"}, "target must be one of"),
        (METHOD | {"of": "method:nothing"}, "method must be one of"),
        (METHOD | {"of": "else"}, "method must be one of"),
        (METHOD | {"of": "run:nothing"}, "No run"),
        (METHOD | {"version": 3}, "version must be a valid string, got 3"),
        (METHOD | {"version": "old"}, "must be like"),
    ],
)
def test_malformed_questions_are_one_sentence(
    log: RunLog, shipped: Catalog, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        form = ExportForm.parse(asked)
        form.source(log, shipped)  # as asked, without the page's choices
        exports_of(form, log, shipped)


def test_the_table_has_every_method_and_tells_each_refusal(shipped: Catalog) -> None:
    rows = matrix(shipped)
    drafting = {name: cls for name, cls in methods().items() if name != "Autoregressive"}
    assert [title for title, _ in rows] == [cls.title for cls in drafting.values()]
    for _, cells in rows:
        assert [cell.engine for cell in cells] == list(ENGINES)
        for cell in cells:
            assert cell.verdict == "exact" or cell.refusal or cell.warnings
            assert not any("is not set" in text for text in (cell.refusal, *cell.warnings))


def test_every_file_of_an_export_has_a_view(shipped: Catalog) -> None:
    exports = [export for _, cells in matrix(shipped) for export in cells]
    assert max(len(export.files) for export in exports) <= MAX_FILES


def test_every_preset_survives_its_method_file(tmp_path: Path) -> None:
    file = tmp_path / "method.yaml"
    for name, preset in presets.methods().items():
        file.write_text(method_yaml(preset.config, "vllm"))
        assert choose_method(str(file)) == preset.config, name


def test_an_imported_config_needs_a_target_that_fits(shipped: Catalog) -> None:
    ngram, _ = read_method('{"method": "ngram", "num_speculative_tokens": 5}', "vllm")
    key = closest_method(shipped, ngram, "qwen3-8b")
    assert shipped.method(key).config.decoding_type == "NGram"
    mtp, _ = read_method('{"method": "mtp", "num_speculative_tokens": 1}', "vllm")
    with pytest.raises(ConfigError, match="MTP is not offered for the target qwen3-8b"):
        closest_method(shipped, mtp, "qwen3-8b")
    assert shipped.method(closest_method(shipped, mtp, "deepseek-v3")).target == "deepseek-v3"


def test_the_embedded_target_is_a_gguf_file_which_is_said_once(
    log: RunLog, shipped: Catalog
) -> None:
    form = ExportForm(of="method:ngram", target="smollm2-135m-instruct", engine="vllm")
    exports = exports_of(form, log, shipped)
    vllm, llama = exports.selected, next(one for one in exports.engines if one.engine == "llamacpp")
    assert exports.gguf.startswith("The target is a GGUF file, for llama.cpp and Ollama.")
    assert exports.gguf in vllm.warnings and "original weights" in exports.gguf
    assert "-m SmolLM2-135M-Instruct.Q4_1.gguf" in llama.files["serve.sh"]
    assert not any("original weights" in said for said in (*llama.notes, *llama.warnings))
    lines = [engine_choice(one, exports.gguf)[0] for one in exports.engines]
    assert any(line.endswith("with losses · Only the weights differ.") for line in lines)
    assert not any("GGUF" in text for text in (*lines, verdict_html(exports)))


def test_names_of_weights_are_what_an_engine_can_load(tmp_path: Path) -> None:
    assert model_name("llama-3.2-1b-instruct") == "meta-llama/Llama-3.2-1B-Instruct"
    assert model_name("owner/heads") == "owner/heads"
    assert model_name(str(tmp_path)) == str(tmp_path)
    assert model_name("nothing of that name") == "nothing of that name"

    def resolve(name: str) -> TargetSpec:
        return TargetSpec(name=name, hub="o/m", revision="abc")

    handed = ExportSource(parse_method({"decoding_type": "NGram"}), "mine", "NGram")
    assert any(
        "revision abc of o/m" in n for n in export_source(handed, "vllm", resolve=resolve).notes
    )


@pytest.mark.parametrize(
    ("query", "link"),
    [
        ("", None),
        ("deploy=what&of=else", ExportForm(of="else")),
        (
            "deploy=vllm&of=run:1&version=0.22&other=x",
            ExportForm(engine="vllm", of="run:1", version="0.22"),
        ),
        (
            "deploy=sglang&of=method:type:NGram&target=tiny",
            ExportForm(engine="sglang", of="method:type:NGram", target="tiny"),
        ),
    ],
)
def test_links_are_read_and_written(query: str, link: ExportForm | None) -> None:
    assert ExportForm.of_link(dict(parse_qsl(query))) == link
    if link is not None:
        assert ExportForm.of_link(dict(parse_qsl(link.link))) == link


def test_the_command_is_the_same_on_the_command_line() -> None:
    asked = ExportForm(of="method:type:NGram", target="my target", engine="vllm")
    assert asked.command == ("specdec export --method NGram --target 'my target' --to vllm")
    asked = ExportForm(of="run:abc", engine="sglang", version="0.5.11")
    assert asked.command == ("specdec export --run abc --to sglang --engine-version 0.5.11")


def test_what_was_measured_is_offered_first_fastest_first_and_never_plain(
    log: RunLog, shipped: Catalog
) -> None:
    plain: dict[str, Any] = {"target": LLAMA, "method": {"decoding_type": "Autoregressive"}}
    alone = timed_run(log, 99.0, target=LLAMA)
    ngram = {"decoding_type": "NGram", "max_draft_len": 9}

    def compared(tok_s: float, name: str, **more: Any) -> str:
        return timed_run(log, tok_s, target=LLAMA, method_title=name, **request(name), **more)

    slow = compared(15.0, "Slower", method=ngram)
    compared(20.0, "Plain", method=plain["method"])
    fast = compared(30.0, "Faster", method=ngram | {"max_draft_len": 7})
    timed_run(log, 20.0, **plain)
    titles, runs = zip(*offered_runs(log), strict=True)
    assert runs == tuple(f"run:{run}" for run in (fast, slow, alone))
    assert titles[0].startswith(f"Faster · 1.50× plain · {LLAMA} · ")
    assert titles[2].startswith("N-gram · 99.0 tok/s · ")
    assert ExportForm().filled(log, shipped).of == f"run:{fast}"


HYBRID = {
    "vllm": "--mamba-cache-mode align",
    "sglang": "--mamba-scheduler-strategy extra_buffer",
    "llamacpp": "Measure with and without drafts",
}


@pytest.mark.parametrize("engine", HYBRID)
def test_what_an_engine_cannot_do_on_a_hybrid_target_is_said(engine: str) -> None:
    ngram = parse_method({"decoding_type": "NGram"})

    def notes(target: str) -> str:
        return " ".join(export_source(ExportSource(ngram, target, ""), engine).notes)

    assert HYBRID[engine] in notes("qwen3.5-4b")
    assert HYBRID[engine] not in notes("qwen3-8b")


def test_targets_with_recurrent_layers_are_marked_as_such() -> None:
    """Their descriptions say what their layers are."""
    words = ("linear", "mamba", "convolution")
    for target in presets.targets().values():
        said = any(word in target.description.lower() for word in words)
        assert target.recurrent == said, target.name


def test_an_address_opens_the_same_whichever_answer_comes_last(host: EngineHost) -> None:
    finished(start(host))
    page = built(lambda: DeployPage(host, gr.Tab()))
    fields = [None, "tiny", "trtllm", ""]
    asked: Any = SimpleNamespace(query_params={"deploy": "vllm", "of": "method:scripted"})
    shown = page.on_select(asked, "", *fields)
    assert shown[page.of].value == "method:scripted" and shown[page.engine].value == "vllm"
    plain: Any = SimpleNamespace(query_params={})
    (_, run), *methods = page.on_select(plain, "", *fields)[page.of].choices
    assert run == f"run:{host.runs.all()[-1].log_id}"
    assert "method:scripted" in [key for _, key in methods]


def test_the_engines_that_run_a_method_are_named_by_how_well() -> None:
    methods = presets.methods()

    def titles(name: str) -> tuple[str, str]:
        return engines_of(ExportSource(methods[name].config, "smollm2-135m-instruct", name))

    exact, losses = titles("draft-smollm2-135m")
    assert exact.startswith("llama.cpp") and "vLLM" in losses
    assert titles("suffix-draft-smollm2-135m") == titles("lookahead") == ("", "")
