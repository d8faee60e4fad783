"""EAGLE heads as they are published: their layouts, their configs, and the target they name.

yuhuili (EAGLE-1/2)   layers.0.*, fc, embed_tokens
yuhuili (EAGLE-3)     midlayer.*, fc, norm, lm_head, d2t, t2d
NVIDIA (ModelOpt)     the same with layers.0.*; no t2d; lm_head only if the head has its own
speculators           as NVIDIA's, with embed_tokens; the layer's config is nested, and the
                      config names the verifier that the head was trained for
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.errors import DrafterError, VocabularyError
from engine.model.checkpoints import Checkpoint
from engine.model.target import Target

PADDING = 0.01
"""Vocabularies whose sizes differ by at most this share differ by padding at the end."""
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
_UNUSED = ("t2d", "rotary_emb.", "verifier_norm.", "verifier_lm_head.", "embed_tokens.")


class EagleCheckpoint:
    """A head's tensors under NVIDIA's names, and its config wherever each format keeps it.

    Attributes:
        layer_config: the config of the head's layer.

    Raises:
        DrafterError: the head is of a kind that is not drafted from here.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.location = checkpoint.location
        nested = checkpoint.config.get("transformer_layer_config")
        self.is_speculators = isinstance(nested, Mapping)
        self.layer_config: Mapping[str, Any] = (
            nested if isinstance(nested, Mapping) else checkpoint.config
        )
        self._config = checkpoint.config
        self._checkpoint = checkpoint
        self._names = {name.replace("midlayer.", "layers.0."): name for name in checkpoint.tensors}
        self._taken: set[str] = set()
        self._refuse_unsupported()

    def has(self, name: str) -> bool:
        return name in self._names

    def take(self, name: str, *shape: int | None) -> Tensor:
        """A tensor that must have this shape (`Checkpoint.tensor`)."""
        self._taken.add(name)
        return self._checkpoint.tensor(self._names.get(name, name), *shape)

    def size(self, name: str, dim: int) -> int:
        """Extent of a matrix; what else must agree with it is checked against it."""
        return int(self._checkpoint.tensor(self._names.get(name, name), None, None).shape[dim])

    def option(self, key: str) -> Any:
        """A setting of the head: at the top, or in `eagle_config` as NVIDIA writes it."""
        value = self._config.get(key)
        return (self._config.get("eagle_config") or {}).get(key) if value is None else value

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number of the layer's config.

        Raises:
            DrafterError: missing, or no positive number.
        """
        value = self.layer_config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise DrafterError(
                f"{self.location}: {key} in config.json must be a positive number, got {value}."
            )
        return value

    def rope(self) -> Mapping[str, Any]:
        """transformers' `rope_parameters` from any spelling; the head's own, not the target's.

        Raises:
            DrafterError: frequencies that change with the length of the text.
        """
        config = self.layer_config
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = rope.pop("type", None) or "default"
        rope.setdefault("rope_type", kind)
        rope.setdefault("rope_theta", float(config.get("rope_theta") or 10000.0))
        if rope["rope_type"] not in _ROPE_TYPES:
            raise DrafterError(
                f"{self.location} uses {rope['rope_type']} rotary positions; heads may use "
                f"{', '.join(sorted(_ROPE_TYPES))}."
            )
        return rope

    def captured_layers(self, target: Target) -> tuple[int, ...]:
        """Decoder layers of the target whose *inputs* an EAGLE-3 head reads.

        Configs count in two ways: outputs of layers (NVIDIA's, first one 1) or inputs (vLLM's and
        speculators', first one 2 or later); input i is output i - 1.

        Raises:
            DrafterError: none are named, and the target has too few layers for the default.
        """
        named = self.option("eagle_aux_hidden_state_layer_ids")
        if named:
            return tuple(i + 1 for i in named) if named[0] == 1 else tuple(named)
        count = target.num_layers
        if count < 7:
            raise DrafterError(
                "EAGLE-3 reads three different layers, for which its default needs a target of at "
                f"least 7 layers, but {target.name} has {count}. Name the layers in "
                "eagle3_layers_to_capture."
            )
        return 2, count // 2, count - 3

    def check_vocabulary(self, target: Target) -> None:
        """Refuse a head for another vocabulary; sizes may differ by padding at the end.

        Raises:
            VocabularyError: naming both sizes.
        """
        stated = self.layer_config.get("vocab_size")
        found = {"vocab_size in config.json": stated} if isinstance(stated, int) else {}
        for name in ("embed_tokens.weight", "t2d"):
            if self.has(name):
                found[name] = len(self._checkpoint.tensors[self._names[name]])
        for name, size in found.items():
            too_short = name == "embed_tokens.weight" and size < target.vocab_size
            if too_short or abs(size - target.vocab_size) > PADDING * target.vocab_size:
                raise VocabularyError(
                    f"{self.location} was made for {size} tokens ({name}), but {target.name} has "
                    f"{target.vocab_size}. Choose a head of this target."
                )

    def remarks(self, target: Target) -> tuple[str, ...]:
        """What a person should know about this pairing, though it runs; ask after all `take`s."""
        said: list[str] = []
        verifier = self._verifier()
        if verifier is not None and _short_name(verifier) not in _names_of(target):
            said.append(f"{self.location} was trained for {verifier}, not for {target.name}.")
        unread = [n for n in self._names if n not in self._taken and not n.startswith(_UNUSED)]
        if unread:
            said.append(f"{self.location} has weights that are not used: {', '.join(unread[:4])}.")
        return tuple(said)

    def _verifier(self) -> str | None:
        """The target that a `speculators` config says the head was trained for."""
        named = (self._config.get("speculators_config") or {}).get("verifier") or {}
        name = named.get("name_or_path")
        return name if isinstance(name, str) else None

    def _refuse_unsupported(self) -> None:
        layers = {name.split(".")[1] for name in self._names if name.startswith("layers.")}
        if len(layers) > 1:
            raise DrafterError(
                f"{self.location} has {len(layers)} layers, but EAGLE heads have 1 layer here."
            )
        if self._config.get("quantization_config"):
            raise DrafterError(f"{self.location} is quantized. Use its bf16 or fp16 original.")
        if self.option("use_aux_hidden_state") is False:
            raise DrafterError(
                f"{self.location} reads one layer of the target (use_aux_hidden_state is false), "
                "which this method does not draft from. Use a head that reads several layers."
            )


def _short_name(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].casefold()


def _names_of(target: Target) -> set[str]:
    where = str(getattr(target.config, "_name_or_path", None) or "")
    return {_short_name(name) for name in (target.name, where) if name}
