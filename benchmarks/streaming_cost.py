"""What streaming to panels and the run log cost the decode loop.

    python -m benchmarks.streaming_cost [--panels 4] [--rounds 7] [--tokens 192] [--method plain]

One process. In each round the same prompt is decoded by the bare loop, and through the page's
engine host: text, figures, a run log on disk, and that many panels reading the stream at the page's
own pace. Both times are the loop's own, first token to last. Prints medians and the cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
from pathlib import Path

import presets
from benchmarks import TARGET, read_options, spread
from engine.config import Limits, Sampling
from engine.decode import decode
from engine.metrics import measure
from playground.host import paths
from playground.host.catalog import Catalog
from playground.host.live import LiveRun
from playground.host.request import GenerateRequest
from playground.host.runner import EngineHost
from playground.host.stream import RunStream, follow
from storage import RunLog


def main() -> None:
    """Measure and print."""
    options = read_options(
        __doc__,
        smoke={"rounds": 1, "tokens": 8},
        target=TARGET,
        dtype="auto",
        method="plain",
        panels=4,
        rounds=7,
        tokens=192,
    )
    catalog = Catalog.shipped()
    prompt = catalog.suites["starter"].prompts[0].turns[0]
    request = GenerateRequest(
        target=presets.resolve(options.target),
        dtype=options.dtype,
        title=catalog.method(options.method).title,
        config=catalog.presets[options.method].config,
        sampling=Sampling(),
        limits=Limits(max_new_tokens=options.tokens, ignore_eos=True),
        mode="chat",
        system="",
        prompt=prompt,
    )
    with tempfile.TemporaryDirectory() as folder:
        log = RunLog.open(str(Path(folder) / "runs.sqlite3"))
        host = EngineHost(log, catalog, cache_dir=paths.cache_dir())
        try:
            _compare(host, request, options)
        finally:
            host.close()
            log.close()


def _compare(host: EngineHost, request: GenerateRequest, options: argparse.Namespace) -> None:
    _streamed(host, request, options.panels)
    # The host's worker is idle between runs, so its target may be used from here.
    bench = host.build_context()
    target, drafter = bench.target, request.config.build(bench)
    ids = target.encode_chat([{"role": "user", "content": request.prompt}])

    def bare() -> float:
        metrics = measure(decode(target, drafter, ids, limits=request.limits))
        assert metrics.tok_s is not None
        return metrics.tok_s

    bare()
    alone, shown = [], []
    for _ in range(options.rounds):
        alone.append(bare())
        shown.append(_streamed(host, request, options.panels))
    print(f"{target.name} {target.dtype_name} on {target.device_name}, {options.tokens} tokens")
    print(f"  bare loop                  median {statistics.median(alone):6.1f} tok/s")
    title = f"{options.panels} panels and run log"
    print(f"  {title:26} median {statistics.median(shown):6.1f} tok/s")
    costs = [100 * (1 - b / a) for a, b in zip(alone, shown, strict=True)]
    print(f"  cost: {spread(costs, 1)} %")


def _streamed(host: EngineHost, request: GenerateRequest, panels: int) -> float:
    """tok/s of a run that so many panels follow."""
    run = host.generate(request, owner="benchmark")
    watchers = [threading.Thread(target=_watch, args=(run,)) for _ in range(panels)]
    for watcher in watchers:
        watcher.start()
    for watcher in watchers:
        watcher.join()
    run.over.wait()
    assert run.state == "completed", run.error
    assert run.metrics is not None and run.metrics.tok_s is not None
    return run.metrics.tok_s


def _watch(run: LiveRun) -> None:
    """What a browser tab costs the server: every message of the stream, as JSON text."""

    async def read() -> None:
        async for message in follow(RunStream([run])):
            json.dumps(message)

    asyncio.run(read())


if __name__ == "__main__":
    main()
