"""Checkpoints of draft networks: every published layout, read by one table into one set of names.

The names are those of our networks: `layers.N.*`, `fc`, `norm`, `hidden_norm`, `lm_head`,
`embed_tokens`. Configs are flattened the same way (`heads.config.SECTIONS`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from engine.drafters.heads.config import SECTIONS, HeadConfig
from engine.drafters.heads.layer import HeadLayer, HeadSpec
from engine.drafters.heads.vocabulary import TokenEmbedding, Vocabulary
from engine.errors import DrafterError, VocabularyError, first_line
from engine.model.checkpoints import Checkpoint, read_checkpoint
from engine.model.files import READ_ERRORS, name_list
from engine.model.layer_types import ATTENTION, FULL, SLIDING
from engine.model.target import Target
from engine.safe_text import short

PADDING = 0.01
"""Vocabularies whose sizes differ by at most this share differ by padding at the end."""
UNUSED = ("t2d", "rotary_emb.", "verifier_norm.", "verifier_lm_head.", "confidence_head.")
"""Tensors that trainers leave in their files, and heads that predict acceptance (DSpark)."""


class Layout(NamedTuple):
    """How a publisher names the tensors of a method's networks.

    Attributes:
        method: its `decoding_type`.
        mark: pattern of names that only its checkpoints have.
        prefixes: the publisher's and ours.
    """

    publisher: str
    method: str
    mark: str
    prefixes: tuple[tuple[str, str], ...] = ()

    def marks(self, name: str) -> bool:
        return re.fullmatch(self.mark, name) is not None

    def read(self, name: str) -> str:
        """Our name for a tensor."""
        return _renamed(name, self.prefixes)

    def written(self, name: str) -> str:
        """The publisher's name for a tensor of ours."""
        return _renamed(name, [(ours, own) for own, ours in self.prefixes])


