# SPDX-License-Identifier: Apache-2.0
"""What `make images` and `make fresh` read: Dockerfiles, README. Installs nothing."""

import importlib
import re

import pytest

from tools.fresh import dockerfiles, readme

NAMES = sorted(dockerfiles.CHECKS)


@pytest.mark.parametrize("name", NAMES)
def test_a_dockerfile_can_be_tried_without_docker(name):
    image = dockerfiles.build(dockerfiles.FOLDER / f"{name}.Dockerfile", None)
    assert image.user != "root"
    python, _, module, *flags = image.entrypoint
    assert python == "python" and image.env["PATH"].startswith("/venv/bin:/")
    # argparse ends the program with 2 if it does not know a flag.
    importlib.import_module(module).parse_flags(flags)


def test_every_dockerfile_is_tried():
    found = sorted(path.stem for path in dockerfiles.FOLDER.glob("*.Dockerfile"))
    assert found == NAMES


def test_the_servers_image_installs_no_torch():
    text = (dockerfiles.FOLDER / "servers.Dockerfile").read_text()
    installed = re.findall(r"pip install.*", text)
    assert installed and not any("torch" in line for line in installed)


def test_an_instruction_that_is_not_tried_is_refused():
    with pytest.raises(ValueError, match="HEALTHCHECK: expected one of FROM, ARG"):
        dockerfiles.parse("FROM debian:bookworm-slim\nHEALTHCHECK CMD true\n")


def test_the_readme_begins_with_a_clone_and_ends_with_training():
    lines = readme.commands((readme.ROOT / "README.md").read_text())
    assert lines[0] == f"git clone {readme.HERE} && cd torchbeast"
    assert lines[1] == "make quickstart"
    script = readme.script(lines, "/srv/torchbeast.git").splitlines()
    assert script[1] == "git clone /srv/torchbeast.git && cd torchbeast"
    assert script[-1].startswith("exec python -m polybeast")
