# SPDX-License-Identifier: Apache-2.0
"""Vector environments as rollout rows: K environments whose steps run together.

`make_vector` creates them by name, like `core.environment.make`:

    ale-vector:Pong    an Atari game in ale_py's C++; also ale-vector:ID with the game's
                       Gymnasium id, such as ale-vector:ALE/Pong-v5
    envpool:Pong-v5    any id of EnvPool, Atari or not: `pip install envpool`

`from_vector_env` takes a `gymnasium.vector.VectorEnv` of your own, of any autoreset
mode. Both return an `Environments`, so rows, counters, checks and messages are those of
`core.environment`. Only the work is begun for all K at once, in threads or processes
that do not share this one's GIL.

What this buys is several cores for one process, not a cheaper step: most of an Atari
step is the emulator, which is the same everywhere. Per core the wrappers in Python are
as fast, or a little faster.

Atari games follow the protocol of `atari_wrappers`; `_Games` says where the C++ allows
less.
"""

import difflib
import importlib
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from core.environment import (
    EnvError,
    Environments,
    EnvSpecError,
    env_seed,
    is_ctrl_c,
)
from core.spaces import Nest, map_nest

ALE, ENVPOOL = "ale-vector:", "envpool:"
FIRE = 1  # Its place in the action set of every game that has it.
NO_LIMIT = 2**30  # Frames or steps; ours are counted here.


def is_vector(name: str) -> bool:
    """Say whether `--env name` is for `make_vector`."""
    return name.startswith((ALE, ENVPOOL))


def is_atari(name: str) -> bool:
    """Say whether `name`, which `is_vector`, is an Atari game.

    Raises:
      ValueError: there is no such environment, or its package is not installed.
    """
    return name.startswith(ALE) or _envpool_entry(name)[0] == "envpool.atari"


def make_vector(
    name: str,
    num_envs: int,
    *,
    atari_options: dict[str, Any],
    seed: int,
    first_env_id: int = 0,
    incarnation: int = 0,
    info_keys: tuple[str, ...] = (),
    seed_every_game: bool = False,
    truncation_is_done: bool = False,
    clock: np.ndarray | None = None,
) -> Environments:
    """Create the `num_envs` environments that `--env name` stands for.

    Args:
      atari_options: as `atari_wrappers.protocol` returns them; only for Atari games.
      seed_every_game: as for `Environments`, but EnvPool is seeded once, when it is
        made.

    Raises:
      ValueError: there is no such environment, its package is not installed, or it
        cannot follow these options.
    """
    options: dict[str, Any] = dict(
        seed=seed,
        first_env_id=first_env_id,
        incarnation=incarnation,
        info_keys=info_keys,
        truncation_is_done=truncation_is_done,
        clock=clock,
    )
    seeds = [env_seed(seed, first_env_id + k, incarnation, 0) for k in range(num_envs)]
    if is_atari(name):
        games = _make_games(name, seeds, **atari_options)
        return _Together(games, seed_every_game=seed_every_game, **options)
    return from_vector_env(_make_envpool(name, seeds), **options)


def single_game(name: str) -> str:
    """Return the Gymnasium id of the game that `name`, which `is_vector`, makes K of.

    Raises:
      ValueError: there is no such environment, or it is no Atari game.
    """
    if not is_atari(name):
        raise ValueError(
            f"--env {name} cannot be shown: EnvPool draws no pictures. Leave --video "
            "out and use --mode test."
        )
    rom = _rom(name) if name.startswith(ALE) else _envpool_entry(name)[2]["task"]
    import ale_py

    gym.register_envs(ale_py)
    return next(
        env_id
        for env_id, spec in gym.registry.items()
        if env_id.startswith("ALE/") and spec.kwargs.get("game") == rom
    )


def from_vector_env(
    vector: VectorEnv,
    *,
    seed: int,
    first_env_id: int = 0,
    incarnation: int = 0,
    info_keys: tuple[str, ...] = (),
    truncation_is_done: bool = False,
    clock: np.ndarray | None = None,
) -> Environments:
    """Return the environments of `vector`, which the result owns and closes.

    Args:
      vector: of any autoreset mode. It must obey `reset(options={"reset_mask": mask})`
        as Gymnasium's, ale_py's and EnvPool's do, and by definition all whose mode is
        DISABLED. Of any other, only SAME_STEP will do, without truncated episodes.

    Raises:
      ValueError: `vector` is none of these.
    """
    return _Together(
        _GymnasiumVector(vector, info_keys, truncation_is_done),
        seed=seed,
        first_env_id=first_env_id,
        incarnation=incarnation,
        info_keys=info_keys,
        truncation_is_done=truncation_is_done,
        clock=clock,
    )


