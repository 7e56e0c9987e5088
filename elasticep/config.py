"""One typed config for every process: a TOML file, overridden by the environment, then by flags.

A file may hold the sections `[controller]`, `[daemon]` and `[client]`; each process reads its own.
The variable of `daemon.socket_dir` is `ELASTICEP_DAEMON_SOCKET_DIR`, that of `daemon.tls.cert`
`ELASTICEP_DAEMON_TLS_CERT`; the client's three are `ELASTICEP_SOCKET`, `ELASTICEP_GROUP` and
`ELASTICEP_RANK`. `ELASTICEP_CONFIG` names the file when no flag does. Unknown keys are refused with
the nearest known name, and so is TCP without mutual TLS beyond the loopback interface.
"""

import difflib
import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from elasticep import parsers
from elasticep.errors import ConfigError
from elasticep.tls import check_pem

CONFIG_VARIABLE = "ELASTICEP_CONFIG"
MAX_SEAT_RANK = 65_535
MAX_SEATS = 63  # of one daemon: two locks of each, in one futex_waitv, which takes 128
_MAX_SOCKET_PATH_BYTES = 100  # sun_path holds 108 with its end; some is left for suffixes
# Kubernetes gives every pod such variables for a service named elasticep-controller.
_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_\w+)$")
_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
GROUP_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")


