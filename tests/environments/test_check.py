# SPDX-License-Identifier: Apache-2.0
"""python -m core.environments.check."""

import itertools
import math
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from core.environments import check
from core.rollout import UnlearnableSpace, row_spec, spec_of
from tests import counting_env
from tests.counting_env import CountingEnv
from tests.environments.helpers import Scripted, frame

DEADLINE_S = 60
FRESH = itertools.count()  # Numbers never seen before.
REPOSITORY = Path(__file__).resolve().parents[2]


def run_check(*arguments, cwd=REPOSITORY):
    return subprocess.run(
        [sys.executable, "-m", "core.environments.check", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{cwd}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_check_prints_what_the_learner_sees(capsys):
    assert check.main(["tests.counting_env:make_nested", "--steps", "101"]) == 0
    out = capsys.readouterr().out
    for text in (
        "CountingEnv (Gymnasium API)",
        "actions      Discrete(3)",
        "observation/pair/0 float32[2]",
        "last_action int64[]",
        "bytes",
        "info         half",
        "101 steps",
        "steps/s",
        "ok           tests.counting_env:make_nested obeys its own spec",
    ):
        assert text in out


def test_check_ends_although_a_thread_of_the_environment_runs():
    result = run_check("tests.counting_env:make_with_thread", "--steps", "101")
    assert result.returncode == 0, result.stderr
    assert result.stderr.endswith("at the end: simulator, simulator, simulator\n")


def test_check_says_that_an_atari_game_is_seen_without_wrappers(monkeypatch, capsys):
    pytest.importorskip("ale_py")
    monkeypatch.setattr(check, "REPLAY_STEPS", 3)
    assert check.main(["PongNoFrameskip-v4", "--steps", "3"]) == 0
    assert "this is the bare game" in capsys.readouterr().out


def test_check_of_a_broken_environment_exits_78_with_a_line_each(tmp_path):
    (tmp_path / "broken.py").write_text(
        "import gymnasium as gym\n"
        "import numpy as np\n"
        "class Broken(gym.Env):\n"
        "    observation_space = gym.spaces.Box(0, 1, (3,), np.float32)\n"
        "    action_space = gym.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return np.full(3, 7, np.float32), {}\n"
        "    def step(self, action):\n"
        "        return np.zeros(3), 1.0, 0, False, {}\n"
    )
    result = run_check("broken:Broken", "--steps", "13", cwd=tmp_path)
    assert result.returncode == 78, result.stderr
    lines = [line for line in result.stdout.splitlines() if "VIOLATION" in line]
    assert len(lines) == 3
    assert (
        "step 0: 'observation' expected Box(0.0, 1.0, (3,), float32), got" in lines[0]
    )
    assert "step 1: 'observation' expected float32[3], got float64[3] (13" in lines[1]
    assert "step 1: 'terminated' expected a bool, got 0 (13 times)" in lines[2]


class Small(gym.Env):
    """Its observation space has a narrow dtype."""

    observation_space = gym.spaces.MultiDiscrete([3, 100], np.int8, start=[-1, 20])
    action_space = gym.spaces.Discrete(2)

    def __init__(self, values):
        self.values = values

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array(self.values[0]), {}

    def step(self, action):
        return np.array(self.values[1]), 1.0, True, False, {}


@pytest.mark.parametrize("dtype", [np.int8, np.int64])
def test_values_of_a_multidiscrete_of_a_narrow_dtype_are_compared(
    dtype, monkeypatch, capsys
):
    values = [dtype([-1, 119])] * 2
    monkeypatch.setattr(check, "make", lambda name: Small(values))
    assert check.main(["small", "--steps", "7"]) == 0
    values[1] = dtype([1, 120])
    assert check.main(["small", "--steps", "7"]) == 78
    assert "MultiDiscrete([  3 100]" in (line := capsys.readouterr().out), line
    assert "got values in [1, 120]" in line


def test_check_of_an_unknown_environment_exits_2_with_the_near_misses(capsys):
    with pytest.raises(SystemExit) as caught:
        check.main(["CartPol-v1"])
    assert caught.value.code == 2
    assert "Did you mean CartPole-v1" in capsys.readouterr().err


class IgnoresSeed(CountingEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if seed is None else next(FRESH))


class RaisesInClose(CountingEnv):
    def close(self):
        raise RuntimeError("still busy")


class ExitsInClose(CountingEnv):
    def close(self):
        sys.exit(0)


def broken(*script, **options):
    return lambda: Scripted(*script, **options)


BROKEN = {
    "seed": (IgnoresSeed, r"two plays from reset\(seed=1\) .* differ"),
    "shape": (broken({"frame": frame((3, 2))}), r"'observation/frame' expected uint8"),
    "bounds": (
        broken({"pair": (1, np.full(7, 2, np.float32))}),
        r"'observation/pair/1' expected Box.* got values in \[2.0, 2.0\]",
    ),
    "NaN": (
        broken({"pair": (1, np.full(7, np.nan, np.float32))}),
        r"'observation/pair/1' expected Box.*, got NaN",
    ),
    "Discrete range": (
        broken({"pair": (5, np.zeros(7, np.float32))}),
        r"'observation/pair/0' expected Discrete\(5\), got values in \[5, 5\]",
    ),
    "structure": (
        broken({"frame": "missing"}),
        r"the observation lacks \['observation/frame'\]( \(|$)",
    ),
    "surplus": (
        broken({"sound": 1}),
        r"the observation adds \['observation/sound'\]( \(|$)",
    ),
    "reward": (
        broken({"reward": math.inf}),
        "'reward' expected a finite number, got inf",
    ),
    "info": (broken({"info": None}), "'info' expected a dict, got None"),
    "truncated": (broken({"truncated": "no"}), "'truncated' expected a bool, got 'no'"),
    "step()": (broken((1, 2, 3, 4)), r"'step\(\)' expected .* got a tuple of 4"),
    "reset()": (broken(reset=frame()), r"'reset\(\)' expected .* got uint8\[2,3\]"),
    "raises": (broken(None, KeyError("boom")), "KeyError: 'boom'"),
    "close()": (RaisesInClose, r"RuntimeError: still busy \(3 times\)"),
    "exit": (ExitsInClose, r"EnvError: .* close\(\): SystemExit: 0 \(3 times\)"),
}


@pytest.mark.parametrize("violation", BROKEN)
def test_check_names_the_violation(violation, monkeypatch, capsys):
    make_env, message = BROKEN[violation]
    monkeypatch.setattr(check, "REPLAY_STEPS", 7)
    monkeypatch.setattr(check, "make", lambda name: make_env())
    assert check.main(["broken", "--steps", "7"]) == 78
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "VIOLATION" in x)
    assert re.search(message, line), line


class Mission(CountingEnv):
    """As MiniGrid: a dict with a picture, a direction, and a text."""

    def __init__(self, **others):
        super().__init__(counting_env.NESTED)
        parts = {**self.observation_space.spaces, **others}
        self.observation_space = gym.spaces.Dict(parts)


@pytest.mark.parametrize(
    "part, said",
    [
        (gym.spaces.Text(5), "'observation/mission' is a Text; expected Box, Discrete"),
        (
            gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Text(5)]),
            "'observation/mission/1' is a Text",
        ),
        (gym.spaces.Box(0, 1, (0,)), "of shape (0,), which holds no values"),
    ],
)
def test_what_cannot_be_learned_is_no_violation_and_says_how_to_leave_it_out(
    part, said, monkeypatch, capsys
):
    monkeypatch.setattr(check, "make", lambda name: Mission(mission=part))
    assert check.main(["mission", "--steps", "7"]) == 78
    out = capsys.readouterr().out
    assert "VIOLATION" not in out
    line = out.splitlines()[-1]
    assert said in line
    call = re.search(r"gymnasium\.wrappers\.(FilterObservation\(.*\))$", line)
    env = gym.wrappers.FilterObservation(
        Mission(mission=part), list(CountingEnv(counting_env.NESTED).observation_space)
    )
    assert call[1] == f"FilterObservation(env, {list(env.observation_space)})"
    spec_of(env.observation_space)  # Without it, it can be learned.


