# SPDX-License-Identifier: Apache-2.0
"""Atari preprocessing: the wrappers between the emulator and the agent.

`make_atari` builds this stack, from the emulator to the agent:

    Emulator      one frame per step; sticky actions, and the set of actions
    TimeLimit     truncates a game that takes too long (Gymnasium's own wrapper)
    NoopReset     begins a game with a random number of no-ops
    EpisodicLife  ends the episode, but not the game, when a life is lost
    MaxAndSkip    repeats an action for 4 frames; makes one grey picture of the last two
    FireReset     begins an episode with the fire button
    WarpFrame     scales the picture to 84x84 pixels
    FrameStack    shows the last 4 pictures: uint8 [4, 84, 84], the newest last

From the emulator to EpisodicLife a step is one emulator *frame*, and its observation is
not used (the Emulator returns None). MaxAndSkip turns frames into *steps* and asks the
emulator for the pictures that it needs, so no other frame is drawn. From MaxAndSkip on,
observations are new arrays, which you may keep or write into.

Rewards are not clipped here; the learner clips them. Rewards of the frames before an
episode's first observation (no-ops, fire) are dropped.

`wrap` applies the same wrappers to an environment of your own, from Gymnasium or (by
`core.environments.classic_gym.adapt`) from classic gym. Its `unwrapped` must have an
`ale` and `get_action_meanings`.
"""

import collections
import contextlib
import math
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import TimeLimit

from core.environments.faults import name_of
from core.environments.make import make
from core.errors import MakeError

IMPORT_ERROR: str | None = None
try:
    import ale_py
except ImportError as error:  # Only Atari games need it: make_atari raises it.
    IMPORT_ERROR = str(error)

# Indices in the full action set, and in the minimal one of a game that has a no-op.
NOOP, FIRE = 0, 1

FRAMES_PER_SECOND = 60  # Of the Atari 2600.

# If FIRE ends this many episodes in a row, the game does not wait for FIRE.
MAX_FIRE_RESETS = 10

PROTOCOLS: dict[str, dict[str, Any]] = {
    # Espeholt et al. 2018 (Table G.1), which follows Mnih et al. 2015. FireReset is
    # from OpenAI Baselines; published curves of IMPALA use it.
    "impala": dict(
        noop_max=30,
        fire_reset=True,
        episodic_life=True,
        frame_skip=4,
        sticky_actions=0.0,
        full_action_space=False,
        max_frames=108_000,
    ),
    # Machado et al. 2018: sticky actions instead of no-ops make games differ. The agent
    # gets no help with lives, with the fire button or with the set of actions. Frame
    # skip and time limit are those of Dopamine (Castro et al. 2018).
    "machado": dict(
        noop_max=0,
        fire_reset=False,
        episodic_life=False,
        frame_skip=4,
        sticky_actions=0.25,
        full_action_space=True,
        max_frames=108_000,
    ),
}


