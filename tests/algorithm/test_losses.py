# SPDX-License-Identifier: Apache-2.0
"""The IMPALA loss: alignment of rows, ends of episodes, gradients by hand."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch

import monobeast
import polybeast
from core.algorithm import losses, update
from core.algorithm.distributions import ActionDistribution
from core.algorithm.dry_run import zero_rows
from core.environments.toys import Catch
from core.nests import leaves
from core.rollout import Spaces
from tests.algorithm.test_vtrace import paper_sum

T, B, A = 5, 3, 7
CATEGORICAL = ActionDistribution(gym.spaces.Discrete(A))
OPTIONS = {
    "distribution": CATEGORICAL,
    "discounting": 0.9,
    "baseline_cost": 0.5,
    "entropy_cost": 0.01,
    "reward_clipping": "none",
}
SEEDS = range(5)


@pytest.fixture(autouse=True)
def fixed_torch_seed():
    torch.manual_seed(0)


def random_rows(seed=0, T=T, B=B, dtype=torch.float64):
    """Return (learner outputs, batch) with terminations and truncations anywhere.

    The learner's outputs require gradients. The reset row after a truncated one is
    done, with reward 0.
    """
    rng = np.random.default_rng(seed)
    done = np.zeros((T + 1, B), bool)
    truncated = np.zeros((T + 1, B), bool)
    for b in range(B):
        for t in range(T + 1):
            if t and truncated[t - 1, b]:
                done[t, b] = True
            else:
                done[t, b], truncated[t, b] = rng.permutation(
                    [rng.random() < 0.4, False]
                )
    reward = 2.0 * rng.normal(size=(T + 1, B))
    reward[1:][truncated[:-1]] = 0.0
    behavior_logits = rng.normal(size=(T + 1, B, A))
    batch = {
        "reward": torch.tensor(reward, dtype=dtype),
        "done": torch.tensor(done),
        "truncated": torch.tensor(truncated),
        "action": torch.tensor(rng.integers(A, size=(T + 1, B))),
        "policy_logits": torch.tensor(behavior_logits, dtype=dtype),
    }
    logits = behavior_logits + 0.5 * rng.normal(size=(T + 1, B, A))
    return {
        "policy_logits": torch.tensor(logits, dtype=dtype, requires_grad=True),
        "baseline": torch.tensor(
            rng.normal(size=(T + 1, B)), dtype=dtype, requires_grad=True
        ),
    }, batch


def plain_rows(seed=0, **kwargs):
    """The same without the end of any episode."""
    outputs, batch = random_rows(seed, **kwargs)
    batch["done"].fill_(False)
    batch["truncated"].fill_(False)
    return outputs, batch


def gradients(loss, outputs):
    return torch.autograd.grad(loss, [outputs["policy_logits"], outputs["baseline"]])


def cut(rows, t, b):
    """Return the rows t (a slice) of column b, as a batch of one column."""
    return {key: x[t, b : b + 1] for key, x in rows.items()}


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def slow_loss(outputs, batch):
    """Return (pg, baseline, entropy) and their gradients, one transition at a time.

    Gradients by hand: of log pi(a) with regard to the logits, onehot(a) - pi; of
    sum(pi log pi), pi (log pi + H); of 1/2 (v - V)^2 with regard to V, V - v.
    """
    learner_logits = outputs["policy_logits"].detach().numpy()
    V = outputs["baseline"].detach().numpy()
    rows = {key: x.numpy() for key, x in batch.items()}
    T, B = V.shape[0] - 1, V.shape[1]
    log_rhos, discounts, rewards = (np.zeros((T, B)) for _ in range(3))
    for t in range(T):
        for b in range(B):
            action = rows["action"][t + 1, b]
            log_pi = log_softmax(learner_logits[t, b])[action]
            log_mu = log_softmax(rows["policy_logits"][t + 1, b])[action]
            log_rhos[t, b] = log_pi - log_mu
            rewards[t, b] = rows["reward"][t + 1, b]
            discounts[t, b] = 0.0 if rows["done"][t + 1, b] else 0.9
            if rows["truncated"][t, b]:
                log_rhos[t, b] = -math.inf
    vs, advantages = paper_sum(log_rhos, discounts, rewards, V[:-1], V[-1])

    pg = baseline = entropy = 0.0
    pg_grad, entropy_grad = np.zeros_like(learner_logits), np.zeros_like(learner_logits)
    baseline_grad = np.zeros_like(V)
    for t in range(T):
        for b in range(B):
            if rows["truncated"][t, b]:
                continue  # No transition starts here.
            action = rows["action"][t + 1, b]
            log_pi = log_softmax(learner_logits[t, b])
            pi = np.exp(log_pi)
            H = -sum(pi * log_pi)
            pg -= advantages[t, b] * log_pi[action]
            pg_grad[t, b] = advantages[t, b] * (pi - np.eye(A)[action])
            baseline += 0.5 * (vs[t, b] - V[t, b]) ** 2
            baseline_grad[t, b] = V[t, b] - vs[t, b]
            entropy -= H
            entropy_grad[t, b] = pi * (log_pi + H)
    return (pg, baseline, entropy), (pg_grad, baseline_grad, entropy_grad)


def test_policy_gradient_does_not_flow_into_the_advantages():
    log_probs = torch.randn(T, B, requires_grad=True)
    advantages = torch.randn(T, B, requires_grad=True)
    losses.compute_policy_gradient_loss(log_probs, advantages).backward()
    assert log_probs.grad is not None
    assert advantages.grad is None


def test_an_action_ruled_out_by_a_very_low_logit_gives_no_nan():
    logits = torch.randn(T, B, A)
    logits[..., 2] = torch.finfo(torch.float32).min
    logits.requires_grad_()
    entropy = CATEGORICAL.entropy(logits)
    loss = losses.compute_entropy_loss(entropy, torch.ones(T, B, dtype=torch.bool))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()


# ------------------------------------------------------------------ the slow arithmetic


@pytest.mark.parametrize("seed", SEEDS)
def test_losses_are_those_of_one_transition_at_a_time(seed):
    outputs, batch = random_rows(seed)
    loss = update.impala_loss(outputs, batch, **OPTIONS)
    (pg, baseline, entropy), _ = slow_loss(outputs, batch)
    assert loss.pg_loss.item() == pytest.approx(pg)
    assert loss.baseline_loss.item() == pytest.approx(0.5 * baseline)
    assert loss.entropy_loss.item() == pytest.approx(0.01 * entropy)
    assert loss.entropy.item() == pytest.approx(-entropy)
    assert loss.total_loss.item() == pytest.approx(pg + 0.5 * baseline + 0.01 * entropy)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_are_those_worked_out_by_hand(seed):
    outputs, batch = random_rows(seed)
    loss = update.impala_loss(outputs, batch, **OPTIONS)
    logits_grad, values_grad = gradients(loss.total_loss, outputs)
    _, (pg, baseline, entropy) = slow_loss(outputs, batch)
    assert_same(logits_grad, torch.tensor(pg + 0.01 * entropy))
    assert_same(values_grad, torch.tensor(0.5 * baseline))


def test_float32_of_production_agrees_with_float64():
    loss64 = update.impala_loss(*random_rows(), **OPTIONS)
    loss32 = update.impala_loss(*random_rows(dtype=torch.float32), **OPTIONS)
    for name, x in loss32.scalars().items():
        exact = name in ("target", "target_square")  # Their difference counts.
        assert x.dtype == (torch.float64 if exact else torch.float32), name
        expected = getattr(loss64, name).item()
        assert x.item() == pytest.approx(expected, rel=1e-4), name


# ---------------------------------------------------------------------------- alignment


def test_the_last_row_of_the_batch_holds_the_last_transition():
    # One transition with reward 1, action 2, on policy, all values 0: the advantage of
    # action 2 at row 0 is 1.
    outputs = {
        "policy_logits": torch.zeros(2, 1, A, requires_grad=True),
        "baseline": torch.zeros(2, 1, requires_grad=True),
    }
    batch = {
        "reward": torch.tensor([[5.0], [1.0]]),
        "done": torch.tensor([[True], [False]]),
        "truncated": torch.tensor([[False], [False]]),
        "action": torch.tensor([[4], [2]]),
        "policy_logits": torch.zeros(2, 1, A),
    }
    loss = update.impala_loss(outputs, batch, **OPTIONS)
    assert loss.pg_loss.item() == pytest.approx(math.log(A))
    assert loss.baseline_loss.item() == 0.5 * 0.5
    logits_grad, _ = gradients(loss.total_loss, outputs)
    assert (logits_grad[0, 0] < 0).nonzero().tolist() == [[2]]


# --------------------------------------------------------------------- ends of episodes


def trajectories(truncated, done, b):
    """Yield (first row, last row) of each trajectory in column b, ends shared.

    A trajectory ends with the row that is done (the next begins there), or with the
    truncated row (the next begins with the reset row after it), or with the batch.
    """
    T, first = len(done) - 1, 0
    for t in range(T + 1):
        if truncated[t, b]:
            yield first, t
            first = t + 1
        elif t > first and done[t, b]:
            yield first, t
            first = t
    yield first, T


@pytest.mark.parametrize("seed", SEEDS)
def test_episodes_count_as_much_as_separate_trajectories(seed):
    outputs, batch = random_rows(seed, T=17)
    whole = update.impala_loss(outputs, batch, **OPTIONS)
    assert batch["truncated"].any() and batch["done"].any()

    total, apart = 0.0, []
    for b in range(B):
        for first, last in trajectories(batch["truncated"], batch["done"], b):
            if first >= last:
                continue  # A truncated row after nothing, or the reset row at the end.
            rows = slice(first, last + 1)
            part = cut(batch, rows, b)
            # A trajectory of its own is not marked: it just stops, with its bootstrap.
            part["truncated"] = torch.zeros_like(part["truncated"])
            loss = update.impala_loss(cut(outputs, rows, b), part, **OPTIONS)
            total = total + loss.total_loss
            apart.append(loss)

    assert_same(whole.total_loss, total)
    for name in whole.scalars():
        assert_same(getattr(whole, name), sum(getattr(loss, name) for loss in apart))
    for one, other in zip(
        gradients(whole.total_loss, outputs), gradients(total, outputs), strict=True
    ):
        assert_same(one, other)


def test_a_batch_without_transitions_has_loss_zero_and_no_nan():
    outputs, batch = random_rows(dtype=torch.float32)
    batch["truncated"].fill_(True)
    loss = update.impala_loss(outputs, batch, **OPTIONS)
    assert not any(x.item() for x in loss.scalars().values())
    for gradient in gradients(loss.total_loss, outputs):
        assert not gradient.any()


def test_costs_scale_their_parts_which_add_up_to_the_total():
    outputs, batch = random_rows()
    loss = update.impala_loss(outputs, batch, **OPTIONS)
    costs = {"baseline_cost": 1.5, "entropy_cost": 0.05}
    other = update.impala_loss(outputs, batch, **OPTIONS | costs)
    assert_same(other.baseline_loss, 3.0 * loss.baseline_loss)
    assert_same(other.entropy_loss, 5.0 * loss.entropy_loss)
    for x in (loss, other):
        parts = x.pg_loss + x.baseline_loss + x.entropy_loss
        assert_same(x.total_loss.detach(), parts)


# ------------------------------------------------------------------ options and refusal


def test_abs_one_clamps_rewards():
    outputs, batch = random_rows()
    assert (batch["reward"][1:].abs() > 1).any()
    clamped = batch | {"reward": batch["reward"].clamp(-1, 1)}
    options = OPTIONS | {"reward_clipping": "abs_one"}
    clipping = update.impala_loss(outputs, batch, **options)
    assert (
        clipping.total_loss
        == update.impala_loss(outputs, clamped, **OPTIONS).total_loss
    )
    assert (
        clipping.total_loss != update.impala_loss(outputs, batch, **OPTIONS).total_loss
    )


@pytest.mark.parametrize(
    "option",
    [
        {"clip_rho_threshold": None},
        {"clip_pg_rho_threshold": None},
        {"clip_c_threshold": 0.5},
        {"lambda_": 0.5},
    ],
    ids=lambda option: next(iter(option)),
)
def test_each_option_of_vtrace_reaches_it(option, monkeypatch):
    calls = []
    original = losses.vtrace.from_importance_weights

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(losses.vtrace, "from_importance_weights", spy)
    update.impala_loss(*random_rows(), **OPTIONS, **option)
    assert calls == [option]


def test_each_flag_of_the_loss_reaches_it():
    argv = "--discounting 0.8 --vtrace_lambda 0.7 --baseline_cost 0.4"
    argv += " --entropy_cost 0.03 --reward_clipping none"
    flags = monobeast.parse_flags(["--env", "Catch", *argv.split()])
    outputs, batch = random_rows()

    def net(rows, state):
        return outputs, state

    net.distribution = CATEGORICAL
    options = {"discounting": 0.8, "baseline_cost": 0.4, "entropy_cost": 0.03}
    expected = update.impala_loss(outputs, batch, **OPTIONS | options, lambda_=0.7)
    loss = update.compute_loss(flags, net, batch, ())
    assert loss.total_loss == expected.total_loss


def test_entropy_and_rho_count_transitions_only():
    outputs, batch = plain_rows()
    outputs["policy_logits"].data.zero_()
    batch["policy_logits"].zero_()  # On policy, so every weight is 1.
    batch["truncated"][2, 1] = True
    batch["done"][3, 1] = True
    loss = update.impala_loss(outputs, batch, **OPTIONS)
    assert loss.entropy.item() == pytest.approx((T * B - 1) * math.log(A))
    assert loss.rho.item() == pytest.approx(T * B - 1)


@pytest.mark.parametrize("threshold, total", [(1.0, 1.5), (0.0, 0.0), (None, 3.0)])
def test_rho_is_the_sum_of_the_clipped_weights(threshold, total):
    outputs = {"policy_logits": torch.zeros(3, 1, 2), "baseline": torch.zeros(3, 1)}
    mu = torch.tensor([[[0.5, 0.5]], [[1 / 5, 4 / 5]], [[1.0, 1e-9]]])
    batch = {
        "reward": torch.zeros(3, 1),
        "done": torch.zeros(3, 1, dtype=torch.bool),
        "truncated": torch.zeros(3, 1, dtype=torch.bool),
        "action": torch.zeros(3, 1, dtype=torch.int64),  # Weights 2.5 and 0.5.
        "policy_logits": mu.log(),
    }
    two = OPTIONS | {"distribution": ActionDistribution(gym.spaces.Discrete(2))}
    loss = update.impala_loss(outputs, batch, **two, clip_rho_threshold=threshold)
    assert loss.rho.item() == pytest.approx(total)


def test_a_batch_is_cut_into_contiguous_groups_of_columns(monkeypatch):
    rows = {"observation": {"x": torch.randn(T, 7, 11)}, "done": torch.zeros(T, 7)}
    state = (torch.randn(2, 7, 13),)
    monkeypatch.setattr(losses, "PIECE_BYTES", rows["observation"]["x"].nbytes // 3 + 1)
    groups = list(losses.split_columns(rows, state))
    assert len(groups) == 3
    for (_, whole), *parts in zip(leaves((rows, state)), *map(leaves, groups)):
        assert all(part.is_contiguous() for _, part in parts)
        assert torch.equal(torch.cat([part for _, part in parts], dim=1), whole)


@pytest.mark.parametrize("trainer", [monobeast, polybeast])
def test_an_update_of_a_large_batch_with_unclipped_rewards_is_done(
    trainer, monkeypatch, tmp_path
):
    """In TorchBeast's style Net says `.view(T * B, ...)`, and so do forks."""
    argv = ["--env", "Catch", "--reward_clipping", "none", "--use_lstm"]
    flags = trainer.parse_flags([*argv, "--disable_cuda", "--savedir", str(tmp_path)])
    spaces = Spaces(Catch().observation_space, Catch().action_space)
    learner = trainer.create_learner(flags, spaces)
    rows = zero_rows(spaces, T + 1, B)
    rows |= {
        "truncated": rows["done"],
        "action": rows["last_action"],
        "policy_logits": torch.zeros(T + 1, B, 3),
    }
    state = learner.net.initial_state(B)
    (whole,) = learner.gradient(rows, state)
    monkeypatch.setattr(losses, "PIECE_BYTES", rows["observation"].nbytes - 1)
    parts = learner.gradient(rows, state)
    assert len(parts) == 2
    torch.testing.assert_close(sum(part.total_loss for part in parts), whole.total_loss)


