# SPDX-License-Identifier: Apache-2.0
"""`core.actors.serial`: which runs may go on with --serial."""

import types

import pytest

from core.actors import serial
from core.errors import ConfigError
from tests.actors.pool import make_flags


def test_a_run_of_polybeast_does_not_go_on_in_lock_step():
    found = types.SimpleNamespace(state={"flags": {"info_keys": [], "num_servers": 2}})
    with pytest.raises(ConfigError, match="--serial is True but .* with False"):
        serial.restore_actors(make_flags("Catch", "--serial"), [], found)


@pytest.mark.parametrize(
    "key, old",
    [
        ("serial", False),
        ("seed", 8),
        ("num_actors", 3),
        ("envs_per_actor", 9),
        ("info_keys", ["half"]),
    ],
)
def test_a_run_goes_on_in_lock_step_with_the_same_values_only(key, old):
    flags = make_flags("Catch", "--serial")
    trained = vars(flags) | {"info_keys": list(flags.info_keys)} | {key: old}
    found = types.SimpleNamespace(state={"flags": trained})
    with pytest.raises(ConfigError, match=f"^--{key} is .* trained with .* as they"):
        serial.restore_actors(flags, [], found)
