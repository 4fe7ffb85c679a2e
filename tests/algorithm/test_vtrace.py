# SPDX-License-Identifier: Apache-2.0
"""V-trace against the paper's sum, and what must hold whatever the numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.algorithm import vtrace

T, B = 5, 3
GAMMA = 0.9
NAMES = ("log_rhos", "discounts", "rewards", "values", "bootstrap_value")


def random_arguments(seed=0, T=T, B=B, dtype=torch.float64):
    """Return arguments with ends of episodes, steps of weight zero, and both."""
    rng = np.random.default_rng(seed)
    weightless = rng.random((T, B)) < 0.2
    ends = rng.random((T, B)) < 0.2
    arguments = {
        "log_rhos": np.where(weightless, -np.inf, rng.normal(size=(T, B))),
        "discounts": np.where(ends, 0.0, GAMMA),
        "rewards": rng.normal(size=(T, B)),
        "values": rng.normal(size=(T, B)),
        "bootstrap_value": rng.normal(size=B),
    }
    return {name: torch.tensor(x, dtype=dtype) for name, x in arguments.items()}


def paper_sum(
    log_rhos,
    discounts,
    rewards,
    values,
    bootstrap_value,
    *,
    clip_rho_threshold=1.0,
    clip_pg_rho_threshold=1.0,
    clip_c_threshold=1.0,
    lambda_=1.0,
):
    """Return v and the advantages by equation (1), term by term, in float64."""

    log_rhos, discounts, rewards, values, bootstrap_value = (
        np.asarray(x, np.float64)
        for x in (log_rhos, discounts, rewards, values, bootstrap_value)
    )
    T, B = values.shape
    V = np.concatenate([values, bootstrap_value[np.newaxis]])

    def clipped_rho(t, b, threshold):
        rho = math.exp(log_rhos[t, b])
        return rho if threshold is None else min(threshold, rho)

    v = V.copy()
    for b in range(B):
        for s in range(T):
            for t in range(s, T):
                factor = 1.0
                for i in range(s, t):
                    c = lambda_ * clipped_rho(i, b, clip_c_threshold)
                    factor *= discounts[i, b] * c
                delta = clipped_rho(t, b, clip_rho_threshold) * (
                    rewards[t, b] + discounts[t, b] * V[t + 1, b] - V[t, b]
                )
                v[s, b] += factor * delta
    advantages = np.empty((T, B))
    for b in range(B):
        for s in range(T):
            advantages[s, b] = clipped_rho(s, b, clip_pg_rho_threshold) * (
                rewards[s, b] + discounts[s, b] * v[s + 1, b] - V[s, b]
            )
    return v[:-1], advantages


def assert_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            one, torch.as_tensor(other, dtype=one.dtype), rtol=1e-10, atol=1e-10
        )


@given(
    seed=st.integers(min_value=0, max_value=2**31),
    T=st.integers(min_value=1, max_value=11),
    B=st.integers(min_value=1, max_value=5),
    clip_rho=st.none() | st.floats(min_value=0.0, max_value=3.0),
    clip_pg_rho=st.none() | st.floats(min_value=0.0, max_value=3.0),
    clip_c=st.floats(min_value=0.0, max_value=2.0),
    lambda_=st.floats(min_value=0.0, max_value=1.0),
)
def test_targets_and_advantages_are_the_papers_sum(
    seed, T, B, clip_rho, clip_pg_rho, clip_c, lambda_
):
    arguments = random_arguments(seed, T, B)
    options = {
        "clip_rho_threshold": clip_rho,
        "clip_pg_rho_threshold": clip_pg_rho,
        "clip_c_threshold": clip_c,
        "lambda_": lambda_,
    }
    assert_equal(
        vtrace.from_importance_weights(**arguments, **options),
        paper_sum(**arguments, **options),
    )


def test_float32_of_production_agrees_with_the_sum_in_float64():
    arguments = random_arguments(T=41, dtype=torch.float32)
    returns = vtrace.from_importance_weights(**arguments)
    for actual, expected in zip(returns, paper_sum(**arguments), strict=True):
        assert actual.dtype == torch.float32
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_small_case_worked_out_by_hand():
    # delta_1 = 0.5 * (4 + 0.5 * 8 - 2) = 3; delta_0 = 1 * (3 + 0.5 * 2 - 1) = 3.
    # v_1 = 2 + 3 = 5; v_0 = 1 + 3 + 0.5 * 1 * 3 = 5.5.
    # Advantages: 1 * (3 + 0.5 * 5 - 1) = 4.5; 0.5 * (4 + 0.5 * 8 - 2) = 3.
    vs, pg_advantages = vtrace.from_importance_weights(
        torch.tensor([[2.0], [0.5]]).log(),
        torch.tensor([[0.5], [0.5]]),
        torch.tensor([[3.0], [4.0]]),
        torch.tensor([[1.0], [2.0]]),
        torch.tensor([8.0]),
    )
    torch.testing.assert_close(vs, torch.tensor([[5.5], [5.0]]))
    torch.testing.assert_close(pg_advantages, torch.tensor([[4.5], [3.0]]))


def test_no_gradient_flows_through_the_results():
    arguments = random_arguments()
    for x in arguments.values():
        x.requires_grad_()
    for x in vtrace.from_importance_weights(**arguments):
        assert not x.requires_grad


def test_arguments_are_left_as_they_were():
    arguments = random_arguments()
    copies = {name: x.clone() for name, x in arguments.items()}
    vtrace.from_importance_weights(**arguments)
    for name, x in arguments.items():
        assert torch.equal(x, copies[name]), name


@pytest.mark.parametrize("name", NAMES)
def test_an_error_names_the_tensor_of_another_shape(name):
    arguments = random_arguments()
    arguments[name] = arguments[name].unsqueeze(-1)
    got = str(list(arguments[name].shape))
    with pytest.raises(ValueError) as error:
        vtrace.from_importance_weights(**arguments)
    assert str(error.value).startswith(f"{name} is float64{got}; expected ")


@pytest.mark.parametrize("name", [n for n in NAMES if n != "values"])
def test_an_error_names_the_tensor_of_another_dtype(name):
    arguments = random_arguments()
    arguments[name] = arguments[name].float()
    with pytest.raises(ValueError, match=rf"^{name} is float32.*; expected float64"):
        vtrace.from_importance_weights(**arguments)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_values_of_a_coarse_dtype_are_refused(dtype):
    arguments = {name: x.to(dtype) for name, x in random_arguments().items()}
    with pytest.raises(ValueError, match=r"^values is .*; expected float32"):
        vtrace.from_importance_weights(**arguments)


def test_action_log_probs_are_those_of_the_actions_taken():
    logits, actions = torch.randn(T, B, 7), torch.randint(7, (T, B))
    log_probs = vtrace.action_log_probs(logits, actions)
    assert log_probs.shape == (T, B)
    for t in range(T):
        for b in range(B):
            expected = logits[t, b].softmax(-1)[actions[t, b]].log()
            torch.testing.assert_close(log_probs[t, b], expected)


def test_from_logits_weighs_by_the_two_policies():
    arguments = random_arguments()
    del arguments["log_rhos"]
    behavior, target = torch.randn(2, T, B, 7, dtype=torch.float64)
    actions = torch.randint(7, (T, B))
    options = {"clip_rho_threshold": 1.9, "clip_pg_rho_threshold": None}
    returns = vtrace.from_logits(
        behavior_policy_logits=behavior,
        target_policy_logits=target.requires_grad_(),
        actions=actions,
        **arguments,
        **options,
    )
    ratios = target.detach().softmax(-1) / behavior.softmax(-1)
    log_rhos = torch.tensor(
        [[ratios[t, b, actions[t, b]].log() for b in range(B)] for t in range(T)]
    )
    assert_equal(returns[:2], paper_sum(log_rhos, **arguments, **options))
    assert_equal(returns.log_rhos, log_rhos)
    assert not (returns.vs.requires_grad or returns.pg_advantages.requires_grad)
    assert_equal(
        returns.target_action_log_probs - returns.behavior_action_log_probs, log_rhos
    )


@pytest.mark.gpu
def test_the_gpu_agrees_with_the_cpu():
    arguments = random_arguments()
    on_gpu = {name: x.cuda() for name, x in arguments.items()}
    assert_equal(
        [x.cpu() for x in vtrace.from_importance_weights(**on_gpu)],
        vtrace.from_importance_weights(**arguments),
    )
