# SPDX-License-Identifier: Apache-2.0
"""Environments as rollout rows: `make`, the classic-gym adapter, and `Environments`.

    python -m core.environment --check ENV [--steps 1000] [--seed 0]

prints what the learner will see of ENV and whether ENV obeys its own spec. `--env`
and `--check` take

    a Gymnasium id            CartPole-v1, ALE/Pong-v5, MinAtar/Breakout-v1, module:Id
    package.module:function   called to create the environment; write your own here
    gym:ID                    an id of classic gym: `pip install -e .[classic]`
    Catch, Memory             the toys in core/toys.py

Environment servers also take the names of `core.vector_env`.

The environment may follow the Gymnasium API or that of classic gym, with any nest of
Box, Discrete, MultiDiscrete and MultiBinary observations and actions. Needs numpy and
gymnasium, never torch: the environment servers import it.
"""

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import logging
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

if __name__ == "__main__":
    from core.installed import explain_missing_packages

    explain_missing_packages()

import gymnasium as gym
import numpy as np

from core import spaces, toys
from core.spaces import ArraySpec, Nest, leaf_spaces, map_nest

TOYS = {"Catch": toys.Catch, "Memory": toys.Memory}
CLASSIC_SPACES = "Box Discrete MultiDiscrete MultiBinary Text Dict Tuple".split()
VECTOR = ("ale-vector:", "envpool:")  # Names for `core.vector_env`.
FLOAT32_MAX = float(np.finfo(np.float32).max)


class EnvError(RuntimeError):
    """An environment raised; `__cause__` is what it raised."""


class EnvValueError(EnvError):
    """An observation has a value that its space does not; the message has both."""


class EnvSpecError(ValueError):
    """An environment broke its own spec or the API. Trying again will not help."""


# ---------------------------------------------------------------- Creating one by name


def make(name: str, **kwargs: Any) -> gym.Env:
    """Create the environment that `--env name` stands for (see the module docstring).

    `kwargs` go to the environment; a `package.module:function` is given those that its
    signature accepts.

    Raises:
      ValueError: there is no such environment; the message says what is near.
    """
    if name in TOYS:
        return TOYS[name](**kwargs)
    if name.startswith(VECTOR):
        raise ValueError(
            f"--env {name} is for PolyBeast only: python -m polybeast --env {name}. "
            "Here take the environment that it makes many of, such as ALE/Pong-v5."
        )
    if name.startswith("gym:"):
        return _make_classic(name.removeprefix("gym:"), **kwargs)
    if ":" in name:
        function = _find_function(name)
        if function is not None:
            return _call(name, function, kwargs)
    return _make_gymnasium(name, **kwargs)


def _make_gymnasium(name: str, **kwargs: Any) -> gym.Env:
    if name not in gym.registry:
        _register_known_packages(name)
    try:
        # No passive checker: `Environments` checks every step, and so does --check.
        env = gym.make(name, disable_env_checker=True, **kwargs)
    except (gym.error.UnregisteredEnv, gym.error.DeprecatedEnv):
        known = [*TOYS, *gym.registry]
        raise ValueError(_unknown(name, known) + _of_package(name)) from None
    except gym.error.DependencyNotInstalled as error:
        raise ValueError(f"--env {name}: {error}") from error
    return MinAtar(env) if name.startswith("MinAtar/") else env


