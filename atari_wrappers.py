# SPDX-License-Identifier: Apache-2.0
"""Atari preprocessing: what lies between the emulator and what the agent sees.

`make_atari` builds this stack, from the emulator up to the agent:

    Emulator      one frame per step; sticky actions, and the set of actions
    TimeLimit     a game that takes too long is truncated (Gymnasium's own wrapper)
    NoopReset     a game begins with a random number of no-ops
    EpisodicLife  a lost life ends the episode, the game goes on
    MaxAndSkip    an action is held for 4 frames, whose last two make one grey picture
    FireReset     an episode begins with the fire button
    WarpFrame     84x84 pixels
    FrameStack    the last 4 pictures: uint8 [4, 84, 84], the newest last

Up to EpisodicLife a step is one emulator *frame* and its observation means nothing (the
Emulator gives none at all); MaxAndSkip makes it a *step* and takes the pictures that it
needs, so no other frame is ever drawn. Everything above hands out new arrays: keep
them, or write into them.

Rewards are not clipped here, the learner does that. Those of the frames before an
episode's first observation (no-ops, fire) count for nobody.

`wrap` puts the same stack onto an environment of your own, from Gymnasium or (by
`core.environment.adapt`) from classic gym, as long as its `unwrapped` has an `ale`.
"""

import collections
from typing import Any

import ale_py
import cv2
import gymnasium as gym
import numpy as np
from gymnasium.wrappers import TimeLimit

from core import environment

# Places in every game's action set, the smallest and the full one.
NOOP, FIRE = 0, 1

FRAMES_PER_SECOND = 60  # Of the console.

# A game that FIRE ends this often in a row is not one that waits for FIRE.
MAX_FIRE_RESETS = 10