@pytest.mark.parametrize("targets, var", [([1e5 - 1, 1e5 + 1], 1.0), ([0.1] * 3, 0.0)])
def test_the_variance_of_targets_is_exact_far_from_0_and_never_negative(targets, var):
    x, zero = torch.tensor(targets, dtype=torch.float64), torch.zeros(())
    part = losses.ImpalaLoss(*[zero] * 6, x.sum(), x.square().sum())
    sums = losses.sum_scalars([part], zero)
    moments = losses.target_moments(sums, len(targets))
    assert moments == (pytest.approx(x.mean().item()), var)


def test_only_the_total_has_a_gradient():
    loss = update.impala_loss(*random_rows(), **OPTIONS)
    with_gradient = {name for name, x in loss.scalars().items() if x.requires_grad}
    assert with_gradient == {"total_loss"}


def test_the_batch_is_left_as_it_was():
    outputs, batch = random_rows()
    copies = {key: x.clone() for key, x in batch.items()}
    update.impala_loss(outputs, batch, **OPTIONS | {"reward_clipping": "abs_one"})
    for key, x in batch.items():
        assert torch.equal(x, copies[key]), key


def test_an_unknown_reward_clipping_is_refused():
    with pytest.raises(ValueError, match='reward_clipping is "?.soft_asym'):
        update.impala_loss(
            *random_rows(), **OPTIONS | {"reward_clipping": "soft_asymmetric"}
        )


