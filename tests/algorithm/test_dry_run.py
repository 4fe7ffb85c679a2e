# SPDX-License-Identifier: Apache-2.0
"""core.algorithm.dry_run: wrong networks are refused with what was expected and got."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import monobeast
import polybeast
from core.actors import prepare
from core.algorithm import update
from core.algorithm.distributions import ActionDistribution
from core.algorithm.dry_run import dry_run, dry_run_loss, explain_create_net
from core.algorithm.recurrent import unroll_lstm
from core.environments.toys import Catch
from core.errors import ConfigError
from core.nests import ArraySpec, leaves, map_nest
from core.rollout import Spaces
from tests.trainers.test_net import PICTURES, VECTORS

A = 7
F32 = np.dtype(np.float32)
OUTPUTS = {"policy_logits": ArraySpec((A,), F32), "baseline": ArraySpec((), F32)}
BOX = gym.spaces.Box(-1.0, 1.0, (11,), np.float32)
ACTIONS = gym.spaces.Discrete(A, start=2)
SPACES = Spaces(BOX, ACTIONS)


class Tiny(nn.Module):
    """A network that fits. Those below do, but for one thing."""

    def __init__(self, use_lstm=False) -> None:
        super().__init__()
        self.distribution = ActionDistribution(ACTIONS)
        self.core = nn.LSTM(11, 13) if use_lstm else None
        self.heads = nn.Linear(13 if use_lstm else 11, A + 1)

    def initial_state(self, B):  # Any name: it is called by position.
        if self.core is None:
            return ()
        return torch.zeros(1, B, 13), torch.zeros(1, B, 13)

    def forward(self, rows, core_state=()):
        x = rows["observation"]
        if self.core is not None:
            x, core_state = unroll_lstm(self.core, x, rows["done"], core_state)
        x = self.heads(x)
        return {"policy_logits": x[..., :A], "baseline": x[..., A]}, core_state


class Changed(Tiny):
    """Gives other things than `Tiny`: what `change` makes of its outputs and state."""

    def __init__(self, change, use_lstm=False):
        super().__init__(use_lstm)
        self.change = change

    def forward(self, rows, core_state=()):
        return self.change(*super().forward(rows, core_state))


def each(change):
    """Return a `Changed` in which each output is changed in this way."""
    return lambda: Changed(lambda outputs, state: (map_nest(change, outputs), state))


def one(name, change):
    """Return a `Changed` in which the output of this name is changed."""
    return lambda: Changed(
        lambda outputs, state: ({**outputs, name: change(outputs[name])}, state)
    )


class BatchFirstState(Tiny):
    def initial_state(self, batch_size):
        return (torch.zeros(batch_size, 1, 5),)


class NoInitialState(nn.Module):
    def __init__(self):
        super().__init__()
        self.distribution = ActionDistribution(ACTIONS)
        self.heads = nn.Linear(11, A + 1)

    forward = Tiny.forward


class ListState(Tiny):
    def initial_state(self, batch_size):
        return [torch.zeros(1, batch_size, 5)]


class ExtraState(Tiny):
    def get_extra_state(self):
        return {"count": 3}


class DropsEncoder(Tiny):
    """Keeps frozen weights out of checkpoints, but then cannot load one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2)

    def state_dict(self, *args, **options):
        weights = super().state_dict(*args, **options)
        del weights["encoder.bias"]
        return weights


def with_buffer(buffer):
    class Buffered(Tiny):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.register_buffer("graph", buffer)

    return Buffered


def with_head(make):
    class OtherHead(Tiny):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.heads = make()

    return OtherHead


class SeesLast(Tiny):
    def initial_state(self, B):
        return (torch.zeros(1, B, 11),)

    def forward(self, rows, core_state=()):
        outputs, _ = super().forward(rows)
        return outputs, (rows["observation"][-1:],)