PROTOCOLS: dict[str, dict[str, Any]] = {
    # Espeholt et al. 2018 (Table G.1), which follows Mnih et al. 2015. FireReset is
    # from OpenAI Baselines: the curves that others show for IMPALA have it.
    "impala": dict(
        noop_max=30,
        fire_reset=True,
        episodic_life=True,
        frame_skip=4,
        sticky_actions=0.0,
        full_action_space=False,
        max_frames=108_000,
    ),
    # Machado et al. 2018: sticky actions make games differ, instead of no-ops; nothing
    # tells the agent of lives, of the fire button, or of the actions that a game uses.
    # Frame skip and time limit stay, as in Dopamine (Castro et al. 2018).
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


def protocol(name: str, **changes: Any) -> dict[str, Any]:
    """Return the options of `make_atari` for a protocol, with single points changed.

    Raises:
      ValueError: there is no such protocol, or it has no such point.
    """
    if name not in PROTOCOLS:
        raise ValueError(f"protocol {name!r} is not one of {', '.join(PROTOCOLS)}")
    options = PROTOCOLS[name]
    unknown = changes.keys() - options.keys()
    if unknown:
        raise ValueError(
            f"a protocol has no {', '.join(sorted(unknown))}; "
            f"it has {', '.join(options)}"
        )
    return {**options, **changes}


def describe(
    *,
    noop_max: int,
    fire_reset: bool,
    episodic_life: bool,
    frame_skip: int,
    sticky_actions: float,
    full_action_space: bool,
    max_frames: int,
) -> str:
    """Say in one line which protocol these options of `make_atari` make."""
    points = [
        f"no-ops <={noop_max}" if noop_max else "no no-ops",
        "fire reset" if fire_reset else "no fire reset",
        f"{'life loss' if episodic_life else 'only game over'} ends an episode",
        f"skip {frame_skip} with max of the last 2" if frame_skip > 1 else "no skip",
        "84x84 grey",
        "stack 4",
        "all 18 actions" if full_action_space else "the game's own actions",
        f"sticky {sticky_actions}",
        f"time limit {max_frames} frames",
    ]
    return ", ".join(points)


def is_atari(env_id: str) -> bool:
    """Say whether `--env env_id` is a game that `make_atari` can make."""
    spec = gym.registry.get(env_id.removeprefix("gym:"))
    return spec is not None and str(spec.entry_point).startswith("ale_py")


def make_atari(
    env_id: str,
    *,
    noop_max: int = 30,
    fire_reset: bool = True,
    episodic_life: bool = True,
    frame_skip: int = 4,
    sticky_actions: float = 0.0,
    full_action_space: bool = False,
    max_frames: int = 108_000,
    render_mode: str | None = None,
) -> gym.Env:
    """Create an Atari game as the agent sees it. The defaults are protocol "impala".

    Args:
      env_id: a Gymnasium id such as PongNoFrameskip-v4 or ALE/Pong-v5, or
        gym:PongNoFrameskip-v4 for classic gym with atari-py. It names the game, its
        mode and difficulty; all else that ids imply, the options here decide.
      noop_max: most no-ops at the start of a game; 0 for none.
      fire_reset: press FIRE at the start of an episode, in games that have it.
      episodic_life: a lost life ends the episode.
      frame_skip: frames for which an action is held.
      sticky_actions: in each frame the probability that the emulator repeats its last
        action instead of taking the new one.
      full_action_space: all 18 actions, not only those that the game uses.
      max_frames: of one game, over all its lives, no-ops included; then it is
        truncated, at the end of a step.
      render_mode: None, "rgb_array" or "human".

    Raises:
      ValueError: `env_id` is no Atari game, or an option is out of its range.
    """
    if not is_atari(env_id):
        raise ValueError(
            f"{env_id} is not the id of an Atari game; expected one such as "
            "PongNoFrameskip-v4 or ALE/Pong-v5"
        )
    if not 0 <= sticky_actions <= 1:
        raise ValueError(f"sticky_actions is {sticky_actions} but must be in [0, 1]")
    options = dict(
        repeat_action_probability=sticky_actions,
        full_action_space=full_action_space,
        render_mode=render_mode,
    )
    if env_id.startswith("gym:"):
        try:
            from core import classic_atari
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{env_id} needs {error.name}, which is not installed. Try: "
                "pip install -e .[classic], or the id without 'gym:'."
            ) from error
        classic_atari.register()
        env = environment.make(env_id, **options)
    else:
        env = Emulator(**{**gym.spec(env_id).kwargs, **options})
    return wrap(
        env,
        noop_max=noop_max,
        fire_reset=fire_reset,
        episodic_life=episodic_life,
        frame_skip=frame_skip,
        max_frames=max_frames,
    )


def wrap(
    env: gym.Env,
    *,
    noop_max: int = 30,
    fire_reset: bool = True,
    episodic_life: bool = True,
    frame_skip: int = 4,
    max_frames: int = 108_000,
) -> gym.Env:
    """Put the wrappers onto `env`, whose steps are single frames. As `make_atari`.

    Raises:
      ValueError: an option is out of its range, or `env` skips frames by itself.
    """
    for name, value, least in [
        ("noop_max", noop_max, 0),
        ("frame_skip", frame_skip, 1),
        ("max_frames", max_frames, 1),
    ]:
        if value < least:
            raise ValueError(f"{name} is {value} but must be at least {least}")
    game = env.unwrapped
    skip = getattr(game, "_frameskip", getattr(game, "frameskip", 1))
    if skip != 1:
        raise ValueError(
            f"the environment skips frames by itself ({skip}), and MaxAndSkip would "
            "once more. Make it with frameskip=1, or use an id with NoFrameskip."
        )
    env = TimeLimit(env, max_frames)
    if noop_max > 0:
        env = NoopReset(env, noop_max)
    if episodic_life:
        env = EpisodicLife(env)
    env = MaxAndSkip(env, frame_skip)
    if fire_reset and game.get_action_meanings()[FIRE] == "FIRE":
        env = FireReset(env)
    env = WarpFrame(env)
    return FrameStack(env)


