# SPDX-License-Identifier: Apache-2.0
"""The command lines of both trainers: meanings, defaults, what is refused and how.

Each test that has `program` is run with MonoBeast and with PolyBeast. How each of them
sets its own numbers of environments, processes and devices is in
test_monobeast_flags.py and test_polybeast_flags.py.
"""

import functools
import json
import re
import sys

import gymnasium as gym
import pytest

import atari_wrappers
import monobeast
import polybeast
from core import flag_types
from core.errors import Exit
from core.rollout import Spaces
from tests.trainers import command_line
from tests.trainers.command_line import parse_test, refusal

PROGRAMS = [monobeast, polybeast]


@pytest.fixture(params=PROGRAMS, ids=lambda module: module.__name__)
def program(request):
    return request.param


@pytest.fixture
def trained(program, tmp_path):
    """Return a function that trains, as far as the flags are concerned."""
    return functools.partial(command_line.train, program, tmp_path)


def table(*, of_both, of_monobeast, of_polybeast):
    """Return rows of parameters that begin with the program."""
    of_one = {monobeast: of_monobeast, polybeast: of_polybeast}
    return [(p, *row) for p in PROGRAMS for row in (*of_both, *of_one[p])]


# ---------------------------------------------------------------------- what is there

# Each flag of TorchBeast (2019) with a value for it, and what that means. Left out is
# PolyBeast's --num_actions, which the servers say.
TORCHBEAST = table(
    of_both=[
        ("--env BreakoutNoFrameskip-v4", "env", "BreakoutNoFrameskip-v4"),
        ("--mode train", "mode", "train"),
        ("--xpid my-run", "xpid", "my-run"),
        ("--disable_checkpoint", "disable_checkpoint", True),
        ("--savedir /tmp/runs", "savedir", "/tmp/runs"),
        ("--num_actors 7", "num_actors", 7),
        ("--total_steps 30000000", "total_steps", 30_000_000),
        ("--batch_size 56", "batch_size", 56),
        ("--unroll_length 80", "unroll_length", 80),
        ("--num_learner_threads 3", "num_learner_threads", 3),
        ("--num_threads 3", "num_learner_threads", 3),  # MonoBeast's.
        ("--disable_cuda", "disable_cuda", True),
        ("--use_lstm", "use_lstm", True),
        ("--entropy_cost 0.0006", "entropy_cost", 0.0006),
        ("--baseline_cost 0.25", "baseline_cost", 0.25),
        ("--discounting 0.9", "discounting", 0.9),
        ("--reward_clipping none", "reward_clipping", "none"),
        ("--reward_clipping abs_one", "reward_clipping", "abs_one"),
        ("--learning_rate 0.00048", "learning_rate", 0.00048),
        ("--alpha 0.95", "alpha", 0.95),
        ("--momentum 0.5", "momentum", 0.5),
        ("--epsilon 0.1", "epsilon", 0.1),
        ("--grad_norm_clipping 10", "grad_norm_clipping", 10.0),
    ],
    of_monobeast=[("--num_buffers 61", "num_buffers", 61)],
    of_polybeast=[
        (
            "--pipes_basename unix:/tmp/polybeast",
            "pipes_basename",
            "unix:/tmp/polybeast",
        ),
        ("--num_servers 5", "num_servers", 5),
        ("--num_inference_threads 3", "num_inference_threads", 3),
        ("--max_learner_queue_size 48", "max_learner_queue_size", 48),
        ("--write_profiler_trace", "write_profiler_trace", True),
    ],
)


@pytest.mark.parametrize("program, argv, name, value", TORCHBEAST)
def test_every_flag_of_torchbeast_has_its_meaning(program, argv, name, value):
    assert getattr(program.parse_flags(argv.split()), name) == value


