"""Exports EAGLE-3 heads in the layout of `speculators`, which vLLM loads with their target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from engine.model.checkpoints import read_checkpoint

HEAD_KEYS = ("architectures", "draft_vocab_size", "torch_dtype")
"""Settings of yuhuili's config that belong to the head, not to its layer."""


def write_speculators(folder: Path, into: Path, *, verifier: str, draft_len: int) -> None:
    """Write a head with nested config and renamed tensors, without the verifier's embedding.

    Args:
        verifier: hub id or name of the target.
        draft_len: the default number of tokens to draft.
    """
    checkpoint = read_checkpoint(str(folder))
    settings = dict(checkpoint.config)
    size = settings.get("draft_vocab_size", settings["vocab_size"])
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "draft_vocab_size": size,
        "target_hidden_size": settings["hidden_size"],
        "norm_before_residual": False,
        "transformer_layer_config": {k: v for k, v in settings.items() if k not in HEAD_KEYS},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_len}],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "torch_dtype": settings.get("torch_dtype", "float32"),
    }
    into.mkdir(parents=True, exist_ok=True)
    tensors = checkpoint.tensors.items()
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors}
    save_file(renamed, into / "model.safetensors", metadata={"format": "pt"})
    (into / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
