# SPDX-License-Identifier: Apache-2.0
"""What `make watch` shows, in a browser too."""

import contextlib
import functools
import io
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

from core import columns
from core.running import dashboard, logs
from tests.conftest import DEADLINE_S, free_ports, wait_until

Image = pytest.importorskip("PIL.Image")
ImageSequence = pytest.importorskip("PIL.ImageSequence")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# TensorBoard's first two colours of runs.
ORANGE, BLUE = (255, 112, 67), (0, 119, 187)


def write_run(run_dir: Path, returns) -> None:
    run_dir.mkdir()
    with logs.RunLog(run_dir) as run_log:
        for step, value in enumerate(returns):
            run_log.log({"step": step, "mean_episode_return": value, "sps": 10 * value})


def test_the_charts_are_of_columns_that_exist():
    shown = [
        column
        for charts in dashboard.CHARTS.values()
        for chart in charts.values()
        for column in chart
    ]
    assert len({*shown}) == len(shown)
    assert {*shown} <= {field.name for field in columns.FIELDS}


def test_each_start_of_a_run_brings_the_layout(tmp_path):
    write_run(tmp_path / "a", [1, 2])
    events = EventAccumulator(str(tmp_path / "a/tensorboard")).Reload()
    (event,) = events.Tensors(metadata.CONFIG_SUMMARY_TAG)
    found = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in found.category] == [*dashboard.CHARTS]
    (first, *_), *_ = [category.chart for category in found.category]
    (pattern,) = first.multiline.tag
    assert [t for t in events.Tags()["scalars"] if re.match(pattern, t)] == [
        "train/mean_episode_return"
    ]


@pytest.mark.parametrize("length, shown", [(7, 7), (801, 267)])
def test_a_video_is_a_moving_picture_of_the_whole_game(length, shown, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "game-000.mp4"
    frames = np.zeros((length, 32, 48, 3), np.uint8)
    frames[:, :, :, 0] = np.linspace(0, 255, length, dtype=np.uint8)[:, None, None]
    imageio.mimwrite(path, frames, fps=30, macro_block_size=2)
    dashboard.show_video(path, step=123)
    (event,) = EventAccumulator(str(tmp_path)).Reload().Images("video")
    assert (event.step, event.width, event.height) == (123, 48, 32)
    reds, duration_ms = [], 0
    for frame in ImageSequence.Iterator(
        Image.open(io.BytesIO(event.encoded_image_string))
    ):
        reds.append(np.asarray(frame.convert("RGB"))[:, :, 0].mean())
        duration_ms += frame.info["duration"]  # Equal frames have become one.
    assert duration_ms == shown * dashboard.FRAME_MS
    assert shown <= dashboard.MAX_FRAMES
    assert reds[0] < 20 and reds[-1] > 235 and (np.diff(reds) > -5).all()


@contextlib.contextmanager
def tensorboard(logdir: Path):
    """Serve the runs in a folder; yield the address."""
    port = free_ports(1)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--load_fast", "false"]
    url = f"http://127.0.0.1:{port}/"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            read = functools.partial(urllib.request.urlopen, timeout=DEADLINE_S)

            def has_loaded() -> bool:
                assert server.poll() is None
                with contextlib.suppress(OSError), read(f"{url}data/runs") as answer:
                    return b"video" in answer.read()
                return False

            wait_until(has_loaded)
            yield url
        finally:
            server.kill()


def screenshot(url: str, tmp_path: Path) -> np.ndarray:
    """Return what a real browser shows, uint8 [H, W, 3]."""
    path = tmp_path / "screen.png"
    command = [BROWSER, "--headless", "--disable-gpu", "--window-size=1200,800"]
    # Time is virtual, until all that is asked from the server is there.
    command += [
        "--virtual-time-budget=30000",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += [f"--screenshot={path}", *["--no-sandbox"] * (os.geteuid() == 0), url]
    subprocess.run(command, timeout=DEADLINE_S, check=True, capture_output=True)
    return np.asarray(Image.open(path).convert("RGB"))


def num_pixels(picture: np.ndarray, color: tuple[int, int, int]) -> int:
    """Count the pixels of a colour, without TensorBoard's margin on the left."""
    return int((picture[:, 310:] == color).all(axis=-1).sum())


@pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: {', '.join(BROWSERS)}")
def test_a_browser_shows_the_curves_of_two_runs_and_a_video(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    runs = tmp_path / "runs"
    runs.mkdir()
    write_run(runs / "a", range(50))
    write_run(runs / "b", range(50, 0, -1))
    (runs / "b/video").mkdir()
    green = np.full((8, 32, 32, 3), (0, 255, 0), np.uint8)
    imageio.mimwrite(runs / "b/video/game-000.mp4", green, macro_block_size=2)
    dashboard.show_video(runs / "b/video/game-000.mp4", step=49)
    (runs / "latest").symlink_to("b")
    with tensorboard(runs) as url:
        picture = screenshot(f"{url}#custom_scalars&regexInput=^(?!latest)", tmp_path)
        for color in (ORANGE, BLUE):
            assert num_pixels(picture, color) > 200, f"no curve in {color}"
        picture = screenshot(f"{url}#images", tmp_path)
        greens = np.abs(picture.astype(int) - (0, 255, 0)).max(axis=-1) < 40
        assert greens.sum() > 10_000