# ----------------------------------------------------------------- Steps of all at once


class _Source(Protocol):
    """K environments that one call sets to work."""

    name: str
    envs: list[Any]  # For `Environments`; their `step` waits for what was begun.

    def begin_reset(self, seeds: list[int]) -> None: ...

    def begin_step(self, actions: Nest, idle: np.ndarray) -> None:
        """Begin the step of all but the `idle` ([K] bool): these will be reset."""


class _Together(Environments):
    """`Environments` that begins each step for all of them before it waits for one.

    Does not offer exact resume (`state`, `restore`).
    """

    def __init__(self, source: _Source, **options: Any) -> None:
        self._source = source
        super().__init__(iter(source.envs).__next__, len(source.envs), **options)

    def reset(self, rows: Nest) -> None:
        self._begin(self._source.begin_reset, self.seeds())
        super().reset(rows)

    def step(self, actions: Nest, rows: Nest) -> None:
        idle = np.array([progress.cut for progress in self._progress], bool)
        if self._progress:
            self._begin(self._source.begin_step, actions, idle)
        super().step(actions, rows)

    def _begin(self, function: Callable[..., None], *args: Any) -> None:
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
        last = self._first_env_id + len(self.envs) - 1
        steps = [progress.steps for progress in self._progress]
        when = f"step {max(steps) + 1}" if steps else "reset"
        return f"envs {self._first_env_id} to {last} ({self._source.name}) {when}"

    def _where(self, k: int) -> str:
        return f"{self._first_env_id + k} ({self._source.name})"


# -------------------------------------------------------------- Gymnasium's vector envs


