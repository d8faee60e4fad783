"""A drafter of your own: any Python object with one method.

    class MyDrafter:
        def draft(self, token_ids, max_draft_len): return [[17, 4, 9], [17, 5]]

`draft` gets all committed tokens, prompt first and root last, which it must not change. It returns
candidate continuations, most probable first, or a tree with its own probabilities (`UserDraft`).
Candidates are cut to `max_draft_len` tokens, merged into one draft tree and verified, so a wrong
guess costs time and never changes the text. A drafter written for TensorRT-LLM runs unchanged
(`engine.drafters.trtllm_drafter`). Optional members:

- `needs`, an `engine.proposal.Needs`: then `draft` gets a third argument, a `TargetOutput` with the
  target's logits and hidden states for the tokens committed since the last draft, the root excluded
  (at first the whole prompt, logits of its last row only; later, too, logits may be of the last
  rows only, where no draft was asked for over many tokens);
- `prepare(prompt_ids, sampling, limits)`, called when a text begins;
- `free()`, called when it ends.

Only the command line and the server's configuration load code: they register a factory under a
name, and a config (which may come from a browser) can only choose among the registered names.

Lossless under sampling: candidates are fixed before the step's draws, which the drafter never sees;
tokens that it sampled from its own distributions are verified with these.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal

import torch
from torch import Tensor

from engine.config import setting
from engine.drafters import trtllm_drafter
from engine.drafters.base import BuildContext, Drafter, DraftSession, Start
from engine.drafters.method import MethodConfig, draft_len, draft_nodes
from engine.errors import ConfigError, DrafterError
from engine.feature_log import Cursor
from engine.model.target import Target
from engine.proposal import Budget, DraftDists, Needs, Proposal, TargetOutput
from engine.tree import TreeShape, merge_prefixes, upload

ENTRY_POINTS = "speculative_decoding_playground.drafters"
"""Entry point group for drafters of installed packages."""


@dataclass(frozen=True, slots=True, eq=False)
class UserDraft:
    """A draft tree with the distributions that its tokens were sampled from.

    Attributes:
        tokens: of the drafted nodes; parents come before their children, siblings differ.
        parents: each token's parent as an index into `tokens`, -1 for the root; None = a chain.
        probs: `(n, vocab)`, what each token was sampled from; siblings from the same row, in order
            and without replacement. None = nothing was sampled.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    probs: Tensor | None = None


_factories: dict[str, Any] = {}
"""By name: what makes a drafter with the target or no argument, usually its class; or a drafter."""


def register_user_drafter(name: str, factory: Any) -> None:
    """Offer a drafter, or what makes it, under a name; ConfigError if that is empty or taken.

    For the command line and the server's start only.
    """
    if not name.strip():
        raise ConfigError("The name of a user-provided drafter must not be empty. Give it one.")
    if _factories.get(name, factory) != factory:
        raise ConfigError(f"A drafter named {name!r} is already registered. Choose another name.")
    _factories[name] = factory


def load_user_drafter(spec: str) -> Any:
    """Import a drafter or what makes it. Runs the code it names.

    Args:
        spec: `module:Class`, or the name of an installed entry point of the group `ENTRY_POINTS`.
            It may also name a function, a drafter, or TensorRT-LLM's config of one.

    Raises DrafterError: there is no such module, attribute or entry point, or it makes no drafter.
    """
    module, colon, path = spec.partition(":")
    installed = entry_points(group=ENTRY_POINTS)
    if colon and not (module and path):
        raise DrafterError(f"A drafter is named module:Class, got {spec!r}.")
    if not colon and spec not in installed.names:
        raise DrafterError(
            f"No installed package offers a drafter {spec!r} (offered: "
            f"{', '.join(sorted(installed.names)) or 'none'}). Name it as module:Class."
        )
    try:
        with trtllm_drafter.importable():
            if colon:
                imported = operator.attrgetter(path)(import_module(module))
            else:
                imported = installed[spec].load()
    except (ImportError, AttributeError) as error:
        raise DrafterError(f"The drafter {spec!r} could not be imported: {error}.") from error
    if not callable(imported) and _user_drafter(imported) is None:
        raise DrafterError(
            f"The drafter {spec!r} must be a class or function, got {type(imported).__name__}."
        )
    return imported