def test_the_defaults_are_the_papers_for_atari():
    flags = monobeast.parse_flags([])
    paper = dict(
        env="PongNoFrameskip-v4",
        mode="train",
        batch_size=32,
        unroll_length=20,
        total_steps=50_000_000,  # 200 million frames.
        learning_rate=0.0006,
        entropy_cost=0.01,
        baseline_cost=0.5,
        discounting=0.99,
        reward_clipping="abs_one",
        alpha=0.99,
        momentum=0.0,
        epsilon=0.01,
        grad_norm_clipping=40.0,
        use_lstm=False,
        model="auto",
    )
    assert {name: getattr(flags, name) for name in paper} == paper


def test_both_programs_have_the_same_defaults():
    mono, poly = (vars(module.parse_flags(["--xpid", "x"])) for module in PROGRAMS)
    both = mono.keys() & poly.keys() - {"num_actors"}  # Processes, or environments.
    assert len(both) > 40
    assert {name: mono[name] for name in both} == {name: poly[name] for name in both}


def test_defaults_that_are_no_constants_are_filled_in(program):
    flags = program.parse_flags([])
    assert flags.num_learner_threads == 2
    assert re.fullmatch(r"torchbeast-\d{8}-\d{6}-[0-9a-f]{4}", flags.xpid)
    assert not flags.savedir.startswith("~")


@pytest.mark.parametrize(
    "env, xpid",
    [
        ("PongNoFrameskip-v4", "PongNoFrameskip-v4-7"),
        ("MinAtar/Breakout-v1", "MinAtar-Breakout-v1-7"),
        ("tests.counting_env:make", "tests.counting_env-make-7"),
    ],
)
def test_env_in_xpid_becomes_the_environments_name(program, env, xpid):
    assert program.parse_flags(["--env", env, "--xpid", "{env}-7"]).xpid == xpid


@pytest.mark.parametrize("text", ["2000000", "2_000_000", "2e6", "2E+6", "2M", ".002G"])
def test_a_count_may_be_written_as_people_write_it(program, text):
    flags = program.parse_flags(["--total_steps", text, "--num_episodes", "1.5k"])
    assert (flags.total_steps, flags.num_episodes) == (2_000_000, 1500)
    assert type(flags.total_steps) is int


def test_info_keys_are_a_comma_list(program):
    flags = program.parse_flags(["--info_keys", "speed,body/height"])
    assert flags.info_keys == ("speed", "body/height")
    assert program.parse_flags([]).info_keys == ()


def test_cuda_graphs_are_used_unless_they_are_switched_off(program):
    assert program.parse_flags([]).disable_cuda_graphs is False
    assert program.parse_flags(["--disable_cuda_graphs"]).disable_cuda_graphs is True


@pytest.mark.parametrize(
    "argv, name, value",
    [
        ("--episodic_life", "episodic_life", True),
        ("--no-episodic_life", "episodic_life", False),
        ("", "episodic_life", None),
        ("--full_action_space", "full_action_space", True),
        ("--sticky_actions 0.25", "sticky_actions", 0.25),
        ("--env ALE/Pong-v5 --sticky_actions 0.25", "sticky_actions", 0.25),
        ("--noop_max 0", "noop_max", 0),
        ("--frame_skip 3", "frame_skip", 3),
        ("--atari_protocol machado", "atari_protocol", "machado"),
    ],
)
def test_atari_flags_go_with_atari(program, argv, name, value):
    assert getattr(program.parse_flags(argv.split()), name) == value


