# SPDX-License-Identifier: Apache-2.0
"""Action masks: what is not allowed is never chosen, and has no gradient."""

import re

import gymnasium as gym
import numpy as np
import pytest
import torch

import monobeast
import polybeast
from core.action_spaces import check_mask, check_spaces, split_mask
from core.algorithm.distributions import ActionDistribution, mask_logits
from core.environments import check
from core.environments.stepping import Environments
from core.errors import ConfigError, EnvValueError, Exit
from core.nests import map_nest
from examples.tictactoe import TicTacToe
from tests.trainers import bodies

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
    mask = torch.tensor([[0, 0, 2, 0]], dtype=torch.int8)  # Not 0, as for the rows.
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
    "empty", [spaces.Dict(), spaces.Dict(a=spaces.Tuple([]), b=spaces.Discrete(2))]
)
def test_spaces_without_parts_are_refused(empty):
    fine = spaces.Discrete(3)
    with pytest.raises(ConfigError, match="^'observation.*' is .*, which has no parts"):
        check_spaces(empty, fine)
    with pytest.raises(ConfigError, match="^'action.*' is .*, which has no parts"):
        check_spaces(fine, empty)


@pytest.mark.parametrize(
    "mask, action, words",
    [
        (spaces.MultiBinary(4), spaces.Discrete(3), "is MultiBinary.4.; expected 3 "),
        (spaces.Discrete(3), spaces.Discrete(3), "is Discrete.3.; expected 3 zeros"),
        (
            spaces.Dict({"a": spaces.MultiBinary(3)}),
            spaces.Dict({"a": spaces.Discrete(3)}),
            "is Dict.*; expected 3 zeros.*Tuple of such",
        ),
        (spaces.MultiBinary(2), spaces.Box(-1, 1, (2,)), "Discrete and MultiDiscrete"),
        (spaces.MultiBinary(3), spaces.MultiBinary(3), "give that key another|Give"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask, action, words):
    space = spaces.Dict({"action_mask": mask, "x": spaces.Box(0, 1, (2,))})
    with pytest.raises(ConfigError, match=words):
        check_spaces(space, action)


@pytest.mark.parametrize(
    "mask",
    [
        spaces.MultiBinary(5),
        spaces.Box(0, 1, (5,), np.int8),
        spaces.Box(0, 1, (5,), np.bool_),
        spaces.Tuple([spaces.Box(0, 1, (3,), np.int8), spaces.MultiBinary(2)]),
    ],
    ids=str,
)
def test_a_mask_that_fits_is_taken(mask):
    space = spaces.Dict({"action_mask": mask, "x": spaces.Box(0, 1, (2,))})
    check_spaces(space, spaces.MultiDiscrete([3, 2]))
    check_mask(space, spaces.Tuple([spaces.Discrete(3), spaces.Discrete(2)]))


def test_a_mask_with_nothing_to_observe_is_refused():
    space = spaces.Dict({"action_mask": spaces.MultiBinary(3)})
    with pytest.raises(ConfigError, match="only the key 'action_mask'"):
        check_mask(space, spaces.Discrete(3))


def first_rows(make_env):
    envs = Environments(make_env, 1, seed=0)
    rows = envs.zero_rows()
    envs.reset(rows)
    return envs, rows


def test_an_environment_that_allows_no_action_is_named():
    envs, rows = first_rows(bodies.Stuck)
    with pytest.raises(
        EnvValueError, match="env 0 .*action_mask.*at least one allowed"
    ):
        envs.step(np.array([4]), rows)


def test_such_an_environment_ends_a_serial_run_in_one_line(start):
    program = start("--env", "tests.trainers.bodies:Stuck", "--serial")
    assert program.wait() == Exit.INTERNAL, program.text()
    last = program.text().splitlines()[-1]
    assert last.startswith("EnvValueError: env 0 (Stuck) step")
    assert "Traceback" not in program.text()


def test_the_checker_obeys_masks_and_names_one_that_allows_nothing(capsys):
    for env in ("tests.trainers.bodies:masked", "examples.tictactoe:TicTacToe"):
        assert check.main([env, "--steps", "70"]) == 0, capsys.readouterr().out
    assert check.main(["tests.trainers.bodies:Stuck", "--steps", "70"]) == 78
    violation = "VIOLATION    step 1: 'observation/action_mask' allows no action"
    assert violation in capsys.readouterr().out


class Cut(bodies.Stuck):
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
@torch.no_grad()
def test_net_plays_a_game_whose_illegal_moves_raise(trainer):
    torch.manual_seed(0)
    net = trainer.Net(TicTacToe.observation_space, TicTacToe.action_space)
    envs, rows = first_rows(TicTacToe)
    for _ in range(40):  # A policy without the mask soon plays where it may not.
        outputs, _ = net(monobeast.as_tensors(rows))
        action = net.distribution.draw(outputs["policy_logits"])["action"]
        envs.step(action[0].numpy(), rows)


def test_more_values_than_can_be_sampled_from_are_refused():
    with pytest.raises(ConfigError, match="more than 16777216 values.*Wrap"):
        ActionDistribution(spaces.MultiDiscrete([2, 2**24 + 1]))
    check_spaces(spaces.Discrete(2), spaces.Discrete(2**24))


def test_the_row_before_the_first_action_shows_one_of_the_space():
    box = spaces.Box(np.float32([-1, 5, -np.inf]), np.float32([1, 6, -2]))
    action = spaces.Tuple([box, spaces.Discrete(3, start=2), spaces.MultiBinary(2)])
    _, rows = first_rows(lambda: bodies.Body(action))
    first = map_nest(lambda x: x[0].tolist(), rows["last_action"])
    assert first == ([0, 5, -2], 2, [0, 0])


# ------------------------------------------------- where runs say what they cannot take


def box_with(low, high):
    """A Box of so many bounds that Gymnasium shows them in several lines."""
    bounds = np.arange(20, dtype=np.float32).reshape(4, 5) / 7
    box = spaces.Box(bounds, bounds + 1)
    box.low[1, 2], box.high[1, 2] = low, high
    return box


MISFITS = {
    "whole_numbers": (spaces.Box(0, 9, (2,), np.int64), "Box of int64"),
    "two_flags": (spaces.Discrete(3), "expected 3 zeros and ones"),
    "infinite": (
        box_with(np.inf, np.inf),
        r"element \[1, 2\] has the bounds inf and inf; expected lower bound",
    ),
}


def whole_numbers():
    return bodies.Body(MISFITS["whole_numbers"][0])


def infinite():
    return bodies.Body(MISFITS["infinite"][0])


def two_flags():
    env = bodies.Body(MISFITS["two_flags"][0])
    env.observation_space = spaces.Dict(
        {"x": env.observation_space, "action_mask": spaces.MultiBinary(2)}
    )
    return env


@pytest.mark.parametrize("kind", MISFITS)
def test_spaces_that_do_not_fit_are_refused_before_a_run_has_a_folder(
    kind, serve, tmp_path, capsys
):
    env = f"{__name__}:{kind}"
    flags = ["--env", env, "--savedir", str(tmp_path / "runs"), "--xpid", "x"]
    assert monobeast.main(flags) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"ConfigError: '.*{MISFITS[kind][1]}", line), line
    server = serve(globals()[kind], name=env)
    assert polybeast.main(["--server_addresses", server.address, *flags]) == 78
    assert capsys.readouterr().err.splitlines() == [line]
    assert not (tmp_path / "runs").exists()
    assert check.main([env]) == 78
    line = line.removeprefix("ConfigError: ")
    assert capsys.readouterr().out.splitlines()[-1] == f"unsupported  {line}"


@pytest.mark.parametrize(
    "low, high, words",
    [(99, 8, "99.0 and 8.0"), (np.inf, -np.inf, "inf and -inf"), (1, -np.inf, "1.0")],
)
def test_one_line_names_the_element_whose_bounds_are_reversed(low, high, words):
    box = box_with(low, high)
    with pytest.raises(ConfigError) as caught:
        check_spaces(spaces.Discrete(2), spaces.Dict({"arm": box}))
    (line,) = str(caught.value).splitlines()
    assert f"element [1, 2] has the bounds {words}" in line and "'action/arm'" in line
    assert len(line) < 500
