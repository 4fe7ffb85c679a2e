# SPDX-License-Identifier: Apache-2.0
"""`core.actors.processes`: deaths of actors, and rollouts that arithmetic can check."""

import contextlib
import errno
import itertools
import multiprocessing.forkserver
import os
import random
import signal
import sys
import threading
import time
from multiprocessing.context import BaseContext
from pathlib import Path

import numpy as np
import psutil
import pytest

from core.actors import fork_server, prepare, processes
from core.algorithm.replay import create_replay
from core.environments.toys import Catch
from core.errors import ConfigError
from core.nests import map_nest
from core.running import unit
from core.running.supervise import start_thread
from core.running.unit import Unit
from tests.actors.pool import E, Pool, make_flags
from tests.conftest import DEADLINE_S, ended, wait_until
from tests.counting_env import check_rollout, decode


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_actors_write_rollouts_that_add_up_under_every_start_method(method):
    flags = ["--start_method", method, "--num_actors", "1"]  # `spawn` imports torch.
    with Pool(make_flags("tests.counting_env:make", *flags)) as pool:
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


def test_an_actor_that_finds_no_descriptors_is_tried_again(monkeypatch, caplog):
    def fail(*args):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    flags = make_flags("Catch", "--start_method", "fork", "--num_actors", "1")
    actors = Pool(flags).actors
    monkeypatch.setattr(BaseContext, "Pipe", fail)
    with contextlib.closing(actors), pytest.raises(OSError, match="open files"):
        (slot,) = actors.slots
        while True:
            slot.budget.start_at = 0.0
            actors.start()
            assert slot.process is slot.pipe is None
    assert caplog.text.count("Actor 0 could not be started (OSError(24") == 4


def test_killed_actors_tear_no_rollout_and_block_nobody():
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

        for kill in range(1, 31):
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
        assert actors.discarded <= 30


def test_an_actor_ends_with_all_that_its_environments_started():
    with Pool(make_flags("tests.fault_env:Forking")) as pool:
        slot = pool.actors.slots[0]
        wait_until(lambda: pool.next_rollout() and slot.budget._has_delivered)
        actor = psutil.Process(slot.process.pid)
        family = [actor, *actor.children()]
        assert len(family) == 1 + E
        actor.kill()
        wait_until(lambda: pool.actors.poll(0.01) or pool.actors.restarts)
        assert ended(family)
        wait_until(lambda: pool.next_rollout() and slot.budget._has_delivered)
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
    assert seeds == set(prepare.first_env_seeds(flags, 0))


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


def test_closed_actors_leave_no_thread():
    """With a second thread, the next actors of this process could not be forked."""
    with Pool(make_flags("Catch")) as pool:
        pool.next_rollout()
    wait_until(
        lambda: all(t.name != "children's output" for t in threading.enumerate())
    )


def test_actors_in_tests_use_the_fork_server_of_all_tests(run_forked):
    """It has imported what whole runs import late: a second for each of them."""
    with Pool(make_flags("Catch")) as pool:
        pool.next_rollout()
    code = "import sys; assert {'polybeast', 'torch._dynamo'} <= {*sys.modules}"
    assert run_forked(exec, code) == (0, "")


def test_while_the_fork_server_imports_nobody_waits(monkeypatch):
    """It may take seconds, in which a signal would not be answered."""
    is_ready = threading.Event()
    monkeypatch.setattr(fork_server, "wait", lambda context: is_ready.wait())
    actors = Pool(make_flags("Catch")).actors
    actors.start()
    actors.poll(0.0)
    assert not actors.pids()
    is_ready.set()
    wait_until(lambda: actors.poll(0.01) or actors.pids())
    actors.close()


def test_whenever_the_program_waits_for_a_stopped_fork_server_it_is_continued(
    monkeypatch, background
):
    """The program starts and joins actors, and waits for the import."""
    monkeypatch.setattr(fork_server, "LOOK_S", 0.01)
    stopped: set[int] = set()

    def stop_before(function):
        def stop_and_call(*args):
            stopped.add(multiprocessing.forkserver._forkserver._forkserver_pid)
            os.kill(max(stopped), signal.SIGSTOP)
            return function(*args)

        return stop_and_call

    for owner, name in ((Unit, "start"), (Unit, "join"), (fork_server, "wait")):
        monkeypatch.setattr(owner, name, stop_before(getattr(owner, name)))

    def run() -> None:
        with Pool(make_flags("Catch")) as pool:
            pool.next_rollout()

    try:
        background(run).result(timeout=DEADLINE_S)
    finally:
        (pid,) = stopped
        os.kill(pid, signal.SIGCONT)


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_out_of_memory_actors_are_killed_before_the_learner():
    with Pool(make_flags()) as pool:
        pool.next_rollout()  # So that they have begun.
        scores = [
            int(Path(f"/proc/{pid}/oom_score_adj").read_text())
            for pid in ("self", *pool.actors.pids())
        ]
    assert scores[0] < 1000 and 1000 in scores[1:], scores


