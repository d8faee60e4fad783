"""P-EAGLE: an EAGLE-3 head with a few more layers drafts a whole block in one forward.

Where EAGLE-3 drafts further by feeding its own output again, here one masked entry per further
token follows the base entries, all in one forward:

    base entries     (f_0, t_1) (f_1, t_2) … (f_N-1, root)        they stay cached
    masked entries   (mask_hidden, mask) (mask_hidden, mask) …    transient

`mask_hidden` takes the place of the target's features, before they are fused.
Source: arXiv:2602.01469, section 3; vLLM's llama_eagle3.py (how layers after the first are joined).
Checkpoints as AWS (`ptd_token_id`) and speculators (`mask_token_id`) write them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from engine.config import setting
from engine.drafters.base import BuildContext
from engine.drafters.blocks.base import AT_ONCE, BlockDrafter, BlockMethod
from engine.drafters.eagle.head import Eagle3Head, Eagle3Spec
from engine.drafters.eagle.methods import CapturedLayers, load_eagle3
from engine.drafters.heads.checkpoint import HeadCheckpoint
from engine.drafters.heads.layer import HeadCache, HeadLayer, within
from engine.drafters.heads.vocabulary import DraftOutput
from engine.drafters.method import draft_len
from engine.errors import DrafterError
from engine.kernels.cpu.operators import pack_linears
from engine.proposal import Budget, Needs, Proposal


class ParallelEagleConfig(BlockMethod):
    """Settings of P-EAGLE; named as EAGLE-3's."""

    title = "P-EAGLE"
    summary = (
        "An EAGLE-3 head with mask tokens drafts a whole block from the target's hidden states in "
        "one forward."
    )
    paper = "2602.01469"

    decoding_type: Literal["P_EAGLE"] = "P_EAGLE"
    speculative_model: str | None = setting(
        None, "P-EAGLE head", "the P-EAGLE head of this target: folder, file or hub id"
    )
    max_draft_len: int = draft_len(7, AT_ONCE)
    eagle3_layers_to_capture: CapturedLayers = None

    def build(self, context: BuildContext) -> ParallelEagleDrafter:
        location = context.weights(self.speculative_model, "a P-EAGLE head")
        target = context.target
        checkpoint = HeadCheckpoint.read(location, target, "P_EAGLE")
        mask_hidden = checkpoint.take("mask_hidden").flatten()
        mask_token = checkpoint.mask_token(self.mask_token_id)
        head, needs = load_eagle3(ParallelHead, checkpoint, self.eagle3_layers_to_capture)
        width = head.spec.feature_width * max(1, head.spec.num_features)
        if len(mask_hidden) != width:
            raise DrafterError(
                f"{location}: mask_hidden has {len(mask_hidden)} numbers, but {width} are read "
                "from the target. It is damaged; copy it again."
            )
        head.mask_token = mask_token
        head.mask_hidden = mask_hidden[None].to(target.device, target.dtype)
        pack_linears(head, target.kernels)
        drafter = ParallelEagleDrafter(self, head, needs)
        drafter.notes = checkpoint.notes()
        return drafter


class ParallelHead(Eagle3Head):
    """The first layer joins token and feature as EAGLE-3's; the others are plain decoder layers."""

    mask_hidden: Tensor
    mask_token: int
    max_layers = 1024

    def __init__(self, spec: Eagle3Spec, lm_head: DraftOutput | None) -> None:
        super().__init__(spec, lm_head)
        hidden, numbered = spec.layer.hidden, list(enumerate(spec.others, start=1))
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=spec.layer.eps) for _ in numbered)
        self.layers = nn.ModuleList(HeadLayer(own, hidden, index) for index, own in numbered)
        names = {f"norms.{i - 1}": f"layers.{i}.input_layernorm" for i, _ in numbered}
        self.aliases = {**Eagle3Head.aliases, **names}

    def fill(self, features: Tensor, tokens: Tensor, past: HeadCache, length: int) -> Tensor:
        """Logits `(length, draft vocabulary)` of the block behind n new base entries.

        The cache gains the base entries; arguments as `BlockDrafter.fill`.
        """
        n, begin = len(tokens), past.length
        masks = tokens.new_full((length - 1,), self.mask_token)
        masked = torch.cat([features, self.mask_hidden.expand(len(masks), -1)])
        x, out = self.join(self.fuse(masked), self.embedding(torch.cat([tokens, masks])))
        positions = torch.arange(begin, begin + len(x), device=x.device)
        visible = torch.arange(begin + len(x), device=x.device) <= positions[:, None]
        out = self.layer(x, out, positions, past, within(visible, self.layer.spec.window))
        for norm, layer, own in zip(self.norms, self.layers, self.spec.others, strict=True):
            out = layer(norm(out), out, positions, past, within(visible, own.window))
        past.length = begin + n
        return self.logits(self.norm(out[n - 1 :]) if self.spec.norm_output else out[n - 1 :])


class ParallelEagleDrafter(BlockDrafter):
    """Keeps the base entries, and fills one block per step."""

    def __init__(self, config: ParallelEagleConfig, head: ParallelHead, needs: Needs) -> None:
        self._config, self._head, self.max_len = config, head, config.max_draft_len
        self.needs, self.device = needs, head.embedding.device

    def new_cache(self) -> HeadCache:
        return HeadCache(1 + len(self._head.layers))

    def fill(
        self, features: Tensor, tokens: Tensor, root: int, budget: Budget, cache: HeadCache
    ) -> Proposal:
        logits = self._head.fill(features, tokens, cache, budget.depth)
        return self._config.fill(root, logits, self._head.vocabulary)
