# SPDX-License-Identifier: Apache-2.0
"""Tries a network and its loss on rows of zeros, before the run starts."""

import contextlib
import copy
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import safetensors.torch
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from core.action_spaces import first_action
from core.algorithm.distributions import ActionDistribution
from core.algorithm.update import Learner, compute_gradient
from core.errors import ConfigError
from core.nests import ArraySpec, Nest, describe, describe_array, leaves, map_nest
from core.rollout import Spaces, leaf_spaces, row_spec

# Other outputs may have no gradient, and so may these if layers are frozen.
WITH_GRADIENT = ("policy_logits", "baseline")
# (T rows, B environments). Acting has one row, learning has several.
SIZES = ((1, 1), (1, 3), (5, 1), (5, 3))


def dry_run(
    net: nn.Module,
    spaces: Spaces,
    outputs: Mapping[str, ArraySpec],
    *,
    stores_all: bool = False,
) -> None:
    """Check the outputs of a copy of `net` for rows of zeros, in several sizes.

    Where there are several rows, an episode begins at the second one. The gradient is
    computed, too. As in a run, all inputs of `net` are contiguous tensors.

    Args:
      outputs: the arrays that `net` must return for each row of each environment. It
        may return more.
      stores_all: rollouts hold all outputs, as in PolyBeast, so each must be an array
        for each row of each environment.

    Raises:
      RuntimeError: `net` raised an error, which is the cause of this one.
      ConfigError: outputs or recurrent state have another structure, shape or dtype, an
        output has the name of another key of the rollout, `net` writes to its inputs,
        or weights of `net` have no shape yet or cannot be copied or loaded. The message
        names what was expected and what was returned.
    """
    distribution = getattr(net, "distribution", "none")
    if not isinstance(distribution, ActionDistribution):
        needed = "self.distribution = ActionDistribution(action_space)"
        raise _error("__init__", needed, distribution)
    device = next(net.parameters()).device
    taken = {*row_spec(spaces.observation, spaces.action, ()), "policy_version"}
    taken |= {*distribution.columns, "replayed"}
    net = _copy(net, device)
    _check_copies(net)
    has_frozen = not all(p.requires_grad for p in net.parameters())
    for T, B in SIZES:
        state = _initial_state(net, B, device)
        for i, tensor in enumerate(state if stores_all else ()):
            if tensor.is_complex():
                needed = "real numbers (torch.view_as_real of complex ones)"
                raise _error(f"initial_state({B})[{i}]", needed, tensor)
        rows = zero_rows(spaces, T, B)
        rows["done"][1:2, 0] = True
        rows = map_nest(lambda x: x.to(device), rows)
        # MonoBeast's actors give it the rollout itself.
        with _refuse_writes(rows, "the network: forward"), _explain_forward(rows):
            result = net(rows, state)
        if not isinstance(result, tuple) or len(result) != 2:
            raise _error("forward", "a tuple (outputs, core_state)", result)
        got, after = result
        if not isinstance(got, dict):
            raise _error("forward's outputs", f"a dict with {', '.join(outputs)}", got)
        if both := sorted(taken & (got if stores_all else outputs).keys()):
            raise ConfigError(
                f"the network: forward has the outputs {', '.join(both)}, but rollouts "
                "have other arrays of that name: give each output a name of its own"
            )
        for name, spec in outputs.items():
            if name not in got:
                needed = f"{name!r} among forward's outputs"
                raise _error("forward", needed, f"only {', '.join(map(repr, got))}")
            where = f"forward's {name!r}, of {T} rows of {B} environments,"
            _check(where, str(ArraySpec((T, B, *spec.shape), spec.dtype)), got[name])
            has_gradient = has_frozen or got[name].requires_grad
            if name in WITH_GRADIENT and not has_gradient:
                raise _error(where, "a gradient (no detach, no no_grad)", "none")
        for name, x in leaves(got) if stores_all else ():
            is_tensor = isinstance(x, torch.Tensor)
            if not is_tensor or x.shape[:2] != (T, B) or not _has_numpy_dtype(x):
                where = f"forward's {name!r}, of {T} rows of {B} environments,"
                raise _error(where, f"a tensor [{T},{B},...] of a numpy dtype", x)
        if not isinstance(after, tuple) or len(after) != len(state):
            raise _error("forward's core_state", f"a tuple of {len(state)}", after)
        for i, (old, new) in enumerate(zip(state, after)):
            where = f"forward's core_state[{i}] must be as initial_state's:"
            _check(where, _describe(old), new)
            _check_storage(f"forward's core_state[{i}]", new, rows)
        _backward([got[name] for name in outputs if got[name].requires_grad])


