"""From a group's typed configuration and a view's tables to the structures of the C ABI.

Kept apart from `abi` because a worker needs that one alone, and this one reads `elasticep.group`,
which needs protobuf.
"""

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from elasticep.errors import ConfigError
from elasticep.native import abi

if TYPE_CHECKING:
    from elasticep.group import GroupConfig, Timeouts
    from elasticep.spec import ExchangeSpec

_NS_PER_MS: Final = 1_000_000
_TABLE_ITEM_BYTES: Final = 4


def exchange_numbers(config: "GroupConfig") -> dict[str, tuple[int, ...]]:
    """Native exchange numbers of each of the group's exchanges, by name.

    An exchange is one native exchange, or two (decode, prefill) when its spec has a prefill part;
    `ExchangeSpec.parts` gives the specs in the same order.
    """
    numbers: dict[str, tuple[int, ...]] = {}
    first = 0
    for name, spec in config.exchanges:
        count = len(spec.parts())
        numbers[name] = tuple(range(first, first + count))
        first += count
    return numbers


def geometry_struct(config: "GroupConfig") -> abi.Geometry:
    """The group's sizes and exchanges as the native core reads them."""
    geometry = config.geometry
    parts = [part for _, spec in config.exchanges for part in spec.parts()]
    struct = abi.Geometry(
        layers=geometry.layers,
        experts=geometry.experts,
        topk=geometry.topk,
        hidden=geometry.hidden,
        slots=geometry.slots_per_rank,
        max_ranks=geometry.max_ranks,
        exchanges=len(parts),
        launch=int(abi.Launch[config.launch.name]),
        serve_lost=int(config.lost_experts.value == "serve"),
        agreed=int(config.completion.value == "agreed"),
        device=int(config.device.value == "cuda"),
    )
    for number, part in enumerate(parts):
        struct.exchange[number] = _exchange_struct(part)
    return struct


def _exchange_struct(spec: "ExchangeSpec") -> abi.ExchangeConfig:
    return abi.ExchangeConfig(
        copies=int(abi.Copies[spec.copies.name]),
        layout=int(abi.RowLayout[spec.layout.name]),
        dispatch_dtype=int(abi.Dtype[spec.dispatch_dtype.name]),
        combine_dtype=int(abi.Dtype[spec.combine_dtype.name]),
        reduce=int(abi.Reduce[spec.reduce.name]),
        cpu_sync=int(spec.cpu_sync),
        max_tokens=spec.max_tokens,
        channels=spec.channels,
        masked_room=spec.masked_room or 0,
        replicated=int(spec.replicated_input),
        scale_layout=int(abi.ScaleLayout[spec.scale_layout.name]),
    )


def timeouts_struct(timeouts: "Timeouts") -> abi.Timeouts:
    """The group's deadlines in nanoseconds."""
    return abi.Timeouts(
        suspect_after_ns=timeouts.suspect_after_ms * _NS_PER_MS,
        hang_timeout_ns=timeouts.hang_timeout_ms * _NS_PER_MS,
        exchange_timeout_ns=timeouts.exchange_timeout_ms * _NS_PER_MS,
        step_timeout_ns=timeouts.step_timeout_ms * _NS_PER_MS,
    )


class ViewTables:
    """A view as `ep_view`, together with the tables that the structure points to.

    Args:
        geometry: the group's sizes.
        epoch: number of the view, >= 1.
        previous_epoch: the epoch it follows, 0 for the group's first view.
        members: incarnation (>= 1) of each member rank.
        slot_expert: int32 little-endian [layers][max_ranks][slots], -1 = empty.
        slot_weight: uint32 little-endian of the same shape, 65536 = all of the expert's tokens.
        digest: what the view says its digest is; 0 = not known, the core computes it.

    Raises:
        ConfigError: a table of the wrong size, or a member out of range.
    """

    def __init__(
        self,
        geometry: abi.Geometry,
        *,
        epoch: int,
        previous_epoch: int,
        members: Mapping[int, int],
        slot_expert: bytes,
        slot_weight: bytes,
        digest: int = 0,
    ) -> None:
        expected = geometry.layers * geometry.max_ranks * geometry.slots * _TABLE_ITEM_BYTES
        for name, table in (("slot_expert", slot_expert), ("slot_weight", slot_weight)):
            if len(table) != expected:
                raise ConfigError(
                    f"view {epoch}: {name} has {len(table)} bytes; [layers][max_ranks][slots] of "
                    f"this group needs {expected}"
                )
        self._experts = ctypes.create_string_buffer(slot_expert, expected)
        self._weights = ctypes.create_string_buffer(slot_weight, expected)
        self.struct = abi.View(epoch=epoch, previous_epoch=previous_epoch, digest=digest)
        for rank, incarnation in members.items():
            if not 0 <= rank < geometry.max_ranks or incarnation < 1:
                raise ConfigError(
                    f"view {epoch}: member rank {rank} with incarnation {incarnation}; ranks are "
                    f"0 to {geometry.max_ranks - 1}, incarnations start at 1"
                )
            self.struct.incarnation[rank] = incarnation
        self.struct.slot_expert = ctypes.addressof(self._experts)
        self.struct.slot_weight = ctypes.addressof(self._weights)