def tensorrt_llm_class(name: str | None) -> tuple[str, str] | None:
    """Module and name of a registered drafter's class, if it has TensorRT-LLM's interface."""
    factory = _factories.get(name or "")
    if not isinstance(factory, type) or not hasattr(factory, trtllm_drafter.METHOD):
        return None
    return factory.__module__, factory.__qualname__


def _user_drafter(user_object: Any) -> Any:
    """The object itself or an adapter to it; None if it has no method that drafts."""
    if callable(getattr(user_object, "draft", None)):
        return user_object
    return trtllm_drafter.Adapter.of(user_object)


def _takes_target(name: str, factory: Callable[..., Any]) -> bool:
    """Whether a factory requires an argument, or has one called `target`.

    Raises DrafterError: it requires more.
    """
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except ValueError:  # written in C
        parameters = []
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind not in open_ended]
    if len(required) > 1:
        raise DrafterError(
            f"The factory of the drafter {name!r} must take the target or nothing, but requires "
            f"{', '.join(p.name for p in required)}. Name a function that makes it."
        )
    return bool(required) or any(p.name == "target" for p in parameters)


def _make(name: str, factory: Any, target: Target) -> Any:
    """The drafter that is registered under a name; DrafterError if it cannot draft."""
    user_object = factory
    if callable(factory):
        user_object = factory(target) if _takes_target(name, factory) else factory()
    user_drafter = _user_drafter(user_object)
    if user_drafter is None:
        raise DrafterError(
            f"The drafter {name!r} must have a method draft(token_ids, max_draft_len), or "
            f"TensorRT-LLM's {trtllm_drafter.METHOD}; {type(user_object).__name__} has none."
        )
    return user_drafter


class UserProvidedConfig(MethodConfig):
    """Settings of a drafter of your own."""

    title = "User-provided"
    summary = (
        "A Python object of your own proposes continuations; it is registered on the command line."
    )
    main_settings = "drafting drafter max_draft_len max_total_draft_tokens"

    decoding_type: Literal["User_Provided"] = "User_Provided"
    drafter: str | None = setting(
        None, "Drafter", "name under which the drafter was registered at the start", max_length=200
    )
    max_draft_len: int = draft_len(8, " in every candidate")
    max_total_draft_tokens: int = draft_nodes(64, "; the rest is dropped")

    def build(self, context: BuildContext) -> UserProvidedDrafter:
        if self.drafter is None or self.drafter not in _factories:
            names = ", ".join(sorted(_factories)) or "none"
            raise ConfigError(
                f"drafter must be a registered name, got {self.drafter!r} (registered: {names}). "
                "Start the program with --drafter module:Class to register one."
            )
        user_drafter = _make(self.drafter, _factories[self.drafter], context.target)
        return UserProvidedDrafter(context, self, user_drafter)


