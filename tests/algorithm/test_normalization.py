# SPDX-License-Identifier: Apache-2.0
"""Normalization: exact statistics, learned once per update, carried to the actors."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import monobeast
import polybeast
from core.actors.shared_memory import SharedWeights
from core.algorithm import losses, update, vtrace
from core.algorithm.distributions import ActionDistribution
from core.algorithm.dry_run import dry_run, zero_rows
from core.algorithm.normalization import (
    MAX_STD,
    MIN_RELATIVE_STD,
    MIN_STD,
    RATE,
    InputNorm,
    PopArt,
    RunningNorm,
)
from core.algorithm.replay import mark_replayed
from core.errors import ConfigError
from core.nests import map_nest
from core.rollout import Spaces
from tests.normalization_flags import obeyed

T, B = 5, 3
OBSERVATIONS, RETURNS = BOTH = "--normalize_observations", "--normalize_returns"
F32 = np.float32
ACTIONS = gym.spaces.Discrete(7, start=2)
VECTOR = gym.spaces.Box(-np.inf, np.inf, (11,), F32)
MIXED = gym.spaces.Dict(
    {
        "action_mask": gym.spaces.Box(0.0, 1.0, (7,), F32),
        "bits": gym.spaces.MultiBinary(3),
        "place": gym.spaces.Tuple(
            (gym.spaces.Discrete(5), gym.spaces.Box(-1.0, 1.0, (2, 3), np.float64))
        ),
        "picture": gym.spaces.Box(0, 255, (4, 5, 2), np.uint8),
        "scalar": gym.spaces.Box(-np.inf, np.inf, (), F32),
    }
)


def random_batch(space=VECTOR, seed=0, columns=B):
    """Return a batch of rollouts whose floats have means and scales of their own."""
    rng = np.random.default_rng(seed)
    shape = (T + 1, columns)

    def fill(x):
        if x.dtype.is_floating_point:
            size = x.shape[2:]
            drawn = rng.normal(rng.normal(size=size), rng.uniform(1, 9, size), x.shape)
            return torch.from_numpy(drawn).to(x.dtype)
        return torch.from_numpy(rng.integers(0, 2, x.shape)).to(x.dtype)

    rows = zero_rows(Spaces(space, ACTIONS), *shape)
    action = torch.from_numpy(rng.integers(2, 9, shape))
    rewards = torch.from_numpy(rng.normal(3, 7, shape)).float()
    rows |= {
        "observation": map_nest(fill, rows["observation"]),
        "reward": rewards,
        "truncated": torch.zeros(shape, dtype=torch.bool),
        "done": torch.from_numpy(rng.random(shape) < 0.1),
        "last_action": action,
        "action": action,
        "policy_logits": torch.from_numpy(rng.normal(size=(*shape, 7))).float(),
        "policy_version": torch.zeros(shape, dtype=torch.int64),
        "episode_return": rewards,
        "info": {key: rewards * np.nan for key in ("game_return", "game_step")},
    }
    return rows


def make_flags(*argv):
    sizes = ["--batch_size", str(B), "--unroll_length", str(T), "--envs_per_actor", "3"]
    flags = monobeast.parse_flags(["--env", "Catch", "--disable_cuda", *sizes, *argv])
    flags.learner_device = "cpu"
    return flags


@pytest.mark.parametrize(
    "flag, part", [(OBSERVATIONS, "normalize"), (RETURNS, "baseline")]
)
def test_a_net_without_the_statistics_of_a_flag_is_refused(flag, part):
    flags = make_flags("--reward_clipping", "none", flag)
    net = monobeast.Net(VECTOR, ACTIONS)
    setattr(net, part, nn.Linear(2, 1))
    with pytest.raises(ConfigError, match=f"{flag} is set, but Net.{part} is Linear"):
        update.Learner(flags, net, [])


def make_learner(*argv, module=monobeast):
    torch.manual_seed(0)
    flags = make_flags("--reward_clipping", "none", *argv)
    if missing := {*argv} & {*BOTH} - {*obeyed(module)}:
        pytest.skip(f"a fork's: {module.__name__}.Net does not obey {missing}")
    return module.create_learner(flags, Spaces(VECTOR, ACTIONS))


def on_policy(net, batch):
    """Return the batch with the logits that `net` acts with.

    Row t holds those with which row t-1's observation was acted on.
    """
    with torch.no_grad():
        logits = net(batch)[0]["policy_logits"]
    batch["policy_logits"][1:] = logits[:-1]
    return batch


def buffers(net):
    return {name: x.clone() for name, x in net.named_buffers()}


# ------------------------------------------------------------------------- statistics


def test_statistics_of_millions_of_rows_are_those_of_float64():
    """In batches of many sizes, of means that move and scales from 1e-3 to 1e6."""
    rng = np.random.default_rng(1)
    scales = np.array([1e-3, 1.0, 1e6])
    norm = RunningNorm((3,))
    places = [x.data_ptr() for x in norm.buffers()]
    parts = []
    for i in range(400):
        size = (7919, 2, 4999)[i % 3]
        part = rng.normal([5.0, 300 - i, -1e6], 1.0, (size, 3)) * scales
        parts.append(part.astype(F32))
        norm.add(norm.moments(torch.from_numpy(parts[-1])))
    rows = np.concatenate(parts).astype(np.float64)
    assert norm.count.item() == len(rows) > 1_500_000
    np.testing.assert_allclose(norm.mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(norm.var, rows.var(0), rtol=1e-9)
    assert {x.dtype for x in norm.buffers()} == {torch.float64}
    assert [x.data_ptr() for x in norm.buffers()] == places


def test_normalized_rows_have_mean_0_and_deviation_1_and_are_clipped():
    rng = np.random.default_rng(2)
    rows = rng.normal([1e5, -3.0], [10.0, 1e-3], (5003, 2)).astype(F32)
    norm = RunningNorm((2,))
    norm.add(norm.moments(torch.from_numpy(rows)))
    y = norm(torch.from_numpy(rows))
    assert y.dtype == torch.float32
    exact = rows.astype(np.float64)
    # The variance of 1e-6 is small enough to see EPSILON.
    exact = (exact - exact.mean(0)) / np.sqrt(exact.var(0) + 1e-8)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)
    far = torch.tensor([[2e5, -4.0], [1e5, 3e38]])
    assert norm(far)[0].tolist() == [10.0, -10.0] and norm(far)[1, 1] == 10.0


def test_before_the_first_row_values_stay_as_they_are():
    x = torch.tensor([[-7.5, 0.25, 9.0], [11.0, -1e9, 0.0]])
    expected = x.clamp(-10, 10)
    torch.testing.assert_close(RunningNorm((3,))(x), expected, rtol=1e-6, atol=0)


def test_an_element_that_never_changes_is_0_and_makes_nothing_infinite():
    norm = RunningNorm((1,))
    norm.add(norm.moments(torch.full((11, 1), 0.1)))
    norm.add(norm.moments(torch.full((13, 1), 0.1)))
    assert norm(torch.tensor([[0.1]])).item() == 0.0
    assert norm(torch.tensor([[0.2]])).item() == 10.0


def test_an_observation_without_elements_has_no_statistics():
    norm = RunningNorm((0,))
    norm.add(norm.moments(torch.zeros(7, 0)))
    assert norm.count == 0 and norm(torch.zeros(5, 0)).shape == (5, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_and_changes_no_statistics(bad):
    norm = RunningNorm((2,))
    norm.add(norm.moments(torch.randn(7, 2)))
    before = buffers(norm)
    rows = torch.randn(5, 2)
    rows[3, 1] = bad
    norm.add(norm.moments(rows))
    for name, x in buffers(norm).items():
        assert torch.equal(x, before[name]), name
    assert norm(rows).isnan().nonzero().tolist() == [[3, 1]]


# ----------------------------------------------------------------- rows of a rollout


def test_each_float_leaf_has_statistics_of_its_own_and_others_stay_as_they_are():
    norm = InputNorm(MIXED, clip_rewards=False)
    rows = random_batch(MIXED)
    norm.learn([norm.moments(rows)])
    got = norm(rows)
    seen = rows["observation"]
    for name, x, y in (
        ("scalar", seen["scalar"], got["observation"]["scalar"]),
        ("place", seen["place"][1], got["observation"]["place"][1]),
        ("reward", rows["reward"], got["reward"]),
    ):
        x = x.double()
        new = x[1:].flatten(0, 1)  # Row 0 was another rollout's last.
        var, mean = torch.var_mean(new, dim=0, correction=0)
        expected = ((x - mean) / var.sqrt()).float()
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6, msg=name)
    for x, y in (
        (seen["action_mask"], got["observation"]["action_mask"]),
        (seen["bits"], got["observation"]["bits"]),
        (seen["picture"], got["observation"]["picture"]),
        (seen["place"][0], got["observation"]["place"][0]),
        (rows["last_action"], got["last_action"]),
    ):
        assert y is x


def test_rows_may_have_the_keys_in_another_order_than_the_space():
    """PolyBeast's rows have them sorted; a Dict keeps the order of its keywords."""
    box = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    space = gym.spaces.Dict(z=box, a=box, k=gym.spaces.Discrete(3))
    assert [*space.spaces] == ["z", "a", "k"]
    rows = random_batch(space)
    seen = rows["observation"]
    seen["z"] += 100
    rows["observation"] = {key: seen[key] for key in ("a", "k", "z")}
    norm = InputNorm(space, clip_rewards=True)
    norm.learn([norm.moments(rows)])
    got = norm(rows)["observation"]
    for key in ("z", "a"):
        assert abs(float(got[key][1:].mean())) < 1e-5, key


