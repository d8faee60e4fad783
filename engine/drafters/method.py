"""What a drafting method is to everybody but the decode loop: its settings, and what follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from engine.config import Settings
from engine.errors import ConfigError

if TYPE_CHECKING:  # settings are read where nothing is drafted: without torch
    from engine.drafters.base import Drafter, Workbench


class MethodConfig(Settings):
    """Settings of one drafting method; subclasses set `decoding_type` to a Literal.

    From the subclass alone come the YAML preset, the command line, the page's controls, the stored
    JSON and the export, so every field needs a default, a range and a one-line description.
    """

    title: ClassVar[str]
    """Short name shown to people."""
    summary: ClassVar[str]
    """One sentence: what is drafted, and how."""
    paper: ClassVar[str | None] = None
    """arXiv id, or a project name where there is no paper."""

    requires: ClassVar[str | None] = None
    """What a target must carry for it, where not every target does."""

    decoding_type: str
    adaptive: bool = Field(
        False, description="draft only as much as recent acceptance and measured latency justify"
    )

    @property
    def lossless(self) -> bool:
        """Whether the output follows the target's own distribution exactly."""
        return True

    def build(self, bench: Workbench) -> Drafter:
        """Load what the method needs and make its drafter.

        Raises:
            DrafterError: the weights do not fit the target, or cannot be found.
        """
        raise ConfigError(f"{type(self).__name__} has no drafter.")
