"""What verifying a drawn chain as a block brings over token by token: tokens a step, expected.

    python -m benchmarks.block_verification [--suite tasks] [--limit 4] [--tokens 96] [--length 5]

A draft model draws chains while the target writes. At every step the expected number of accepted
tokens follows from the probabilities of what was drafted, by block verification (arXiv:2403.10444)
the sum of p(i) = min(1, p(i-1) · target / draft) and token by token (arXiv:2211.17192) the sum of
the products of min(1, target / draft). Both are of the very same drafts, so that neither other
texts nor a busy machine change what is compared. `--limit` counts prompts of each kind of task.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import presets
from benchmarks import TARGET, read_options
from benchmarks.models import build_context, encode_question, load
from engine.accept import Acceptance, Lossless, Rule, VerifiedTree
from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.draft_target import DraftTargetConfig
from engine.sampling import SeededDraws, probabilities
from playground.experiments.prompts import choose_items


@dataclass
class RuleComparison(Rule):
    """The rule of a run, and what both rules would have accepted on average."""

    sampling: Sampling
    by_token: list[float] = field(default_factory=list)
    by_block: list[float] = field(default_factory=list)

    def __call__(self, verified: VerifiedTree, draws: SeededDraws) -> Acceptance:
        if verified.dists is not None:
            product = chance = 1.0
            sums = [1.0, 1.0]
            for place, token in enumerate(verified.tokens[1:]):
                target = float(probabilities(verified.logits[place], self.sampling)[token])
                draft = float(verified.dists.probs[verified.dists.row_of_parent[place]][token])
                product, chance = (
                    product * min(1.0, target / draft),
                    min(1.0, chance * target / draft),
                )
                sums = [sums[0] + product, sums[1] + chance]
            self.by_token.append(sums[0])
            self.by_block.append(sums[1])
        return Lossless(self.sampling)(verified, draws)


def main() -> None:
    """Decode and print."""
    options = read_options(
        __doc__,
        smoke={"suite": "starter", "limit": 1, "tokens": 8},
        target=TARGET,
        draft="draft-smollm2-135m",
        suite="tasks",
        limit=4,
        tokens=96,
        length=5,
        temperatures="0.7,1.0",
    )
    target = load(options.target, "auto", "cpu")
    config = DraftTargetConfig(
        speculative_model=options.draft,
        max_draft_len=options.length,
        use_draft_probs=True,
        drafting="as set",
    )
    drafter = config.build(build_context(target))
    suite = presets.suites()[options.suite]
    items = choose_items([suite], limit_per_category=options.limit)
    prompts = [item.turns[0] for item in items]
    limits = Limits(max_new_tokens=options.tokens, ignore_eos=True)
    print(f"{len(prompts)} prompts, chains of {options.length}")
    print(f"{'temperature':>12}{'steps':>8}{'token':>8}{'block':>8}{'gain':>8}")
    for temperature in map(float, options.temperatures.split(",")):
        sampling = Sampling(temperature=temperature)
        rule = RuleComparison(sampling)
        drafter.session = type("Compared", (drafter.session,), {"rule": lambda _, rule=rule: rule})
        for prompt in prompts:
            for _ in decode(
                target, drafter, encode_question(target, prompt), sampling=sampling, limits=limits
            ):
                pass
        steps = len(rule.by_block)
        token, block = sum(rule.by_token) / steps, sum(rule.by_block) / steps
        print(f"{temperature:>12}{steps:>8}{token:>8.3f}{block:>8.3f}{block / token - 1:>8.1%}")


if __name__ == "__main__":
    main()
