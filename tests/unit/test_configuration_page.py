"""docs/configuration.md against the code: every key, variable, flag and default, and no others."""

import dataclasses
import importlib
import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click
import pytest

import elasticep
from elasticep.balance import RebalancePolicy
from elasticep.config import (
    ClientConfig,
    ControllerConfig,
    DaemonConfig,
    GroupSeats,
    TlsConfig,
    load_config,
)
from elasticep.group import GroupConfig, Timeouts
from elasticep.weights import TensorSpec

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text()
SECTIONS: dict[str, Any] = {
    "controller": ControllerConfig,
    "daemon": DaemonConfig,
    "client": ClientConfig,
}
# A value of each key that differs from its default, as a variable says it, and what it becomes.
TLS = {"tls.cert": "/c.crt", "tls.key": "/c.key", "tls.ca": "/ca.crt"}
ETCD_TLS = {"etcd_cert": "/e.crt", "etcd_key": "/e.key", "etcd_ca": "/e-ca.crt"}
SAMPLES: dict[str, dict[str, tuple[str, Any]]] = {
    "controller": {
        "listen": ("127.0.0.1:1", "127.0.0.1:1"),
        "advertise": ("c-0.example:7400", "c-0.example:7400"),
        "metrics_port": ("9464", 9464),
        "metrics_host": ("0.0.0.0", "0.0.0.0"),
        "store": ("memory", "memory"),
        "etcd_endpoints": ("a:1,b:2", ("a:1", "b:2")),
        **{key: (path, path) for key, path in ETCD_TLS.items()},
        "lease_ttl_s": ("5", 5),
        "name": ("c-0", "c-0"),
        **{key: (path, path) for key, path in TLS.items()},
    },
    "daemon": {
        "node": ("gpu-a", "gpu-a"),
        "domain": ("rack-1", "rack-1"),
        "socket_dir": ("/run/other", "/run/other"),
        "listen": ("127.0.0.1:1", "127.0.0.1:1"),
        "controllers": ("127.0.0.1:1,127.0.0.1:2", ("127.0.0.1:1", "127.0.0.1:2")),
        "seats": ("g:0-2;h:5", (GroupSeats("g", (0, 1, 2)), GroupSeats("h", (5,)))),
        "devices": ("0,2", (0, 2)),
        "load_interval_ms": ("250", 250),
        "checkpoint": ("g=/m/g,/m/rest", ("g=/m/g", "/m/rest")),
        "backup_bytes": ("1073741824", 1 << 30),
        "weights_rate": ("250000000", 250_000_000),
        "fault_injection": ("true", True),
        "metrics_port": ("9465", 9465),
        "metrics_host": ("0.0.0.0", "0.0.0.0"),
        **{key: (path, path) for key, path in TLS.items()},
    },
    "client": {
        "socket": ("/run/other/daemon.sock", "/run/other/daemon.sock"),
        "group": ("decode-0", "decode-0"),
        "rank": ("3", 3),
    },
}
# Between processes of ours, or of the build; nobody sets them by hand.
INTERNAL = {
    "ELASTICEP_TICKET",
    "ELASTICEP_ORPHAN_AFTER_MS",
    "ELASTICEP_LIBRARY_DIR",
    "ELASTICEP_BENCH_RANKS",
    "ELASTICEP_MOVER_TLS",
    # What the GPU's acceptance tells the tests and the build that it runs: see docs/cuda.md.
    "ELASTICEP_CUDA",
    "ELASTICEP_GPU_CLIENT_KILLS",
    "ELASTICEP_GPU_EXCHANGES",
    "ELASTICEP_GPU_KILLS",
    "ELASTICEP_GPU_KILLS_JSON",
    "ELASTICEP_GPU_OUT",
    "ELASTICEP_GPU_PATIENCE",
    "ELASTICEP_GPU_SEED",
    "ELASTICEP_GPUS",
    "ELASTICEP_REQUIRE_GPU",
}


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the first table below a heading, by their first cell, without backticks."""
    _, found, rest = PAGE.partition(f"\n{heading}")
    assert found, f"the page has no heading {heading!r}"
    rows: dict[str, list[str]] = {}
    for line in re.split(r"\n#", rest)[0].splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            rows[cells[0].strip("`")] = cells[1:]
    return rows


def section_table(section: str) -> dict[str, list[str]]:
    return table(f"## `[{section}]`")


def keys_of(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    keys: dict[str, dataclasses.Field[Any]] = {}
    for item in fields(kind):
        if item.name == "tls":
            keys.update({f"tls.{part.name}": part for part in fields(TlsConfig)})
        else:
            keys[item.name] = item
    return keys


def check_default(key: str, cell: str, item: dataclasses.Field[Any]) -> None:
    if item.default is MISSING:
        what = "required" if item.default_factory is MISSING else cell
        assert cell == what, f"{key}: the page says {cell}, the code has no default"
        return
    if item.default is None:
        assert cell == "none", f"{key}: the page says {cell}, the code has none"
        return
    value = tomllib.loads(f"value = {cell.strip('`')}")["value"]
    plain = list(item.default) if isinstance(item.default, tuple) else item.default
    assert value == plain, f"{key}: the page says {cell}, the code {item.default!r}"


@pytest.mark.parametrize("section", SECTIONS)
def test_page_has_exactly_the_keys_and_defaults_of_a_section(section: str) -> None:
    rows, keys = section_table(section), keys_of(SECTIONS[section])
    assert list(rows) == list(keys)
    for key, (_, _, default, _) in rows.items():
        check_default(key, default, keys[key])


@pytest.mark.parametrize(
    ("section", "key"), [(section, key) for section in SECTIONS for key in SAMPLES[section]]
)
def test_each_variable_of_the_page_sets_its_key(section: str, key: str) -> None:
    variable = section_table(section)[key][0].strip("`")
    environment = {}
    if section == "controller" and key != "store":  # etcd, the default, needs its addresses
        environment = {"ELASTICEP_CONTROLLER_ETCD_ENDPOINTS": "e:2379"}
    for together in (TLS, ETCD_TLS):  # all three, or none
        if key in together:
            for name, path in together.items():
                environment[section_table(section)[name][0].strip("`")] = path
    text, expected = SAMPLES[section][key]
    config = load_config(SECTIONS[section], env={**environment, variable: text})
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    assert value == expected


def test_every_key_has_a_sample_here() -> None:
    for section, kind in SECTIONS.items():
        assert list(SAMPLES[section]) == list(keys_of(kind))


@pytest.mark.parametrize("section", ["controller", "daemon"])
def test_page_has_exactly_the_flags_of_a_command(section: str) -> None:
    command = importlib.import_module(f"elasticep.cli.{section}").command
    flags = {
        name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
        if name.startswith("--")
    }
    documented = {row[1].strip("`") for row in section_table(section).values()}
    assert documented <= flags
    others = {
        flag
        for flag, (of, *_) in table("### Flags without a key").items()
        if of in ("both", section)
    }
    assert flags - documented == others


def test_page_has_the_keys_and_defaults_of_a_group() -> None:
    sections = {
        "## A group's file": fields(GroupConfig),
        "### `[geometry]`": fields(GroupConfig.__dataclass_fields__["geometry"].type),
        "### `[timeouts]`": fields(Timeouts),
        "### `[rebalance]`": fields(RebalancePolicy),
        "### `[weights.NAME]`": [item for item in fields(TensorSpec) if item.name != "name"],
    }
    for heading, items in sections.items():
        rows = table(heading)
        assert set(rows) == {item.name for item in items}, heading
        for item in items:
            check_default(item.name, rows[item.name][0], item)


def test_group_file_of_the_page_can_be_read() -> None:
    _, _, rest = PAGE.partition("## A group's file")
    example = rest.split("```toml\n")[1].split("```")[0]
    group = GroupConfig.from_toml_dict(tomllib.loads(example))
    assert (group.name, group.timeouts.node_timeout_ms) == ("decode-0", 2000)


def test_page_names_every_variable_that_the_package_reads() -> None:
    read = set()
    for path in Path(elasticep.__file__).parent.rglob("*.py"):
        read |= set(re.findall(r"[\"'](ELASTICEP_[A-Z_]*[A-Z])[\"']", path.read_text()))
    assert "ELASTICEP_CONFIG" in read
    assert read - INTERNAL - set(re.findall(r"`(ELASTICEP_[A-Z_]+)`", PAGE)) == set()
