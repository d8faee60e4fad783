"""Medusa: extra heads on the target's last hidden state fill a static tree of ranks.

Where the target's own head reads row t and predicts token t + 1 (the root), Medusa head i reads the
same row and predicts token t + 2 + i, independent of the tokens between. A node at depth d
with rank r therefore carries the r-th best token of head d - 1, the same under every parent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import CDLL
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import silu

from engine.accept import Rule, Typical
from engine.config import UnitFloat, setting
from engine.drafters.base import BuildContext, Drafter, DraftSession, Traits, root_only
from engine.drafters.heads.checkpoint import LAYOUTS, HeadCheckpoint
from engine.drafters.heads.vocabulary import DraftOutput, DraftVocab, Vocabulary
from engine.drafters.method import ChoiceLimits, DraftShape, MethodConfig
from engine.drafters.texts import MAX_LOGIT_ROWS, TargetTrace
from engine.errors import DrafterError, SourceError
from engine.kernels.cpu.operators import NativeLinear, packed_linear, topk
from engine.model.checkpoints import read_checkpoint, tensor_names
from engine.model.target import Target
from engine.proposal import Budget, Needs, Proposal
from engine.tree import ChoicePaths, ChoiceTree, upload

_LAYOUTS = [layout for layout in LAYOUTS if layout.method == "Medusa"]
_CONFIG = ("base_model_name_or_path", "medusa_num_heads", "medusa_num_layers", "version")
"""Settings of config.json that follow from the tensors."""


class MedusaConfig(MethodConfig):
    """Settings of Medusa; the default tree is the example of TensorRT-LLM's documentation."""

    title = "Medusa"
    summary = (
        "Extra heads on the target's last hidden state each guess one token further ahead; "
        "a choice tree says which guesses to verify."
    )
    paper = "2401.10774"
    main_settings = "drafting medusa_choices acceptance"

    without_effect = (({"acceptance": "lossless"}, "posterior_threshold posterior_alpha"),)

    decoding_type: Literal["Medusa"] = "Medusa"
    speculative_model: str | None = setting(
        None, "Medusa heads", "the heads: folder, weight file or hub id; a merged model counts too"
    )
    medusa_choices: ChoicePaths = setting(
        ((0, 0, 0, 0), (0, 1, 0), (1, 0), (1, 1)),
        "Choice tree",
        "paths of ranks, one head per depth; list every path, or only those to the leaves",
    )
    num_medusa_heads: int | None = setting(
        None, "Number of heads", "first heads of the checkpoint to use; None = all", ge=1, le=64
    )
    draft_vocab: DraftVocab = None
    acceptance: Literal["lossless", "typical"] = setting(
        "lossless", "Acceptance", "typical accepts any plausible token: longer drafts, lossy"
    )
    posterior_threshold: UnitFloat = setting(
        0.09,
        "Typical acceptance: threshold",
        "typical: a token this probable is always accepted",
    )
    posterior_alpha: UnitFloat = setting(
        0.3,
        "Typical acceptance: alpha",
        "typical: where the target is unsure, the bar falls to alpha · exp(-entropy)",
    )

    @property
    def lossless(self) -> bool:
        return self.acceptance == "lossless"

    def build(self, context: BuildContext) -> MedusaDrafter:
        location = context.weights(self.speculative_model, "the Medusa heads")
        heads = read_heads(location, context.target, self.draft_vocab, self.num_medusa_heads)
        what = f"{self.speculative_model} with its {heads.count} Medusa heads"
        tree = ChoiceTree(self.medusa_choices)
        tree.check_fits(depth=heads.count, ranks=context.target.vocab_size, what=what)
        return MedusaDrafter(self, heads, tree, context.target.device)

    def draft_shape(self) -> DraftShape:
        return DraftShape.of(ChoiceTree(self.medusa_choices))

    def choice_limits(self, locate: Callable[[str], str]) -> ChoiceLimits:
        heads = self.num_medusa_heads
        if heads is None and self.speculative_model is not None:
            try:
                heads = _num_heads(tensor_names(locate(self.speculative_model))) or None
            except SourceError:
                pass  # loading the heads reports what is wrong with them
        return ChoiceLimits(depth=heads, what=f"{heads} heads" if heads else "")


