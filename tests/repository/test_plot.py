# SPDX-License-Identifier: Apache-2.0
"""tools.plot: seeds become a median and a band, beside what others have published."""

import json
from pathlib import Path

import numpy as np
import pytest

from tools import plot

PNG = b"\x89PNG"


def write_run(folder: Path, env: str, seed: int, rows: list[tuple]) -> Path:
    """Make a run's folder; rows are (step, mean return), 2 steps a second."""
    folder.mkdir(parents=True)
    lines = [f"{step},{4 * step},{step / 2},{mean}" for step, mean in rows]
    header = "step,frames,time_s,mean_episode_return"
    (folder / "logs.csv").write_text("\n".join([header, *lines]) + "\n")
    (folder / "meta.json").write_text(json.dumps({"flags": {"env": env, "seed": seed}}))
    return folder


@pytest.fixture
def reference(tmp_path, monkeypatch):
    path = tmp_path / "reference.csv"
    path.write_text(
        "env,system,metric,value,frames\n"
        "Catch,Theirs,return,0.5,1000000\nCatch,Best,return,1,\n"
        "Catch,Best,minutes,7,\nMemory,Else,return,3,\n"
    )
    monkeypatch.setattr(plot, "REFERENCE", path)


def test_seeds_become_quartiles_on_the_steps_that_all_have_seen():
    curves = [
        (np.array([0.0, 10.0]), np.array([0.0, 10.0])),  # y = x
        (np.array([2.0, 4.0, 12.0]), np.array([4.0, 8.0, 24.0])),  # y = 2 x
        (np.array([1.0, 8.0]), np.array([5.0, 40.0])),  # y = 5 x
    ]
    x, (low, median, high) = plot.aggregate(curves, points=4)
    np.testing.assert_allclose(x, [2, 4, 6, 8])
    np.testing.assert_allclose(median, 2 * x)
    np.testing.assert_allclose(low, 1.5 * x)  # Half way from x to 2 x.
    np.testing.assert_allclose(high, 3.5 * x)


def test_one_seed_is_its_own_median():
    x, quartiles = plot.aggregate([(np.array([1.0, 2.0]), np.array([3.0, 5.0]))], 3)
    np.testing.assert_allclose(x, [1, 1.5, 2])
    np.testing.assert_allclose(quartiles, [[3, 4, 5]] * 3)


def test_names_that_differ_in_the_seed_are_one_variant(tmp_path):
    for name, env, seed in (
        ("MinAtar-Breakout-v1-monobeast-1", "MinAtar/Breakout-v1", 1),
        ("MinAtar-Breakout-v1-monobeast-2", "MinAtar/Breakout-v1", 2),
        ("breakout-polybeast-lr=0.1-2", "MinAtar/Breakout-v1", 2),
        ("my.envs-make_it-use_lstm=True-1", "my.envs:make_it", 1),
        ("Catch-1", "Catch", 1),
        ("torchbeast-20261121-22", "Catch", 1),  # A time of day is no seed.
    ):
        write_run(tmp_path / name, env, seed, [(1, 0)])
    (tmp_path / "latest").symlink_to("Catch-1")
    (tmp_path / "best").symlink_to(tmp_path / "Catch-1")  # A name of the user's own.
    elsewhere = tmp_path.with_name("elsewhere")  # A run may be a link, too.
    (tmp_path / "Catch-1").rename(elsewhere)
    (tmp_path / "Catch-1").symlink_to(elsewhere)
    groups = plot.by_variant(plot.find_runs([tmp_path]))
    names = {
        env: {variant: len(seeds) for variant, seeds in variants.items()}
        for env, variants in groups.items()
    }
    assert names == {
        "MinAtar/Breakout-v1": {"monobeast": 2, "polybeast-lr=0.1": 1},
        "my.envs:make_it": {"use_lstm=True": 1},
        "Catch": {"Catch": 1, "torchbeast-20261121-22": 1},
    }


@pytest.mark.parametrize(
    "x_axis, last", [("steps", 0.002), ("frames", 0.008), ("hours", 1000 / 3600)]
)
def test_the_x_axis_is_steps_frames_or_hours(tmp_path, reference, x_axis, last):
    run = write_run(tmp_path / "a", "Memory", 1, [(1000, 1), (2000, 2)])
    (axes,) = plot.draw(plot.find_runs([run]), x_axis).axes
    curve = axes.get_lines()[0]
    assert curve.get_xdata()[-1] == pytest.approx(last)
    assert curve.get_ydata()[-1] == 2
    assert x_axis in axes.get_xlabel()


def test_a_panel_for_each_environment_with_the_published_returns(tmp_path, reference):
    for seed, mean in ((1, 0.1), (2, 0.2), (3, 0.9)):
        write_run(tmp_path / f"Catch-a-{seed}", "Catch", seed, [(1, 0), (9, mean)])
    write_run(tmp_path / "CartPole-v1-a-1", "CartPole-v1", 1, [(1, 7), (9, 8)])
    cartpole, catch = plot.draw(plot.find_runs([tmp_path]), "steps").axes
    assert (cartpole.get_title(), catch.get_title()) == ("CartPole-v1", "Catch")
    lines = {line.get_label(): line for line in catch.get_lines()}
    assert list(lines) == ["a, 3 seeds", "Best: 1", "Theirs: 0.5 (1M frames)"]
    assert lines["a, 3 seeds"].get_ydata()[-1] == pytest.approx(0.2)
    assert set(lines["Theirs: 0.5 (1M frames)"].get_ydata()) == {0.5}
    assert [line.get_label() for line in cartpole.get_lines()] == ["a"]
    # One variant, one colour.
    assert cartpole.get_lines()[0].get_color() == lines["a, 3 seeds"].get_color()


