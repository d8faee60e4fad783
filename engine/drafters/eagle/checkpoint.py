"""Loads EAGLE heads and checks that they were made for the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, TypeVar

from pydantic import Field

from engine.drafters.eagle.head import DraftHead, Eagle1Head, Eagle3Head, Eagle3Spec
from engine.drafters.heads.checkpoint import HeadCheckpoint
from engine.drafters.heads.vocabulary import DraftOutput, Vocabulary
from engine.errors import DrafterError
from engine.proposal import Needs

_Head = TypeVar("_Head", bound=DraftHead)
_Eagle3 = TypeVar("_Eagle3", bound=Eagle3Head)

CapturedLayers = Annotated[
    tuple[Annotated[int, Field(ge=0, le=1023)], ...] | None,
    Field(
        strict=False,
        min_length=1,
        max_length=16,
        title="Target layers",
        description="target layers whose outputs the head reads; None = as its checkpoint says",
    ),
]


def load_eagle1(
    checkpoint: HeadCheckpoint, draft_vocab: int | None = None, token_map: str | None = None
) -> Eagle1Head:
    """An EAGLE-1/2 head on the target's device, in its dtype.

    Args:
        draft_vocab, token_map: as `size` and `file` of `Vocabulary.beside`.
    """
    location, target = checkpoint.location, checkpoint.target
    if checkpoint.has("layers.0.hidden_norm.weight"):
        raise DrafterError(f"{location} is an EAGLE-3 head. Choose the method Eagle3.")
    window = layer_windows(checkpoint)[0]
    spec = replace(checkpoint.layer_spec(target.hidden_size), window=window)
    bias = checkpoint.config.bias
    output = DraftOutput(target, Vocabulary.beside(location, target, draft_vocab, token_map))
    head = checkpoint.load(lambda: Eagle1Head(spec, output, vocab=target.vocab_size, bias=bias))
    return _with_embedding(head, checkpoint, spec.hidden)


def load_eagle3(
    checkpoint: HeadCheckpoint, captured: Sequence[int] | None = None
) -> tuple[Eagle3Head, Needs]:
    """An EAGLE-3 head on the target's device, in its dtype, and the features that it reads.

    Args:
        captured: layers of the target whose outputs it reads; None = as its config says.
    """
    if checkpoint.has("mask_hidden"):
        raise DrafterError(f"{checkpoint.location} is a P-EAGLE head. Choose the method P_EAGLE.")
    check_is_eagle3(checkpoint)
    windows = layer_windows(checkpoint)
    return load_eagle3_network(Eagle3Head, checkpoint, captured, windows[0])


def check_is_eagle3(checkpoint: HeadCheckpoint) -> None:
    if not checkpoint.has("layers.0.hidden_norm.weight"):
        raise DrafterError(
            f"{checkpoint.location} is not an EAGLE-3 head: it has no hidden_norm. Choose the "
            "method Eagle for EAGLE-1/2 heads."
        )


def load_eagle3_network(
    make: Callable[[Eagle3Spec, DraftOutput | None], _Eagle3],
    checkpoint: HeadCheckpoint,
    captured: Sequence[int] | None,
    window: int | None,
) -> tuple[_Eagle3, Needs]:
    """As `load_eagle3`, of any network that has EAGLE-3's parts; `window` of its first layer."""
    vocabulary, own_output = checkpoint.vocabulary()
    if not own_output and vocabulary.ids is not None:
        raise DrafterError(
            f"{checkpoint.location} drafts tokens of its own (d2t), but lacks lm_head.weight. "
            "It is damaged; copy it again."
        )
    spec = _eagle3_spec(checkpoint, vocabulary.size, window)
    needs = Needs(hidden=True)
    if spec.num_features:
        needs = Needs(layers=_captured_inputs(checkpoint, captured, spec.num_features))
    elif captured:
        raise DrafterError(
            f"{checkpoint.location} reads the target's last hidden state only "
            "(use_aux_hidden_state is false). Leave eagle3_layers_to_capture out."
        )
    lm_head = None if own_output else DraftOutput(checkpoint.target)
    head = checkpoint.load(lambda: make(spec, lm_head))
    head.vocabulary = vocabulary
    return _with_embedding(head, checkpoint, spec.layer.hidden), needs


