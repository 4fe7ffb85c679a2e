# SPDX-License-Identifier: Apache-2.0
"""Set-up from a fresh machine, played with fake tools: no network, no packages."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from core import imports

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30

# Stands for every Python: answers -V, makes a venv with itself as its Python, and
# writes down each call of pip.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
-V) echo "Python $FAKE_VERSION" ;;
*ensurepip*) test -e "$FAKE_ROOT/has_venv_module" ;;
*Python.h*) ;;
"-c import pip") ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip "*) echo "$*" >>"$FAKE_ROOT/pip_calls"; cat "$FAKE_ROOT/pip_says" >&2
    exit "$FAKE_PIP_STATUS" ;;
esac
"""
FAKE_APT_GET = """#!/bin/sh
echo "$*" >>"$FAKE_ROOT/apt_calls"
touch "$FAKE_ROOT/has_venv_module"
"""
COPIED = (
    "Makefile",
    "requirements.txt",
    "setup.py",
    "pyproject.toml",
    "tools/setup.sh",
)
PYTHONS = ("python3", "python3.10", "python3.11", "python3.12", "python3.13")
OFFLINE = """WARNING: Retrying after connection broken by 'NewConnectionError(
Failed to establish a new connection: Temporary failure in name resolution)'
ERROR: No matching distribution found for torch
"""


