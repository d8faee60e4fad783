"""A drafting method before anything is loaded: its settings and the shape of its drafts.

A new method is one file with a subclass of `MethodConfig` and a drafter. The subclass also
describes the method to the tuner; with the defaults here, it is measured by running it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, model_validator

from engine.config import Settings, setting
from engine.errors import ConfigError

if TYPE_CHECKING:  # settings must be readable without torch
    from engine.drafters.base import BuildContext, Drafter
    from engine.tree import ChoiceTree


Drafting = Annotated[
    Literal["auto", "as set"],
    BeforeValidator(lambda value: "as set" if value in ("set", "as_set", "as-set") else value),
]
_REPLACED = {"adaptive", "size"}
"""Settings of earlier versions that `drafting` replaced."""
_EARLIER = _REPLACED | {"mix_contexts", "escape", "text_weight", "recycle_prompt", "keep_matrix"}
"""All settings of earlier versions that stored runs may have."""


def draft_len(default: int | None, detail: str = "", *, most: int = 64) -> Any:
    """The setting of a chain's length; `detail` is added to its description."""
    return setting(default, "Draft length", f"tokens drafted per step{detail}", ge=1, le=most)


def draft_nodes(default: int, detail: str = "", *, most: int = 1024) -> Any:
    """The setting of a tree's size, described as by `draft_len`."""
    description = f"maximum number of nodes in the draft tree{detail}"
    return setting(default, "Draft tokens", description, ge=1, le=most)


class DraftShape(NamedTuple):
    """The most that one step drafts.

    Attributes:
        depth: longest path, in drafted tokens.
        num_nodes: draft nodes; an upper bound for methods that merge beams or look up.
    """

    depth: int
    num_nodes: int

    @classmethod
    def of(cls, tree: ChoiceTree) -> Self:
        return cls(tree.depth, len(tree))


@dataclass(frozen=True, slots=True)
class ChoiceLimits:
    """Greatest depth and number of ranks of a choice tree (None = no limit), and what sets them."""

    depth: int | None = None
    ranks: int | None = None
    what: str = ""


class MethodConfig(Settings):
    """Settings of one drafting method; subclasses set `decoding_type` to a Literal.

    YAML presets, the command line, the page's controls, the stored JSON and the export are all
    derived from the subclass, so every field needs a default, a range and a one-line description.
    """

    title: ClassVar[str]
    """Short display name."""
    summary: ClassVar[str]
    """One sentence: what is drafted, and how."""
    paper: ClassVar[str | None] = None
    """arXiv id, or a project name where there is no paper."""

    requires: ClassVar[str | None] = None
    """What a target must have for this method; None = nothing special."""

    looks_up: ClassVar[bool] = False
    """Whether it copies from texts; it then ranks no tokens and drafts only at matches."""

    decoding_type: str
    drafting: Drafting = setting(
        "auto",
        "How much to draft",
        "auto = at each step as much as pays off, at most as set below; as set = always that much, "
        "as in the paper",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_earlier_version(cls, values: Any) -> Any:
        """Without the settings of earlier versions; `adaptive` and `size` set `drafting`."""
        if not isinstance(values, Mapping) or not _EARLIER & values.keys():
            return values
        current = {name: value for name, value in values.items() if name not in _EARLIER}
        if _REPLACED & values.keys():
            decides = values.get("adaptive") or values.get("size") == "fit"
            current.setdefault("drafting", "auto" if decides else "as set")
        return current

    @property
    def lossless(self) -> bool:
        """Whether the output follows the target's own distribution exactly."""
        return True

    @property
    def badge(self) -> str:
        """The label beside its name."""
        return "lossless" if self.lossless else "lossy"

    def live_settings(self) -> set[str]:
        """Settings that have an effect with the values of the others."""
        return super().live_settings() - {"decoding_type"}

    def nested(self) -> dict[str, MethodConfig]:
        """The methods among its settings."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, MethodConfig)}

    @property
    def changed_flat(self) -> dict[str, Any]:
        """`changed`, with nested methods as their type and names like `retrieval.max_draft_len`."""
        nested, changes = self.nested(), dict[str, Any]()
        for name, value in self.changed.items():
            inner = nested.get(name)
            changes[name] = inner.decoding_type if inner else value
            if inner:
                changes |= {f"{name}.{key}": v for key, v in inner.changed_flat.items()}
        return changes

    def build(self, context: BuildContext) -> Drafter:
        """Load the method's weights and make its drafter.

        Raises:
            ConfigError, TreeError: a setting is missing, or exceeds what the weights can draft.
            SourceError: the weights cannot be found or read safely.
            DrafterError: they are of another method, or were made for another target.
        """
        raise ConfigError(f"{type(self).__name__} has no drafter.")

    @classmethod
    def nested_choices(cls, setting: str) -> Mapping[str, type[MethodConfig]]:
        """The methods that a setting accepts, by decoding type; empty for most settings."""
        return {}

    # ---- for the tuner

    @property
    def offline(self) -> bool:
        """Whether drafts depend only on a text and the target's features along it.

        A finished text can then be drafted again without running the target: the drafter has
        `ranks` (unless it looks up), and the settings have a `draft_shape`.
        """
        return type(self).draft_shape is not MethodConfig.draft_shape

    def draft_shape(self) -> DraftShape:
        """The draft's shape by these settings; ConfigError if it cannot be tuned offline."""
        raise ConfigError(
            f"{self.decoding_type} cannot be tuned offline: it uses more of the target than a "
            "text's features. Measure it by running it."
        )

    @property
    def largest_draft(self) -> DraftShape:
        """The same for any method whose settings bound a step's draft; ConfigError for others."""
        from engine.tree import ChoiceTree

        choices = None if self.offline else self.choices_field()
        return DraftShape.of(ChoiceTree(getattr(self, choices))) if choices else self.draft_shape()

    @classmethod
    def choices_field(cls) -> str | None:
        """The setting that holds a choice tree, if there is one: its name ends with `_choices`."""
        return next((name for name in cls.model_fields if name.endswith("_choices")), None)

    def choice_limits(self, locate: Callable[[str], str]) -> ChoiceLimits:
        """A choice tree's limits, as far as they are known without reading weights."""
        return ChoiceLimits()

    @property
    def chain_len(self) -> int | None:
        """Length of the drafted chain; None where no setting sets it (see `with_chain`)."""
        return getattr(self, "max_draft_len", None)

    def with_tree(self, tree: ChoiceTree) -> Self:
        """These settings with this tree; ConfigError if it branches and the method does not."""
        field = self.choices_field()
        if field is not None:
            return self.replace(**{field: tree.paths})
        if not tree.shape.is_chain or tree.max_rank:
            raise ConfigError(
                f"{self.decoding_type} drafts chains, but the tree has {len(tree.leaves)} leaves. "
                "Use Medusa or Eagle for trees."
            )
        return self.with_chain(tree.depth)

    def with_chain(self, length: int) -> Self:
        """These settings, drafting a chain; ConfigError if the method has no draft length."""
        if "max_draft_len" not in type(self).model_fields:
            raise ConfigError(f"{self.decoding_type} takes no tree and no draft length.")
        return self.replace(max_draft_len=length)
