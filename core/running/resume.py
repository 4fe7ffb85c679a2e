# SPDX-License-Identifier: Apache-2.0
"""Save the state of a training run in a checkpoint, and resume the run from it."""

import argparse
import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core import ranks
from core.algorithm.update import Learner
from core.errors import ConfigError
from core.nests import Nest, map_nest
from core.running import checkpoint, optimizer_state
from core.running.common_flags import NETWORK_FLAGS, flags_to_train
from core.running.randomness import restore_rng, rng_state

log = logging.getLogger(__name__)


class Snapshots:
    """Saves and restores the learner of a run. Used between two updates.

    Create the object before training. If training changes an option of an optimizer
    later, this option is state, which `restore` restores. All other options are
    configuration, which `restore` does not change.

    Raises:
      ConfigError: an optimizer cannot be saved.
    """

    def __init__(self, flags: argparse.Namespace, learner: Learner):
        self._flags = flags
        self._learner = learner
        # The key is the name in a checkpoint: optimizer, optimizer1, ...
        self._optimizers = {
            f"optimizer{i or ''}": optimizer
            for i, optimizer in enumerate(learner.optimizers)
        }
        for optimizer in learner.optimizers:
            optimizer_state.optimizer_state(optimizer, learner.net)
        self._fresh_options = {
            name: optimizer_state.group_options(optimizer)
            for name, optimizer in self._optimizers.items()
        }

    def take(self) -> tuple[dict[str, Any], dict[str, Nest]]:
        """Return the state for `restore`: values for JSON, copies of all tensors."""
        learner = self._learner
        tensors: Nest = {"model": dict(learner.net.state_dict())}
        optimizers: dict[str, Any] = {}
        for name, optimizer in self._optimizers.items():
            tensors[name], optimizers[name] = optimizer_state.optimizer_state(
                optimizer, learner.net, self._fresh_options[name]
            )
        tensors = map_nest(  # Copies, because training goes on while they are written.
            lambda x: x.detach().to("cpu", copy=True), tensors
        )
        rng, rng_tensors = rng_state()
        state = {
            "flags": ranks.flags_of_run(self._flags),
            "learner": learner.state(),
            "rng": rng,
            **optimizers,
        }
        return state, {**tensors, "rng": rng_tensors}

    def restore(self, found: checkpoint.Checkpoint) -> None:
        """Restore the learner's state from a checkpoint of the same run.

        Raises:
          ConfigError: the checkpoint was made with another environment or network.
        """
        flags, learner = self._flags, self._learner
        state = found.state
        # Older checkpoints do not have all flags. A missing flag was off.
        trained = dict.fromkeys(NETWORK_FLAGS, False) | state["flags"]
        for key in ("env", *NETWORK_FLAGS):
            if trained[key] != getattr(flags, key):
                raise ConfigError(
                    f"--{key} is {getattr(flags, key)} but run {flags.xpid} was "
                    f"trained with {trained[key]}. Choose another --xpid, or leave "
                    f"--{key} as it was."
                )
        model = found.tensors["model"]
        with name_changed_flags(flags, state["flags"]):
            checkpoint.check_tensors(learner.net.state_dict(), model)
            learner.net.load_state_dict(model)
            changes = self._restore_optimizers(found)
        learner.restore(state["learner"])
        restore_rng(state["rng"], found.tensors["rng"])
        log.info("Run %s goes on from step %d", flags.xpid, learner.step)
        if flags.init_from is not None:
            log.info("  --init_from %s is ignored: the run resumes", flags.init_from)
        for line in (*changed_flags(flags, state["flags"]).values(), *changes):
            log.info("  %s", line)

    def _restore_optimizers(self, found: checkpoint.Checkpoint) -> list[str]:
        """Restore the optimizers; describe how their options differ from this run's."""
        ours = self._optimizers
        num_theirs = sum(name.startswith("optimizer") for name in found.state)
        if num_theirs not in (0, len(ours)):
            raise checkpoint.CheckpointMismatch(
                f"optimizers: file {num_theirs}, this run {len(ours)}"
            )
        return [
            f"{name}, {line}"
            for name, optimizer in ours.items()
            for line in optimizer_state.restore_optimizer(
                optimizer, self._learner.net, found.tensors[name], found.state[name]
            )
        ]

    def take_weights(self, name: str, savedir: Path) -> None:
        """Load only the weights of another run, perhaps in `savedir`, or checkpoint.

        Safe for files from strangers: the file is checked and never unpickled. Besides
        the weights, only a few flags are read, and only for log lines.
        """
        place = Path(name).expanduser()
        if not place.exists():
            place = savedir / name
        found = checkpoint.load_from(place)
        if found is None:
            raise ConfigError(
                f"--init_from is {name}, where there is no checkpoint. Name the folder "
                "of a run or one of its checkpoints (step-...), or a run in "
                f"--savedir ({savedir})."
            )
        for line in found.rejected:
            log.warning("Checkpoint not used: %s", line)
        differences = self._flag_differences(found)
        try:
            model = checkpoint.weights_for(self._learner.net, found)
        except checkpoint.CheckpointMismatch as error:
            raise ConfigError(
                f"--init_from {found.path} does not fit: {error}{differences}"
            ) from error
        if key := checkpoint.find_not_finite(self._learner.net, model):
            raise ConfigError(f"--init_from {found.path}: {key} is not finite")
        self._learner.net.load_state_dict(model)
        log.info("Weights of %s, step %d%s", found.path, found.step, differences)

    def _flag_differences(self, found: checkpoint.Checkpoint) -> str:
        """Name the flags of another run's checkpoint that differ from this run's."""
        theirs = found.state.get("flags")
        theirs = theirs if isinstance(theirs, dict) else {}
        differences = [
            f"; --{key} was {theirs[key]} in that run and is "
            f"{getattr(self._flags, key)} in this run"
            for key in ("env", *NETWORK_FLAGS)
            if key in theirs and theirs[key] != getattr(self._flags, key)
        ]
        return checkpoint.printable("".join(differences))


def changed_flags(
    flags: argparse.Namespace, recorded: Mapping[str, Any]
) -> dict[str, str]:
    """Describe each flag whose value is not the recorded one, by name."""
    ours = ranks.flags_of_run(flags)
    return {
        key: f"--{key} was {old} and is now {new}"
        for key, old in recorded.items()
        if (new := ours.get(key, old)) != old
    }


@contextlib.contextmanager
def name_changed_flags(
    flags: argparse.Namespace, recorded: Mapping[str, Any]
) -> Iterator[None]:
    """If a checkpoint does not fit, name the flags that may be the reason.

    Args:
      recorded: the flags in the checkpoint, or in meta.json.
    """
    try:
        yield
    except checkpoint.CheckpointMismatch as error:
        skip = flags_to_train()
        changes = changed_flags(flags, recorded).items()
        lines = [line for key, line in changes if key not in skip]
        why = "No flag has changed since then, but the code or the environment has."
        if lines:
            why = checkpoint.printable(f"Since then {'; '.join(lines)}.")
            why += " The code may have changed, too."
        raise checkpoint.CheckpointMismatch(f"{error}. {why}") from None
