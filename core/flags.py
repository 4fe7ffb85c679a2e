# SPDX-License-Identifier: Apache-2.0
"""Flags that more than one program has, each declared once, and their checks.

Needs neither torch nor a compiler: the environment servers parse flags too.
"""

import argparse
import decimal
import difflib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from core.supervise import num_cores

MAX_WHOLE = 10**18  # Fits into 64 bits, and 1e999999 does not take all the memory.
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
ENVS_PER_ACTOR = 8  # Unless flags say otherwise.
ENV = "PongNoFrameskip-v4"  # Where neither --env nor a server says another.
# Of two programs that share most of their flags, for who gives one to the other.
ONLY_IN = {
    "MonoBeast (python -m monobeast)": (
        "envs_per_actor",
        "num_buffers",
        "serial",
        "start_method",
    ),
    "PolyBeast (python -m polybeast)": (
        "actor_device",
        "envs_per_stream",
        "insecure",
        "keepalive_s",
        "learner_device",
        "max_learner_queue_size",
        "num_inference_threads",
        "num_servers",
        "pipes_basename",
        "server_addresses",
        "streams_per_server",
        "tls_dir",
        "write_profiler_trace",
    ),
}
MAX_NAME_NBYTES = 200  # Of a run's folder: file systems take 255, most of them.


