# SPDX-License-Identifier: Apache-2.0
"""The share of the flags that each of several learners takes."""

import argparse
import json
import re
from pathlib import Path

import pytest

import monobeast
import polybeast
from core import ranks
from core.errors import ConfigError
from core.running import folder
from core.running.machine import num_cores
from tests.trainers.several import environments


@pytest.fixture
def learner(monkeypatch):
    """Let this process be one of several learners."""

    def be(rank, size):
        for name, value in environments(size, port=1)[rank].items():
            monkeypatch.setenv(name, value)

    return be


def parse(module, *argv):
    return module.parse_flags(["--env", "Catch", *map(str, argv)])


def test_without_torchrun_there_is_one_learner(monkeypatch):
    assert (ranks.rank(), ranks.size(), ranks.first_incarnation()) == (0, 1, 0)
    for name in ("WORLD_SIZE", "RANK"):  # Some schedulers set one of them alone.
        monkeypatch.setenv(name, "4")
        assert (ranks.rank(), ranks.size()) == (0, 1)
        monkeypatch.delenv(name)


def test_each_learner_takes_its_share(learner):
    learner(1, 3)
    flags = parse(monobeast, "--batch_size", 12, "--num_actors", 6, "--num_buffers", 31)
    assert flags.batch_size == 4
    assert flags.num_actors * flags.envs_per_actor == 2
    assert flags.num_buffers == 11
    recorded = ranks.flags_of_run(flags)
    assert (recorded["batch_size"], recorded["num_buffers"]) == (12, 33)


def test_a_run_has_a_batch_of_all_learners(learner, capsys, tmp_path):
    few = ["--batch_size", 12, "--unroll_length", 5, "--num_actors", 6]
    few += ["--total_steps", 59]
    learner(rank=1, size=2)
    with pytest.raises(SystemExit):
        parse(monobeast, *few)
    assert "--batch_size (12) x --unroll_length (5) = 60" in capsys.readouterr().err
    learner(rank=0, size=1)
    folder.write_meta(tmp_path, flags={"env": "Catch"}, extra={})
    test = ["--mode", "test", "--savedir", tmp_path.parent, "--xpid", tmp_path.name]
    assert parse(monobeast, *few, *test).total_steps == 59


def test_flags_of_a_fork_are_recorded_as_json_or_refused_by_name():
    paths = [Path("c"), Path("d")]
    flags = argparse.Namespace(
        encoder=Path("a/b.pt"), sizes=(3, (4, None)), on=True, paths=paths
    )
    recorded = ranks.flags_of_run(flags)
    assert json.loads(json.dumps(recorded)) == recorded
    assert recorded["sizes"] == [3, [4, None]]
    assert (recorded["encoder"], recorded["paths"]) == ("a/b.pt", ["c", "d"])
    flags.kinds = {"a"}
    with pytest.raises(ConfigError, match="--kinds is {'a'}, a set: .*type=str"):
        ranks.flags_of_run(flags)


def test_each_learner_has_servers_of_its_own(learner):
    taken = []
    for rank in range(3):
        learner(rank, 3)
        flags = parse(
            polybeast, "--batch_size", 6, "--server_addresses", "localhost:4431-4437"
        )
        taken.append(set(flags.server_addresses))
    assert sorted(map(len, taken)) == [2, 2, 3]
    assert len(set.union(*taken)) == 7


def test_the_share_of_a_learner_may_have_no_server_that_tls_protects(learner):
    learner(1, 2)
    flags = parse(
        *(polybeast, "--batch_size", 6, "--tls_dir", "certs"),
        *("--server_addresses", "localhost:1,unix:/a"),
    )
    assert flags.server_addresses == ("unix:/a",)


def test_a_learner_at_which_machines_dial_in_needs_no_server_of_the_list(learner):
    learner(1, 2)
    flags = parse(
        *(polybeast, "--batch_size", 6, "--listen", "localhost:4431"),
        *("--server_addresses", "localhost:1"),
    )
    assert (flags.server_addresses, flags.listen) == ((), "localhost:4432")


def test_a_list_that_may_change_is_divided_where_it_is_read(learner):
    learner(2, 3)
    flags = parse(
        *(polybeast, "--batch_size", 6, "--max_streams", 7),
        *("--server_addresses", "dns:localhost:1"),
    )
    assert (flags.server_addresses, flags.max_streams) == (("dns:localhost:1",), 3)


def test_learners_on_one_machine_share_its_cores(learner):
    cores = num_cores()
    learner(0, 2 * cores)
    assert num_cores() == 1
    learner(0, 1)
    assert num_cores() == cores


def test_only_learner_0_writes(learner):
    learner(0, 2)
    assert not parse(polybeast).disable_checkpoint
    learner(1, 2)
    flags = parse(polybeast, "--write_profiler_trace", "--wandb")
    assert flags.disable_checkpoint
    assert not flags.write_profiler_trace and not flags.wandb


@pytest.mark.parametrize(
    "module, argv, message",
    [
        (monobeast, ["--batch_size", 7], "--batch_size is 7 .* Try --batch_size 8"),
        (polybeast, ["--num_servers", 3], "--num_servers is 3 .* Try --num_servers 4"),
        (polybeast, ["--server_addresses", "localhost:1"], "each needs a server"),
        (monobeast, ["--mode", "test"], "without torchrun"),
        (polybeast, ["--batch_size", 8, "--envs_per_stream", 3], "its share of what"),
    ],
)
def test_what_cannot_be_shared_is_refused(learner, capsys, module, argv, message):
    learner(1, 2)
    with pytest.raises(SystemExit) as error:
        parse(module, *argv)
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_incarnations_of_learners_do_not_meet(learner):
    learner(1, 2)
    assert ranks.first_incarnation() > 2**40  # Far above what one learner reaches.