class _GymnasiumVector:
    """Any `gymnasium.vector.VectorEnv`.

    A step of it steps all K, but the rows want each environment to wait or not on its
    own (see `Environments`): a terminated episode shows its reset observation in the
    same row, a truncated one its final observation, and the reset only in the next row.
    So what the autoreset mode does not do is done by a reset of single environments:

                 terminated             the step after a truncation
    NEXT_STEP    reset, after the step  the vector environment's own reset
    SAME_STEP    has been reset         has been reset, and must take a step with the
                                        others: nobody sees it, then reset again
    DISABLED     reset, after the step  reset (it must be), step that nobody sees, reset

    With `truncation_is_done` truncated episodes are dealt with as terminated ones.
    """

    def __init__(
        self,
        vector: VectorEnv,
        info_keys: tuple[str, ...],
        truncation_is_done: bool,
    ) -> None:
        spec = getattr(vector, "spec", None)
        self.name = getattr(spec, "id", None) or type(vector.unwrapped).__name__
        self.vector = vector
        self._mode = _autoreset_mode(vector, self.name)
        self._is_envpool = _is_envpool(vector)
        self._can_reset_some = _can_reset_some(vector, self._mode)
        if self._mode is AutoresetMode.NEXT_STEP and not self._can_reset_some:
            raise ValueError(
                f"{self.name} resets an ended episode in its next step, too late for "
                "a rollout row, and it is not known to reset single environments "
                "earlier. Let its metadata['autoreset_mode'] be SAME_STEP, or DISABLED "
                "with reset(options={'reset_mask': mask})."
            )
        self._truncation_is_done = truncation_is_done
        self._info_keys = ("life_lost", *info_keys)
        self.envs = [_View(self, k) for k in range(vector.num_envs)]

    def begin_reset(self, seeds: list[int]) -> None:
        inner = self.vector.unwrapped
        seed: Any = seeds[0]  # As the base class has it: the others follow from it.
        if self._is_envpool:
            seed = None  # It got its seeds when it was made.
        elif isinstance(inner, SyncVectorEnv | AsyncVectorEnv):
            seed = seeds
        elif _is_atari_vector_env(inner):
            seed = np.array(seeds)
        self._seen, self._told = self.vector.reset(seed=seed)
        self._resets: dict[int, tuple[Nest, dict[str, Any], int]] = {}

    def begin_step(self, actions: Nest, idle: np.ndarray) -> None:
        is_next_step = self._mode is AutoresetMode.NEXT_STEP
        is_same_step = self._mode is AutoresetMode.SAME_STEP
        self._resets = {}
        if self._mode is AutoresetMode.DISABLED and idle.any():
            self._reset(idle)
        result = self.vector.step(actions)
        self._seen, rewards, terminated, truncated, self._told = result
        # Python's own numbers: `Environments` looks at each one.
        self._rewards = self._array("rewards", rewards, np.float64).tolist()
        self._terminated = self._array("terminations", terminated, np.bool_)
        self._truncated = self._array("truncations", truncated, np.bool_)
        if self._truncation_is_done:
            self._terminated |= self._truncated
        # Where what was seen is a reset observation, and the final one is in the info.
        self._finals = np.zeros_like(idle)
        if is_same_step:
            self._finals = self._terminated | self._truncated
            self._check_finals(self._truncated & ~self._terminated & ~idle)
        to_reset = np.zeros_like(idle)
        if not is_next_step:
            to_reset |= idle
        if not is_same_step:
            to_reset |= self._terminated
        if to_reset.any():
            self._reset(to_reset)

    def _reset(self, mask: np.ndarray) -> None:
        seen, told = self.vector.reset(options={"reset_mask": mask.copy()})
        for place, k in enumerate(np.flatnonzero(mask)):
            # EnvPool returns these environments only, the others all K.
            self._resets[k] = (seen, told, place if self._is_envpool else k)

    def step(self, k: int) -> tuple[Any, ...]:
        """Return what environment k's own `step` would have returned."""
        seen, told = self._seen, self._told
        if self._finals[k]:  # ale_py has no final_info, so these info_keys are NaN.
            seen, told = told.get("final_obs"), told.get("final_info", {})
        return (
            None if seen is None else _at(seen, k),
            self._rewards[k],
            self._terminated[k],
            self._truncated[k],
            _info_at(told, self._info_keys, k),
        )

    def reset(self, k: int) -> tuple[Nest, dict[str, Any]]:
        """Return what environment k's own `reset` would have returned."""
        seen, told, place = self._resets.get(k, (self._seen, self._told, k))
        return _at(seen, place), _info_at(told, ("new_game",), place)

    def _array(self, name: str, value: Any, dtype: Any) -> np.ndarray:
        array = np.asarray(value)
        if array.shape != (len(self.envs),):
            raise EnvSpecError(
                f"'{name}' expected shape ({len(self.envs)},), got {array.shape}"
            )
        return array.astype(dtype)

    def _check_finals(self, cut: np.ndarray) -> None:
        if not cut.any():
            return  # A terminated episode's final observation is not shown.
        if "final_obs" not in self._told:
            raise EnvSpecError(
                "an episode was truncated, and a rollout row must show its final "
                f"observation: expected info['final_obs'], got {sorted(self._told)}"
            )
        if not self._can_reset_some:
            raise EnvSpecError(
                "an episode was truncated, and the environment is not known to reset "
                "single environments with reset(options={'reset_mask': mask}). Let its "
                "metadata['autoreset_mode'] be DISABLED if it can."
            )


class _View(gym.Env):
    """Environment k of a vector environment, which has done the work before."""

    def __init__(self, source: _GymnasiumVector, k: int) -> None:
        self._source = source
        self._k = k
        self.observation_space = source.vector.single_observation_space
        self.action_space = source.vector.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return self._source.reset(self._k)

    def step(self, action: Any) -> Any:
        return self._source.step(self._k)

    def close(self) -> None:
        self._source.vector.close()  # Again for each k, which is fine.


def _at(batch: Nest, k: int) -> Nest:
    """Return entry k of each leaf; what is wrong with it, `Environments` will say."""
    return map_nest(lambda leaf: leaf[k], batch)


def _info_at(infos: dict[str, Any], keys: tuple[str, ...], k: int) -> dict[str, Any]:
    """Return what `infos` has of `keys` for environment k (`_key` says if it does)."""
    return {
        key: infos[key][k]
        for key in keys
        if key in infos and (f"_{key}" not in infos or infos[f"_{key}"][k])
    }


def _autoreset_mode(vector: VectorEnv, name: str) -> AutoresetMode:
    mode = vector.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ValueError(
            f"{name}: expected a gymnasium.vector.AutoresetMode in "
            f"metadata['autoreset_mode'], got {mode!r}"
        )
    return mode


