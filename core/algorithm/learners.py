# SPDX-License-Identifier: Apache-2.0
"""Several learners that train one network: synchronous data parallelism (torchrun).

    torchrun --standalone --nproc_per_node 2 -m polybeast ...

Each learner has its own environments and its share of each batch. The losses are sums
over the batch, so the sum of the learners' gradients is the gradient of the whole
batch, and no learning rate changes. An update does this (`Learner.update`):

    gradient of the share  ->  sum over all learners  ->  clip  ->  optimizer step

All learners have the same weights, counters and learning rate at each update, so they
make the same decisions: when the run is finished, and which updates are left out. In
each update a learner waits for all other learners. If one learner has no data, the
other learners wait for up to --stall_timeout_s; then the run stops and names that
learner.

No other module of core and no trainer knows torch.distributed.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core import proc, ranks
from core.algorithm import agreement
from core.errors import ConfigError, Exit, one_line

log = logging.getLogger(__name__)

# The learners of a run may be started one after another, on several machines.
START_S = 300.0
# A learner whose connections have closed has this time to say how it ended.
END_S = 3.0
# Learner 0 may need this long for its last checkpoint while the other learners wait.
LAST_SAVE_S = 300.0
# A learner with wrong flags waits this long for those of other machines to read it.
NEIGHBOURS_S = 60.0
# How long a learner waits, after a stop signal, for an update in which all agree.
STOP_S = 5.0
SAY_WAITING_S = 30.0  # Between two warnings that this learner waits for another one.
ASK_S = 1.0  # Between two checks whether another learner has ended or wants to stop.
REPORT_S = 1.0  # Learner 0 asks for the other learners' reports at this interval.
YEAR_S = 365 * 86400.0  # For torch, which takes no infinite limit.
CHECK_UPDATES = 1000  # Updates between two comparisons of the weights.


class LearnerLost(Exception):
    """Another learner has ended or does not answer, so this learner ends too.

    Attributes:
      status: the exit status: STOPPED if a signal stopped the other learner, USAGE if
        its flags are wrong.
    """

    def __init__(self, text: str, status: Exit = Exit.INTERNAL):
        super().__init__(text)
        self.status = status


class Learners:
    """The connection to the other learners. Every learner must make the same calls.

    Used by the main thread at the start of a run, and then by `Learner.update` with
    `Learner.turn`. The main thread may call `check_stop` at any time.
    """

    def __init__(self, *, limit_s: float):
        """Make a learner that is not connected yet.

        Args:
          limit_s: how long an update waits for other learners; may be infinite.
        """
        self.rank, self.size = ranks.rank(), ranks.size()
        self.reports: list[Any] = []  # In learner 0: the newest of the other learners.
        self.columns: dict[str, Any] = {}  # Log columns for this learner's reports.
        self.waits_since = 0.0  # Start of the wait for a learner; 0 if there is none.
        self._waits = 0  # Number of waits so far: the same in all learners.
        self.wants_stop = False  # The next update makes all learners agree to stop.
        self.has_agreed_to_stop = False  # The latest update agreed to stop.
        self.is_report_due = False  # After the present update.
        self.is_over = False  # True after the last update of all learners.
        self._stop_by = math.inf  # When to stop without an agreement (monotonic).
        self._asked_at = self._said_at = 0.0
        self._store: Any = None  # torch's key-value store, which all learners share.
        self._limit_s = limit_s
        self.report_s = REPORT_S
        self._last_report = 0.0
        self._on_gpu = False

    def connect(self) -> None:
        """Connect to the other learners.

        Raises:
          ConfigError: this learner cannot connect to any other one.
          LearnerLost: another learner has ended, or has not come.
        """
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise ConfigError(
                    f"WORLD_SIZE is {self.size}, but {name} is not set. Start several "
                    "learners with torchrun; for one learner unset WORLD_SIZE."
                )
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        ranks.check_host("--master_addr (MASTER_ADDR)", host)
        try:
            store = self._store = _open_store(START_S)
            store.set(f"process/{self.rank}", f"{os.getpid()} {proc.place()}")
            self._wait_for_all()
            self._open_group()
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"learner {self.rank} of {self.size} cannot connect to the other "
                f"learners at {host}:{port}: {one_line(str(error))}. If another job "
                "uses this port, give torchrun another --master_port, or --standalone."
            ) from error

    def _open_group(self) -> None:
        gpu = 0
        if num_gpus := torch.cuda.device_count():
            gpu = ranks.local_rank() % num_gpus
            torch.cuda.set_device(gpu)  # From now on "cuda" means this GPU.
        has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        # With a connection of its own: it waits there, and would block `_read`.
        store = _open_store(START_S, may_keep=False)
        with self._waiting(at_start=True):
            opening = _in_thread(
                dist.init_process_group,
                "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
                store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.size,
                timeout=datetime.timedelta(seconds=min(self._limit_s, YEAR_S)),
            )
            while not opening.done():
                self._raise_if_one_has_ended()
                concurrent.futures.wait([opening], 0.1)
            opening.result()
        # Learners that share a GPU sum on the CPU: NCCL needs one GPU for each.
        gpus = {*self.collect((socket.gethostname(), gpu))}
        self._on_gpu = has_nccl and len(gpus) == self.size

    # -------------------------------------------------------------- during an update

    def sum_gradients(self, net: nn.Module) -> None:
        """Replace the gradients with their sums over all learners, in one operation."""
        gradients = []
        for p in net.parameters():
            if p.requires_grad:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                gradients.append(p.grad)
        flat = torch.cat([g.flatten() for g in gradients])
        sums = flat if self._on_gpu else flat.cpu()
        with self._waiting():
            dist.all_reduce(sums)
        parts = sums.to(flat.device).split([g.numel() for g in gradients])
        for gradient, part in zip(gradients, parts):
            gradient.copy_(part.view_as(gradient))

    def sum(self, numbers: dict[Any, float]) -> dict[Any, float]:
        """Return the sums over all learners of some numbers, in float64.

        The names must be the same in all learners, and in the same order.
        """
        sums = torch.tensor(list(numbers.values()), dtype=torch.float64)
        with self._waiting():
            dist.all_reduce(sums)
        return dict(zip(numbers, sums.tolist()))

    def sum_update(self, sums: dict[Any, float]) -> dict[Any, float]:
        """Return an update's sums over all learners; agree on a stop and on reports.

        Sets `has_agreed_to_stop` and `is_report_due`, the same in all learners.
        """
        own = dict(sums)
        grad_norm = own.pop("grad_norm")  # The summed gradient's: all have the same.
        # Learner 0 decides for all learners when it is time for reports.
        now = time.monotonic()
        is_time = self.rank == 0 and now - self._last_report >= self.report_s
        if is_time:
            self._last_report = now
        own |= {"stop": self.wants_stop, "report": is_time}
        total = self.sum(own)
        self.has_agreed_to_stop = total.pop("stop") > 0
        self.is_report_due = total.pop("report") > 0
        return {**total, "grad_norm": grad_norm}

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every learner's tensor, in the order of their ranks."""
        parts = [torch.empty_like(x, device="cpu") for _ in range(self.size)]
        with self._waiting():
            dist.all_gather(parts, x.cpu())
        return [part.to(x.device) for part in parts]

    def report(self, report: Any) -> list[Any]:
        """Send a report to learner 0. There, return the others' reports; else []."""
        parts: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._waiting():
            dist.gather_object(report, parts)
        self.reports = [] if parts is None else parts[1:]
        return self.reports

    def check_weights(self, net: nn.Module) -> None:
        """Compare checksums of all learners' parameters; share learner 0's buffers.

        The buffers differ if `forward` writes to them, as that of a BatchNorm does.

        Raises:
          RuntimeError: the parameters differ.
        """
        agreement.check_parameters(net, self.gather)
        parameters = {name for name, _ in net.named_parameters()}
        weights = net.state_dict()  # Not the buffers that are not persistent.
        self._share(x for name, x in weights.items() if name not in parameters)

    # ------------------------------------------------------- at the start of a run

    def share(self, value: Any) -> Any:
        """Return learner 0's value. Learners trust each other: the value is pickled."""
        values = [value]
        with self._waiting():
            dist.broadcast_object_list(values)
        return values[0]

    def collect(self, value: Any) -> list[Any]:
        """Return every learner's value, in the order of their ranks."""
        values: list[Any] = [None] * self.size
        with self._waiting():
            dist.all_gather_object(values, value)
        return values

    def share_weights(self, net: nn.Module) -> None:
        """Give all learners the weights of learner 0.

        Raises:
          ConfigError: the networks differ, or the processors that learn.
        """
        agreement.check_networks(net, self.rank, self.collect)
        self._share(net.state_dict().values())

    def _share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy learner 0's tensors to those of the other learners."""
        for x in tensors:
            on_cpu = agreement.bytes_of(x)
            with self._waiting():
                dist.broadcast(on_cpu, 0)
            x.copy_(on_cpu.view(x.dtype).view_as(x))

    def _wait_for_all(self) -> None:
        """Wait until all learners have connected to the store.

        Raises:
          LearnerLost: a learner has ended, or has not connected within START_S (within
            the limit of an update, if that is longer).
        """
        limit_s = max(START_S, self._limit_s)
        began = said = time.monotonic()
        while not self._have_all_connected():
            self._raise_if_one_has_ended()
            if self._store is None:
                raise LearnerLost(f"lost learner 0 of {self.size}, or its torchrun")
            now = time.monotonic()
            is_over = now > began + limit_s
            if is_over or now > said + SAY_WAITING_S:
                said = now
                every = range(self.size)
                missing = [r for r in every if self._read(f"process/{r}") is None]
                names = " and ".join(f"learner {r}" for r in missing)
                if is_over and missing:
                    raise LearnerLost(
                        f"{names} of {self.size} did not connect within {limit_s:g} s. "
                        "Look whether each runs, and whether its output has an error."
                    )
                log.warning("Waiting for %s to connect", names)
            time.sleep(0.1)
        self._raise_if_one_has_ended()

    def _have_all_connected(self) -> bool:
        store, every = self._store, [f"process/{r}" for r in range(self.size)]
        try:
            return store is not None and bool(store.check(every))
        except RuntimeError:
            self._store = None
            return False

    def _raise_if_one_has_ended(self) -> None:
        if (rank := self._read("ended")) is not None:
            raise self._end_of(int(rank)) or LearnerLost(f"learner {rank} has ended")

    # ------------------------------------------------------------- at the end of a run

    def send_rows(self, rows: Mapping[str, int]) -> None:
        """Tell learner 0 what became of the rows that this learner has received."""
        self._tell(f"rows/{self.rank}", json.dumps(rows))

    def sum_rows(self) -> dict[str, int] | None:
        """Return the sums of what all learners have sent by `send_rows`.

        For learner 0, which waits for END_S: None if a learner has not sent its rows.
        """
        deadline = time.monotonic() + END_S
        while True:
            found = [self._read(f"rows/{rank}") for rank in range(self.size)]
            parts = [json.loads(text) for text in found if text is not None]
            if len(parts) == self.size:
                return {key: sum(part[key] for part in parts) for key in parts[0]}
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)

    # ---------------------------------------------------------------------- stopping

    def waited_s(self) -> float:
        """Return for how long the present update has waited for another learner."""
        since = self.waits_since
        return time.monotonic() - since if since else 0.0

    def check_stop(self, has_signal: bool, *, is_training: bool = True) -> bool:
        """Exchange stop signals with the other learners. For the main thread.

        After a signal to any learner, all learners agree to stop in their next update.
        Returns whether STOP_S have passed without such an update: perhaps no update
        comes, because there is nothing to learn from.

        Args:
          is_training: False if no update will show that learner 0 has ended, together
            with the torchrun that keeps the store.

        Raises:
          LearnerLost: another learner has ended.
        """
        now = time.monotonic()
        since = self.waits_since
        if since and now > max(since, self._said_at) + SAY_WAITING_S:
            self._said_at = now
            log.warning("Waiting for another learner for %.0f s", now - since)
        is_news = has_signal and not self.wants_stop
        if is_news:
            self._tell("stop", "")
        if is_news or now - self._asked_at > ASK_S:
            self._asked_at = now
            if since:  # Another learner may end first, and must not name this one.
                self._say_here()
            if not self.wants_stop and (has_signal or self._read("stop") is not None):
                self.wants_stop, self._stop_by = True, now + STOP_S
            if not self.is_over:
                self._raise_if_one_has_ended()
        needs_store = not (is_training and _has_torchrun()) and not self.is_over
        if needs_store and self._store is None:
            raise LearnerLost(f"learner 0 of {self.size} has ended")
        return now > self._stop_by

    # ---------------------------------------------------------------------- failures

    @contextlib.contextmanager
    def _waiting(self, *, at_start: bool = False) -> Iterator[None]:
        """Wait for the other learners.

        Raises:
          LearnerLost: another learner has ended, or does not answer.
          RuntimeError: at the start, this learner cannot connect at all.
        """
        self._waits += 1
        self.waits_since = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # Of gloo and NCCL; dist.DistError is one, too.
            is_late = self.waited_s() > 0.9 * self._limit_s
            if at_start and not is_late:
                raise
            raise self._explain(error, is_late) from error
        finally:
            self.waits_since = 0.0

    def _explain(self, error: RuntimeError, is_late: bool) -> LearnerLost:
        """Return the exception that names the missing learner and the reason."""
        self._say_here()
        others = [r for r in range(self.size) if r != self.rank]
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            for rank in others:
                if (end := self._end_of(rank)) is not None:
                    return end
            time.sleep(0.05)
        waits = {r: int(self._read(f"here/{r}") or 0) for r in others}
        missing = [f"learner {r}" for r in others if waits[r] < self._waits]
        names = " and ".join(missing) or "another learner"
        if is_late:
            return LearnerLost(
                f"{names} of {self.size} did not answer within {self._limit_s:g} s "
                "(--stall_timeout_s): its environments or servers do not answer, or "
                "its process is stopped"
            )
        return LearnerLost(f"lost {names} of {self.size}: {one_line(str(error))}")

    def _end_of(self, rank: int) -> LearnerLost | None:
        """Return how a learner has ended, as an exception; None if it may still run."""
        name = f"learner {rank} of {self.size}"
        if (end := self._read(f"end/{rank}")) is not None:
            status, _, text = end.partition(" ")
            if int(status) == Exit.STOPPED:
                return LearnerLost(f"{name} was stopped", Exit.STOPPED)
            return LearnerLost(
                f"{name} has ended: {text or f'exit status {status}'}",
                Exit.USAGE if int(status) == Exit.USAGE else Exit.INTERNAL,
            )
        pid, _, place = (self._read(f"process/{rank}") or "").partition(" ")
        if place == proc.place() and proc.state(int(pid)) in "ZX":
            return LearnerLost(f"{name} (process {pid}) was killed")
        return None

    def _say_here(self) -> None:
        """Tell the other learners which of all waits this learner has reached."""
        self._tell(f"here/{self.rank}", str(self._waits))

    def _tell(self, key: str, value: str) -> None:
        store = self._store  # Another thread may set it to None.
        try:
            if store is not None:
                store.set(key, value)
        except RuntimeError:  # The process with the store (torchrun, learner 0) ended.
            self._store = None

    def _read(self, key: str) -> str | None:
        store = self._store  # Another thread may set it to None.
        try:
            if store is not None and store.check([key]):
                return store.get(key).decode()
        except RuntimeError:
            self._store = None
        return None

    def end(self, status: Exit, text: str = "") -> None:
        """Tell the other learners how this one ends; close the connections; wait.

        At the end of a run the learners wait for each other before they exit: if one
        exits first, torchrun may end learner 0 while it writes the last checkpoint.
        """
        self._tell(f"end/{self.rank}", f"{int(status)} {one_line(text)}")
        if not self.is_over:  # Other learners may wait for an update of this one.
            self._tell("ended", str(self.rank))
            self._continue_stopped()
            if dist.is_initialized():
                dist.destroy_process_group()
        is_early = status not in (Exit.DONE, Exit.STOPPED)
        # Without torchrun, learner 0 keeps the store: the others must read it first.
        if not is_early or self.rank == 0:
            others = [r for r in range(self.size) if r != self.rank]
            if not self.is_over:  # There was no agreement to stop: some may be away.
                is_early |= self.rank == 0  # It has saved.
                others = others if self.rank == 0 else [0]
            deadline = time.monotonic() + (END_S if is_early else LAST_SAVE_S)
            while time.monotonic() < deadline:
                if all(self._end_of(r) for r in others) or self._store is None:
                    break
                time.sleep(0.05)
        if self.is_over:
            dist.destroy_process_group()

    def _continue_stopped(self) -> None:
        """Continue the learners of this machine that are stopped, so that they end too.

        Learner 0 then writes a checkpoint. torchrun would kill them after 30 s.
        """
        for rank in range(self.size):
            pid, _, place = (self._read(f"process/{rank}") or "").partition(" ")
            if place == proc.place():
                proc.continue_if_stopped(f"learner {rank}", int(pid))


