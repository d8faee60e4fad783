"""Speculative decoding playground: `python app.py` serves the page; `--help` lists the rest."""

from playground.cli.main import app as app
from playground.cli.main import run

if __name__ == "__main__":
    run()