class Emulator(ale_py.AtariEnv):
    """The emulator: a step is one frame, and there is no observation.

    ale_py's own environment makes a picture of every frame, of which MaxAndSkip drops
    two in four. Sticky actions (Machado et al. 2018) happen in here, frame by frame.
    """

    def __init__(self, **options: Any):
        # No banner from each of many actors; errors still show.
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        no_limit = 0  # TimeLimit does that, and counts the same frames.
        super().__init__(
            **{**options, "frameskip": 1, "max_num_frames_per_episode": no_limit}
        )
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

    The number is drawn from the environment's own generator, as by Gymnasium's
    AtariPreprocessing, so the seed decides it. If the no-ops end the game, the rest of
    them is done in a new one.
    """

    def __init__(self, env: gym.Env, noop_max: int):
        super().__init__(env)
        self.noop_max = noop_max

    def reset(self, *, seed=None, options=None):
        observation, info = self.env.reset(seed=seed, options=options)
        for _ in range(self.np_random.integers(1, self.noop_max + 1)):
            observation, _, terminated, truncated, info = self.env.step(NOOP)
            if terminated or truncated:
                # Without the seed: that would lead to the same end again.
                observation, info = self.env.reset(options=options)
        return observation, info


class EpisodicLife(gym.Wrapper):
    """End the episode, but not the game, when a life is lost (Mnih et al. 2015).

    Lives are looked at after every frame, as in DQN and in AtariPreprocessing. A step
    that loses a life while the game goes on is `terminated` and says so by
    `info["life_lost"] = True`; the `reset` after it goes on with the same game. Any
    other `reset` (asked for earlier, or with a seed) begins a new game.

    A game with no lives left is not over until the emulator says so: Q*bert plays on
    for some frames. A life won is no end.

    `info["new_game"]` of a `reset` tells which of the two it did. It can be True even
    after `life_lost`: if the frames that lead to the new episode end the game, or use
    up its time.
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
            # One frame, to leave the one on which the life was lost.
            observation, _, terminated, truncated, info = self.env.step(NOOP)
            new_game = terminated or truncated
        if new_game:
            observation, info = self.env.reset(seed=seed, options=options)
        self._lives = self._ale.lives()
        self._game_goes_on = False
        info["new_game"] = new_game
        return observation, info


class MaxAndSkip(gym.Wrapper):
    """Hold each action for `frame_skip` frames, show the max of the last two in grey.

    Mnih et al. 2015: the max, because the console draws some objects in every other
    frame only. As in Gymnasium's AtariPreprocessing, it is the max of two grey pictures
    (and not the grey of a max over colours); after `reset` there is only one. Rewards
    are summed.

    The end of an episode ends the skip too; only if that happens before the last frame
    is the final picture a single frame. A time limit waits for the end of the skip: a
    truncated episode is bootstrapped from its final picture, which must look like all
    others.
    """

    def __init__(self, env: gym.Env, frame_skip: int):
        super().__init__(env)
        self._ale = env.unwrapped.ale
        self.frame_skip = frame_skip
        height, width = env.observation_space.shape[:2]
        self.observation_space = gym.spaces.Box(0, 255, (height, width), np.uint8)
        # For a video that has one picture per step.
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

    From OpenAI Baselines (Dhariwal et al. 2017). Breakout, for one, serves the ball on
    FIRE, after every lost life. If this ends the episode (a life lost, or the game), it
    is done again in the next one, so the agent never gets an episode that is over.
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
    """Scale pictures to 84x84 (Mnih et al. 2015), with cv2's INTER_AREA."""

    SIZE = (84, 84)

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(0, 255, self.SIZE, np.uint8)

    def observation(self, observation):
        return cv2.resize(observation, self.SIZE, interpolation=cv2.INTER_AREA)


class FrameStack(gym.Wrapper):
    """Show the last 4 pictures (Mnih et al. 2015), the newest last: [4, H, W].

    An episode begins with 4 times its first picture, so nothing of the one before is
    left in the stack.
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
