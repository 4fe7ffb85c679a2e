# SPDX-License-Identifier: Apache-2.0
"""A training run: the learner's counters, and the folder that lets the run go on.

Both trainers keep the same things in the same places, so that their runs can be
resumed, compared and tested alike:

    <savedir>/<xpid>/
      meta.json       flags, seeds, versions, commit, host, every start
      logs.csv        one row every --log_interval_s; fields.csv explains the columns
      out.log         what the terminal said;  tensorboard/  the same as events
      checkpoints/    the last three good ones
"""

import argparse
import concurrent.futures
import contextlib
import faulthandler
import logging
import math
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from core import checkpoint, metrics, terminal
from core.losses import ImpalaLoss
from core.spaces import Nest, leaves, map_nest
from core.supervise import (
    ConfigError,
    Exit,
    StallError,
    available_memory,
    start_thread,
)

log = logging.getLogger(__name__)

MAX_BAD_UPDATES = 10  # Non-finite updates in a row that stop the run.
LOCK_S = 10.0  # For an update to end, when a checkpoint or the last row waits for it.
# What is not normal among the trainers' columns, for the last lines of a run.
NOT_NORMAL = {
    "actor_restarts": "actor restarts",
    "rollouts_discarded": "rollouts discarded",
    "reconnects": "reconnects",
    "steps_discarded": "rows discarded",
}
LOG_S = 10.0  # At the end, for the row that is being written and shown.


