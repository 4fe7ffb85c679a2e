# SPDX-License-Identifier: Apache-2.0
"""The fork server that MonoBeast's actor processes are forked from.

`ForkServer` starts multiprocessing's fork server, which imports the trainer once. It
imports this module before the trainer, and this module makes the fork server end when
its program ends.

Without this module the fork server ends only when the last process that it forked has
ended. A process that hangs in C code never notices that its program was killed. Then
this process, the fork server and the folder of its socket would stay for ever. With
this module the kernel sends the fork server a signal when the program ends (Linux
only). The fork server then ends, and the kernel sends a signal to its children
(`core.running.unit`).
"""

import contextlib
import functools
import multiprocessing
import os
import re
import select
import signal
import socket
import sys
from concurrent import futures
from multiprocessing import forkserver
from typing import Any

from core.proc import continue_if_stopped
from core.running.supervise import send_at_parents_end, start_thread

LOOK_S = 0.5  # Interval in which a thread looks whether the fork server is stopped.

# multiprocessing starts a fork server by `python -c "... main(listener, alive, ..."`.
# The two numbers are file descriptors: its socket, and a pipe that closes when the last
# of its clients ends.
_COMMAND = re.compile(r"from multiprocessing\.forkserver .*main\((\d+), (\d+), ")


class ForkServer:
    """This process's fork server, and a thread that sends SIGCONT if it is stopped.

    A stopped fork server neither starts processes nor reports their ends. The main
    thread, which starts and joins actors, waits for it without a limit, so another
    thread must continue it.
    """

    def __init__(self, context: Any, preload: str):
        """Start the fork server; it goes on to import module `preload`.

        Call this in a thread that lives as long as the program: the fork server ends
        together with the thread that started it.
        """
        context.set_forkserver_preload([__name__, preload])
        forkserver.ensure_running()
        self._import = start_thread("fork-server", wait, context)
        self._closed: futures.Future = futures.Future()
        self._watch = start_thread("fork-server-watch", self._keep_going)

    def has_imported(self) -> bool:
        """Say whether the fork server has imported everything."""
        return self._import.done()

    def is_cut_off(self) -> bool:
        """Say whether its socket was deleted, as old files in /tmp sometimes are."""
        # multiprocessing has no public name for it.
        path = getattr(forkserver._forkserver, "_forkserver_address", None)
        return path is not None and not os.path.exists(path)

    def _keep_going(self) -> None:
        # Goes on until the import is done, too: a program that ends during the import
        # joins the process of `wait`.
        while futures.wait([self._closed, self._import], LOOK_S).not_done:
            # multiprocessing has no public name for the process id. Read it each time:
            # multiprocessing replaces a fork server that died.
            pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
            if pid is not None:
                continue_if_stopped("The fork server", pid)

    def close(self) -> None:
        """End the thread; the fork server itself ends with the program."""
        self._closed.set_result(None)
        if self.has_imported():
            self._watch.result()  # The program may fork next, without other threads.


def wait(context: Any) -> None:
    """Wait until the fork server has imported everything."""
    process = context.Process(target=int, daemon=True)
    process.start()  # Returns when the fork server has forked, after all imports.
    process.join()


def end_with_program(listener: int, alive: int) -> None:
    """End this fork server, and remove its socket, when the program ends."""
    with socket.socket(fileno=os.dup(listener)) as duplicate:
        path = duplicate.getsockname()

    program = os.getppid()

    def end() -> None:
        # Errors: the folder may belong to a parent of the program that still uses it.
        with contextlib.suppress(OSError):
            os.unlink(path)
            os.rmdir(os.path.dirname(path))
        os._exit(0)

    # The program handles Ctrl-C; SIGHUP, which comes when the terminal closes; and
    # SIGTERM, which `timeout` and schedulers send to the whole process group.
    # multiprocessing ignores only Ctrl-C, and only after all imports. The handler of
    # SIGTERM is not SIG_IGN, because processes that a module starts would inherit it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    # SIGCONT, unlike other signals, also reaches a stopped fork server. A shell may
    # send SIGCONT too, and the kernel sends it when any thread of the program ends. So
    # check whether the parent is still the program.
    signal.signal(signal.SIGCONT, lambda *_: end() if os.getppid() != program else None)
    for signum in (signal.SIGCONT, signal.SIGTERM):
        default = functools.partial(signal.signal, signum, signal.SIG_DFL)
        os.register_at_fork(after_in_child=default)
    send_at_parents_end(signal.SIGCONT)
    if select.select([alive], [], [], 0)[0]:  # The program has already ended.
        end()


# Do this only in the fork server, not in a child that it has forked. Such a child has
# the same command line and may import this module first. multiprocessing marks a child
# while it is being set up (`_inheriting`); afterwards the child has a parent process.
_is_child = (
    getattr(multiprocessing.current_process(), "_inheriting", False)
    or multiprocessing.parent_process() is not None
)
if (
    sys.platform == "linux"
    and not _is_child
    and (match := _COMMAND.search(sys.orig_argv[-1]))
):
    end_with_program(*map(int, match.groups()))
