# SPDX-License-Identifier: Apache-2.0
"""Seed, save and restore the random number generators of torch, numpy and Python."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_rng(seed: int) -> None:
    """Seed torch's, numpy's and Python's global generators.

    Environments may use these generators. Each forked process needs its own seed: it
    begins with a copy of the parent's generators.
    """
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def keep_torch() -> Iterator[None]:
    """Undo what an environment changes for all of torch in the block."""
    seed = torch.initial_seed()
    dtype, has_gradient = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(has_gradient)
        undo_seeding(seed)


def undo_seeding(seed: int) -> None:
    """If an environment has seeded torch, seed it anew.

    The policy draws its actions with the same generator. An environment that seeds it
    at each reset would see the same actions in each game.

    Args:
      seed: `torch.initial_seed()` before the call of the environment.
    """
    if torch.initial_seed() != seed:
        # The CPU's generator has 32 bits. These constants go through all of them.
        torch.manual_seed((1664525 * seed + 1013904223) % 2**32)


def rng_state() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the state of torch's, numpy's and Python's global generators."""
    kind, keys, *numpy_rest = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    state = {"numpy": [kind, *numpy_rest], "python": [version, gauss_next]}
    return state, {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "python": torch.tensor(internal, dtype=torch.int64),
    }


def restore_rng(state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Restore the state that `rng_state` returned."""
    torch.set_rng_state(tensors["torch"])
    kind, *numpy_rest = state["numpy"]
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((kind, keys, *numpy_rest))
    version, gauss_next = state["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss_next))
