# SPDX-License-Identifier: Apache-2.0
"""Test mode: full games and their returns by arithmetic, the table, the videos."""

import argparse
import csv
import functools
import json
import math
import os
import signal

import numpy as np
import pytest
import torch

import monobeast
from core.environments.stepping import Environments, env_seed
from core.environments.toys import Catch
from core.errors import ConfigError, Exit
from core.running import evaluation
from core.running.evaluation import Game
from core.running.randomness import keep_torch
from tests import counting_env, fault_env
from tests.counting_env import LIVES, NESTED, TRUNCATING, Place

SEED, NUM_GAMES = 11, 7
KINDS = {
    "plain": 0,
    "truncating": TRUNCATING,
    "lives": LIVES,
    "lives and truncating": LIVES | TRUNCATING,
    "nested": NESTED | TRUNCATING,
}


def choose(place):
    return (place.step + 2 * place.game + place.life) % counting_env.NUM_ACTIONS


class Policy:
    """Acts by what the observation says, and writes down all it is shown."""

    def __init__(self):
        self.places = []
        self.done = []
        self.states = []

    def __call__(self, row, state):
        observation = row["observation"]
        if isinstance(observation, dict):
            observation = observation["code"]
        place = counting_env.decode(observation[0])
        self.places.append(place)
        self.done.append(bool(row["done"][0]))
        self.states.append(state)
        return np.array([choose(place)]), state + 1


def make_envs(kind, **options):
    make = functools.partial(counting_env.CountingEnv, kind)
    return Environments(make, 1, seed=SEED, **options)


def play(kind, num_games=NUM_GAMES, **options):
    envs, policy = make_envs(kind, **options), Policy()
    games = list(evaluation.play(envs, policy, 0, num_games=num_games))
    envs.close()
    return games, policy


def play_by_arithmetic(place):
    """Return what a game from its first place must be, and the next game's place."""
    life_returns, steps, game = [], 0, place.game
    while place.game == game:
        life_returns.append(0.0)
        for step in range(place.length()):
            before = place._replace(step=step)
            after = place._replace(step=step + 1)
            life_returns[-1] += after.reward(choose(before))
            steps += 1
        place = place.next_episode()
    return Game(sum(life_returns), steps, life_returns), place


def first_place(kind, game=0):
    return Place(env_seed(SEED, 0, 0, game), game=0, life=0, step=0, kind=kind)


# ------------------------------------------------------------------------------- play


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_full_games_have_the_returns_and_lengths_of_arithmetic(kind):
    games, _ = play(kind)
    expected, place = [], first_place(kind)
    for _ in range(NUM_GAMES):
        game, place = play_by_arithmetic(place)
        expected.append(game)
    assert games == expected


def test_games_that_begin_with_seeds_of_their_own_do_too():
    games, _ = play(LIVES | TRUNCATING, seed_every_game=True)
    expected = [
        play_by_arithmetic(first_place(LIVES | TRUNCATING, game))[0]
        for game in range(NUM_GAMES)
    ]
    assert games == expected


def test_the_kinds_above_do_end_games_in_both_ways():
    place, cut = first_place(TRUNCATING), []
    for _ in range(NUM_GAMES):
        cut.append(place.is_cut())
        place = place.next_episode()
    assert 1 < sum(cut) < NUM_GAMES - 1


def test_a_game_is_reported_before_the_next_one_is_played():
    policy, num_actions = Policy(), []
    for game in evaluation.play(make_envs(0), policy, 0, num_games=3):
        num_actions.append((len(policy.places), game.steps))
    assert num_actions[0][0] == num_actions[0][1]
    assert num_actions[1][0] == num_actions[0][1] + num_actions[1][1]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_policy_sees_every_row_once_and_done_where_episodes_begin(kind):
    _, policy = play(kind)
    place, expected = first_place(kind), []
    while len(expected) < len(policy.places):
        # The final observation of a cut episode is a row too: its action is not taken.
        num_rows = place.length() + place.is_cut()
        expected += [place._replace(step=step) for step in range(num_rows)]
        place = place.next_episode()
    assert policy.places == expected[: len(policy.places)]
    assert policy.done == [place.step == 0 for place in policy.places]


def test_the_recurrent_state_goes_from_row_to_row():
    _, policy = play(LIVES | TRUNCATING)
    assert policy.states == list(range(len(policy.states)))


