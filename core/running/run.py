# SPDX-License-Identifier: Apache-2.0
"""A training run: the steps around the algorithm that both trainers share.

with run_folder(flags) as run_dir, StopSignal() as stop:
    run = Run(flags, run_dir, learner, stop, frames_per_step=4)
    run.resume()
    if run.has_nothing_to_do():
        return Exit.DONE
    run.record(env_options)
    with run.open():
        while run.goes_on():
            ...
            run.tick(columns)
    return run.end()
"""

import argparse
import concurrent.futures
import contextlib
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from core import columns, ranks
from core.algorithm import learners
from core.algorithm.torsos import MLPTorso
from core.algorithm.update import Learner
from core.environments.stepping import env_seed
from core.errors import Exit, StallError
from core.rollout import Spaces
from core.running import (
    checkpoint,
    compute,
    folder,
    log_setup,
    logs,
    settings,
    status_line,
    terminal,
)
from core.running.compute import gpu_utilization, on_one_core
from core.running.randomness import seed_rng
from core.running.resume import Snapshots
from core.running.signals import StopSignal
from core.running.supervise import join_threads, start_thread

log = logging.getLogger(__name__)


# Columns that are 0 in a run without problems. At its end a run logs the other columns.
NOT_NORMAL = {
    "actor_restarts": "actor restarts",
    "rollouts_discarded": "rollouts discarded",
    "server_restarts": "server restarts",
    "reconnects": "reconnects",
    "steps_discarded": "rows discarded",
}
NOT_SAVED = "Nothing is saved (--disable_checkpoint)."
WHEN_SAVED = "The first checkpoint of a run is written after its first update."
LARGE = 4096  # Numbers; a flat observation of more is probably a picture.
LOG_S = 10.0  # How long the end of a run waits for a row that is being written.
SAY_HANGS_S = 30.0  # Interval of warnings that the disk has not taken a row or save.
JOIN_S = 30.0  # How long the end waits for threads, plus the longest update.
LOCK_S = 10.0  # How long a checkpoint or the last row waits for an update's last part.


# The state in a checkpoint besides the learner: (values for JSON, groups of tensors).
ExtraState = Callable[[], tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]]


def run_folder(flags: argparse.Namespace) -> contextlib.AbstractContextManager[Path]:
    """Lock the folder of a run, log there, and seed all random number generators.

    A relative --savedir or --init_from is relative to the working directory at the time
    of this call: an environment may change it before the block begins.

    If this creates the folder, and the block ends before `Run.record`, it deletes it.

    Without --seed a resumed run keeps its seed, and a new run draws one; in both cases
    `flags.seed` is set. Of several learners, only learner 0 uses the folder, and it
    tells the other learners the folder's name and the seed.

    Raises:
      RunDirBusy: another process is training in this folder.
    """
    if flags.init_from is not None and os.path.exists(flags.init_from):
        flags.init_from = os.path.abspath(flags.init_from)
    return _open_folder(flags, Path(os.path.realpath(flags.savedir), flags.xpid))


@contextlib.contextmanager
def _open_folder(flags: argparse.Namespace, place: Path) -> Iterator[Path]:
    run_dir = None
    with contextlib.ExitStack() as stack:
        if ranks.rank() == 0:
            run_dir, is_new = place, not os.path.exists(place)
            folder.prepare_run_dir(place.parent, flags.xpid)
            if is_new:
                stack.callback(folder.remove_unless_recorded, run_dir)
        stack.enter_context(log_setup.setup_logging(run_dir))
        if flags.seed is None and run_dir is not None:
            recorded = folder.recorded_meta(run_dir).get("flags", {})
            flags.seed = recorded.get("seed", secrets.randbelow(2**31))
        run_dir, flags.seed = learners.share((run_dir, flags.seed))
        seed_rng(flags.seed)
        assert run_dir is not None
        yield run_dir


