"""Configs of other engines are read as methods; unknown keys are refused, ignored ones listed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import presets
from engine.errors import ConfigError
from playground.deploy import ENGINES
from playground.deploy.files import read_flags
from playground.deploy.trees import MC_SIM_7B_63
from tests.playground.deploy.schemas import LLAMA, read

EAGLE3 = "decoding_type: Eagle3\nmax_draft_len: 4\nspeculative_model_dir: x/y\n"


ASSISTANT = (
    "model = AutoModelForCausalLM.from_pretrained('a/b')\n"
    "small = AutoModelForCausalLM.from_pretrained('c/d')\n"
    "words = AutoTokenizer.from_pretrained('c/d')\n"
    "model.generate(assistant_model=small, tokenizer=tokenizer, assistant_tokenizer=words"
)
ASSISTED = f"{ASSISTANT})\n"
GPU_0, RANK_1, FAST, TOP_K = (
    f'parameters: {{\n  key: "{key}"\n  value: {{\n    string_value: "{value}"\n  }}\n}}\n'
    for key, value in (("gpu_device_ids", "0"), ("participant_ids", "1"),
                       ("speculative_decoding_fast_logits", "1"), ("decoding_mode", "top_k_top_p"))
)  # fmt: skip
"""The guide's lines for a pair of engines; a mode alone drafts nothing."""
GEMMA = "google/gemma-4-E4B-it-assistant"
MEDUSA = 'parameters: { key: "decoding_mode" value: { string_value: "medusa" } }'
TUTORIAL = presets.trees()["mc_sim_7b_63-medusa"].candidates
BLOCK = "deepseek-ai/dspark_qwen3_4b_block7"
DSPARK = {"decoding_type": "DSpark", "speculative_model": BLOCK, "max_draft_len": 7}
QUICK_START = """from tensorrt_llm.llmapi import Eagle3DecodingConfig

model = "meta-llama/Llama-3.1-8B-Instruct"
speculative_model = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"

speculative_config = Eagle3DecodingConfig(
    max_draft_len=3,
    speculative_model=speculative_model)

llm = LLM(model, speculative_config=speculative_config)
"""
"""Of TensorRT-LLM's guide, where the names are those of variables."""