def _can_reset_some(vector: VectorEnv, mode: AutoresetMode) -> bool:
    inner = vector.unwrapped
    return (
        mode is AutoresetMode.DISABLED
        or isinstance(inner, SyncVectorEnv | AsyncVectorEnv)
        or _is_atari_vector_env(inner)
        or _is_envpool(vector)
    )


def _is_atari_vector_env(vector: Any) -> bool:
    return type(vector).__module__ == "ale_py.vector_env"


def _is_envpool(vector: Any) -> bool:
    return any(cls.__module__.startswith("envpool.") for cls in type(vector).__mro__)


# -------------------------------------------------------------------------- Atari games


class Frame(NamedTuple):
    """What one step of an emulator (several frames) led to."""

    picture: np.ndarray  # [84, 84] uint8
    reward: float  # Unclipped.
    game_over: bool
    lives: int
    frames: int  # Of this game so far.


class _Emulators(Protocol):
    """K games in C++, each on its own. A step holds an action for some frames."""

    num_actions: int

    def begin(self, ks: np.ndarray, actions: np.ndarray) -> None:
        """Begin one step of each of the games `ks`."""

    def end(self, k: int) -> Frame:
        """Wait for the step of game k."""

    def reset(self, k: int, seed: int | None) -> Frame:
        """Begin a new game with the no-ops."""

    def close(self) -> None: ...


class _AleEmulators:
    """K times ale_py's AtariVectorEnv, each of one game with a thread of its own.

    One of K games would step all of them or none, and the FIRE after a lost life is for
    one. That costs K small messages per step; but a game that begins anew holds up no
    other. Not used is ale_py's time limit, which leaves the last frame out of the final
    picture.
    """

    def __init__(
        self,
        rom: str,
        num_envs: int,
        *,
        noop_max: int,
        frame_skip: int,
        sticky_actions: float,
        full_action_space: bool,
    ) -> None:
        from ale_py.vector_env import AtariVectorEnv

        self._noop_max = noop_max
        self._games = [
            AtariVectorEnv(
                rom,
                1,
                num_threads=1,
                noop_max=noop_max + 1,  # It draws less than that.
                frameskip=frame_skip,
                repeat_action_probability=sticky_actions,
                full_action_space=full_action_space,
                stack_num=1,
                max_num_frames_per_episode=NO_LIMIT,
                reward_clipping=False,
                use_fire_reset=False,
            )
            for _ in range(num_envs)
        ]
        self.num_actions = len(self._games[0].ale.get_action_set())

    def begin(self, ks: np.ndarray, actions: np.ndarray) -> None:
        for i, k in enumerate(ks):
            self._games[k].send(actions[i : i + 1])

    def end(self, k: int) -> Frame:
        observations, rewards, game_over, _, infos = self._games[k].recv()
        return Frame(
            observations[0, 0],
            float(rewards[0]),
            bool(game_over[0]),
            int(infos["lives"][0]),
            int(infos["episode_frame_number"][0]),
        )

    def reset(self, k: int, seed: int | None) -> Frame:
        seeds = None if seed is None else np.array([seed])
        while True:
            observations, infos = self._games[k].reset(seed=seeds)
            frames = int(infos["episode_frame_number"][0])
            if frames > 0 or self._noop_max == 0:
                lives = int(infos["lives"][0])
                return Frame(observations[0, 0], 0.0, False, lives, frames)
            seeds = None  # It drew 0 no-ops; 1 is the least.

    def close(self) -> None:
        self._games.clear()


class _EnvPoolEmulators:
    """EnvPool, which can step some of its games and not the others."""

    def __init__(
        self,
        name: str,
        seeds: list[int],
        *,
        noop_max: int,
        frame_skip: int,
        sticky_actions: float,
        full_action_space: bool,
    ) -> None:
        self._frame_skip = frame_skip
        self._frames = [0] * len(seeds)
        self._results: dict[int, tuple[int, Any]] = {}
        self._pool = _make_envpool(
            name,
            seeds,
            noop_max=max(1, noop_max),  # With 0 it would draw from an empty range.
            frame_skip=frame_skip,
            repeat_action_probability=sticky_actions,
            full_action_space=full_action_space,
            stack_num=1,
            max_episode_steps=NO_LIMIT,
            reward_clip=False,
            use_fire_reset=False,
            episodic_life=False,
        )
        self.num_actions = int(self._pool.action_space.n)

    def begin(self, ks: np.ndarray, actions: np.ndarray) -> None:
        result = self._pool.step(actions, ks)
        for place, k in enumerate(ks):
            self._results[k] = (place, result)

    def end(self, k: int) -> Frame:
        place, (observations, rewards, game_over, _, infos) = self._results.pop(k)
        self._frames[k] += self._frame_skip
        return Frame(
            observations[place, 0],
            float(rewards[place]),
            bool(game_over[place]),
            int(infos["lives"][place]),
            self._frames[k],
        )

    def reset(self, k: int, seed: int | None) -> Frame:
        del seed  # It got its seeds when it was made.
        self._frames[k] = 0  # And it does not say how many no-ops it did.
        observations, infos = self._pool.reset(np.array([k]))
        return Frame(observations[0, 0], 0.0, False, int(infos["lives"][0]), 0)

    def close(self) -> None:
        self._pool.close()


