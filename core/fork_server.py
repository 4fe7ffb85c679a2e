# SPDX-License-Identifier: Apache-2.0
"""For multiprocessing's fork server to import: makes it end with its program.

    context.set_forkserver_preload(["core.fork_server", ...])  # Before all others.

By itself it waits for the end of the last process that it forked. One that hangs in C
code never notices that its program was killed, and both stay for ever. So does, after
any kill, the socket's folder. Here the kernel tells the fork server (Linux only), and
ends its children with it: they asked for that (`core.supervise.exit_with_parent`).
"""

import atexit
import ctypes
import os
import re
import select
import shutil
import signal
import socket
import sys

# How multiprocessing starts it: `python -c "... main(listener, alive, ..."`, with two
# file descriptors: its socket, and a pipe that closes with the last of its clients.
_COMMAND = re.compile(r"from multiprocessing\.forkserver .*main\((\d+), (\d+), ")


def end_with_program(listener: int, alive: int) -> None:
    """End this fork server, and remove its socket, when its parent's end comes."""
    server, parent = os.getpid(), os.getppid()
    with socket.socket(fileno=os.dup(listener)) as duplicate:
        folder = os.path.dirname(duplicate.getsockname())

    def has_ended() -> bool:
        return os.getppid() != parent or bool(select.select([alive], [], [], 0)[0])

    def clean_up() -> None:
        # A program that lives will start another fork server, in the same folder.
        if os.getpid() == server and has_ended():
            shutil.rmtree(folder, ignore_errors=True)

    def restore_in_child() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    atexit.register(clean_up)
    os.register_at_fork(after_in_child=restore_in_child)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGTERM))
    if has_ended():  # Before that.
        sys.exit()


if match := _COMMAND.search(sys.orig_argv[-1]):  # And not in any other process.
    end_with_program(*map(int, match.groups()))
