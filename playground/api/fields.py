"""Unsupported fields of other engines' requests: ignored ones, and refused ones.

A field that would change the answer is refused by name unless its value is neutral. A field that is
neither listed here nor in a request model is refused, too. `docs/request-fields.md` is generated
from this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NeutralValues = tuple[Any, ...]
"""Values of a field that have no effect; null is always one."""


def _refused(*rows: tuple[NeutralValues, str]) -> dict[str, NeutralValues]:
    """Fields, separated by blanks, by their neutral values."""
    return {name: neutral for neutral, names in rows for name in names.split()}


COMPLETION_IGNORED: Mapping[str, str] = {
    "user": "identifies the client",
    "safety_identifier": "identifies the client",
    "session_id": "identifies a conversation",
    "request_id": "identifies the request; an answer has its run's id",
    "metadata": "labels the request",
    "store": "every run is in the log",
    "service_tier": "requests run in order of arrival",
    "prompt_cache_key": "prompts are cached by their tokens",
    "prompt_cache_retention": "prompts are cached by their tokens",
    "stream_interval": "text is streamed as it is decoded",
    "guided_decoding_backend": "there is only one",
    "spaces_between_special_tokens": "special tokens have no text",
    "return_mm_kwargs": "of vLLM's render endpoints only",
    "return_token_offsets": "of vLLM's render endpoints only",
}
COMPLETION_REFUSED = _refused(
    ((1,), "n length_penalty repetition_penalty"),
    (
        (False,),
        "use_beam_search logprobs watermarking include_stop_str_in_output echo "
        "return_token_ids return_tokens_as_token_ids",
    ),
    (
        (),
        "prompt_logprobs repetition_detection truncate_prompt_tokens cache_salt "
        "kv_transfer_params ec_transfer_params guided_whitespace_pattern",
    ),
    (([],), "logprob_token_ids allowed_token_ids bad_words"),
    (({},), "logit_bias vllm_xargs"),
    (
        (0,),
        "presence_penalty frequency_penalty no_repeat_ngram_size min_tokens priority "
        "routed_experts_prompt_start",
    ),
    ((-1,), "thinking_token_budget"),
    ((True,), "skip_special_tokens"),
    (("left", "right"), "truncation_side"),
)
TEXT_REFUSED = COMPLETION_REFUSED | _refused(
    ((True,), "add_special_tokens"),
    ((1,), "best_of"),
    (("",), "suffix"),
    ((), "prompt_embeds"),
)
CHAT_IGNORED: Mapping[str, str] = {
    **COMPLETION_IGNORED,
    "tools": "chat clients always send them, and a model need not use them",
    "parallel_tool_calls": "no tool is called",
}
CHAT_REFUSED = COMPLETION_REFUSED | _refused(
    ((False,), "add_special_tokens continue_final_message return_prompt_text"),
    ((True,), "add_generation_prompt include_reasoning"),
    ((0,), "top_logprobs"),
    (("auto", "none"), "tool_choice function_call"),
    (([],), "functions documents"),
    ((), "chat_template verbosity prediction web_search_options audio"),
    (({},), "media_io_kwargs mm_processor_kwargs"),
    ((["text"],), "modalities"),
)
MESSAGE_REFUSED = _refused(
    ((), "function_call refusal audio"),
    (([],), "annotations"),
)
TOOL_CALL_IGNORED: Mapping[str, str] = {"index": "numbers the calls of a stream"}
STREAM_IGNORED: Mapping[str, str] = {"include_obfuscation": "pads the chunks, not the text"}
STREAM_REFUSED = _refused(
    ((False,), "continuous_usage_stats"),
)
STRUCTURE_REFUSED = _refused(
    ((), "structural_tag whitespace_pattern"),
    ((False,), "disable_any_whitespace disable_additional_properties"),
)
SCHEMA_IGNORED: Mapping[str, str] = {
    "name": "labels the schema",
    "description": "labels the schema",
    "strict": "a schema is always followed",
}

TRITON_IGNORED: Mapping[str, str] = {
    "id": "identifies the request",
    "stream": "decided by the address",
    "pad_id": "requests run one at a time, without padding",
}
TRITON_REFUSED = _refused(
    (("",), "decoder_text_input guided_decoding_guide_type guided_decoding_guide image_url_input"),
    ((1,), "num_return_sequences beam_width repetition_penalty"),
    ((1, 0), "length_penalty"),
    (("", [], [""]), "bad_words embedding_bias_words"),
    ((0,), "min_tokens min_length presence_penalty frequency_penalty"),
    (([],), "embedding_bias_weights"),
    (
        (),
        "prompt_embedding_table prompt_table_extra_id prompt_vocab_size lora_task_id "
        "lora_weights lora_config image_input image_bytes_input video_bytes_input",
    ),
    (
        (False,),
        "return_log_probs return_context_logits return_generation_logits return_perf_metrics "
        "return_num_input_tokens return_num_output_tokens",
    ),
)


def is_neutral(value: object, neutral: NeutralValues) -> bool:
    """Whether a value has no effect; 0 and False are different values."""
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in neutral)