def _register_known_packages(name: str) -> None:
    """Register the ids of ale_py and minatar, which Gymnasium does not find itself."""
    if name.startswith("MinAtar/"):
        # minatar warns through the root logger that it cannot plot. Were that the
        # process's first record, it would also install a handler on everybody's behalf.
        quiet = logging.NullHandler()
        logging.getLogger().addHandler(quiet)
        try:
            import minatar.gym
        except ImportError:
            raise ValueError(f"--env {name} needs: pip install minatar") from None
        finally:
            logging.getLogger().removeHandler(quiet)
        if "MinAtar/Breakout-v1" not in gym.registry:
            minatar.gym.register_envs()
    elif ":" not in name:
        with contextlib.suppress(ImportError):
            import ale_py

            gym.register_envs(ale_py)
            # No banner from each of many actors; errors still show.
            ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def _make_classic(name: str, **kwargs: Any) -> gym.Env:
    try:
        classic_gym = importlib.import_module("gym")
    except ImportError:
        raise ValueError(
            f"--env gym:{name} needs classic gym, which is not installed. "
            f"Try: pip install -e .[classic], or --env {name} for Gymnasium's own."
        ) from None
    parameters = inspect.signature(classic_gym.make).parameters
    if "disable_env_checker" in parameters:
        kwargs["disable_env_checker"] = True  # The checker of 0.26 breaks on numpy 2.
    else:
        kwargs.pop("render_mode", None)  # Before 0.24: render(mode="rgb_array").
    try:
        return adapt(classic_gym.make(name, **kwargs))
    except classic_gym.error.UnregisteredEnv:
        registry = classic_gym.envs.registry
        names = [f"gym:{known}" for known in getattr(registry, "env_specs", registry)]
        raise ValueError(_unknown(f"gym:{name}", names)) from None
    except classic_gym.error.DependencyNotInstalled as error:
        raise ValueError(f"--env gym:{name}: {error}") from error


def _find_function(name: str) -> Callable[..., Any] | None:
    """Import `package.module:attribute`; None if only the attribute is missing."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(missing + "."):
            raise  # The module exists; something that it imports does not.
        raise ValueError(
            f"--env {name}: no module {missing!r} in the current directory or among "
            "the installed packages. Run from the directory that holds it, or set "
            "PYTHONPATH."
        ) from None
    function = getattr(module, attribute, None)
    if function is None and name.rpartition(":")[2] not in gym.registry:
        names = [n for n, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(attribute, names, n=3)
        raise ValueError(
            f"--env {name}: {module.__file__} has no function {attribute!r}, and "
            f"importing it registers no such Gymnasium id.{_did_you_mean(near)}"
        )
    if function is not None and not callable(function):
        raise ValueError(f"--env {name}: expected a function, got {function!r}")
    return function


def _call(name: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> gym.Env:
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        kwargs = {key: value for key, value in kwargs.items() if key in parameters}
    env = function(**kwargs)
    try:
        return adapt(env)
    except ValueError as error:
        raise ValueError(f"--env {name}: {error}") from None


def _unknown(name: str, names: list[str]) -> str:
    by_lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    message = (
        f"--env {name} is not known; expected a Gymnasium id, package.module:function, "
        f"gym:ID, Catch or Memory.{_did_you_mean([by_lower[n] for n in near])}"
    )
    if importlib.util.find_spec("ale_py") is None:
        message += " (For Atari games: pip install ale-py)"
    return message


def _of_package(name: str) -> str:
    """Say what to write if a package registers the id `name` when it is imported."""
    package = name.partition("-")[0].partition("/")[0].lower()  # MiniGrid-Empty-5x5-v0
    if package.isidentifier() and ":" not in name:
        with contextlib.suppress(Exception):  # Whatever it may be.
            importlib.import_module(package)
        if name in gym.registry:
            return _did_you_mean([f"{package}:{name}"])
    return " Where another package registers it: package:ID."


def _did_you_mean(near: list[str]) -> str:
    return f" Did you mean {' or '.join(near)}?" if near else ""


class MinAtar(gym.Wrapper):
    """MinAtar whose games depend on their seed alone, and that renders by itself.

    The package carries the last game's last action into the next game's first sticky
    action, and needs seaborn to draw. Here every game starts from action 0.
    """

    PIXELS = 16

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        base: Any = self.unwrapped
        base.game.last_action = 0
        return self.env.reset(seed=seed, options=options)

    def render(self) -> Any:
        base: Any = self.unwrapped
        state = base.game.state()  # [10, 10, C] bool
        hues = np.arange(state.shape[-1]) / state.shape[-1]
        waves = np.cos(2 * np.pi * (hues[:, None] - np.arange(3) / 3))
        colours = (128 + 127 * waves).astype(np.uint8)  # [C, 3]
        channel = state.argmax(axis=-1)
        image = np.where(state.any(axis=-1)[..., None], colours[channel], 0)
        return image.repeat(self.PIXELS, 0).repeat(self.PIXELS, 1).astype(np.uint8)


# -------------------------------------------------------------------------- Classic gym


def adapt(env: Any) -> gym.Env:
    """Return `env` itself if it is Gymnasium's, else `env` behind a `ClassicGym`.

    Raises:
      ValueError: `env` lacks a method or a space, or has a space of another kind.
    """
    needed = ("reset", "step", "observation_space", "action_space")
    missing = [attribute for attribute in needed if not hasattr(env, attribute)]
    if missing:
        raise ValueError(
            f"{type(env).__name__} has no {', '.join(missing)}; expected an "
            "environment of Gymnasium or classic gym. Set observation_space and "
            "action_space when it is made: the learner builds its model from them."
        )
    return env if isinstance(env, gym.Env) else ClassicGym(env)


class ClassicGym(gym.Env):
    """The Gymnasium API around an environment of classic gym, of any version.

    `reset` may return the observation or (observation, info); `step` 4 values with
    `done`, or 5 with `terminated` and `truncated`. Which it is shows at the first call.
    A `done` that `info["TimeLimit.truncated"]` explains is a truncation. Seeds go to
    `reset(seed=)` where the innermost environment takes that, else to `seed()`.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space = convert_space(env.observation_space)
        self.action_space = convert_space(env.action_space)
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)
        # Wrappers pass **kwargs on, so only the innermost signature tells.
        reset = inspect.signature(self.unwrapped.reset).parameters
        has_method = callable(getattr(env, "seed", None))
        takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in reset.values())
        self._reset_seeds = "seed" in reset or (takes_kwargs and not has_method)
        if not self._reset_seeds and not has_method:
            name = type(self.unwrapped).__name__
            warnings.warn(f"{name} takes no seed", stacklevel=3)
        self._reset_returns_info: bool | None = None  # Not known yet.
        self._step_returns: int | None = None

    @property
    def unwrapped(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)  # For wrappers that draw from `np_random`.
        if seed is not None and self._reset_seeds:
            result = self.env.reset(seed=seed)
        else:
            if seed is not None and callable(getattr(self.env, "seed", None)):
                self.env.seed(seed)
            result = self.env.reset()
        if self._reset_returns_info is None:
            is_pair = isinstance(result, tuple) and len(result) == 2
            space = self.observation_space  # May be one of pairs itself.
            is_observation = isinstance(space, gym.spaces.Tuple) and result in space
            self._reset_returns_info = (
                is_pair and isinstance(result[1], dict) and not is_observation
            )
        return result if self._reset_returns_info else (result, {})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        if self._step_returns is None:
            self._step_returns = len(result)
        if self._step_returns != 4:
            return result
        observation, reward, done, info = result
        truncated = bool(done and info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done and not truncated), truncated, info

    def render(self) -> Any:
        if self.render_mode is not None:
            return self.env.render()
        return self.env.render(mode="rgb_array")

    def close(self) -> None:
        # Environments written for TorchBeast may have nothing but reset and step.
        if hasattr(self.env, "close"):
            self.env.close()


