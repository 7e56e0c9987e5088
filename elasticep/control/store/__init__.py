"""The control plane's store: one protocol, etcd behind it in service and memory in tests.

`EtcdStore` lives in `elasticep.control.store.etcd` and is imported only where it is used.
"""

from elasticep.control.store.base import (
    Committed,
    CreateRevision,
    Delete,
    KeyValue,
    LeaseLost,
    ModRevision,
    Put,
    Snapshot,
    Store,
    StoreRefused,
)
from elasticep.control.store.memory import MemoryBackend, MemoryStore

__all__ = [
    "Committed",
    "CreateRevision",
    "Delete",
    "KeyValue",
    "LeaseLost",
    "MemoryBackend",
    "MemoryStore",
    "ModRevision",
    "Put",
    "Snapshot",
    "Store",
    "StoreRefused",
]
