# SPDX-License-Identifier: Apache-2.0
"""PolyBeast: IMPALA (Espeholt et al. 2018) with environments on any machine.

    python -m polybeast --env PongNoFrameskip-v4
    python -m polybeast --server_addresses host1:4431-4446,host2:4431-4446 \\
        --tls_dir certs/learner

Environment servers (polybeast_env.py) step environments and send what they see; this
process, the learner, chooses all actions and learns. The actor pool between them is C++
(csrc/): it moves rows and holds no GIL; all machine learning is here.

     polybeast_env.py, many processes                  polybeast.py, one process
    ┌──────────────────────┐  gRPC stream   ┌──────────────────────────────────────────┐
    │ K environments       │  Step[K]  ───► │ ActorPool ── rows ──► DynamicBatcher     │
    │                      │                │     │   ▲                  │             │
    │                      │  ◄── Action[K] │     │   └── actions ── inference threads │
    └──────────────────────┘                │     ▼                        ▲           │
                                            │ BatchingQueue            weights         │
                                            │     └── [T+1, B] ──► learner threads     │
                                            └──────────────────────────────────────────┘

To train your own agent edit Net here; for your own environment edit create_env in
polybeast_env.py. Sizes travel from the servers to the learner by themselves.
"""

import os
import signal

# One thread per process unless told otherwise (torch reads this when it is imported):
# inference, learner and environments share the cores, and spinning OpenMP threads would
# steal them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What gRPC finds worth printing is told here in better words.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

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
import copy
import dataclasses
import functools
import itertools
import logging
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import core.flags
import libtorchbeast
import nest
import polybeast_env
from core import environment, evaluation, gpu, losses, metrics, terminal, tls, wire
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
    RECORD_BYTES,
    ConfigError,
    Exit,
    RestartBudget,
    StopSignal,
    Watchdog,
    available_memory,
    continue_if_stopped,
    describe_exit,
    from_child,
    join_threads,
    keep_freed_memory,
    let_learner_go_first,
    num_cores,
    start_thread,
)

log = logging.getLogger("polybeast")

TICK_S = 0.2  # The main loop looks at signals, failures and clocks at least this often.
JOIN_S = 30.0  # An update of the largest batch on one core, with room.
DESCRIBE_S = 2.0  # For a server to say what it serves; asked again until one does.
MAX_REFUSALS = 5  # Of our certificate, in a row, by one server; then it is no accident.
SERVERS_EXIT_S = 3.0  # For local servers' goodbyes; then they are killed.
SAY_WAITING_S = 10.0
NO_SERVER_S = 30.0  # Between two warnings that no server is connected.
# Beyond --env_step_timeout_s, for a server's own supervisor to end what hangs.
SUPERVISOR_S = 2.0
MAX_INFERENCE_BATCH = 1024
UNTRACED_UPDATES = 5  # The first ones are slower.
TRACED_UPDATES = 3
# What the network reads of a row.
NET_INPUTS = ("observation", "reward", "done", "last_action")


# ---------------------------------------------------------------------------- flags


def parse_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; exits with status 2 if something is wrong."""
    parser = make_parser()
    return check_flags(parser, core.flags.parse(parser, argv))


def make_parser() -> argparse.ArgumentParser:
    parser = core.flags.Parser(
        prog="python -m polybeast",
        description="IMPALA with environments on any machine.",
        formatter_class=core.flags.HelpFormatter,
    )
    whole = core.flags.whole
    core.flags.add_run_flags(parser)
    core.flags.add_environment_flags(parser)

    servers = parser.add_argument_group("environment servers")
    servers.add_argument(
        "--server_addresses",
        type=core.flags.addresses,
        metavar="ADDRESSES",
        help="servers that run already, a comma list: host:port, host:4431-4446, "
        "unix:/path, unix:/path.0-15. Default: this program starts servers of its own "
        "and ends them",
    )
    core.flags.add_server_flags(servers)
    servers.add_argument(
        "--num_actors",
        type=whole(1),
        metavar="A",
        help="environments of the local servers, all together; must be --num_servers x "
        "--streams_per_server x --envs_per_stream. As in TorchBeast each has a server "
        "process of its own, unless these flags say otherwise",
    )
    inference = parser.add_argument_group("inference")
    inference.add_argument(
        "--num_inference_threads",
        type=whole(1),
        help="threads that choose actions, each with a copy of the network. Default: 2 "
        "on a GPU, where one copies while the other computes; else one for 4 cores",
    )
    inference.add_argument(
        "--actor_device",
        help="torch device of inference. Default: the second GPU, the only one, or cpu",
    )
    core.flags.add_learner_flags(parser)
    learner = parser.add_argument_group("learner, PolyBeast only")
    learner.add_argument(
        "--learner_device",
        help="torch device of the learner. Default: the first GPU, or cpu",
    )
    learner.add_argument(
        "--max_learner_queue_size",
        type=whole(1),
        metavar="N",
        help="rollouts that may wait for the learner while their environments go on. "
        "Default: --batch_size",
    )
    learner.add_argument(
        "--write_profiler_trace",
        action="store_true",
        help="write a chrome trace of some updates to the run's folder",
    )
    core.flags.add_loss_flags(parser)
    core.flags.add_optimizer_flags(parser)
    return parser


def check_flags(
    parser: argparse.ArgumentParser, flags: argparse.Namespace
) -> argparse.Namespace:
    """Fill in defaults that depend on other flags and refuse what cannot work."""
    is_atari = True
    with contextlib.suppress(ValueError):  # No such environment; its server will say.
        is_atari = flags.env is None or polybeast_env.is_atari(flags.env)
    core.flags.check_common(parser, flags, is_atari=is_atari)
    polybeast_env.check_recycling(parser, flags)
    if flags.num_learner_threads is None:
        flags.num_learner_threads = 2
    if flags.max_learner_queue_size is None:
        flags.max_learner_queue_size = flags.batch_size
    if flags.max_learner_queue_size < flags.batch_size:
        parser.error(
            f"--max_learner_queue_size is {flags.max_learner_queue_size} but must be "
            f"at least --batch_size ({flags.batch_size}), or no batch is ever full."
        )
    for name in ("learner_device", "actor_device"):
        check_device(parser, flags, name)
    on_gpu = flags.actor_device.startswith("cuda")
    if flags.cuda_graphs and not on_gpu and not records_gradient(flags):
        parser.error(
            "--cuda_graphs is set, but there is nothing to record: inference is on the "
            "CPU, and so is the learner, or it has --use_lstm. Leave it out, or use a "
            "GPU (--learner_device, --actor_device)."
        )
    if flags.num_inference_threads is None:
        # Fewer on the CPU: threads that run small operations fight over Python's lock.
        on_cpu = flags.actor_device.startswith("cpu")
        flags.num_inference_threads = max(1, num_cores() // 4) if on_cpu else 2
    core.flags.check_tls_flags(parser, flags, flags.server_addresses or ())
    if flags.server_addresses is not None:
        for name in (*core.flags.SERVER_FLAGS, "num_actors", "pipes_basename"):
            # The servers know what they serve; --env, where given, must agree.
            ours = ("env", "env_step_timeout_s", "keepalive_s")
            if name not in ours and getattr(flags, name) != parser.get_default(name):
                parser.error(
                    f"--{name} is {getattr(flags, name)} but --server_addresses names "
                    "servers that run already, with settings of their own. Give it to "
                    "python -m polybeast_env, or leave --server_addresses out."
                )
        public = [a for a in flags.server_addresses if tls.is_public(a)]
        if public and flags.mode == "train" and not (flags.tls_dir or flags.insecure):
            parser.error(
                f"--server_addresses has {public[0]}, which is another machine's. "
                "Either encrypt the traffic and check who is there: --tls_dir DIR, "
                f"with a folder that {tls.CERTS_COMMAND} has made. Or let whoever is "
                "on the way read and change it: --insecure."
            )
        return flags
    if not (flags.pipes_basename or "unix:").startswith("unix:"):
        parser.error(
            f"--pipes_basename is {flags.pipes_basename} but must be unix:/path. For "
            "TCP start python -m polybeast_env and use --server_addresses."
        )
    set_num_servers(parser, flags)
    B, K = flags.batch_size, flags.envs_per_stream
    if B % K:
        parser.error(
            f"--batch_size is {B} but must be a multiple of --envs_per_stream ({K}): "
            f"a stream makes {K} rollouts at a time. Try --envs_per_stream "
            f"{core.flags.divisor(B, at_most=K)}."
        )
    return flags


def records_gradient(flags: argparse.Namespace) -> bool:
    """Say whether --cuda_graphs can; an LSTM's depends on where episodes end."""
    return flags.learner_device.startswith("cuda") and not flags.use_lstm


def check_device(
    parser: argparse.ArgumentParser, flags: argparse.Namespace, name: str
) -> None:
    device = getattr(flags, name)
    num_gpus = 0 if flags.disable_cuda else torch.cuda.device_count()
    if device is None:
        gpu = min(1, num_gpus - 1) if name == "actor_device" else 0
        setattr(flags, name, f"cuda:{gpu}" if num_gpus else "cpu")
        return
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        parser.error(f"--{name} is {device!r}: {error}")
    if parsed.type == "cuda" and (parsed.index or 0) >= num_gpus:
        why = " with --disable_cuda" if flags.disable_cuda else ""
        parser.error(
            f"--{name} is {device} but torch sees {num_gpus} GPUs{why}. Try --{name} "
            "cpu, or leave it out."
        )