def convert_space(space: Any) -> gym.Space:
    """Return `space` as Gymnasium's; classic gym's is known by its class's name.

    That may be the name of a class that it is derived from, or have "Space" after it.
    """
    if isinstance(space, gym.Space):
        return space
    names = [cls.__name__.removesuffix("Space") for cls in type(space).__mro__]
    match next((name for name in names if name in CLASSIC_SPACES), None):
        case "Box":
            low, high = np.asarray(space.low), np.asarray(space.high)
            return gym.spaces.Box(low, high, space.shape, np.dtype(space.dtype).type)
        case "Discrete":
            start = int(getattr(space, "start", 0))
            return gym.spaces.Discrete(int(space.n), start=start)
        case "MultiDiscrete":
            return gym.spaces.MultiDiscrete(np.asarray(space.nvec))
        case "MultiBinary":
            return gym.spaces.MultiBinary(space.n)
        case "Text":
            return gym.spaces.Text(int(space.max_length))
        case "Dict":
            items = space.spaces.items()
            return gym.spaces.Dict({key: convert_space(sub) for key, sub in items})
        case "Tuple":
            return gym.spaces.Tuple([convert_space(sub) for sub in space.spaces])
    raise ValueError(
        f"cannot convert the space {space!r} of classic gym; expected Box, Discrete, "
        "MultiDiscrete, MultiBinary, Dict or Tuple. Set the environment's "
        "observation_space and action_space to spaces of gymnasium.spaces."
    )


