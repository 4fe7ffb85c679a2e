# SPDX-License-Identifier: Apache-2.0
"""Two toy tasks that a few thousand steps solve: `Catch` and `Memory`.

Both are Gymnasium environments. `core.environments.make.make` knows their names; they
are not registered with Gymnasium. They show that an agent learns (`Catch`) and that its
recurrent state works (`Memory`).
"""

from typing import Any

import gymnasium as gym
import numpy as np

from core.errors import MakeError


def _check_mode(env: gym.Env, render_mode: str | None) -> str | None:
    known = env.metadata["render_modes"]
    if render_mode not in (None, *known):
        name = type(env).__name__
        raise MakeError(f"{name} has no render_mode {render_mode!r}, only {known}")
    return render_mode


class Catch(gym.Env):
    """A ball falls, one row per step; catch it with the paddle on the bottom row.

    The task of bsuite (Osband et al. 2019, arXiv:1908.03568). The ball starts in a
    random column of the top row, the paddle in the middle of the bottom row. Every
    episode has 9 steps. The last reward is +1 if the paddle is under the ball, else -1;
    all other rewards are 0. A perfect policy has mean return 1.

    Observation: float32 [10, 5], 1 where the ball or the paddle is, else 0.
    Actions: 0 left, 1 stay, 2 right.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}
    ROWS, COLUMNS = 10, 5
    PIXELS = 16  # Per cell when rendered.

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = _check_mode(self, render_mode)
        shape = (self.ROWS, self.COLUMNS)
        self.observation_space = gym.spaces.Box(0.0, 1.0, shape, np.float32)
        self.action_space = gym.spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._ball_row = 0
        self._ball_column = int(self.np_random.integers(self.COLUMNS))
        self._paddle_column = self.COLUMNS // 2
        return self._board(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        column = self._paddle_column + int(action) - 1
        self._paddle_column = min(max(column, 0), self.COLUMNS - 1)
        self._ball_row += 1
        landed = self._ball_row == self.ROWS - 1
        reward = 0.0
        if landed:
            reward = 1.0 if self._paddle_column == self._ball_column else -1.0
        return self._board(), reward, landed, False, {}

    def render(self) -> np.ndarray:
        board = np.kron(self._board(), np.ones((self.PIXELS, self.PIXELS)))
        return np.repeat((255 * board).astype(np.uint8)[..., None], 3, axis=-1)

    def _board(self) -> np.ndarray:
        board = np.zeros((self.ROWS, self.COLUMNS), np.float32)
        board[self._ball_row, self._ball_column] = 1.0
        board[-1, self._paddle_column] = 1.0
        return board


class Memory(gym.Env):
    """A cue seen only at the start decides which action is right at the end.

    An episode has 7 steps. The first observation shows the cue (-1 or +1), the next
    five are blank, and the last one shows the signal to answer. The answer earns +1 if
    it names the cue (action 0 for -1, action 1 for +1), else -1. Each action 1 before
    the signal costs 0.5.

    Because of this cost the task tests the recurrent state. An agent without a
    recurrent state still sees its last action (and last reward), so it could carry the
    cue as a chain of actions: 1, 1, 1, ... for one cue and 0, 0, 0, ... for the other.
    All blank observations are equal, so if the chain once takes the same action for
    both cues, the cue is lost. So at each of the 6 steps before the signal one of the
    two cues must pay: the chain costs 0.5 * 6 / 2 = 1.5 per episode on average and
    gains 1 over guessing. (A stochastic policy does not help: if the probabilities of
    action 1 for the two cues differ by d_t at step t, the answer gains at most min d_t,
    and waiting costs at least 0.25 * sum d_t >= 1.5 * min d_t.)

    Mean return: 1 for the perfect recurrent policy (wait with 0, then answer), 0 for
    the best policy without memory (wait with 0, then guess), -0.5 for the chain, -1.5
    for random actions.

    Observation: float32 [2]: (cue, signal), each 0 when not shown.
    Actions: 0 and 1.
    """

    metadata: dict[str, Any] = {"render_modes": []}
    LENGTH = 7
    PRICE = 0.5

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = _check_mode(self, render_mode)
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        self._cue = 2 * int(self.np_random.integers(2)) - 1
        return np.array([self._cue, 0.0], np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._step += 1
        if self._step == self.LENGTH:
            reward = 1.0 if 2 * int(action) - 1 == self._cue else -1.0
            return np.zeros(2, np.float32), reward, True, False, {}
        signal = float(self._step == self.LENGTH - 1)
        reward = -self.PRICE if action == 1 else 0.0
        return np.array([0.0, signal], np.float32), reward, False, False, {}
