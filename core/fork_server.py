# SPDX-License-Identifier: Apache-2.0
"""For multiprocessing's fork server to import: makes it end with its program.

    context.set_forkserver_preload(["core.fork_server", ...])  # Before all others.

By itself it waits for the end of the last process that it forked. One that hangs in C
code never notices that its program was killed, and both stay for ever. So does, after
any kill, the socket's folder. Here the kernel tells the fork server (Linux only), and
ends its children with it: they asked for that (`core.supervise.exit_with_parent`).
"""

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import sys

# How multiprocessing starts it: `python -c "... main(listener, alive, ..."`, with two
# file descriptors: its socket, and a pipe that closes with the last of its clients.
_COMMAND = re.compile(r"from multiprocessing\.forkserver .*main\((\d+), (\d+), ")


def end_with_program(listener: int, alive: int) -> None:
    """End this fork server, and remove its socket, when its parent's end comes."""
    with socket.socket(fileno=os.dup(listener)) as duplicate:
        path = duplicate.getsockname()

    def end(*_: object) -> None:
        # The folder may be that of a process above the program, and in use.
        with contextlib.suppress(OSError):
            os.unlink(path)
            os.rmdir(os.path.dirname(path))
        os._exit(0)

    # Its own main ignores Ctrl-C, but not before all imports; and never the end of the
    # terminal, which is the program's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # A signal that nobody else sends: a program that lives would miss the folder. It
    # comes again with the end of each of the program's threads.
    parent_ends = signal.SIGRTMIN
    signal.signal(parent_ends, end)
    os.register_at_fork(
        after_in_child=lambda: signal.signal(parent_ends, signal.SIG_DFL)
    )
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(parent_ends))
    if select.select([alive], [], [], 0)[0]:  # It ended before that.
        end()


# Not in any other process that imports this.
if sys.platform == "linux" and (match := _COMMAND.search(sys.orig_argv[-1])):
    end_with_program(*map(int, match.groups()))
