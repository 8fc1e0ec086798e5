"""The chart for bulk jobs on Ray: objects that KubeRay and Kubernetes take, and a command that `dragoman bulk` takes."""

import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.requirements import Requirement

from dragoman.cli import main as dragoman
from tests.deploy.conftest import ROOT, Refused, Rendered, Values, assert_valid, install, load

CHART = ROOT / "deploy/ray"
JOB: Values = {"inputs": ["/data/in"], "output": "/data/out", "options": {"to": "de"}}
SPOT = {"karpenter.sh/capacity-type": "spot"}
CLAIM = {"persistentVolumeClaim": {"claimName": "corpus"}}
IMAGE = {"image": {"reference": "registry.example/models:3", "pullPolicy": "IfNotPresent"}}
CLUSTER, AUTOSCALER = "RayJob spec rayClusterSpec", "RayJob spec rayClusterSpec autoscalerOptions"
HEAD, WORKER = (f"{CLUSTER} {group} template spec" for group in ("headGroupSpec", "workerGroupSpecs 0"))

Render = Callable[[Values], Rendered]


def pods(job: Rendered) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the pods of a job, by the names of their groups."""
    yield "submitter", job.find("RayJob spec submitterPodTemplate")
    yield "head", job.find(f"{CLUSTER} headGroupSpec template")
    for group in job.find(f"{CLUSTER} workerGroupSpecs"):
        yield group["groupName"], group["template"]


@pytest.fixture(scope="module")
def render(configuration: Callable[[], Any]) -> Render:
    """Render a job and check that its pods are valid, confined, and fit to their volumes."""

    def render(values: Values) -> Rendered:
        job = install(configuration, CHART, JOB | values, "corpus")
        assert [item["kind"] for item in job.objects] == ["RayJob"] and job.objects[0]["apiVersion"] == "ray.io/v1"
        for group, pod in pods(job):
            assert_valid(
                {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": group} | pod["metadata"], "spec": pod["spec"]}, "1.37"
            )
            (container,) = pod["spec"]["containers"]
            assert pod["spec"]["securityContext"]["runAsNonRoot"] and pod["spec"]["restartPolicy"] == "Never"
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["resources"]["requests"] == container["resources"]["limits"]
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts.keys() == {volume["name"] for volume in pod["spec"]["volumes"]} and mounts["tmp"] == "/tmp"
        return job

    return render


def parsed(job: Rendered) -> dict[str, Any]:
    """Return the values that `dragoman bulk` reads of a job's command, which bash has read in the submitter."""
    script = f"printf '%s\\0' {job.find('RayJob spec entrypoint')}"
    printed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd="/").stdout
    program, name, *arguments = printed.split("\0")[:-1]
    assert program == "dragoman"
    command = typer.main.get_command(dragoman.app).commands[name]  # type: ignore[attr-defined]
    return {key: value for key, value in command.make_context(name, arguments).params.items() if value is not None}


ENGINES = ("ray", "device", "num_threads", "engines", "num_gpus")


@pytest.mark.parametrize(
    ("values", "engines"),
    [
        ({}, ("auto", "cpu", 2, 32, 0)),
        ({"device": "gpu"}, ("auto", "cuda", 4, 4, 1)),
        ({"workers.cpu": {"minReplicas": 2, "maxReplicas": 3, "engines": 3, "cpu": 7}}, ("auto", "cpu", 2, 9, 0)),
        ({"device": "gpu", "workers.gpu": {"gpus": 1, "engines": 2, "cpu": 8}}, ("auto", "cuda", 4, 8, 0.5)),
    ],
)
def test_engines_are_those_that_workers_have_room_for(render: Render, values: Values, engines: tuple[Any, ...]) -> None:
    job = render(values)
    read = parsed(job)
    assert tuple(read[name] for name in ENGINES) == engines
    (group,) = job.find(f"{CLUSTER} workerGroupSpecs")
    assert group["groupName"] == values.get("device", "cpu"), "no other, which autoscalers might start for nothing"
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    per_worker = read["engines"] // group["maxReplicas"]
    assert per_worker * read["num_threads"] <= limits["cpu"] and per_worker * read["num_gpus"] == limits.get("nvidia.com/gpu", 0)
    assert job.find(f"{CLUSTER} headGroupSpec rayStartParams num-cpus") == "0", "engines beside the head would compete with it"


def test_arguments_arrive_as_they_are_written(render: Render) -> None:
    inputs = ["/data/*/[a-z]?.txt", "s3://bücher/$HOME;a&b|(c)<d>/#{e}~!/`f`\\", "/etc/*", 'it\'s 2\n"lines"']
    options = {"to": "fr", "num-beams": 4, "length-penalty": 0.6, "truncate": True, "max-new-tokens": 1000000, "no-repeat": False}
    read = parsed(render({"inputs": inputs, "options": options, "model": "/models/a+b"}))
    assert list(read["inputs"]) == inputs and str(read["model"]) == "/models/a+b" and read["output"] == "/data/out"
    wanted = {"target_language": "fr", "num_beams": 4, "length_penalty": 0.6, "truncate": True, "max_new_tokens": 1000000}
    assert {name: read[name] for name in wanted} == wanted


