"""Checkpoints of draft networks: what their configs and tensors are called, in every format.

yuhuili (EAGLE-1/2)   layers.0.*, fc, embed_tokens
yuhuili (EAGLE-3)     midlayer.*, fc, norm, lm_head, d2t, t2d
NVIDIA (ModelOpt)     the same with layers.0.*; no t2d; lm_head only if the head has its own
speculators           as NVIDIA's, with embed_tokens; the layer's config is nested, and the
                      config names the verifier that the head was trained for
P-EAGLE               as EAGLE-3's, with more layers and mask_hidden
z-lab (DFlash)        layers.N.*, fc, hidden_norm, norm; transformers writes encoder.fc and
                      encoder.output_norm_enc
DSpark                as DFlash's, with markov_head, embed_tokens, lm_head and confidence_head
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Self, TypeVar

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from engine.config import Settings
from engine.drafters.heads.layer import HeadLayer, HeadSpec
from engine.errors import ConfigError, DrafterError, first_line
from engine.model.checkpoints import Checkpoint, read_checkpoint
from engine.model.files import UNREADABLE
from engine.model.target import Target

_RENAMED = {
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_Network = TypeVar("_Network", bound=nn.Module)


_Count = Annotated[int, Field(ge=1, le=1 << 24)]
_Layers = Annotated[tuple[Annotated[int, Field(ge=-1, le=4096)], ...], Field(strict=False)]


class _Published(Settings):
    """Other people's settings: what is not asked for may be anything, and null is not said."""

    model_config = ConfigDict(extra="ignore", title="config.json")

    @classmethod
    def read(cls, values: Mapping[str, Any], location: str) -> Self:
        """DrafterError if a setting that counts is of another kind, or out of range."""
        said = {key: value for key, value in values.items() if value is not None}
        try:
            return cls.parse(said, where=f"{location}/config.json")
        except ConfigError as error:
            raise DrafterError(str(error)) from error


class LayerConfig(_Published):
    """What a config says of the network's layers."""

    hidden_size: _Count | None = None
    vocab_size: _Count | None = None
    num_hidden_layers: int | None = Field(None, ge=1, le=1024)
    num_attention_heads: int | None = Field(None, ge=1, le=4096)
    num_key_value_heads: int | None = Field(None, ge=1, le=4096)
    head_dim: int | None = Field(None, ge=1, le=1 << 14)
    intermediate_size: _Count | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = Field(1e-6, ge=0.0, lt=1.0)
    rope_theta: float = Field(10000.0, gt=0.0, allow_inf_nan=False)
    rope_parameters: dict[str, Any] = {}
    rope_scaling: dict[str, Any] = {}
    bias: bool = True


class HeadOptions(_Published):
    """What a config says of the head itself: at its top, or where NVIDIA or z-lab nest it."""

    quantization_config: Any = None
    use_aux_hidden_state: bool = True
    eagle_aux_hidden_state_layer_ids: _Layers = ()
    norm_before_residual: bool | None = None
    norm_output: bool = False
    speculators_config: dict[str, Any] = {}
    block_size: int | None = Field(None, ge=1, le=1024)
    mask_token_id: int | None = Field(None, ge=0)
    ptd_token_id: int | None = Field(None, ge=0)
    pard_token: int | None = Field(None, ge=0)
    target_layer_ids: _Layers | None = None
    aux_hidden_state_layer_ids: _Layers = ()
    sample_from_anchor: bool = True
    markov_head_type: str = "vanilla"
    layer_types: Annotated[tuple[str, ...], Field(strict=False)] = ()
    sliding_window: int | None = Field(None, ge=1)