class _Game(gym.Env):
    """Game k of some emulators: the time limit, and lives that end episodes.

    As `TimeLimit` and `EpisodicLife` in `atari_wrappers`, but after whole steps.
    """

    def __init__(
        self,
        emulators: _Emulators,
        k: int,
        *,
        episodic_life: bool,
        max_frames: int,
    ) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
        self.action_space = gym.spaces.Discrete(emulators.num_actions)
        self.begun = False  # Is a step under way?
        self._emulators = emulators
        self._k = k
        self._episodic_life = episodic_life
        self._max_frames = max_frames
        self._game_goes_on = False
        self._frame: Frame  # The last one.

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if not self.begun:  # FIRE, for this game alone.
            self._emulators.begin(np.array([self._k]), np.array([action]))
        self.begun = False
        before, self._frame = self._frame, self._emulators.end(self._k)
        picture, reward, terminated, lives, frames = self._frame
        truncated = frames >= self._max_frames
        info: dict[str, Any] = {"lives": lives}
        if self._episodic_life and 0 < lives < before.lives and not terminated:
            terminated = True
            if not truncated:
                info["life_lost"] = self._game_goes_on = True
        return picture, reward, terminated, truncated, info

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        new_game = seed is not None or not self._game_goes_on
        self._game_goes_on = False
        if new_game:
            self._frame = self._emulators.reset(self._k, seed)
        return self._frame.picture, {"lives": self._frame.lives, "new_game": new_game}

    def close(self) -> None:
        self._emulators.close()  # Again for each k, which is fine.


class _Games:
    """Atari games in C++ as `atari_wrappers.make_atari` makes them in Python.

    Pictures, rewards, ends of games, no-ops (their number, drawn by another generator),
    FIRE and the frame stack are the same, byte for byte where nothing is drawn: see
    tests/test_vector_env.py. Not the same:

    * A lost life is noticed at the end of a step, up to 3 frames late with 4 frames per
      step (2 to 2.5 on average in four games), and the one no-op frame after it is left
      out: neither ale_py nor EnvPool stops within a step and goes on with the game.
    * EnvPool does at least one no-op, also where `noop_max` is 0; its time limit does
      not count the no-ops, so it comes up to `noop_max` frames late.
    * Emulators draw sticky actions from other seeds than in `atari_wrappers`. EnvPool
      is seeded when it is made: a second `reset` begins other games.
    """

    def __init__(
        self,
        name: str,
        emulators: _Emulators,
        num_envs: int,
        *,
        press_fire: bool,
        episodic_life: bool,
        max_frames: int,
    ) -> None:
        # core/ uses nothing outside it but this: FireReset and FrameStack must stay the
        # same. (As a module without types.)
        atari_wrappers = importlib.import_module("atari_wrappers")
        self.name = name
        self._emulators = emulators
        self._games = [
            _Game(emulators, k, episodic_life=episodic_life, max_frames=max_frames)
            for k in range(num_envs)
        ]
        self.envs = []
        for game in self._games:
            env: gym.Env = atari_wrappers.FireReset(game) if press_fire else game
            self.envs.append(atari_wrappers.FrameStack(env))

    def begin_reset(self, seeds: list[int]) -> None:
        for game in self._games:  # All are reset, one by one.
            game.begun = False

    def begin_step(self, actions: Nest, idle: np.ndarray) -> None:
        num_actions = self._emulators.num_actions
        if not ((actions >= 0) & (actions < num_actions)).all():
            # ale_py would wait for ever, EnvPool read beyond its table.
            raise ValueError(f"expected actions 0 to {num_actions - 1}, got {actions}")
        ks = np.flatnonzero(~idle)
        if ks.size:
            self._emulators.begin(ks, actions[ks])
        for k in ks:
            self._games[k].begun = True


