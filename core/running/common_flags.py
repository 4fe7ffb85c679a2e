# SPDX-License-Identifier: Apache-2.0
"""Flags that more than one program has, each declared once, and their checks.

Needs neither torch nor a compiler: the environment servers parse flags too.
"""

import argparse
import importlib.util
import os
import re
import secrets
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from core import flag_types, ranks
from core.flag_types import folder_path, int_at_least, names, number
from core.rollout import new_rollouts
from core.running import folder
from core.running.machine import num_cores

ENV = "PongNoFrameskip-v4"  # If neither --env nor a server names an environment.
MAX_NAME_NBYTES = 200  # For the name of a run's folder. Most file systems allow 255.
REPLAY_BATCHES = 10  # Default of --replay_capacity, in batches.


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("run")
    run.add_argument(
        "--mode",
        choices=["train", "test", "test_render"],
        default="train",
        help="train: train a run. test: play full games with its newest checkpoint. "
        "test_render: show these games in a window",
    )
    run.add_argument(
        "--xpid",
        help="name of the run, a folder in --savedir. An existing run is resumed. "
        "'{env}' is replaced by the name of the environment. Default: a time stamp "
        "when training, the latest run when testing",
    )
    run.add_argument(
        "--savedir",
        type=folder_path,
        default="~/logs/torchbeast",
        help="folder that holds the runs",
    )
    run.add_argument(
        "--seed",
        type=int_at_least(0),
        help="seed of environments, weights and sampled actions. Default: drawn at "
        "random, and recorded in meta.json",
    )
    run.add_argument(
        "--init_from",
        metavar="CHECKPOINT_OR_RUN",
        help="start a new run with the weights of another run: a checkpoint file, the "
        "folder of a run, or a run's name in --savedir. Steps, optimizer and log start "
        "from scratch. Ignored if the run already has checkpoints of its own",
    )
    run.add_argument(
        "--disable_checkpoint",
        action="store_true",
        help="write no checkpoints: nothing can be resumed or tested",
    )
    run.add_argument(
        "--checkpoint_interval_s",
        type=number(0),
        default=600.0,
        help="seconds between checkpoints. There is also one after the first update, "
        "and one at the end",
    )
    run.add_argument(
        "--log_interval_s",
        type=number(0),
        default=5.0,
        help="seconds between rows of logs.csv",
    )
    run.add_argument(
        "--info_keys",
        type=names,
        default=(),
        help="comma-separated names of scalar entries of the environment's info to log",
    )
    run.add_argument(
        "--stall_timeout_s",
        type=number(1),
        default=300.0,
        help="if the step count does not change for this long, the run logs what it "
        "waits for and all stacks; then --on_stall decides",
    )
    run.add_argument(
        "--on_stall",
        choices=["stop", "wait"],
        default="stop",
        help="stop: write a checkpoint and end the run with a non-zero status. wait: "
        "keep waiting, and log this again every --stall_timeout_s",
    )
    run.add_argument("--wandb", action="store_true", help="log to Weights & Biases")
    _add_test_flags(run)


def _add_test_flags(run: Any) -> None:
    run.add_argument(
        "--num_episodes",
        type=int_at_least(1),
        default=10,
        help="test: number of full games to play",
    )
    run.add_argument(
        "--greedy",
        action="store_true",
        help="test: take the most likely action instead of sampling as in training",
    )
    run.add_argument(
        "--video",
        action="store_true",
        help="test: write every game to an mp4 file in the run's folder",
    )


