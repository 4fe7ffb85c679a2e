# SPDX-License-Identifier: Apache-2.0
"""Wait for the first server whose environments fit the learner's flags and the run.

For the learner only: imports libtorchbeast.
"""

import argparse
import collections
import concurrent.futures
import logging
import re
import time
import zlib
from pathlib import Path

import libtorchbeast
from core import ranks
from core.action_spaces import check_spaces
from core.algorithm import learners
from core.errors import ConfigError
from core.remote import codec, messages, tls
from core.remote.frames import arrays_of
from core.remote.local_servers import LocalServers
from core.remote.server_flags import describe_new_rollouts
from core.remote.server_lists import ServerList
from core.rollout import new_rollouts, row_spec, spec_of, text_of
from core.running import common_flags, folder
from core.running.signals import StopSignal
from core.running.supervise import start_thread

log = logging.getLogger(__name__)

# Limits for one request; then the learner asks the next server. The second limit is for
# a server that has exceeded the first one.
DESCRIBE_S, SLOW_DESCRIBE_S = 5.0, 10.0
MAX_REFUSALS = 5  # A server with so many TLS errors in a row does not fit.
ASK_AGAIN_S = 0.1  # Pause after a server has not answered, or the list was empty.
SAY_WAITING_S = 10.0  # Interval of log lines while no server answers.


def greet(
    flags: argparse.Namespace, servers: LocalServers | ServerList, stop: StopSignal
) -> tuple[argparse.Namespace, messages.Welcome] | None:
    """Ask one server after another for its Welcome, until one answers that fits.

    Servers of --server_addresses may start at any time, and their list may be empty for
    any time. A list that may change may also have servers that do not fit: they are
    refused with a warning, and asked again in their turn.

    Returns:
      The flags with the servers' environment, and the Welcome. None after a signal to
      stop, to this learner or another one.

    Raises:
      LearnerLost: another learner has ended.
      ConfigError: the servers have an error, do not fit this learner or differ from
        another learner's; a certificate is wrong; or a name could not be resolved for
        --stall_timeout_s.
      TimeoutError: local servers did not answer within --stall_timeout_s.
    """
    began = say_at = time.monotonic()
    if servers.is_local:
        say_at += SAY_WAITING_S  # The log lines of local servers come first.
    trained_env = _trained_env(flags)
    asker = _Asker(flags, trained_env if servers.may_change else None)
    refused: dict[str, str] = {}  # The reason, by address.
    # Learners other than the first print only warnings.
    level = logging.WARNING if ranks.rank() else logging.INFO
    attempt = 0
    while True:
        if _is_to_stop(stop):
            return None
        servers.check()
        is_late = time.monotonic() - began > flags.stall_timeout_s
        if servers.is_local and is_late:
            raise TimeoutError(
                f"no environment server was ready within {flags.stall_timeout_s:g} "
                "s (--stall_timeout_s). Check the environment: python -m "
                f"core.environments.check {flags.env}"
            )
        addresses = servers.addresses
        refused = {key: refused[key] for key in addresses if key in refused}
        if addresses:
            address = addresses[attempt % len(addresses)]
            try:
                greeted = asker.ask(address)
            except ConnectionError as error:
                why = str(error)
                refused.pop(address, None)
            except ConfigError as error:
                if not servers.may_change:
                    raise
                why = str(error) if address in str(error) else f"{address}: {error}"
                if refused.get(address) != why:
                    log.warning("Refused until it fits the run: %s", why)
                refused[address] = why
            else:
                return greeted if _check_with_others(greeted[1], stop) else None
        else:
            assert isinstance(servers, ServerList)
            why = servers.problem()
            if is_late and "cannot resolve" in why:
                raise ConfigError(
                    f"{why}, for {flags.stall_timeout_s:g} s (--stall_timeout_s). "
                    "Check the name."
                )
        if time.monotonic() > say_at:
            say_at = time.monotonic() + SAY_WAITING_S
            if refused and why not in refused.values():
                why += f"; {len(refused)} refused: {next(iter(refused.values()))}"
            log.log(level, "Waiting for an environment server: %s", why)
        attempt += 1
        time.sleep(ASK_AGAIN_S)


