"""Speculative decoding playground: `python app.py` serves the page; `--help` lists the rest."""

import atexit
import gc

from playground.cli.main import app

if __name__ == "__main__":
    atexit.register(gc.freeze)  # else ending looks through a million objects first, for seconds
    app()
