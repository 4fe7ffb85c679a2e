# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's actors: buffers, deaths, and rollouts that arithmetic can check."""

import argparse
import os
import random
import signal
import sys
import threading
import time
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch

import monobeast
import polybeast
from core import losses, metrics, rollouts
from core.spaces import ArraySpec, map_nest
from core.supervise import ConfigError, start_thread
from tests.conftest import DEADLINE_S, ended, wait_until
from tests.counting_env import check_rollout, decode

T, E = 5, 3


def make_flags(env: str = "tests.counting_env:make", *more: str) -> argparse.Namespace:
    flags = monobeast.parse_flags(
        ["--env", env, "--num_actors", "2", "--envs_per_actor", str(E)]
        + ["--batch_size", str(2 * E), "--unroll_length", str(T), "--seed", "7", *more]
    )
    return flags


class Pool:
    """Actors with everything they need, polled by the test's own thread."""

    def __init__(self, flags: argparse.Namespace):
        torch.manual_seed(0)
        spaces = monobeast.read_spaces(flags)
        net = monobeast.create_net(flags, spaces)
        row, state = monobeast.rollout_specs(flags, spaces, net)
        self.buffers = rollouts.RolloutBuffers(
            row,
            state,
            num_buffers=flags.num_buffers // E,
            unroll_length=T,
            envs_per_actor=E,
        )
        self.weights = rollouts.SharedWeights(
            {
                k: ArraySpec(tuple(v.shape), v.numpy().dtype)
                for k, v in net.state_dict().items()
            }
        )
        self.weights.publish(net.state_dict(), 0)
        self.actors = monobeast.Actors(
            flags,
            spaces,
            self.buffers,
            self.weights,
            first_incarnation=0,
            busy=metrics.BusyTime(),
        )
        self.flags = flags

    def __enter__(self) -> "Pool":
        def have_started() -> bool:
            self.actors.start()
            return len(self.actors.pids()) == self.flags.num_actors

        wait_until(have_started)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.actors.close()

    def next_rollout(self) -> dict:
        """Poll until a buffer is full; return a copy of it, the buffer given back."""

        def arrived() -> bool:
            self.actors.poll(0.01)
            return self.actors.stats()["buffers_full"] > 0

        wait_until(arrived)
        (index,) = self.actors.take(1)
        rollout = map_nest(np.copy, self.buffers.rollout(index))
        self.actors.give_back([index])
        return rollout

    def buffers_accounted_for(self) -> int:
        actors = self.actors
        held = sum(len(slot.held) for slot in actors.slots)
        return held + len(actors._free) + len(actors._full)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_actors_write_rollouts_that_add_up_under_every_start_method(method):
    with Pool(make_flags("tests.counting_env:make", "--start_method", method)) as pool:
        for _ in range(4):
            check_rollout(pool.next_rollout())


@pytest.mark.parametrize("env", ["make_truncating", "make_lives", "make_nested"])
def test_rollouts_of_one_actor_continue_one_another(env):
    flags = make_flags(f"tests.counting_env:{env}", "--num_actors", "1")
    with Pool(flags) as pool:
        last_row = None
        for _ in range(7):
            rollout = pool.next_rollout()
            check_rollout(rollout, last_row)
            last_row = map_nest(lambda x: x[-1], rollout)


def test_a_hundred_killed_actors_tear_no_rollout_and_block_nobody():
    rng = random.Random(3)
    learned = 0
    with Pool(make_flags()) as pool:
        actors = pool.actors

        def consume() -> None:
            nonlocal learned
            actors.poll(0.001)
            if actors.stats()["buffers_full"]:
                check_rollout(pool.next_rollout())
                learned += 1

        for kill in range(1, 101):
            victim = rng.choice(actors.slots)

            def is_at_work(victim=victim) -> bool:
                consume()  # One that never delivered would use up its budget.
                is_there = victim.process is not None and victim.process.pid is not None
                return is_there and victim.budget.quick_deaths == 0

            wait_until(is_at_work)
            # Writing, running the network, or (nothing is consumed) waiting.
            for _ in range(rng.randrange(30)):
                actors.poll(0)
            os.kill(victim.process.pid, signal.SIGKILL)

            def is_replaced(kill=kill) -> bool:
                consume()
                return actors.restarts == kill

            wait_until(is_replaced)
        before = learned
        while learned < before + 10:
            consume()
        assert pool.buffers_accounted_for() == pool.buffers.num_buffers
        assert actors.received == learned + actors.stats()["buffers_full"] // E
        assert actors.discarded <= 100


