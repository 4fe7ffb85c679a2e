# SPDX-License-Identifier: Apache-2.0
"""The contents of `make watch`: TensorBoard's Custom Scalars, and videos.

Needs TensorBoard's protocol buffers only, not its server.
"""

import contextlib
import socket
import time
from pathlib import Path
from typing import Any

# Charts by heading. Each chart has a title and the columns of logs.csv in it.
CHARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "Return": {
        "mean return of the last 100 full games": ("mean_episode_return",),
        "mean length of these games, in steps": ("mean_episode_step",),
    },
    "Speed": {
        "steps per second": ("sps",),
        "bottleneck: share of time that each stage is busy": (
            "learner_busy",
            "inference_busy",
            "env_busy",
            "gpu_utilization",
        ),
    },
    "Lag": {
        "updates between acting and learning": ("policy_lag_mean", "policy_lag_max"),
        "mean clipped importance weight": ("mean_rho",),
    },
    "Losses": {
        "losses, sums over T and B": (
            "total_loss",
            "pg_loss",
            "baseline_loss",
            "entropy_loss",
        ),
        "entropy of the policy, nats per step": ("entropy",),
        "gradient norm before clipping": ("grad_norm",),
    },
}
MAX_FRAMES = 400  # In the GIF of a game. Of longer games, frames are left out.
FRAME_MS = 50  # Browsers slow down GIFs with much shorter times per frame.


def tag(column: str) -> str:
    """Return the TensorBoard name of a column of logs.csv."""
    return f"train/{column}"


def layout() -> Any:
    """Return the event value that makes TensorBoard show CHARTS (Custom Scalars)."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    found = layout_pb2.Layout()
    for heading, charts in CHARTS.items():
        category = found.category.add(title=heading)
        for title, columns in charts.items():
            chart = category.chart.add(title=title)
            chart.multiline.tag.extend(f"^{tag(column)}$" for column in columns)
    text = found.SerializeToString()
    return Summary.Value(
        tag=metadata.CONFIG_SUMMARY_TAG,
        metadata=metadata.create_summary_metadata(),
        tensor=TensorProto(dtype=DT_STRING, string_val=[text]),
    )


def show_video(path: Path, step: int) -> None:
    """Write a game's mp4 file as an event beside the file, for TensorBoard's Images.

    TensorBoard cannot show mp4, so the event has a GIF. The event is not in the folder
    of the training's events: TensorBoard reads only the newest file in a folder.

    Args:
      step: the step of the checkpoint that played the game.
    """
    import imageio.v2 as imageio
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    film: Any = imageio.get_reader(path)
    with contextlib.closing(film):
        every = -(-film.count_frames() // MAX_FRAMES)
        frames = [frame for i, frame in enumerate(film) if i % every == 0]
    options: Any = {"format": "GIF", "duration": FRAME_MS, "loop": 0}
    gif = imageio.mimwrite("<bytes>", frames, **options)
    height, width = frames[0].shape[:2]
    picture = Summary.Image(height=height, width=width, encoded_image_string=gif)
    value = Summary.Value(tag="video", image=picture)
    name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
    with (path.parent / name).open("wb") as file:
        events = RecordWriter(file)
        for event in (
            Event(file_version="brain.Event:2"),
            Event(step=step, summary=Summary(value=[value])),
        ):
            event.wall_time = time.time()
            events.write(event.SerializeToString())