_current: Learners | None = None


def current() -> Learners | None:
    """Return this process's connection to the other learners; None if it is alone."""
    return _current


def share(value: Any) -> Any:
    """Return learner 0's value in every learner; just the value if there is one."""
    return value if _current is None else _current.share(value)


def train_together(
    train: Callable[[argparse.Namespace], Exit], flags: argparse.Namespace
) -> Exit:
    """Return train(flags), connected to the other learners if torchrun started some.

    Raises:
      UsageError: the learners have different flags.
      ConfigError: the learners cannot connect to each other.
      LearnerLost: another learner has ended.
    """
    global _current
    if ranks.size() == 1:
        return train(flags)
    limit_s = flags.stall_timeout_s if flags.on_stall == "stop" else math.inf
    _current = learners = Learners(limit_s=limit_s)
    if getattr(flags, "serial", False):  # Not by the clock, but after each update.
        learners.report_s = 0.0
    try:
        learners.connect()
        agreement.check_flags(flags, learners.collect)
        status = train(flags)
    except BaseException as error:
        ends, text = Exit.INTERNAL, f"{type(error).__name__}: {error}"
        if isinstance(error, LearnerLost):
            ends, text = error.status, str(error)
        learners.end(ends, text)
        raise
    else:
        ranks.record_status(status)  # Now: `end` may wait for the other learners.
        learners.end(status)
        return status
    finally:
        _current = None