def test_an_actor_ends_with_all_that_its_environments_started():
    with Pool(make_flags("tests.fault_env:make_forking")) as pool:
        slot = pool.actors.slots[0]
        wait_until(lambda: pool.next_rollout() and slot.budget._has_delivered)
        actor = psutil.Process(slot.process.pid)
        family = [actor, *actor.children()]
        assert len(family) == 1 + E
        actor.kill()
        wait_until(lambda: pool.actors.poll(0.01) or pool.actors.restarts)
        assert ended(family)
        family = [psutil.Process(pid) for pid in pool.actors.pids()]
        family += [child for actor in family for child in actor.children()]
        assert len(family) > 1
    assert ended(family)


def test_a_slow_learner_starves_no_actor():
    with Pool(make_flags("tests.counting_env:make", "--num_actors", "3")) as pool:
        actors = pool.actors
        delivered = dict.fromkeys(range(3), 0)
        for slot in actors.slots:

            def count(slot=slot) -> None:
                delivered[slot.actor_id] += 1

            slot.budget.delivered = count

        def all_full() -> bool:
            actors.poll(0.01)
            return actors.stats()["buffers_full"] == pool.flags.num_buffers

        for _ in range(30):
            wait_until(all_full)
            actors.give_back(actors.take(1))
        assert max(delivered.values()) - min(delivered.values()) <= 9, delivered


def test_the_seeds_that_are_recorded_are_those_of_the_first_games():
    flags = make_flags("tests.counting_env:make", "--start_method", "fork")
    seeds = set()
    with Pool(flags) as pool:

        def both_have_begun() -> bool:
            for observation in pool.next_rollout()["observation"][0]:
                row = decode(observation)
                if (row.game, row.life, row.step) == (0, 0, 0):
                    seeds.add(row.seed)
            return len(seeds) == 2 * E

        wait_until(both_have_begun)
    assert seeds == set(monobeast.first_env_seeds(flags, incarnation=0))


def test_a_dead_actors_environments_do_not_repeat_their_games():
    with Pool(make_flags("tests.counting_env:make", "--num_actors", "1")) as pool:
        first = pool.next_rollout()["observation"]
        (slot,) = pool.actors.slots
        os.kill(slot.process.pid, signal.SIGKILL)

        def restarted() -> bool:
            pool.actors.poll(0.01)
            if pool.actors.stats()["buffers_full"]:
                pool.next_rollout()
            return pool.actors.restarts == 1 and slot.process is not None

        wait_until(restarted)
        again = pool.next_rollout()["observation"]
    assert not np.array_equal(first, again)


def test_while_the_fork_server_imports_nobody_waits(monkeypatch):
    """It may take seconds, in which a signal would not be answered."""
    is_ready = threading.Event()
    monkeypatch.setattr(
        monobeast.Actors, "_await_fork_server", lambda actors: is_ready.wait()
    )
    actors = Pool(make_flags("Catch")).actors
    actors.start()
    actors.poll(0.0)
    assert not actors.pids()
    is_ready.set()
    wait_until(lambda: actors.poll(0.01) or actors.pids())
    actors.close()


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_out_of_memory_actors_are_killed_before_the_learner():
    with Pool(make_flags()) as pool:
        pool.next_rollout()  # So that they have begun.
        scores = [
            int(Path(f"/proc/{pid}/oom_score_adj").read_text())
            for pid in ("self", *pool.actors.pids())
        ]
    assert scores[0] < 500 and 500 in scores[1:], scores


def test_an_actor_that_hangs_is_replaced_while_others_go_on(caplog):
    env = "tests.fault_env:make_one_hanging"
    with Pool(make_flags(env, "--env_step_timeout_s", "1")) as pool:
        actors = pool.actors
        victim, other = actors.slots
        hung = victim.process
        learned = dict.fromkeys((False, True), 0)  # While it hangs, and afterwards.

        def has_come_back() -> bool:
            pool.next_rollout()
            learned[actors.restarts == 1] += 1
            return min(learned.values()) >= 10 and victim.budget._has_delivered

        wait_until(has_come_back)
    assert (actors.restarts, actors.discarded) == (1, 1)
    said = "Actor 0 hangs: one call of its environment has taken 1 s (--env_step_timeou"
    assert said in caplog.text
    assert "Actor 0 died (its environment hung)" in caplog.text
    assert other.budget.quick_deaths == 0
    with pytest.raises(ValueError):  # It has been waited for.
        hung.is_alive()


