"""Speculative decoding playground: `python app.py` serves the page; `--help` lists the rest."""

from playground.cli.main import app

if __name__ == "__main__":
    app()
