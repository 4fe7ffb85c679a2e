# SPDX-License-Identifier: Apache-2.0
"""Replay: which rollouts come again, when they leave, and what is counted of them."""

import collections
import math

import numpy as np
import pytest
import torch

import libtorchbeast
import monobeast
from core import ranks
from core.actors import prepare
from core.algorithm import replay
from core.algorithm.replay import Mixer, Replay, create_replay
from core.nests import leaves, map_nest
from tests.actors.pool import make_flags
from tests.normalization_flags import obeyed

T, NEW, REPLAYED, CAPACITY = 5, 3, 7, 11  # Of rollouts, where they are all one item.


# ------------------------------------------------------------------------------- Replay


def test_items_leave_in_the_order_in_which_they_came_and_once():
    ring = Replay(CAPACITY, 2)
    left: list[int] = []
    for first in range(0, 300, NEW):
        new = list(range(first, first + NEW))
        assert len(ring._ring) <= CAPACITY
        sampled = ring.sample()
        assert all(first - CAPACITY <= item < first for item in sampled)
        left += ring.add(new, sampled)
    assert left == list(range(300 - CAPACITY))


def test_a_reserve_leaves_first_and_one_item_leaves_for_each_that_comes():
    ring = Replay(4, 1, reserve=[10, 11, 12, 13])
    assert ring.sample() == []
    assert ring.add([0, 1, 2], []) == [10, 11, 12]
    assert ring.sample()[0] in (0, 1, 2)
    assert Replay(4, 1, reserve=[10, 11, 12, 13]).add(range(6), []) == [
        *(10, 11, 12, 13),
        *(0, 1),
    ]


def test_without_capacity_new_items_leave_at_once():
    ring = Replay(0, 0)
    for new in ([4, 1], [1, 4], [2]):
        assert ring.sample() == []
        assert ring.add(new, []) == new


def test_nothing_is_sampled_before_a_batch_can_be_full():
    ring = Replay(CAPACITY, REPLAYED)
    for first in range(0, 30, NEW):
        sampled = ring.sample()
        assert len(sampled) == (REPLAYED if first >= REPLAYED else 0)
        assert len(set(sampled)) == len(sampled)
        ring.add(range(first, first + NEW), sampled)


def test_what_another_thread_copies_does_not_leave():
    ring = Replay(2, 2)
    ring.add(["a", "b"], [])
    ours, theirs = ring.sample(), ring.sample()
    assert set(ours) == set(theirs) == {"a", "b"}
    assert ring.add(["c"], ours) == []
    assert ring.add(["d"], theirs) == ["a", "b"]
    assert ring.add(["e"], []) == ["c"]


def test_draws_are_uniform_over_the_replay():
    ring = Replay(CAPACITY, 2, seed=(7, 0))
    ring.add(range(CAPACITY), [])
    counts: collections.Counter[int] = collections.Counter()
    num_draws = 11_000
    for _ in range(num_draws):
        sampled = ring.sample()
        counts.update(sampled)
        ring.add([], sampled)
    p = 2 / CAPACITY
    sigma = math.sqrt(num_draws * p * (1 - p))
    assert set(counts) == set(range(CAPACITY))
    for count in counts.values():
        assert abs(count - num_draws * p) < 4 * sigma


def test_a_seed_fixes_the_draws_and_a_resumed_run_has_others(monkeypatch):
    def draws(*argv, first_update=0):
        sizes = "--replay_ratio 1 --batch_size 12 --replay_capacity 119"
        flags = make_flags("Catch", *sizes.split(), *argv)
        ring = create_replay(flags, first_update, flags.envs_per_actor)
        assert (ring.capacity, ring.num_sampled) == (40, 2)  # Items of 3 rollouts.
        ring.add(range(40), [])
        return [ring.sample() for _ in range(7)]

    assert draws() == draws()
    assert draws() != draws("--seed", "8")
    assert draws() != draws(first_update=100)
    draws_of_learner_0 = draws()
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    assert draws() != draws_of_learner_0


# -------------------------------------------------------------------------------- Mixer


def new_batch(rng, number):
    """A batch of NEW rollouts, as PolyBeast's learner receives them."""

    def tensor(dtype, *shape):
        values = rng.integers(
            0, 2 if dtype == torch.bool else 251, (T + 1, NEW, *shape)
        )
        return torch.from_numpy(values).to(dtype)

    batch = {
        "observation": {"a": tensor(torch.uint8, 2, 3), "b": (tensor(torch.float32),)},
        "done": tensor(torch.bool),
        "policy_logits": tensor(torch.float32, 4),
        "policy_version": torch.full((T + 1, NEW), number),
    }
    return batch, (tensor(torch.bfloat16, 5)[:2], tensor(torch.float32, 3)[:1])


def columns_of(nest):
    """Return the bytes of each column, leaf by leaf."""
    tensors = [x for _, x in leaves(nest)]
    return [
        tuple(x[:, i].contiguous().view(torch.uint8).numpy().tobytes() for x in tensors)
        for i in range(tensors[0].shape[1])
    ]


