"""Run with the peer's source in PYTHONPATH: converts one drafter by its `convert_hf_to_gguf.py`.

    python run_converter.py FOLDER TARGET OUT [OPTION …]

A drafter needs no vocabulary: it drafts its target's tokens.
"""

import logging
import sys

import conversion  # type: ignore[import-not-found]
import convert_hf_to_gguf  # type: ignore[import-not-found]
from conversion.base import TextModel  # type: ignore[import-not-found]


def all_subclasses(kind):
    for one in kind.__subclasses__():
        yield one
        yield from all_subclasses(one)


logging.disable(logging.WARNING)
conversion.load_all_models()
drafters = {kind for kind in all_subclasses(TextModel) if kind.__name__[:6] in ("DFlash", "DSpark")}
for kind in {*all_subclasses(TextModel)} - drafters:  # theirs call their target's
    kind.set_vocab = TextModel._set_vocab_none
folder, target, out, *options = sys.argv[1:]
sys.argv = ["", folder, "--target-model-dir", target, "--outfile", out, *options]
convert_hf_to_gguf.main()