@dataclass(frozen=True, slots=True, eq=False)
class ResidualLayer:
    """One residual block per head.

    Attributes:
        weight, bias: `(heads, hidden, hidden)` and `(heads, 1, hidden)`: one matmul for all heads.
        packed: each head's in the kernels' format; empty without kernels.
    """

    weight: Tensor
    bias: Tensor
    packed: tuple[NativeLinear, ...] = ()

    @classmethod
    def of(cls, weights: Tensor, biases: Tensor, kernels: CDLL | None) -> ResidualLayer:
        """`weights (heads, hidden, hidden)`, `biases (heads, hidden)`."""
        linears = [packed_linear(w, b, kernels) for w, b in zip(weights, biases, strict=True)]
        packed = tuple(linear for linear in linears if linear is not None)
        return cls(weights.new_empty(0) if packed else weights, biases[:, None], packed)

    def __call__(self, x: Tensor) -> Tensor:
        """`(heads, rows, hidden)` of the first heads."""
        count = len(x)
        if self.packed:
            products = [linear(rows) for linear, rows in zip(self.packed[:count], x, strict=True)]
            return x + silu(torch.stack(products))
        return x + silu(torch.baddbmm(self.bias[:count], x, self.weight[:count].mT))


@dataclass(frozen=True, slots=True, eq=False)
class MedusaHeads:
    """All heads of a checkpoint.

    Attributes:
        output: `(heads, vocab, hidden)`; None where the heads share the target's.
    """

    layers: tuple[ResidualLayer, ...]
    output: Tensor | None
    lm_head: DraftOutput
    count: int

    def logits(self, hidden: Tensor, num_heads: int) -> Tensor:
        """Predictions of the first `num_heads` heads: `(rows, hidden)` → `(heads, rows, vocab)`.

        Source: arXiv:2401.10774, section 2.1.1.
        """
        x = hidden.expand(num_heads, *hidden.shape)
        for layer in self.layers:
            x = layer(x)
        if self.output is not None:
            return torch.bmm(x, self.output[:num_heads].mT)
        return self.lm_head(x)


def read_heads(
    location: str, target: Target, draft_vocab: int | None = None, num_heads: int | None = None
) -> MedusaHeads:
    """Medusa heads in any published layout, in the target's dtype and on its device.

    Three layouts, recognized by the file's tensors: a flat dict `head.layer.linear.weight` with an
    output matrix `head.layers.weight` per head; the same without it (the target's `lm_head` takes
    its place); either of them inside a full model under `medusa_head.`. The number of heads is the
    file's: published configs name fewer than there are.

    Args:
        draft_vocab: as `size` of `Vocabulary.beside`; of heads that share the target's matrix.
        num_heads: how many are read, the first ones; None = all.

    Raises:
        SourceError: nothing there, or it cannot be read safely.
        DrafterError: no Medusa heads in it, fewer than `num_heads`, or heads for another target.
    """
    file = read_checkpoint(
        location,
        keep=lambda name: (
            (head := _head_of(name)) is not None and (num_heads is None or head < num_heads)
        ),
    )
    if not file.tensors:
        raise DrafterError(
            f"{location} holds no Medusa heads (tensors named 0.0.linear.weight, …). "
            "Name a checkpoint of heads, or a model with the heads merged in."
        )
    checkpoint, count = HeadCheckpoint(file, target, "Medusa"), _num_heads(file.tensors)
    if num_heads is not None and count < num_heads:
        raise DrafterError(
            f"num_medusa_heads is {num_heads}, but {location} holds {count} heads. Leave it empty."
        )
    depth, size = checkpoint.count("0.{}.linear.weight"), target.hidden_size

    def stacked(name: str, *shape: int) -> Tensor:
        heads = [checkpoint.take(f"{head}.{name}", *shape) for head in range(count)]
        return torch.stack([head.to(target.dtype) for head in heads]).to(target.device)

    layers = tuple(
        ResidualLayer.of(
            stacked(f"{layer}.linear.weight", size, size),
            stacked(f"{layer}.linear.bias", size),
            target.kernels,
        )
        for layer in range(depth)
    )
    output, vocabulary = None, None
    if checkpoint.has(own_output := f"0.{depth}.weight"):
        checkpoint.check_predicts_all(len(checkpoint.take(own_output)))
        output = stacked(f"{depth}.weight", target.vocab_size, size)
    else:
        vocabulary = Vocabulary.beside(location, target, draft_vocab)
    # The config's other settings are the target's, which the heads may be merged into.
    checkpoint.check_all_read(*_CONFIG, *target.config.to_dict())
    return MedusaHeads(layers, output, DraftOutput(target, vocabulary), count)


