"""What drafting as set is expected to cost, before a run begins."""

from __future__ import annotations

from engine import formats
from engine.drafters.method import MethodConfig
from engine.metrics import SAME
from engine.tuning.experience import ExperienceStore

NOT_KNOWN = (
    "What drafting as set brings here is not known yet: a run with drafting: auto finds out."
)


def as_set_sentence(experience: ExperienceStore, target: str, config: MethodConfig) -> str:
    """× plain, expected from what earlier runs have learnt; empty where drafting is not as set."""
    if config.drafting != "as set" or config.decoding_type == "Autoregressive":
        return ""
    known = experience.stored(target, config)
    expected = known and known.as_set(config)
    if not expected:
        return NOT_KNOWN
    step = expected.mat / expected.speedup
    advice = " Drafting: auto drafts less." if expected.speedup < 1 - SAME else ""
    return (
        f"As set, about {formats.speedup(expected.speedup)} plain decoding is expected: "
        f"{formats.mat(expected.mat)} tokens a step, and a step takes {formats.speedup(step)} as "
        f"long as a plain step, by earlier runs here.{advice}"
    )
