# SPDX-License-Identifier: Apache-2.0
"""Replay: learn from the most recent rollouts more than once (--replay_ratio).

As in section 5.2.2 of Espeholt et al. 2018, a batch has new rollouts and replayed ones,
drawn uniformly from the most recent. V-trace corrects for the age of both: a row keeps
the logits of the policy that acted (`policy_logits`), and a rollout keeps the recurrent
state of that time.

Rollouts stay in the memory where they were received. A learner thread does this for
each batch:

    replayed = replay.sample()           # They stay in the replay for now.
    ...                                  # Copy new and replayed rollouts into a batch.
    free = replay.add(new, replayed)     # The oldest leave: their memory is free.

With --replay_ratio 0 the replay holds nothing: `add` returns the new rollouts at once.
"""

import argparse
import collections
import dataclasses
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from core import ranks
from core.algorithm.counters import Field
from core.nests import Nest, map_nest
from core.rollout import new_rollouts

log = logging.getLogger(__name__)

# Columns of logs.csv that only a run with --replay_ratio has.
LAG = Field(
    "replay_policy_lag_mean",
    "updates",
    "policy_lag_mean of replayed rollouts; policy_lag_mean and policy_lag_max are of "
    "new rollouts",
)
RHO = Field(
    "replay_mean_rho",
    "1",
    "mean_rho of replayed rollouts; mean_rho is of new rollouts",
)


class Replay:
    """The most recent rollouts, for uniform sampling. Thread-safe.

    Args:
      capacity: largest number of items. An item stands for one rollout, or for several
        that lie side by side in memory. It is hashable: a buffer's index, or `Column`.
      num_sampled: how many items `sample` draws.
      seed: seed of the draws.
      reserve: items that have no rollout yet, at most `capacity`. They leave first, so
        that `add` can return one item for each new item from the start.
    """

    def __init__(
        self,
        capacity: int,
        num_sampled: int,
        seed: Sequence[int] = (),
        reserve: Sequence[Any] = (),
    ):
        self.capacity = capacity
        self.num_sampled = num_sampled
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        # All guarded by the lock:
        self._reserve = collections.deque(reserve)
        self._ring: collections.deque[Any] = collections.deque()  # Oldest first.
        self._in_use: collections.Counter[Any] = collections.Counter()  # Sampled.

    def sample(self) -> list[Any]:
        """Draw `num_sampled` different items, or none if the replay holds fewer.

        They do not leave the replay before `add` is called with them.
        """
        with self._lock:
            if not self.num_sampled or len(self._ring) < self.num_sampled:
                return []
            chosen = self._rng.choice(len(self._ring), self.num_sampled, replace=False)
            items = [self._ring[i] for i in chosen]
            self._in_use.update(items)
            return items

    def add(self, new: Sequence[Any], sampled: Sequence[Any]) -> list[Any]:
        """Put new items in; return those that leave, the oldest first.

        An item that another thread has sampled stays until that thread calls `add`.

        Args:
          sampled: the items that `sample` returned. They are no longer in use.
        """
        with self._lock:
            self._in_use.subtract(sampled)
            self._in_use = +self._in_use  # Without the zeros.
            self._ring.extend(new)
            evicted = []
            while len(self._reserve) + len(self._ring) > self.capacity:
                oldest = self._reserve or self._ring
                if oldest[0] in self._in_use:
                    break
                evicted.append(oldest.popleft())
            return evicted


