# SPDX-License-Identifier: Apache-2.0
"""Seed, save and restore the random number generators of torch, numpy and Python."""

import random
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