def test_help_names_every_flag_and_no_default_that_says_nothing(program, capsys):
    with pytest.raises(SystemExit) as caught:
        program.parse_flags(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in vars(program.parse_flags([])):
        assert f"--{name}" in text, name
    for default in ("None", "False", "()"):
        assert f"(default: {default})" not in text


def test_every_flag_has_a_help_text(program):
    for action in program.make_parser()._actions:
        assert action.help, action.option_strings


def test_flags_reach_the_network_and_its_optimizer(program):
    argv = "--env Catch --disable_cuda --reward_clipping none --initial_action_std 0.5"
    argv += " --learning_rate 0.002 --alpha 0.9 --epsilon 0.1 --momentum 0.6"
    box = gym.spaces.Box(-1.0, 1.0, (3,))
    flags = program.parse_flags(argv.split())
    learner = program.create_learner(flags, Spaces(box, box))
    assert not learner.net.clip_rewards
    assert learner.net.policy.log_std.exp().tolist() == pytest.approx([0.5] * 3)
    ((group,),) = (optimizer.param_groups for optimizer in learner.optimizers)
    options = [group[key] for key in ("lr", "alpha", "eps", "momentum")]
    assert options == [0.002, 0.9, 0.1, 0.6]


# -------------------------------------------------------------------- what is refused


def refused(flags, values, kind):
    """Return rows of BAD_VALUES: each flag expects a number of this kind."""
    return [(flag, v, f"expected {kind}") for flag in flags.split() for v in values]


# All ways to write a wrong number are tried with one flag of each kind, and the limits
# with the other flags.
COUNT, COUNT_OR_ZERO = "a whole number >= 1", "a whole number >= 0"
AMOUNT, SHARE = "a number >= 0", "a number in [0, 1]"
BAD_VALUES = table(
    of_both=[
        *refused("--total_steps", ["0", "-3", "2.5", "1e-3", "0.0005k", "2m"], COUNT),
        *refused("--total_steps", ["9e99", "inf", "many", ""], COUNT),
        *refused("--num_actors --batch_size --unroll_length", ["0"], COUNT),
        *refused("--num_learner_threads --learner_cores", ["0"], COUNT),
        *refused("--num_episodes --frame_skip --replay_capacity", ["0"], COUNT),
        *refused("--seed --noop_max", ["-1"], COUNT_OR_ZERO),
        *refused("--recycle_games --max_policy_lag", ["-1"], COUNT_OR_ZERO),
        *refused("--learning_rate", ["-0.1", "inf", "nan", "much", ""], AMOUNT),
        *refused("--checkpoint_interval_s --log_interval_s", ["-0.1"], AMOUNT),
        *refused("--entropy_cost --baseline_cost", ["-0.1"], AMOUNT),
        *refused("--grad_norm_clipping --replay_ratio", ["-0.1"], AMOUNT),
        *refused("--discounting", ["-0.1", "1.01", "inf", "nan", "much"], SHARE),
        *refused("--alpha --momentum", ["-0.1", "1.01"], SHARE),
        *refused("--sticky_actions --vtrace_lambda", ["-0.1", "1.01"], SHARE),
        *refused("--stall_timeout_s --env_step_timeout_s", ["0.9"], "a number >= 1"),
        *refused("--epsilon", ["0"], "a number >= 1e-10"),
        *refused("--initial_action_std", ["0"], "a number >= 0.0001"),
        ("--mode", "play", "test_render"),
        ("--reward_clipping", "soft_asymmetric", "abs_one"),
        ("--model", "resnet", "shallow"),
        ("--precision", "half", "bfloat16"),
        ("--atari_protocol", "dopamine", "machado"),
    ],
    of_monobeast=[
        *refused("--envs_per_actor --num_buffers", ["0"], COUNT),
        ("--start_method", "thread", "spawn"),
    ],
    of_polybeast=[
        *refused("--num_servers --envs_per_stream --streams_per_server", ["0"], COUNT),
        *refused("--num_inference_threads --max_learner_queue_size", ["0"], COUNT),
    ],
)


@pytest.mark.parametrize("program, flag, value, remedy", BAD_VALUES)
def test_a_bad_value_is_refused_with_flag_value_and_remedy(
    program, flag, value, remedy, capsys
):
    message = refusal(program, [f"{flag}={value}"], capsys)
    for part in (flag, repr(value), remedy):
        assert part in message


BAD_COMBINATIONS = table(
    of_both=[
        (
            "--replay_ratio 2 --batch_size 32",
            [
                "--replay_ratio is 2",
                "--batch_size is 32",
                "10.67",
                "Try --batch_size 36.",
            ],
        ),
        (  # Not a single replayed rollout.
            "--replay_ratio 0.001 --batch_size 8",
            ["--replay_ratio is 0.001", "--batch_size is 8", "Try --batch_size 4004."],
        ),
        (  # Not a single new one.
            "--replay_ratio 900 --batch_size 8",
            ["--replay_ratio is 900", "--batch_size is 8", "Try --batch_size 3604."],
        ),
        (
            "--replay_ratio 1 --batch_size 8 --replay_capacity 7",
            ["--replay_capacity is 7", "--batch_size (8)", "Try --replay_capacity 80."],
        ),
        ("--replay_capacity 99", ["--replay_capacity is 99", "--replay_ratio is 0"]),
        (
            "--total_steps 639 --batch_size 32 --unroll_length 20",
            ["--total_steps is 639", "(32) x --unroll_length (20) = 640", "Raise"],
        ),
        (
            "--replay_ratio 1 --batch_size 32 --unroll_length 20 --total_steps 319",
            ["--total_steps is 319", "(16 new ones)", "320"],
        ),
        *[
            (f"--env {env} --{name} {n}", [f"--{name} is {n}", env, f"Leave --{name} "])
            for env, name, n in (
                ("Catch", "atari_protocol", "impala"),
                ("Catch", "sticky_actions", "0.0"),
                ("Catch", "noop_max", 3),
                ("Catch", "frame_skip", 4),
                ("CartPole-v1", "frame_skip", 4),
                ("tests.counting_env:make", "frame_skip", 4),
            )
        ],
        (
            "--env Catch --no-episodic_life",
            ["--episodic_life is False", "Catch", "Leave --episodic_life out."],
        ),
        (
            "--env Catch --full_action_space",
            ["--full_action_space is True", "Catch", "Leave --full_action_space out."],
        ),
        ("--video", ["--video is set", "--mode is train", "Add --mode test"]),
        ("--greedy", ["--greedy is set", "--mode is train", "Add --mode test"]),
        ("--xpid a/b", ["--xpid is 'a/b'", "--savedir"]),
        ("--xpid .", ["--xpid is '.'", "--savedir"]),
        ("--xpid ..", ["--xpid is '..'", "--savedir"]),
        ("--xpid {env} --env ..", ["--xpid is '..'", "--savedir"]),
        ("--xpid=", ["--xpid is ''", "--savedir"]),
        (f"--xpid {'x' * 300}", ["--xpid has 300 bytes", "at most 200", "shorter"]),
        ("--xpid latest", ["--xpid is 'latest'", "Choose another name."]),
        ("--info_keys a,b,a", ["--info_keys", "each name once", "'a' twice"]),
        ('--info_keys a"b', ["--info_keys", "without double quotes or line", "'a\"b'"]),
        ("--info_keys speed,game_step", ["--info_keys", "'game_step'", "Leave it out"]),
        ("--info_keys game_return", ["--info_keys", "'game_return'", "Leave it out"]),
        ("--savedir ~nobody-has-this-name/runs", ["--savedir", "without ~"]),
        (f"--seed {2**70}", ["--seed", "at most 10^18", str(2**70)]),
        (f"--seed 1e{'9' * 18}G", ["--seed", "at most 10^18", "9G"]),
        ("--num_actions 6", ["no flag --num_actions. Did you mean --num_actors?"]),
        ("--lerning_rate=1", ["no flag --lerning_rate. Did you mean --learning_rate?"]),
        ("--xyzzy", ["there is no flag --xyzzy. See"]),
        ("Pong", ["'Pong' is not a flag"]),
    ],
    of_monobeast=[
        (  # Too large a group of environments.
            "--batch_size 12 --envs_per_actor 8",
            ["--batch_size is 12", "--envs_per_actor (8)", "Try --envs_per_actor 6."],
        ),
        (
            "--batch_size 5 --envs_per_actor 7",
            ["--batch_size is 5", "--envs_per_actor (7)", "Try --envs_per_actor 5."],
        ),
        (
            "--replay_ratio 3 --batch_size 16 --envs_per_actor 8",
            ["must be its 4 new", "12 replayed", "Try --envs_per_actor 4."],
        ),
        (
            "--num_buffers 35 --num_actors 9 --batch_size 8 --envs_per_actor 4",
            ["--num_buffers is 35", "environments (36)", "Try --num_buffers 88."],
        ),
        (
            "--num_buffers 6 --num_actors 7 --batch_size 7",
            ["--num_buffers is 6", "environments (7)", "Try --num_buffers 28."],
        ),
        (
            "--num_buffers 7 --num_actors 1 --batch_size 8 --envs_per_actor 2",
            ["--num_buffers is 7", "--batch_size (8)", "Try --num_buffers 20."],
        ),
        (
            "--serial --num_learner_threads 3",
            ["--num_learner_threads is 3", "--serial", "Leave one of them out."],
        ),
        (
            "--serial --num_threads 2",
            ["--num_learner_threads is 2", "--serial", "Leave one of them out."],
        ),
        (
            "--num_servers 3",
            ["--num_servers is for PolyBeast (python -m polybeast) only"],
        ),
    ],
    of_polybeast=[
        (
            "--max_learner_queue_size 16",
            [
                "--max_learner_queue_size is 16",
                "at least --batch_size (32 new rollouts)",
            ],
        ),
        (
            "--batch_size 12 --envs_per_stream 8",
            ["--batch_size is 12", "--envs_per_stream (8)", "Try --envs_per_stream 6."],
        ),
        (
            "--batch_size 5 --envs_per_stream 7",
            ["--batch_size is 5", "--envs_per_stream (7)", "Try --envs_per_stream 5."],
        ),
        (
            "--replay_ratio 3 --batch_size 16 --envs_per_stream 8",
            [
                "new rollouts in a batch is 4 (--batch_size 16",
                "Try --envs_per_stream 4.",
            ],
        ),
        (
            "--num_actors 7 --num_servers 2",
            [
                "--num_actors is 7 but --num_servers (2) x --streams_per_server (2) x ",
                "--envs_per_stream (8) is 32. Leave --num_actors out.",
            ],
        ),
        ("--num_actors 7 --envs_per_stream 2", ["--num_actors is 7", "is 4"]),
        ("--pipes_basename /tmp/a", ["--pipes_basename is /tmp/a", "unix:/path"]),
        (
            "--pipes_basename unix:/a%41",
            ["--pipes_basename: expected a path without '%'"],
        ),
        (
            "--pipes_basename unix:/a,b",
            ["--pipes_basename: expected a path without ','"],
        ),
        (
            "--pipes_basename 127.0.0.1:5",
            ["--pipes_basename is 127.0.0.1:5", "--server_addresses"],
        ),
        (
            "--max_streams 3",
            ["--max_streams is 3", "--server_addresses", "--num_servers"],
        ),
        (
            "--tls_dir certs",
            ["--tls_dir is certs", "all addresses are unix sockets", "Leave it out."],
        ),
        (
            "--tls_dir certs --server_addresses unix:/a,unix:/b",
            ["--tls_dir is certs", "all addresses are unix sockets", "Leave it out."],
        ),
        (
            "--tls_dir certs --insecure --server_addresses host:1",
            ["--tls_dir is certs", "--insecure", "Leave one out."],
        ),
        ("--insecure", ["--insecure is set", "starts its own servers. Leave it out."]),
        ("--num_buffers 60", ["--num_buffers is for MonoBeast", "only"]),
        ("--serial", ["--serial is for MonoBeast (python -m monobeast) only"]),
    ],
)


@pytest.mark.parametrize("program, argv, parts", BAD_COMBINATIONS)
def test_a_bad_combination_is_refused_with_values_and_remedy(
    program, argv, parts, capsys
):
    message = refusal(program, argv.split(), capsys)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "program, argv",
    [(p, argv) for p, argv, parts in BAD_COMBINATIONS if "Try --" in parts[-1]],
)
def test_taking_the_advice_helps(program, argv, capsys):
    message = refusal(program, argv.split(), capsys)
    advice = re.search(r"Try (--\S+ \d+)\.", message).group(1)
    program.parse_flags([*argv.split(), *advice.split()])


