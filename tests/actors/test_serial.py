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