def create_replay(
    flags: argparse.Namespace,
    first_update: int,
    rollouts_per_item: int = 1,
    reserve: Sequence[Any] = (),
) -> Replay:
    """Return the replay that the flags ask for. It is empty, also in a resumed run.

    Args:
      first_update: optimizer steps before this start of the run. It is a part of the
        seed, so that a resumed run does not repeat its first draws. So is the learner's
        number, since each of several learners draws from its own rollouts.
      reserve: as `Replay` takes it.
    """
    new = new_rollouts(flags)
    replayed = flags.batch_size - new
    if replayed:
        log.info(
            "Replay: each batch has %d new and %d replayed rollouts, from the last %d. "
            "The replay is empty at each start of a run.",
            new,
            replayed,
            flags.replay_capacity,
        )
    capacity = math.ceil((flags.replay_capacity or 0) / rollouts_per_item)
    seed = (flags.seed, first_update, ranks.rank())
    return Replay(capacity, replayed // rollouts_per_item, seed, reserve)


# --------------------------------------------------------- batches with replayed rows


def mark_replayed(num_rows: int, num_new: int, num_rollouts: int) -> np.ndarray:
    """Return the key `replayed` of a batch: bool [T + 1, B], the new columns first."""
    return np.tile(np.arange(num_rollouts) >= num_new, (num_rows, 1))


def split(batch: Mapping[str, Nest]) -> tuple[Nest, Nest | None]:
    """Return the new columns of a batch, and the replayed ones or None: views.

    Args:
      batch: arrays, or tensors on any device.
    """
    if "replayed" not in batch:
        return batch, None
    num_new = int((~batch["replayed"][0]).sum())
    if num_new == batch["replayed"].shape[1]:
        return batch, None
    new, replayed = (
        map_nest(lambda x, part=part: x[:, part], batch)
        for part in (slice(num_new), slice(num_new, None))
    )
    return new, replayed


def sum_replayed(rhos: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sum of the weights [T, B] of replayed rows; {} without such rows."""
    if "replayed" not in batch:
        return {}
    return {"replay_rho": rhos.masked_fill(~batch["replayed"][1:], 0).sum()}


@dataclasses.dataclass(frozen=True, eq=False)  # Hashable: equal only to itself.
class Column:
    """One rollout of a batch. It keeps the memory of that batch alive."""

    batch: Nest  # Rows [T + 1, B, ...] and recurrent state [layers, B, hidden].
    index: int

    def view(self) -> Nest:
        return map_nest(lambda x: x[:, self.index : self.index + 1], self.batch)


class Mixer:
    """Joins batches of new rollouts with replayed ones. For one thread.

    The rollouts stay in the memory in which they were received: the replay holds
    references to their batches. The mixed batch is allocated once and reused.

    Args:
      page_locked: allocate memory that a GPU copies from while the CPU continues.
    """

    def __init__(self, replay: Replay, *, page_locked: bool = False):
        self._replay = replay
        self._page_locked = page_locked
        self._memory: Nest = None

    def __call__(self, batch: Nest, state: Nest) -> tuple[Nest, Nest]:
        """Return a batch with replayed rollouts, and the recurrent state before row 0.

        Without --replay_ratio these are the arguments themselves.

        Args:
          batch: tensors of new rollouts, [T + 1, B, ...].
          state: [layers, B, hidden] each.
        """
        if not self._replay.num_sampled:
            return batch, state
        num_rows, num_new = batch["done"].shape
        replayed = self._replay.sample()
        new = (batch, state)
        batch, state = self._join(new, replayed) if replayed else new
        marks = mark_replayed(num_rows, num_new, num_new + len(replayed))
        self._replay.add([Column(new, i) for i in range(num_new)], replayed)
        return {**batch, "replayed": torch.from_numpy(marks)}, state

    def _join(self, new: Nest, replayed: Sequence[Column]) -> Nest:
        parts = [new, *(column.view() for column in replayed)]
        num = new[0]["done"].shape[1] + len(replayed)
        if self._memory is None:
            self._memory = map_nest(
                lambda x: torch.empty(
                    (len(x), num, *x.shape[2:]),
                    dtype=x.dtype,
                    pin_memory=self._page_locked,
                ),
                new,
            )
        map_nest(lambda to, *xs: torch.cat(xs, dim=1, out=to), self._memory, *parts)
        return self._memory
