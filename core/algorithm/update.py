# SPDX-License-Identifier: Apache-2.0
"""One update of IMPALA: from a batch of rollouts to new weights.

Espeholt et al. 2018 (arXiv:1802.01561), section 4. Read from top to bottom:

    Learner.update      the whole update: gradient, clipping, optimizer step, counters
    compute_gradient    forward and backward pass, one group of columns after another
    compute_loss        the forward pass, and the loss of its outputs
    impala_loss         V-trace and the three losses

V-trace itself is in `core.algorithm.vtrace`, the counts and averages for the log are in
`core.algorithm.batch_counts`, and the sums over several learners are in
`core.algorithm.learners`. To change the loss, write a `compute_loss` of your own in
your trainer and give it to `Learner` (README, "Change the algorithm").
"""

import argparse
import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from core.algorithm import losses, replay, vtrace
from core.algorithm.batch_counts import BatchCounts, count_all_steps
from core.algorithm.counters import BusyTime
from core.algorithm.distributions import ActionDistribution
from core.algorithm.gpu import Graphs, in_stream
from core.algorithm.learners import CHECK_UPDATES, Learners, current
from core.algorithm.losses import ImpalaLoss
from core.algorithm.normalization import check_statistics
from core.errors import StallError
from core.nests import Nest, map_nest

MAX_BAD_UPDATES = 10  # Non-finite updates in a row that stop the run.

State = tuple[torch.Tensor, ...]  # The recurrent state: [layers, B, hidden] each.