def whole(at_least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers >= `at_least`, for `type=`.

    200000, 200_000, 2e5, 200k and 0.2M are the same number.
    """

    def parse(text: str) -> int:
        match = re.fullmatch(r"([\d_]*\.?\d+(?:[eE]\+?\d+)?)([kMG]?)", text, re.ASCII)
        value = decimal.Decimal(-1)
        if match is not None:
            value = decimal.Decimal(match[1].replace("_", "")) * UNITS[match[2]]
        if not at_least <= value <= MAX_WHOLE or value % 1:
            raise argparse.ArgumentTypeError(
                f"expected a whole number >= {at_least} (and at most 10^18), such as "
                f"20000, 20_000, 2e4, 20k or 1.5M, got {text!r}"
            )
        return int(value)

    return parse


def number(low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return a parser of finite numbers in [low, high], for `type=`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and math.isfinite(value)):
            bounds = f">= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
            raise argparse.ArgumentTypeError(
                f"expected a number {bounds}, got {text!r}"
            )
        return value

    return parse


def names(text: str) -> tuple[str, ...]:
    """Parse a comma list of names, for `type=`."""
    result = tuple(name for name in text.split(",") if name)
    for name in result:
        if result.count(name) > 1:
            raise argparse.ArgumentTypeError(
                f"expected each name once, got {name!r} twice"
            )
    return result


def addresses(text: str) -> tuple[str, ...]:
    """Parse a comma list of server addresses with ranges, for `type=`.

    "a:1-3,unix:/b.0-1" is a:1, a:2, a:3, unix:/b.0 and unix:/b.1.
    """
    result: list[str] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(unix:/.*?|.*:)(?:(\d+)-)?(\d+)", part)
        if part.startswith("unix:/") and (match is None or match[2] is None):
            result.append(part)  # A path that ends in a number is not a range.
            continue
        if match is None or part.startswith(":"):
            raise argparse.ArgumentTypeError(
                f"expected host:port, host:4431-4446, unix:/path or unix:/path.0-15, "
                f"got {part!r}"
            )
        last = int(match[3])
        first = last if match[2] is None else int(match[2])
        if first > last:
            raise argparse.ArgumentTypeError(
                f"expected a range from low to high, got {part!r}"
            )
        if not (1 <= first and last <= 65535 or part.startswith("unix:")):
            raise argparse.ArgumentTypeError(
                f"expected ports from 1 to 65535, got {part!r}"
            )
        result += [f"{match[1]}{i}" for i in range(first, last + 1)]
    for address in result:
        if result.count(address) > 1:
            raise argparse.ArgumentTypeError(
                f"expected each address once, got {address} twice"
            )
    if not result:
        raise argparse.ArgumentTypeError(f"expected an address, got {text!r}")
    return tuple(result)


def to_argv(flags: argparse.Namespace, keys: Sequence[str]) -> list[str]:
    """Return the command line that sets `keys` as `flags` has them."""
    argv = []
    for key in keys:
        match getattr(flags, key):
            case None:
                pass
            case bool(value):
                argv.append(f"--{key}" if value else f"--no-{key}")
            case tuple(value):
                argv.append(f"--{key}={','.join(value)}")
            case value:
                argv.append(f"--{key}={value}")
    return argv


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command line, and where help is."""

    def parse_args(self, args=None, namespace=None):
        flags, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0].partition("=")[0]))
        return flags

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: error: {message}{end} See {self.prog} --help\n")

    def _unknown(self, flag: str) -> str:
        if not flag.startswith("-"):
            return f"{flag!r} belongs to no flag"
        for program, flags in ONLY_IN.items():
            if flag.lstrip("-") in flags:
                return f"{flag} is for {program} only"
        known = [name.lstrip("-") for name in self._option_string_actions]
        near = difflib.get_close_matches(flag.lstrip("-"), known, n=1)
        did_you_mean = "".join(f". Did you mean --{name}?" for name in near)
        return f"there is no flag {flag}{did_you_mean}"


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not 'None', 'False' or '()', which say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == ():
            return action.help
        return super()._get_help_string(action)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("run")
    run.add_argument(
        "--mode",
        choices=["train", "test", "test_render"],
        default="train",
        help="train; play full games with a run's newest checkpoint; or show them in a "
        "window",
    )
    run.add_argument(
        "--xpid",
        help="name of the run, a folder in --savedir. An existing run goes on where it "
        "stopped. '{env}' becomes the name of the environment. Default: a time stamp "
        "when training, the latest run when testing",
    )
    run.add_argument(
        "--savedir", default="~/logs/torchbeast", help="folder that holds the runs"
    )
    run.add_argument(
        "--seed",
        type=whole(0),
        help="what environments, weights and sampled actions are seeded with. Default: "
        "drawn at random, and recorded in meta.json",
    )
    run.add_argument(
        "--init_from",
        metavar="CHECKPOINT_OR_RUN",
        help="begin a new run with the weights of another: the folder of a run or of "
        "one of its checkpoints, or a run's name in --savedir. Steps, optimizer and "
        "log begin anew. A run that has checkpoints of its own goes on from those",
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
        help="seconds between checkpoints; there is one at every kind of end too",
    )
    run.add_argument(
        "--log_interval_s",
        type=number(0),
        default=5.0,
        help="seconds between rows of logs.csv",
    )
    run.add_argument(
        "--stall_timeout_s",
        type=number(1),
        default=300.0,
        help="a run whose step count stands still this long says what it waits for and "
        "dumps all stacks; then --on_stall decides",
    )
    run.add_argument(
        "--on_stall",
        choices=["stop", "wait"],
        default="stop",
        help="stop: write a checkpoint and end the run with a non-zero status. wait: "
        "go on waiting, and say so again every --stall_timeout_s",
    )
    run.add_argument(
        "--wandb",
        action="store_true",
        help="log to Weights & Biases too (pip install wandb)",
    )
    run.add_argument(
        "--num_episodes",
        type=whole(1),
        default=10,
        help="test: number of full games to play",
    )
    run.add_argument(
        "--greedy",
        action="store_true",
        help="test: take the likeliest action instead of sampling as in training",
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
        f"the built-in Catch or Memory. Default: {ENV}, or what the servers at "
        "--server_addresses serve",
    )
    env.add_argument(
        "--info_keys",
        type=names,
        default=(),
        help="comma list of scalar entries of the environment's info to log",
    )
    env.add_argument(
        "--env_step_timeout_s",
        type=number(1),
        default=120.0,
        help="an environment hangs if one call (constructor, reset, step or close) "
        "takes longer: its process shows its stacks, is killed and started again. A "
        "learner gives up on a server that takes longer still (this times the "
        "environments of a stream, and a little), and connects anew",
    )
    env.add_argument(
        "--recycle_games",
        type=whole(0),
        default=0,
        metavar="N",
        help="close each environment after N full games and make it anew, for "
        "simulators that leak; 0: never",
    )
    atari = parser.add_argument_group("environment, Atari only")
    atari.add_argument(
        "--atari_protocol",
        choices=["impala", "machado"],
        help="impala (the default): a lost life ends the episode, minimal actions, no "
        "sticky actions. machado (Machado et al. 2018): full games, all 18 actions, "
        "sticky actions with probability 0.25. The flags below change single points",
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
        type=whole(0),
        metavar="N",
        help="up to N no-op actions after a reset (default 30)",
    )
    atari.add_argument(
        "--frame_skip",
        type=whole(1),
        metavar="N",
        help="emulator frames per agent step (default 4)",
    )


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
        type=whole(1),
        default=50_000_000,
        help="agent steps to train for. 200000, 200_000, 2e5 and 200k are the same "
        "number, for every flag that counts",
    )
    learner.add_argument(
        "--batch_size", type=whole(1), default=32, metavar="B", help="rollouts a batch"
    )
    learner.add_argument(
        "--unroll_length",
        type=whole(1),
        default=20,
        metavar="T",
        help="steps per rollout",
    )
    learner.add_argument(
        "--num_learner_threads",
        "--num_threads",
        type=whole(1),
        help="threads that assemble batches; they take turns at the gradient step. "
        "Default: 2, but 1 with MonoBeast's --serial",
    )
    learner.add_argument(
        "--learner_cores",
        type=whole(1),
        metavar="N",
        help="CPU cores that a gradient step is spread over. Default: all for --model "
        "deep, else half; 1 with MonoBeast's --serial",
    )
    learner.add_argument(
        "--disable_cuda", action="store_true", help="learn on the CPU even with a GPU"
    )
    learner.add_argument(
        "--model",
        choices=["auto", "deep", "shallow", "small", "mlp"],
        default="auto",
        help="deep: the IMPALA paper's residual network. shallow: three convolutions. "
        "small: one, for pictures of less than 36 pixels a side. mlp: any small "
        "observation. auto: shallow or small for pictures, else mlp",
    )
    learner.add_argument(
        "--use_lstm", action="store_true", help="add a recurrent core to the network"
    )
    learner.add_argument(
        "--precision",
        choices=["float32", "bfloat16"],
        default="float32",
        help="what the network's torso computes in. bfloat16 is about 1.5 times as "
        "fast on CPUs that have it (AVX512-BF16, AMX); weights, losses, LSTM and "
        "optimizer stay float32",
    )
    learner.add_argument(
        "--cuda_graphs",
        action="store_true",
        help="record what the network does on a GPU once and replay it, which saves "
        "the time that Python takes to launch it: inference (PolyBeast), and the "
        "gradient unless --use_lstm. Not for networks that look at what tensors hold",
    )


