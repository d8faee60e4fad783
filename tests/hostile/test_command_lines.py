"""Command lines that nobody means: answered, or refused in one sentence, and no process ends.

A short campaign by default, 700 command lines with `--hostile-long`.
"""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from playground.deploy import ENGINES
from storage import RunLog
from tests.hostile.campaign import CANARY, MOST_S, Campaign
from tests.hostile.test_bounds import GROWMAPS
from tests.hostile.test_texts import BAD_JSON, BAD_YAML
from tests.hostile.worker import outcome
from tests.models import save_tiny
from tests.storage.conftest import finished_run

pytestmark = pytest.mark.slow

NUM_SHORT = 60
NUM_LONG = 700
PATIENCE_S = 600.0
"""For an answer of the worker, which may be paused."""

GIVEN: dict[str, list[str]] = json.loads((Path(__file__).parent / "command_lines.json").read_text())
DIGITS = "9" * 400
TEXTS = [*GIVEN["texts"], DIGITS, "[" * 2000, "a" * 300, "a" * 20_000]
"""What an option is given."""
LENGTHS = [DIGITS, "[" * 5000, "1" * 5000]
SETTINGS = [*GIVEN["settings"], *(f"max_draft_len={text}" for text in LENGTHS)]
RANGES = [
    *GIVEN["ranges"],
    *(f"max_draft_len={text}" for text in (f"1:{DIGITS}", f"{DIGITS}:1", "1," * 5000)),
]


class Lines:
    """The command lines, by what they need in a folder."""

    def __init__(self, folder: Path, tiny: Path) -> None:
        self.folder, self.db = folder, str(folder / "runs.db")
        self.model = ["--target", str(tiny), "--dtype", "float32", "--device", "cpu"]
        self.log = ["--db", self.db]

    def all(self) -> Iterator[list[str]]:
        """Every command line."""
        generate = ["generate", "hello", *self.model, *self.log, "--max-new-tokens", "3"]
        one = "temperature top-k top-p seed max-new-tokens stop system method set drafter dtype"
        two = "device target trace db cache-dir prompt-ids"
        yield from self.options(generate, f"{one} {two}", TEXTS)
        ngram = [*generate, "--method", "NGram"]
        yield from self.options(ngram, "set", SETTINGS)
        yield from (["generate", text, *generate[2:]] for text in TEXTS)
        suite = self.file("suite.json", b'{"turns": ["hello"]}')
        work = [*self.model, *self.log, "--suite", suite, "--max-new-tokens", "2"]
        bench = ["bench", *work, "--method", "NGram"]
        names = "suite categories limit-per-category repeats methods method set name resume output"
        yield from self.options(bench, names, TEXTS)
        sweep = ["sweep", *work, "--method", "NGram", "--trials", "1"]
        yield from self.options(sweep, "vary", [*TEXTS, *RANGES])
        varied = [*sweep, "--vary", "max_draft_len=1:2"]
        yield from self.options(varied, "trials objective seed name resume output set", TEXTS)
        train = ["train", "--method", "medusa", "--output", str(self.folder / "o")]
        train += ["--target", "no/such"]
        yield from self.options(train, "set tokens rows prompts features evals seed", TEXTS)
        runs = "search status filter sort limit db"
        yield from self.options(["runs", "list", *self.log], runs, TEXTS)
        filters = [f"{name}={text}" for name in ("target", "label:turn") for text in TEXTS]
        yield from self.options(["runs", "list", *self.log], "filter", filters)
        for text in TEXTS:
            yield ["runs", "export", *self.log, "--", text]
            yield ["runs", "export", *self.log, "--", str(self.folder / "x.json"), text]
            yield ["runs", "import", *self.log, "--", text]
            yield ["export", *self.log, "--to", "vllm", "--method", text]
            yield ["import", "--from", "vllm", "--", text]
            yield [text]
            yield [text, text]
        made = ["export", *self.log, "--to", "vllm", "--method", "NGram"]
        yield from self.options(made, "run to target engine-version output set drafter", TEXTS)
        yield from self.options(made, "set", SETTINGS)
        yield ["serve", "--no-token", "--host", "0.0.0.0"]
        yield from (["serve", *bad.split()] for bad in ("--port 0", "--port x", "--target no/such"))
        yield from (["serve", *bad.split()] for bad in ("--drafter no:such", "--drafter no", "a b"))
        yield from self.files(generate, bench)

    def files(self, generate: list[str], bench: list[str]) -> Iterator[list[str]]:
        """Files of every kind, full of what they should not hold."""
        texts = {**BAD_YAML, **BAD_JSON}
        payloads = {
            name: text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
            for name, text in texts.items()
        }
        for name, payload in (payloads | GROWMAPS).items():
            yaml, json = (self.file(f"{name}.{end}", payload) for end in ("yaml", "json"))
            yield [*generate, "--method", yaml]
            yield [*bench, "--suite", yaml]
            yield [*bench, "--suite", json]
            yield ["runs", "import", *self.log, json]
            for engine in ENGINES:
                yield ["import", json, "--from", engine]
        for special in ("/dev/zero", "/dev/null", str(self.folder), "/proc/self/mem"):
            yield ["runs", "import", *self.log, special]
            yield ["import", special, "--from", "vllm"]
            yield [*bench, "--suite", special]
            yield [*generate, "--method", special]
        for full in ("/dev/full", str(self.folder), "/proc/none/x", self.db + "/x"):
            yield [*generate, "--trace", full]
            yield ["runs", "export", *self.log, full]
            yield [*bench, "--output", full]
            yield ["export", "--to", "vllm", "--method", "NGram", "--output", full]
            yield ["import", "--from", "vllm", "--output", full, self.file("good.json", GOOD)]

    def options(self, command: list[str], names: str, values: list[str]) -> Iterator[list[str]]:
        for name in names.split():
            yield from ([*command, f"--{name}={value}"] for value in values)

    def file(self, name: str, payload: bytes) -> str:
        path = self.folder / name.replace(" ", "-")
        path.write_bytes(payload)
        return str(path)