class HeadCheckpoint:
    """A network's tensors by one set of names, and its config wherever each format keeps it.

    Attributes:
        layers: the config of the network's layers.
        unread: names of tensors that nobody has taken yet.
    """

    def __init__(self, found: Checkpoint) -> None:
        self.location, config = found.location, found.config
        sections = ("transformer_layer_config", "eagle_config", "dflash_config")
        nested = {name: config.get(name) or {} for name in sections}
        for name, section in nested.items():
            if not isinstance(section, Mapping):
                raise DrafterError(f"{found.location}: {name} in config.json must be a mapping.")
        layers, *others = nested.values()
        self.is_speculators = bool(layers)
        self.layers = LayerConfig.read(layers or config, found.location)
        options: dict[str, Any] = {}
        for place in (*reversed(others), config):
            options |= {key: value for key, value in place.items() if value is not None}
        self.options = HeadOptions.read(options, found.location)
        tensors = {_renamed(name): tensor for name, tensor in found.tensors.items()}
        self._found = Checkpoint(found.location, found.config, tensors)
        self.unread = dict.fromkeys(tensors)

    @classmethod
    def read(cls, location: str) -> Self:
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

    def mask_token(self, named: int | None, size: int) -> int:
        """The mask of a network that drafts blocks: as a setting names it, or the config.

        Args:
            size: rows of the embedding that must have it.
        """
        said = self.options
        known = (named, said.mask_token_id, said.ptd_token_id, said.pard_token)
        return mask_token(known, self.location, size)

    def layer_spec(self, width: int) -> HeadSpec:
        """The layers' sizes and constants; DrafterError for what such layers cannot compute."""
        from transformers.activations import ACT2FN  # seconds, which the page's start saves

        if self.options.quantization_config:
            raise DrafterError(f"{self.location} is quantized. Use its bf16 or fp16 original.")
        layers = self.layers
        heads = self.stated("num_attention_heads", layers.num_attention_heads)
        if layers.hidden_act not in ACT2FN:
            raise DrafterError(
                f"{self.location} has the unknown activation {layers.hidden_act[:80]!a}."
            )
        attention = "layers.0.self_attn"
        return HeadSpec(
            hidden=width,
            intermediate=layers.intermediate_size or self.size("layers.0.mlp.gate_proj.weight", 0),
            heads=heads,
            kv_heads=layers.num_key_value_heads or heads,
            head_dim=layers.head_dim or max(1, width // heads),
            eps=layers.rms_norm_eps,
            rope=self._rope(),
            activation=layers.hidden_act,
            qkv_bias=self.has(f"{attention}.q_proj.bias"),
            o_bias=self.has(f"{attention}.o_proj.bias"),
            qk_norm=self.has(f"{attention}.q_norm.weight"),
        )

    def stated(self, name: str, value: int | None) -> int:
        """A number of the config that no tensor tells; DrafterError if it says none."""
        if value is None:
            raise DrafterError(f"{self.location}'s config.json says no {name}. Add it.")
        return value

    def _rope(self) -> Mapping[str, Any]:
        """transformers' `rope_parameters` from any spelling: the network's, not the target's."""
        rope = dict(self.layers.rope_parameters or self.layers.rope_scaling)
        kind = rope.pop("type", None) or "default"
        rope.setdefault("rope_type", kind)
        rope.setdefault("rope_theta", self.layers.rope_theta)
        if rope["rope_type"] not in _ROPE_TYPES:
            raise DrafterError(
                f"{self.location} uses {str(rope['rope_type'])[:80]!a} rotary positions; heads may "
                f"use {', '.join(_ROPE_TYPES)}."
            )
        return rope

    def check_all_read(self) -> None:
        """DrafterError if nobody took some of its tensors."""
        self._found.check_read(self._found.tensors.keys() - self.unread.keys())

    def load(self, make: Callable[[], _Network], target: Target) -> _Network:
        """A network with these weights, which never had others, where and as the target is.

        DrafterError if a tensor is missing or has another shape.
        """
        try:
            with torch.device("meta"):
                network = make()
        except UNREADABLE as error:
            raise DrafterError(
                f"{self.location}: no network can be built from its config.json: "
                f"{first_line(error)}."
            ) from error
        names = published_names(network)
        tensors = {}
        for name, wanted in network.state_dict().items():
            module, _, kind = name.rpartition(".")
            parts = names.get(module, {module: len(wanted)}).items()
            taken = [self.take(f"{part}.{kind}", n, *wanted.shape[1:]) for part, n in parts]
            tensors[name] = taken[0] if len(taken) == 1 else torch.cat(taken)
        network.load_state_dict(tensors, strict=True, assign=True)
        return network.requires_grad_(False).eval().to(device=target.device, dtype=target.dtype)


def mask_token(said: Iterable[int | None], location: str, size: int) -> int:
    """The first that is said of the mask of a network that embeds `size` tokens."""
    mask = next((int(one) for one in said if one is not None), None)
    if mask is None:
        raise DrafterError(
            f"{location}'s config.json says no mask token (mask_token_id, ptd_token_id or "
            "pard_token): it was not trained to draft blocks. Choose another method, or set "
            "mask_token_id."
        )
    if not 0 <= mask < size:
        raise DrafterError(
            f"The mask token is {mask}, but {location} embeds tokens 0 to {size - 1}. "
            "Correct mask_token_id."
        )
    return mask


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
