# SPDX-License-Identifier: Apache-2.0
"""Nests: tuples, lists, namedtuples and dicts of any leaves."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libtorchbeast import nest
from tests.python import run_python

Pair = collections.namedtuple("Pair", "left right")

# Keys out of order; every kind of nest; leaves of several types.
NEST = (1, [Pair("two", 3.0), ()], {"b": 5, "a": [4]})
LEAVES = [1, "two", 3.0, 4, 5]

nests = st.recursive(
    st.integers(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=10,
)


def test_flatten_goes_depth_first_and_by_sorted_key():
    assert nest.flatten(NEST) == LEAVES
    assert nest.flatten("leaf") == ["leaf"]
    assert nest.flatten(()) == []


def test_map_keeps_the_kinds_of_nests():
    mapped = nest.map(str, NEST)
    assert mapped == ("1", [Pair("two", "3.0"), ()], {"a": ["4"], "b": "5"})
    assert type(mapped[1][0]) is Pair
    assert nest.map(str, 1) == "1"


def test_map_visits_leaves_in_the_order_of_flatten():
    seen = []
    nest.map(seen.append, NEST)
    assert seen == LEAVES


def test_map_hands_on_the_functions_exception():
    with pytest.raises(ZeroDivisionError):
        nest.map(lambda x: 1 / x, {"a": 0})


def test_map_many_gives_the_leaves_of_all_nests_as_a_list():
    a, b, c = ({"x": Pair(i, [10 * i])} for i in (1, 2, 3))
    assert nest.map_many(tuple, a, b, c) == {"x": Pair((1, 2, 3), [(10, 20, 30)])}
    assert nest.map_many(sum, a, b, c) == {"x": Pair(6, [60])}
    assert type(nest.map_many(sum, a, b)["x"]) is Pair
    assert nest.map_many(sum, 1, 2) == 3


def test_map_many_without_a_nest_is_an_error():
    with pytest.raises(ValueError, match="at least one nest"):
        nest.map_many(sum)


@pytest.mark.parametrize(
    "other, difference",
    [
        ({"a": (1,)}, r"at nest\['a'\]: sequence of 2 vs sequence of 1"),
        ({"a": ([1], 2)}, r"at nest\['a'\]\[0\]: leaf vs sequence of 1"),
        ({"b": (1, 2)}, r"at nest: dict with keys \['a'\] vs dict with keys \['b'\]"),
        (((1, 2),), "at nest: dict with keys .* vs sequence of 1"),
        (3, "at nest: dict with keys .* vs leaf"),
    ],
)
def test_map_many_says_where_nests_differ(other, difference):
    with pytest.raises(ValueError, match=difference):
        nest.map_many(sum, {"a": (1, 2)}, {"a": (3, 4)}, other)


def test_lists_and_tuples_match():
    assert nest.map_many(sum, (1, [2, 3]), [4, (5, 6)]) == (5, [7, 9])


def test_map_many2_gives_the_leaves_of_two_nests_as_arguments():
    second = {"x": [10, 20]}
    assert nest.map_many2(divmod, {"x": Pair(25, 50)}, second) == {
        "x": Pair((2, 5), (2, 10))
    }
    with pytest.raises(ValueError, match="sequence of 1 vs sequence of 2"):
        nest.map_many2(divmod, (1,), (1, 2))


def test_pack_as_takes_any_iterable():
    packed = nest.pack_as(NEST, (10 * i for i in range(5)))
    assert packed == (0, [Pair(10, 20), ()], {"a": [30], "b": 40})
    assert type(packed[1][0]) is Pair
    assert nest.pack_as("leaf", [7]) == 7


@pytest.mark.parametrize("count, word", [(4, "few"), (6, "many")])
def test_pack_as_wants_exactly_as_many_leaves(count, word):
    with pytest.raises(ValueError, match=f"Too {word} elements: .* 5 .* got {count}"):
        nest.pack_as(NEST, range(count))


def test_front_is_the_first_leaf():
    assert nest.front(NEST) == 1
    assert nest.front({"b": 1, "a": [[], 2]}) == 2
    with pytest.raises(ValueError, match="no front"):
        nest.front([(), {}])


@given(nests)
def test_pack_as_undoes_flatten(tree):
    packed = nest.pack_as(tree, nest.flatten(tree))
    assert packed == tree
    assert repr(nest.map(lambda leaf: leaf, tree)) == repr(packed)


@given(nests)
def test_map_is_pack_as_of_the_mapped_leaves(tree):
    doubled = [2 * leaf for leaf in nest.flatten(tree)]
    assert nest.map(lambda leaf: 2 * leaf, tree) == nest.pack_as(tree, doubled)
    assert nest.map_many(sum, tree, tree) == nest.pack_as(tree, doubled)


def test_nest_is_importable_by_its_old_name_and_loads_nothing_else():
    script = (
        "import sys, nest\n"
        "assert nest.flatten({'a': (1, 2)}) == [1, 2]\n"
        "assert not {'torch', 'numpy', 'libtorchbeast'} & set(sys.modules)\n"
    )
    done = run_python(script, cwd="/")
    assert done.returncode == 0, done.stderr
