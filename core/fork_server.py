# SPDX-License-Identifier: Apache-2.0
"""For multiprocessing's fork server to import: makes it end with its program.

    context.set_forkserver_preload(["core.fork_server", ...])  # Before all others.

By itself it waits for the end of the last process that it forked. One that hangs in C
code never notices that its program was killed, and both stay for ever. So does, after
any kill, the socket's folder. Here the kernel tells the fork server (Linux only), and
then its children, which asked for that (`core.unit`).

In the program `keep_going` continues a fork server that was stopped: one can neither
start processes nor tell of their ends.
"""

import contextlib
import multiprocessing
import os
import re
import select
import signal
import socket
import sys
from multiprocessing import forkserver

from core.supervise import continue_if_stopped, send_at_parents_end

# How multiprocessing starts it: `python -c "... main(listener, alive, ..."`, with two
# file descriptors: its socket, and a pipe that closes with the last of its clients.
_COMMAND = re.compile(r"from multiprocessing\.forkserver .*main\((\d+), (\d+), ")


def end_with_program(listener: int, alive: int) -> None:
    """End this fork server, and remove its socket, when its parent's end comes."""
    with socket.socket(fileno=os.dup(listener)) as duplicate:
        path = duplicate.getsockname()

    program = os.getppid()

    def end() -> None:
        # The folder may be that of a process above the program, and in use.
        with contextlib.suppress(OSError):
            os.unlink(path)
            os.rmdir(os.path.dirname(path))
        os._exit(0)

    # Its own main ignores Ctrl-C, but not before all imports; and never the end of the
    # terminal, which is the program's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # It continues a stopped process, too. A shell also sends it, and it comes with the
    # end of each of the program's threads.
    signal.signal(signal.SIGCONT, lambda *_: end() if os.getppid() != program else None)
    os.register_at_fork(
        after_in_child=lambda: signal.signal(signal.SIGCONT, signal.SIG_DFL)
    )
    send_at_parents_end(signal.SIGCONT)
    if select.select([alive], [], [], 0)[0]:  # It ended before that.
        end()


def keep_going() -> None:
    """Continue this process's fork server, if it has one, should it be stopped."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)  # No public name.
    if pid is not None:
        continue_if_stopped("The fork server", pid)


# Not in any other process that imports this, and not in a child of a fork server that
# has not: while the child is being set up, multiprocessing says so.
_is_child = getattr(multiprocessing.current_process(), "_inheriting", False)
if (
    sys.platform == "linux"
    and not _is_child
    and (match := _COMMAND.search(sys.orig_argv[-1]))
):
    end_with_program(*map(int, match.groups()))
