"""One grid in one process and by workers of a local Ray: wall time, best settings, speedups.

    python -m benchmarks.sweep_on_ray [--workers 2] [--sweep "options of `app.py sweep`"]

24 trials of prompt look-up by default, every process and worker with one thread. A speedup is
that of pooled tok/s; two agree where, prompt by prompt, they do not differ by more than they
scatter, which one trial in twenty does by chance.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import ROOT, TARGET, read_options
from engine import formats
from playground.experiments.sweep.report import SweepResults, read_sweep
from playground.experiments.sweep.trials import Trial
from playground.host.speedup import differ
from storage import RunLog

GRID = "--vary max_draft_len=1:8 --vary max_matching_ngram_size=1:3"
SWEEP = f"--method ngram --suite starter --max-new-tokens 32 {GRID}"
SMOKE = "--method ngram --suite starter --max-new-tokens 4 --vary max_draft_len=1:2"


def main() -> None:
    """Measure both ways, print."""
    options = read_options(
        __doc__, smoke={"workers": 1, "sweep": SMOKE}, target=TARGET, workers=2, sweep=SWEEP
    )
    arguments = ("--target", options.target, *shlex.split(options.sweep))
    ray = ("--ray", "local", "--workers", str(options.workers), "--worker-cpus", "1")
    with tempfile.TemporaryDirectory() as folder:
        ways = {"one process": (), f"{options.workers} workers": ray}
        results = [
            run_sweep(str(Path(folder) / f"{number}.db"), (*arguments, *more))
            for number, more in enumerate(ways.values())
        ]
    for name, (seconds, sweep) in zip(ways, results, strict=True):
        done = sum(trial.outcome == "measured" for trial in sweep.trials)
        print(f"{name}: {seconds:.0f} s, {done} of {len(sweep.trials)} trials measured")
        if sweep.best is None:  # other programs on the machine have made every speedup doubtful
            print("  best: none, for no speedup is reliable")
            continue
        ties = [settings(sweep.trial(number).point) for number in sweep.ties]
        print(f"  best: {settings(sweep.best.point)}; as good: {'; '.join(ties) or 'none'}")
    compare(list(ways), [{settings(t.point): t for t in sweep.trials} for _, sweep in results])


def run_sweep(db: str, arguments: tuple[str, ...]) -> tuple[float, SweepResults]:
    """Seconds of a sweep from the command to its end, and its results."""
    command = [sys.executable, "app.py", "sweep", "--grid", "--db", db, *arguments]
    began_s = time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - began_s
    with RunLog.open(db) as log:
        (sweep,) = log.benchmarks.list(sweeps=True)
        return seconds, read_sweep(log, sweep.id)


def compare(ways: list[str], results: list[dict[str, Trial]]) -> None:
    """A line per point that both have measured."""
    print(f"\n{'settings':46}{ways[0]:>20}{ways[1]:>20}  agree")
    num_agree = num = 0
    for point, one in results[0].items():
        other = results[1].get(point)
        if other is None or one.section is None or other.section is None:
            continue
        agree = not differ(one.counts, other.counts)
        num, num_agree = num + 1, num_agree + agree
        shown = (formats.speedup(trial.value("speedup")) for trial in (one, other))
        print(f"{point:46}{''.join(f'{text:>20}' for text in shown)}  {'yes' if agree else 'no'}")
    print(f"{num_agree} of {num} agree")


def settings(point: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in point.items())


if __name__ == "__main__":
    main()