def test_every_replayed_column_was_new_once_to_the_last_bit():
    rng = np.random.default_rng(0)
    mix = Mixer(Replay(CAPACITY, REPLAYED))
    seen: list[tuple[bytes, ...]] = []
    memory = set()
    for number in range(10):
        new = new_batch(rng, number)
        batch, state = mix(*new)
        marks = batch.pop("replayed")
        columns = columns_of((batch, state))
        num_old = REPLAYED if len(seen) >= REPLAYED else 0
        assert marks.shape == (T + 1, NEW + num_old) and marks.dtype == torch.bool
        assert not marks[:, :NEW].any() and marks[:, NEW:].all()
        assert columns[:NEW] == columns_of(new)
        assert set(columns[NEW:]) <= set(seen[-CAPACITY:])
        assert len(set(columns)) == len(columns) == NEW + num_old
        if num_old:
            memory.add(batch["done"].data_ptr())
        seen += columns[:NEW]
    assert len(memory) == 1  # All batches are mixed in the same place.


def test_a_batch_before_the_first_replayed_rollout_is_new_as_a_whole():
    batch = {"replayed": replay.mark_replayed(T + 1, NEW, NEW)}
    new, replayed = replay.split(batch)
    assert new is batch and replayed is None


def test_without_replay_a_batch_is_passed_on_as_it_is():
    batch, state = new_batch(np.random.default_rng(0), 0)
    got = Mixer(Replay(0, 0))(batch, state)
    assert got[0] is batch and got[1] is state


def test_the_memory_of_batches_that_have_left_serves_new_ones():
    """The queue's pool stops allocating once the replay is full."""
    sizes: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    queue = libtorchbeast.BatchingQueue(
        minimum_batch_size=NEW, maximum_batch_size=NEW, allocate=allocate
    )
    mix = Mixer(Replay(2 * NEW, NEW))
    one = {"done": torch.zeros(T + 1, 1, dtype=torch.bool)}
    counts = []
    for _ in range(30):
        for _ in range(NEW):
            queue.enqueue((one, ()))
        mix(*next(queue))
        counts.append(len(sizes))
    queue.close()
    assert counts[-1] == counts[5] <= 4  # Two in the replay, and those on the way.


# ---------------------------------------------------------------- what is counted of it


def make_learner(*argv):
    """Return a learner and a function that makes random rollouts for it."""
    flags = make_flags("Catch", "--batch_size", "12", "--info_keys", "half", *argv)
    spaces = monobeast.read_env(flags)[0]
    torch.manual_seed(0)
    learner = monobeast.create_learner(flags, spaces)
    outputs = monobeast.net_outputs(spaces)
    row, _ = prepare.rollout_specs(flags, spaces, learner.net, outputs)
    rng = np.random.default_rng(0)

    def rollouts(num, version):
        batch = map_nest(
            lambda s: rng.integers(0, 2, (T + 1, num, *s.shape)).astype(s.dtype), row
        )
        batch["info"]["game_return"][...] = np.nan
        batch["policy_version"][...] = version
        return batch

    return learner, rollouts


def join(new, old):
    batch = map_nest(lambda *xs: np.concatenate(xs, axis=1), new, old)
    num_new = new["done"].shape[1]
    marks = replay.mark_replayed(T + 1, num_new, batch["done"].shape[1])
    return {**batch, "replayed": marks}


def test_steps_episodes_and_rows_are_those_of_new_rollouts():
    learner, rollouts = make_learner()
    new, old = rollouts(NEW, 3), rollouts(REPLAYED, 1)
    old["info"]["game_return"][2, 0] = 100.0
    old["episode_return"][...] = 100.0
    old["info"]["half"][...] = 100.0
    new["info"]["game_return"][1:3, 2] = 7.0
    new["info"]["game_step"][2, 2] = np.nan  # So no game ends there.
    new["policy_version"][T, 2] = 0
    new["policy_version"][0] = old["policy_version"][0] = 0  # The rollouts before.
    learner.updates = 10
    learner.update(join(new, old), ())
    alone, _ = make_learner()
    alone.updates = 10
    alone.update(new, ())
    assert learner.updates == 11
    assert learner.step == alone.step == np.count_nonzero(~new["truncated"][:-1])
    assert (
        learner.counts.rows
        == alone.counts.rows
        == {"learned": T * NEW, "stale": 0, "unused": 0}
    )
    assert learner.counts.episodes.state() == alone.counts.episodes.state()
    assert learner.counts.episodes.columns()["games"] == 1
    row, row_alone = learner.counts.averages.pop(), alone.counts.averages.pop()
    for column in ("policy_lag_mean", "policy_lag_max", "info_half"):
        assert row[column] == row_alone[column]
    assert row[replay.LAG] == 9 and row["policy_lag_max"] == 10
    assert row["policy_lag_mean"] == pytest.approx(7 + 3 / (T * NEW))
    assert 0 < row["entropy"] <= math.log(3) + 1e-6  # The mean over all rows.
    assert row["mean_rho"] == pytest.approx(row_alone["mean_rho"], rel=1e-5)
    assert replay.LAG not in row_alone and replay.RHO not in row_alone


