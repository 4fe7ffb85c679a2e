# SPDX-License-Identifier: Apache-2.0
"""Install MonoBeast into an environment of your own: `pip install -e .`

Needs neither a compiler nor gRPC. The ranges below say what the code works with;
requirements.txt says which versions `make setup` installs and the tests run with.
"""

from setuptools import setup

setup(
    name="torchbeast",
    version="0.1.0",
    description="IMPALA in PyTorch, to fork and to change",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    py_modules=["monobeast", "atari_wrappers"],
    packages=["core"],
    install_requires=[
        "torch>=2.4",
        "numpy>=1.26",
        "gymnasium>=1.0",
        "ale-py>=0.10",
        "opencv-python-headless>=4.8",
        "safetensors>=0.4",
        "rich>=13",
        "tensorboard>=2.15",
        "imageio>=2.31",
        "imageio-ffmpeg>=0.4.9",
        "psutil>=5.9",
    ],
    extras_require={
        "minatar": ["minatar>=1.0.15"],
        "wandb": ["wandb"],
        # Classic gym, for environments that never moved to Gymnasium. atari-py is
        # compiled when it is installed: it needs a C++ compiler, cmake and zlib.
        "classic": [
            "gym==0.26.2",
            "atari-py==0.2.9",
            "numpy<2; python_version<'3.13'",
            "opencv-python-headless<4.12; python_version<'3.13'",
        ],
        "dev": [
            "pytest",
            "pytest-timeout",
            "hypothesis",
            "matplotlib",
            "ruff",
            "mypy",
        ],
    },
)
