# SPDX-License-Identifier: Apache-2.0
"""`make` creates one environment by its name. `--env` takes one of these names:

    a Gymnasium id            CartPole-v1, ALE/Pong-v5, MinAtar/Breakout-v1, module:Id
    package.module:function   a function of yours that returns an environment
    gym:ID                    an id of classic gym: `pip install -e .[classic]`
    Catch, Memory             the toys in core/environments/toys.py

For vector environments see `core.environments.vector`.
"""

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import json
import logging
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from core.environments import toys
from core.environments.classic_gym import adapt
from core.errors import MakeError
from core.nests import describe

TOYS = {"Catch": toys.Catch, "Memory": toys.Memory}


def make(name: str, **kwargs: Any) -> gym.Env:
    """Create the environment that `--env name` stands for (see the module docstring).

    The environment gets `kwargs`; a `package.module:function` gets only the arguments
    that its signature accepts.

    Raises:
      MakeError: there is no such environment; the message suggests similar names.
    """
    if name in TOYS:
        return TOYS[name](**kwargs)
    if name.startswith("gym:"):
        return _make_classic(name.removeprefix("gym:"), **kwargs)
    if ":" in name:
        function = _find_function(name)
        if function is not None:
            return _call(name, function, kwargs)
    return _make_gymnasium(name, **kwargs)


def check_options(options: Any) -> dict[str, Any]:
    """Return the options of an environment, as `env_options` of a program gave them.

    Raises:
      MakeError: they are no dict, or JSON (meta.json) cannot hold one of them, or
        `frame_skip` is no number of frames.
    """
    if not isinstance(options, dict):
        raise MakeError(f"env_options returned {describe(options)}, expected a dict")
    for name, value in options.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise MakeError(
                f"env_options: {name} is {value!r:.80} ({type(value).__name__}), which "
                "meta.json cannot hold; expected a bool, int, float or str"
            ) from error
    frames = options.get("frame_skip", 1)
    if type(frames) is not int or frames < 1:
        raise MakeError(
            f"env_options: frame_skip is {frames!r:.80}, expected an int of at least 1"
        )
    return options


def _make_gymnasium(name: str, **kwargs: Any) -> gym.Env:
    if name not in gym.registry:
        _register_known_packages(name)
    spec = gym.registry.get(name.rpartition(":")[2])
    if spec is None:  # Without its version, an Atari game would have no wrappers.
        known = [*TOYS, *gym.registry]
        raise MakeError(_unknown(name, known) + _suggest_package(name))
    if kwargs.get("render_mode") is None:
        # The id may be registered with a render mode, which the wrappers of the
        # environment need. render_mode=None would replace it.
        if "render_mode" in spec.kwargs:
            kwargs.pop("render_mode", None)
    try:
        # Gymnasium's passive checker is not needed: `Environments` checks each step.
        env = _make_with(gym.make, name, disable_env_checker=True, **kwargs)
    except (gym.error.Error, ImportError) as error:
        if getattr(error, "name", None) is not None:
            raise  # The environment's own module has a wrong import.
        raise MakeError(f"--env {name}: {error}") from error
    return MinAtar(env) if name.startswith("MinAtar/") else env


def _register_known_packages(name: str) -> None:
    """Register the ids of ale_py and minatar, which Gymnasium does not find."""
    if name.startswith("MinAtar/"):
        # minatar logs a message about plotting to the root logger. If this were the
        # first log record of the process, logging would also install a handler.
        quiet = logging.NullHandler()
        logging.getLogger().addHandler(quiet)
        try:
            import minatar.gym
        except ImportError:
            raise MakeError(f"--env {name} needs: pip install minatar") from None
        finally:
            logging.getLogger().removeHandler(quiet)
        if "MinAtar/Breakout-v1" not in gym.registry:
            minatar.gym.register_envs()
    elif ":" not in name:
        with contextlib.suppress(ImportError):
            import ale_py

            gym.register_envs(ale_py)
            # Without this, each of many actors prints a banner. Errors still show.
            ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def _make_classic(name: str, **kwargs: Any) -> gym.Env:
    try:
        classic_gym = importlib.import_module("gym")
    except ImportError:
        raise MakeError(
            f"--env gym:{name} needs classic gym, which is not installed. "
            f"Try: pip install -e .[classic], or --env {name} from Gymnasium."
        ) from None
    parameters = inspect.signature(classic_gym.make).parameters
    if "disable_env_checker" in parameters:
        kwargs["disable_env_checker"] = True  # The checker of 0.26 breaks on numpy 2.
    else:
        kwargs.pop("render_mode", None)  # Before 0.24: render(mode="rgb_array").
    try:
        return adapt(_make_with(classic_gym.make, name, **kwargs))
    except classic_gym.error.UnregisteredEnv:
        registry = classic_gym.envs.registry
        names = [f"gym:{known}" for known in getattr(registry, "env_specs", registry)]
        raise MakeError(_unknown(f"gym:{name}", names)) from None
    except (classic_gym.error.Error, ImportError) as error:
        if getattr(error, "name", None) is not None:
            raise  # The environment's own module has a wrong import.
        raise MakeError(f"--env gym:{name}: {error}") from error