def test_a_reward_that_the_network_clips_is_not_normalized():
    norm = InputNorm(VECTOR, clip_rewards=True)
    rows = random_batch()
    norm.learn([norm.moments(rows)])
    assert norm(rows)["reward"] is rows["reward"]


@pytest.mark.parametrize(
    "space, clipping, told",
    [
        (ACTIONS, "abs_one", True),
        (ACTIONS, "none", False),  # Rewards are normalized.
        (MIXED, "abs_one", False),
    ],
)
def test_a_normalization_of_nothing_is_told(space, clipping, told, caplog):
    flags = make_flags(OBSERVATIONS, "--reward_clipping", clipping)
    learner = monobeast.create_learner(flags, Spaces(space, ACTIONS))
    assert ("--normalize_observations changes nothing here" in caplog.text) == told
    norm = learner.net.normalize
    moments = norm.moments(random_batch(space))
    assert moments.dtype == torch.float64 and (moments.numel() == 0) == told
    norm.learn([moments])


@pytest.mark.parametrize("module", [monobeast, polybeast])
@pytest.mark.parametrize("use_lstm", [False, True])
def test_the_network_sees_normalized_rows(module, use_lstm):
    """As one without statistics sees rows that somebody else has normalized."""
    options = {"clip_rewards": False, "use_lstm": use_lstm}
    torch.manual_seed(0)
    net = module.Net(VECTOR, ACTIONS, normalize=["observations"], **options)
    torch.manual_seed(0)
    plain = module.Net(VECTOR, ACTIONS, **options)
    rows = random_batch()
    net.normalize.learn([net.normalize.moments(random_batch(seed=1))])
    said, _ = net(rows, net.initial_state(B))
    expected, _ = plain(net.normalize(rows), net.initial_state(B))
    for key, x in said.items():
        torch.testing.assert_close(x, expected[key], rtol=0, atol=0)
    spaces = Spaces(VECTOR, ACTIONS)
    dry_run(net, spaces, module.net_outputs(spaces))
    assert net.normalize.reward.count == T * B  # A copy was tried.