def test_an_actor_that_waits_for_a_buffer_does_not_hang(monkeypatch, caplog):
    with Pool(make_flags("Catch", "--env_step_timeout_s", "1")) as pool:
        actors = pool.actors

        def all_full() -> bool:
            actors.poll(0.01)
            return actors.stats()["buffers_full"] == pool.flags.num_buffers

        wait_until(all_full)
        pids, later = actors.pids(), time.monotonic() + 1e6
        with monkeypatch.context() as patch:  # Whatever joins needs the real one.
            patch.setattr(monobeast.time, "monotonic", lambda: later)
            actors._check_progress(actors.slots[0])
        assert actors.pids() == pids and "hangs" not in caplog.text


def test_an_actor_that_always_fails_ends_with_its_own_traceback():
    with Pool(make_flags("tests.test_monobeast:broken_env")) as pool:

        def fails() -> bool:
            pool.actors.poll(0.01)
            return False

        with pytest.raises(monobeast.ActorError) as error:
            wait_until(fails)
    assert "5 times in a row" in str(error.value)
    assert "Traceback" in str(error.value)
    assert "the simulator is out of coffee" in str(error.value)


def test_close_wakes_a_learner_that_waits_for_rollouts():
    flags = make_flags()
    pool = Pool(flags)  # Not started: no rollout will ever come.
    waiting = start_thread("learner", pool.actors.take, 2)
    wait_until(lambda: pool.actors.num_waiting() == 1)
    pool.actors.close()
    with pytest.raises(monobeast.ActorsClosed):
        waiting.result(timeout=DEADLINE_S)


def test_close_ends_actors_that_hang():
    with Pool(make_flags("tests.test_monobeast:hanging_env")) as pool:
        pids = [slot.process.pid for slot in pool.actors.slots]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_serial_and_asynchronous_actors_write_the_same_rollout():
    flags = make_flags("Catch", "--num_actors", "1")
    with Pool(flags) as pool:
        ours = pool.next_rollout()
    torch.manual_seed(monobeast.environment.env_seed(flags.seed, 0, 0, 0))
    spaces = monobeast.read_spaces(flags)
    net = monobeast.create_net(flags, spaces)
    pool.weights.fetch(net.state_dict(), -1)
    torch.manual_seed(monobeast.environment.env_seed(flags.seed, 0, 0, 0))
    monobeast.create_net(flags, spaces)  # The actor drew its own weights first.
    actor = monobeast.Actor(
        flags,
        net,
        pool.buffers,
        actor_id=0,
        incarnation=0,
        fetch=lambda: 0,
        clock=np.zeros(1),
    )
    actor.unroll(0)
    theirs = pool.buffers.rollout(0)
    map_nest(np.testing.assert_array_equal, ours, theirs)


def test_a_run_of_polybeast_does_not_go_on_in_lock_step():
    found = types.SimpleNamespace(state={"flags": {"info_keys": [], "num_servers": 2}})
    with pytest.raises(ConfigError, match="--serial is True but .* with False"):
        monobeast.restore_serial(make_flags("Catch", "--serial"), [], found)


