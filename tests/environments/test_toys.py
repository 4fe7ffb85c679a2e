# SPDX-License-Identifier: Apache-2.0
"""Catch and Memory: what the best policies earn, and that no shortcut earns it."""

import itertools

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from core.environments.toys import Catch, Memory
from core.errors import MakeError

NUM_EPISODES = 29


def play(env, policy, num_episodes=NUM_EPISODES):
    """Return the returns; policy(observation, last_action, last_reward, first)."""
    returns = []
    for episode in range(num_episodes):
        observation, _ = env.reset(seed=episode)
        action, reward, total, first, ended = 0, 0.0, 0.0, True, False
        while not ended:
            action = policy(observation, action, reward, first)
            observation, reward, terminated, truncated, _ = env.step(action)
            total, first, ended = total + reward, False, terminated or truncated
        returns.append(total)
    return returns


@pytest.mark.parametrize("env_class", [Catch, Memory])
def test_toys_obey_the_gymnasium_api(env_class):
    check_env(env_class(), skip_render_check=True)


@pytest.mark.parametrize("env_class, mode", [(Catch, "human"), (Memory, "rgb_array")])
def test_toys_refuse_to_draw_what_they_cannot(env_class, mode):
    with pytest.raises(MakeError, match=f"has no render_mode '{mode}'"):
        env_class(render_mode=mode)


def ball_and_paddle(board):
    if board.sum() == 1.0:  # Caught: both in one cell.
        return 9, int(board[-1].argmax()), int(board[-1].argmax())
    (rows, columns) = np.nonzero(board)
    paddle = columns[-1] if rows[0] < 9 else None
    return int(rows[0]), int(columns[0]), paddle


def test_catch_perfect_policy_always_earns_one():
    def follow(board, *_):
        _, ball, paddle = ball_and_paddle(board)
        return 1 + np.sign(ball - paddle)

    assert play(Catch(), follow) == [1.0] * NUM_EPISODES


def test_catch_worst_policy_always_loses_one():
    def flee(board, *_):
        _, ball, _ = ball_and_paddle(board)
        return 0 if ball >= 2 else 2

    assert play(Catch(), flee) == [-1.0] * NUM_EPISODES


def test_catch_ball_starts_in_every_column_and_falls_straight_for_nine_steps():
    starts = set()
    for seed in range(NUM_EPISODES):
        env = Catch()
        board, _ = env.reset(seed=seed)
        row, column, paddle = ball_and_paddle(board)
        assert (row, paddle) == (0, 2)
        starts.add(column)
        for step in range(1, 10):
            board, reward, terminated, truncated, _ = env.step(1)
            assert board[step, column] == 1.0
            assert board.dtype == np.float32
            assert terminated == (step == 9) and not truncated
            assert reward == (0.0 if step < 9 else 1.0 if column == 2 else -1.0)
    assert starts == {0, 1, 2, 3, 4}


def test_catch_paddle_stops_at_the_walls():
    env = Catch()
    env.reset(seed=3)
    for action, end in ((0, 0), (2, 4)):
        for _ in range(4):
            board, *_ = env.step(action)
        assert board[-1, end] == 1.0


def test_catch_renders_what_it_observes():
    env = Catch(render_mode="rgb_array")
    board, _ = env.reset(seed=5)
    image = env.render()
    assert image.shape == (160, 80, 3) and image.dtype == np.uint8
    np.testing.assert_array_equal(image[::16, ::16, 0], 255 * board)


def test_memory_shows_the_cue_once_and_the_signal_at_the_last_decision():
    cues = set()
    for seed in range(NUM_EPISODES):
        env = Memory()
        observation, _ = env.reset(seed=seed)
        cues.add(float(observation[0]))
        seen = [observation]
        for _ in range(6):
            observation, _, terminated, _, _ = env.step(0)
            assert not terminated
            seen.append(observation)
        assert [tuple(o) for o in seen[1:]] == [(0, 0)] * 5 + [(0, 1)]
        last, _, terminated, truncated, _ = env.step(0)
        assert terminated and not truncated and not last.any()
    assert cues == {-1.0, 1.0}


def test_memory_perfect_recurrent_policy_earns_one():
    cue = 0.0

    def remember(observation, _action, _reward, first):
        nonlocal cue
        if first:
            cue = observation[0]
        return int(observation[1] == 1.0 and cue > 0)

    assert play(Memory(), remember) == [1.0] * NUM_EPISODES


def test_memory_best_feed_forward_policy_earns_zero():
    """All deterministic policies of (observation, last action, last reward).

    After the first step the last reward is a function of the last action.
    """
    one_seed_per_cue = {}
    for seed in range(NUM_EPISODES):
        observation, _ = Memory().reset(seed=seed)
        one_seed_per_cue[float(observation[0])] = seed

    def mean_return(table):
        cue_to_action, blank_to_action, signal_to_action = table
        total = 0.0
        for seed in one_seed_per_cue.values():
            env = Memory()
            observation, _ = env.reset(seed=seed)
            action = cue_to_action[int(observation[0] > 0)]
            terminated = False
            while not terminated:
                observation, reward, terminated, _, _ = env.step(action)
                total += reward
                last = signal_to_action if observation[1] else blank_to_action
                action = last[action]
        return total / 2

    pairs = list(itertools.product([0, 1], repeat=2))
    means = {table: mean_return(table) for table in itertools.product(pairs, repeat=3)}
    assert len(means) == 64
    assert max(means.values()) == 0.0
    copy = (0, 1)
    assert means[copy, copy, copy] == -0.5  # The chain, as the docstring says.


def test_memory_random_policy_earns_what_the_docstring_says():
    rng = np.random.default_rng(7)
    returns = play(Memory(), lambda *_: int(rng.integers(2)), num_episodes=2003)
    assert np.mean(returns) == pytest.approx(-1.5, abs=0.1)