def _copy(net: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy: the running statistics of `net` must not include the zeros."""
    for name, value in net.state_dict().items():
        if not isinstance(value, torch.Tensor):  # Of `get_extra_state`.
            raise _error(f"{name!r} in its state_dict", "a tensor", value)
        if is_lazy(value):
            needed = "a tensor of known shape (nn.Linear instead of nn.LazyLinear)"
            raise _error(f"{name!r} in its state_dict", needed, "no shape")
    try:
        return copy.deepcopy(net).to(device)  # Packs an LSTM's weights on a GPU again.
    except (RuntimeError, TypeError) as error:
        needed = (
            "modules that copy.deepcopy can copy (parametrizations.weight_norm of "
            "torch.nn.utils instead of its weight_norm)"
        )
        raise _error("__init__", needed, " ".join(str(error).split())) from error


def _check_storage(where: str, tensor: torch.Tensor, rows: Nest) -> None:
    """Raise ConfigError if a recurrent state is in rows, which actors write anew."""
    place = tensor.untyped_storage().data_ptr()
    for name, x in leaves(rows):
        if place and x.untyped_storage().data_ptr() == place:  # 0: has no elements.
            raise _error(where, "a copy (.clone())", f"a view of rows' {name}")


def _backward(outputs: Sequence[torch.Tensor]) -> None:
    if not outputs:  # All layers are frozen. `dry_run_loss` refuses this.
        return
    with warnings.catch_warnings():
        # On a GPU the first backward pass of a process says this. It is harmless.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS")
        torch.stack([x.sum() for x in outputs]).sum().backward()


@torch.no_grad()
def _check_copies(net: nn.Module) -> None:
    """Copy and load each tensor of `net`, as checkpoints and actors do.

    Raises:
      ConfigError: one is a copy, or sparse, or has NaN, or its elements share their
        memory (`expand`), or safetensors does not have its dtype; or `net` cannot load
        its own state_dict, so that no run could resume.
    """
    again = net.state_dict()
    for name, x in net.state_dict().items():
        where = f"{name!r} in its state_dict"
        try:
            x.copy_(x.to("cpu", copy=True).contiguous())
            safetensors.torch.save({name: torch.empty(0, dtype=x.dtype)})
        except (RuntimeError, KeyError) as error:
            needed = (
                "a tensor that can be copied (.to_dense(), .clone()) and saved (not "
                "complex128)"
            )
            raise _error(where, needed, x) from error
        if x.data_ptr() != again[name].data_ptr():
            needed = "the tensor itself, into which actors copy each new value"
            raise _error(where, needed, "a copy")
        if x.is_floating_point() and x.float().isnan().any():
            raise _error(where, "numbers (a checkpoint may have no NaN)", "NaN")
    try:
        net.load_state_dict(net.state_dict())
    except Exception as error:  # Of the network's own load_state_dict, perhaps.
        reason = " ".join(str(error).split())
        raise _error(
            "load_state_dict", "the network's own state_dict", reason
        ) from error


@contextlib.contextmanager
def _explain_forward(rows: Nest) -> Iterator[None]:
    """If `forward` fails, say what its rows have. The traceback shows both errors."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{name} {_describe(x)}" for name, x in leaves(rows))
        raise RuntimeError(
            f"the network: forward failed before the run, on rows of zeros that have "
            f"{shapes} (a/b is the key b of the Dict a): "
            f"{type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def explain_create_net() -> Iterator[None]:
    """If the arguments of a call in `create_net` are wrong, say what to change.

    Raises:
      ConfigError: instead of Python's TypeError.
    """
    try:
        yield
    except TypeError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if last.name != "create_net":  # A function that it calls has failed.
            raise
        raise ConfigError(
            f"the network: {error}. create_net ({last.filename}, line {last.lineno}) "
            "passes the observation space, the action space, and options that follow "
            "from flags, by name. Let Net.__init__ take all of them (or **options), or "
            "change create_net."
        ) from error


def dry_run_loss(learner: Learner, spaces: Spaces) -> None:
    """Compute the gradient of the learner's loss, on a copy of its network.

    Call `dry_run` first. The batch has the keys of a batch in a run, and as many rows.
    Its values are zeros, except the network's outputs.

    Raises:
      ConfigError: the loss is none that an update can use.
    """
    flags, device = learner.flags, learner.device
    # A loss may use flags.unroll_length, but on a CPU it gets a part of the B rollouts.
    T, B = flags.unroll_length + 1, min(2, flags.batch_size)
    net = copy.deepcopy(learner.net).to(device)
    state = _initial_state(net, B, device)
    spec = row_spec(spaces.observation, spaces.action, tuple(flags.info_keys))
    specs = {**spec, **net.distribution.columns}
    specs["policy_version"] = ArraySpec((), np.dtype(np.int64))
    if flags.replay_ratio:
        specs["replayed"] = ArraySpec((), np.dtype(bool))
    rows = map_nest(lambda spec: _zeros(spec, T, B), specs)
    rows |= zero_rows(spaces, T, B)
    rows["action"] = rows["last_action"]
    rows = map_nest(lambda x: x.to(device), rows)
    with torch.no_grad():
        outputs, _ = net(rows, state)
    for name, nest in outputs.items():
        if all(torch.is_tensor(x) and x.shape[:2] == (T, B) for _, x in leaves(nest)):
            rows[name] = nest
    # The memory of the batch may hold rollouts that are replayed later.
    with _refuse_writes(rows, "compute_loss"):
        compute_gradient(flags, net, learner.loss, rows, state)


@contextlib.contextmanager
def _refuse_writes(rows: Mapping[str, Nest], who: str) -> Iterator[None]:
    """Raise ConfigError if the block writes to `rows` or to a tensor in it."""
    versions = [(name, x, x._version) for name, x in leaves(rows)]
    yield
    now = dict(leaves(rows))
    if changed := [name for name, x, _ in versions if now.get(name) is not x]:
        raise ConfigError(
            f"{who} assigns to its input {changed[0]!r}, which others read later: "
            "expected a new dict (rows = {**rows, 'reward': ...})"
        )
    for name, x, version in versions:
        if x._version != version:
            raise ConfigError(
                f"{who} has an operation in place on its input {name!r}: expected a "
                "new tensor (x = x / 2, x.unsqueeze(1)), got x /= 2, x.unsqueeze_(1) "
                "or the like"
            )


def _initial_state(
    net: Any, num_envs: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    if not hasattr(net, "initial_state"):
        raise _error("Net", "a method initial_state (docs/how-it-works.md)", "none")
    state = net.initial_state(num_envs)
    if not isinstance(state, tuple):
        raise _error("initial_state", "a tuple of tensors, or () for no state", state)
    for i, tensor in enumerate(state):
        is_tensor = isinstance(tensor, torch.Tensor)
        if not is_tensor or tensor.ndim < 2 or tensor.shape[1] != num_envs:
            where = f"initial_state({num_envs})[{i}]"
            raise _error(where, f"a tensor [layers, {num_envs}, ...]", tensor)
    return tuple(tensor.to(device) for tensor in state)


def _has_numpy_dtype(tensor: torch.Tensor) -> bool:
    try:
        torch.empty(0, dtype=tensor.dtype).numpy()
    except TypeError:  # As for bfloat16.
        return False
    return True


def zero_rows(spaces: Spaces, T: int, B: int) -> dict[str, Nest]:
    """Return a network's inputs for T rows of B environments: zeros, [T, B, ...].

    Where a space does not begin at 0, the values are those of `first_action`.
    """

    def zeros(spec: ArraySpec, space: gym.Space) -> torch.Tensor:
        return _zeros(spec, T, B, space)

    row = row_spec(spaces.observation, spaces.action, ())
    return {
        "observation": map_nest(
            zeros, row["observation"], leaf_spaces(spaces.observation)
        ),
        "reward": _zeros(row["reward"], T, B),
        "done": _zeros(row["done"], T, B),
        "last_action": map_nest(zeros, row["last_action"], leaf_spaces(spaces.action)),
    }


def _zeros(spec: ArraySpec, T: int, B: int, space: Any = None) -> torch.Tensor:
    first = np.zeros((T, B, *spec.shape), spec.dtype)
    return torch.from_numpy(first + np.asarray(first_action(space), spec.dtype))


def _check(where: str, expected: str, got: Any) -> None:
    if _describe(got) != expected:
        raise _error(where, expected, got)


def _error(where: str, expected: str, got: Any) -> ConfigError:
    return ConfigError(
        f"the network: {where} expected {expected}, got {_describe(got)}"
    )


def _describe(value: Any) -> str:
    match value:
        case torch.Tensor():
            return describe_array(value.dtype, value.shape)
        case np.ndarray():
            return "a numpy array"
        case str():
            return value
    return describe(value)
