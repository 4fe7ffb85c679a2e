# SPDX-License-Identifier: Apache-2.0
"""`RowWriter`: checks what environments return, and writes it into rollout rows."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from core.action_spaces import ACTION_MASK, category_sizes
from core.errors import EnvSpecError, EnvValueError
from core.nests import ArraySpec, Nest, describe, leaves, map_nest
from core.rollout import leaf_spaces, spec_of, value_range

FLOAT32_MAX = float(np.finfo(np.float32).max)


class RowWriter:
    """Checks and writes what one of K environments returned.

    All checks compare with the environments' own spaces. They raise EnvSpecError, or
    EnvValueError for a value outside its range or a reward that is not finite.

    Args:
      space: the observation space.
      action_space: the action space, for the check of `action_mask`.
      where: given k, returns the text that names environment k and its step in a
        message.
    """

    def __init__(
        self, space: gym.Space, action_space: gym.Space, where: Callable[[int], str]
    ) -> None:
        self._spec = spec_of(space, "observation")
        self._ranges = map_nest(value_range, leaf_spaces(space))
        self._where = where
        # Where the entries of each Discrete choice begin in a mask.
        sizes = category_sizes(action_space)
        self._choices = np.cumsum([0, *sizes])[:-1]
        mask = None
        if isinstance(space, gym.spaces.Dict):
            mask = space.spaces.get(ACTION_MASK)
        # The learner refuses a mask of another size.
        size = 0 if mask is None else gym.spaces.flatdim(mask)
        self._has_mask = size == sum(sizes) > 0

    def write_observation(self, rows: Nest, k: int, value: Any) -> None:
        """Write the observation `value` into entry k of `rows` (a nest)."""
        self._write(rows, k, value, self._spec, self._ranges, "observation")

    def check_mask(self, k: int, observation: Any) -> None:
        """Refuse an observation that allows no action at all."""
        if not self._has_mask:
            return
        parts = [np.ravel(part) for _, part in leaves(observation[ACTION_MASK])]
        allowed = np.concatenate(parts) != 0
        if not np.logical_or.reduceat(allowed, self._choices).all():
            raise EnvValueError(
                f"{self._where(k)}: 'observation/{ACTION_MASK}' expected at least one "
                f"allowed action per choice, got {allowed.astype(int).tolist()}. "
                "End the episode in this step, or allow one."
            )

    def transition(self, k: int, result: Any) -> tuple[Any, float, bool, bool, dict]:
        """Return what `step` returned, with the reward and the flags converted."""
        try:
            observation, reward, terminated, truncated, info = result
        except (TypeError, ValueError):
            expected = "(observation, reward, terminated, truncated, info)"
            raise self._error(k, "step()", expected, result) from None
        if not isinstance(info, dict):
            raise self._error(k, "info", "a dict", info)
        try:
            terminated, truncated = bool(terminated), bool(truncated)
        except ValueError:  # Arrays.
            got = (terminated, truncated)
            raise self._error(k, "terminated, truncated", "bools", got) from None
        reward = self.number(k, "reward", reward)
        if not -FLOAT32_MAX <= reward <= FLOAT32_MAX:  # True for NaN.
            raise EnvValueError(
                f"{self._where(k)}: 'reward' expected a finite float32, got {reward}"
            )
        return observation, reward, terminated, truncated, info

    def check_reset(self, k: int, result: Any) -> None:
        """Check that `reset` returned an observation and a dict."""
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not (is_pair and isinstance(result[1], dict)):
            raise self._error(k, "reset()", "(observation, info)", result)

    def number(self, k: int, name: str, value: Any) -> float:
        """Return a scalar as a float."""
        plain = isinstance(value, (float, int))  # Also np.float64. Faster than ndim.
        try:
            if not plain and (isinstance(value, str | bytes) or np.ndim(value) != 0):
                raise TypeError
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise self._error(k, name, "a number", value) from None

    def _write(
        self, rows: Nest, k: int, value: Any, spec: Nest, ranges: Nest, name: str
    ) -> None:
        if isinstance(spec, ArraySpec):
            if (
                type(value) is not np.ndarray
                or value.shape != spec.shape
                or value.dtype is not spec.dtype  # Faster than !=. _cast takes both.
            ):
                value = self._cast(k, name, spec, value)
            if ranges is not None:
                self._check_range(k, name, ranges, value)
            rows[k] = value
            return
        if isinstance(spec, dict):
            if not isinstance(value, dict) or value.keys() != spec.keys():
                raise self._error(k, name, f"a dict with keys {list(spec)}", value)
            keys: Any = spec
        else:
            if not isinstance(value, tuple) or len(value) != len(spec):
                raise self._error(k, name, f"a tuple of {len(spec)}", value)
            keys = range(len(spec))
        for key in keys:
            sub_name = f"{name}/{key}"
            self._write(rows[key], k, value[key], spec[key], ranges[key], sub_name)

    def _cast(self, k: int, name: str, spec: ArraySpec, value: Any) -> np.ndarray:
        """Return `value` as an array of the right shape and a dtype that fits.

        Floats fit floats of any size; integers must keep their values when cast.
        """
        try:
            array = np.asarray(value)
        except Exception:  # Ragged, or an object whose __array__ raises.
            raise self._error(k, name, str(spec), value) from None
        fits = np.can_cast(array.dtype, spec.dtype, casting="same_kind")
        if array.shape != spec.shape or not fits:
            raise self._error(k, name, str(spec), value)
        if spec.dtype.kind in "iu" and array.dtype != spec.dtype:
            wrong = array[array.astype(spec.dtype) != array]
            if wrong.size:
                raise EnvValueError(
                    f"{self._where(k)}: '{name}' expected values that {spec.dtype} can "
                    f"hold, got {wrong[0]}"
                )
        return array

    def _check_range(
        self, k: int, name: str, limits: tuple[Any, Any], value: np.ndarray
    ) -> None:
        """Refuse a value that no network can take.

        Unlike a wrong shape, such a value may be an exception, so its error ends only
        the episode.
        """
        low, high = limits
        if isinstance(low, int):
            fine = low <= int(value) <= high
        else:
            fine = bool(((low <= value) & (value <= high)).all())
        if not fine:
            expected = f"{np.asarray(low).tolist()} to {np.asarray(high).tolist()}"
            raise EnvValueError(
                f"{self._where(k)}: '{name}' expected {expected}, got {value.tolist()}"
            )

    def _error(self, k: int, name: str, expected: str, got: Any) -> EnvSpecError:
        return EnvSpecError(
            f"{self._where(k)}: '{name}' expected {expected}, got {describe(got)}"
        )
