# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's command line: names, meanings, defaults, and what is refused and how."""

import json
import re

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import atari_wrappers
import monobeast
from core.actors import actor_flags
from core.errors import Exit
from core.rollout import new_rollouts
from core.running import folder
from core.running.machine import num_cores


def refusal(argv, capsys):
    """Return what is said of a bad command line, which must exit with status 2."""
    with pytest.raises(SystemExit) as caught:
        monobeast.parse_flags(argv)
    assert caught.value.code == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.endswith("See python -m monobeast --help")
    return line


# ---------------------------------------------------------------------- what is there

# Each flag of TorchBeast's MonoBeast (2019), a value for it, and what that means.
TORCHBEAST = [
    ("--env", "BreakoutNoFrameskip-v4", "env", "BreakoutNoFrameskip-v4"),
    ("--mode", "train", "mode", "train"),
    ("--xpid", "my-run", "xpid", "my-run"),
    ("--disable_checkpoint", None, "disable_checkpoint", True),
    ("--savedir", "/tmp/runs", "savedir", "/tmp/runs"),
    ("--num_actors", "7", "num_actors", 7),
    ("--total_steps", "30000000", "total_steps", 30_000_000),
    ("--batch_size", "56", "batch_size", 56),
    ("--unroll_length", "80", "unroll_length", 80),
    ("--num_buffers", "61", "num_buffers", 61),
    ("--num_learner_threads", "3", "num_learner_threads", 3),
    ("--num_threads", "3", "num_learner_threads", 3),
    ("--disable_cuda", None, "disable_cuda", True),
    ("--disable_cuda_graphs", None, "disable_cuda_graphs", True),
    ("--use_lstm", None, "use_lstm", True),
    ("--entropy_cost", "0.0006", "entropy_cost", 0.0006),
    ("--baseline_cost", "0.25", "baseline_cost", 0.25),
    ("--discounting", "0.9", "discounting", 0.9),
    ("--reward_clipping", "none", "reward_clipping", "none"),
    ("--reward_clipping", "abs_one", "reward_clipping", "abs_one"),
    ("--learning_rate", "0.00048", "learning_rate", 0.00048),
    ("--alpha", "0.95", "alpha", 0.95),
    ("--momentum", "0.5", "momentum", 0.5),
    ("--epsilon", "0.1", "epsilon", 0.1),
    ("--grad_norm_clipping", "10", "grad_norm_clipping", 10.0),
]


@pytest.mark.parametrize("flag, text, name, value", TORCHBEAST)
def test_every_flag_of_torchbeast_has_its_meaning(flag, text, name, value):
    flags = monobeast.parse_flags([flag] if text is None else [flag, text])
    assert getattr(flags, name) == value


def test_the_command_of_torchbeasts_readme_is_45_environments():
    flags = monobeast.parse_flags(
        "--env PongNoFrameskip-v4 --num_actors 45 --total_steps 30000000 "
        "--learning_rate 0.0004 --epsilon 0.01 --entropy_cost 0.01 --batch_size 4 "
        "--unroll_length 80 --num_buffers 60 --num_threads 4 --xpid example".split()
    )
    assert (flags.num_actors, flags.envs_per_actor) == (45, 1)  # gcd(45, 4) is 1.
    assert flags.num_buffers == 60


@pytest.mark.parametrize(
    "argv, cores, actors, envs",
    [
        ("", 2, 2, 8),
        ("", 32, 32, 8),
        ("--batch_size 4", 2, 2, 4),
        ("--batch_size 12", 2, 2, 6),
        ("--num_actors 48", 2, 3, 16),  # As few processes as keep the cores busy.
        ("--num_actors 48", 32, 48, 1),
        ("--num_actors 256", 32, 32, 8),
        ("--num_actors 16", 2, 2, 8),
        ("--num_actors 1", 2, 1, 1),
        ("--num_actors 3", 2, 3, 1),
        ("--num_actors 16 --serial", 2, 1, 16),  # Whatever machine it goes on.
        ("--num_actors 16 --serial", 32, 1, 16),
        ("--num_actors 3 --envs_per_actor 4", 2, 3, 4),
        ("--envs_per_actor 16", 2, 2, 16),
    ],
)
def test_environments_are_put_into_processes(argv, cores, actors, envs, monkeypatch):
    monkeypatch.setattr(actor_flags, "num_cores", lambda: cores)
    flags = monobeast.parse_flags(argv.split())
    assert (flags.num_actors, flags.envs_per_actor) == (actors, envs)
    recorded = [
        f"--{key}={getattr(flags, key)}" for key in ("num_actors", "envs_per_actor")
    ]
    again = monobeast.parse_flags([*argv.split(), *recorded])
    assert vars(again) | {"xpid": ""} == vars(flags) | {"xpid": ""}


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


