# SPDX-License-Identifier: Apache-2.0
"""The learner's watch over the actor pool and its environment servers.

The pool itself is C++ (csrc/actor_pool.h). For the learner only: imports libtorchbeast.
"""

import argparse
import collections
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import libtorchbeast
from core import ranks
from core.action_spaces import category_sizes, split_mask
from core.algorithm import learners
from core.algorithm.update import Learner
from core.errors import ConfigError
from core.nests import ArraySpec, leaves
from core.remote import codec, frames, messages, tls
from core.remote.dial_in import DialedIn
from core.remote.greet import add_tls_reason
from core.remote.local_servers import LocalServers
from core.remote.server_flags import MIN_MAX_STREAMS
from core.remote.server_lists import ServerList, describe_change
from core.rollout import Spaces, new_rollouts, row_spec
from core.running import folder
from core.running.common_flags import has_remote_servers
from core.running.machine import available_memory, num_cores
from core.running.supervise import Watchdog

log = logging.getLogger(__name__)

NO_SERVER_S = 30.0  # Interval of warnings while no server is connected.
# Added to --env_step_timeout_s, so that the server's supervisor ends a hung environment
# before the learner gives up.
SUPERVISOR_S = 2.0
MAX_RECEIVING_THREADS = 4  # More were not measured.


def open_servers(flags: argparse.Namespace) -> LocalServers | ServerList:
    """Start servers on this machine, or open the list of servers that run already.

    Raises:
      ConfigError: the list, or the address of --listen, cannot be used.
    """
    if not has_remote_servers(flags):
        return LocalServers(flags)
    return ServerList.of_flags(flags, DialedIn(flags) if flags.listen else None)


def learner_id(recorded: Mapping[str, Any], run_dir: Path) -> str:
    """Return the id by which servers recognize this learner when it connects again.

    It is the run's id, which is the same in all starts of the run. Learners after the
    first add their number, because a learner ends the streams of another one that has
    the same id. Only learner 0 looks into the run's folder: it is on its machine.

    Args:
      recorded: the run's meta.json, or {} in a new run.
    """
    rank = ranks.rank()
    run_id = learners.share(folder.run_id(recorded, run_dir) if rank == 0 else "")
    return f"{run_id}, learner {rank}" if rank else run_id


def max_streams(
    flags: argparse.Namespace,
    servers: LocalServers | ServerList,
    welcome: messages.Welcome,
) -> int:
    """Return the largest number of streams at a time: --max_streams or its default."""
    num_servers = len(servers.addresses)
    streams = num_servers * welcome.num_streams
    if not servers.may_change:
        return flags.max_streams or streams
    limit = flags.max_streams or max(MIN_MAX_STREAMS, 2 * streams)
    log.info(
        "The list of servers may change: now %d servers with %d streams each, at most "
        "%d streams (--max_streams)",
        *(num_servers, welcome.num_streams, limit),
    )
    return limit


def stream_options(
    flags: argparse.Namespace, welcome: messages.Welcome
) -> dict[str, Any]:
    """Return the arguments of `libtorchbeast.ActorPool` that concern its streams."""
    _, mask = split_mask(welcome.observation)
    return {
        "num_envs": welcome.num_envs,
        "welcome": codec.encode(welcome),
        "value_ranges": frames.value_ranges(welcome.observation, welcome.action),
        "mask_sizes": category_sizes(welcome.action) if mask is not None else [],
        "info_keys": flags.info_keys,
        "seed": flags.seed,
        # The flag limits one environment; a message carries the rows of all K.
        "step_timeout_s": welcome.num_envs * flags.env_step_timeout_s + SUPERVISOR_S,
        "keepalive_s": flags.keepalive_s,
        "tls": tls.files(flags.tls_dir),
        "num_threads": num_receiving_threads(),
    }


