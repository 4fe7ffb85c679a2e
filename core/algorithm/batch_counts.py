# SPDX-License-Identifier: Apache-2.0
"""The counts and averages of a learner's batches, for the log.

No weight of the network depends on these numbers. But `BatchCounts.leave_out_stale`
implements --max_policy_lag, which removes rollouts from batches.
"""

import argparse
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from core import ranks
from core.algorithm import losses, replay
from core.algorithm.counters import Averages, BusyTime, EpisodeStats
from core.algorithm.learners import Learners
from core.nests import Nest, map_nest

log = logging.getLogger(__name__)

MANY_GAMES = 100  # Games without a value for one of --info_keys that cause a warning.


class BatchCounts:
    """Counts rows, rollouts and episodes of batches. `Learner.lock` guards the counts.

    Only episodes, steps and rows of new rollouts are counted: those of a replayed
    rollout were counted when it was new.
    """

    def __init__(self, flags: argparse.Namespace):
        self._flags = flags
        self.stale = 0  # Rollouts left out because of --max_policy_lag.
        # How the rows of all batches since the start were used. A row is unused if its
        # batch came after the last update, or if the update of its batch was left out.
        self.rows = {"learned": 0, "stale": 0, "unused": 0}
        self.episodes = EpisodeStats()  # Has its own lock. So has `averages`.
        # This learner's since the last report, if there are others.
        self._own_episodes = self.episodes if ranks.size() == 1 else EpisodeStats()
        self.averages = Averages()  # Since the last row of the log.
        # Those of --info_keys that no row has had yet. Only learner 0 warns of them.
        self._missing = [] if ranks.rank() else [*flags.info_keys]
        self._games = 0  # Since the start.

    def leave_out_stale(
        self, parts: tuple[Nest, Nest, Nest], updates: int
    ) -> tuple[Nest, Nest, Nest]:
        """Return a batch without the rollouts that --max_policy_lag refuses.

        A rollout is left out if the weights that chose its first action are more than
        --max_policy_lag updates old. This holds for replayed rollouts, too. (If no
        rollout of a batch is left, there is no update, so the lag cannot grow.) Games
        that end in a rollout that is left out are counted all the same.

        Args:
          parts: the batch as numpy arrays, the same rows on the learner's device, and
            the recurrent state.
          updates: the version of the weights.
        """
        batch = parts[0]
        if self._flags.max_policy_lag is None:
            return parts
        lag = updates - batch["policy_version"][1:].min(axis=0)  # [B]
        is_stale = lag > self._flags.max_policy_lag
        if not is_stale.any():
            return parts
        new, _ = replay.split(batch)
        num_new = new["done"].shape[1]
        counted = {key: new[key] for key in ("done", "episode_return", "info")}
        stale = map_nest(lambda x: x[:, is_stale[:num_new]], counted)
        self.stale += stale["done"].shape[1]
        self.rows["stale"] += stale["done"][1:].size
        self._add_games(stale)
        fresh = np.flatnonzero(~is_stale)
        batch, rows, state = (map_nest(lambda x: x[:, fresh], part) for part in parts)
        return batch, rows, state

    def add_unused(self, batch: Nest) -> None:
        """Count a batch that comes after the last update."""
        new, _ = replay.split(batch)
        self.rows["unused"] += new["done"][1:].size

    def add(
        self, batch: Nest, sums: dict[Any, float], updates: int, *, is_learned: bool
    ) -> int:
        """Count a batch, with all its values for the log; return its number of steps.

        Args:
          sums: the results of `losses.sum_scalars` and `count_all_steps`. Entries that
            are not columns of the log are removed.
          updates: the version of the weights before this update.
          is_learned: False if the update was left out.
        """
        all_steps, num_steps, replayed_steps = (
            int(sums.pop(key)) for key in losses.COUNTS
        )
        rho, entropy = sums.pop("rho"), sums.pop("entropy")
        new, replayed = replay.split(batch)
        replay_rho = sums.pop("replay_rho", math.nan)  # A fork's loss may have none.
        if replayed_steps:  # Of all learners.
            rho -= replay_rho
            self.averages.add({replay.RHO: replay_rho / replayed_steps})
        if replayed is not None:
            lag = updates - replayed["policy_version"][1:]
            self.averages.add({replay.LAG: lag.mean()})
        self._add_games(new)
        lag = updates - new["policy_version"][1:]
        self.averages.add_max(policy_lag_max=lag.max())
        self.averages.add(policy_lag_mean=lag.mean())
        target_mean, target_var = losses.target_moments(sums, all_steps)
        del sums["target"], sums["target_square"]
        # An infinite loss would hide those of all other updates of the log's row.
        if is_learned and num_steps:
            self.averages.add(
                sums,
                mean_rho=rho / num_steps,
                entropy=entropy / all_steps,
                return_mean=target_mean,
                return_std=target_var**0.5,
            )
        self.rows["learned" if is_learned else "unused"] += new["done"][1:].size
        return num_steps

    def _add_games(self, new: Nest) -> None:
        """Count the episodes and games that end in new rollouts, and --info_keys."""
        rows = map_nest(lambda x: x[1:], new)  # Row 0 was the last row of a rollout.
        self._own_episodes.add_episodes(rows["episode_return"][rows["done"]])
        info = rows["info"]
        # NaN: no game has ended. A server in another language may send anything.
        ended = np.isfinite(info["game_return"]) & np.isfinite(info["game_step"])
        returns, steps = info["game_return"][ended], info["game_step"][ended]
        self._own_episodes.add_games(returns, steps)
        for key in self._flags.info_keys:
            values = info[key][np.isfinite(info[key])]
            if values.size:
                total = float(values.sum(dtype=np.float64))
                self.averages.merge({f"info_{key}": (total, values.size)}, {})
                if key in self._missing:
                    self._missing.remove(key)
        self._games += np.count_nonzero(ended)
        if self._missing and self._games >= MANY_GAMES:
            log.warning(
                "--info_keys has %s, but no step of the first %d games had a number "
                "of this name in info, so the column is blank. "
                "`python -m core.environments.check ENV` lists the names.",
                ", ".join(self._missing),
                self._games,
            )
            self._missing = []  # One warning is enough.

    def take_report(self, learners: Learners, busy: BusyTime) -> dict[str, Any] | None:
        """Return the counts since the last report, for learner 0; its own is None."""
        if learners.rank == 0:
            return None
        report = {
            "episodes": self._own_episodes.state(),
            "averages": self.averages.take(),
            "stale": self.stale,
            "busy": busy.pop(),
            "columns": learners.columns,
        }
        self._own_episodes, self.stale = EpisodeStats(), 0
        return report

    def add_reports(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """In learner 0, add the other learners' counts to its own."""
        states = [self._own_episodes.state(), *(other["episodes"] for other in reports)]
        self._own_episodes = EpisodeStats()
        self.episodes.merge(states)
        for other in reports:
            self.averages.merge(*other["averages"])
            self.stale += other["stale"]

    def discard_restored(self) -> None:
        """Discard counts from a checkpoint, in a learner other than 0.

        Learner 0 keeps them, and adds the counts that this learner reports.
        """
        self.episodes, self.averages, self.stale = EpisodeStats(), Averages(), 0

    def state(self) -> dict[str, Any]:
        """Return the counts that a checkpoint holds, for `restore`."""
        return {"stale": self.stale, "episodes": self.episodes.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stale = state.get("stale", 0)  # Older checkpoints have none.
        self.episodes.restore(state["episodes"])


def count_all_steps(batch: Nest) -> dict[str, float]:
    """Return the numbers of all, of new and of replayed transitions of a batch.

    No transition starts at a truncated row.
    """
    new, replayed = (
        0 if part is None else int(np.count_nonzero(~part["truncated"][:-1]))
        for part in replay.split(batch)
    )
    return {"steps": new + replayed, "new_steps": new, "replayed_steps": replayed}
