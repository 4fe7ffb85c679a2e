# SPDX-License-Identifier: Apache-2.0
"""Train the MonoBeast of 2019 on Pong until killed; print "seconds steps" lines.

    python train_monobeast2019.py FOLDER pong

FOLDER is a clone of facebookresearch/torchbeast; its torchbeast/monobeast.py runs
unchanged, in an environment of its own; see README.md. A Pong on ale-py with the same
interface replaces atari-py, the Atari package of that time.
"""

import sys

import ale_py
import gym
import numpy as np
from work import WORKS, print_updates


class PongNoFrameskip(gym.Env):
    """Pong with the interface of 2019: reset() returns the picture, step() four values.

    The wrappers of 2019 add the random no-ops, the skipped frames and the 84 x 84 grey
    pictures.
    """

    def __init__(self):
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(ale_py.roms.get_rom_path("pong"))
        self.actions = self.ale.getMinimalActionSet()
        self.action_space = gym.spaces.Discrete(len(self.actions))
        self.observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)

    def get_action_meanings(self) -> list[str]:
        return [action.name for action in self.actions]

    def seed(self, seed: int) -> None:
        self.np_random = np.random.RandomState(seed)  # As classic gym's, with randint.

    def reset(self) -> np.ndarray:
        self.ale.reset_game()
        return self.ale.getScreenRGB()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, dict]:
        reward = float(self.ale.act(self.actions[action]))
        return self.ale.getScreenRGB(), reward, self.ale.game_over(), {}


def main(folder: str, work: str) -> None:
    assert work == "pong"
    gym.register("PongNoFrameskip-v4", entry_point=PongNoFrameskip)
    sys.path.insert(0, folder)
    from torchbeast import monobeast

    size = WORKS[work]
    print_updates(work)
    flags = f"--unroll_length {size.num_steps} --batch_size {size.num_envs} "
    flags += f"--num_actors 4 --num_buffers {2 * size.num_envs} --disable_cuda "
    flags += "--disable_checkpoint --total_steps 1000000000 --savedir ."
    monobeast.main(monobeast.parser.parse_args(flags.split()))


if __name__ == "__main__":
    main(*sys.argv[1:])