@pytest.mark.parametrize(
    ("engine", "text", "expected", "note"),
    [
        ("vllm", "vllm serve a/b --speculative-config '{\"method\": \"eagle3\", "
         "\"model\": \"x/y\", \"num_speculative_tokens\": 2}'", {"decoding_type": "Eagle3"}, ""),
        ("vllm", "vllm serve a/b --speculative_config.method ngram "
         "--speculative-config.num_speculative_tokens 2", {"decoding_type": "NGram"}, ""),
        *(("vllm", f'{{"model": "{model}", "num_speculative_tokens": 2}}',
           {"decoding_type": kind}, f"rules make it {name}")
          for model, kind, name in (
              ("yuhuili/EAGLE-LLaMA3-8B", "Eagle", "eagle"), ("a/Eagle3-b", "Eagle3", "eagle3"),
              ("a/small", "Draft_Target", "draft_model"), ("[ngram]", "NGram", "ngram"))),
        ("vllm", '{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}',
         {"decoding_type": "MTP"}, ""),
        ("vllm", "vllm serve a/b -sc '{\"method\": \"mtp\", \"num-speculative-tokens\": 2}'",
         {"decoding_type": "MTP"}, ""),
        ("vllm", "vllm serve a/b --spec-method eagle3 --spec-model c/d --spec-tokens 2",
         {"decoding_type": "Eagle3"}, ""),
        ("vllm", "model: a/b\nspec-method: ngram\nspec-tokens: 2\n",
         {"decoding_type": "NGram"}, ""),
        ("vllm", '{"method": "mtp", "num_speculative_tokens": 2, "draft_sample_method": '
         '"probabilistic"}', {"decoding_type": "MTP"}, "draft_sample_method is ignored: whether"),
        ("sglang", "--speculative-algorithm NEXTN --speculative-use-rejection-sampling",
         {"decoding_type": "MTP"}, "--speculative-use-rejection-sampling is ignored: whether"),
        ("trtllm", "decoding_type: MTP\nuse_rejection_sampling: true", {"decoding_type": "MTP"},
         "use_rejection_sampling is ignored: whether drafts are sampled is no setting"),
        ("trtllm", "decoding_type: MTP\nmax_draft_len: 2\nuse_mtp_vanilla: true",
         {"max_draft_len": 2}, "use_mtp_vanilla is ignored: here a layer drafts again"),
        ("triton", GPU_0 + RANK_1, {"decoding_type": "Draft_Target", "use_draft_probs": False}, ""),
        ("triton", RANK_1 + FAST + TOP_K, {"use_draft_probs": True}, ""),
        *(("transformers", f"{ASSISTANT}{sampled})",
           {"decoding_type": "Draft_Target", "vocabulary": kind}, "")
          for sampled, kind in (("", "text"), (", do_sample=True", "intersection"))),
        ("sglang", "python3 -m sglang.launch_server --model-path a/b --tp 2 "
         "--speculative-algorithm=EAGLE3 --speculative-draft-model-path c/d "
         "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
         "--speculative-attention-mode decode --speculative-accept-threshold-single 1.0",
         {"decoding_type": "Eagle3", "max_draft_len": 3}, ""),
        ("sglang", "--speculative-algorithm EAGLE --speculative-draft-model-path x/y",
         {"eagle_choices": ((0,), (0, 0), (0, 0, 0))}, "3, 1, 4 is used here"),
        *(("sglang", f"--speculative-algorithm {name} --speculative-draft-model-path {GEMMA} "
           "--speculative-num-steps 5 --speculative-num-draft-tokens 6 --speculative-eagle-topk 1",
           {"decoding_type": "MTP_Assistant", "max_draft_len": 5}, "")
          for name in ("NEXTN", "EAGLE", "FROZEN_KV_MTP")),
        ("sglang", f"--speculative-algorithm DSPARK --speculative-draft-model-path {BLOCK} "
         "--speculative-dspark-block-size 7", DSPARK, ""),
        ("vllm", f'{{"method": "mtp", "model": "{GEMMA}", "num_speculative_tokens": 5}}',
         {"decoding_type": "MTP_Assistant", "max_draft_len": 5}, ""),
        ("llamacpp", "llama-server -m a/b -md d.gguf --draft-max 16 --draft-min 0",
         {"max_draft_len": 16, "confidence_threshold": 0.0}, "refuse the old names"),
        ("llamacpp", "llama-server -m a/b -md d.gguf", {"confidence_threshold": 0.0},
         "builds before April 2026 used 0.75"),
        ("llamacpp", "llama-server -m a/b -md c.gguf \\\n    --spec-type draft-dflash "
         "--spec-draft-n-max 15 -fa on --jinja", {"max_draft_len": 15}, ""),
        ("llamacpp", "llama-server -m a/b --spec-type ngram-map-k4v "
         "--spec-ngram-map-k4v-size-n 8 --spec-ngram-map-k4v-size-m 9 "
         "--spec-ngram-map-k4v-min-hits 2",
         {"max_matching_ngram_size": 8, "max_draft_len": 9}, "counts occurrences"),
        ("transformers", "import os; os.remove('/')\n"
         "model = AutoModelForCausalLM.from_pretrained('a/b')\n"
         "small = AutoModelForCausalLM.from_pretrained('c/d')\n"
         "small.generation_config.num_assistant_tokens = 7\n"
         "small.generation_config.assistant_confidence_threshold = 0.3\n"
         "out = model.generate(**inputs, assistant_model=small, do_sample=True)\n",
         {"speculative_model": "c/d", "max_draft_len": 7, "confidence_threshold": 0.3}, ""),
        *(("transformers", f"{ASSISTED}{config}.generation_config.{key} = {value}",
           {"max_draft_len": 20, "confidence_threshold": 0.4}, f"generation_config.{key} is ignored"
           " by transformers, which reads assistant_model.generation_config.")
          for config in ("model", "small.other")
          for key, value in (("num_assistant_tokens", 3), ("assistant_confidence_threshold", 0.1))),
        ("transformers", f"{ASSISTANT}, num_assistant_tokens=3)", {"max_draft_len": 20},
         "generation_config.num_assistant_tokens is ignored by transformers"),
        ("transformers", f"{ASSISTED}small.generation_config = GenerationConfig("
         "num_assistant_tokens=3)", {"max_draft_len": 3}, ""),
        ("transformers", "prompt_lookup_num_tokens: 6\nmax_matching_ngram_size: 3\n",
         {"lookup": "transformers", "max_draft_len": 6}, ""),
        ("trtllm", "cuda_graph_config:\n  batch_sizes: [1, 2]\nspeculative_config:\n"
         "  decoding_type: MTP\n  num_nextn_predict_layers: 3\n  relaxed_topk: 10\n"
         "  use_relaxed_acceptance_for_thinking: true\n  relaxed_delta: 0.6\n",
         {"max_draft_len": 3, "relaxed_topk": 10, "relaxed_delta": 0.6,
          "relaxed_rule": "probability"}, "code compares probabilities, though its guide"),
        ("trtllm", f"{EAGLE3}use_sa_spec: true\nsa_spec_threshold: 6\n",
         {"decoding_type": "Combined", "min_match_len": 6}, ""),
        ("trtllm", f"{EAGLE3}sa_config: {{threshold: 6}}\n",
         {"decoding_type": "Combined", "min_match_len": 6}, ""),
        ("trtllm", f"{EAGLE3}use_sa_spec: false\n", {"decoding_type": "Eagle3"}, ""),
        ("trtllm", "decoding_type: NGram\ndraft_len_schedule: {8: 2, 1: 6}\n",
         {"max_draft_len": 6}, "for one request"),
        ("trtllm", "decoding_type: NGram\n", {"max_draft_len": 10}, "asks for max_draft_len"),
        ("trtllm", "decoding_type: AUTO",
         {"max_draft_len": 5, "max_matching_ngram_size": 3}, "AUTO is NGram"),
        ("trtllm", "speculative_config:\n  decoding_type: Eagle\n  speculative_model_dir: x/y\n"
         "backend: tensorrt\n", {"decoding_type": "Eagle"}, "EAGLE-1/2 of the TensorRT backend"),
        ("trtllm", "speculative_config:\n  decoding_type: Eagle\n  speculative_model_dir: x/y\n"
         "backend: pytorch\n", {"decoding_type": "Eagle3"}, "backend is EAGLE-3"),
        ("trtllm", "from tensorrt_llm._tensorrt_engine import LLM\nLLM('a/b', speculative_config="
         "EagleDecodingConfig(speculative_model='x/y'))", {"decoding_type": "Eagle"}, ""),
        ("trtllm", "decoding_type: Medusa\nmedusa_choices: [[0,0], [1]]",
         {"medusa_choices": ((0,), (1,), (0, 0))}, "Python runtime alone"),
        *((engine, text, {name: TUTORIAL}, "mc_sim_7b_63, 63 nodes") for engine, text, name in (
            ("triton", MEDUSA, "medusa_choices"),
            ("triton", MEDUSA.replace("medusa", "eagle"), "eagle_choices"),
            ("trtllm", "decoding_type: Medusa\nmax_draft_len: 63", "medusa_choices"))),
        ("trtllm", "decoding_type: NGram\nmax_draft_len: 3\nis_keep_all: false\n",
         {"lookup": "pool_as_coded"}, "its guide says only one is kept"),
        ("trtllm", QUICK_START, {"decoding_type": "Eagle3", "max_draft_len": 3,
         "speculative_model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}, ""),
        ("trtllm", "config = UserProvidedDecodingConfig(max_draft_len=3, drafter=MyDrafter())",
         {"decoding_type": "User_Provided", "drafter": "MyDrafter"}, "named at the start"),
        ("trtllm", "config = EagleDecodingConfig(max_draft_len=63, num_eagle_layers=4, "
         "speculative_model_dir='/e', max_non_leaves_per_layer=10)",
         {"decoding_type": "Eagle", "eagle_choices": MC_SIM_7B_63.paths}, ""),
        ("sglang", "model-path: a/b\nspeculative-algorithm: EAGLE3\nspeculative_num_steps: 2\n"
         "speculative-draft-model-path: c/d\nspeculative-eagle-topk: 1\n"
         "speculative-num-draft-tokens: 3\nspec-trace-dir: t\nspeculative-adaptive: false\n",
         {"decoding_type": "Eagle3", "speculative_model": "c/d", "max_draft_len": 2}, ""),
        ("sglang", "--model-path a/b --speculative-algorithm NGRAM --decoupled-spec-rank 0 "
         "--speculative-use-block-verification",
         {"decoding_type": "NGram"}, "use-block-verification is the sampling setting"),
        *(("sglang", "--model-path a/b --speculative-algorithm NGRAM "
           f"--speculative-ngram-max-match-window-size 8 {rest}",
           {"max_matching_ngram_size": 8, "max_draft_len": length}, note)
          for rest, length, note in (
              ("--speculative-ngram-min-match-window-size 2", 7, "match-window-size is ignored"),
              ("--speculative-ngram-branch-length 18", 7, "branch-length is ignored"),
              ("--speculative-num-draft-tokens 5", 4, ""))),
        *((engine, f"{start} {repeated}", {"max_draft_len": 3}, "") for engine, start, repeated in (
            ("vllm", "docker run -e A=1 -e A=2 vllm/vllm-openai --model a/b --spec-method eagle3 "
             "--spec-model c/d", "--spec-tokens 2 --spec-tokens 3"),
            ("llamacpp", "A=1 A=2 llama-server -m a/b -md c/d -otd e=CPU -otd f=GPU",
             "--spec-draft-n-max 2 --spec-draft-n-max 3"))),
        ("vllm", '{"model": "c/d", "num_speculative_tokens": 3, '
         '"rejection_sample_method": "block"}',
         {"decoding_type": "Draft_Target"}, "rejection_sample_method is the sampling setting"),
        ("llamacpp", "LLAMA_ARG_MODEL=a/b LLAMA_ARG_SPEC_DRAFT_N_MAX=5 llama-server -Cd f -otd x "
         "--spec-draft-model c/d --spec-draft-sampling probabilistic",
         {"decoding_type": "Draft_Target", "max_draft_len": 5, "use_draft_probs": True}, ""),
        ("llamacpp", "environment:\n  - LLAMA_ARG_SPEC_TYPE=draft-mtp\n"
         "  LLAMA_ARG_SPEC_DRAFT_N_MAX: 2\n  - LLAMA_ARG_HF_REPO=a/b",
         {"decoding_type": "MTP", "max_draft_len": 2}, ""),
        ("llamacpp", "version = 1\n[*]\nspec-draft-n-max = 9\nCd = ff\n; a note\n"
         "[qwen]\nm = a/b\nspec-type = draft-dflash\nmd = c/d\nLLAMA_ARG_SPEC_DRAFT_N_MAX = 4\n",
         {"decoding_type": "DFlash", "speculative_model": "c/d", "max_draft_len": 4}, ""),
        ("trtllm", "decoding_type: MTP\nspeculative_model: c/d\nmoe_backend: AUTO\n",
         {"decoding_type": "MTP_Assistant", "speculative_model": "c/d"}, "target's assistant"),
        ("trtllm", "decoding_type: PARD\nmax_draft_len: 3\nspeculative_model: c/d\n"
         "sa_config: {threshold: 5}\n", {"decoding_type": "Combined", "min_match_len": 5}, ""),
        ("trtllm", "decoding_type: Eagle3\nmax_draft_len: 3\nspeculative_model: c/d\n"
         "dynamic_tree_max_topK: 4\n",
         {"decoding_type": "Eagle3", "use_dynamic_tree": False}, "use_dynamic_tree is a chain"),
        ("mlx", "mlx_lm.server --model a/b --draft-model c/d --port 80",
         {"decoding_type": "Draft_Target", "max_draft_len": 3, "use_draft_probs": False}, "3, its"),
        ("ollama", 'from a/b\nTEMPLATE """DRAFT x\n"""\ndraft c-dflash.gguf\nparameter top_k 2',
         {"decoding_type": "DFlash", "speculative_model": "c-dflash.gguf", "max_draft_len": 4},
         "4, its default"),
        ("ollama", "FROM a/b\nPARAMETER draft_num_predict 2", {"decoding_type": "MTP"}, ""),
    ],
)  # fmt: skip
def test_every_way_to_write_a_config(
    engine: str, text: str, expected: dict[str, object], note: str
) -> None:
    """Documented commands, YAML, programs, variables, INI presets and Modelfiles."""
    result = read(engine, text)
    values = result.config.model_dump()
    assert {name: values[name] for name in expected} == expected
    assert any(note in text for text in result.notes) if note else True
    assert result.target == ("a/b" if "a/b" in text else LLAMA if text == QUICK_START else None)


@pytest.mark.parametrize(
    ("engine", "text", "words"),
    [
        ("vllm", "", "Nothing to read. Paste a config of vLLM"),
        ("vllm", '{"method": "custom_class", "model": "a.B"}', "got custom_class. Others have"),
        ("vllm", '{"method": "ngram", "num_speculative_tokens": "x"}', "must be a valid integer"),
        ("sglang", "--speculative-algorithm EAGLE3 --speculative-num-steps 3", "wants all of"),
        ("trtllm", "x = 1  # EagleDecodingConfig(", "calls no …DecodingConfig"),
        ("trtllm", "EagleDecodingConfig(", "not valid Python"),
        ("trtllm", "a: 1", "must have speculative_config with decoding_type"),
        ("trtllm", "decoding_type: Medusa\nmedusa_choices: '[[0], [0, 1, 0]]'", "has a gap"),
        ("triton", "parameters: { key: \"decoding_mode\" value: { string_value: \"top_k\" } }",
         "It drafts nothing"),
        ("llamacpp", "llama-server -m t.gguf", "names neither --spec-type nor a draft model"),
        ("transformers", "model.generate(**inputs)", "The call drafts nothing"),
        ("vllm", '{"method": "ngram", "num_speculative_tokens": 3, "promt_lookup_max": 4}',
         "vLLM has no setting promt_lookup_max. Did you mean prompt_lookup_max?"),
        ("vllm", '{"method": "medusa", "num_speculative_tokens": 3, "parallel_drafting": true}',
         "method beside parallel_drafting must be one of draft_model, eagle3, got medusa"),
        *(("sglang", "speculative-algorithm: NGRAM\nspeculative-accept-threshold-"
           f"{name}: {value}", f"{name}={value} has no counterpart here")
          for name, value in (("single", "0"), ("acc", "0.0"))),
        ("vllm", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 0}',
         "max_matching_ngram_size must be greater than or equal to 1, got 0"),
        ("vllm", '{"method": "dflash", "model": "a/XPress", "num_speculative_tokens": 3}',
         "got xpress. Others have no counterpart here"),
        ("sglang", "--speculative-algorithm UNO --speculative-num-draft-tokens 8",
         "got UNO. Others have no counterpart here"),
        ("sglang", "SGLANG_SIMULATE_ACC_LEN=2.5 python -m sglang.launch_server --model-path a/b "
         "--speculative-algorithm NEXTN", "SGLANG_SIMULATE_ACC_LEN=2.5 has no counterpart"),
        ("sglang", "--speculative-algorithm STANDALONE --decoupled-spec-role verifier",
         "the drafter is a server of its own"),
        ("sglang", '{"1": {"candidate_steps": [3, 5]}}', "the table of SGLang's adaptive drafting"),
        ("llamacpp", "[a]\nmodel = x\n[b]\nmodel = y\n", "several models, a, b. Keep one."),
        ("mlx", "mlx_lm.generate --model a/b", "The command drafts nothing"),
        ("ollama", "FROM a\nPARAMETER draft_num_predict 0", "The Modelfile drafts nothing"),
        ("ollama", "FROM a\nDRAFT b\nDRAFT c", "several lines for DRAFT"),
        ("trtllm", f"{EAGLE3}sa_config: {{treshold: 3}}", "no setting sa_config.treshold"),
        ("trtllm", "decoding_type: NGram\ndraft_len_schedule: {a: 1}", "batch sizes to lengths"),
        ("trtllm", "decoding_type: MTP\nmax_draft_len: 2\nnum_nextn_predict_layers: 3",
         "max_draft_len contradicts num_nextn_predict_layers. Keep one of them."),
        ("vllm", '{"model": "a/b", "num_speculative_tokens": 3, "draft_sample_method": "greedy", '
         '"rejection_sample_method": "probabilistic"}',
         "rejection_sample_method contradicts another key for use_draft_probs. Keep one of them."),
        ("vllm", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 6, '
         '"prompt_lookup_max": 4}', "prompt_lookup_min=6 is more than prompt_lookup_max=4."),
        ("sglang", "--speculative-algorithm DSPARK --speculative-draft-model-path a/b "
         "--speculative-dspark-block-size 4 --speculative-num-draft-tokens 9",
         "--speculative-num-draft-tokens contradicts another key for max_draft_len."),
        *(("trtllm", f"decoding_type: {more}\nspeculative_model: a/b", words) for more, words in (
            ("Eagle3\ngreedy_sampling: false\neagle_choices: [[0]]", "greedy_sampling=False has"),
            ("Eagle3\neagle_choices: [[0]]\ngreedy_sampling: false", "eagle_choices=[[0]] has"),
            ("Medusa\nmax_draft_len: 2\nmedusa_choices: [[0], [1], [0, 0]]",
             "max_draft_len must be at least 3 for the tree of 3 nodes (medusa_choices), got 2"),
            ("Medusa\nnum_medusa_heads: 1\nmedusa_choices: [[0], [1], [0, 0]]",
             "num_medusa_heads must be at least 2"),
            ("Medusa\nmax_draft_len: 9", "(medusa_choices is not set), got 9"),
            ("Eagle\nnum_eagle_layers: 1\neagle_choices: [[0], [0, 0]]",
             "num_eagle_layers must be at least 2"),
            ("Eagle\nmax_non_leaves_per_layer: 1\neagle_choices: [[0], [1], [0, 0], [1, 0]]",
             "max_non_leaves_per_layer must be at least 2"))),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_sentence(engine: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(engine, text)
    assert words in str(caught.value)


SIGNS = st.sampled_from(
    ["{", "}", "[", "]", ":", ",", "\n", " ", "'", '"', "-", "(", ")", "=", "#", "0", "1", "x",
     "method", "ngram", "speculative_config", "decoding_type", "Eagle", "--speculative-algorithm",
     "--speculative-config", "EAGLE", "parameters", "string_value", "generate", "--spec-type",
     "-md", "num_speculative_tokens", "medusa_choices", "true", "null"]
)  # fmt: skip


@given(engine=st.sampled_from(sorted(ENGINES)), parts=st.lists(SIGNS, max_size=14))
@settings(deadline=None, max_examples=40)
def test_any_text_is_a_method_or_a_sentence(engine: str, parts: list[str]) -> None:
    for text in ("".join(parts), " ".join(parts)):
        try:
            result = read(engine, text)
        except ConfigError as error:
            assert str(error)
        else:
            assert result.config.decoding_type


def test_flags_keep_negative_numbers_and_words_apart() -> None:
    flags = read_flags("serve x --a=1 --b -1 --c --d 'e f' -md g # note")
    assert flags.options == {"--a": "1", "--b": "-1", "--c": "", "--d": "e f", "-md": "g"}
    assert flags.arguments == ("serve", "x")
