"""The judges themselves can fail: a verifier that is wrong on purpose is found out."""

from __future__ import annotations

import pytest

from engine.accept import Acceptance, Lossless, Rule, VerifiedTree
from engine.config import Sampling
from engine.drafters.base import BuildContext
from engine.drafters.lookup.lookahead import LookaheadConfig, LookaheadDrafter
from engine.sampling import SeededDraws, probabilities
from tests.engine.drafters.judges import p_value, sampled_target
from tests.models import build_context


class Wrong(LookaheadDrafter):
    """Tries each drafted child several times, and forgets a rejection when it draws anew."""

    def __init__(self, context: BuildContext, tries: int) -> None:
        super().__init__(context, LookaheadConfig())
        self.tries = tries

    def rule(self, sampling: Sampling) -> Rule:
        def rule(verified: VerifiedTree, draws: SeededDraws) -> Acceptance:
            node, path = 0, list[int]()
            while True:
                probs = probabilities(verified.logits[node], sampling)
                passed = [
                    child
                    for child in verified.shape.children[node]
                    if min(draws.uniform() for _ in range(self.tries))
                    < float(probs[verified.tokens[child]])
                ]
                if not passed:
                    return Acceptance(tuple(path), draws.pick(probs))
                node = passed[0]
                path.append(node)

        return rule


@pytest.mark.parametrize("tries", [1, 2])
def test_chi_square_finds_a_wrong_verifier_though_drafts_know_nothing(tries: int) -> None:
    target = sampled_target()
    assert p_value(target, Wrong(build_context(target), tries)) < 1e-4
    assert isinstance(LookaheadConfig().build(build_context(target)).rule(Sampling()), Lossless)