def _renamed(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    changed = (new + name.removeprefix(old) for old, new in prefixes if name.startswith(old))
    return next(changed, name)


_HEAD = r"\d{1,3}\.\d{1,3}\.(linear\.)?(weight|bias)"
_ENCODER = (("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."))
YUHUILI = Layout(
    "yuhuili", "Eagle3", r"midlayer\.hidden_norm\.weight", (("midlayer.", "layers.0."),)
)
LAYOUTS = (
    Layout("FasterDecoding", "Medusa", _HEAD),
    Layout(
        "a model with heads merged in", "Medusa", rf"medusa_head\.{_HEAD}", (("medusa_head.", ""),)
    ),
    Layout("deepseek-ai, speculators", "DSpark", r"markov_head\.markov_w1\.weight", _ENCODER),
    Layout("AWS, speculators", "P_EAGLE", "mask_hidden", YUHUILI.prefixes),
    YUHUILI,
    Layout("NVIDIA, speculators", "Eagle3", r"layers\.0\.hidden_norm\.weight"),
    Layout("transformers", "DFlash", r"encoder\.output_norm_enc\.weight", _ENCODER),
    Layout("z-lab, NVIDIA", "DFlash", r"hidden_norm\.weight"),
    Layout("Apple", "ReDrafter", r"rnn_u\.weight"),
    Layout("yuhuili", "Eagle", r"fc\.weight"),
)
"""Public layouts; the first that one of a checkpoint's names tells is its own.

Our heads are written in FasterDecoding's, yuhuili's and Apple's, EAGLE-3 also in speculators'.
"""
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_Network = TypeVar("_Network", bound=nn.Module)


def layout_of(names: Iterable[str]) -> Layout | None:
    """The layout of the checkpoint with tensors of these names; None where they tell none."""
    names = list(names)
    return next((layout for layout in LAYOUTS if any(map(layout.marks, names))), None)


class HeadCheckpoint:
    """A network's tensors by our names, and its config, read for one target.

    Attributes:
        config: its config.json; reading a setting marks it as read.
        unread: names of tensors that have not been read yet.
    """

    def __init__(self, checkpoint: Checkpoint, target: Target, method: str) -> None:
        """Raises DrafterError: it is another method's than `method`, or its config is invalid."""
        self.location, self.target = checkpoint.location, target
        self.config = HeadConfig.of(checkpoint.config, checkpoint.location)
        self.model_type = checkpoint.config.get("model_type")
        self.is_speculators = bool(checkpoint.config.get(SECTIONS[0]))
        layout, self.tensors = layout_of(checkpoint.tensors), dict(checkpoint.tensors)
        if layout is not None:
            self.tensors = {layout.read(name): one for name, one in checkpoint.tensors.items()}
            if layout.method != method:
                raise DrafterError(
                    f"{self.location} is not a checkpoint for {method}. Choose the method "
                    f"{layout.method}."
                )
        self._stored = replace(checkpoint, tensors=self.tensors)
        self.unread = dict.fromkeys(self.tensors)

    @classmethod
    def read(cls, location: str, target: Target, method: str) -> Self:
        return cls(read_checkpoint(location), target, method)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, *shape: int | None) -> Tensor:
        """A tensor that must have this shape (`Checkpoint.tensor`)."""
        self.unread.pop(name, None)
        return self._stored.tensor(name, *shape)

    def size(self, name: str, dim: int) -> int:
        """Extent of a matrix, which others are checked against."""
        return self.take(name, None, None).shape[dim]

    def count(self, name: str) -> int:
        """Number of tensors called `name` with 0, 1, … in place of {}."""
        return next(i for i in itertools.count() if not self.has(name.format(i)))

    # ---- the config against the tensors and the target

    def required(self, name: str, *values: Any, hint: str = "Add it.") -> Any:
        """The first value that is not None; DrafterError if the config has none either."""
        value = next((v for v in (*values, getattr(self.config, name)) if v is not None), None)
        if value is None:
            raise DrafterError(f"{self.location}'s config.json has no {name}. {hint}")
        return value

    def option(self, name: str, tensor: str) -> bool:
        """Whether the network has the part that a setting switches on and a tensor belongs to.

        DrafterError if the setting is on and the tensor is missing.
        """
        setting, has = getattr(self.config, name), self.has(tensor)
        if setting and not has:
            raise DrafterError(
                f"{self.location}'s config.json sets {name}, but there is no tensor {tensor}. "
                "It is damaged; copy it again."
            )
        return has and setting is not False

    def agree(self, **sizes: int) -> None:
        """DrafterError where the config names another size than the tensors or the target."""
        for name, size in sizes.items():
            setting = getattr(self.config, name)
            if setting not in (None, size):
                raise DrafterError(
                    f"{self.location}: {name} in config.json must be {size}, got {setting}. It was "
                    "made for another model, or it is damaged."
                )

    def check_vocabulary(self) -> None:
        """VocabularyError if it was made for another vocabulary, padding aside."""
        target, vocab_size = self.target, self.config.vocab_size
        sizes = {} if vocab_size is None else {"vocab_size in config.json": vocab_size}
        sizes |= {n: len(self.take(n)) for n in (_EMBEDDING, "t2d") if self.has(n)}
        for name, size in sizes.items():
            too_short = name == _EMBEDDING and size < target.vocab_size
            if too_short or abs(size - target.vocab_size) > PADDING * target.vocab_size:
                raise VocabularyError(
                    f"{self.location} was made for {size} tokens ({name}), but {target.name} has "
                    f"{target.vocab_size}. Choose a head of this target."
                )

    def check_predicts_all(self, size: int) -> None:
        """VocabularyError unless it predicts as many tokens as the target has."""
        if size != self.target.vocab_size:
            raise VocabularyError(
                f"{self.location} predicts {size} tokens, but {self.target.name} has "
                f"{self.target.vocab_size}. It was made for another model."
            )

    def check_all_read(self, *also: str) -> None:
        """DrafterError if tensors, or settings other than `also`, were never read."""
        names = [name for name in self.unread if not name.startswith(UNUSED)]
        if names:
            raise DrafterError(
                f"{self.location} also has {name_list(names)}, which no other tensor goes with. "
                "It is not a complete checkpoint of this method; copy it again."
            )
        self.config.check_read(*also)

    def notes(self) -> tuple[str, ...]:
        """Remarks on this pairing, which runs all the same; complete once it is loaded."""
        notes: list[str] = []
        verifier = self.config.speculators_config.get("verifier")
        name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
        target = self.target
        names = (target.name, str(getattr(target.config, "_name_or_path", None) or target.name))
        if isinstance(name, str) and _short_name(name) not in map(_short_name, names):
            notes.append(f"{self.location} was trained for {name}, not for {target.name}.")
        unread = [n for n in self.unread if not n.startswith((*UNUSED, "embed_tokens."))]
        if unread:
            notes.append(f"{self.location} has weights that are not used: {name_list(unread)}.")
        return tuple(notes)

    # ---- the parts of a network

    def layer_specs(self, width: int, *, most: int = 1024) -> tuple[HeadSpec, ...]:
        """Sizes and constants of each layer; DrafterError for what such layers cannot compute.

        Args:
            most: layers that the method's networks have at most.
        """
        from transformers.activations import ACT2FN  # takes seconds: not at the page's start

        config = self.config
        if config.quantization_config:
            raise DrafterError(f"{self.location} is quantized. Use its bf16 or fp16 original.")
        self.agree(hidden_size=width)
        heads = self.required("num_attention_heads")
        if config.hidden_act not in ACT2FN:
            raise DrafterError(
                f"{self.location} has the unknown activation {config.hidden_act[:80]!a}."
            )
        attention, head_dim = "layers.0.self_attn", config.head_dim or max(1, width // heads)
        rope, rotary_dim = self._rope(head_dim)
        spec = HeadSpec(
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
        )
        return tuple(replace(spec, window=window) for window in self._windows(most))

    def _windows(self, most: int) -> tuple[int | None, ...]:
        """How many rows each layer attends to, its own included; None = all."""
        config = self.config
        count = len({n.split(".")[1] for n in self.tensors if n.startswith("layers.")})
        if not 1 <= count <= most:
            raise DrafterError(
                f"{self.location} has {count} layers (layers.N.…), but this method's networks have "
                f"{'1' if most == 1 else f'1 to {most}'}. Choose another method or checkpoint."
            )
        kinds = config.layer_types
        if most > 1:
            self.agree(num_hidden_layers=count)
        elif config.num_hidden_layers not in (None, count):
            kinds = ()  # the config of a target, which EAGLE's own code reads its sizes from
        kinds = kinds or FULL[:1] * count
        if len(kinds) != count or not set(kinds) <= ATTENTION:
            raise DrafterError(
                f"{self.location}: layer_types in config.json must name {count} layers, each one "
                f"of {', '.join(sorted(ATTENTION))}."
            )
        if config.use_swa and SLIDING[0] not in kinds:
            kinds = SLIDING[:1] * count
        own_window = config.sliding_window or 0
        window = (config.swa_window_size or own_window) if config.use_sliding_window else 0
        if SLIDING[0] in kinds and window < 1:
            raise DrafterError(
                f"{self.location}'s config.json has sliding_attention among its layer_types, but "
                "no sliding_window. Add it."
            )
        return tuple(window if kind == SLIDING[0] else None for kind in kinds)

    def _rope(self, head_dim: int) -> tuple[Mapping[str, Any], int]:
        """transformers' `rope_parameters` from any spelling, and how many dimensions they rotate.

        They are the network's own, not the target's.
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
        factor = config.partial_rotary_factor or rope.pop("partial_rotary_factor", None) or 1.0
        rotary_dim = int(head_dim * factor) if isinstance(factor, float | int) else 0
        if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
            raise DrafterError(
                f"{self.location}: partial_rotary_factor in config.json must rotate an even number "
                f"of a head's {head_dim} dimensions, got {short(factor)}."
            )
        return rope, rotary_dim

    def vocabulary(self) -> tuple[Vocabulary, bool]:
        """The tokens that it drafts, and whether it has its own output matrix for them.

        By `d2t`, which holds target id - draft id; where there are as many, they are the same.
        """
        self.check_vocabulary()
        target, own_output = self.target, self.has(_LM_HEAD)
        size = target.vocab_size
        if own_output:
            size = self.size(_LM_HEAD, 0)
        elif self.has("d2t"):
            size = len(self.take("d2t", None))
        self.agree(draft_vocab_size=size)
        if size == target.vocab_size:
            self.unread.pop("d2t", None)
            return Vocabulary(None, size), own_output
        ids = torch.arange(size) + self.take("d2t", size).long()
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= target.vocab_size:
            raise VocabularyError(
                f"{self.location}: d2t names token {low if low < 0 else high}, but {target.name} "
                f"has tokens 0 to {target.vocab_size - 1}. Choose a head of this target."
            )
        return Vocabulary(ids.to(target.device), target.vocab_size), own_output

    def embedding(self, width: int) -> TokenEmbedding:
        """Its embedding of this width; the target's where it has none of its own."""
        target, shared = self.target, TokenEmbedding.of(self.target.embedding)
        if self.has(_EMBEDDING):
            own = self.take(_EMBEDDING, None, width).to(target.device, target.dtype)
            # Most carry a copy of the target's; there is no need to keep both.
            plain = shared.table
            if isinstance(plain, Tensor) and own.shape == plain.shape and torch.equal(own, plain):
                return shared
            return TokenEmbedding(own)
        if width != shared.width:
            raise DrafterError(
                f"{self.location} has no embed_tokens and hidden size {width}, so it cannot use "
                f"the target's, which has {shared.width}."
            )
        return shared

    def mask_token(self, setting: int | None) -> int:
        """The mask of a network that drafts blocks: the method's setting, or the config's."""
        config, module = self.config, self.target.embedding
        embeds = int(module.num_embeddings)  # type: ignore[arg-type]
        if self.has(_EMBEDDING):
            embeds = self.size(_EMBEDDING, 0)
        candidates = (setting, config.mask_token_id, config.ptd_token_id, config.pard_token)
        return mask_token(candidates, self.location, embeds)

    def load(self, make: Callable[[], _Network]) -> _Network:
        """A network with these weights, on the target's device and in its dtype.

        DrafterError if a tensor is missing or has another shape, or it is of another target.
        """
        target = self.target
        self.agree(target_hidden_size=target.hidden_size, num_target_layers=target.num_layers)
        try:
            with torch.device("meta"):
                network = make()
        except READ_ERRORS as error:
            raise DrafterError(
                f"{self.location}: no network can be built from its config.json: "
                f"{first_line(error)}."
            ) from error
        names, state = published_names(network), {}
        for name, empty in network.state_dict().items():
            module, _, kind = name.rpartition(".")
            parts = names.get(module, {module: len(empty)}).items()
            tensors = [self.take(f"{part}.{kind}", n, *empty.shape[1:]) for part, n in parts]
            state[name] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        network.load_state_dict(state, strict=True, assign=True)
        return network.requires_grad_(False).eval().to(device=target.device, dtype=target.dtype)


def mask_token(candidates: Iterable[int | None], location: str, num_embeddings: int) -> int:
    """The first mask token that is not None; DrafterError if none is, or it has no embedding."""
    mask = next((int(token) for token in candidates if token is not None), None)
    if mask is None:
        raise DrafterError(
            f"{location}'s config.json has no mask token (mask_token_id, ptd_token_id or "
            "pard_token): it was not trained to draft blocks. Choose another method, or set "
            "mask_token_id."
        )
    if not 0 <= mask < num_embeddings:
        raise DrafterError(
            f"The mask token is {mask}, but {location} embeds tokens 0 to {num_embeddings - 1}. "
            "Correct mask_token_id."
        )
    return mask


def published_names(network: nn.Module) -> dict[str, dict[str, int]]:
    """Per module that has other names in checkpoints: its parts, and the rows of each.

    A network's own are in its `aliases`; layers are numbered even where there is only one.
    """
    names: dict[str, dict[str, int]] = {}
    aliases: Mapping[str, str] = getattr(network, "aliases", {})
    for path, module in network.named_modules():
        if isinstance(module, HeadLayer):
            for own, parts in module.published().items():
                numbered = {f"layers.{module.index}.{part}": n for part, n in parts.items()}
                names[f"{path}.{own}"] = numbered
        elif path in aliases:
            names[path] = {aliases[path]: len(module.get_parameter("weight"))}
    return names


def published_tensors(network: nn.Module) -> dict[str, Tensor]:
    """A network's parameters by their names in checkpoints; writing to them changes it."""
    names, tensors = published_names(network), dict[str, Tensor]()
    for name, parameter in network.named_parameters():
        module, _, kind = name.rpartition(".")
        parts = names.get(module, {module: len(parameter)})
        rows = parameter.split(list(parts.values()))
        tensors |= {f"{part}.{kind}": own for part, own in zip(parts, rows, strict=True)}
    return tensors


def _short_name(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].casefold()