def _num_heads(names: Iterable[str]) -> int:
    """How many heads the tensors of these names are of."""
    return 1 + max((head for name in names if (head := _head_of(name)) is not None), default=-1)


def _head_of(name: str) -> int | None:
    """The number of the head that a tensor belongs to; None for other tensors."""
    own = next((layout.read(name) for layout in _LAYOUTS if layout.marks(name)), None)
    return None if own is None else int(own.partition(".")[0])


class MedusaSession(DraftSession["MedusaDrafter"]):
    def propose(self, budget: Budget) -> Proposal:
        drafter, tree, hidden = self.drafter, self.drafter.tree, self.log.last_row()
        depth = min(tree.depth, budget.depth)
        if depth < 1:
            return root_only(self.root, hidden.device)
        best = topk(drafter.heads.logits(hidden, depth)[:, 0], tree.max_rank + 1)
        probs = best.log_probs.exp()
        ids = drafter.heads.lm_head.vocabulary.target_ids(best.ids)
        root = ids.new_full((1,), self.root)
        # Nodes are in the order of their depths: those of the first heads come first.
        num_nodes = drafter.num_nodes[depth]
        slots = drafter.slots[:num_nodes]
        return Proposal(
            torch.cat([root, ids.flatten()])[slots],
            tree.shape.keep(range(num_nodes)),
            tree.ranks[:num_nodes],
            torch.cat([probs.new_ones(1), probs.flatten()])[slots],
        )

    def rule(self) -> Rule:
        """Typical acceptance reads the temperature only; top-k and top-p do not apply to it."""
        config, sampling = self.drafter.config, self.start.sampling
        if config.lossless or sampling.greedy:
            return super().rule()
        return Typical(sampling.temperature, config.posterior_threshold, config.posterior_alpha)


class MedusaDrafter(Drafter):
    session = MedusaSession
    needs = Needs(hidden=True)
    traits = Traits(has_network=True)

    def __init__(
        self, config: MedusaConfig, heads: MedusaHeads, tree: ChoiceTree, device: torch.device
    ) -> None:
        self.config, self.heads, self.tree = config, heads, tree
        self.slots = upload(choice_slots(tree, tree.max_rank + 1), device)
        lengths = [0, *map(len, tree.paths)]
        self.num_nodes = [sum(n <= depth for n in lengths) for depth in range(tree.depth + 1)]

    def ranks(self, trace: TargetTrace, depths: int) -> Tensor:
        """Every head judges the token at its own distance: exact for every tree."""
        depths, device = min(depths, self.heads.count), self.slots.device
        hidden = trace.hidden_before_roots().to(device)
        tokens = trace.true_tokens(depths).clamp_min(0).to(device)
        ranks, size = [], max(1, MAX_LOGIT_ROWS // depths)
        for rows, labels in zip(hidden.split(size), tokens.split(size), strict=True):
            logits = self.heads.logits(rows, depths)
            ranks.append(self.heads.lm_head.vocabulary.rank_of(logits, labels.T).T)
        return torch.cat(ranks).cpu()


def choice_slots(tree: ChoiceTree, num_choices: int) -> Tensor:
    """Where each node's token lies in [root, choices of head 0, choices of head 1, …]; `(n,)`.

    Example: the tree [0], [1], [1, 0] with two choices per head: the vector is
    [root, h0c0, h0c1, h1c0, h1c1] and the slots are [0, 1, 2, 3].
    """
    slots = [1 + num_choices * (len(path) - 1) + path[-1] for path in tree.paths]
    return torch.tensor([0, *slots])
