"""The draft length that Connect advises a llama-server, and what it then does.

    python -m benchmarks.connect_advice LLAMA_SERVER MODEL.gguf DRAFT.gguf [--longest 7]

A server that drafts `--longest` tokens is measured beside one that does not draft, which gives the
advice; then the advised length and others are set and measured. Each is compared with the plain
server in the same minute, so that drift of the machine hits both alike.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import presets
from benchmarks.vs_llama_cpp import DRAFT_WAY, serving
from playground.connect.replay import Load, asked_of
from playground.connect.report import Report
from playground.connect.session import Address, visit


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--longest", type=int, default=7)
    parser.add_argument("--also", default="1,5")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    asked = tuple(asked_of(presets.suites()["tasks"], options.prompts))
    load = Load(asked, (1,), options.tokens)
    with serving(options.server, options.model, []) as plain:
        long = _report(options, load, options.longest, plain.url)
        print("\n".join(long.sentences()))
        (choice,) = long.choices
        others = {int(part) for part in options.also.split(",")}
        print(f"{'length':>8}{'MAT':>14}{'tok/s':>18}{'× plain':>18}")
        for length in sorted({choice.draft_len or 1, *others}):
            report = _report(options, load, length, plain.url)
            (own, beside), rates = report.pairs[0], long.position_rates
            assert own.tok_s and beside is not None and beside.tok_s and own.mat
            said = choice.tok_s_by_len[length]
            mats = f"{1 + sum(rates[:length]):.2f} → {own.mat:.2f}"
            speeds = f"{said:.1f} → {own.tok_s:.1f}"
            ratios = f"{said / choice.plain_tok_s:.2f} → {own.tok_s / beside.tok_s:.2f}"
            star = " *" if length == choice.draft_len else ""
            print(f"{length:8}{mats:>14}{speeds:>18}{ratios:>18}{star}")
    print("predicted → measured; * = advised" + ("" if choice.draft_len else ": no drafts"))


def _report(options: argparse.Namespace, load: Load, length: int, plain_url: str) -> Report:
    """A server that drafts so many tokens, beside the one that does not draft."""
    drafting = ["--spec-type", DRAFT_WAY, "--model-draft", str(options.draft), "--metrics"]
    drafting += ["--spec-draft-n-max", str(length)]
    with serving(options.server, options.model, drafting) as server:
        return asyncio.run(_last(Address(server.url, plain_url=plain_url), load))


async def _last(address: Address, load: Load) -> Report:
    return [report async for report in visit(address, load, None)][-1]


if __name__ == "__main__":
    main()
