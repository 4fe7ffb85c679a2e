# SPDX-License-Identifier: Apache-2.0
"""PolyBeast: IMPALA (Espeholt et al. 2018) with environments on any machine.

    python -m polybeast --env PongNoFrameskip-v4
    python -m polybeast --server_addresses host1:4431-4446,host2:4431-4446 \\
        --tls_dir certs/learner

Environment servers (polybeast_env.py) step environments and send observations; this
process, the learner, chooses all actions and learns. The actor pool between them is C++
(csrc/): it moves rows and holds no GIL. All machine learning is Python: here, and in
core/algorithm.

     polybeast_env.py, many processes                  polybeast.py, one process
    ┌──────────────────────┐     stream     ┌──────────────────────────────────────────┐
    │ K environments       │  Step[K]  ───► │ ActorPool ── rows ──► DynamicBatcher     │
    │                      │                │     │   ▲                  │             │
    │                      │  ◄── Action[K] │     │   └── actions ── inference threads │
    └──────────────────────┘                │     ▼                        ▲           │
                                            │ BatchingQueue            weights         │
                                            │     └── [T+1, B] ──► learner threads     │
                                            └──────────────────────────────────────────┘

To train your own agent edit Net here; for your own environment edit create_env in
polybeast_env.py. The servers tell the learner their observation and action spaces.
"""

import os

# One OpenMP thread per process unless the user sets another number (torch reads this
# when it is imported). Inference, learner and environments share the cores, and OpenMP
# threads that spin while they wait would take cores from them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hides gRPC's own messages; this program logs the errors that matter.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

if __name__ == "__main__":
    from core import imports

    imports.end_at_signals()  # Until the program handles them itself.
    imports.open_closed_streams()
    imports.explain_missing_packages()

import argparse
import concurrent.futures
import contextlib
import copy
import functools
import sys
import threading
from collections.abc import Collection, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import atari_wrappers
import libtorchbeast
import polybeast_env
from core import flag_types
from core.action_spaces import split_mask
from core.algorithm import counters
from core.algorithm.action_layers import ActionFeatures, PolicyHead
from core.algorithm.distributions import ActionDistribution, mask_logits
from core.algorithm.dry_run import dry_run, dry_run_loss, explain_create_net
from core.algorithm.gpu import (
    Graphs,
    allocate_page_locked,
    create_stream,
    in_stream,
    wait_for,
)
from core.algorithm.normalization import InputNorm, PopArt, normalized
from core.algorithm.recurrent import create_lstm, unroll_lstm
from core.algorithm.replay import Mixer, Replay, create_replay
from core.algorithm.torsos import TORSOS, model_for, orthogonal
from core.algorithm.update import Learner
from core.environments import stepping
from core.errors import Exit, leave
from core.nests import ArraySpec, Nest, map_nest
from core.remote import messages, pool, server_flags
from core.remote.greet import greet, warn_if_insecure
from core.remote.local_servers import LocalServers
from core.remote.server_lists import ServerList
from core.rollout import NET_INPUTS, Spaces, new_rollouts
from core.running import common_flags, compute, evaluation, log_setup
from core.running.compute import explain_out_of_memory, set_torch_threads
from core.running.machine import (
    keep_freed_memory,
    lower_priority,
    num_cores,
    raise_file_limit,
)
from core.running.precision import settle_precision, to_bfloat16
from core.running.program import run_program
from core.running.run import Run, run_folder
from core.running.signals import StopSignal
from core.running.supervise import (
    raise_failures,
    start_thread,
    wait_for_failure,
)
from core.running.trace import Trace

TICK_S = 0.2  # The main loop checks signals, failures and clocks at least this often.
MAX_INFERENCE_BATCH = 1024


# ---------------------------------------------------------------------------- flags