def _make_with(make: Callable[..., Any], name: str, **kwargs: Any) -> Any:
    """Call Gymnasium's or classic gym's `make`, also for a class without render modes.

    Other classes get render_mode=None: they may draw by default.
    """
    try:
        return make(name, **kwargs)
    except TypeError as error:
        has_modes = "unexpected keyword argument 'render_mode'" not in str(error)
        if has_modes or kwargs.get("render_mode", "absent") is not None:
            raise
    del kwargs["render_mode"]
    return make(name, **kwargs)


def _find_function(name: str) -> Callable[..., Any] | None:
    """Import `package.module:attribute`; None if only the attribute is missing."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(missing + "."):
            raise  # The module exists, but it imports a module that does not exist.
        raise MakeError(
            f"--env {name}: Python finds no module {missing!r}. Start the program with "
            "`python -m` in the directory that holds it, or set PYTHONPATH."
        ) from None
    function = getattr(module, attribute, None)
    if function is None and name.rpartition(":")[2] not in gym.registry:
        names = [n for n, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(attribute, names, n=3)
        raise MakeError(
            f"--env {name}: {module.__file__} has no function {attribute!r}, and "
            f"importing it registers no such Gymnasium id.{_did_you_mean(near)}"
        )
    if function is not None and not callable(function):
        raise MakeError(f"--env {name}: expected a function, got {function!r}")
    return function


def _call(name: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> gym.Env:
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        kwargs = {key: value for key, value in kwargs.items() if key in parameters}
    env = function(**kwargs)
    try:
        return adapt(env)
    except MakeError as error:
        raise MakeError(f"--env {name}: {error}") from None


def _unknown(name: str, names: list[str]) -> str:
    by_lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    message = (
        f"--env {name} is not known; expected a Gymnasium id, package.module:function, "
        f"gym:ID, Catch or Memory.{_did_you_mean([by_lower[n] for n in near])}"
    )
    if importlib.util.find_spec("ale_py") is None:
        message += " (Atari games need: pip install ale-py)"
    return message


def _suggest_package(name: str) -> str:
    """Suggest package:ID if importing the package registers the id `name`."""
    package = name.partition("-")[0].partition("/")[0].lower()  # MiniGrid-Empty-5x5-v0
    if package.isidentifier() and ":" not in name:
        with contextlib.suppress(Exception):  # Any package may have this name.
            importlib.import_module(package)
        if name in gym.registry:
            return _did_you_mean([f"{package}:{name}"])
    return " If another package registers this id, write package:ID."


def _did_you_mean(near: list[str]) -> str:
    return f" Did you mean {' or '.join(near)}?" if near else ""


class MinAtar(gym.Wrapper):
    """MinAtar with games that depend only on their seed, and without seaborn.

    In the package, the first sticky action of a game repeats the last action of the
    previous game, and `render` needs seaborn. Here the last action is 0 at the start of
    every game, and `render` needs only numpy.
    """

    PIXELS = 16

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        base: Any = self.unwrapped
        base.game.last_action = 0
        return self.env.reset(seed=seed, options=options)

    def render(self) -> Any:
        base: Any = self.unwrapped
        state = base.game.state()  # [10, 10, C] bool
        hues = np.arange(state.shape[-1]) / state.shape[-1]
        waves = np.cos(2 * np.pi * (hues[:, None] - np.arange(3) / 3))
        colours = (128 + 127 * waves).astype(np.uint8)  # [C, 3]
        channel = state.argmax(axis=-1)
        image = np.where(state.any(axis=-1)[..., None], colours[channel], 0)
        return image.repeat(self.PIXELS, 0).repeat(self.PIXELS, 1).astype(np.uint8)