def _has_torchrun() -> bool:
    """Return whether torchrun keeps the store; otherwise learner 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _in_thread(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what may wait longer than this learner lives; return its Future.

    Not in a daemon thread: that would abort the program if the call returned while
    Python ends. At the end of a program `core.errors.leave` gives up this thread.
    """
    threads = concurrent.futures.ThreadPoolExecutor(1, "connect")
    future = threads.submit(call, *args, **kwargs)
    threads.shutdown(wait=False)
    return future


def _open_store(limit_s: float, *, may_keep: bool = True) -> Any:
    """Return torch's key-value store of this start, which all learners share.

    Args:
      may_keep: learner 0 keeps the store if torchrun does not.

    Raises:
      RuntimeError: it cannot be opened, or nobody answers within the limit.
    """
    # In a thread: torch has no limit for the first answer of whoever has the port.
    opening = _in_thread(
        dist.TCPStore,  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=may_keep and ranks.rank() == 0 and not _has_torchrun(),
        timeout=datetime.timedelta(seconds=limit_s),
        wait_for_workers=False,  # `_wait_for_all` waits, and names who is missing.
    )
    concurrent.futures.wait([opening], limit_s + END_S)
    if not opening.done():
        raise RuntimeError(f"no answer within {limit_s:g} s")
    # torchrun keeps its store when it restarts the learners.
    name = f"start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(name, opening.result())  # type: ignore[attr-defined]


def tell_flags_are_wrong() -> None:
    """Tell the other learners that this one ends before it connects to them.

    Without this call, learners on other machines would wait for START_S. Does nothing
    if there are none: torchrun itself ends the learners of its own machine.
    """
    if ranks.size() == 1 or int(os.environ.get("GROUP_WORLD_SIZE", 1)) == 1:
        return
    rank, status = ranks.rank(), int(Exit.USAGE)
    reason = f"its flags are wrong, as its output on {socket.gethostname()} says"
    with contextlib.suppress(RuntimeError, ValueError):  # The store may be gone.
        store = _open_store(END_S)
        store.set(f"end/{rank}", f"{status} {reason}")
        store.set("ended", str(rank))
        # The store may end with this learner's torchrun: others may still start.
        others = [r for r in range(ranks.size()) if r != rank]
        deadline = time.monotonic() + NEIGHBOURS_S
        while others and time.monotonic() < deadline:
            others = [
                r
                for r in others
                if not store.check([f"process/{r}"]) and not store.check([f"end/{r}"])
            ]
            time.sleep(0.1)
        time.sleep(END_S)