def parse_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; exits with status 2 if something is wrong."""
    parser = make_parser()
    return check_flags(parser, common_flags.parse(parser, argv))


def make_parser() -> argparse.ArgumentParser:
    parser = flag_types.Parser(
        prog="python -m polybeast",
        description="IMPALA with environments on any machine.",
        formatter_class=flag_types.HelpFormatter,
    )
    int_at_least = flag_types.int_at_least
    common_flags.add_run_flags(parser)
    common_flags.add_environment_flags(parser)

    servers = parser.add_argument_group("environment servers")
    server_flags.add_address_flags(servers)
    server_flags.add_server_flags(servers)
    servers.add_argument(
        "--num_actors",
        type=int_at_least(1),
        metavar="A",
        help="total number of environments of the local servers: --num_servers x "
        "--streams_per_server x --envs_per_stream. If only this flag is given, each "
        "environment has its own server process, as in the TorchBeast of 2019",
    )
    inference = parser.add_argument_group("inference")
    inference.add_argument(
        "--num_inference_threads",
        type=int_at_least(1),
        help="threads that choose actions, each with a copy of the network. Default: 1 "
        "on a GPU, on the CPU one for every 4 cores",
    )
    inference.add_argument(
        "--actor_device",
        help="torch device of inference. Default: the second GPU, else the first, else "
        "cpu",
    )
    common_flags.add_learner_flags(parser)
    learner = parser.add_argument_group("learner, PolyBeast only")
    learner.add_argument(
        "--learner_device",
        help="torch device of the learner. Default: the first GPU, or cpu",
    )
    learner.add_argument(
        "--max_learner_queue_size",
        type=int_at_least(1),
        metavar="N",
        help="rollouts that may wait for the learner, besides one of each environment; "
        "then environments wait. Default: --batch_size, without the replayed ones",
    )
    learner.add_argument(
        "--write_profiler_trace",
        action="store_true",
        help="write a chrome trace of some updates to the run's folder (torch >= 2.7)",
    )
    common_flags.add_loss_flags(parser)
    common_flags.add_optimizer_flags(parser)
    return parser


def check_flags(
    parser: argparse.ArgumentParser, flags: argparse.Namespace
) -> argparse.Namespace:
    """Set defaults that depend on other flags; refuse flags that contradict others."""
    is_atari = flags.env is None or atari_wrappers.is_atari(flags.env)
    common_flags.check_common(parser, flags, is_atari=is_atari)
    if flags.num_learner_threads is None:
        flags.num_learner_threads = 2
    if flags.max_learner_queue_size is None:
        flags.max_learner_queue_size = new_rollouts(flags)
    if flags.max_learner_queue_size < new_rollouts(flags):
        parser.error(
            f"--max_learner_queue_size is {flags.max_learner_queue_size} but must be "
            f"at least --batch_size ({new_rollouts(flags)} new rollouts), or no batch "
            "is ever full."
        )
    compute.set_device(parser, flags, "learner_device", default_gpu=0)
    compute.set_device(parser, flags, "actor_device", default_gpu=1)
    if flags.num_inference_threads is None:
        # Few on the CPU: threads that run small operations compete for the GIL.
        on_cpu = flags.actor_device.startswith("cpu")
        flags.num_inference_threads = max(1, num_cores() // 4) if on_cpu else 1
    server_flags.check_servers(parser, flags)
    return flags


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


def net_outputs(spaces: Spaces) -> dict[str, ArraySpec]:
    """Return the specs of Net.forward's outputs, for one row of one environment."""
    f32 = np.dtype(np.float32)
    return {
        "policy_logits": ArraySpec(
            (ActionDistribution(spaces.action).num_parameters,), f32
        ),
        "baseline": ArraySpec((), f32),
    }


# ------------------------------------------------------------------------- inference


