"""Drafts for a target on a pretended device with a model on the processor; see the test beside it.

    python -m tests.engine.device.draft_vocab FOLDER

FOLDER lists the tokens that may be drafted. Prints how many tokens each way of drafting drafted.

No accelerator is needed: tensors say that they are on `pretend:0`, with data on the CPU. Every
operation goes through `_fallback`, which refuses to mix devices, as CUDA does. torch takes one such
backend a process, for good.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from engine.config import Sampling
from engine.drafters.base import Drafter, Start
from engine.drafters.draft_target import DraftTargetConfig
from engine.kernels.cpu.compile import library
from engine.kernels.cpu.native import NativeForward
from engine.kernels.cpu.operators import pack_native
from engine.model.target import Target
from engine.proposal import Budget, Outcome, TargetOutput
from engine.sampling import SeededDraws
from tests.engine.cpu.targets import SIZES, WIDE, variant_model
from tests.models import VOCAB, build_context, tiny_tokenizer

_library: Any = None


class _Pretended(torch.Tensor):
    """Says that it is elsewhere; `_data_cpu` is what it holds."""

    _data_cpu: torch.Tensor
    # Else what is copied to the CPU would be of this class, too. torch's stub has only a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def set_up() -> torch.device:
    """Register the device."""
    global _library
    _setup_privateuseone_for_python_backend("pretend")
    _library = torch.library.Library("_", "IMPL")
    _library.fallback(_fallback, "PrivateUse1")
    return torch.device("pretend", 0)


def _wrapped(data: Any) -> Any:
    if not isinstance(data, torch.Tensor):
        return data
    tensor: Any = torch._C._acc.create_empty_tensor(data.shape, data.dtype)
    tensor.__class__ = _Pretended
    tensor._data_cpu = data
    return tensor


def _bare(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value._data_cpu if isinstance(value, _Pretended) else value


def _fallback(operator: Any, *args: Any, **named: Any) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
    here = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.dim()]
    name = operator.name()
    if here and any(tensor.device.type == "pretend" for tensor in tensors) and "copy" not in name:
        raise RuntimeError(f"{name}: tensors on pretend:0 and cpu")
    if name == "aten::_copy_from":
        _bare(args[1]).copy_(_bare(args[0]))
        return args[1]
    result = operator(*tree_map(_bare, args), **tree_map(_bare, named))
    to = named.get("device")
    return result if to is not None and to.type == "cpu" else tree_map(_wrapped, result)


PRETEND = set_up()
NOTHING = TargetOutput(torch.empty(0, 0))


@torch.no_grad()  # inference tensors cannot be pretended
def drafted(drafter: Drafter, temperature: float) -> list[int]:
    """A text whose drafts are accepted but for the last token."""
    drafter.start(Start([7, 8], 9, NOTHING, Sampling(temperature=temperature), SeededDraws(0)))
    tokens: list[int] = []
    for _ in range(4):
        proposal = drafter.propose(Budget(64))
        assert proposal.tokens.device == PRETEND
        if proposal.draft_probs is not None:
            assert proposal.draft_probs.device == PRETEND
        new = proposal.tokens[1:].tolist()
        tokens += new
        drafter.observe(Outcome(proposal, NOTHING, tuple(range(len(new))), (*new[:-1], 10)))
    drafter.finish()
    return tokens


def main(folder: Path) -> None:
    model, own = (variant_model("llama", **SIZES, **WIDE["llama"]).bfloat16() for _ in "12")
    target = Target(model, tiny_tokenizer(), name="target")
    target.device = PRETEND  # it is never run
    pack_native(own, library(folder / "kernels"), 16)
    forward = NativeForward(own)
    small = Target(own, tiny_tokenizer(), name="small", forward=forward)
    listed, location = json.loads((folder / "draft_vocab.json").read_text()), str(folder)
    for temperature, threshold in ((0.0, 0.0), (0.0, 1e-6), (1.0, 0.0)):
        settings = {"speculative_model": location, "confidence_threshold": threshold}
        config = DraftTargetConfig.parse(settings)
        drafter = config.build(build_context(target, **{location: small}))
        tokens = drafted(drafter, temperature)
        assert {*tokens} <= {*listed} < {*range(VOCAB)}
        print(len(tokens))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
