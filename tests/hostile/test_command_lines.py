"""Options given what nobody means: an answer, or one sentence and exit code 2; never a traceback.

What each option says to the usual mistakes is tested beside its command.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from playground.cli.main import app
from storage import RunLog
from tests.hostile.watch import MOST_S, Watch
from tests.models import save_tiny
from tests.storage.conftest import finished_run

pytestmark = pytest.mark.slow

TEXTS = ["", "-", "=", "a=b=c", ",,", "::", "nan", "1e99", "9" * 400, "0x_", "\u0663", "[" * 2000]
TEXTS += ["&a [*a]", "!!timestamp foo", "\x1b[2J", "[red]", "%s{0}", "a\nb", "\udcff", "~nobody/x"]
TEXTS += ["/dev/full", "/dev/zero", "/proc/self/mem", "http://[::1", "postgresql://x@127.0.0.1:1/x"]
SMALL = "--target {tiny} --dtype float32 --device cpu --db {db} --max-new-tokens 2"
LINES = {
    f"generate hello {SMALL}": "temperature seed method set trace prompt-ids",
    f"bench {SMALL} --method NGram --limit-per-category 1": "suite repeats output",
    f"sweep {SMALL} --method NGram --trials 1": "vary objective seed resume",
    "train --method medusa --target no/such --output {out}": "set tokens prompts features seed",
    "runs list --db {db}": "search status filter sort limit",
    "export --method NGram --to vllm --db {db}": "run to target engine-version output set drafter",
    "import --from vllm": "",
}
"""Command lines, and the options that are given texts, of which each two share all; nothing names
an argument."""


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition(" ")[0])
def test_an_odd_option_is_answered_or_refused_in_one_sentence(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, db = save_tiny(tmp_path / "tiny", eos_token_id=None), tmp_path / "runs.db"
    with RunLog.open(str(db)) as log:
        finished_run(log)
    monkeypatch.chdir(tmp_path)
    words = line.format(tiny=tiny, db=db, out=tmp_path / "out").split()
    options = [f"--{name}=" for name in LINES[line].split()] or [""]
    shares = {o: TEXTS[i % 2 :: 2] for i, o in enumerate(options)} if options[1:] else {"": TEXTS}
    for given in (option + text for option, texts in shares.items() for text in texts):
        watch = Watch()
        result = CliRunner().invoke(app, [*words, given], input="")
        errors = [said for said in result.stderr.splitlines() if said.startswith("error: ")]
        assert isinstance(result.exception, SystemExit | None), given
        if result.exit_code:
            assert result.exit_code == 2, given
            assert len(errors) == 1 or "Usage:" in result.stderr, given
            assert watch.took_s < MOST_S, given
