"""Whether a model as large as people use loads and writes in this machine's memory.

    python -m benchmarks.large_gguf [--layers 32] [--hidden 4096] [--experts 0] [--tokens 16]
        [--file FILE.gguf]

Writes a Llama of Llama 3 8B's shape with random blocks, as Q4_K_M files have them (most matrices
Q4_K; values, and the second halves of the MLPs, Q6_K in every other layer), unless FILE.gguf is
there. Then a fresh process loads it and writes some tokens. Prints the sizes of the file and of
what that process held at most, the seconds of the load and milliseconds per token. With
`--experts`, a Qwen3-MoE with so many experts of width 768, of which a token chooses 8; then a step
of 1, 2, 4 and 8 rows is timed as well, and the experts that its rows read are counted.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import numpy as np

import presets
from benchmarks import read_options
from benchmarks.startup import load
from engine.kernels.cpu.experts import NativeExperts
from engine.metrics import expert_reads
from engine.model.loading import load_target
from engine.tuning.timing import measure_curve
from playground.host import paths

VOCAB = 128_256
CHOSEN, WIDTH = 8, 768
"""Of the mixture of experts."""
ROWS = (1, 2, 4, 8)


def main() -> None:
    """Write, load and print."""
    options = read_options(
        __doc__,
        smoke={"layers": 2, "hidden": 512, "vocab": 512, "tokens": 4},
        layers=32,
        hidden=4096,
        vocab=VOCAB,
        experts=0,
        tokens=16,
        file=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = options.file or Path(folder) / "large.gguf"
        if not file.exists():
            write(
                file,
                layers=options.layers,
                hidden=options.hidden,
                vocab=options.vocab,
                experts=options.experts,
            )
        report = load(str(file), options.tokens)
        size = file.stat().st_size
        rows = time_rows(str(file)) if options.experts else {}
    print(f"{report['forward']}, {size / 1e9:.2f} GB in the file")
    print(
        f"at most held {report['peak'] / 1e9:.2f} GB: {(report['peak'] - size) / 1e6:.0f} MB more"
    )
    print(f"loaded in {report['load']:.1f} s, {report['token_ms']:.0f} ms per token")
    for count, (step_ms, reads) in rows.items():
        even = expert_reads(options.experts, CHOSEN, count)
        print(
            f"{count} rows: {step_ms:.0f} ms, {1000 * count / step_ms:.1f} rows/s; they read "
            f"{reads:.2f}× the experts of one ({even:.2f}× if all are chosen equally often)"
        )


def time_rows(name: str) -> dict[int, tuple[float, float]]:
    """By number of rows, milliseconds of a step, and the experts read over those of one row."""
    target = load_target(presets.resolve(name), cache_dir=paths.cache_dir())
    target.tokenizer = None  # the file's knows hardly any words: time any tokens
    read = list[int]()
    layers = [one for one in target.model.modules() if isinstance(one, NativeExperts)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args: read.append(len(args[1].unique())))
    found: dict[int, tuple[float, float]] = {}
    for count in ROWS:
        curve = measure_curve(target, rows=(count,), repeats=4)
        of_steps = read[-len(layers) :]
        found[count] = curve.ms[0], sum(of_steps) / len(of_steps) / CHOSEN
    return found


def write(file: Path, *, layers: int, hidden: int, vocab: int, experts: int = 0) -> None:
    """A Llama, or a Qwen3-MoE, of random blocks."""
    writer = gguf.GGUFWriter(file, "qwen3moe" if experts else "llama", use_temp_file=True)
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
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(CHOSEN)
        writer.add_expert_feed_forward_length(WIDTH)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["a", "b", "ab", *(f"<{i}>" for i in range(3, vocab))])
    writer.add_token_types([1] * vocab)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    generator = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int, kind: str, count: int = 1) -> None:
        number = gguf.GGMLQuantizationType[kind]
        weights, size = gguf.GGML_QUANT_SIZES[number]
        blocks = generator.integers(0, 256, (rows, columns // weights, size), dtype=np.uint8)
        small = np.array([1e-5, 7.5e-5], dtype=np.float16).view(np.uint8)  # 0 on average
        at = 208 if kind == "Q6_K" else 0
        blocks[..., at : at + (2 if kind == "Q6_K" else 4)] = small[: 2 if kind == "Q6_K" else 4]
        data = blocks.reshape(rows, -1)
        if count > 1:  # all alike: which of them are read is what counts
            data = np.broadcast_to(data, (count, *data.shape))
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=number)

    def norm(name: str, size: int = hidden) -> None:
        writer.add_tensor(name, np.ones(size, dtype=np.float32))

    add("token_embd.weight", vocab, hidden, "Q4_K")
    for i in range(layers):
        better = "Q6_K" if i % 2 else "Q4_K"
        for name in ("attn_norm", "ffn_norm"):
            norm(f"blk.{i}.{name}.weight")
        add(f"blk.{i}.attn_q.weight", heads * head_dim, hidden, "Q4_K")
        add(f"blk.{i}.attn_k.weight", kv_heads * head_dim, hidden, "Q4_K")
        add(f"blk.{i}.attn_v.weight", kv_heads * head_dim, hidden, better)
        add(f"blk.{i}.attn_output.weight", hidden, heads * head_dim, "Q4_K")
        if experts:
            for name in ("attn_q_norm", "attn_k_norm"):
                norm(f"blk.{i}.{name}.weight", head_dim)
            router = generator.standard_normal((experts, hidden)).astype(np.float32)
            writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
            add(f"blk.{i}.ffn_gate_exps.weight", WIDTH, hidden, "Q4_K", experts)
            add(f"blk.{i}.ffn_up_exps.weight", WIDTH, hidden, "Q4_K", experts)
            add(f"blk.{i}.ffn_down_exps.weight", hidden, WIDTH, better, experts)
            continue
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
