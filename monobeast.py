# SPDX-License-Identifier: Apache-2.0
"""MonoBeast: IMPALA (Espeholt et al. 2018) on one machine, in pure Python.

    python -m monobeast --env PongNoFrameskip-v4

Actor processes step environments and choose actions on the CPU; learner threads do one
gradient step with each batch of rollouts. Rollouts and weights are in shared memory.
Messages over pipes say which process may use which rollout buffer:

      actor processes                                   parent process
    ┌────────────────────────┐   pipe: "i is full"   ┌────────────────────────────┐
    │ E environments         │ ────────────────────► │ main thread, Actors:       │
    │ Net, on the CPU        │ ◄──────────────────── │   free and full buffers    │
    └───┬───────────────▲────┘   pipe: "fill i"      │        │ take   ▲ give_back│
        │ rows          │ weights                    │        ▼        │          │
    ┌───▼───────────────┴────┐                       │ learner threads:           │
    │ shared memory          │ ◄───────────────────► │   copy a batch, learn      │
    └────────────────────────┘                       └────────────────────────────┘

To train your own agent edit Net; for your own environment edit create_env. core/actors
has the code that runs the processes and holds the buffers. core/algorithm/update.py has
the whole update.
"""

import os

# One OpenMP thread per process, unless the user has set another number: there are more
# processes than cores, and idle OpenMP threads would spin and keep the cores busy.
# Torch reads this variable when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if __name__ == "__main__":
    from core import imports

    imports.end_at_signals()  # Until the program handles them itself.
    imports.open_closed_streams()
    imports.explain_missing_packages()

import argparse
import concurrent.futures
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import atari_wrappers
from core import flag_types
from core.action_spaces import split_mask
from core.actors import actor_flags, prepare, serial
from core.actors.processes import ActorProcess, Actors
from core.actors.shared_memory import BatchAssembler, RolloutBuffers, SharedWeights
from core.algorithm import gpu
from core.algorithm.action_layers import ActionFeatures, PolicyHead
from core.algorithm.distributions import ActionDistribution, mask_logits
from core.algorithm.dry_run import dry_run, dry_run_loss, explain_create_net
from core.algorithm.normalization import InputNorm, PopArt, normalized
from core.algorithm.recurrent import create_lstm, unroll_lstm
from core.algorithm.replay import Replay, create_replay
from core.algorithm.torsos import TORSOS, model_for, orthogonal
from core.algorithm.update import Learner
from core.environments import stepping
from core.environments.make import make
from core.errors import Exit, leave
from core.nests import ArraySpec, Nest, map_nest
from core.rollout import NET_INPUTS, Spaces, new_rollouts
from core.running import common_flags, evaluation
from core.running.compute import explain_out_of_memory, set_torch_threads
from core.running.machine import keep_freed_memory
from core.running.precision import settle_precision, to_bfloat16
from core.running.program import run_program
from core.running.randomness import keep_torch, undo_seeding
from core.running.run import Run, run_folder
from core.running.signals import StopSignal
from core.running.supervise import (
    Watchdog,
    check_main_file,
    raise_failures,
    start_thread,
)
from core.running.unit import running

log = logging.getLogger("monobeast")

TICK_S = 0.2  # The main loop checks signals, failures and clocks at least this often.


# ---------------------------------------------------------------------------- flags