def set_num_servers(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Work out how many local servers, streams and environments there are."""
    A = flags.num_actors
    sizes = (flags.streams_per_server, flags.envs_per_stream)
    if A is not None and sizes == (None, None) and flags.num_servers in (None, A):
        flags.num_servers, flags.streams_per_server, flags.envs_per_stream = A, 1, 1
        return
    if flags.envs_per_stream is None:
        flags.envs_per_stream = core.flags.divisor(
            flags.batch_size, at_most=polybeast_env.ENVS_PER_STREAM
        )
    if flags.streams_per_server is None:
        flags.streams_per_server = polybeast_env.STREAMS_PER_SERVER
    per_server = flags.streams_per_server * flags.envs_per_stream
    if flags.num_servers is None:
        flags.num_servers = num_cores() if A is None else max(1, A // per_server)
    total = flags.num_servers * per_server
    if A is not None and A != total:
        parser.error(
            f"--num_actors is {A} but --num_servers ({flags.num_servers}) x "
            f"--streams_per_server ({flags.streams_per_server}) x --envs_per_stream "
            f"({flags.envs_per_stream}) is {total}. Leave --num_actors out."
        )
    flags.num_actors = total


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


def net_outputs(spaces: Spaces) -> dict[str, ArraySpec]:
    """Return what Net must say of each row of each environment."""
    f32 = np.dtype(np.float32)
    return {
        "policy_logits": ArraySpec((int(spaces.action.n),), f32),
        "baseline": ArraySpec((), f32),
    }


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


# ------------------------------------------------------------------------- inference


class Weights:
    """The newest weights, on their way from the learner to the inference threads.

    Each inference thread has a network of its own and fetches what is new between two
    batches, so that neither side ever waits for the other's forward or backward pass.
    """

    def __init__(self, net: nn.Module, device: str):
        self._device = device
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._tensors = {
            name: tensor.detach().to(device, copy=True)
            for name, tensor in net.state_dict().items()
        }
        self._version = -1

    def publish(self, net: nn.Module, version: int) -> None:
        """Hand out the weights of `net` as `version` from now on."""
        with self._lock:
            for name, tensor in net.state_dict().items():
                self._tensors[name].copy_(tensor)
            gpu.wait_for(self._device)  # Others read them in streams of their own.
            self._version = version

    def fetch(self, net: nn.Module, have: int) -> int:
        """Copy the newest weights into `net` if it lacks them; return their version."""
        if self._version == have:
            return have
        with self._lock:
            for name, tensor in net.state_dict().items():
                tensor.copy_(self._tensors[name])
            gpu.wait_for(self._device)  # Then the learner may write the next ones.
            return self._version


@torch.inference_mode()
def inference(
    flags: argparse.Namespace,
    net: Net,
    weights: Weights,
    inference_batcher: libtorchbeast.DynamicBatcher,
    busy: metrics.BusyTime,
) -> None:
    """Choose actions for all environments that wait, batch after batch.

    Runs in each inference thread. In the paper each actor does this for its own
    environment; here whatever has arrived meanwhile makes a batch.
    """
    # Threads side by side lose less time than wide ones do in step, and leave the
    # learner its cores.
    compute_on(1)
    # A learner on every core would hardly let this thread run, and one on a GPU needs
    # few; outside Linux this would be for all threads.
    on_cpu = flags.learner_device.startswith("cpu")
    if on_cpu and flags.learner_cores < num_cores() and sys.platform == "linux":
        let_learner_go_first()
    stream = gpu.create_stream(flags.actor_device, urgent=True)
    forward = net
    if flags.cuda_graphs and stream is not None:
        forward = gpu.Graphs(net, flags.actor_device, pad=True)
    version = -1
    for batch in inference_batcher:
        with (
            torch.profiler.record_function("inference"),
            busy.measure("inference", workers=flags.num_inference_threads),
        ):
            with gpu.in_stream(stream):
                version = weights.fetch(net, version)
                rows, agent_state = nest.map(
                    lambda t: t.to(flags.actor_device, non_blocking=True),
                    batch.get_inputs(),
                )
                outputs, agent_state = nest.map(
                    lambda t: t.to("cpu", non_blocking=True),
                    forward(rows, agent_state),
                )
            choose_actions(outputs, net.first_action, version)
            batch.set_outputs((outputs, agent_state))


def choose_actions(
    outputs: dict[str, torch.Tensor], first_action: int, version: int
) -> None:
    """Complete the agent's part of the next rows: add what is chosen, and by whom.

    On the CPU: on a GPU a NaN would end all work of this process there, and with it the
    last checkpoint.

    Args:
      outputs: of Net, for N rows, [1, N, ...].
      version: of Net's weights.
    """
    outputs["action"] = sample_action(outputs["policy_logits"]) + first_action
    outputs["policy_version"] = torch.full(outputs["action"].shape, version)


# -------------------------------------------------------------------------- learning


def create_learner(flags: argparse.Namespace, spaces: Spaces) -> Learner:
    net = create_net(flags, spaces).to(flags.learner_device)
    optimizer = torch.optim.RMSprop(
        net.parameters(),
        lr=flags.learning_rate,
        alpha=flags.alpha,
        eps=flags.epsilon,
        momentum=flags.momentum,
        foreach=True,
    )
    gradient = functools.partial(compute_gradient, flags, net)
    if flags.cuda_graphs and records_gradient(flags):
        gradient = gpu.Graphs(gradient, flags.learner_device)
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
    agent_state: tuple[torch.Tensor, ...],
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Do one IMPALA update on a batch of rollouts.

    Args:
      batch: [T + 1, B, ...] as the table in `core.rollouts` says, on the CPU.
      agent_state: the recurrent state before row 0, [layers, B, hidden] each.
      stream: copies to a GPU, while another thread's update goes on.
    """
    net = learner.net
    with gpu.in_stream(stream):
        rows, state = nest.map(
            lambda t: t.to(flags.learner_device, non_blocking=True),
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
        learner.update(parts, map_nest(lambda t: t.numpy(), batch))


def learn_loop(
    flags: argparse.Namespace,
    learner: Learner,
    weights: Weights,
    learner_queue: libtorchbeast.BatchingQueue,
) -> None:
    """Run one learner thread: take a batch of rollouts, learn, publish the weights."""
    compute_on(flags.learner_cores)
    stream = gpu.create_stream(flags.learner_device)
    for (env_rows, agent_rows), agent_state in learner_queue:
        with torch.profiler.record_function("learn"):
            learn(flags, learner, {**env_rows, **agent_rows}, agent_state, stream)
        with learner.lock:
            weights.publish(learner.net, learner.updates)


# ------------------------------------------------------------------------------- run


class LocalServers:
    """Environment servers on this machine, in processes that end with this one.

    Their sockets are in a private folder, unless --pipes_basename says otherwise. A
    context manager.
    """

    def __init__(self, flags: argparse.Namespace):
        self._folder = None
        basename = flags.pipes_basename
        command = [sys.executable, "-m", "polybeast_env", "--with_parent"]
        if basename is None:
            self._folder = tempfile.mkdtemp(prefix="torchbeast-")  # Mode 0700.
            basename = f"unix:{self._folder}/env"
            command += ["--remove_folder"]  # Should this process be killed.
        self.addresses = tuple(f"{basename}.{i}" for i in range(flags.num_servers))
        command += core.flags.to_argv(flags, core.flags.SERVER_FLAGS)
        command += ["--pipes_basename", basename]
        self._command = command
        self._budget = RestartBudget()
        self._delivered = 0  # Steps, when the present supervisor started.
        self._restart_at: float | None = None  # Monotonic; None while it runs.
        self._last_line = ""
        self._start()

    def _start(self) -> None:
        # A session of its own: Ctrl-C is for this process, which then ends theirs. And
        # Linux shares the cores out by sessions first: that suits both.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,  # It closes with this process, whatever ends it.
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = start_thread("env-servers", self._log_lines, self._process)

    def __enter__(self) -> "LocalServers":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(SERVERS_EXIT_S)
        except subprocess.TimeoutExpired:
            log.error(
                "The environment servers did not stop within %g s", SERVERS_EXIT_S
            )
            self._process.kill()
            self._process.wait()
        concurrent.futures.wait([self._reader], TICK_S)  # For their last words.
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _log_lines(self, process: subprocess.Popen) -> None:
        for line in terminal.lines_of(process.stdout.fileno(), RECORD_BYTES):
            level, text = from_child(line)
            self._last_line = text or self._last_line
            log.log(level, "%s", text)

    def check(self, received: int = 0) -> None:
        """Replace the servers' supervisor if it was killed; servers end with theirs.

        Args:
          received: steps that have come from the servers so far.

        Raises:
          ConfigError: they cannot serve this environment.
          RuntimeError: they failed, or the supervisor was killed too often.
        """
        if self._restart_at is not None:
            late_s = time.monotonic() - self._restart_at
            # Their output closes with the last of the old servers, whose addresses the
            # new ones take.
            if late_s >= 0 and (self._reader.done() or late_s > SERVERS_EXIT_S):
                self._restart_at = None
                self._start()
            return
        continue_if_stopped("The supervisor of the servers", self._process.pid)
        status = self._process.poll()
        if status is None:
            return
        concurrent.futures.wait([self._reader], TICK_S)
        if status in (Exit.CONFIG, Exit.USAGE):
            raise ConfigError(self._last_line)
        if received >= self._delivered + polybeast_env.DELIVERED_STEPS:
            self._budget.delivered()
            self._delivered = received
        wait_s = self._budget.died() if status <= 0 else None
        if wait_s is None:
            raise RuntimeError(
                f"the environment servers ended ({describe_exit(status)}); their last "
                f"words: {self._last_line}"
            )
        self._restart_at = time.monotonic() + wait_s
        log.warning(
            "The environment servers ended (%s); starting them again in %.1f s",
            describe_exit(status),
            wait_s,
        )


def greet(
    flags: argparse.Namespace, servers: LocalServers | None, stop: StopSignal
) -> wire.Welcome | None:
    """Ask the servers, one after another, until one says what it serves.

    Servers elsewhere may come as late as they like. Returns None if the program is to
    stop.

    Raises:
      ConfigError: the servers cannot serve, or not this learner; or certificates are
        wrong.
      TimeoutError: local servers took more than --stall_timeout_s.
    """
    began = say_at = time.monotonic()
    if servers is None:
        addresses = flags.server_addresses
    else:
        addresses = servers.addresses
        say_at += SAY_WAITING_S  # Their own words come first.
    pem_files = tls.read(flags.tls_dir, is_server=False)
    refusals: collections.Counter[str] = collections.Counter()
    for address in itertools.cycle(addresses):
        if stop.received is not None:
            return None
        if servers is not None:
            servers.check()
            if time.monotonic() - began > flags.stall_timeout_s:
                raise TimeoutError(
                    f"no environment server was ready within {flags.stall_timeout_s:g} "
                    "s (--stall_timeout_s). Does the environment start by itself?"
                )
        try:
            raw = libtorchbeast.describe(
                address,
                info_keys=flags.info_keys,
                timeout_s=DESCRIBE_S,
                tls=pem_files,
            )
            return wire.decode_welcome(raw)
        except libtorchbeast.ServerUnavailable as error:
            reason = tls.diagnose(address, flags.tls_dir)
            text = f"{error}; {reason}" if reason else str(error)
            refusals[address] = refusals[address] + 1 if reason else 0
            if refusals[address] == MAX_REFUSALS:
                raise ConfigError(text) from error
            if time.monotonic() > say_at:
                say_at = time.monotonic() + SAY_WAITING_S
                log.info("Waiting for an environment server: %s", text)
        except libtorchbeast.ServerMismatch as error:
            reason = tls.diagnose(address, flags.tls_dir)
            raise ConfigError(f"{error}; {reason}" if reason else str(error)) from error
        except wire.WireError as error:
            raise ConfigError(f"{address}: {error}") from error
    raise AssertionError("no addresses")


def train(flags: argparse.Namespace) -> Exit:
    """Train until --total_steps, a signal or a failure; a checkpoint is left behind."""
    keep_freed_memory()  # Before there are other threads.
    with contextlib.ExitStack() as stack:
        stack.enter_context(metrics.setup_logging(None))
        stop = stack.enter_context(StopSignal())
        servers = None
        if flags.insecure and any(map(tls.is_public, flags.server_addresses or ())):
            log.warning(
                "INSECURE: the traffic with the servers is neither encrypted nor "
                "authenticated (--insecure)"
            )
        if flags.server_addresses is None:
            servers = stack.enter_context(LocalServers(flags))
        welcome = greet(flags, servers, stop)
        if welcome is None or stop.received is not None:
            return Exit.STOPPED  # Before there is anything to save.
        check_welcome(flags, welcome)
        if flags.env not in (None, welcome.env):
            raise ConfigError(
                f"--env is {flags.env} but the servers serve {welcome.env}. Leave "
                "--env out, or start the servers with it."
            )
        try:
            xpid = core.flags.expand_xpid(flags, welcome.env)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        flags = argparse.Namespace(**{**vars(flags), "env": welcome.env, "xpid": xpid})
        return train_with(flags, servers, welcome, stop)


def train_with(
    flags: argparse.Namespace,
    servers: LocalServers | None,
    welcome: wire.Welcome,
    stop: StopSignal,
) -> Exit:
    """Train on what the servers serve, in a run's folder."""
    run_dir = metrics.prepare_run_dir(Path(flags.savedir), flags.xpid)
    with metrics.setup_logging(run_dir):
        recorded = (
            metrics.read_meta(run_dir) if (run_dir / "meta.json").exists() else {}
        )
        if flags.seed is None:
            flags.seed = recorded.get("flags", {}).get("seed", secrets.randbelow(2**31))
        seed_rng(flags.seed)
        spaces = Spaces(welcome.observation, welcome.action)
        learner = create_learner(flags, spaces)
        dry_run(learner.net, spaces.observation, spaces.action, net_outputs(spaces))
        run = Run(
            flags,
            run_dir,
            learner,
            frames_per_step=welcome.frames_per_step,
            in_turn=False,
        )
        found = run.resume()
        describe(flags, run_dir, welcome, learner)
        options = {option.name: option.value for option in welcome.options}
        log_options(options, recorded)
        addresses = pool_addresses(flags, servers, welcome)
        check_memory(flags, welcome, len(addresses))
        if learner.finished():
            log.info(
                "Nothing to do: run %s is at step %d of --total_steps %d.",
                flags.xpid,
                learner.step,
                flags.total_steps,
            )
            return Exit.DONE
        # Environments of this start must not replay the games of the starts before it.
        first_incarnation = len(recorded.get("starts", [])) << 16
        run_id = metrics.run_id(recorded, run_dir)
        metrics.write_meta(
            run_dir,
            flags=vars(flags),
            extra={
                "step": learner.step,
                "run_id": run_id,
                "env_options": options,
                "first_env_seeds": [
                    environment.env_seed(flags.seed, i, first_incarnation, 0)
                    for i in range(len(addresses) * welcome.num_envs)
                ],
            },
        )
        with run.open(resumed=found is not None):
            train_async(
                run,
                servers,
                addresses,
                welcome,
                run_id,
                first_incarnation,
                stop,
            )
        if stop.received is not None and not learner.finished():
            log.info(
                "Stopped by %s at step %d. The same command goes on from there.",
                stop.received.name,
                learner.step,
            )
            return Exit.STOPPED
        log.info("Done: %d steps.", learner.step)
        return Exit.DONE


def pool_addresses(
    flags: argparse.Namespace, servers: LocalServers | None, welcome: wire.Welcome
) -> list[str]:
    """Return one address for each stream."""
    addresses = flags.server_addresses if servers is None else servers.addresses
    return [a for a in addresses for _ in range(welcome.num_streams)]


def check_welcome(flags: argparse.Namespace, welcome: wire.Welcome) -> None:
    """Refuse a batch that the servers' streams cannot fill exactly."""
    B, K = flags.batch_size, welcome.num_envs
    if B % K:
        raise ConfigError(
            f"--batch_size is {B} but must be a multiple of the servers' "
            f"--envs_per_stream ({K}): a stream makes {K} rollouts at a time. Try "
            f"--batch_size {-(-B // K) * K}, or start the servers with another "
            "--envs_per_stream."
        )


def check_memory(
    flags: argparse.Namespace, welcome: wire.Welcome, num_streams: int
) -> None:
    """Say what rollouts will take of the memory, and refuse what cannot fit.

    Raises:
      ConfigError: there is less; the message has both numbers and the remedy.
    """
    row = {
        **row_spec(welcome.observation, welcome.action, flags.info_keys),
        **net_outputs(Spaces(welcome.observation, welcome.action)),
    }
    row_bytes = sum(spec.nbytes for _, spec in leaves(row))
    # Of each environment one, under way or waiting beyond the queue's maximum; what
    # else waits; with the learner threads; and what an unfinished batch leaves empty.
    batches = 1 + flags.num_learner_threads
    num = num_streams * welcome.num_envs
    num += flags.max_learner_queue_size + flags.batch_size * batches
    need = num * (flags.unroll_length + 1) * row_bytes / 2**20
    have = available_memory() / 2**20
    line = f"memory: {num} rollouts need {need:,.1f} MiB, have {have:,.1f} MiB"
    if need > have:
        raise ConfigError(
            f"{line}. Lower --max_learner_queue_size, --batch_size or --unroll_length, "
            "or use fewer environments."
        )
    log.info("Preflight: %s", line)


def describe(
    flags: argparse.Namespace, run_dir: Path, welcome: wire.Welcome, learner: Learner
) -> None:
    """Say at the start what is about to run."""
    torso = getattr(learner.net, "torso", learner.net)  # A fork's Net may have none.
    log.info("Run %s in %s, seed %d", flags.xpid, run_dir, flags.seed)
    log.info("Environment %s: %s, %s", welcome.env, welcome.observation, welcome.action)
    log.info(
        "Network %s, %d parameters, learning on %s, acting on %s",
        type(torso).__name__ + (" + LSTM" if flags.use_lstm else ""),
        sum(p.numel() for p in learner.net.parameters()),
        flags.learner_device,
        flags.actor_device,
    )


def create_pool(
    flags: argparse.Namespace,
    addresses: Sequence[str],
    welcome: wire.Welcome,
    state: Any,
    **start: Any,
) -> tuple[
    libtorchbeast.BatchingQueue, libtorchbeast.DynamicBatcher, libtorchbeast.ActorPool
]:
    """Return the learner's queue, the inference batcher, and the actors between them.

    Args:
      state: the recurrent state of one environment's new episode.
      start: what is told to the servers of this start of the run.
    """
    page_locked = any(d.startswith("cuda") for d in devices(flags))
    allocate = gpu.allocate_page_locked if page_locked else None
    learner_queue = libtorchbeast.BatchingQueue(
        batch_dim=1,
        minimum_batch_size=flags.batch_size,
        maximum_batch_size=flags.batch_size,
        check_inputs=True,
        maximum_queue_size=flags.max_learner_queue_size,
        allocate=allocate,
    )
    # No minimum and no waiting: what is there makes a batch, stragglers the next one.
    inference_batcher = libtorchbeast.DynamicBatcher(
        batch_dim=1,
        minimum_batch_size=1,
        maximum_batch_size=MAX_INFERENCE_BATCH,
        timeout_ms=None,
        check_outputs=True,
        allocate=allocate,
    )
    actors = libtorchbeast.ActorPool(
        unroll_length=flags.unroll_length,
        learner_queue=learner_queue,
        inference_batcher=inference_batcher,
        env_server_addresses=addresses,
        initial_agent_state=state,
        named_rows=True,
        inference_keys=NET_INPUTS,
        value_ranges=wire.value_ranges(welcome.observation, welcome.action),
        info_keys=flags.info_keys,
        seed=flags.seed,
        # The flag is for one environment; a message is for all of a stream.
        step_timeout_s=welcome.num_envs * flags.env_step_timeout_s + SUPERVISOR_S,
        keepalive_s=flags.keepalive_s,
        tls=tls.read(flags.tls_dir, is_server=False),
        **start,
    )
    return learner_queue, inference_batcher, actors


def train_async(
    run: Run,
    servers: LocalServers | None,
    addresses: Sequence[str],
    welcome: wire.Welcome,
    run_id: str,
    first_incarnation: int,
    stop: StopSignal,
) -> None:
    """Train with the actor pool, inference and learner threads; this one watches."""
    flags, learner = run.flags, run.learner
    learner_queue, inference_batcher, actors = create_pool(
        flags,
        addresses,
        welcome,
        learner.net.initial_state(batch_size=1),
        run_id=f"{flags.xpid} ({run_id})",
        first_incarnation=first_incarnation,
    )
    weights = Weights(learner.net, flags.actor_device)
    weights.publish(learner.net, learner.updates)
    nets = [
        copy.deepcopy(learner.net).to(flags.actor_device)
        for _ in range(flags.num_inference_threads)
    ]
    for net in nets:
        if net.bfloat16:
            net.torso.bfloat16()  # Or every forward pass would cast the weights.
    watchdog = Watchdog(flags.stall_timeout_s, flags.on_stall)
    contact = Contact(flags)
    threads: dict[str, concurrent.futures.Future] = {}
    with contextlib.ExitStack() as stack:
        trace = None
        if flags.write_profiler_trace:
            trace = stack.enter_context(Trace(run.run_dir / "trace.json"))
        try:
            for i, net in enumerate(nets):
                threads[f"inference-{i}"] = start_thread(
                    f"inference-{i}",
                    inference,
                    flags,
                    net,
                    weights,
                    inference_batcher,
                    learner.busy,
                )
            for i in range(flags.num_learner_threads):
                threads[f"learner-{i}"] = start_thread(
                    f"learner-{i}",
                    learn_loop,
                    flags,
                    learner,
                    weights,
                    learner_queue,
                )
            # The last one, because it fails too when inference does.
            threads["actors"] = start_thread("actors", run_actors, flags, actors)
            run.log({})
            env_s, last_event = 0.0, ""
            while stop.received is None and not learner.finished():
                concurrent.futures.wait(
                    threads.values(), TICK_S, concurrent.futures.FIRST_COMPLETED
                )
                raise_failures(threads)
                for last_event in actors.take_events():
                    is_good = last_event.endswith("connected again")
                    level = logging.INFO if is_good else logging.WARNING
                    log.log(level, "%s", last_event, extra={"repeats": True})
                stats = actors.stats()
                if servers is not None:
                    servers.check(stats["received"])
                servers_s = [s["env_s"] for s in stats["addresses"].values()]
                learner.busy.add("env", sum(servers_s) - env_s, workers=len(servers_s))
                env_s = sum(servers_s)
                run.tick(pool_stats(stats, learner_queue))
                if trace is not None:
                    trace.tick(learner.updates)
                if contact.is_lost(stats, last_event) and servers is None:
                    watchdog.rest()  # They may be away for as long as they like.
                else:
                    watchdog.progress(
                        f"step {learner.step}",
                        lambda: stage(stats, addresses, learner_queue),  # noqa: B023
                    )
        finally:
            last = pool_stats(actors.stats(), learner_queue)
            watchdog.close()
            actors.stop()
            inference_batcher.close()
            learner_queue.close()
            join_threads(threads, JOIN_S)
    raise_failures(threads)  # A failure of the last moment is one, too.
    stats = actors.stats()
    run.log(last)  # With the last update, but without what the end discarded.
    others = {key.replace("_", " "): stats[key] for key in ("discarded", "in_flight")}
    check_ledger(learner, stats["received"], others)


class Contact:
    """Says, again and again, that no environment server is connected."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags = flags
        self._lost_at = self._say_at = 0.0  # Monotonic; 0 while there is one.

    def is_lost(self, stats: Mapping[str, Any], last_event: str) -> bool:
        """Say whether no server is connected."""
        now = time.monotonic()
        if stats["connected"]:
            self._lost_at = 0.0
            return False
        if not self._lost_at:
            self._lost_at, self._say_at = now, now + NO_SERVER_S
        elif now > self._say_at:
            log.warning(
                "No environment server has been connected for %.0f s; trying on. The "
                "latest of them said: %s",
                now - self._lost_at,
                with_reason(last_event, self._flags) or "nothing",
            )
            self._say_at = now + NO_SERVER_S
        return True


def with_reason(text: str, flags: argparse.Namespace) -> str:
    """Add to what came of a server what TLS has to do with it, if anything."""
    for address in flags.server_addresses or ():
        if text.startswith(f"{address} "):
            reason = tls.diagnose(address, flags.tls_dir)
            return f"{text}; {reason}" if reason else text
    return text


def stage(
    stats: Mapping[str, Any],
    addresses: Sequence[str],
    learner_queue: libtorchbeast.BatchingQueue,
) -> str:
    """Say what a run that stands still waits for, and what each part is doing."""
    states = collections.Counter(stats["states"])
    waiting_s = stats["waiting_s"]
    longest = max(range(len(waiting_s)), key=waiting_s.__getitem__)
    if states["waiting_for_room"]:
        what = "the learner"
    elif states["waiting_for_inference"]:
        what = "inference"
    elif not stats["connected"]:
        what = "environment servers, none of which is connected"
    else:
        what = f"the environment server {addresses[longest]}"
        what += f", which has not answered for {waiting_s[longest]:.0f} s"
    streams = ", ".join(f"{n} {state}" for state, n in states.items())
    return f"{what} (streams: {streams}; learner queue: {learner_queue.size()})"


def run_actors(flags: argparse.Namespace, actors: libtorchbeast.ActorPool) -> None:
    """Receive rows and send actions until the pool is stopped. One thread."""
    try:
        actors.run()
    except libtorchbeast.ServerMismatch as error:
        raise ConfigError(str(error)) from error
    except libtorchbeast.ActorError as error:
        text = with_reason(str(error), flags)
        if text != str(error):
            raise ConfigError(text) from error
        raise


def raise_failures(threads: Mapping[str, concurrent.futures.Future]) -> None:
    for thread in threads.values():
        if thread.done():
            thread.result()  # Raises what the thread died of.


def devices(flags: argparse.Namespace) -> tuple[str, str]:
    return flags.learner_device, flags.actor_device


def pool_stats(
    stats: Mapping[str, Any], learner_queue: libtorchbeast.BatchingQueue
) -> dict[str, Any]:
    """Return the log's columns about actors, from the pool's own counters."""
    row = {
        "streams": stats["connected"],
        "reconnects": stats["reconnects"],
        "steps_discarded": stats["discarded"],
        "learner_queue": learner_queue.size(),
    }
    if stats["batch_fill"]:
        row["inference_batch"] = stats["batch_fill"]
    served = [server for server in stats["addresses"].values() if server["steps"]]
    if served:
        row["env_step_p50_ms"] = median(server["p50_ms"] for server in served)
        row["env_step_p99_ms"] = max(server["p99_ms"] for server in served)
    return row


class Trace:
    """Traces some updates, for chrome://tracing or ui.perfetto.dev. Context manager.

    Seen are inference and learner threads, not the actor pool's, which run no torch.
    All methods are for the main thread: a profiler belongs to the one that started it.
    """

    def __init__(self, path: Path):
        self._path = path
        self._begin: int | None = None  # The first update to trace.
        self._is_running = False
        self._profiler: torch.profiler.profile | None = torch.profiler.profile(
            experimental_config=torch.profiler._ExperimentalConfig(
                profile_all_threads=True
            )
        )

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_running:
            self._write()
        elif self._profiler is not None:
            log.warning("Too few updates for a trace: %s not written", self._path)

    def tick(self, updates: int) -> None:
        """Begin or end the trace if it is time."""
        if self._profiler is None:
            return
        if self._begin is None:
            self._begin = updates + UNTRACED_UPDATES
        if self._is_running and updates >= self._begin + TRACED_UPDATES:
            self._write()
        elif not self._is_running and updates >= self._begin:
            self._begin = updates
            self._profiler.start()
            self._is_running = True

    def _write(self) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        self._is_running = False
        self._profiler.export_chrome_trace(str(self._path))
        self._profiler = None  # With all that it has recorded.
        log.info("Wrote %s", self._path)


# ------------------------------------------------------------------------------ test


def test(flags: argparse.Namespace) -> Exit:
    """Play --num_episodes full games with a run's newest checkpoint; report returns."""

    def policy(net: Net) -> evaluation.Policy:
        @torch.inference_mode()
        def act(row: Nest, state: Any) -> tuple[np.ndarray, Any]:
            rows = map_nest(
                lambda x: torch.from_numpy(x).unsqueeze(0),
                {key: row[key] for key in NET_INPUTS},
            )
            outputs, state = net(rows, state)
            action = sample_action(outputs["policy_logits"], greedy=flags.greedy)
            return action[0].numpy() + net.first_action, state

        return act

    evaluation.test_run(
        flags,
        create_envs=functools.partial(polybeast_env.create_environments, flags, 1),
        create_net=lambda obs, action: create_net(flags, Spaces(obs, action)),
        policy=policy,
    )
    return Exit.DONE


def main(argv: Sequence[str] | None = None) -> int:
    return run_program(parse_flags, train, test, argv)


if __name__ == "__main__":
    sys.exit(main())
