# SPDX-License-Identifier: Apache-2.0
"""One update of IMPALA on one page: from a batch of rollouts to new weights.

Espeholt et al. 2018 (arXiv:1802.01561), section 4. Read from top to bottom:

    Learner.update      the whole update: gradient, clipping, optimizer step, counters
    compute_gradient    forward and backward pass, one group of columns after another
    compute_loss        the forward pass, and the loss of what came out
    impala_loss         V-trace and the three losses

V-trace itself is in `core.algorithm.vtrace`. To change the loss, write a `compute_loss`
of your own in your trainer and give it to `Learner` (README, "Change the algorithm").
"""

import argparse
import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from core.algorithm import losses, replay, vtrace
from core.algorithm.counters import Averages, BusyTime, EpisodeStats
from core.algorithm.distributions import ActionDistribution
from core.algorithm.gpu import Graphs, in_stream
from core.algorithm.learners import CHECK_UPDATES, current
from core.algorithm.losses import ImpalaLoss
from core.errors import StallError
from core.nests import Nest, map_nest

MAX_BAD_UPDATES = 10  # Non-finite updates in a row that stop the run.

State = tuple[torch.Tensor, ...]  # The recurrent state: [layers, B, hidden] each.


class Learner:
    """The network being trained, its optimizers, and the counters of the updates.

    Learner threads and the main thread share it: `lock` is held for every update and
    every snapshot, so that a checkpoint never holds half an update.
    """

    def __init__(
        self,
        flags: argparse.Namespace,
        net: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loss: Callable[..., ImpalaLoss] | None = None,
    ):
        """Create the learner.

        Args:
          net: on the device that learns.
          optimizers: of net's parameters. All of them step at each update. The learning
            rate that each parameter group has now is the one at the start of the run. A
            resumed run takes the other options of the groups from here, too, except
            those that training has changed, such as a counter: these go on as saved.
          loss: called like `compute_loss`, which is the default.
        """
        self.flags = flags
        self.net: Any = net  # The Net of a trainer, which core does not import.
        self.device = next(net.parameters()).device
        self.optimizers = list(optimizers)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])  # As torch's schedulers do.
        self.gradient: Callable[..., list[ImpalaLoss]] = functools.partial(
            compute_gradient, flags, net, loss or compute_loss
        )
        if flags.cuda_graphs and self.device.type == "cuda" and not flags.use_lstm:
            self.gradient = Graphs(self.gradient, self.device)
        self.lock = threading.Lock()
        # Guarded by `lock`:
        self.step = 0  # Agent steps learned from: transitions, not rows.
        self.updates = 0  # Optimizer steps: the version of the weights.
        self.skipped = 0  # Updates left out because something was not finite.
        self.skipped_in_a_row = 0
        self.stale = 0  # Rollouts left out because of --max_policy_lag.
        # What became of the rows of all batches since the start. Unused are those of a
        # batch that came after the last update, or whose update was left out.
        self.rows = {"learned": 0, "stale": 0, "unused": 0}
        self.failed = False  # After MAX_BAD_UPDATES: the other learner threads stop.
        # The other learners (torchrun), None without any. They do the same updates: all
        # above but `stale` and `rows` is the same in all of them.
        self.learners = current()
        self.stopped = False  # The learners have agreed to stop.
        self.episodes = EpisodeStats()
        # Between two rows of the log; each has a lock of its own.
        self.averages = Averages()
        self.busy = BusyTime()

    def update(
        self, batch: Nest, state: Nest, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Do one update with a batch of rollouts.

        If the loss or its gradient is not finite, no optimizer steps: one NaN would
        make every weight NaN. After the last update a batch is counted, not learned.

        Args:
          batch: [T + 1, B, ...] as the table in `core.rollout` says; numpy arrays, or
            tensors on the CPU. New rollouts come before replayed ones.
          state: the recurrent state before row 0, [layers, B, hidden] each.
          stream: copies to a GPU while another thread's update goes on.

        Raises:
          FloatingPointError: this was the last of MAX_BAD_UPDATES such updates in a
            row.
        """
        flags, net = self.flags, self.net
        batch, state = map_nest(torch.as_tensor, (batch, state))
        with in_stream(stream):
            rows, state = map_nest(
                lambda x: x.to(self.device, non_blocking=True), (batch, state)
            )
        batch = map_nest(lambda x: x.numpy(), batch)
        with self.lock, self.busy.measure("learner"):
            if self.finished() or self.failed or self.stopped:
                new, _ = replay.split(batch)
                self.rows["unused"] += new["done"][1:].size
                return
            fresh = self._fresh_columns(batch)
            if fresh.size < batch["done"].shape[1]:
                batch, rows, state = (
                    map_nest(lambda x: x[:, fresh], part)
                    for part in (batch, rows, state)
                )
                if not replay.split(batch)[0]["done"].size:
                    return

            # The learning rate of each parameter group falls linearly to 0.
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    remaining = 1 - self.step / flags.total_steps
                    group["lr"] = group["initial_lr"] * remaining
            parts = self.gradient(rows, state)  # Forward and backward pass.
            if self.learners is not None:
                self.learners.sum_gradients(net)
            grad_norm = nn.utils.clip_grad_norm_(
                net.parameters(), flags.grad_norm_clipping or math.inf
            )
            sums = losses.sum_scalars(parts, grad_norm)  # Waits for the device.
            sums |= count_all_steps(batch)
            is_report_due = False
            if self.learners is not None:
                sums, is_report_due = self._sum_over_learners(sums)
            is_finite = math.isfinite(sums["total_loss"] + sums["grad_norm"])
            if is_finite:
                for optimizer in self.optimizers:
                    optimizer.step()
                self._learn_statistics(batch, rows, sums)
            self._count(batch, sums, is_finite)
            if self.learners is not None:
                self._meet_learners(is_report_due)

    def _fresh_columns(self, batch: Nest) -> np.ndarray:
        """Return which rollouts --max_policy_lag leaves; count the others.

        A rollout is too old if its first action was chosen by weights that have been
        updated more often since. (If no rollout of a batch is left, the weights stay as
        they are, and the next rollouts are younger.) A replayed rollout may not be
        older than a new one either, but was counted when it was new.
        """
        num_rollouts = batch["done"].shape[1]
        if self.flags.max_policy_lag is None:
            return np.arange(num_rollouts)
        lag = self.updates - batch["policy_version"][1:].min(axis=0)  # [B]
        fresh = np.flatnonzero(lag <= self.flags.max_policy_lag)
        num_new = replay.split(batch)[0]["done"].shape[1]
        num_stale = num_new - np.count_nonzero(fresh < num_new)
        self.stale += num_stale
        self.rows["stale"] += num_stale * (len(batch["done"]) - 1)
        return fresh

    def _learn_statistics(
        self, batch: Nest, rows: Nest, sums: dict[Any, float]
    ) -> None:
        """Add a batch to the network's running statistics, if flags give it some."""
        if self.flags.normalize_observations:
            new_rows = replay.split(rows)[0]  # Each row once.
            self.net.normalize.learn(new_rows, self.learners)
        if self.flags.normalize_returns and (num_steps := int(sums["steps"])):
            self.net.baseline.learn(*losses.target_moments(sums, num_steps))

    def _count(self, batch: Nest, sums: dict[Any, float], is_finite: bool) -> None:
        """Count an update, and all that the log says of its batch.

        Steps, episodes and rows are those of new rollouts.
        """
        all_steps, num_steps, replayed_steps = (
            int(sums.pop(key)) for key in ("steps", "new_steps", "replayed_steps")
        )
        rho, entropy = sums.pop("rho"), sums.pop("entropy")
        new, replayed = replay.split(batch)
        replay_rho = sums.pop("replay_rho", math.nan)  # A fork's loss may have none.
        if replayed is not None:
            rho -= replay_rho
            lag = self.updates - replayed["policy_version"][1:]
            mean_rho = replay_rho / max(replayed_steps, 1)
            self.averages.add({replay.LAG: lag.mean(), replay.RHO: mean_rho})
        rows = map_nest(lambda x: x[1:], new)  # Row 0 was another rollout's last.
        self.episodes.add_episodes(rows["episode_return"][rows["done"]])
        info = rows["info"]
        ended = ~np.isnan(info["game_return"])
        self.episodes.add_games(info["game_return"][ended], info["game_step"][ended])
        lag = self.updates - rows["policy_version"]
        self.averages.add_max(policy_lag_max=lag.max())
        target_mean, target_var = losses.target_moments(sums, all_steps)
        del sums["target"], sums["target_square"]
        self.averages.add(
            sums,
            mean_rho=rho / max(num_steps, 1),
            entropy=entropy / max(all_steps, 1),
            policy_lag_mean=lag.mean(),
            return_mean=target_mean,
            return_std=target_var**0.5,
        )
        for key in self.flags.info_keys:
            values = info[key][np.isfinite(info[key])]
            if values.size:
                self.averages.add(**{f"info_{key}": values.mean()})

        self.step += num_steps
        if is_finite:
            self.updates += 1
            self.skipped_in_a_row = 0
            self.rows["learned"] += rows["done"].size
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.rows["unused"] += rows["done"].size
        if self.skipped_in_a_row >= MAX_BAD_UPDATES:
            self.failed = True
            bad = losses.describe_not_finite(batch)
            raise FloatingPointError(
                f"{self.skipped_in_a_row} updates in a row had a loss "
                f"({sums['total_loss']}) or gradient norm ({sums['grad_norm']}) that "
                f"is not finite; {bad} The weights are as they were before. Lower "
                "--learning_rate, or check the environment's observations."
            )

    def _sum_over_learners(
        self, sums: dict[Any, float]
    ) -> tuple[dict[Any, float], bool]:
        """Return the sums over all learners, and whether reports are due now."""
        assert self.learners is not None
        own = dict(sums)
        grad_norm = own.pop("grad_norm")  # Of the summed gradient already.
        own |= {
            "stop": self.learners.wants_stop,
            "report": self.learners.wants_report(),
        }
        total = self.learners.sum(own)
        self.stopped = total.pop("stop") > 0
        is_report_due = total.pop("report") > 0
        return {**total, "grad_norm": grad_norm}, is_report_due

    def _meet_learners(self, is_report_due: bool) -> None:
        """After an update: give learner 0 what it logs; compare the weights."""
        learners = self.learners
        assert learners is not None
        learners.is_over = self.finished() or self.stopped
        if is_report_due or learners.is_over:
            report = None
            if learners.rank > 0:
                report = {
                    "episodes": self.episodes.take(),
                    "averages": self.averages.take(),
                    "stale": self.stale,
                    "busy": self.busy.pop(),
                    "columns": learners.columns,
                }
                self.stale = 0
            for other in learners.report(report):
                self.episodes.merge(other["episodes"])
                self.averages.merge(*other["averages"])
                self.stale += other["stale"]
        if self.updates % CHECK_UPDATES == 0:
            learners.check_weights(self.net)

    def finished(self) -> bool:
        """Say whether --total_steps are done."""
        return self.step >= self.flags.total_steps

    def progress(self) -> str:
        """Say how far the run is, for a `Watchdog`.

        The text changes all the time while this learner waits for other learners: that
        wait has a limit of its own, and another learner's watchdog knows the reason.
        """
        text = f"step {self.step}"
        if self.learners is not None and self.learners.waits_since:
            text += f", at {time.monotonic():.0f} s"
        return text

    @contextlib.contextmanager
    def between_updates(self, limit_s: float) -> Iterator[None]:
        """Hold `lock`, waiting for it for up to `limit_s`.

        Raises:
          StallError: the present update does not end.
        """
        if not self.lock.acquire(timeout=limit_s):
            raise StallError(
                f"an update has not ended within {limit_s:g} s: a learner thread holds "
                "learner.lock"
            )
        try:
            yield
        finally:
            self.lock.release()

    def state(self) -> dict[str, Any]:
        """Return the counters, for `restore`. Needs the lock."""
        return {
            "step": self.step,
            "updates": self.updates,
            "skipped": self.skipped,
            "stale": self.stale,
            "episodes": self.episodes.state(),
        }

    def begin_own_counts(self) -> None:
        """Forget what learner 0 has counted: it adds what this learner reports."""
        self.episodes, self.averages, self.stale = EpisodeStats(), Averages(), 0

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.updates = state["updates"]
        self.skipped = state["skipped"]
        self.stale = state.get("stale", 0)  # Older checkpoints have none.
        self.episodes.restore(state["episodes"])


def count_steps(batch: Mapping[str, np.ndarray]) -> int:
    """Return how many transitions a batch has; none starts at a truncated row."""
    return int(np.count_nonzero(~batch["truncated"][:-1]))


def count_all_steps(batch: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the numbers of all, of new and of replayed transitions of a batch."""
    new, replayed = (
        0 if part is None else count_steps(part) for part in replay.split(batch)
    )
    return {"steps": new + replayed, "new_steps": new, "replayed_steps": replayed}


def compute_gradient(
    flags: argparse.Namespace,
    net: nn.Module,
    loss: Callable[..., ImpalaLoss],
    rows: Nest,
    state: State,
) -> list[ImpalaLoss]:
    """Set the gradient of a batch's loss; return the losses of its groups of columns.

    The loss is a sum over columns, and so is its gradient: on a CPU one group of
    columns after another uses the same, warm memory.

    Args:
      loss: called like `compute_loss`.
      rows: [T + 1, B, ...] as the table in `core.rollout` says, on net's device.
      state: the recurrent state before row 0.
    """
    # A CUDA graph writes into the .grad tensors it was recorded with, so they are
    # zeroed in place.
    net.zero_grad(set_to_none=not flags.cuda_graphs)
    parts = []
    for rows_part, state_part in losses.split_columns(rows, state):
        part = loss(flags, net, rows_part, state_part)
        part.total_loss.backward()
        parts.append(part)
    return parts


def compute_loss(
    flags: argparse.Namespace, net: Any, rows: Nest, state: State
) -> ImpalaLoss:
    """Return the loss of some columns of a batch under the network being trained.

    Args:
      net: has `distribution`, an `ActionDistribution`.
      rows: [T + 1, B, ...], contiguous, on net's device.
      state: the recurrent state before row 0.
    """
    outputs, _ = net(rows, state)
    return impala_loss(outputs, rows, net.distribution, **loss_options(flags, net))


def loss_options(flags: argparse.Namespace, net: Any) -> dict[str, Any]:
    """Return the keyword arguments of `impala_loss` that flags are for."""
    names = ("discounting", "baseline_cost", "entropy_cost", "reward_clipping")
    options = {name: getattr(flags, name) for name in names}
    options["lambda_"] = flags.vtrace_lambda
    if flags.normalize_returns:
        options["scale"] = net.baseline.scale
    return options


def impala_loss(
    learner_outputs: Mapping[str, torch.Tensor],
    batch: Mapping[str, Any],
    distribution: ActionDistribution,
    *,
    discounting: float,
    baseline_cost: float,
    entropy_cost: float,
    reward_clipping: str,
    scale: torch.Tensor | float = 1.0,
    **clipping: Any,
) -> ImpalaLoss:
    """Compute the loss of a batch of rollouts.

    Its gradient is the update of the paper's section 4.2, with sums over all
    transitions x_s -> x_{s+1} of the batch:

        - sum rho_s log pi(a_s|x_s) (r_s + gamma_s v_{s+1} - V(x_s))
        + baseline_cost * 1/2 sum (v_s - V(x_s))^2
        - entropy_cost * sum H(pi(.|x_s))

    where v is the V-trace target, and only pi and V have a gradient. What is in round
    brackets is divided by `scale` first (Hessel et al. 2018, arXiv:1809.04474).

    Args:
      learner_outputs: policy_logits [T + 1, B, P] and baseline [T + 1, B], float32, of
        the network being trained, for the observation of each row.
      batch: [T + 1, B, ...] as the table in `core.rollout` says.
      distribution: over the actions; the policy_logits are its parameters.
      discounting: gamma inside an episode.
      baseline_cost, entropy_cost: weights of the baseline loss and the entropy bonus.
      reward_clipping: "abs_one" clamps rewards to [-1, 1], "none" leaves them.
      scale: `PopArt.scale`, about the standard deviation of v; or 1.
      clipping: `lambda_` and the thresholds that
        `core.algorithm.vtrace.from_importance_weights` takes; the paper's by default.

    Raises:
      ValueError: a shape, a dtype or reward_clipping; the message names it.
    """
    losses.check_rows(learner_outputs, batch, distribution)

    # Row t+1 of the batch holds the action chosen at row t's observation, with the
    # logits it was drawn from, the reward it brought, and whether it ended the episode
    # (the table in core.rollout). So the T transitions pair the learner's rows [:-1],
    # where they start, with the batch's rows [1:], where they arrive. The learner's
    # last row has no transition left; its value is what the rollout bootstraps from.
    policy = learner_outputs["policy_logits"][:-1]
    values = learner_outputs["baseline"][:-1]
    bootstrap_value = learner_outputs["baseline"][-1]
    chosen = distribution.sample_of(batch)[1:]
    rewards = losses.clip_rewards(batch["reward"][1:], reward_clipping)
    discounts = (~batch["done"][1:]).to(values.dtype) * discounting

    # Termination and truncation part here (Pardo et al. 2018, arXiv:1712.00378). An
    # episode that terminates gets discount 0. One that is truncated goes on to
    # bootstrap from V(final observation): the transition into a truncated row is like
    # any other. What starts at a truncated row leads to the reset observation and is
    # no transition: weight zero, so its v is V, and all its losses are zero.
    transitions = ~batch["truncated"][:-1]

    log_probs = distribution.log_prob(policy, chosen)
    with torch.no_grad():
        log_mus = distribution.log_prob(batch["policy_logits"][1:], chosen)
        log_rhos = (log_probs - log_mus).masked_fill(~transitions, -torch.inf)
    vs, pg_advantages = vtrace.from_importance_weights(
        log_rhos, discounts, rewards, values, bootstrap_value, **clipping
    )

    pg_loss = losses.compute_policy_gradient_loss(log_probs, pg_advantages / scale)
    baseline_loss = baseline_cost * losses.compute_baseline_loss((vs - values) / scale)
    negentropy = losses.compute_entropy_loss(distribution.entropy(policy), transitions)
    entropy_loss = entropy_cost * negentropy
    return ImpalaLoss(
        total_loss=pg_loss + baseline_loss + entropy_loss,
        pg_loss=pg_loss.detach(),
        baseline_loss=baseline_loss.detach(),
        entropy_loss=entropy_loss.detach(),
        entropy=-negentropy.detach(),
        **losses.sums_to_log(vs, log_rhos, batch, clipping),
    )
