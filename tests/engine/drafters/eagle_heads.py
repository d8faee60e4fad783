"""EAGLE heads for tiny targets, fitted in closed form so that some of their drafts are right."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

from engine.model.target import Target
from tests.engine.drafters.fitted import fit, greedy_texts

HEADS, KV_HEADS, INTERMEDIATE = 4, 2, 24
HEAD_DIM = 8


@dataclass
class LayerFormula:
    """What a decoder layer computes, a row at a time, as the papers write it."""

    turned: int = HEAD_DIM
    eps: float = 1e-5
    theta: float = 10_000.0

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * weight

    def turn(self, x: Tensor, position: int) -> Tensor:
        half = self.turned // 2
        angle = position * self.theta ** (-2 * torch.arange(half) / self.turned)
        first, second, rest = x.split([half, half, len(x) - self.turned])
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest])

    def layer(
        self,
        w: dict[str, Tensor],
        prefix: str,
        inputs: Sequence[Tensor],
        residuals: Sequence[Tensor],
        sees: Callable[[int, int], bool],
    ) -> list[Tensor]:
        """Outputs of the last rows, one per residual; `sees` tells of two rows what is attended."""

        def linear(name: str, x: Tensor) -> Tensor:
            return w[f"{prefix}.{name}.weight"] @ x + w.get(f"{prefix}.{name}.bias", 0.0)

        def heads(kind: str, row: Tensor, at: int) -> Tensor:
            parts = linear(f"self_attn.{kind}_proj", row).view(-1, HEAD_DIM)
            weight = w.get(f"{prefix}.self_attn.{kind}_norm.weight")
            normed = parts if weight is None else self.norm(parts, weight)
            return torch.stack([self.turn(part, at) for part in normed])

        keys = torch.stack([heads("k", row, at) for at, row in enumerate(inputs)])
        rows = [linear("self_attn.v_proj", row).view(-1, HEAD_DIM) for row in inputs]
        values, outputs = torch.stack(rows), []
        for at, residual in enumerate(residuals, start=len(inputs) - len(residuals)):
            seen = [j for j in range(len(inputs)) if sees(at, j)]
            mixed = []
            for head, query in enumerate(heads("q", inputs[at], at)):
                group = head // (HEADS // KV_HEADS)
                scores = keys[seen, group] @ query / HEAD_DIM**0.5
                mixed.append(scores.softmax(0) @ values[seen, group])
            out = residual + linear("self_attn.o_proj", torch.cat(mixed))
            x = self.norm(out, w[f"{prefix}.post_attention_layernorm.weight"])
            gated = silu(linear("mlp.gate_proj", x)) * linear("mlp.up_proj", x)
            outputs.append(out + linear("mlp.down_proj", gated))
        return outputs


def layer_tensors(hidden: int, attention_input: int, prefix: str) -> dict[str, Tensor]:
    """A random layer whose output stays near its input."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int, scale: float = 0.2) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    kv = KV_HEADS * hidden // HEADS
    return {
        f"{prefix}.self_attn.q_proj.weight": random(hidden, attention_input),
        f"{prefix}.self_attn.k_proj.weight": random(kv, attention_input),
        f"{prefix}.self_attn.v_proj.weight": random(kv, attention_input),
        f"{prefix}.self_attn.o_proj.weight": random(hidden, hidden, scale=0.05),
        f"{prefix}.mlp.gate_proj.weight": random(INTERMEDIATE, hidden),
        f"{prefix}.mlp.up_proj.weight": random(INTERMEDIATE, hidden),
        f"{prefix}.mlp.down_proj.weight": random(hidden, INTERMEDIATE, scale=0.05),
        f"{prefix}.post_attention_layernorm.weight": 1 + random(hidden),
    }


def config_of(target: Target, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        **more,
    }


@torch.inference_mode()
def save_eagle(folder: Path, target: Target) -> Path:
    """EAGLE-1/2 layout; `fc` is fitted to map embedding and feature to the next feature."""
    size, embedding = target.hidden_size, target.embedding.get_parameter("weight")
    inputs, wanted = [], []
    for ids, hidden in greedy_texts(target):
        inputs.append(torch.cat([embedding[ids[1:]], hidden[:-1]], dim=-1))
        wanted.append(hidden[1:])
    solved = torch.linalg.lstsq(torch.cat(inputs), torch.cat(wanted), driver="gelsd").solution
    tensors = layer_tensors(size, size, "layers.0")
    tensors |= {"fc.weight": solved.T.contiguous(), "embed_tokens.weight": embedding.clone()}
    return write(folder, tensors, config_of(target, bias=False))


@torch.inference_mode()
def save_eagle3(folder: Path, target: Target, layers: tuple[int, ...], *, draft_vocab: int) -> Path:
    """EAGLE-3 layout with tokens that the target writes; `lm_head` is fitted."""
    size = target.hidden_size
    tensors = layer_tensors(size, 2 * size, "midlayer")
    fc = torch.randn(size, len(layers) * size, generator=torch.Generator().manual_seed(2)) / 8
    inputs, wanted = [], []
    written = list(greedy_texts(target, layers))
    for ids, features in written:
        fused = features[:-2] @ fc.T
        inputs.append(fused * torch.rsqrt(fused.pow(2).mean(-1, keepdim=True) + 1e-5))
        wanted.append(ids[2:])
    likely = torch.cat([ids for ids, _ in written]).bincount(minlength=target.vocab_size)
    kept = likely.argsort(descending=True, stable=True)[:draft_vocab].sort().values
    tensors |= {
        "fc.weight": fc,
        "lm_head.weight": fit(inputs, wanted, target.vocab_size)[kept],
        "norm.weight": torch.ones(size),
        "midlayer.hidden_norm.weight": torch.ones(size),
        "midlayer.input_layernorm.weight": torch.ones(size),
        "d2t": kept - torch.arange(draft_vocab),
        "t2d": torch.isin(torch.arange(target.vocab_size), kept),
    }
    return write(folder, tensors, config_of(target, draft_vocab_size=draft_vocab))


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """A checkpoint folder as `speculators` and NVIDIA write it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "m.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder
