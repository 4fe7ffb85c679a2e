# SPDX-License-Identifier: Apache-2.0
"""MonoBeast: IMPALA (Espeholt et al. 2018) on one machine, in pure Python.

    python -m monobeast --env PongNoFrameskip-v4

Actor processes step environments and choose actions on the CPU; learner threads turn
their rollouts into gradient steps. They share memory for the two things that are large,
and speak over pipes about who may touch what:

      actor processes                                   parent process
    ┌────────────────────────┐   pipe: "i is full"   ┌────────────────────────────┐
    │ E environments         │ ────────────────────► │ main thread, Actors:       │
    │ Net, on the CPU        │ ◄──────────────────── │   free and full buffers    │
    └───┬───────────────▲────┘   pipe: "fill i"      │        │ take   ▲ give_back│
        │ rows          │ weights                    │        ▼        │          │
    ┌───▼───────────────┴────┐                       │ learner threads:           │
    │ shared memory          │ ◄───────────────────► │   copy a batch, learn      │
    └────────────────────────┘                       └────────────────────────────┘

To train your own agent edit Net; for your own environment edit create_env.
"""

import os
import signal

# One thread per process unless told otherwise (torch reads this when it is imported):
# actors outnumber the cores, and spinning OpenMP threads would steal them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if __name__ == "__main__":
    # Until somebody handles it, Ctrl-C ends the program without a traceback from the
    # midst of an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from core.installed import explain_missing_packages

    explain_missing_packages()

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import functools
import logging
import math
import multiprocessing
import secrets
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import atari_wrappers
import core.flags
from core import (
    checkpoint,
    environment,
    evaluation,
    fork_server,
    gpu,
    losses,
    metrics,
    rollouts,
    terminal,
)
from core.dry_run import dry_run
from core.recurrent import create_lstm, unroll_lstm
from core.run import (
    Learner,
    Run,
    check_ledger,
    compute_on,
    log_options,
    naming_memory,
    run_program,
    seed_rng,
)
from core.spaces import ArraySpec, Nest, flat_ranges, leaves, map_nest, row_spec
from core.supervise import (
    STOP_SIGNALS,
    ConfigError,
    Exit,
    RestartBudget,
    StopSignal,
    Watchdog,
    be_killed_first_for_memory,
    check_main_file,
    check_resources,
    describe_exit,
    join_threads,
    keep_freed_memory,
    kill_if_hung,
    let_learner_go_first,
    show_stacks,
    start_thread,
)
from core.unit import Unit, limit_calls

log = logging.getLogger("monobeast")

TICK_S = 0.2  # The main loop looks at signals, failures and clocks at least this often.
LEARNER_JOIN_S = 30.0  # An update of the largest batch on one core, with room.
# What an actor says of a full buffer: b"F", its index, and the seconds that its
# environments and its agent took.
FULL = struct.Struct("<cIdd")
ACTOR_EXIT_S = 1.0  # For an environment's close(); then the actor is killed.


# ---------------------------------------------------------------------------- flags


def parse_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; exits with status 2 if something is wrong."""
    parser = make_parser()
    return check_flags(parser, core.flags.parse(parser, argv))


def make_parser() -> argparse.ArgumentParser:
    parser = core.flags.Parser(
        prog="python -m monobeast",
        description="IMPALA on one machine, in pure Python.",
        formatter_class=core.flags.HelpFormatter,
    )
    core.flags.add_run_flags(parser)
    core.flags.add_environment_flags(parser)

    actors = parser.add_argument_group("actors")
    core.flags.add_actor_flags(actors)
    actors.add_argument(
        "--start_method",
        choices=multiprocessing.get_all_start_methods(),
        default="forkserver" if sys.platform == "linux" else "spawn",
        help="how actor processes start",
    )
    actors.add_argument(
        "--serial",
        action="store_true",
        help="everything in one process and one thread, in lock step: pdb works, and "
        "with --seed two runs on the CPU are bitwise equal",
    )

    core.flags.add_learner_flags(parser)
    core.flags.add_loss_flags(parser)
    core.flags.add_optimizer_flags(parser)
    return parser


def check_flags(
    parser: argparse.ArgumentParser, flags: argparse.Namespace
) -> argparse.Namespace:
    """Fill in defaults that depend on other flags and refuse what cannot work."""
    is_atari = atari_wrappers.is_atari(flags.env)
    if flags.serial and flags.learner_cores is None:
        flags.learner_cores = 1
    core.flags.check_common(parser, flags, is_atari=is_atari)
    core.flags.set_actors(parser, flags)
    if flags.serial and (flags.num_learner_threads or 1) > 1:
        parser.error(
            f"--num_learner_threads is {flags.num_learner_threads} but --serial uses "
            "one thread for everything. Leave one of them out."
        )
    if flags.num_learner_threads is None:
        flags.num_learner_threads = 1 if flags.serial else 2
    if flags.cuda_graphs and not has_gpu(flags):
        parser.error(
            "--cuda_graphs is set, but the learner is on the CPU: --disable_cuda is "
            "set too, or torch sees no GPU. Leave it out."
        )
    if flags.cuda_graphs and flags.use_lstm:
        parser.error(
            "--cuda_graphs is set, but with --use_lstm the gradient depends on where "
            "episodes end and cannot be recorded. Leave one of them out."
        )
    return flags


def has_gpu(flags: argparse.Namespace) -> bool:
    """Say whether the learner is on a GPU; actors never are."""
    return torch.cuda.is_available() and not flags.disable_cuda


# ------------------------------------------------------------------------- the agent

LSTM_SIZE = 256
MLP_SIZE = 256


class Net(nn.Module):
    """Policy and baseline: a torso for observations, maybe an LSTM, two linear heads.

    As in the paper, the core sees the torso's features, the last action (one-hot) and
    the last reward (clipped to [-1, 1] like the loss's, unless `clip_rewards` is off).
    With `bfloat16` the torso computes in that type; weights and the rest stay float32.

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
    ):
        super().__init__()
        if not isinstance(action_space, gym.spaces.Discrete):
            raise ConfigError(
                f"the action space is {action_space}; Net's policy is a categorical "
                "distribution and needs Discrete. Wrap the environment, or give Net "
                "the distribution you need and core/losses.py its log-probability."
            )
        if model == "auto":
            model = model_for(observation_space)
        self.num_actions = int(action_space.n)
        self.first_action = int(action_space.start)
        self.clip_rewards = clip_rewards
        self.bfloat16 = bfloat16
        self.torso = TORSOS[model](observation_space)
        core_size = self.torso.num_features + self.num_actions + 1
        self.core = create_lstm(core_size, LSTM_SIZE) if use_lstm else None
        head_size = LSTM_SIZE if use_lstm else core_size
        # All actions are about equally likely at first.
        self.policy = orthogonal(nn.Linear(head_size, self.num_actions), gain=0.01)
        self.baseline = orthogonal(nn.Linear(head_size, 1), gain=1.0)

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
          policy_logits [T, B, A] and baseline [T, B], and the state after the last row.
        """
        T, B = rows["done"].shape
        observation = map_nest(lambda x: x.flatten(0, 1), rows["observation"])
        with torch.autocast(
            rows["done"].device.type, torch.bfloat16, enabled=self.bfloat16
        ):
            features = self.torso(observation).float()  # [T*B, features]
        reward = rows["reward"].clamp(-1, 1) if self.clip_rewards else rows["reward"]
        last_action = F.one_hot(
            rows["last_action"] - self.first_action, self.num_actions
        )
        x = torch.cat(
            [features, reward.view(T * B, 1), last_action.view(T * B, -1)], dim=1
        )
        if self.core is not None:
            x, core_state = unroll_lstm(
                self.core, x.view(T, B, -1), rows["done"], core_state
            )
            x = x.flatten(0, 1)
        outputs = {
            "policy_logits": self.policy(x).view(T, B, -1),
            "baseline": self.baseline(x).view(T, B),
        }
        return outputs, core_state


def orthogonal(layer: nn.Module, gain: float = 2**0.5) -> nn.Module:
    """Return `layer` with orthogonal weights and no bias (Saxe et al. 2014).

    Signals keep their size from layer to layer. With torch's own initial weights, what
    moves on an Atari screen changes the features of ShallowTorso by some 1e-4 only, and
    learning takes long to begin.
    """
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def model_for(space: gym.Space) -> str:
    """Return the `--model` that fits observations from this space."""
    side = picture_side(space)
    return "shallow" if side >= 36 else "small" if side >= 5 else "mlp"


def picture_side(space: gym.Space) -> int:
    """Return a picture's height or width, whichever is less; 0 for what is none."""
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 3:
        return 0
    first, middle, last = space.shape  # Either the first or the last are the channels.
    return min(middle, max(first, last))