class Learner:
    """The network being trained, its optimizers, and the counters of the updates.

    Learner threads and the main thread share it. A thread holds `turn` during its whole
    update, and `lock` while the update changes the weights and the counters. Snapshots
    take only `lock`: so a checkpoint never holds half an update, and does not wait for
    a gradient or for another learner. (A hook of an optimizer runs with `lock`, and
    what `forward` writes into buffers of the network is not protected.)
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
          net: the network, on the device that learns.
          optimizers: of net's parameters. All of them step at each update. The present
            learning rate of each parameter group is the one at the start of the run. A
            resumed run also takes the other options of the groups from here, except
            options that training has changed, such as a counter: these are restored
            from the checkpoint.
          loss: a function with the arguments of `compute_loss`, which is the default.
            On a GPU it must be one that `Graphs` can record.

        Raises:
          ConfigError: a flag asks for statistics that net does not keep.
        """
        check_statistics(flags, net)
        self.flags = flags
        self.net: Any = net  # The Net of a trainer, which core does not import.
        self.device = next(net.parameters()).device
        self.optimizers = list(optimizers)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])  # As torch's schedulers do.
        self.loss = loss or compute_loss
        self.gradient: Callable[..., list[ImpalaLoss]] = functools.partial(
            compute_gradient, flags, net, self.loss
        )
        # An LSTM's kernels depend on where episodes end.
        if self.device.type == "cuda" and not flags.use_lstm:
            record = not flags.disable_cuda_graphs
            self.gradient = Graphs(self.gradient, self.device, record=record)
        self.turn = threading.Lock()
        self.lock = threading.Lock()
        # Guarded by `lock`; changed only by the thread that also holds `turn`:
        self.step = 0  # Agent steps (not rows) of all updates, skipped ones included.
        self.updates = 0  # Optimizer steps: the version of the weights.
        self.skipped = 0  # Updates left out because something was not finite.
        self.skipped_in_a_row = 0  # At MAX_BAD_UPDATES all learner threads stop.
        self.counts = BatchCounts(flags)
        # The other learners (torchrun), or None. All learners do the same updates:
        # everything above except `counts` is the same in all of them.
        self.learners = current()
        # A signal stopped the run; of several learners, all have agreed to stop.
        self.stopped = False
        self.is_closed = False  # The run has ended: no update changes anything.
        self.longest_update_s = 0.0  # The time of the longest update since the start.
        self.busy = BusyTime()  # Since the last row of the log. Has a lock of its own.

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
          stream: for the copy to the GPU, which another thread's update does not delay.

        Raises:
          FloatingPointError: this was the last of MAX_BAD_UPDATES updates in a row
            whose loss or gradient was not finite.
        """
        flags, net = self.flags, self.net
        batch, state = map_nest(torch.as_tensor, (batch, state))
        with in_stream(stream):
            rows, state = map_nest(
                lambda x: x.to(self.device, non_blocking=True), (batch, state)
            )
        batch = map_nest(lambda x: x.numpy(), batch)
        with self.turn, self.busy.measure("learner"):
            with self.lock:
                has_failed = self.skipped_in_a_row >= MAX_BAD_UPDATES
                if self.finished() or has_failed or self.stopped or self.is_closed:
                    self.counts.add_unused(batch)
                    return
                batch, rows, state = self.counts.leave_out_stale(
                    (batch, rows, state), self.updates
                )
                if not replay.split(batch)[0]["done"].size:  # All new ones were stale.
                    return
                # The learning rate of each parameter group falls linearly to 0.
                for optimizer in self.optimizers:
                    for group in optimizer.param_groups:
                        remaining = 1 - self.step / flags.total_steps
                        group["lr"] = group["initial_lr"] * remaining

            began = time.monotonic()
            parts = self.gradient(rows, state)  # Forward and backward pass.
            if self.learners is not None:
                self.learners.sum_gradients(net)
            grad_norm = nn.utils.clip_grad_norm_(
                net.parameters(), flags.grad_norm_clipping or math.inf
            )
            sums = losses.sum_scalars(parts, grad_norm)  # Waits for the device.
            sums |= count_all_steps(batch)
            if self.learners is not None:
                sums = self.learners.sum_update(sums)
            is_finite = math.isfinite(sums["total_loss"] + sums["grad_norm"])
            moments = self._input_moments(rows) if is_finite else []
            with self.lock:
                if self.is_closed:
                    self.counts.add_unused(batch)
                    return
                if is_finite:
                    for optimizer in self.optimizers:
                        optimizer.step()
                    self._learn_statistics(moments, sums)
                if self.learners is not None:
                    self.stopped = self.learners.has_agreed_to_stop
                self._count(batch, sums, is_finite)
            if self.learners is not None:
                self._meet_learners(self.learners)
            self.longest_update_s = max(self.longest_update_s, time.monotonic() - began)

    def _input_moments(self, rows: Nest) -> list[torch.Tensor]:
        """Return what --normalize_observations learns from a batch, of each learner."""
        if not self.flags.normalize_observations:
            return []
        moments = self.net.normalize.moments(replay.split(rows)[0])  # Of new rows only.
        return [moments] if self.learners is None else self.learners.gather(moments)

    def _learn_statistics(
        self, moments: list[torch.Tensor], sums: dict[Any, float]
    ) -> None:
        """Add a batch to the network's running statistics, if flags ask for these."""
        if moments:
            self.net.normalize.learn(moments)
        if self.flags.normalize_returns and (num_steps := int(sums["steps"])):
            self.net.baseline.learn(*losses.target_moments(sums, num_steps))

    def _count(self, batch: Nest, sums: dict[Any, float], is_finite: bool) -> None:
        """Count an update and its batch.

        Raises:
          FloatingPointError: this was the last of MAX_BAD_UPDATES updates in a row that
            were left out.
        """
        self.step += self.counts.add(
            batch, dict(sums), self.updates, is_learned=is_finite
        )
        if is_finite:
            self.updates += 1
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_BAD_UPDATES:
            raise FloatingPointError(
                f"{self.skipped_in_a_row} updates in a row had a loss "
                f"({sums['total_loss']}) or gradient norm ({sums['grad_norm']}) that "
                "is not finite. The weights are as they were before. "
                f"{losses.describe_not_finite(batch, sums)}"
            )

    def _meet_learners(self, learners: Learners) -> None:
        """After an update: send learner 0 its report; now and then compare weights."""
        learners.is_over = self.finished() or self.stopped
        if learners.is_report_due or learners.is_over:
            with self.lock:
                report = self.counts.take_report(learners, self.busy)
            reports = learners.report(report)
            with self.lock:
                self.counts.add_reports(reports)
        if self.updates % CHECK_UPDATES == 0:
            learners.check_weights(self.net)

    def finished(self) -> bool:
        """Say whether --total_steps are done."""
        return self.step >= self.flags.total_steps

    def progress(self) -> str:
        """Return a text that changes when the run makes progress, for a `Watchdog`.

        The text also changes while this learner waits for other learners: this wait has
        its own limit, and the watchdog of the learner that is late reports the reason.
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
            **self.counts.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.updates = state["updates"]
        self.skipped = state["skipped"]
        self.counts.restore(state)


def compute_gradient(
    flags: argparse.Namespace,
    net: nn.Module,
    loss: Callable[..., ImpalaLoss],
    rows: Nest,
    state: State,
) -> list[ImpalaLoss]:
    """Set the gradient of a batch's loss; return the losses of its groups of columns.

    The loss is a sum over columns, and so is its gradient: see `losses.split_columns`.

    Args:
      loss: a function with the arguments of `compute_loss`.
      rows: [T + 1, B, ...] as the table in `core.rollout` says, on net's device.
      state: the recurrent state before row 0.
    """
    # A CUDA graph writes into the .grad tensors it was recorded with, so they are
    # zeroed in place.
    net.zero_grad(set_to_none=not rows["done"].is_cuda)
    parts = []
    for rows_part, state_part in losses.split_columns(rows, state):
        try:
            part = loss(flags, net, rows_part, state_part)
        except KeyError as error:
            if error.args[0] in rows:
                raise
            raise KeyError(
                f"{error}. If the loss reads it from the rows: they have "
                f"{', '.join(rows)}, and each output of forward that net_outputs "
                "declares."
            ) from error
        losses.check_loss(part, flags.info_keys)
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
    """Return the keyword arguments of `impala_loss` that follow from flags."""
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

    where v is the V-trace target, and gradients flow only through log pi, V in the
    second line, and H. The differences (r_s + gamma_s v_{s+1} - V(x_s)) and
    (v_s - V(x_s)) are divided by `scale` first (Hessel et al. 2018, arXiv:1809.04474).

    Args:
      learner_outputs: policy_logits [T + 1, B, P] and baseline [T + 1, B], float32, of
        the network being trained, for the observation of each row.
      batch: [T + 1, B, ...] as the table in `core.rollout` says.
      distribution: over the actions; the policy_logits are its parameters.
      discounting: gamma inside an episode.
      baseline_cost, entropy_cost: weights of the baseline loss and the entropy bonus.
      reward_clipping: "abs_one" clamps rewards to [-1, 1], "none" leaves them.
      scale: `PopArt.scale`, about the standard deviation of v; or 1.
      clipping: `lambda_` and the thresholds of `vtrace.from_importance_weights`.

    Raises:
      ValueError: a shape, a dtype or reward_clipping is wrong; the message names it.
    """
    losses.check_rows(learner_outputs, batch, distribution)

    # Row t+1 of the batch holds the action chosen at row t's observation, with the
    # logits it was drawn from, the reward it brought, and whether it ended the episode
    # (the table in core.rollout). So the T transitions pair the learner's rows [:-1],
    # where they start, with the batch's rows [1:], where they end. No transition starts
    # at the learner's last row; the rollout bootstraps from the value of this row.
    policy = learner_outputs["policy_logits"][:-1]
    values = learner_outputs["baseline"][:-1]
    bootstrap_value = learner_outputs["baseline"][-1]
    chosen = distribution.sample_of(batch)[1:]
    rewards = losses.clip_rewards(batch["reward"][1:], reward_clipping)
    discounts = (~batch["done"][1:]).to(values.dtype) * discounting

    # Termination and truncation differ here (Pardo et al. 2018, arXiv:1712.00378). An
    # episode that terminates gets discount 0. A truncated episode bootstraps from
    # V(final observation): the transition into a truncated row is like any other. The
    # step that starts at a truncated row leads to the reset observation and is not a
    # transition: it has weight zero, so its v is V, and all its losses are zero.
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
