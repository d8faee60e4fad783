"""ReDrafter: a small recurrent head drafts by beam search; the beams are verified as one tree.

The head reads the target's last hidden state once per step (the context c) and then runs on its
own: a state s is fed one drafted token at a time, and [c; s] is projected to the vocabulary.

    beams (best first)     merged into one prefix tree: shared beginnings are verified once
    r 5 6 7                node    0  1  2  3  4  5  6  7
    r 5 6 8                token   r  5  6  7  8  9  1  5
    r 9 1 5                parent -1  0  1  2  2  0  5  6
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from engine.config import setting
from engine.drafters.base import BuildContext, Drafter, DraftSession, Traits, root_only
from engine.drafters.heads.checkpoint import HeadCheckpoint
from engine.drafters.heads.vocabulary import DraftVocab, Vocabulary
from engine.drafters.method import DraftShape, MethodConfig
from engine.drafters.texts import MAX_LOGIT_ROWS, TargetTrace
from engine.kernels.cpu.operators import pack_linears
from engine.model.target import Target
from engine.proposal import Budget, Needs, Proposal
from engine.tree import merge_prefixes, upload

NUM_CANDIDATES = 50
"""Tokens of a beam's distribution that are kept, as in Apple's code."""


class ReDrafterConfig(MethodConfig):
    """Settings of ReDrafter, named as in Apple's code."""

    title = "ReDrafter"
    summary = (
        "A recurrent head drafts by beam search from the target's last hidden state; "
        "the beams are merged into one prefix tree."
    )
    paper = "2403.09919"
    main_settings = "drafting beam_width beam_length"

    decoding_type: Literal["ReDrafter"] = "ReDrafter"
    speculative_model: str | None = setting(
        None, "Recurrent head", "the recurrent head: folder, weight file or hub id"
    )
    beam_width: int = setting(4, "Beam width", "beams kept by the search", ge=1, le=NUM_CANDIDATES)
    beam_length: int = setting(
        5, "Beam length", "tokens of a beam, including the root: one fewer is drafted", ge=2, le=17
    )
    draft_vocab: DraftVocab = None

    def build(self, context: BuildContext) -> ReDrafterDrafter:
        location = context.weights(self.speculative_model, "the ReDrafter head")
        head = read_head(location, context.target)
        head.draft_only(Vocabulary.beside(location, context.target, self.draft_vocab))
        pack_linears(head, context.target.kernels)
        return ReDrafterDrafter(self, head)

    def draft_shape(self) -> DraftShape:
        depth, width = self.beam_length - 1, self.beam_width
        return DraftShape(depth, width * depth)

    @property
    def chain_len(self) -> int:
        return self.beam_length - 1

    def with_chain(self, length: int) -> Self:
        return self.replace(beam_width=1, beam_length=length + 1)


