# SPDX-License-Identifier: Apache-2.0
"""Exceptions and messages for what environments do wrong."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from core.errors import EnvError


def is_ctrl_c(error: BaseException) -> bool:
    """Return whether `error` may be the exception that Python raises at SIGINT."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


@contextlib.contextmanager
def only_exceptions(doing: str) -> Iterator[None]:
    """Turn SystemExit, GeneratorExit and the like from an environment into EnvError.

    Otherwise our own code would treat them as its own: SystemExit ends a thread without
    a message, and GeneratorExit ends a generator.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or is_ctrl_c(error):
            raise
        text = f"{doing}: {type(error).__name__}: {error}"
        raise EnvError(f"the environment raised in {text}") from error


def name_of(env: Any) -> str:
    """Return the id under which `env` is registered, else the name of its class."""
    spec = getattr(env, "spec", None)
    return getattr(spec, "id", None) or type(env.unwrapped).__name__