GOOD = b'{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'


def test_every_command_line_is_answered_or_refused_in_one_sentence(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a worker, so that one that ends its process ends no test."""
    (tmp_path / "canary.txt").write_text(CANARY)
    lines = Lines(tmp_path, save_tiny(tmp_path / "tiny", eos_token_id=None))
    with RunLog.open(lines.db) as log:
        finished_run(log)
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    number = NUM_LONG if pytestconfig.getoption("--hostile-long") else NUM_SHORT
    campaign = Campaign("command lines")
    with multiprocessing.get_context("spawn").Pool(1) as worker:
        for arguments in random.Random(13).sample(list(lines.all()), number):
            answer = worker.apply_async(outcome, [arguments])
            try:
                judge(campaign, arguments, answer.get(PATIENCE_S))
            except multiprocessing.TimeoutError:
                campaign.judge(said(arguments), "ended", "", fault="its process ended, or hangs")
                break
    campaign.check()


def said(arguments: list[str]) -> str:
    return " ".join(ascii(word)[1:-1][-60:] for word in arguments)


def judge(campaign: Campaign, arguments: list[str], found: dict[str, Any]) -> None:
    """Count a command line by how it ended."""
    case, fault = said(arguments), found["trace"]
    errors = [line for line in found["stderr"].splitlines() if line.startswith("error: ")]
    usage = "Usage:" in found["stderr"]
    if found["code"] != 0 and not usage and (len(errors) != 1 or found["code"] != 2):
        fault = fault or f"exit {found['code']}: {found['stderr'][-300:]}"
    campaign.slowest = max(campaign.slowest, (found["took_s"], case))
    if found["took_s"] > MOST_S and found["code"] != 0:
        fault = fault or f"{found['took_s']:.1f} s"
    outcome = "answered" if found["code"] == 0 else "refused"
    campaign.judge(case, outcome, found["output"], fault=fault)
