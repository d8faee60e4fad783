"""Records tests/golden/gguf by the peer: `python -m tests.engine.gguf.record LLAMA_CPP [NAME …]`.

A family's file is the peer's conversion of a tiny model; its logits are those of transformers'
model of the folder that was converted.
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
from pathlib import Path

from tests.engine.gguf.families import MODELS, convert, load_folder, save_folder, some_logits

CONVERTED_ONLY = set(
    """mistral granitemoe qwen2+linear qwen3+yarn seed_oss+yarn falcon_mamba olmoe glm gemma
    exaone_moe dots1 gpt_bigcode hunyuan_v1_moe ernie4_5 afmoe qwen2+yarn""".split()
)
"""Families that only the slow test converts: the recorded files take at most 600 KB."""
GOLDEN = Path(__file__).parents[2] / "golden/gguf"


def main(peer: Path, names: list[str]) -> None:
    """Replace the recorded files."""
    logits_file = GOLDEN / "logits.json"
    logits = json.loads(logits_file.read_text()) if logits_file.exists() else {}
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        for name in names:
            save_folder(name, folder / name)
        convert(peer, folder, names)
        for name in names:
            file = folder / f"{name}.gguf"
            if file.exists():
                packed = lzma.compress(file.read_bytes(), preset=9)
                (GOLDEN / f"{name}.gguf.xz").write_bytes(packed)
                logits[name] = some_logits(load_folder(folder / name))
    lines = (f'"{name}": {json.dumps(values)}' for name, values in sorted(logits.items()))
    logits_file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or sorted(MODELS.keys() - CONVERTED_ONLY))
