# SPDX-License-Identifier: Apache-2.0
"""tools/kubernetes: manifests that the API accepts, and that name each other rightly.

Seen red: with a misspelled field, with `clusterIP: none`, with a Secret that no volume
names, and with a flag that polybeast_env does not have. With an autoscaler of another
Deployment, with `averageUtilisation`, with more streams than the
learner has, and with a Deployment that requests no CPU.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from core.remote import server_flags
from tests.conftest import DEADLINE_S, free_ports

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tools" / "kubernetes"
VERSIONS = ("1.32.0", "1.37.0")


def manifests() -> list[dict]:
    texts = [path.read_text() for path in sorted(FOLDER.glob("*.yaml"))]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text)]


def one(kind: str, name: str) -> dict:
    (found,) = (
        m for m in manifests() if (m["kind"], m["metadata"]["name"]) == (kind, name)
    )
    return found


def pod_of(manifest: dict) -> dict:
    return manifest["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_one_of_the_api(version):
    for manifest in manifests():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_what_the_manifests_name_is_there():
    learner, servers = (
        one("Job", "torchbeast-learner"),
        one("Deployment", "torchbeast-servers"),
    )
    secrets = set()
    for manifest in (learner, servers):
        pod = pod_of(manifest)
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        secrets.add(volumes["certs"]["secret"]["secretName"])
        for source in container["envFrom"]:
            one("ConfigMap", source["configMapRef"]["name"])
        known = one("ConfigMap", "torchbeast")["data"].keys()
        known |= {entry["name"] for entry in container.get("env", ())}
        used = re.findall(r"\$\((\w+)\)", " ".join(container["args"]))
        assert used and set(used) <= known
    one("PersistentVolumeClaim", "torchbeast-runs")
    text = (FOLDER / "torchbeast.yaml").read_text()
    assert secrets == set(re.findall(r"create secret generic (\S+)", text))
    service = one("Service", "torchbeast-servers")
    labels = servers["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (port,) = service["spec"]["ports"]
    name = f"{service['metadata']['name']}:{port['port']}"
    assert f"--server_addresses=dns:{name}" in pod_of(learner)["containers"][0]["args"]
    made = re.search(r"tools.certs --hosts (\S+)", text)
    assert made is not None and made[1] == service["metadata"]["name"]


def test_the_autoscaler_scales_the_servers_by_the_cpu_that_they_request():
    scaler = one("HorizontalPodAutoscaler", "torchbeast-servers")["spec"]
    target = scaler["scaleTargetRef"]
    servers = one(target["kind"], target["name"])
    assert servers["apiVersion"] == target["apiVersion"]
    (container,) = pod_of(servers)["containers"]
    (metric,) = scaler["metrics"]
    # A utilization is a part of the request.
    assert metric["resource"]["target"]["type"] == "Utilization"
    assert metric["resource"]["name"] in container["resources"]["requests"]
    replicas = servers["spec"]["replicas"]
    assert scaler["minReplicas"] <= replicas <= scaler["maxReplicas"]
    streams = scaler["maxReplicas"] * server_flags.STREAMS_PER_SERVER
    assert streams <= server_flags.MIN_MAX_STREAMS  # The learner's --max_streams.
    # An option: who applies torchbeast.yaml gets no autoscaler.
    text = (FOLDER / "torchbeast.yaml").read_text()
    assert "HorizontalPodAutoscaler" not in text


def command_of(manifest: dict, data: dict[str, str], replaced: dict) -> list[str]:
    """Return what the container runs, with paths and hosts of this machine."""
    (container,) = pod_of(manifest)["containers"]
    words = []
    for word in (*container["command"], *container["args"]):
        for name, value in data.items():
            word = word.replace(f"$({name})", value)
        for old, new in replaced.items():
            word = word.replace(old, str(new))
        words.append(word)
    assert words[0] == "python" and "$(" not in "".join(words)
    return [sys.executable, *words[1:]]


@pytest.mark.slow
def test_the_containers_commands_train_a_run_to_its_end(tmp_path):
    pytest.importorskip("cryptography")
    from tools import certs

    # 127.0.0.1 stands for the service's name.
    assert certs.main(["--hosts", "127.0.0.1", "--out", str(tmp_path / "certs")]) == 0
    data = dict(one("ConfigMap", "torchbeast")["data"])
    data |= {"ENV": "Catch", "TOTAL_STEPS": "2000"}
    port = free_ports(1)
    replaced = {"torchbeast-servers:4431": f"127.0.0.1:{port}", ":4431": f":{port}"}
    replaced |= {"/runs": tmp_path / "runs"}
    commands = {
        folder: command_of(manifest, data, {**replaced, "/certs": tmp_path / folder})
        for folder, manifest in {
            "certs/127.0.0.1": one("Deployment", "torchbeast-servers"),
            "certs/learner": one("Job", "torchbeast-learner"),
        }.items()
    }
    servers = subprocess.Popen(commands["certs/127.0.0.1"], cwd=ROOT)
    try:
        done = subprocess.run(commands["certs/learner"], cwd=ROOT, timeout=DEADLINE_S)
    finally:
        servers.terminate()
        assert servers.wait(DEADLINE_S) == 0
    assert done.returncode == 0
    assert list((tmp_path / "runs" / data["XPID"] / "checkpoints").iterdir())