def parse_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; exits with status 2 if something is wrong."""
    parser = make_parser()
    return check_flags(parser, common_flags.parse(parser, argv))


def make_parser() -> argparse.ArgumentParser:
    parser = flag_types.Parser(
        prog="python -m monobeast",
        description="IMPALA on one machine, in pure Python.",
        formatter_class=flag_types.HelpFormatter,
    )
    common_flags.add_run_flags(parser)
    common_flags.add_environment_flags(parser)
    actor_flags.add_actor_flags(parser.add_argument_group("actors"))
    common_flags.add_learner_flags(parser)
    common_flags.add_loss_flags(parser)
    common_flags.add_optimizer_flags(parser)
    return parser


def check_flags(
    parser: argparse.ArgumentParser, flags: argparse.Namespace
) -> argparse.Namespace:
    """Set defaults that depend on other flags; refuse flags that contradict others."""
    is_atari = atari_wrappers.is_atari(flags.env)
    if flags.serial:
        flags.disable_cuda = True
        flags.learner_cores = flags.learner_cores or 1
    common_flags.check_common(parser, flags, is_atari=is_atari)
    actor_flags.set_actors(parser, flags)
    actor_flags.set_learner_threads(parser, flags)
    return flags


def has_gpu(flags: argparse.Namespace) -> bool:
    """Say whether the learner is on a GPU. Actors always compute on the CPU."""
    return torch.cuda.is_available() and not flags.disable_cuda


# ------------------------------------------------------------------------- the agent

LSTM_SIZE = 256


class Net(nn.Module):
    """Policy and baseline: a torso for observations, maybe an LSTM, two linear heads.

    As in the paper, the core sees the torso's features, the last action (one-hot) and
    the last reward (clipped to [-1, 1] like the loss's, unless `clip_rewards` is off).
    `distribution` turns the policy's outputs into actions of any action space. With
    `bfloat16` the torso computes in that type; the weights and all other layers stay
    float32. `normalize` may contain "observations" and "returns". Both programs
    have the same class, each its own copy: change it in each that you use.

    Raises:
      ConfigError: the model does not fit the spaces.
    """

    def __init__(
        self,
        observation_space: gym.Space,
        action_space: gym.Space,
        *,
        model: str = "auto",
        use_lstm: bool = False,
        clip_rewards: bool = True,
        bfloat16: bool = False,
        normalize: Collection[str] = (),
        initial_std: float = 1.0,
    ):
        super().__init__()
        self.normalize = (
            InputNorm(observation_space, clip_rewards=clip_rewards)
            if "observations" in normalize
            else nn.Identity()
        )
        observation_space, _ = split_mask(observation_space)
        if model == "auto":
            model = model_for(observation_space)
        self.distribution = ActionDistribution(action_space)
        self.clip_rewards = clip_rewards
        self.use_bfloat16 = bfloat16
        self.torso = TORSOS[model](observation_space)
        self.action_features = ActionFeatures(action_space)
        core_size = self.torso.num_features + self.action_features.num_features + 1
        self.core = create_lstm(core_size, LSTM_SIZE) if use_lstm else None
        head_size = LSTM_SIZE if use_lstm else core_size
        self.policy = PolicyHead(head_size, self.distribution, initial_std)
        self.value_torso = None
        if model == "tanh" and not use_lstm:  # As in PPO's networks for MuJoCo.
            self.value_torso = TORSOS[model](observation_space)
        linear = PopArt if "returns" in normalize else nn.Linear
        self.baseline = orthogonal(linear(head_size, 1), gain=1.0)

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        """Return a new episode's recurrent state: [1, B, LSTM_SIZE] each, or ()."""
        if self.core is None:
            return ()
        return tuple(torch.zeros(1, batch_size, LSTM_SIZE) for _ in range(2))

    def forward(
        self, rows: dict[str, Nest], core_state: tuple[torch.Tensor, ...] = ()
    ) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Evaluate T rows of B environments.

        Args:
          rows: rollout rows, [T, B, ...]: observation, reward, done, last_action.
          core_state: the recurrent state before the first row.

        Returns:
          policy_logits [T, B, P], the parameters of `distribution`, baseline [T, B],
          and the state after the last row.
        """
        rows = self.normalize(rows)
        T, B = rows["done"].shape
        observation = map_nest(lambda x: x.flatten(0, 1), rows["observation"])
        observation, mask = split_mask(observation)
        reward = rows["reward"].clamp(-1, 1) if self.clip_rewards else rows["reward"]
        last_action = self.action_features(rows["last_action"])

        def features(torso: nn.Module) -> torch.Tensor:
            precision = contextlib.nullcontext()
            if self.use_bfloat16:
                precision = torch.autocast(rows["done"].device.type, torch.bfloat16)
            with precision:
                x = torso(observation).float()  # [T*B, features]
            return torch.cat([x, reward.view(T * B, 1), last_action], dim=1)

        x = features(self.torso)
        if self.core is not None:
            x, core_state = unroll_lstm(
                self.core, x.view(T, B, -1), rows["done"], core_state
            )
            x = x.flatten(0, 1)
        logits = self.policy(x)
        if mask is not None:
            logits = mask_logits(logits, mask)
        outputs = {
            "policy_logits": logits.view(T, B, -1),
            "baseline": self.baseline(
                features(self.value_torso) if self.value_torso is not None else x
            ).view(T, B),
        }
        return outputs, core_state


def create_env(flags: argparse.Namespace, render_mode: str | None = None) -> Any:
    """Return the environment that actors step. Edit this for your own environment.

    The environment follows the Gymnasium or the classic gym interface. Do not clip
    rewards here: the loss clips them.

    Args:
      render_mode: None when training; "rgb_array" or "human" when testing.
    """
    if atari_wrappers.is_atari(flags.env):
        options = atari_wrappers.options_of(vars(flags))
        return atari_wrappers.make_atari(flags.env, render_mode=render_mode, **options)
    return make(flags.env, render_mode=render_mode)


def env_options(flags: argparse.Namespace, env: gym.Env) -> dict[str, Any]:
    """Return the options of `env`, which create_env made, for the log and meta.json.

    A step counts as `frame_skip` frames, or as one if this option is not there. --mode
    test reads those in common_flags.ATARI_FLAGS from meta.json.
    """
    return atari_wrappers.recorded_options(vars(flags), env)


def create_net(flags: argparse.Namespace, spaces: Spaces) -> Net:
    return Net(
        spaces.observation,
        spaces.action,
        model=flags.model,
        use_lstm=flags.use_lstm,
        clip_rewards=flags.reward_clipping == "abs_one",
        bfloat16=flags.precision == "bfloat16",
        normalize=normalized(flags),
        initial_std=flags.initial_action_std,
    )


def read_env(flags: argparse.Namespace) -> tuple[Spaces, dict[str, Any]]:
    """Create one environment to ask for its spaces and its options."""
    return prepare.read_env(
        lambda: create_env(flags),
        functools.partial(env_options, flags),
        flags.env_step_timeout_s,
    )


def net_outputs(spaces: Spaces) -> dict[str, ArraySpec]:
    """Return the specs of Net.forward's outputs, for one row of one environment."""
    f32 = np.dtype(np.float32)
    return {
        "policy_logits": ArraySpec(
            (ActionDistribution(spaces.action).num_parameters,), f32
        ),
        "baseline": ArraySpec((), f32),
    }


# ---------------------------------------------------------------------------- acting


class Actor:
    """Steps E environments with one copy of the network, one rollout at a time."""

    def __init__(
        self,
        flags: argparse.Namespace,
        net: Net,
        spaces: Spaces,
        buffers: RolloutBuffers,
        *,
        actor_id: int,
        incarnation: int,
        fetch: Callable[[], int],
        clock: np.ndarray,
    ):
        """Create the environments.

        Args:
          spaces: what `net` and the buffers are for.
          incarnation: another number at each start of this actor's process. Together
            with `actor_id` it seeds the environments.
          fetch: brings the newest weights into `net` and returns their version.
          clock: [1] float64, written by the actor: the time (`time.monotonic`) at
            which the present call into an environment, or the choice of actions,
            began; 0 while no buffer is being filled. The program reads the clock and
            kills an actor that takes too long.
        """
        E = flags.envs_per_actor
        with keep_torch():  # Environments may seed torch, or change its defaults.
            self.envs = stepping.Environments(
                lambda: create_env(flags),
                E,
                seed=flags.seed,
                first_env_id=actor_id * E,
                incarnation=incarnation,
                info_keys=flags.info_keys,
                seed_every_game=flags.serial,
                max_actions=serial.MAX_ACTIONS // (flags.num_actors * E),
                recycle_games=flags.recycle_games,
                clock=clock,
            )
        own = Spaces(self.envs.observation_space, self.envs.action_space)
        prepare.check_same_spaces(spaces, own)
        self.net = net
        self.agent_keys = (*net_outputs(spaces), *net.distribution.columns)
        self.state = net.initial_state(E)
        self.buffers = buffers
        # The last row of a rollout is row 0 of the next one (table in core.rollout).
        self.last_row = map_nest(lambda rows: rows[0, 0].copy(), buffers.rows)
        self.started = False
        # Seconds of the last rollout: in environments, and in everything else.
        self.env_s = self.agent_s = 0.0
        self._fetch = fetch
        self._clock = clock
        clock[0] = 0.0

    @torch.no_grad()
    def unroll(self, index: int) -> None:
        """Fill buffer `index` with the next T steps of every environment."""
        started, env_s = time.monotonic(), 0.0
        self._clock[0] = started
        row = self.buffers.row(index, 0)
        if self.started:
            map_nest(np.copyto, row, self.last_row)
        else:
            self._first_row(row)
        for states, state in zip(self.buffers.agent_state, self.state):
            states[index] = state.numpy()  # Before the rollout's first row.
        T = self.buffers.unroll_length
        for t in range(T):
            version = self._fetch()
            rows = as_tensors(row)
            outputs, self.state = self.net(rows, self.state)
            row = self.buffers.row(index, t + 1)
            logits = outputs["policy_logits"]
            outputs |= self.net.distribution.draw(logits, inputs=rows)
            for key in self.agent_keys:
                map_nest(copy_output, row[key], outputs[key])
            row["policy_version"][...] = version
            began, seed = time.monotonic(), torch.initial_seed()
            self.envs.step(row["action"], row)
            undo_seeding(seed)  # Or the policy would repeat its random numbers.
            self._clock[0] = time.monotonic()
            env_s += self._clock[0] - began
        self._clock[0] = 0.0
        map_nest(np.copyto, self.last_row, row)
        self.env_s, self.agent_s = env_s, time.monotonic() - started - env_s

    def _first_row(self, row: Nest) -> None:
        for key in (*self.agent_keys, "policy_version"):
            # No action led to the first row; the loss ignores it.
            map_nest(lambda x: x.fill(0), row[key])
        with keep_torch():
            self.envs.reset(row)
        self.started = True


def copy_output(to: np.ndarray, output: torch.Tensor) -> None:
    """Copy an output [1, E, ...] into a row [E, ...]."""
    to[...] = output.numpy()[0]  # numpy's views take a third of the time of torch's.


def as_tensors(row: Nest) -> Nest:
    """Return the network's inputs from one row [E, ...] as tensors [1, E, ...].

    The tensors are views: nothing is copied.
    """
    inputs = {key: row[key] for key in NET_INPUTS}
    return map_nest(lambda x: torch.from_numpy(x[np.newaxis]), inputs)


def own_code() -> list[str]:
    """Return the names of the code that a script may have replaced in this module."""
    return prepare.names_of(Net, create_net, create_env, net_outputs)


def act(
    flags: argparse.Namespace, spaces: Spaces, code: list[str], process: ActorProcess
) -> None:
    """Run in an actor process: create network and environments, then fill buffers.

    Args:
      code: the program's `own_code`.
    """
    prepare.check_code(program=code, actor=own_code())
    net = create_net(flags, spaces)
    if getattr(net, "use_bfloat16", False):  # A Net of your own may lack it.
        to_bfloat16(net.torso)
    actor = Actor(
        flags,
        net,
        spaces,
        process.buffers,
        actor_id=process.actor_id,
        incarnation=process.incarnation,
        fetch=process.fetcher(net),
        clock=process.clock,
    )
    # Faster than no_grad. --serial has only the no_grad of `unroll`: there actors and
    # learner share one Net, and a tensor that `forward` keeps from inference mode
    # cannot take part in a gradient.
    with torch.inference_mode():
        process.fill_buffers(actor)


# -------------------------------------------------------------------------- learning


def create_learner(flags: argparse.Namespace, spaces: Spaces) -> Learner:
    """Create the network and its optimizer: RMSProp, as in the paper."""
    net = create_net(flags, spaces).to("cuda" if has_gpu(flags) else "cpu")
    optimizer = torch.optim.RMSprop(
        net.parameters(),
        lr=flags.learning_rate,
        alpha=flags.alpha,
        eps=flags.epsilon,
        momentum=flags.momentum,
        foreach=True,
    )
    return Learner(flags, net, [optimizer])


def learn_loop(
    flags: argparse.Namespace,
    learner: Learner,
    actors: Actors,
    buffers: RolloutBuffers,
    weights: SharedWeights,
    replay: Replay,
) -> None:
    """Run one learner thread: take full buffers, copy them, give them back, learn."""
    set_torch_threads(flags.learner_cores)
    n = new_rollouts(flags) // flags.envs_per_actor  # A buffer has E rollouts.
    stream = gpu.create_stream(learner.device)
    empty = np.empty if stream is None else gpu.empty_page_locked
    assembler = BatchAssembler(buffers, n, empty, num_replayed=replay.num_sampled)
    while (indices := actors.take(n)) is not None:
        replayed = replay.sample()
        assembler.fill(indices, replayed)
        actors.give_back(replay.add(indices, replayed))
        with explain_out_of_memory(assembler.batch, learner.net):
            learner.update(assembler.batch, assembler.agent_state, stream)
        with learner.lock:
            weights.publish(learner.net.state_dict(), learner.updates)


# ------------------------------------------------------------------------------- run


def train(flags: argparse.Namespace) -> Exit:
    """Train until --total_steps, a signal or a failure; write a last checkpoint."""
    if not flags.serial:
        check_main_file()
    keep_freed_memory()
    opening = run_folder(flags)  # An environment may change the working directory.
    # Before `opening` creates the run's folder: a misspelt --env creates none.
    spaces, options = read_env(flags)
    with opening as run_dir, StopSignal() as stop:
        # The devices of the learner and of the actors.
        torso_devices = ("cuda" if has_gpu(flags) else "cpu", "cpu")
        flags = settle_precision(flags, run_dir, spaces.observation, *torso_devices)
        with explain_create_net():
            learner = create_learner(flags, spaces)
        outputs = net_outputs(spaces)
        dry_run(learner.net, spaces, outputs)
        dry_run_loss(learner, spaces)
        run = Run(
            flags,
            run_dir,
            learner,
            stop,
            frames_per_step=options.get("frame_skip", 1),  # 1 without an emulator.
            actors_do_both=True,  # They step environments and choose actions.
            in_background=not flags.serial,
        )
        run.resume()
        env = options.get("create_env", flags.env)
        run.describe(env, spaces, devices=f"on {learner.device}")
        log.info(actor_flags.describe_actors(flags))
        if run.has_nothing_to_do():
            return Exit.DONE
        buffers = prepare.create_buffers(flags, spaces, learner.net, outputs)
        first = serial.first_incarnation(run) if flags.serial else run.first_incarnation
        run.record(options, first_env_seeds=prepare.first_env_seeds(flags, first))
        if flags.serial:
            train_serial(run, spaces, buffers)
        else:
            with run.open():
                train_async(run, spaces, buffers)
        return run.end()


def train_async(run: Run, spaces: Spaces, buffers: RolloutBuffers) -> None:
    """Train with actor processes and learner threads; the main thread watches them."""
    flags, learner = run.flags, run.learner
    weights = SharedWeights(learner.net.state_dict(), learner.updates)
    actors = Actors(
        functools.partial(act, flags, spaces, own_code()),
        flags,
        buffers,
        weights,
        first_incarnation=run.first_incarnation,
        busy=learner.busy,
        preload="monobeast",
    )
    E = flags.envs_per_actor
    replay = create_replay(flags, learner.updates, E, actors.reserve)
    watchdog = Watchdog(flags.stall_timeout_s, flags.on_stall)
    threads: dict[str, concurrent.futures.Future] = {}
    try:
        actors.start()
        for i in range(flags.num_learner_threads):
            args = (flags, learner, actors, buffers, weights, replay)
            threads[f"learner-{i}"] = start_thread(f"learner-{i}", learn_loop, *args)
        run.log({})
        while run.goes_on():
            actors.poll(TICK_S)
            raise_failures(threads)
            run.tick(actors.stats())
            watchdog.progress(learner.progress(), actors.describe_wait)
    finally:
        watchdog.close()
        actors.stop_handing_out()
        run.join(threads)
        actors.close()
    raise_failures(threads)  # A thread may have failed at the last moment.
    run.log(actors.stats())  # The last row, now that the last update is done.
    run.check_ledger(*actors.rows())


def train_serial(run: Run, spaces: Spaces, buffers: RolloutBuffers) -> None:
    """Train in this thread alone: the actors act one after another, then an update.

    The rollouts of update u come from actors u*n, u*n + 1, ... (modulo their number).
    So a resumed run takes them from the same actors as a run without interruption.
    """
    flags, learner = run.flags, run.learner
    set_torch_threads(flags.learner_cores)
    n = new_rollouts(flags) // flags.envs_per_actor
    replay = create_replay(flags, learner.updates, flags.envs_per_actor)
    assembler = BatchAssembler(buffers, n, num_replayed=replay.num_sampled)
    free = list(range(buffers.num_buffers))

    create_actor = functools.partial(
        Actor,
        flags,
        learner.net,
        spaces,
        buffers,
        incarnation=serial.first_incarnation(run),
        fetch=lambda: learner.updates,
    )
    with serial.open_run(run, create_actor) as (actors, update_clock):
        while run.goes_on():
            first = n * (learner.updates + learner.skipped)
            indices = [free.pop() for _ in range(n)]
            for i, index in enumerate(indices):
                actor = actors[(first + i) % len(actors)]
                actor.unroll(index)
                learner.busy.add("env", actor.env_s)
                learner.busy.add("inference", actor.agent_s)
            with (
                running(update_clock),
                explain_out_of_memory(assembler.batch, learner.net),
            ):
                replayed = replay.sample()
                assembler.fill(indices, replayed)
                free += replay.add(indices, replayed)
                learner.update(assembler.batch, assembler.agent_state)
                run.tick({})


# ------------------------------------------------------------------------------ test


def test(flags: argparse.Namespace) -> Exit:
    """Play --num_episodes full games with a run's newest checkpoint; report returns."""
    evaluation.test_run(
        flags,
        create_envs=lambda render_mode, **options: stepping.Environments(
            lambda: create_env(flags, render_mode),
            1,
            recycle_games=flags.recycle_games,
            **options,
        ),
        env_options=functools.partial(env_options, flags),
        create_net=functools.partial(create_net, flags),
    )
    return Exit.DONE


def main(argv: Sequence[str] | None = None) -> int:
    return run_program(parse_flags, train, test, argv)


if __name__ == "__main__":
    leave(main())
