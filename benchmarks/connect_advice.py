"""The draft length that Connect advises a llama-server, and what it then does.

    python -m benchmarks.connect_advice LLAMA_SERVER MODEL.gguf DRAFT.gguf [--longest 7]

A server that drafts `--longest` tokens is measured beside one that does not draft, which gives the
advice; then the advised length and others are set and measured. Each is compared with the plain
server in the same minute, so that drift of the machine hits both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import presets
from benchmarks import TARGET, read_options
from benchmarks.servers import llama_server, own_server
from benchmarks.vs_llama_cpp import DRAFT_TYPE
from playground.connect.replay import Load, sample_prompts
from playground.connect.report import Report
from playground.connect.session import Address, measure

STAND_IN = "Token_Recycling"
"""What this program's own server drafts by where there is no llama-server."""


def main() -> None:
    """Measure and print."""
    options = read_options(
        __doc__,
        programs=("server", "model", "draft"),
        smoke={"prompts": 1, "tokens": 16, "longest": 2, "also": "1"},
        target=TARGET,
        longest=7,
        also="1,5",
        prompts=6,
        tokens=96,
    )
    prompts = sample_prompts(presets.suites()["tasks"], options.prompts)
    load = Load(prompts, (1,), options.tokens)
    with _plain_url(options) as plain_url:
        long = _report(options, load, options.longest, plain_url)
        print("\n".join(long.sentences()))
        print(f"{'length':>8}{'MAT':>14}{'tok/s':>18}{'× plain':>18}")
        if not long.advice:
            print("The server drafted nothing, so no length can be advised.")
            return
        (choice,) = long.advice
        others = {int(part) for part in options.also.split(",")}
        for length in sorted({choice.draft_len or 1, *others}):
            report = _report(options, load, length, plain_url)
            (own, beside), rates = report.pairs[0], long.position_rates
            assert own.tok_s and beside is not None and beside.tok_s and own.mat
            predicted = choice.tok_s_by_len[length]
            mats = f"{1 + sum(rates[:length]):.2f} → {own.mat:.2f}"
            speeds = f"{predicted:.1f} → {own.tok_s:.1f}"
            ratios = f"{predicted / choice.plain_tok_s:.2f} → {own.tok_s / beside.tok_s:.2f}"
            star = " *" if length == choice.draft_len else ""
            print(f"{length:8}{mats:>14}{speeds:>18}{ratios:>18}{star}")
    print("predicted → measured; * = advised" + ("" if choice.draft_len else ": no drafts"))


@contextmanager
def _plain_url(options: argparse.Namespace) -> Iterator[str]:
    """Where a server listens that does not draft; without a llama-server, this program's own."""
    if options.server is None:
        print("No llama-server is given: this program's own server stands in for it.")
        with tempfile.TemporaryDirectory() as folder:
            with own_server(Path(folder), options.target, "--no-token") as (_, url):
                yield url.rstrip("/")
    else:
        with llama_server(options.server, options.model, []) as plain:
            yield plain.url


def _report(options: argparse.Namespace, load: Load, length: int, plain_url: str) -> Report:
    """A server that drafts so many tokens, beside the one that does not draft."""
    if options.server is None:
        return asyncio.run(_last(Address(plain_url, model=f"{options.target}:{STAND_IN}"), load))
    drafting = ["--spec-type", DRAFT_TYPE, "--model-draft", str(options.draft), "--metrics"]
    drafting += ["--spec-draft-n-max", str(length)]
    with llama_server(options.server, options.model, drafting) as server:
        return asyncio.run(_last(Address(server.url, plain_url=plain_url), load))


async def _last(address: Address, load: Load) -> Report:
    return [report async for report in measure(address, load, None)][-1]


if __name__ == "__main__":
    main()
