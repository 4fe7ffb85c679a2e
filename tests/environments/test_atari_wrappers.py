# SPDX-License-Identifier: Apache-2.0
"""Atari preprocessing: frame by frame against Gymnasium's, and cases by hand."""

import runpy
import sys
import types

import cv2
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

import atari_wrappers
from atari_wrappers import (
    EpisodicLife,
    FireReset,
    MaxAndSkip,
    NoopReset,
    WarpFrame,
    make_atari,
    wrap,
)
from core.environments import toys

# ------------------------------------------------- Against Gymnasium, frame by frame

# A game without lives, one with, one that flickers, one whose lives go up.
GAMES = ["Pong", "SpaceInvaders", "Seaquest", "Assault"]


def gymnasium_stack(env_id, *, terminal_on_life_loss=False, **kwargs):
    env = gym.make(env_id, frameskip=1, **kwargs)
    env = AtariPreprocessing(env, terminal_on_life_loss=terminal_on_life_loss)
    return FrameStackObservation(env, 4)


def assert_same_play(ours, theirs, *, seed, num_steps, resets=True):
    """Step both with the same random actions; return the rewards and ends seen."""
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    actions = np.random.default_rng(seed).integers(ours.action_space.n, size=num_steps)
    assert_same_pictures(ours.reset(seed=seed)[0], theirs.reset(seed=seed)[0])
    rewards, ends = 0.0, 0
    for step, action in enumerate(actions):
        observation, reward, *done, info = ours.step(action)
        expected, expected_reward, *expected_done, expected_info = theirs.step(action)
        assert (reward, done) == (expected_reward, expected_done), step
        assert info["lives"] == expected_info["lives"]
        rewards += abs(reward)
        if any(done):
            # Gymnasium's picture of a game that ends within a skip is an older one.
            ends += 1
            if not resets:
                break
            observation, expected = ours.reset()[0], theirs.reset()[0]
        assert_same_pictures(observation, expected, f"step {step}")
    ours.close()
    theirs.close()
    return rewards, ends


def assert_same_pictures(got, expected, where="reset"):
    """cv2 rounds some halves the other way: see the tests of WarpFrame."""
    off = np.abs(got.astype(int) - expected)
    assert got.shape == expected.shape and off.max() <= 1 and off.mean() < 0.001, where


@pytest.mark.parametrize("game", GAMES)
def test_pictures_rewards_and_ends_equal_those_of_gymnasium(game):
    ours = make_atari(f"{game}NoFrameskip-v4", fire_reset=False, episodic_life=False)
    theirs = gymnasium_stack(f"{game}NoFrameskip-v4")
    rewards, _ = assert_same_play(ours, theirs, seed=1, num_steps=397)
    assert rewards > 0  # Something happened.


def test_play_equals_that_of_gymnasium_over_several_games():
    ours = make_atari("BreakoutNoFrameskip-v4", fire_reset=False, episodic_life=False)
    theirs = gymnasium_stack("BreakoutNoFrameskip-v4")
    rewards, ends = assert_same_play(ours, theirs, seed=5, num_steps=613)
    assert rewards > 0 and ends >= 2


@pytest.mark.parametrize("game", ["Breakout", "SpaceInvaders"])
def test_a_lost_life_ends_the_episode_where_gymnasium_says(game):
    ours = make_atari(f"{game}NoFrameskip-v4", fire_reset=False)
    theirs = gymnasium_stack(f"{game}NoFrameskip-v4", terminal_on_life_loss=True)
    _, ends = assert_same_play(ours, theirs, seed=7, num_steps=499, resets=False)
    assert ends == 1


def test_the_machado_protocol_plays_as_gymnasium_does_with_the_same_options():
    # Gymnasium needs some no-ops.
    options = atari_wrappers.options_of({"atari_protocol": "machado", "noop_max": 30})
    ours = make_atari("FreewayNoFrameskip-v4", **options)
    theirs = gymnasium_stack(
        "ALE/Freeway-v5", repeat_action_probability=0.25, full_action_space=True
    )
    assert ours.action_space.n == 18
    assert_same_play(ours, theirs, seed=3, num_steps=307)