def test_without_the_flag_the_network_has_no_statistics():
    net = monobeast.create_net(make_flags(), Spaces(VECTOR, ACTIONS))
    assert net.state_dict().keys() == dict(net.named_parameters()).keys()


# ------------------------------------------------------------------------- the update


@pytest.mark.parametrize("module", [monobeast, polybeast])
def test_an_update_learns_the_statistics_of_its_batch_once(module, monkeypatch):
    """In groups of columns, too."""
    monkeypatch.setattr(losses, "PIECE_BYTES", 1)
    learner = make_learner(OBSERVATIONS, module=module)
    batches = [random_batch(seed=seed) for seed in range(3)]
    for batch in batches:
        learner.update(batch, ())
    (norm,) = learner.net.normalize.observation
    new = torch.cat([batch["observation"][1:].flatten(0, 1) for batch in batches])
    assert norm.count.item() == len(new) == 3 * T * B
    torch.testing.assert_close(norm.mean, new.double().mean(0), rtol=1e-12, atol=0)
    var = new.double().var(0, correction=0)
    torch.testing.assert_close(norm.var, var, rtol=1e-12, atol=0)


def test_an_update_uses_the_statistics_that_its_actors_had():
    """So on-policy data has importance weights of 1, whatever it looks like."""
    learner = make_learner(*BOTH, "--learning_rate", "0.01")
    for seed in range(3):
        learner.update(on_policy(learner.net, random_batch(seed=seed)), ())
        mean_rho = learner.counts.averages.pop()["mean_rho"]
        assert mean_rho == pytest.approx(1, abs=1e-6), seed


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_skipped_update_changes_no_statistics(bad):
    learner = make_learner(*BOTH)
    learner.update(random_batch(), ())
    before = buffers(learner.net)
    spoilt = random_batch(seed=1)
    spoilt["observation"][2, 1, 3] = bad
    learner.update(spoilt, ())
    assert (learner.updates, learner.skipped) == (1, 1)
    for name, x in buffers(learner.net).items():
        assert torch.equal(x, before[name]), name