def _make_games(
    name: str,
    seeds: list[int],
    *,
    noop_max: int,
    fire_reset: bool,
    episodic_life: bool,
    frame_skip: int,
    sticky_actions: float,
    full_action_space: bool,
    max_frames: int,
) -> _Games:
    """As `atari_wrappers.make_atari`, for one game per seed."""
    least_skip = 2 if name.startswith(ENVPOOL) else 1  # Its max would be of all frames.
    for option, value, least in [
        ("noop_max", noop_max, 0),
        ("frame_skip", frame_skip, least_skip),
        ("max_frames", max_frames, 1),
    ]:
        if value < least:
            raise ValueError(
                f"{option} is {value} but must be at least {least} for {name}"
            )
    if not 0 <= sticky_actions <= 1:
        raise ValueError(f"sticky_actions is {sticky_actions} but must be in [0, 1]")
    options: dict[str, Any] = dict(
        noop_max=noop_max,
        frame_skip=frame_skip,
        sticky_actions=sticky_actions,
        full_action_space=full_action_space,
    )
    emulators: _Emulators
    if name.startswith(ALE):
        rom = _rom(name)
        emulators = _AleEmulators(rom, len(seeds), **options)
    else:
        rom = _envpool_entry(name)[2]["task"]
        emulators = _EnvPoolEmulators(name, seeds, **options)
    return _Games(
        name,
        emulators,
        len(seeds),
        press_fire=fire_reset and _has_fire(rom, full_action_space),
        episodic_life=episodic_life,
        max_frames=max_frames,
    )


def _rom(name: str) -> str:
    """Return the ROM of ale-vector:GAME or ale-vector:ID."""
    try:
        import ale_py
        import ale_py.vector_env  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--env {name}: {error}. Try: pip install ale-py") from error
    gym.register_envs(ale_py)
    game = name.removeprefix(ALE)
    for env_id in (game, f"ALE/{game}-v5"):
        spec = gym.registry.get(env_id)
        if spec is not None and str(spec.entry_point).startswith("ale_py"):
            return spec.kwargs["game"]
    known = [i.split("/")[1].removesuffix("-v5") for i in gym.registry if "ALE/" in i]
    near = difflib.get_close_matches(game, known, n=3)
    raise ValueError(
        f"--env {name} is not known; expected a game such as {ALE}Pong or its "
        f"Gymnasium id.{_did_you_mean([ALE + match for match in near])}"
    )


def _has_fire(rom: str, full_action_space: bool) -> bool:
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # No banner.
    ale = ale_py.ALEInterface()
    path = ale_py.roms.get_rom_path(rom)
    assert path is not None, rom
    ale.loadROM(path)
    actions = (
        ale.getLegalActionSet() if full_action_space else ale.getMinimalActionSet()
    )
    return actions[FIRE] == ale_py.Action.FIRE


# ------------------------------------------------------------------------------ EnvPool


def _envpool_entry(name: str) -> tuple[str, str, dict[str, Any]]:
    """Return the module, the class and the options of what EnvPool calls `name`."""
    try:
        envpool = importlib.import_module("envpool")
    except ImportError as error:
        raise ValueError(
            f"--env {name} needs EnvPool ({error}). Try: pip install envpool"
        ) from error
    task = name.removeprefix(ENVPOOL)
    specs = envpool.registration.registry.specs
    if task not in specs:
        near = difflib.get_close_matches(task, specs, n=3)
        raise ValueError(
            f"--env {name} is not known to EnvPool {envpool.__version__}."
            f"{_did_you_mean([ENVPOOL + match for match in near])}"
        )
    return specs[task]


def _make_envpool(name: str, seeds: list[int], **options: Any) -> Any:
    _envpool_entry(name)  # Raises what is wrong with the name.
    return importlib.import_module("envpool").make_gymnasium(
        name.removeprefix(ENVPOOL),
        num_envs=len(seeds),
        num_threads=min(len(seeds), _num_cores()),
        seed=seeds,
        **options,
    )


def _num_cores() -> int:
    # Not that of core.supervise, which imports more than an environment server needs.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _did_you_mean(near: list[str]) -> str:
    return f" Did you mean {' or '.join(near)}?" if near else ""
