"""Programs whose figures are in PERFORMANCE.md and the documentation.

With `--smoke` each runs in seconds and offline: a small random model stands in for the target, and
other programs are left out where they are not given. Its table is whole; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TARGET = "smollm2-135m-instruct"
ROOT = Path(__file__).resolve().parents[1]


def read_options(
    about: str | None,
    *,
    programs: Sequence[str] = (),
    smoke: Mapping[str, Any] | None = None,
    arguments: Sequence[str] | None = None,
    **defaults: Any,
) -> argparse.Namespace:
    """A program's options: `tokens=96` is `--tokens` of a whole number, `tiny=False` a flag.

    Args:
        programs: files that must be given in this order; with `--smoke` they may be missing.
        smoke: values that `--smoke` sets where the command line does not; also `target`.
        defaults: None stands for a file that need not be given.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in programs:
        parser.add_argument(name, type=Path, nargs="?")
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            kind = Path if default is None else type(default)
            parser.add_argument(flag, default=default, type=kind)
    parser.add_argument("--smoke", action="store_true", help="is the program whole? in seconds")
    options = parser.parse_args(arguments)
    if options.smoke:
        parser.set_defaults(**_smoke_values(smoke or {}, defaults))
        return parser.parse_args(arguments)
    if missing := [name for name in programs if getattr(options, name) is None]:
        parser.error(f"{', '.join(missing)} must be given")
    return options


def _smoke_values(smoke: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    if "target" not in defaults:
        return dict(smoke)
    from benchmarks.models import save_stand_in  # torch is for those that have a target

    print(f"A small random model stands in for {TARGET}: the figures mean nothing.")
    return {"target": str(save_stand_in()), **smoke}


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`1.20 (1.11 … 1.32)`: median, least and most."""
    figures = (statistics.median(values), min(values), max(values))
    return "{} ({} … {})".format(*(f"{figure:.{digits}f}" for figure in figures))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> str:
    """`spread` of what was measured in the same rounds."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])