def test_a_batch_learns_the_same_whole_and_in_groups_of_columns(monkeypatch):
    flags = make_flags("tests.counting_env:make_truncating", "--num_actors", "1")
    flags.batch_size = E
    with Pool(flags) as pool:
        rollout = pool.next_rollout()
    gradients = []
    for piece_bytes in (2**30, 1):
        monkeypatch.setattr(losses, "PIECE_BYTES", piece_bytes)
        torch.manual_seed(0)
        learner = monobeast.create_learner(flags, monobeast.read_spaces(flags))
        monobeast.learn(flags, learner, rollout, ())
        gradients.append([p.grad.clone() for p in learner.net.parameters()])
    for whole, pieces in zip(*gradients):
        torch.testing.assert_close(whole, pieces, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", [monobeast, polybeast])
def test_a_step_is_one_that_an_environment_took(module):
    """The row after a truncated one shows the reset, and no step led to it."""
    env_steps = 0

    class Env(gym.Wrapper):
        def step(self, action):
            nonlocal env_steps
            env_steps += 1
            return super().step(action)

    flags = make_flags("tests.counting_env:make_truncating", "--serial")
    flags.learner_device = "cpu"
    spaces = monobeast.read_spaces(flags)
    learner = module.create_learner(flags, spaces)
    buffers = monobeast.create_buffers(flags, spaces, learner.net)
    actor = monobeast.create_serial_actors(flags, learner, buffers)[0]
    actor.envs.envs = [Env(env) for env in actor.envs.envs]
    for updates in range(1, 10):
        actor.unroll(0)
        batch = buffers.rollout(0)
        if module is polybeast:
            batch = map_nest(torch.from_numpy, batch)
        module.learn(flags, learner, batch, ())
        assert (learner.step, learner.updates) == (env_steps, updates)
    assert env_steps < updates * T * E  # There were such rows.


@pytest.mark.parametrize("module", [monobeast, polybeast])
def test_rollouts_beyond_the_maximal_lag_are_left_out_and_counted(module):
    """Lag 7 and 3 at their first actions; what was chosen later is younger."""
    flags = make_flags("Catch", "--num_actors", "1", "--use_lstm")
    flags.batch_size = 2 * E
    flags.learner_device = "cpu"
    with Pool(flags) as pool:
        rollout, state = pool.next_rollout(), pool.buffers.agent_state
        state = tuple(np.concatenate([s[0], s[0] + 1], axis=1) for s in state)
    both = map_nest(lambda x: np.concatenate([x, x], axis=1), rollout)
    both["policy_version"][1:, :E] = 3
    both["policy_version"][1:, E:] = 7
    both["policy_version"][2:, 0] = 10
    both["policy_version"][0] = 0  # The rollout before's.

    def learned_from(max_policy_lag, columns=slice(None)):
        torch.manual_seed(0)
        flags.max_policy_lag = max_policy_lag
        learner = module.create_learner(flags, monobeast.read_spaces(flags))
        learner.updates = 10
        batch, agent_state = map_nest(lambda x: x[:, columns], (both, state))
        if module is polybeast:
            batch, agent_state = map_nest(torch.from_numpy, (batch, agent_state))
        module.learn(flags, learner, batch, agent_state)
        counts = (learner.step, learner.updates - 10, learner.stale)
        assert learner.rows == {
            "learned": learner.step,
            "stale": learner.stale * T,
            "unused": 0,
        }
        return counts, [p.grad for p in learner.net.parameters()]

    for max_lag, columns, counts in [
        (None, slice(None), (2 * E * T, 1, 0)),
        (7, slice(None), (2 * E * T, 1, 0)),
        (6, slice(E, None), (E * T, 1, E)),
        (3, slice(E, None), (E * T, 1, E)),
        (2, slice(0), (0, 0, 2 * E)),
    ]:
        got, gradients = learned_from(max_lag)
        assert got == counts
        if counts[0]:
            torch.testing.assert_close(gradients, learned_from(None, columns)[1])
        else:
            assert gradients == [None] * len(gradients)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_an_update_without_memory_says_what_is_how_large(kind, monkeypatch):
    flags = make_flags("Catch", "--num_actors", "1")
    spaces = monobeast.read_spaces(flags)
    learner = monobeast.create_learner(flags, spaces)
    row, _ = monobeast.rollout_specs(flags, spaces, learner.net)
    batch = map_nest(lambda s: np.zeros((T + 1, E, *s.shape), s.dtype), row)

    def forward(rows, state):
        torch.empty(2**50) if kind == "torch" else np.empty(2**50)

    monkeypatch.setattr(learner.net, "forward", forward)
    with pytest.raises(MemoryError) as error:
        monobeast.learn(flags, learner, batch, ())
    assert f"{E} rollouts of {T} steps: the batch has 0.0 MiB, the network 0." in (
        str(error.value)
    )
    assert "Lower --batch_size" in str(error.value)
    assert "allocate" in str(error.value.__cause__)
    assert not learner.lock.locked()


def test_nan_observations_leave_the_weights_alone_and_ten_in_a_row_stop_the_run():
    flags = make_flags("Catch", "--num_actors", "1")
    flags.batch_size = E
    with Pool(flags) as pool:
        good = pool.next_rollout()
    bad = map_nest(np.copy, good)
    bad["observation"][2, 1] = np.nan
    learner = monobeast.create_learner(flags, monobeast.read_spaces(flags))
    monobeast.learn(flags, learner, good, ())
    weights = {k: v.clone() for k, v in learner.net.state_dict().items()}
    for _ in range(9):
        monobeast.learn(flags, learner, bad, ())
    assert (learner.updates, learner.skipped) == (1, 9)
    with pytest.raises(FloatingPointError, match="10 .* batch: observation"):
        monobeast.learn(flags, learner, bad, ())
    monobeast.learn(flags, learner, bad, ())  # By another thread: no second failure.
    assert learner.skipped == 10
    for name, weight in learner.net.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=0)


def broken_env():
    env = monobeast.environment.make("Catch")

    def step(action):
        raise ValueError("the simulator is out of coffee")

    env.step = step
    return env


def hanging_env():
    env = monobeast.environment.make("Catch")
    env.step = lambda action: signal.pause()
    return env
