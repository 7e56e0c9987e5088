"""Makes etcd3 0.12.0 importable on protobuf >= 4, unmodified.

Its generated modules build descriptors in a way that protobuf refuses since version 4, but the
schemas inside them are sound. So the serialized schemas are read out of those files (they are not
executed), put into a private descriptor pool, and modules with classes made from them take the
places of the originals before `etcd3` is imported.
"""

import ast
import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

from elasticep.errors import ConfigError

_PACKAGE = "etcd3.etcdrpc"
_FILES = ("kv_pb2", "auth_pb2", "rpc_pb2")  # dependencies first
_SCHEMA = re.compile(r"serialized_pb=_b\(('(?:[^'\\]|\\.)*')\)")


def load() -> tuple[Any, Any]:
    """The modules `rpc_pb2` (messages) and `rpc_pb2_grpc` (stubs) of etcd3.

    Raises:
        ConfigError: etcd3 is not installed, or its files are not those of 0.12.0.
    """
    if f"{_PACKAGE}.rpc_pb2" not in sys.modules:
        _install(_folder())
    stubs = importlib.import_module(f"{_PACKAGE}.rpc_pb2_grpc")
    return sys.modules[f"{_PACKAGE}.rpc_pb2"], stubs


def _folder() -> Path:
    spec = importlib.util.find_spec("etcd3")  # finds it without importing it
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the package etcd3 is not installed; pip install etcd3==0.12.0")
    return Path(spec.submodule_search_locations[0]) / "etcdrpc"


def _install(folder: Path) -> None:
    pool = descriptor_pool.DescriptorPool()
    for name in _FILES:
        path = folder / f"{name}.py"
        found = _SCHEMA.search(path.read_text()) if path.is_file() else None
        if found is None:
            raise ConfigError(f"{path} holds no schema; elasticep works with etcd3 0.12.0")
        serialized = ast.literal_eval(found[1]).encode("latin1")
        file = descriptor_pb2.FileDescriptorProto.FromString(serialized)
        pool.Add(file)
        module = types.ModuleType(f"{_PACKAGE}.{name}")
        descriptor = pool.FindFileByName(file.name)
        for message, kind in descriptor.message_types_by_name.items():
            setattr(module, message, message_factory.GetMessageClass(kind))
        for enum, values in descriptor.enum_types_by_name.items():
            setattr(module, enum, enum_type_wrapper.EnumTypeWrapper(values))
            for value in values.values:
                setattr(module, value.name, value.number)
        module.DESCRIPTOR = descriptor  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
