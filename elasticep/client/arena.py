"""Expert weights that the daemon keeps: tensors over the rank's arena, for the slots of a view.

Nothing is copied and nothing is loaded: the memory is the daemon's, filled and verified before the
view that names its slots could be adopted, and outlives this process. It is mapped once, for
reading only; to write through a tensor of it ends the process, instead of changing weights that
other ranks may copy.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from elasticep.arena import Arena
from elasticep.errors import WeightsError
from elasticep.weights import ArenaLayout, WeightDtype

TORCH: Final[Mapping[WeightDtype, torch.dtype]] = {
    WeightDtype.FP32: torch.float32,
    WeightDtype.FP16: torch.float16,
    WeightDtype.BF16: torch.bfloat16,
    WeightDtype.FP8_E4M3: torch.float8_e4m3fn,
    WeightDtype.FP8_E5M2: torch.float8_e5m2,
    WeightDtype.FP8_E8M0: torch.float8_e8m0fnu,
    WeightDtype.INT64: torch.int64,
    WeightDtype.INT32: torch.int32,
    WeightDtype.INT16: torch.int16,
    WeightDtype.INT8: torch.int8,
    WeightDtype.UINT8: torch.uint8,
}

LayerWeights = Mapping[str, torch.Tensor]
"""Name of a tensor -> `[S, *shape]`, expert by slot."""

OpenArena = Callable[[], int]
"""Gives a descriptor of the arena, which then belongs to the caller."""


@dataclass(frozen=True, slots=True)
class _Checked:
    """A layer that was found right: for which slots, and what its labels were then."""

    slots: tuple[int, ...]
    labels: bytes


class ArenaWeights:
    """The weights of one rank.

    Args:
        layout: of the arena, by the group's config.
        open_arena: called once, when weights are first asked for.
    """

    def __init__(self, layout: ArenaLayout, open_arena: OpenArena) -> None:
        self._layout = layout
        self._open = open_arena
        self._arena: Arena | None = None
        self._bytes: torch.Tensor | None = None
        self._layers: dict[int, LayerWeights] = {}
        self._checked: dict[int, _Checked] = {}

    def get(self, layer: int, slots: tuple[int, ...]) -> LayerWeights:
        """The tensors of a layer, if every slot holds what the view says.

        Labels are compared at the first call for these slots, and again whenever any label of the
        layer changed since.

        Args:
            layer: MoE layer, 0-based.
            slots: the expert in each slot by the view being run, -1 = empty. What lies in an empty
                slot is undefined.

        Raises:
            SlotInvalid: a slot does not hold its expert. Nothing is handed out.
            WeightsError: the arena is not laid out as this group's config says.
            Unavailable: the daemon did not hand the arena over.
        """
        arena = self._mapped()
        labels = arena.raw_labels(layer)
        checked = self._checked.get(layer)
        if checked is None or checked.labels != labels or checked.slots != slots:
            for slot, expert in enumerate(slots):
                if expert >= 0:
                    arena.require(layer, slot, expert)
            self._checked[layer] = _Checked(slots, labels)
        return self._tensors(layer)

    def close(self) -> None:
        """Forget the arena. Its memory stays mapped as long as there are tensors over it."""
        if self._arena is not None:
            self._arena.release()
        self._arena = self._bytes = None
        self._layers.clear()
        self._checked.clear()

    def _tensors(self, layer: int) -> LayerWeights:
        held = self._layers.get(layer)
        if held is not None:
            return held
        assert self._bytes is not None
        found: dict[str, torch.Tensor] = {}
        for index, spec in enumerate(self._layout.spec.tensors):
            start = self._layout.tensor_offset(layer, index)
            part = self._bytes[start : start + spec.nbytes * self._layout.slots]
            found[spec.name] = part.view(TORCH[spec.dtype]).view(self._layout.slots, *spec.shape)
        held = self._layers[layer] = MappingProxyType(found)
        return held

    def _mapped(self) -> Arena:
        if self._arena is None:
            fd = self._open()
            try:
                memory = _map(fd, self._layout.total_bytes)
            finally:
                os.close(fd)
            self._arena = Arena(memory, self._layout)
            self._bytes = torch.frombuffer(_unguarded(memory), dtype=torch.uint8)
        return self._arena


def _map(fd: int, size: int) -> mmap.mmap:
    found = os.fstat(fd).st_size
    if found < size:
        raise WeightsError(
            f"the arena that the daemon handed over has {found} bytes, this group's config makes "
            f"it {size}; install one version everywhere"
        )
    return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)


def _unguarded(memory: mmap.mmap) -> Any:
    # torch has no read-only tensors and warns of read-only buffers, so it is shown the address.
    # The array keeps the mapping, and every tensor over it keeps the array.
    start = np.frombuffer(memory, np.uint8)
    array = (ctypes.c_ubyte * len(memory)).from_address(start.ctypes.data)
    array.__dict__["memory"] = start
    return array