class ImageTorso(nn.Module):
    """What the convolutional torsos share: layout, scaling, the size of the end.

    Takes [N, C, H, W] or [N, H, W, C], whichever axis is the smaller (the last if they
    are equal); integers are scaled by the range of the space. Convolutions run
    channels-last, three times as fast on a CPU.
    """

    name: str  # Of the --model.
    min_side = 36

    def __init__(self, space: gym.Space, make_convs: Callable[[int], nn.Module], size):
        super().__init__()
        if picture_side(space) < self.min_side:
            raise ConfigError(
                f"--model {self.name} needs one Box of three axes, at least "
                f"{self.min_side} pixels a side, as observation; the environment has "
                f"{space}. Use --model {model_for(space)}."
            )
        assert isinstance(space, gym.spaces.Box)
        self.channels_first = space.shape[0] < space.shape[-1]
        C = space.shape[0] if self.channels_first else space.shape[-1]
        self.convs = make_convs(C)
        offset, scale = flat_ranges(space)
        self.offset = int(offset.min())
        self.scale = int((offset + scale).max()) - self.offset
        with torch.no_grad():
            _, C, H, W = self._convolve(torch.zeros(1, *space.shape)).shape
        # A linear layer over the whole map. As a convolution oneDNN runs it, on AMD
        # CPUs twice as fast as MKL runs nn.Linear.
        self.fc = orthogonal(nn.Conv2d(C, size, kernel_size=(H, W)))
        self.num_features = size
        self.to(memory_format=torch.channels_last)

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        if not self.channels_first:
            x = x.movedim(-1, 1)  # [N, C, H, W]
        x = x.contiguous(memory_format=torch.channels_last)  # Bytes move faster.
        if self.offset:
            x = x.float() - self.offset
        return self.convs(x.float() if self.scale == 1 else x / self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.fc(self._convolve(x)).flatten(1))