class Weights:
    """The newest weights: the learner publishes them, inference threads fetch them.

    Each inference thread has its own copy of the network and fetches new weights
    between two batches. So inference and an update wait for each other only while one
    of them copies weights.
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
        """Copy the weights of `net`, for inference threads to fetch as `version`."""
        with self._lock:
            for name, tensor in net.state_dict().items():
                self._tensors[name].copy_(tensor)
            wait_for(self._device)  # Inference threads read in other CUDA streams.
            self._version = version

    def fetch(self, net: nn.Module, have: int) -> int:
        """Copy the newest weights into `net`, which has version `have`.

        Returns the version that `net` has now.
        """
        if self._version == have:  # Without the lock: the next batch looks again.
            return have
        with self._lock:
            for name, tensor in net.state_dict().items():
                tensor.copy_(self._tensors[name])
            wait_for(self._device)  # Before the learner may write the next weights.
            return self._version


def copy_for_acting(flags: argparse.Namespace, net: Net) -> Net:
    """Return a copy of the network for one inference thread."""
    net = copy.deepcopy(net).to(flags.actor_device)
    if getattr(net, "use_bfloat16", False):  # A Net of your own may lack it.
        to_bfloat16(net.torso)
    return net


@torch.inference_mode()
def inference(
    flags: argparse.Namespace,
    net: Net,
    weights: Weights,
    inference_batcher: libtorchbeast.DynamicBatcher,
    busy: counters.BusyTime,
    trace: Trace,
) -> None:
    """Run one inference thread: choose actions for all environments that wait.

    In the paper each actor computes its own actions. Here all observations that have
    arrived since the last batch are the next batch.
    """
    # Several threads with one core each are faster than one thread with several cores,
    # and leave cores to the learner.
    set_torch_threads(1)
    # Let the learner run first, if it is on the CPU and leaves a core free. If the
    # learner used all cores, this thread would hardly run at low priority. Only Linux
    # has priorities of threads.
    learns_on_cpu = flags.learner_device.startswith("cpu")
    if learns_on_cpu and flags.learner_cores < num_cores() and sys.platform == "linux":
        lower_priority()
    stream = create_stream(flags.actor_device, urgent=True)
    forward = net
    if stream is not None:
        record = not flags.disable_cuda_graphs
        forward = Graphs(net, flags.actor_device, pad=True, record=record)

    version = -1
    for batch in inference_batcher:
        with (
            trace.span("inference"),
            busy.measure("inference", workers=flags.num_inference_threads),
        ):
            rows, agent_state = batch.get_inputs()
            with in_stream(stream):
                version = weights.fetch(net, version)
                outputs, agent_state = map_nest(
                    lambda x: x.to("cpu", non_blocking=True),
                    forward(rows, agent_state),
                )
            choose_actions(outputs, net.distribution, version, rows)
            batch.set_outputs((outputs, agent_state))


def choose_actions(
    outputs: dict[str, Nest],
    distribution: ActionDistribution,
    version: int,
    rows: Nest = (),
) -> None:
    """Add the actions, and the version of the weights that chose them, to `outputs`.

    Samples on the CPU: on a GPU a NaN in the logits would make all later CUDA calls of
    this process fail, and the last checkpoint could not be written.

    Args:
      outputs: Net's outputs for N rows, [1, N, ...].
      rows: Net's inputs, which the error names if no action can be drawn.
    """
    outputs |= distribution.draw(outputs["policy_logits"], inputs=rows)
    outputs["policy_version"] = torch.full(outputs["baseline"].shape, version)


# -------------------------------------------------------------------------- learning


def create_learner(flags: argparse.Namespace, spaces: Spaces) -> Learner:
    """Create the network and its optimizer: RMSProp, as in the paper."""
    net = create_net(flags, spaces).to(flags.learner_device)
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
    weights: Weights,
    learner_queue: libtorchbeast.BatchingQueue,
    trace: Trace,
    replay: Replay,
) -> None:
    """Run one learner thread: take a batch of rollouts, learn, publish the weights."""
    set_torch_threads(flags.learner_cores)
    stream = create_stream(flags.learner_device)
    mix = Mixer(replay, page_locked=stream is not None)
    for (env_rows, agent_rows), agent_state in learner_queue:
        batch, agent_state = mix({**env_rows, **agent_rows}, agent_state)
        with trace.span("learn"), explain_out_of_memory(batch, learner.net):
            learner.update(batch, agent_state, stream)
        with learner.lock:
            weights.publish(learner.net, learner.updates)


# ------------------------------------------------------------------------------- run


def train(flags: argparse.Namespace) -> Exit:
    """Train until --total_steps, a signal or a failure; write a last checkpoint."""
    keep_freed_memory()  # Must come before other threads start.
    raise_file_limit()
    with contextlib.ExitStack() as stack:
        stack.enter_context(log_setup.setup_logging(None))
        stop = stack.enter_context(StopSignal())
        warn_if_insecure(flags)
        servers = stack.enter_context(pool.open_servers(flags))
        greeted = greet(flags, servers, stop)
        if greeted is None or stop.received is not None:
            return Exit.STOPPED  # There is nothing to save yet.
        flags, welcome = greeted
        return train_with(flags, servers, welcome, stop)


def train_with(
    flags: argparse.Namespace,
    servers: LocalServers | ServerList,
    welcome: messages.Welcome,
    stop: StopSignal,
) -> Exit:
    """Train on the servers' environments, in the folder of the run."""
    with run_folder(flags) as run_dir:
        spaces = Spaces(welcome.observation, welcome.action)
        torso_devices = (flags.learner_device, flags.actor_device)
        flags = settle_precision(flags, run_dir, spaces.observation, *torso_devices)
        with explain_create_net():
            learner = create_learner(flags, spaces)
        outputs = net_outputs(spaces)
        dry_run(learner.net, spaces, outputs, stores_all=True)
        dry_run_loss(learner, spaces)
        frames_per_step = welcome.frames_per_step
        run = Run(flags, run_dir, learner, stop, frames_per_step=frames_per_step)
        run.resume()
        devices = f"learning on {flags.learner_device}, acting on {flags.actor_device}"
        options = {option.name: option.value for option in welcome.options}
        run.describe(options.get("create_env", welcome.env), spaces, devices=devices)
        max_streams = pool.max_streams(flags, servers, welcome)
        num_envs = max_streams * welcome.num_envs
        outputs |= learner.net.distribution.columns
        pool.check_memory(flags, spaces, outputs, num_envs)
        if run.has_nothing_to_do():
            return Exit.DONE
        run_id = pool.learner_id(run.recorded, run_dir)
        run.record(
            options,
            run_id=run_id,
            first_env_seeds=[
                stepping.env_seed(flags.seed, i, run.first_incarnation, 0)
                for i in range(num_envs)
            ],
        )
        with run.open():
            train_async(run, servers, max_streams, welcome, run_id)
        return run.end()


