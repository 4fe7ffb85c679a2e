# SPDX-License-Identifier: Apache-2.0
"""The columns of logs.csv: name, unit and meaning of each. The loss may add others."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from core.errors import ConfigError


class Field(NamedTuple):
    """A column of logs.csv."""

    name: str
    unit: str
    meaning: str


# Not allowed in the name of a column: logs.csv is read and written line by line.
NOT_IN_A_NAME = re.compile('[\n\r",]')

# The columns of logs.csv in their order. "Since the last row" means over all updates
# between two rows. A test holds the table in docs/logs-and-columns.md equal to this.
FIELDS = (
    Field(
        "step",
        "agent steps",
        "transitions of all updates so far, skipped updates included, all environments "
        "together. The reset that follows a truncated row does not count as a step",
    ),
    Field(
        "frames",
        "frames",
        "emulator frames of these steps; Atari: --frame_skip frames per step",
    ),
    Field(
        "time_s",
        "s",
        "training time so far, without the time between a stop and a resume",
    ),
    Field("sps", "agent steps/s", "steps per second since the last row"),
    Field(
        "mean_episode_return",
        "reward",
        "mean unclipped return of the last 100 finished full games; blank before the "
        "first",
    ),
    Field("mean_episode_step", "agent steps", "mean length of the same games"),
    Field("games", "count", "full games finished so far"),
    Field(
        "best_mean_return",
        "reward",
        "highest mean_episode_return so far; blank before 100 games",
    ),
    Field(
        "mean_life_return",
        "reward",
        "mean unclipped return of the last 100 episodes as the learner sees them: "
        "single lives, if a lost life ends the episode",
    ),
    Field(
        "total_loss",
        "1",
        "pg_loss + baseline_loss + entropy_loss; each is a sum over T and B, averaged "
        "over the updates since the last row",
    ),
    Field("pg_loss", "1", "policy gradient loss"),
    Field(
        "baseline_loss",
        "1",
        "half the squared error to the V-trace targets, times --baseline_cost",
    ),
    Field(
        "entropy_loss",
        "1",
        "minus the entropy, times --entropy_cost; higher if the policy is closer to "
        "deterministic",
    ),
    Field(
        "entropy",
        "nats per step",
        "mean entropy of the policy; ln(number of actions) if it is uniform",
    ),
    Field(
        "mean_rho",
        "1",
        "mean clipped importance weight of V-trace; 1 if the actors' policy equals the "
        "learner's, lower if they differ",
    ),
    Field(
        "return_mean",
        "reward",
        "mean V-trace target of the baseline, for rewards after --reward_clipping",
    ),
    Field(
        "return_std",
        "reward",
        "standard deviation of these targets in a batch; --normalize_returns uses that "
        "of the targets of all batches",
    ),
    Field(
        "grad_norm",
        "1",
        "global gradient norm before clipping, mean since the last row",
    ),
    Field("learning_rate", "1", "learning rate of the latest update"),
    Field("updates", "count", "optimizer steps so far"),
    Field(
        "skipped_updates",
        "count",
        "updates left out so far because loss or gradient was not finite",
    ),
    Field(
        "policy_lag_mean",
        "updates",
        "optimizer steps between acting and learning, mean since the last row",
    ),
    Field("policy_lag_max", "updates", "the same, largest since the last row"),
    Field(
        "stale_rollouts",
        "count",
        "rollouts left out so far because of --max_policy_lag; never learned from",
    ),
    Field("buffers_full", "count", "MonoBeast: rollouts waiting for the learner"),
    Field("learner_busy", "share of time", "time in which an update runs"),
    Field(
        "inference_busy",
        "share of time",
        "time in which actions are chosen. PolyBeast: by the inference threads. "
        "MonoBeast: by the actors, which otherwise step environments or wait",
    ),
    Field(
        "env_busy",
        "share of time",
        "time in which environments step. PolyBeast: from sending actions until the "
        "server answers, the mean of all streams; the streams of one server wait for "
        "each other, which counts too. MonoBeast: in the actors",
    ),
    Field(
        "gpu_utilization",
        "share of time",
        "time in which the learner's GPU computes; blank without a GPU, or without "
        "nvidia-ml-py",
    ),
    Field(
        "actor_restarts", "count", "actors started again after they died, since start"
    ),
    Field(
        "rollouts_discarded",
        "count",
        "unfinished rollouts of dead actors, never learned from, since start",
    ),
    Field(
        "streams", "count", "PolyBeast: connected streams to environment servers, now"
    ),
    Field(
        "server_restarts",
        "count",
        "local environment servers started again after they died, since start",
    ),
    Field(
        "reconnects",
        "count",
        "streams that connected again after they broke, since start",
    ),
    Field(
        "steps_discarded",
        "rows",
        "rows of rollouts that were unfinished when their stream broke, never learned "
        "from, since start",
    ),
    Field("learner_queue", "count", "PolyBeast: rollouts waiting for the learner"),
    Field(
        "inference_batch",
        "environments",
        "mean size of an inference batch since start",
    ),
    Field(
        "env_step_p50_ms",
        "ms",
        "median time from sending actions to receiving the next observations, since "
        "start; median over the servers",
    ),
    Field(
        "env_step_p99_ms",
        "ms",
        "99th percentile of the same time; largest over the servers",
    ),
    Field("rss_mb", "MB", "resident memory of the main process"),
)
NAMES = frozenset(field.name for field in FIELDS)


# How columns about actors and servers are combined over several learners.
SUMS = {
    *("buffers_full", "actor_restarts", "rollouts_discarded", "streams"),
    *("server_restarts", "reconnects", "steps_discarded", "learner_queue"),
}
MAXIMA = {"env_step_p99_ms"}


def combine(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum, maximum or mean of each column over several learners."""
    result = {}
    for name in {name: None for row in rows for name in row}:
        values = [row[name] for row in rows if name in row]
        if name in SUMS:
            result[name] = sum(values)
        elif name in MAXIMA:
            result[name] = max(values)
        else:
            result[name] = sum(values) / len(values)
    return result


def info_field(key: str) -> Field:
    """Return the column for one of --info_keys."""
    return Field(
        f"info_{key}", "-", f"info[{key!r}] of the environment, mean since the last row"
    )


def check_names(keys: Iterable[Any], taken: Iterable[str]) -> None:
    """Check the names of the columns that a loss adds to the log.

    Args:
      keys: names, or a `Field` each.
      taken: the names of other columns, besides those of FIELDS.

    Raises:
      ConfigError: a name is that of another column, or has a comma, a double quote or a
        line break.
    """
    for name in (key.name if isinstance(key, Field) else key for key in keys):
        if name in NAMES or name in taken:
            raise ConfigError(
                f"the log has two columns with the name {name}: give the one in the "
                "loss's extra another name"
            )
        if NOT_IN_A_NAME.search(name):
            raise ConfigError(
                f"the loss's extra has a column with the name {name!r}: expected a "
                "name without commas, double quotes and line breaks"
            )