class SmallTorso(ImageTorso):
    """A convolution and two linear layers, for pictures as small as MinAtar's."""

    name = "small"
    min_side = 5

    def __init__(self, space: gym.Space):
        def convs(channels: int) -> nn.Module:
            return nn.Sequential(
                orthogonal(nn.Conv2d(channels, 16, kernel_size=3)),
                nn.ReLU(inplace=True),
            )

        super().__init__(space, convs, 256)
        self.last = orthogonal(nn.Linear(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.last(super().forward(x)))


class ShallowTorso(ImageTorso):
    """Three convolutions and a linear layer, as in Mnih et al. 2015 (Nature)."""

    name = "shallow"

    def __init__(self, space: gym.Space):
        def convs(channels: int) -> nn.Module:
            return nn.Sequential(
                orthogonal(nn.Conv2d(channels, 32, kernel_size=8, stride=4)),
                nn.ReLU(inplace=True),
                orthogonal(nn.Conv2d(32, 64, kernel_size=4, stride=2)),
                nn.ReLU(inplace=True),
                orthogonal(nn.Conv2d(64, 64, kernel_size=3, stride=1)),
                nn.ReLU(inplace=True),
            )

        super().__init__(space, convs, 512)


class DeepTorso(ImageTorso):
    """The 15 convolutions of Espeholt et al. 2018, figure 3 (right)."""

    name = "deep"

    def __init__(self, space: gym.Space):
        def convs(channels: int) -> nn.Module:
            sections = []
            for width in (16, 32, 32):
                sections += [
                    nn.Conv2d(channels, width, kernel_size=3, padding=1),
                    nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
                    ResidualBlock(width),
                    ResidualBlock(width),
                ]
                channels = width
            return nn.Sequential(*sections, nn.ReLU())

        super().__init__(space, convs, 256)


class ResidualBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class MLPTorso(nn.Module):
    """Two linear layers over all leaves of the observation, flattened side by side.

    Discrete and MultiDiscrete leaves become one-hot; integer boxes are scaled by the
    ranges of their elements.
    """

    num_features = MLP_SIZE

    def __init__(self, space: gym.Space):
        super().__init__()
        self.space = space
        offset, scale = torch.from_numpy(flat_ranges(space))
        self.is_scaled = bool(offset.any() or (scale != 1).any())
        # Integers: in a torso of bfloat16 they stay exact.
        self.register_buffer("offset", offset, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        size = gym.spaces.flatdim(space)
        self.layers = nn.Sequential(
            orthogonal(nn.Linear(size, MLP_SIZE)),
            nn.ReLU(),
            orthogonal(nn.Linear(MLP_SIZE, MLP_SIZE)),
            nn.ReLU(),
        )

    def forward(self, observation: Nest) -> torch.Tensor:
        x = torch.cat(list(flat_features(self.space, observation)), 1)
        if self.is_scaled:
            x = (x - self.offset) * self.scale.reciprocal()
        return self.layers(x)


TORSOS = {
    "deep": DeepTorso,
    "shallow": ShallowTorso,
    "small": SmallTorso,
    "mlp": MLPTorso,
}


def flat_features(space: gym.Space, x: Nest) -> Iterator[torch.Tensor]:
    """Yield one float tensor [N, features] for each leaf of a batch of observations."""
    match space:
        case gym.spaces.Dict():
            for key, sub in space.spaces.items():
                yield from flat_features(sub, x[key])
        case gym.spaces.Tuple():
            for sub, leaf in zip(space.spaces, x):
                yield from flat_features(sub, leaf)
        case gym.spaces.Discrete():
            yield F.one_hot(x - int(space.start), int(space.n)).float()
        case gym.spaces.MultiDiscrete():
            ranges = zip(space.start.flat, space.nvec.flat)
            for i, (start, n) in enumerate(ranges):
                yield F.one_hot(x.flatten(1)[:, i] - int(start), int(n)).float()
        case _:
            yield x.reshape(len(x), -1).float()


def create_env(flags: argparse.Namespace, render_mode: str | None = None) -> Any:
    """Return the environment that actors step. Edit this for your own.

    Anything that follows the Gymnasium (or the classic gym) interface will do. Rewards
    are not clipped here: the loss does that.

    Args:
      render_mode: None when training; "rgb_array" or "human" when testing.
    """
    if atari_wrappers.is_atari(flags.env):
        return atari_wrappers.make_atari(
            flags.env, **atari_options(flags), render_mode=render_mode
        )
    return environment.make(flags.env, render_mode=render_mode)


def atari_options(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the Atari protocol as the flags have it, for `atari_wrappers`."""
    given = {key: getattr(flags, key) for key in core.flags.ATARI_FLAGS}
    return atari_wrappers.protocol(
        given.pop("atari_protocol") or "impala",
        **{key: value for key, value in given.items() if value is not None},
    )


def env_options(flags: argparse.Namespace) -> dict[str, Any]:
    """Return how the environment is made, to be shown and recorded.

    --mode test takes over those that are ATARI_FLAGS.
    """
    if not atari_wrappers.is_atari(flags.env):
        return {}
    return {"atari_protocol": flags.atari_protocol or "impala", **atari_options(flags)}


def create_net(flags: argparse.Namespace, spaces: "Spaces") -> Net:
    return Net(
        spaces.observation,
        spaces.action,
        model=flags.model,
        use_lstm=flags.use_lstm,
        clip_rewards=flags.reward_clipping == "abs_one",
        bfloat16=flags.precision == "bfloat16",
    )


@dataclasses.dataclass(frozen=True)
class Spaces:
    """What an environment says and hears; read once, from one instance."""

    observation: gym.Space
    action: gym.Space


def read_spaces(flags: argparse.Namespace) -> Spaces:
    """Create one environment to ask for its spaces.

    Raises:
      ConfigError: there is no such environment, or nobody could learn it.
    """
    with limit_calls(flags.env_step_timeout_s) as clock:
        try:
            envs = environment.Environments(
                lambda: create_env(flags), 1, seed=0, clock=clock
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        with contextlib.closing(envs):
            return Spaces(envs.observation_space, envs.action_space)


def net_outputs(spaces: Spaces) -> dict[str, ArraySpec]:
    """Return what Net must say of each row of each environment."""
    f32 = np.dtype(np.float32)
    return {
        "policy_logits": ArraySpec((int(spaces.action.n),), f32),
        "baseline": ArraySpec((), f32),
    }


# ---------------------------------------------------------------------------- acting


class Actor:
    """Steps E environments with one copy of the network, a rollout at a time."""

    def __init__(
        self,
        flags: argparse.Namespace,
        net: Net,
        buffers: rollouts.RolloutBuffers,
        *,
        actor_id: int,
        incarnation: int,
        fetch: Callable[[], int],
        clock: np.ndarray,
    ):
        """Create the environments.

        Args:
          fetch: brings the newest weights into `net` and returns their version.
          clock: [1] float64, written here: since when (`time.monotonic`) the present
            call into an environment lasts, or the choice of actions; 0 while no
            buffer is being filled. In shared memory, the parent watches it.
        """
        E = flags.envs_per_actor
        self.envs = environment.Environments(
            lambda: create_env(flags),
            E,
            seed=flags.seed,
            first_env_id=actor_id * E,
            incarnation=incarnation,
            info_keys=flags.info_keys,
            seed_every_game=flags.serial,
            recycle_games=flags.recycle_games,
            clock=clock,
        )
        self.net = net
        self.state = net.initial_state(E)
        self.buffers = buffers
        # Carried from one rollout to the next: its last row is the next one's row 0.
        self.last_row = map_nest(lambda slab: slab[0, 0].copy(), buffers.rows)
        self.started = False
        # Seconds of the last rollout that the environments took, and the rest.
        self.env_s = self.agent_s = 0.0
        self._fetch = fetch
        self._clock = clock
        clock[0] = 0.0

    @torch.inference_mode()
    def unroll(self, index: int) -> None:
        """Fill buffer `index` with the next T steps of every environment."""
        started, env_s = time.monotonic(), 0.0
        self._clock[0] = started
        row = self.buffers.row(index, 0)
        if self.started:
            map_nest(np.copyto, row, self.last_row)
        else:
            self._first_row(row)
        for slab, state in zip(self.buffers.agent_state, self.state):
            slab[index] = state.numpy()
        T = self.buffers.unroll_length
        for t in range(T):
            version = self._fetch()
            outputs, self.state = self.net(as_tensors(row), self.state)
            row = self.buffers.row(index, t + 1)
            action = sample_action(outputs["policy_logits"]) + self.net.first_action
            row["policy_logits"][...] = outputs["policy_logits"][0].numpy()
            row["baseline"][...] = outputs["baseline"][0].numpy()
            row["action"][...] = action[0].numpy()
            row["policy_version"][...] = version
            began = time.monotonic()
            self.envs.step(row["action"], row)
            self._clock[0] = time.monotonic()
            env_s += self._clock[0] - began
        self._clock[0] = 0.0
        map_nest(np.copyto, self.last_row, row)
        self.env_s, self.agent_s = env_s, time.monotonic() - started - env_s

    def _first_row(self, row: Nest) -> None:
        for key in ("action", "policy_logits", "baseline", "policy_version"):
            row[key][...] = 0  # Nothing acted before the first row; nothing learns it.
        self.envs.reset(row)
        self.started = True


def as_tensors(row: Nest) -> Nest:
    """View what the network reads of one row, [E, ...], as tensors [1, E, ...]."""
    keys = ("observation", "reward", "done", "last_action")
    return map_nest(
        lambda x: torch.from_numpy(x).unsqueeze(0), {key: row[key] for key in keys}
    )


def sample_action(logits: torch.Tensor, *, greedy: bool = False) -> torch.Tensor:
    """Sample actions [T, B] int64, numbered from 0, from logits [T, B, A].

    Raises:
      FloatingPointError: the logits are not finite.
    """
    if greedy:
        return logits.argmax(-1)
    probabilities = F.softmax(logits.flatten(0, 1), dim=-1)
    try:
        flat = torch.multinomial(probabilities, num_samples=1)
    except RuntimeError as error:
        if torch.isfinite(probabilities).all():
            raise
        raise FloatingPointError(
            "no action can be sampled: the policy's logits are not finite. The weights "
            "of a run always are; check the environment's observations and rewards."
        ) from error
    return flat.view(logits.shape[:2])


def act(
    flags: argparse.Namespace,
    spaces: Spaces,
    actor_id: int,
    incarnation: int,
    pipe: connection.Connection,
    buffers: rollouts.RolloutBuffers,
    weights: rollouts.SharedWeights,
    clocks: rollouts.SharedArrays,
    output: connection.Connection,
) -> None:
    """Run one actor process: fill the buffers that the parent names, until it hangs up.

    The parent sends a buffer's index; back comes FULL when it is, or b"E" and a
    traceback, once, before the process ends with a non-zero status.
    """
    be_killed_first_for_memory()
    terminal.redirect_output(output)
    # The parent's to handle: it drains. Not SIG_IGN: what an environment starts would
    # inherit that.
    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda *_: None)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # A stall dumps the stacks.
    compute_on(1)
    let_learner_go_first()
    seed_rng(environment.env_seed(flags.seed, actor_id, incarnation, 0))
    try:
        net = create_net(flags, spaces)
        if net.bfloat16:
            net.torso.bfloat16()  # Or every forward pass would cast the weights.
        tensors = net.state_dict()  # Shares memory with the parameters.
        version = -1

        def fetch() -> int:
            nonlocal version
            version = weights.fetch(tensors, version)
            return version

        actor = Actor(
            flags,
            net,
            buffers,
            actor_id=actor_id,
            incarnation=incarnation,
            fetch=fetch,
            clock=clocks.arrays["clock"][actor_id : actor_id + 1],
        )
        with contextlib.closing(actor.envs):
            for index in requests(pipe):
                i = int.from_bytes(index, "little")
                actor.unroll(i)
                message = FULL.pack(b"F", i, actor.env_s, actor.agent_s)
                with contextlib.suppress(BrokenPipeError):  # It hung up meanwhile.
                    pipe.send_bytes(message)
    except BaseException:  # An environment's sys.exit() is a failure, too.
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(b"E" + traceback.format_exc().encode())
        sys.exit(1)


def requests(pipe: connection.Connection) -> Iterator[bytes]:
    """Yield what the parent sends, until it hangs up."""
    while True:
        try:
            yield pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            return


class ActorError(Exception):
    """An actor died too often; the message has its own traceback."""


class ActorsClosed(Exception):
    """The buffers are no longer handed out: the run is ending."""


@dataclasses.dataclass
class ActorSlot:
    """One actor's place: its present process, if any, and the buffers it holds."""

    actor_id: int
    budget: RestartBudget
    process: Unit | None = None
    pipe: connection.Connection | None = None
    held: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    last_served: int = 0  # When it was last handed a buffer, as a running number.
    restart_at: float | None = 0.0  # Monotonic seconds; None while it runs.
    reason: str | None = None  # Of its death, if more is known than the exit status.


class Actors:
    """The actor processes, and who has which rollout buffer.

    A buffer is free, held by one actor, full, or with a learner thread. Each actor has
    a pipe of its own and holds up to two buffers: the one it fills and its next. There
    is no lock that an actor could die with. A dead actor's finished rollouts count, its
    torn one does not: the buffer becomes free again and the process is replaced. One
    whose environment takes more than --env_step_timeout_s is killed.

    `poll`, `start` and `close` belong to the main thread (Linux ends a child together
    with the thread that started it); `take` and `give_back` to learner threads.
    """

    def __init__(
        self,
        flags: argparse.Namespace,
        spaces: Spaces,
        buffers: rollouts.RolloutBuffers,
        weights: rollouts.SharedWeights,
        *,
        first_incarnation: int,
        busy: metrics.BusyTime,
    ):
        self._flags = flags
        self._busy = busy
        # One clock for each actor: see `Actor`.
        shape = ArraySpec((flags.num_actors,), np.dtype(np.float64))
        clocks = rollouts.SharedArrays({"clock": shape})
        self._clock = clocks.arrays["clock"]
        self._output = terminal.ChildOutput()
        self._args = (buffers, weights, clocks, self._output.theirs)
        self._spaces = spaces
        self._incarnation = first_incarnation
        self._context = multiprocessing.get_context(flags.start_method)
        self._import: concurrent.futures.Future | None = None
        if flags.start_method == "forkserver":
            # Import torch once, in the server; actors are forked from there in no time.
            self._context.set_forkserver_preload(["core.fork_server", "monobeast"])
            forkserver.ensure_running()  # Here: it would end together with its thread.
            self._import = start_thread("fork-server", self._await_fork_server)
        self.slots = [ActorSlot(i, RestartBudget()) for i in range(flags.num_actors)]
        # Guards everything below, and the slots' `held` and `pipe`.
        self._changed = threading.Condition()
        self._free = collections.deque(range(buffers.num_buffers))
        self._full: collections.deque[int] = collections.deque()
        self._served = 0
        self._waiting = 0
        self._closed = False
        self.received = 0  # Full buffers, ever.
        self.discarded = 0  # Partial rollouts of dead actors, in buffers.
        self.restarts = 0

    def _await_fork_server(self) -> None:
        process = self._context.Process(target=int, daemon=True)
        process.start()  # Returns when the server has imported everything.
        process.join()

    def start(self) -> None:
        """Start every actor that is due, when the fork server is ready."""
        if self._import is not None and not self._import.done():
            return
        for slot in self.slots:
            if slot.restart_at is not None and time.monotonic() >= slot.restart_at:
                self._start(slot)
        self._output.start()  # A thread: after the first actors, that may be forked.

    def _start(self, slot: ActorSlot) -> None:
        # The first actors may be forked: there are no threads yet. Later on a fork
        # would copy a process whose other threads hold who knows which locks.
        context = self._context
        if self._flags.start_method == "fork" and threading.active_count() > 1:
            context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = Unit(
            context,
            act,
            (
                self._flags,
                self._spaces,
                slot.actor_id,
                self._incarnation,
                theirs,
                *self._args,
            ),
            name=f"actor-{slot.actor_id}",
        )
        self._incarnation += 1
        self._clock[slot.actor_id] = 0.0
        fork_server.keep_going()
        try:
            process.start()
        except (OSError, EOFError) as error:
            # Most likely the fork server has died; soon there will be another.
            wait_s = slot.budget.died()
            if wait_s is None:
                raise
            slot.restart_at = time.monotonic() + wait_s
            log.warning(
                "Actor %d could not be started (%r); trying again in %.1f s",
                slot.actor_id,
                error,
                wait_s,
            )
            return
        slot.process = process
        theirs.close()  # Or we would not see the actor's end of it close.
        slot.restart_at = slot.reason = None
        with self._changed:
            slot.pipe = ours
            self._hand_out()

    def _hand_out(self) -> None:
        """Give free buffers to the actors that hold the fewest. Needs the lock.

        Among equals the one that waits longest is first: when the learner is slow, all
        actors hold none, and each must get its turn.
        """
        while self._free and not self._closed:
            slot = min(
                (s for s in self.slots if s.pipe is not None and len(s.held) < 2),
                key=lambda s: (len(s.held), s.last_served),
                default=None,
            )
            if slot is None:
                return
            index = self._free.popleft()
            slot.held.append(index)
            self._served += 1
            slot.last_served = self._served
            with contextlib.suppress(OSError):  # It is dying; poll() will see to it.
                slot.pipe.send_bytes(index.to_bytes(4, "little"))

    def poll(self, timeout_s: float) -> None:
        """Wait for messages and deaths for up to `timeout_s`; act on them.

        Raises:
          ActorError: an actor has died too often without delivering a rollout.
        """
        by_handle = {s.process.sentinel: s for s in self.slots if s.process is not None}
        by_handle |= {s.pipe: s for s in self.slots if s.pipe is not None}
        for handle in connection.wait(list(by_handle), timeout_s):
            slot = by_handle[handle]
            if slot.pipe is not None:
                self._receive(slot)
            if slot.process is not None and handle == slot.process.sentinel:
                self._bury(slot)
        for slot in self.slots:
            self._check_progress(slot)
        self.start()

    def _check_progress(self, slot: ActorSlot) -> None:
        """Kill an actor whose environment takes too long."""
        if slot.process is None:
            return
        if kill_if_hung(
            f"Actor {slot.actor_id}",
            slot.process,
            self._clock[slot.actor_id],
            self._flags.env_step_timeout_s,
        ):
            slot.reason = "its environment hung"
            self._clock[slot.actor_id] = 0.0  # It may take a while to end.

    def _receive(self, slot: ActorSlot) -> None:
        assert slot.pipe is not None
        try:
            while slot.pipe.poll():
                message = slot.pipe.recv_bytes()
                if message[:1] == b"E":
                    slot.reason = message[1:].decode().strip()
                    continue
                _, index, env_s, agent_s = FULL.unpack(message)
                self._busy.add("env", env_s, workers=len(self.slots))
                self._busy.add("inference", agent_s, workers=len(self.slots))
                slot.budget.delivered()
                with self._changed:
                    assert slot.held[0] == index, (slot.actor_id, slot.held, index)
                    slot.held.popleft()
                    self._full.append(index)
                    self.received += 1
                    self._hand_out()
                    self._changed.notify_all()
        except (EOFError, OSError):
            fork_server.keep_going()  # Who tells of the end of what it has forked.
            with self._changed:  # The process is ending; its sentinel comes next.
                slot.pipe.close()
                slot.pipe = None

    def _bury(self, slot: ActorSlot) -> None:
        """Reclaim a dead actor's buffers and plan its replacement."""
        slot.process.join()
        reason = slot.reason or describe_exit(slot.process.exitcode)
        slot.process.close()
        slot.process = None
        with self._changed:
            if slot.pipe is not None:
                slot.pipe.close()
                slot.pipe = None
            if slot.held:
                self.discarded += 1
            self._free.extend(slot.held)
            slot.held.clear()
            self._hand_out()
        wait_s = slot.budget.died()
        if wait_s is None:
            raise ActorError(
                f"actor {slot.actor_id} died {slot.budget.quick_deaths} times in a row "
                f"without delivering a rollout; the last time: {reason}"
            )
        self.restarts += 1
        slot.restart_at = time.monotonic() + wait_s
        log.warning(
            "Actor %d died (%s); its rollout is discarded; restarting it in %.1f s",
            slot.actor_id,
            reason,
            wait_s,
        )

    def take(self, n: int) -> list[int]:
        """Return `n` full buffers, first come, first served. Blocks.

        Raises:
          ActorsClosed: `close` was called.
        """
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._closed or len(self._full) >= n)
            self._waiting -= 1
            if self._closed:
                raise ActorsClosed
            return [self._full.popleft() for _ in range(n)]

    def give_back(self, indices: list[int]) -> None:
        """Make buffers free again."""
        with self._changed:
            self._free.extend(indices)
            self._hand_out()

    def num_waiting(self) -> int:
        """Return the number of learner threads that wait in `take`."""
        return self._waiting

    def stats(self) -> dict[str, Any]:
        """Return the log's columns about actors."""
        return {
            "buffers_full": len(self._full) * self._flags.envs_per_actor,
            "actor_restarts": self.restarts,
            "rollouts_discarded": self.discarded,
        }

    def rows(self) -> tuple[int, dict[str, int]]:
        """Return the rows received, and those of them that were not taken."""
        rows = self._flags.unroll_length * self._flags.envs_per_actor
        return rows * self.received, {"in flight": rows * len(self._full)}

    def pids(self) -> list[int]:
        pids = [slot.process.pid for slot in self.slots if slot.process is not None]
        return [pid for pid in pids if pid is not None]

    def stop_handing_out(self) -> None:
        """Wake learner threads: `take` raises from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Hang up, and kill the actors that are not gone after ACTOR_EXIT_S."""
        self.stop_handing_out()
        with self._changed:
            for slot in self.slots:
                if slot.pipe is not None:
                    slot.pipe.close()
                    slot.pipe = None
        fork_server.keep_going()
        processes = [s.process for s in self.slots if s.process is not None]
        deadline = time.monotonic() + ACTOR_EXIT_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
        for process in processes:
            process.join()


# -------------------------------------------------------------------------- learning


def create_learner(flags: argparse.Namespace, spaces: Spaces) -> Learner:
    device = "cuda" if has_gpu(flags) else "cpu"
    net = create_net(flags, spaces).to(device)
    optimizer = torch.optim.RMSprop(
        net.parameters(),
        lr=flags.learning_rate,
        alpha=flags.alpha,
        eps=flags.epsilon,
        momentum=flags.momentum,
        foreach=True,
    )
    gradient = functools.partial(compute_gradient, flags, net)
    if flags.cuda_graphs:
        gradient = gpu.Graphs(gradient, device)
    return Learner(net, [optimizer], gradient, flags)


def compute_gradient(
    flags: argparse.Namespace,
    net: Net,
    rows: Nest,
    state: tuple[torch.Tensor, ...],
) -> list[losses.ImpalaLoss]:
    """Set the gradient of a batch's loss; return the losses of its groups of columns.

    Args:
      rows: [T + 1, B, ...] as the table in `core.rollouts` says, on net's device.
      state: the recurrent state before row 0, [layers, B, hidden] each.
    """
    parts = []
    # A graph goes on writing to the tensors that it was recorded with.
    net.zero_grad(set_to_none=not flags.cuda_graphs)
    # The loss is a sum over columns, and so is its gradient.
    for rows_part, state_part in losses.split_columns(rows, state):
        outputs, _ = net(rows_part, state_part)
        part = losses.impala_loss(
            outputs,
            {**rows_part, "action": rows_part["action"] - net.first_action},
            discounting=flags.discounting,
            baseline_cost=flags.baseline_cost,
            entropy_cost=flags.entropy_cost,
            reward_clipping=flags.reward_clipping,
        )
        part.total_loss.backward()
        parts.append(part)
    return parts


def learn(
    flags: argparse.Namespace,
    learner: Learner,
    batch: Nest,
    agent_state: tuple[np.ndarray, ...],
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Do one IMPALA update on a batch of rollouts.

    Args:
      batch: numpy, [T + 1, B, ...] as the table in `core.rollouts` says.
      agent_state: the recurrent state before row 0, [layers, B, hidden] each.
      stream: copies to a GPU, while another thread's update goes on.
    """
    net = learner.net
    device = next(net.parameters()).device
    with gpu.in_stream(stream):
        rows, state = map_nest(
            lambda x: torch.from_numpy(x).to(device, non_blocking=True),
            (batch, agent_state),
        )
    with (
        learner.lock,
        learner.busy.measure("learner"),
        naming_memory(batch, net),
    ):
        if learner.finished() or learner.failed:
            learner.leave(batch)  # Another thread did the last update meanwhile.
            return
        fresh = learner.fresh_columns(batch)
        if fresh is not None:
            batch, rows, state = (
                map_nest(lambda x: x[:, fresh], part) for part in (batch, rows, state)
            )
            if not fresh.size:
                return
        parts = learner.gradient(rows, state)
        learner.update(parts, batch)


def learn_loop(
    flags: argparse.Namespace,
    learner: Learner,
    actors: Actors,
    buffers: rollouts.RolloutBuffers,
    weights: rollouts.SharedWeights,
) -> None:
    """Run one learner thread: take full buffers, copy them, give them back, learn."""
    compute_on(flags.learner_cores)
    n = flags.batch_size // flags.envs_per_actor
    tensors = learner.net.state_dict()
    device = next(learner.net.parameters()).device
    stream = gpu.create_stream(device)
    empty = np.empty if stream is None else gpu.empty_page_locked
    assembler = rollouts.BatchAssembler(buffers, n, empty)
    while True:
        try:
            indices = actors.take(n)
        except ActorsClosed:
            return
        assembler.fill(indices)
        actors.give_back(indices)
        learn(flags, learner, assembler.batch, assembler.agent_state, stream)
        with learner.lock:
            weights.publish(tensors, learner.updates)


# ------------------------------------------------------------------------------- run


def rollout_specs(
    flags: argparse.Namespace, spaces: Spaces, net: Net
) -> tuple[Nest, list[ArraySpec]]:
    """Return the specs of one row, environment's and agent's part, and of the state."""
    row = row_spec(spaces.observation, spaces.action, flags.info_keys)
    f32, i64 = np.dtype(np.float32), np.dtype(np.int64)
    row |= {
        "action": row["last_action"],
        **net_outputs(spaces),
        "policy_version": ArraySpec((), i64),
    }
    state = net.initial_state(flags.envs_per_actor)
    return row, [ArraySpec(tuple(s.shape), f32) for s in state]


def create_buffers(
    flags: argparse.Namespace, spaces: Spaces, net: Net
) -> rollouts.RolloutBuffers:
    """Check that the machine has what the run needs, say so, and allocate."""
    row, state = rollout_specs(flags, spaces, net)
    sizes = {
        "num_buffers": math.ceil(flags.num_buffers / flags.envs_per_actor),
        "unroll_length": flags.unroll_length,
        "envs_per_actor": flags.envs_per_actor,
    }
    weights = sum(t.numel() * t.element_size() for t in net.state_dict().values())
    for line in check_resources(
        shared_bytes=rollouts.nbytes(rollouts.buffer_specs(row, state, **sizes))
        + weights,
        memory_folder=rollouts.memory_folder(),
        files=64 + 8 * flags.num_actors,
        processes=1 if flags.serial else flags.num_actors + 1,
    ):
        log.info("Preflight: %s", line)
    return rollouts.RolloutBuffers(row, state, **sizes)


def train(flags: argparse.Namespace) -> Exit:
    """Train until --total_steps, a signal or a failure; a checkpoint is left behind."""
    if not flags.serial:
        check_main_file()
    keep_freed_memory()
    spaces = read_spaces(flags)  # First: a misspelt --env leaves no run behind.
    run_dir = metrics.prepare_run_dir(Path(flags.savedir), flags.xpid)
    with metrics.setup_logging(run_dir), StopSignal() as stop:
        recorded = (
            metrics.read_meta(run_dir) if (run_dir / "meta.json").exists() else {}
        )
        if flags.seed is None:
            flags.seed = recorded.get("flags", {}).get("seed", secrets.randbelow(2**31))
        seed_rng(flags.seed)
        learner = create_learner(flags, spaces)
        options = env_options(flags)
        dry_run(learner.net, spaces.observation, spaces.action, net_outputs(spaces))
        run = Run(
            flags,
            run_dir,
            learner,
            frames_per_step=options.get("frame_skip", 1),  # 1 without an emulator.
            in_turn=True,
            in_background=not flags.serial,
        )
        found = run.resume()
        describe(flags, run_dir, spaces, learner)
        log_options(options, recorded)
        if learner.finished():
            log.info(
                "Nothing to do: run %s is at step %d of --total_steps %d.",
                flags.xpid,
                learner.step,
                flags.total_steps,
            )
            return Exit.DONE
        # Actors of this start must not replay the games of the starts before it.
        incarnation = 0 if flags.serial else len(recorded.get("starts", [])) << 16
        metrics.write_meta(
            run_dir,
            flags=vars(flags),
            extra={
                "step": learner.step,
                "env_options": options,
                "first_env_seeds": first_env_seeds(flags, incarnation),
            },
        )
        buffers = create_buffers(flags, spaces, learner.net)
        if flags.serial:
            actors = create_serial_actors(flags, learner, buffers)
            run.extra_state = lambda: serial_state(actors)
            if found is not None:
                restore_serial(flags, actors, found)
        with run.open(resumed=found is not None):
            if flags.serial:
                train_serial(run, actors, buffers, stop)
            else:
                train_async(run, spaces, buffers, stop, incarnation)
        if stop.received is not None and not learner.finished():
            log.info(
                "Stopped by %s at step %d. The same command goes on from there.",
                stop.received.name,
                learner.step,
            )
            return Exit.STOPPED
        log.info("Done: %d steps.", learner.step)
        return Exit.DONE


def first_env_seeds(flags: argparse.Namespace, incarnation: int) -> list[int]:
    """Return the seed of each environment's first game in this start of the run."""
    E = flags.envs_per_actor
    return [
        # Actors are numbered in the order in which they start: see `Actors._start`.
        environment.env_seed(
            flags.seed, i, incarnation + (0 if flags.serial else i // E), 0
        )
        for i in range(flags.num_actors * E)
    ]


def describe(
    flags: argparse.Namespace, run_dir: Path, spaces: Spaces, learner: Learner
) -> None:
    """Say at the start what is about to run."""
    torso = getattr(learner.net, "torso", learner.net)  # A fork's Net may have none.
    log.info("Run %s in %s, seed %d", flags.xpid, run_dir, flags.seed)
    log.info("Environment %s: %s, %s", flags.env, spaces.observation, spaces.action)
    log.info(core.flags.describe_actors(flags))
    log.info(
        "Network %s, %d parameters, on %s",
        type(torso).__name__ + (" + LSTM" if flags.use_lstm else ""),
        sum(p.numel() for p in learner.net.parameters()),
        next(learner.net.parameters()).device,
    )


def train_async(
    run: Run,
    spaces: Spaces,
    buffers: rollouts.RolloutBuffers,
    stop: StopSignal,
    first_incarnation: int,
) -> None:
    """Train with actor processes and learner threads; the main thread keeps watch."""
    flags, learner = run.flags, run.learner
    tensors = learner.net.state_dict()
    weights = rollouts.SharedWeights(
        {
            name: ArraySpec(tuple(t.shape), t.new_empty(0).cpu().numpy().dtype)
            for name, t in tensors.items()
        }
    )
    weights.publish(tensors, learner.updates)
    actors = Actors(
        flags,
        spaces,
        buffers,
        weights,
        first_incarnation=first_incarnation,
        busy=learner.busy,
    )
    watchdog = Watchdog(flags.stall_timeout_s, flags.on_stall)
    threads: dict[str, concurrent.futures.Future] = {}
    try:
        actors.start()
        for i in range(flags.num_learner_threads):
            threads[f"learner-{i}"] = start_thread(
                f"learner-{i}", learn_loop, flags, learner, actors, buffers, weights
            )
        run.log({})
        while stop.received is None and not learner.finished():
            actors.poll(TICK_S)
            for thread in threads.values():
                if thread.done():
                    thread.result()  # Raises what the thread died of.
            run.tick(actors.stats())
            watchdog.progress(f"step {learner.step}", lambda: stage(flags, actors))
    finally:
        watchdog.close()
        actors.stop_handing_out()
        join_threads(threads, LEARNER_JOIN_S)
        actors.close()
    for thread in threads.values():
        if thread.done():
            thread.result()  # A failure of the last moment is one, too.
    run.log(actors.stats())  # Now that the last update is done.
    check_ledger(learner, *actors.rows())


def stage(flags: argparse.Namespace, actors: Actors) -> str:
    """Say what a run that stands still waits for; the actors show their stacks."""
    for pid in actors.pids():
        show_stacks(pid)
    full = actors.stats()["buffers_full"]
    waits = full >= flags.batch_size
    return f"{'the learner' if waits else 'the actors'} ({full} rollouts wait)"


# ---------------------------------------------------------------------------- serial


def create_serial_actors(
    flags: argparse.Namespace, learner: Learner, buffers: rollouts.RolloutBuffers
) -> list[Actor]:
    """Return the actors of --serial; they act with the learner's own network."""
    if next(learner.net.parameters()).is_cuda:
        raise ConfigError("--serial runs on the CPU; add --disable_cuda.")
    return [
        Actor(
            flags,
            learner.net,
            buffers,
            actor_id=i,
            incarnation=0,
            fetch=lambda: learner.updates,
            clock=np.zeros(1),
        )
        for i in range(flags.num_actors)
    ]


def train_serial(
    run: Run, actors: list[Actor], buffers: rollouts.RolloutBuffers, stop: StopSignal
) -> None:
    """Train in this thread alone: the actors take turns, then the learner learns.

    The rollouts of update u come from actors u*n, u*n + 1, ... (modulo their number),
    so that a resumed run deals them out as the unbroken one would.
    """
    flags, learner = run.flags, run.learner
    compute_on(flags.learner_cores)
    n = flags.batch_size // flags.envs_per_actor
    assembler = rollouts.BatchAssembler(buffers, n)
    watchdog = Watchdog(flags.stall_timeout_s)
    # Whoever sits at the terminal may be in pdb, and sees what does not go on.
    is_alone = sys.stdin is None or not sys.stdin.isatty()
    try:
        while stop.received is None and not learner.finished():
            if is_alone:
                watchdog.progress(f"step {learner.step}")
            turn = n * (learner.updates + learner.skipped)
            for i in range(n):
                actor = actors[(turn + i) % len(actors)]
                actor.unroll(i)
                learner.busy.add("env", actor.env_s)
                learner.busy.add("inference", actor.agent_s)
            assembler.fill(range(n))
            learn(flags, learner, assembler.batch, assembler.agent_state)
            run.tick({})
    finally:
        watchdog.close()
    run.log({})


def serial_state(actors: list[Actor]) -> tuple[dict[str, Any], dict[str, dict]]:
    """Return what a checkpoint of a serial run holds beyond the learner."""
    tensors = {}
    for i, actor in enumerate(actors):
        for name, array in leaves(actor.last_row):
            tensors[f"{i}/row/{name}"] = torch.from_numpy(array.copy())
        for j, state in enumerate(actor.state):
            tensors[f"{i}/state/{j}"] = state.clone()
    state = {
        "actors": [
            {"started": a.started, "envs": a.envs.state() if a.started else None}
            for a in actors
        ]
    }
    return state, {"actors": tensors}


def restore_serial(
    flags: argparse.Namespace, actors: list[Actor], found: checkpoint.Checkpoint
) -> None:
    """Bring the actors back to where the checkpoint left them, bit by bit.

    Environments cannot be saved, so each current game is played again: same seed, same
    actions.
    """
    trained = {"serial": False, **found.state["flags"]}  # PolyBeast's have no such.
    trained["info_keys"] = tuple(trained["info_keys"])  # JSON has only lists.
    for key in ("serial", "seed", "num_actors", "envs_per_actor", "info_keys"):
        if trained.get(key) != getattr(flags, key):
            raise ConfigError(
                f"--{key} is {getattr(flags, key)} but run {flags.xpid} was trained "
                f"with {trained[key]}, and --serial goes on exactly or not at all. "
                f"Choose another --xpid, or leave --{key} as it was."
            )
    saved = found.state["actors"]
    tensors = found.tensors["actors"]
    for i, (actor, old) in enumerate(zip(actors, saved)):
        if not old["started"]:
            continue
        for name, array in leaves(actor.last_row):
            array[...] = tensors[f"{i}/row/{name}"].numpy()
        actor.state = tuple(tensors[f"{i}/state/{j}"] for j in range(len(actor.state)))
        actor.envs.restore(old["envs"], actor.last_row)
        actor.started = True


# ------------------------------------------------------------------------------ test


def test(flags: argparse.Namespace) -> Exit:
    """Play --num_episodes full games with a run's newest checkpoint; report returns."""

    def policy(net: Net) -> evaluation.Policy:
        @torch.inference_mode()
        def act(row: Nest, state: Any) -> tuple[np.ndarray, Any]:
            outputs, state = net(as_tensors(row), state)
            action = sample_action(outputs["policy_logits"], greedy=flags.greedy)
            return action[0].numpy() + net.first_action, state

        return act

    evaluation.test_run(
        flags,
        create_envs=lambda render_mode, **options: environment.Environments(
            lambda: create_env(flags, render_mode), 1, **options
        ),
        create_net=lambda obs, action: create_net(flags, Spaces(obs, action)),
        policy=policy,
    )
    return Exit.DONE


def main(argv: Sequence[str] | None = None) -> int:
    return run_program(parse_flags, train, test, argv)


if __name__ == "__main__":
    sys.exit(main())
