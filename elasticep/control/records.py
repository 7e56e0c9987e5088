"""The keys of the store and what lies under them.

    /elasticep/v1/leader                          {name, id, address, process}, leased
    /elasticep/v1/nodes/<node>                    NodeEndpoint
    /elasticep/v1/past/<group>                    {incarnation, epoch, at_unix_ms}: deleted groups
    /elasticep/v1/groups/<group>/config           GroupConfig
    /elasticep/v1/groups/<group>/view             View with placement, compressed
    /elasticep/v1/groups/<group>/adopted          epoch
    /elasticep/v1/groups/<group>/policies         what operators changed, all of it
    /elasticep/v1/groups/<group>/members/<rank>   {incarnation, node, phase, since, held, reason,
                                                   ended_unix_ms}
    /elasticep/v1/groups/<group>/history/<epoch>  {sentence, members, expelled, at_unix_ms}
    /elasticep/v1/groups/<group>/rebalance        {paused, asked, placement, held}: by operators
    /elasticep/v1/groups/<group>/loads            tokens of every (layer, expert), compressed

One leader serves all groups, because a node has one session for all of them. Only the leader key
has a lease: incarnations and endpoints must outlive every process that wrote them.

Controllers are upgraded one by one, so one may read what a later version wrote: fields that it does
not know are passed over.

A group is deleted by one transaction, which takes its config away and notes what numbers it has
used up. Its other keys go after that, by the next leader if need be.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from elasticep.control import events as ev
from elasticep.control.placement import InvalidPlacement, Placement
from elasticep.control.state import HISTORY_LENGTH, Past, Saved
from elasticep.control.store import Delete, KeyValue, Put
from elasticep.control.store.base import MAX_VALUE_BYTES
from elasticep.control.views import View
from elasticep.errors import ConfigError, ElasticEPError
from elasticep.group import GroupConfig
from elasticep.policies import Policies
from elasticep.proto import types_pb2

PREFIX: Final = "/elasticep/v1/"
LEADER: Final = f"{PREFIX}leader"
# Of one group. A view with every one of so many slots in use takes 0.9 MB in the store, and the
# loads of so many experts, whatever they are, 1.3 MB: each must fit into one value.
MAX_SLOTS: Final = 1 << 19  # of all layers and ranks
MAX_LOADS: Final = 1 << 18  # experts of all layers
_HISTORY_KEPT: Final = 1_000  # epochs
_MAX_VIEW_BYTES: Final = 256 << 20
_BESIDE_BYTES: Final = 64 << 10  # what a view has beside its tables
# What reading anything may raise, JSON of another form than expected included.
_UNREADABLE: Final = (
    *(ValueError, TypeError, KeyError, AttributeError),
    *(DecodeError, zlib.error, ElasticEPError),
)


class StoreCorrupt(ElasticEPError):
    """A key holds what this version cannot read."""

    reason = "STORE_CORRUPT"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach the daemon of a node; see `NodeEndpoint` in types.proto."""

    node: str
    domain: str
    grpc_address: str
    fd_socket: str

    def to_proto(self) -> types_pb2.NodeEndpoint:
        """The message."""
        return types_pb2.NodeEndpoint(**asdict(self))


@dataclass(slots=True)
class Loaded:
    """All that the store holds; `remains` are deleted groups of which there are keys left."""

    nodes: dict[str, Endpoint] = field(default_factory=dict)
    groups: dict[str, tuple[GroupConfig, Saved]] = field(default_factory=dict)
    view_revisions: dict[str, int] = field(default_factory=dict)
    past: dict[str, Past] = field(default_factory=dict)
    remains: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Moment:
    """One instant, on this process's clock of events and on the one that all processes share."""

    now_ms: int
    unix_ms: int


def view_key(group: str) -> str:
    """Where a group's latest view lies."""
    return f"{PREFIX}groups/{group}/view"


def put_node(endpoint: Endpoint) -> Put:
    """Write a node's endpoint."""
    content: bytes = endpoint.to_proto().SerializeToString(deterministic=True)
    return Put(f"{PREFIX}nodes/{endpoint.node}", content)


def delete_node(node: str) -> Delete:
    """Forget a node's endpoint."""
    return Delete(f"{PREFIX}nodes/{node}")


def put_config(config: GroupConfig) -> Put:
    """Write a group's config."""
    content: bytes = config.to_proto().SerializeToString(deterministic=True)
    return Put(f"{PREFIX}groups/{config.name}/config", content)