# ------------------------------------------------------------------------- Rollout rows


def env_seed(seed: int, env_id: int, incarnation: int, game: int) -> int:
    """Return the seed (31 bits) for one game of one environment.

    `incarnation` counts how often this environment was started anew after a crash: its
    second life must not repeat the first.
    """
    entropy = np.random.SeedSequence([seed, env_id, incarnation, game])
    return int(entropy.generate_state(1)[0]) & 0x7FFFFFFF


@dataclasses.dataclass
class _Progress:
    """Where one environment stands."""

    game: int = 0  # Index of the full game being played.
    seed: int | None = None  # Of the last seeded reset,
    steps: int = 0  # and how many steps came after it.
    episode_return: float = 0.0
    episode_step: int = 0
    game_return: float = 0.0  # A game is several episodes if lives end episodes.
    game_step: int = 0
    cut: bool = False  # The last row was `truncated`, so the next step only resets.
    actions: list[Nest] = dataclasses.field(default_factory=list)  # Of this game.

    def end_episode(self, *, game_over: bool) -> None:
        self.episode_return, self.episode_step, self.cut = 0.0, 0, False
        if game_over:
            self.game += 1
            self.game_return, self.game_step, self.actions = 0.0, 0, []

    def counters(self) -> dict[str, Any]:
        """Return what a replay of the current game must lead to."""
        keys = ("game", "episode_return", "episode_step", "game_return", "game_step")
        return {key: getattr(self, key) for key in keys}