class _Asker:
    """Asks single servers for their Welcome.

    Args:
      trained_env: the environment that the servers must have, or None.
    """

    def __init__(self, flags: argparse.Namespace, trained_env: str | None):
        self._flags = flags
        self._trained_env = trained_env
        self._pem_files = tls.files(flags.tls_dir)
        # By address: how often in a row TLS has failed.
        self._tls_failures: collections.Counter[str] = collections.Counter()
        self._slow: set[str] = set()  # Servers that have exceeded DESCRIBE_S.

    def ask(self, address: str) -> tuple[argparse.Namespace, messages.Welcome]:
        """Return the flags with the server's environment, and its Welcome.

        Raises:
          ConnectionError: the server does not answer now.
          ConfigError: the server has an error or does not fit.
        """
        flags = self._flags
        try:
            raw = libtorchbeast.describe(
                address,
                info_keys=flags.info_keys,
                timeout_s=SLOW_DESCRIBE_S if address in self._slow else DESCRIBE_S,
                tls=self._pem_files,
            )
            welcome = codec.decode_welcome(raw)
        except messages.WireError as error:
            raise ConfigError(f"{address}: {error}") from error
        except libtorchbeast.ActorError as error:
            reason = tls.diagnose(address, flags.tls_dir)
            why = f"{error}; {reason}" if reason else str(error)
            if "DEADLINE_EXCEEDED" in why:
                self._slow.add(address)
            failures = self._tls_failures[address] + 1 if reason else 0
            self._tls_failures[address] = failures
            is_permanent = isinstance(error, libtorchbeast.ServerMismatch)
            if is_permanent or failures >= MAX_REFUSALS:
                raise ConfigError(why) from error
            raise ConnectionError(why) from error
        if self._trained_env not in (None, welcome.env):
            raise ConfigError(
                f"the servers serve {welcome.env} but run {flags.xpid} was trained "
                f"with {self._trained_env}. Choose another --xpid, or start the "
                "servers with that environment."
            )
        return complete_flags(flags, welcome), welcome


def _trained_env(flags: argparse.Namespace) -> str | None:
    """Return the environment of the run that is resumed, or None in a new run.

    Of several learners, learner 0 tells it to the others: it has the run's folder.
    """
    found = None
    if ranks.rank() == 0:
        run_dir = Path(flags.savedir) / flags.xpid
        if any(run_dir.glob("checkpoints/step-*")):
            found = folder.recorded_meta(run_dir).get("flags", {}).get("env")
    return learners.share(found)


def _is_to_stop(stop: StopSignal) -> bool:
    has_signal = stop.received is not None
    if (others := learners.current()) is None:
        return has_signal
    others.check_stop(has_signal, is_training=False)
    return others.wants_stop


def _check_with_others(welcome: messages.Welcome, stop: StopSignal) -> bool:
    """Call `check_same_env` when all learners have a server; False after a signal."""
    if (others := learners.current()) is None:
        return True
    if others.rank == 0:
        log.info("Waiting until each learner has a server")
    # In a thread: a signal must not wait for the others.
    check = start_thread("greet", check_same_env, welcome)
    while not check.done():
        try:
            if _is_to_stop(stop):
                return False
        except learners.LearnerLost:
            # All learners find the same difference, but another one was faster.
            if not concurrent.futures.wait([check], learners.END_S).not_done:
                check.result()
            raise
        concurrent.futures.wait([check], timeout=ASK_AGAIN_S)
    check.result()
    return True