def test_columns_that_are_too_old_are_not_counted():
    learner = make_learner(OBSERVATIONS, "--max_policy_lag", "2")
    learner.updates = 5
    batch = random_batch()
    batch["policy_version"][1:, 1:] = 3
    learner.update(batch, ())
    (norm,) = learner.net.normalize.observation
    assert norm.count.item() == T * (B - 1)


# ---------------------------------------------------------------------- value targets


def test_outputs_stay_while_the_scale_changes_a_thousandfold():
    torch.manual_seed(0)
    layer = PopArt(13)
    x = torch.randn(7, 3, 13)
    layer.learn(mean=40.0, var=25.0)
    before = layer(x)
    for mean, std in ((40.0, 5000.0), (-3.0, 5.0), (32.0, 0.5), (40.0, 5.0)):
        layer.updates.zero_()  # As the first: the statistics become these at once.
        layer.learn(mean, std**2)
        assert layer.mean.item() == mean and layer.std.item() == pytest.approx(std)
        torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)
        said = torch.nn.functional.linear(x, layer.weight, layer.bias)
        normalized = (before.double() - mean) / std
        torch.testing.assert_close(said.double(), normalized, rtol=1e-3, atol=1e-5)


def test_each_output_has_statistics_of_its_own():
    torch.manual_seed(0)
    layer, x = PopArt(13, 3), torch.randn(7, 13)
    places = [x.data_ptr() for x in layer.state_dict().values()]
    before = layer(x)
    assert torch.equal(before, nn.functional.linear(x, layer.weight, layer.bias))
    mean, std = torch.tensor([[40.0, -3.0, 0.5], [5.0, 0.25, 70.0]]).double()
    layer.learn(mean, std**2)
    assert torch.equal(layer.mean, mean) and torch.equal(layer.std, std)
    torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)
    assert [x.data_ptr() for x in layer.state_dict().values()] == places


def test_a_thousand_small_changes_of_scale_keep_the_outputs():
    rng = np.random.default_rng(3)
    torch.manual_seed(0)
    layer, x = PopArt(13), torch.randn(31, 13)
    layer.learn(0.0, 1.0)
    before = layer(x).detach()
    for mean, std in zip(rng.normal(0, 2, 1000), rng.uniform(0.5, 2, 1000)):
        layer.learn(mean, std**2)
    torch.testing.assert_close(layer(x), before, rtol=1e-4, atol=1e-4)