class Environments:
    """K environments stepped in turn; each step is written as one rollout row.

    Rows are nests of numpy arrays [K, ...] as `row_spec` says, written in place; the
    table in `core.rollouts` says what each key means. What an environment returns is
    checked on every step against its own spaces: structure, shape, dtype, and that
    rewards are finite. (`--check` looks at bounds and much more.)

    A truncated episode takes two rows. The first shows its final observation
    (`truncated`); the step after that executes no action and shows the reset
    observation (`done`, reward 0, and once more the return of the truncated episode).
    With `truncation_is_done` it takes one, like a terminated episode: for learners of
    TorchBeast, which know of no other end.

    An environment whose lives end episodes while the game goes on says so by
    `info["life_lost"] = True` on such a terminated step; its next `reset` continues
    the game. If `truncated` is set as well, the game is over. So it is if the `info` of
    that `reset` has `new_game`: the frames up to the next episode can end a game.

    `info_keys` are read from the `info` of `step`; rows that no `step` led to have NaN.

    With `recycle_games` N an environment that has played N full games is closed, and a
    new one plays on in its place, for simulators that leak. The rows do not show it.

    After an exception only `close` is allowed.

    Args:
      make_env: creates one environment; called `num_envs` times, and to recycle one.
      seed: the run's seed; `env_seed` derives each environment's own from it.
      first_env_id: id of the first of these environments, counted over the whole run.
      incarnation: how often these environments were started anew after a crash.
      info_keys: scalars to copy from `info` into each row, NaN where absent.
      seed_every_game: reset every full game with a seed of its own, as `state` needs.
        Otherwise only each environment's first one is: seeding ALE anew costs as much
        as 300 steps.
      recycle_games: full games after which an environment is made anew; 0 for never.
      truncation_is_done: as said above.
      clock: [1] float64, in which `time.monotonic()` is noted before each call into an
        environment (constructor, reset, step, close). Whoever made it sets it back to 0
        between calls of this class; in shared memory, another process can see when one
        environment takes too long.
    """

    def __init__(
        self,
        make_env: Callable[[], Any],
        num_envs: int,
        *,
        seed: int,
        first_env_id: int = 0,
        incarnation: int = 0,
        info_keys: tuple[str, ...] = (),
        seed_every_game: bool = False,
        recycle_games: int = 0,
        truncation_is_done: bool = False,
        clock: np.ndarray | None = None,
    ) -> None:
        self.info_keys = info_keys
        self._clock = np.zeros(1) if clock is None else clock
        self._make_env = make_env
        self._seed = seed
        self._first_env_id = first_env_id
        self._incarnation = incarnation
        self._seed_every_game = seed_every_game
        self._recycle_games = recycle_games
        self._truncation_is_done = truncation_is_done
        self._progress: list[_Progress] = []  # Empty until `reset`.
        self.envs: list[gym.Env] = []
        with contextlib.ExitStack() as stack, _only_exceptions("making it"):
            # One for each environment: it closes that, once.
            self._closers = [
                stack.enter_context(contextlib.ExitStack()) for _ in range(num_envs)
            ]
            for k in range(num_envs):
                self.envs.append(self._make(k))
            self.observation_space = convert_space(self.envs[0].observation_space)
            self.action_space = convert_space(self.envs[0].action_space)
            self._action_spaces = leaf_spaces(self.action_space)
            self._ranges = map_nest(
                spaces.value_range, leaf_spaces(self.observation_space)
            )
            self._check_equal_spaces()
            self.row_spec = spaces.row_spec(
                self.observation_space, self.action_space, info_keys
            )
            self._closer = stack.pop_all()

    def _make(self, k: int) -> gym.Env:
        self._clock[0] = time.monotonic()
        env = adapt(self._make_env())
        self._closers[k].callback(self._close, env)
        return env

    def _close(self, env: gym.Env) -> None:
        self._clock[0] = time.monotonic()
        env.close()

    def seeds(self) -> list[int]:
        """Return the seed of each environment's first game, for the run's records."""
        return [self._game_seed(k, 0) for k in range(len(self.envs))]

    def reset(self, rows: Nest) -> None:
        """Begin the first game of every environment; write the very first rows."""
        self._progress = [_Progress() for _ in self.envs]
        # The zero of the action space: `start` where it has one.
        first_action = spaces.map_nest(
            lambda space: getattr(space, "start", 0), self._action_spaces
        )
        for k in range(len(self.envs)):
            _copy_at(rows["last_action"], k, first_action)
            observation, _ = self._reset(k, self._game_seed(k, 0))
            self._write(rows, k, observation, done=True)

    def step(self, actions: Nest, rows: Nest) -> None:
        """Take `actions` ([K, ...] arrays as the action space says); write the rows.

        Raises:
          EnvError: an environment raised.
          EnvSpecError: an environment broke its spec.
        """
        if not self._progress:
            raise RuntimeError("Environments.step was called before reset")
        spaces.map_nest(np.copyto, rows["last_action"], actions)
        for k in range(len(self.envs)):
            self._step(k, actions, rows)

    def render(self, k: int = 0) -> Any:
        """Return what environment k draws.

        Raises:
          EnvError: it raised.
        """
        self._clock[0] = time.monotonic()
        try:
            return self.envs[k].render()
        except BaseException as error:
            raise self._env_error(k, error) from error

    def close(self) -> None:
        """Close all environments; calling it again is fine."""
        with _only_exceptions("close()"):
            self._closer.close()

    # Exact resume: no environment can be saved, but its current game can be replayed.

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to rebuild every environment, fit for JSON.

        Raises:
          RuntimeError: not created with `seed_every_game`, or not yet reset.
        """
        if not self._seed_every_game or not self._progress:
            raise RuntimeError(
                "Environments.state needs seed_every_game=True and a reset before it"
            )
        envs = []
        for progress in self._progress:
            actions = [
                [np.asarray(leaf).tolist() for _, leaf in spaces.leaves(action)]
                for action in progress.actions
            ]
            envs.append({**progress.counters(), "actions": actions})
        return {"seeds": self.seeds(), "envs": envs}

    def restore(self, state: dict[str, Any], rows: Nest) -> None:
        """Bring new environments to where `state` was taken.

        Each one's current game is played again: its seeded reset, then its actions.

        Args:
          state: the result of `state()`.
          rows: the rows the environments stood at then; only read.

        Raises:
          ValueError: `state` belongs to other environments.
          RuntimeError: playing the games again did not lead to `rows`.
        """
        if not self._seed_every_game:
            raise RuntimeError("Environments.restore needs seed_every_game=True")
        if state["seeds"] != self.seeds():
            raise ValueError(
                f"the saved environments have seeds {state['seeds']}, these have "
                f"{self.seeds()}: --seed or the number of environments has changed"
            )
        replayed = spaces.map_nest(
            lambda spec: np.zeros((len(self.envs), *spec.shape), spec.dtype),
            self.row_spec,
        )
        self._progress = [_Progress(game=saved["game"]) for saved in state["envs"]]
        for k, saved in enumerate(state["envs"]):
            self._replay(k, saved, replayed)
            difference = self._difference(k, saved, replayed, rows)
            if difference is not None:
                raise RuntimeError(
                    f"environment {self._where(k)} is not deterministic given seed and "
                    f"actions: after a replay of its game, {difference} is not what it "
                    "was. Such an environment cannot resume exactly."
                )

    def _replay(self, k: int, saved: dict[str, Any], rows: Nest) -> None:
        seed = self._game_seed(k, saved["game"])
        observation, _ = self._reset(k, seed)
        self._write(rows, k, observation, done=True)
        for flat in saved["actions"]:
            action = self._unflatten(flat)
            _copy_at(rows["last_action"], k, action)
            self._step(k, rows["last_action"], rows)

    def _unflatten(self, flat: list[Any]) -> Nest:
        values = iter(flat)
        return spaces.map_nest(lambda _: next(values), self.row_spec["last_action"])

    def _difference(
        self, k: int, saved: dict[str, Any], replayed: Nest, rows: Nest
    ) -> str | None:
        """Return the name of the first thing that a replay got wrong, or None."""
        for key, value in self._progress[k].counters().items():
            if value != saved[key]:
                return key
        # The first row of a game tells of the game before, which is not replayed.
        keys = self.row_spec if saved["actions"] else ["observation"]
        for key in keys:
            pairs = zip(
                spaces.leaves(replayed[key], key), spaces.leaves(rows[key]), strict=True
            )
            for (name, ours), (_, theirs) in pairs:
                if ours[k].tobytes() != theirs[k].tobytes():
                    return f"'{name}'"
        return None

    def _step(self, k: int, actions: Nest, rows: Nest) -> None:
        """Step environment k, or reset it if its last row was `truncated`."""
        progress = self._progress[k]
        if progress.cut:
            observation, _ = self._next_game(k)
            self._write(rows, k, observation, done=True)
            progress.end_episode(game_over=True)
            return

        action = action_at(self._action_spaces, actions, k)
        if self._seed_every_game:
            progress.actions.append(action)
        progress.steps += 1
        self._clock[0] = time.monotonic()
        try:
            result = self.envs[k].step(action)
        except BaseException as error:
            raise self._env_error(k, error) from error
        try:
            observation, reward, terminated, truncated, info = result
        except (TypeError, ValueError):
            expected = "(observation, reward, terminated, truncated, info)"
            raise self._spec_error(k, "step()", expected, result) from None
        if not isinstance(info, dict):
            raise self._spec_error(k, "info", "a dict", info)
        try:
            terminated, truncated = bool(terminated), bool(truncated)
        except ValueError:  # Arrays.
            got = (terminated, truncated)
            raise self._spec_error(k, "terminated, truncated", "bools", got) from None
        reward = self._number(k, "reward", reward)
        if not -FLOAT32_MAX <= reward <= FLOAT32_MAX:  # True for NaN.
            raise self._spec_error(k, "reward", "a finite float32", reward)
        progress.episode_return += reward
        progress.episode_step += 1
        progress.game_return += reward
        progress.game_step += 1

        life_lost = terminated and info.get("life_lost", False)
        game_over = truncated or (terminated and not life_lost)
        if self._truncation_is_done:
            terminated, truncated = terminated or truncated, False
        if terminated and not game_over:
            observation, reset_info = self._reset(k, None)
            game_over = bool(reset_info.get("new_game", False))
            if game_over and (self._seed_every_game or self._is_due(k)):
                observation, _ = self._next_game(k)
        elif terminated:  # Wins over `truncated`: there is nothing to bootstrap from.
            observation, _ = self._next_game(k)
        self._write(
            rows,
            k,
            observation,
            reward=reward,
            done=terminated,
            truncated=truncated and not terminated,
            game_over=game_over,
            info=info,
        )
        if terminated:
            progress.end_episode(game_over=game_over)
        else:
            progress.cut = truncated

    def _next_game(self, k: int) -> tuple[Any, dict[str, Any]]:
        """Begin the next game, in a new environment if that is due."""
        is_due = self._is_due(k)
        if is_due:
            self._recycle(k)
        # A new environment must not play the games of the old one again.
        next_game = self._progress[k].game + 1
        seed = (
            self._game_seed(k, next_game) if self._seed_every_game or is_due else None
        )
        return self._reset(k, seed)

    def _is_due(self, k: int) -> bool:
        """Say whether the game that has just ended was environment k's last."""
        games = self._progress[k].game + 1
        return self._recycle_games > 0 and games % self._recycle_games == 0

    def _recycle(self, k: int) -> None:
        try:
            self._closers[k].close()
            self.envs[k] = self._make(k)
        except BaseException as error:
            raise self._env_error(k, error) from error
        try:
            self._check_equal_spaces()
        except ValueError as error:
            raise EnvSpecError(str(error)) from None

    def _reset(self, k: int, seed: int | None) -> tuple[Any, dict[str, Any]]:
        """Reset environment k, with `seed` if there is one."""
        progress = self._progress[k]
        self._clock[0] = time.monotonic()
        try:
            if seed is None:
                result = self.envs[k].reset()
            else:
                progress.seed, progress.steps = seed, 0
                result = self.envs[k].reset(seed=seed)
        except BaseException as error:
            raise self._env_error(k, error) from error
        if not (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[1], dict)
        ):
            raise self._spec_error(k, "reset()", "(observation, info)", result)
        return result

    def _write(
        self,
        rows: Nest,
        k: int,
        observation: Any,
        *,
        reward: float = 0.0,
        done: bool = False,
        truncated: bool = False,
        game_over: bool = False,
        info: dict[str, Any] | None = None,
    ) -> None:
        """Write row k, all but `last_action`."""
        progress = self._progress[k]
        self._write_observation(
            rows["observation"],
            k,
            observation,
            self.row_spec["observation"],
            self._ranges,
        )
        rows["reward"][k] = reward
        rows["done"][k] = done
        rows["truncated"][k] = truncated
        rows["episode_return"][k] = progress.episode_return
        rows["episode_step"][k] = progress.episode_step
        infos = rows["info"]
        infos["game_return"][k] = progress.game_return if game_over else np.nan
        infos["game_step"][k] = progress.game_step if game_over else np.nan
        for key in self.info_keys:
            value = (info or {}).get(key)
            infos[key][k] = (
                np.nan if value is None else self._number(k, f"info/{key}", value)
            )

    def _write_observation(
        self,
        rows: Nest,
        k: int,
        value: Any,
        spec: Nest,
        ranges: Nest,
        name: str = "observation",
    ) -> None:
        if isinstance(spec, ArraySpec):
            if (
                type(value) is not np.ndarray
                or value.shape != spec.shape
                or value.dtype != spec.dtype
            ):
                value = self._cast(k, name, spec, value)
            if ranges is not None:
                self._check_range(k, name, ranges, value)
            rows[k] = value
        elif isinstance(spec, dict):
            if not isinstance(value, dict) or value.keys() != spec.keys():
                raise self._spec_error(k, name, f"a dict with keys {list(spec)}", value)
            for key, sub in spec.items():
                self._write_observation(
                    rows[key], k, value[key], sub, ranges[key], f"{name}/{key}"
                )
        else:
            if not isinstance(value, tuple) or len(value) != len(spec):
                raise self._spec_error(k, name, f"a tuple of {len(spec)}", value)
            for i, sub in enumerate(spec):
                self._write_observation(
                    rows[i], k, value[i], sub, ranges[i], f"{name}/{i}"
                )

    def _cast(self, k: int, name: str, spec: ArraySpec, value: Any) -> np.ndarray:
        """Return `value` as an array of the right shape and a dtype that fits."""
        try:
            array = np.asarray(value)
        except Exception:  # Ragged, or an object whose __array__ raises.
            raise self._spec_error(k, name, str(spec), value) from None
        fits = np.can_cast(array.dtype, spec.dtype, casting="same_kind")
        if array.shape != spec.shape or not fits:
            raise self._spec_error(k, name, str(spec), value)
        return array

    def _check_range(
        self, k: int, name: str, limits: tuple[Any, Any], value: np.ndarray
    ) -> None:
        """Refuse a value that no network can take.

        Other than a wrong shape it may never come again: it costs the episode only.
        """
        low, high = limits
        if isinstance(low, int):
            fine = low <= int(value) <= high
        else:
            fine = bool(((low <= value) & (value <= high)).all())
        if not fine:
            expected = f"{np.asarray(low).tolist()} to {np.asarray(high).tolist()}"
            raise EnvValueError(
                f"env {self._where(k)} step {self._progress[k].steps}: '{name}' "
                f"expected {expected}, got {value.tolist()}"
            )

    def _number(self, k: int, name: str, value: Any) -> float:
        if type(value) is float:
            return value
        try:
            if isinstance(value, str | bytes) or np.ndim(value) != 0:
                raise TypeError
            return float(value)
        except (TypeError, ValueError):
            raise self._spec_error(k, name, "a number", value) from None

    def _game_seed(self, k: int, game: int) -> int:
        return env_seed(self._seed, self._first_env_id + k, self._incarnation, game)

    def _check_equal_spaces(self) -> None:
        for k, env in enumerate(self.envs):
            for name in ("observation_space", "action_space"):
                expected, got = getattr(self, name), convert_space(getattr(env, name))
                if got != expected:
                    raise ValueError(
                        f"env {self._first_env_id + k} ({name_of(env)}): expected "
                        f"{name} {expected} like that of env {self._first_env_id}, "
                        f"got {got}"
                    )

    def _where(self, k: int) -> str:
        return f"{self._first_env_id + k} ({name_of(self.envs[k])})"

    def _spec_error(self, k: int, name: str, expected: str, got: Any) -> EnvSpecError:
        return EnvSpecError(
            f"env {self._where(k)} step {self._progress[k].steps}: "
            f"'{name}' expected {expected}, got {describe(got)}"
        )

    def _env_error(self, k: int, error: BaseException) -> EnvError:
        if is_ctrl_c(error):
            raise error
        progress = self._progress[k]
        return EnvError(
            f"env {self._where(k)} step {progress.steps} after reset(seed="
            f"{progress.seed}): {type(error).__name__}: {error}"
        )