def test_flags_of_the_other_program_are_known_as_such():
    mono, poly = (
        {action.dest for action in program.make_parser()._actions}
        for program in PROGRAMS
    )
    told = [set(flags) for flags in flag_types.ONLY_IN.values()]
    assert told == [mono - poly, poly - mono]


# -------------------------------------------------------------------------- test mode


def test_testing_takes_over_what_the_network_and_environment_depend_on(
    program, trained, tmp_path
):
    trained(
        "--xpid a --env BreakoutNoFrameskip-v4 --model deep --use_lstm "
        "--reward_clipping none --sticky_actions 0.25 --no-episodic_life --noop_max 3 "
        "--normalize_observations --normalize_returns"
    )
    flags = parse_test(program, tmp_path, "--xpid a")
    assert flags.env == "BreakoutNoFrameskip-v4"
    assert (flags.model, flags.use_lstm) == ("deep", True)
    assert (flags.normalize_observations, flags.normalize_returns) == (True, True)
    assert flags.reward_clipping == "none"
    assert (flags.sticky_actions, flags.noop_max) == (0.25, 3)
    assert flags.episodic_life is False
    assert flags.frame_skip is None


def test_testing_takes_over_a_flag_of_a_fork(program, trained, tmp_path, monkeypatch):
    make_parser = program.make_parser

    def make_forked_parser():
        parser = make_parser()
        parser.add_argument("--hidden", type=int, default=128)
        parser.add_argument("--goals", type=flag_types.names, default=())
        parser.add_argument("--sizes", type=int, nargs="*", default=[])
        return parser

    monkeypatch.setattr(program, "make_parser", make_forked_parser)
    own = "--hidden 64 --goals a,b --sizes 3 5"
    trained(f"--xpid a --env Catch {own} --batch_size 8 --seed 3 --num_actors 2")
    flags = parse_test(program, tmp_path)
    assert (flags.goals, flags.sizes) == (("a", "b"), [3, 5])
    assert (flags.hidden, flags.batch_size) == (64, 8)
    assert (flags.mode, flags.seed) == ("test", None)
    assert parse_test(program, tmp_path, "--hidden 32").hidden == 32