def group_prefix(group: str) -> str:
    """What the keys of a group begin with."""
    return f"{PREFIX}groups/{group}/"


def delete_group(group: str, past: Past, at: Moment) -> list[Put | Delete]:
    """Take a group's config away, now. The rest under `group_prefix` means nothing without it."""
    content = {**asdict(past), "at_unix_ms": at.unix_ms}
    return [Delete(f"{group_prefix(group)}config"), Put(f"{PREFIX}past/{group}", _json(content))]


def check_room(config: GroupConfig) -> None:
    """Raise `ConfigError` for a group whose views or loads the store could not take."""
    geometry = config.geometry
    experts = geometry.layers * geometry.experts
    slots = geometry.layers * geometry.max_ranks * geometry.slots_per_rank
    for what, count, most, lower in (
        ("slots, layers x max_ranks x slots_per_rank", slots, MAX_SLOTS, "the last two"),
        ("experts, layers x experts", experts, MAX_LOADS, "one of them"),
    ):
        if count > most:
            raise ConfigError(
                f"group {config.name!r} has {count} {what}; the store has room for {most} of a "
                f"group: lower {lower}"
            )


def check_import(placement: Placement) -> None:
    """Raise `InvalidPlacement` for one that the store could not take, as asked for or as a view."""
    tables = zlib.compress(b"".join(placement.to_tables()), level=1)
    size = max(len(tables), len(base64.b64encode(placement.to_bytes())))
    if size > MAX_VALUE_BYTES - _BESIDE_BYTES:
        raise InvalidPlacement(
            f"the plan takes {size} bytes in the store, which takes {MAX_VALUE_BYTES}; fill fewer "
            "slots, or let copies of an expert share evenly"
        )


def view_bytes(view: View) -> bytes:
    """What lies under `/view`."""
    return zlib.compress(view.to_proto().SerializeToString(deterministic=True), level=1)


def operations(group: str, write: ev.Write, at: Moment) -> list[Put | Delete]:
    """The store operations of one write, made now."""
    base = f"{PREFIX}groups/{group}"
    if isinstance(write, ev.SavePolicies):
        return [Put(f"{base}/policies", _json(write.policies.to_dict()))]
    if isinstance(write, ev.SaveAdopted):
        return [Put(f"{base}/adopted", str(write.epoch).encode())]
    if isinstance(write, ev.SaveSeat):
        return [Put(f"{base}/members/{write.rank}", _json(_plain_seat(write, at)))]
    if isinstance(write, ev.SaveRebalance):
        placement = base64.b64encode(write.placement).decode()
        content = {
            "paused": write.paused,
            "asked": write.asked,
            "placement": placement,
            "held": write.held,
        }
        return [Put(f"{base}/rebalance", _json(content))]
    if isinstance(write, ev.SaveLoads):
        return [Put(f"{base}/loads", zlib.compress(write.tokens.astype("<i8").tobytes(), level=1))]
    view = write.view
    history = {
        "sentence": view.describe(),
        "members": [[m.rank, m.incarnation, m.node] for m in view.members],
        "expelled": [[m.rank, m.incarnation, m.node] for m in view.expelled],
        "at_unix_ms": at.unix_ms,
    }
    found: list[Put | Delete] = [
        Put(view_key(group), view_bytes(view)),
        Put(f"{base}/history/{view.epoch:020d}", _json(history)),
    ]
    if view.epoch > _HISTORY_KEPT:
        found.append(Delete(f"{base}/history/{view.epoch - _HISTORY_KEPT:020d}"))
    return found


def load(items: Iterable[KeyValue], at: Moment) -> Loaded:
    """Read everything under `PREFIX`, now.

    Raises:
        StoreCorrupt: a key cannot be read; the message names it.
    """
    loaded = Loaded()
    groups: dict[str, dict[str, KeyValue]] = {}
    for item in items:
        kind, _, rest = item.key.removeprefix(PREFIX).partition("/")
        if kind == "nodes":
            endpoint = _read(item, _endpoint)
            loaded.nodes[endpoint.node] = endpoint
        elif kind == "past":
            loaded.past[rest] = _read(item, _past)
        elif kind == "groups":
            name, _, what = rest.partition("/")
            groups.setdefault(name, {})[what] = item
    for name, keys in groups.items():
        if "config" not in keys:
            if name in loaded.past:
                loaded.remains.add(name)
            continue  # else it was deleted by hand, in part
        config: GroupConfig = _read(keys["config"], _config)
        loaded.groups[name] = (config, _saved(config, keys, at))
        if "view" in keys:
            loaded.view_revisions[name] = keys["view"].mod_revision
    return loaded


