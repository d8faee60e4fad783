"""P-EAGLE: an EAGLE-3 head that drafts a whole block in one forward.

Source: arXiv:2602.01469; checkpoints as AWS (`ptd_token_id`) and speculators (`mask_token_id`)
write them.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from engine.config import setting
from engine.drafters.base import BuildContext, root_only
from engine.drafters.blocks.base import AT_ONCE, BlockMethod
from engine.drafters.eagle.checkpoint import load_parallel, remarks
from engine.drafters.eagle.methods import CapturedLayers, inputs_of
from engine.drafters.eagle.parallel_head import ParallelHead
from engine.drafters.heads.checkpoint import HeadCheckpoint
from engine.drafters.heads.features import FeatureDrafter
from engine.drafters.heads.layer import HeadCache
from engine.drafters.method import draft_len
from engine.kernels.cpu.operators import pack_linears
from engine.proposal import Needs, Proposal


class ParallelEagleConfig(BlockMethod):
    """Settings of P-EAGLE; named as EAGLE-3's."""

    title: ClassVar[str] = "P-EAGLE"
    summary: ClassVar[str] = (
        "An EAGLE-3 head with mask tokens drafts a whole block from the target's hidden states in "
        "one forward."
    )
    paper: ClassVar[str | None] = "2602.01469"
    main_settings: ClassVar[str] = "size max_draft_len use_dynamic_tree"

    decoding_type: Literal["P_EAGLE"] = "P_EAGLE"
    speculative_model: str | None = setting(
        None, "P-EAGLE head", "the P-EAGLE head of this target: folder, file or hub id"
    )
    max_draft_len: int = draft_len(7, AT_ONCE)
    eagle3_layers_to_capture: CapturedLayers = None

    def build(self, context: BuildContext) -> ParallelEagleDrafter:
        found = HeadCheckpoint.read(context.weights(self.speculative_model, "a P-EAGLE head"))
        inputs = inputs_of(self.eagle3_layers_to_capture)
        head, needs = load_parallel(found, context.target, inputs, self.mask_token_id)
        pack_linears(head, context.target.kernels)
        notes = remarks(found, context.target)
        return ParallelEagleDrafter(self, head, needs, notes)


class ParallelEagleDrafter(FeatureDrafter):
    """Keeps a head's base entries in step with the target, and fills one block per step."""

    def __init__(
        self,
        config: ParallelEagleConfig,
        head: ParallelHead,
        needs: Needs,
        notes: tuple[str, ...],
    ) -> None:
        self._config, self._head = config, head
        self.needs, self.notes = needs, notes
        self._cache = HeadCache(1 + len(head.layers))

    def _resume(self, rows: int) -> int:
        self._cache.truncate(rows)
        return self._cache.length

    def propose(self, max_depth: int) -> Proposal:
        length = min(self._config.max_draft_len, max_depth)
        if length < 1:
            return root_only(self.text[-1], self._head.embedding_weight.device)
        unread, self._unread = self.unread(), ()
        logits = self._head.fill(*unread, self._cache, length)
        return self._config.fill(self.text[-1], logits, self._head.vocabulary)

    def close(self) -> None:
        self.finish()
        self._cache.free()
        del self._head
