# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's command line: servers, their numbers and addresses, threads and devices.

What both programs' command lines have in common is in test_flags.py.
"""

import argparse
import re

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import atari_wrappers
import monobeast
import polybeast
import polybeast_env
from core import flag_types
from core.environments.toys import Catch
from core.errors import Exit
from core.remote import server_flags
from core.running import common_flags, evaluation, folder
from core.running.machine import num_cores
from tests.trainers.command_line import parse_test, refusal, train


def parse(text=""):
    return polybeast.parse_flags(text.split())


# ---------------------------------------------------------------------- what is there


def test_the_command_of_torchbeasts_readme_parses():
    flags = parse(
        "--env PongNoFrameskip-v4 --num_actors 32 --total_steps 30000000 "
        "--learning_rate 0.0004 --epsilon 0.01 --entropy_cost 0.01 --batch_size 32 "
        "--unroll_length 20 --num_inference_threads 2 --num_learner_threads 2 "
        "--grad_norm_clipping 1280 --xpid example --pipes_basename unix:/tmp/polybeast"
    )
    assert flags.num_servers == 32


def test_defaults_that_depend_on_others_are_filled_in():
    flags = parse("--batch_size 24 --disable_cuda")
    assert flags.num_servers == num_cores()
    assert (flags.envs_per_stream, flags.streams_per_server) == (8, 2)
    assert flags.num_actors == 16 * num_cores()
    assert flags.max_learner_queue_size == 24


@pytest.mark.parametrize(
    "cores, argv, inference_threads, learner_cores",
    [
        (1, "", 1, 1),
        (2, "", 1, 1),
        (2, "--model deep", 1, 2),
        (16, "", 4, 8),
        (16, "--model deep", 4, 16),
        (16, "--num_inference_threads 3 --learner_cores 5", 3, 5),
    ],
)
def test_the_cores_are_shared_between_acting_and_learning(
    monkeypatch, cores, argv, inference_threads, learner_cores
):
    for module in (polybeast, common_flags):
        monkeypatch.setattr(module, "num_cores", lambda: cores)
    flags = parse(f"--disable_cuda {argv}")
    assert flags.num_inference_threads == inference_threads
    assert flags.learner_cores == learner_cores


def test_a_gpu_that_acts_has_one_thread_and_three_streams_of_each_server(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    flags = parse()
    assert (flags.actor_device, flags.num_inference_threads) == ("cuda:0", 1)
    assert flags.streams_per_server == 3
    assert parse("--streams_per_server 2").streams_per_server == 2


def test_the_learner_and_its_servers_have_the_same_defaults():
    """Or the help of one of them, and `streams x environments`, would be wrong."""
    ours, theirs = parse(), polybeast_env.parse_flags([])
    for action in server_flags.passed_on():
        assert getattr(ours, action.dest) == getattr(theirs, action.dest), action.dest


def servers_flags(flags):
    """Return the flags of the servers that a learner with these flags starts."""
    return polybeast_env.parse_flags(
        flag_types.to_argv(flags, server_flags.passed_on())
    )


def test_the_learners_servers_get_its_flags():
    flags = parse(
        "--env BreakoutNoFrameskip-v4 --num_servers 3 --streams_per_server 5 "
        "--envs_per_stream 2 --env_step_timeout_s 7.5 --recycle_games 9 "
        "--no-episodic_life --noop_max 0 "
        "--sticky_actions 0.25 --full_action_space --frame_skip 3 "
        "--atari_protocol machado"
    )
    theirs = servers_flags(flags)
    for action in server_flags.passed_on():
        assert getattr(theirs, action.dest) == getattr(flags, action.dest), action.dest


def test_an_environment_that_is_not_installed_is_left_to_its_server():
    assert parse("--env nonesuch:Nonesuch-v5").env == "nonesuch:Nonesuch-v5"


@pytest.fixture
def forked(monkeypatch):
    """Let add_environment_flags declare flags of a fork, too."""
    declare = common_flags.add_environment_flags

    def add_environment_flags(parser):
        declare(parser)
        group = parser.add_argument_group("environment, of this fork")
        group.add_argument("--level", type=int, default=1)
        group.add_argument("--map-name", default="plain")
        group.add_argument("--hard", action="store_true")
        group.add_argument("--quiet", dest="sound", action="store_false")
        group.add_argument("--sizes", type=int, nargs="+", default=[2])

    monkeypatch.setattr(common_flags, "add_environment_flags", add_environment_flags)


FORK = "--level 5 --map-name=--odd --hard --quiet --sizes 3 -7"


@pytest.mark.parametrize("argv", ["", "--level 5", FORK])
def test_the_learners_servers_get_the_environment_flags_of_a_fork(forked, argv):
    flags = parse(argv)
    theirs = servers_flags(flags)
    for name in ("level", "map_name", "hard", "sound", "sizes"):
        assert getattr(theirs, name) == getattr(flags, name), name


def test_an_environment_flag_of_a_fork_belongs_to_the_servers_that_have_the_environment(
    forked, capsys
):
    argv = "--server_addresses localhost:1 --level 5"
    message = refusal(polybeast, argv.split(), capsys)
    assert "--level is 5 but" in message and "python -m polybeast_env" in message


@pytest.mark.parametrize("trainer", [monobeast, polybeast])
def test_testing_takes_over_the_environment_flags_of_a_fork(forked, tmp_path, trainer):
    savedir = ["--savedir", str(tmp_path)]
    flags = trainer.parse_flags([*FORK.split(), *savedir])
    run_dir = folder.prepare_run_dir(tmp_path, "a")
    folder.write_meta(run_dir, flags=vars(flags), extra={})
    argv = ["--mode", "test", "--xpid", "a", *savedir]
    tested = trainer.parse_flags(argv)
    assert (tested.level, tested.map_name, tested.sizes) == (5, "--odd", [3, -7])
    assert (tested.hard, tested.sound) == (True, False)
    assert trainer.parse_flags([*argv, "--level", "2"]).level == 2
    # A run that is older than the flag.
    old = {name: value for name, value in vars(flags).items() if name != "level"}
    folder.write_meta(run_dir, flags=old, extra={})
    assert trainer.parse_flags(argv).level == 1


def test_testing_takes_over_the_level_that_the_servers_told(forked, tmp_path):
    argv = "--xpid a --server_addresses localhost:1"
    train(polybeast, tmp_path, argv, "Catch", level=5)
    assert parse_test(polybeast, tmp_path).level == 5


# ------------------------------------------------------------------ numbers of servers


@pytest.mark.parametrize(
    "argv, servers, streams, envs",
    [
        # TorchBeast's: a process for each environment.
        ("--num_actors 7", 7, 1, 1),
        ("--num_actors 7 --num_servers 7", 7, 1, 1),
        ("--num_actors 32 --num_servers 2", 2, 2, 8),
        ("--num_actors 32 --envs_per_stream 4", 4, 2, 4),
        ("--num_actors 24 --streams_per_server 3", 1, 3, 8),
        ("--num_servers 3", 3, 2, 8),
        ("--num_servers 3 --envs_per_stream 4", 3, 2, 4),
        ("--num_servers 3 --streams_per_server 1", 3, 1, 8),
        ("--num_servers 3 --streams_per_server 5 --envs_per_stream 2", 3, 5, 2),
        ("--envs_per_stream 4", num_cores(), 2, 4),
        ("--num_servers 3 --batch_size 4", 3, 2, 4),
        ("--num_servers 3 --batch_size 12", 3, 2, 6),
    ],
)
def test_servers_streams_and_environments_follow_from_each_other(
    argv, servers, streams, envs
):
    flags = parse(argv)
    assert flags.num_servers == servers
    assert flags.streams_per_server == streams
    assert flags.envs_per_stream == envs
    assert flags.num_actors == servers * streams * envs


small = st.integers(1, 12)


@hypothesis.given(
    sizes=st.fixed_dictionaries(
        {"batch_size": small},
        optional={
            "num_actors": st.integers(1, 40),
            "num_servers": small,
            "streams_per_server": small,
            "envs_per_stream": small,
        },
    )
)
@hypothesis.settings(max_examples=100)
def test_what_is_accepted_is_what_was_asked_for_and_fits(sizes):
    try:
        flags = polybeast.parse_flags([f"--{name}={n}" for name, n in sizes.items()])
    except SystemExit as error:
        assert error.code == Exit.USAGE
        # Not for too little: at most one size is free, or they contradict each other.
        assert "num_actors" in sizes or sizes["batch_size"] % sizes["envs_per_stream"]
        return
    assert {name: getattr(flags, name) for name in sizes} == sizes
    assert flags.num_actors == (
        flags.num_servers * flags.streams_per_server * flags.envs_per_stream
    )
    assert flags.batch_size % flags.envs_per_stream == 0


# -------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "text, expected",
    [
        ("host:4431", ["host:4431"]),
        ("host:4431-4433", ["host:4431", "host:4432", "host:4433"]),
        ("host:4431-4431", ["host:4431"]),
        ("a:1-2,b:1,", ["a:1", "a:2", "b:1"]),
        ("10.0.0.7:65535", ["10.0.0.7:65535"]),
        ("[::1]:5-6", ["[::1]:5", "[::1]:6"]),
        ("host-1-2.example:5", ["host-1-2.example:5"]),
        ("unix:/tmp/pipe", ["unix:/tmp/pipe"]),
        ("unix:/tmp/pipe.0-2", [f"unix:/tmp/pipe.{i}" for i in range(3)]),
        ("unix:/tmp/run-7", ["unix:/tmp/run-7"]),
        ("unix:/tmp/2019-07-01/pipe", ["unix:/tmp/2019-07-01/pipe"]),
        ("unix:/tmp/a:5", ["unix:/tmp/a:5"]),
        (
            "unix:/tmp/p.99998-100000",
            [f"unix:/tmp/p.{i}" for i in (99998, 99999, 10**5)],
        ),
        ("a:1,unix:/b.0-1", ["a:1", "unix:/b.0", "unix:/b.1"]),
        ("dns:envs.jobs:4431,a:1", ["dns:envs.jobs:4431", "a:1"]),
        ("@hosts,file:/etc/envs", ["file:hosts", "file:/etc/envs"]),
    ],
)
def test_addresses_are_a_comma_list_with_ranges(text, expected):
    assert server_flags.addresses(text) == tuple(expected)
    flags = polybeast.parse_flags(["--insecure", "--server_addresses", text])
    assert flags.server_addresses == tuple(expected)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "expected an address"),
        (",", "expected an address"),
        ("host", "expected host:port"),
        (":4431", "expected host:port"),
        ("host:", "expected host:port"),
        ("host:http", "expected host:port"),
        ("fd00::7:4431", "expected an IPv6 address in brackets"),
        ("[fd00::7:4431", "expected an IPv6 address in brackets"),
        ("unix:relative", "expected host:port"),
        ("host:4433-4431", "from low to high"),
        ("unix:/a.3-1", "from low to high"),
        ("host:65536", "ports from 1 to 65535"),
        ("host:65530-65536", "ports from 1 to 65535"),
        ("host:0", "ports from 1 to 65535"),
        ("host:0-3", "ports from 1 to 65535"),
        ("a:1-3,a:3", "a:3 twice"),
        ("unix:/a,unix:/a", "unix:/a twice"),
        ("unix:/a%41.0-1", "without '%'"),
        ("unix:/a#1.0-1", "without '#'"),
        ("@hosts,file:hosts", "file:hosts twice"),
        ("dns:envs", "expected dns:NAME:PORT"),
        ("dns::1", "expected dns:NAME:PORT"),
        ("dns:envs:0", "port from 1 to 65535"),
        ("dns:envs:65536", "port from 1 to 65535"),
        ("@", "expected file:PATH"),
        ("file:", "expected file:PATH"),
    ],
)
def test_addresses_that_are_none_are_named(text, said, capsys):
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(said)):
        server_flags.addresses(text)
    message = refusal(polybeast, [f"--server_addresses={text}"], capsys)
    assert "--server_addresses" in message and said in message


def test_a_file_of_addresses_is_not_read_as_a_file_of_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("localhost:1\n")
    (tmp_path / "flags").write_text("--server_addresses @hosts --seed 3\n")
    for argv in (
        ["--server_addresses", "@hosts"],
        ["--server_addresses=@hosts"],
        ["@flags"],
    ):
        assert polybeast.parse_flags(argv).server_addresses == ("file:hosts",)


def test_remote_servers_know_their_own_environment():
    flags = parse("--server_addresses localhost:1 --xpid {env}-1")
    assert (flags.env, flags.xpid) == (None, "{env}-1")  # The servers will say.
    pong = "PongNoFrameskip-v4"  # The default elsewhere: given, it must agree.
    assert parse(f"--server_addresses localhost:1 --env {pong}").env == pong
    assert parse("--server_addresses localhost:1 --env Catch").env == "Catch"


def test_this_machines_lists_need_no_protection():
    assert parse("--server_addresses dns:localhost:1,file:hosts").max_streams is None


@pytest.mark.parametrize(
    "address", ["host:1", "unix:/a,10.0.0.7:1-9", "[::]:1", "dns:envs:1"]
)
def test_servers_elsewhere_are_protected_or_known_not_to_be(address, capsys):
    argv = f"--server_addresses {address}"
    message = refusal(polybeast, argv.split(), capsys)
    for way_out in ("--tls_dir", "python -m tools.certs", "--insecure"):
        assert way_out in message
    assert parse(f"{argv} --insecure").insecure
    assert parse(f"{argv} --tls_dir certs/learner").tls_dir == "certs/learner"


def test_the_learner_has_timeouts_of_its_own():
    text = "--server_addresses unix:/a --env_step_timeout_s 3 --keepalive_s 0.5"
    flags = parse(text)
    assert (flags.env_step_timeout_s, flags.keepalive_s) == (3.0, 0.5)


@pytest.mark.parametrize(
    "flag",
    [
        "--num_servers 2",
        "--num_actors 2",
        "--envs_per_stream 8",
        "--streams_per_server 2",
        "--pipes_basename unix:/tmp/polybeast",
        "--recycle_games 3",
        "--sticky_actions 0.25",
        "--no-episodic_life",
    ],
)
def test_what_remote_servers_decide_is_refused_here(flag, capsys):
    argv = f"--server_addresses localhost:1 {flag}"
    message = refusal(polybeast, argv.split(), capsys)
    name = flag.split()[0].replace("no-", "")
    for part in (name, "--server_addresses", "python -m polybeast_env"):
        assert part in message


# ---------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    "num_gpus, argv, learner, actor",
    [
        (0, "", "cpu", "cpu"),
        (1, "", "cuda:0", "cuda:0"),
        (2, "", "cuda:0", "cuda:1"),
        (8, "", "cuda:0", "cuda:1"),
        (2, "--disable_cuda", "cpu", "cpu"),
        (2, "--actor_device cpu", "cuda:0", "cpu"),
        (4, "--learner_device cuda:3", "cuda:3", "cuda:1"),
        (1, "--learner_device cuda", "cuda", "cuda:0"),
        (2, "--disable_cuda --learner_device cpu", "cpu", "cpu"),
        (1, "--learner_device cpu", "cpu", "cuda:0"),
    ],
)
def test_devices_are_the_gpus_there_are(monkeypatch, num_gpus, argv, learner, actor):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    flags = parse(argv)
    assert (flags.learner_device, flags.actor_device) == (learner, actor)


@pytest.mark.parametrize(
    "num_gpus, argv, parts",
    [
        (0, "--learner_device cuda", ["--learner_device is cuda", "sees 0 GPUs"]),
        (1, "--actor_device cuda:1", ["--actor_device is cuda:1", "sees 1 GPUs"]),
        (
            2,
            "--disable_cuda --actor_device cuda:1",
            ["--actor_device is cuda:1", "with --disable_cuda", "--actor_device cpu"],
        ),
        (2, "--actor_device gpu", ["--actor_device is 'gpu'"]),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    monkeypatch, num_gpus, argv, parts, capsys
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    message = refusal(polybeast, argv.split(), capsys)
    for part in parts:
        assert part in message


# -------------------------------------------------------------------------- test mode


def test_testing_plays_by_the_protocol_that_the_servers_told(tmp_path, monkeypatch):
    served = polybeast_env.parse_flags(
        "--env PongNoFrameskip-v4 --atari_protocol machado --frame_skip 5".split()
    )
    train(
        polybeast,
        tmp_path,
        "--xpid a --server_addresses localhost:1",
        served.env,
        **{"atari_protocol": "machado", **atari_wrappers.options_of(vars(served))},
    )
    made = []

    def make_atari(env_id, **options):
        made.append((env_id, options))
        return Catch()

    def test_run(flags, create_envs, **_):
        create_envs(seed=1).close()

    monkeypatch.setattr(atari_wrappers, "make_atari", make_atari)
    monkeypatch.setattr(evaluation, "test_run", test_run)
    assert polybeast.main(["--mode", "test", "--savedir", str(tmp_path)]) == Exit.DONE
    protocol = {**atari_wrappers.PROTOCOLS["machado"], "frame_skip": 5}
    assert made == [("PongNoFrameskip-v4", {**protocol, "render_mode": None})]


@pytest.mark.parametrize(
    "argv, env",
    [
        ("--env Catch --batch_size 21 --envs_per_stream 7 --num_servers 1", None),
        ("--env Catch --num_actors 3 --unroll_length 1 --batch_size 1", None),
        ("--server_addresses localhost:1-9 --batch_size 5", "Catch"),
        ("--server_addresses host:1 --tls_dir certs --batch_size 5", "Catch"),
    ],
)
def test_any_run_that_was_trained_can_be_tested(tmp_path, argv, env):
    train(polybeast, tmp_path, f"--xpid a {argv}", env)
    assert parse_test(polybeast, tmp_path).env == "Catch"


@pytest.mark.parametrize(
    "servers", ["--server_addresses localhost:1", "--listen :4431"]
)
def test_a_run_with_other_servers_is_tested_with_its_own_flags(tmp_path, servers):
    env, told = "PongNoFrameskip-v4", {"atari_protocol": "machado"}
    train(polybeast, tmp_path, f"--xpid a {servers}", env, **told)
    assert parse_test(polybeast, tmp_path, servers).atari_protocol == "machado"