def check_same_env(welcome: messages.Welcome) -> None:
    """Refuse learners whose servers have another environment than learner 0's.

    (csrc/same_env.cc compares the servers of one learner.) The number of environments
    of a stream may differ: no learner reads the rollouts of another one. Does nothing
    if this is the only learner; otherwise all learners must call this.

    Raises:
      ConfigError: in all learners. The message names the learner and the difference.
    """
    if (others := learners.current()) is None:
        return
    ours = {"env": welcome.env, "frames_per_step": str(welcome.frames_per_step)}
    for name in ("observation", "action"):
        space = getattr(welcome, name)
        ours[f"{name} space"] = text_of(space)
        data = codec.encode(codec.space_message(space))  # The text may lack bounds.
        ours[f"{name} space with the checksum"] = f"{zlib.crc32(data):08x}"
    ours |= {f"option {o.name}": repr(o.value) for o in welcome.options}
    first, *rest = others.collect(ours)
    for i, theirs in enumerate(rest, 1):
        for key in {**first, **theirs}:
            expected, got = (x.get(key, "(not reported)") for x in (first, theirs))
            if got != expected:
                raise ConfigError(
                    f"learner {i}'s servers have the {key} {got}, but learner 0's have "
                    f"{expected}. Start all servers with the same environment and the "
                    "same flags."
                )


def add_tls_reason(text: str, flags: argparse.Namespace) -> str:
    """Append the TLS error to a message about a server, if there is one.

    Args:
      text: begins with the server's address.
    """
    address = text.partition(" ")[0]
    if flags.server_addresses and re.fullmatch(r".+:\d+(#.*)?", address):
        reason = tls.diagnose(address, flags.tls_dir)
        return f"{text}; {reason}" if reason else text
    return text


def warn_if_insecure(flags: argparse.Namespace) -> None:
    if flags.insecure and any(map(tls.is_public, flags.server_addresses or ())):
        log.warning(
            "INSECURE: the traffic with the servers is neither encrypted nor "
            "authenticated (--insecure)"
        )


def complete_flags(
    flags: argparse.Namespace, welcome: messages.Welcome
) -> argparse.Namespace:
    """Return the flags with the servers' environment; check the flags against it.

    Raises:
      ConfigError: --env, --batch_size or --xpid does not fit the servers, or no policy
        fits their spaces, or they do not send what their spaces say.
    """
    check_spaces(welcome.observation, welcome.action)
    B, K = new_rollouts(flags), welcome.num_envs
    if B % K:
        enough = -(-B // K) * K  # The next multiple of K, in new rollouts.
        raise ConfigError(
            f"{describe_new_rollouts(flags)} but must be a multiple of the servers' "
            f"--envs_per_stream ({K}): a stream makes {K} rollouts at a time. Try "
            f"--batch_size {flags.batch_size * enough // B}, or start the servers with "
            "another --envs_per_stream."
        )
    if flags.env not in (None, welcome.env):
        raise ConfigError(
            f"--env is {flags.env} but the servers serve {welcome.env}. Leave "
            "--env out, or start the servers with it."
        )
    check_arrays(welcome, flags.info_keys)
    try:
        xpid = common_flags.expand_xpid(flags, welcome.env)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return argparse.Namespace(**{**vars(flags), "env": welcome.env, "xpid": xpid})


def check_arrays(welcome: messages.Welcome, info_keys: tuple[str, ...]) -> None:
    """Compare a Welcome's arrays with its spaces: a server may be anybody's program.

    Raises:
      ConfigError: an array is missing or has another type or shape.
    """
    row = row_spec(welcome.observation, welcome.action, info_keys)
    for name, spec in (
        ("step_arrays", row),
        ("action_arrays", spec_of(welcome.action, "action")),
    ):
        found = {array.path: array for array in getattr(welcome, name)}
        for array in arrays_of(spec):
            got = found.get(array.path)
            if got is None or (got.dtype, got.shape) != (array.dtype, array.shape):
                key = "/".join(map(str, array.path))
                was = "none" if got is None else f"{got.dtype}{[*got.shape]}"
                raise ConfigError(
                    f"the servers' Welcome.{name} has {was} for '{key}', but their "
                    f"spaces and --info_keys need {array.dtype}{[*array.shape]}. "
                    "Correct the server, as proto/torchbeast.proto says."
                )
