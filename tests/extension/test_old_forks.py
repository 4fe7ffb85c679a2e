# SPDX-License-Identifier: Apache-2.0
"""Learners written for TorchBeast in 2019 run unchanged on the extension."""

import argparse
import re
import threading
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import libtorchbeast
import monobeast
import nest
import polybeast
from core.algorithm.distributions import ActionDistribution
from core.errors import Exit
from core.running.supervise import start_thread
from tests import old_fork_learner
from tests.conftest import DEADLINE_S, wait_until

T, B = 5, 4
EPISODE_STEPS = 3

# Old code has no seeds to give.
pytestmark = pytest.mark.filterwarnings("ignore:.* takes no seed")


class Echo:
    """Rewards the action that the observation shows. A time limit ends each episode.

    As environments were in 2019: no base class, `reset` returns the observation alone,
    `step` four values.
    """

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self):
        self._steps = 0
        return self._observe()

    def step(self, action):
        reward = float(action == self._shown)
        self._steps += 1
        done = self._steps == EPISODE_STEPS
        info = {"TimeLimit.truncated": True} if done else {}
        return self._observe(), reward, done, info

    def _observe(self):
        self._shown = np.random.randint(2)
        return np.eye(2, dtype=np.float32)[self._shown]


class Failing(Echo):
    def step(self, action):
        raise ZeroDivisionError("this environment is broken")


@pytest.fixture
def flags(tmp_path):
    """Flags of the learner; `serve(env_class)` starts its servers."""
    flags = argparse.Namespace(
        unroll_length=T,
        batch_size=B,
        total_steps=60 * T * B,
        num_inputs=2,
        num_actions=2,
        action_dtype=torch.int64,
        discounting=0.9,
        entropy_cost=0.001,
        learning_rate=0.01,
        log_every_s=0.01,
        addresses=[],
        actorpool_errors=[],
    )
    servers = []

    def serve(env_class):
        for i in range(2):
            address = f"unix:{tmp_path}/{i}"
            server = libtorchbeast.Server(env_class, server_address=address)
            server.start()
            servers.append((server, start_thread("server", server.run)))
            flags.addresses.append(address)

    flags.serve = serve
    yield flags
    for server, thread in servers:
        server.stop()
        thread.result(timeout=DEADLINE_S)


def test_an_old_learner_learns(flags):
    torch.manual_seed(1)
    flags.serve(Echo)
    stats = start_thread("main", old_fork_learner.train, flags).result(DEADLINE_S)
    assert flags.actorpool_errors == []
    assert stats["step"] >= flags.total_steps
    rows = [rows for rows in stats["rows"][-20:] if rows.done.any()]
    mean_return = torch.cat([r.episode_return[r.done] for r in rows]).mean().item()
    assert mean_return > 0.9 * EPISODE_STEPS  # Half of them by chance.


def test_actions_may_be_of_another_integer_type(flags):
    flags.serve(Echo)
    flags.total_steps = 3 * T * B
    flags.action_dtype = torch.uint8
    stats = start_thread("main", old_fork_learner.train, flags).result(DEADLINE_S)
    assert flags.actorpool_errors == []
    assert stats["step"] >= flags.total_steps


def test_a_broken_environment_ends_an_old_main_loop(flags):
    flags.serve(Failing)
    main = start_thread("main", old_fork_learner.train, flags)
    with pytest.raises(libtorchbeast.ActorError, match="this environment is broken"):
        main.result(timeout=DEADLINE_S)
    # Nothing that would keep the program alive.
    names = ("actorpool", "learner", "inference")
    wait_until(lambda: not any(t.name.startswith(names) for t in threading.enumerate()))
    (error,) = flags.actorpool_errors
    assert "this environment is broken" in str(error)


def test_a_truncated_episode_is_one_row_for_an_old_learner(flags):
    flags.serve(Echo)
    flags.total_steps = 3 * T * B
    stats = start_thread("main", old_fork_learner.train, flags).result(DEADLINE_S)
    for rows in stats["rows"]:
        # Three steps, each a transition with its own reward, and the next game.
        assert torch.equal(rows.done, rows.episode_step == EPISODE_STEPS)
        assert set(rows.episode_step.unique().tolist()) <= {1, 2, 3}
        begins = torch.where(rows.done[:-1], 0.0, rows.episode_return[:-1])
        assert torch.equal(rows.episode_return[1:], begins + rows.rewards[1:])


# ---------------------------------------------------------------- docs/migrating.md


class MovedNet(nn.Module):
    """A network of 2019, with the five changes that docs/migrating.md names."""

    def __init__(self, observation_space, action_space, **_):
        super().__init__()
        self.num_actions = int(action_space.n)
        self.distribution = ActionDistribution(action_space)
        self.fc = nn.Linear(np.prod(observation_space.shape), 16)
        self.core = nn.LSTM(16 + self.num_actions + 1, 16, 2)
        self.policy = nn.Linear(16, self.num_actions)
        self.baseline = nn.Linear(16, 1)

    def initial_state(self, batch_size):
        return tuple(torch.zeros(2, batch_size, 16) for _ in range(2))

    def forward(self, inputs, core_state=()):
        x = inputs["observation"]
        T, B, *_ = x.shape
        x = F.relu(self.fc(x.view(T * B, -1).float()))
        last_action = F.one_hot(inputs["last_action"].view(T * B), self.num_actions)
        reward = torch.clamp(inputs["reward"], -1, 1).view(T * B, 1)
        x = torch.cat([x, reward, last_action.float()], dim=-1).view(T, B, -1)
        outputs = []
        for row, notdone in zip(x.unbind(), (~inputs["done"]).float().unbind()):
            core_state = nest.map(notdone.view(1, -1, 1).mul, core_state)
            output, core_state = self.core(row.unsqueeze(0), core_state)
            outputs.append(output)
        x = torch.flatten(torch.cat(outputs), 0, 1)
        return dict(
            policy_logits=self.policy(x).view(T, B, -1),
            baseline=self.baseline(x).view(T, B),
        ), core_state


def test_a_moved_net_trains(monkeypatch, tmp_path):
    monkeypatch.setattr(monobeast, "Net", MovedNet)
    argv = ["--env", "Catch", "--serial", "--total_steps", "50", "--batch_size", "5"]
    argv += ["--unroll_length", "5", "--savedir", str(tmp_path), "--xpid", "moved"]
    flags = monobeast.parse_flags(argv)
    assert monobeast.train(flags) is Exit.DONE


def test_the_page_on_migrating_tells_the_flags_and_their_defaults():
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    defaults = vars(polybeast.parse_flags([])) | vars(monobeast.parse_flags([]))
    rows = re.findall(r"^\| `--(\w+)`[^|]*\|([^|]+)\|([^|]+)\|$", page, re.MULTILINE)
    assert len(rows) > 10
    for flag, _, now in rows:
        assert (flag in defaults) == (not now.strip().startswith("removed")), flag
        if now.strip().replace(".", "").isdecimal():
            assert defaults[flag] == float(now), flag
