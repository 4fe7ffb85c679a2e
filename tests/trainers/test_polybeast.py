# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's data path: real servers, the actor pool, and a toy agent in Python.

Rollouts of the counting environment can be checked by arithmetic; the agent's recurrent
state counts the steps of an episode, so the learner's batches can be checked against
their own observations.
"""

import copy
import os
import sys
import threading
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import libtorchbeast
import monobeast
import nest
import polybeast
from core.algorithm.replay import Replay
from core.environments import toys
from core.nests import leaves, map_nest
from core.remote import env_server
from core.remote.frames import Steps, value_ranges
from core.remote.messages import Hello
from core.remote.service import ServerOptions, Service
from core.running.supervise import start_thread
from core.running.trace import Trace
from tests import counting_env
from tests.actors.pool import make_actor
from tests.conftest import DEADLINE_S, wait_until
from tests.trainers import bodies

T, K, S, B = 5, 3, 2, 6


class Play:
    """Servers, a pool and an inference thread; `next_batch` is the learner."""

    def __init__(
        self,
        make_env,
        folder,
        *,
        agent,
        state=(),
        servers=1,
        streams=S,
        batch_size=B,
        tcp=False,
        **pool,
    ):
        self._make_env = make_env
        self._streams = streams
        addresses = [f"unix:{folder}/{i}" for i in range(servers)]
        if tcp:
            addresses = ["127.0.0.1:0"] * servers
        self.threads = []
        self.servers = [self._start_server(address) for address in addresses]
        self.addresses = [server.listens_at for server in self.servers]
        self.queue = libtorchbeast.BatchingQueue(
            minimum_batch_size=batch_size,
            maximum_batch_size=batch_size,
            maximum_queue_size=batch_size,
        )
        self.batcher = libtorchbeast.DynamicBatcher(timeout_ms=None)
        self.actors = libtorchbeast.ActorPool(
            T,
            self.queue,
            self.batcher,
            [address for address in self.addresses for _ in range(streams)],
            state,
            named_rows=True,
            num_envs=K,
            seed=7,
            **pool,
        )
        self.threads.append(start_thread("actors", self.actors.run))
        self.threads.append(start_thread("inference", self._infer, agent))

    def _start_server(self, address):
        server = env_server.Server(
            self._make_env, address, num_envs=K, num_streams=self._streams
        )
        server.listens_at = server.start()
        server.thread = start_thread("server", server.run)
        return server

    def restart_server(self, i):
        self.servers[i].stop()
        self.servers[i].thread.result(timeout=DEADLINE_S)
        self.servers[i] = self._start_server(self.addresses[i])

    def _infer(self, agent):
        for batch in self.batcher:
            batch.set_outputs(agent(*batch.get_inputs()))

    def next_batch(self):
        """Return one learner batch as numpy: (rows [T + 1, B, ...], state)."""
        (env, agent), state = next(self.queue)
        return (
            nest.map(lambda t: t.numpy().copy(), {**env, **agent}),
            nest.map(lambda t: t.numpy().copy(), state),
        )

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.actors.stop()
        self.batcher.close()
        self.queue.close()
        for server in self.servers:
            server.stop()
        for thread in (*self.threads, *(s.thread for s in self.servers)):
            thread.result(timeout=DEADLINE_S)


def outputs_for(rows, action):
    """Return what an agent must: logits, value and version say which row it saw."""
    return {
        "action": action,
        "policy_logits": torch.zeros(*action.shape, 3),
        "baseline": rows["episode_step"].float(),
        "policy_version": torch.zeros_like(action),
    }


def random_agent(rows, state):
    return outputs_for(rows, torch.randint(0, 3, rows["done"].shape)), state


def counting_agent(rows, state):
    """Its state is the number of rows of the episode before the present one."""
    (count,) = state
    assert rows["done"].shape[0] == 1
    count = torch.where(rows["done"], 0.0, count[0, :, 0].unsqueeze(0)) + 1
    action = torch.randint(0, 3, rows["done"].shape)
    return outputs_for(rows, action), (count.T.unsqueeze(0).contiguous(),)


def columns(rows, n=K):
    """Cut a batch into the rollouts of its streams, [T + 1, K, ...] each."""
    for start in range(0, rows["done"].shape[1], n):
        yield map_nest(lambda x, i=start: x[:, i : i + n], rows)


def check_continuity(rollouts, num_streams):
    """Check rollouts, and that each continues another; return the number of firsts.

    They come in no particular order, and the last of a stream may be missing: then one
    may lack what it continues.
    """
    last_rows = [map_nest(lambda x: x[-1], rollout) for rollout in rollouts]
    firsts, orphans = 0, 0
    for rollout in rollouts:
        first = map_nest(lambda x: x[0], rollout)
        index = next((i for i, row in enumerate(last_rows) if same(row, first)), None)
        previous = None if index is None else last_rows.pop(index)
        counting_env.check_rollout(rollout, previous)
        if previous is None and first["done"].all() and not first["action"].any():
            firsts += 1
        elif previous is None:
            orphans += 1
    assert orphans <= num_streams, orphans
    return firsts


def same(a, b):
    return all(
        np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        for (_, x), (_, y) in zip(leaves(a), leaves(b), strict=True)
    )


@pytest.mark.parametrize(
    "make", ["make", "make_truncating", "make_lives", "make_nested"]
)
def test_rollouts_that_crossed_the_network_add_up(make, tmp_path):
    rollouts = []
    make_env = getattr(counting_env, make)
    with Play(make_env, tmp_path, agent=random_agent, servers=2) as play:
        for _ in range(12):
            rollouts += columns(play.next_batch()[0])
    assert check_continuity(rollouts, 2 * S) <= 2 * S


@pytest.mark.parametrize("tcp", [True, False])
def test_stacks_that_crossed_the_network_add_up(tcp, tmp_path, monkeypatch):
    sizes, encode = [], Steps.encode

    def spy(self, seq, *, whole):
        message = encode(self, seq, whole=whole)
        sizes.append(len(message))
        return message

    monkeypatch.setattr(Steps, "encode", spy)
    rollouts = []
    make_env = counting_env.make_stacked
    with Play(make_env, tmp_path, agent=random_agent, servers=2, tcp=tcp) as play:
        for _ in range(30):
            rollouts += columns(play.next_batch()[0])
    assert check_continuity(rollouts, 2 * S) <= 2 * S
    frames, nbytes = counting_env.STACK
    saved = K * (frames - 1) * nbytes
    # Frame by frame, but not on one machine, where that is no gain.
    assert {size // saved for size in sizes} == ({0, 1} if tcp else {1})


def test_a_lost_stream_never_carries_its_state_or_rollout_on(tmp_path):
    initial = (torch.zeros(1, 1, 1),)
    make, rollouts = counting_env.make, []
    with Play(make, tmp_path, agent=counting_agent, state=initial) as play:

        def reconnects():
            return play.actors.stats()["reconnects"]

        for i in range(5):
            for _ in range(3):
                rows, (count,) = play.next_batch()
                rollouts += columns(rows)
                going_on = ~rows["done"][0]
                np.testing.assert_array_equal(
                    count[0, :, 0][going_on], rows["episode_step"][0][going_on]
                )
            play.restart_server(0)
            wait_until(lambda expected=S * (i + 1): reconnects() >= expected)
    assert S < check_continuity(rollouts, S) <= 6 * S


@pytest.mark.parametrize("tcp", [True, False])
def test_the_ledger_adds_up_in_a_storm_of_lost_servers(tcp, tmp_path):
    make = counting_env.make
    with Play(make, tmp_path, agent=random_agent, servers=2, tcp=tcp) as play:
        actors = play.actors
        learned, restarts, discarded = 0, 0, 0
        # A server may happen to stop between two rollouts, and costs no step then.
        while restarts < 10 or discarded == 0:
            play.restart_server(restarts % 2)
            restarts += 1
            for _ in range(2):
                play.next_batch()
                learned += T * B
            stats = actors.stats()
            discarded = stats["discarded"]
            assert stats["received"] == (
                stats["dequeued"] + discarded + stats["in_flight"]
            )
    stats = actors.stats()
    assert stats["in_flight"] == 0
    assert stats["dequeued"] == learned
    assert stats["received"] == learned + stats["discarded"]


def test_a_stream_with_a_value_out_of_range_is_lost_and_named(tmp_path):
    class Counter(gym.Env):
        """Its server says 0 to 99; the learner below expects 0 to 2."""

        action_space = gym.spaces.Discrete(1000)

        def __init__(self, n=100):
            count, pair = gym.spaces.Discrete(n), gym.spaces.MultiDiscrete([5, 7])
            self.observation_space = gym.spaces.Dict(x=gym.spaces.Tuple([pair, count]))

        def observe(self):
            return {"x": (np.array([4, 6]), self.count)}, {}

        def reset(self, *, seed=None, options=None):
            self.count = 0
            return self.observe()

        def step(self, action):
            self.count += 1
            observation, info = self.observe()
            return observation, 0.0, False, False, info

    ranges = value_ranges(Counter(3).observation_space, Counter.action_space)
    assert ranges == [
        (("observation", "x", 0), [0, 0], [4, 6]),
        (("observation", "x", 1), [0], [2]),
        (("last_action",), [0], [999]),
    ]
    options = dict(value_ranges=ranges, max_failures=1000, streams=1)
    with Play(Counter, tmp_path, agent=random_agent, **options) as play:
        wait_until(lambda: play.actors.stats()["reconnects"] >= 2)
        assert not play.threads[0].done()
        events = " ".join(play.actors.take_events())
    lost = (
        "array observation.x[1] of environment 0 in this stream has 3, expected 0 to 2"
    )
    assert lost in events, events


@pytest.mark.parametrize(
    "kind", ["discrete", "choices", "bits", "box", "nested", "mask"]
)
def test_both_trainers_make_the_same_rollouts(tmp_path, kind):
    """One actor, one stream, the same weights and random numbers."""
    argv = [
        "--env",
        f"tests.trainers.bodies:{kind}",
        "--num_actors",
        "1",
        "--envs_per_actor",
        str(K),
    ]
    argv += ["--batch_size", str(K), "--unroll_length", str(T), "--seed", "7"]
    flags = monobeast.parse_flags([*argv, "--use_lstm"])
    spaces = monobeast.read_env(flags)[0]
    torch.manual_seed(3)
    mono_net = monobeast.create_net(flags, spaces)
    poly_net = copy.deepcopy(mono_net)  # Forks edit one trainer's Net.
    actor = make_actor(flags, mono_net, lambda: 4)
    torch.manual_seed(5)
    ours = []
    for _ in range(7):
        actor.unroll(0)
        rollout = actor.buffers.rollout(0)
        ours.append(map_nest(np.copy, (rollout, actor.buffers.agent_state)))
    actor.envs.close()

    @torch.inference_mode()
    def agent(rows, state):
        outputs, state = poly_net(rows, state)
        polybeast.choose_actions(outputs, poly_net.distribution, version=4)
        return outputs, state

    torch.manual_seed(5)
    with Play(
        getattr(bodies, kind),
        tmp_path,
        agent=agent,
        state=poly_net.initial_state(1),
        streams=1,
        batch_size=K,
        inference_keys=polybeast.NET_INPUTS,
    ) as play:
        for rollout, agent_state in ours:
            theirs, theirs_state = play.next_batch()
            map_nest(np.testing.assert_array_equal, rollout, theirs)
            for a, b in zip(agent_state, theirs_state, strict=True):
                np.testing.assert_array_equal(a[0], b)


def test_fetched_weights_are_as_they_were_when_they_were_published():
    learning, acting = (torch.nn.Linear(5, 3) for _ in range(2))
    weights = polybeast.Weights(learning, "cpu")
    weights.publish(learning, 7)
    published = learning.weight.clone()
    torch.nn.init.zeros_(learning.weight)  # The next update has begun.
    assert weights.fetch(acting, -1) == 7
    assert torch.equal(acting.weight, published)


def test_a_net_may_make_its_recurrent_state_on_its_own_device():
    """As `weight.new_zeros` does. The dry run accepted it, and C++ refused it."""

    class OnGpu(torch.Tensor):
        is_cpu = False

        def cpu(self):
            return self.as_subclass(torch.Tensor)

    flags = polybeast.parse_flags(["--env", "Catch", "--seed", "7"])
    options = ServerOptions(num_envs=1)
    welcome = Service(toys.Catch, options, np.zeros(1)).welcome(Hello())
    state = torch.zeros(1, 1, 5).as_subclass(OnGpu)
    polybeast.create_pool(flags, 1, welcome, (state,))


def test_one_stream_may_carry_more_environments_than_an_inference_batch():
    num_envs = polybeast.MAX_INFERENCE_BATCH + 1
    sizes = ["--batch_size", str(num_envs), "--envs_per_stream", str(num_envs)]
    flags = polybeast.parse_flags(["--env", "Catch", "--seed", "7", *sizes])
    options = ServerOptions(num_envs=num_envs)
    welcome = Service(toys.Catch, options, np.zeros(1)).welcome(Hello())
    _, batcher, _ = polybeast.create_pool(flags, 1, welcome, ())
    rows = torch.zeros(1, num_envs)
    answer = start_thread("stream", batcher.compute, rows)
    wait_until(lambda: batcher.size() or answer.done())
    if batcher.size():
        next(batcher).set_outputs(rows + 1)
    assert answer.result(timeout=DEADLINE_S).sum() == num_envs


# ----------------------------------------------------------------------------- threads


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's niceness is Linux's")
@pytest.mark.parametrize(
    "device, cores, more", [("cpu", 3, 19), ("cpu", 4, 0), ("cuda:0", 3, 0)]
)
def test_inference_leaves_the_cores_to_a_learner_that_needs_them(
    monkeypatch, device, cores, more
):
    monkeypatch.setattr(polybeast, "num_cores", lambda: 4)
    nice, asked = os.nice, []  # 19 is the most: what came of it may be less.
    before = nice(0)

    def ask(increment: int) -> int:
        asked.append((increment, threading.current_thread().name))
        return nice(increment)

    monkeypatch.setattr(os, "nice", ask)

    def infer() -> None:
        flags = SimpleNamespace(
            learner_device=device, actor_device="cpu", learner_cores=cores
        )
        polybeast.inference(flags, None, None, [], None, Trace(None))

    start_thread("inference", infer).result(DEADLINE_S)
    assert asked == ([(more, "inference")] if more else [])
    assert nice(0) == before  # The learner's thread is another.


def test_inference_keeps_to_one_core_beside_a_learner_on_several():
    flags = SimpleNamespace(learner_device="cpu", actor_device="cpu", learner_cores=2)
    is_acting, is_learning = threading.Event(), threading.Event()
    used = {}

    def inference_batcher():  # What it does, the thread that iterates over it does.
        is_acting.set()
        assert is_learning.wait(DEADLINE_S)
        used["inference"] = torch.get_num_threads()
        yield from ()

    def learner_queue():
        used["learner"] = torch.get_num_threads()
        is_learning.set()
        yield from ()

    args = (flags, None, None, inference_batcher(), None, Trace(None))
    acting = start_thread("inference", polybeast.inference, *args)
    assert is_acting.wait(DEADLINE_S)
    args = (flags, None, None, learner_queue(), Trace(None), Replay(0, 0))
    start_thread("learner", polybeast.learn_loop, *args).result(DEADLINE_S)
    acting.result(DEADLINE_S)
    assert used == {"inference": 1, "learner": 2}
