# SPDX-License-Identifier: Apache-2.0
"""An environment whose rollouts can be checked by arithmetic.

Every observation names the seed, game, life and step it belongs to; rewards, episode
lengths and truncations are functions of these and the action. So `check_rollout` can
tell of any two rows whether one follows the other, wherever the rollout came from:

    python -m monobeast --env tests.counting_env:make        # or make_truncating, ...
    check_rollout(rollout, previous_last_row)
"""

import struct
import threading
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

NUM_ACTIONS = 3
TRUNCATING, LIVES, NESTED, STACKED = 1, 2, 4, 8  # Bits of `Place.kind`.
LIVES_PER_GAME = 3
INFO_KEY = "half"  # In `info` of every other step.
_FORMAT = "<IIBBB"  # The fields of `Place`: 11 bytes.
STACK = (4, 1100)  # Frames, and bytes of each: the place, again and again.


class Place(NamedTuple):
    """What an observation says."""

    seed: int
    game: int  # Counted from 0 after a seeded reset.
    life: int
    step: int  # 0 on the first observation of an episode.
    kind: int

    def length(self) -> int:
        """Return the number of steps of this episode, 1 to 7."""
        return 1 + (self.seed + 3 * self.game + 5 * self.life) % 7

    def is_cut(self) -> bool:
        """Return whether this episode ends by truncation."""
        odd = (self.seed // 7 + self.game + self.life) % 2 == 1
        return bool(self.kind & TRUNCATING) and odd

    def next_episode(self) -> "Place":
        """Return the first place after this episode, if no seed comes between."""
        if self.is_last_life() or self.is_cut():
            return self._replace(game=self.game + 1, life=0, step=0)
        return self._replace(life=self.life + 1, step=0)

    def is_last_life(self) -> bool:
        return not self.kind & LIVES or self.life == LIVES_PER_GAME - 1

    def reward(self, action: int) -> float:
        """Return the reward of the step that led here: positive, sums are exact."""
        return self.game % 5 + self.step / 8 + action / 64

    def info(self) -> dict[str, float]:
        return {INFO_KEY: self.step / 2} if self.step % 2 == 0 else {}


def encode(place: Place) -> Any:
    if place.kind & STACKED:  # An episode's first frame stands for those before it.
        steps = range(place.step - STACK[0] + 1, place.step + 1)
        return np.stack([_frame(place._replace(step=max(s, 0))) for s in steps])
    code = np.frombuffer(struct.pack(_FORMAT, *place), np.uint8).copy()
    if not place.kind & NESTED:
        return code
    return {
        "code": code,
        "pair": (np.array([place.game, place.step], np.float32), place.step - 1),
        "bits": np.unpackbits(code[8:9])[:5].astype(np.int8),
        "wheel": np.array([place.step % 2, place.game % 3]),
    }


def _frame(place: Place) -> np.ndarray:
    return np.resize(np.frombuffer(struct.pack(_FORMAT, *place), np.uint8), STACK[1])


def decode(observation: Any) -> Place:
    code = observation["code"] if isinstance(observation, dict) else observation
    if code.shape == STACK:
        code = code[-1, : struct.calcsize(_FORMAT)]
    return Place(*struct.unpack(_FORMAT, np.asarray(code).tobytes()))


class CountingEnv(gym.Env):
    """The environment of the module docstring. `reset(seed=)` begins game 0."""

    def __init__(self, kind: int = 0) -> None:
        self.action_space = gym.spaces.Discrete(NUM_ACTIONS)
        code = gym.spaces.Box(0, 255, (struct.calcsize(_FORMAT),), np.uint8)
        self.observation_space = code
        if kind & STACKED:
            self.observation_space = gym.spaces.Box(0, 255, STACK, np.uint8)
        if kind & NESTED:
            self.observation_space = gym.spaces.Dict(
                code=code,
                pair=gym.spaces.Tuple(
                    [
                        gym.spaces.Box(0.0, np.inf, (2,), np.float32),
                        gym.spaces.Discrete(11, start=-1),
                    ]
                ),
                bits=gym.spaces.MultiBinary(5),
                wheel=gym.spaces.MultiDiscrete([2, 3]),
            )
        self._place = Place(seed=0, game=-1, life=0, step=0, kind=kind)
        self._ended = True

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._place = self._place._replace(seed=seed, game=0, life=0, step=0)
        else:
            assert self._ended, f"reset in the middle of an episode: {self._place}"
            self._place = self._place.next_episode()
        self._ended = False
        return encode(self._place), {}

    def step(self, action):
        assert not self._ended, f"step after the end of an episode: {self._place}"
        assert type(action) is int and 0 <= action < NUM_ACTIONS, action
        self._place = place = self._place._replace(step=self._place.step + 1)
        self._ended = place.step == place.length()
        truncated = self._ended and place.is_cut()
        terminated = self._ended and not truncated
        info: dict[str, Any] = dict(place.info())
        if terminated and not place.is_last_life():
            info["life_lost"] = True
        return encode(place), place.reward(action), terminated, truncated, info


def make() -> CountingEnv:
    return CountingEnv()


def make_truncating() -> CountingEnv:
    return CountingEnv(TRUNCATING)


def make_lives() -> CountingEnv:
    return CountingEnv(LIVES)


def make_nested() -> CountingEnv:
    return CountingEnv(NESTED | TRUNCATING)


def make_with_thread() -> CountingEnv:
    """Return an environment that leaves a thread behind, which is not a daemon."""
    threading.Thread(target=threading.Event().wait, name="simulator").start()
    return CountingEnv()


def make_stacked() -> CountingEnv:
    return CountingEnv(STACKED | TRUNCATING)


def check_rollout(
    rollout: Any,
    previous_last_row: Any = None,
    *,
    seed_every_game: bool = False,
    truncation_is_done: bool = False,
) -> None:
    """Check that each row of a rollout follows from the row before it.

    Args:
      rollout: nest of arrays [T+1, B, ...], as `core.rollout` describes. Anything with
        `numpy()` (a tensor) will do. The agent's part may be missing; if `action` is
        there it must agree with `last_action`.
      previous_last_row: nest [B, ...], the last row of the rollout before, which must
        be the first row of this one. Without it, row 0 is only checked in itself.
      seed_every_game: games begin with seeds that are not known here.
      truncation_is_done: truncated episodes take one row, like terminated ones.

    Raises:
      AssertionError: with row, column and key.
    """
    rollout = _to_numpy(rollout)
    num_rows, num_columns = rollout["reward"].shape
    keys = ["observation", "reward", "done", "truncated", "episode_return"]
    keys += ["episode_step", "last_action", "info"]
    if previous_last_row is not None:
        previous = _to_numpy(previous_last_row)
        for b in range(num_columns):
            for key in keys:
                ours, theirs = _at(rollout[key], 0, b), _at(previous[key], b)
                _assert_equal(ours, theirs, f"row 0 column {b} '{key}'")
    for b in range(num_columns):
        column = [
            {key: _at(rollout[key], t, b) for key in keys} for t in range(num_rows)
        ]
        _check_first(column[0], f"row 0 column {b}")
        game_return: float | None = None  # Not known before a game begins.
        game_step = 0
        for t in range(1, num_rows):
            before, row, where = column[t - 1], column[t], f"row {t} column {b}"
            if "action" in rollout:
                _assert_equal(
                    rollout["action"][t, b], row["last_action"], f"{where} 'action'"
                )
            place = decode(before["observation"])
            if before["done"] and place.life == 0:
                game_return, game_step = 0.0, 0
            expected, game_over = _next_row(
                before, row, seed_every_game, truncation_is_done
            )
            if game_return is not None and not before["truncated"]:
                game_return += expected["reward"]
                game_step += 1
            info = row["info"]
            if not game_over:
                expected_info = {"game_return": np.nan, "game_step": np.nan}
            elif game_return is not None:
                expected_info = {"game_return": game_return, "game_step": game_step}
            else:  # Its beginning was in another rollout.
                assert info["game_return"] >= expected["episode_return"], where
                assert info["game_step"] >= expected["episode_step"], where
                expected_info = {key: info[key] for key in ("game_return", "game_step")}
            expected_info[INFO_KEY] = expected.pop("info").get(INFO_KEY, np.nan)
            expected["info"] = {key: expected_info[key] for key in info}
            for key, value in expected.items():
                _assert_equal(row[key], value, f"{where} '{key}' after {place}")


def _check_first(row: Any, where: str) -> None:
    place = decode(row["observation"])
    _assert_equal(row["observation"], encode(place), f"{where} 'observation'")
    assert not (row["done"] and row["truncated"]), where
    assert not row["done"] or place.step == 0, f"{where}: done in {place}"
    at_end = place.step == place.length() and place.is_cut()
    assert bool(row["truncated"]) == at_end, f"{where}: truncated in {place}"
    if not row["done"]:
        assert row["episode_step"] == place.step, f"{where}: episode_step in {place}"
        reward = place.reward(int(row["last_action"]))
        _assert_equal(row["reward"], reward, f"{where} 'reward'")


def _next_row(
    before: Any, row: Any, seed_every_game: bool, truncation_is_done: bool
) -> tuple[Any, bool]:
    """Return what must follow `before` when the action is that of `row`.

    Also return whether the transition ended a full game.
    """
    place = decode(before["observation"])
    action = int(row["last_action"])
    if before["truncated"]:
        following = place.next_episode()
        if seed_every_game:
            following = following._replace(seed=decode(row["observation"]).seed, game=0)
        return {
            "observation": encode(following),
            "reward": 0.0,
            "done": True,
            "truncated": False,
            "episode_return": before["episode_return"],
            "episode_step": before["episode_step"],
            "info": {},
        }, False
    here = place._replace(step=place.step + 1)
    ended = here.step == here.length()
    truncated = ended and here.is_cut() and not truncation_is_done
    done = ended and not truncated
    game_over = ended and (here.is_cut() or here.is_last_life())
    following = here.next_episode() if done else here
    if done and game_over and seed_every_game:
        following = following._replace(seed=decode(row["observation"]).seed, game=0)
    reward = here.reward(action)
    return {
        "observation": encode(following),
        "reward": reward,
        "done": done,
        "truncated": truncated,
        "episode_return": reward + (0 if before["done"] else before["episode_return"]),
        "episode_step": here.step,
        "info": here.info(),
    }, game_over


def _to_numpy(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: _to_numpy(value) for key, value in nest.items()}
    if isinstance(nest, tuple | list):
        return tuple(_to_numpy(value) for value in nest)
    return nest.numpy() if hasattr(nest, "numpy") else np.asarray(nest)


def _at(nest: Any, *index: int) -> Any:
    if isinstance(nest, dict):
        return {key: _at(value, *index) for key, value in nest.items()}
    if isinstance(nest, tuple):
        return tuple(_at(value, *index) for value in nest)
    return nest[index]


def _assert_equal(got: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), f"{where}: {set(got)} {set(expected)}"
        for key in expected:
            _assert_equal(got[key], expected[key], f"{where} {key}")
    elif isinstance(expected, tuple):
        assert len(got) == len(expected), where
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            _assert_equal(a, b, f"{where} {i}")
    else:
        same = np.array_equal(
            got, expected, equal_nan=np.asarray(got).dtype.kind == "f"
        )
        assert same, f"{where}: expected {expected}, got {got}"