MACHADO = {
    "atari_protocol": "machado",
    **atari_wrappers.options_of({"atari_protocol": "machado", "frame_skip": 5}),
}


@pytest.mark.parametrize(
    "argv, changes",
    [
        ("", {}),
        ("--no-full_action_space", {"full_action_space": False}),
        # A protocol that is named is that one, not a mixture of it and another.
        ("--atari_protocol impala", atari_wrappers.PROTOCOLS["impala"]),
    ],
)
def test_testing_plays_by_the_options_that_the_servers_told(
    program, trained, tmp_path, argv, changes
):
    trained("--xpid a", **MACHADO)
    played = atari_wrappers.options_of(vars(parse_test(program, tmp_path, argv)))
    told = {**MACHADO, **changes}
    del told["atari_protocol"]
    assert played == told


def test_atari_games_under_another_name_are_tested_too(
    program, trained, tmp_path, capsys
):
    """A create_env that calls make_atari, or --env module:function that does."""
    trained("--xpid a --env Catch", "Catch", **MACHADO)  # Not the id of an Atari game.
    assert parse_test(program, tmp_path).frame_skip == 5
    argv = ["--mode", "test", "--savedir", str(tmp_path), "--frame_skip", "3"]
    assert "--frame_skip is 3 but --env is Catch" in refusal(program, argv, capsys)