class Learner:
    """The network being trained, its optimizers, and the counters that go with them.

    Learner threads and the main thread share it: `lock` is held for every update and
    every snapshot, so that a checkpoint never holds half an update.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        gradient: Callable[[Nest, tuple[torch.Tensor, ...]], Sequence[ImpalaLoss]],
        flags: argparse.Namespace,
    ):
        """Wrap them.

        Args:
          optimizers: of net's parameters. All of them step at each update. The
            learning rate that each parameter group has now is the one it begins with.
          gradient: sets the gradient of the loss of (rows, state before row 0), and
            returns the losses that add up to it.
        """
        self.net = net
        self.optimizers = list(optimizers)
        for optimizer in self.optimizers:
            checkpoint.optimizer_state(optimizer, net)  # Raises if it cannot be saved.
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])  # As torch's schedulers do.
        self.gradient = gradient
        self._flags = flags
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
        self.failed = False  # Too many of them; whoever comes next leaves it at that.
        self.episodes = metrics.EpisodeStats()
        # Between two rows of the log; has a lock of its own.
        self.averages = metrics.Averages()
        self.busy = metrics.BusyTime()

    def finished(self) -> bool:
        return self.step >= self._flags.total_steps

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

    def fresh_columns(self, batch: Nest) -> np.ndarray | None:
        """Return which rollouts --max_policy_lag leaves, None for all. Needs the lock.

        One is too old, and counted, if its first action was chosen by weights that have
        been updated more often since. (Without updates the next will be younger, so
        there is always one to learn from in the end.)

        Args:
          batch: as for `update`; numpy or tensors on the CPU.
        """
        if self._flags.max_policy_lag is None:
            return None
        lag = self.updates - np.asarray(batch["policy_version"][1:]).min(axis=0)
        fresh = np.flatnonzero(lag <= self._flags.max_policy_lag)
        self.stale += lag.size - fresh.size
        self.rows["stale"] += (lag.size - fresh.size) * (len(batch["done"]) - 1)
        return fresh if fresh.size < lag.size else None

    def leave(self, batch: Nest) -> None:
        """Count a batch that comes after the last update. Needs the lock."""
        rows, num_rollouts = batch["done"].shape
        self.rows["unused"] += (rows - 1) * num_rollouts

    def update(self, parts: Sequence[ImpalaLoss], batch: Nest) -> None:
        """Let each optimizer step with the present gradient. Needs the lock.

        Each parameter group's learning rate falls linearly to 0 over --total_steps; the
        gradient's global norm is clipped. If the loss or the gradient is not finite, no
        optimizer steps: one NaN would make every weight NaN.

        Args:
          parts: the losses, each of as many columns, whose gradient it is.
          batch: the numpy rollouts behind them, [T + 1, B, ...].

        Raises:
          FloatingPointError: that was the last of MAX_BAD_UPDATES such steps in a row.
        """
        flags = self._flags
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (1 - self.step / flags.total_steps)
        norm = nn.utils.clip_grad_norm_(
            self.net.parameters(), flags.grad_norm_clipping or float("inf")
        )
        sums = _sum_up(parts, norm)
        loss, grad_norm = sums["total_loss"], sums["grad_norm"]
        # What starts at a truncated row is no transition (the table in core.rollouts).
        num_steps = int(np.count_nonzero(~batch["truncated"][:-1]))
        num_rows = batch["done"][1:].size
        self._record(sums, num_steps, batch)
        self.step += num_steps
        if math.isfinite(loss) and math.isfinite(grad_norm):
            for optimizer in self.optimizers:
                optimizer.step()
            self.updates += 1
            self.skipped_in_a_row = 0
            self.rows["learned"] += num_rows
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            self.rows["unused"] += num_rows
        if self.skipped_in_a_row >= MAX_BAD_UPDATES:
            self.failed = True
            raise FloatingPointError(
                f"{self.skipped_in_a_row} updates in a row had a loss "
                f"({loss}) or gradient norm ({grad_norm}) that is "
                f"not finite; {_describe_not_finite(batch)} The weights are as they "
                "were before. Lower --learning_rate, or check the environment's "
                "observations."
            )

    def _record(self, sums: dict[Any, float], num_steps: int, batch: Nest) -> None:
        rows = map_nest(lambda x: x[1:], batch)  # Row 0 was another rollout's last.
        self.episodes.add_episodes(rows["episode_return"][rows["done"]])
        info = rows["info"]
        ended = ~np.isnan(info["game_return"])
        self.episodes.add_games(info["game_return"][ended], info["game_step"][ended])
        lag = self.updates - rows["policy_version"]
        self.averages.add_max(policy_lag_max=lag.max())
        rho, entropy = (sums.pop(key) / max(num_steps, 1) for key in ("rho", "entropy"))
        self.averages.add(
            sums, mean_rho=rho, entropy=entropy, policy_lag_mean=lag.mean()
        )
        for key in self._flags.info_keys:
            values = info[key][np.isfinite(info[key])]
            if values.size:
                self.averages.add(**{f"info_{key}": values.mean()})

    def state(self) -> dict[str, Any]:
        """Return the counters, for `restore`. Needs the lock."""
        return {
            "step": self.step,
            "updates": self.updates,
            "skipped": self.skipped,
            "stale": self.stale,
            "episodes": self.episodes.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.updates = state["updates"]
        self.skipped = state["skipped"]
        self.stale = state.get("stale", 0)  # Older checkpoints have none.
        self.episodes.restore(state["episodes"])


def check_ledger(learner: Learner, received: int, others: Mapping[str, int]) -> None:
    """Say what became of every row received since the start, row 0 of rollouts aside.

    Args:
      received: by the process that learns.
      others: rows that no learner thread has taken, by what became of them.

    Raises:
      RuntimeError: it does not add up: rows were lost, or learned twice.
    """
    parts = {**learner.rows, **others}
    text = f"{received} rows received = "
    text += " + ".join(f"{n} {name}" for name, n in parts.items())
    log.info("%s", text)
    if received != sum(parts.values()):
        raise RuntimeError(f"{text}: that does not add up")


@contextlib.contextmanager
def naming_memory(batch: Nest, net: nn.Module) -> Iterator[None]:
    """Say how large things are when there is no memory for an update.

    Args:
      batch: rollouts as numpy arrays or tensors, [T + 1, B, ...].

    Raises:
      MemoryError: instead of that of numpy, of torch on the CPU, or on a GPU.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_torchs = isinstance(error, torch.cuda.OutOfMemoryError) or (
            "can't allocate memory" in str(error)  # Its allocator on the CPU.
        )
        if not (is_torchs or isinstance(error, MemoryError)):
            raise
        rows, num_rollouts = batch["done"].shape
        batch_mib = sum(x.nbytes for _, x in leaves(batch)) / 2**20
        net_mib = sum(x.nbytes for x in net.state_dict().values()) / 2**20
        raise MemoryError(
            f"no memory for an update of {num_rollouts} rollouts of {rows - 1} steps: "
            f"the batch has {batch_mib:,.1f} MiB, the network {net_mib:,.1f} MiB, its "
            "gradient and optimizer a multiple of that, and what the network computes "
            f"on the way the rest; {available_memory() / 2**20:,.1f} MiB of the "
            "machine's memory are left. Lower --batch_size or --unroll_length."
        ) from error


