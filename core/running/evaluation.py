# SPDX-License-Identifier: Apache-2.0
"""Test modes: play full games with a trained policy; report returns; write videos."""

import argparse
import contextlib
import csv
import dataclasses
import datetime
import functools
import json
import math
import secrets
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.action_spaces import check_spaces
from core.environments.stepping import Environments
from core.errors import ConfigError, EnvError, MakeError, one_line
from core.nests import Nest, describe, map_nest
from core.rollout import NET_INPUTS, Spaces
from core.running import checkpoint, common_flags, dashboard, folder
from core.running.randomness import keep_torch, seed_rng
from core.running.resume import name_changed_flags
from core.running.unit import limit_calls

# Maps (row [1, ...], recurrent state) to (actions [1, ...], new recurrent state).
Policy = Callable[[Nest, Any], tuple[Nest, Any]]


@torch.inference_mode()
def act(net: Any, row: Nest, state: Any, *, greedy: bool) -> tuple[Nest, Any]:
    """Choose an action with a trainer's Net: a `Policy`, given `net` and `greedy`."""
    inputs = {key: row[key] for key in NET_INPUTS}
    rows = map_nest(lambda x: torch.from_numpy(x).unsqueeze(0), inputs)
    outputs, state = net(rows, state)
    chosen = net.distribution.draw(outputs["policy_logits"], inputs=rows, greedy=greedy)
    return map_nest(lambda x: x[0].numpy(), chosen["action"]), state


@dataclasses.dataclass
class Game:
    """The result of one full game: all lives, up to the game's end or time limit."""

    game_return: float  # Sum of unclipped rewards.
    steps: int  # Agent steps.
    life_returns: list[float]  # One per episode. A lost life may end an episode.


def play(
    envs: Environments,
    policy: Policy,
    state: Any,
    *,
    num_games: int,
    video_dir: Path | None = None,
) -> Iterator[Game]:
    """Play `num_games` games one after another; yield each as it ends.

    Args:
      envs: holds one environment. With `video_dir`, its render mode is "rgb_array".
      state: the recurrent state before the first game.
      video_dir: the folder for game-000.mp4, game-001.mp4 and so on, which is created
        if it is missing. None to write no videos.

    Raises:
      ConfigError: the environment draws no pictures for a video.
    """
    assert len(envs.envs) == 1, len(envs.envs)
    row = envs.zero_rows()
    with keep_torch():
        envs.reset(row)
    for number in range(num_games):
        lives: list[float] = []
        with contextlib.ExitStack() as stack:
            add_frame = None
            while True:
                if video_dir is not None:
                    picture = _draw(envs)
                    if add_frame is None:
                        path = video_path(video_dir, number)
                        add_frame = stack.enter_context(_video(path, envs.envs[0]))
                    add_frame(picture)
                actions, state = policy(row, state)
                with keep_torch():
                    envs.step(actions, row)
                ended = not math.isnan(row["info"]["game_return"][0])
                if row["truncated"][0] or row["done"][0]:
                    lives.append(float(row["episode_return"][0]))
                if ended:
                    break
        info = row["info"]
        yield Game(float(info["game_return"][0]), int(info["game_step"][0]), lives)
        if row["truncated"][0]:  # The next step executes no action; it resets.
            actions, state = policy(row, state)
            with keep_torch():
                envs.step(actions, row)


def _draw(envs: Environments) -> np.ndarray:
    """Return a frame for a video: [H, W], or [H, W, C] with C = 1, 3 or 4."""
    try:
        drawn = envs.render()
    except EnvError as error:
        if not isinstance(error.__cause__, NotImplementedError):
            raise
        raise ConfigError("--video: the environment has no render()") from error
    picture = np.asarray(drawn)
    is_right = picture.ndim == 2 or (
        picture.ndim == 3 and picture.shape[2] in (1, 3, 4)
    )
    if not is_right or not np.issubdtype(picture.dtype, np.number):
        why = ""
        if drawn is None:
            why = (
                ". Does create_env, or the function that --env names, take render_mode "
                "and pass it on?"
            )
        raise ConfigError(
            f"--video: the environment's render() returned {describe(drawn)}; "
            f"expected uint8[H,W,3], as for render_mode='rgb_array'{why}"
        )
    return picture


def video_path(video_dir: Path, number: int) -> Path:
    return video_dir / f"game-{number:03d}.mp4"


@contextlib.contextmanager
def _video(path: Path, env: Any) -> Iterator[Callable[[np.ndarray], None]]:
    """Open an mp4 file; yield the function that adds a frame, uint8 [H, W, 3]."""
    import imageio.v2 as imageio  # Imported here: only videos need this package.

    path.parent.mkdir(parents=True, exist_ok=True)
    fps = env.metadata.get("render_fps") or 30
    try:
        fps = float(fps)
    except (TypeError, ValueError):
        raise ConfigError(
            f"--video: the environment's metadata['render_fps'] is {fps!r}; expected "
            "frames per second, such as 30"
        ) from None
    path.open("wb").close()  # ffmpeg's error would be forty lines.

    def add_frame(picture: np.ndarray) -> None:
        try:
            writer.append_data(picture)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--video: cannot add a frame, {describe(picture)}, to {path}: "
                f"{one_line(str(error))}. Is the disk full, or have the frames "
                "different sizes?"
            ) from error

    # H.264 needs an even width and height. imageio's default, multiples of 16, would
    # stretch the frames of Atari games.
    writer = imageio.get_writer(path, fps=fps, macro_block_size=2)
    with contextlib.closing(writer):
        yield add_frame
    print(f"Wrote {path}", flush=True)