def test_defaults_that_depend_on_others_are_filled_in():
    flags = monobeast.parse_flags(["--batch_size", "24", "--envs_per_actor", "3"])
    assert flags.num_actors == num_cores()
    assert flags.num_buffers == 2 * 3 * flags.num_actors + 2 * 24
    assert flags.num_learner_threads == 2
    assert re.fullmatch(r"torchbeast-\d{8}-\d{6}", flags.xpid)
    assert not flags.savedir.startswith("~")


def test_serial_defaults_to_one_learner_thread():
    assert monobeast.parse_flags(["--serial"]).num_learner_threads == 1
    assert monobeast.parse_flags("--serial --num_threads 1".split()).serial


@pytest.mark.parametrize(
    "env, xpid",
    [
        ("PongNoFrameskip-v4", "PongNoFrameskip-v4-7"),
        ("MinAtar/Breakout-v1", "MinAtar-Breakout-v1-7"),
        ("tests.counting_env:make", "tests.counting_env-make-7"),
    ],
)
def test_env_in_xpid_becomes_the_environments_name(env, xpid):
    assert monobeast.parse_flags(["--env", env, "--xpid", "{env}-7"]).xpid == xpid


@pytest.mark.parametrize("text", ["2000000", "2_000_000", "2e6", "2E+6", "2M", ".002G"])
def test_a_count_may_be_written_as_people_write_it(text):
    flags = monobeast.parse_flags(["--total_steps", text, "--num_buffers", "1.5k"])
    assert (flags.total_steps, flags.num_buffers) == (2_000_000, 1500)
    assert type(flags.total_steps) is int


def test_info_keys_are_a_comma_list():
    flags = monobeast.parse_flags(["--info_keys", "speed,body/height"])
    assert flags.info_keys == ("speed", "body/height")
    assert monobeast.parse_flags([]).info_keys == ()


@pytest.mark.parametrize(
    "argv, name, value",
    [
        ("--episodic_life", "episodic_life", True),
        ("--no-episodic_life", "episodic_life", False),
        ("", "episodic_life", None),
        ("--full_action_space", "full_action_space", True),
        ("--sticky_actions 0.25", "sticky_actions", 0.25),
        ("--noop_max 0", "noop_max", 0),
        ("--frame_skip 3", "frame_skip", 3),
        ("--atari_protocol machado", "atari_protocol", "machado"),
    ],
)
def test_atari_flags_go_with_atari(argv, name, value):
    assert getattr(monobeast.parse_flags(argv.split()), name) == value