def add_environment_flags(parser: argparse.ArgumentParser) -> None:
    env = parser.add_argument_group("environment")
    env.add_argument(
        "--env",
        help="a Gymnasium id, 'package.module:function', 'gym:ID' for classic gym, or "
        f"the built-in Catch or Memory. Default: {ENV}; PolyBeast with "
        "--server_addresses or --listen: what the servers play",
    )
    env.add_argument(
        "--env_step_timeout_s",
        type=number(1),
        default=120.0,
        help="limit in seconds for one call of an environment: constructor, reset, "
        "step, close. If a call takes longer, its process shows its stacks, is killed "
        "and is replaced. A learner connects again if a server does not answer within "
        "this limit times --envs_per_stream, plus 2 seconds",
    )
    env.add_argument(
        "--recycle_games",
        type=int_at_least(0),
        default=0,
        metavar="N",
        help="close each environment after N full games and create a new one, for "
        "simulators that leak memory; 0: never",
    )
    atari = parser.add_argument_group("environment, Atari only")
    atari.add_argument(
        "--atari_protocol",
        choices=["impala", "machado"],
        help="impala (the default): a lost life ends the episode, minimal actions, no "
        "sticky actions. machado (Machado et al. 2018): full games, all 18 actions, "
        "sticky actions with probability 0.25. The flags below override parts of this",
    )
    atari.add_argument(
        "--episodic_life",
        action=argparse.BooleanOptionalAction,
        help="end the agent's episode when a life is lost",
    )
    atari.add_argument(
        "--sticky_actions",
        type=number(0, 1),
        metavar="P",
        help="probability that the emulator repeats the previous action",
    )
    atari.add_argument(
        "--full_action_space",
        action=argparse.BooleanOptionalAction,
        help="all 18 actions instead of those the game uses",
    )
    atari.add_argument(
        "--noop_max",
        type=int_at_least(0),
        metavar="N",
        help="up to N no-op actions after a reset (default 30; machado: 0)",
    )
    atari.add_argument(
        "--frame_skip",
        type=int_at_least(1),
        metavar="N",
        help="emulator frames per agent step (default 4)",
    )


def environment_flags() -> list[argparse.Action]:
    """Return the flags that `add_environment_flags` declares, also those of a fork."""
    parser = argparse.ArgumentParser(add_help=False)
    add_environment_flags(parser)
    return parser._actions


# A network's parameters and buffers depend on these flags and on the environment.
NETWORK_FLAGS = ("model", "use_lstm", "normalize_observations", "normalize_returns")


ATARI_FLAGS = (
    "atari_protocol",
    "episodic_life",
    "sticky_actions",
    "full_action_space",
    "noop_max",
    "frame_skip",
)


def add_learner_flags(parser: argparse.ArgumentParser) -> None:
    learner = parser.add_argument_group("learner")
    learner.add_argument(
        "--total_steps",
        type=int_at_least(1),
        default=50_000_000,
        help="agent steps to train for. All flags that are whole numbers accept "
        "200000, 200_000, 200k and 0.2M",
    )
    learner.add_argument(
        "--batch_size",
        type=int_at_least(1),
        default=32,
        metavar="B",
        help="rollouts per batch; with --replay_ratio this counts new and replayed "
        "rollouts",
    )
    learner.add_argument(
        "--unroll_length",
        type=int_at_least(1),
        default=20,
        metavar="T",
        help="steps per rollout",
    )
    learner.add_argument(
        "--num_learner_threads",
        "--num_threads",
        type=int_at_least(1),
        help="threads that assemble batches and learn; only one at a time computes a "
        "gradient step. Default: 2; 1 with MonoBeast's --serial",
    )
    learner.add_argument(
        "--learner_cores",
        type=int_at_least(1),
        metavar="N",
        help="CPU cores that a gradient step uses. Default: all for --model deep, else "
        "half of them; 1 with MonoBeast's --serial",
    )
    learner.add_argument(
        "--disable_cuda", action="store_true", help="use the CPU even with a GPU"
    )
    _add_network_flags(learner)
    _add_replay_flags(learner)