def add_actor_flags(group: Any) -> None:
    """Declare how many environments MonoBeast has and where, in a parser's group."""
    group.add_argument(
        "--num_actors",
        type=whole(1),
        metavar="A",
        help="number of environments; the program chooses how many share a process, "
        "and says so at the start. With --envs_per_actor E: number of processes, of E "
        "environments each. Default: one process per core this program may use, of up "
        f"to {ENVS_PER_ACTOR} environments",
    )
    group.add_argument(
        "--envs_per_actor",
        type=whole(1),
        metavar="E",
        help="environments that an actor process steps in turn, with one forward pass "
        "for all. With it --num_actors counts processes, so there are A x E "
        "environments. Must divide --batch_size",
    )
    group.add_argument(
        "--num_buffers",
        type=whole(1),
        metavar="N",
        help="rollouts in shared memory, rounded up to a multiple of the environments "
        "in a process. More let actors run further ahead of the learner. Default: two "
        "per environment and two batches",
    )


def set_actors(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Work out MonoBeast's actor processes, their environments and the buffers.

    Afterwards `num_actors` counts processes of `envs_per_actor` environments each, so
    that the two together, as a command line, mean the same again. `num_buffers` counts
    rollouts. Exits with status 2 if they do not fit together.
    """
    A, B, E = flags.num_actors, flags.batch_size, flags.envs_per_actor
    if E is not None and B % E:
        parser.error(
            f"--batch_size is {B} but must be a multiple of --envs_per_actor ({E}): an "
            f"actor makes {E} rollouts at a time. Try --envs_per_actor "
            f"{divisor(B, at_most=E)}."
        )
    if E is not None:
        A = num_cores() if A is None else A
    elif A is None:
        A, E = num_cores(), divisor(B, at_most=ENVS_PER_ACTOR)
    else:
        # As few processes as keep all cores busy. In lock step one is, wherever the
        # run goes on.
        cores = 1 if flags.serial else num_cores()
        E = divisor(math.gcd(A, B), at_most=max(1, A // cores))
        A //= E
    flags.num_actors, flags.envs_per_actor = A, E
    advice = f"Try --num_buffers {2 * A * E + 2 * B}."
    if flags.num_buffers is None:
        flags.num_buffers = 2 * A * E + 2 * B
    if flags.num_buffers < A * E:
        parser.error(
            f"--num_buffers is {flags.num_buffers} but must be at least the number of "
            f"environments ({A * E}): each fills one. {advice}"
        )
    if flags.num_buffers < B:
        parser.error(
            f"--num_buffers is {flags.num_buffers} but must be at least --batch_size "
            f"({B}): a batch takes as many. {advice}"
        )


def divisor(number: int, *, at_most: int) -> int:
    """Return the largest divisor of `number` that is not above `at_most`."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)


def describe_actors(flags: argparse.Namespace) -> str:
    """Say how `set_actors` has laid out the environments."""
    A, E = flags.num_actors, flags.envs_per_actor
    where = "groups in one process" if flags.serial else "processes"
    return f"Actors: {A} {where}, environments in each: {E}, in all: {A * E}"


def add_server_flags(group: Any) -> None:
    """Declare what the learner and `polybeast_env` both have, in a parser's group."""
    group.add_argument(
        "--num_servers",
        type=whole(1),
        metavar="N",
        help="environment server processes on this machine. Default: one per core this "
        "process may use",
    )
    group.add_argument(
        "--envs_per_stream",
        type=whole(1),
        metavar="K",
        help="environments that a stream steps in turn, with one message for all. "
        "Default: 8, or the next lower divisor of a learner's --batch_size",
    )
    group.add_argument(
        "--streams_per_server",
        type=whole(1),
        metavar="S",
        help="streams that a server process has at the same time, each with K "
        "environments of its own: some step while others wait for actions. Default: 2",
    )
    group.add_argument(
        "--pipes_basename",
        metavar="unix:PATH",
        help="serve at the unix sockets PATH.0, PATH.1 and so on",
    )
    group.add_argument(
        "--tls_dir",
        metavar="DIR",
        help="encrypt TCP connections, and talk only to who shows a certificate of the "
        "same CA: a folder with ca.pem, cert.pem and key.pem, as python -m tools.certs "
        "makes them",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="talk to other machines without --tls_dir: whoever is on the way can read "
        "and change everything",
    )
    group.add_argument(
        "--keepalive_s",
        type=number(0.1),
        default=10.0,
        help="a machine that is frozen or cut off from the network is noticed within "
        "twice this time, by the learner and by the servers",
    )


def check_tls_flags(
    parser: argparse.ArgumentParser,
    flags: argparse.Namespace,
    addresses: Sequence[str],
) -> None:
    """Refuse TLS flags (exit status 2) that have no effect on these addresses."""
    if flags.tls_dir is None:
        return
    if flags.insecure:
        parser.error(
            f"--tls_dir is {flags.tls_dir} and there is --insecure: they contradict "
            "each other. Leave one out."
        )
    if all(address.startswith("unix:") for address in addresses):
        parser.error(
            f"--tls_dir is {flags.tls_dir} but is for TCP, and here are unix sockets "
            "only, which no other user can open. Leave it out."
        )


# What a learner passes on to the servers that it starts.
SERVER_FLAGS = (
    "env",
    *ATARI_FLAGS,
    "num_servers",
    "envs_per_stream",
    "streams_per_server",
    "env_step_timeout_s",
    "keepalive_s",
    "recycle_games",
)


def add_loss_flags(parser: argparse.ArgumentParser) -> None:
    loss = parser.add_argument_group("loss (sums over T and B)")
    loss.add_argument(
        "--max_policy_lag",
        type=whole(0),
        metavar="UPDATES",
        help="leave out, and count, rollouts whose first action was chosen by weights "
        "that have been updated more often since; the log's policy_lag_max shows what "
        "there is. Default: learn from all, V-trace corrects for their age",
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
        help="weight of the baseline loss, itself half the squared error",
    )
    loss.add_argument(
        "--discounting", type=number(0, 1), default=0.99, help="discount per step"
    )
    loss.add_argument(
        "--reward_clipping",
        choices=["abs_one", "none"],
        default="abs_one",
        help="clip rewards to [-1, 1] in the loss and in the network's input",
    )


def add_optimizer_flags(parser: argparse.ArgumentParser) -> None:
    optimizer = parser.add_argument_group("optimizer (RMSProp)")
    optimizer.add_argument(
        "--learning_rate",
        type=number(0),
        default=0.0006,
        help="at the start; falls linearly to 0 over --total_steps",
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


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the command line of a trainer.

    Testing takes what the run was trained with (environment, its options, model...)
    from its meta.json, unless the command line says otherwise. `env` is None if it is
    up to the servers at --server_addresses.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    flags = parser.parse_args(argv)
    if flags.mode == "train":
        if getattr(flags, "server_addresses", None) is None:
            flags.env = flags.env or ENV
        return flags
    from core import metrics  # Needs packages that environment servers do without.

    try:
        run_dir = run_dir_to_test(flags)
    except ValueError as error:
        parser.error(str(error))
    if not (run_dir / "meta.json").is_file():
        parser.error(
            f"--mode is {flags.mode} but {run_dir} holds no run. Name one that has "
            "been trained with --xpid and --savedir."
        )
    meta = metrics.read_meta(run_dir)
    trained = meta["flags"]
    keep = ("env", "model", "use_lstm", "precision", "reward_clipping")
    parser.set_defaults(**{key: trained[key] for key in keep if key in trained})
    if flags.atari_protocol is None:  # Else it says all of them.
        # A server's word outweighs the learner's flags. First, so that argv wins; and
        # as a command line, so that each has the type it must have.
        told = argparse.Namespace(**{**trained, **meta.get("env_options", {})})
        argv = [*to_argv(told, [k for k in ATARI_FLAGS if hasattr(told, k)]), *argv]
    flags = parser.parse_args(argv)
    flags.env = flags.env or ENV
    return flags


def run_dir_to_test(flags: argparse.Namespace) -> Path:
    """Return the folder of the run that `--mode test` plays.

    Raises:
      ValueError: --xpid cannot be the name of a run.
    """
    xpid = "latest" if flags.xpid is None else expand_xpid(flags, flags.env or ENV)
    return (Path(flags.savedir).expanduser() / xpid).resolve()


def expand_xpid(flags: argparse.Namespace, env: str | None) -> str:
    """Return --xpid, with the environment's name, once it is known, in {env}'s place.

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
    """Refuse flags for Atari games (exit status 2) where there is none."""
    if is_atari:
        return
    for flag in ATARI_FLAGS:
        value = getattr(flags, flag)
        if value is not None:
            parser.error(
                f"--{flag} is {value} but --env is {flags.env}, which is not an Atari "
                f"game made by ALE. Leave --{flag} out."
            )


def check_common(
    parser: argparse.ArgumentParser, flags: argparse.Namespace, *, is_atari: bool
) -> None:
    """Check what the trainers' flags share (exit status 2), and fill in names."""
    check_atari_flags(parser, flags, is_atari=is_atari)
    for key in ("game_return", "game_step"):
        if key in flags.info_keys:
            parser.error(
                f"--info_keys has {key!r}, but that is what each row's info says of "
                "full games. Leave it out, or rename it in the environment."
            )
    if flags.mode != "train" and flags.init_from is not None:
        parser.error(
            f"--init_from is {flags.init_from} but --mode is {flags.mode}: it is for "
            "training. Name the run to test with --xpid."
        )
    if flags.mode == "train":
        for flag in ("video", "greedy"):
            if getattr(flags, flag):
                parser.error(
                    f"--{flag} is set but --mode is train: it is for testing. Add "
                    "--mode test, or leave it out."
                )
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
        flags.xpid = time.strftime("torchbeast-%Y%m%d-%H%M%S")
    B, T = flags.batch_size, flags.unroll_length
    if flags.total_steps < B * T:
        parser.error(
            f"--total_steps is {flags.total_steps} but one batch has --batch_size "
            f"({B}) x --unroll_length ({T}) = {B * T} steps. Raise --total_steps."
        )
    if flags.learner_cores is None:
        # What is left is about what acting takes.
        share = 1 if flags.model == "deep" else 2
        flags.learner_cores = max(1, num_cores() // share)
    flags.savedir = str(Path(flags.savedir).expanduser())