@pytest.mark.parametrize("key", ["done", "truncated"])
def test_flags_of_uint8_are_refused(key):
    outputs, batch = random_rows()
    batch[key] = batch[key].to(torch.uint8)
    with pytest.raises(ValueError, match=rf"^{key} is uint8\[6, 3\]; expected bool"):
        update.impala_loss(outputs, batch, **OPTIONS)


@pytest.mark.parametrize(
    "key", ["reward", "done", "truncated", "action", "policy_logits"]
)
def test_an_error_names_the_part_of_the_batch_without_row_t(key):
    outputs, batch = random_rows()
    batch[key] = batch[key][:-1]
    with pytest.raises(ValueError, match=rf"{key} is \w+\[5, 3.*; expected \w+\[6, 3"):
        update.impala_loss(outputs, batch, **OPTIONS)


@pytest.mark.parametrize("key", ["baseline", "policy_logits"])
def test_an_error_names_the_output_of_the_learner_of_another_rank(key):
    outputs, batch = random_rows()
    outputs[key] = outputs[key].flatten(0, 1)
    with pytest.raises(ValueError, match=rf"learner's {key} is float64\[18"):
        update.impala_loss(outputs, batch, **OPTIONS)


def test_a_single_row_is_refused():
    outputs, batch = random_rows(T=0)
    with pytest.raises(
        ValueError, match=r"learner's baseline is float64\[1, 3\].*T >= 1"
    ):
        update.impala_loss(outputs, batch, **OPTIONS)


