# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's flags about actors: how many environments, and in which processes."""

import argparse
import math
import multiprocessing
import sys
from typing import Any

from core.flag_types import divisor, int_at_least
from core.rollout import new_rollouts
from core.running.machine import num_cores

ENVS_PER_ACTOR = 8  # Unless flags say otherwise.


def add_actor_flags(group: Any) -> None:
    """Declare MonoBeast's flags about actors in a group of a parser."""
    group.add_argument(
        "--num_actors",
        type=int_at_least(1),
        metavar="A",
        help="number of environments. The program chooses how many of them share a "
        "process, and logs this at the start. With --envs_per_actor E this is the "
        "number of processes, of E environments each. Default: one process for each "
        "core that this program may use (one with --serial), of up to "
        f"{ENVS_PER_ACTOR} environments each",
    )
    group.add_argument(
        "--envs_per_actor",
        type=int_at_least(1),
        metavar="E",
        help="number of environments in each actor process. The process steps them one "
        "after another and does one forward pass for all of them. With this flag "
        "--num_actors counts processes, so there are A x E environments. E must divide "
        "--batch_size",
    )
    group.add_argument(
        "--num_buffers",
        type=int_at_least(1),
        metavar="N",
        help="number of rollouts in shared memory, without those of --replay_capacity, "
        "rounded up to a multiple of the environments in a process. With more buffers "
        "actors run further ahead of the learner. Default: two for each environment "
        "plus two batches",
    )
    group.add_argument(
        "--start_method",
        choices=multiprocessing.get_all_start_methods(),
        default="forkserver" if sys.platform == "linux" else "spawn",
        help="how Python's multiprocessing starts the actor processes",
    )
    group.add_argument(
        "--serial",
        action="store_true",
        help="run everything in one process and one thread: actors and learner take "
        "turns, on the CPU. pdb works, and with --seed two runs are bitwise equal",
    )


def set_actors(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Set the numbers of actor processes, of environments in each, and of buffers.

    Afterwards `num_actors` counts processes of `envs_per_actor` environments each. (The
    same two values on a command line give the same processes again.) `num_buffers`
    counts rollouts. Exits with status 2 if the flags do not fit together.
    """
    A, B, E = flags.num_actors, new_rollouts(flags), flags.envs_per_actor
    unit = math.gcd(B, flags.batch_size)  # E divides the new and the replayed rollouts.
    if E is not None and unit % E:
        replayed = (
            f", and with --replay_ratio {flags.replay_ratio:g} so must be its {B} new "
            f"rollouts and its {flags.batch_size - B} replayed ones"
            if flags.replay_ratio
            else ""
        )
        parser.error(
            f"--batch_size is {flags.batch_size} but must be a multiple of "
            f"--envs_per_actor ({E}){replayed}: an actor makes {E} rollouts at a time. "
            f"Try --envs_per_actor {divisor(unit, at_most=E)}."
        )
    # --serial uses one core; on any machine, so that a run can be resumed on another.
    cores = 1 if flags.serial else num_cores()
    if E is not None:
        A = cores if A is None else A
    elif A is None:
        A, E = cores, divisor(unit, at_most=ENVS_PER_ACTOR)
    else:
        # The fewest processes that keep all cores busy.
        E = divisor(math.gcd(A, unit), at_most=max(1, A // cores))
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
            f"({B}{' new ones' if flags.replay_ratio else ''}): a batch takes as many. "
            f"{advice}"
        )


def set_learner_threads(
    parser: argparse.ArgumentParser, flags: argparse.Namespace
) -> None:
    """Set the number of learner threads: two, but with --serial one."""
    if flags.serial and (flags.num_learner_threads or 1) > 1:
        parser.error(
            f"--num_learner_threads is {flags.num_learner_threads} but --serial uses "
            "one thread for everything. Leave one of them out."
        )
    if flags.num_learner_threads is None:
        flags.num_learner_threads = 1 if flags.serial else 2


def describe_actors(flags: argparse.Namespace) -> str:
    """Return a line about the actors for the log. Call `set_actors` first."""
    A, E = flags.num_actors, flags.envs_per_actor
    where = "in one process" if flags.serial else "each a process"
    return f"Actors: {A}, {where}; environments in each: {E}, in all: {A * E}"