# ----------------------------------------------------------------------------- report

GAMES = [Game(1.0, 5, [1.0]), Game(2.0, 7, [0.5, 1.5]), Game(6.0, 15, [4.0, 0.0, 2.0])]


@pytest.fixture
def reported(tmp_path, capsys):
    """Report GAMES; return the lines printed, the rows of the table, and its path."""
    settings = {"env": "Pong", "seed": 3}
    evaluation.report(iter(GAMES), tmp_path, step=1234, settings=settings)
    (path,) = tmp_path.glob("test-*.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return capsys.readouterr().out.splitlines(), rows, path


def test_the_last_line_is_the_result_of_arithmetic_as_one_json_object(reported):
    lines, _, path = reported
    assert json.loads(lines[-1]) == {
        "episodes": 3,
        "mean_return": 3.0,
        # Deviations -2, -1, 3: variance 14 / (3 - 1) = 7.
        "stderr": pytest.approx(math.sqrt(7 / 3)),
        "min": 1.0,
        "max": 6.0,
        "mean_life_return": 1.5,
        "mean_steps": 9.0,
        "step": 1234,
        "csv": str(path),
        "env": "Pong",
        "seed": 3,
    }


def test_the_table_has_a_row_for_each_game(reported):
    _, rows, _ = reported
    assert list(rows[0]) == ["game", "return", "steps", "episodes", "mean_life_return"]
    numbers = [[float(value) for value in row.values()] for row in rows]
    assert numbers == [[0, 1, 5, 1, 1], [1, 2, 7, 2, 1], [2, 6, 15, 3, 2]]


def test_each_game_and_the_summary_are_printed(reported):
    lines, _, _ = reported
    assert len(lines) == len(GAMES) + 2
    assert "return 6 in 15 steps, 3 episode(s) of mean return 2" in lines[2]
    for part in ("3 full games", "mean return 3.00 +- 1.53", "min 1", "max 6"):
        assert part in lines[3]
    assert "per life 1.50" in lines[3]


def test_a_game_is_in_the_table_as_soon_as_it_is_over(tmp_path):
    num_rows = []

    def games():
        for game in GAMES:
            yield game
            (path,) = tmp_path.glob("test-*.csv")
            num_rows.append(len(path.read_text().splitlines()) - 1)

    evaluation.report(games(), tmp_path, step=0, settings={})
    assert num_rows == [1, 2, 3]


def test_tests_of_one_second_have_a_table_each(tmp_path):
    for n in 1, 2, 3:
        evaluation.report(iter(GAMES[:n]), tmp_path, step=0, settings={})
    tables = sorted(tmp_path.glob("test-*.csv"))
    assert [len(table.read_text().splitlines()) for table in tables] == [2, 3, 4]


def test_one_game_has_no_spread(tmp_path, capsys):
    evaluation.report(iter(GAMES[2:]), tmp_path, step=0, settings={})
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["episodes"], result["mean_return"]) == (1, 6.0)
    assert result["stderr"] == 0.0


def test_between_two_games_no_call_of_the_environment_runs():
    clock = np.zeros(1)
    games = evaluation.play(make_envs(LIVES, clock=clock), Policy(), 0, num_games=2)
    for _ in evaluation._between_calls(games, clock):
        assert clock[0] == 0.0
    assert clock[0] == 0.0


def test_ctrl_c_ends_a_test_without_a_traceback(monkeypatch, capsys):
    def press_ctrl_c(*args, **kwargs):
        raise KeyboardInterrupt

    flags = argparse.Namespace(mode="test", savedir="")
    monkeypatch.setattr(evaluation, "test_run", press_ctrl_c)
    monkeypatch.setattr(monobeast, "parse_flags", lambda argv: flags)
    monkeypatch.setattr(signal, "signal", lambda *args: None)  # It stays as it is.
    assert monobeast.main([]) == 128 + signal.SIGINT
    assert "Traceback" not in capsys.readouterr().err


def test_an_environment_that_seeds_torch_does_not_choose_the_actions():
    actions = []

    def policy(row, state):
        actions.append(int(torch.randint(9**9, ())))
        return np.zeros(1, np.int64), state

    with keep_torch():
        envs = Environments(fault_env.ChangesTorch, 1, seed=SEED)
    games = list(evaluation.play(envs, policy, 0, num_games=3))
    assert [game.steps for game in games] == [5, 5, 5]
    assert len(set(actions)) == len(actions)