def test_the_id_names_the_game_and_the_options_decide_the_rest():
    one, other = make_atari("ALE/Pong-v5"), make_atari("PongNoFrameskip-v4")
    assert_same_play(one, other, seed=2, num_steps=53)


def warp(picture):
    env = gym.Env()
    env.observation_space = gym.spaces.Box(0, 255, picture.shape, np.uint8)
    return WarpFrame(env).observation(picture)


# The sizes of ALE's screens, one that is left as it is, and one that is enlarged.
@pytest.mark.parametrize("height", [210, 214, 230, 250, 84, 50])
def test_a_scaled_pixel_is_the_mean_of_the_area_that_it_covers(height):
    width = 84 if height == 84 else 160
    picture = np.random.default_rng(height).integers(0, 256, (height, width), np.uint8)
    # Each pixel as 84x84 parts of equal size; then the mean of what a new pixel covers.
    rows = np.repeat(picture.astype(np.int64), 84, axis=0).reshape(84, height, width)
    columns = np.repeat(rows.sum(axis=1), 84, axis=1).reshape(84, 84, width)
    sums, area = columns.sum(axis=2), height * width
    got = warp(picture)
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, np.rint(sums / area))
    if height >= 84:  # cv2 has another rule for enlarging.
        theirs = cv2.resize(picture, (84, 84), interpolation=cv2.INTER_AREA)
        is_half = 2 * (sums % area) == area
        np.testing.assert_array_equal(got[~is_half], theirs[~is_half])
        assert np.abs(got.astype(int) - theirs).max() <= 1
        assert height != 210 or is_half.any()


# ----------------------------------------------------------------------- By hand

SIZE = 84  # Of the fake's screens: WarpFrame leaves them as they are.
MEANINGS = ["NOOP", "FIRE", "RIGHT"]


class Script(gym.Env):
    """Games that follow a script; each picture tells which frame of which game it is.

    A game is a string with the lives at each frame, from the reset on; the game is over
    at the last one. Frame `f` of game `g` is the single pixel [g, f], and its reward
    `f`. Once all games have been played the last one is played again.
    """

    observation_space = gym.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
    action_space = gym.spaces.Discrete(len(MEANINGS))

    def __init__(self, *games, meanings=MEANINGS):
        self.games = games
        self.meanings = meanings
        self.game, self.frame = -1, 0
        self.actions = []  # (game, frame that it led to, action)
        self.seeds = []
        self.ale = types.SimpleNamespace(
            lives=lambda: int(self.lives()), getScreenGrayscale=self.draw
        )

    def get_action_meanings(self):
        return self.meanings

    def lives(self):
        return self.games[min(self.game, len(self.games) - 1)][self.frame]

    def is_over(self):
        return self.frame == len(self.games[min(self.game, len(self.games) - 1)]) - 1

    def draw(self, screen):
        screen[...] = 0
        screen[self.game, self.frame] = 255

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.game, self.frame = self.game + 1, 0
        return None, {}

    def step(self, action):
        assert not self.is_over(), "a finished game was stepped"
        self.frame += 1
        self.actions.append((self.game, self.frame, action))
        return None, float(self.frame), self.is_over(), False, {}


def shown(picture):
    """Return the set of (game, frame) that a picture shows."""
    return {(int(game), int(frame)) for game, frame in np.argwhere(picture)}


def newest(observation):
    return shown(observation[-1])


class FixedNoops:
    def __init__(self, number):
        self.number = number

    def integers(self, low, high):
        assert low <= self.number < high
        return self.number


def test_without_skip_a_step_shows_one_frame():
    env = MaxAndSkip(Script("0" * 20), 1)
    env.reset()
    picture, reward, *_ = env.step(2)
    assert shown(picture) == {(0, 1)}
    assert reward == 1


def test_a_game_that_ends_within_the_skip_keeps_its_reward_and_last_frame():
    env = MaxAndSkip(Script("0" * 7), 4)  # Over at frame 6.
    env.reset()
    env.step(0)
    picture, reward, terminated, truncated, _ = env.step(0)
    assert terminated and not truncated
    assert reward == 5 + 6
    assert shown(picture) == {(0, 6)}