def test_an_option_of_the_wrong_type_is_refused(program, trained, tmp_path, capsys):
    trained("--xpid a", frame_skip="lots")
    argv = ["--mode", "test", "--savedir", str(tmp_path)]
    message = refusal(program, argv, capsys)
    assert "--frame_skip: expected a whole number" in message and "'lots'" in message


def test_the_command_line_wins_over_the_run(program, trained, tmp_path):
    trained("--xpid a --env BreakoutNoFrameskip-v4 --sticky_actions 0.25")
    argv = "--env PongNoFrameskip-v4 --sticky_actions 0"
    flags = parse_test(program, tmp_path, argv)
    assert (flags.env, flags.sticky_actions) == ("PongNoFrameskip-v4", 0.0)


@pytest.mark.parametrize(
    "recorded, argv, expected",
    [
        ("bfloat16", "", "bfloat16"),
        ("bfloat16", "--precision auto", "bfloat16"),
        ("bfloat16", "--precision float32", "float32"),
        ("float32", "", "float32"),
        (None, "", "float32"),  # A run older than the flag.
    ],
)
def test_testing_computes_as_the_run_did(
    program, recorded, argv, expected, trained, tmp_path
):
    trained(f"--xpid a --env Catch --precision {recorded or 'auto'}")
    if recorded is None:
        meta = json.loads((tmp_path / "a/meta.json").read_text())
        del meta["flags"]["precision"]
        (tmp_path / "a/meta.json").write_text(json.dumps(meta))
    assert parse_test(program, tmp_path, argv).precision == expected


