# SPDX-License-Identifier: Apache-2.0
"""Action masks: what is not allowed is never chosen, and has no gradient."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import monobeast
import polybeast
from core.algorithm.action_masks import check_mask, mask_logits, split_mask
from core.algorithm.distributions import ActionDistribution
from core.environments.stepping import Environments
from core.errors import ConfigError, EnvValueError
from core.nests import map_nest
from examples.tictactoe import TicTacToe

spaces = gym.spaces
CHOICES = spaces.Tuple(
    [spaces.Discrete(3), spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 4])]
)


def test_what_is_not_allowed_is_never_chosen():
    torch.manual_seed(0)
    distribution = ActionDistribution(CHOICES)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 0, 1]]).expand(5000, -1)
    logits = torch.randn(5000, distribution.num_parameters, requires_grad=True)
    masked = mask_logits(logits, mask)
    torch.testing.assert_close(masked[:, 9:], logits[:, 9:])  # The Box's.
    drawn = distribution.draw(masked.detach().unsqueeze(0))
    first, _, pair = drawn["action"]
    assert set(first.unique().tolist()) == {1, 2}
    assert set(pair[..., 0].unique().tolist()) == {0}
    assert set(pair[..., 1].unique().tolist()) == {1, 3}
    log_prob = distribution.log_prob(masked, drawn["sample"][0])
    entropy = distribution.entropy(masked)
    (log_prob.sum() + entropy.sum()).backward()
    assert torch.isfinite(log_prob).all() and torch.isfinite(entropy).all()
    ruled_out = (mask == 0).nonzero()[:, 1].unique()
    assert not logits.grad[:, ruled_out].any()
    assert logits.grad[:, [1, 2, 6, 8]].abs().sum() > 0


def test_one_allowed_action_has_probability_one_and_no_entropy():
    distribution = ActionDistribution(spaces.Discrete(4))
    mask = torch.tensor([[0, 0, 1, 0]], dtype=torch.int8)
    masked = mask_logits(torch.tensor([[50.0, 3.0, -80.0, 1.0]]), mask)
    assert distribution.log_prob(masked, torch.tensor([[2]])).item() == 0.0
    assert distribution.entropy(masked).item() == 0.0
    assert distribution.draw(masked.unsqueeze(0), greedy=True)["action"].item() == 2


def test_a_mask_is_split_off_and_what_is_left_is_seen_alone():
    picture = spaces.Box(0, 255, (10, 10, 3), np.uint8)
    space = spaces.Dict({"action_mask": spaces.MultiBinary(2), "observation": picture})
    assert split_mask(space) == (picture, spaces.MultiBinary(2))
    assert split_mask({"action_mask": 1, "a": 2, "b": 3}) == ({"a": 2, "b": 3}, 1)
    assert split_mask(picture) == (picture, None)


@pytest.mark.parametrize(
    "mask, words",
    [
        (spaces.MultiBinary(4), "MultiBinary.4.; expected 3 zeros and ones"),
        (spaces.Discrete(3), "Discrete.3.; expected 3 zeros and ones"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask, words):
    space = spaces.Dict({"action_mask": mask, "x": spaces.Box(0, 1, (2,))})
    with pytest.raises(ConfigError, match=words):
        check_mask(space, spaces.Discrete(3))


def test_a_mask_with_nothing_to_observe_is_refused():
    space = spaces.Dict({"action_mask": spaces.MultiBinary(3)})
    with pytest.raises(ConfigError, match="only the key 'action_mask'"):
        check_mask(space, spaces.Discrete(3))


class Stuck(TicTacToe):
    """Allows nothing in its second row."""

    def step(self, action):
        observation, *rest = super().step(action)
        return {**observation, "action_mask": np.zeros(9, np.int8)}, *rest


def first_rows(make_env):
    envs = Environments(make_env, 1, seed=0)
    rows = map_nest(lambda s: np.zeros((1, *s.shape), s.dtype), envs.row_spec)
    envs.reset(rows)
    return envs, rows


def test_an_environment_that_allows_no_action_is_named():
    envs, rows = first_rows(Stuck)
    with pytest.raises(
        EnvValueError, match="env 0 .*action_mask.*at least one allowed"
    ):
        envs.step(np.array([4]), rows)


class Cut(Stuck):
    """Ends by truncation: no action is executed in the row that allows none."""

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, True, info


def test_a_truncated_row_may_allow_no_action():
    envs, rows = first_rows(Cut)
    envs.step(np.array([4]), rows)
    assert rows["truncated"][0] and not rows["observation"]["action_mask"].any()
    envs.step(np.array([4]), rows)  # Resets.
    assert rows["observation"]["action_mask"].all()


@pytest.mark.parametrize("trainer", [monobeast, polybeast])
def test_net_plays_a_game_whose_illegal_moves_raise(trainer):
    torch.manual_seed(0)
    net = trainer.Net(TicTacToe.observation_space, TicTacToe.action_space)
    # Without the mask it would play square 0 again and again.
    net.policy.bias.data[0] = 100.0
    envs, rows = first_rows(TicTacToe)
    for _ in range(40):
        outputs, _ = net(monobeast.as_tensors(rows))
        action = net.distribution.draw(outputs["policy_logits"])["action"]
        envs.step(action[0].numpy(), rows)
