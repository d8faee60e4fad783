"""Run with the peer's source in PYTHONPATH: converts tiny models by its `convert_hf_to_gguf.py`.

    python run_converter.py FOLDER NAME …

Its vocabularies are told by hashes of published tokenizers; here every model has the same tiny one.
"""

import logging
import sys
from pathlib import Path

import conversion  # type: ignore[import-not-found]
import convert_hf_to_gguf  # type: ignore[import-not-found]
from conversion.base import ModelBase, TextModel  # type: ignore[import-not-found]

ABSENT = {
    "cohere2": {"rotary_pct": 1.0},
    "gpt2": {"n_ctx": 256},
    "hunyuan_v1_moe": {
        "moe_intermediate_size": [48] * 3,
        "moe_topk": [2] * 3,
        "num_shared_expert": [1] * 3,
    },
    "minimax_m2": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
}
"""Settings of published configs that transformers does not write."""
WITHOUT_MTP = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def convert(folder, name):
    """Convert one model."""
    more = ["--no-nextn"] if name in WITHOUT_MTP else []
    out = str(folder / f"{name}.gguf")
    sys.argv = ["", str(folder / name), "--outfile", out, "--outtype", "f32", *more]
    convert_hf_to_gguf.main()


def all_subclasses(kind):
    for one in kind.__subclasses__():
        yield one
        yield from all_subclasses(one)


def load_hparams(folder, *more, **options):
    return read_hparams(folder, *more, **options) | ABSENT.get(Path(folder).name, {})


logging.disable(logging.WARNING)
conversion.load_all_models()
read_hparams = ModelBase.load_hparams
ModelBase.load_hparams = staticmethod(load_hparams)
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
for kind in all_subclasses(TextModel):
    kind.set_vocab = TextModel._set_vocab_gpt2
folder, names = Path(sys.argv[1]), sys.argv[2:]
for name in names:
    try:
        convert(folder, name)
    except BaseException as error:
        print("not converted:", name, repr(error)[:200])