def test_an_actor_that_hangs_is_replaced_while_others_go_on(caplog):
    env = "tests.fault_env:OneHangs"
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
    stats = actors.stats()
    assert (stats["actor_restarts"], stats["rollouts_discarded"]) == (1, E)
    said = "Actor 0 hangs: one call of its environment has taken 1 s (--env_step_timeou"
    assert said in caplog.text
    assert "Actor 0 died (its environment hung)" in caplog.text
    assert other.budget.quick_deaths == 0
    with pytest.raises(ValueError):  # It has been waited for.
        _ = hung.exitcode


def test_an_actor_that_was_stopped_is_continued(monkeypatch, caplog):
    monkeypatch.setattr(unit, "CONTINUE_S", 0.0)
    with Pool(make_flags("Catch")) as pool:
        pool.next_rollout()
        worker = psutil.Process(pool.actors.pids()[0])
        for process in worker, worker.parent():  # The parent is its guard.
            process.suspend()
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED)  # noqa: B023
            pool.actors.poll(0.0)
            wait_until(lambda: process.status() != psutil.STATUS_STOPPED)  # noqa: B023
    assert caplog.text.count("was stopped; continuing it") == 2
    assert pool.actors.stats()["actor_restarts"] == 0


def test_an_actor_that_waits_for_a_buffer_does_not_hang(monkeypatch, caplog):
    with Pool(make_flags("Catch", "--env_step_timeout_s", "1")) as pool:
        actors = pool.actors

        def all_full() -> bool:
            actors.poll(0.01)
            return actors.stats()["buffers_full"] == pool.flags.num_buffers

        wait_until(all_full)
        pids, later = actors.pids(), itertools.count(int(time.monotonic()) + 10**6)
        with monkeypatch.context() as patch:  # Whatever joins needs the real one.
            patch.setattr(time, "monotonic", later.__next__)
            actors._check_progress(actors.slots[0], 0.0)
        assert actors.pids() == pids and "hangs" not in caplog.text


@pytest.mark.parametrize(
    "env, said, has_traceback",
    [
        (
            "tests.actors.test_processes:broken_env",
            "simulator is out of coffee",
            True,
        ),
        ("tests.trainers.bodies:Stuck", "at least one allowed", False),
    ],
)
def test_an_actor_that_always_fails_ends_with_its_own_error(env, said, has_traceback):
    """With a traceback only if that shows a line of the environment."""
    with Pool(make_flags(env)) as pool:

        def fails() -> bool:
            pool.actors.poll(0.01)
            return False

        with pytest.raises(processes.ActorError) as error:
            wait_until(fails)
    assert "5 times in a row" in str(error.value)
    assert ("Traceback" in str(error.value)) == has_traceback
    assert said in str(error.value)


def test_close_wakes_a_learner_that_waits_for_rollouts():
    flags = make_flags()
    pool = Pool(flags)  # Not started: no rollout will ever come.
    waiting = start_thread("learner", pool.actors.take, 2)
    wait_until(lambda: pool.actors.num_waiting() == 1)
    pool.actors.close()
    assert waiting.result(timeout=DEADLINE_S) is None


def test_close_ends_actors_that_hang():
    with Pool(make_flags("tests.actors.test_processes:hanging_env")) as pool:
        pids = [slot.process.pid for slot in pool.actors.slots]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def broken_env():
    env = Catch()

    def step(action):
        # As in a file's name that is not UTF-8.
        raise ValueError("simulator is out of coffee \udcff")

    env.step = step
    return env


def hanging_env():
    env = Catch()
    env.step = lambda action: signal.pause()
    return env


def test_options_of_the_environment_are_checked():
    with pytest.raises(ConfigError, match="env_options: frame_skip is 0"):
        prepare.read_env(Catch, lambda env: {"frame_skip": 0}, DEADLINE_S)


def test_an_error_of_the_environments_own_code_is_no_wrong_configuration():
    def create_env():
        raise ValueError("operands could not be broadcast together")

    with pytest.raises(ValueError, match="broadcast"):  # Not a ConfigError.
        prepare.read_env(create_env, lambda env: {}, DEADLINE_S)


def test_a_buffer_in_the_replay_keeps_its_rollout_while_actors_write():
    """Every replayed rollout is what was new once, and no buffer is lost or twice."""
    flags = make_flags("tests.counting_env:make", "--replay_ratio", "1")
    assert flags.replay_capacity == 20 * E
    flags.replay_capacity = 4 * E
    with Pool(flags) as pool:
        actors, num_free = pool.actors, flags.num_buffers // E
        replay = create_replay(flags, 0, E, actors.reserve)
        assert (replay.capacity, replay.num_sampled) == (4, 1)
        rollouts, replayed = {}, []
        for _ in range(40):
            wait_until(lambda: actors.poll(0.01) or len(actors._full) > 0)
            new = actors.take(1)
            for index in new:
                rollouts[index] = map_nest(np.copy, pool.buffers.rollout(index))
            sampled = replay.sample()
            actors.poll(0.01)
            for index in sampled:
                got = pool.buffers.rollout(index)
                map_nest(np.testing.assert_array_equal, got, rollouts[index])
                replayed.append(index)
            actors.give_back(replay.add(new, sampled))
            assert pool.buffers_accounted_for() == num_free  # As without a replay.
        assert len(replay._ring) == 4 and len(replayed) == 39
        held = [index for slot in actors.slots for index in slot.held]
        both = [*held, *actors._free, *actors._full, *replay._ring]
        assert sorted(both) == list(range(num_free + 4))
