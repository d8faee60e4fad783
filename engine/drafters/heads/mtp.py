"""Multi-token prediction: the target's own next-n layers draft a chain.

Layer k at position i reads the output of layer k - 1 there (for k = 0 the target's last hidden
state) together with token i + k + 1, and predicts token i + k + 2. Its last k rows therefore depend
on tokens that are only drafted. Such rows are never kept: the cache holds rows that are final for
all layers, and each step reads the others again with the committed tokens.

    root at position n, L layers    final: rows 0 … n - L    read again: rows n - L + 1 … n - 1

A model with one such layer (DeepSeek-V3) drafts more than one token by feeding the layer its own
output as the next row, as serving engines do; those rows are dropped after the draft.

The layers are transformers' (`MtpModel`), read from the target's own checkpoint.
Lossless under sampling: drafts are argmaxes, so they follow from the committed text.
Source: arXiv:2412.19437, section 2.2; TensorRT-LLM's "MTP Vanilla" (several layers) and "MTP Eagle"
(one layer).
"""

from __future__ import annotations

import re
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from engine.accept import Lossless, Relaxed, Rule, ThinkingPhase
from engine.config import setting
from engine.drafters.base import (
    BuildContext,
    FeatureDrafter,
    FeatureSession,
    Start,
    chain,
    root_only,
)
from engine.drafters.heads.config import beyond_transformers, check_unread
from engine.drafters.method import MethodConfig, draft_len
from engine.errors import DrafterError, first_line
from engine.kernels.cpu.operators import TopK, topk
from engine.model.cache import TreeCache
from engine.model.files import READ_ERRORS
from engine.model.forward import MaskBuilder
from engine.model.gguf.file import GGUFFile
from engine.model.gguf.tensors import mtp_state_dict
from engine.model.layer_types import ATTENTION
from engine.model.reading import unmapped_files
from engine.model.target import Target
from engine.proposal import Budget, Needs, Proposal

THINKING = ("begin_thinking_phase_token", "end_thinking_phase_token")


class MTPConfig(MethodConfig):
    """Settings of multi-token prediction, named as in TensorRT-LLM."""

    title = "MTP"
    summary = (
        "The target's own multi-token prediction layers (DeepSeek-V3, Qwen3.5 …) draft a chain."
    )
    paper = "2412.19437"
    main_settings = "drafting max_draft_len use_relaxed_acceptance_for_thinking relaxed_topk"

    requires = "next-token (MTP) layers of its own, as DeepSeek V3 has"

    without_effect = (
        (
            {"use_relaxed_acceptance_for_thinking": False},
            "relaxed_topk relaxed_delta relaxed_rule begin_thinking_phase_token "
            "end_thinking_phase_token",
        ),
    )

    decoding_type: Literal["MTP"] = "MTP"
    max_draft_len: int = draft_len(1, "; at most one per layer, unless there is only one", most=16)
    use_relaxed_acceptance_for_thinking: bool = setting(
        False,
        "Relaxed acceptance while thinking",
        "lossy: while the model thinks, accept any plausible token",
    )
    relaxed_topk: int = setting(
        1,
        "Relaxed acceptance: candidates",
        "relaxed: how many of the likeliest tokens may pass",
        ge=1,
        le=1000,
    )
    relaxed_delta: float = setting(
        0.0,
        "Relaxed acceptance: gap",
        "relaxed: how much less likely than the best they may be",
        ge=0.0,
        le=100.0,
    )
    relaxed_rule: Literal["probability", "log_probability"] = setting(
        "probability",
        "Relaxed acceptance: what the gap measures",
        "relaxed: relaxed_delta is a difference of probabilities, as TensorRT-LLM "
        "computes it, or of their logarithms, as its guide says",
    )
    begin_thinking_phase_token: int = setting(
        128798,
        "Token that begins thinking",
        "token id that begins thinking (DeepSeek-R1: <think>)",
        ge=0,
    )
    end_thinking_phase_token: int = setting(
        128799,
        "Token that ends thinking",
        "token id that ends thinking (DeepSeek-R1: </think>)",
        ge=0,
    )

    @property
    def lossless(self) -> bool:
        return not self.use_relaxed_acceptance_for_thinking

    def build(self, context: BuildContext) -> MTPDrafter:
        size = context.target.vocab_size
        for name in THINKING if self.use_relaxed_acceptance_for_thinking else ():
            if (token := getattr(self, name)) >= size:
                raise DrafterError(
                    f"{name} must be below {size}, the size of the target's vocabulary, got "
                    f"{token}. The defaults are DeepSeek-R1's."
                )
        return MTPDrafter(context, self, load_layers(context.target, self.max_draft_len))


