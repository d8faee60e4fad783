"""Captures hidden states of a transformers model while a drafter wants them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.proposal import Needs


class FeatureTap:
    """Hooks on the decoder and on single decoder layers; installed only while needed."""

    def __init__(self, model: PreTrainedModel) -> None:
        # OPT's language model calls its decoder directly, not the base model around it.
        self._decoder = model.get_decoder()
        self._layers = decoder_layers(model)
        self._hidden: Tensor | None = None
        self._inputs: dict[int, Tensor] = {}
        self._installed = Needs()
        self._hooks: list[Any] = []

    def watch(self, needs: Needs) -> None:
        """Capture these features in every forward from now on."""
        if needs == self._installed:
            return
        self.close()
        if needs.hidden:
            self._hooks.append(self._decoder.register_forward_hook(self._keep_hidden))
        for i in needs.layers:
            if i == len(self._layers):
                hook = self._layers[-1].register_forward_hook(self._keep_last)
            else:
                hook = self._layers[i].register_forward_pre_hook(self._keeper(i), with_kwargs=True)
            self._hooks.append(hook)
        self._installed = needs

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        """`hidden (rows, hidden)` and `layers (rows, k * hidden)` of the forward just run."""
        hidden, self._hidden = self._hidden, None
        layers = [self._inputs[i][0] for i in self._installed.layers]
        self._inputs.clear()
        return (
            None if hidden is None else hidden[0],
            torch.cat(layers, dim=-1) if layers else None,
        )

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._installed = Needs()

    def _keep_hidden(self, module: nn.Module, args: Any, out: Any) -> None:
        self._hidden = out.last_hidden_state

    def _keep_last(self, module: nn.Module, args: Any, out: Any) -> None:
        """The last layer's output, before the final norm: the input of a layer that is not."""
        self._inputs[len(self._layers)] = out[0] if isinstance(out, tuple) else out

    def _keeper(self, i: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inputs[i] = args[0] if args else kwargs["hidden_states"]

        return keep


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's list of decoder layers, found by its length."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    return nn.ModuleList()
