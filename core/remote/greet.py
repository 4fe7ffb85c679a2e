# SPDX-License-Identifier: Apache-2.0
"""Wait for the first server, and check that its environments fit the learner's flags.

For the learner only: imports libtorchbeast.
"""

import argparse
import collections
import logging
import re
import time

import libtorchbeast
from core import ranks
from core.action_spaces import check_spaces
from core.errors import ConfigError
from core.remote import codec, messages, tls
from core.remote.local_servers import LocalServers
from core.remote.server_flags import describe_new_rollouts
from core.remote.server_lists import ServerList
from core.rollout import new_rollouts
from core.running import common_flags
from core.running.signals import StopSignal

log = logging.getLogger(__name__)

DESCRIBE_S = 2.0  # Limit for one request; then the learner asks the next server.
MAX_REFUSALS = 5  # If one server refuses our certificate so often, the program ends.
EMPTY_S = 0.2  # Interval of checks while the list of servers is empty.
SAY_WAITING_S = 10.0  # Interval of log lines while no server answers.


def greet(
    flags: argparse.Namespace, servers: LocalServers | ServerList, stop: StopSignal
) -> messages.Welcome | None:
    """Ask one server after another for its Welcome, until one answers.

    Servers of --server_addresses may start at any time, and their list may be empty for
    any time. Returns None after a signal to stop.

    Raises:
      ConfigError: the servers have an error or do not fit this learner, a certificate
        is wrong, or a name could not be resolved for --stall_timeout_s.
      TimeoutError: local servers did not answer within --stall_timeout_s.
    """
    began = say_at = time.monotonic()
    if servers.is_local:
        say_at += SAY_WAITING_S  # The log lines of local servers come first.
    pem_files = tls.read(flags.tls_dir, is_server=False)
    refusals: collections.Counter[str] = collections.Counter()
    # Learners other than the first print only warnings.
    level = logging.WARNING if ranks.rank() else logging.INFO
    attempt = 0
    while True:
        if stop.received is not None:
            return None
        servers.check()
        is_late = time.monotonic() - began > flags.stall_timeout_s
        if servers.is_local and is_late:
            raise TimeoutError(
                f"no environment server was ready within {flags.stall_timeout_s:g} "
                "s (--stall_timeout_s). Check the environment: python -m "
                f"core.environments.check {flags.env}"
            )
        if addresses := servers.addresses:
            address = addresses[attempt % len(addresses)]
            try:
                return codec.decode_welcome(
                    libtorchbeast.describe(
                        address,
                        info_keys=flags.info_keys,
                        timeout_s=DESCRIBE_S,
                        tls=pem_files,
                    )
                )
            except messages.WireError as error:
                raise ConfigError(f"{address}: {error}") from error
            except libtorchbeast.ActorError as error:
                reason = tls.diagnose(address, flags.tls_dir)
                why = f"{error}; {reason}" if reason else str(error)
                refusals[address] = refusals[address] + 1 if reason else 0
                is_permanent = isinstance(error, libtorchbeast.ServerMismatch)
                if is_permanent or refusals[address] == MAX_REFUSALS:
                    raise ConfigError(why) from error
        else:
            assert isinstance(servers, ServerList)
            why = servers.problem()
            if is_late and "cannot resolve" in why:
                raise ConfigError(
                    f"{why}, for {flags.stall_timeout_s:g} s (--stall_timeout_s). "
                    "Check the name."
                )
            time.sleep(EMPTY_S)
        if time.monotonic() > say_at:
            say_at = time.monotonic() + SAY_WAITING_S
            log.log(level, "Waiting for an environment server: %s", why)
        attempt += 1


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
        fits their spaces.
    """
    assert welcome.observation is not None and welcome.action is not None
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
    try:
        xpid = common_flags.expand_xpid(flags, welcome.env)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return argparse.Namespace(**{**vars(flags), "env": welcome.env, "xpid": xpid})