def _add_network_flags(learner: Any) -> None:
    learner.add_argument(
        "--model",
        choices=["auto", "deep", "shallow", "small", "mlp", "tanh"],
        default="auto",
        help="deep: the IMPALA paper's residual network. shallow: three convolutions. "
        "small: one convolution, for pictures of less than 36 pixels a side. mlp: any "
        "small observation. tanh, for continuous control: like mlp, but with two tanh "
        "layers of 64 units for the policy and two for the baseline (with --use_lstm "
        "two for both). auto: shallow or small for pictures, else mlp",
    )
    learner.add_argument(
        "--use_lstm", action="store_true", help="add a recurrent core to the network"
    )
    learner.add_argument(
        "--precision",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="number format in which the network's torso computes; weights, losses, "
        "LSTM and optimizer stay float32. auto: bfloat16 if the torso has convolutions "
        "and all processors that it computes on have instructions for bfloat16 (CPUs "
        "with AVX512-BF16 or AMX, GPUs since Ampere), else float32. The run's first "
        "log lines name the format. A resumed run, and its tests, use the format in "
        "its meta.json",
    )
    learner.add_argument(
        "--normalize_observations",
        action="store_true",
        help="subtract the running mean of each observed float, divide by its running "
        "standard deviation and clip to [-10, 10]. With --reward_clipping none, do "
        "the same with the last reward. The statistics are over all rows learned "
        "from. Integers and Discrete values stay as they are",
    )
    learner.add_argument(
        "--disable_cuda_graphs",
        action="store_true",
        help="launch the network's GPU operations one by one. Usually they are "
        "recorded once and then replayed, which is faster: for inference (PolyBeast), "
        "and for the gradient unless --use_lstm is set. Use this flag if forward or "
        "the loss depend on Python values that change, or wait for the GPU (.item())",
    )
    learner.add_argument(
        "--initial_action_std",
        type=number(1e-4),
        default=1.0,
        metavar="STD",
        help="initial standard deviation of continuous actions (a Box), in units in "
        "which a bounded action space is [-1, 1]",
    )


def _add_replay_flags(learner: Any) -> None:
    learner.add_argument(
        "--replay_ratio",
        type=number(0),
        default=0,
        metavar="R",
        help="learn from rollouts again: a batch has R replayed rollouts for every new "
        "one, so B / (1 + R) new ones. Replayed rollouts are drawn uniformly from the "
        "last --replay_capacity rollouts. There are 1 + R times as many updates per "
        "step; steps, frames and episodes count new rollouts only. The first batches "
        "after a start or a resume have new rollouts only",
    )
    learner.add_argument(
        "--replay_capacity",
        type=int_at_least(1),
        metavar="N",
        help="with --replay_ratio: number of latest rollouts that are kept in memory "
        f"for replay. Default: {REPLAY_BATCHES} x --batch_size",
    )


def add_loss_flags(parser: argparse.ArgumentParser) -> None:
    loss = parser.add_argument_group("loss (sums over T and B)")
    loss.add_argument(
        "--max_policy_lag",
        type=int_at_least(0),
        metavar="UPDATES",
        help="skip and count rollouts if the weights that chose their first action are "
        "more than this many updates old; the column policy_lag_max shows the largest "
        "lag. Replayed rollouts are skipped by the same rule, but not counted. "
        "Default: learn from all rollouts, since V-trace corrects for the lag",
    )
    loss.add_argument(
        "--entropy_cost",
        type=number(0),
        default=0.01,
        help="weight of the entropy bonus",
    )
    loss.add_argument(
        "--baseline_cost",
        type=number(0),
        default=0.5,
        help="weight of the baseline loss, which is half the squared error",
    )
    loss.add_argument(
        "--discounting", type=number(0, 1), default=0.99, help="discount per step"
    )
    loss.add_argument(
        "--vtrace_lambda",
        type=number(0, 1),
        default=1.0,
        help="lambda of V-trace (Remark 2 of the paper): below 1, value targets rely "
        "more on the baseline and less on later rewards of the rollout",
    )
    loss.add_argument(
        "--reward_clipping",
        choices=["abs_one", "none"],
        default="abs_one",
        help="abs_one: clip rewards to [-1, 1] in the loss and in the network's input. "
        "none: leave them as they are",
    )
    loss.add_argument(
        "--normalize_returns",
        action="store_true",
        help="divide advantages and the errors of the baseline by the running standard "
        "deviation of the value targets (PopArt). Then --entropy_cost and "
        "--learning_rate need not change with the size of rewards, as long as that "
        "deviation is between 1e-4 and 1e6. Use it with --reward_clipping none",
    )


