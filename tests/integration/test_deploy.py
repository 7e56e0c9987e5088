"""deploy/: units that systemd takes, manifests that Kubernetes takes, and processes that take both.

What is checked against the code: config files and variables load, commands exist, and the settings
on which a restart of the daemon depends are there.
"""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from elasticep.cli.main import cli
from elasticep.config import ClientConfig, ControllerConfig, DaemonConfig, load_config
from elasticep.control.metrics import ControllerMetrics
from elasticep.errors import ConfigError
from elasticep.runtime.metrics import Metrics, StepCounts
from elasticep.testing.units import MAX_STORED_FDS

DEPLOY = Path(__file__).parents[2] / "deploy"
SYSTEMD = DEPLOY / "systemd"
KUBERNETES = DEPLOY / "kubernetes"
UNITS = sorted(SYSTEMD.glob("*.service"))
MANIFESTS = sorted([*KUBERNETES.glob("*.yaml"), *KUBERNETES.glob("examples/*.yaml")])
CONFIGS: dict[str, Any] = {"controller": ControllerConfig, "daemon": DaemonConfig}
# What the core, the daemon and its workers cannot do without.
SYSCALLS = {
    *("memfd_create", "fallocate", "ftruncate", "mmap", "futex", "futex_waitv", "set_robust_list"),
    *("pidfd_open", "pidfd_send_signal", "recvmsg", "sendmsg", "epoll_wait", "eventfd2"),
    *("execve", "setsid", "close_range", "prctl", "flock", "rename", "sched_setaffinity"),
}

# ---- systemd


def need_systemd() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (package systemd)")


def settings_of(unit: Path) -> dict[str, str]:
    """Settings of a unit, the last of each name; sections do not share names here."""
    lines = (line.strip() for line in unit.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if line and line[0] not in "#[")


