# SPDX-License-Identifier: Apache-2.0
"""core.environments.row_writer: what breaks the spec is named."""

import gymnasium as gym
import numpy as np
import pytest

from core.environments.row_writer import RowWriter
from core.environments.stepping import Environments
from core.errors import EnvError, EnvSpecError, EnvValueError
from tests.environments.helpers import Scripted, empty_rows, frame, step_until_error

VIOLATIONS = {
    "float64 for uint8": (
        {"frame": frame(dtype=np.float64)},
        "'observation/frame' expected uint8[2,3], got float64[2,3]",
    ),
    "int64 for uint8": (
        {"frame": frame(dtype=np.int64)},
        "'observation/frame' expected uint8[2,3], got int64[2,3]",
    ),
    "wrong shape": (
        {"frame": frame((3, 2))},
        "'observation/frame' expected uint8[2,3], got uint8[3,2]",
    ),
    "shape that would broadcast": (
        {"frame": frame((3,))},
        "'observation/frame' expected uint8[2,3], got uint8[3]",
    ),
    "object array": (
        {"frame": frame(dtype=object)},
        "'observation/frame' expected uint8[2,3], got object[2,3]",
    ),
    "ragged list": (
        {"frame": [[1, 2, 3], [4]]},
        "'observation/frame' expected uint8[2,3], got a list of 2",
    ),
    "None": ({"frame": None}, "'observation/frame' expected uint8[2,3], got None"),
    "missing key": (
        {"frame": "missing"},
        "'observation' expected a dict with keys ['frame', 'pair'], "
        "got a dict with keys ['pair']",
    ),
    "surplus key": (
        {"sound": 1},
        "'observation' expected a dict with keys ['frame', 'pair'], "
        "got a dict with keys ['frame', 'pair', 'sound']",
    ),
    "array for dict": (
        {"observation": frame()},
        "'observation' expected a dict with keys ['frame', 'pair'], got uint8[2,3]",
    ),
    "tuple too short": (
        {"pair": (1,)},
        "'observation/pair' expected a tuple of 2, got a tuple of 1",
    ),
    "list for tuple": (
        {"pair": [1, np.zeros(7, np.float32)]},
        "'observation/pair' expected a tuple of 2, got a list of 2",
    ),
    "leaf in a tuple": (
        {"pair": (1, np.zeros(5, np.float32))},
        "'observation/pair/1' expected float32[7], got float32[5]",
    ),
    "float for Discrete": (
        {"pair": (1.5, np.zeros(7, np.float32))},
        "'observation/pair/0' expected int64[], got 1.5",
    ),
    "reward array": (
        {"reward": np.zeros(1)},
        "'reward' expected a number, got float64[1]",
    ),
    "no reward": ({"reward": None}, "'reward' expected a number, got None"),
    "flag array": (
        {"truncated": np.zeros(2, bool)},
        "'terminated, truncated' expected bools, got a tuple of 2",
    ),
    "info list": ({"info": []}, "'info' expected a dict, got a list of 0"),
    "info text": (
        {"info": {"score": "7"}},
        "'info/score' expected a number, got '7'",
    ),
    "info bytes": (
        {"info": {"score": b"7"}},
        "'info/score' expected a number, got a bytes",
    ),
    "info too large": (
        {"info": {"score": 10**400}},
        f"'info/score' expected a number, got {10**400}",
    ),
    "info array": (
        {"info": {"score": np.zeros(2)}},
        "'info/score' expected a number, got float64[2]",
    ),
    "old API": (
        (0, 0.0, False, {}),
        "'step()' expected (observation, reward, terminated, truncated, info), "
        "got a tuple of 4",
    ),
}


@pytest.mark.parametrize(
    ("space", "values", "expected"),
    [
        (gym.spaces.Discrete(5, start=-2), [-2, 2, 3], "expected -2 to 2, got 3"),
        (
            gym.spaces.MultiDiscrete([5, 3]),
            [np.array([0, 2]), np.array([4, 0]), np.array([0, 3])],
            "expected [0, 0] to [4, 2], got [0, 3]",
        ),
        (
            gym.spaces.MultiDiscrete([5, 3]),
            [np.array([0, 2]), np.array([4, 0]), np.array([-1, 2])],
            "expected [0, 0] to [4, 2], got [-1, 2]",
        ),
        (
            gym.spaces.Box(-128, 127, (2,), np.int8),
            [np.array([7, -128]), [0, 127], np.array([300, 0])],
            "expected values that int8 can hold, got 300",
        ),
        (
            gym.spaces.Box(0, 255, (2,), np.uint8),
            [np.zeros(2, np.uint8), np.uint16([7, 255]), np.uint16([300, 0])],
            "expected values that uint8 can hold, got 300",
        ),
    ],
    ids=["Discrete", "too high", "too low", "wider integers", "wider unsigned"],
)
def test_a_value_out_of_range_fails_the_environment_and_is_named(
    space, values, expected
):
    """It may be an accident: other than a wrong shape it does not end the run."""

    class Scripted(gym.Env):
        observation_space = gym.spaces.Dict(x=space)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.left = iter(values)
            return {"x": next(self.left)}, {}

        def step(self, action):
            return {"x": next(self.left)}, 0.0, False, False, {}

    envs = Environments(Scripted, 1, seed=3)
    rows = empty_rows(envs, 1)
    envs.reset(rows)
    envs.step(np.zeros(1, np.int64), rows)
    with pytest.raises(EnvError) as error:
        envs.step(np.zeros(1, np.int64), rows)
    assert "step 2: 'observation/x' " + expected in str(error.value)


@pytest.mark.parametrize("reward", [np.nan, np.float32(-np.inf), 1e39])
def test_a_reward_that_is_not_finite_fails_the_environment_and_is_named(reward):
    with pytest.raises(EnvValueError) as caught:
        step_until_error(Scripted(None, {"reward": reward}))
    assert str(caught.value) == (
        f"env 5 (Scripted) step 2: 'reward' expected a finite float32, got {reward}"
    )


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_a_broken_spec_is_named_with_env_step_expected_and_got(violation):
    entry, message = VIOLATIONS[violation]
    with pytest.raises(EnvSpecError) as caught:
        step_until_error(Scripted(None, entry), info_keys=("score",))
    assert str(caught.value) == f"env 5 (Scripted) step 2: {message}"


def test_a_mask_allows_a_value_of_each_choice():
    def check(*mask):
        space = gym.spaces.Dict(action_mask=gym.spaces.MultiBinary(len(mask)))
        choices = gym.spaces.MultiDiscrete([2, 3])
        writer = RowWriter(space, choices, lambda k: f"env {k}")
        writer.check_mask(7, {"action_mask": np.array(mask, np.int8)})

    check(0, 1, 1, 0, 0)
    for mask in ([0, 0, 1, 1, 1], [1, 1, 0, 0, 0]):
        with pytest.raises(EnvValueError, match="env 7: .* per choice") as caught:
            check(*mask)
        assert f"got {mask}. " in str(caught.value)
    for size in (4, 6):  # The learner refuses these masks.
        check(*[0] * size)
