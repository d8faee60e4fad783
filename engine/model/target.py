"""The target: a causal language model that can verify a whole draft tree in one forward."""

from __future__ import annotations

import contextlib
import functools
import inspect
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from engine.errors import PromptError, TargetError
from engine.grammar import token_texts
from engine.model.backend import Backend, Precision
from engine.model.cache import RecurrentStates, TreeCache
from engine.model.chat_template import Message, render
from engine.model.forward import COUNT_ROWS, Forward, ModulesForward, Rows, block_causal
from engine.model.layer_types import check_can_roll_back, has_attention, kv_layers
from engine.model.long_rope import LongRope
from engine.model.prefixes import PrefixCache
from engine.model.random_weights import notes_of
from engine.model.recurrent import recurrent_layers
from engine.model.tokenizer import encode
from engine.proposal import Needs, Proposal, TargetOutput
from engine.safe_text import cpuinfo

if TYPE_CHECKING:
    from llguidance import LLTokenizer

NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


class Target:
    """A loaded causal LM, prepared for tree verification; made by `load_target`.

    Attributes:
        tokenizer: None where a checkpoint has none (token ids in, token ids out).
        hidden_size: of the last hidden state and the embedding; OPT 350M's are narrower than its
            layers.
        layer_width: of hidden states between layers.
        gguf_path: the file that the weights are from; None = none.
        output: as `lm_head`, `(…, hidden)` → `(…, vocab)`, on the fastest backend.
        kernels, draft_chain, ragged_batch: as in `Forward`.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        provenance: dict[str, Any] | None = None,
        forward: Forward | None = None,
        bits: int | None = None,
        gguf_path: Path | None = None,
    ) -> None:
        """Wrap a model; `forward` runs it, transformers' modules if None.

        Args:
            bits: as in `Precision`.
        """
        self.name, self.gguf_path = name, gguf_path
        self.model = model.eval()
        # Cached: transformers searches all parameters for it, and every step reads it.
        self.device = torch.device(model.device)
        self.tokenizer = tokenizer
        self.provenance = provenance or {}
        self.precision = Precision(model.dtype, bits)
        self.config = config = model.config.get_text_config()
        self.num_layers, self.layer_width = int(config.num_hidden_layers), int(config.hidden_size)
        self.hidden_size = int(getattr(config, "word_embed_proj_dim", None) or self.layer_width)
        # The number of logits; padding may make it larger than the tokenizer's vocabulary. Inkling
        # pads its embeddings alone.
        unpadded = getattr(config, "unpadded_vocab_size", None) or config.vocab_size
        self.vocab_size = min(int(config.vocab_size), int(unpadded))
        check_can_roll_back(self.config, name)
        takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
        if (has_attention(config) and not takes_positions) or getattr(config, "alibi", False):
            # It derives them from row numbers, and siblings share one.
            raise TargetError(
                f"{name} ({type(model).__name__}) takes no explicit positions (ALiBi), so it "
                "cannot verify a draft tree. Choose a model with rotary or learned positions."
            )
        self._forward = forward = forward or ModulesForward(model)
        self.output, self.kernels = forward.output, forward.kernels
        self.draft_chain, self.ragged_batch = forward.draft_chain, forward.ragged_batch
        self.recurrent = recurrent_layers(model)
        self.long_rope = LongRope(model, name)
        self.prefixes = PrefixCache()

    # ---- what it is

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.model.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def dtype_name(self) -> str:
        """As in the settings; `q8` and `q4` compute in bfloat16 outside matrix products."""
        return self.precision.name

    @property
    def device_name(self) -> str:
        device_map = getattr(self.model, "hf_device_map", None)
        if device_map:
            names = (f"cuda:{d}" if isinstance(d, int) else str(d) for d in device_map.values())
            return " + ".join(dict.fromkeys(names))
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{cpu_name()} ({torch.get_num_threads()} threads)"

    @property
    def context_len(self) -> int:
        """Longest sequence, prompt and output together."""
        return int(getattr(self.config, "max_position_embeddings", None) or 1 << 20)

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        layers = getattr(self.config, "per_layer_config", None) or [self.config] * self.num_layers
        total = 0
        for config in (layers[i] for i in kv_layers(self.config)):
            heads = int(config.num_attention_heads)
            kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
            width = int(getattr(config, "head_dim", None) or self.layer_width // heads)
            total += 2 * kv_heads * width * self.dtype.itemsize
        return total

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        token_ids: set[int] = set()
        generation = getattr(self.model, "generation_config", None)
        for source in (generation, self.config, self.tokenizer):
            ids = getattr(source, "eos_token_id", None)
            token_ids.update([ids] if isinstance(ids, int) else ids or [])
        return frozenset(token_ids)

    @property
    def can_pack_texts(self) -> bool:
        """Whether texts can share a forward: attention masks keep them apart.

        Recurrent states have no mask, nor do layers that count rows.
        """
        return not len(self.recurrent) and self.config.model_type not in COUNT_ROWS

    @functools.cached_property
    def token_texts(self) -> LLTokenizer:
        """Its vocabulary's texts, for grammars; TargetError where they cannot be read."""
        return token_texts(self.tokenizer, self.vocab_size, self.eos_ids)

    @property
    def embedding(self) -> nn.Module:
        """Input embedding: token ids → `(…, hidden)`."""
        module = self.model.get_input_embeddings()
        assert isinstance(module, nn.Module)
        return module

    @property
    def lm_head(self) -> nn.Module:
        """Output projection: `(…, hidden)` after the final norm → `(…, vocab)`."""
        module = self.model.get_output_embeddings()
        assert isinstance(module, nn.Module)
        return module

    # ---- text in

    @property
    def chat_template(self) -> str:
        """Its text; empty without one. Of several templates, the default one."""
        template = self.tokenizer.chat_template if self.tokenizer is not None else None
        return str(template.get("default", "") if isinstance(template, dict) else template or "")

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with the tokenizer's own special tokens in front."""
        return encode(self._tokenizer(), text, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[Message], settings: Mapping[str, Any] = NO_SETTINGS
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn; raises as `chat_text`."""
        text = self.chat_text(messages, settings)
        return encode(self._tokenizer(), text)

    def chat_text(
        self, messages: Sequence[Message], settings: Mapping[str, Any] = NO_SETTINGS
    ) -> str:
        """A conversation rendered by the chat template, with its generation prompt.

        Args:
            settings: values of variables that the template reads, such as `enable_thinking`.

        Raises PromptError: there is no chat template, or as `chat_template.render`.
        """
        tokenizer = self._tokenizer()
        if not self.chat_template:
            raise PromptError(
                f"{self.name} has no chat template. Use raw completion, or an instruct model."
            )
        return render(tokenizer, messages, settings, model=self.name)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise PromptError(f"{self.name} has no tokenizer. Give the prompt as token ids.")
        return self.tokenizer

    # ---- forwards

    def new_cache(self, rows: int, *, rewinds: int = 0, text_len: int | None = None) -> TreeCache:
        """An empty cache with room for about `rows` rows (it grows when needed).

        Args:
            rewinds: number of commits that `truncate` undoes exactly, also in recurrent layers.
            text_len: the most tokens that the text may have, prompt and output; None = `rows`.
        """
        cache = self._forward.new_cache(rows)
        if cache is None:
            states = RecurrentStates(self.device, rewinds) if len(self.recurrent) else None
            layers = len(kv_layers(self.config))
            cache = TreeCache(layers, capacity=max(64, rows), recurrent=states)
        text_len = min(rows if text_len is None else text_len, self.context_len)
        cache.rope_len = self.long_rope.shortest_alike(text_len)
        return cache

    @torch.inference_mode()
    def prefill(
        self, prompt_ids: Sequence[int] | Tensor, cache: TreeCache, needs: Needs
    ) -> TargetOutput:
        """Append these tokens to the cache's rows and commit them; logits of the last row."""
        tokens = torch.as_tensor(prompt_ids, device=self.device)
        n = len(tokens)
        cache.reserve(n)
        positions = torch.arange(cache.length, cache.length + n, device=self.device)
        with self._using(cache, None):
            output = self._forward(Rows(tokens, positions), cache, needs, last_only=True)
        cache.extend(n)
        return _with_shared(output, cache, needs)

    @torch.inference_mode()
    def verify(self, proposal: Proposal, cache: TreeCache, needs: Needs) -> TargetOutput:
        """One forward over all rows of the proposal; nothing is committed yet."""
        tokens, depths, visible = proposal.rows()
        cache.reserve(len(tokens))
        rows = Rows(tokens, depths + cache.length, visible if len(tokens) > 1 else None)
        parents = proposal.parents() if cache.recurrent is not None else None
        with self._using(cache, parents):
            output = self._forward(rows, cache, needs, last_only=False)
        return _with_shared(output, cache, needs)

    @torch.no_grad()
    def read_texts(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, needs: Needs
    ) -> TargetOutput:
        """The features of whole texts that are packed in one row, without their logits.

        Args:
            tokens, positions: `(n,)` int64, each text's from 0.
            segments: `(n,)` int64, ascending, the number of each row's text.
        """
        n = len(tokens)
        if not self.can_pack_texts:
            texts = tokens.split(segments.unique_consecutive(return_counts=True)[1].tolist())
            outputs = [self.prefill(text, self.new_cache(len(text)), needs) for text in texts]
            return TargetOutput.joined(outputs)
        batch = self.ragged_batch(n)
        if batch is not None:
            return batch.read(tokens, positions, torch.arange(n) - positions, needs=needs)
        visible = block_causal(positions, segments) if bool(segments.any()) else None
        cache = self.new_cache(n, text_len=int(positions.max()) + 1)
        with self._using(cache, None):
            return self._forward(Rows(tokens, positions, visible), cache, needs, last_only=True)

    @contextlib.contextmanager
    def _using(self, cache: TreeCache, parents: tuple[int, ...] | None) -> Iterator[None]:
        """A context whose forward has the cache's recurrent states and rotary frequencies."""
        with self.recurrent.using(cache.recurrent, parents), self.long_rope.using(cache.rope_len):
            yield

    # ---- lifetime

    @property
    def experts(self) -> tuple[int, int] | None:
        """Experts of a layer, and how many a token chooses; None = it has no mixture of experts."""
        config = self.config.get_text_config()
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        count = next((n for name in names if (n := getattr(config, name, None))), 0)
        chosen = getattr(config, "num_experts_per_tok", None) or 0
        return (int(count), int(chosen)) if 0 < chosen < count else None

    @property
    def is_exact(self) -> bool:
        """Whether verified rows yield plain decoding's tokens: bit-exact kernels, or float32.

        Otherwise a row's rounding depends on the other rows, and near-ties may flip.
        """
        return self.backend.row_invariant or self.dtype == torch.float32

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on its figures."""
        return notes_of({**self.provenance, **self.backend.environment()})

    @property
    def backend(self) -> Backend:
        return self._forward.backend

    def environment(self) -> dict[str, Any]:
        """What a run stores so that it can be repeated: weights and device."""
        return {
            "target": self.name,
            "dtype": self.dtype_name,
            "device": str(self.device),
            "device_name": self.device_name,
            "threads": torch.get_num_threads(),
            "exact": self.is_exact,
            **self.backend.environment(),
            **self.provenance,
        }

    def close(self) -> None:
        """Drop the weights."""
        self._forward.close()
        self.prefixes.clear()
        self.model = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _with_shared(output: TargetOutput, cache: TreeCache, needs: Needs) -> TargetOutput:
    if not needs.shared:
        return output
    return replace(output, shared=tuple(cache.kv.layer(layer) for layer in needs.shared))


def cpu_name() -> str:
    """The processor's name, or at least its architecture."""
    return cpuinfo("model name") or platform.processor() or platform.machine()
