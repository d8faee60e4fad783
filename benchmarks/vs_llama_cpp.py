"""Methods here against llama-server on the same GGUF file, with each of its ways to speculate.

    python -m benchmarks.vs_llama_cpp LLAMA_SERVER [--draft DRAFT.gguf] [--methods plain,…]

LLAMA_SERVER is the program as its project builds it (`cmake --build … --target llama-server`);
DRAFT.gguf is a shipped draft model, converted by its `convert_hf_to_gguf.py`. Each way runs in a
server of its own. All contestants take turns prompt by prompt: same prompts, same number of
threads, greedy, exactly so many tokens. tok/s are of decoding, first token to last, without the
prompt; llama-server's are those that it reports. Methods have the size that is fitted to this
machine. Prints totals per round, and ratios.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import httpx
import torch

import presets
from engine.config import Limits
from engine.decode import decode
from engine.drafters.base import BuildContext, Drafter
from engine.metrics import Tally
from engine.model.loading import load_target
from engine.model.target import Target
from engine.tuning.adaptive import build_drafter, controller_curve
from engine.tuning.fit import fit_size
from playground.experiments.prompt_files import read_suite_file
from playground.host import paths

PEER = "llama.cpp"
WAYS = ("none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
"""Its kinds of speculation that need no weights; `none` is its plain decoding."""
DRAFT_WAY = "draft-simple"
START_S = 60.0
WARM_UP_TOKENS = 32


class Server:
    """A llama-server that listens."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=300.0)

    def ready(self) -> bool:
        try:
            return self._http.get("/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def seconds(self, prompt_ids: Sequence[int], num_tokens: int) -> float:
        """Of decoding, as it reports them."""
        asked = {
            "prompt": list(prompt_ids),
            "n_predict": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        timings = self._http.post("/completion", json=asked).raise_for_status().json()["timings"]
        if timings["predicted_n"] < num_tokens - 1:
            raise RuntimeError(f"llama-server wrote {timings['predicted_n']} tokens")
        return float(timings["predicted_ms"]) / 1000 / timings["predicted_n"] * (num_tokens - 1)


@contextmanager
def serving(program: Path, file: Path, options: Sequence[str]) -> Iterator[Server]:
    """Start a llama-server with these options and end it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(torch.get_num_threads())
    line = [program, "--model", file, "--port", str(port), "--ctx-size", "4096", "--parallel", "1"]
    line += ["--threads", threads, "--threads-batch", threads, *options]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            server, began_s = Server(f"http://127.0.0.1:{port}"), time.monotonic()
            while not server.ready():
                if process.poll() is not None or time.monotonic() - began_s > START_S:
                    raise RuntimeError(f"llama-server did not start with {' '.join(options)}")
                time.sleep(0.1)
            yield server
        finally:
            process.terminate()


def fitted(target: Target, name: str) -> Drafter:
    """A preset's drafter in the size that suits this machine."""
    context = BuildContext(
        target,
        presets.resolve,
        lambda spec: load_target(
            spec, dtype=target.companion_dtype, device="cpu", cache_dir=paths.cache_dir()
        ),
        locate=presets.locate,
    )
    curve = cache(lambda: controller_curve(target))
    config = presets.methods()[name].config
    return build_drafter(fit_size(config, presets.sizes(config), context, curve).config, context)


def prompts_of(target: Target, options: argparse.Namespace) -> list[list[int]]:
    """So many first turns of each category."""
    suite = read_suite_file(options.prompts) if options.prompts else presets.suites()["tasks"]
    kinds: dict[str, list[list[int]]] = {}
    for prompt in suite.prompts:
        ids = target.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        kinds.setdefault(prompt.category, []).append(ids)
    return [ids for of_kind in kinds.values() for ids in of_kind[: options.per_category]]


def seconds_here(target: Target, drafter: Drafter, ids: list[int], num_tokens: int) -> float:
    """Of decoding, first token to last."""
    tally = Tally()
    limits = Limits(max_new_tokens=num_tokens, ignore_eos=True)
    for record in decode(target, drafter, ids, limits=limits):
        tally.add(record)
    assert tally.metrics.tok_s is not None
    return (num_tokens - 1) / tally.metrics.tok_s


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("server", type=Path, help="the program llama-server")
    parser.add_argument("--draft", type=Path, help="a draft model as GGUF")
    parser.add_argument("--methods", default="plain,suffix-smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=Path, help="prompt file; default: suite `tasks`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--per-category", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parsed()
    target = load_target(
        presets.resolve("smollm2-135m-instruct"), dtype=options.dtype, cache_dir=paths.cache_dir()
    )
    file = next(Path(paths.cache_dir()).rglob("SmolLM2-135M-Instruct.Q4_1.gguf"))
    prompts = prompts_of(target, options)
    drafters = {name: fitted(target, name) for name in options.methods.split(",")}
    ways = {way: ["--spec-type", way] for way in WAYS}
    if options.draft:
        ways[DRAFT_WAY] = ["--spec-type", DRAFT_WAY, "--model-draft", str(options.draft)]
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        servers = {
            f"{PEER} {way}": stack.enter_context(serving(options.server, file, settings))
            for way, settings in ways.items()
        }
        for server in servers.values():
            server.seconds(prompts[0], WARM_UP_TOKENS)
        for drafter in drafters.values():
            seconds_here(target, drafter, prompts[0], WARM_UP_TOKENS)
        for _ in range(options.rounds):
            took = dict.fromkeys([*servers, *drafters], 0.0)
            for ids in prompts:
                for name, server in servers.items():
                    took[name] += server.seconds(ids, options.tokens)
                for name, drafter in drafters.items():
                    took[name] += seconds_here(target, drafter, ids, options.tokens)
            for name, seconds in took.items():
                rates.setdefault(name, []).append(len(prompts) * (options.tokens - 1) / seconds)
    print(
        f"{target.name} {target.dtype_name} on {target.device_name}, {options.tokens} tokens for "
        f"each of {len(prompts)} prompts, {options.rounds} rounds, interleaved"
    )
    show(rates)


def show(rates: dict[str, list[float]]) -> None:
    """tok/s of everyone; ratios to llama.cpp's plain decoding and to its best way to speculate."""
    middle = {name: statistics.median(values) for name, values in rates.items()}
    plain = f"{PEER} {WAYS[0]}"
    best = max((name for name in rates if name.startswith(PEER) and name != plain), key=middle.get)  # type: ignore[arg-type]
    for name, values in rates.items():
        line = f"  {name:28} {middle[name]:6.1f} tok/s"
        for against in (plain, best):
            ratios = [a / b for a, b in zip(values, rates[against], strict=True)]
            line += f"   {statistics.median(ratios):.2f} × {against}"
            line += f" ({min(ratios):.2f} … {max(ratios):.2f})"
        print(line)


if __name__ == "__main__":
    main()
