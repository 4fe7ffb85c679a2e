# SPDX-License-Identifier: Apache-2.0
"""Tic-tac-toe against a random opponent: an environment with an action mask.

    python -m monobeast --env examples.tictactoe:TicTacToe --total_steps 300k \\
        --learning_rate 0.002 --epsilon 0.001 --batch_size 8

Only empty squares may be played. The observation's key `action_mask` says which they
are, and the agent never chooses another one. To show this, the environment raises an
error for an illegal move, and some such errors in a row would end the run. The agent
moves first; a win is a reward of 1, a loss -1, a draw 0.
"""

from typing import Any

import gymnasium as gym
import numpy as np

LINES = np.array(
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8]]
    + [[2, 4, 6]]
)


class TicTacToe(gym.Env):
    action_space = gym.spaces.Discrete(9)
    observation_space = gym.spaces.Dict(
        {
            "board": gym.spaces.Box(-1, 1, (9,), np.float32),  # 1: the agent's.
            "action_mask": gym.spaces.MultiBinary(9),
        }
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        super().reset(seed=seed)
        self.board = np.zeros(9, np.float32)
        return self._observe(), {}

    def step(self, action: int) -> tuple:
        if self.board[action]:
            raise ValueError(f"square {action} is taken: {self.board.tolist()}")
        self.board[action] = 1
        if not self._has_won(1) and not self.board.all():
            self.board[self.np_random.choice(np.flatnonzero(self.board == 0))] = -1
        reward = float(self._has_won(1)) - float(self._has_won(-1))
        over = reward != 0 or bool(self.board.all())
        return self._observe(), reward, over, False, {}

    def _has_won(self, player: int) -> bool:
        return bool((self.board[LINES] == player).all(1).any())

    def _observe(self) -> dict[str, np.ndarray]:
        return {
            "board": self.board.copy(),
            "action_mask": (self.board == 0).astype(np.int8),
        }
