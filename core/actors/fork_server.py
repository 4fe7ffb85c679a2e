# SPDX-License-Identifier: Apache-2.0
"""The fork server that MonoBeast's actor processes are forked from.

`ForkServer` starts multiprocessing's fork server, which imports the trainer once.
Before the trainer it imports this module, which makes the fork server end when its
program ends.

By itself, multiprocessing's fork server ends when the last process that it forked has
ended. A process that hangs in C code never notices that its program was killed, so that
this process and the fork server would stay for ever, and so would the folder of the
fork server's socket. Here the kernel tells the fork server of the program's end (Linux
only), and then tells the fork server's children, which ask for that
(`core.running.unit`).
"""

import contextlib
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

from core.running.supervise import (
    continue_if_stopped,
    send_at_parents_end,
    start_thread,
)

LOOK_S = 0.5  # Interval in which a thread looks whether the fork server is stopped.

# multiprocessing starts a fork server by `python -c "... main(listener, alive, ..."`.
# The two numbers are file descriptors: its socket, and a pipe that closes when the last
# of its clients ends.
_COMMAND = re.compile(r"from multiprocessing\.forkserver .*main\((\d+), (\d+), ")


class ForkServer:
    """This process's fork server, which a thread continues whenever it is stopped.

    A stopped fork server neither starts processes nor reports their ends, and whoever
    waits for it waits without a limit: the main thread, which starts and joins actors,
    must not be the one that continues it.
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

    def _keep_going(self) -> None:
        # A program that ends during the import joins the process of `wait`.
        while futures.wait([self._closed, self._import], LOOK_S).not_done:
            # No public name. multiprocessing replaces a dead fork server by another.
            pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
            if pid is not None:
                continue_if_stopped("The fork server", pid)

    def close(self) -> None:
        """End the thread; the fork server itself ends with the program."""
        self._closed.set_result(None)
        if self.has_imported():
            self._watch.result()  # A process that forks next must have one thread.


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
        # The folder may belong to a process above the program that still uses it.
        with contextlib.suppress(OSError):
            os.unlink(path)
            os.rmdir(os.path.dirname(path))
        os._exit(0)

    # The program handles Ctrl-C, and SIGHUP, which comes when the terminal closes.
    # multiprocessing ignores Ctrl-C only after all imports, and SIGHUP never.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # SIGCONT also wakes a fork server that is stopped. A shell may send it too, and the
    # kernel sends it at the end of each of the program's threads. So check the parent.
    signal.signal(signal.SIGCONT, lambda *_: end() if os.getppid() != program else None)
    os.register_at_fork(
        after_in_child=lambda: signal.signal(signal.SIGCONT, signal.SIG_DFL)
    )
    send_at_parents_end(signal.SIGCONT)
    if select.select([alive], [], [], 0)[0]:  # The program has already ended.
        end()


# Only in the fork server itself. A child that it has forked has the same command line,
# and may be the first to import this: multiprocessing marks the child while it is being
# set up (`_inheriting`), and afterwards the child knows its parent.
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
