"""Expert weights in GPU memory: tensors at fixed addresses, which the session's own thread keeps in
step with the views.

The daemon's arena is in host memory. The native session holds its tensors once more on the GPU and
copies into them what a view names before that view is staged (`csrc/cuda/mirror.cu`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from elasticep.client.arena import TORCH, LayerWeights
from elasticep.errors import SlotInvalid
from elasticep.native.tensors import over
from elasticep.weights import ArenaLayout


class WeightsHandle(Protocol):
    """What is asked of the native session."""

    @property
    def device(self) -> torch.device:
        """The GPU."""

    def weights_address(self) -> int:
        """Device address of the first layer's tensors."""

    def weights_held(self, layer: int, slots: int) -> list[int]:
        """The expert that lies whole in each slot, -1: none."""


class DeviceWeights:
    """The weights of one rank on its GPU.

    Args:
        handle: of the session.
        layout: of the arena, by the group's config.
        rank: of the session, for messages.
    """

    def __init__(self, handle: WeightsHandle, layout: ArenaLayout, rank: int) -> None:
        self._handle = handle
        self._slots = layout.slots
        self._rank = rank
        self._layers = tuple(self._tensors(layout, layer) for layer in range(layout.layers))

    def _tensors(self, layout: ArenaLayout, layer: int) -> LayerWeights:
        begin = self._handle.weights_address() - layout.data_offset
        found: Mapping[str, torch.Tensor] = {
            spec.name: over(
                begin + layout.tensor_offset(layer, index),
                (layout.slots, *spec.shape),
                TORCH[spec.dtype],
                self._handle.device,
            )
            for index, spec in enumerate(layout.spec.tensors)
        }
        return MappingProxyType(found)

    def get(self, layer: int) -> LayerWeights:
        """Name of a tensor -> `[S, *shape]`; the same objects at each call."""
        return self._layers[layer]

    def require(self, layer: int, slots: tuple[int, ...]) -> None:
        """Check that every slot holds what a view says.

        Args:
            layer: MoE layer, 0-based.
            slots: the expert in each slot by that view, -1 = empty.

        Raises:
            SlotInvalid: a slot does not.
        """
        held = self._handle.weights_held(layer, self._slots)
        for slot, expert in enumerate(slots):
            if expert >= 0 and held[slot] != expert:
                what = f"expert {held[slot]}" if held[slot] >= 0 else "nothing whole"
                raise SlotInvalid(
                    f"layer {layer} slot {slot} of rank {self._rank} holds {what} on the GPU, not "
                    f"expert {expert}; its weights must be in place before the view that names "
                    "them is staged"
                )