def refuse_unknown(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` for the first key that is not known, with the nearest that is."""
    names = sorted(known)
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(names)}"
            raise ConfigError(f"{where} has no setting {key!r}; {hint}")


@dataclass(frozen=True, slots=True)
class GroupSeats:
    """Ranks of one group that a node offers, ascending."""

    group: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.group}:{','.join(str(rank) for rank in self.ranks)}"


def parse_seats(value: Any) -> tuple[GroupSeats, ...]:
    """Read "group:0-3,6", several joined by ";" or as a list. `ValueError` says what is wanted."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(";") if part.strip()]
    wanted = 'seats such as "group:0-3,6"'
    if not isinstance(value, (list, tuple)):
        raise ValueError(wanted)
    taken: dict[str, set[int]] = {}
    for item in value:
        if isinstance(item, GroupSeats):
            item = str(item)
        group, _, ranges = item.partition(":") if isinstance(item, str) else ("", "", "")
        if not group or not ranges:
            raise ValueError(wanted)
        if not GROUP_NAME.fullmatch(group.strip()):
            raise ValueError(
                f"{wanted} ({group.strip()!r} is no group: lower case letters, digits, '.', '_' "
                "and '-', at most 63)"
            )
        ranks = taken.setdefault(group.strip(), set())
        for part in ranges.split(","):
            match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
            if not match:
                raise ValueError(f"{wanted} ({part.strip()!r} is no rank)")
            low, high = int(match[1]), int(match[2] or match[1])
            if not low <= high <= MAX_SEAT_RANK:
                raise ValueError(f"{wanted}, ascending and at most {MAX_SEAT_RANK}")
            if not ranks.isdisjoint(range(low, high + 1)):
                raise ValueError(f"{wanted} (rank {part.strip()} of {group} is given twice)")
            ranks.update(range(low, high + 1))
    return tuple(GroupSeats(group, tuple(sorted(ranks))) for group, ranks in taken.items())


# ---- addresses


def is_loopback(address: str, name: str = "") -> bool:
    """Whether "host:port", "[v6]:port" or "unix:..." stays on this host."""
    if address.startswith("unix:"):
        return True
    host = split_address(address, name)[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_address(address: str, name: str = "") -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port"; `ConfigError` with the setting's `name`."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9._-]+)):(\d{1,5})", address)
    if not match or int(match[3]) > 65_535:
        raise ConfigError(
            f"{name}{': ' if name else ''}{address!r} is no address; use host:port, [v6]:port or unix:///absolute/path"
        )
    return match[1] or match[2], int(match[3])


def check_socket_path(path: str) -> None:
    """Raise `ConfigError` when a Unix socket cannot have this path."""
    if not path.startswith("/") or len(path.encode()) > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path!r} must be absolute and at most {_MAX_SOCKET_PATH_BYTES} "
            "bytes; choose a shorter socket_dir"
        )


def default_socket_dir() -> str:
    """`$XDG_RUNTIME_DIR/elasticep` where there is one, else `/run/elasticep`."""
    return str(Path(os.environ.get("XDG_RUNTIME_DIR") or "/run") / "elasticep")


def host_boot_id() -> str:
    """The kernel's boot id: processes that share it can share memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        raise ConfigError(f"no boot id on this host ({error}); set daemon.domain") from None


# ---- sections


def _setting(parse: Callable[[Any], Any], **default: Any) -> Any:
    return field(metadata={"parse": parse}, **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Paths of PEM files for mutual TLS: all three, or none."""

    cert: str = _setting(parsers.text, default="")
    key: str = _setting(parsers.text, default="")
    ca: str = _setting(parsers.text, default="")

    def __post_init__(self) -> None:
        given = [bool(self.cert), bool(self.key), bool(self.ca)]
        if any(given) and not all(given):
            raise ConfigError("tls needs cert, key and ca together: TLS is always mutual here")

    @property
    def enabled(self) -> bool:
        """Whether mutual TLS is on."""
        return bool(self.cert)

    def read(self) -> tuple[bytes, bytes, bytes]:
        """The PEM contents of (key, cert, ca); `ConfigError` names the file that is of no use."""
        contents = []
        for path in (self.key, self.cert, self.ca):
            try:
                contents.append(Path(path).read_bytes())
            except OSError as error:
                raise ConfigError(f"cannot read the TLS file {path!r}: {error.strerror}") from None
        check_pem(self.cert, self.key, self.ca)
        return contents[0], contents[1], contents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Settings of `elasticep controller`.

    Attributes:
        listen: "host:port" (port 0: any free one) or "unix:///path".
        advertise: what nodes and standbys are told to dial; empty: the bound address.
        metrics_port: port of `/metrics`; 0: any free one, -1: none.
        metrics_host: interface of `/metrics`.
        store: "etcd", or "memory" (one controller, nothing survives it).
        etcd_endpoints: "host:port" of the etcd members.
        etcd_cert: PEM file of a certificate for mutual TLS towards etcd; empty: no TLS.
        etcd_key: PEM file of its key.
        etcd_ca: PEM file of the authorities that sign etcd's certificates.
        lease_ttl_s: how long a silent leader keeps the lead, seconds.
        name: this controller in logs and status; empty: host name and process id.
        tls: mutual TLS of the gRPC port.
    """

    listen: str = _setting(parsers.text, default="127.0.0.1:7400")
    advertise: str = _setting(parsers.text, default="")
    metrics_port: int = _setting(parsers.whole(-1, 65_535), default=-1)
    metrics_host: str = _setting(parsers.text, default="127.0.0.1")
    store: str = _setting(parsers.text, default="etcd")
    etcd_endpoints: tuple[str, ...] = _setting(parsers.texts, default=())
    etcd_cert: str = _setting(parsers.text, default="")
    etcd_key: str = _setting(parsers.text, default="")
    etcd_ca: str = _setting(parsers.text, default="")
    lease_ttl_s: int = _setting(parsers.whole(1, 60), default=2)
    name: str = _setting(parsers.text, default="")
    tls: TlsConfig = field(default_factory=TlsConfig)

    def __post_init__(self) -> None:
        _check_listen("controller", self.listen, self.tls)
        if self.store not in ("etcd", "memory"):
            raise ConfigError(f'controller.store is {self.store!r}; use "etcd" or "memory"')
        if self.store == "etcd" and not self.etcd_endpoints:
            raise ConfigError(
                "controller.etcd_endpoints is empty; name the etcd members, or set "
                'controller.store = "memory" for a trial that need not survive a restart'
            )
        if self.store == "memory" and self.etcd_endpoints:
            raise ConfigError('controller.etcd_endpoints means nothing with store = "memory"')
        for endpoint in self.etcd_endpoints:
            split_address(endpoint, "controller.etcd_endpoints")
        if len({bool(self.etcd_cert), bool(self.etcd_key), bool(self.etcd_ca)}) > 1:
            raise ConfigError("controller.etcd_cert, .etcd_key, .etcd_ca: give all three, or none")
        if self.advertise and not self.advertise.startswith("unix:"):
            split_address(self.advertise, "controller.advertise")

    @property
    def etcd_tls(self) -> TlsConfig:
        """Mutual TLS towards etcd."""
        return TlsConfig(cert=self.etcd_cert, key=self.etcd_key, ca=self.etcd_ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """Settings of `elasticep daemon`.

    Attributes:
        node: this node's name; unique in the cluster.
        domain: nodes of one domain map each other's memory; default: the host's boot id.
        socket_dir: where the daemon's two Unix sockets lie.
        listen: TCP address for other daemons; empty: Unix socket only.
        controllers: addresses of all controllers, leader or not.
        seats: ranks offered, as "group:0-3,6".
        devices: CUDA devices, which a group's seats here take in turn; none: 0, 1, ...
        load_interval_ms: how often the load of experts is reported; 0: never.
        checkpoint: where expert weights are loaded from: a path, or "group=path" for one group.
        backup_bytes: host memory for experts that live on other nodes, per group; 0: none.
        weights_rate: bytes of weights per second that are moved at most while nobody waits for
            them; 0: no limit.
        fault_injection: whether `InjectFault` is served.
        metrics_port: port of `/metrics`; 0: any free one, -1: none.
        metrics_host: interface of `/metrics`.
        tls: mutual TLS, for the TCP port and towards the controllers.
    """

    node: str = _setting(parsers.text, default_factory=socket.gethostname)
    domain: str = _setting(parsers.text, default_factory=host_boot_id)
    socket_dir: str = _setting(parsers.text, default_factory=default_socket_dir)
    listen: str = _setting(parsers.text, default="")
    controllers: tuple[str, ...] = _setting(parsers.texts, default=())
    seats: tuple[GroupSeats, ...] = _setting(parse_seats, default=())
    devices: tuple[int, ...] = _setting(parsers.devices, default=())
    load_interval_ms: int = _setting(parsers.whole(0, 3_600_000), default=1_000)
    checkpoint: tuple[str, ...] = _setting(parsers.texts, default=())
    backup_bytes: int = _setting(parsers.whole(0, 1 << 50), default=0)
    weights_rate: int = _setting(parsers.whole(0, 1 << 50), default=0)
    fault_injection: bool = _setting(parsers.yes_no, default=False)
    metrics_port: int = _setting(parsers.whole(-1, 65_535), default=-1)
    metrics_host: str = _setting(parsers.text, default="127.0.0.1")
    tls: TlsConfig = field(default_factory=TlsConfig)

    def __post_init__(self) -> None:
        if not _NODE.fullmatch(self.node):
            raise ConfigError(
                f"daemon.node is {self.node!r}; use letters, digits, '.', '_' and '-'"
            )
        if not 1 <= len(self.domain) <= 253:
            raise ConfigError("daemon.domain must have 1 to 253 characters")
        offered = sum(len(seats.ranks) for seats in self.seats)
        if offered > MAX_SEATS:
            raise ConfigError(
                f"daemon.seats names {offered} seats; one daemon watches at most {MAX_SEATS}, so "
                "offer the others by another daemon, with a node name and a socket_dir of its own"
            )
        check_socket_path(self.grpc_socket)
        if self.listen:
            _check_listen("daemon", self.listen, self.tls)
        for address in self.controllers:
            _check_dial("daemon.controllers", address, self.tls)

    def checkpoint_of(self, group: str) -> str:
        """Path of a group's checkpoint, "" if there is none."""
        named = dict(item.split("=", 1) for item in self.checkpoint if "=" in item)
        return named.get(group, next((item for item in self.checkpoint if "=" not in item), ""))

    @property
    def grpc_socket(self) -> str:
        """Path of the Unix socket that engines call."""
        return str(Path(self.socket_dir) / "daemon.sock")

    @property
    def fd_socket(self) -> str:
        """Path of the SEQPACKET socket that passes file descriptors."""
        return str(Path(self.socket_dir) / "daemon.fd")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """What an engine needs to find its rank.

    Attributes:
        socket: path of the daemon's Unix socket.
        group: the group's name; empty: the caller must say.
        rank: the seat; -1: the caller must say.
    """

    socket: str = _setting(
        parsers.text, default_factory=lambda: str(Path(default_socket_dir()) / "daemon.sock")
    )
    group: str = _setting(parsers.text, default="")
    rank: int = _setting(parsers.whole(-1, MAX_SEAT_RANK), default=-1)

    def __post_init__(self) -> None:
        check_socket_path(self.socket)


def _check_listen(section: str, address: str, tls: TlsConfig) -> None:
    if address.startswith("unix:"):
        check_socket_path(address.removeprefix("unix:").removeprefix("//"))
        return
    if not is_loopback(address, f"{section}.listen") and not tls.enabled:
        raise ConfigError(
            f"{section}.listen is {address!r} without TLS; set {section}.tls.cert, .key and .ca, "
            "or listen on 127.0.0.1 or a Unix socket"
        )


def _check_dial(where: str, address: str, tls: TlsConfig) -> None:
    if not is_loopback(address, where) and not tls.enabled:
        raise ConfigError(
            f"{where} names {address!r} beyond this host without TLS; set tls.cert, .key and .ca"
        )


# ---- loading

Config = TypeVar("Config", ControllerConfig, DaemonConfig, ClientConfig)
_SECTIONS: dict[str, type] = {
    "controller": ControllerConfig,
    "daemon": DaemonConfig,
    "client": ClientConfig,
}


def load_config(
    kind: type[Config],
    *,
    file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """Build a section's config: file, then environment, then flags (those that are not None).

    Args:
        kind: `ControllerConfig`, `DaemonConfig` or `ClientConfig`.
        file: TOML file; None: the one that `ELASTICEP_CONFIG` names, if any.
        env: the environment; None: this process's.
        flags: field names (`tls_cert` for a TLS path) to values; None means "not given".

    Raises:
        ConfigError: the file cannot be read, a key is unknown, a value cannot be used.
    """
    env = os.environ if env is None else env
    section = next(name for name, section_kind in _SECTIONS.items() if section_kind is kind)
    path = file if file is not None else env.get(CONFIG_VARIABLE)
    values = _from_file(Path(path), section) if path else {}
    values.update(_from_env(kind, section, env))
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    refuse_unknown("the command line", given, _parsers(kind))
    # Engines give arguments to `attach`; the processes are given flags.
    form = "{}" if section == "client" else "--{}"
    values.update(
        {name: (form.format(name.replace("_", "-")), value) for name, value in given.items()}
    )
    parsed: dict[str, Any] = {}
    tls: dict[str, Any] = {}
    parsers = _parsers(kind)
    for name, (source, value) in values.items():
        try:
            result = parsers[name](value)
        except ValueError as error:
            raise ConfigError(f"{source} is {value!r}; it must be {error}") from None
        if name.startswith("tls_"):
            tls[name.removeprefix("tls_")] = result
        else:
            parsed[name] = result
    if tls:
        parsed["tls"] = TlsConfig(**tls)
    return kind(**parsed)


def _parsers(kind: type) -> dict[str, Callable[[Any], Any]]:
    found: dict[str, Callable[[Any], Any]] = {}
    for item in fields(kind):
        if item.name == "tls":
            found.update({f"tls_{f.name}": f.metadata["parse"] for f in fields(TlsConfig)})
        else:
            found[item.name] = item.metadata["parse"]
    return found


def _from_file(path: Path, section: str) -> dict[str, tuple[str, Any]]:
    try:
        with path.open("rb") as stream:
            content = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} is not TOML: {error}") from None
    refuse_unknown(f"{path}", content, _SECTIONS)
    values: dict[str, tuple[str, Any]] = {}
    for name, table in content.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table, [{name}]")
        known = [f.name for f in fields(_SECTIONS[name])]
        refuse_unknown(f"[{name}] in {path}", table, known)
        tls = table.get("tls", {})
        if not isinstance(tls, dict):
            raise ConfigError(f"{path}: tls must be a table, [{name}.tls]")
        refuse_unknown(f"[{name}.tls] in {path}", tls, [f.name for f in fields(TlsConfig)])
        if name == section:
            values = {k: (f"{name}.{k} in {path}", v) for k, v in table.items() if k != "tls"}
            values |= {f"tls_{k}": (f"{name}.tls.{k} in {path}", v) for k, v in tls.items()}
    return values


def _from_env(kind: type, section: str, env: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    names = _parsers(kind)
    # The client's three names are short, as engines set them by hand; they share their prefix
    # with everything else, so a misspelt one cannot be told from another program's variable.
    prefix = "ELASTICEP_" if section == "client" else f"ELASTICEP_{section.upper()}_"
    known = {f"{prefix}{name.upper()}": name for name in names}
    if section != "client":
        given = [
            key
            for key in env
            if key.startswith(prefix) and key not in known and not _KUBERNETES.search(key)
        ]
        refuse_unknown("the environment", given, known)
    return {name: (key, env[key]) for key, name in known.items() if key in env}