def add_optimizer_flags(parser: argparse.ArgumentParser) -> None:
    optimizer = parser.add_argument_group("optimizer (RMSProp)")
    optimizer.add_argument(
        "--learning_rate",
        type=number(0),
        default=0.0006,
        help="learning rate at the start; it falls linearly to 0 over --total_steps",
    )
    optimizer.add_argument(
        "--alpha", type=number(0, 1), default=0.99, help="RMSProp smoothing constant"
    )
    optimizer.add_argument(
        "--momentum", type=number(0, 1), default=0.0, help="RMSProp momentum"
    )
    optimizer.add_argument(
        "--epsilon",
        type=number(1e-10),  # At 0 a gradient of 0 would make a weight NaN.
        default=0.01,
        help="RMSProp epsilon, added outside the square root",
    )
    optimizer.add_argument(
        "--grad_norm_clipping",
        type=number(0),
        default=40.0,
        help="largest global gradient norm; 0 turns clipping off",
    )


def has_remote_servers(flags: argparse.Namespace) -> bool:
    """Return whether other programs run the environment servers."""
    given = (getattr(flags, name, None) for name in ("server_addresses", "listen"))
    return any(value is not None for value in given)


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the command line of a trainer.

    In the test modes, flags default to those in the run's meta.json, also flags of a
    fork, except for `flags_to_train`. `env` is None if --env is not given and other
    programs run the environment servers: then the servers name the environment.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    flags = parser.parse_args(argv)
    ranks.take_share(parser, flags)
    if flags.mode == "train":
        if not has_remote_servers(flags):
            flags.env = flags.env or ENV
        return flags
    try:
        run_dir = run_dir_to_test(flags)
    except ValueError as error:
        parser.error(str(error))
    if not (run_dir / "meta.json").is_file():
        parser.error(
            f"--mode is {flags.mode} but {run_dir} holds no run. Name one that has "
            "been trained with --xpid and --savedir."
        )
    meta = folder.read_meta(run_dir)
    trained = meta["flags"]
    # The options of a remote server override the recorded flags of the environment.
    told = meta.get("env_options", {})
    told = {a.dest: told[a.dest] for a in environment_flags() if a.dest in told}
    used = {**trained, **told}
    # --atari_protocol, if given, defines all Atari options.
    skip = flags_to_train() | {*(ATARI_FLAGS if flags.atari_protocol else ())}
    for action in parser._actions:
        if action.dest in used.keys() - skip:
            value, old = used[action.dest], action.default
            is_tuple = isinstance(value, list) and isinstance(old, tuple)
            action.default = tuple(value) if is_tuple else value  # JSON has only lists.
    flags = parser.parse_args(argv)
    flags.env = flags.env or ENV
    if flags.precision == "auto":  # Older runs used float32 and did not record it.
        flags.precision = trained.get("precision", "float32")
    return flags