def _between_calls(games: Iterator[Game], clock: np.ndarray) -> Iterator[Game]:
    """Yield the games; stop the clock of `limit_calls` while the caller uses one."""
    for game in games:
        clock[0] = 0.0
        yield game
    clock[0] = 0.0


def report(
    games: Iterator[Game], run_dir: Path, *, step: int, settings: dict[str, Any]
) -> None:
    """Print each game when it ends; then print statistics of all games.

    Each game is also written to `run_dir/test-<time>.csv` as a row. The last two lines
    show the statistics (mean, standard error, minimum and maximum of the return): first
    as text, then as one JSON object with the keys `episodes` (number of full games),
    `mean_return`, `stderr` and more.

    Args:
      step: the step of the checkpoint.
      settings: additional entries of the JSON object, such as the seed.
    """
    played: list[Game] = []
    now = datetime.datetime.now()  # With microseconds: tests may start together.
    path = run_dir / f"test-{now:%Y%m%d-%H%M%S-%f}.csv"
    with path.open("x", newline="") as file:
        table = csv.writer(file)
        table.writerow(["game", "return", "steps", "episodes", "mean_life_return"])
        for game in games:
            played.append(game)
            num_lives = len(game.life_returns)
            per_life = statistics.fmean(game.life_returns)
            row = (len(played) - 1, game.game_return, game.steps, num_lives, per_life)
            table.writerow(row)
            file.flush()
            print(
                f"Game {len(played)}: return {game.game_return:g} in {game.steps} "
                f"steps, {num_lives} episode(s) of mean return {per_life:g}",
                flush=True,
            )
    returns = [game.game_return for game in played]
    lives = [r for game in played for r in game.life_returns]
    spread = statistics.stdev(returns) if len(returns) > 1 else 0.0
    result = {
        "episodes": len(returns),
        "mean_return": statistics.fmean(returns),
        "stderr": spread / math.sqrt(len(returns)),
        "min": min(returns),
        "max": max(returns),
        "mean_life_return": statistics.fmean(lives),
        "mean_steps": statistics.fmean(game.steps for game in played),
        "step": step,
        "csv": file.name,
        **settings,
    }
    print(
        f"{result['episodes']} full games: mean return {result['mean_return']:.2f} +- "
        f"{result['stderr']:.2f} (standard error), min {result['min']:g}, max "
        f"{result['max']:g}; per life {result['mean_life_return']:.2f}"
    )
    print(json.dumps(result))


def test_run(
    flags: argparse.Namespace,
    *,
    create_envs: Callable[..., Environments],
    env_options: Callable[[Any], Mapping[str, Any]],
    create_net: Callable[[Spaces], Any],
) -> None:
    """Play --num_episodes full games with a run's newest checkpoint; report the games.

    Args:
      create_envs: function that creates one environment. It is called with
        `render_mode` and with keyword arguments for `Environments`.
      env_options: function that returns the options of that environment.
      create_net: function that creates the network for an environment's spaces.

    Raises:
      ConfigError: there is no checkpoint, or the environment cannot be created, or no
        policy can act in its action space.
      CheckpointError: there are checkpoints, but none is good.
      CheckpointMismatch: the checkpoint is of another network.
    """
    run_dir = common_flags.run_dir_to_test(flags)
    found = checkpoint.load(run_dir / "checkpoints")
    if found is None:
        raise ConfigError(
            f"{run_dir} holds no checkpoint yet. Train until the first checkpoint is "
            "written (--checkpoint_interval_s), without --disable_checkpoint."
        )
    for line in found.rejected:
        print(f"Checkpoint not used: {line}")
    render_mode = None
    if flags.mode == "test_render":
        render_mode = "human"
    elif flags.video:
        render_mode = "rgb_array"
    seed = flags.seed if flags.seed is not None else secrets.randbelow(2**31)
    seed_rng(seed)
    limit = limit_calls(flags.env_step_timeout_s, at_terminal=False)
    with limit as clock, contextlib.ExitStack() as stack:
        options = {"seed": seed, "seed_every_game": True, "clock": clock}
        try:
            with keep_torch():
                envs = create_envs(render_mode=render_mode, **options)
        except MakeError as error:
            raise ConfigError(str(error)) from error
        stack.enter_context(contextlib.closing(envs))
        made_for = envs.envs[0].render_mode
        if render_mode == "human" and made_for != render_mode:
            print(
                f"Maybe no window: the environment has render_mode {made_for!r}, not "
                "'human'. Does create_env pass render_mode on?"
            )
        check_spaces(envs.observation_space, envs.action_space)
        net = create_net(Spaces(envs.observation_space, envs.action_space))
        # A published checkpoint has few flags, but its meta.json has all.
        recorded = folder.recorded_meta(run_dir).get("flags", {})
        with name_changed_flags(flags, recorded):
            net.load_state_dict(checkpoint.weights_for(net, found))
        net.eval()  # No dropout. In a run, actors and learner are in training mode.
        env = env_options(envs.envs[0]).get("create_env", flags.env)
        print(f"Playing {flags.num_episodes} games of {env} with {found.path}")
        video_dir = run_dir / "video" if flags.video else None
        games = play(
            envs,
            functools.partial(act, net, greedy=flags.greedy),
            net.initial_state(1),
            num_games=flags.num_episodes,
            video_dir=video_dir,
        )
        report(
            _between_calls(games, clock),
            run_dir,
            step=found.step,
            settings={"env": env, "greedy": flags.greedy, "seed": seed},
        )
        if video_dir is not None:
            last = video_path(video_dir, flags.num_episodes - 1)
            dashboard.show_video(last, found.step)