def num_receiving_threads() -> int:
    """Return how many threads receive messages: one for every 4 cores, at most 4.

    On 16 cores four receive twice as many steps per second as one (docs/speed.md). On
    two cores a second one only takes time from the other threads.
    """
    return min(max(1, num_cores() // 4), MAX_RECEIVING_THREADS)


def check_memory(
    flags: argparse.Namespace,
    spaces: Spaces,
    net_outputs: Mapping[str, ArraySpec],
    num_envs: int,
) -> None:
    """Log how much memory the rollouts need and how much the machine has.

    Raises:
      ConfigError: there is too little; the message has both numbers and the remedy.
    """
    row = {
        **row_spec(spaces.observation, spaces.action, flags.info_keys),
        **net_outputs,
    }
    row_bytes = sum(spec.nbytes for _, spec in leaves(row))
    # Memory for: one rollout of each environment, which is unfinished or waits for room
    # in the queue; as many finished rollouts, in batches that wait for an environment
    # that takes several times as long as others (otherwise there are few); the rollouts
    # in the queue; the batches of the learner threads; and one batch that is not full.
    batches = 1 + flags.num_learner_threads
    new = new_rollouts(flags)
    num = 2 * num_envs + flags.max_learner_queue_size + new * batches
    advice = "--max_learner_queue_size, --batch_size or --unroll_length"
    if flags.replay_ratio:
        # The replay, which keeps its oldest batch until all rollouts of the batch have
        # left; and the learner threads' batches of new and replayed rollouts.
        num += flags.replay_capacity + new
        num += flags.batch_size * flags.num_learner_threads
        advice = f"--replay_capacity, {advice}"
    need = num * (flags.unroll_length + 1) * row_bytes / 2**20
    have = available_memory() / 2**20
    line = f"memory: {num} rollouts need {need:,.1f} MiB, have {have:,.1f} MiB"
    if need > have:
        fewer = " (--max_streams)" if has_remote_servers(flags) else ""
        raise ConfigError(f"{line}. Lower {advice}, or use fewer environments{fewer}.")
    log.info("Preflight: %s", line)


def run_actors(flags: argparse.Namespace, actors: libtorchbeast.ActorPool) -> None:
    """Receive rows and send actions in this thread until the pool is stopped."""
    try:
        actors.run()
    except libtorchbeast.ServerMismatch as error:
        raise ConfigError(str(error)) from error
    except libtorchbeast.ActorError as error:
        text = add_tls_reason(str(error), flags)
        if text != str(error):
            raise ConfigError(text) from error
        raise


class PoolWatch:
    """Watches servers and streams while the learner trains. For the main thread.

    Args:
      num_streams: the number of streams of each server.
    """

    def __init__(
        self,
        flags: argparse.Namespace,
        learner: Learner,
        actors: libtorchbeast.ActorPool,
        learner_queue: libtorchbeast.BatchingQueue,
        num_streams: int,
        servers: LocalServers | ServerList,
    ):
        self._learner = learner
        self._actors = actors
        self._learner_queue = learner_queue
        self._num_streams = num_streams
        self._servers = servers
        self._addresses: tuple[str, ...] = ()  # Of all servers in the list.
        self._left_out = 0  # Streams without a place, because of --max_streams.
        self._contact = Contact(flags)
        self._watchdog = Watchdog(flags.stall_timeout_s, flags.on_stall)
        self._env_s = 0.0  # Seconds that servers have taken for steps so far.
        self._last_event = ""
        self.follow_servers()

    def follow_servers(self) -> None:
        """Tell the pool which servers there are now; log who joined and who left."""
        before, now = self._addresses, self._servers.addresses
        if now == before:
            return
        self._addresses = now
        left_out = self._actors.set_addresses(
            [address for address in now for _ in range(self._num_streams)]
        )
        if self._servers.may_change:
            log.info("Servers: %s", describe_change(before, now))
        if left_out and not self._left_out:
            log.warning(
                "%d streams of the %d servers have no place and wait for one: raise "
                "--max_streams",
                *(left_out, len(now)),
            )
        self._left_out = left_out

    def tick(self) -> dict[str, Any]:
        """Log events, restart servers, detect a stall; return the log's columns.

        Raises:
          ConfigError: local servers cannot serve.
          RuntimeError: local servers failed too often.
          StallError: nothing was learned for --stall_timeout_s.
        """
        self.follow_servers()
        self._log_events()
        stats = self._actors.stats()
        self._servers.check(stats["received"])
        self._count_env_time(stats)
        no_server = self._contact.is_lost(stats, self._last_event)
        if no_server and not self._servers.is_local:
            self._watchdog.rest()  # Remote servers may be away for any time.
        else:
            self._watchdog.progress(
                self._learner.progress(),
                lambda: describe_wait(stats, self._learner_queue),
            )
        return self.columns(stats)

    def _log_events(self) -> None:
        for event in self._actors.take_events():
            is_good = event.endswith("connected again")
            level = logging.INFO if is_good else logging.WARNING
            log.log(level, "%s", event, extra={"repeats": True})
            self._last_event = event

    def _count_env_time(self, stats: Mapping[str, Any]) -> None:
        since = stats["env_s"] - self._env_s
        num_streams = len(stats["addresses"]) * self._num_streams
        self._learner.busy.add("env", since, workers=max(1, num_streams))
        self._env_s = stats["env_s"]

    def columns(self, stats: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the log's columns about the pool.

        Args:
          stats: the pool's counters; by default those of this moment.
        """
        if stats is None:
            stats = self._actors.stats()
        row = {
            "streams": stats["connected"],
            "reconnects": stats["reconnects"],
            "steps_discarded": stats["discarded"],
            "learner_queue": self._learner_queue.size(),
        }
        if isinstance(self._servers, LocalServers):
            row["server_restarts"] = self._servers.restarts
        if stats["batch_fill"]:
            row["inference_batch"] = stats["batch_fill"]
        served = [server for server in stats["addresses"].values() if server["steps"]]
        if served:
            row["env_step_p50_ms"] = median(server["p50_ms"] for server in served)
            row["env_step_p99_ms"] = max(server["p99_ms"] for server in served)
        return row

    def close(self) -> None:
        self._watchdog.close()

    def rows(self) -> tuple[int, dict[str, int]]:
        """Return how many rows were received, and how many no learner thread took."""
        stats = self._actors.stats()
        not_taken = {"discarded": stats["discarded"], "in flight": stats["in_flight"]}
        return stats["received"], not_taken


class Contact:
    """Warns every NO_SERVER_S while no environment server is connected."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags = flags
        # Monotonic times; 0 while a server is connected.
        self._lost_at = self._say_at = 0.0

    def is_lost(self, stats: Mapping[str, Any], last_event: str) -> bool:
        """Return whether no server is connected.

        Args:
          last_event: the last line of `ActorPool.take_events`, for the warning.
        """
        now = time.monotonic()
        if stats["connected"]:
            self._lost_at = 0.0
            return False
        if not self._lost_at:
            self._lost_at, self._say_at = now, now + NO_SERVER_S
        elif now > self._say_at:
            log.warning(
                "No environment server has been connected for %.0f s; still trying. "
                "The latest error: %s",
                now - self._lost_at,
                add_tls_reason(last_event, self._flags) or "none",
            )
            self._say_at = now + NO_SERVER_S
        return True


def describe_wait(
    stats: Mapping[str, Any], learner_queue: libtorchbeast.BatchingQueue
) -> str:
    """Describe what a run without progress waits for, and the states of streams."""
    states = collections.Counter(stats["states"])
    del states["unused"]
    waiting_s = stats["waiting_s"]
    longest = max(range(len(waiting_s)), key=waiting_s.__getitem__)
    if states["waiting_for_room"]:
        what = "the learner"
    elif states["waiting_for_inference"]:
        what = "inference"
    elif not stats["connected"]:
        what = "environment servers, none of which is connected"
    else:
        what = f"the environment server {stats['stream_addresses'][longest]}"
        what += f", which has not answered for {waiting_s[longest]:.0f} s"
    streams = ", ".join(f"{n} {state}" for state, n in states.items())
    return f"{what} (streams: {streams}; learner queue: {learner_queue.size()})"