def flags_to_train() -> set[str]:
    """Return the names of the flags that a test does not take from the run.

    These are the flags of the group "run", those that only one of the two programs has,
    and the numbers of actors, threads and cores.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_run_flags(parser)
    sizes = {"num_actors", "num_learner_threads", "learner_cores"}
    return sizes.union((a.dest for a in parser._actions), *flag_types.ONLY_IN.values())


def run_dir_to_test(flags: argparse.Namespace) -> Path:
    """Return the folder of the run that `--mode test` plays.

    Raises:
      ValueError: --xpid cannot be the name of a run.
    """
    xpid = "latest" if flags.xpid is None else expand_xpid(flags, flags.env or ENV)
    return Path(os.path.realpath(Path(flags.savedir) / xpid))


def expand_xpid(flags: argparse.Namespace, env: str | None) -> str:
    """Return --xpid, with `{env}` replaced by `env` unless `env` is None.

    Raises:
      ValueError: the result cannot be the name of a run.
    """
    xpid = flags.xpid
    if env is not None:
        xpid = xpid.replace("{env}", re.sub("[/:]", "-", env))
    if "/" in xpid or xpid in ("", ".", ".."):
        raise ValueError(
            f"--xpid is {xpid!r} but must be a plain folder name inside --savedir. Put "
            "the path into --savedir."
        )
    nbytes = len(os.fsencode(xpid))
    if nbytes > MAX_NAME_NBYTES:
        raise ValueError(
            f"--xpid has {nbytes} bytes but must have at most {MAX_NAME_NBYTES}: it is "
            "the name of a folder. Choose a shorter one."
        )
    if flags.mode == "train" and xpid == "latest":
        raise ValueError(
            "--xpid is 'latest', the name of the link to the latest run in --savedir. "
            "Choose another name."
        )
    return xpid


def check_atari_flags(
    parser: argparse.ArgumentParser, flags: argparse.Namespace, *, is_atari: bool
) -> None:
    """Refuse flags for Atari (exit status 2) if the environment is not Atari."""
    if is_atari:
        return
    for flag in ATARI_FLAGS:
        value = getattr(flags, flag)
        # The default is the run's, whose create_env may have made a game all the same.
        if value not in (None, parser.get_default(flag)):
            parser.error(
                f"--{flag} is {value} but --env is {flags.env}, which is not an Atari "
                f"game that ale-py (if it is installed) knows. Leave --{flag} out."
            )


def check_replay(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Check the flags about replay (exit status 2); set the default capacity."""
    R, N, B = flags.replay_ratio, flags.replay_capacity, flags.batch_size
    if R == 0:
        if N is not None:
            parser.error(
                f"--replay_capacity is {N} but --replay_ratio is 0: nothing would be "
                "replayed. Add --replay_ratio 1, or leave --replay_capacity out."
            )
        return
    new = new_rollouts(flags)
    if abs(new - B / (1 + R)) > 0.01 or not 0 < new < B:
        share = max(Fraction(R).limit_denominator(1000), Fraction(1, 1000))
        unit = 4 * (share.numerator + share.denominator)
        parser.error(
            f"--replay_ratio is {R:g} and --batch_size is {B}, which makes "
            f"{B / (1 + R):.2f} new rollouts and {B - B / (1 + R):.2f} replayed ones "
            "in a batch, but both must be whole numbers. Try --batch_size "
            f"{unit * max(1, round(B / unit))}."
        )
    if N is None:
        flags.replay_capacity = REPLAY_BATCHES * B
    elif N < B:
        parser.error(
            f"--replay_capacity is {N} but must be at least --batch_size ({B}): each "
            f"batch draws from it. Try --replay_capacity {REPLAY_BATCHES * B}."
        )


def check_common(
    parser: argparse.ArgumentParser, flags: argparse.Namespace, *, is_atari: bool
) -> None:
    """Check the flags that both trainers have (exit status 2); set their defaults."""
    check_atari_flags(parser, flags, is_atari=is_atari)
    for key in ("game_return", "game_step"):
        if key in flags.info_keys:
            parser.error(
                f"--info_keys has {key!r}, but rows use this name for the result of a "
                "full game. Leave it out, or rename it in the environment."
            )
    if flags.mode != "train" and flags.init_from is not None:
        parser.error(
            f"--init_from is {flags.init_from} but --mode is {flags.mode}: it is for "
            "training. Name the run to test with --xpid."
        )
    for flag in ("video", "greedy"):
        if flags.mode == "train" and getattr(flags, flag):
            parser.error(
                f"--{flag} is set but --mode is train: it is for testing. Add --mode "
                "test, or leave it out."
            )
    if flags.wandb and not getattr(importlib.util.find_spec("wandb"), "origin", None):
        parser.error("--wandb needs a package. Run `pip install wandb`.")
    if flags.mode == "test_render" and flags.video:
        parser.error(
            "--video is set but --mode is test_render: games go to a window or to "
            "files. Use --mode test --video."
        )
    if flags.xpid is not None:
        try:
            flags.xpid = expand_xpid(flags, flags.env)
        except ValueError as error:
            parser.error(str(error))
    elif flags.mode == "train":
        # Two runs may start in the same second.
        unique = secrets.token_hex(2)
        flags.xpid = time.strftime(f"torchbeast-%Y%m%d-%H%M%S-{unique}")
    check_replay(parser, flags)
    B, T = new_rollouts(flags) * ranks.size(), flags.unroll_length  # Of all learners.
    if flags.mode == "train" and flags.total_steps < B * T:
        parser.error(
            f"--total_steps is {flags.total_steps} but one batch has --batch_size "
            f"({B}{' new ones' if flags.replay_ratio else ''}) x --unroll_length ({T}) "
            f"= {B * T} steps. Raise --total_steps."
        )
    if flags.learner_cores is None:
        # Acting needs about half of the cores.
        share = 1 if flags.model == "deep" else 2
        flags.learner_cores = max(1, num_cores() // share)