class Machine:
    """A checkout and a PATH whose Pythons, apt-get, sudo and id are fakes."""

    def __init__(self, path: Path):
        self.path = path
        self.checkout = path / "checkout"
        self.bin = path / "bin"
        self.pip_calls = path / "pip_calls"
        self.apt_calls = path / "apt_calls"
        (self.checkout / "tools").mkdir(parents=True)
        self.bin.mkdir()
        for name in COPIED:
            shutil.copy(ROOT / name, self.checkout / name)
        (self.checkout / "csrc").mkdir()
        for name in ("nest.h", "module.cc"):
            (self.checkout / "csrc" / name).touch()
        for name in PYTHONS:
            self.install(name, FAKE_PYTHON)
        self.install("id", "#!/bin/sh\necho 1000\n")
        self.install("sudo", '#!/bin/sh\nexec "$@"\n')
        self.install("apt-get", FAKE_APT_GET)
        for name in ("c++", "pkg-config"):
            self.install(name, "#!/bin/sh\n")
        (path / "has_venv_module").touch()
        (path / "pip_says").touch()
        # No variable of the make that may run this test, nor anybody's PYTHON.
        self.env = {"PATH": f"{self.bin}:{os.environ['PATH']}"}
        self.env |= {"FAKE_ROOT": str(path), "FAKE_VERSION": "3.12.7"}
        self.env |= {"FAKE_PIP_STATUS": "0", "LC_ALL": "C"}

    def install(self, name: str, script: str) -> None:
        tool = self.bin / name
        tool.write_text(script)
        tool.chmod(0o755)

    def make(self, *args: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["make", *args],
            cwd=self.checkout,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    def error_of(self, *args: str) -> str:
        """The one line that a failing make prints, besides make's own."""
        done = self.make(*args)
        assert done.returncode != 0, done
        lines = [x for x in done.stderr.splitlines() if not x.startswith("make")]
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("setup: error: ")
        return lines[0]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def count_setups(machine: Machine) -> int:
    """The number of set-ups that went as far as building the extension."""
    return machine.pip_calls.read_text().count(" -e .")


def test_setup_installs_the_pinned_list_then_builds_with_it(machine):
    done = machine.make("setup")
    assert done.returncode == 0, done
    pins, build = machine.pip_calls.read_text().splitlines()
    assert pins.endswith("-r requirements.txt")
    assert build.endswith("--no-build-isolation --no-deps -e .")
    assert not machine.apt_calls.exists()  # Nothing is missing.


def test_a_later_setup_does_what_has_changed(machine):
    machine.make("setup")
    done = machine.make("setup")
    assert (done.returncode, done.stdout) == (0, "")
    assert count_setups(machine) == 1
    with (machine.checkout / "requirements.txt").open("a") as requirements:
        requirements.write("extra==1.0\n")
    machine.make("setup")
    assert count_setups(machine) == 2
    (machine.checkout / "csrc" / "nest.h").write_text("#pragma once")
    machine.make("setup")
    assert count_setups(machine) == 3


def test_another_python_replaces_the_environment(machine):
    machine.make("setup")
    marker = machine.checkout / ".venv" / "of_the_old_python"
    marker.touch()
    machine.install("other", FAKE_PYTHON.replace("$FAKE_VERSION", "3.11.7"))
    machine.make("setup", "PYTHON=other")
    assert not marker.exists()
    assert count_setups(machine) == 2


def test_environment_whose_python_is_gone_is_made_anew(machine):
    machine.make("setup")
    python = machine.checkout / ".venv" / "bin" / "python"
    python.unlink()
    assert machine.make("setup").returncode == 0
    assert python.exists()


@pytest.mark.parametrize("version", ["3.9.18", "3.14.0", "2.7.18"])
def test_unsupported_python_is_named_with_a_remedy(machine, version):
    machine.env["FAKE_VERSION"] = version
    error = machine.error_of("setup")
    assert f"python3 (Python {version})" in error
    assert "PYTHON=/path/to/python3.12" in error
    assert not machine.pip_calls.exists()


def test_python_that_is_not_there_is_said(machine):
    error = machine.error_of("setup", "PYTHON=nowhere/python")
    assert "none that runs" in error


def test_newer_python_is_found_beside_an_old_python3(machine):
    machine.install("python3", FAKE_PYTHON.replace("$FAKE_VERSION", "3.9.18"))
    done = machine.make("setup")
    assert done.returncode == 0, done
    assert "Python 3.12.7" in done.stdout


def test_missing_venv_module_is_installed_with_sudo_and_said(machine):
    (machine.path / "has_venv_module").unlink()
    done = machine.make("setup")
    assert done.returncode == 0, done
    assert "sudo apt-get install python3.12-venv" in done.stdout
    assert "install -y python3.12-venv" in machine.apt_calls.read_text()


def test_failing_apt_gets_one_line_with_the_package(machine):
    (machine.path / "has_venv_module").unlink()
    machine.install("apt-get", "#!/bin/sh\nexit 100\n")
    error = machine.error_of("setup")
    assert "could not install python3.12-venv" in error


@pytest.fixture
def bare_machine(machine):
    """Its PATH has what setup.sh itself uses and the fakes, but no real compiler."""
    used = "cat cp dirname grep head ls make mkdir rm sed sh test touch".split()
    for name in used:
        (machine.bin / name).symlink_to(shutil.which(name))
    machine.env["PATH"] = str(machine.bin)
    machine.install("apt-get", "#!/bin/sh\nexit 100\n")
    return machine


@pytest.mark.parametrize(
    "tool, package", [("c++", "g++"), ("pkg-config", "pkg-config libgrpc++-dev")]
)
def test_missing_tools_are_asked_for_by_debian_names(bare_machine, tool, package):
    (bare_machine.bin / tool).unlink()
    assert f"could not install {package} " in bare_machine.error_of("setup")


def test_missing_cmake_is_asked_for_only_by_test_classic(bare_machine):
    assert bare_machine.make("setup").returncode == 0
    assert "could not install cmake" in bare_machine.error_of("test-classic")


def test_no_network_gets_one_line_with_a_remedy(machine):
    machine.env["FAKE_PIP_STATUS"] = "1"
    (machine.path / "pip_says").write_text(OFFLINE)
    error = machine.error_of("setup")
    assert "No network?" in error
    assert "run the same command again" in error


def test_failing_pip_shows_its_reason(machine):
    machine.env["FAKE_PIP_STATUS"] = "1"
    (machine.path / "pip_says").write_text("ERROR: [Errno 28] No space left\n")
    done = machine.make("setup")
    assert done.returncode != 0
    assert "No space left" in done.stderr
    assert "No network?" not in done.stderr


def test_failed_setup_is_tried_again(machine):
    machine.env["FAKE_PIP_STATUS"] = "1"
    machine.make("setup")
    machine.env["FAKE_PIP_STATUS"] = "0"
    assert machine.make("setup").returncode == 0
    assert count_setups(machine) == 1


def launch(tmp_path: Path, body: str) -> subprocess.Popen:
    """tools/launch.py with a trainer of these lines; returns when they have begun."""
    (tmp_path / "trainer.py").write_text(f"import signal, sys\n{body}\n")
    launcher = subprocess.Popen(
        [sys.executable, ROOT / "tools" / "launch.py", "trainer"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert launcher.stdout.readline() == "ready\n"
    return launcher


STOPS_WITH_A_CHECKPOINT = """
signals = {signal.SIGINT, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("ready", flush=True)
assert signal.sigtimedwait(signals, 30)
print("checkpoint", flush=True)
sys.exit(75)
"""


def test_ctrl_c_waits_for_the_checkpoint_and_is_no_error(tmp_path):
    launcher = launch(tmp_path, STOPS_WITH_A_CHECKPOINT)
    os.killpg(launcher.pid, signal.SIGINT)  # As a terminal does: to everybody.
    out, _ = launcher.communicate(timeout=DEADLINE_S)
    assert out == "checkpoint\n"
    assert launcher.returncode == 0


def test_sigterm_is_handed_on_to_the_trainer(tmp_path):
    launcher = launch(tmp_path, STOPS_WITH_A_CHECKPOINT)
    launcher.terminate()  # As make does: to its child alone.
    out, _ = launcher.communicate(timeout=DEADLINE_S)
    assert out == "checkpoint\n"
    assert launcher.returncode == 0


def test_failure_of_the_trainer_is_the_launchers(tmp_path):
    launcher = launch(tmp_path, 'print("ready", flush=True)\nsys.exit(78)')
    launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 78


def setup_arguments() -> dict:
    call = ast.parse((ROOT / "setup.py").read_text()).body[-1].value
    wanted = ("install_requires", "extras_require", "py_modules", "packages")
    return {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg in wanted}


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", line)[0].lower() for line in requirements}


def read_requirements() -> tuple[set[str], set[str]]:
    """Names of what we import, and of what those bring along."""
    text = (ROOT / "requirements.txt").read_text()
    ours, theirs = text.split("# What those bring along")
    return names(pins_of(ours)), names(pins_of(theirs))


def pins_of(text: str) -> list[str]:
    return re.findall(r"^[\w.-]+==.*", text, re.M)


def test_setup_py_and_requirements_name_the_same_packages():
    arguments = setup_arguments()
    extras = arguments["extras_require"]
    ours, theirs = read_requirements()
    assert ours == names(
        arguments["install_requires"]
        + [line for name in ("minatar", "tls", "tools", "dev") for line in extras[name]]
    )
    assert not ours & theirs


def test_extras_that_the_pages_name_exist():
    named = set()
    for folder in ("docs", "settings", "examples/*", "."):
        for page in ROOT.glob(f"{folder}/*.md"):
            named |= set(re.findall(r"pip install -e '\.\[(\w+)\]'", page.read_text()))
    assert {"classic", "mujoco", "nethack"} <= named
    extras = setup_arguments()["extras_require"]
    assert named <= set(extras)
    for package, extra in imports.EXTRAS.items():
        assert package in names(extras[extra])


def test_every_requirement_is_pinned():
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        assert not line or line.startswith("#") or re.match(r"[\w.-]+==[\w.]+", line)


def test_torch_is_pinned_in_one_place():
    texts = [ROOT / "Makefile", ROOT / ".ci" / "run"]
    for pattern in ("*.py", "*.txt", "*.toml", "tools/*", "core/**/*.py"):
        texts += ROOT.glob(pattern)
    files = [p for p in texts if p.is_file()]
    pins = [p.name for p in files if re.search(r"\btorch *==", p.read_text())]
    assert pins == ["requirements.txt"]


def test_commands_of_the_documentation_exist():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    code = "".join(text for page in pages for text in code_of(page))
    commands = set(re.findall(r"\bmake ([a-z][\w-]*)", code))
    assert {"quickstart", "test"} <= commands
    assert commands <= targets


def code_of(page: Path) -> list[str]:
    """What a Markdown page shows as code, in blocks and in the line."""
    text = page.read_text()
    return re.findall(r"```.*?```|`[^`\n]+`", text, re.S)


def test_setup_py_installs_what_is_there():
    arguments = setup_arguments()
    for module in arguments["py_modules"]:
        assert (ROOT / f"{module}.py").exists(), module
    for package in arguments["packages"]:
        folder = "libtorchbeast/nest" if package == "nest" else package
        assert (ROOT / folder.replace(".", "/") / "__init__.py").exists(), package
    rooms = {f"core.{path.parent.name}" for path in ROOT.glob("core/*/__init__.py")}
    assert rooms < set(arguments["packages"])


@pytest.mark.parametrize(
    "module, package",
    [
        ("monobeast", "gymnasium"),
        ("polybeast", "gymnasium"),
        ("polybeast_env", "numpy"),
        ("core.environments.check", "gymnasium"),
        ("tools.sweep", "rich"),
        ("tools.plot", "matplotlib"),
        ("benchmarks.ceilings", "numpy"),
    ],
)
def test_a_missing_package_is_one_line_that_says_where_it_is(module, package):
    line = run_without_packages("-m", module)
    extra = "'.[tools]'" if package == "matplotlib" else "."
    for part in (
        repr(package),
        sys.executable,
        "source .venv/bin/activate",
        f"pip install -e {extra})",
    ):
        assert part in line


def test_before_python_3_11_a_sweep_without_tomli_is_told_the_extra():
    line = run_without_packages("-c", "import tools, tomli")
    assert "'tomli'" in line and "(pip install -e '.[tools]')" in line


def run_without_packages(*args: str) -> str:
    """Return the one line with which a program ends that has no site-packages."""
    done = subprocess.run(
        [sys.executable, "-S", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 78
    (line,) = done.stderr.splitlines()
    return line
