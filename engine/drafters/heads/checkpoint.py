"""Checkpoints of draft networks: what their configs and tensors are called, in every format.

yuhuili (EAGLE-1/2)   layers.0.*, fc, embed_tokens
yuhuili (EAGLE-3)     midlayer.*, fc, norm, lm_head, d2t, t2d
NVIDIA (ModelOpt)     the same with layers.0.*; no t2d; lm_head only if the head has its own
speculators           as NVIDIA's, with embed_tokens; the layer's config is nested, and the
                      config names the verifier that the head was trained for
z-lab (DFlash)        layers.N.*, fc, hidden_norm, norm; transformers writes encoder.fc and
                      encoder.output_norm_enc
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from engine.drafters.heads.layer import HeadLayer, HeadSpec
from engine.errors import DrafterError
from engine.model.checkpoints import Checkpoint, read_checkpoint
from engine.model.target import Target

_RENAMED = {
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
_Network = TypeVar("_Network", bound=nn.Module)


class HeadCheckpoint:
    """A network's tensors by one set of names, and its config wherever each format keeps it.

    Attributes:
        layer_config: the config of the network's layers.
        unread: names of tensors that nobody has taken yet.
    """

    def __init__(self, found: Checkpoint) -> None:
        self.location = found.location
        nested = found.config.get("transformer_layer_config")
        self.is_speculators = isinstance(nested, Mapping)
        self.layer_config: Mapping[str, Any] = (
            nested if isinstance(nested, Mapping) else found.config
        )
        tensors = {_renamed(name): tensor for name, tensor in found.tensors.items()}
        self._found = Checkpoint(found.location, found.config, tensors)
        self.unread = dict.fromkeys(tensors)

    @classmethod
    def read(cls, location: str) -> Self:
        """As `read_checkpoint`."""
        return cls(read_checkpoint(location))

    def has(self, name: str) -> bool:
        return name in self._found.tensors

    def take(self, name: str, *shape: int | None) -> Tensor:
        """A tensor that must have this shape (`Checkpoint.tensor`)."""
        self.unread.pop(name, None)
        return self._found.tensor(name, *shape)

    def size(self, name: str, dim: int) -> int:
        """Extent of a matrix that others are checked against."""
        return self.take(name, None, None).shape[dim]

    def option(self, key: str) -> Any:
        """A setting: at the top of the config, or where NVIDIA or z-lab nest it."""
        config = self._found.config
        places = (config, config.get("eagle_config") or {}, config.get("dflash_config") or {})
        return next((place[key] for place in places if place.get(key) is not None), None)

    def number(self, key: str, default: int | None = None) -> int:
        """A positive number of the layers' config; DrafterError if it is none."""
        value = self.layer_config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise DrafterError(
                f"{self.location}: {key} in config.json must be a positive number, got {value}."
            )
        return value

    def layer_spec(self, width: int) -> HeadSpec:
        """The layers' sizes and constants; DrafterError for what such layers cannot compute."""
        if self.option("quantization_config"):
            raise DrafterError(f"{self.location} is quantized. Use its bf16 or fp16 original.")
        heads = self.number("num_attention_heads")
        activation = str(self.layer_config.get("hidden_act", "silu"))
        if activation not in ACT2FN:
            raise DrafterError(f"{self.location} has the unknown activation {activation!r}.")
        attention = "layers.0.self_attn"
        return HeadSpec(
            hidden=width,
            intermediate=self.number(
                "intermediate_size", self.size("layers.0.mlp.gate_proj.weight", 0)
            ),
            heads=heads,
            kv_heads=self.number("num_key_value_heads", heads),
            head_dim=self.number("head_dim", max(1, width // heads)),
            eps=float(self.layer_config.get("rms_norm_eps", 1e-6)),
            rope=self._rope(),
            activation=activation,
            qkv_bias=self.has(f"{attention}.q_proj.bias"),
            o_bias=self.has(f"{attention}.o_proj.bias"),
            qk_norm=self.has(f"{attention}.q_norm.weight"),
        )

    def _rope(self) -> Mapping[str, Any]:
        """transformers' `rope_parameters` from any spelling: the network's, not the target's."""
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

    def load(self, make: Callable[[], _Network], target: Target) -> _Network:
        """A network with these weights, which never had others, where and as the target is.

        DrafterError if a tensor is missing or has another shape.
        """
        with torch.device("meta"):
            network = make()
        names = published_names(network)
        tensors = {}
        for name, wanted in network.state_dict().items():
            module, _, kind = name.rpartition(".")
            parts = names.get(module, {module: len(wanted)}).items()
            taken = [self.take(f"{part}.{kind}", n, *wanted.shape[1:]) for part, n in parts]
            tensors[name] = taken[0] if len(taken) == 1 else torch.cat(taken)
        network.load_state_dict(tensors, strict=True, assign=True)
        return network.requires_grad_(False).eval().to(device=target.device, dtype=target.dtype)


def published_names(network: nn.Module) -> dict[str, dict[str, int]]:
    """Per module that goes by other names in checkpoints: its parts, and the rows of each.

    A network's own are in its `aliases`; layers are numbered, also where there is but one.
    """
    names: dict[str, dict[str, int]] = {}
    others: Mapping[str, str] = getattr(network, "aliases", {})
    for path, module in network.named_modules():
        if isinstance(module, HeadLayer):
            for own, parts in module.published().items():
                numbered = {f"layers.{module.index}.{part}": n for part, n in parts.items()}
                names[f"{path}.{own}"] = numbered
        elif path in others:
            names[path] = {others[path]: len(module.get_parameter("weight"))}
    return names


def _renamed(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