def test_a_game_that_ends_with_the_skip_shows_the_last_two_frames():
    env = MaxAndSkip(Script("0" * 5), 4)
    env.reset()
    picture, _, terminated, _, _ = env.step(0)
    assert terminated
    assert shown(picture) == {(0, 3), (0, 4)}


def test_noops_range_from_one_to_the_most():
    env = NoopReset(Script("0" * 40), 7)
    env.reset(seed=1)
    numbers = set()
    for _ in range(100):
        env.unwrapped.actions.clear()
        env.reset()
        assert {action for _, _, action in env.unwrapped.actions} == {0}
        numbers.add(len(env.unwrapped.actions))
    assert numbers == {1, 2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize(("noops", "expected"), [(1, (0, 1)), (2, (1, 0)), (5, (1, 3))])
def test_noops_that_end_the_game_go_on_in_a_new_one(noops, expected):
    env = MaxAndSkip(NoopReset(Script("000", "0" * 20), 30), 4)
    env.np_random = FixedNoops(noops)
    picture, _ = env.reset()
    assert shown(picture) == {expected}


def test_a_game_that_noops_have_ended_is_not_played_again():
    env = NoopReset(Script("00", "0" * 40), 30)
    env.reset(seed=7)
    assert env.unwrapped.seeds == [7, None]


def test_a_lost_life_ends_the_episode_and_the_skip():
    env = MaxAndSkip(EpisodicLife(Script("33" + "2" * 20)), 4)
    env.reset()
    picture, reward, terminated, truncated, info = env.step(2)
    assert terminated and not truncated and info["life_lost"]
    assert reward == 1 + 2
    assert shown(picture) == {(0, 2)}


def test_after_a_lost_life_the_same_game_goes_on():
    env = MaxAndSkip(EpisodicLife(Script("33" + "2" * 20)), 4)
    env.reset()
    env.step(2)
    picture, info = env.reset()
    assert info["new_game"] is False
    assert shown(picture) == {(0, 3)}
    assert env.unwrapped.actions[-1] == (0, 3, 0)  # One no-op.
    _, _, terminated, _, info = env.step(2)
    assert not terminated and "life_lost" not in info


def test_the_last_life_ends_the_game():
    env = MaxAndSkip(EpisodicLife(Script("2211110", "2" * 20)), 4)
    env.reset()
    assert env.step(0)[4]["life_lost"]
    env.reset()
    _, _, terminated, _, info = env.step(0)
    assert terminated and "life_lost" not in info
    picture, info = env.reset()
    assert info["new_game"] is True
    assert shown(picture) == {(1, 0)}


def test_a_life_won_ends_nothing_and_can_be_lost():
    env = MaxAndSkip(EpisodicLife(Script("2233322222")), 4)
    env.reset()
    assert not env.step(0)[2]
    _, _, terminated, _, info = env.step(0)
    assert terminated and info["life_lost"]


def test_a_game_without_lives_left_goes_on_until_it_is_over():
    env = MaxAndSkip(EpisodicLife(Script("110000000", "2" * 20)), 4)
    env.reset()
    _, _, terminated, _, _ = env.step(0)
    assert not terminated
    _, _, terminated, _, info = env.step(0)
    assert terminated and "life_lost" not in info


def test_a_game_that_ends_with_lives_left_is_over():
    env = MaxAndSkip(EpisodicLife(Script("33332", "3" * 20)), 4)
    env.reset()
    _, _, terminated, _, info = env.step(0)
    assert terminated and "life_lost" not in info
    assert env.reset()[1]["new_game"] is True


def test_a_life_lost_in_the_first_frame_of_a_game_ends_the_episode():
    env = MaxAndSkip(EpisodicLife(Script("1" * 4, "3" + "2" * 20)), 4)
    env.reset()
    env.step(0)
    env.reset()
    _, reward, terminated, _, info = env.step(0)
    assert terminated and info["life_lost"]
    assert reward == 1


def test_a_life_lost_on_the_way_to_an_episode_does_not_end_it():
    env = MaxAndSkip(EpisodicLife(Script("33" + "2" + "1" * 20)), 4)
    env.reset()
    assert env.step(0)[4]["life_lost"]
    env.reset()
    _, _, terminated, _, info = env.step(0)
    assert not terminated and "life_lost" not in info


def test_a_reset_in_the_middle_of_a_life_begins_a_new_game():
    env = MaxAndSkip(EpisodicLife(Script("2" * 20)), 4)
    env.reset()
    env.step(0)
    picture, info = env.reset()
    assert shown(picture) == {(1, 0)}
    assert info["new_game"] is True


def test_a_seed_begins_a_new_game_even_after_a_lost_life():
    env = MaxAndSkip(EpisodicLife(Script("22" + "1" * 20)), 4)
    env.reset()
    assert env.step(0)[4]["life_lost"]
    picture, info = env.reset(seed=1)
    assert shown(picture) == {(1, 0)}
    assert info["new_game"] is True


def test_a_game_that_ends_on_the_way_to_the_next_life_gives_way_to_a_new_one():
    env = MaxAndSkip(EpisodicLife(Script("22110", "2" * 20)), 4)
    env.reset()
    env.step(0)  # Up to frame 2, where a life is lost.
    env.unwrapped.games = ("2211", "2" * 20)  # Now over at frame 3.
    picture, info = env.reset()
    assert shown(picture) == {(1, 0)}
    assert info["new_game"] is True
    assert not env.step(0)[2]


def fire_stack(*games, meanings=MEANINGS, **options):
    return wrap(Script(*games, meanings=meanings), **{"noop_max": 0, **options})


def test_an_episode_begins_with_fire_and_action_two():
    env = fire_stack("3" * 30)
    observation, info = env.reset()
    assert [action for _, _, action in env.unwrapped.actions] == [1] * 4 + [2] * 4
    assert newest(observation) == {(0, 7), (0, 8)}
    assert info["new_game"] is True


def test_a_single_noop_is_pressed():
    env = fire_stack("3" * 9, noop_max=1, fire_reset=False)
    env.reset()
    assert env.unwrapped.actions == [(0, 1, 0)]


def test_fire_is_pressed_again_after_a_lost_life():
    env = fire_stack("3" * 10 + "2" * 30)
    env.reset()
    assert env.step(0)[4]["life_lost"]  # At frame 10.
    env.unwrapped.actions.clear()
    observation, info = env.reset()
    presses = [action for _, _, action in env.unwrapped.actions]
    assert presses == [0] + [1] * 4 + [2] * 4
    assert newest(observation) == {(0, 18), (0, 19)}
    assert info["new_game"] is False


@pytest.mark.parametrize("length", [2, 4, 5, 7, 9])  # Over by FIRE, or by action 2.
def test_a_game_that_fire_ends_is_not_shown_to_the_agent(length):
    env = fire_stack("3" * length, "3" * 30)
    observation, info = env.reset()
    assert newest(observation) == {(1, 7), (1, 8)}
    assert info["new_game"] is True
    _, _, terminated, _, _ = env.step(0)
    assert not terminated


def test_a_life_that_fire_loses_does_not_end_the_episode_after():
    env = fire_stack("33" + "2" * 30)
    observation, info = env.reset()
    # FIRE (2 frames), a no-op to leave the lost life, FIRE and action 2.
    presses = [action for _, _, action in env.unwrapped.actions]
    assert presses == [1, 1, 0] + [1] * 4 + [2] * 4
    assert newest(observation) == {(0, 10), (0, 11)}
    assert info["new_game"] is True  # This reset began it, though not at its end.
    _, _, terminated, _, _ = env.step(0)
    assert not terminated


def test_a_game_that_fire_ends_after_a_lost_life_is_told():
    env = fire_stack("3" * 10 + "2" * 4, "3" * 30)  # Over at frame 13.
    env.reset()
    assert env.step(0)[4]["life_lost"]
    observation, info = env.reset()
    assert info["new_game"] is True
    assert newest(observation) == {(1, 7), (1, 8)}


def test_games_without_fire_begin_without_it():
    env = fire_stack("3" * 30, meanings=["NOOP", "UP", "RIGHT"])
    observation, _ = env.reset()
    assert newest(observation) == {(0, 0)}


def test_a_game_that_fire_always_ends_is_an_error():
    env = FireReset(MaxAndSkip(Script("00"), 4))
    with pytest.raises(RuntimeError, match="fire_reset=False"):
        env.reset()


def test_the_time_limit_truncates_at_the_end_of_a_step():
    env = wrap(Script("0" * 60), noop_max=0, fire_reset=False, max_frames=10)
    env.reset()
    ends = [env.step(0) for _ in range(3)]
    assert [end[2:4] for end in ends] == [(False, False), (False, False), (False, True)]
    observation, reward = ends[-1][:2]
    assert newest(observation) == {(0, 11), (0, 12)}
    assert reward == 9 + 10 + 11 + 12
    observation, info = env.reset()
    assert newest(observation) == {(1, 0)}
    assert info["new_game"] is True


def test_a_game_that_ends_with_its_time_is_terminated():
    env = wrap(Script("0" * 12), noop_max=0, fire_reset=False, max_frames=10)
    env.reset()
    env.step(0)
    env.step(0)
    _, _, terminated, _, info = env.step(0)
    assert terminated and "life_lost" not in info


def test_the_time_limit_counts_frames_over_all_lives_and_noops():
    env = wrap(Script("3" * 5 + "2" * 60), noop_max=30, fire_reset=False, max_frames=14)
    env.np_random = FixedNoops(3)
    env.reset()  # To frame 3.
    assert env.step(0)[4]["life_lost"]  # Frame 5.
    env.reset()  # Frame 6, a no-op.
    assert env.step(0)[3] is False  # Frame 10.
    assert env.step(0)[3] is True


def test_a_life_lost_when_the_time_is_up_ends_the_game():
    env = wrap(Script("3" * 4 + "2" * 60), noop_max=0, fire_reset=False, max_frames=4)
    env.reset()
    _, _, terminated, truncated, info = env.step(0)
    assert terminated and truncated and "life_lost" not in info
    observation, info = env.reset()
    assert newest(observation) == {(1, 0)}
    assert info["new_game"] is True


def test_a_time_that_is_up_on_the_way_to_the_next_life_begins_a_new_game():
    env = wrap(Script("3" * 4 + "2" * 60), noop_max=0, fire_reset=False, max_frames=5)
    env.reset()
    assert env.step(0)[4]["life_lost"]  # Frame 4.
    observation, info = env.reset()  # Frame 5, a no-op.
    assert newest(observation) == {(1, 0)}
    assert info["new_game"] is True


def test_an_episode_begins_with_a_stack_of_its_first_picture():
    env = wrap(Script("3" * 10 + "2" * 30), noop_max=0, fire_reset=False)
    observation, _ = env.reset()
    assert [shown(picture) for picture in observation] == [{(0, 0)}] * 4
    env.step(0)
    env.step(0)
    assert env.step(0)[4]["life_lost"]
    observation, _ = env.reset()
    assert [shown(picture) for picture in observation] == [{(0, 11)}] * 4


def test_observations_can_be_kept_and_written_into():
    env = wrap(Script("0" * 80), noop_max=0, fire_reset=False)
    twin = wrap(Script("0" * 80), noop_max=0, fire_reset=False)
    kept = [env.reset()[0]]
    expected = [twin.reset()[0].copy()]
    for step in range(7):
        kept.append(env.step(0)[0])
        expected.append(twin.step(0)[0].copy())
        np.testing.assert_array_equal(kept[step + 1], expected[step + 1])
        if step % 2:
            kept[step + 1][...] = expected[step + 1][...] = 9
    np.testing.assert_array_equal(kept, expected)


# --------------------------------------------------------------- Options and videos


def test_the_defaults_of_make_atari_are_the_impala_protocol():
    defaults = atari_wrappers.wrap.__kwdefaults__ | make_atari.__kwdefaults__
    for point, value in atari_wrappers.PROTOCOLS["impala"].items():
        assert defaults[point] == value, point


def test_flags_change_the_options_of_a_protocol():
    changes = {"sticky_actions": 0.0, "full_action_space": False}
    flags = {"atari_protocol": "machado", **changes, "noop_max": None, "seed": 7}
    machado = atari_wrappers.PROTOCOLS["machado"]
    assert atari_wrappers.options_of(flags) == {**machado, **changes}
    assert machado["sticky_actions"] == 0.25


@pytest.mark.parametrize(
    ("env_id", "make_env", "expected"),
    [
        ("PongNoFrameskip-v4", lambda: gym.make("CartPole-v1"), "CartPole-v1"),
        ("PongNoFrameskip-v4", toys.Catch, "Catch"),
        ("my-task", toys.Catch, None),
    ],
)
def test_options_are_recorded_of_atari_games_alone(env_id, make_env, expected):
    flags = {"env": env_id, "atari_protocol": None}
    options = {} if expected is None else {"create_env": expected}
    assert atari_wrappers.recorded_options(flags, make_env()) == options


def test_options_are_recorded_as_the_environment_has_them():
    flags = {"env": "BreakoutNoFrameskip-v4", "atari_protocol": "machado"}
    options = {**atari_wrappers.options_of(flags), "frame_skip": 3, "noop_max": 2}
    env = gym.Wrapper(make_atari("PongNoFrameskip-v4", **options))
    recorded = atari_wrappers.recorded_options(flags, env)
    assert recorded == {"atari_protocol": "machado", **options}


@pytest.mark.parametrize(
    ("env_id", "expected"),
    [
        ("PongNoFrameskip-v4", True),
        ("ALE/Pong-v5", True),
        ("ale_py:ALE/Pong-v5", True),
        ("gym:PongNoFrameskip-v4", True),
        ("CartPole-v1", False),
        ("gym:CartPole-v1", False),
        ("Catch", False),
        ("package.module:make", False),
    ],
)
def test_is_atari_knows_the_ids_of_ale(env_id, expected):
    assert atari_wrappers.is_atari(env_id) is expected


def test_missing_ale_py_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)  # `import` raises an exception.
    module = runpy.run_path(atari_wrappers.__file__)
    with pytest.raises(ValueError, match=r"ale_py.*pip install ale-py"):
        module["make_atari"]("PongNoFrameskip-v4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_id": "CartPole-v1"}, "CartPole-v1 is not the id of an Atari game"),
        ({"sticky_actions": 1.5}, r"sticky_actions is 1.5 but must be in \[0, 1\]"),
        ({"sticky_actions": -0.5}, r"sticky_actions is -0.5 but must be in \[0, 1\]"),
        ({"noop_max": -1}, "noop_max is -1 but must be at least 0"),
        ({"frame_skip": 0}, "frame_skip is 0 but must be at least 1"),
        ({"max_frames": 0}, "max_frames is 0 but must be at least 1"),
        ({"env_id": "ALE/Backgammon-v5"}, "first action is FIRE.*--full_action_space"),
        ({"env_id": "ALE/Backgammon-v5", "noop_max": 0}, "first action is FIRE"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_atari(**{"env_id": "PongNoFrameskip-v4", **options})


def test_a_game_without_a_noop_can_be_played_where_nothing_presses_it():
    env = fire_stack("3" * 9, meanings=["FIRE", "UP", "RIGHT"], episodic_life=False)
    env.reset()
    assert env.unwrapped.actions == []


def test_classic_gym_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "core.environments.classic_atari", raising=False)
    monkeypatch.setitem(sys.modules, "atari_py", None)  # Makes the import fail.
    with pytest.raises(ValueError, match=r"needs atari_py.*pip install -e .\[classic"):
        make_atari("gym:PongNoFrameskip-v4")


def test_an_environment_that_skips_frames_itself_is_refused():
    with pytest.raises(ValueError, match=r"skips frames by itself \(4\)"):
        wrap(gym.make("ALE/Pong-v5"))


def test_wrap_takes_an_environment_of_gymnasium():
    one = wrap(gym.make("BreakoutNoFrameskip-v4"))
    assert_same_play(one, make_atari("BreakoutNoFrameskip-v4"), seed=2, num_steps=97)


def test_one_picture_per_step_plays_at_the_speed_of_the_console():
    assert make_atari("PongNoFrameskip-v4").metadata["render_fps"] == 15
    env = make_atari("PongNoFrameskip-v4", frame_skip=3, render_mode="rgb_array")
    assert env.metadata["render_fps"] == 20 and env.render_mode == "rgb_array"
