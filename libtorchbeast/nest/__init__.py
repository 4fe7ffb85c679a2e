# SPDX-License-Identifier: Apache-2.0
"""Nests: tuples, lists, namedtuples and dicts that contain leaves or other nests.

Every other object is a leaf. The order of the leaves is depth first, and the entries of
a dict are sorted by key. Results have the types of the first argument; a namedtuple
keeps its class.

Several nests match if they have the same keys and lengths at all levels. A tuple
matches a list.

Importable as `nest`, as users of TorchBeast know it, and as `libtorchbeast.nest`.
Needs neither a compiler nor torch.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def map(function: Callable[[Any], Any], nest: Any) -> Any:
    """Return a nest like `nest` with `function(leaf)` in place of each leaf."""
    children = _children(nest)
    if children is None:
        return function(nest)
    return _rebuild(nest, [map(function, child) for child in children])


def map_many(function: Callable[[list], Any], *nests: Any) -> Any:
    """Return a nest like the first, made of `function([leaf of each nest])`.

    `nest.map_many(torch.cat, a, b)` concatenates two nests leaf by leaf.

    Raises:
      ValueError: there is no nest, or they do not match.
    """
    if not nests:
        raise ValueError("Expected at least one nest, got none")
    return _map_many(function, nests, "")


def map_many2(function: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """Return a nest like the first, made of `function(leaf, leaf of the second)`.

    Raises:
      ValueError: the nests do not match.
    """
    return map_many(lambda leaves: function(*leaves), first, second)


def flatten(nest: Any) -> list:
    """Return the leaves, in order."""
    children = _children(nest)
    if children is None:
        return [nest]
    return [leaf for child in children for leaf in flatten(child)]


def pack_as(nest: Any, flat: Iterable[Any]) -> Any:
    """Return a nest like `nest` with the leaves `flat`; undoes `flatten`.

    Raises:
      ValueError: `flat` has more or fewer elements than `nest` has leaves.
    """
    flat = list(flat)
    num_leaves = len(flatten(nest))
    if len(flat) != num_leaves:
        few_or_many = "few" if len(flat) < num_leaves else "many"
        raise ValueError(
            f"Too {few_or_many} elements: the nest has {num_leaves} leaves, "
            f"got {len(flat)}"
        )
    leaves = iter(flat)
    return map(lambda _: next(leaves), nest)


def front(nest: Any) -> Any:
    """Return the first leaf.

    Raises:
      ValueError: there is none.
    """
    leaves = flatten(nest)
    if not leaves:
        raise ValueError(f"A nest without leaves has no front: {nest!r}")
    return leaves[0]


def _children(nest: Any) -> Sequence[Any] | None:
    """Return what is directly inside; None for a leaf."""
    if isinstance(nest, tuple | list):
        return nest
    if isinstance(nest, dict):
        return [nest[key] for key in sorted(nest)]
    return None


def _rebuild(nest: Any, children: list) -> Any:
    if isinstance(nest, dict):
        return dict(zip(sorted(nest), children))
    if isinstance(nest, list):
        return children
    if hasattr(nest, "_make"):  # A namedtuple.
        return nest._make(children)
    return tuple(children)


def _map_many(function: Callable, nests: Sequence[Any], path: str) -> Any:
    first = nests[0]
    for other in nests[1:]:
        if _shape(first) != _shape(other):
            raise ValueError(
                f"nests don't match at nest{path}: {_shape(first)} vs {_shape(other)}"
            )
    if _children(first) is None:
        return function(list(nests))
    if isinstance(first, dict):
        keys: Iterable = sorted(first)
    else:
        keys = range(len(first))
    results = [
        _map_many(function, [nest[key] for nest in nests], f"{path}[{key!r}]")
        for key in keys
    ]
    return _rebuild(first, results)


def _shape(nest: Any) -> str:
    """Say what must be equal for two nests to match here."""
    if isinstance(nest, dict):
        return f"dict with keys {sorted(nest)}"
    if isinstance(nest, tuple | list):
        return f"sequence of {len(nest)}"
    return "leaf"