class Run:
    """A training run: its folder, checkpoints, logs and status line.

    Used by the main thread. `tick` writes log rows in one thread and checkpoints in
    another one, because MonoBeast's main thread hands out the rollout buffers, and so
    must not wait for the end of an update, for a disk or for a terminal.
    """

    def __init__(
        self,
        flags: argparse.Namespace,
        run_dir: Path,
        learner: Learner,
        stop: StopSignal,
        *,
        frames_per_step: int,
        actors_do_both: bool = False,
        in_background: bool = True,
    ):
        """Create the run.

        Args:
          run_dir: as `run_folder` yields it; may be a link to a folder on another disk.
          frames_per_step: emulator frames per agent step.
          actors_do_both: as `bottleneck` takes it.
          in_background: False makes `tick` write in the calling thread.
        """
        self.flags = flags
        self.learner = learner
        self.stop = stop
        self.run_dir = run_dir
        self._others = learner.learners
        self._has_folder = ranks.rank() == 0
        # meta.json as earlier starts of the run left it.
        recorded = folder.recorded_meta(run_dir) if self._has_folder else {}
        self.recorded: dict[str, Any] = learners.share(recorded)
        self.found: checkpoint.Checkpoint | None = None
        self.extra_state: ExtraState = lambda: ({}, {})
        self._snapshots = Snapshots(flags, learner)
        self._frames_per_step = frames_per_step
        self._actors_do_both = actors_do_both
        self._in_background = in_background
        # The latest job of each thread: "log" and "save".
        self._jobs: dict[str, concurrent.futures.Future] = {}
        self._began: dict[str, float] = {}  # When, or when it was last warned of.
        self._checkpoints = run_dir / "checkpoints"
        self._earlier_s = 0.0  # Training time before the last resume.
        self._is_joined = True  # False if `join` gave up waiting for a thread.
        self._has_sent_rows = False  # To learner 0, or learner 0 to itself.

    def resume(self) -> checkpoint.Checkpoint | None:
        """Resume from the newest good checkpoint; return it, or None in a new run.

        Also sets `found`. A new run starts with the weights of --init_from, if the flag
        is given.

        Raises:
          CheckpointError: there are checkpoints, but none is good, or the newest good
            one was written by another program.
          ConfigError: the checkpoint was made with another environment or network.
        """
        if self._has_folder:
            self.found = checkpoint.load(self._checkpoints)
            if self.found is None and self.flags.init_from is not None:
                savedir = self.run_dir.parent
                self._snapshots.take_weights(self.flags.init_from, savedir)
        self.found = learners.share(self.found)
        if self.found is not None:
            self._restore(self.found)
        elif self._has_folder and self.recorded.get("starts"):
            why = NOT_SAVED if self.flags.disable_checkpoint else WHEN_SAVED
            log.warning(
                "Run %s was started before, but has no checkpoint: it begins again at "
                "step 0. %s",
                self.flags.xpid,
                why,
            )
        if self._others is not None:
            self._others.share_weights(self.learner.net)
        if ranks.rank() > 0:  # Otherwise all learners would draw the same actions.
            self.learner.counts.discard_restored()
            seed_rng(env_seed(self.flags.seed, ranks.rank(), self.learner.updates, 0))
        return self.found

    def _restore(self, found: checkpoint.Checkpoint) -> None:
        """Resume from a checkpoint."""
        for line in found.rejected:
            log.warning("Checkpoint not used: %s", line)
        try:
            self._snapshots.restore(found)
            self._earlier_s = float(found.state["time_s"])
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise checkpoint.CheckpointError(
                f"{found.path} was not written by this program: {error!r}. Choose "
                "another --xpid; --init_from takes the weights alone."
            ) from error

    def describe(self, env: str, spaces: Spaces, *, devices: str) -> None:
        """Log the run, the environment and the network, before training starts."""
        flags, net = self.flags, self.learner.net
        torso = getattr(net, "torso", net)  # A fork's Net may have none.
        log.info("Run %s in %s, seed %d", flags.xpid, self.run_dir, flags.seed)
        log.info("Environment %s: %s, %s", env, spaces.observation, spaces.action)
        if (suggestion := settings.suggestion(env, flags)) is not None:
            log.info(suggestion)
        if flags.normalize_returns and flags.reward_clipping != "none":
            log.warning(
                "--normalize_returns normalizes the returns of clipped rewards. Add "
                "--reward_clipping none to learn from rewards of any size."
            )
        log.info(
            "Network %s, %d parameters, %s",
            type(torso).__name__ + (" + LSTM" if flags.use_lstm else ""),
            sum(p.numel() for p in net.parameters()),
            devices,
        )
        if isinstance(torso, MLPTorso) and len(torso.offset) > LARGE:
            log.warning(
                "The network flattens an observation of %d numbers. If it has a "
                "picture, wrap the environment so that the observation is one Box of "
                "three axes: then --model auto takes convolutions.",
                len(torso.offset),
            )

    def record(self, env_options: Mapping[str, Any], **extra: Any) -> None:
        """Log the environment's options, write meta.json, and link `latest` here."""
        if not self._has_folder:
            return
        if (made := env_options.get("create_env")) is not None:
            log.warning(
                "create_env made %s without the wrappers of atari_wrappers.py, but "
                "--env is %s, which names this run, and its steps count as frames. "
                "Give --env another name; env_options may return a frame_skip.",
                made,
                self.flags.env,
            )
        log_options(env_options, self.recorded)
        extra |= {"step": self.learner.step, "env_options": dict(env_options)}
        flags = ranks.flags_of_run(self.flags)
        folder.write_meta(self.run_dir, flags=flags, extra=extra)
        folder.link_latest(self.run_dir)

    @property
    def first_incarnation(self) -> int:
        """The incarnation of the first environments of this start.

        Earlier starts of this run used smaller numbers, so that environments do not
        play the games of an earlier start again (`stepping.env_seed`).
        """
        return ranks.first_incarnation() + (len(self.recorded.get("starts", [])) << 16)

    def has_nothing_to_do(self) -> bool:
        """Return whether all steps were done before this start, and log if so."""
        if self.learner.finished():
            log.info(
                "Nothing to do: run %s is at step %d of --total_steps %d.",
                self.flags.xpid,
                self.learner.step,
                self.flags.total_steps,
            )
        return self.learner.finished()

    def goes_on(self) -> bool:
        """Return whether training continues: it is not finished and no signal came."""
        has_signal = self.stop.received is not None
        if self._others is not None:
            # The other learners need this one until all have agreed to stop.
            late = self._others.check_stop(has_signal)
            has_signal = late or self.learner.stopped
        else:  # Another thread may wait with a batch: it must not begin an update.
            self.learner.stopped = has_signal
        return not has_signal and not self.learner.finished()

    def join(self, threads: Mapping[str, concurrent.futures.Future]) -> None:
        """Wait for threads that must stop; after that no update changes anything.

        The limit is JOIN_S and the time of the longest update. But an update that has
        already waited for another learner for STOP_S is given up: that learner may
        never come back, and a scheduler that stops this one gives it only some seconds.
        """
        longest_s = min(self.learner.longest_update_s, self.flags.stall_timeout_s)

        def is_hopeless() -> bool:
            others = self._others
            if others is None or others.waited_s() <= learners.STOP_S:
                return False
            log.warning("The update waits for another learner: it is given up")
            return True

        self._is_joined = join_threads(threads, JOIN_S + longest_s, is_hopeless)
        self.learner.is_closed = True

    def check_ledger(self, received: int, others: Mapping[str, int]) -> None:
        """Log how many rows were received, and how many were learned, stale etc.

        The numbers are those since the start. Row 0 of each rollout does not count,
        because it is the last row of the previous rollout. Each of several learners
        checks its own rows here; `end` adds up those of all.

        Args:
          received: number of rows that this process has received.
          others: numbers of rows that no learner thread has taken. The key, such as
            "discarded", is a word for the log.

        Raises:
          RuntimeError: the sum is wrong: rows were lost, or learned twice.
        """
        if not self._is_joined:
            log.warning("The received rows are not added up: a thread has not ended")
            return
        parts = {**self.learner.counts.rows, **others}
        text = describe_ledger(received, parts)
        if received != sum(parts.values()):
            raise RuntimeError(f"{text}: the sum is wrong")
        if self._others is None:
            log.info("%s", text)
        else:
            self._others.send_rows({"received": received, **parts})
            self._has_sent_rows = True

    def end(self) -> Exit:
        """Log how the run ended; return the exit status."""
        if self._others is not None and self._has_folder and self._has_sent_rows:
            # The last checkpoint is written, so nothing is lost if a learner is late.
            if (total := self._others.sum_rows()) is not None:
                log.info("%s", describe_ledger(total.pop("received"), total))
        if not self.learner.finished():
            who = self.stop.received.name if self.stop.received else "another learner"
            remedy = (
                f"The same command with --xpid {self.flags.xpid} goes on from there."
            )
            if self.flags.disable_checkpoint:
                remedy = NOT_SAVED
            log.info("Stopped by %s at step %d. %s", who, self.learner.step, remedy)
            return Exit.STOPPED
        log.info("Done: %d steps.", self.learner.step)
        return Exit.DONE

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Open the logs; at the end, also after an error, write the last checkpoint."""
        # If this learner is killed, this is its status. Before, nothing can be lost.
        ranks.record_status(Exit.INTERNAL)
        flags, learner = self.flags, self.learner
        self._started = self._last_log = self._last_save = time.monotonic()
        if self.found is None:  # Save once soon: what cannot be saved shows at once.
            self._last_save = -math.inf
        self._last_step = learner.step
        self._stats: dict[str, Any] = {}
        if not self._has_folder:
            yield
            return
        skipped = learner.skipped
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: self._sum_up(learner.skipped - skipped))
            self._log = stack.enter_context(
                logs.RunLog(
                    self.run_dir,
                    info_keys=flags.info_keys,
                    resume_step=None if self.found is None else learner.step,
                    wandb=ranks.flags_of_run(flags) if flags.wandb else None,
                )
            )
            self._status = stack.enter_context(
                status_line.StatusLine(flags.total_steps, ranks.size())
            )
            try:
                yield
            except folder.RunDirBusy:  # The folder belongs to that run now.
                raise
            except BaseException:
                self._wait_for("log", LOG_S)
                try:
                    self._save_last()
                except Exception as error:  # The first failure is the one to report.
                    log.error("The last checkpoint is missing: %s", error)
                raise
            self._save_last()

    def tick(self, stats: dict[str, Any]) -> None:
        """Start to log or to save if it is time; do not wait until this has ended.

        Args:
          stats: values for columns of the log that only the trainer knows.

        Raises:
          Exception: the error that ended the last attempt to log or to save.
        """
        terminal.write_waiting()  # By now the actors have been forked.
        if self._others is not None and not self._has_folder:
            self._others.columns = stats
            return
        self._stats = stats
        now = time.monotonic()
        for name, job in self._jobs.items():
            if job.done():
                job.result()
            elif now - self._began[name] > SAY_HANGS_S:
                self._began[name] = now
                log.warning("Waiting for the disk of %s, to %s", self.run_dir, name)
        if now - self._last_log >= self.flags.log_interval_s:
            self._begin("log", self._write_row, stats)
        is_due = now - self._last_save >= self.flags.checkpoint_interval_s
        if is_due and self.learner.updates:
            self._begin("save", self._try_to_save)

    def _begin(self, name: str, write: Callable[..., None], *args: Any) -> None:
        """Call `write` in a thread `name`, unless its last job is still running."""
        if not self._in_background:
            write(*args)
        elif name not in self._jobs or self._jobs[name].done():
            with contextlib.suppress(RuntimeError):  # No thread is left: the next tick.
                self._jobs[name] = start_thread(name, on_one_core, write, *args)
                self._began[name] = time.monotonic()

    def _wait_for(self, name: str, limit_s: float) -> bool:
        """Wait for the end of a thread's last job; return whether it has ended."""
        job = self._jobs.get(name)
        return job is None or not concurrent.futures.wait([job], limit_s).not_done

    def _sum_up(self, skipped: int) -> None:
        """At the end of a run, log the problems since its start."""
        stats = self._of_all_learners("columns", self._stats)
        counts = {text: stats.get(key, 0) for key, text in NOT_NORMAL.items()}
        counts["updates skipped"] = skipped
        parts = [f"{n} {text}" for text, n in counts.items() if n]
        warnings = log_setup.frequent_warnings(3)
        if parts:
            log.info("Not normal since the start: %s", ", ".join(parts))
        if warnings:
            log.info("The most frequent warnings: %s", "; ".join(warnings))

    def _save_last(self) -> None:
        # No limit: if this save hangs, the last save would hang, too.
        while not self._wait_for("save", SAY_HANGS_S):
            log.warning("Waiting for the disk of %s, to save", self.run_dir)
        self.save()

    def _try_to_save(self) -> None:
        try:
            self.save()
        except StallError:
            pass  # An update takes long. The watchdog decides whether it hangs.
        except checkpoint.CheckpointError as error:
            # The old checkpoints are intact, and the disk may have space again later.
            log.warning("%s. Training goes on.", error)

    def log(self, stats: dict[str, Any]) -> None:
        """Write the first or the last row of this start, between two updates.

        Raises:
          StallError: an update has not ended within LOCK_S.
          Exception: the error that ended the last attempt to log.
        """
        if not self._has_folder:
            return
        self._stats = stats
        if not self._wait_for("log", LOG_S):
            log.error("The last row is missing: the row before is still being written")
            return
        if "log" in self._jobs:
            self._jobs.pop("log").result()
        with self.learner.between_updates(LOCK_S):
            self._write_row(stats, is_last=True)

    def _write_row(self, stats: dict[str, Any], *, is_last: bool = False) -> None:
        """Write one row of logs.csv and show it; do nothing if there are no new steps.

        This does not take the lock. So if an update ends at this moment, some columns
        of this row include the update, and the other columns include it only in the
        next row. After the last update there is no next row: therefore only `log`
        writes the last row.
        """
        learner, now = self.learner, time.monotonic()
        step = learner.step
        if not is_last and (learner.stopped or learner.finished()):
            return
        steps = step - self._last_step
        row: dict[str, Any] = {
            "step": step,
            "frames": step * self._frames_per_step,
            "time_s": self._earlier_s + now - self._started,
            "sps": steps / max(now - self._last_log, 1e-9),
            **learner.counts.episodes.columns(),
            "learning_rate": learner.optimizers[0].param_groups[0]["lr"],
            "updates": learner.updates,
            "skipped_updates": learner.skipped,
            "stale_rollouts": learner.counts.stale,
            "rss_mb": compute.rss_mb(),
        }
        if steps == 0:
            if step == 0:
                self._status.update(row)
            return
        busy = self._of_all_learners("busy", learner.busy.pop())
        stats = self._of_all_learners("columns", stats)
        row |= {**learner.counts.averages.pop(), **stats}
        row |= {f"{stage}_busy": share for stage, share in busy.items()}
        row["gpu_utilization"] = gpu_utilization(learner.net)
        # First, since the disk may hang.
        stage = bottleneck(busy, actors_do_both=self._actors_do_both)
        self._status.update(row, stage)
        self._log.log(row)
        self._last_log, self._last_step = now, step

    def _of_all_learners(self, name: str, ours: dict[str, Any]) -> dict[str, Any]:
        """Combine columns of this learner with those in the other learners' reports."""
        if self._others is None:
            return ours
        return columns.combine([ours, *(r[name] for r in self._others.reports)])

    def save(self) -> None:
        """Write a checkpoint, unless --disable_checkpoint.

        Raises:
          CheckpointError: the checkpoint cannot be written.
          StallError: an update has not ended within LOCK_S.
          ValueError: a weight is not finite, so training cannot go on from it.
        """
        if self.flags.disable_checkpoint:
            self._last_save = time.monotonic()  # `tick` tries again after an interval.
            return
        learner = self.learner
        with learner.between_updates(LOCK_S):
            self._last_save = time.monotonic()
            state, tensors = self._snapshots.take()
            extra, extra_tensors = self.extra_state()
            elapsed_s = self._earlier_s + time.monotonic() - self._started
        step = state["learner"]["step"]
        if wrong := checkpoint.find_not_finite(learner.net, tensors["model"]):
            raise ValueError(f"weight {wrong} is not finite at step {step}; not saved")
        checkpoint.save(
            self._checkpoints,
            step=step,
            tensors={**tensors, **extra_tensors},
            state={**state, "time_s": elapsed_s, **extra},
        )