def options_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `make_atari` that a trainer's flags ask for.

    Flags with the names of options change those of --atari_protocol, unless None.
    """
    options = PROTOCOLS[flags.get("atari_protocol") or "impala"]
    changes = {name: flags[name] for name in options if flags.get(name) is not None}
    return {**options, **changes}


def recorded_options(flags: Mapping[str, Any], env: gym.Env) -> dict[str, Any]:
    """Return the options of `env`, which `create_env` made, for the log and meta.json.

    They are those that `make_atari` or `wrap` got, also if other wrappers are around
    its result. For any other environment the result is empty; but if --env is an Atari
    game all the same, the result says what `create_env` made instead.
    """
    with contextlib.suppress(AttributeError):
        protocol = flags.get("atari_protocol") or "impala"
        return {"atari_protocol": protocol, **env.get_wrapper_attr("atari_options")}
    return {"create_env": name_of(env)} if is_atari(flags["env"]) else {}


def is_atari(env_id: str) -> bool:
    """Say whether `--env env_id` is a game that `make_atari` can make."""
    spec = gym.registry.get(env_id.removeprefix("gym:").removeprefix("ale_py:"))
    return spec is not None and str(spec.entry_point).startswith("ale_py")


def make_atari(
    env_id: str,
    *,
    sticky_actions: float = 0.0,
    full_action_space: bool = False,
    render_mode: str | None = None,
    **wrappers: Any,
) -> gym.Env:
    """Create an Atari game with all wrappers. The defaults are protocol "impala".

    Args:
      env_id: a Gymnasium id such as PongNoFrameskip-v4, ALE/Pong-v5 or
        ale_py:ALE/Pong-v5, or gym:PongNoFrameskip-v4 for classic gym with atari-py. It
        selects the game, its mode and difficulty. The arguments here decide everything
        else.
      sticky_actions: probability, in each frame, that the emulator repeats its last
        action instead of the new one.
      full_action_space: all 18 actions, not only those that the game uses.
      render_mode: None, "rgb_array" or "human".
      wrappers: as `wrap` takes them.

    Raises:
      MakeError: `env_id` is not an Atari game, or an option is out of its range, or a
        package is not installed.
    """
    if IMPORT_ERROR:
        raise MakeError(
            f"--env {env_id}: {IMPORT_ERROR}. Atari games need: pip install ale-py"
        )
    if not is_atari(env_id):
        raise MakeError(
            f"{env_id} is not the id of an Atari game; expected one such as "
            "PongNoFrameskip-v4 or ALE/Pong-v5"
        )
    if not 0 <= sticky_actions <= 1:
        raise MakeError(f"sticky_actions is {sticky_actions} but must be in [0, 1]")
    options = dict(
        repeat_action_probability=sticky_actions,
        full_action_space=full_action_space,
        render_mode=render_mode,
    )
    if env_id.startswith("gym:"):
        try:
            from core.environments import classic_atari
        except ModuleNotFoundError as error:
            raise MakeError(
                f"{env_id} needs {error.name}, which is not installed. Try: "
                "pip install -e .[classic], or the id without 'gym:'."
            ) from error
        classic_atari.register()
        env = make(env_id, **options)
    else:
        env = Emulator(**{**gym.spec(env_id).kwargs, **options})
    env = wrap(env, **wrappers)
    env.atari_options |= {
        "sticky_actions": sticky_actions,
        "full_action_space": full_action_space,
    }
    return env


def wrap(
    env: gym.Env,
    *,
    noop_max: int = 30,
    fire_reset: bool = True,
    episodic_life: bool = True,
    frame_skip: int = 4,
    max_frames: int = 108_000,
) -> gym.Env:
    """Apply the wrappers to `env`, whose steps are single frames.

    Args:
      noop_max: maximum number of no-ops at the start of a game; 0 for none.
      fire_reset: press FIRE at the start of an episode, in games that have FIRE.
      episodic_life: a lost life ends the episode.
      frame_skip: frames for which an action is repeated.
      max_frames: time limit of one game, over all its lives, no-ops included. The game
        is truncated at the end of the step that reaches it.

    Raises:
      MakeError: an option is out of its range, or `env` skips frames by itself, or
        has no no-op, which `noop_max` and `episodic_life` need.
    """
    for name, value, least in [
        ("noop_max", noop_max, 0),
        ("frame_skip", frame_skip, 1),
        ("max_frames", max_frames, 1),
    ]:
        if value < least:
            raise MakeError(f"{name} is {value} but must be at least {least}")
    game = env.unwrapped
    skip = getattr(game, "_frameskip", getattr(game, "frameskip", 1))
    if skip != 1:
        raise MakeError(
            f"the environment skips frames by itself ({skip}), and MaxAndSkip would "
            "skip again. Make it with frameskip=1, or use an id with NoFrameskip."
        )
    presses_noop = noop_max > 0 or episodic_life
    if presses_noop and (first := game.get_action_meanings()[NOOP]) != "NOOP":
        raise MakeError(
            f"the game's first action is {first}, but its resets press a no-op. Let it "
            "have all actions: full_action_space=True (--full_action_space)."
        )
    env = TimeLimit(env, max_frames)
    if noop_max > 0:
        env = NoopReset(env, noop_max)
    if episodic_life:
        env = EpisodicLife(env)
    env = MaxAndSkip(env, frame_skip)
    if fire_reset and game.get_action_meanings()[FIRE] == "FIRE":
        env = FireReset(env)
    env = FrameStack(WarpFrame(env))
    env.atari_options = {
        "noop_max": noop_max,
        "fire_reset": fire_reset,
        "episodic_life": episodic_life,
        "frame_skip": frame_skip,
        "max_frames": max_frames,
    }
    return env


class Emulator(gym.Wrapper):
    """The emulator: a step is one frame and returns no observation.

    ale_py's own `step` draws every frame, but MaxAndSkip uses only two of four.
    The emulator applies sticky actions (Machado et al. 2018) in each frame.
    """

    def __init__(self, **options: Any):
        # Without this, each of many actors prints a banner. Errors still show.
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        no_limit = 0  # The wrapper TimeLimit has the limit.
        options |= {"frameskip": 1, "max_num_frames_per_episode": no_limit}
        super().__init__(ale_py.AtariEnv(**options))
        self.ale = self.unwrapped.ale
        self._actions = (
            self.ale.getLegalActionSet()
            if options.get("full_action_space")
            else self.ale.getMinimalActionSet()
        )

    def step(self, action):
        reward = self.ale.act(self._actions[action])
        game_over = self.ale.game_over(with_truncation=False)
        return None, reward, game_over, False, {"lives": self.ale.lives()}


class NoopReset(gym.Wrapper):
    """Begin a game with 1 to `noop_max` no-ops (Mnih et al. 2015).

    The environment's own generator draws the number, as in Gymnasium's
    AtariPreprocessing, so the seed decides it. If the no-ops end the game, the
    remaining no-ops follow in a new game.
    """

    def __init__(self, env: gym.Env, noop_max: int):
        super().__init__(env)
        self.noop_max = noop_max

    def reset(self, *, seed=None, options=None):
        observation, info = self.env.reset(seed=seed, options=options)
        for _ in range(self.np_random.integers(1, self.noop_max + 1)):
            observation, _, terminated, truncated, info = self.env.step(NOOP)
            if terminated or truncated:
                # Not with the seed, which would lead to the same end again.
                observation, info = self.env.reset(options=options)
        return observation, info


class EpisodicLife(gym.Wrapper):
    """End the episode, but not the game, when a life is lost (Mnih et al. 2015).

    Lives are checked after every frame, as in DQN and in AtariPreprocessing. A step
    that loses a life while the game goes on is `terminated` and has
    `info["life_lost"] = True`; the next `reset` continues the same game. Any other
    `reset` (in the middle of an episode, or with a seed) begins a new game.

    A game without lives left goes on until the emulator ends it: Q*bert goes on for
    some frames. Winning a life does not end the episode.

    `info["new_game"]` of a `reset` says whether a new game began. It can be True even
    after `life_lost`: if the frames before the new episode end the game, or reach its
    time limit.
    """

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self._ale = env.unwrapped.ale
        self._lives = 0
        self._game_goes_on = False

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        lives = self._ale.lives()
        if 0 < lives < self._lives and not terminated:
            terminated = True
            if not truncated:
                info["life_lost"] = self._game_goes_on = True
        self._lives = lives
        return observation, reward, terminated, truncated, info

    def reset(self, *, seed=None, options=None):
        new_game = seed is not None or not self._game_goes_on
        if not new_game:
            # Leave the frame on which the life was lost.
            observation, _, terminated, truncated, info = self.env.step(NOOP)
            new_game = terminated or truncated
        if new_game:
            observation, info = self.env.reset(seed=seed, options=options)
        self._lives = self._ale.lives()
        self._game_goes_on = False
        info["new_game"] = new_game
        return observation, info


class MaxAndSkip(gym.Wrapper):
    """Repeat each action for `frame_skip` frames; show the max of the last two in grey.

    Mnih et al. 2015 take the max because the Atari 2600 draws some objects only in
    every other frame. As in Gymnasium's AtariPreprocessing, it is the max of two grey
    pictures, not the grey of a max over colours. After `reset` there is only one
    picture. Rewards are summed.

    A termination ends the skip early. Then the final picture is the last frame alone. A
    time limit does not end the skip early: a truncated episode bootstraps from its
    final picture, so this picture must look like all other pictures.
    """

    def __init__(self, env: gym.Env, frame_skip: int):
        super().__init__(env)
        self._ale = env.unwrapped.ale
        self.frame_skip = frame_skip
        height, width = env.observation_space.shape[:2]
        self.observation_space = gym.spaces.Box(0, 255, (height, width), np.uint8)
        # A video has one picture per step.
        self.metadata = {**env.metadata, "render_fps": FRAMES_PER_SECOND / frame_skip}

    def step(self, action):
        total, time_is_up, before_last = 0.0, False, None
        for i in range(self.frame_skip):
            _, reward, terminated, truncated, info = self.env.step(action)
            total += reward
            time_is_up = time_is_up or truncated
            if terminated:
                break
            if i == self.frame_skip - 2:
                before_last = self._screen()
        screen = self._screen()
        if before_last is not None:
            np.maximum(screen, before_last, out=screen)
        return screen, total, terminated, time_is_up, info

    def reset(self, *, seed=None, options=None):
        _, info = self.env.reset(seed=seed, options=options)
        return self._screen(), info

    def _screen(self) -> np.ndarray:
        screen = np.empty(self.observation_space.shape, np.uint8)  # [H, W]
        self._ale.getScreenGrayscale(screen)
        return screen


class FireReset(gym.Wrapper):
    """Begin an episode with FIRE and action 2, for games that wait for it.

    From OpenAI Baselines (Dhariwal et al. 2017). Breakout, for example, serves the ball
    on FIRE, after every lost life. If the two actions end the episode (a life lost, or
    the game), they are repeated in the next episode, so the agent never starts with an
    episode that is over.
    """

    def reset(self, *, seed=None, options=None):
        observation, info = self.env.reset(seed=seed, options=options)
        new_game = info.get("new_game", True)
        for _ in range(MAX_FIRE_RESETS):
            for action in (FIRE, 2):
                observation, _, terminated, truncated, info = self.env.step(action)
                if terminated or truncated:
                    break
            else:
                info["new_game"] = new_game
                return observation, info
            _, info = self.env.reset(options=options)
            new_game = new_game or info.get("new_game", True)
        raise RuntimeError(
            f"FIRE and action 2 ended {MAX_FIRE_RESETS} episodes in a row; this game "
            "does not wait for FIRE. Use fire_reset=False."
        )


class WarpFrame(gym.ObservationWrapper):
    """Scale pictures to 84x84 (Mnih et al. 2015).

    A new pixel is the mean of the area that it covers, rounded; halves to even. cv2's
    INTER_AREA, which Gymnasium's AtariPreprocessing uses, computes the same, but rounds
    some halves the other way. This takes less than half the time.
    """

    SIZE = 84

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(
            0, 255, (self.SIZE, self.SIZE), np.uint8
        )
        height, width = env.observation_space.shape
        self._rows = overlaps(height, self.SIZE)
        self._columns = np.ascontiguousarray(overlaps(width, self.SIZE).T)
        self._area = np.float32(self._rows.shape[1] * self._columns.shape[0])

    def observation(self, observation):
        (_, rows), (columns, _) = self._rows.shape, self._columns.shape
        # Whole numbers below 2**24 (for any of ALE's screens) are exact in float32.
        x = observation.reshape(-1, rows, observation.shape[1]).astype(np.float32)
        x = (self._rows @ x).reshape(-1, columns) @ self._columns
        x /= self._area
        return np.rint(x, out=x).astype(np.uint8).reshape(self.SIZE, self.SIZE)


def overlaps(old: int, new: int) -> np.ndarray:
    """Return how much each of `new` equal parts of a line covers each of `old` parts.

    The pattern repeats gcd(old, new) times; returns it once: float32
    [new / gcd, old / gcd], whole numbers. Each row's sum is old / gcd.
    """
    repeats = math.gcd(old, new)
    old, new = old // repeats, new // repeats
    # Both are old x new units long.
    begins, others = old * np.arange(new)[:, None], new * np.arange(old)
    covered = np.minimum(begins + old, others + new) - np.maximum(begins, others)
    return covered.clip(min=0).astype(np.float32)


class FrameStack(gym.Wrapper):
    """Show the last 4 pictures (Mnih et al. 2015), the newest last: [4, H, W].

    An episode begins with 4 copies of its first picture, so the stack never shows two
    episodes.
    """

    SIZE = 4

    def __init__(self, env: gym.Env):
        super().__init__(env)
        shape = (self.SIZE, *env.observation_space.shape)
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self._pictures: collections.deque[np.ndarray] = collections.deque(
            maxlen=self.SIZE
        )

    def step(self, action):
        picture, reward, terminated, truncated, info = self.env.step(action)
        self._pictures.append(picture)
        return np.array(self._pictures), reward, terminated, truncated, info

    def reset(self, *, seed=None, options=None):
        picture, info = self.env.reset(seed=seed, options=options)
        self._pictures.extend([picture] * self.SIZE)
        return np.array(self._pictures), info
