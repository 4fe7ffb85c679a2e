# SPDX-License-Identifier: Apache-2.0
"""The NetHack Learning Environment (Küttler et al. 2020) as the agent sees it.

python -m core.environments.check examples.nethack.environment:make_env
"""

import logging
from typing import Any

import gymnasium as gym
import numpy as np

from core.environments.make import make
from core.errors import MakeError

# The map, the line of numbers at the bottom, and the line of text at the top.
OBSERVATION_KEYS = ("glyphs", "blstats", "message")


class SeededGames(gym.Wrapper):
    """Games that depend only on their seed and on the actions.

    NLE's `reset` ignores its seed, and NetHack then asks the operating system for one.
    """

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self._rng = np.random.default_rng()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        core, display = self._rng.integers(2**62, size=2).tolist()
        # With reseed NetHack takes true randomness now and then during a game.
        self.unwrapped.seed(core, display, reseed=False)
        return self.env.reset(seed=seed, options=options)


def make_env(name: str = "NetHackScore-v0", render_mode: str | None = None) -> gym.Env:
    """Create one of NLE's tasks. It writes to a temporary folder only, until `close`.

    Args:
      render_mode: None, or "rgb_array" for a picture of the map's tiles.
    """
    if render_mode not in (None, "rgb_array"):
        raise MakeError(
            f"render_mode is {render_mode!r} but NLE has no window: use --mode test "
            "--video instead of --mode test_render."
        )
    logging.getLogger("nle").setLevel(logging.WARNING)  # One line per environment.
    env = make(
        f"nle:{name}",
        observation_keys=OBSERVATION_KEYS,
        save_ttyrec_every=0,  # No recordings of games.
        fix_moon_phase=True,  # NetHack reads the clock: moon, night, Friday the 13th.
        render_mode=render_mode and "pixel",
    )
    return SeededGames(env)