class CopiesWeights(Tiny):
    def state_dict(self, *args, **options):
        weights = super().state_dict(*args, **options)
        return {name: tensor.clone() for name, tensor in weights.items()}


class ClipsRewards(Tiny):
    def forward(self, rows, core_state=()):
        rows["reward"] = rows["reward"].clamp(-1, 1)
        return super().forward(rows, core_state)


class ScalesInPlace(Tiny):
    def forward(self, rows, core_state=()):
        x = rows["observation"].float()  # The same tensor, if it has this dtype.
        x /= 255
        return super().forward(rows, core_state)


WRONG = {
    "extra state": (
        ExtraState,
        "'_extra_state' in its state_dict expected a tensor, got a dict with keys "
        "['count']",
    ),
    "dropped weights": (
        DropsEncoder,
        "load_state_dict expected the network's own state_dict, got Error(s) in "
        'loading state_dict for DropsEncoder: Missing key(s) in state_dict: "encoder.b',
    ),
    "lazy layer": (
        with_head(lambda: nn.LazyLinear(A + 1)),
        "'heads.weight' in its state_dict expected a tensor of known shape (nn.Linear "
        "instead of nn.LazyLinear), got no shape",
    ),
    "old weight norm": (
        with_head(lambda: nn.utils.weight_norm(nn.Linear(11, A + 1))),
        "__init__ expected modules that copy.deepcopy can copy (parametrizations."
        "weight_norm of torch.nn.utils instead of its weight_norm), got Only Tensors",
    ),
    "view as state": (
        SeesLast,
        "forward's core_state[0] expected a copy (.clone()), got a view of rows' obs",
    ),
    "copied weights": (
        CopiesWeights,
        "'heads.weight' in its state_dict expected the tensor itself, into which "
        "actors copy each new value, got a copy",
    ),
    "NaN in a buffer": (
        with_buffer(torch.full((3,), torch.nan)),
        "'graph' in its state_dict expected numbers (a checkpoint may have no NaN), "
        "got NaN",
    ),
    "assigned input": (
        ClipsRewards,
        "the network: forward assigns to its input 'reward', which others read later",
    ),
    "sparse buffer": (
        with_buffer(torch.eye(3).to_sparse()),
        "'graph' in its state_dict expected a tensor that can be copied (.to_dense(), "
        ".clone()) and saved (not complex128), got float32[3,3]",
    ),
    "double complex buffer": (  # safetensors has no such dtype.
        with_buffer(torch.zeros(5, dtype=torch.complex128)),
        "'graph' in its state_dict expected a tensor that can be copied (.to_dense(), "
        ".clone()) and saved (not complex128), got complex128[5]",
    ),
    "expanded buffer": (
        with_buffer(torch.zeros(1).expand(5)),
        "'graph' in its state_dict expected a tensor that can be copied (.to_dense(), "
        ".clone()) and saved (not complex128), got float32[5]",
    ),
    "other shape": (
        one("policy_logits", lambda x: x[..., 1:]),
        "'policy_logits', .* expected float32[1,1,7], got float32[1,1,6]",
    ),
    "other dtype": (
        one("baseline", torch.Tensor.double),
        "'baseline', .* expected float32[1,1], got float64[1,1]",
    ),
    "extra axis": (
        one("baseline", lambda x: x.unsqueeze(-1)),
        "'baseline', .* expected float32[1,1], got float32[1,1,1]",
    ),
    "flat": (
        each(lambda x: x.flatten(0, 1)),
        "'policy_logits', .* expected float32[1,1,7], got float32[1,7]",
    ),
    "batch first": (
        each(lambda x: x.movedim(0, 1)),
        "of 1 rows of 3 environments, expected float32[1,3,7], got float32[3,1,7]",
    ),
    "squeezing": (
        each(torch.squeeze),
        "'policy_logits', .* expected float32[1,1,7], got float32[7]",
    ),
    "detached": (
        each(torch.detach),
        "'policy_logits', .* expected a gradient .* got none",
    ),
    "nameless": (
        lambda: Changed(lambda outputs, state: ({"logits": outputs["baseline"]}, ())),
        "expected 'policy_logits' among forward's outputs, got only 'logits'",
    ),
    "stateless": (
        lambda: Changed(lambda outputs, state: outputs),
        "forward expected a tuple (outputs, core_state), got a dict with keys "
        "['policy_logits', 'baseline']",
    ),
    "tuple of outputs": (
        lambda: Changed(lambda outputs, state: (tuple(outputs.values()), state)),
        "outputs expected a dict with policy_logits, baseline, got a tuple of 2",
    ),
    "forgets its state": (
        lambda: Changed(lambda outputs, state: (outputs, ()), use_lstm=True),
        "forward's core_state expected a tuple of 2, got a tuple of 0",
    ),
    "grows its state": (
        lambda: Changed(
            lambda outputs, state: (
                outputs,
                tuple(torch.cat([s, s], 2) for s in state),
            ),
            use_lstm=True,
        ),
        "core_state[0] .* expected float32[1,1,13], got float32[1,1,26]",
    ),
    "batch first in its state": (
        BatchFirstState,
        "initial_state(3)[0] expected a tensor [layers, 3, ...], got float32[3,1,5]",
    ),
    "scales in place": (
        ScalesInPlace,
        "in place on its input 'observation': expected a new tensor",
    ),
    "no initial_state": (
        lambda: NoInitialState(),
        "Net expected a method initial_state (docs/how-it-works.md), got none",
    ),
    "list of states": (
        ListState,
        "initial_state expected a tuple of tensors, or () for no state, got a list",
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("make, said", WRONG.values(), ids=WRONG)
def test_a_wrong_network_is_refused_with_what_was_expected_and_what_came(make, said):
    with pytest.raises(ConfigError) as error:
        dry_run(make(), SPACES, OUTPUTS)
    message = str(error.value)
    assert message.startswith("the network: ") and "\n" not in message
    for part in said.split(" .* "):
        assert part in message, message


def with_aux(make):
    """Return a `Changed` that has one more output."""
    return Changed(
        lambda outputs, state: ({**outputs, "aux": make(outputs["baseline"])}, state)
    )


@pytest.mark.parametrize(
    "make, dtype",
    [
        (lambda x: x.detach(), np.float32),
        (lambda x: x.long(), np.int64),
        (lambda x: x > 0, np.bool_),
    ],
)
def test_an_output_for_the_rollout_needs_no_gradient(make, dtype):
    outputs = {**OUTPUTS, "aux": ArraySpec((), np.dtype(dtype))}
    dry_run(with_aux(make), SPACES, outputs, stores_all=True)


@pytest.mark.parametrize(
    "make, got",
    [
        (lambda x: x.sum(), "float32[]"),
        (lambda x: x[-1], "float32[1]"),
        (lambda x: [x], "a list of 1"),
        (lambda x: x.detach().numpy(), "a numpy array"),
        (lambda x: x.bfloat16(), "bfloat16[1,1]"),
    ],
)
def test_an_output_that_no_rollout_can_hold_is_named(make, got):
    dry_run(with_aux(make), SPACES, OUTPUTS)  # Only `OUTPUTS` are stored.
    with pytest.raises(ConfigError) as error:
        dry_run(with_aux(make), SPACES, OUTPUTS, stores_all=True)
    assert str(error.value) == (
        "the network: forward's 'aux', of 1 rows of 1 environments, expected a tensor "
        f"[1,1,...] of a numpy dtype, got {got}"
    )


def test_a_complex_recurrent_state_is_for_monobeast_only():
    class Complex(Tiny):
        def initial_state(self, B):
            return (torch.zeros(1, B, 5, dtype=torch.complex64),)

    dry_run(Complex(), SPACES, OUTPUTS)
    with pytest.raises(ConfigError) as error:
        dry_run(Complex(), SPACES, OUTPUTS, stores_all=True)
    assert str(error.value) == (
        "the network: initial_state(1)[0] expected real numbers (torch.view_as_real of "
        "complex ones), got complex64[1,1,5]"
    )


@pytest.mark.parametrize("name", ["reward", "action", "policy_version", "replayed"])
def test_an_output_with_the_name_of_another_array_of_the_rollout_is_refused(name):
    """PolyBeast learned from it in place of the reward."""
    net = Changed(lambda outputs, state: ({**outputs, name: outputs["baseline"]}, ()))
    dry_run(net, SPACES, OUTPUTS)  # Only `OUTPUTS` are stored.
    message = f"forward has the outputs {name}, but rollouts have other arrays"
    with pytest.raises(ConfigError, match=message):
        dry_run(net, SPACES, OUTPUTS, stores_all=True)
    with pytest.raises(ConfigError, match=message):
        dry_run(net, SPACES, {**OUTPUTS, name: ArraySpec((), F32)})


def test_a_network_without_a_gradient_is_found():
    def square_in_place(x):
        value = x.exp()
        return value.mul_(value)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        dry_run(one("baseline", square_in_place)(), SPACES, OUTPUTS)


def test_a_network_that_cannot_go_past_the_end_of_an_episode_is_found():
    class OneEpisode(Tiny):
        def forward(self, rows, core_state=()):
            if rows["done"][1:].any():
                raise NotImplementedError("an episode begins in the midst")
            return super().forward(rows, core_state)

    with pytest.raises(RuntimeError, match="in the midst") as caught:
        dry_run(OneEpisode(), SPACES, OUTPUTS)
    assert isinstance(caught.value.__cause__, NotImplementedError)


def test_a_network_that_fails_is_told_what_its_rows_have():
    space = gym.spaces.Dict({"x": BOX, "n": gym.spaces.Discrete(3)})
    with pytest.raises(RuntimeError, match="forward failed before the run") as caught:
        dry_run(Tiny(), Spaces(space, ACTIONS), OUTPUTS)  # It expects no Dict.
    text = str(caught.value)
    assert "observation/n int64[1,1], observation/x float32[1,1,11], reward fl" in text


def test_a_network_without_the_options_of_create_net_is_told_them(monkeypatch):
    class Bare(Tiny):
        def __init__(self, observation_space, action_space):
            super().__init__()

    flags = monobeast.parse_flags(["--env", "Catch"])
    monkeypatch.setattr(monobeast, "Net", Bare)
    with pytest.raises(ConfigError) as caught, explain_create_net():
        monobeast.create_learner(flags, SPACES)
    text = str(caught.value)
    assert "unexpected keyword argument 'model'. create_net (" in text
    assert "Let Net.__init__ take all of them" in text
    with pytest.raises(TypeError, match="^a mistake$"), explain_create_net():
        raise TypeError("a mistake")  # Elsewhere.


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("space", [VECTORS["dict"], PICTURES["float"]])
def test_the_networks_of_both_trainers_are_accepted(space, use_lstm):
    action = gym.spaces.Discrete(A, start=-3)
    for trainer in (monobeast, polybeast):
        net = trainer.Net(space, action, use_lstm=use_lstm, bfloat16=True)
        spaces = Spaces(space, action)
        dry_run(net, spaces, trainer.net_outputs(spaces))


def test_a_network_may_have_frozen_layers():
    """Such as all but the policy's last, to go on from another run's weights."""
    flags = monobeast.parse_flags(["--env", "Catch"])
    learner = monobeast.create_learner(flags, SPACES)
    learner.net.torso.requires_grad_(False)
    learner.net.baseline.requires_grad_(False)
    dry_run(learner.net, SPACES, OUTPUTS)
    dry_run_loss(learner, SPACES)
    learner.net.requires_grad_(False)
    dry_run(learner.net, SPACES, OUTPUTS)
    with pytest.raises(ConfigError, match="total_loss .* without a gradient"):
        dry_run_loss(learner, SPACES)


def test_a_dry_run_leaves_the_network_as_it_was():
    class Counting(Tiny):
        def forward(self, rows, core_state=()):
            self.calls += 1
            return super().forward(rows, core_state)

    net = Counting()
    net.register_buffer("calls", torch.zeros(()))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    dry_run(net, SPACES, OUTPUTS)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in net.parameters())


def wrong_net_env() -> Catch:
    """Catch, in a process whose MonoBeast has a wrong network."""
    forward = monobeast.Net.forward

    def wrong(self, rows, core_state=()):
        outputs, core_state = forward(self, rows, core_state)
        return {**outputs, "baseline": outputs["baseline"].sum(0)}, core_state

    monobeast.Net.forward = wrong
    return Catch()


def test_a_run_with_a_wrong_network_ends_before_it_begins(start, tmp_path):
    env = "tests.algorithm.test_dry_run:wrong_net_env"
    program = start("--env", env, "--xpid", "x")
    assert program.wait() == 78, program.text()
    assert program.text().splitlines()[-1] == (
        "ConfigError: the network: forward's 'baseline', of 1 rows of 1 environments, "
        "expected float32[1,1], got float32[1]"
    )
    assert not list((tmp_path / "runs" / "x").glob("checkpoints/*"))


def test_a_network_of_an_older_fork_is_told_what_is_missing():
    net = Tiny()
    del net.distribution
    with pytest.raises(ConfigError, match=r"__init__ expected self\.distribution = "):
        dry_run(net, SPACES, OUTPUTS)


@pytest.mark.parametrize(
    "action",
    [gym.spaces.Discrete(3, start=2), gym.spaces.Box(-1.0, 1.0, (2,), np.float32)],
    ids=["discrete", "box"],
)
def test_a_loss_is_tried_on_a_batch_like_those_of_the_run(action):
    flags = monobeast.parse_flags(
        ["--info_keys", "speed", "--replay_ratio", "1", "--use_lstm", "--disable_cuda"]
        + ["--batch_size", "2", "--unroll_length", "7"]
    )
    spaces = Spaces(VECTORS["dict"], action)
    learner = monobeast.create_learner(flags, spaces)
    before = {k: v.clone() for k, v in learner.net.state_dict().items()}
    seen = {}

    def loss(flags, net, rows, state):
        seen.update(rows)
        return update.compute_loss(flags, net, rows, state)

    learner.loss = loss
    dry_run_loss(learner, spaces)
    outputs = monobeast.net_outputs(spaces) | learner.net.distribution.columns
    expected, _ = prepare.rollout_specs(flags, spaces, learner.net, outputs)
    expected["replayed"] = ArraySpec((), np.dtype(bool))
    assert dict(leaves(expected)).keys() == dict(leaves(seen)).keys()
    for name, spec in leaves(expected):
        x = dict(leaves(seen))[name].numpy()
        assert (x.shape[2:], x.dtype) == (spec.shape, spec.dtype), name
        assert x.shape[0] == flags.unroll_length + 1 and x.shape[1] <= 2, name
    for name, value in learner.net.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in learner.net.parameters())

    def halve_rewards(flags, net, rows, state):
        rows["reward"][1:] /= 2
        return update.compute_loss(flags, net, rows, state)

    learner.loss = halve_rewards  # Replay would give it the same rollout again.
    with pytest.raises(ConfigError, match="compute_loss has an operation in place"):
        dry_run_loss(learner, spaces)

    learner.loss = lambda *args: update.compute_loss(*args).total_loss
    with pytest.raises(ConfigError, match="compute_loss returned a Tensor; expected"):
        dry_run_loss(learner, spaces)
