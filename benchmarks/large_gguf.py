"""Whether a model as large as people use loads and writes in this machine's memory.

    python -m benchmarks.large_gguf [--layers 32] [--hidden 4096] [--tokens 16] [--file FILE.gguf]

Writes a Llama of Llama 3 8B's shape with random blocks, as Q4_K_M files have them (most matrices
Q4_K; values, and the second halves of the MLPs, Q6_K in every other layer), unless FILE.gguf is
there. Then a fresh process loads it and writes some tokens. Prints the sizes of the file and of
what that process held at most, the seconds of the load and milliseconds per token.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import numpy as np

from benchmarks import read_options
from benchmarks.startup import load

VOCAB = 128_256


def main() -> None:
    """Write, load and print."""
    options = read_options(
        __doc__,
        smoke={"layers": 2, "hidden": 512, "vocab": 512, "tokens": 4},
        layers=32,
        hidden=4096,
        vocab=VOCAB,
        tokens=16,
        file=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = options.file or Path(folder) / "large.gguf"
        if not file.exists():
            write(file, layers=options.layers, hidden=options.hidden, vocab=options.vocab)
        report = load(str(file), options.tokens)
        size = file.stat().st_size
    print(f"{report['forward']}, {size / 1e9:.2f} GB in the file")
    print(
        f"at most held {report['peak'] / 1e9:.2f} GB: {(report['peak'] - size) / 1e6:.0f} MB more"
    )
    print(f"loaded in {report['load']:.1f} s, {report['token_ms']:.0f} ms per token")


def write(file: Path, *, layers: int, hidden: int, vocab: int) -> None:
    """A Llama of random blocks."""
    writer = gguf.GGUFWriter(file, "llama", use_temp_file=True)
    head_dim = min(128, hidden // 8)
    heads, kv_heads, width = hidden // head_dim, hidden // head_dim // 4, hidden * 7 // 2
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["a", "b", "ab", *(f"<{i}>" for i in range(3, vocab))])
    writer.add_token_types([1] * vocab)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    generator = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int, kind: str) -> None:
        number = gguf.GGMLQuantizationType[kind]
        weights, size = gguf.GGML_QUANT_SIZES[number]
        blocks = generator.integers(0, 256, (rows, columns // weights, size), dtype=np.uint8)
        small = np.array([1e-5, 1e-5], dtype=np.float16).view(np.uint8)
        at = 208 if kind == "Q6_K" else 0
        blocks[..., at : at + (2 if kind == "Q6_K" else 4)] = small[: 2 if kind == "Q6_K" else 4]
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=number)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(hidden, dtype=np.float32))

    add("token_embd.weight", vocab, hidden, "Q4_K")
    for i in range(layers):
        better = "Q6_K" if i % 2 else "Q4_K"
        for name in ("attn_norm", "ffn_norm"):
            norm(f"blk.{i}.{name}.weight")
        add(f"blk.{i}.attn_q.weight", heads * head_dim, hidden, "Q4_K")
        add(f"blk.{i}.attn_k.weight", kv_heads * head_dim, hidden, "Q4_K")
        add(f"blk.{i}.attn_v.weight", kv_heads * head_dim, hidden, better)
        add(f"blk.{i}.attn_output.weight", hidden, heads * head_dim, "Q4_K")
        add(f"blk.{i}.ffn_gate.weight", width, hidden, "Q4_K")
        add(f"blk.{i}.ffn_up.weight", width, hidden, "Q4_K")
        add(f"blk.{i}.ffn_down.weight", hidden, width, better)
    norm("output_norm.weight")
    add("output.weight", vocab, hidden, "Q6_K")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
