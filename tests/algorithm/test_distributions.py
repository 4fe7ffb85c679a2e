# SPDX-License-Identifier: Apache-2.0
"""`core.algorithm.distributions`: against torch.distributions and by hand."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import distributions as td

from core.algorithm.action_layers import ActionFeatures, PolicyHead
from core.algorithm.distributions import (
    ActionDistribution,
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    box_units,
    mask_logits,
)
from core.errors import ConfigError
from core.nests import leaves, map_nest
from core.rollout import action_at, leaf_spaces, spec_of

spaces = gym.spaces
T, B = 3, 4
BOX = spaces.Box(np.float32([-2, 0, -np.inf]), np.float32([2, 10, np.inf]))
SPACES = {
    "discrete": spaces.Discrete(5, start=2),
    "multi_discrete": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "int32": spaces.MultiDiscrete([3, 2], start=[-1, 4], dtype=np.int32),
    "uint16": spaces.MultiDiscrete([3, 2], start=[1, 4], dtype=np.uint16),
    "one number": spaces.MultiDiscrete(np.array(4)),
    "multi_binary": spaces.MultiBinary((2, 2)),
    "box": BOX,
    "box64": spaces.Box(-1.0, 3.0, (2,), np.float64),
    "scalar box": spaces.Box(-2.0, 2.0, (), np.float32),
    "tuple": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3, start=-1)]),
    "dict": spaces.Dict(
        {
            "arm": spaces.Box(-1, 1, (2,)),
            "buttons": spaces.MultiBinary(3),
            "gear": spaces.Discrete(4),
            "inner": spaces.Tuple(
                [spaces.MultiDiscrete([2, 2]), spaces.Box(-5, 5, (1,)), BOX]
            ),
        }
    ),
}


@pytest.fixture(autouse=True)
def fixed_torch_seed():
    torch.manual_seed(0)


def theirs(kind, parameters):
    """Return torch's own distribution."""
    match kind:
        case Categorical():
            return td.Categorical(logits=parameters)
        case Bernoulli():
            return td.Independent(td.Bernoulli(logits=parameters), 1)
    mean, log_std = parameters.chunk(2, -1)
    return td.Independent(td.Normal(mean, log_std.exp()), 1)


KINDS = [Categorical(6), Bernoulli(3), DiagonalGaussian(3)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_each_distribution_is_torchs(kind):
    p, q = torch.randn(2, T, B, kind.num_parameters, dtype=torch.float64)
    sample = kind.sample(p)
    assert sample.shape == (T, B, kind.size)
    reference, other = theirs(kind, p), theirs(kind, q)
    value = sample.squeeze(-1) if isinstance(kind, Categorical) else sample
    for ours, expected in [
        (kind.log_prob(p, sample), reference.log_prob(value)),
        (kind.entropy(p), reference.entropy()),
        (kind.kl(p, q), td.kl_divergence(reference, other)),
        (kind.kl(p, p), torch.zeros(T, B, dtype=torch.float64)),
    ]:
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-10)
    assert (kind.log_prob(p, kind.mode(p)) >= kind.log_prob(p, sample)).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_samples_are_distributed_as_torchs(kind):
    """The mean of log_prob over many samples is minus the entropy."""
    p = torch.randn(kind.num_parameters).expand(200_000, -1)
    log_probs = kind.log_prob(p, kind.sample(p))
    error = log_probs.std() / math.sqrt(len(log_probs))
    assert abs(log_probs.mean() + kind.entropy(p)[0]) < 5 * error
    if not isinstance(kind, Categorical):
        expected, samples = theirs(kind, p[0]), kind.sample(p)
        deviation = (samples.mean(0) - expected.mean).abs()
        assert (deviation < 5 * (expected.variance / len(p)).sqrt()).all()
        correlations = torch.corrcoef(samples.T) - torch.eye(3)  # Of the elements.
        assert (correlations.abs() < 5 / math.sqrt(len(p))).all()


