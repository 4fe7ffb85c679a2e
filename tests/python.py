# SPDX-License-Identifier: Apache-2.0
"""Python code in a fresh interpreter.

Not in conftest.py: children of tests import this module, and must start fast.
"""

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEADLINE_S = 60.0  # The code may import torch.


def run_python(
    code: str, *args: object, python: Sequence[str] = (sys.executable,), **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python code at the root of the repository; return its status and output.

    Args:
      code: may be indented.
      args: what it finds in `sys.argv[1:]`.
      python: the words of the command that starts the interpreter.
      options: more of `subprocess.run`, such as `env`.
    """
    command = [*python, "-c", textwrap.dedent(code), *map(str, args)]
    options = {"cwd": ROOT, "timeout": DEADLINE_S, **options}
    return subprocess.run(command, capture_output=True, text=True, **options)
