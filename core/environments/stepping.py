# SPDX-License-Identifier: Apache-2.0
"""`Environments`: K environments that are stepped in turn and write rollout rows.

The environments follow the Gymnasium API, with any nest of Box, Discrete, MultiDiscrete
and MultiBinary observations and actions. Needs numpy and gymnasium, never torch: the
environment servers import this module.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from core.action_spaces import first_action
from core.environments.classic_gym import adapt, convert_space, original
from core.environments.faults import is_ctrl_c, name_of, only_exceptions
from core.environments.row_writer import RowWriter
from core.errors import EnvError, EnvSpecError
from core.nests import Nest, leaves, map_nest, unflatten
from core.rollout import action_at, copy_at, each_action, leaf_spaces, row_spec, text_of

NAN = float("nan")


def env_seed(seed: int, env_id: int, incarnation: int, game: int) -> int:
    """Return the seed (31 bits) for one game of one environment.

    `incarnation` distinguishes the starts of an environment (after a crash, in a
    resumed run), so that a new start does not play the games of an old one again.
    """
    entropy = np.random.SeedSequence([seed, env_id, incarnation, game])
    return int(entropy.generate_state(1)[0]) & 0x7FFFFFFF


@dataclasses.dataclass(frozen=True)
class EnvOptions:
    """What `Environments` takes as keywords.

    Attributes:
      seed: the run's seed; `env_seed` derives each environment's own seed from it.
      first_env_id: id of the first of these environments, among those of one learner.
      incarnation: distinguishes the starts of these environments: see `env_seed`.
      info_keys: scalars to copy from `info` into each row, NaN where absent.
      seed_every_game: reset every full game with a seed of its own, as `state` needs.
        Otherwise only the first game is seeded: a new seed costs ALE as much time as
        300 steps.
      max_actions: how many numbers of actions `state` may hold for each environment. If
        its unfinished game has more, `restore` begins a new game instead.
      recycle_games: full games after which an environment is closed and a new one takes
        its place, for simulators that leak; 0 for never. Rows do not show it.
      truncation_is_done: a truncated episode takes one row, like a terminated episode.
        This is for learners of the original TorchBeast, which have no truncation.
      clock: float64 array. `Environments` writes `time.monotonic()` into clock[0]
        before each call of an environment (constructor, reset, step, close). The owner
        sets clock[0] back to 0 between calls of `Environments`. If the array is in
        shared memory, another process can see that an environment takes too long.
    """

    seed: int
    first_env_id: int = 0
    incarnation: int = 0
    info_keys: tuple[str, ...] = ()
    seed_every_game: bool = False
    max_actions: int = 100_000
    recycle_games: int = 0
    truncation_is_done: bool = False
    clock: np.ndarray | None = None


@dataclasses.dataclass
class _Progress:
    """The progress of one environment."""

    game: int = 0  # Index of the full game being played.
    seed: int | None = None  # Seed of the last seeded reset.
    steps: int = 0  # Steps since the last seeded reset.
    episode_return: float = 0.0
    episode_step: int = 0
    game_return: float = 0.0  # A game is several episodes if lives end episodes.
    game_step: int = 0
    cut: bool = False  # The last row was `truncated`, so the next step only resets.
    # Of this game; None if there are too many for `state`.
    actions: list[Nest] | None = dataclasses.field(default_factory=list)

    def end_episode(self, *, game_over: bool) -> None:
        self.episode_return, self.episode_step, self.cut = 0.0, 0, False
        if game_over:
            self.game += 1
            self.game_return, self.game_step, self.actions = 0.0, 0, []

    def counters(self) -> dict[str, Any]:
        """Return the counters that a replay of the current game must reproduce."""
        keys = ("game", "episode_return", "episode_step", "game_return", "game_step")
        return {key: getattr(self, key) for key in keys}


class Environments:
    """K environments stepped in turn; each step is written as one rollout row.

    Rows are nests of numpy arrays [K, ...] as `row_spec` says, written in place; the
    table in `core.rollout` says what each key means. Each step checks what an
    environment returns against its own spaces: structure, shape, dtype, and that
    rewards are finite. (`python -m core.environments.check` checks bounds and more.)

    A truncated episode takes two rows. The first row shows its final observation
    (`truncated`). The next step executes no action; its row shows the reset observation
    (`done`, reward 0, and once more the return of the truncated episode).

    Where a lost life ends the episode but not the game, the environment sets
    `info["life_lost"] = True` in that terminated step, and its next `reset` continues
    the game. The game is over nevertheless if the step is also truncated, or if the
    `info` of that `reset` has `new_game` (frames before the next episode ended it).

    `info_keys` are read from the `info` of `step`; rows of a reset have NaN.

    After an exception only `close` is allowed.

    Args:
      make_env: creates one environment; called `num_envs` times, and to recycle one.
      num_envs: K.
      options: the fields of `EnvOptions`; `seed` is required.
    """

    def __init__(
        self, make_env: Callable[[], Any], num_envs: int, **options: Any
    ) -> None:
        self._make_env = make_env
        self._options = EnvOptions(**options)
        self._info_keys = self._options.info_keys
        clock = self._options.clock
        self._clock = np.zeros(1) if clock is None else clock
        self._progress: list[_Progress] = []  # Empty until `reset`.
        self.envs: list[gym.Env] = []
        with contextlib.ExitStack() as stack, only_exceptions("making it"):
            # One closer per environment, which closes that environment once.
            self._closers = [
                stack.enter_context(contextlib.ExitStack()) for _ in range(num_envs)
            ]
            for k in range(num_envs):
                self.envs.append(self._make(k))
            self.observation_space = convert_space(self.envs[0].observation_space)
            self.action_space = convert_space(self.envs[0].action_space)
            self._action_spaces = leaf_spaces(self.action_space)
            self.row_spec = row_spec(
                self.observation_space, self.action_space, self._info_keys
            )
            size = sum(math.prod(x.shape) for _, x in leaves(self._action_spaces))
            self._max_steps = self._options.max_actions // size
            self._check_equal_spaces()
            self._writer = RowWriter(
                self.observation_space, self.action_space, self._where_now
            )
            self._closer = stack.pop_all()

    def _make(self, k: int) -> gym.Env:
        self._clock[0] = time.monotonic()
        env = adapt(self._make_env())
        others = (other for i, other in enumerate(self.envs) if i != k)
        if any(original(env) is original(other) for other in others):
            raise EnvSpecError(
                f"create_env returned the same {name_of(env)} twice: expected a new "
                "environment from each call, since each plays a game of its own"
            )
        self._closers[k].callback(self._close, env)
        return env

    def _close(self, env: gym.Env) -> None:
        self._clock[0] = time.monotonic()
        env.close()

    def seeds(self) -> list[int]:
        """Return the seed of each environment's first game, for the run's records."""
        return [self._game_seed(k, 0) for k in range(len(self.envs))]

    def zero_rows(self) -> Nest:
        """Return new rows, for `reset` and `step` to write into."""
        K = len(self.envs)
        return map_nest(lambda s: np.zeros((K, *s.shape), s.dtype), self.row_spec)

    def reset(self, rows: Nest) -> None:
        """Begin the first game of every environment; write the first rows."""
        self._progress = [_Progress() for _ in self.envs]
        for k in range(len(self.envs)):
            self._begin(k, rows)

    def step(self, actions: Nest, rows: Nest) -> None:
        """Take `actions` ([K, ...] arrays as the action space says); write the rows.

        Raises:
          EnvError: an environment raised.
          EnvSpecError: an environment broke its spec.
        """
        if not self._progress:
            raise RuntimeError("Environments.step was called before reset")
        map_nest(np.copyto, rows["last_action"], actions)
        _clear(rows)
        each = each_action(self._action_spaces, actions)
        for k in range(len(self.envs)):
            self._step(k, map_nest(next, each), rows)

    def render(self) -> Any:
        """Return a picture of the first environment, from its `render`.

        Raises:
          EnvError: `render` raised.
        """
        return self._call_env(0, self.envs[0].render)

    def close(self) -> None:
        """Close all environments; calling it again is fine."""
        with only_exceptions("close()"):
            self._closer.close()

    # Exact resume: environments cannot be saved, but their games can be played again.

    def state(self) -> dict[str, Any]:
        """Return a JSON-compatible state for `restore`.

        Raises:
          RuntimeError: not created with `seed_every_game`, or not yet reset.
        """
        if not self._options.seed_every_game or not self._progress:
            raise RuntimeError(
                "Environments.state needs seed_every_game=True and a reset before it"
            )
        envs = []
        for progress in self._progress:
            actions = None
            if progress.actions is not None:
                actions = [
                    [np.asarray(leaf).tolist() for _, leaf in leaves(action)]
                    for action in progress.actions
                ]
            envs.append({**progress.counters(), "actions": actions})
        return {"seeds": self.seeds(), "envs": envs}

    def restore(self, state: dict[str, Any], rows: Nest) -> int:
        """Bring new environments to the point at which `state` was taken.

        Play the current game of each environment again: the seeded reset, then the
        saved actions. If they were too many to be saved, begin the next game.

        Args:
          state: the result of `state()`.
          rows: the last rows before `state`. Written only where the next game begins.

        Returns:
          The number of environments that begin the next game.

        Raises:
          ValueError: `state` belongs to other environments.
          RuntimeError: playing the games again did not lead to `rows`.
        """
        if not self._options.seed_every_game:
            raise RuntimeError("Environments.restore needs seed_every_game=True")
        if state["seeds"] != self.seeds():
            raise ValueError(
                f"the saved environments have seeds {state['seeds']}, these have "
                f"{self.seeds()}: --seed or the number of environments has changed"
            )
        replayed = self.zero_rows()
        self._progress = [_Progress(game=saved["game"]) for saved in state["envs"]]
        num_new = 0
        for k, saved in enumerate(state["envs"]):
            if saved["actions"] is None:
                num_new += 1
                self._progress[k].game += 1
                self._begin(k, rows)
                continue
            self._replay(k, saved, replayed)
            difference = self._difference(k, saved, replayed, rows)
            if difference is not None:
                raise RuntimeError(
                    f"environment {self._where(k)} is not deterministic given seed and "
                    "actions, or has other options than before: after a replay of its "
                    f"game, {difference} differs. So it cannot resume exactly: give it "
                    "the options that it had, or leave --serial out."
                )
        return num_new

    def _begin(self, k: int, rows: Nest) -> None:
        """Begin a game of a new environment, and write its first row."""
        rows["truncated"][k] = False
        for values in rows["info"].values():
            values[k] = NAN
        copy_at(rows["last_action"], k, map_nest(first_action, self._action_spaces))
        observation, _ = self._reset(k, self._game_seed(k, self._progress[k].game))
        self._write_first(rows, k, observation)

    def _replay(self, k: int, saved: dict[str, Any], rows: Nest) -> None:
        seed = self._game_seed(k, saved["game"])
        observation, _ = self._reset(k, seed)
        self._write_first(rows, k, observation)
        for flat in saved["actions"]:
            action = unflatten(flat, self._action_spaces)
            copy_at(rows["last_action"], k, action)
            _clear(rows)
            self._step(k, action_at(self._action_spaces, rows["last_action"], k), rows)

    def _difference(
        self, k: int, saved: dict[str, Any], replayed: Nest, rows: Nest
    ) -> str | None:
        """Return the name of the first value that a replay did not reproduce."""
        for key, value in self._progress[k].counters().items():
            if value != saved[key]:
                return key
        # The first row of a game describes the previous game, which is not replayed.
        keys = self.row_spec if saved["actions"] else ["observation"]
        for key in keys:
            pairs = zip(leaves(replayed[key], key), leaves(rows[key]), strict=True)
            for (name, ours), (_, theirs) in pairs:
                if ours[k].tobytes() != theirs[k].tobytes():
                    return f"'{name}'"
        return None

    def _step(self, k: int, action: Nest, rows: Nest) -> None:
        """Step environment k, or reset it if its last row was `truncated`."""
        progress = self._progress[k]
        if progress.cut:
            observation, _ = self._next_game(k)
            self._write_first(rows, k, observation)
            progress.end_episode(game_over=True)
            return

        if self._options.seed_every_game and progress.actions is not None:
            # A copy: the environment may write into the action.
            progress.actions.append(map_nest(copy.copy, action))
            if len(progress.actions) > self._max_steps:
                progress.actions = None
        progress.steps += 1
        result = self._call_env(k, self.envs[k].step, action)
        transition = self._writer.transition(k, result)
        observation, reward, terminated, truncated, info = transition
        progress.episode_return += reward
        progress.episode_step += 1
        progress.game_return += reward
        progress.game_step += 1

        life_lost = terminated and info.get("life_lost", False)
        game_over = truncated or (terminated and not life_lost)
        if self._options.truncation_is_done:
            terminated, truncated = terminated or truncated, False
        if terminated and not game_over:
            observation, reset_info = self._reset(k, None)
            game_over = bool(reset_info.get("new_game", False))
            if game_over and (self._options.seed_every_game or self._is_due(k)):
                observation, _ = self._next_game(k)
        elif terminated:
            observation, _ = self._next_game(k)
        progress.cut = truncated and not terminated  # A terminal state's value is 0.
        rows["reward"][k] = reward
        self._write(rows, k, observation, terminated, progress.cut, game_over, info)
        if terminated:
            progress.end_episode(game_over=game_over)

    def _next_game(self, k: int) -> tuple[Any, dict[str, Any]]:
        """Begin the next game, in a new environment if that is due."""
        seed = None
        is_due = self._is_due(k)
        if is_due:
            self._recycle(k)
        # Seed a new environment too, or it would play the games of the old one again.
        if is_due or self._options.seed_every_game:
            seed = self._game_seed(k, self._progress[k].game + 1)
        return self._reset(k, seed)

    def _is_due(self, k: int) -> bool:
        """Return whether environment k is to be replaced after the game that ended."""
        games = self._progress[k].game + 1
        limit = self._options.recycle_games
        return limit > 0 and games % limit == 0

    def _recycle(self, k: int) -> None:
        self._call_env(k, self._closers[k].close)
        self.envs[k] = self._call_env(k, self._make, k)
        self._check_equal_spaces()

    def _reset(self, k: int, seed: int | None) -> tuple[Any, dict[str, Any]]:
        """Reset environment k, with `seed` if there is one."""
        progress = self._progress[k]
        reset = self.envs[k].reset
        if seed is not None:
            progress.seed, progress.steps = seed, 0
            reset = functools.partial(reset, seed=seed)
        result = self._call_env(k, reset)
        self._writer.check_reset(k, result)
        return result

    def _call_env(self, k: int, call: Callable[..., Any], *args: Any) -> Any:
        """Call environment k while the clock runs; name it in what it raises."""
        self._clock[0] = time.monotonic()
        try:
            return call(*args)
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            if isinstance(error, gym.error.DependencyNotInstalled):
                raise EnvSpecError(f"env {self._where(k)}: {error}") from error
            raise EnvError(
                f"{self._where_now(k)} after reset(seed={self._progress[k].seed}): "
                f"{type(error).__name__}: {error}"
            ) from error

    def _write_first(self, rows: Nest, k: int, observation: Any) -> None:
        """Write row k with the first observation of a game."""
        rows["reward"][k] = 0.0
        self._write(rows, k, observation, True, False, False, {})

    def _write(
        self,
        rows: Nest,
        k: int,
        observation: Any,
        done: bool,
        truncated: bool,
        game_over: bool,
        info: dict[str, Any],
    ) -> None:
        """Write row k, which was cleared, except `last_action` and `reward`."""
        progress = self._progress[k]
        self._writer.write_observation(rows["observation"], k, observation)
        rows["episode_return"][k] = progress.episode_return
        rows["episode_step"][k] = progress.episode_step
        if truncated:
            rows["truncated"][k] = True
        else:  # The action chosen there is never executed.
            self._writer.check_mask(k, observation)
        if done:
            rows["done"][k] = True
        if game_over:
            rows["info"]["game_return"][k] = progress.game_return
            rows["info"]["game_step"][k] = progress.game_step
        for key in self._info_keys:
            if (value := info.get(key)) is not None:
                value = self._writer.number(k, f"info/{key}", value)
                rows["info"][key][k] = value

    def _game_seed(self, k: int, game: int) -> int:
        options = self._options
        env_id = options.first_env_id + k
        return env_seed(options.seed, env_id, options.incarnation, game)

    def _check_equal_spaces(self) -> None:
        first_id = self._options.first_env_id
        for k, env in enumerate(self.envs):
            for name in ("observation_space", "action_space"):
                expected, got = getattr(self, name), convert_space(getattr(env, name))
                if got != expected:
                    raise EnvSpecError(
                        f"env {first_id + k} ({name_of(env)}): expected {name} "
                        f"{text_of(expected)} like that of env {first_id}, got "
                        f"{text_of(got)}"
                    )

    def _where(self, k: int) -> str:
        return f"{self._options.first_env_id + k} ({name_of(self.envs[k])})"

    def _where_now(self, k: int) -> str:
        return f"env {self._where(k)} step {self._progress[k].steps}"


def _clear(rows: Nest) -> None:
    """Write what most rows have, for all environments at once, which is faster."""
    rows["done"].fill(False)
    rows["truncated"].fill(False)
    for values in rows["info"].values():
        values.fill(NAN)