def _sum_up(parts: Sequence[ImpalaLoss], norm: torch.Tensor) -> dict[Any, float]:
    """Return the sums of the parts' scalars, and grad_norm, as numbers.

    All in one read: it waits for the device.
    """
    sums: dict[Any, torch.Tensor] = {}
    for part in parts:
        for key, x in part.scalars().items():
            x = torch.as_tensor(x).detach().to(norm)
            x = x.sum() if x.ndim else x
            sums[key] = sums[key] + x if key in sums else x
    sums["grad_norm"] = norm
    return dict(zip(sums, torch.stack(list(sums.values())).tolist()))


def _describe_not_finite(batch: Nest) -> str:
    """Name the parts of a batch that are not finite, as a sentence."""
    bad = [
        name
        for name, x in leaves({k: v for k, v in batch.items() if k != "info"})
        if x.dtype.kind == "f" and not np.isfinite(x).all()
    ]
    return (
        f"not finite in the batch: {', '.join(bad)}."
        if bad
        else "the batch itself is finite."
    )


# What a checkpoint holds beyond the learner: (for JSON, groups of tensors).
ExtraState = Callable[[], tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]]


class Run:
    """A run's folder and all that is written there: checkpoints, logs, status line.

    Used by the main thread. What `tick` writes, threads of its own write: MonoBeast's
    main thread hands out the rollout buffers, and must wait neither for an update to
    end nor for a disk or a terminal. There is one for the row and one for the
    checkpoint, each for as long as it takes.
    """

    def __init__(
        self,
        flags: argparse.Namespace,
        run_dir: Path,
        learner: Learner,
        *,
        frames_per_step: int,
        in_turn: bool,
        in_background: bool = True,
    ):
        """Create the run.

        Args:
          in_turn: as `verdict` takes it.
          in_background: False makes `tick` write in the calling thread.
        """
        self.flags = flags
        self.learner = learner
        self.extra_state: ExtraState = lambda: ({}, {})
        self.run_dir = run_dir
        self._frames_per_step = frames_per_step
        self._in_turn = in_turn
        self._in_background = in_background
        self._jobs: dict[str, concurrent.futures.Future] = {}  # What threads write.
        self._checkpoints = run_dir / "checkpoints"
        self._earlier_s = 0.0  # Training time before the last resume.

    def resume(self) -> checkpoint.Checkpoint | None:
        """Continue from the newest good checkpoint; return it, or None in a new run.

        A new run begins with the weights that --init_from names, if it does.

        Raises:
          CheckpointError: there are checkpoints, and none is good; or it is another
            program's.
          ConfigError: the checkpoint was made with another environment or network.
        """
        checkpoint.sweep(self._checkpoints)
        found = checkpoint.load(self._checkpoints)
        if found is None:
            if self.flags.init_from is not None:
                self._take_weights(self.flags.init_from)
            return None
        for line in found.rejected:
            log.warning("Checkpoint not used: %s", line)
        try:
            self._restore(found)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise checkpoint.CheckpointError(
                f"{found.path} is whole, but not of this program: {error!r}. Choose "
                "another --xpid; --init_from takes the weights alone."
            ) from error
        return found

    def _restore(self, found: checkpoint.Checkpoint) -> None:
        flags, learner = self.flags, self.learner
        state = found.state
        for key in ("env", "model", "use_lstm"):
            if state["flags"][key] != getattr(flags, key):
                raise ConfigError(
                    f"--{key} is {getattr(flags, key)} but run {flags.xpid} was "
                    f"trained with {state['flags'][key]}. Choose another --xpid, or "
                    f"leave --{key} as it was."
                )
        model = found.tensors["model"]
        checkpoint.check_tensors(learner.net.state_dict(), model, what="model")
        learner.net.load_state_dict(model)
        changes = self._restore_optimizers(found)
        learner.restore(state["learner"])
        self._earlier_s = float(state["time_s"])
        restore_rng(state["rng"], found.tensors["rng"])
        log.info("Run %s goes on from step %d", flags.xpid, learner.step)
        if flags.init_from is not None:
            log.info("  --init_from %s was for its beginning", flags.init_from)
        for key, old in state["flags"].items():
            new = _plain(getattr(flags, key, old))
            if new != old:
                log.info("  --%s was %s and is now %s", key, old, new)
        for line in changes:
            log.info("  %s", line)

    def _restore_optimizers(self, found: checkpoint.Checkpoint) -> list[str]:
        """Return what the checkpoint's optimizers had other than this run's."""
        ours = _by_name(self.learner.optimizers)
        num_theirs = sum(name.startswith("optimizer") for name in found.state)
        if num_theirs not in (0, len(ours)):
            raise checkpoint.CheckpointMismatch(
                f"optimizers: file {num_theirs}, this run {len(ours)}"
            )
        return [
            f"{name}, {line}"
            for name, optimizer in ours.items()
            for line in checkpoint.restore_optimizer(
                optimizer, self.learner.net, found.tensors[name], found.state[name]
            )
        ]

    def _take_weights(self, name: str) -> None:
        """Load the weights, and nothing else, of another run or checkpoint.

        Whoever wrote it: all of it is checked, nothing unpickled, and of the rest only
        a few flags are read, to be shown.
        """
        place = Path(name).expanduser()
        if not place.exists():
            place = Path(self.flags.savedir) / name
        found = checkpoint.load_from(place)
        if found is None:
            raise ConfigError(
                f"--init_from is {name}, where there is no checkpoint. Name the folder "
                "of a run or one of its checkpoints (step-...), or a run in "
                f"--savedir ({self.flags.savedir})."
            )
        for line in found.rejected:
            log.warning("Checkpoint not used: %s", line)
        try:
            model = checkpoint.weights_for(self.learner.net, found)
        except checkpoint.CheckpointMismatch as error:
            raise ConfigError(
                f"--init_from {found.path} does not fit: {error}{self._others(found)}"
            ) from error
        for key, tensor in model.items():
            if not torch.isfinite(tensor).all():
                raise ConfigError(f"--init_from {found.path}: {key} is not finite")
        self.learner.net.load_state_dict(model)
        log.info(
            "Weights of %s, step %d%s", found.path, found.step, self._others(found)
        )

    def _others(self, found: checkpoint.Checkpoint) -> str:
        """Name the flags of another run's checkpoint that differ from this run's."""
        theirs = found.state.get("flags")
        theirs = theirs if isinstance(theirs, dict) else {}
        differences = [
            f"; --{key} there {theirs[key]}, here {getattr(self.flags, key)}"
            for key in ("env", "model", "use_lstm")
            if key in theirs and theirs[key] != getattr(self.flags, key)
        ]
        return checkpoint.one_line("".join(differences))

    @contextlib.contextmanager
    def open(self, *, resumed: bool) -> Iterator[None]:
        """Open the logs; write the last checkpoint at the end, however that comes."""
        flags, learner = self.flags, self.learner
        self._started = self._last_log = self._last_save = time.monotonic()
        self._last_step = learner.step
        self._stats: dict[str, Any] = {}
        skipped = learner.skipped
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: self._sum_up(learner.skipped - skipped))
            self._log = stack.enter_context(
                metrics.RunLog(
                    self.run_dir,
                    info_keys=flags.info_keys,
                    resume_step=learner.step if resumed else None,
                    wandb=flags.wandb,
                    config={key: _plain(value) for key, value in vars(flags).items()},
                )
            )
            self._status = stack.enter_context(
                metrics.StatusLine(flags.total_steps, start_step=learner.step)
            )
            try:
                yield
            except BaseException:
                self._wait_for("log", LOG_S)
                try:
                    self._save_last()
                except Exception as error:  # The first failure is the one to report.
                    log.error("No checkpoint of the end: %s", error)
                raise
            self._save_last()

    def tick(self, stats: dict[str, Any]) -> None:
        """Begin to log and save what is due; wait for nothing.

        Args:
          stats: columns of the log that only the trainer knows.

        Raises:
          Exception: what the last attempt to log or save died of.
        """
        self._stats = stats
        for job in self._jobs.values():
            if job.done():
                job.result()
        sys.stderr.flush()  # What a slow terminal has not taken yet.
        now = time.monotonic()
        if now - self._last_log >= self.flags.log_interval_s:
            self._begin("log", self._write_row, stats)
        if now - self._last_save >= self.flags.checkpoint_interval_s:
            self._begin("save", self._try_to_save)

    def _begin(self, name: str, write: Callable[..., None], *args: Any) -> None:
        """Write in a thread of that name, unless the last one is still at work."""
        if not self._in_background:
            write(*args)
        elif name not in self._jobs or self._jobs[name].done():
            self._jobs[name] = start_thread(name, _on_one_core, write, *args)

    def _wait_for(self, name: str, limit_s: float | None = None) -> bool:
        """Wait for what a thread is writing; say whether it has come to an end."""
        job = self._jobs.get(name)
        return job is None or not concurrent.futures.wait([job], limit_s).not_done

    def _sum_up(self, skipped: int) -> None:
        """Say at the end what was not normal since the start."""
        counts = {text: self._stats.get(key, 0) for key, text in NOT_NORMAL.items()}
        counts["updates skipped"] = skipped
        parts = [f"{n} {text}" for text, n in counts.items() if n]
        warnings = metrics.frequent_warnings(3)
        if parts:
            log.info("Not normal since the start: %s", ", ".join(parts))
        if warnings:
            log.info("The most frequent warnings: %s", "; ".join(warnings))

    def _save_last(self) -> None:
        self._wait_for("save")  # For ever: the checkpoint after it goes the same way.
        self.save()

    def _try_to_save(self) -> None:
        try:
            self.save()
        except StallError:
            pass  # A long update. Whether it ever ends is for the watchdog to see.
        except checkpoint.CheckpointError as error:
            # The old ones are intact, and the disk may have room again next time.
            log.warning("%s. Training goes on.", error)

    def log(self, stats: dict[str, Any]) -> None:
        """Write the first or the last row of this start, between two updates.

        Raises:
          StallError: an update is at work for longer than LOCK_S.
          Exception: what the last attempt to log died of.
        """
        self._stats = stats
        if not self._wait_for("log", LOG_S):
            log.error("The last row is missing: the one before is still being written")
            return
        if "log" in self._jobs:
            self._jobs.pop("log").result()
        with self.learner.between_updates(LOCK_S):
            self._write_row(stats)

    def _write_row(self, stats: dict[str, Any]) -> None:
        """Write one row of logs.csv, and show the same; nothing if no step was made.

        Without the lock, which an update may hold for seconds: of an update that ends
        meanwhile some columns may know, and the others will in the next row.
        """
        learner, now = self.learner, time.monotonic()
        step, episodes = learner.step, learner.episodes
        steps = step - self._last_step
        row: dict[str, Any] = {
            "step": step,
            "frames": step * self._frames_per_step,
            "time_s": self._earlier_s + now - self._started,
            "sps": steps / max(now - self._last_log, 1e-9),
            "mean_episode_return": episodes.mean_return,
            "mean_episode_step": episodes.mean_step,
            "games": episodes.games,
            "best_mean_return": episodes.best_mean_return,
            "mean_life_return": episodes.mean_life_return,
            "learning_rate": learner.optimizers[0].param_groups[0]["lr"],
            "updates": learner.updates,
            "skipped_updates": learner.skipped,
            "stale_rollouts": learner.stale,
            "rss_mb": metrics.rss_mb(),
        }
        if steps == 0:
            if step == 0:
                self._show(row, None)
            return
        row |= {**learner.averages.pop(), **stats}
        busy = learner.busy.pop()
        row |= {f"{stage}_busy": share for stage, share in busy.items()}
        row["gpu_utilization"] = gpu_utilization(learner.net)
        self._log.log(row)
        self._show(row, verdict(busy, in_turn=self._in_turn))
        self._last_log, self._last_step = now, step

    def _show(self, row: dict[str, Any], verdict: str | None) -> None:
        self._status.update(
            step=row["step"],
            frames=row["frames"],
            sps=row["sps"],
            mean_return=row["mean_episode_return"],
            policy_lag=row.get("policy_lag_mean"),
            verdict=verdict,
        )

    def save(self) -> None:
        """Write a checkpoint, unless --disable_checkpoint.

        Raises:
          CheckpointError: it cannot be written.
          StallError: an update is at work for longer than LOCK_S.
        """
        if self.flags.disable_checkpoint:
            return
        learner = self.learner
        with learner.between_updates(LOCK_S):
            self._last_save = time.monotonic()
            tensors: Nest = {"model": dict(learner.net.state_dict())}
            optimizers: dict[str, Any] = {}
            for name, optimizer in _by_name(learner.optimizers).items():
                tensors[name], optimizers[name] = checkpoint.optimizer_state(
                    optimizer, learner.net
                )
            tensors = map_nest(  # Copies: training goes on while they are written.
                lambda x: x.detach().to("cpu", copy=True), tensors
            )
            rng, rng_tensors = rng_state()
            extra, extra_tensors = self.extra_state()
            state = {
                "flags": {
                    key: _plain(value) for key, value in vars(self.flags).items()
                },
                "learner": learner.state(),
                "time_s": self._earlier_s + time.monotonic() - self._started,
                "rng": rng,
                **optimizers,
                **extra,
            }
        checkpoint.save(
            self._checkpoints,
            step=state["learner"]["step"],
            tensors={**tensors, "rng": rng_tensors, **extra_tensors},
            state=state,
        )


