"""The files in deploy/ fit each other and the code: command lines, ports, numbers, exit codes, rights, times."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from ps import cli
from ps.control.server import MAX_GRACE_S
from ps.server.process import SHUTDOWN_S
from tests.support.commands import parse

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPONENTS = ("coordinator", "server", "worker")
FINAL = {cli.EXIT_FAILED, cli.EXIT_USAGE, cli.EXIT_INTERRUPTED}
"""Ends of a coordinator after which another try would say the same."""

VALUES = {
    "POD_IP": "10.1.2.3", "POD_NAME": "ps-server-0",
    "PS_HOST": "10.0.0.1", "PS_PORT": "7777", "PS_SERVERS": "2", "PS_COORDINATOR": "10.0.0.1:7777",
    "PS_SCRIPT": "/srv/train.py", "PS_SCRIPT_ARGS": "--epochs 3",
}  # fmt: skip
"""What the variables in command lines stand for."""


class CommandLine(NamedTuple):
    """A call of `psctl` in a file of deploy/."""

    where: str
    arguments: list[str]


def documents() -> list[dict[str, Any]]:
    """Every Kubernetes object."""
    paths = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [doc for path in paths for doc in yaml.safe_load_all(path.read_text())]


def of_kind(*kinds: str) -> Iterator[dict[str, Any]]:
    return (doc for doc in documents() if doc["kind"] in kinds)


def workload(component: str) -> dict[str, Any]:
    """The object that makes a component's pods."""
    found = [doc for doc in of_kind("Job", "StatefulSet", "Deployment") if component_of(doc) == component]
    assert len(found) == 1, component
    return found[0]


def component_of(doc: Mapping[str, Any]) -> str:
    return str(doc["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"])


def pod(component: str) -> dict[str, Any]:
    """What a component's pods are to be."""
    spec: dict[str, Any] = workload(component)["spec"]["template"]["spec"]
    return spec


def container(component: str) -> dict[str, Any]:
    """The one container of a component's pods."""
    (only,) = pod(component)["containers"]
    found: dict[str, Any] = only
    return found


def compose() -> dict[str, Any]:
    """The services of compose.yaml."""
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
    return services


def unit(path: Path) -> dict[str, list[str]]:
    """The settings of a systemd unit, of all sections together."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def policy(component: str) -> dict[str, Any]:
    """The NetworkPolicy of a component's pods."""
    key = "app.kubernetes.io/component"
    found = [d["spec"] for d in of_kind("NetworkPolicy") if d["spec"]["podSelector"]["matchLabels"][key] == component]
    (only,) = found
    result: dict[str, Any] = only
    return result


def command_lines() -> Iterator[CommandLine]:
    """Every call of `psctl` in manifests, in the compose file and in units, with variables filled in."""
    for component in COMPONENTS:
        text = [re.sub(r"\$\((\w+)\)", lambda found: VALUES[found[1]], arg) for arg in container(component)["args"]]
        yield CommandLine(f"kubernetes {component}", text)
    for name, service in compose().items():
        yield CommandLine(f"compose {name}", service["command"])
    command, *arguments = compose()["coordinator"]["healthcheck"]["test"][1:]
    assert command == "psctl"
    yield CommandLine("compose healthcheck", arguments)
    for path in UNITS:
        (line,) = unit(path)["ExecStart"]
        line = re.sub(r"\$\{?(\w+)\}?", lambda found: VALUES[found[1]], line.replace("%i", "0"))
        program, *arguments = shlex.split(line)
        assert program == "/opt/torch-ps/bin/psctl"
        yield CommandLine(path.name, arguments)


@pytest.mark.parametrize("line", list(command_lines()), ids=lambda line: line.where)
def test_command_lines(line: CommandLine) -> None:
    """Each command line is one that `psctl` takes, with settings that the code accepts; members know where to go."""
    options = parse(line.arguments, {"PS_COORDINATOR": VALUES["PS_COORDINATOR"]})
    if line.arguments[0] in ("server", "worker"):
        assert options.coordinator in {"10.0.0.1:7777", "coordinator:7777", "ps-coordinator:7777"}


def test_numbers_agree() -> None:
    """The coordinator waits for as many servers as are started."""
    assert parse(compose()["coordinator"]["command"]).servers == compose()["server"]["deploy"]["replicas"]
    assert parse(container("coordinator")["args"]).servers == workload("server")["spec"]["replicas"]
    job = workload("worker")["spec"]
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]