def load_layers(target: Target, max_draft_len: int) -> Any:
    """transformers' `MtpModel` of a target, on its device and in its dtype.

    DrafterError if the target has none or fewer than `max_draft_len`.
    """
    from transformers.modeling_layers import MtpModel

    kind: Any = MtpModel
    reason = UNSUPPORTED.get(target.config.model_type)
    if reason is not None:
        raise DrafterError(
            f"{target.name}'s MTP layers cannot be used: transformers {transformers.__version__} "
            f"{reason}. Choose another method."
        )
    file = None if target.gguf_path is None else GGUFFile(target.gguf_path)
    if file is not None:
        target.config.num_mtp_layers = int(file.fields.get("nextn_predict_layers", 0))
    if target.config.model_type in QWEN and (file is None or target.config.num_mtp_layers):
        kind = _qwen_layers(target, MtpModel)
    count = int(getattr(target.config, "num_mtp_layers", None) or 0)
    if not count:
        raise DrafterError(f"{target.name} has no MTP layers. Choose another method.")
    if 1 < count < max_draft_len:
        raise DrafterError(
            f"max_draft_len is {max_draft_len}, but {target.name} has {count} MTP layers. "
            f"Set it to {count} or less."
        )
    settings = beyond_transformers(target.config).items()
    of_mtp = {key: value for key, value in settings if "mtp" in key or "nextn" in key}
    check_unread(of_mtp, target.name, *_COUNTS, "mtp_layer_types")
    if file is not None:
        return _layers_of_gguf(target, file, MtpModel)
    model: Any = target.model
    model._keys_to_ignore_on_load_unexpected = weight_patterns(target, count)
    try:
        with unmapped_files():
            layers = kind.from_pretrained(model, device_map={"": target.device})
    except READ_ERRORS as error:
        raise DrafterError(
            f"{target.name}'s checkpoint ({model.config.name_or_path}) has no MTP weights that "
            f"transformers can read: {first_line(error)}."
        ) from error
    finally:
        del model._keys_to_ignore_on_load_unexpected
    return _checked(layers, target)


def _layers_of_gguf(target: Target, file: GGUFFile, kind: Any) -> Any:
    """`MtpModel` with the layers behind those of a target's GGUF file."""
    try:
        layers = kind(target.model, target.config.num_mtp_layers)
        state = mtp_state_dict(layers, file)
    except READ_ERRORS as error:
        raise DrafterError(
            f"{target.name}'s MTP layers cannot be used: {first_line(error)}. Choose another "
            "method."
        ) from error
    layers.layers.load_state_dict({k.removeprefix("layers."): v for k, v in state.items()})
    layers.layers.to(device=target.device, dtype=target.dtype).requires_grad_(False)
    return _checked(layers, target)


def _checked(layers: Any, target: Target) -> Any:
    """DrafterError unless the state of all layers can be rolled back."""
    kinds = set(getattr(layers.config, "layer_types", None) or ()) - ATTENTION
    if kinds:
        raise DrafterError(
            f"{target.name}'s MTP layers are of kind {', '.join(sorted(kinds))}, whose state "
            "cannot be rolled back. Choose another method."
        )
    return layers.eval()


_COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Names of the number of such layers in configs."""
UNSUPPORTED = {
    "bailing_hybrid": "builds them with a norm that they do not have",
    "nemotron_h": "does not read them",
}
"""Families whose layers cannot be loaded, and why."""
QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with one such layer, which transformers does not load."""
QWEN_NAMES = {
    "^mtp.layers.0.": "layers.0.mtp_block.",
    "^mtp.fc.": "layers.0.eh_proj.",
    "^mtp.pre_fc_norm_embedding.": "layers.0.enorm.",
    "^mtp.pre_fc_norm_hidden.": "layers.0.hnorm.",
    "^mtp.norm.": "layers.0.post_norm.",
}


def _qwen_layers(target: Target, layers: Any) -> Any:
    """`MtpModel` for the one full-attention layer that Qwen publishes beside the model."""
    from transformers.core_model_loading import WeightRenaming

    target.config.num_mtp_layers, target.config.mtp_layer_types = 1, ["full_attention"]
    renamings = [
        WeightRenaming(source_patterns=theirs, target_patterns=ours)
        for theirs, ours in QWEN_NAMES.items()
    ]

    class QwenLayers(layers):  # type: ignore[misc]
        def get_weight_conversions(self, main_model: Any) -> list[Any]:
            return [*renamings, *super().get_weight_conversions(main_model)]

    return QwenLayers


