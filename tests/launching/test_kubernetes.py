# SPDX-License-Identifier: Apache-2.0
"""tools/kubernetes: manifests that the API accepts and that name each other rightly."""

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from core.remote import server_flags
from tests import namespaces
from tests.conftest import DEADLINE_S, free_ports

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tools" / "kubernetes"
TEXT = (FOLDER / "torchbeast.yaml").read_text()
PAGE = (ROOT / "docs" / "scale.md").read_text()
PAGE = PAGE.partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
FROM_FILE = re.compile(r"create secret generic (\S+) --from-file=(\S+)")
HOME = "/home/torchbeast"  # In the images.
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
    assert secrets == set(dict(FROM_FILE.findall(TEXT)))
    service = one("Service", "torchbeast-servers")
    labels = servers["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (port,) = service["spec"]["ports"]
    name = f"{service['metadata']['name']}:{port['port']}"
    assert f"--server_addresses=dns:{name}" in pod_of(learner)["containers"][0]["args"]
    made = re.search(r"tools.certs --hosts (\S+)", TEXT)
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
    assert "HorizontalPodAutoscaler" not in TEXT


def command_of(manifest: dict, data: dict[str, str]) -> list[str]:
    """Return the container's command, with variables replaced as Kubernetes does it."""
    (container,) = pod_of(manifest)["containers"]
    command = []
    for word in (*container["command"], *container["args"]):
        for name, value in data.items():
            word = word.replace(f"$({name})", value)
        command.append(word)
    assert command[0] == "python" and "$(" not in "".join(command)
    return command


def short_run() -> dict[str, str]:
    """Return the ConfigMap's data, edited as users edit it."""
    data = one("ConfigMap", "torchbeast")["data"]
    return {**data, "ENV": "Catch", "TOTAL_STEPS": "2000"}


class Pods:
    """Pods of the manifests, played by two hosts. Their volumes are in a folder.

    Each command runs as it stands: its user, its paths, the service's name and port.
    As in its image, the working directory is the checkout, and Python is in /venv.
    """

    def __init__(self, hosts: namespaces.Hosts, folder: Path, data: dict[str, str]):
        self._hosts = hosts
        self._folder = folder
        self._data = data
        self._secrets = dict(FROM_FILE.findall(TEXT))

    def command(self, manifest: dict) -> list[str]:
        """Return the command line that runs a manifest's pod here."""
        name, pod = manifest["metadata"]["name"], pod_of(manifest)
        (container,) = pod["containers"]
        security = pod["securityContext"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {
            mount["mountPath"]: self._volume(
                volumes[mount["name"]], f"{name}-{mount['name']}", security["fsGroup"]
            )
            for mount in container["volumeMounts"]
        }
        home = self._folder / f"{name}-home"
        root = self._folder / f"{name}-root"
        root.mkdir()
        home.mkdir()
        os.chown(home, security["runAsUser"], security["runAsGroup"])
        mounts |= {"/torchbeast": ROOT, "/venv": Path(sys.prefix), HOME: home}
        return self._hosts.on(
            name,
            *namespaces.in_container(
                *command_of(manifest, self._data),
                user=f"{security['runAsUser']}:{security['runAsGroup']}",
                mounts=mounts,
                env={
                    **self._data,
                    "PATH": "/venv/bin:/usr/local/bin:/usr/bin:/bin",
                    "HOME": HOME,
                },
                folder=root,
                cwd="/torchbeast",
            ),
        )

    def _volume(self, volume: dict, name: str, group: int) -> Path:
        """Make a volume: the files of a Secret, or an empty one."""
        folder = self._folder / name
        folder.mkdir()
        if "secret" in volume:
            secret = volume["secret"]
            files = self._folder / self._secrets[secret["secretName"]]
            for file in files.iterdir():
                copy = shutil.copy(file, folder)
                os.chmod(copy, secret["defaultMode"])
                os.chown(copy, -1, group)
        folder.chmod(0o2775)
        os.chown(folder, -1, group)
        return folder


@pytest.mark.slow
def test_the_pods_commands_train_a_run_to_its_end_as_they_stand(tmp_path):
    pytest.importorskip("cryptography")
    namespaces.require()
    if not ROOT.stat().st_mode & stat.S_IROTH:
        pytest.skip("needs a checkout that other users can read (umask 022)")
    (line,) = re.findall(r"^#   (python -m tools\.certs .*)$", TEXT, re.M)
    assert f"\n{line}\n" in PAGE
    assert FROM_FILE.findall(PAGE) == FROM_FILE.findall(TEXT)
    python, *certs = shlex.split(line)
    assert python == "python"
    subprocess.run(
        [sys.executable, *certs],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    learner, servers = (
        one("Job", "torchbeast-learner"),
        one("Deployment", "torchbeast-servers"),
    )
    names = [manifest["metadata"]["name"] for manifest in (learner, servers)]
    with namespaces.Hosts(names, tmp_path) as hosts:
        pods = Pods(hosts, tmp_path, short_run())
        check_training(pods.command(servers), pods.command(learner))
    run = tmp_path / "torchbeast-learner-runs" / short_run()["XPID"]
    assert list((run / "checkpoints").iterdir())


@pytest.mark.slow
def test_the_containers_commands_train_with_other_paths_where_the_test_is_not_root(
    tmp_path,
):
    pytest.importorskip("cryptography")
    if namespaces.reason_for_none() is None:
        pytest.skip("the commands run as they stand, in another test")
    from tools import certs

    # 127.0.0.1 stands for the service's name.
    assert certs.main(["--hosts", "127.0.0.1", "--out", str(tmp_path / "certs")]) == 0
    port = free_ports(1)

    def command(manifest: dict, certificates: str) -> list[str]:
        text = "\n".join(command_of(manifest, short_run()))
        for old, new in (
            ("torchbeast-servers:4431", f"127.0.0.1:{port}"),
            (":4431", f":{port}"),
            ("/runs", f"{tmp_path}/runs"),
            ("/certs", f"{tmp_path}/certs/{certificates}"),
        ):
            text = text.replace(old, new)
        return [sys.executable, *text.split("\n")[1:]]

    check_training(
        command(one("Deployment", "torchbeast-servers"), "127.0.0.1"),
        command(one("Job", "torchbeast-learner"), "learner"),
    )
    run = tmp_path / "runs" / short_run()["XPID"]
    assert list((run / "checkpoints").iterdir())


def check_training(serve: list[str], learn: list[str]) -> None:
    servers = subprocess.Popen(serve, cwd=ROOT)
    try:
        done = subprocess.run(learn, cwd=ROOT, timeout=DEADLINE_S)
    finally:
        status = namespaces.stop(servers)
    assert done.returncode == 0
    assert status == 0