FACTS: list[tuple[Values, dict[str, Any]]] = [
    (
        {},
        {
            "RayJob metadata name": "corpus-1",
            "RayJob spec submissionMode": "K8sJobMode",
            "RayJob spec shutdownAfterJobFinishes": True,
            "RayJob spec ttlSecondsAfterFinished": 600,
            "RayJob spec backoffLimit": 3,
            f"{CLUSTER} enableInTreeAutoscaling": True,
            f"{CLUSTER} authOptions mode": "token",
            f"{CLUSTER} workerGroupSpecs 0 minReplicas": 0,
            f"{CLUSTER} workerGroupSpecs 0 maxReplicas": 8,
            f"{AUTOSCALER} securityContext readOnlyRootFilesystem": True,
            f"{AUTOSCALER} volumeMounts tmp mountPath": "/tmp",
            f"{HEAD} automountServiceAccountToken": True,
            f"{WORKER} automountServiceAccountToken": False,
            f"{WORKER} tolerations": None,
            f"{WORKER} containers 0 image": "dragoman:0.1.0-ray",
            f"{WORKER} containers 0 lifecycle preStop exec command": ["ray", "stop"],
            f"{WORKER} containers 0 livenessProbe httpGet": {"path": "/api/healthz", "port": 52365},
        },
    ),
    (
        {"device": "gpu"},
        {
            f"{CLUSTER} workerGroupSpecs 0 maxReplicas": 4,
            f"{WORKER} containers 0 image": "dragoman:0.1.0-cuda-ray",
            f"{WORKER} containers 0 resources limits": {"cpu": 4, "memory": "16Gi", "nvidia.com/gpu": 1},
            f"{WORKER} tolerations 0 key": "nvidia.com/gpu",
            f"{HEAD} containers 0 image": "dragoman:0.1.0-ray",
        },
    ),
    (
        {"workers.cpu": {"nodeSelector": SPOT, "podSpec": {"priorityClassName": "low"}}},
        {
            f"{WORKER} nodeSelector": SPOT,
            f"{WORKER} priorityClassName": "low",
            f"{WORKER} terminationGracePeriodSeconds": 20,
            f"{HEAD} nodeSelector": None,
        },
    ),
    (
        {"models": IMAGE, "data": CLAIM, "serviceAccountName": "reader", "authOptions.mode": None},
        {
            f"{group} {path}": value
            for group in (HEAD, WORKER)
            for path, value in {
                "serviceAccountName": "reader",
                "volumes models image": IMAGE["image"],
                "containers 0 volumeMounts models readOnly": True,
                "volumes data": {"name": "data"} | CLAIM,
                "containers 0 volumeMounts data mountPath": "/data",
            }.items()
        }
        | {f"{CLUSTER} authOptions": None},
    ),
    (
        {"env": [{"name": "AWS_REGION", "value": "x"}], "envFrom": [{"secretRef": {"name": "bucket"}}]},
        {f"{group} containers 0 envFrom 0 secretRef name": "bucket" for group in (HEAD, WORKER)}
        | {f"{group} containers 0 env AWS_REGION value": "x" for group in (HEAD, WORKER)},
    ),
]


@pytest.mark.parametrize(("values", "facts"), FACTS, ids=[",".join(values) or "defaults" for values, _ in FACTS])
def test_values_become_fields_of_the_job(render: Render, values: Values, facts: dict[str, Any]) -> None:
    job = render(values)
    assert {path: job.find(path) for path in facts} == facts


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"inputs": []}, "inputs"),
        ({"inputs": ["--help"]}, "inputs"),
        ({"output": ""}, "output"),
        ({"options": {"ray": "auto"}}, "'ray'"),
        ({"device": "tpu"}, "device"),
        ({"workers.gpu.maxReplicas": 0}, "/workers/gpu/maxReplicas"),
        ({"workers.cpu.minReplicas": 9}, "minReplicas is more"),
        ({"workers.cpu.engines": 9}, "engines"),
        ({"worker.cpu": 1}, "worker"),
    ],
)
def test_values_that_cannot_work_are_refused(render: Render, values: Values, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        render(values)


def test_images_have_the_ray_that_kuberay_is_told() -> None:
    values, extras = (
        load("ray/values.yaml"),
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"],
    )
    (asked,) = (each for each in map(Requirement, extras["ray"]) if each.name == "ray")
    assert "default" in asked.extras, "the dashboard, which takes the job and answers probes"
    for kind in ("cpu", "gpu"):
        packages = "cpu" if kind == "cpu" else "cuda"
        lock = (ROOT / f"deploy/docker/requirements-{packages}-ray.txt").read_text()
        assert re.search(r"^ray==(\S+)", lock, re.MULTILINE)[1] == values["rayVersion"]  # type: ignore[index]
        text = Path(ROOT / f"deploy/docker/{packages}.Dockerfile").read_text()
        assert f"--build-arg PACKAGES={packages}-ray -t {values['images'][kind]} ." in text and f"ARG PACKAGES={packages}\n" in text
        assert "deploy/docker/requirements-${PACKAGES}.txt" in text