class UserProvidedSession(DraftSession["UserProvidedDrafter"]):
    """Calls the user's object, checks its drafts, and turns them into one tree."""

    _prepared = False
    _cursor: Cursor | None = None

    def __init__(self, drafter: UserProvidedDrafter, start: Start) -> None:
        super().__init__(drafter, start)
        if drafter.needs.has_features:
            self._cursor = start.log.open_cursor()

    def propose(self, budget: Budget) -> Proposal:
        config, user_drafter = self.drafter.config, self.drafter.user_drafter
        if not self._prepared:
            self._prepared = True
            if hasattr(user_drafter, "prepare"):
                start = self.start
                user_drafter.prepare(self.log.prompt_ids, start.sampling, start.limits)
        length = min(config.max_draft_len, budget.depth)
        draft = self._draft(length) if length > 0 else []
        if isinstance(draft, UserDraft):
            proposal = self._tree(draft).cut(length)
        else:
            tokens, shape, _ = merge_prefixes([self._token_ids(beam)[:length] for beam in draft])
            rows = upload(torch.tensor([self.root, *tokens]), self.drafter.device)
            proposal = Proposal(rows, shape)
        max_nodes = config.max_total_draft_tokens + 1
        return proposal.keep(range(max_nodes)) if len(proposal.shape) > max_nodes else proposal

    def _draft(self, length: int) -> Any:
        draft = self.drafter.user_drafter.draft
        if not self.drafter.needs.logits:
            return draft(self.text, length)
        output = TargetOutput(self.log.take_logits())
        if self._cursor is not None:
            output = replace(self.log.rows(self._cursor.row), logits=output.logits)
            self._cursor.row = len(self.text) - 1
        return draft(self.text, length, output)

    def _tree(self, draft: UserDraft) -> Proposal:
        """A draft as a tree; DrafterError if its tokens, parents or probabilities are invalid."""
        tokens = self._token_ids(draft.tokens)
        parents = range(-1, len(tokens) - 1) if draft.parents is None else draft.parents
        shape = TreeShape([-1, *(operator.index(parent) + 1 for parent in parents)])
        if len(shape) != len(tokens) + 1:
            raise DrafterError(
                f"{self.drafter.name} gave {len(tokens)} tokens and {len(shape) - 1} parents. "
                "Give one parent per token."
            )
        if any(len({tokens[n - 1] for n in nodes}) < len(nodes) for nodes in shape.children):
            raise DrafterError(f"{self.drafter.name} gave a node twice.")
        proposal = Proposal(torch.tensor([self.root, *tokens], device=self.drafter.device), shape)
        if draft.probs is None or not tokens:
            return proposal
        probs = self._probabilities(draft.probs, len(tokens))
        nodes = torch.arange(len(tokens), device=self.drafter.device)
        draft_probs = torch.cat([probs.new_ones(1), probs[nodes, proposal.tokens[1:]]])
        rows = {node: siblings[0] - 1 for node, siblings in enumerate(shape.children) if siblings}
        dists = DraftDists(probs, rows) if not self.start.sampling.greedy else None
        return replace(proposal, draft_probs=draft_probs, dists=dists)

    def _probabilities(self, user_probs: Tensor, count: int) -> Tensor:
        """`(n, vocab)` float32 on the target's device."""
        probs = torch.as_tensor(user_probs, dtype=torch.float32, device=self.drafter.device)
        shape = (count, self.drafter.vocab_size)
        valid = tuple(probs.shape) == shape and bool((probs >= 0).all())
        if not valid or not torch.allclose(probs.sum(-1), probs.new_ones(count), atol=1e-3):
            raise DrafterError(
                f"{self.drafter.name} must give probabilities of shape {shape} whose rows sum to "
                f"1, got {tuple(probs.shape)}."
            )
        return probs

    def _token_ids(self, beam: Sequence[int]) -> list[int]:
        """A candidate as plain ints; DrafterError if they are not token ids of the target."""
        try:
            tokens = [operator.index(token) for token in beam]
        except TypeError as error:
            raise DrafterError(
                f"{self.drafter.name} must return lists of token ids, got {beam!r:.80}."
            ) from error
        for token in tokens:
            if not 0 <= token < self.drafter.vocab_size:
                raise DrafterError(
                    f"{self.drafter.name} drafted token {token}, but the target's vocabulary has "
                    f"{self.drafter.vocab_size} tokens. Was it made for another model?"
                )
        return tokens

    def close(self) -> None:
        if self._prepared and hasattr(self.drafter.user_drafter, "free"):
            self.drafter.user_drafter.free()


class UserProvidedDrafter(Drafter):
    session = UserProvidedSession

    def __init__(
        self, context: BuildContext, config: UserProvidedConfig, user_drafter: Any
    ) -> None:
        self.config, self.user_drafter = config, user_drafter
        self.name = f"The drafter {config.drafter!r}"
        self.device, self.vocab_size = context.target.device, context.target.vocab_size
        needs: Needs | None = getattr(user_drafter, "needs", None)
        if needs is not None:
            self.needs = replace(needs, logits=True)