@pytest.mark.parametrize("name", SPACES)
def test_actions_are_in_the_space_and_have_its_structure(name):
    space = SPACES[name]
    distribution = ActionDistribution(space)
    parameters = 3 * torch.randn(T, B, distribution.num_parameters)
    for greedy in (False, True):
        drawn = distribution.draw(parameters, greedy=greedy)
        assert drawn.keys() == distribution.columns.keys()
        for key, spec in distribution.columns.items():
            rows = map_nest(lambda x: x.numpy(), drawn[key])
            for (_, x), (_, leaf) in zip(leaves(rows), leaves(spec), strict=True):
                assert (x.shape, x.dtype) == ((T, B, *leaf.shape), leaf.dtype)
        for t in range(T):
            for b in range(B):
                rows = map_nest(lambda x, t=t: x[t].numpy(), drawn["action"])
                action = action_at(leaf_spaces(space), rows, b)
                assert space.contains(action), action
    log_prob = distribution.log_prob(parameters, distribution.sample_of(drawn))
    assert log_prob.shape == distribution.entropy(parameters).shape == (T, B)
    assert torch.isfinite(log_prob).all()


@pytest.mark.parametrize("name", SPACES)
def test_what_is_said_of_a_space_is_the_sum_over_its_leaves(name):
    """Each leaf alone, with its own slice of parameters, in the documented order."""
    space = SPACES[name]
    distribution = ActionDistribution(space)
    p, q = torch.randn(2, 1, 1, distribution.num_parameters, dtype=torch.float64)
    sample = torch.cat([part.sample(x) for part, (x,) in distribution._split(p)], -1)
    log_prob, entropy, kl, begin, at = 0.0, 0.0, 0.0, 0, 0

    def add(make, n, values):
        nonlocal log_prob, entropy, kl, begin, at
        ours, other = (make(x[0, 0, begin : begin + n]) for x in (p, q))
        log_prob += ours.log_prob(sample[0, 0, at : at + values].squeeze()).sum()
        entropy += ours.entropy().sum()
        kl += td.kl_divergence(ours, other).sum()
        begin, at = begin + n, at + values

    for part in distribution.parts:
        n = part.num_parameters
        match part:
            case Categorical():
                add(lambda x: td.Categorical(logits=x), n, 1)
            case Bernoulli():
                add(lambda x: td.Bernoulli(logits=x), n, n)
            case DiagonalGaussian():
                d = distribution.num_log_stds
                add(
                    lambda x, d=d: td.Normal(x[:d].squeeze(), x[d:].exp().squeeze()),
                    n,
                    d,
                )
    assert (begin, at) == (distribution.num_parameters, distribution.size)
    for ours, expected in [
        (distribution.log_prob(p, sample), log_prob),
        (distribution.entropy(p), entropy),
        (distribution.kl(p, q), kl),
    ]:
        assert ours.item() == pytest.approx(float(expected), abs=1e-9)


def test_each_leaf_of_an_action_has_its_own_part_of_the_sample():
    distribution = ActionDistribution(SPACES["dict"])
    gear, pair, bits = [0, 0, 9, 0], [0, 9, 9, 0], [9, -9, 9]
    arm, one, box = [0.5, -0.25], [0.2], [0.25, -0.5, 7.0]
    numbers = [*gear, *pair, *bits, *arm, *one, *box, *[0] * 6]
    drawn = distribution.draw(torch.tensor(numbers).view(1, 1, -1), greedy=True)
    assert drawn["sample"].flatten().tolist() == pytest.approx(
        [2, 1, 0, 1, 0, 1, *arm, *one, *box]
    )
    action = map_nest(lambda x: x[0, 0].tolist(), drawn["action"])
    assert (action["gear"], action["inner"][0]) == (2, [1, 0])
    assert (action["buttons"], action["arm"]) == ([1, 0, 1], arm)
    assert action["inner"][1:] == ([pytest.approx(1)], [0.5, 2.5, 7])


