# SPDX-License-Identifier: Apache-2.0
"""Run torchrun, and end with the exit status of its learners, for schedulers.

    python -m tools.learners --standalone --nproc_per_node 2 -m polybeast [flags]

Takes torchrun's flags. torchrun itself always ends with 1 and a traceback if a learner
does not end with 0. This program ends with

- 75 after a signal to stop, if all learners of this machine ended with 75 or 0: the
  same command continues from the checkpoint. Also if the signal came before torchrun
  had started learners;
- after a signal, if a learner ended in another way, the status of that learner: 70 if
  torchrun killed it, because its checkpoint was not written in time;
- without a signal, 0, or the status of the first learner that did not end with 0;
- 78 if learner 0's host does not resolve or its port is in use, with one line.

After a signal the learners have SAVE_S for their checkpoint, or as many seconds as the
environment variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT says. (Older versions of torch
always allow 30 s.)
"""

import argparse
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path

from core import ranks
from core.errors import ConfigError, Exit

SAVE_S = 110  # The files in slurm/ and kubernetes/ allow 120 s.


# Held while the folder of the statuses is made or, at the end, deleted.
making_folder = threading.Lock()


def main() -> int:
    with contextlib.ExitStack() as stack:
        with making_folder:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            os.environ[ranks.STATUS_DIR] = folder
        return run_learners(Path(folder))


def run_learners(statuses: Path) -> int:
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_S))
    # As the trainers do. If it is not set, torchrun does this too, with a warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Here, since the import takes seconds: signals are handled before.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    args = run.parse_args(sys.argv[1:])
    try:
        if args.rdzv_endpoint and not args.standalone:
            host, _ = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=0)
            ranks.check_host("--rdzv_endpoint", host)
        elif not args.standalone:
            ranks.check_host("--master_addr", args.master_addr)
        own = []
        if args.log_dir is None and {args.redirects, args.tee} == {"0"}:
            # Without logs torchrun makes a folder for them, too, and leaves it there.
            own = ["--log_dir", str(statuses)]
        run.main([*own, *sys.argv[1:]])
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return Exit.CONFIG
    except (RuntimeError, RendezvousConnectionError) as error:
        reason = str(error.__cause__ or error).lower()  # torch versions differ.
        if "address already in use" not in reason:
            raise
        print(f"ConfigError: {describe_taken_port(args)}", file=sys.stderr)
        return Exit.CONFIG
    except SignalException:  # torchrun has handed it on, and waited for the learners.
        if not statuses.exists():  # It was deleted, and no learner has ended since.
            print("No learner could write how it ended", file=sys.stderr)
            return Exit.INTERNAL
        numbered = [path for path in statuses.iterdir() if path.name.isdecimal()]
        for path in sorted(numbered, key=lambda path: int(path.name)):
            text = path.read_text()
            status = int(text or Exit.INTERNAL)
            if status not in (Exit.DONE, Exit.STOPPED):
                how = f"ended with {status}"
                if not text:
                    how = f"could not write its status: is the disk of {path} full?"
                elif status == Exit.INTERNAL:
                    how += ", or was killed before it had ended"
                print(f"Learner {path.name} {how}", file=sys.stderr)
                return status
        return Exit.STOPPED
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        # Negative means killed by that signal; shells say that as 128 + signal.
        status = status if status >= 0 else 128 - status
        print(f"Learner {rank} was the first to end, with {status}", file=sys.stderr)
        return status
    return Exit.DONE


def describe_taken_port(args: argparse.Namespace) -> str:
    flag, value = "--master_port", args.master_port
    if args.rdzv_endpoint:
        flag, value = "--rdzv_endpoint", args.rdzv_endpoint
    return (
        f"{flag} is {value}, but another program on {socket.gethostname()} uses this "
        "port: another run? Give this run another port, with the same "
        f"{flag} on all its machines. On one machine, --standalone finds a free port."
    )


def respect_nohup() -> None:
    """Block SIGHUP if it is ignored: torchrun would replace that by a handler.

    Threads and learners that are started later inherit this.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])


def stop_without_learners() -> None:
    """Let SIGTERM and Ctrl-C end this program with 75 until torchrun handles them.

    The default action would end it with 143, or do nothing in the first process of a
    container. A thread ends it, since the main thread may wait in C++ for other nodes.
    """

    def handle(signum: int, frame: object) -> None:
        pass

    def wait_for_signal() -> None:
        while signal.getsignal(os.read(signals, 1)[0]) is not handle:
            pass
        making_folder.acquire()  # And never released: main makes no folder any more.
        shutil.rmtree(os.environ.get(ranks.STATUS_DIR, ""), ignore_errors=True)
        os._exit(Exit.STOPPED)

    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    threading.Thread(target=wait_for_signal, name="signals", daemon=True).start()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, handle)


if __name__ == "__main__":
    respect_nohup()
    stop_without_learners()
    sys.exit(main())
