"""A drafter of your own: any Python object with one method.

    class MyDrafter:
        def __init__(self, target): ...
        def draft(self, token_ids, max_draft_len): return [[17, 4, 9], [17, 5]]

`draft` gets all committed tokens, prompt first, and returns candidate continuations, likeliest
first; they are merged into one draft tree and verified, so a wrong guess costs time and never
changes the text. A new text begins whenever `token_ids` is not the last one grown longer.

Loading code is for whoever starts the program: the command line or the server's configuration
registers a factory under a name, and a config (which may come from a browser) can only choose among
the registered names.

Lossless under sampling as long as `draft` uses no randomness of the run, which it never sees:
whatever it returns is fixed before the step's draws.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import ClassVar, Literal, Protocol

import torch
from pydantic import Field

from engine.drafters.base import BuildContext, Drafter
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, DrafterError
from engine.model.target import Target
from engine.proposal import Proposal
from engine.tree import merge_prefixes

ENTRY_POINTS = "speculative_decoding_playground.drafters"
"""Entry point group in which installed packages offer drafters."""


class UserDrafter(Protocol):
    """What a drafter of your own must do."""

    def draft(self, token_ids: Sequence[int], max_draft_len: int) -> Sequence[Sequence[int]]:
        """Candidate continuations, likeliest first; may be empty.

        Args:
            token_ids: committed tokens, prompt first; the last one is the root. Not to be changed.
            max_draft_len: tokens per candidate that are of use; what is longer is cut.
        """


UserFactory = Callable[[Target], UserDrafter]
"""Makes the drafter of a target; usually its class."""

_factories: dict[str, UserFactory] = {}


def register_user_drafter(name: str, factory: UserFactory) -> None:
    """Offer a drafter under a name; ConfigError if it is empty or taken by another.

    For the command line and the server's start only.
    """
    if not name.strip():
        raise ConfigError("The name of a user-provided drafter must not be empty. Give it one.")
    if _factories.get(name, factory) is not factory:
        raise ConfigError(f"A drafter named {name!r} is registered already. Choose another name.")
    _factories[name] = factory


def registered_user_drafters() -> tuple[str, ...]:
    """Names that a config may choose from."""
    return tuple(sorted(_factories))


def load_user_drafter(spec: str) -> UserFactory:
    """Import a drafter's factory. Runs the code it names.

    Args:
        spec: `module:Class`, or the name of an installed entry point of the group `ENTRY_POINTS`.

    Raises:
        DrafterError: there is no such module, attribute or entry point, or it cannot be called.
    """
    module, colon, path = spec.partition(":")
    found = entry_points(group=ENTRY_POINTS)
    if colon and not (module and path):
        raise DrafterError(f"A drafter is named module:Class, got {spec!r}.")
    if not colon and spec not in found.names:
        raise DrafterError(
            f"No installed package offers a drafter {spec!r} (offered: "
            f"{', '.join(sorted(found.names)) or 'none'}). Name it as module:Class."
        )
    try:
        imported = operator.attrgetter(path)(import_module(module)) if colon else found[spec].load()
    except (ImportError, AttributeError) as error:
        raise DrafterError(f"The drafter {spec!r} could not be imported: {error}.") from error
    if not callable(imported):
        raise DrafterError(
            f"The drafter {spec!r} must be a class or function, got {type(imported).__name__}."
        )
    return imported  # type: ignore[no-any-return]


class UserProvidedConfig(MethodConfig):
    """Settings of a drafter of your own."""

    title: ClassVar[str] = "User-provided"
    summary: ClassVar[str] = (
        "A Python object of your own proposes continuations; it is registered on the command line."
    )

    decoding_type: Literal["User_Provided"] = "User_Provided"
    size: Literal["set"] = Field("set", description="the drafter itself decides")
    drafter: str | None = Field(
        None, max_length=200, description="name under which the drafter was registered at the start"
    )
    max_draft_len: int = Field(8, ge=1, le=64, description="most tokens per candidate")
    max_total_draft_tokens: int = Field(
        64, ge=1, le=1024, description="most nodes of the draft tree; what is left over is dropped"
    )

    def build(self, context: BuildContext) -> UserProvidedDrafter:
        if self.drafter is None or self.drafter not in _factories:
            known = ", ".join(registered_user_drafters()) or "none"
            raise ConfigError(
                f"drafter must be a registered name, got {self.drafter!r} (registered: {known}). "
                "Start the program with --drafter module:Class to register one."
            )
        made = _factories[self.drafter](context.target)
        if not callable(getattr(made, "draft", None)):
            raise DrafterError(
                f"The drafter {self.drafter!r} must have a method draft(token_ids, max_draft_len); "
                f"{type(made).__name__} has none."
            )
        return UserProvidedDrafter(context, self, made)


class UserProvidedDrafter(Drafter):
    """Asks the object, checks what it says, and merges it into one tree."""

    def __init__(
        self, context: BuildContext, config: UserProvidedConfig, user: UserDrafter
    ) -> None:
        self.config = config
        self._user = user
        self._device = context.target.device
        self._vocab_size = context.target.vocab_size

    def propose(self, max_depth: int) -> Proposal:
        length = min(self.config.max_draft_len, max_depth)
        beams = self._user.draft(self.text, length) if length > 0 else []
        tokens, shape, _ = merge_prefixes([self._checked(beam)[:length] for beam in beams])
        rows = torch.tensor([self.text[-1], *tokens], device=self._device)
        proposal = Proposal(rows, shape)
        most = self.config.max_total_draft_tokens + 1
        return proposal.keep(range(most)) if len(shape) > most else proposal

    def _checked(self, beam: Sequence[int]) -> list[int]:
        """A candidate as plain ints; DrafterError if they are no token ids of the target."""
        try:
            tokens = [operator.index(token) for token in beam]
        except TypeError as error:
            raise DrafterError(
                f"The drafter {self.config.drafter!r} must return lists of token ids, "
                f"got {beam!r:.80}."
            ) from error
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise DrafterError(
                    f"The drafter {self.config.drafter!r} drafted token {token}, but the target's "
                    f"vocabulary has {self._vocab_size} tokens. Was it made for another model?"
                )
        return tokens
