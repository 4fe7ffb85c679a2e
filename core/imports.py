# SPDX-License-Identifier: Apache-2.0
"""What programs do before they import packages: signals, standard streams, errors.

Imports nothing but the standard library: a program calls this module's functions before
it imports anything else.
"""

import os
import signal
import sys
from types import TracebackType

from core.errors import Exit

# The import names of the packages that setup.py requires; below, of its extras.
PACKAGES = (
    *("ale_py", "grpc", "gymnasium", "imageio", "numpy", "psutil", "rich"),
    *("safetensors", "tensorboard", "torch"),
)
EXTRAS = {
    "cryptography": "tls",
    "matplotlib": "tools",
    "minatar": "minatar",
    "tomli": "tools",
}


def end_at_signals() -> None:
    """Make Ctrl-C end this program without a traceback, as SIGTERM does.

    The first process of a container ignores signals unless it has a handler.
    """
    if os.getpid() == 1:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda signum, _: os._exit(128 + signum))
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def open_closed_streams() -> None:
    """Open /dev/null in place of standard streams that are closed, as by `2>&-`.

    Otherwise the program's next files would get these descriptors, and what C libraries
    print would be written into these files.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = open(os.devnull, "r+")
            os.dup2(null.fileno(), fd)
            os.set_inheritable(fd, True)  # If `null` itself has this descriptor.
            setattr(sys, name, null)
            setattr(sys, f"__{name}__", null)


def explain_missing_packages() -> None:
    """Make a missing package end this program with one line instead of a traceback."""
    sys.excepthook = _explain


def _explain(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    package = name.partition(".")[0] if name else ""
    if package not in (*PACKAGES, *EXTRAS):
        sys.__excepthook__(kind, error, trace)
        return
    what = f"'.[{EXTRAS[package]}]'" if package in EXTRAS else "."
    print(
        f"No module named {name!r} in {sys.executable}. Use the Python that `make` has "
        "set up (source .venv/bin/activate), or install the packages for this Python "
        f"(pip install -e {what}).",
        file=sys.stderr,
    )
    sys.exit(Exit.CONFIG)
