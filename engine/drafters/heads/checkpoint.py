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
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from engine.drafters.heads.config import ConfigReader
from engine.drafters.heads.layer import HeadLayer, HeadSpec
from engine.errors import DrafterError, VocabularyError, first_line
from engine.model.checkpoints import Checkpoint, read_checkpoint
from engine.model.files import UNREADABLE
from engine.model.kinds import ATTENTION, FULL, SLIDING
from engine.model.target import Target
from engine.safe_text import short

PADDING = 0.01
"""Vocabularies whose sizes differ by at most this share differ by padding at the end."""
UNUSED = ("t2d", "rotary_emb.", "verifier_norm.", "verifier_lm_head.")
"""Tensors that trainers leave in their files."""

_RENAMED = {
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_Network = TypeVar("_Network", bound=nn.Module)


class HeadCheckpoint:
    """A network's tensors by one set of names, and its config.

    Attributes:
        config: what its config.json says; a setting that is looked at is read.
        unread: names of tensors that nobody has taken yet.
    """

    def __init__(self, found: Checkpoint) -> None:
        self.location = found.location
        self._reader = ConfigReader(found.config, found.location)
        self.config, self.is_speculators = self._reader.settings, self._reader.is_nested
        self.model_type = found.config.get("model_type")
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

    def num_embeddings(self, target: Target) -> int:
        """Tokens that it can embed, by its own matrix or the target's."""
        if self.has("embed_tokens.weight"):
            return self.size("embed_tokens.weight", 0)
        return len(target.embedding.get_parameter("weight"))

    def mask_token(self, named: int | None, size: int) -> int:
        """The mask of a network that drafts blocks: as a setting names it, or the config.

        Args:
            size: rows of the embedding that must have it.
        """
        said = self.config
        known = (named, said.mask_token_id, said.ptd_token_id, said.pard_token)
        return mask_token(known, self.location, size)

    def option(self, name: str, tensor: str) -> bool:
        """Whether the network has what a setting switches on and a tensor belongs to.

        DrafterError if the setting says so and there is no such tensor.
        """
        said, has = getattr(self.config, name), self.has(tensor)
        if said and not has:
            raise DrafterError(
                f"{self.location}'s config.json says {name}, but there is no tensor {tensor}. "
                "It is damaged; copy it again."
            )
        return has and said is not False

    def agree(self, **sizes: int) -> None:
        """DrafterError where the config names another size than the tensors, or the target."""
        for name, size in sizes.items():
            said = getattr(self.config, name)
            if said not in (None, size):
                raise DrafterError(
                    f"{self.location}: {name} in config.json must be {size}, got {said}. It was "
                    "made for another model, or it is damaged."
                )

    def check_vocabulary(self, target: Target) -> None:
        """VocabularyError if it was made for other tokens than the target's, padding aside."""
        stated = self.config.vocab_size
        sizes = {} if stated is None else {"vocab_size in config.json": stated}
        for name in ("embed_tokens.weight", "t2d"):
            if self.has(name):
                sizes[name] = len(self.take(name))
        for name, size in sizes.items():
            too_short = name == "embed_tokens.weight" and size < target.vocab_size
            if too_short or abs(size - target.vocab_size) > PADDING * target.vocab_size:
                raise VocabularyError(
                    f"{self.location} was made for {size} tokens ({name}), but {target.name} has "
                    f"{target.vocab_size}. Choose a head of this target."
                )

    def layer_spec(self, width: int) -> HeadSpec:
        """The layers' sizes and constants; DrafterError for what such layers cannot compute."""
        from transformers.activations import ACT2FN  # seconds, which the page's start saves

        config = self.config
        if config.quantization_config:
            raise DrafterError(f"{self.location} is quantized. Use its bf16 or fp16 original.")
        self.agree(hidden_size=width)
        heads = self.stated("num_attention_heads", config.num_attention_heads)
        if config.hidden_act not in ACT2FN:
            raise DrafterError(
                f"{self.location} has the unknown activation {config.hidden_act[:80]!a}."
            )
        attention, head_dim = "layers.0.self_attn", config.head_dim or max(1, width // heads)
        rope, rotary_dim = self._rope(head_dim)
        return HeadSpec(
            hidden=width,
            intermediate=config.intermediate_size or self.size("layers.0.mlp.gate_proj.weight", 0),
            heads=heads,
            kv_heads=config.num_key_value_heads or heads,
            head_dim=head_dim,
            eps=config.rms_norm_eps,
            rope=rope,
            activation=config.hidden_act,
            qkv_bias=self.option("attention_bias", f"{attention}.q_proj.bias"),
            o_bias=self.has(f"{attention}.o_proj.bias"),
            qk_norm=self.option("use_qk_norm", f"{attention}.q_norm.weight"),
            rotary_dim=rotary_dim,
            interleaved=not config.is_neox_style,
            value_scale=config.attention_value_scale,
        )

    def windows(
        self, count: int, named: int | None = None, *, all_slide: bool = False
    ) -> tuple[int | None, ...]:
        """How many rows each of so many layers looks at, its own included; None = all.

        Args:
            named: the window, where another setting than `sliding_window` names it.
            all_slide: whether all layers slide where `layer_types` names none that does.

        Raises DrafterError: it describes layers that no such network has.
        """
        config = self.config
        kinds = config.layer_types or FULL[:1] * count
        if len(kinds) != count or not set(kinds) <= ATTENTION:
            raise DrafterError(
                f"{self.location}: layer_types in config.json must name {count} layers, each one "
                f"of {', '.join(sorted(ATTENTION))}."
            )
        if all_slide and SLIDING[0] not in kinds:
            kinds = SLIDING[:1] * count
        stated, slides = config.sliding_window, config.use_sliding_window
        window = named or (stated if slides else None) or 0
        if SLIDING[0] in kinds and window < 1:
            raise DrafterError(
                f"{self.location}'s config.json has sliding_attention among its layer_types, but "
                "no sliding_window. Add it."
            )
        return tuple(window if kind == SLIDING[0] else None for kind in kinds)

    def stated(self, name: str, value: int | None) -> int:
        """A number of the config that no tensor tells; DrafterError if it says none."""
        if value is None:
            raise DrafterError(f"{self.location}'s config.json says no {name}. Add it.")
        return value

    def _rope(self, head_dim: int) -> tuple[Mapping[str, Any], int]:
        """transformers' `rope_parameters` from any spelling: the network's, not the target's.

        And how many numbers of a head they turn.
        """
        config = self.config
        new, old = config.rope_parameters, config.rope_scaling
        rope = dict(new or old)
        kind = rope.pop("type", None) or "default"
        rope.setdefault("rope_type", kind)
        rope.setdefault("rope_theta", config.rope_theta)
        if rope["rope_type"] not in _ROPE_TYPES:
            raise DrafterError(
                f"{self.location} uses {str(rope['rope_type'])[:80]!a} rotary positions; heads may "
                f"use {', '.join(_ROPE_TYPES)}."
            )
        of_rope = rope.pop("partial_rotary_factor", None)
        share = config.partial_rotary_factor or of_rope or 1.0
        turned = int(head_dim * share) if isinstance(share, float | int) else 0
        if not 2 <= turned <= head_dim or turned % 2:
            raise DrafterError(
                f"{self.location}: partial_rotary_factor in config.json must leave an even number "
                f"of a head's {head_dim} numbers to turn, got {short(share)}."
            )
        return rope, turned

    def check_config_read(self, *also: str) -> None:
        """Raises DrafterError: its config says something that nobody has read (`ConfigReader`)."""
        self._reader.check_all_read(*also)

    def check_all_read(self) -> None:
        """DrafterError if nobody took some of its tensors, or read some of its config."""
        names = [name for name in self.unread if not name.startswith(UNUSED)]
        self._found.check_read(self._found.tensors.keys() - names)
        self.check_config_read()

    def load(self, make: Callable[[], _Network], target: Target) -> _Network:
        """A network with these weights, which never had others, where and as the target is.

        DrafterError if a tensor is missing or has another shape, or it is of another target.
        """
        self.agree(target_hidden_size=target.hidden_size, num_target_layers=target.num_layers)
        try:
            with torch.device("meta"):
                network = make()
        except UNREADABLE as error:
            raise DrafterError(
                f"{self.location}: no network can be built from its config.json: "
                f"{first_line(error)}."
            ) from error
        names, gemma = published_names(network), self.config.use_gemma_norm
        tensors = {}
        for name, wanted in network.state_dict().items():
            module, _, kind = name.rpartition(".")
            parts = names.get(module, {module: len(wanted)}).items()
            taken = [self.take(f"{part}.{kind}", n, *wanted.shape[1:]) for part, n in parts]
            tensors[name] = taken[0] if len(taken) == 1 else torch.cat(taken)
            if gemma and isinstance(network.get_submodule(module), nn.RMSNorm):
                tensors[name] = 1 + tensors[name].float()
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
