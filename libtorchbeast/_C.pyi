# SPDX-License-Identifier: Apache-2.0
"""The compiled part of libtorchbeast. csrc/module.cc binds it.

Sizes count rows: entries along axis `batch_dim`. An array put in has at least one, and
often more; the rows that are put in together stay together.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

class ClosedBatchingQueue(RuntimeError):
    """The queue or batcher is closed, or was closed while the call waited."""

class AsyncError(RuntimeError):
    """A batch was dropped without outputs, so its callers get no answer."""

class ActorError(ConnectionError):
    """A server failed. Has its address, and its own words or traceback."""

class ServerMismatch(ActorError):
    """A server and this learner do not fit, so trying again will not help."""

class ServerUnavailable(ActorError):
    """A server is not there, or busy; it may be back soon."""

@final
class BatchingQueue:
    """FIFO of nests of arrays, which leave it joined into batches. Thread-safe.

    Args:
      batch_dim: axis along which rows are counted and joined.
      minimum_batch_size: rows that a batch waits for.
      maximum_batch_size: rows that a batch never exceeds.
      timeout_ms: once the oldest nest has been queued for so long, a batch does not
        wait for minimum_batch_size. 0: it never waits. None: it always does.
      check_inputs: compare structure, dtypes and the other axes with what is queued.
        Otherwise a batch that does not fit together raises where it comes out.
      maximum_queue_size: `enqueue` waits while so many rows are queued. At least
        maximum_batch_size. None: it never waits.
      allocate: returns memory of this many bytes, as a uint8 tensor on the CPU or an
        object with a writable buffer, aligned to 16 bytes; batches are made in it,
        again and again. For page-locked memory, for instance:
        `lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)`.
        May be called in any thread. None: ordinary memory.

    Raises:
      ValueError: the sizes make no sense together.
    """

    def __init__(
        self,
        batch_dim: int = 1,
        minimum_batch_size: int = 1,
        maximum_batch_size: int = 1024,
        timeout_ms: int | None = None,
        check_inputs: bool = True,
        maximum_queue_size: int | None = None,
        allocate: Callable[[int], Any] | None = None,
    ) -> None: ...
    def enqueue(self, nest: Any) -> None:
        """Add a nest of arrays `[.., rows, ..]`. Blocks while the queue is full.

        Raises:
          ClosedBatchingQueue: it is closed, or was closed meanwhile.
          TypeError: a leaf is no array, or its dtype is not among those named in
            `libtorchbeast`.
          ValueError: the nest has no array; or a leaf, which is named, has no rows, too
            many rows or too few dimensions, or does not fit the others (check_inputs).
        """
    def __iter__(self) -> BatchingQueue: ...
    def __next__(self) -> Any:
        """Return a batch: a nest like its first, `[.., rows, ..]`. Blocks.

        A batch of a single nest is not copied.

        Raises:
          StopIteration: the queue is closed.
          ValueError: the nests do not fit together (without check_inputs).
          MemoryError: there is no memory for the batch, whose size is named.
        """
    def close(self) -> None:
        """Drop what is queued and wake every waiter. Does not block.

        Raises:
          RuntimeError: it is closed already, and not by an ActorPool that failed.
        """
    def is_closed(self) -> bool: ...
    def size(self) -> int:
        """Return the number of rows queued.

        Raises:
          ActorError and others: an ActorPool without named_rows closed it when its
            `run` failed, for the same reason.
        """
    def dropped(self) -> int:
        """Return the number of rows that were put in and that nobody will see."""
    def dequeued(self) -> int:
        """Return the number of rows handed out so far."""
    def num_waiting(self) -> int:
        """Return the number of threads that wait in `enqueue` or for a batch."""

@final
class DynamicBatcher:
    """Joins the inputs of many callers into batches for few model threads. Thread-safe.

    Args:
      batch_dim, minimum_batch_size, maximum_batch_size, timeout_ms, allocate: as for
        BatchingQueue.
      check_outputs: outputs must have exactly the rows of their batch. Otherwise they
        may have more, which are ignored.

    Raises:
      ValueError: the sizes make no sense together.
    """

    def __init__(
        self,
        batch_dim: int = 1,
        minimum_batch_size: int = 1,
        maximum_batch_size: int = 1024,
        timeout_ms: int | None = 100,
        check_outputs: bool = True,
        allocate: Callable[[int], Any] | None = None,
    ) -> None: ...
    def compute(self, nest: Any) -> Any:
        """Return the outputs for inputs `[.., rows, ..]`. Blocks until there are some.

        Raises:
          ClosedBatchingQueue: it is closed, or was closed meanwhile.
          AsyncError: the batch was dropped without outputs.
          TypeError, ValueError: as for BatchingQueue.enqueue.
        """
    def __iter__(self) -> DynamicBatcher: ...
    def __next__(self) -> Batch:
        """Return a batch of inputs. Blocks until there is one.

        Raises:
          StopIteration: the batcher is closed.
        """
    def close(self) -> None:
        """Wake every waiter, without an answer. Does not block.

        Raises:
          RuntimeError: it is closed already, and not by an ActorPool that failed.
        """
    def is_closed(self) -> bool: ...
    def size(self) -> int:
        """Return the number of rows queued.

        Raises:
          ActorError and others: an ActorPool without named_rows closed it when its
            `run` failed, for the same reason.
        """
    def num_batches(self) -> int:
        """Return the number of batches handed out so far."""
    def num_rows(self) -> int:
        """Return the number of rows handed out so far."""
    def num_waiting(self) -> int:
        """Return the number of threads that wait in `compute` or for a batch."""

@final
class Batch:
    """The joined inputs of several `compute`. Dropped: AsyncError in all of them."""

    def get_inputs(self) -> Any:
        """Return a copy of the inputs `[.., rows, ..]`. Does not block."""
    def set_outputs(self, outputs: Any) -> None:
        """Hand each caller its rows of a nest of arrays `[.., rows, ..]`.

        The nest may be another one than that of the inputs. Does not block. After the
        batcher was closed this does nothing.

        Raises:
          RuntimeError: there are outputs already.
          TypeError: a leaf is no array.
          ValueError: a leaf has another number of rows, or too few dimensions; it is
            named. Outputs may then be set again.
        """

@final
class ActorPool:
    """Plays on environment servers: one stream per address, without any Python.

    Each stream carries K environments. Inference goes through
    `inference_batcher`, which must answer `(agent_outputs, agent_state)` to
    `(env_rows, agent_state)`, arrays `[1, K, ...]`. Rollouts go to `learner_queue`, a
    whole learner batch at a time: `((env_rows, agent_outputs), agent_state)`, arrays
    `[unroll_length + 1, B, ...]`. core/rollout.py says what the rows mean.

    Args:
      unroll_length: steps of a rollout, T.
      env_server_addresses: "unix:/path" or "host:port" of each stream; an address may
        come several times. `set_addresses` replaces them.
      initial_agent_state: nest of arrays `[.., 1, ...]` of one environment; () for a
        model without memory.
      named_rows: env_rows is a dict of all that the server sends. Otherwise it is the
        tuple (observation, reward, done, episode_step, episode_return) that learners of
        TorchBeast know, and a truncated episode ends in one row that is done, as a
        terminated one does.
      inference_keys: with named_rows, the keys that inference needs and gets; (): all
        of them.
      info_keys: scalars of the environments' info to send as well.
      seed, run_id, first_incarnation: told to the servers.
      max_failures: failures in a row, on one stream without a finished rollout, that
        end the run; four times as many on one that has finished a rollout before. With
        servers_may_change, they end only this stream, as long as a server at another
        address plays without failures.
      step_timeout_s: a server that does not answer for so long is given up, and
        connected to anew; 0: never.
      keepalive_s: a machine that is frozen or cut off is noticed within twice this.
      num_threads: threads that receive.
      tls: the paths of ca.pem, cert.pem and key.pem: all connections but those to
        unix sockets are encrypted, and both sides show a certificate of this CA. Each
        new connection reads the files again.
      value_ranges: (path, low, high) of each integer array of a Step whose values must
        lie in a range, such as (("observation", "direction"), [0], [3]): the least and
        the greatest of one environment's numbers. A server that sends another value
        loses its stream.
      mask_sizes: how many values each Discrete choice of an action has, if observations
        have an action_mask; (): they have none. A server whose mask allows no value of
        a choice loses its stream, unless the row is truncated.
      max_streams: the largest number of streams at a time. 0: as many as there are
        env_server_addresses.
      num_envs: K. A server with another number does not fit.
      welcome: what `describe` returned for the server that the model was made for. A
        server that differs does not fit. b"": the first server that connects decides.
      servers_may_change: whether `set_addresses` may bring servers that nobody knew at
        the start. If so, a server that does not fit is refused, and asked again after
        a minute. If not, it ends the run.

    Raises:
      TypeError, ValueError: an argument does not make sense, or no multiple of K is a
        batch of learner_queue.
    """

    def __init__(
        self,
        unroll_length: int,
        learner_queue: BatchingQueue,
        inference_batcher: DynamicBatcher,
        env_server_addresses: Sequence[str],
        initial_agent_state: Any,
        *,
        named_rows: bool = False,
        inference_keys: Sequence[str] = (),
        info_keys: Sequence[str] = (),
        seed: int = 0,
        run_id: str = "",
        first_incarnation: int = 0,
        max_failures: int = 5,
        step_timeout_s: float = 0.0,
        keepalive_s: float = 10.0,
        num_threads: int = 1,
        tls: tuple[str, str, str] | None = None,
        value_ranges: Sequence[
            tuple[Sequence[str | int], Sequence[int], Sequence[int]]
        ] = (),
        mask_sizes: Sequence[int] = (),
        max_streams: int = 0,
        num_envs: int = 1,
        welcome: bytes = b"",
        servers_may_change: bool = False,
    ) -> None: ...
    def run(self) -> None:
        """Play until `stop()`, or until a queue is closed. Blocks. Once only.

        A server that goes away costs its rollouts under way, and is returned to.

        If run() fails and named_rows is off, it closes learner_queue and
        inference_batcher: loops over them end, and their size() raises the same error,
        because the main loop of a TorchBeast learner of 2019 only asks for sizes.

        Raises:
          ServerMismatch: a server's protocol, environment, spaces or number of
            environments is not what it must be (see servers_may_change).
          ActorError: a server failed max_failures times in a row. That it shows a
            wrong certificate, or none, is a failure too.
          AsyncError: an inference batch was dropped.
          ValueError: a server does not send one of inference_keys.
        """
    def stop(self) -> None:
        """End `run()`. Blocks until it has ended. May be called again.

        A signal handler that interrupts `run()` may call it, too: then it does not
        block, and `run()` ends after the handler.
        """
    def set_addresses(self, env_server_addresses: Sequence[str]) -> int:
        """Replace the list of addresses, also during `run()`. Does not block.

        An address that comes n times gets n streams. Streams whose addresses stay are
        not disturbed. Streams whose addresses are gone end: their unfinished rollouts
        are discarded, and other addresses take their places, with the same numbers of
        environments in new incarnations.

        Returns how many of the addresses, the last new ones, got no stream because
        there are max_streams already. They wait for the stream of an address that
        leaves, or whose server is refused or cannot be reached.

        Raises:
          ValueError: an address is neither "unix:/path" nor "host:port".
        """
    def count(self) -> int:
        """Return the number of agent steps received so far."""
    def stats(self) -> dict[str, Any]:
        """Return statistics of the pool.

        Steps are agent steps. At any moment
        received == dequeued + discarded + in_flight.

          connected: streams that are connected now.
          connects: connections so far.
          reconnects: connections so far but the first one of each stream.
          failures: failures so far that count towards max_failures.
          received: steps that servers have sent.
          dequeued: steps that learner_queue has handed out.
          discarded: steps of rollouts that were cut short or dropped.
          in_flight: steps of rollouts under way or queued.
          batch_fill: mean number of environments in an inference batch so far.
          env_s: the sum of env_s over all addresses, also those that have left.
          states: what each of max_streams streams is doing.
          waiting_s: how long each stream has been waiting for its server, else 0.
          stream_addresses: the address of each stream; "" if it is unused.
          addresses: by address: streams, connected, steps, and of the time from an
            action sent to its step received p50_ms, p99_ms and env_s, the sum.
        """
    def take_events(self) -> list[str]:
        """Return a line for each failure or reconnection since the last call."""

def describe(
    address: str,
    *,
    info_keys: Sequence[str] = (),
    run_id: str = "",
    timeout_s: float = 10.0,
    tls: tuple[str, str, str] | None = None,
) -> bytes:
    """Return the Welcome of the server at `address`; for `decode_welcome`. Blocks.

    If there is no server yet, the call fails soon: ask again.

    Args:
      tls: as for ActorPool.

    Raises:
      ServerUnavailable: it did not answer; with the address and the reason.
      ServerMismatch: it refuses this learner, or its certificate is wrong all the time.
      ValueError: the address is neither "unix:/path" nor "host:port".
    """
