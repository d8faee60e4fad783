"""Fields of other engines' requests that are not supported: harmless ones, and refused ones.

A field that would change the answer is refused by name, unless its value is neutral; so is a field
that neither a table nor a request model has. `docs/request-fields.md` is generated from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NeutralValues = tuple[Any, ...]
"""Values of a field that have no effect; null is always one."""

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
COMPLETION_REFUSED: Mapping[str, NeutralValues] = {
    "n": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "repetition_detection": (),
    "no_repeat_ngram_size": (0,),
    "min_tokens": (0,),
    "thinking_token_budget": (-1,),
    "watermarking": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),
    "echo": (False,),
    "priority": (0,),
    "cache_salt": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "guided_whitespace_pattern": (),
}
TEXT_REFUSED: Mapping[str, NeutralValues] = {
    **COMPLETION_REFUSED,
    "add_special_tokens": (True,),
    "best_of": (1,),
    "suffix": ("",),
    "prompt_embeds": (),
}
CHAT_IGNORED: Mapping[str, str] = {
    **COMPLETION_IGNORED,
    "tools": "chat clients always send them, and a model need not use them",
    "parallel_tool_calls": "no tool is called",
}
CHAT_REFUSED: Mapping[str, NeutralValues] = {
    **COMPLETION_REFUSED,
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "verbosity": (),
    "prediction": (),
    "web_search_options": (),
    "modalities": (["text"],),
    "audio": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_prompt_text": (False,),
}
MESSAGE_REFUSED: Mapping[str, NeutralValues] = {
    "name": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
}
STREAM_IGNORED: Mapping[str, str] = {"include_obfuscation": "pads the chunks, not the text"}
STREAM_REFUSED: Mapping[str, NeutralValues] = {"continuous_usage_stats": (False,)}
STRUCTURE_REFUSED: Mapping[str, NeutralValues] = {
    "structural_tag": (),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
}
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
TRITON_REFUSED: Mapping[str, NeutralValues] = {
    "decoder_text_input": ("",),
    "num_return_sequences": (1,),
    "beam_width": (1,),
    "length_penalty": (1, 0),
    "bad_words": ("", [], [""]),
    "min_tokens": (0,),
    "min_length": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "embedding_bias_words": ("", [], [""]),
    "embedding_bias_weights": ([],),
    "prompt_embedding_table": (),
    "prompt_table_extra_id": (),
    "prompt_vocab_size": (),
    "lora_task_id": (),
    "lora_weights": (),
    "lora_config": (),
    "guided_decoding_guide_type": ("",),
    "guided_decoding_guide": ("",),
    "image_input": (),
    "image_bytes_input": (),
    "image_url_input": ("",),
    "video_bytes_input": (),
    "return_log_probs": (False,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
    "return_num_input_tokens": (False,),
    "return_num_output_tokens": (False,),
}


def is_neutral(value: object, neutral: NeutralValues) -> bool:
    """Whether a value has no effect; 0 and False are different values."""
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in neutral)
