# SPDX-License-Identifier: Apache-2.0
"""`--serial`: actors and learner take turns in one thread; resuming changes no result.

A checkpoint of a serial run also holds the state of the actors. So a resumed run is
bitwise equal to a run without interruption. This does not hold

- with --replay_ratio: rollouts are not in checkpoints, so the replay of a resumed run
  starts empty;
- if a game is so long that its actions are more than MAX_ACTIONS allows: the resumed
  run begins a new game.
"""

import argparse
import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from core import ranks
from core.actors.processes import Actor
from core.errors import ConfigError
from core.nests import leaves
from core.running.checkpoint import Checkpoint
from core.running.randomness import restore_rng
from core.running.run import Run
from core.running.unit import limit_calls

log = logging.getLogger(__name__)

# How many numbers the actions of all unfinished games may have in a checkpoint. Each
# takes up to 30 bytes, and the header of a safetensors file at most 100 MB. To play a
# million steps again takes minutes.
MAX_ACTIONS = 1_000_000


@contextlib.contextmanager
def open_run(
    run: Run, create_actor: Callable[..., Actor]
) -> Iterator[tuple[list[Actor], np.ndarray]]:
    """Create the actors of a serial run, resume them, and open the run's logs.

    At the end this writes the last row of the log and the last checkpoint, and closes
    the environments.

    Args:
      create_actor: called with `actor_id` and `clock`.

    Yields:
      The actors, and the clock of updates: a thread of `limit_calls` ends the program
      if an update with its log row and checkpoint takes too long.
    """
    flags = run.flags
    is_alone = ranks.size() == 1
    # Several learners wait for each other in an update. This wait has its own limit,
    # and `Learners` names the learner that is late.
    has_limit = is_alone and flags.on_stall == "stop"
    limits = limit_calls(
        flags.env_step_timeout_s,
        update_s=flags.stall_timeout_s if has_limit else math.inf,
        at_terminal=False,
    )
    with limits as clocks, contextlib.ExitStack() as stack:
        actors: list[Actor] = []
        for i in range(flags.num_actors):
            # They take turns with the clock.
            actors.append(create_actor(actor_id=i, clock=clocks[:1]))
            stack.enter_context(contextlib.closing(actors[-1].envs))
        run.stop.renew()
        if is_alone:
            number = first_incarnation(run)
            run.extra_state = lambda: actors_state(actors, number)
        if run.found is not None and not (is_alone and _goes_on_exactly(run.found)):
            log.warning(
                "The checkpoint holds no actors for --serial (there were several "
                "learners, or an error ended the run): the environments start again, "
                "so this run is not equal to one without the interruption."
            )
        elif run.found is not None:
            restore_actors(actors, run.found)
            # Making environments and playing their games again may have drawn numbers.
            restore_rng(run.found.state["rng"], run.found.tensors["rng"])
            if flags.replay_ratio:
                log.warning(
                    "--replay_ratio: the replay starts empty, so this run is not equal "
                    "to one without the interruption."
                )
            clocks[:] = 0.0
        with run.open():
            try:
                yield actors, clocks[1:]
            except BaseException:
                # Some actor may have half a rollout, which no checkpoint can hold.
                run.extra_state = lambda: ({}, {})
                raise
            finally:
                clocks[:] = 0.0  # The last checkpoint may take any time.
            run.log({})


def _goes_on_exactly(found: Checkpoint) -> bool:
    """Return whether a checkpoint holds the actors, if it is of a serial run.

    It holds none if there were several learners, or if an error ended the run.
    """
    return "actors" in found.state or not found.state["flags"].get("serial", False)


def first_incarnation(run: Run) -> int:
    """Return the number that seeds the actors' environments, with the actors' numbers.

    A run that goes on exactly keeps its number. Environments that start again get a new
    one, so that they play other games. Call this before `Run.record`, so that a start
    that is refused leaves meta.json as it was.

    Raises:
      ConfigError: a flag differs that must be the same to go on exactly; the message
        names it.
    """
    found = run.found
    if ranks.size() > 1 or (found is not None and not _goes_on_exactly(found)):
        return run.first_incarnation
    if found is None:
        return 0
    _check_flags(run.flags, found)
    return found.state.get("first_incarnation", 0)


def _check_flags(flags: argparse.Namespace, found: Checkpoint) -> None:
    trained = {"serial": False, **found.state["flags"]}  # PolyBeast has no --serial.
    trained["info_keys"] = tuple(trained["info_keys"])  # JSON has only lists.
    for key in ("serial", "seed", "num_actors", "envs_per_actor", "info_keys"):
        if trained.get(key) != getattr(flags, key):
            raise ConfigError(
                f"--{key} is {getattr(flags, key)} but run {flags.xpid} was trained "
                f"with {trained[key]}; --serial resumes only with the same value. "
                f"Choose another --xpid, or give --seed {trained.get('seed')} "
                f"--num_actors {trained.get('num_actors')} --envs_per_actor "
                f"{trained.get('envs_per_actor')} and the other flags as they were."
            )


def actors_state(
    actors: Sequence[Actor], number: int
) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """Return the actors' state for a checkpoint: (for JSON, groups of tensors).

    Args:
      number: from `first_incarnation`.
    """
    tensors = {}
    for i, actor in enumerate(actors):
        for name, array in leaves(actor.last_row):
            tensors[f"{i}/row/{name}"] = torch.from_numpy(array.copy())
        for j, state in enumerate(actor.state):
            tensors[f"{i}/state/{j}"] = state.clone()
    states = [
        {"started": a.started, "envs": a.envs.state() if a.started else None}
        for a in actors
    ]
    return {"actors": states, "first_incarnation": number}, {"actors": tensors}


def restore_actors(actors: Sequence[Actor], found: Checkpoint) -> None:
    """Restore the actors' state from a checkpoint, bit by bit.

    Environments cannot be saved. Each environment plays its present game again, with
    the same seed and the same actions. If the game is too long for that (MAX_ACTIONS),
    it begins the next game.
    """
    saved = found.state["actors"]
    tensors = found.tensors["actors"]
    num_new = 0
    for i, (actor, old) in enumerate(zip(actors, saved)):
        if not old["started"]:
            continue
        for name, array in leaves(actor.last_row):
            array[...] = tensors[f"{i}/row/{name}"].numpy()
        actor.state = tuple(tensors[f"{i}/state/{j}"] for j in range(len(actor.state)))
        num_new += actor.envs.restore(old["envs"], actor.last_row)
        actor.started = True
    if num_new:
        log.warning(
            "The unfinished games of %d environments are too long to be played again: "
            "new games begin there, so this run is not equal to one without the "
            "interruption.",
            num_new,
        )