def test_minigrid_is_learned_as_the_page_on_environments_says(monkeypatch):
    picture = gym.spaces.Box(0, 255, (7, 7, 3), np.uint8)

    class MiniGrid(gym.Env):
        observation_space = gym.spaces.Dict(
            image=picture, direction=gym.spaces.Discrete(4), mission=gym.spaces.Text(9)
        )

    page = (REPOSITORY / "docs" / "environments.md").read_text()
    (code,) = re.findall(
        r"```python\n(import gymnasium\n+def make_env\(.*?)```", page, re.DOTALL
    )
    monkeypatch.setattr(gym, "make", lambda env_id: MiniGrid())
    names = {}
    exec(code, names)
    space = names["make_env"]().observation_space
    spec_of(space)  # It can be learned.
    assert set(space) == {"image", "direction"}
    assert space["image"] == gym.spaces.Box(0, 10, picture.shape, picture.dtype)


def nan_bound():
    space = gym.spaces.Box(0, 1, (4, 5))
    space.low[1, 2] = np.nan
    return space


@pytest.mark.parametrize(
    "space, said",
    [
        (gym.spaces.Text(5), "'action' is a Text; .*"),
        (gym.spaces.Dict({"a": gym.spaces.Text(5)}), "'action/a' is a Text; .*"),
        (gym.spaces.MultiDiscrete(np.zeros(0, int)), "which holds no values"),
        (gym.spaces.Box(0, 1, (2,), np.longdouble), "expected one of the dtypes bool"),
        (gym.spaces.Box(0, 1, (2,), np.dtype(">f4")), "expected one of the dtypes"),
        (gym.spaces.Dict({1: gym.spaces.Discrete(2)}), "the key 1; expected a string"),
        (nan_bound(), "expected bounds that are numbers or infinite"),
    ],
    ids=str,
)
def test_other_spaces_that_cannot_be_learned_are_named(space, said):
    with pytest.raises(UnlearnableSpace, match=said) as caught:
        row_spec(gym.spaces.Discrete(2), space, ())
    assert "FilterObservation" not in str(caught.value)  # It is an action.
    assert "\n" not in str(caught.value)


def test_a_slow_check_says_how_far_it_has_come(monkeypatch, capsys):
    monkeypatch.setattr(check, "PROGRESS_S", 0.0)
    assert check.main(["Catch", "--steps", "7"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "playing: 0 of 7 steps"
    assert lines[-1] == "measuring: 6 of 7 steps"
    assert "playing: 299 of 300 steps" in lines


class Large(CountingEnv):
    """Observations of 100 KB."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gym.spaces.Box(0, 1, (25_000,), np.float32)

    def reset(self, **options):
        return np.zeros(25_000, np.float32), super().reset(**options)[1]

    def step(self, action):
        return np.zeros(25_000, np.float32), *super().step(action)[1:]


def test_the_memory_it_takes_does_not_grow_with_the_steps(monkeypatch):
    monkeypatch.setattr(check, "REPLAY_STEPS", 3)
    tracemalloc.start()
    try:
        check.main(["tests.environments.test_check:Large", "--steps", "300"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10e6