def print_to(reader_is_there: bool) -> int:
    """Be a test whose output goes to a pipe; print its first game, and fail."""
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    if not reader_is_there:
        os.close(reader)

    def print_game(*args, **kwargs):
        print("Game 1", flush=True)
        raise BrokenPipeError("of an environment")

    evaluation.test_run = print_game
    monobeast.parse_flags = lambda argv: argparse.Namespace(mode="test", savedir="")
    return monobeast.main([])


def test_a_test_ends_quietly_when_nobody_reads_its_output(run_forked):
    assert run_forked(print_to, False) == (128 + signal.SIGPIPE, "")
    status, said = run_forked(print_to, True)
    assert status == Exit.INTERNAL
    assert said.endswith("BrokenPipeError: of an environment\n")


# ----------------------------------------------------------------------------- videos


def test_a_video_shows_each_observation_that_was_acted_on(tmp_path, capsys):
    imageio = pytest.importorskip("imageio.v3")
    pytest.importorskip("imageio_ffmpeg")
    shown = []

    class Watched(Catch):
        def render(self):
            shown.append(super().render())
            return shown[-1]

    envs = Environments(lambda: Watched(render_mode="rgb_array"), 1, seed=SEED)
    stay = np.array([1])
    games = list(
        evaluation.play(
            envs,
            lambda row, state: (stay, state),
            None,
            num_games=2,
            video_dir=tmp_path / "new" / "video",
        )
    )
    envs.close()
    paths = sorted((tmp_path / "new" / "video").iterdir())
    assert [path.name for path in paths] == ["game-000.mp4", "game-001.mp4"]
    assert capsys.readouterr().out.splitlines() == [f"Wrote {p}" for p in paths]
    films = [imageio.imread(path, plugin="FFMPEG") for path in paths]
    assert [len(film) for film in films] == [game.steps for game in games] == [9, 9]
    film, expected = np.concatenate(films), np.stack(shown)
    assert film.shape == expected.shape  # Not rescaled.
    errors = np.abs(film.astype(int) - expected.astype(int)).mean(axis=(1, 2, 3))
    differences = np.abs(np.diff(expected.astype(int), axis=0)).mean(axis=(1, 2, 3))
    assert errors.max() < differences.min() / 2  # Nearer to its own than to the next.


@pytest.mark.parametrize(
    "picture, said",
    [
        (NotImplementedError(), "the environment has no render"),
        (None, r"returned None; expected uint8.* and pass it on\?"),
        (np.zeros((3, 4, 5)), r"returned float64\[3,4,5\]; expected .*rgb_array'$"),
        ("a text", "expected uint8"),
    ],
)
def test_an_environment_without_pictures_is_told_in_one_line(tmp_path, picture, said):
    class Blind(Catch):
        def render(self):
            if isinstance(picture, Exception):
                raise picture
            return picture

    envs = Environments(Blind, 1, seed=SEED)
    games = evaluation.play(
        envs, lambda row, state: (np.array([1]), state), None, num_games=1,
        video_dir=tmp_path / "video",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=said):
        next(games)
    assert not (tmp_path / "video").exists()


@pytest.mark.parametrize(
    "fps, change, error, said",
    [
        ("fast", 0, ConfigError, r"metadata\['render_fps'\] is 'fast'; expected"),
        (None, 1, ConfigError, r"cannot add a frame, uint8\[41,40,3\], to .*000.mp4"),
        (None, 0, IsADirectoryError, "game-000.mp4"),
    ],
)
def test_a_video_that_cannot_be_written_is_told(tmp_path, fps, change, error, said):
    pytest.importorskip("imageio_ffmpeg")
    height = 40

    class Growing(Catch):
        metadata = {**Catch.metadata, "render_fps": fps}

        def render(self):
            nonlocal height
            height += change
            return np.zeros((height - change, 40, 3), np.uint8)

    envs = Environments(lambda: Growing(render_mode="rgb_array"), 1, seed=SEED)
    if error is IsADirectoryError:
        (tmp_path / "game-000.mp4").mkdir()
    games = evaluation.play(
        envs, lambda row, state: (np.array([1]), state), None, num_games=1,
        video_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(error, match=said):
        next(games)
