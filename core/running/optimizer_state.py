# SPDX-License-Identifier: Apache-2.0
"""Save and restore the state of optimizers, by the names of the parameters."""

import copy
import functools
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from core.errors import ConfigError
from core.running.checkpoint import CheckpointMismatch, mismatch, name_differences


def optimizer_state(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    fresh: Sequence[Mapping[str, Any]] = (),
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return any torch optimizer's state as flat named tensors and JSON.

    The content is that of `optimizer.state_dict()`, but without pickle, and with
    parameters by name. Options that are functions are left out, and so are attributes
    of the optimizer object itself, and state whose key is neither a parameter nor a
    string. Tensors are named `<parameter>/<key>`, or
    `all groups/<key>` if they belong to no parameter; they are not copied.

    Args:
      fresh: the `group_options` of this optimizer when it was new. If an option other
        than `lr` differs from them, training has changed it (a counter, for instance):
        then it is state, and `restore_optimizer` restores it. All other options are
        configuration. Without `fresh`, all options are configuration.

    Raises:
      ConfigError: the optimizer has parameters that are not the model's, or state that
        neither tensors nor JSON can express.
    """
    tensors: dict[str, torch.Tensor] = {}

    def encode(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[name] = value.detach()
            return {"tensor": name}
        if isinstance(value, tuple):  # Adam's betas. JSON has only lists.
            return {"tuple": encode(name, list(value))}
        if isinstance(value, list):
            return [encode(f"{name}/{i}", item) for i, item in enumerate(value)]
        if type(value) is dict:  # Not a subclass, whose class would be lost.
            for key in value:
                if not isinstance(key, str):
                    raise ConfigError(
                        f"optimizer state {name} has the key {key!r} "
                        f"({type(key).__name__}); in a checkpoint all keys are strings"
                    )
            return {"dict": {k: encode(f"{name}/{k}", x) for k, x in value.items()}}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise ConfigError(
            f"optimizer state {name} is a {type(value).__name__}; a checkpoint can "
            "hold tensors, numbers, strings, None, and lists, tuples or dicts of these"
        )

    groups, state = [], {}
    parameters = dict(model.named_parameters())
    for i, (group, names) in enumerate(
        zip(optimizer.param_groups, _parameter_names(optimizer, model))
    ):
        options = {
            key: encode(f"group {i}/{key}", value)
            for key, value in _options(group).items()
        }
        before = fresh[i] if i < len(fresh) else group
        changed = [
            key
            for key in options
            if key != "lr"
            if key not in before or not _equal_values(group[key], before[key])
        ]
        groups.append({"params": names, "options": options, "changed": changed})
        for name in names:
            if parameters[name] in optimizer.state:
                state[name] = {
                    key: encode(f"{name}/{key}", value)
                    for key, value in optimizer.state[parameters[name]].items()
                }
    of_all = {k: v for k, v in optimizer.state.items() if isinstance(k, str)}
    return tensors, {
        "class": type(optimizer).__name__,
        "groups": groups,
        "state": state,
        "of_all": {k: encode(f"all groups/{k}", v) for k, v in of_all.items()},
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    tensors: dict[str, torch.Tensor],
    state: dict[str, Any],
) -> list[str]:
    """Restore the state that `optimizer_state` returned: later updates are bit-equal.

    `tensors` are copied. The options of the groups (learning rate, momentum, ...) are
    not restored, unless training has changed them: see `optimizer_state`.

    Returns:
      One line for each option that differs from the checkpoint's, except `lr`, which
      changes with each update.

    Raises:
      CheckpointMismatch: the state is of another kind of optimizer or of other
        parameters.
    """
    if state["class"] != type(optimizer).__name__:
        raise CheckpointMismatch(
            f"optimizer: file {state['class']}, this run {type(optimizer).__name__}"
        )
    ours = _parameter_names(optimizer, model)
    theirs = [group["params"] for group in state["groups"]]
    if ours != theirs:
        differences = name_differences({*chain(*ours)}, {*chain(*theirs)})
        same = "the same parameters in other groups, or in another order"
        raise mismatch("optimizer", differences or [same])

    decode = functools.partial(_decode, tensors)
    saved = [
        {key: decode(value) for key, value in group["options"].items()}
        for group in state["groups"]
    ]
    # Older checkpoints have no "changed".
    changed = [
        {key: options[key] for key in group.get("changed", ())}
        for group, options in zip(state["groups"], saved)
    ]
    # torch numbers the parameters of all groups consecutively.
    index = {name: i for i, name in enumerate(chain(*ours))}
    entries_of = {
        name: {key: decode(value) for key, value in entries.items()}
        for name, entries in state["state"].items()
    }
    device = next(model.parameters()).device
    # Older checkpoints have no "of_all".
    of_all = {k: decode(v, device) for k, v in state.get("of_all", {}).items()}
    optimizer.load_state_dict(
        {
            "state": {
                **{index[name]: entries for name, entries in entries_of.items()},
                **of_all,
            },
            "param_groups": [
                {**group, **options, "params": [index[name] for name in names]}
                for group, options, names in zip(optimizer.param_groups, changed, ours)
            ],
        }
    )
    parameters = dict(model.named_parameters())
    for name, kept in entries_of.items():
        loaded = optimizer.state[parameters[name]]
        for key in kept.keys() & loaded.keys():
            loaded[key] = _undo_conversion(loaded[key], kept[key])
    if isinstance(optimizer, torch.optim.RMSprop):
        for group in optimizer.param_groups:
            for entries in map(optimizer.state.get, group["params"]):
                # If the momentum was 0 when the state was saved, it has no buffer.
                if group["momentum"] and entries:
                    zeros = torch.zeros_like(entries["square_avg"])
                    entries.setdefault("momentum_buffer", zeros)
    return [
        f"group {i}: {key} was {old} and is now {group[key]}"
        for i, (group, options) in enumerate(zip(optimizer.param_groups, saved))
        for key, old in options.items()
        if key in group and key != "lr" and not _equal_values(group[key], old)
    ]


def _decode(
    tensors: Mapping[str, torch.Tensor], value: Any, device: str | torch.device = "cpu"
) -> Any:
    """Return the value that `optimizer_state` encoded, with copies of its tensors."""
    decode = functools.partial(_decode, tensors, device=device)
    match value:
        case {"tensor": name}:
            if name not in tensors:
                raise CheckpointMismatch(f"optimizer: missing {name}")
            return tensors[name].to(device, copy=True)
        case {"tuple": items}:
            return tuple(map(decode, items))
        case {"dict": items}:
            return {key: decode(item) for key, item in items.items()}
        case list():
            return [decode(item) for item in value]
    return value


def _undo_conversion(loaded: Any, saved: Any) -> Any:
    """Return what `load_state_dict` made of `saved`, but as the optimizer had it.

    torch gives all tensors the dtype of the parameter (a mask and a sum in float64,
    too), and makes a string the text of a generator.
    """
    match saved:
        case torch.Tensor() if torch.is_tensor(loaded) and loaded.dtype != saved.dtype:
            return saved.to(loaded.device)
        case str():
            return saved
        # Unless load_state_dict is the optimizer's own, and has changed the structure.
        case list() | tuple() if type(loaded) is type(saved) and (
            len(loaded) == len(saved)
        ):
            return type(saved)(map(_undo_conversion, loaded, saved))
        case dict() if isinstance(loaded, dict) and loaded.keys() == saved.keys():
            return {key: _undo_conversion(loaded[key], x) for key, x in saved.items()}
    return loaded


def _parameter_names(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> list[list[str]]:
    """Return the names of the optimizer's parameters in the model, a list per group."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    strangers = sum(id(p) not in name_of for params in groups for p in params)
    if strangers:
        raise ConfigError(
            f"{strangers} of the optimizer's parameters are not among the model's, "
            "so no checkpoint would hold them. Make their module an attribute of Net."
        )
    return [[name_of[id(p)] for p in params] for params in groups]


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return a copy of the options of each parameter group.

    Call this before the first update: `optimizer_state` compares with the copy to tell
    configuration from state. Options that are functions are left out.
    """
    return [copy.deepcopy(_options(group)) for group in optimizer.param_groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params" and not callable(v)}


def _equal_values(a: Any, b: Any) -> bool:
    """Return whether two options are equal, tensors included."""
    if isinstance(a, (list, tuple)):
        same = type(a) is type(b) and len(a) == len(b)
        return same and all(map(_equal_values, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal_values(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    return isinstance(a, torch.Tensor) == isinstance(b, torch.Tensor) and a == b
