"""Manifests for Kubernetes: what they ask of the command line is there, and their numbers go together."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclopts import CycloptsError

from tilewright.cli.main import app
from tilewright.cli.processes import COORDINATOR, INDEX, PROCESSES
from tilewright.server.middleware import OPEN_PATHS

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
ONE_HOST = "one-host.yaml"
SLICE = "tpu-slice.yaml"


def objects(name: str) -> dict[str, Any]:
    """The objects of a file, by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))}


def pods(name: str) -> list[dict[str, Any]]:
    """Specifications of pods."""
    found = objects(name)
    if name == ONE_HOST:
        return [found["Deployment"]["spec"]["template"]["spec"]]
    template = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]]


def options(container: dict[str, Any]) -> dict[str, str]:
    """Values of a server's options."""
    return dict(word.removeprefix("--").split("=", 1) for word in container["args"] if word.startswith("--"))


def servers() -> Iterator[Any]:
    for name in (ONE_HOST, SLICE):
        for number, pod in enumerate(pods(name)):
            yield pytest.param(pod, pod["containers"][0], id=f"{name}-{number}")


def test_all_manifests_are_looked_at():
    assert sorted(path.name for path in FOLDER.iterdir()) == [ONE_HOST, SLICE, "train-slice.yaml"]
    assert [*objects(ONE_HOST)] == ["Deployment", "PodDisruptionBudget", "Service"]
    assert [*objects(SLICE)] == ["LeaderWorkerSet", "PodDisruptionBudget", "Service"]


@pytest.mark.parametrize("pod, container", [*servers()])
def test_the_command_line_knows_what_it_is_asked(pod: dict[str, Any], container: dict[str, Any]):
    assert "tilewright serve" in " ".join(container["command"])
    _, bound, _ = app.parse_args(["serve", *container["args"]], exit_on_error=False, print_error=False)
    assert bound.arguments
    assert "TILEWRIGHT_API_KEY" in {each["name"] for each in container["env"]}


def test_an_option_that_there_is_not_would_be_seen():
    with pytest.raises(CycloptsError, match="--drains"):
        app.parse_args(["serve", "a", "--drains=30"], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("pod, container", [*servers()])
def test_a_pod_has_time_to_drain(pod: dict[str, Any], container: dict[str, Any]):
    lifecycle = container["lifecycle"]
    (_, slept) = ("sleep", "0") if lifecycle is None else lifecycle["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > int(slept) + int(options(container)["limits"].partition("drain_s=")[2])


@pytest.mark.parametrize("name", [ONE_HOST, SLICE])
def test_probes_need_no_key_and_come_to_the_port(name: str):
    container = pods(name)[0]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert str(ports["http"]) == options(container)["port"]
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/health",
        "liveness": "/health",
        "readiness": "/ready",
    }
    assert all(probe["path"] in OPEN_PATHS and probe["port"] == "http" for probe in probes.values())
    service = objects(name)["Service"]["spec"]
    assert service["ports"][0]["targetPort"] == "http"


def test_what_selects_pods_finds_them():
    found = objects(ONE_HOST)
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for spec in (found["Deployment"]["spec"], found["PodDisruptionBudget"]["spec"]):
        assert spec["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    found = objects(SLICE)
    template = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    leader = template["leaderTemplate"]
    worker = template["workerTemplate"]
    assert found["Service"]["spec"]["selector"] == leader["metadata"]["labels"]
    assert "metadata" not in worker, "requests come to the first pod alone"


def test_hosts_of_a_slice_are_processes_of_one_model():
    spec = objects(SLICE)["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    first, other = (pod["containers"][0] for pod in pods(SLICE))
    assert other["args"] == first["args"]
    said = first["command"][2]
    assert all(f"{name}=" in said for name in (COORDINATOR, PROCESSES, INDEX))
    port = next(each["containerPort"] for each in first["ports"] if each["name"] == "coordinator")
    assert f'{COORDINATOR}="$LWS_LEADER_ADDRESS:{port}"' in said
    chips = int(first["resources"]["limits"]["google.com/tpu"])
    assert int(options(first)["tensor-parallel"]) == spec["size"] * chips
    assert not any(other[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")), "it does not listen"