def test_mean_rho_is_of_new_rows_where_only_another_learner_has_replayed_ones():
    learner, rollouts = make_learner()
    sums = {"steps": 60, "new_steps": 40, "replayed_steps": 20}  # Of all learners.
    sums |= {"rho": 60.0, "replay_rho": 20.0, "entropy": 30.0}
    sums |= {"target": 60 * 3.0, "target_square": 60 * (3.0**2 + 2.0**2)}
    learner.counts.add(rollouts(NEW, 3), sums, 0, is_learned=True)
    row = learner.counts.averages.pop()
    assert row["mean_rho"] == row[replay.RHO] == 1.0
    assert replay.LAG not in row
    of_all_rows = row["entropy"], row["return_mean"], row["return_std"]
    assert of_all_rows == (0.5, 3.0, 2.0)


def test_importance_weights_are_told_apart():
    """New rows by the learner's own policy have the weight 1; others have less."""
    learner, rollouts = make_learner()
    new, old = rollouts(NEW, 3), rollouts(REPLAYED, 1)
    new["policy_logits"][...] = 0  # Nearly those of a network that has not learned.
    learner.update(join(new, old), ())
    alone, _ = make_learner()
    alone.update(old, ())
    row = learner.counts.averages.pop()
    assert row[replay.RHO] == pytest.approx(
        alone.counts.averages.pop()["mean_rho"], rel=1e-5
    )
    assert "replay_rho" not in row
    assert row["mean_rho"] > 0.98 > 0.95 > row[replay.RHO]


def test_the_update_is_that_of_all_rollouts():
    weights = []
    for mark in (True, False):
        learner, rollouts = make_learner()
        batch = join(rollouts(NEW, 3), rollouts(REPLAYED, 1))
        if not mark:
            del batch["replayed"]
        learner.update(batch, ())
        weights.append([p.detach() for p in learner.net.parameters()])
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "max_lag, versions, counts",
    [  # (updates, steps, stale rollouts)
        (9, (3, 1), (1, T * NEW, 0)),
        (8, (3, 1), (1, T * NEW, 0)),  # Replayed ones are left out, too, uncounted.
        (6, (3, 4), (0, 0, NEW)),  # Nothing is learned from replayed ones alone.
    ],
)
def test_no_replayed_rollout_is_older_than_a_new_one_may_be(max_lag, versions, counts):
    learner, rollouts = make_learner("--max_policy_lag", str(max_lag))
    new, old = rollouts(NEW, versions[0]), rollouts(REPLAYED, versions[1])
    new["truncated"][...] = old["truncated"][...] = False
    learner.updates = 10
    learner.update(join(new, old), ())
    assert (learner.updates - 10, learner.step, learner.counts.stale) == counts
    stale = {"learned": learner.step, "stale": T * counts[2], "unused": 0}
    assert learner.counts.rows == stale
    row = learner.counts.averages.pop()
    assert (replay.RHO in row) == (max_lag == 9)
    assert "replay_rho" not in row


@pytest.mark.parametrize("versions", [(0, 0, 0), (0, 3, 3)])
def test_games_in_rollouts_that_are_too_old_are_counted_once(versions):
    learner, rollouts = make_learner("--max_policy_lag", "2")
    new, old = rollouts(NEW, versions), rollouts(REPLAYED, 0)
    for batch in (new, old):
        batch["info"]["half"][...] = np.nan
        batch["done"][...] = batch["truncated"][...] = False
    for column, game_return in enumerate([7.0, 8.0]):
        new["info"]["game_return"][2, column] = game_return
        new["info"]["half"][2, column] = game_return / 2
        new["done"][2, column] = True
        new["episode_return"][2, column] = game_return
    old["info"]["game_return"][2, 0] = 100.0
    learner.updates = 3
    learner.update(join(new, old), ())
    counts = learner.counts.episodes.state()
    assert counts["games"] == 2
    assert sorted(counts["returns"]) == sorted(counts["life_returns"]) == [7.0, 8.0]
    assert learner.counts.averages.pop()["info_half"] == 3.75


@pytest.mark.skipif(
    "--normalize_observations" not in obeyed(monobeast), reason="a fork's Net"
)
def test_statistics_of_observations_count_new_rollouts_only():
    learner, rollouts = make_learner("--normalize_observations")
    learner.update(join(rollouts(NEW, 3), rollouts(REPLAYED, 1)), ())
    (norm,) = learner.net.normalize.observation
    assert norm.count == T * NEW


def test_the_rows_of_a_batch_after_the_last_update_are_counted_once():
    learner, rollouts = make_learner()
    learner.step = learner.flags.total_steps
    learner.update(join(rollouts(NEW, 3), rollouts(REPLAYED, 1)), ())
    assert learner.counts.rows == {"learned": 0, "stale": 0, "unused": T * NEW}