def test_targets_of_the_first_batches_weigh_the_same_and_later_ones_fade():
    rng = np.random.default_rng(4)
    layer = PopArt(2)
    batches = rng.normal(rng.normal(0, 9, 3 * round(1 / RATE)), 3.0, (17, 300)).T
    mean = square = 0.0
    for i, batch in enumerate(batches, start=1):
        layer.learn(batch.mean(), batch.var())
        rate = max(RATE, 1 / i)
        mean += rate * (batch.mean() - mean)
        square += rate * (np.square(batch).mean() - square)
        if i == round(1 / RATE):
            assert layer.mean.item() == pytest.approx(batches[:i].mean())
            assert layer.var.item() == pytest.approx(batches[:i].var())
    assert layer.mean.item() == pytest.approx(mean)
    assert layer.std.item() == pytest.approx((square - mean**2) ** 0.5)


@pytest.mark.parametrize(
    "mean, var, bound",
    [
        (0.0, 0.0, MIN_STD),
        (0.0, 1e30, MAX_STD),
        (-700.0, 0.25, 700 * MIN_RELATIVE_STD),
    ],
)
def test_the_deviation_has_bounds_and_outputs_stay_at_them(mean, var, bound):
    layer, x = PopArt(5), torch.ones(1, 5)
    before = layer(x).item()
    layer.learn(mean, var)
    assert layer.std.item() == bound
    assert layer(x).item() == pytest.approx(before, rel=1e-5, abs=1e-6 * abs(mean))


def targets_of(values, batch, **options):
    """V-trace targets [T, B] of a batch that the present policy made."""
    transitions = ~batch["truncated"][:-1]
    return vtrace.from_importance_weights(
        torch.zeros(T, B).masked_fill_(~transitions, -torch.inf),
        0.99 * (~batch["done"][1:]).float(),
        batch["reward"][1:],
        values[:-1],
        values[-1],
        **options,
    ).vs


def test_losses_are_in_units_of_the_deviation():
    torch.manual_seed(0)
    x, layer = torch.randn(T + 1, B, 11), PopArt(11)
    layer.learn(500.0, 300.0**2)
    batch = random_batch()
    distribution = ActionDistribution(ACTIONS)
    outputs = {"policy_logits": batch["policy_logits"].clone()}
    outputs["policy_logits"][:-1] = batch["policy_logits"][1:]  # On-policy.

    def loss_of(scale):
        outputs["baseline"] = layer(x).squeeze(-1)
        return update.impala_loss(
            outputs,
            batch,
            distribution,
            discounting=0.99,
            baseline_cost=0.5,
            entropy_cost=0.0,
            reward_clipping="none",
            scale=scale,
        )

    plain, scaled = loss_of(1.0), loss_of(layer.scale)
    torch.testing.assert_close(scaled.pg_loss, plain.pg_loss / 300)
    torch.testing.assert_close(scaled.baseline_loss, plain.baseline_loss / 300**2)
    # The layer learns as one whose targets somebody else has normalized.
    vs = targets_of(outputs["baseline"].detach(), batch)
    said = torch.nn.functional.linear(x, layer.weight, layer.bias).squeeze(-1)
    expected = 0.25 * (said[:-1] - (vs - 500) / 300).square().sum()
    for parameter in (layer.weight, layer.bias):
        (got,) = torch.autograd.grad(scaled.total_loss, parameter, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected, parameter, retain_graph=True)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_an_infinite_loss_does_not_hide_the_others_of_a_log_row():
    learner = make_learner(RETURNS)
    good, bad = (on_policy(learner.net, random_batch(seed=seed)) for seed in range(2))
    bad["reward"][2, 1] = 1e25
    learner.update(good, ())
    learner.update(bad, ())
    assert (learner.updates, learner.skipped) == (1, 1)
    row = learner.counts.averages.pop()
    assert np.isfinite(row["total_loss"] + row["grad_norm"] + row["return_std"])


def test_a_batch_without_a_transition_is_left_out_of_the_averages():
    learner = make_learner(RETURNS)
    batch = on_policy(learner.net, random_batch())
    batch["truncated"][:-1] = True
    learner.update(batch, ())
    row = learner.counts.averages.pop()
    assert learner.updates == 1 and row["policy_lag_mean"] is not None
    assert row.get("mean_rho") is None and row.get("total_loss") is None


