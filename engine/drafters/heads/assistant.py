"""Gemma 4's assistants: next-token layers that read the target's own keys and values.

An assistant has no cache. All of its layers attend to the keys and values of the target's last
layers of full and of sliding-window attention. It drafts a chain at one position, the root's: every
token follows from the one before and from the assistant's own output there.

    root r at position n     reads  embedding(r), the target's last hidden state of row n - 1,
                                    the target's keys and values of rows 0 … n - 1
                             drafts d1, then from embedding(d1) and its own output d2, …

Lossless under sampling: drafts are argmaxes, so they follow from the committed text.
Source: transformers' `SinglePositionMultiTokenCandidateGenerator`, whose windows these are;
https://ai.google.dev/gemma/docs/mtp/mtp
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from engine.config import setting
from engine.drafters.base import BuildContext, Drafter, DraftSession, Traits, chain, root_only
from engine.drafters.heads.config import beyond_transformers, check_unread
from engine.drafters.method import MethodConfig, draft_len
from engine.errors import DrafterError
from engine.kernels.cpu.operators import TopK, topk
from engine.model.files import check_folder
from engine.model.forward import prepare_attention
from engine.model.layer_types import FULL, SLIDING
from engine.model.reading import read_config, read_weights, translate_errors
from engine.model.sources import TargetSpec, Weights
from engine.model.target import Target
from engine.proposal import Budget, Needs, Proposal

KINDS = (FULL[0], SLIDING[0])
MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


class AssistantConfig(MethodConfig):
    """Settings of an assistant."""

    title = "Gemma 4 assistant"
    summary = (
        "A few layers published beside the target draft a chain from the target's own keys and "
        "values."
    )
    paper = "Gemma 4 MTP"
    main_settings = "drafting max_draft_len"
    requires = "an assistant, as Gemma 4 has"

    decoding_type: Literal["MTP_Assistant"] = "MTP_Assistant"
    speculative_model: str | None = setting(
        None, "Assistant", "the assistant of this target: folder or hub id"
    )
    max_draft_len: int = draft_len(4, most=32)

    def build(self, context: BuildContext) -> AssistantDrafter:
        location = context.weights(self.speculative_model, "the target's assistant")
        return AssistantDrafter(self, context.target, load_assistant(location, context.target))


def load_assistant(location: str, target: Target) -> Any:
    """transformers' assistant model, on the target's device and in its dtype.

    Raises:
        DrafterError: it is no assistant, or one for another target.
        SourceError, TargetError: it cannot be read.
    """
    spec = TargetSpec.of_path_or_hub(location)
    weights = Weights(spec.path or location, None, None, spec.path is not None, None)
    if weights.local:
        check_folder(Path(weights.location))
    with translate_errors(spec):
        config = read_config(weights)
    if config.model_type not in MODEL_TYPES:
        raise DrafterError(
            f"{location} is of the type {config.model_type}; an assistant is of one of "
            f"{', '.join(MODEL_TYPES)}. Use Draft_Target for an ordinary small model."
        )
    text_config = config.get_text_config()
    for part in (config, text_config):
        check_unread(beyond_transformers(part), location)
    sizes = (config.backbone_hidden_size, text_config.vocab_size)
    mismatches = _head_dims(text_config).items() - _head_dims(target.config).items()
    if sizes != (target.hidden_size, target.vocab_size) or mismatches:
        raise DrafterError(
            f"{location} reads keys and values of another model than {target.name}. Use the "
            "assistant that was published for this target."
        )
    with translate_errors(spec):
        model = read_weights(spec, weights, target.dtype)
    prepare_attention(model)
    return model.to(target.device).requires_grad_(False).eval()  # type: ignore[arg-type]


def _head_dims(config: Any) -> dict[str, int]:
    """Width of a head per kind of attention."""
    kinds = getattr(config, "layer_types", None) or ()
    per_layer = getattr(config, "per_layer_config", None)
    if per_layer is None:
        return {}
    return {kind: int(per_layer[i].head_dim) for i, kind in enumerate(kinds) if kind in KINDS}


def shared_layers(target: Target) -> tuple[int, ...]:
    """The last layer of each of `KINDS` that has keys and values of its own.

    DrafterError if the target lacks one.
    """
    config = target.config
    kinds = list(getattr(config, "layer_types", None) or ())
    own = kinds[: len(kinds) - int(getattr(config, "num_kv_shared_layers", 0) or 0)]
    if not set(KINDS) <= set(own):
        raise DrafterError(
            f"{target.name} has no layers of both full and sliding-window attention, whose keys "
            "and values an assistant reads. Choose another method."
        )
    return tuple(len(own) - 1 - own[::-1].index(kind) for kind in KINDS)


class AssistantSession(DraftSession["AssistantDrafter"]):
    """Runs the assistant over one row, as often as it drafts tokens."""

    def propose(self, budget: Budget) -> Proposal:
        drafter, target = self.drafter, self.drafter.target
        length = min(drafter.config.max_draft_len, budget.depth)
        if length < 1:
            return root_only(self.root, target.device)
        device, position = target.device, len(self.text) - 1
        rows = [tuple(part[:, :, :position] for part in pair) for pair in self.log.shared]
        # The root's row and `window` rows before it, as transformers counts it here.
        recent = tuple(part[:, :, -(drafter.window + 1) :] for part in rows[1])
        shared = dict(zip(KINDS, (rows[0], recent), strict=True))
        position_ids = torch.full((1, 1), position, device=device)
        token = torch.full((1,), self.root, device=device)
        hidden, best = self.log.last_row(), list[TopK]()
        while len(best) < length:
            embedded = target.embedding(token).to(hidden.dtype)
            out = drafter.model(
                inputs_embeds=torch.cat([embedded, hidden], dim=-1)[None],
                position_ids=position_ids,
                shared_kv_states=shared,
                use_cache=False,
            )
            best.append(topk(out.logits[0], 1))
            token, hidden = best[-1].ids[0], out.last_hidden_state[0]
        log_probs = torch.cat([one.log_probs[0] for one in best])
        return chain(self.root, torch.cat([one.ids[0] for one in best]), log_probs.exp())


class AssistantDrafter(Drafter):
    session = AssistantSession
    traits = Traits(has_network=True)

    def __init__(self, config: AssistantConfig, target: Target, model: Any) -> None:
        """Raises DrafterError: the target's layers are of other kinds."""
        self.config, self.target, self.model = config, target, model
        self.window = int(model.config.get_text_config().sliding_window)
        self.needs = Needs(hidden=True, shared=shared_layers(target))
