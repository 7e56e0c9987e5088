"""Views: who is a member in which incarnation, and which expert lies where. Pure values."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from elasticep.control.placement import GeometryLike, Placement
from elasticep.errors import ConfigError
from elasticep.proto import types_pb2


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A seat taken by one incarnation (>= 1), on a node."""

    rank: int
    incarnation: int
    node: str

    def __str__(self) -> str:
        return f"rank {self.rank} (incarnation {self.incarnation} on {self.node})"

    def to_proto(self) -> types_pb2.Member:
        """The message."""
        return types_pb2.Member(rank=self.rank, incarnation=self.incarnation, node=self.node)

    @classmethod
    def from_proto(cls, message: types_pb2.Member) -> Self:
        """Inverse of `to_proto`."""
        return cls(message.rank, message.incarnation, message.node)


@dataclass(frozen=True, slots=True)
class View:
    """One epoch of a group. Epochs are totally ordered and never reused.

    Attributes:
        group: the group's name.
        epoch: >= 1.
        previous_epoch: the view proposed before; 0 when no member runs an earlier one.
        members: ascending by rank, one incarnation per rank.
        expelled: incarnations that left since the last adopted view and whose dead word is set.
        placement: slot tables of all layers.
        reason: why this view was proposed, one sentence.
        digest: 64 bits over epochs, incarnations and tables; 0 in the constructor computes it.
        lost: (layer, expert) pairs without a replica.
    """

    group: str
    epoch: int
    previous_epoch: int
    members: tuple[Member, ...]
    expelled: tuple[Member, ...]
    placement: Placement
    reason: str
    digest: int = 0
    lost: tuple[tuple[int, int], ...] = field(init=False)
    _by_rank: dict[int, Member] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ranks = [member.rank for member in self.members]
        if not ranks or ranks != sorted(set(ranks)):
            raise ConfigError(
                f"group {self.group!r} epoch {self.epoch}: the members' ranks {ranks} must be "
                "ascending and each appear once"
            )
        if not 0 <= self.previous_epoch < self.epoch:
            raise ConfigError(
                f"group {self.group!r}: epoch {self.epoch} cannot follow {self.previous_epoch}"
            )
        object.__setattr__(self, "_by_rank", {member.rank: member for member in self.members})
        object.__setattr__(self, "lost", tuple(self.placement.lost_experts(ranks)))
        if self.digest == 0:
            object.__setattr__(self, "digest", self._digest())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks, ascending."""
        return tuple(member.rank for member in self.members)

    def member(self, rank: int) -> Member | None:
        """The member that holds `rank`, or None."""
        return self._by_rank.get(rank)

    def holds(self, rank: int, incarnation: int) -> bool:
        """Whether this incarnation of the rank is a member."""
        member = self._by_rank.get(rank)
        return member is not None and member.incarnation == incarnation

    def describe(self) -> str:
        """One sentence for the history."""
        return f"epoch {self.epoch}: {describe_ranks(self.ranks)}; {self.reason}"

    def _digest(self) -> int:
        state = hashlib.blake2b(digest_size=8)
        state.update(f"{self.group}\n{self.epoch}\n{self.previous_epoch}\n".encode())
        for member in self.members:
            state.update(f"{member.rank}:{member.incarnation}\n".encode())
        for table in self.placement.to_tables():
            state.update(table)
        return int.from_bytes(state.digest(), "little") or 1  # 0 means "not computed"

    def to_proto(self, *, with_placement: bool = True) -> types_pb2.View:
        """The message; `with_placement=False` leaves the tables out (status, history)."""
        placement = None
        if with_placement:
            slot_expert, slot_weight = self.placement.to_tables()
            placement = types_pb2.Placement(slot_expert=slot_expert, slot_weight=slot_weight)
        return types_pb2.View(
            group=self.group,
            epoch=self.epoch,
            previous_epoch=self.previous_epoch,
            members=[member.to_proto() for member in self.members],
            expelled=[member.to_proto() for member in self.expelled],
            placement=placement,
            digest=self.digest,
            reason=self.reason,
        )

    @classmethod
    def from_proto(cls, geometry: GeometryLike, message: types_pb2.View) -> Self:
        """Inverse of `to_proto` with a placement; raises `InvalidPlacement` or `ConfigError`."""
        placement = Placement.from_tables(
            geometry, message.placement.slot_expert, message.placement.slot_weight
        )
        return cls(
            group=message.group,
            epoch=message.epoch,
            previous_epoch=message.previous_epoch,
            members=tuple(Member.from_proto(member) for member in message.members),
            expelled=tuple(Member.from_proto(member) for member in message.expelled),
            placement=placement,
            reason=message.reason,
            digest=message.digest,
        )


def describe_ranks(ranks: Iterable[int]) -> str:
    """Words such as "rank 2" or "ranks 0-3, 6"; "no rank" when there is none."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    if not parts:
        return "no rank"
    shown = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
    return f"{'rank' if parts == [[parts[0][0]] * 2] else 'ranks'} {shown}"