@pytest.mark.parametrize("module", [monobeast, polybeast])
@pytest.mark.parametrize("piece_bytes", [1, 2**30])
def test_an_update_learns_the_targets_of_its_transitions(
    module, piece_bytes, monkeypatch
):
    """Of all columns, but not of the rows that follow a truncation."""
    monkeypatch.setattr(losses, "PIECE_BYTES", piece_bytes)
    learner = make_learner(RETURNS, "--learning_rate", "0", module=module)
    batch = on_policy(learner.net, random_batch())
    batch["truncated"][2, 1] = True
    marks = mark_replayed(T + 1, B - 1, B)
    batch["replayed"] = torch.from_numpy(marks)  # Targets of these count, too.
    values = learner.net(batch)[0]["baseline"].detach()
    vs = targets_of(values, batch)[~batch["truncated"][:-1]]
    assert len(vs) == T * B - 1
    learner.update(batch, ())
    layer = learner.net.baseline
    assert layer.updates == 1
    assert layer.mean.item() == pytest.approx(vs.mean().item(), rel=1e-5)
    assert layer.var.item() == pytest.approx(vs.var(correction=0).item(), rel=1e-5)
    # What the log says of the batch; and the values are as before, but for rounding.
    row = learner.counts.averages.pop()
    assert row["return_mean"] == pytest.approx(layer.mean.item())
    assert row["return_std"] == pytest.approx(layer.std.item())
    after = learner.net(batch)[0]["baseline"]
    torch.testing.assert_close(after, values, rtol=1e-5, atol=1e-5)


def test_the_first_batch_is_for_the_statistics_and_the_entropy_bonus():
    learner = make_learner(RETURNS, "--entropy_cost", "0")
    batches = [on_policy(learner.net, random_batch(seed=seed)) for seed in range(2)]

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return learner.net(batches[0])[0]["policy_logits"]

    before = logits()
    learner.update(batches[0], ())
    assert torch.equal(logits(), before)
    learner.update(batches[1], ())
    assert not torch.equal(logits(), before)


def test_rewards_a_thousand_times_as_large_make_the_same_policy():
    """If the values begin at 0, whatever the rewards' units are."""
    policies = {}
    for factor in (1.0, 1000.0):
        argv = ("--grad_norm_clipping", "0", "--entropy_cost", "0")
        learner = make_learner(*BOTH, *argv, "--learning_rate", "0.002")
        torch.nn.init.zeros_(learner.net.baseline.weight)
        for seed in range(5):
            batch = random_batch(seed=seed)
            batch["reward"] *= factor
            learner.update(batch, ())
        assert learner.skipped == 0
        batch = random_batch(seed=99)
        batch["reward"] *= factor
        policies[factor] = learner.net(batch)[0]["policy_logits"].softmax(-1)
    torch.testing.assert_close(policies[1.0], policies[1000.0], rtol=1e-4, atol=1e-4)
    assert (policies[1.0].max() - policies[1.0].min()) > 0.1  # Something was learned.


# ----------------------------------------------------------------------- to the actors


def test_the_statistics_reach_the_actors_with_the_weights():
    """By shared memory in MonoBeast, by `Weights` in PolyBeast, where they are."""
    for module in (monobeast, polybeast):
        learner = make_learner(*BOTH, module=module)
        actor = module.create_net(learner.flags, Spaces(VECTOR, ACTIONS))
        if module is monobeast:
            weights = SharedWeights(learner.net.state_dict(), 0)
        else:
            weights = polybeast.Weights(learner.net, "cpu")
        learner.update(random_batch(), ())
        if module is monobeast:
            weights.publish(learner.net.state_dict(), 1)
            assert weights.fetch(actor, -1) == 1
        else:
            weights.publish(learner.net, 1)
            assert weights.fetch(actor, -1) == 1
        assert actor.normalize.observation[0].count == T * B
        assert actor.baseline.std != 1
        rows = random_batch(seed=2)
        with torch.no_grad():
            said, expected = actor(rows)[0], learner.net(rows)[0]
        map_nest(lambda a, b: torch.testing.assert_close(a, b), said, expected)