def _saved(config: GroupConfig, keys: dict[str, KeyValue], at: Moment) -> Saved:
    view = adopted = policies = loads = None
    if "loads" in keys:
        loads = _read(keys["loads"], lambda value: _loads(config, value))
    if "policies" in keys:
        policies = _read(keys["policies"], lambda value: _policies(config, value))
    if "view" in keys:
        view = _read(keys["view"], lambda value: _view(config, value))
    if "adopted" in keys:
        adopted = _read(keys["adopted"], int)
    seats = [
        _read(item, lambda v: _seat(v, at))
        for key, item in keys.items()
        if key.startswith("members/")
    ]
    history = sorted(key for key in keys if key.startswith("history/"))[-HISTORY_LENGTH:]
    return Saved(
        view=view,
        adopted=min(adopted or 0, view.epoch) if view else 0,
        seats=tuple(sorted(seats, key=lambda seat: int(seat.rank))),
        history=tuple(
            _read(keys[key], lambda v: str(json.loads(v)["sentence"])) for key in history
        ),
        rebalance=_read(keys["rebalance"], _rebalance) if "rebalance" in keys else None,
        policies=policies,
        loads=loads,
    )


def _read(item: KeyValue, parse: Any) -> Any:
    try:
        return parse(item.value)
    except _UNREADABLE as error:
        raise StoreCorrupt(
            f"{item.key} cannot be read ({type(error).__name__}: {error}); restore it from a "
            "backup of the store, or delete it to give that state up"
        ) from error


def _endpoint(value: bytes) -> Endpoint:
    message = types_pb2.NodeEndpoint.FromString(value)
    return Endpoint(message.node, message.domain, message.grpc_address, message.fd_socket)


def _past(value: bytes) -> Past:
    plain = json.loads(value)
    return Past(int(plain["incarnation"]), int(plain["epoch"]))


def _config(value: bytes) -> GroupConfig:
    return GroupConfig.from_proto(types_pb2.GroupConfig.FromString(value))


def _view(config: GroupConfig, value: bytes) -> View:
    inflate = zlib.decompressobj()
    content = inflate.decompress(value, _MAX_VIEW_BYTES)
    return View.from_proto(config.geometry, types_pb2.View.FromString(content))


def _loads(config: GroupConfig, value: bytes) -> NDArray[np.int64]:
    shape = (config.geometry.layers, config.geometry.experts)
    content = zlib.decompressobj().decompress(value, shape[0] * shape[1] * 8 + 1)
    tokens = np.frombuffer(content, "<i8").astype(np.int64).reshape(shape)
    if int(tokens.min()) < 0:
        raise ValueError("a count is below 0")
    return tokens


def _known(plain: dict[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `like` has, too, and of those that are tables the same."""
    return {
        name: _known(value, like[name]) if isinstance(like[name], dict) else value
        for name, value in plain.items()
        if name in like
    }


def _policies(config: GroupConfig, value: bytes) -> Policies:
    known = _known(json.loads(value), Policies.of(config).to_dict())
    policies = Policies.from_dict(known, config)
    policies.apply(config)
    return policies


def _plain_seat(write: ev.SaveSeat, at: Moment) -> dict[str, Any]:
    plain = asdict(write)
    plain["ended_unix_ms"] = [at.unix_ms - at.now_ms + t for t in plain.pop("ended_ms")]
    return plain


def _seat(value: bytes, at: Moment) -> ev.SaveSeat:
    plain = json.loads(value)
    # Whatever the clocks of other hosts say, nothing ended in the future.
    ended = [min(at.now_ms, at.now_ms - at.unix_ms + t) for t in plain.pop("ended_unix_ms", ())]
    known = {f.name for f in fields(ev.SaveSeat)}
    return ev.SaveSeat(**_known(plain, dict.fromkeys(known)), ended_ms=tuple(ended))


def _rebalance(value: bytes) -> ev.SaveRebalance:
    plain = json.loads(value)
    placement = base64.b64decode(plain["placement"], validate=True)
    if placement:
        Placement.from_bytes(placement)
    held = bool(plain.get("held", False))  # older controllers did not write it
    return ev.SaveRebalance(str(plain["paused"]), str(plain["asked"]), placement, held)


def _json(plain: object) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
