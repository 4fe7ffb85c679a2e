# SPDX-License-Identifier: Apache-2.0
"""`Service`: the environments that a server makes, and how it describes them."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

import gymnasium as gym
import numpy as np

from core.environments.faults import name_of
from core.environments.make import check_options
from core.environments.stepping import Environments
from core.errors import EnvSpecError, MakeError
from core.nests import Nest
from core.remote import frames, messages
from core.remote.messages import Action, Hello
from core.remote.places import quote
from core.rollout import row_spec, spec_of
from core.running.unit import running

log = logging.getLogger(__name__)

MAX_INFO_KEYS = 1000


EnvOptions = Mapping[str, bool | int | float | str]


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """The keyword arguments of `Server`.

    Attributes:
      num_envs: K, the environments of a stream. They are stepped one after the other.
      num_streams: S, the largest number of streams at a time.
      name: the environment's name; by default the environment's own name.
      frames_per_step: emulator frames per step; the learner counts frames with it. By
        default the option `frame_skip`, or 1 if there is none.
      options: the options of the environments by name: bools, numbers and strings; or a
        function that returns them for one environment. The learner shows and records
        them.
      vector: `env_class` creates all environments of a stream at once, and is called
        like `Environments` without its first argument.
      tls_dir: a folder with ca.pem, cert.pem and key.pem: over TCP, encrypt, and serve
        only learners that show a certificate of that CA.
      insecure: serve other machines without encryption.
      progress: [2 * S, 2] float64, written by the server. Column 0: number of steps
        that the streams in this place have done. Column 1: `time.monotonic()` at the
        start of the present call into an environment, 0 between calls. If it is in
        shared memory, another process can read it. There are 2 * S rows, because a
        stream of the same run may start while the old stream closes its environments.
      keepalive_s: if a learner's machine is frozen or cut off, the server notices in
        twice this time and closes the learner's environments.
    """

    num_envs: int = 1
    num_streams: int = 1
    name: str | None = None
    frames_per_step: int | None = None
    options: EnvOptions | Callable[[Any], EnvOptions] | None = None
    vector: bool = False
    tls_dir: str | None = None
    insecure: bool = False
    progress: np.ndarray | None = None
    keepalive_s: float = 10.0


class WrongProtocol(Exception):
    """The learner speaks another version of the protocol."""


class Service:
    """Creates the environments of a server and describes them to learners.

    Creates one environment to read its spaces, and closes it.

    Args:
      env_class: as `Server` takes it.
      clock: [1] float64, as `Environments` takes it.

    Raises:
      MakeError: the environment cannot be served.
    """

    def __init__(
        self, env_class: Callable[..., Any], options: ServerOptions, clock: np.ndarray
    ) -> None:
        self._options = options
        self._make = (
            env_class if options.vector else functools.partial(Environments, env_class)
        )
        self.num_envs = options.num_envs
        envs = self.make_environments(Hello(), clock, num_envs=1)
        with closing(envs, clock):
            self._observation_space: gym.Space = envs.observation_space
            self.action_space: gym.Space = envs.action_space
            self.name = options.name or name_of(envs.envs[0])
            env_options = options.options or {}
            if callable(env_options):
                env_options = env_options(envs.envs[0])
            env_options = check_options(env_options)
        self._action_arrays = frames.arrays_of(spec_of(self.action_space))
        for name, value in env_options.items():
            if not isinstance(value, bool | int | float | str):
                raise MakeError(
                    f"env_options: {name} is {value!r:.80} ({type(value).__name__}), "
                    "expected a bool, int, float or str"
                )
        self._env_options = tuple(messages.Option(*x) for x in env_options.items())
        frames_per_step = options.frames_per_step or env_options.get("frame_skip", 1)
        self._frames_per_step = int(frames_per_step)

    def make_environments(
        self, hello: Hello, clock: np.ndarray, *, num_envs: int | None = None
    ) -> Environments:
        """Return new environments with the seeds and options in the learner's Hello."""
        with running(clock):
            return self._make(
                num_envs or self.num_envs,
                seed=hello.seed,
                first_env_id=hello.first_env_id,
                incarnation=hello.incarnation,
                info_keys=hello.info_keys,
                truncation_is_done=hello.truncation_is_done,
                clock=clock,
            )

    def check_spaces(self, envs: Environments) -> None:
        """Raise EnvSpecError if the spaces do not equal those that were described."""
        expected = (self._observation_space, self.action_space)
        if (envs.observation_space, envs.action_space) != expected:
            raise EnvSpecError(
                f"{self.name} has different spaces than when this server started: "
                f"{envs.observation_space} and {envs.action_space}; expected "
                f"{self._observation_space} and {self.action_space}"
            )

    def check_hello(self, hello: Hello) -> None:
        """Check a learner's Hello.

        Raises:
          WrongProtocol: the learner is of another version.
          WireError: the keys are not allowed.
        """
        if hello.protocol != messages.PROTOCOL:
            older = "server" if hello.protocol > messages.PROTOCOL else "learner"
            raise WrongProtocol(
                f"the server speaks protocol {messages.PROTOCOL} (torchbeast "
                f"{version()}), the learner {hello.protocol} (torchbeast "
                f"{quote(hello.version)}): upgrade the {older}"
            )
        keys = hello.info_keys
        if len(keys) > MAX_INFO_KEYS:
            raise messages.WireError(
                f"Hello.info_keys: {len(keys)}, at most {MAX_INFO_KEYS}"
            )
        if len(set(keys)) < len(keys) or {"", "game_return", "game_step"} & set(keys):
            raise messages.WireError(
                "Hello.info_keys: expected different names other than game_return and "
                f"game_step, got {', '.join(keys)!r:.200}"
            )

    def action_frame(self) -> frames.Frame:
        """Return a new frame for the Actions of one stream."""
        return frames.Frame(Action, self._action_arrays, self.num_envs)

    def step_arrays(self, hello: Hello) -> tuple[tuple[messages.Array, ...], Nest]:
        """Return the arrays of a Step, flat and as the spec of a row."""
        spec = row_spec(self._observation_space, self.action_space, hello.info_keys)
        return frames.with_stacks(frames.arrays_of(spec)), spec

    def welcome(self, hello: Hello) -> messages.Welcome:
        return messages.Welcome(
            protocol=messages.PROTOCOL,
            version=version(),
            env=self.name,
            num_envs=self.num_envs,
            num_streams=self._options.num_streams,
            frames_per_step=self._frames_per_step,
            observation=self._observation_space,
            action=self.action_space,
            step_arrays=self.step_arrays(hello)[0],
            action_arrays=self._action_arrays,
            options=self._env_options,
        )


@contextlib.contextmanager
def closing(envs: Environments, clock: np.ndarray) -> Iterator[None]:
    """Close the environments after the block; log exceptions of `close`."""
    try:
        yield
    finally:
        try:
            with running(clock):
                envs.close()
        except Exception:
            log.exception("An environment could not be closed")


@functools.cache
def version() -> str:
    """Return the version of this package, for messages."""
    try:
        return metadata.version("torchbeast")
    except metadata.PackageNotFoundError:
        return "not installed"