def test_help_names_every_flag_and_no_default_that_says_nothing(capsys):
    with pytest.raises(SystemExit) as caught:
        monobeast.parse_flags(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in vars(monobeast.parse_flags([])):
        assert f"--{name}" in text, name
    for default in ("None", "False", "()"):
        assert f"(default: {default})" not in text


def test_every_flag_has_a_help_text():
    for action in monobeast.make_parser()._actions:
        assert action.help, action.option_strings


# -------------------------------------------------------------------- what is refused

WHOLE = ["0", "-3", "2.5", "1e-3", "0.0005k", "2m", "9e99", "inf", "many", ""]
BAD_VALUES = [
    *[
        (flag, value, "expected a whole number >= 1")
        for flag in (
            "--num_actors",
            "--envs_per_actor",
            "--num_buffers",
            "--total_steps",
            "--batch_size",
            "--unroll_length",
            "--num_learner_threads",
            "--num_episodes",
            "--frame_skip",
            "--replay_capacity",
        )
        for value in WHOLE
    ],
    *[
        (flag, value, "expected a whole number >= 0")
        for flag in ("--seed", "--noop_max")
        for value in WHOLE[1:]
    ],
    *[
        (flag, value, "expected a number >= 0")
        for flag in (
            "--checkpoint_interval_s",
            "--log_interval_s",
            "--entropy_cost",
            "--baseline_cost",
            "--learning_rate",
            "--grad_norm_clipping",
            "--replay_ratio",
        )
        for value in ("-0.1", "inf", "nan", "much", "")
    ],
    *[
        (flag, value, "expected a number in [0, 1]")
        for flag in ("--discounting", "--alpha", "--momentum", "--sticky_actions")
        for value in ("-0.1", "1.01", "inf", "nan", "much")
    ],
    *[("--stall_timeout_s", v, "expected a number >= 1") for v in ("0", "-5", "inf")],
    *[("--epsilon", v, "expected a number >= 1e-10") for v in ("0", "-1", "nan")],
    ("--mode", "play", "test_render"),
    ("--reward_clipping", "soft_asymmetric", "abs_one"),
    ("--model", "resnet", "shallow"),
    ("--start_method", "thread", "spawn"),
    ("--atari_protocol", "dopamine", "machado"),
]


@pytest.mark.parametrize("flag, value, remedy", BAD_VALUES)
def test_a_bad_value_is_refused_with_flag_value_and_remedy(flag, value, remedy, capsys):
    message = refusal([f"{flag}={value}"], capsys)
    for part in (flag, repr(value), remedy):
        assert part in message


BAD_COMBINATIONS = [
    (  # Too large a group of environments.
        "--batch_size 12 --envs_per_actor 8",
        ["--batch_size is 12", "--envs_per_actor (8)", "Try --envs_per_actor 6."],
    ),
    (
        "--batch_size 5 --envs_per_actor 7",
        ["--batch_size is 5", "--envs_per_actor (7)", "Try --envs_per_actor 5."],
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
        "--replay_ratio 2 --batch_size 32",
        ["--replay_ratio is 2", "--batch_size is 32", "10.67", "Try --batch_size 36."],
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
        "--replay_ratio 3 --batch_size 16 --envs_per_actor 8",
        ["must be its 4 new", "12 replayed", "Try --envs_per_actor 4."],
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
        "--total_steps 639 --batch_size 32 --unroll_length 20",
        [
            "--total_steps is 639",
            "--batch_size (32)",
            "--unroll_length (20)",
            "640",
            "Raise --total_steps.",
        ],
    ),
    *[
        (
            f"--env {env} {flag}",
            [f"{flag.split()[0]} is {flag.split()[1]}", env, "Leave"],
        )
        for env in ("Catch", "CartPole-v1", "tests.counting_env:make")
        for flag in (
            "--atari_protocol impala",
            "--sticky_actions 0.0",
            "--noop_max 3",
            "--frame_skip 4",
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
    ("--savedir ~nobody-has-this-name/runs", ["--savedir", "without ~"]),
    (f"--seed {2**70}", ["--seed", "at most 10^18", str(2**70)]),
    (f"--seed 1e{'9' * 18}G", ["--seed", "at most 10^18", "9G"]),
    ("--info_keys speed,game_step", ["--info_keys", "'game_step'", "Leave it out"]),
    ("--info_keys game_return", ["--info_keys", "'game_return'", "Leave it out"]),
    ("--num_actions 6", ["no flag --num_actions. Did you mean --num_actors?"]),
    ("--lerning_rate=1", ["no flag --lerning_rate. Did you mean --learning_rate?"]),
    ("--xyzzy", ["there is no flag --xyzzy. See"]),
    ("--num_servers 3", ["--num_servers is for PolyBeast (python -m polybeast) only"]),
    ("Pong", ["'Pong' is not a flag"]),
]


@pytest.mark.parametrize(
    "argv, parts", BAD_COMBINATIONS, ids=[argv for argv, _ in BAD_COMBINATIONS]
)
def test_a_bad_combination_is_refused_with_values_and_remedy(argv, parts, capsys):
    message = refusal(argv.split(), capsys)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "argv",
    [argv for argv, parts in BAD_COMBINATIONS if "Try --" in parts[-1]],
)
def test_taking_the_advice_helps(argv, capsys):
    advice = re.search(r"Try (--\S+ \d+)\.", refusal(argv.split(), capsys)).group(1)
    monobeast.parse_flags([*argv.split(), *advice.split()])


def test_a_serial_run_is_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert monobeast.has_gpu(monobeast.parse_flags([]))
    assert not monobeast.has_gpu(monobeast.parse_flags(["--serial"]))


def test_what_is_just_enough_is_accepted():
    monobeast.parse_flags(
        "--num_actors 7 --num_buffers 21 --batch_size 21 --envs_per_actor 3 "
        "--unroll_length 5 --total_steps 105".split()
    )


@pytest.mark.parametrize(
    "argv, new, envs, capacity",
    [
        ("--batch_size 32", 32, 8, None),
        ("--batch_size 32 --replay_ratio 0", 32, 8, None),
        ("--batch_size 32 --replay_ratio 1", 16, 8, 320),
        ("--batch_size 32 --replay_ratio 3 --replay_capacity 32", 8, 8, 32),
        ("--batch_size 12 --replay_ratio 0.5", 8, 4, 120),
        ("--batch_size 32 --replay_ratio 0.3333", 24, 8, 320),
    ],
)
def test_a_batch_has_new_and_replayed_rollouts(argv, new, envs, capacity):
    """The environments of a process divide the number of both."""
    flags = monobeast.parse_flags(argv.split())
    assert new_rollouts(flags) == new
    assert flags.envs_per_actor == envs
    assert flags.replay_capacity == capacity


small = st.integers(1, 12)


@hypothesis.given(
    sizes=st.fixed_dictionaries(
        {"batch_size": small, "unroll_length": small},
        optional={
            "num_actors": small,
            "envs_per_actor": small,
            "num_buffers": st.integers(1, 60),
            "num_learner_threads": st.integers(1, 3),
            "total_steps": st.integers(1, 200),
        },
    ),
    serial=st.booleans(),
)
@hypothesis.settings(max_examples=200)
def test_exactly_what_can_be_trained_is_accepted(sizes, serial):
    A, B, E, T = (
        sizes.get(k)
        for k in ("num_actors", "batch_size", "envs_per_actor", "unroll_length")
    )
    argv = [f"--{name}={value}" for name, value in sizes.items()]
    if A is None:
        cores = 1 if serial else num_cores()
        total = cores * (E or max(e for e in range(1, 9) if B % e == 0))
    else:
        total = A * (E or 1)
    # Buffers for a whole batch, one for every environment, and at least one update.
    possible = (
        (E is None or B % E == 0)
        and sizes.get("num_buffers", 1000) >= max(total, B)
        and sizes.get("total_steps", 1000) >= B * T
        and not (serial and sizes.get("num_learner_threads", 1) > 1)
    )
    try:
        flags = monobeast.parse_flags(argv + ["--serial"] * serial)
    except SystemExit as error:
        assert error.code == Exit.USAGE
        assert not possible
    else:
        assert possible
        assert flags.num_actors * flags.envs_per_actor == total
        assert B % flags.envs_per_actor == 0
        assert flags.num_buffers >= max(total, B)
        if E is None:
            sizes.pop("num_actors", None)
        assert {name: getattr(flags, name) for name in sizes} == sizes


# -------------------------------------------------------------------------- test mode


@pytest.fixture
def trained(tmp_path):
    """Return a function that trains, as far as the flags are concerned."""

    def train(argv, **env_options):
        flags = monobeast.parse_flags([*argv.split(), "--savedir", str(tmp_path)])
        run_dir = folder.prepare_run_dir(tmp_path, flags.xpid)
        extra = {"env_options": env_options} if env_options else {}
        folder.write_meta(run_dir, flags=vars(flags), extra=extra)
        folder.link_latest(run_dir)

    return train


def parse_test(savedir, argv=""):
    return monobeast.parse_flags(
        ["--mode", "test", "--savedir", str(savedir), *argv.split()]
    )


def test_testing_takes_over_what_the_network_and_environment_depend_on(
    trained, tmp_path
):
    trained(
        "--xpid a --env BreakoutNoFrameskip-v4 --model deep --use_lstm "
        "--reward_clipping none --sticky_actions 0.25 --no-episodic_life --noop_max 3 "
        "--normalize_observations --normalize_returns"
    )
    flags = parse_test(tmp_path, "--xpid a")
    assert flags.normalize_observations is True
    assert flags.normalize_returns is True
    assert flags.env == "BreakoutNoFrameskip-v4"
    assert flags.model == "deep"
    assert flags.use_lstm is True
    assert flags.reward_clipping == "none"
    assert flags.sticky_actions == 0.25
    assert flags.episodic_life is False
    assert flags.noop_max == 3
    assert flags.frame_skip is None


MACHADO = monobeast.env_options(
    monobeast.parse_flags(["--atari_protocol", "machado", "--frame_skip", "5"])
)


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
    trained, tmp_path, argv, changes
):
    trained("--xpid a", **MACHADO)
    played = atari_wrappers.options_of(vars(parse_test(tmp_path, argv)))
    told = {**MACHADO, **changes}
    del told["atari_protocol"]
    assert played == told


def test_an_option_of_the_wrong_type_is_refused(trained, tmp_path, capsys):
    trained("--xpid a", frame_skip="lots")
    argv = ["--mode", "test", "--savedir", str(tmp_path)]
    message = refusal(argv, capsys)
    assert "--frame_skip: expected a whole number" in message and "'lots'" in message


def test_any_run_that_was_trained_can_be_tested(trained, tmp_path):
    trained(
        "--xpid a --env Catch --batch_size 21 --envs_per_actor 7 --unroll_length 1 "
        "--total_steps 21 --num_actors 1 --num_buffers 21 --serial"
    )
    assert parse_test(tmp_path).env == "Catch"


def test_the_command_line_wins_over_the_run(trained, tmp_path):
    trained("--xpid a --env BreakoutNoFrameskip-v4 --sticky_actions 0.25")
    flags = parse_test(tmp_path, "--env PongNoFrameskip-v4 --sticky_actions 0")
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
def test_testing_computes_as_the_run_did(recorded, argv, expected, trained, tmp_path):
    trained(f"--xpid a --env Catch --precision {recorded or 'auto'}")
    if recorded is None:
        meta = json.loads((tmp_path / "a/meta.json").read_text())
        del meta["flags"]["precision"]
        (tmp_path / "a/meta.json").write_text(json.dumps(meta))
    assert parse_test(tmp_path, argv).precision == expected


def test_without_xpid_the_latest_run_is_tested(trained, tmp_path):
    trained("--xpid a --env Catch")
    trained("--xpid b --env Memory")
    assert parse_test(tmp_path).env == "Memory"
    assert parse_test(tmp_path, "--xpid a").env == "Catch"


def test_env_in_xpid_finds_the_run_too(trained, tmp_path):
    trained("--xpid {env}-7 --env MinAtar/Breakout-v1 --use_lstm")
    flags = parse_test(tmp_path, "--xpid {env}-7 --env MinAtar/Breakout-v1")
    assert flags.use_lstm is True


@pytest.mark.parametrize("mode", ["test", "test_render"])
@pytest.mark.parametrize("xpid", [[], ["--xpid", "nothing"]])
def test_testing_without_a_run_is_refused_with_the_remedy(mode, xpid, tmp_path, capsys):
    argv = ["--mode", mode, "--savedir", str(tmp_path / "none"), *xpid]
    message = refusal(argv, capsys)
    for part in (f"--mode is {mode}", str(tmp_path / "none"), "--xpid", "--savedir"):
        assert part in message


def test_a_window_and_a_video_at_once_are_refused(trained, tmp_path, capsys):
    trained("--xpid a --env Catch")
    argv = ["--mode", "test_render", "--video", "--savedir", str(tmp_path)]
    message = refusal(argv, capsys)
    for part in ("--video", "--mode is test_render", "--mode test --video"):
        assert part in message


def test_video_and_greedy_go_with_test(trained, tmp_path):
    trained("--xpid a --env Catch")
    flags = parse_test(tmp_path, "--video --greedy --num_episodes 3")
    assert (flags.video, flags.greedy, flags.num_episodes) == (True, True, 3)


def test_a_damaged_meta_json_is_a_configuration_error(tmp_path, capfd):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "meta.json").write_text("{")
    argv = ["--mode", "test", "--savedir", str(tmp_path), "--xpid", "a"]
    assert monobeast.main(argv) == Exit.CONFIG
    assert str(tmp_path / "a" / "meta.json") in capfd.readouterr().err
