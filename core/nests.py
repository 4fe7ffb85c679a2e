# SPDX-License-Identifier: Apache-2.0
"""Nests of arrays, and the shape and dtype of each array in them.

A *nest* is a leaf, or a dict or tuple of nests. Observations are nests, and so is a
complete rollout row (see `core.rollout`). Needs numpy only.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

# A leaf of any type, or a dict or tuple of nests. (A recursive alias would force
# every caller into casts.)
Nest = Any


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one leaf."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))  # Also of np.float32.

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return describe_array(self.dtype, self.shape)


def describe_array(dtype: Any, shape: Iterable[int]) -> str:
    """Return dtype and shape of an array or tensor, such as `float32[5,3]`."""
    return f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"


def describe(value: Any) -> str:
    """Describe a value of the wrong kind, for a message."""
    if isinstance(value, np.ndarray | np.generic):
        return describe_array(value.dtype, value.shape)
    if isinstance(value, dict):
        return f"a dict with keys {list(value)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    return f"a {type(value).__name__}"


def map_nest(fn: Callable[..., Any], nest: Nest, *others: Nest) -> Nest:
    """Apply `fn` to the leaves of nests of equal structure; keep the structure.

    Raises:
      ValueError: the nests differ in their keys or lengths.
    """
    if isinstance(nest, dict):
        for other in others:
            if not isinstance(other, dict) or other.keys() != nest.keys():
                got = sorted(other) if isinstance(other, dict) else type(other).__name__
                raise ValueError(f"nests differ: keys {sorted(nest)} against {got}")
        if not others:  # Takes half the time of the line below.
            return {k: map_nest(fn, v) for k, v in nest.items()}
        return {k: map_nest(fn, v, *(o[k] for o in others)) for k, v in nest.items()}
    if isinstance(nest, tuple):
        for other in others:
            if not isinstance(other, tuple) or len(other) != len(nest):
                size = len(other) if isinstance(other, tuple) else type(other).__name__
                raise ValueError(f"nests differ: a tuple of {len(nest)} against {size}")
        return tuple(map_nest(fn, *leaves) for leaves in zip(nest, *others))
    return fn(nest, *others)


def not_finite(nest: Nest) -> list[str]:
    """Return the names of the arrays (or CPU tensors) that have NaN or infinity."""
    arrays = ((name, np.asarray(leaf)) for name, leaf in leaves(nest))
    return [x for x, a in arrays if a.dtype.kind == "f" and not np.isfinite(a).all()]


def unflatten(values: Iterable[Any], nest: Nest) -> Nest:
    """Return a nest like `nest`, with the next of `values` in place of each leaf."""
    rest = iter(values)
    return map_nest(lambda _: next(rest), nest)


def leaves(nest: Nest, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) in a fixed order; names are paths such as `observation/0`.

    No two leaves have the same name: in keys, `~` and `/` become `~0` and `~1`.
    """
    prefix = f"{name}/" if name else ""
    if isinstance(nest, dict):
        for key, value in nest.items():
            yield from leaves(value, prefix + key.replace("~", "~0").replace("/", "~1"))
    elif isinstance(nest, tuple):
        for i, value in enumerate(nest):
            yield from leaves(value, f"{prefix}{i}")
    else:
        yield name, nest