def verify(unit: Path, folder: Path, extra: str = "") -> str:
    """What `systemd-analyze verify` says; the program is one that is there."""
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
    copy = folder / unit.name
    copy.write_text(text.replace("[Service]\n", f"[Service]\n{extra}"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=120
    )
    return done.stderr if done.returncode == 0 else f"exit status {done.returncode}: {done.stderr}"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_has_nothing_to_say_about_a_unit(unit: Path, tmp_path: Path) -> None:
    need_systemd()
    assert verify(unit, tmp_path) == ""
    # It exits with 0 when it knows a key not, so only its silence means something.
    assert "Bogus" in verify(unit, tmp_path, "Bogus=1\n")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_unit_starts_a_command_that_exists(unit: Path) -> None:
    settings = settings_of(unit)
    program, command = settings["ExecStart"].split()
    assert program == "/opt/elasticep/bin/elasticep"
    assert cli.get_command(None, command) is not None  # type: ignore[arg-type]
    assert (settings["Type"], settings["Restart"]) == ("notify", "always")
    assert settings["NoNewPrivileges"] == "yes"
    assert settings["EnvironmentFile"] == "-/etc/elasticep/elasticep.env"


def test_daemon_unit_keeps_what_a_restart_needs() -> None:
    settings = settings_of(SYSTEMD / "elasticep-daemon.service")
    assert settings["RestartKillSignal"] == "SIGUSR1"  # SIGTERM ends the seats
    assert settings["KillMode"] == "process"  # workers go on
    assert int(settings["FileDescriptorStoreMax"]) >= MAX_STORED_FDS  # the memory
    assert settings["RuntimeDirectoryPreserve"] == "restart"  # state file
    config = tomllib.loads((SYSTEMD / "elasticep.toml").read_text())
    assert config["daemon"]["socket_dir"] == f"/run/{settings['RuntimeDirectory']}"
    # Each of these would take something away that workers and engines need.
    for setting in ("PrivateDevices", "PrivateTmp", "PrivateUsers", "ProtectProc", "MemoryMax"):
        assert setting not in settings
    controller = settings_of(SYSTEMD / "elasticep-controller.service")
    assert settings["User"] == controller["User"] == "elasticep"
    assert "\nu elasticep " in (SYSTEMD / "elasticep.sysusers.conf").read_text()


def test_engines_of_the_example_outlive_a_restart_of_the_daemon(tmp_path: Path) -> None:
    template = SYSTEMD / "examples" / "elasticep-engine@.service"
    unit = tmp_path / "elasticep-engine@3.service"
    unit.write_text(template.read_text())
    settings = settings_of(unit)
    assert not {"Requires", "BindsTo", "PartOf", "PrivateUsers", "PrivatePIDs"} & set(settings)
    assert settings["Wants"] == "elasticep-daemon.service"
    daemon = settings_of(SYSTEMD / "elasticep-daemon.service")
    assert settings["User"] == daemon["User"]
    given = re.findall(r"^Environment=(\w+)=(\S+)$", unit.read_text(), flags=re.MULTILINE)
    config = load_config(ClientConfig, env={name: text.replace("%i", "3") for name, text in given})
    assert config.socket == f"/run/{daemon['RuntimeDirectory']}/daemon.sock"
    assert (config.group, config.rank) == ("decode-0", 3)
    need_systemd()
    (tmp_path / "checked").mkdir()
    assert verify(unit, tmp_path / "checked") == ""


def test_system_calls_of_the_core_pass_the_filter() -> None:
    need_systemd()
    text = subprocess.run(
        ["systemd-analyze", "--no-pager", "syscall-filter"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    groups: dict[str, list[str]] = {}
    for line in text.splitlines():
        name = line.strip()
        if line.startswith("@"):
            groups[name] = []
        elif name and not name.startswith("#") and groups:
            groups[list(groups)[-1]].append(name)

    def expand(name: str) -> Iterator[str]:
        for entry in groups.get(name, ()):
            yield from expand(entry) if entry.startswith("@") else (entry,)

    for unit in UNITS:
        assert settings_of(unit)["SystemCallFilter"] == "@system-service"
    assert SYSCALLS - set(expand("@system-service")) == set()


@pytest.mark.parametrize("section", CONFIGS)
def test_example_files_of_systemd_load(section: str) -> None:
    environment = {}
    for line in (SYSTEMD / "elasticep.env").read_text().splitlines():
        if match := re.fullmatch(r"#?([A-Z_]+)=(\S+)", line):  # what is commented out loads, too
            environment[match[1]] = match[2]
    assert environment["ELASTICEP_CONFIG"] == "/etc/elasticep/elasticep.toml"
    config = load_config(CONFIGS[section], file=SYSTEMD / "elasticep.toml", env=environment)
    assert config.tls.enabled
    if isinstance(config, DaemonConfig):
        assert (config.node, str(config.seats[0])) == (
            "gpu-07",
            "decode-0:56,57,58,59,60,61,62,63",
        )


# ---- Kubernetes


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def objects() -> dict[tuple[str, str], dict[str, Any]]:
    """Everything that the kustomization applies, by kind and name."""
    kustomization = documents(KUBERNETES / "kustomization.yaml")[0]
    found = {}
    for name in kustomization["resources"]:
        for document in documents(KUBERNETES / name):
            found[document["kind"], document["metadata"]["name"]] = document
    return found


WORKLOADS = {
    "controller": ("StatefulSet", "elasticep-controller"),
    "daemon": ("DaemonSet", "elasticep-daemon"),
}


def pod_of(section: str) -> dict[str, Any]:
    template: dict[str, Any] = objects()[WORKLOADS[section]]["spec"]["template"]
    return template


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid(path: Path) -> None:
    for document in documents(path):
        if document["kind"] != "Kustomization":  # of kubectl itself; there is no schema
            version = kubernetes_validate.latest_version()
            kubernetes_validate.validate(document, version, strict=True)
            document["bogus"] = 1
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(document, version, strict=True)


def test_kustomization_applies_every_manifest() -> None:
    applied = set(documents(KUBERNETES / "kustomization.yaml")[0]["resources"])
    there = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert applied == there


@pytest.mark.parametrize("section", WORKLOADS)
def test_what_a_pod_refers_to_exists(section: str) -> None:
    pod, known = pod_of(section), objects()
    spec = pod["spec"]
    workload = known[WORKLOADS[section]]["spec"]
    assert workload["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert ("ServiceAccount", spec["serviceAccountName"]) in known
    assert spec["automountServiceAccountToken"] is False
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for volume in volumes.values():
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in known
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


@pytest.mark.parametrize("section", WORKLOADS)
def test_probes_run_the_health_check(section: str) -> None:
    container = pod_of(section)["spec"]["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["exec"]["command"] == ["elasticep", "health", section]
        # Longer than the command's own limit, so that its reason reaches the events.
        assert container[probe]["timeoutSeconds"] > 3
    assert cli.get_command(None, "health") is not None  # type: ignore[arg-type]


def environment_of(section: str) -> dict[str, str]:
    """A container's variables with $(NAME) replaced as the kubelet does it."""
    fields = {
        "metadata.name": "elasticep-controller-1",
        "spec.nodeName": "gpu-a",
        "status.hostIP": "10.0.0.7",
    }
    environment: dict[str, str] = {}
    for entry in pod_of(section)["spec"]["containers"][0]["env"]:
        if "valueFrom" in entry:
            value = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            value = re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], entry["value"])
        environment[entry["name"]] = value
    return environment


def mounted_config(section: str, folder: Path) -> tuple[dict[str, str], Path]:
    """The variables of a container, and the file that its ELASTICEP_CONFIG names."""
    environment = environment_of(section)
    path = Path(environment.pop("ELASTICEP_CONFIG"))
    name = "elasticep-controller" if section == "controller" else "elasticep-nodes"
    file = folder / path.name
    file.write_text(objects()["ConfigMap", name]["data"][path.name])
    return environment, file


@pytest.mark.parametrize("section", WORKLOADS)
def test_container_starts_a_command_with_a_config_that_loads(section: str, tmp_path: Path) -> None:
    container = pod_of(section)["spec"]["containers"][0]
    assert container["command"] == ["elasticep", section]
    environment, file = mounted_config(section, tmp_path)
    config = load_config(CONFIGS[section], file=file, env=environment)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config.listen.endswith(f":{ports['grpc']}")
    assert config.metrics_port == ports["metrics"]
    assert config.metrics_host != "127.0.0.1"
    # The files of the Secret lie where the config looks for them.
    mount = next(m for m in container["volumeMounts"] if m["name"] == "tls")["mountPath"]
    paths = {config.tls.cert, config.tls.key, config.tls.ca}
    assert paths == {f"{mount}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")}
    # Without them there is no TCP beyond the host.
    plain = {name: value for name, value in environment.items() if "_TLS_" not in name}
    file.write_text(re.sub(r"\[\w+\.tls\]\n(?:.+\n)*", "", file.read_text()))
    with pytest.raises(ConfigError, match="without TLS"):
        load_config(CONFIGS[section], file=file, env=plain)


def test_daemons_find_every_controller_replica(tmp_path: Path) -> None:
    stateful = objects()[WORKLOADS["controller"]]["spec"]
    service = objects()["Service", stateful["serviceName"]]["spec"]
    assert service["selector"].items() <= stateful["template"]["metadata"]["labels"].items()
    assert service["clusterIP"] == "None"
    environment, file = mounted_config("daemon", tmp_path)
    config = load_config(DaemonConfig, file=file, env=environment)
    assert config.controllers == tuple(
        f"elasticep-controller-{index}.{stateful['serviceName']}.elasticep.svc:7400"
        for index in range(stateful["replicas"])
    )
    environment, file = mounted_config("controller", tmp_path)
    assert load_config(ControllerConfig, file=file, env=environment).advertise in config.controllers


def test_engines_share_what_the_daemon_checks() -> None:
    engine = documents(KUBERNETES / "examples" / "engine.yaml")[0]["spec"]
    daemon = pod_of("daemon")["spec"]
    # The daemon compares process ids and users, and hands memory over in one directory.
    assert engine["hostPID"]
    assert daemon["hostPID"]
    for field in ("runAsUser", "runAsGroup"):
        assert engine["securityContext"][field] == daemon["securityContext"][field]
    paths = [
        next(v["hostPath"]["path"] for v in pod["volumes"] if v["name"] == "sockets")
        for pod in (engine, daemon)
    ]
    assert paths[0] == paths[1] == environment_of("daemon")["ELASTICEP_DAEMON_SOCKET_DIR"]
    variables = {entry["name"]: entry["value"] for entry in engine["containers"][0]["env"]}
    assert variables["ELASTICEP_SOCKET"] == f"{paths[0]}/daemon.sock"


# ---- Prometheus and Grafana


def known_series() -> dict[str, set[str]]:
    """Every series that our processes export, with its labels."""
    daemon = Metrics()
    daemon.read_steps(lambda: (StepCounts("g", 0, 1, 0),))
    series: dict[str, set[str]] = {}
    for registry in (ControllerMetrics().registry, daemon.registry):
        for family in registry.collect():
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
            labels = {label for sample in family.samples for label in sample.labels}
            # Without a value yet there are no samples; the collector knows its labels.
            collector = registry._names_to_collectors.get(family.name)
            labels |= set(getattr(collector, "_labelnames", ()))
            for suffix in suffixes.get(family.type, [""]):
                series[family.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return series


def check_query(query: str, series: dict[str, set[str]]) -> set[str]:
    """The series of a query; all of them, and the labels it names, must exist."""
    used = set(re.findall(r"\belasticep_\w+", query))
    assert used <= set(series), f"{sorted(used - set(series))} in {query}"
    known = set().union(*(series[name] for name in used), {"instance", "job"})
    grouped = re.findall(r"\bby \(([\w, ]+)\)", query)
    named = {label.strip() for labels in grouped for label in labels.split(",")}
    named |= set(re.findall(r"(\w+)=~?\"", query))
    assert named <= known, f"{sorted(named - known)} in {query}"
    return used


def test_page_on_operations_has_every_series_with_its_labels() -> None:
    page = (DEPLOY.parent / "docs" / "operations.md").read_text()
    documented = {}
    row = r"^\| `(elasticep_\w+)` \|([^|]*)\| ([^|]*) \|$"
    for name, labels, text in re.findall(row, page, flags=re.MULTILINE):
        bucket = f"{name}_bucket" if text.startswith("histogram") else name
        documented[bucket] = set(re.findall(r"`(\w+)`", labels))
    series = known_series()
    kept = {
        n: labels - {"le"} for n, labels in series.items() if not n.endswith(("_sum", "_count"))
    }
    assert documented == kept


def test_alerts_name_series_that_exist() -> None:
    series = known_series()
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    used = [check_query(rule["expr"], series) for rule in rules]
    assert sum(map(bool, used)) >= len(rules) - 1  # one asks only whether a target is up
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert {"summary", "description"} <= set(rule["annotations"])


def test_dashboard_names_series_that_exist() -> None:
    series = known_series()
    dashboard = json.loads((DEPLOY / "grafana" / "elasticep.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = set().union(*(check_query(query, series) for query in queries))
    assert len(used) >= 15
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_scraped_ports_are_those_of_the_examples() -> None:
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    ports = {
        job["job_name"].removeprefix("elasticep-"): {
            int(target.rpartition(":")[2])
            for static in job["static_configs"]
            for target in static["targets"]
        }
        for job in scrape["scrape_configs"]
    }
    example = tomllib.loads((SYSTEMD / "elasticep.toml").read_text())
    for section, found in ports.items():
        assert found == {example[section]["metrics_port"]}
    labels = pod_of("controller")["metadata"]["labels"], pod_of("daemon")["metadata"]["labels"]
    job = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yml").read_text())["scrape_configs"][
        0
    ]
    kept = [rule["regex"] for rule in job["relabel_configs"] if rule.get("action") == "keep"]
    assert kept == ["elasticep", "metrics"]
    assert {label["app.kubernetes.io/part-of"] for label in labels} == {kept[0]}


ALERT_TEST = """
rule_files: [alerts.yml]
evaluation_interval: 5s
tests:
  - interval: 5s
    input_series:
      - series: 'elasticep_controller_leader{instance="a"}'
        values: '0x60'
      - series: 'elasticep_controller_leader{instance="b"}'
        values: '1x60'
      # What a controller said before it was deposed means nothing.
      - series: 'elasticep_controller_lost_experts{instance="a",group="g"}'
        values: '7x60'
      - series: 'elasticep_controller_lost_experts{instance="b",group="g"}'
        values: '0x20 2x40'
    alert_rule_test:
      - eval_time: 90s
        alertname: ElasticEPExpertsLost
      - eval_time: 200s
        alertname: ElasticEPExpertsLost
        exp_alerts:
          - exp_labels: {severity: critical, group: g}
            exp_annotations:
              summary: Group g serves without 2 experts
              description: >-
                No member holds a replica of them. Under the policy refuse no step runs; under
                serve the tokens that needed them are flagged. Bring ranks back, or add some.
      - eval_time: 200s
        alertname: ElasticEPNoLeader
"""


def test_prometheus_takes_the_files(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (package prometheus)")
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", tmp_path)
    (tmp_path / "alerts_test.yml").write_text(ALERT_TEST)
    for arguments in (
        ["check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")],
        ["test", "rules", str(tmp_path / "alerts_test.yml")],
    ):
        done = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