def test_logits_of_different_numbers_of_actions_are_refused():
    outputs, batch = random_rows()
    batch["policy_logits"] = batch["policy_logits"][..., :-1]
    with pytest.raises(ValueError, match="batch's policy_logits.*3, 6.*3, 7"):
        update.impala_loss(outputs, batch, **OPTIONS)


def test_outputs_of_autocast_are_refused():
    outputs, batch = random_rows(dtype=torch.float32)
    outputs = {key: x.bfloat16() for key, x in outputs.items()}
    with pytest.raises(ValueError, match="learner's baseline is bfloat16.*float32"):
        update.impala_loss(outputs, batch, **OPTIONS)


@pytest.mark.gpu
def test_the_gpu_agrees_with_the_cpu():
    outputs, batch = random_rows()
    loss = update.impala_loss(outputs, batch, **OPTIONS)
    on_gpu = update.impala_loss(
        {key: x.cuda() for key, x in outputs.items()},
        {key: x.cuda() for key, x in batch.items()},
        **OPTIONS,
    )
    for name, x in on_gpu.scalars().items():
        assert_same(x.cpu(), getattr(loss, name))
    for one, other in zip(
        gradients(on_gpu.total_loss, outputs),
        gradients(loss.total_loss, outputs),
        strict=True,
    ):
        assert_same(one, other)


def test_a_learner_says_that_the_batch_of_another_may_not_be_finite(monkeypatch):
    rows, sums = {"reward": np.zeros((2, 3), np.float32)}, {"total_loss": math.nan}
    said = "share of the batch (each learner names its own): nothing. In the loss: tot"
    assert said not in losses.describe_not_finite(rows, sums)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert said in losses.describe_not_finite(rows, sums)
