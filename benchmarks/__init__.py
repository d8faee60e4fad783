"""Programs whose figures are in PERFORMANCE.md and the documentation."""

import argparse
from typing import Any

TARGET = "smollm2-135m-instruct"


def read_options(about: str | None, **defaults: Any) -> argparse.Namespace:
    """A program's options: `tokens=96` is `--tokens` of a whole number, `tiny=False` a flag."""
    parser = argparse.ArgumentParser(description=about)
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, default=default, type=type(default))
    return parser.parse_args()