class RecurrentHead(nn.Module):
    """Apple's drafter: a recurrence over token embeddings and a residual stack on top.

    Source: arXiv:2403.09919, section 3.1.

    Its parts follow from the checkpoint: without `rnn_*` the state is a running sum;
    without `input_proj` the stack is as wide as [c; s]. The embedding is the target's and no
    parameter of this module.
    """

    def __init__(self, checkpoint: HeadCheckpoint) -> None:
        super().__init__()
        target, depth = checkpoint.target, checkpoint.count("lm_head.{}.linear.weight")
        hidden, last = target.hidden_size, f"lm_head.{depth}"
        vocab, width = checkpoint.take(f"{last}.weight", None, None).shape
        checkpoint.check_predicts_all(vocab)
        recurrent, projected = (
            checkpoint.has(f"{name}.weight") for name in ("rnn_w", "input_proj")
        )
        if not projected:
            checkpoint.take(f"{last}.weight", vocab, 2 * hidden)
        self._embedding = (target.embedding,)
        self.rnn_w = nn.Linear(hidden, hidden, bias=False) if recurrent else None
        self.rnn_u = nn.Linear(hidden, hidden) if recurrent else None
        self.input_proj = nn.Linear(2 * hidden, width) if projected else None
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.output = nn.Linear(width, vocab, bias=False)
        self.aliases = {f"blocks.{i}": f"lm_head.{i}.linear" for i in range(depth)}
        self.aliases["output"] = last
        self.vocabulary = Vocabulary(None, vocab)

    def draft_only(self, vocabulary: Vocabulary) -> None:
        """Keep the output matrix's rows of these tokens."""
        self.vocabulary = vocabulary
        if vocabulary.ids is not None:
            rows = self.output.weight.detach()[vocabulary.ids]
            self.output.weight = nn.Parameter(rows, requires_grad=False)
            self.output.out_features = vocabulary.size

    def advance(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Feed one token per beam: state `(beams, hidden)`, tokens `(beams,)` → next state."""
        embedded: Tensor = self._embedding[0](tokens)
        if self.rnn_w is None or self.rnn_u is None:
            return embedded + state
        return silu(self.rnn_w(embedded) + self.rnn_u(state))

    def logits(self, context: Tensor, state: Tensor) -> Tensor:
        """Next-token logits `(beams, vocab)` for context `(1, hidden)` and the beams' states."""
        x = torch.cat([context.expand_as(state), state], dim=-1)
        if self.input_proj is not None:
            x = self.input_proj(x)
        for block in self.blocks:
            x = x + silu(block(x))
        logits: Tensor = self.output(x)
        return logits


def read_head(location: str, target: Target) -> RecurrentHead:
    """A head in Apple's layout, in the target's dtype and on its device.

    Raises:
        SourceError: nothing there, or it cannot be read safely.
        DrafterError: no ReDrafter head in it, or one for another target.
    """
    checkpoint = HeadCheckpoint.read(location, target, "ReDrafter")
    head = checkpoint.load(lambda: RecurrentHead(checkpoint))
    vocab, width = head.output.weight.shape
    checkpoint.agree(
        vocab_size=vocab,
        hidden_size=target.hidden_size,
        exit_dim=width,
        num_draft_layers=len(head.blocks),
        rnn=head.rnn_w is not None,
    )
    checkpoint.check_all_read()
    return head


class Beams(NamedTuple):
    """Best beam first: tokens, their ranks and log-probabilities, `(beams, drafted)` each."""

    tokens: Tensor
    ranks: Tensor
    log_probs: Tensor


def search_beams(
    head: RecurrentHead,
    context: Tensor,
    root: int,
    *,
    width: int,
    length: int,
    min_prob: float = 0.0,
) -> Beams:
    """Beam search of `length` tokens from a root; no length normalisation, no end of text.

    A beam can only be continued by its own best `NUM_CANDIDATES` tokens, so the best `width` of
    beams × candidates are the best of beams × vocabulary.
    Source: arXiv:2403.09919, section 3.2.

    Args:
        context: `(1, hidden)`, the target's last hidden state at the last accepted token.
        min_prob: the search ends where every beam is less probable.
    """
    last = torch.full((1,), root, device=context.device)
    state = torch.zeros_like(context)
    scores = torch.zeros(1, device=context.device)
    beams = Beams(last.new_empty(1, 0), last.new_empty(1, 0), scores.new_empty(1, 0))
    for _ in range(length):
        if min_prob > 0 and float(scores.max()) < math.log(min_prob):
            break
        state = head.advance(state, last)
        best, indices = best_candidates(head.logits(context, state))
        tokens = head.vocabulary.target_ids(indices)
        totals = (scores[:, None] + best).flatten()
        scores, candidates = totals.topk(min(width, len(totals)))
        parents, ranks = candidates // best.shape[1], candidates % best.shape[1]
        last = tokens.flatten()[candidates]
        state = state[parents]
        newest = (last, ranks, best.flatten()[candidates])
        columns = zip(beams, newest, strict=True)
        beams = Beams(*(torch.cat([old[parents], new[:, None]], dim=1) for old, new in columns))
    return beams


def best_candidates(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of each row's best tokens among themselves, and the tokens, best first.

    Tokens that tie with the last of the best `NUM_CANDIDATES` count in the normaliser, as in
    Apple's code, though only `NUM_CANDIDATES` are returned.
    """
    k = min(NUM_CANDIDATES, logits.shape[-1])
    best, tokens = logits.topk(k)
    last = best[:, -1:]
    num_ties_left_out = (logits >= last).sum(dim=-1, keepdim=True) - k
    best, last = best.float(), last.float()
    left_out = last + num_ties_left_out.float().log()
    return best - torch.logaddexp(best.logsumexp(dim=-1, keepdim=True), left_out), tokens


class ReDrafterSession(DraftSession["ReDrafterDrafter"]):
    def propose(self, budget: Budget) -> Proposal:
        config, context = self.drafter.config, self.log.last_row()
        length = min(config.beam_length - 1, budget.depth)
        if length < 1:
            return root_only(self.root, context.device)
        beams = search_beams(
            self.drafter.head,
            context,
            self.root,
            width=min(config.beam_width, budget.width),
            length=length,
            min_prob=budget.min_prob,
        )
        return merge(beams, self.root)


class ReDrafterDrafter(Drafter):
    session = ReDrafterSession
    needs = Needs(hidden=True)

    def __init__(self, config: ReDrafterConfig, head: RecurrentHead) -> None:
        self.config, self.head = config, head
        self.traits = Traits(has_network=True, branches=config.beam_width > 1)

    def ranks(self, trace: TargetTrace, depths: int) -> Tensor:
        """The recurrence runs along the true path from every root at once.

        Rank 0 at depths 1 … d means that greedy drafting (`beam_width` 1) has d tokens right: for
        it the table is exact, at any length. Wider beams compete with each other, so the true
        path's survival does not follow from its ranks: draft the text again for them.
        """
        device = self.head.output.weight.device
        contexts = trace.hidden_before_roots().to(device)
        labels = trace.true_tokens(depths).clamp_min(0).to(device)
        roots = trace.tokens[trace.first :][: len(labels)].to(device)
        chunks = (tensor.split(MAX_LOGIT_ROWS) for tensor in (contexts, roots, labels))
        ranks = []
        for context, tokens, true in zip(*chunks, strict=True):
            state, columns = torch.zeros_like(context), []
            for label in true.unbind(dim=1):
                state = self.head.advance(state, tokens)
                logits = self.head.logits(context, state)
                columns.append(self.head.vocabulary.rank_of(logits, label))
                tokens = label
            ranks.append(torch.stack(columns, dim=1))
        return torch.cat(ranks).cpu()


def merge(beams: Beams, root: int) -> Proposal:
    """The beams as one draft tree, nodes in the order in which the beams visit them.

    Source: arXiv:2403.09919, section 3.3.
    """
    # The one wait for the device: the tree's topology is needed on the host.
    beam_tokens, beam_ranks = torch.stack([beams.tokens, beams.ranks]).tolist()
    tokens, shape, nodes = merge_prefixes(beam_tokens)
    # A node may be on several beams; they share its prefix, so any of them will do.
    index_of = {node: i for i, node in enumerate(node for beam in nodes for node in beam)}
    indices = [index_of[node] for node in range(1, len(shape))]
    ranks, device = [rank for beam in beam_ranks for rank in beam], beams.tokens.device
    probs = beams.log_probs.exp().flatten()[upload(torch.tensor(indices), device)]
    return Proposal(
        upload(torch.tensor([root, *tokens]), device),
        shape,
        [0, *(ranks[index] for index in indices)],
        torch.cat([probs.new_ones(1), probs]),
    )
