"""Hidden states that enter chosen layers, caught while a pass runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.core.errors import InputError, UnsupportedError


class FeatureTap:
    """Catches the inputs of layers 0..n; n, the number of layers, stands for what leaves the last one."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        config = model.config.get_text_config(decoder=True)
        self.width = config.hidden_size * len(self.layers)
        self._caught: dict[int, Any] = {}
        if not self.layers:
            return
        count = config.num_hidden_layers
        for layer in self.layers:
            if not 0 <= layer <= count:
                raise InputError(f"feature layer {layer} does not exist; the model has layers 0 to {count}")
        blocks = _blocks(model, count)
        for layer in set(self.layers):
            if layer < count:
                blocks[layer].register_forward_pre_hook(self._entering(layer), with_kwargs=True)
            else:
                blocks[-1].register_forward_hook(self._leaving(layer))

    def _entering(self, layer: int) -> Any:
        def hook(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._caught[layer] = given[0] if given else named["hidden_states"]

        return hook

    def _leaving(self, layer: int) -> Any:
        def hook(_: Any, __: Any, made: Any) -> None:
            self._caught[layer] = made[0] if isinstance(made, tuple) else made

        return hook

    def take(self, first: int = 0) -> Any:
        """float32 [rows, width] of the last pass, from row `first` on; None without layers.

        Layers stand side by side in the order asked for.
        """
        if not self.layers:
            return None
        device = self._caught[self.layers[0]].device
        found = torch.cat([self._caught[layer][0, first:].float().to(device) for layer in self.layers], 1)
        self._caught = {}
        return found


def _blocks(model: Any, count: int) -> Any:
    """The list of decoder layers. Raises UnsupportedError when there is none to be seen."""
    for _, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and hasattr(module[0], "forward"):
            return module
    raise UnsupportedError(f"features cannot be read from {type(model).__name__}: it has no list of {count} layers")
