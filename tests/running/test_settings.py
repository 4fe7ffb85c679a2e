# SPDX-License-Identifier: Apache-2.0
"""Settings files: read by both programs, and suggested where they are missing."""

import re
import shlex
from pathlib import Path

import ale_py
import gymnasium as gym
import minatar.gym
import pytest
from gymnasium.envs.registration import EnvSpec

import monobeast
import polybeast
from core.running import settings
from core.running.settings import family_of, suggestion
from tests.trainers.several import environments

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "settings").glob("*.txt"))


@pytest.mark.parametrize("trainer", [monobeast, polybeast])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_both_programs_read_each_file(trainer, file):
    env = ["--env", "CartPole-v1", "--xpid", "x"]  # The default has the time.
    argv = shlex.split(file.read_text(), comments=True)
    assert argv or file.stem == "atari"  # The defaults.
    read = vars(trainer.parse_flags([f"@{file}", *env]))
    assert read == vars(trainer.parse_flags([*argv, *env]))


def test_the_readme_has_each_files_scores_and_they_are_those_of_the_linked_results():
    readme = ROOT / "settings" / "README.md"
    rows = re.findall(r"^\| (\w+)\.txt \|.*\| (.*) \|$", readme.read_text(), re.M)
    assert sorted(name for name, _ in rows) == [file.stem for file in FILES]
    for name, cell in rows:
        links = re.findall(r"\((\.\./results/\S+)\)", cell)
        scores = re.findall(r"(?<=[ (])-?\d[\d,.]*\d\b", re.sub(r"\[.*?\)", "", cell))
        assert (scores and links) or cell.startswith("none:"), name
        there = " ".join((readme.parent / link).read_text() for link in links)
        assert set(scores) <= set(re.findall(r"-?\d[\d,.]*\d\b", there)), name


def test_flags_after_a_file_win_and_comments_are_skipped(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("# Mine.\n--batch_size 8  # Small.\n\n--learning_rate 0.5\n")
    flags = monobeast.parse_flags([f"@{file}", "--learning_rate", "0.25"])
    assert (flags.batch_size, flags.learning_rate) == (8, 0.25)


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "mine.txt'"),
        (b"--env 'Catch\n", 'cannot read the line "--env \'Catch" of an @FILE'),
        (b"--env Catch \\\n", "cannot read the line '--env Catch \\\\' of an @FILE"),
        (b"--env \xff", "'utf-8' codec can't"),  # decode or, since 3.12, encode.
        (b"@mine.txt", ""),  # Too many recursions or, on macOS, open files.
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path, monkeypatch, capsys, content, said
):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("mine.txt").write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        monobeast.parse_flags(["@mine.txt"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and line.startswith("python -m monobeast: error: ")


FAMILIES = {
    "CartPole-v1": "classic_control",
    "LunarLander-v3": "box2d",
    "HalfCheetah-v5": "mujoco",
    "MinAtar/Breakout-v1": "minatar",
    "NetHackScore-v0": "nethack",
    "nle:NetHackScore-v0": "nethack",
    "ALE/Pong-v5": None,
    "nobody/Knows-v0": None,
}


def test_a_family_is_known_where_the_package_is_not_imported(run_forked):
    """As in PolyBeast's learner: only its servers import the environments."""
    code = "import polybeast; from core.running.settings import family_of as f; "
    code += f"print(*map(f, {[*FAMILIES]}))"
    status, said = run_forked(exec, code)
    assert status == 0, said
    assert said.split() == [str(family) for family in FAMILIES.values()]


@pytest.mark.parametrize("env, family", FAMILIES.items())
def test_a_family_is_known_by_its_package(env, family, monkeypatch):
    monkeypatch.setattr(settings, "NAMES", {})
    gym.register_envs(ale_py)
    if "MinAtar/Breakout-v1" not in gym.registry:
        minatar.gym.register_envs()
    nethack = EnvSpec("NetHackScore-v0", "nle.env.tasks:NetHackScore")
    monkeypatch.setitem(gym.registry, nethack.id, nethack)  # As nle does.
    assert family_of(env) == family
    if family is not None:
        assert (ROOT / "settings" / f"{family}.txt").is_file()


@pytest.mark.parametrize(
    "env, text",
    [
        ("LunarLanderContinuous-v3", "try @settings/box2d.txt"),
        ("Pendulum-v1", "try @settings/classic_control.txt --discounting 0.9"),
        ("BipedalWalker-v3", "try examples/appo, as @settings/box2d.txt alone"),
        ("Acrobot-v1", None),
        ("MountainCar-v0", None),
    ],
)
def test_what_is_suggested_is_what_the_results_show(env, text):
    got = suggestion(env, monobeast.parse_flags(["--env", env]))
    assert got is None if text is None else text in got


def test_a_file_is_suggested_to_a_run_at_the_defaults_only():
    env = ["--env", "CartPole-v1"]
    plain = monobeast.parse_flags(env)
    assert "@settings/classic_control.txt" in suggestion("CartPole-v1", plain)
    file = f"@{ROOT}/settings/classic_control.txt"
    for argv in ([file, *env], [*env, "--learning_rate", "0.001"]):
        assert suggestion("CartPole-v1", monobeast.parse_flags(argv)) is None
    assert suggestion("nobody/Knows-v0", plain) is None


def test_a_file_is_suggested_to_each_of_several_learners(monkeypatch):
    for name, value in environments(2, port=1)[1].items():
        monkeypatch.setenv(name, value)
    share = monobeast.parse_flags(["--env", "CartPole-v1", "--num_actors", "2"])
    assert suggestion("CartPole-v1", share) is not None
