# SPDX-License-Identifier: Apache-2.0
"""Atari for classic gym: the ids that gym 0.26 dropped, on atari-py 0.2.9.

    pip install -e .[classic]      # needs g++, cmake and zlib (zlib1g-dev)
    python -m monobeast --env gym:PongNoFrameskip-v4

Up to version 0.19 gym had these environments itself. `register` adds the ids that the
installed gym lacks and keeps gym's own ids. The ROMs come from ale_py, so nobody needs
to import ROMs (atari-py has only one).
"""

from typing import Any

import ale_py.roms
import atari_py
import gym
import gymnasium
import numpy as np


class ClassicAtari(gym.Env):
    """One game on atari-py, with gym 0.26's API. One step is one frame.

    Observations are RGB pictures. `ale` is the emulator, as in gym's environments.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}

    def __init__(
        self,
        game: str,
        repeat_action_probability: float = 0.0,
        full_action_space: bool = False,
        render_mode: str | None = None,
    ):
        self.render_mode = render_mode
        self._rom = str(ale_py.roms.get_rom_path(game))
        self.ale = atari_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", repeat_action_probability)
        self._load(seed=0)
        self._actions = (
            self.ale.getLegalActionSet()
            if full_action_space
            else self.ale.getMinimalActionSet()
        ).tolist()
        width, height = self.ale.getScreenDims()
        self.action_space = gym.spaces.Discrete(len(self._actions))
        self.observation_space = gym.spaces.Box(0, 255, (height, width, 3), np.uint8)

    def get_action_meanings(self) -> list[str]:
        """Return the name of each action. All versions of ALE use the same numbers."""
        members = ale_py.Action.__members__
        names = {action.value: name for name, action in members.items()}
        return [names[action] for action in self._actions]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._load(seed)
        self.ale.reset_game()
        return self._screen(), {"lives": self.ale.lives()}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(self.ale.act(self._actions[action]))
        info = {"lives": self.ale.lives()}
        return self._screen(), reward, self.ale.game_over(), False, info

    def render(self) -> np.ndarray:
        return self._screen()

    def _load(self, seed: int) -> None:
        # The emulator reads its seed (31 bits) when it loads a game.
        self.ale.setInt("random_seed", seed & 0x7FFFFFFF)
        self.ale.loadROM(self._rom)

    def _screen(self) -> np.ndarray:
        return self.ale.getScreenRGB2()


def register() -> None:
    """Register Gymnasium's NoFrameskip ids with classic gym. Safe to call again."""
    known = gym.envs.registry
    known = getattr(known, "env_specs", known)  # Before gym 0.26.
    for spec in gymnasium.registry.values():
        if "NoFrameskip-" in spec.id and spec.id not in known:
            gym.register(
                id=spec.id,
                entry_point="core.environments.classic_atari:ClassicAtari",
                kwargs={
                    key: spec.kwargs[key]
                    for key in ("game", "repeat_action_probability")
                },
            )
