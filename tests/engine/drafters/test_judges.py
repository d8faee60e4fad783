"""The judges themselves can fail: a verifier that is wrong on purpose is found out."""

from __future__ import annotations

from dataclasses import dataclass

from engine.accept import Acceptance, Lossless, Rule, Verified
from engine.config import Sampling
from engine.drafters.lookup.lookahead import LookaheadConfig, LookaheadDrafter
from engine.sampling import Draws, probabilities
from tests.engine.drafters.judges import p_value, sampled_target
from tests.models import build_context


@dataclass(frozen=True)
class Generous:
    """Gives every drafted child a second chance: not lossless."""

    sampling: Sampling

    def __call__(self, verified: Verified, draws: Draws) -> Acceptance:
        at, path = 0, list[int]()
        while True:
            probs = probabilities(verified.logits[at], self.sampling)
            children = verified.shape.children[at]
            taken = [
                c
                for c in children
                if min(draws.uniform(), draws.uniform()) < float(probs[verified.tokens[c]])
            ]
            if not taken:
                return Acceptance(tuple(path), draws.pick(probs))
            at = taken[0]
            path.append(at)


class Wrong(LookaheadDrafter):
    def rule(self, sampling: Sampling) -> Rule:
        return Generous(sampling)


def test_chi_square_finds_a_wrong_verifier():
    target = sampled_target()
    wrong = Wrong(build_context(target), LookaheadConfig())
    assert p_value(target, wrong) < 1e-4
    assert isinstance(LookaheadConfig().build(build_context(target)).rule(Sampling()), Lossless)


class KeepsRejectedMass(LookaheadDrafter):
    """After a rejection it draws from the whole distribution again."""

    def rule(self, sampling: Sampling) -> Rule:
        def rule(verified: Verified, draws: Draws) -> Acceptance:
            at, path = 0, list[int]()
            while True:
                probs = probabilities(verified.logits[at], sampling)
                taken = [
                    c
                    for c in verified.shape.children[at]
                    if draws.uniform() < float(probs[verified.tokens[c]])
                ]
                if not taken:
                    return Acceptance(tuple(path), draws.pick(probs))
                at = taken[0]
                path.append(at)

        return rule


def test_chi_square_finds_a_verifier_without_residual_though_drafts_know_nothing():
    target = sampled_target()
    assert p_value(target, KeepsRejectedMass(build_context(target), LookaheadConfig())) < 1e-4