def _by_name(
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[str, torch.optim.Optimizer]:
    """Return optimizers by their names in a checkpoint: optimizer, optimizer1, ..."""
    return {f"optimizer{i or ''}": optimizer for i, optimizer in enumerate(optimizers)}


def log_options(options: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """Say at the start how the environment is made, and what of that has changed.

    Args:
      options: by name, as the environment's maker says them.
      recorded: the run's meta.json, or {} in a new run.
    """
    if options:
        text = ", ".join(f"{name} {value}" for name, value in options.items())
        log.info("Environment options: %s", text)
    before = recorded.get("env_options", options)
    for name in sorted({*before, *options}):
        old, new = before.get(name, "not told"), options.get(name, "not told")
        if old != new:
            log.warning(
                "  %s was %s when this run was started before, and is now %s",
                name,
                old,
                new,
            )


def _plain(value: Any) -> Any:
    """Return a flag's value as JSON would give it back."""
    return list(value) if isinstance(value, tuple) else value


def verdict(busy: Mapping[str, float], *, in_turn: bool) -> str | None:
    """Name the stage that bounds the run: the one that rests least.

    Args:
      busy: the share of time that "env", "inference" and "learner" work.
      in_turn: the same workers step environments and choose actions, so that both
        together are what they are busy with.
    """
    if not busy:
        return None
    shares = dict(busy)
    if in_turn and {"env", "inference"} <= shares.keys():
        acting = shares["env"] + shares["inference"]
        bound = "env" if shares["env"] >= shares["inference"] else "inference"
        shares = {"learner": shares.get("learner", 0.0), bound: min(1.0, acting)}
    stage = max(shares, key=lambda stage: shares[stage])
    return f"{stage}-bound {shares[stage]:.0%}"


def gpu_utilization(net: nn.Module) -> float | None:
    """Return the share of the last second that the network's GPU computed, if any."""
    device = next(net.parameters()).device
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # Without nvidia-ml-py, or its driver: as many types as versions.
        return None


def _on_one_core(fn: Callable[..., None], *args: Any) -> None:
    compute_on(1)  # Or torch would give this thread workers of its own.
    fn(*args)


def compute_on(cores: int) -> None:
    """Let torch use `cores` cores in this thread; other threads keep their number."""
    # A thread that has not asked or computed yet takes the number set last by any
    # thread when it does, whatever its own was.
    torch.get_num_threads()
    torch.set_num_threads(cores)


def seed_rng(seed: int) -> None:
    """Seed torch's, numpy's and Python's global generators.

    Environments may use them; forked processes would otherwise share numpy's state.
    """
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def rng_state() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the state of torch's, numpy's and Python's global generators."""
    kind, keys, *numpy_rest = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    state = {"numpy": [kind, *numpy_rest], "python": [version, gauss_next]}
    return state, {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "python": torch.tensor(internal, dtype=torch.int64),
    }


def restore_rng(state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(tensors["torch"])
    kind, *numpy_rest = state["numpy"]
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((kind, keys, *numpy_rest))
    version, gauss_next = state["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss_next))


def run_program(
    parse_flags: Callable[..., argparse.Namespace],
    train: Callable[[argparse.Namespace], Exit],
    test: Callable[[argparse.Namespace], Exit],
    argv: Sequence[str] | None,
) -> int:
    """Do what the command line asks for; return the exit status.

    An error that the user can remove is one line, any other a traceback. A terminal
    that stops reading does not stop the training.
    """
    with contextlib.ExitStack() as stack:
        try:
            flags = parse_flags(argv)
            if flags.mode == "train":
                stack.enter_context(terminal.never_waiting())
            else:  # Ctrl-C closes environments and videos.
                signal.signal(signal.SIGINT, signal.default_int_handler)
            faulthandler.enable(terminal.urgent_fd())
            return int(train(flags) if flags.mode == "train" else test(flags))
        except (
            ConfigError,
            metrics.RunDirBusy,
            checkpoint.CheckpointMismatch,
        ) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return int(Exit.CONFIG)
        except checkpoint.CheckpointError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return int(Exit.CHECKPOINT)
        except Exception:
            traceback.print_exc()
            return int(Exit.INTERNAL)
