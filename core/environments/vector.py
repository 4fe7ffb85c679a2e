# SPDX-License-Identifier: Apache-2.0
"""`from_vector_env`: make your own Gymnasium vector environment write rollout rows.

To serve one, return it from `create_environments` in polybeast_env.py:

    envs = gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="async")
    return from_vector_env(envs, **options)

Use this where one call must step all K environments of a stream: a simulator that runs
on a GPU, or a library that has its own threads or processes. Single environments do not
need this function: a server steps K of them in turn (`Environments`), which costs no
more per step.
"""

import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from core.environments.faults import is_ctrl_c, name_of
from core.environments.stepping import Environments
from core.errors import EnvError, EnvSpecError, MakeError
from core.nests import Nest, map_nest


def from_vector_env(
    vector: VectorEnv, *, info_keys: tuple[str, ...] = (), **options: Any
) -> Environments:
    """Return the environments of `vector`. The result owns `vector` and closes it.

    Args:
      vector: a vector environment of any autoreset mode that obeys
        `reset(options={"reset_mask": mask})`, as those of Gymnasium, ale_py and EnvPool
        do. All vector environments of the mode DISABLED must do so. One that does not
        must have the mode SAME_STEP and never truncate an episode.
      info_keys, options: as `Environments` takes them, but not `recycle_games`.
        `seed_every_game` has no effect: only the first games are seeded. EnvPool takes
        its seeds when it is made and ignores these.

    Raises:
      MakeError: `vector` does not obey these rules.
    """
    if options.get("recycle_games"):
        raise MakeError(
            f"recycle_games is {options['recycle_games']}, but a vector environment "
            "cannot replace one of its environments. Leave --recycle_games out."
        )
    is_done = options.get("truncation_is_done", False)
    steps = _VectorSteps(vector, info_keys, truncation_is_done=is_done)
    return _VectorEnvironments(steps, info_keys=info_keys, **options)


class _VectorEnvironments(Environments):
    """`Environments` whose K steps are one call of the vector environment.

    Does not offer exact resume (`state`, `restore`).
    """

    def __init__(self, steps: "_VectorSteps", **options: Any) -> None:
        self._steps = steps
        super().__init__(iter(steps.envs).__next__, len(steps.envs), **options)

    def reset(self, rows: Nest) -> None:
        self._call(self._steps.reset_all, self.seeds())
        super().reset(rows)

    def step(self, actions: Nest, rows: Nest) -> None:
        if self._progress:
            cut = np.array([progress.cut for progress in self._progress], bool)
            # Copies: the vector environment may write into its actions.
            self._call(self._steps.step_all, map_nest(np.copy, actions), cut)
        super().step(actions, rows)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        self._clock[0] = time.monotonic()
        try:
            function(*args)
        except EnvSpecError as error:
            raise EnvSpecError(f"{self._who()}: {error}") from error.__cause__
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            message = f"{self._who()}: {type(error).__name__}: {error}"
            raise EnvError(message) from error

    def _who(self) -> str:
        first = self._options.first_env_id
        last = first + len(self.envs) - 1
        steps = [progress.steps for progress in self._progress]
        when = f"step {max(steps) + 1}" if steps else "reset"
        return f"envs {first} to {last} ({self._steps.name}) {when}"

    def _where(self, k: int) -> str:
        return f"{self._options.first_env_id + k} ({self._steps.name})"