def test_ports_agree() -> None:
    """Service, container, probes and policies name the port that the coordinator listens on, at its pod's address."""
    options = parse(container("coordinator")["args"])
    assert options.host == "0.0.0.0"
    service = next(doc for doc in of_kind("Service") if doc["metadata"]["name"] == "ps-coordinator")["spec"]
    port = {"port": options.port, "protocol": "TCP"}
    assert service["ports"][0]["port"] == container("coordinator")["ports"][0]["containerPort"] == options.port
    assert service["ports"][0]["targetPort"] == container("coordinator")["ports"][0]["name"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container("coordinator")[probe]["grpc"] == {"port": options.port}
    assert policy("coordinator")["ingress"][0]["ports"] == policy("server")["egress"][0]["ports"] == [port]
    for component in ("server", "worker"):
        assert parse(container(component)["args"]).coordinator == f"ps-coordinator:{options.port}"


def test_nothing_touches_the_data_plane() -> None:
    """Servers and workers have no probes, no ports to publish, no addresses but their pods', and no sidecars."""
    for component in ("server", "worker"):
        assert not {"startupProbe", "readinessProbe", "livenessProbe", "ports"} & container(component).keys()
        assert "healthcheck" not in compose()[component] and "ports" not in compose()[component]
        assert "--advertise=$(POD_IP)" in container(component)["args"]
        template = workload(component)["spec"]["template"]["metadata"]
        assert template["labels"]["sidecar.istio.io/inject"] == "false"
        assert template["annotations"]["linkerd.io/inject"] == "disabled"
    assert [doc["metadata"]["name"] for doc in of_kind("Service") if doc["spec"].get("clusterIP") != "None"] == [
        "ps-coordinator"
    ]
    assert "HEALTHCHECK " not in re.sub("#.*", "", (DEPLOY / "docker" / "Dockerfile").read_text())


def test_only_members_reach_each_other() -> None:
    """Only workers reach servers, only members the coordinator, nobody a worker."""
    key = "app.kubernetes.io/component"
    assert policy("server")["ingress"] == [{"from": [{"podSelector": {"matchLabels": {key: "worker"}}}]}]
    (rule,) = policy("coordinator")["ingress"]
    (expression,) = rule["from"][0]["podSelector"]["matchExpressions"]
    assert len(rule["from"]) == 1
    assert expression == {"key": key, "operator": "In", "values": ["server", "worker"]}
    assert policy("worker")["ingress"] == []
    for component in COMPONENTS:
        assert "Ingress" in policy(component)["policyTypes"]


@pytest.mark.parametrize("component", COMPONENTS)
def test_containers_have_no_rights(component: str) -> None:
    """Not root, nothing but named folders is writable, no capability, no credentials of the cluster."""
    spec, security = pod(component), container(component)["securityContext"]
    user = re.search(r"^USER (\d+):(\d+)$", (DEPLOY / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert user is not None and "0" not in user.groups()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == tuple(
        map(int, user.groups())
    )
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert security["readOnlyRootFilesystem"] is True and security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert {"name": "tmp", "mountPath": "/tmp"} in container(component)["volumeMounts"]
    service = compose()[component]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and service["tmpfs"] == ["/tmp"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_time_to_leave() -> None:
    """Everything gives a process longer between SIGTERM and SIGKILL than it takes to leave."""
    least = max(SHUTDOWN_S, MAX_GRACE_S)
    times = [pod(component)["terminationGracePeriodSeconds"] for component in COMPONENTS]
    times += [int(service["stop_grace_period"].removesuffix("s")) for service in compose().values()]
    times += [int(unit(path)["TimeoutStopSec"][0]) for path in UNITS]
    assert len(times) == 9 and min(times) > least >= 20
    assert all(unit(path)["KillSignal"] == ["SIGTERM"] for path in UNITS)


def test_restarts() -> None:
    """What has failed for good isn't tried again; what was killed, or found no coordinator, is."""
    failed, disrupted = workload("coordinator")["spec"]["podFailurePolicy"]["rules"]
    assert failed["action"] == "FailJob" and failed["onExitCodes"]["operator"] == "In"
    assert set(failed["onExitCodes"]["values"]) == FINAL and disrupted["action"] == "Ignore"
    disrupted, failed = workload("worker")["spec"]["podFailurePolicy"]["rules"]
    assert failed["action"] == "FailJob" and failed["onExitCodes"]["operator"] == "NotIn"
    assert {cli.EXIT_NO_COORDINATOR, 128 + 9, 128 + 15} <= set(failed["onExitCodes"]["values"])
    assert not {cli.EXIT_FAILED, cli.EXIT_USAGE} & set(failed["onExitCodes"]["values"])
    assert pod("coordinator")["restartPolicy"] == pod("worker")["restartPolicy"] == "Never"
    coordinator, server, worker = map(unit, UNITS)
    assert set(map(int, coordinator["RestartPreventExitStatus"][0].split())) == FINAL
    assert coordinator["Restart"] == server["Restart"] == ["on-failure"]
    assert server["RestartPreventExitStatus"] == [str(cli.EXIT_USAGE)]
    assert worker["Restart"] == ["on-abnormal"]
    assert worker["RestartForceExitStatus"] == [str(cli.EXIT_NO_COORDINATOR)]


def test_kustomization_is_complete() -> None:
    """Every manifest is applied, and the image has the name that the kustomization sets."""
    (kustomization,) = of_kind("Kustomization")
    files = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files
    assert {container(c)["image"] for c in COMPONENTS} == {kustomization["images"][0]["name"]}


def test_image_gets_what_it_copies() -> None:
    """Each source of COPY exists and is sent to the builder; the script that workers run is among them."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    sources = [s for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for s in line.split()[:-1]]
    sent = re.findall(r"^!(.*)$", (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert sorted(sources) == sorted(sent)
    assert all((ROOT / source).exists() for source in sources)
    assert "COPY examples /opt/examples" in text
    for script in (container("worker")["args"][-1], compose()["worker"]["command"][-1]):
        assert (ROOT / Path(script).relative_to("/opt")).is_file()


def test_image_installs_locked_versions() -> None:
    """The build step that lists requirements works, and every one of them is in the lock file."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", "")
    found = re.search(r'^RUN python -c "(.*)" > wanted.txt', text, re.MULTILINE)
    assert found is not None
    command = ["python3", "-c", found[1]]
    wanted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout.split(
        "\n"
    )
    pins = {line.partition("==")[0].lower() for line in (ROOT / "requirements.lock").read_text().splitlines()}
    names = {re.split("[<>=!~ ]", line)[0].lower() for line in wanted if line}
    assert {"torch", "grpcio", "scikit-learn", "setuptools"} <= names <= pins


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_say_their_variables(path: Path) -> None:
    """Each variable of a unit's command line is named in its first lines, and shown in the README."""
    text = path.read_text()
    names = set(re.findall(r"\$\{?(\w+)", unit(path)["ExecStart"][0]))
    header = text[: text.index("[Unit]")]
    assert all(name in header and name in (DEPLOY / "README.md").read_text() for name in names)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_are_right(path: Path, tmp_path: Path) -> None:
    """systemd knows every setting of a unit and finds nothing to say about it."""
    copy = tmp_path / path.name.replace("@", "@0")
    copy.write_text(path.read_text().replace("/opt/torch-ps/bin/psctl", "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, [line for line in done.stderr.splitlines() if copy.name in line]) == (0, [])


def test_slurm_script_is_clean() -> None:
    """shellcheck has nothing to say about the batch script."""
    command = [str(Path(sys.executable).with_name("shellcheck")), str(DEPLOY / "slurm" / "train.sbatch")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


SRUN = """#!/bin/bash
# Notes the call and ends as the task would.
args=("$@")
while [[ $1 != psctl ]]; do shift; done
printf '%s\\0' "${args[@]}" > "$NOTES/$2"
[[ $2 != coordinator ]] || exit "$COORDINATOR_CODE"
exit 137
"""

SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames n[07-08]" ]] && printf 'n07\\nn08\\n'
"""


def batch(folder: Path, *arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run train.sbatch as a batch job of two nodes, with stand-ins for Slurm's commands."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "NOTES": str(folder), "COORDINATOR_CODE": str(code)}
    env |= {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "n[07-08]", "SLURM_NTASKS": "7", **variables}
    command = ["bash", str(DEPLOY / "slurm" / "train.sbatch"), *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=30)


def calls(folder: Path, role: str) -> tuple[list[str], list[str]]:
    """Flags of srun, and the arguments of psctl, of one role's step."""
    words = (folder / role).read_text().split("\0")[:-1]
    at = words.index("psctl")
    return words[:at], words[at + 1 :]


def test_slurm(tmp_path: Path) -> None:
    """One allocation runs all roles with command lines that psctl takes; the exit code is the coordinator's."""
    done = batch(tmp_path, "my train.py", "--lr", "0.1", code=1, PS_SERVERS="2", PS_WORKER_FLAGS="--gpus-per-task=1 -v")
    assert (done.returncode, done.stderr) == (1, "")
    flags, arguments = calls(tmp_path, "coordinator")
    options = parse(arguments)
    assert {"--ntasks=1", "--nodelist=n07"} <= set(flags)
    assert (options.host, options.port, options.servers, options.min_workers) == ("n07", 23456, 2, 4)
    flags, arguments = calls(tmp_path, "server")
    assert "--ntasks=2" in flags
    parse(arguments, {"PS_COORDINATOR": "n07:23456"})
    flags, arguments = calls(tmp_path, "worker")
    assert {"--ntasks=4", "--gpus-per-task=1", "-v", "--kill-on-bad-exit=0"} <= set(flags)
    options = parse(arguments, {"PS_COORDINATOR": "n07:23456"})
    assert (options.script, options.arguments) == ("my train.py", ["--lr", "0.1"])


def test_slurm_defaults(tmp_path: Path) -> None:
    """Without settings: two servers, no other flags; a chosen address and port are used."""
    assert batch(tmp_path, "train.py", PS_HOST="10.0.0.7", PS_PORT="7777").returncode == 0
    _, arguments = calls(tmp_path, "coordinator")
    options = parse(arguments)
    assert (options.host, options.port, options.servers, options.min_workers) == ("10.0.0.7", 7777, 2, 4)
    assert "--gpus-per-task=1" not in calls(tmp_path, "worker")[0]


def test_slurm_refuses(tmp_path: Path) -> None:
    """Too few tasks, or no script: said in a sentence, nothing is started."""
    done = batch(tmp_path, "train.py", PS_SERVERS="6")
    assert done.returncode == 2 and "7 tasks can't be 1 coordinator, 6 servers and at least 1 worker" in done.stderr
    done = batch(tmp_path)
    assert done.returncode == 2 and "usage: sbatch" in done.stderr
    assert not (tmp_path / "coordinator").exists()
