# SPDX-License-Identifier: Apache-2.0
"""Steps before MonoBeast's actors start: spaces, buffers, memory checks, seeds."""

import argparse
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from core.action_spaces import check_spaces
from core.actors import shared_memory
from core.environments.make import check_options
from core.environments.stepping import Environments, env_seed
from core.errors import ConfigError, EnvSpecError, MakeError
from core.nests import ArraySpec, Nest
from core.rollout import Spaces, row_spec, text_of
from core.running.machine import check_resources
from core.running.randomness import keep_torch
from core.running.unit import limit_calls

log = logging.getLogger(__name__)


def read_env(
    create_env: Callable[[], Any],
    env_options: Callable[[Any], dict[str, Any]],
    limit_s: float,
) -> tuple[Spaces, dict[str, Any]]:
    """Create one environment to ask for its spaces and its options.

    The working directory stays the one that the environment has chosen: a module that
    changes it does so once, when it is imported, and its next environments rely on it.

    Args:
      env_options: returns the options of the environment.
      limit_s: for each call into the environment (--env_step_timeout_s).

    Raises:
      ConfigError: there is no such environment, or no policy fits its spaces; or an
        option cannot be recorded.
    """
    with limit_calls(limit_s) as clock, keep_torch():
        try:
            envs = Environments(create_env, 1, seed=0, clock=clock)
            with contextlib.closing(envs):
                check_spaces(envs.observation_space, envs.action_space)
                spaces = Spaces(envs.observation_space, envs.action_space)
                return spaces, check_options(env_options(envs.envs[0]))
        except MakeError as error:
            raise ConfigError(str(error)) from error


def check_same_spaces(expected: Spaces, got: Spaces) -> None:
    """Raise EnvSpecError if an actor's environments have other spaces than the first.

    Args:
      expected: of the environment of `read_env`, for which network and buffers are.
    """
    for name in ("observation", "action"):
        first, own = getattr(expected, name), getattr(got, name)
        if own != first:
            raise EnvSpecError(
                f"expected the {name} space {text_of(first)} of the environment that "
                f"the program made first, got {text_of(own)}. create_env must give the "
                "same spaces in each process"
            )


def rollout_specs(
    flags: argparse.Namespace,
    spaces: Spaces,
    net: Any,
    outputs: Mapping[str, ArraySpec],
) -> tuple[dict[str, Nest], list[ArraySpec]]:
    """Return the specs of one row of one environment, and of the recurrent state.

    Args:
      net: the trainer's Net; its `initial_state` is [layers, E, hidden] each, and its
        `distribution` names the columns that rows have for the chosen actions.
      outputs: the specs of its outputs, for one row of one environment.

    Raises:
      ConfigError: numpy does not have the dtype of a tensor of the recurrent state.
    """
    row = row_spec(spaces.observation, spaces.action, flags.info_keys)
    row |= {
        **outputs,
        **net.distribution.columns,
        "policy_version": ArraySpec((), np.dtype(np.int64)),
    }
    state = net.initial_state(flags.envs_per_actor)
    try:
        arrays = [s.detach().cpu().numpy() for s in state]
    except TypeError as error:
        dtypes = ", ".join(str(s.dtype).removeprefix("torch.") for s in state)
        raise ConfigError(
            "the network: initial_state expected dtypes that numpy has, got "
            f"{dtypes}: MonoBeast's rollouts are numpy arrays. Use float32."
        ) from error
    return row, [ArraySpec(x.shape, x.dtype) for x in arrays]


def create_buffers(
    flags: argparse.Namespace,
    spaces: Spaces,
    net: Any,
    outputs: Mapping[str, ArraySpec],
) -> shared_memory.RolloutBuffers:
    """Check and log the memory, files and processes needed; allocate the buffers.

    Args:
      net, outputs: as for `rollout_specs`.

    Raises:
      ConfigError: the machine has too little; the message has both numbers and the
        remedy.
    """
    row, state = rollout_specs(flags, spaces, net, outputs)
    E = flags.envs_per_actor
    num_replay = math.ceil((flags.replay_capacity or 0) / E)
    sizes = {
        "num_buffers": math.ceil(flags.num_buffers / E) + num_replay,
        "unroll_length": flags.unroll_length,
        "envs_per_actor": E,
    }
    slabs = shared_memory.buffer_specs(row, state, **sizes)
    weights = sum(t.numel() * t.element_size() for t in net.state_dict().values())
    for line in check_resources(
        shared_bytes=shared_memory.nbytes(slabs) + weights,
        replay_share=num_replay / sizes["num_buffers"],
        memory_folder=shared_memory.memory_folder(),
        files=64 + 8 * flags.num_actors,
        processes=1 if flags.serial else flags.num_actors + 1,
    ):
        log.info("Preflight: %s", line)
    return shared_memory.RolloutBuffers(row, slabs)


def names_of(*code: Any) -> list[str]:
    """Return the full names of classes and functions, the same in all processes."""
    modules = [getattr(x, "__module__", "") for x in code]
    # A functools.partial has no name, and its repr has an address.
    names = [getattr(x, "__qualname__", type(x).__qualname__) for x in code]
    # The name of a program's main module in the processes that it starts.
    modules = ["__main__" if m == "__mp_main__" else m for m in modules]
    return [f"{module}.{name}" for module, name in zip(modules, names)]


def check_code(*, program: list[str], actor: list[str]) -> None:
    """Refuse an actor process without the code that a script has assigned.

    Args:
      program, actor: `names_of` the same code in the two processes.

    Raises:
      ConfigError: they differ; the message has the first difference.
    """
    for ours, theirs in zip(program, actor):
        if ours != theirs:
            raise ConfigError(
                f"this program uses {ours}, but its actor processes have {theirs}: "
                "they import the script again. Assign code of your own at the top "
                'level of a script, not under if __name__ == "__main__" and not in a '
                "notebook or a package's __main__.py, or use --serial."
            )


def first_env_seeds(flags: argparse.Namespace, first_incarnation: int) -> list[int]:
    """Return the seeds of this learner's environments for their first games."""
    A, E = flags.num_actors, flags.envs_per_actor
    # `Actors` counts incarnations in the order in which its processes start. With
    # --serial all actors have the same incarnation.
    incarnations = [first_incarnation + (0 if flags.serial else i) for i in range(A)]
    return [env_seed(flags.seed, i, incarnations[i // E], 0) for i in range(A * E)]