class _VectorSteps:
    """Steps a `VectorEnv`, and keeps the results for its K single views.

    `VectorEnv.step` steps all K environments, but rows need each environment to reset
    at its own time (see `Environments`). After a termination the same row shows the
    reset observation. After a truncation the row shows the final observation and only
    the next row shows the reset observation. Where the autoreset mode of the vector
    environment resets at another time, this class resets the single environment
    ("we"):

                 after a termination    in the step after a truncation
    NEXT_STEP    we reset it            the vector environment resets it
    SAME_STEP    already reset          already reset; it is stepped with the others, no
                                        row shows this step, and we reset it again
    DISABLED     we reset it            we reset it before the step (DISABLED demands
                                        it); no row shows the step; we reset it again

    With `truncation_is_done` truncated episodes are treated like terminated ones.
    """

    def __init__(
        self, vector: VectorEnv, info_keys: tuple[str, ...], *, truncation_is_done: bool
    ) -> None:
        self.name = name_of(vector)
        self.vector = vector
        self._mode = _autoreset_mode(vector, self.name)
        self._is_envpool = _is_envpool(vector)
        inner = vector.unwrapped
        self._can_reset_some = (
            self._mode is AutoresetMode.DISABLED
            or self._is_envpool
            or isinstance(inner, SyncVectorEnv | AsyncVectorEnv)
            or _is_atari_vector_env(inner)
        )
        if self._mode is AutoresetMode.NEXT_STEP and not self._can_reset_some:
            raise MakeError(
                f"{self.name} resets an ended episode in its next step, too late for "
                "a rollout row, and it is not known to reset single environments "
                "earlier. Let its metadata['autoreset_mode'] be SAME_STEP, or DISABLED "
                "with reset(options={'reset_mask': mask})."
            )
        self._truncation_is_done = truncation_is_done
        self._info_keys = ("life_lost", *info_keys)
        self.envs = [_View(self, k) for k in range(vector.num_envs)]

    def reset_all(self, seeds: list[int]) -> None:
        inner = self.vector.unwrapped
        seed: Any = seeds[0]  # `VectorEnv.reset` derives the other seeds from it.
        if self._is_envpool:
            seed = None
        elif isinstance(inner, SyncVectorEnv | AsyncVectorEnv):
            seed = seeds
        elif _is_atari_vector_env(inner):
            seed = np.array(seeds)
        self._observations, self._infos = self.vector.reset(seed=seed)
        self._resets: dict[int, tuple[Nest, dict[str, Any], int]] = {}

    def step_all(self, actions: Nest, cut: np.ndarray) -> None:
        """Step all environments; reset those that were `cut` ([K] bool) before."""
        is_next_step = self._mode is AutoresetMode.NEXT_STEP
        is_same_step = self._mode is AutoresetMode.SAME_STEP
        self._resets = {}
        if self._mode is AutoresetMode.DISABLED and cut.any():
            self._reset(cut)
        result = self.vector.step(actions)
        self._observations, rewards, terminated, truncated, self._infos = result
        # `Environments` reads single rewards; Python's floats are fastest for that.
        self._rewards = self._array("rewards", rewards, np.float64).tolist()
        self._terminated = self._array("terminations", terminated, np.bool_)
        self._truncated = self._array("truncations", truncated, np.bool_)
        if self._truncation_is_done:
            self._terminated |= self._truncated
        # True where the observation comes from a reset: infos have the final one.
        self._finals = np.zeros_like(cut)
        if is_same_step:
            self._finals = self._terminated | self._truncated
            self._check_finals(self._truncated & ~self._terminated & ~cut)
        to_reset = np.zeros_like(cut)
        if not is_next_step:
            to_reset |= cut
        if not is_same_step:
            to_reset |= self._terminated
        if to_reset.any():
            self._reset(to_reset)

    def step(self, k: int) -> tuple[Any, ...]:
        """Return what environment k's own `step` would have returned."""
        observations, infos = self._observations, self._infos
        if self._finals[k]:  # ale_py has no final_info, so its info_keys are NaN here.
            observations = infos.get("final_obs")
            infos = infos.get("final_info", {})
        return (
            None if observations is None else _at(observations, k),
            self._rewards[k],
            self._terminated[k],
            self._truncated[k],
            _info_at(infos, self._info_keys, k),
        )

    def reset(self, k: int) -> tuple[Nest, dict[str, Any]]:
        """Return what environment k's own `reset` would have returned."""
        all_now = (self._observations, self._infos, k)
        observations, infos, index = self._resets.get(k, all_now)
        return _at(observations, index), _info_at(infos, ("new_game",), index)

    def _reset(self, mask: np.ndarray) -> None:
        observations, infos = self.vector.reset(options={"reset_mask": mask.copy()})
        for index, k in enumerate(np.flatnonzero(mask)):
            # EnvPool returns the environments of the mask, all other libraries all K.
            self._resets[k] = (observations, infos, index if self._is_envpool else k)

    def _array(self, name: str, value: Any, dtype: Any) -> np.ndarray:
        array = np.asarray(value)
        if array.shape != (len(self.envs),):
            raise EnvSpecError(
                f"'{name}' expected shape ({len(self.envs)},), got {array.shape}"
            )
        return array.astype(dtype)

    def _check_finals(self, cut: np.ndarray) -> None:
        if not cut.any():
            return  # Rows do not show the final observation of a terminated episode.
        if "final_obs" not in self._infos:
            raise EnvSpecError(
                "an episode was truncated, and a rollout row must show its final "
                f"observation: expected info['final_obs'], got {sorted(self._infos)}"
            )
        if not self._can_reset_some:
            raise EnvSpecError(
                "an episode was truncated, and the environment is not known to reset "
                "single environments with reset(options={'reset_mask': mask}). Let its "
                "metadata['autoreset_mode'] be DISABLED if it can."
            )


class _View(gym.Env):
    """Environment k of a vector environment that has been stepped or reset before."""

    def __init__(self, steps: _VectorSteps, k: int) -> None:
        self._steps = steps
        self._k = k
        self.observation_space = steps.vector.single_observation_space
        self.action_space = steps.vector.single_action_space
        self.spec = getattr(steps.vector, "spec", None)
        self.render_mode = getattr(steps.vector, "render_mode", None)

    @property
    def unwrapped(self) -> Any:  # Its class names environments without a spec.
        return self._steps.vector.unwrapped

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return self._steps.reset(self._k)

    def step(self, action: Any) -> Any:
        return self._steps.step(self._k)

    def close(self) -> None:
        self._steps.vector.close()  # Once per view; `VectorEnv.close` allows it.


def _at(batch: Nest, k: int) -> Nest:
    """Return entry k of each leaf; `Environments` checks its shape and dtype."""
    return map_nest(lambda leaf: leaf[k], batch)


def _info_at(infos: dict[str, Any], keys: tuple[str, ...], k: int) -> dict[str, Any]:
    """Return those of `keys` that `infos` has for environment k (by its `_key`)."""
    return {
        key: infos[key][k]
        for key in keys
        if key in infos and (f"_{key}" not in infos or infos[f"_{key}"][k])
    }


def _autoreset_mode(vector: VectorEnv, name: str) -> AutoresetMode:
    mode = vector.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise MakeError(
            f"{name}: expected a gymnasium.vector.AutoresetMode in "
            f"metadata['autoreset_mode'], got {mode!r}"
        )
    return mode


def _is_atari_vector_env(vector: Any) -> bool:
    return type(vector).__module__ == "ale_py.vector_env"


def _is_envpool(vector: Any) -> bool:
    return any(cls.__module__.startswith("envpool.") for cls in type(vector).__mro__)