def test_without_xpid_the_latest_run_is_tested(program, trained, tmp_path):
    trained("--xpid a --env Catch")
    trained("--xpid b --env Memory")
    assert parse_test(program, tmp_path).env == "Memory"
    assert parse_test(program, tmp_path, "--xpid a").env == "Catch"


def test_env_in_xpid_finds_the_run_too(program, trained, tmp_path):
    trained("--xpid {env}-7 --env MinAtar/Breakout-v1 --use_lstm")
    flags = parse_test(program, tmp_path, "--xpid {env}-7 --env MinAtar/Breakout-v1")
    assert flags.use_lstm is True


@pytest.mark.parametrize("mode", ["test", "test_render"])
@pytest.mark.parametrize("xpid", [[], ["--xpid", "nothing"]])
def test_testing_without_a_run_is_refused_with_the_remedy(
    program, mode, xpid, tmp_path, capsys
):
    if xpid:  # A loop of links, instead of a path that does not exist.
        (tmp_path / "none").symlink_to("none")
    argv = ["--mode", mode, "--savedir", str(tmp_path / "none"), *xpid]
    message = refusal(program, argv, capsys)
    run = tmp_path / "none" / (xpid[-1] if xpid else "latest")
    for part in (f"--mode is {mode} but {run} holds no run", "--xpid", "--savedir"):
        assert part in message


def test_a_window_and_a_video_at_once_are_refused(program, trained, tmp_path, capsys):
    trained("--xpid a --env Catch")
    argv = ["--mode", "test_render", "--video", "--savedir", str(tmp_path)]
    message = refusal(program, argv, capsys)
    for part in ("--video", "--mode is test_render", "--mode test --video"):
        assert part in message


def test_wandb_that_is_not_installed_is_refused(program, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    message = refusal(program, ["--env", "Catch", "--wandb"], capsys)
    assert "--wandb needs a package. Run `pip install wandb`." in message


def test_wandb_is_imported_before_there_is_a_run_and_sees_the_output(
    program, monkeypatch, capfd, tmp_path
):
    """W&B records the streams that it finds when it is imported."""
    (tmp_path / "wandb.py").write_text("import sys\nraise ImportError(sys.stdout)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)  # At the end as it was before.
    del sys.modules["wandb"]
    argv = ["--env", "Catch", "--savedir", str(tmp_path / "runs"), "--wandb"]
    assert program.main(argv) == Exit.USAGE
    (line,) = capfd.readouterr().err.splitlines()
    assert "--wandb: cannot import wandb: ImportError: <core.running.terminal." in line
    assert not (tmp_path / "runs").exists()


def test_init_from_is_for_training(program, trained, tmp_path, capsys):
    trained("--xpid a --env Catch")
    argv = ["--mode", "test", "--init_from", "y", "--savedir", str(tmp_path)]
    message = refusal(program, argv, capsys)
    for part in ("--init_from is y", "--mode is test", "--xpid"):
        assert part in message


def test_a_damaged_meta_json_is_a_configuration_error(program, tmp_path, capfd):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "meta.json").write_text("{")
    argv = ["--mode", "test", "--savedir", str(tmp_path), "--xpid", "a"]
    assert program.main(argv) == Exit.CONFIG
    assert str(tmp_path / "a" / "meta.json") in capfd.readouterr().err