def test_a_box_is_scaled_and_clipped_and_the_sample_kept():
    distribution = ActionDistribution(BOX)
    means = torch.tensor([0.5, -0.5, 123.0])
    parameters = torch.cat([means, torch.full((3,), -20.0)]).view(1, 1, 6)
    drawn = distribution.draw(parameters)
    torch.testing.assert_close(drawn["sample"][0, 0], means)
    torch.testing.assert_close(drawn["action"][0, 0], torch.tensor([1.0, 2.5, 123.0]))
    parameters[..., :2] = torch.tensor([-7.0, 7.0])
    drawn = distribution.draw(parameters)
    torch.testing.assert_close(drawn["action"][0, 0, :2], torch.tensor([-2.0, 10.0]))
    torch.testing.assert_close(drawn["sample"][0, 0, :2], torch.tensor([-7.0, 7.0]))


def test_a_box_of_float64_is_met_exactly_at_its_bounds():
    third = spaces.Box(np.array([0.1]), np.array([1 / 3]), dtype=np.float64)
    distribution = ActionDistribution(third)
    for mean, bound in (-50.0, third.low), (50.0, third.high):
        drawn = distribution.draw(torch.tensor([[[mean, 0.0]]]), greedy=True)
        assert drawn["action"].numpy() == bound


def test_a_box_that_is_unbounded_on_a_side_is_not_scaled():
    low, high = [-np.inf, -1, -1e7, 0, 0], [1, np.inf, 1e7, np.inf, 1e6]
    offset, scale = box_units(spaces.Box(np.float32(low), np.float32(high)))
    assert (offset.tolist(), scale.tolist()) == ([0, 0, 0, 0, 5e5], [1, 1, 1, 1, 5e5])


def test_a_box_that_is_unbounded_and_without_0_begins_at_its_bound():
    low, high = [5, -np.inf, 2e6], [np.inf, -3, 3e6]
    offset, scale = box_units(spaces.Box(np.float32(low), np.float32(high)))
    assert (offset.tolist(), scale.tolist()) == ([5, -3, 2e6], [1, 1, 1])


@pytest.mark.parametrize("name", ["discrete", "multi_discrete"])
def test_any_number_of_rows_may_rule_all_actions_out(name):
    distribution = ActionDistribution(SPACES[name])
    for num_rows in (1, 2, 64):
        logits = torch.randn(num_rows, distribution.num_parameters)
        logits = mask_logits(logits, torch.zeros_like(logits))
        for action in distribution.draw(logits)["action"].numpy():
            assert SPACES[name].contains(action)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", SPACES)
def test_parameters_that_are_not_finite_are_refused(name, number):
    distribution = ActionDistribution(SPACES[name])
    parameters = torch.zeros(1, 2, distribution.num_parameters)
    parameters[0, 1, -1] = number
    inputs = {"observation": {"a": torch.zeros(1, 2), "b": torch.ones(1, 2).long()}}
    with pytest.raises(FloatingPointError, match=r"inputs and weights are .* Net\.for"):
        distribution.draw(parameters, inputs=inputs)
    inputs["observation"]["a"][0, 1] = number
    with pytest.raises(FloatingPointError, match=r"inputs: observation/a\. So check"):
        distribution.draw(parameters, inputs=inputs)
    with pytest.raises(FloatingPointError, match=r"Check the env.* Net\.forward") as e:
        distribution.draw(parameters)  # As in an older fork.
    assert "inputs" not in str(e.value)


@pytest.mark.parametrize(
    "space, words",
    [
        (spaces.Box(0, 9, (2,), np.int64), "int64.*MultiDiscrete"),
        (spaces.Dict({"a": spaces.Box(0, 1, (1,), bool)}), "action/a.*bool"),
    ],
)
def test_a_space_without_a_distribution_is_refused_by_name(space, words):
    with pytest.raises(ConfigError, match=words):
        ActionDistribution(space)