def is_ctrl_c(error: BaseException) -> bool:
    """Say whether `error` may be Python's own answer to SIGINT."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


@contextlib.contextmanager
def _only_exceptions(what: str) -> Iterator[None]:
    """Turn SystemExit, GeneratorExit and the like out of an environment into EnvError.

    They mean something else to those who call an environment: threads end on SystemExit
    without a word, generators on GeneratorExit.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or is_ctrl_c(error):
            raise
        text = f"{what}: {type(error).__name__}: {error}"
        raise EnvError(f"the environment raised in {text}") from error


def action_at(leaf_spaces: Nest, actions: Nest, k: int) -> Any:
    """Return environment k's action: ints for Discrete, else arrays of its own."""

    def leaf(space: gym.Space, rows: np.ndarray) -> int | np.ndarray:
        is_discrete = isinstance(space, gym.spaces.Discrete)
        return int(rows[k]) if is_discrete else np.array(rows[k])

    return spaces.map_nest(leaf, leaf_spaces, actions)


def _copy_at(rows: Nest, k: int, values: Nest) -> None:
    def copy(row: np.ndarray, value: Any) -> None:
        row[k] = value

    spaces.map_nest(copy, rows, values)


def name_of(env: Any) -> str:
    """Return the id under which `env` is registered, else the name of its class."""
    spec = getattr(env, "spec", None)
    return spec.id if spec is not None else type(env.unwrapped).__name__


def describe(value: Any) -> str:
    """Return what messages say of a value of the wrong kind."""
    if isinstance(value, np.ndarray | np.generic):
        return str(ArraySpec(value.shape, value.dtype))
    if isinstance(value, dict):
        return f"a dict with keys {list(value)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    return f"a {type(value).__name__}"


if __name__ == "__main__":
    from core import check_environment

    sys.exit(check_environment.main())
