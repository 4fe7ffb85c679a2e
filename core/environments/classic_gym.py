# SPDX-License-Identifier: Apache-2.0
"""Adapt environments of classic gym, of any version, to the API of Gymnasium."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from core.errors import MakeError

CLASSIC_SPACES = "Box Discrete MultiDiscrete MultiBinary Text Dict Tuple".split()


def adapt(env: Any) -> gym.Env:
    """Return `env` if it is a Gymnasium environment, else `ClassicGym(env)`.

    Raises:
      MakeError: `env` lacks a method or a space, or a space has no counterpart; or its
        `reset` takes no seed; or it is a vector environment.
    """
    if isinstance(env, gym.vector.VectorEnv):
        raise MakeError(
            f"{type(env).__name__} is a vector environment; expected one environment, "
            "because actors and servers make several. docs/environments.md shows how "
            "PolyBeast's servers use a vector environment."
        )
    needed = ("reset", "step", "observation_space", "action_space")
    missing = [attribute for attribute in needed if not hasattr(env, attribute)]
    if missing:
        raise MakeError(
            f"{type(env).__name__} has no {', '.join(missing)}; expected an "
            "environment of Gymnasium or classic gym. Set observation_space and "
            "action_space when it is made: the learner builds its model from them."
        )
    if not isinstance(env, gym.Env):
        return ClassicGym(env)
    layer: Any = env
    while layer is not None:
        if not _takes_seed(layer.reset):
            raise MakeError(
                f"{type(layer).__name__}.reset takes no seed; expected the interface "
                "of Gymnasium: def reset(self, *, seed=None, options=None)"
            )
        # A wrapper of the user's own may call the `reset` below it without a seed.
        passes_seed = type(layer).__module__.startswith("gymnasium.") or (
            isinstance(layer, gym.Wrapper) and type(layer).reset is gym.Wrapper.reset
        )
        layer = getattr(layer, "env", None) if passes_seed else None
    return env


def _takes_seed(reset: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(reset, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # Of a function in C, for example.
        return True
    return "seed" in parameters or _takes_kwargs(parameters)


def _takes_kwargs(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def original(env: gym.Env) -> Any:
    """Return the environment that `adapt` got, if it returned `env`."""
    return env.env if isinstance(env, ClassicGym) else env


class ClassicGym(gym.Env):
    """The Gymnasium API around an environment of classic gym, of any version.

    `reset` may return the observation or (observation, info). `step` may return 4
    values with `done`, or 5 values with `terminated` and `truncated`. The first call of
    each method shows what it returns. A `done` with `info["TimeLimit.truncated"]` is a
    truncation. Seeds go to `reset(seed=)` if the innermost environment takes a seed
    there, else to `seed()`.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space = convert_space(env.observation_space)
        self.action_space = convert_space(env.action_space)
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)
        # Wrappers take **kwargs, so look at the signature of the innermost `reset`.
        reset = inspect.signature(self.unwrapped.reset).parameters
        has_method = callable(getattr(env, "seed", None))
        by_kwargs = _takes_kwargs(reset) and not has_method
        self._reset_seeds = "seed" in reset or by_kwargs
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
            space = self.observation_space  # Observations may be pairs, too.
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
    """Return `space` as a Gymnasium space.

    The kind of a classic space is read from the name of its class or of a base class.
    The name may end in "Space".
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
            items = [(key, convert_space(sub)) for key, sub in space.spaces.items()]
            return gym.spaces.Dict(items)  # Sorts the keys of a dict, not of a list.
        case "Tuple":
            return gym.spaces.Tuple([convert_space(sub) for sub in space.spaces])
    raise MakeError(
        f"cannot convert the space {space!r} of classic gym; expected Box, Discrete, "
        "MultiDiscrete, MultiBinary, Dict or Tuple. Set the environment's "
        "observation_space and action_space to spaces of gymnasium.spaces."
    )