def create_pool(
    flags: argparse.Namespace,
    max_streams: int,
    welcome: messages.Welcome,
    state: Any,
    **options: Any,
) -> tuple[
    libtorchbeast.BatchingQueue, libtorchbeast.DynamicBatcher, libtorchbeast.ActorPool
]:
    """Create the learner's queue, the inference batcher, and the actors between them.

    Args:
      max_streams: how many streams to servers there may be at a time.
      state: the recurrent state of one environment at the start of an episode, on any
        device.
      options: `run_id` and `first_incarnation`, which the servers receive; and
        `servers_may_change`.
    """
    on_gpu = "cuda" in flags.learner_device + flags.actor_device
    allocate = allocate_page_locked if on_gpu else None
    learner_queue = libtorchbeast.BatchingQueue(
        minimum_batch_size=new_rollouts(flags),
        maximum_batch_size=new_rollouts(flags),
        maximum_queue_size=flags.max_learner_queue_size,
        allocate=allocate,
    )
    # A batch has all observations that have arrived when an inference thread is free.
    # It has no minimum size: no observation waits for others.
    inference_batcher = libtorchbeast.DynamicBatcher(
        # The rows of one stream stay together.
        maximum_batch_size=max(MAX_INFERENCE_BATCH, welcome.num_envs),
        timeout_ms=None,
        allocate=allocate,
    )
    actors = libtorchbeast.ActorPool(
        unroll_length=flags.unroll_length,
        learner_queue=learner_queue,
        inference_batcher=inference_batcher,
        env_server_addresses=(),  # PoolWatch sets them, as servers come and go.
        max_streams=max_streams,
        initial_agent_state=map_nest(lambda x: x.cpu(), state),
        named_rows=True,  # Dicts as in core.rollout, not the tuples of 2019.
        inference_keys=NET_INPUTS,
        **pool.stream_options(flags, welcome),
        **options,
    )
    return learner_queue, inference_batcher, actors


def train_async(
    run: Run,
    servers: LocalServers | ServerList,
    max_streams: int,
    welcome: messages.Welcome,
    run_id: str,
) -> None:
    """Train with actor, inference and learner threads; this thread watches them."""
    flags, learner = run.flags, run.learner
    name = flags.xpid.encode(errors="replace").decode()  # The flag may be no UTF-8.
    learner_queue, inference_batcher, actors = create_pool(
        flags,
        max_streams,
        welcome,
        learner.net.initial_state(1),
        run_id=f"{name} ({run_id})",
        first_incarnation=run.first_incarnation,
        servers_may_change=servers.may_change,
    )
    replay = create_replay(flags, learner.updates)
    weights = Weights(learner.net, flags.actor_device)
    weights.publish(learner.net, learner.updates)
    watch = pool.PoolWatch(
        flags, learner, actors, learner_queue, welcome.num_streams, servers
    )
    threads: dict[str, concurrent.futures.Future] = {}

    def start(name: str, *call: Any) -> None:
        threads[name] = start_thread(name, *call)

    trace_path = run.run_dir / "trace.json" if flags.write_profiler_trace else None
    with Trace(trace_path) as trace:
        try:
            for i in range(flags.num_inference_threads):
                net = copy_for_acting(flags, learner.net)
                args = (flags, net, weights, inference_batcher, learner.busy, trace)
                start(f"inference-{i}", inference, *args)
            for i in range(flags.num_learner_threads):
                args = (flags, learner, weights, learner_queue, trace, replay)
                start(f"learner-{i}", learn_loop, *args)
            # Last: if inference fails, the actors fail too, and the program reports the
            # first failed thread in this order.
            start("actors", pool.run_actors, flags, actors)
            run.log({})
            while run.goes_on():
                wait_for_failure(threads, TICK_S)
                run.tick(watch.tick())
                trace.tick(learner.updates)
        finally:
            last = watch.columns()
            watch.close()
            actors.stop()
            inference_batcher.close()
            learner_queue.close()
            run.join(threads)
    raise_failures(threads)  # A thread may have failed while it was being stopped.
    run.log(last)  # Has the last update, but not the steps discarded by stopping.
    run.check_ledger(*watch.rows())


# ------------------------------------------------------------------------------ test


def test(flags: argparse.Namespace) -> Exit:
    """Play --num_episodes full games with a run's newest checkpoint; report returns."""
    evaluation.test_run(
        flags,
        create_envs=functools.partial(polybeast_env.create_environments, flags, 1),
        env_options=functools.partial(polybeast_env.env_options, flags),
        create_net=functools.partial(create_net, flags),
    )
    return Exit.DONE


def main(argv: Sequence[str] | None = None) -> int:
    return run_program(parse_flags, train, test, argv)


if __name__ == "__main__":
    leave(main())