def weight_patterns(target: Target, count: int) -> list[str]:
    """Names of MTP weights in the checkpoint: the ones transformers ignores when loading.

    transformers lists them for the published sizes (`model.layers.61.*`); they follow the target's
    own layers, however many it has.
    """
    patterns = list(type(target.model)._keys_to_ignore_on_load_unexpected or ())
    numbered = [p for p in patterns if re.search(r"layers\\?\.\d+", p)]
    if not numbered:
        return patterns
    layers = range(target.num_layers, target.num_layers + count)
    return [p for p in patterns if p not in numbered] + [rf"model\.layers\.{n}\." for n in layers]


class MTPSession(FeatureSession["MTPDrafter"]):
    """Feeds the committed rows to the MTP layers, which draft one token each.

    Rows that are not final for all layers yet stay unread.
    """

    def __init__(self, drafter: MTPDrafter, start: Start) -> None:
        super().__init__(drafter, start)
        self.cursor.row = max(0, self.cursor.row - drafter.num_layers + 1)
        self.cache.truncate(self.cursor.row)

    def propose(self, budget: Budget) -> Proposal:
        length = min(self.drafter.config.max_draft_len, budget.depth)
        if length < 1:
            return root_only(self.root, self.drafter.device)
        best = self._draft(length)
        log_probs = torch.cat([one.log_probs[0] for one in best])
        return chain(self.root, torch.cat([one.ids[0] for one in best]), log_probs.exp())

    def _draft(self, length: int) -> list[TopK]:
        """The most probable token at each of `length` depths; the cache gains final rows."""
        features, following = self.unread()
        rows, hidden, ids = len(following), features, following
        cache, num_layers = self.cache, self.drafter.num_layers
        cache.reserve(rows + length)
        best: list[TopK] = []
        for k in range(num_layers):
            hidden = self._forward(k, hidden, ids)
            best.append(self._best(hidden))
            ids = torch.cat([ids[1:], best[-1].ids[0]])
        self.cursor.row += max(0, rows - num_layers + 1)
        cache.length = self.cursor.row
        if num_layers == 1:
            # A single layer is fed its own output until the draft is long enough.
            while len(best) < length:
                hidden = self._forward(0, hidden[-1:], best[-1].ids[0])
                cache.length += 1
                best.append(self._best(hidden))
            cache.truncate(self.cursor.row)
        return best[:length]

    def _forward(self, k: int, hidden: Tensor, ids: Tensor) -> Tensor:
        """Output of layer k for rows behind the cache's, `(r, hidden)` like the layer before's.

        `ids (r,)` are the tokens k + 1 positions further.
        """
        mtp, n, past, device = self.drafter.layers, len(ids), self.cache.length, self.drafter.device
        rows = torch.arange(past, past + n, device=device)
        positions = (rows + k + 1)[None]
        embedded = mtp.embed_tokens(ids)[None].to(hidden.dtype)
        kind = (getattr(mtp.config, "layer_types", None) or ["full_attention"] * (k + 1))[k]
        rotary = None
        if mtp.rotary_emb is not None:
            per_kind = {"layer_type": kind} if mtp.has_per_layer_rope else {}
            rotary = mtp.rotary_emb(embedded, position_ids=positions, **per_kind)
        # A single row attends to everything.
        visible = torch.ones(n, n, dtype=torch.bool, device=device).tril() if n > 1 else None
        mask = self.drafter.masks.build(rows, visible, past, self.drafter.dtype)
        out: Tensor = mtp.layers[k](
            embedded,
            hidden[None],
            position_embeddings=rotary,
            attention_mask=mask[kind] if isinstance(mask, dict) else mask,
            position_ids=positions,
            cache=self.cache,
        )
        if mtp.use_shared_post_norm:
            out = mtp.shared_post_norm(out)
        return out[0]

    def _best(self, hidden: Tensor) -> TopK:
        """The most probable token after the last row."""
        logits: Tensor = self.drafter.layers._project_to_logits(hidden[-1:])
        return topk(logits.to(self.drafter.device), 1)

    def rule(self) -> Rule:
        config, strict = self.drafter.config, Lossless(self.start.sampling)
        if config.lossless:
            return strict
        thinking = ThinkingPhase(config.begin_thinking_phase_token, config.end_thinking_phase_token)
        logs = config.relaxed_rule == "log_probability"
        return Relaxed(strict, config.relaxed_topk, config.relaxed_delta, thinking, logs)


class MTPDrafter(FeatureDrafter):
    session = MTPSession
    needs = Needs(hidden=True)

    def __init__(self, context: BuildContext, config: MTPConfig, layers: Any) -> None:
        self.config, self.layers = config, layers
        self.device, self.dtype = context.target.device, context.target.dtype
        self.masks = MaskBuilder(context.target.model)
        self.num_layers = min(config.max_draft_len, len(layers.layers))

    def new_cache(self) -> TreeCache:
        return TreeCache(self.num_layers)
