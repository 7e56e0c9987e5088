"""Config of processes and groups: where values come from, what is refused and in which words."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticep.config import (
    ClientConfig,
    ControllerConfig,
    DaemonConfig,
    GroupSeats,
    TlsConfig,
    is_loopback,
    load_config,
    parse_seats,
    split_address,
)
from elasticep.errors import ConfigError, ElasticEPError, GroupMismatch
from elasticep.geometry import GroupGeometry
from elasticep.group import Completion, GroupConfig, Launch, LostExperts, Timeouts
from elasticep.proto import types_pb2
from elasticep.spec import ExchangeSpec
from elasticep.testing.membership import group_config

CONTROLLER = '[controller]\netcd_endpoints = ["127.0.0.1:2379"]\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "elasticep.toml"
    path.write_text(text)
    return path


# ---- where values come from


def test_flags_go_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, CONTROLLER + 'name = "file"\nlease_ttl_s = 3\nmetrics_port = 1\n')
    env = {"ELASTICEP_CONTROLLER_NAME": "env", "ELASTICEP_CONTROLLER_LEASE_TTL_S": "4"}
    flags = {"name": "flag", "metrics_port": None, "metrics_host": None}
    config = load_config(ControllerConfig, file=path, env=env, flags=flags)
    assert (config.name, config.lease_ttl_s, config.metrics_port) == ("flag", 4, 1)
    assert config.etcd_endpoints == ("127.0.0.1:2379",)
    assert config.listen == "127.0.0.1:7400"


def test_a_variable_names_the_file_when_no_flag_does(tmp_path: Path) -> None:
    path = write(tmp_path, CONTROLLER + 'name = "file"\n')
    config = load_config(ControllerConfig, env={"ELASTICEP_CONFIG": str(path)})
    assert config.name == "file"


def test_each_process_reads_its_own_section(tmp_path: Path) -> None:
    text = '[daemon]\nnode = "n1"\nseats = ["g:0-2,5", "h:1"]\n[client]\ngroup = "g"\nrank = 3\n'
    path = write(tmp_path, CONTROLLER + text)
    daemon = load_config(DaemonConfig, file=path, env={})
    assert daemon.node == "n1"
    assert daemon.seats == (GroupSeats("g", (0, 1, 2, 5)), GroupSeats("h", (1,)))
    assert daemon.domain == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    client = load_config(ClientConfig, file=path, env={"ELASTICEP_RANK": "4"})
    assert (client.group, client.rank) == ("g", 4)


def test_every_kind_of_value_can_come_from_the_environment(tmp_path: Path) -> None:
    env = {
        "ELASTICEP_DAEMON_NODE": "n",
        "ELASTICEP_DAEMON_SOCKET_DIR": str(tmp_path),
        "ELASTICEP_DAEMON_SEATS": "g:0-1;h:7",
        "ELASTICEP_DAEMON_CONTROLLERS": "127.0.0.1:1, 127.0.0.1:2",
        "ELASTICEP_DAEMON_FAULT_INJECTION": "yes",
        "ELASTICEP_DAEMON_METRICS_PORT": "0",
        "ELASTICEP_DAEMON_TLS_CERT": "c",
        "ELASTICEP_DAEMON_TLS_KEY": "k",
        "ELASTICEP_DAEMON_TLS_CA": "a",
    }
    config = load_config(DaemonConfig, env=env)
    assert config.controllers == ("127.0.0.1:1", "127.0.0.1:2")
    assert config.fault_injection is True
    assert config.metrics_port == 0
    assert config.tls == TlsConfig(cert="c", key="k", ca="a")
    assert config.grpc_socket == f"{tmp_path}/daemon.sock"
    assert [str(seats) for seats in config.seats] == ["g:0,1", "h:7"]


def test_a_rank_may_be_a_whole_number_of_numpy() -> None:
    config = load_config(ClientConfig, env={}, flags={"rank": np.int64(3)})
    assert (config.rank, type(config.rank)) == (3, int)
    for wrong in (np.float64(3), True, "3.0"):
        with pytest.raises(ConfigError, match=r"^rank is .*; it must be a whole number"):
            load_config(ClientConfig, env={}, flags={"rank": wrong})


def test_kubernetes_service_variables_are_no_settings_of_ours() -> None:
    env = {
        "ELASTICEP_CONTROLLER_ETCD_ENDPOINTS": "127.0.0.1:1",
        "ELASTICEP_CONTROLLER_SERVICE_HOST": "10.0.0.1",
        "ELASTICEP_CONTROLLER_SERVICE_PORT_GRPC": "7400",
        "ELASTICEP_CONTROLLER_PORT": "tcp://10.0.0.1:7400",
        "ELASTICEP_CONTROLLER_PORT_7400_TCP_ADDR": "10.0.0.1",
        "ELASTICEP_CONTROLLER_METRICS_PORT": "9",
    }
    assert load_config(ControllerConfig, env=env).metrics_port == 9


# ---- what is refused


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[controler]\n", "has no setting 'controler'; did you mean 'controller'?"),
        (CONTROLLER + 'lisen = "x"\n', "[controller] in .* no setting 'lisen'; did .*'listen'"),
        (CONTROLLER + '[daemon]\nnod = "x"\n', "no setting 'nod'; did you mean 'node'?"),
        (CONTROLLER + '[controller.tls]\ncerts = "x"\n', "no setting 'certs'; did .*'cert'"),
        ("controller = 3\n", r"controller must be a table, \[controller\]"),
        (CONTROLLER + "lease_ttl_s = 0\n", "lease_ttl_s in .* is 0; .* from 1 to 60"),
        (CONTROLLER + "lease_ttl_s = true\n", "is True; it must be a whole number"),
        (CONTROLLER + "name = 3\n", "controller.name in .* is 3; it must be a string"),
        (CONTROLLER + 'store = "disk"\n', 'use "etcd" or "memory"'),
        (CONTROLLER + 'store = "memory"\n', "means nothing with store"),
        ("[controller]\n", "etcd_endpoints is empty; name the etcd members"),
        (CONTROLLER + 'listen = "7400"\n', "controller.listen: '7400' is no address"),
        (CONTROLLER + 'advertise = "c1"\n', "controller.advertise: 'c1' is no address"),
        (CONTROLLER + 'listen = "unix:///' + "x" * 120 + '"\n', "at most 100 bytes"),
        (CONTROLLER + '[controller.tls]\ncert = "c"\n', "cert, key and ca together"),
        ("= 3", "is not TOML"),
    ],
)
def test_a_bad_file_is_refused_with_the_place_and_the_remedy(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said.replace("[controller] in", r"\[controller\] in")):
        load_config(ControllerConfig, file=write(tmp_path, text), env={})


def test_an_unknown_variable_or_flag_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"LISTN.*did you mean 'ELASTICEP_CONTROLLER_LISTEN'"):
        load_config(ControllerConfig, env={"ELASTICEP_CONTROLLER_LISTN": "x"})
    with pytest.raises(ConfigError, match="'nam'; did you mean 'name'"):
        load_config(ControllerConfig, env={}, flags={"nam": "x"})
    with pytest.raises(ConfigError, match=r"cannot read the config file .*No such file"):
        load_config(ControllerConfig, file=tmp_path / "none", env={})
    with pytest.raises(ConfigError, match="ELASTICEP_CONTROLLER_LEASE_TTL_S is 'x'"):
        load_config(ControllerConfig, env={"ELASTICEP_CONTROLLER_LEASE_TTL_S": "x"})


def test_tcp_beyond_this_host_needs_mutual_tls() -> None:
    tls = TlsConfig(cert="c", key="k", ca="a")
    endpoints = ("127.0.0.1:1",)
    for listen in ("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1"):
        with pytest.raises(ConfigError, match=r"without TLS; set controller\.tls\.cert"):
            ControllerConfig(listen=listen, etcd_endpoints=endpoints)
        ControllerConfig(listen=listen, etcd_endpoints=endpoints, tls=tls)
        with pytest.raises(ConfigError, match="without TLS"):
            DaemonConfig(listen=listen)
        with pytest.raises(ConfigError, match=r"daemon\.controllers names .* without TLS"):
            DaemonConfig(controllers=(listen,))
    for listen in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:///tmp/s"):
        ControllerConfig(listen=listen, etcd_endpoints=endpoints)


def test_addresses() -> None:
    assert split_address("[::1]:7") == ("::1", 7)
    assert split_address("a.b-c:65535") == ("a.b-c", 65535)
    assert not is_loopback("128.0.0.1:1")
    for bad in ("", "host", "host:", ":1", "host:99999", "ho st:1", "::1:1"):
        with pytest.raises(ConfigError, match="is no address"):
            split_address(bad)


@pytest.mark.parametrize(
    "text",
    ["", "g", "g:", ":1", "g:a", "g:2-1", "g:0,0", "g:0;g:0", "g:99999", "g:-1", 7, "A b:0"],
)
def test_seats_that_make_no_sense(text: object) -> None:
    if text == "":
        assert parse_seats(text) == ()
        return
    with pytest.raises(ValueError, match="seats such as"):
        parse_seats(text)


def test_a_tls_file_that_is_absent_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot read the TLS file '/none': No such file"):
        TlsConfig(cert="c", key="/none", ca="a").read()


def test_a_daemon_takes_no_more_seats_than_it_can_watch() -> None:
    assert len(DaemonConfig(seats=parse_seats("g:0-62")).seats[0].ranks) == 63
    with pytest.raises(ConfigError, match=r"names 64 seats; one daemon watches at most 63"):
        DaemonConfig(seats=parse_seats("g:0-61;h:0-1"))


def test_tls_files_that_are_of_no_use_are_named(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    for name in ("a", "b"):
        command = ("openssl", "req", "-x509", "-nodes", "-subj", f"/CN={name}", "-newkey", "ec")
        out = ("-keyout", str(tmp_path / f"{name}.key"), "-out", str(tmp_path / f"{name}.crt"))
        curve = ("-pkeyopt", "ec_paramgen_curve:prime256v1")
        subprocess.run([*command, *curve, *out], check=True, capture_output=True)
    locked = ("openssl", "ec", "-aes256", "-passout", "pass:word", "-in", str(tmp_path / "a.key"))
    subprocess.run([*locked, "-out", str(tmp_path / "l.key")], check=True, capture_output=True)
    (tmp_path / "junk").write_bytes(bytes(range(256)))
    good = TlsConfig(**{k: str(tmp_path / f"a.{e}") for k, e in (("cert", "crt"), ("key", "key"))},
                     ca=str(tmp_path / "b.crt"))  # fmt: skip
    assert good.read()[1].startswith(b"-----BEGIN CERTIFICATE")
    for part, file, said in (
        ("key", "b.key", r"certificate '.*a\.crt' with the key '.*b\.key' cannot be used"),
        ("key", "l.key", r"key must not be encrypted"),
        ("cert", "junk", r"certificate '.*junk' .* must be PEM"),
        ("ca", "junk", r"authorities in '.*junk' cannot be used"),
    ):
        with pytest.raises(ConfigError, match=said):
            replace(good, **{part: str(tmp_path / file)}).read()


# ---- groups


def toml(**changes: object) -> dict[str, object]:
    plain = group_config().to_dict()
    plain["exchanges"] = {"decode": {"preset": "ROUTED"}, "prefill": {"preset": "ALLGATHER"}}
    return {**plain, **changes}


def test_a_group_survives_both_forms() -> None:
    config = GroupConfig.from_toml_dict(
        toml(
            lost_experts="serve",
            launch="inline",
            flap_limit=0,
            manual_readmission=True,
            timeouts={"hang_timeout_ms": 7_000},
        )
    )
    assert config.lost_experts is LostExperts.SERVE
    assert config.launch is Launch.INLINE
    assert config.timeouts == Timeouts(hang_timeout_ms=7_000)
    assert GroupConfig.from_proto(config.to_proto()) == config
    wire = types_pb2.GroupConfig.FromString(config.to_proto().SerializeToString())
    assert GroupConfig.from_proto(wire).digest() == config.digest()
    assert [name for name, _ in config.exchanges] == ["decode", "prefill"]


def test_defaults_of_a_message_are_those_of_the_class() -> None:
    message = group_config().to_proto()
    for name in ("timeouts", "lost_experts", "launch", "min_ranks", "flap_limit"):
        message.ClearField(name)
    assert GroupConfig.from_proto(message) == group_config()
    message.launch = 77  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="number 77, which this version does not know"):
        GroupConfig.from_proto(message)


def test_the_digest_sees_every_field_and_the_order_of_exchanges() -> None:
    base = GroupConfig.from_toml_dict(toml())
    changes: list[dict[str, object]] = [
        {"name": "h"},
        {"initial_ranks": 3},
        {"min_ranks": 2},
        {"spare_copies": 0},
        {"flap_limit": 9},
        {"manual_readmission": True},
        {"lost_experts": "serve"},
        {"launch": "inline"},
        {"timeouts": {"step_timeout_ms": 1}},
        {"geometry": {**base.to_dict()["geometry"], "topk": 3}},
        {"exchanges": {"prefill": {"preset": "ALLGATHER"}, "decode": {"preset": "ROUTED"}}},
    ]
    others = [GroupConfig.from_toml_dict(toml(**change)) for change in changes]
    assert len({config.digest() for config in (base, *others)}) == len(others) + 1
    for other in others[1:]:
        with pytest.raises(GroupMismatch, match="exists with another config"):
            base.require_same(other)
    with pytest.raises(GroupMismatch, match="the order of the exchanges"):
        base.require_same(others[-1])
    base.require_same(GroupConfig.from_toml_dict(toml()))


def test_a_group_of_one_rank_has_no_spare_copies_unless_somebody_asks_for_them() -> None:
    sizes = {**GroupConfig.from_toml_dict(toml()).to_dict()["geometry"], "slots_per_rank": 8}
    one = toml(initial_ranks=1, min_ranks=1, geometry={**sizes, "max_ranks": 1})
    del one["spare_copies"]
    config = GroupConfig.from_toml_dict(one)
    assert config.spare_copies == 0
    assert type(config.spare_copies) is int
    assert GroupConfig.from_proto(config.to_proto()) == config
    config.require_same(GroupConfig.from_toml_dict({**one, "spare_copies": 0}))
    with pytest.raises(ConfigError, match="spare_copies is 1; it must be 0 to 0"):
        GroupConfig.from_toml_dict({**one, "spare_copies": 1})
    two = GroupConfig.from_toml_dict({**one, "geometry": {**sizes, "max_ranks": 2}})
    assert (two.spare_copies, type(two.spare_copies)) == (1, int)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "Bad Name"}, "the group's name is 'Bad Name'"),
        ({"initial_ranks": 5}, r"initial_ranks is 5; it must be 1 to 4 \(geometry.max_ranks\)"),
        ({"initial_ranks": True}, "initial_ranks is True"),
        ({"min_ranks": 5}, r"min_ranks is 5; it must be 1 to 4 \(initial_ranks\)"),
        ({"initial_ranks": 1}, "hold 4 experts of 8; raise initial_ranks"),
        ({"spare_copies": 4}, "spare_copies is 4"),
        ({"flap_limit": -1}, "flap_limit is -1"),
        ({"manual_readmission": 1}, "must be true or false"),
        ({"lost_experts": "ignore"}, "use one of refuse, serve"),
        ({"exchanges": {}}, "has 0 exchanges"),
        ({"exchanges": {"Bad!": {"preset": "ROUTED"}}}, "an exchange of group 'g' is 'Bad!'"),
        ({"exchanges": {"a": 3}}, "a is 3 in the group file; it must be a table"),
        ({"exchanges": {"a": {"preset": ["ROUTED"]}}}, r"exchange 'a': .* no preset \['ROUTED'\]"),
        ({"exchanges": {"a": {"prest": "ROUTED"}}}, "exchange 'a': an exchange has no setting"),
        ({"exchanges": {"a": {"preset": "NONE"}}}, "NONE"),
        ({"timeouts": {"hang": 3}}, r"\[timeouts\] has no setting 'hang'"),
        ({"timeouts": {"hang_timeout_ms": 100}}, "must be above suspect_after_ms"),
        ({"timeouts": {"node_timeout_ms": 0}}, "node_timeout_ms is 0; it must be 1"),
        ({"timeouts": {"node_timeout_ms": 50}}, "below 100 a busy node"),
        ({"geometry": {"layers": 1}}, "needs whole numbers for experts, topk"),
        ({"initial_rank": 4}, "no setting 'initial_rank'; did you mean 'initial_ranks'?"),
    ],
)
def test_a_group_that_cannot_be_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ElasticEPError, match=said):
        GroupConfig.from_toml_dict(toml(**change))


def test_an_engine_may_write_words_and_mappings() -> None:
    plain = group_config()
    spec = dict(plain.exchanges)
    words = replace(plain, completion="agreed", launch="inline", lost_experts="serve")  # type: ignore[arg-type]
    assert words.completion is Completion.AGREED
    assert (words.launch, words.lost_experts) == (Launch.INLINE, LostExperts.SERVE)
    assert replace(plain, exchanges=spec) == plain  # type: ignore[arg-type]
    assert replace(plain, exchanges=list(plain.exchanges)) == plain  # type: ignore[arg-type]
    assert GroupConfig.from_proto(words.to_proto()) == words


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"completion": "sometimes"}, "completion is 'sometimes'; use one of local, agreed"),
        ({"device": "tpu"}, "device is 'tpu'; use one of cpu, cuda"),
        ({"geometry": {"layers": 1}}, "geometry is a dict; give a GroupGeometry"),
        ({"timeouts": {"node_timeout_ms": 3}}, "timeouts is a dict; give a Timeouts"),
        ({"rebalance": None}, "rebalance is a NoneType; give a RebalancePolicy"),
        ({"weights": {}}, "weights is a dict; give a WeightSpec"),
        ({"exchanges": ["decode"]}, "must be pairs of a name and an ExchangeSpec"),
        ({"exchanges": None}, "must be pairs of a name and an ExchangeSpec"),
        ({"exchanges": {"decode": "ROUTED"}}, "exchange 'decode' is a str; give an ExchangeSpec"),
    ],
)
def test_a_group_made_in_code_is_checked_like_a_file(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(group_config(), **change)


def test_a_group_needs_a_name_and_ranks_and_different_exchanges() -> None:
    plain = toml()
    del plain["name"]
    with pytest.raises(ConfigError, match="lacks name"):
        GroupConfig.from_toml_dict(plain)
    spec = ExchangeSpec.preset("ROUTED")
    with pytest.raises(ConfigError, match="names an exchange twice: a, a"):
        GroupConfig(
            name="g",
            geometry=GroupGeometry(
                layers=1, experts=4, topk=1, hidden=8, slots_per_rank=4, max_ranks=1
            ),
            exchanges=(("a", spec), ("a", spec)),
            initial_ranks=1,
        )
    message = group_config().to_proto()
    message.exchanges[0].spec_json = "{"
    with pytest.raises(ConfigError, match="spec_json is not JSON"):
        GroupConfig.from_proto(message)


@pytest.mark.parametrize("module", ["elasticep.config", "elasticep.control.controller"])
def test_control_and_config_do_without_torch_client_and_runtime(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "bad = {'torch', 'transformers', 'elasticep.client', "
        "'elasticep.runtime'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