@pytest.mark.parametrize("low, high", [(1.0, -1.0), (np.nan, 1.0)])
def test_bounds_that_are_reversed_or_not_numbers_are_refused(low, high):
    space = spaces.Box(-1, 1, (2,))
    space.low[1], space.high[1] = low, high
    with pytest.raises(ConfigError, match="'action' is .*lower bound"):
        ActionDistribution(space)


# --------------------------------------------------------------------------- layers


def test_the_head_begins_near_zero_with_the_initial_std():
    distribution = ActionDistribution(SPACES["dict"])
    head = PolicyHead(32, distribution, initial_std=0.5)
    parameters = head(torch.randn(7, 32))
    d = distribution.num_log_stds
    assert parameters.shape == (7, distribution.num_parameters)
    assert parameters[:, :-d].abs().max() < 0.2
    torch.testing.assert_close(parameters[:, -d:].exp(), torch.full((7, d), 0.5))
    assert head.log_std.requires_grad
    largest = torch.linalg.matrix_norm(head.weight, 2)
    torch.testing.assert_close(largest.item(), 0.01, rtol=1e-3, atol=0)


def test_a_head_of_discrete_actions_has_the_tensors_of_older_checkpoints():
    head = PolicyHead(8, ActionDistribution(spaces.Discrete(3)), initial_std=1.0)
    assert {k: tuple(x.shape) for k, x in head.state_dict().items()} == {
        "weight": (3, 8),
        "bias": (3,),
    }


@pytest.mark.parametrize("name", SPACES)
def test_features_of_actions_are_one_hot_or_within_one(name):
    space = SPACES[name]
    features = ActionFeatures(space)
    space.seed(0)
    spec = spec_of(space)
    rows = map_nest(lambda s: np.zeros((2, 3, *s.shape), s.dtype), spec)
    samples = [[space.sample() for _ in range(3)] for _ in range(2)]
    for t in range(2):
        for b in range(3):
            for (_, row), (_, x) in zip(leaves(rows), leaves(samples[t][b])):
                row[t, b] = x
    x = features(map_nest(torch.from_numpy, rows))
    assert x.shape == (6, features.num_features)
    bounded = {n for n in SPACES if n not in ("box", "dict")}
    if name in bounded:
        assert x.abs().max() <= 1 + 1e-6
    if name == "discrete":
        assert x.argmax(1).tolist() == [s - 2 for row in samples for s in row]
    if name == "box":
        first = torch.tensor(np.array(samples)[..., 0].ravel() / 2).float()
        torch.testing.assert_close(x[:, 0], first)


@pytest.mark.parametrize(
    "space, action, expected",
    [
        (spaces.Box(0, 2, (1,)), [1.5], [0.5]),
        (spaces.Box(-9, 9, (1,)), [4.5], [0.5]),
        (
            spaces.Tuple(
                [
                    spaces.Box(np.float32([-10, 0]), np.float32([10, 4])),
                    spaces.Discrete(2, start=5),
                    spaces.Box(3, 3, (1,)),  # There is nothing to choose.
                    spaces.Box(-1, 3, (1,)),
                ]
            ),
            ([-5, 1], 6, [3], [3]),
            [-0.5, -0.5, 0, 1, 0, 1],
        ),
    ],
    ids=["offset", "scale", "tuple"],
)
def test_features_of_an_action_worked_out_by_hand(space, action, expected):
    features = ActionFeatures(space)
    assert not features.state_dict()  # Checkpoints have no such tensors.
    spec = spec_of(space)
    rows = map_nest(lambda s: np.zeros((1, 1, *s.shape), s.dtype), spec)
    actions = action if isinstance(action, tuple) else (action,)
    for (_, row), x in zip(leaves(rows), actions, strict=True):
        row[:] = x
    x = features(map_nest(torch.from_numpy, rows))
    torch.testing.assert_close(x, torch.tensor([expected]))
