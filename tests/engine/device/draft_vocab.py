"""Drafts for a target on a pretended device with a model on the processor; see the test beside it.

    python -m tests.engine.device.draft_vocab FOLDER

FOLDER lists the tokens that may be drafted. Prints how many tokens each way of drafting drafted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from engine.config import Sampling
from engine.drafters.base import Drafter, Start
from engine.drafters.draft_target import DraftTargetConfig
from engine.kernels.cpu.compile import library
from engine.kernels.cpu.native import NativeForward
from engine.model.target import Target
from engine.proposal import Outcome, TargetOutput
from engine.sampling import SeededDraws
from tests.engine.cpu.targets import SIZES, WIDE, variant_model
from tests.engine.device.pretend import set_up
from tests.models import VOCAB, build_context, tiny_tokenizer

PRETEND = set_up()
NOTHING = TargetOutput(torch.empty(0, 0))


@torch.no_grad()  # inference tensors cannot be pretended
def drafted(drafter: Drafter, temperature: float) -> list[int]:
    """A text whose drafts are accepted but for the last token."""
    drafter.start(Start([7, 8], 9, NOTHING, Sampling(temperature=temperature), SeededDraws(0)))
    tokens: list[int] = []
    for _ in range(4):
        proposal = drafter.propose(64)
        assert proposal.tokens.device == PRETEND
        if proposal.draft_probs is not None:
            assert proposal.draft_probs.device == PRETEND
        new = proposal.tokens[1:].tolist()
        tokens += new
        drafter.observe(Outcome(proposal, NOTHING, tuple(range(len(new))), (*new[:-1], 10)))
    drafter.finish()
    return tokens


def main(folder: Path) -> None:
    model, own = (variant_model("llama", **SIZES, **WIDE["llama"]).bfloat16() for _ in "12")
    target = Target(model, tiny_tokenizer(), name="target")
    target.device = PRETEND  # it is never run
    forward = NativeForward(own, library(folder / "kernels"), None)
    small = Target(own, tiny_tokenizer(), name="small", forward=forward)
    listed, location = json.loads((folder / "draft_vocab.json").read_text()), str(folder)
    for temperature, threshold in ((0.0, 0.0), (0.0, 1e-6), (1.0, 0.0)):
        settings = {"speculative_model": location, "confidence_threshold": threshold}
        config = DraftTargetConfig.parse(settings)
        drafter = config.build(build_context(target, **{location: small}))
        tokens = drafted(drafter, temperature)
        assert {*tokens} <= {*listed} < {*range(VOCAB)}
        print(len(tokens))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
