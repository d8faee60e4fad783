"""Where the time of a step goes, per method, on one target.

    python -m benchmarks.time_split [--dtype float32] [--tokens 64] [--rounds 3]

Prints mean milliseconds of draft, verify, accept and everything else, and the share of accept and
else: what a step spends outside the model forwards and the drafting. Heads without a checkpoint
for the target are random: they cost what trained ones cost per step, whatever they accept.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import presets
from benchmarks import TARGET, random_heads, read_options
from benchmarks.models import load
from engine.config import Limits
from engine.decode import decode
from engine.drafters import methods, parse_method
from engine.drafters.base import BuildContext, Drafter
from engine.drafters.method import MethodConfig
from engine.errors import PlaygroundError
from engine.metrics import Tally
from engine.model.target import Target
from engine.tuning.controller import build_drafter

HEADS = ("Medusa", "ReDrafter", "Eagle", "Eagle3")


def main() -> None:
    """Measure and print."""
    smoke = {"tokens": 4, "rounds": 1}
    options = read_options(__doc__, smoke=smoke, target=TARGET, dtype="auto", tokens=64, rounds=3)
    target = load(options.target, options.dtype)
    print(f"{target.name} {target.dtype_name} on {target.device_name}")
    print(
        f"{'method':26}{'nodes':>7}{'draft':>9}{'verify':>9}{'accept':>9}{'other':>9}{'share':>8}"
    )
    with tempfile.TemporaryDirectory() as temp:
        for name, config in configs(target, Path(temp)).items():
            bench = BuildContext(target, presets.resolve, lambda spec: target)
            try:
                drafter = build_drafter(config, bench)
            except PlaygroundError as error:
                print(f"{name:26}left out: {error}")
                continue
            _report(name, target, drafter, options)
            del drafter  # before the next one is built


def configs(target: Target, folder: Path) -> dict[str, MethodConfig]:
    """One configuration per method that runs on any target, heads random."""
    heads = random_heads.make_all(target, folder)
    configs: dict[str, MethodConfig] = {}
    for name in methods():
        if name in ("User_Provided", "MTP", "DFlash", "DSpark", "P_EAGLE"):
            continue  # they need the user's object, or weights of their own
        values: dict[str, object] = {"decoding_type": name}
        if name in heads:
            values["speculative_model"] = str(heads[name])
        if name in ("Draft_Target", "PARD"):
            values["speculative_model"] = target.name
        if name == "PARD":
            values["mask_token_id"] = 0  # untrained: its time is the same
        configs[name] = parse_method(values)
    dynamic = {"decoding_type": "Eagle", "speculative_model": str(heads["Eagle"])}
    configs["Eagle (dynamic tree)"] = parse_method({**dynamic, "use_dynamic_tree": True})
    return configs


def _report(name: str, target: Target, drafter: Drafter, options: argparse.Namespace) -> None:
    prompt = presets.suites()["starter"].prompts[0].turns[0]
    ids = target.encode_chat([{"role": "user", "content": prompt}])
    limits = Limits(max_new_tokens=options.tokens, ignore_eos=True)
    tally = Tally()
    list(decode(target, drafter, ids, limits=limits))
    for _ in range(options.rounds):
        for record in decode(target, drafter, ids, limits=limits):
            tally.add(record)
    metrics = tally.metrics
    split = metrics.time_split
    assert split is not None
    share = (split.accept_s + split.other_s) / split.total_s
    nodes = metrics.num_drafted / metrics.num_steps
    figures = (split.draft_s, split.verify_s, split.accept_s, split.other_s)
    print(
        f"{name:26}{nodes:7.1f}"
        + "".join(f"{1000 * s:6.2f} ms" for s in figures)
        + f"{100 * share:7.1f}%"
    )


if __name__ == "__main__":
    main()