def layer_windows(checkpoint: HeadCheckpoint, *, max_layers: int = 1) -> tuple[int | None, ...]:
    """The window of each layer; refuses too many layers, and heads of another vocabulary."""
    numbered = (name.split(".") for name in checkpoint.unread if name.startswith("layers."))
    count = len({number for _, number, *_ in numbered})
    if count > max_layers:
        raise DrafterError(
            f"{checkpoint.location} has {count} layers, but EAGLE heads have {max_layers} layer."
        )
    checkpoint.agree(num_hidden_layers=count)
    checkpoint.check_vocabulary()
    return checkpoint.windows(count)


def _captured_inputs(
    checkpoint: HeadCheckpoint, captured: Sequence[int] | None, count: int
) -> tuple[int, ...]:
    """Decoder layers of the target whose *inputs* the head reads: as set, or by its config.

    Configs count in two ways: outputs of layers (NVIDIA's, first one 1) or inputs (vLLM's and
    speculators', first one 2 or later); input i is output i - 1.
    """
    target, layers = checkpoint.target, checkpoint.config.eagle_aux_hidden_state_layer_ids
    if captured:
        layers = tuple(i + 1 for i in captured)
    elif layers:
        layers = tuple(i + 1 for i in layers) if layers[0] == 1 else layers
    elif target.num_layers < 7:
        raise DrafterError(
            "EAGLE-3 reads three different layers, for which its default needs a target of at "
            f"least 7 layers, but {target.name} has {target.num_layers}. Name the layers in "
            "eagle3_layers_to_capture."
        )
    else:
        layers = (2, target.num_layers // 2, target.num_layers - 3)
    correct = "Correct eagle3_layers_to_capture."
    if len(layers) != count:
        raise DrafterError(
            f"{checkpoint.location} reads {count} layers of the target, but {len(layers)} are "
            f"captured. {correct}"
        )
    beyond = [layer - 1 for layer in layers if not 0 <= layer <= target.num_layers]
    if beyond:
        raise DrafterError(
            f"{checkpoint.location} reads the output of layer {beyond[0]}, but {target.name} has "
            f"layers 0 to {target.num_layers - 1}. {correct}"
        )
    return layers


def _eagle3_spec(
    checkpoint: HeadCheckpoint, draft_vocab_size: int, window: int | None
) -> Eagle3Spec:
    config, location, target = checkpoint.config, checkpoint.location, checkpoint.target
    width = target.hidden_size
    reads_layers, has_fc = config.use_aux_hidden_state, checkpoint.has("fc.weight")
    if has_fc and not reads_layers:
        raise DrafterError(
            f"{location}'s config.json says that use_aux_hidden_state is false, but fc.weight "
            "fuses several layers. It is damaged; copy it again."
        )
    inputs = checkpoint.size("fc.weight", 1) if reads_layers else 0
    if inputs % width:
        raise DrafterError(
            f"{location}: fc reads {inputs} numbers, no multiple of the hidden size {width} of "
            f"{target.name}. This drafter was made for another model."
        )
    layer = checkpoint.layer_spec(checkpoint.size("fc.weight", 0) if reads_layers else width)
    if not checkpoint.has("lm_head.weight") and layer.hidden != width:
        raise DrafterError(
            f"{location} has no lm_head and hidden size {layer.hidden}, so it cannot use the "
            f"target's, which needs {width}."
        )
    before_residual = config.norm_before_residual
    if before_residual is None:
        before_residual = checkpoint.is_speculators
    return Eagle3Spec(
        layer=replace(layer, window=window),
        num_features=inputs // width,
        feature_width=width,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=before_residual,
        norm_before_fc=checkpoint.option("norm_before_fc", "input_norm.weight"),
        norm_each_feature=checkpoint.option("fc_norm", "fc_norm.0.weight"),
        norm_output=config.norm_output,
    )


def _with_embedding(head: _Head, checkpoint: HeadCheckpoint, width: int) -> _Head:
    head.embedding = checkpoint.embedding(width)
    checkpoint.check_config_read()
    return head