def describe_ledger(received: int, parts: Mapping[str, int]) -> str:
    """Return the line of the log that accounts for all received rows."""
    sums = " + ".join(f"{n} {name}" for name, n in parts.items())
    return f"{received} rows received = {sums}"


def log_options(options: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """Log the environment's options, and those that changed since the last start.

    Args:
      options: the environment's options by name.
      recorded: the run's meta.json, or {} in a new run.
    """
    if options:
        text = ", ".join(f"{name} {value}" for name, value in options.items())
        log.info("Environment options: %s", text)
    before = recorded.get("env_options", options)
    for name in sorted({*before, *options}):
        old, new = before.get(name, "not reported"), options.get(name, "not reported")
        if old != new:
            log.warning(
                "  %s was %s when this run was started before, and is now %s",
                name,
                old,
                new,
            )


def bottleneck(busy: Mapping[str, float], *, actors_do_both: bool) -> str | None:
    """Name the stage that limits the speed of the run: the busiest stage.

    Args:
      busy: the shares of time in which "env", "inference" and "learner" work.
      actors_do_both: whether the same workers step environments and choose actions.
        Then the sum of both shares counts.
    """
    if not busy:
        return None
    shares = dict(busy)
    if actors_do_both and {"env", "inference"} <= shares.keys():
        acting = shares["env"] + shares["inference"]
        bound = "env" if shares["env"] >= shares["inference"] else "inference"
        shares = {"learner": shares.get("learner", 0.0), bound: min(1.0, acting)}
    stage = max(shares, key=lambda stage: shares[stage])
    return f"{stage}-bound {shares[stage]:.0%}"
