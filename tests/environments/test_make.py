# SPDX-License-Identifier: Apache-2.0
"""core.environments.make: names of environments, and what to do about wrong ones."""

import sys

import gymnasium as gym
import numpy as np
import pytest

from core.environments.make import check_options, make
from core.errors import MakeError


def test_make_knows_toys_gymnasium_ids_and_functions():
    assert type(make("Catch")).__name__ == "Catch"
    assert type(make("Memory")).__name__ == "Memory"
    env = make("CartPole-v1", render_mode="rgb_array")
    env.reset(seed=3)
    assert env.render().shape == (400, 600, 3)
    assert make("tests.counting_env:make").observation_space.shape == (11,)


def test_make_registers_atari_and_minatar_when_asked():
    pytest.importorskip("ale_py")
    assert make("PongNoFrameskip-v4").unwrapped.ale.lives() == 0
    pytest.importorskip("minatar")
    assert make("MinAtar/Breakout-v1").observation_space.shape == (10, 10, 4)


def test_minatar_forgets_the_last_action_of_the_last_game():
    pytest.importorskip("minatar")
    env = make("MinAtar/Breakout-v1")
    env.reset(seed=3)
    for _ in range(3):  # Sticky actions: one may not be taken.
        env.step(2)
    assert env.unwrapped.game.last_action != 0
    env.reset()
    assert env.unwrapped.game.last_action == 0


def test_minatar_renders_without_plotting_packages():
    pytest.importorskip("minatar")
    env = make("MinAtar/Breakout-v1", render_mode="rgb_array")
    env.reset(seed=3)
    image = env.render()
    assert image.shape == (160, 160, 3) and image.dtype == np.uint8
    black = ~image[::16, ::16].any(axis=-1)
    np.testing.assert_array_equal(black, ~env.unwrapped.game.state().any(axis=-1))


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Return a function that writes a module of the user's, importable by name."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def test_make_gives_a_function_the_keywords_it_accepts(user_module):
    user_module(
        "user_env",
        "from tests.counting_env import CountingEnv\n"
        "def plain():\n    return CountingEnv()\n"
        "def drawn(render_mode):\n"
        "    env = CountingEnv()\n    env.render_mode = render_mode\n    return env\n"
        "def everything(**kwargs):\n    return drawn(**kwargs)\n",
    )
    assert make("user_env:plain", render_mode="rgb_array").render_mode is None
    assert make("user_env:drawn", render_mode="rgb_array").render_mode == "rgb_array"
    assert make("user_env:everything", render_mode="human").render_mode == "human"


def test_make_takes_an_id_that_a_module_registers(user_module):
    user_module(
        "user_registers",
        "import gymnasium\n"
        "gymnasium.register('Counting-v0', 'tests.counting_env:CountingEnv')\n",
    )
    try:
        assert make("user_registers:Counting-v0").spec.id == "Counting-v0"
    finally:
        gym.registry.pop("Counting-v0")


def test_an_id_may_have_no_render_mode_or_one_of_its_own(user_module):
    user_module(
        "user_draws",
        "import gymnasium\n"
        "from tests.counting_env import CountingEnv\n"
        "class Drawn(CountingEnv):\n"
        "    def __init__(self, render_mode='human'):\n"
        "        super().__init__()\n        self.render_mode = render_mode\n"
        "gymnasium.register('Plain-v0', CountingEnv)\n"
        "gymnasium.register('Drawn-v0', Drawn)\n"
        "gymnasium.register('Array-v0', Drawn, kwargs={'render_mode': 'rgb_array'})\n",
    )
    modes = {"Plain-v0": None, "Drawn-v0": None, "Array-v0": "rgb_array"}
    try:
        for name, mode in modes.items():
            env = make(f"user_draws:{name}", render_mode=None)
            assert env.unwrapped.render_mode == mode, name
        with pytest.raises(TypeError, match="render_mode"):
            make("Plain-v0", render_mode="rgb_array")
    finally:
        for name in modes:
            gym.registry.pop(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CartPol-v1", "--env CartPol-v1 is not known; .*Did you mean CartPole-v1"),
        # Gymnasium would take the newest version. For Atari the wrappers would be
        # missing: atari_wrappers.is_atari knows whole ids only.
        ("PongNoFrameskip", "--env PongNoFrameskip is not known; .*NoFrameskip-v4"),
        ("CARTPOLE-V1", "Did you mean CartPole-v1"),
        ("catch", "Did you mean Catch"),
        ("PongNoFrameskip-v5", "Did you mean PongNoFrameskip-v4"),
        ("MinAtar/Breakot-v1", "Did you mean MinAtar/Breakout-v1"),
        ("no.such.module:make", "no module 'no'.* with `python -m` in the"),
        ("tests.no_such:make", "no module 'tests.no_such'"),
        ("tests.counting_env:mak", "no function 'mak'.*Did you mean make"),
        ("tests.counting_env:LIVES", "expected a function, got 2"),
        ("fractions:Fraction", "Fraction has no reset, step, observation_space"),
        ("tests.wrong_env:make_vector", "SyncVectorEnv is a vector environment"),
        ("gym:CartPole-v1", r"pip install -e .\[classic\]"),
        ("Nobody-v0", "If another package registers this id, write package:ID"),
        ("Cart Pole-v1", "--env Cart Pole-v1 is not known; .*Did you mean CartPole-v1"),
        ("Ant-v3", "--env Ant-v3: .* moved to the gymnasium-robotics project"),
    ],
)
def test_make_of_an_unknown_name_says_what_to_do(name, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "gym", None)  # As if it were not installed.
    with pytest.raises(ValueError, match=message) as caught:
        make(name)
    assert "--env" in str(caught.value)


def test_make_says_which_package_registers_an_id(user_module):
    user_module(
        "userworld",
        "import gymnasium\n"
        "gymnasium.register('UserWorld-Door-v0', 'tests.counting_env:CountingEnv')\n",
    )
    try:
        with pytest.raises(ValueError, match="mean userworld:UserWorld-Door-v0?"):
            make("UserWorld-Door-v0")
        assert make("userworld:UserWorld-Door-v0").spec.id == "UserWorld-Door-v0"
    finally:
        gym.registry.pop("UserWorld-Door-v0")


def test_make_lets_an_error_inside_the_users_module_through(user_module):
    user_module("user_broken", "import not_installed_package\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_package"):
        make("user_broken:make")
    gym.register("UserBroken-v0", "user_broken:make")
    try:
        with pytest.raises(ModuleNotFoundError, match="not_installed_package"):
            make("UserBroken-v0")
    finally:
        gym.registry.pop("UserBroken-v0")


@pytest.mark.parametrize(
    "options, said",
    [
        (None, "returned None, expected a dict"),
        ({"level": np.float32(0.5)}, r"level is .* \(float32\), which meta.json"),
        ({"level": float("nan")}, r"level is nan \(float\), which meta.json"),
        (
            {"frame_skip": np.int64(4)},
            r"frame_skip is .*4.* \(int64\), which meta",
        ),
        ({"frame_skip": 0}, "frame_skip is 0, expected an int of at least 1"),
        ({"frame_skip": 2.5}, "frame_skip is 2.5, expected an int of at least"),
    ],
)
def test_options_that_no_record_can_hold_are_named(options, said):
    with pytest.raises(MakeError, match=f"env_options:? {said}"):
        check_options(options)
    fine = {"frame_skip": 4, "maps": [1, 2], "level": None}  # For MonoBeast.
    assert check_options(fine) == fine
