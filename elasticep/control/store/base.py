"""What the control plane asks of a store: keys, transactions, leases, a level-triggered watch.

`MemoryStore` and `EtcdStore` do the same; one conformance suite runs on both. Every call has a
deadline and raises `Unavailable` when it passes. A write that raised `Unavailable` may or may not
have happened: whoever needs to know reads again.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from elasticep.errors import ElasticEPError

DEFAULT_DEADLINE_S = 5.0
MAX_VALUE_BYTES = 1_400_000  # etcd refuses requests above 1.5 MiB
MAX_OPERATIONS = 120  # etcd refuses transactions with more than 128


class LeaseLost(ElasticEPError):
    """The lease has expired or was revoked; its keys are gone."""

    reason = "LEASE_LOST"


class StoreRefused(ElasticEPError):
    """The store refused a request as invalid (too large, a lease that does not exist)."""

    reason = "STORE_REFUSED"


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key. Revisions are the store's: one counter for all keys, +1 per transaction."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys under a prefix at one revision, ascending by key."""

    revision: int
    items: tuple[KeyValue, ...]


@dataclass(frozen=True, slots=True)
class CreateRevision:
    """Compare: `key` was created at `revision` (0: it does not exist)."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class ModRevision:
    """Compare: `key` was last written at `revision` (0: it does not exist)."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write `key`; with a lease it goes when the lease does."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete `key`; deleting what is not there is no error."""

    key: str


Compare: TypeAlias = CreateRevision | ModRevision
Operation: TypeAlias = Put | Delete


@dataclass(frozen=True, slots=True)
class Committed:
    """Outcome of a transaction: whether all compares held, and the store's revision after it."""

    succeeded: bool
    revision: int


class Store(Protocol):
    """A store client. Deadlines are in seconds and bound the whole call."""

    async def get(self, key: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> KeyValue | None:
        """The key, or None. Linearizable."""

    async def list(self, prefix: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Snapshot:
        """All keys that begin with `prefix`, at one revision. Linearizable."""

    async def put(
        self, key: str, value: bytes, *, lease: int = 0, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> int:
        """Write one key; returns the revision."""

    async def transact(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Operation],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Committed:
        """Apply all operations if all compares hold, else nothing."""

    async def lease_grant(self, ttl_s: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        """A new lease; returns its id. The store may grant a longer time than asked."""

    async def lease_keepalive(self, lease: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> float:
        """Renew a lease; returns the seconds it now has. `LeaseLost` when it is gone."""

    async def lease_revoke(self, lease: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """End a lease and delete its keys; a lease that is gone already is no error."""

    def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[int, None]:
        """Tell that something under `prefix` changed after `after_revision`.

        Yields a revision at which the prefix should be listed again; several changes may be told
        as one, and a change may be told that turns out to be none. Nothing that happened after
        `after_revision` is missed: outages, restarts, cancelled watches and compaction of the
        history end in a notice, not in an error. Ends when it is closed or cancelled.
        """

    async def close(self) -> None:
        """End all watches and connections."""


def check_operations(operations: Sequence[Operation]) -> None:
    """Raise `StoreRefused` for a transaction that etcd would not take."""
    if len(operations) > MAX_OPERATIONS:
        raise StoreRefused(
            f"a transaction has {len(operations)} operations; at most {MAX_OPERATIONS} are allowed"
        )
    keys = [operation.key for operation in operations]
    if len(set(keys)) != len(keys):
        raise StoreRefused("a transaction names a key twice")
    size = sum(len(op.key) + len(op.value) for op in operations if isinstance(op, Put))
    if size > MAX_VALUE_BYTES:
        raise StoreRefused(
            f"a transaction of {size} bytes; the store takes {MAX_VALUE_BYTES}: a placement with "
            "fewer layers, ranks or slots is needed"
        )