def test_a_published_return_far_above_the_curve_is_only_in_the_legend(
    tmp_path, reference
):
    run = write_run(tmp_path / "a", "Catch", 1, [(1, 0), (9, 0.3)])
    (axes,) = plot.draw(plot.find_runs([run]), "steps").axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["a", "Best: 1", "Theirs: 0.5 (1M frames)"]
    _, best, theirs = axes.get_lines()
    assert np.isnan(best.get_ydata()).all() and set(theirs.get_ydata()) == {0.5}
    assert axes.get_ylim()[1] < 1


def test_environments_can_share_a_panel(tmp_path, reference):
    for seed in (1, 2):
        write_run(tmp_path / f"Catch-{seed}", "Catch", seed, [(1, 0), (9, seed)])
        write_run(tmp_path / f"Memory-{seed}", "Memory", seed, [(1, 0), (9, 5)])
    runs = plot.find_runs([tmp_path])
    (axes,) = plot.draw(runs, "steps", together="Both").axes
    assert axes.get_title() == "Both"
    labels = [line.get_label() for line in axes.get_lines()]
    assert labels == ["Catch, 2 seeds", "Memory, 2 seeds"]


def test_a_figure_appears_beside_the_data_or_where_it_is_wanted(
    tmp_path, reference, capsys
):
    run = write_run(tmp_path / "runs" / "a", "Catch", 1, [(1, 0), (9, 1)])
    plot.main([str(run)])
    assert (run / "curve.png").read_bytes().startswith(PNG)
    plot.main([str(run.parent), "--out", str(tmp_path / "b.png"), "--x", "hours"])
    assert (tmp_path / "b.png").read_bytes().startswith(PNG)
    assert not (run.parent / "curve.png").exists()
    said = [f"Wrote {run / 'curve.png'}", f"Wrote {tmp_path / 'b.png'}"]
    assert capsys.readouterr().out.splitlines() == said


def test_runs_without_a_finished_game_are_left_out(tmp_path, capsys):
    write_run(tmp_path / "a", "Catch", 1, [(1, "")])
    run = write_run(tmp_path / "b", "Catch", 1, [(1, ""), (2, 1)])
    assert [r.folder for r in plot.find_runs([tmp_path])] == [run]
    assert "a: has no mean_episode_return yet" in capsys.readouterr().err


def test_any_column_can_be_drawn(tmp_path, reference):
    run = write_run(tmp_path / "a", "Catch", 1, [(1, ""), (2, 1), (3, 1)])
    log = (run / "logs.csv").read_text().splitlines()
    extra = ["info_x", "5", "", "7"]
    lines = [f"{line},{x}" for line, x in zip(log, extra, strict=True)]
    (run / "logs.csv").write_text("\n".join(lines) + "\n")
    (axes,) = plot.draw(plot.find_runs([run], "info_x"), "steps", "info_x").axes
    (curve,) = axes.get_lines()  # No published return beside it.
    assert list(curve.get_ydata()[[0, -1]]) == [5, 7]
    assert axes.get_ylabel() == "info_x"


def test_the_ends_of_runs_against_a_flag(tmp_path, reference):
    for lag in (0, 100):
        for seed in (1, 2, 3):
            # Up to 0.8 of the steps they all are the same.
            rows = [(1, 9), (79, 9), (80, seed), (100, seed - lag)]
            write_run(tmp_path / f"lag={lag}-vtrace-{seed}", "Memory", seed, rows)
    plot.main([str(tmp_path), "--against", "lag"])
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
    (axes,) = plot.draw(plot.find_runs([tmp_path]), "steps", against="lag").axes
    medians, points = axes.get_lines()  # Nothing that others have published.
    assert medians.get_label() == "vtrace"
    assert list(medians.get_xdata()) == [0, 100]
    assert list(medians.get_ydata()) == [2, 2 - 50]
    assert len(points.get_xdata()) == 6
    assert axes.get_xlabel() == "lag"


def test_a_flag_that_no_name_has_is_told(tmp_path):
    write_run(tmp_path / "a-1", "Catch", 1, [(1, 0)])
    with pytest.raises(SystemExit, match="a-1: its name does not have lag=<number>"):
        plot.main([str(tmp_path), "--against", "lag"])


def test_a_folder_without_runs_is_named(tmp_path):
    with pytest.raises(SystemExit, match=f"{tmp_path}: no run"):
        plot.main([str(tmp_path)])


@pytest.mark.parametrize("text, said", [(None, "No such file"), ("{", "Expecting")])
def test_a_run_without_a_good_meta_json_is_named(tmp_path, text, said):
    (tmp_path / "logs.csv").write_text("step,mean_episode_return\n1,2\n")
    if text is not None:
        (tmp_path / "meta.json").write_text(text)
    with pytest.raises(SystemExit, match=f"{tmp_path}: cannot read its meta.*{said}"):
        plot.main([str(tmp_path)])
