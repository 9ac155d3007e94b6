"""docker/kubernetes by the schemas of Kubernetes, and by what moed takes and promises."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from moed.config.cli import read_flags
from moed.config.settings import ServeSettings
from moed.config.sources import read_variables
from moed.config.validation import validate
from moed.dist.torchrun_patience import longest_drain_s
from moed.server.api.probes import PROBE_PATHS

FOLDER = Path(__file__).parents[2] / "docker" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
# The oldest that is held against, and a newer one.
VERSIONS = ("1.32", "1.37")
# From the end of a drain until all processes have ended.
LEAVING_S = 5

# The fields of leaderworkerset.x-k8s.io/v1; what is inside of pod templates is Kubernetes' own.
LEADER_WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "networkConfig": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
                },
                "rolloutStrategy": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["type"],
                    "properties": {
                        "type": {"const": "RollingUpdate"},
                        "rollingUpdateConfiguration": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "partition": {"type": "integer"},
                                "maxSurge": {"type": ["integer", "string"]},
                                "maxUnavailable": {"type": ["integer", "string"]},
                            },
                        },
                    },
                },
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate"],
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {
                            "enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                        },
                        "leaderTemplate": {"type": "object"},
                        "workerTemplate": {"type": "object"},
                    },
                },
            },
        },
    },
}


def documents(kind: str | None = None) -> Iterator[Any]:
    for path in FILES:
        for document in yaml.safe_load_all(path.read_text()):
            if kind is None or document["kind"] == kind:
                yield document


def pod_templates() -> list[Any]:
    templates = [document["spec"]["template"] for document in documents("Deployment")]
    for document in documents("LeaderWorkerSet"):
        group = document["spec"]["leaderWorkerTemplate"]
        templates += [group[key] for key in ("leaderTemplate", "workerTemplate") if key in group]
    return templates


@pytest.mark.parametrize("version", VERSIONS)
def test_valid_by_the_api(version: str) -> None:
    for document in documents():
        if document["kind"] != "LeaderWorkerSet":
            kubernetes_validate.validate(document, version, strict=True)
            continue
        jsonschema.validate(document, LEADER_WORKER_SET)
        for template in pod_templates():
            # A Deployment holds any pod template to its schema.
            labels = template["metadata"]["labels"]
            around = {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": "any"},
                "spec": {"selector": {"matchLabels": labels}, "template": template},
            }
            kubernetes_validate.validate(around, version, strict=True)


def test_the_api_refuses_what_is_wrong() -> None:
    (document,) = documents("Deployment")
    document["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[0], strict=True)


@pytest.mark.parametrize("template", pod_templates(), ids=["one node", "several"])
def test_pods(template: Any) -> None:
    spec = template["spec"]
    (container,) = spec["containers"]
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/tmp"]]["emptyDir"] == volumes[mounts["/cache"]]["emptyDir"] == {}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    probes = {
        probe: container[f"{probe}Probe"]["httpGet"]
        for probe in ("startup", "readiness", "liveness")
    }
    assert [get["path"] for get in probes.values()] == ["/startupz", "/readyz", "/livez"]
    assert {get["path"] for get in probes.values()} <= PROBE_PATHS
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == ServeSettings().port
    assert {get["port"] for get in probes.values()} == {"http"}


def words_of(container: Any) -> list[str]:
    args: list[str] = container["args"]
    return args[args.index("serve") + 1 :]


@pytest.mark.parametrize("template", pod_templates(), ids=["one node", "several"])
def test_flags_and_variables_are_moeds(template: Any) -> None:
    (container,) = template["spec"]["containers"]
    flags = read_flags(words_of(container))
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(flags["data_parallel_size"][0]) % gpus == 0
    variables = {each["name"]: each.get("value", "secret") for each in container["env"]}
    validate(flags, read_variables(variables), {})


@pytest.mark.parametrize("template", pod_templates(), ids=["one node", "several"])
def test_times_of_the_end_fit_into_each_other(template: Any) -> None:
    """preStop + torchrun or drain + leaving <= grace; delay < timeout; readiness seen in the
    delay.
    """
    spec = template["spec"]
    (container,) = spec["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    timeout_s = float(variables["MOED_SHUTDOWN_TIMEOUT"])
    delay_s = float(variables["MOED_DRAIN_DELAY"])
    patience = [word for word in container["args"] if word.startswith("--shutdown-timeout=")]
    outer_s = timeout_s
    if "tini" in container.get("command", ()):
        outer_s = float(patience[0].partition("=")[2])
        assert timeout_s <= longest_drain_s(outer_s)
    before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert before_s + outer_s + LEAVING_S <= spec["terminationGracePeriodSeconds"]
    readiness = container["readinessProbe"]
    seen_s = (
        readiness["periodSeconds"] * readiness["failureThreshold"] + readiness["timeoutSeconds"]
    )
    assert seen_s <= delay_s < timeout_s


def test_the_group_has_a_rank_for_each_gpu() -> None:
    (document,) = documents("LeaderWorkerSet")
    group = document["spec"]["leaderWorkerTemplate"]
    (container,) = group["workerTemplate"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node={gpus}" in container["args"]
    assert f"--data-parallel-size={gpus * group['size']}" in container["args"]


def test_what_selects_pods_finds_them() -> None:
    names = {document["metadata"]["name"] for document in documents("LeaderWorkerSet")}
    for template in pod_templates():
        labels = dict(template["metadata"]["labels"])
        assert labels["app.kubernetes.io/name"] in {"moed", *names}
    selectors = [document["spec"]["selector"] for document in documents("Service")]
    selectors += [
        document["spec"]["selector"]["matchLabels"] for document in documents("PodDisruptionBudget")
    ]
    selectors += [
        document["spec"]["podSelector"]["matchLabels"] for document in documents("NetworkPolicy")
    ]
    assert len(selectors) == 6
    for selector in selectors:
        own = selector.get("app.kubernetes.io/name") == "moed"
        # The controller of groups puts its labels on.
        assert own or selector["leaderworkerset.sigs.k8s.io/name"] in names
    for document in documents("NetworkPolicy"):
        opened = [
            port["port"] for rule in document["spec"]["ingress"] for port in rule.get("ports", ())
        ]
        assert opened == [ServeSettings().port]
