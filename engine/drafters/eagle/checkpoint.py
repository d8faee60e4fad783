"""Loads EAGLE heads and checks that they were made for the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

from pydantic import Field

from engine.drafters.eagle.head import Eagle1Head, Eagle3Head, Eagle3Spec
from engine.drafters.heads.checkpoint import HeadCheckpoint
from engine.drafters.heads.vocabulary import DraftOutput, Vocabulary
from engine.errors import DrafterError
from engine.proposal import Needs

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
    target = checkpoint.target
    checkpoint.check_is("Eagle")
    checkpoint.check_vocabulary()
    (spec,) = checkpoint.layer_specs(target.hidden_size, most=1)
    vocabulary = Vocabulary.beside(checkpoint.location, target, draft_vocab, token_map)
    output, bias = DraftOutput(target, vocabulary), checkpoint.config.bias
    head = checkpoint.load(lambda: Eagle1Head(spec, output, vocab=target.vocab_size, bias=bias))
    head.embedding = checkpoint.embedding(spec.hidden)
    checkpoint.check_config_read()
    return head


def load_eagle3(
    checkpoint: HeadCheckpoint, captured: Sequence[int] | None = None
) -> tuple[Eagle3Head, Needs]:
    """An EAGLE-3 head on the target's device, in its dtype, and the features that it reads.

    Args:
        captured: layers of the target whose outputs it reads; None = as its config says.
    """
    checkpoint.check_is("Eagle3")
    return load_eagle3_network(Eagle3Head, checkpoint, captured)


def load_eagle3_network(
    kind: type[_Eagle3], checkpoint: HeadCheckpoint, captured: Sequence[int] | None
) -> tuple[_Eagle3, Needs]:
    """As `load_eagle3`, of any network that has EAGLE-3's parts."""
    target = checkpoint.target
    vocabulary, own_output = checkpoint.vocabulary()
    spec = _eagle3_spec(checkpoint, vocabulary.size, kind.max_layers)
    is_narrow = spec.layer.hidden != target.hidden_size
    if not own_output and (vocabulary.ids is not None or is_narrow):
        raise DrafterError(
            f"{checkpoint.location} drafts tokens of its own (d2t), or has another hidden size "
            f"than {target.name}, but lacks lm_head.weight. It is damaged; copy it again."
        )
    needs = Needs(hidden=True)
    if spec.num_features:
        needs = Needs(layers=_captured_inputs(checkpoint, captured, spec.num_features))
    elif captured:
        raise DrafterError(
            f"{checkpoint.location} reads the target's last hidden state only "
            "(use_aux_hidden_state is false). Leave eagle3_layers_to_capture out."
        )
    lm_head = None if own_output else DraftOutput(target)
    head = checkpoint.load(lambda: kind(spec, lm_head))
    head.vocabulary = vocabulary
    head.embedding = checkpoint.embedding(spec.layer.hidden)
    checkpoint.check_config_read()
    return head, needs


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
    if len(layers) != count or not all(0 <= layer <= target.num_layers for layer in layers):
        raise DrafterError(
            f"{checkpoint.location} reads the outputs of {count} layers, and {target.name} has "
            f"layers 0 to {target.num_layers - 1}, but {', '.join(str(i - 1) for i in layers)} "
            "are captured. Correct eagle3_layers_to_capture."
        )
    return layers


def _eagle3_spec(checkpoint: HeadCheckpoint, draft_vocab_size: int, max_layers: int) -> Eagle3Spec:
    config, location, target = checkpoint.config, checkpoint.location, checkpoint.target
    width, reads_layers = target.hidden_size, config.use_aux_hidden_state
    if checkpoint.has("fc.weight") and not reads_layers:
        raise DrafterError(
            f"{location}'s config.json says that use_aux_hidden_state is false, but fc.weight "
            "fuses several layers. It is damaged; copy it again."
        )
    hidden, inputs = checkpoint.take("fc.weight", None, None).shape if reads_layers else (width, 0)
    if inputs % width:
        raise DrafterError(
            f"{location}: fc reads {inputs} numbers, no multiple of the hidden size {width} of "
            f"{target.name}. This drafter was made for another model."
        )
    layer, *others = checkpoint.layer_specs(hidden, most=max_layers)
    before_residual = config.norm_before_residual
    if before_residual is None:
        before_residual = checkpoint.is_speculators
    return Eagle3Spec(
        layer=layer,
        num_features=inputs // width,
        feature_width=width,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=before_residual,
        norm_before_fc=checkpoint.option("norm_before_fc", "input_norm.weight"),
        norm_each_feature=checkpoint.option("fc_norm", "fc_norm.0.weight"),
        norm_output=config.norm_output,
        others=tuple(others),
    )
