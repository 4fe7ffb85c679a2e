# SPDX-License-Identifier: Apache-2.0
"""core.running.run: a new run with the weights of another, whoever wrote them."""

import errno
import faulthandler
import functools
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import monobeast
from core import ranks
from core.algorithm import counters, losses, update
from core.algorithm.dry_run import zero_rows
from core.algorithm.update import Learner
from core.environments.toys import Catch
from core.errors import ConfigError, Exit
from core.nests import Nest, leaves, map_nest
from core.rollout import Spaces
from core.running import (
    checkpoint,
    evaluation,
    folder,
    logs,
    program,
    run,
    supervise,
    terminal,
)
from core.running.checkpoint import CheckpointError
from tests.conftest import DEADLINE_S, wait_until
from tests.normalization_flags import obeyed
from tools.runs import log_rows

SIZES = ["--batch_size", "5", "--unroll_length", "10", "--envs_per_actor", "5"]


def wide_env() -> gym.Env:
    """Catch with another action and a wider board."""
    env = Catch()
    env.observation_space = gym.spaces.Box(0.0, 1.0, (10, 7), np.float32)
    env.action_space = gym.spaces.Discrete(5)
    return env


def make_run(savedir: Path, *flags: str, xpid: str = "x") -> run.Run:
    parsed = monobeast.parse_flags(
        ["--savedir", str(savedir), "--xpid", xpid, "--env", "Catch", "--disable_cuda"]
        + [*SIZES, *flags]
    )
    (savedir / xpid).mkdir(exist_ok=True)
    spaces = monobeast.read_env(parsed)[0]
    learner = monobeast.create_learner(parsed, spaces)
    return run.Run(
        parsed,
        savedir / xpid,
        learner,
        SimpleNamespace(received=None),
        frames_per_step=1,
    )


def weights(a_run: run.Run) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in a_run.learner.net.state_dict().items()}


@pytest.fixture(scope="module")
def _old(tmp_path_factory) -> Path:
    savedir = tmp_path_factory.mktemp("old")
    old = make_run(savedir, xpid="old")
    for step in (100, 200):
        old.learner.step = step
        with torch.no_grad():
            last_parameter(old).fill_(float(step))
        with old.open():
            pass
    return savedir


@pytest.fixture
def savedir(_old, tmp_path) -> Path:
    """Return a folder with a run named old: checkpoints of steps 100 and 200."""
    shutil.copytree(_old, tmp_path / "runs")
    return tmp_path / "runs"


def newest(savedir: Path) -> Path:
    return savedir / "old" / "checkpoints" / "step-000000000200.safetensors"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_not_saved(savedir, bad):
    broken = make_run(savedir, xpid="broken")
    with torch.no_grad():
        last_parameter(broken)[-1] = bad
    refusal = pytest.raises(ValueError, match="is not finite at step 0; not saved")
    with refusal, broken.open():
        broken.save()
    assert checkpoint.load_from(savedir / "broken") is None


@pytest.mark.parametrize("is_parameter", [False, True])
def test_what_no_gradient_changes_may_hold_infinities_but_no_nan(
    savedir, is_parameter, monkeypatch
):
    """Such as the mask of a transformer's attention."""

    class Net(monobeast.Net):
        def __init__(self, *spaces, **options):
            super().__init__(*spaces, **options)
            mask = torch.nn.Transformer.generate_square_subsequent_mask(3)
            if is_parameter:
                self.mask = torch.nn.Parameter(mask, requires_grad=False)
            else:
                self.register_buffer("mask", mask)

    monkeypatch.setattr(monobeast, "Net", Net)
    first = make_run(savedir, xpid="masked")
    with first.open():
        first.save()
    for again in (
        make_run(savedir, xpid="masked"),
        make_run(savedir, "--init_from", "masked", xpid="new"),
    ):
        again.learner.net.mask.zero_()
        again.resume()
        assert torch.equal(again.learner.net.mask, first.learner.net.mask)
    first.learner.net.mask.fill_(math.nan)
    with pytest.raises(ValueError, match="mask is not finite"):
        first.save()


@pytest.mark.parametrize("name", ["old", "path", "checkpoints", "step", "older"])
def test_a_new_run_begins_with_the_weights_of_another_and_nothing_else(savedir, name):
    place = {
        "old": "old",
        "path": savedir / "old",
        "checkpoints": savedir / "old" / "checkpoints",
        "step": newest(savedir),
        "older": newest(savedir).with_name("step-000000000100.safetensors"),
    }[name]
    new = make_run(savedir, "--init_from", str(place), xpid="new")
    assert new.resume() is None
    step = 100.0 if name == "older" else 200.0
    assert torch.all(last_parameter(new) == step)
    assert (new.learner.step, new.learner.updates) == (0, 0)
    assert not new.learner.optimizers[0].state
    old = checkpoint.load_from(newest(savedir))
    assert old is not None
    if name != "older":
        for key, tensor in weights(new).items():
            assert torch.equal(tensor, old.tensors["model"][key]), key


def test_a_run_with_checkpoints_goes_on_from_its_own(savedir, caplog):
    caplog.set_level("INFO")
    flags = ["--init_from", str(savedir / "elsewhere")]  # Which need not exist then.
    assert (again := make_run(savedir, *flags, xpid="old")).resume() is not None
    assert again.learner.step == 200
    assert "--init_from" in caplog.text and "is ignored: the run resumes" in caplog.text


def test_a_large_observation_that_is_flattened_is_warned_of(
    tmp_path, caplog, monkeypatch
):
    new = make_run(tmp_path)
    spaces = monobeast.read_env(new.flags)[0]
    new.describe("Catch", spaces, devices="on cpu")
    assert "flattens" not in caplog.text
    monkeypatch.setattr(run, "LARGE", 49)  # Catch has 10 x 5.
    new.describe("Catch", spaces, devices="on cpu")
    assert "The network flattens an observation of 50 numbers" in caplog.text


def test_the_last_lines_count_the_problems_of_all_learners(tmp_path, caplog):
    caplog.set_level("INFO")
    first = make_run(tmp_path)
    reports = [{"columns": {"actor_restarts": n}, "busy": {}} for n in (120, 3)]
    first._others = SimpleNamespace(reports=reports)
    first._stats = {"actor_restarts": 1, "reconnects": 0}
    first._sum_up(skipped=0)
    assert "Not normal since the start: 124 actor restarts\n" in caplog.text


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--use_lstm"], "--use_lstm is True but run old was trained with False"),
        (["--model", "mlp"], "--model is mlp but run old was trained with auto"),
    ],
)
def test_a_run_goes_on_with_its_own_network_only(savedir, flags, said):
    with pytest.raises(ConfigError, match=said):
        make_run(savedir, *flags, xpid="old").resume()


@pytest.mark.parametrize("flag", obeyed(monobeast))
@pytest.mark.parametrize("recorded", [True, False], ids=["now", "before the flag"])
def test_a_run_goes_on_with_its_own_normalization_only(savedir, flag, recorded):
    """Checkpoints from before these flags are those of runs without them."""
    found = checkpoint.load(savedir / "old" / "checkpoints")
    assert found is not None
    if not recorded:
        del found.state["flags"][flag.removeprefix("--")]
    folder = savedir / "old" / "checkpoints"
    checkpoint.save(folder, step=201, tensors=found.tensors, state=found.state)
    said = f"{flag} is True but run old was trained with False"
    with pytest.raises(ConfigError, match=said):
        make_run(savedir, flag, xpid="old").resume()
    assert make_run(savedir, xpid="old").resume() is not None


@pytest.mark.skipif("--normalize_returns" not in obeyed(monobeast), reason="a fork")
@pytest.mark.parametrize("clipping, told", [("abs_one", True), ("none", False)])
def test_returns_of_clipped_rewards_are_told(tmp_path, caplog, clipping, told):
    a_run = make_run(tmp_path, "--normalize_returns", "--reward_clipping", clipping)
    a_run.describe("Catch", monobeast.read_env(a_run.flags)[0], devices="on cpu")
    assert ("Add --reward_clipping none" in caplog.text) == told


# ---------------------------------------------------------------- logging and saving


def test_a_network_is_tested_without_dropout(savedir, monkeypatch):
    create_net, nets = monobeast.create_net, []

    def create_and_keep(*args):
        nets.append(create_net(*args))
        return nets[-1]

    old = make_run(savedir, xpid="old")
    old.record({})
    monkeypatch.setattr(monobeast, "create_net", create_and_keep)
    monkeypatch.setattr(signal, "signal", lambda *args: None)  # It stays as it is.
    flags = ["--mode", "test", "--num_episodes", "1", "--xpid", "old"]
    assert monobeast.main([*flags, "--savedir", str(savedir)]) == 0
    assert not any(module.training for module in nets[-1].modules())


@pytest.mark.parametrize("argv", [[], ["--greedy"]])
def test_a_policy_is_tested_at_random_or_greedily(savedir, monkeypatch, argv):
    act, greedy = evaluation.act, set()

    def spy(*args, **options):
        greedy.add(options["greedy"])
        return act(*args, **options)

    make_run(savedir, xpid="old").record({})
    monkeypatch.setattr(evaluation, "act", spy)
    monkeypatch.setattr(signal, "signal", lambda *args: None)  # It stays as it is.
    flags = ["--mode", "test", "--num_episodes", "1", "--xpid", "old"]
    assert monobeast.main([*flags, "--savedir", str(savedir), *argv]) == 0
    assert greedy == {bool(argv)}


AT_ONCE = ["--log_interval_s", "0", "--checkpoint_interval_s", "0"]


@pytest.fixture
def gate(monkeypatch):
    """Return an event that `checkpoint.save` waits for."""
    gate, save = threading.Event(), checkpoint.save

    def wait_and_save(*args, **options):
        assert gate.wait(DEADLINE_S)
        save(*args, **options)

    monkeypatch.setattr(checkpoint, "save", wait_and_save)
    yield gate
    gate.set()


def steps_logged(a_run: run.Run) -> list[int]:
    lines = (a_run.run_dir / "logs.csv").read_text().splitlines()[1:]
    return [int(line.partition(",")[0]) for line in lines]


def saved(a_run: run.Run) -> list[int]:
    folder = a_run.run_dir / "checkpoints"
    return sorted(int(path.stem.partition("-")[2]) for path in folder.glob("step-*"))


def test_neither_an_update_nor_a_slow_disk_holds_up_who_logs(
    tmp_path, gate, background
):
    a_run = make_run(tmp_path, *AT_ONCE)
    with a_run.open():
        learn(a_run)
        with a_run.learner.lock:  # As the next update, a long one, does.
            background(a_run.tick, {}).result(DEADLINE_S)
            wait_until(lambda: steps_logged(a_run) == [50])
        learn(a_run)
        background(a_run.tick, {}).result(DEADLINE_S)
        wait_until(lambda: steps_logged(a_run) == [50, 100])
        assert saved(a_run) == []
        gate.set()
        wait_until(lambda: saved(a_run))
        learn(a_run)
    assert saved(a_run)[-1] == 150


def test_a_new_run_is_saved_after_its_first_update(tmp_path, savedir):
    new, old = make_run(tmp_path), make_run(savedir, xpid="old")
    old.resume()
    for a_run, before, after in ((new, [], [50]), (old, [100, 200], [100, 200])):
        a_run._in_background = False
        with a_run.open():
            for _ in range(3):
                a_run.tick({})
            assert saved(a_run) == before
            for _ in range(3):
                learn(a_run)
                a_run.tick({})
            assert saved(a_run) == after


def test_what_an_optimizer_cannot_save_ends_a_run_at_its_first_update(tmp_path):
    a_run = make_run(tmp_path)
    a_run._in_background = False
    state = a_run.learner.optimizers[0].state
    with pytest.raises(ConfigError, match="/seen is a set; a checkpoint"), a_run.open():
        learn(a_run)
        state[last_parameter(a_run)]["seen"] = {1}
        a_run.tick({})


def test_a_learner_that_is_killed_while_it_trains_has_a_status(tmp_path, monkeypatch):
    monkeypatch.setenv(ranks.STATUS_DIR, str(tmp_path))
    a_run = make_run(tmp_path)
    assert not (tmp_path / "0").exists()
    with a_run.open():
        assert (tmp_path / "0").read_text() == "70"
        learn(a_run)


def test_an_update_that_does_not_end_holds_up_neither_checkpoint_nor_end(
    tmp_path, background, monkeypatch, caplog
):
    a_run = make_run(tmp_path, *AT_ONCE)
    learner, gradient = a_run.learner, a_run.learner.gradient
    began, may_end = threading.Event(), threading.Event()

    def slow(*args):
        began.set()
        assert may_end.wait(DEADLINE_S)
        return gradient(*args)

    with a_run.open():
        learn(a_run)
        monkeypatch.setattr(learner, "gradient", slow)
        update = background(learner.update, random_rows(), ())
        assert began.wait(DEADLINE_S)
        a_run.save()
        assert saved(a_run) == [50]
        monkeypatch.setattr(run, "JOIN_S", 0.0)
        a_run.join({"learner-0": update})
        a_run.check_ledger(10**6, {})  # Nobody knows what becomes of that batch.
        before = weights(a_run)
    assert "a thread has not ended" in caplog.text
    may_end.set()
    update.result(DEADLINE_S)
    assert learner.step == 50
    for name, x in weights(a_run).items():
        assert torch.equal(x, before[name]), name
    assert learner.counts.rows == {"learned": 50, "stale": 0, "unused": 50}


@pytest.mark.parametrize(
    "argv, why",
    [
        ([], "The first checkpoint of a run is written after its first update."),
        (["--disable_checkpoint"], "Nothing is saved (--disable_checkpoint)."),
    ],
)
def test_a_run_that_begins_again_without_a_checkpoint_says_so(
    tmp_path, caplog, argv, why
):
    for is_second in (False, True):
        a_run = make_run(tmp_path, *argv)
        assert a_run.resume() is None
        said = f"it begins again at step 0. {why}" in caplog.text
        assert said == is_second
        a_run.record({})


def test_latest_points_to_a_run_whose_folder_is_on_another_disk(tmp_path):
    savedir, other_disk = tmp_path / "runs", tmp_path / "other"
    for path in (savedir, other_disk, other_disk / "x"):
        path.mkdir()
    (savedir / "x").symlink_to(other_disk / "x")
    a_run = make_run(savedir)
    with run.run_folder(a_run.flags) as a_run.run_dir:
        a_run.record({})
    assert os.readlink(savedir / "latest") == "x"
    names = {path.name for path in (*savedir.iterdir(), *other_disk.iterdir())}
    assert names == {"x", "latest", ".locks"}
    assert not (other_disk / "latest").exists()


def test_a_disk_that_hangs_is_told(tmp_path, gate, background, monkeypatch, caplog):
    monkeypatch.setattr(run, "SAY_HANGS_S", 0.01)
    a_run = make_run(tmp_path, *AT_ONCE)

    def told() -> int:
        return caplog.text.count(f"Waiting for the disk of {a_run.run_dir}, to save")

    with a_run.open():
        learn(a_run)
        a_run.tick({})
        wait_until(lambda: a_run.tick({}) or told())
        before = told()
        opened = background(wait_until, lambda: told() > before)  # By the last save.
        opened.add_done_callback(lambda _: gate.set())
    assert saved(a_run) == [50]


def test_with_the_first_tick_a_thread_writes_to_the_file_behind_stderr(
    tmp_path, monkeypatch
):
    a_run = make_run(tmp_path, *AT_ONCE)
    with open(tmp_path / "printed", "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with terminal.never_waiting(), a_run.open():
            learn(a_run)
            a_run.tick({})
            names = [thread.name for thread in threading.enumerate()]
            assert "write printed" in names


def test_a_moment_without_threads_stops_nothing(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("can't start new thread")

    a_run = make_run(tmp_path, *AT_ONCE)
    watchdog = supervise.Watchdog(60.0)
    with a_run.open():
        learn(a_run)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            patch.setattr(faulthandler, "dump_traceback_later", fail)
            a_run.tick({})
            watchdog.progress("step 1")
        a_run.tick({})
        wait_until(lambda: steps_logged(a_run) == [50])
    watchdog.close()


def test_a_run_whose_folder_another_run_has_taken_saves_nothing_there(tmp_path):
    a_run = make_run(tmp_path)
    with pytest.raises(folder.RunDirBusy), a_run.open():
        learn(a_run)
        raise folder.RunDirBusy("in use by another process")
    assert saved(a_run) == []


def test_with_disable_checkpoint_a_save_is_due_once_in_an_interval(tmp_path):
    """Not at each tick: it would start a thread five times a second."""
    a_run = make_run(tmp_path, "--disable_checkpoint")
    a_run._last_save = -math.inf
    a_run.save()
    assert a_run._last_save > 0
    assert saved(a_run) == []


def test_with_disable_checkpoint_the_end_saves_nothing_and_says_so(tmp_path, caplog):
    caplog.set_level("INFO")
    a_run = make_run(tmp_path, *AT_ONCE, "--disable_checkpoint")
    with a_run.open():
        learn(a_run)
        a_run.tick({})
        wait_until(lambda: steps_logged(a_run) == [50])
    a_run.stop.received = signal.SIGTERM
    assert a_run.end() == Exit.STOPPED
    assert caplog.text.rstrip().endswith("Nothing is saved (--disable_checkpoint).")
    assert not (a_run.run_dir / "checkpoints").exists()


def test_what_logging_dies_of_ends_the_run(tmp_path):
    a_run = make_run(tmp_path, *AT_ONCE)

    def tick() -> bool:
        a_run.tick({"my_gauge": "seven"})
        return False

    said = "column my_gauge was given 'seven', which is a str; expected a number"
    with pytest.raises(ConfigError, match=said), a_run.open():
        learn(a_run)
        wait_until(tick)
    assert saved(a_run) == [50]


# ------------------------------------------------------------------------- optimizers


def create_two_optimizers(flags, spaces) -> Learner:
    """A fork's: most parameters have a rate of their own, the last one has Adam."""
    net = monobeast.create_net(flags, spaces)
    first, *others, last = net.parameters()
    rmsprop = torch.optim.RMSprop(
        [{"params": [first]}, {"params": others, "lr": 1e-4, "eps": 0.5}],
        lr=flags.learning_rate,
        alpha=flags.alpha,
        eps=flags.epsilon,
        momentum=flags.momentum,
    )
    adam = torch.optim.Adam([last], lr=0.003)
    return Learner(flags, net, [rmsprop, adam])


def random_rows() -> Nest:
    """Return Catch's rows of 50 steps."""
    B = 5
    spaces = Spaces(Catch().observation_space, Catch().action_space)
    rows = zero_rows(spaces, 11, B)
    rows["observation"] = torch.randn(rows["observation"].shape)
    rows |= {
        "truncated": rows["done"],
        "action": rows["last_action"],
        "policy_logits": torch.randn(11, B, 3),
        "policy_version": torch.zeros(11, B, dtype=torch.int64),
        "episode_return": rows["reward"],
        "info": {key: rows["reward"] * np.nan for key in ("game_return", "game_step")},
    }
    return rows


def last_parameter(a_run: run.Run) -> torch.nn.Parameter:
    """Return the bias of the baseline, or what a fork's network has last."""
    return list(a_run.learner.net.parameters())[-1]


def learn(a_run: run.Run, *, spoil: int | None = None) -> None:
    """Do an update of 50 steps; the gradient of parameter `spoil` becomes infinite."""
    learner = a_run.learner
    gradient = learner.gradient

    def spoiled(rows, state):
        parts = gradient(rows, state)
        if spoil is not None:
            list(learner.net.parameters())[spoil].grad.fill_(np.inf)
        return parts

    learner.gradient = spoiled
    learner.update(random_rows(), ())
    learner.gradient = gradient


def test_the_ledger_tells_what_became_of_every_row(savedir, caplog):
    caplog.set_level("INFO")
    learner = (a_run := make_run(savedir, xpid="new")).learner
    learn(a_run)
    learn(a_run)
    learn(a_run, spoil=0)
    learner.step = 10**9  # Another thread has done the last update.
    learner.update(map_nest(lambda x: x[:, :3], random_rows()), ())
    others = {"discarded": 7, "in flight": 5}
    a_run.check_ledger(192, others)
    text = "100 learned + 0 stale + 80 unused + 7 discarded + 5 in flight"
    assert caplog.messages[-1] == f"192 rows received = {text}"
    with pytest.raises(
        RuntimeError, match=f"191 .* = {re.escape(text)}: the sum is wrong"
    ):
        a_run.check_ledger(191, others)


def test_the_counts_of_a_run_go_on(tmp_path):
    old, now = (make_run(tmp_path) for _ in range(2))
    learn(old)
    learn(old, spoil=0)
    old.learner.counts.stale = 7
    with old.open():
        pass
    assert now.resume() is not None
    learner = now.learner
    assert (learner.step, learner.updates, learner.skipped) == (100, 1, 1)
    assert learner.counts.stale == 7


def test_a_run_goes_on_with_the_seed_that_it_has_drawn(tmp_path):
    seeds = {}
    for xpid in ("x", "x", "y"):
        a_run = make_run(tmp_path, xpid=xpid)
        assert a_run.flags.seed is None
        with run.run_folder(a_run.flags):
            a_run.record({})
        assert seeds.setdefault(xpid, a_run.flags.seed) == a_run.flags.seed
    assert seeds["x"] != seeds["y"]


def test_time_and_speed_are_those_of_training(tmp_path, monkeypatch):
    """The time goes on after a resume; the speed is that since the last row."""
    now = 1000.0
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(3):
        a_run = make_run(tmp_path)
        a_run.resume()
        with a_run.open():
            for seconds in (8, 2):
                learn(a_run)
                now += seconds
                a_run.log({})
        now += 100
    rows = log_rows(tmp_path / "x")
    assert [float(row["time_s"]) for row in rows] == [8, 10, 18, 20, 28, 30]
    assert [float(row["sps"]) for row in rows] == [50 / 8, 50 / 2] * 3


def test_a_snapshot_stays_as_it_is_while_training_goes_on(tmp_path):
    a_run = make_run(tmp_path)
    learn(a_run)
    _, tensors = a_run._snapshots.take()
    before = map_nest(torch.clone, tensors)
    learn(a_run)
    for (name, now), (_, then) in zip(leaves(tensors), leaves(before)):
        assert torch.equal(now, then), name
    last = list(before["model"].values())[-1]
    assert not torch.equal(list(weights(a_run).values())[-1], last)


def test_after_a_signal_no_batch_is_learned(tmp_path):
    a_run = make_run(tmp_path)
    a_run.stop.received = signal.SIGINT
    assert not a_run.goes_on()
    learn(a_run)  # A learner thread has waited for this batch.
    assert a_run.learner.updates == a_run.learner.step == 0
    assert a_run.learner.counts.rows == {"learned": 0, "stale": 0, "unused": 50}


def test_an_info_key_that_no_game_has_is_warned_of_once(tmp_path, caplog):
    a_run = make_run(tmp_path, "--info_keys", "speed,spede,rare")
    rows = random_rows()
    info = dict.fromkeys(("speed", "spede", "rare"), rows["reward"] * np.nan)
    info |= dict.fromkeys(("game_return", "game_step"), rows["reward"] * 0)  # 50 games.
    first = {**info, "rare": rows["reward"] * 0}
    for i, (infos, said) in enumerate([(first, 0), (info, 1), (info, 1)]):
        infos["speed"] = rows["reward"] * 0
        a_run.learner.update({**rows, "info": infos}, ())
        assert len(caplog.messages) == said, i
    assert "--info_keys has spede, but no step of the first 100 games" in caplog.text


def test_an_info_key_is_the_mean_over_its_values_of_all_batches(tmp_path):
    a_run = make_run(tmp_path, "--info_keys", "won")
    for values in ([0.0], [1.0, np.inf, 1.0, 1.0], []):
        rows = random_rows()
        won = rows["info"]["won"] = rows["reward"] * np.nan
        won[1 : 1 + len(values), 2] = torch.tensor(values)
        a_run.learner.update(rows, ())
    assert a_run.learner.counts.averages.pop()["info_won"] == 0.75


def test_the_end_of_a_run_sums_up_the_updates_that_were_skipped(tmp_path, caplog):
    caplog.set_level("INFO")
    for spoiled, said in (0, ["1 updates skipped"]), (None, []):
        a_run = make_run(tmp_path)
        a_run.resume()  # The second start does not count those of the first.
        caplog.clear()
        with a_run.open():
            learn(a_run, spoil=spoiled)
        sums = [m for m in caplog.messages if m.startswith("Not normal")]
        assert sums == [f"Not normal since the start: {text}" for text in said]


def rates(a_run: run.Run) -> list[float]:
    return [
        group["lr"]
        for optimizer in a_run.learner.optimizers
        for group in optimizer.param_groups
    ]


@pytest.fixture
def two_optimizers(monkeypatch):
    monkeypatch.setattr(monobeast, "create_learner", create_two_optimizers)


def test_the_schedule_scales_each_groups_own_rate(tmp_path, two_optimizers):
    a_run = make_run(tmp_path, "--total_steps", "200", "--learning_rate", "0.002")
    for share in (1.0, 0.75, 0.5):
        learn(a_run)
        assert rates(a_run) == [0.002 * share, 1e-4 * share, 0.003 * share]


@pytest.mark.parametrize("spoil", [0, -1])  # Of the first and of the last optimizer.
def test_one_gradient_that_is_not_finite_stops_every_optimizer(
    tmp_path, two_optimizers, spoil
):
    a_run = make_run(tmp_path)
    before = weights(a_run)
    learn(a_run, spoil=spoil)
    assert (a_run.learner.skipped, a_run.learner.updates) == (1, 0)
    for key, tensor in weights(a_run).items():
        assert torch.equal(tensor, before[key]), key
    learn(a_run)
    after = weights(a_run)
    first, *_, last = (name for name, _ in a_run.learner.net.named_parameters())
    assert not any(torch.equal(after[name], before[name]) for name in (first, last))


def test_every_optimizer_goes_on_bit_equal_from_a_checkpoint(tmp_path, two_optimizers):
    whole = make_run(tmp_path)
    learn(whole)
    with whole.open():
        pass
    again = make_run(tmp_path)
    assert again.resume() is not None
    for a_run in (whole, again):
        torch.manual_seed(3)
        learn(a_run)
    assert rates(again) == rates(whole)
    for key, tensor in weights(again).items():
        assert torch.equal(tensor, weights(whole)[key]), key


def test_another_number_of_optimizers_is_told(tmp_path, monkeypatch):
    with make_run(tmp_path).open():
        pass
    monkeypatch.setattr(monobeast, "create_learner", create_two_optimizers)
    with pytest.raises(checkpoint.CheckpointMismatch, match="file 1, this run 2"):
        make_run(tmp_path).resume()


@pytest.mark.parametrize(
    "argv, why",
    [
        ("--discounting 0.9 --seed 4", "Since then --discounting was 0.99 and is now "),
        ("", "No flag has changed since then, but the code or the environment has."),
    ],
)
def test_weights_that_do_not_fit_are_told_with_the_flags_that_changed(
    tmp_path, monkeypatch, argv, why
):
    with (old := make_run(tmp_path, "--seed", "3")).open():
        old.record({})
    create_net = monobeast.create_net

    def create_wide_net(flags, spaces):
        net = create_net(flags, spaces)
        net.last = torch.nn.Linear(3, 1)  # Forks have other layers than Net has here.
        return net

    monkeypatch.setattr(monobeast, "create_net", create_wide_net)
    again = make_run(tmp_path, "--seed", "3", *argv.split())
    flags = ["--mode", "test", "--savedir", str(tmp_path), "--xpid", "x"]
    tested = monobeast.parse_flags([*flags, *argv.split()])
    for call in (again.resume, lambda: monobeast.test(tested)):
        with pytest.raises(checkpoint.CheckpointMismatch) as caught:
            call()
        text = str(caught.value)
        assert "model: missing last.bias" in text and f". {why}" in text
        assert "seed" not in text


class CountingRMSprop(torch.optim.RMSprop):
    """Keeps state in its groups' options, as schedule-free optimizers do."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            group |= {"k": 0, "weight_sum": torch.zeros(())}

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"]
            group["training"] = True
        return super().step(closure)


def test_what_training_changes_in_a_groups_options_goes_on(tmp_path, monkeypatch):
    """Saved again before the first update, too."""
    monkeypatch.setattr(torch.optim, "RMSprop", CountingRMSprop)
    a_run = make_run(tmp_path)
    learn(a_run)
    with a_run.open():
        learn(a_run)
    expected = a_run.learner.optimizers[0].param_groups[0]["weight_sum"]
    for flags in ([], OTHER):
        a_run = make_run(tmp_path, *flags)
        assert a_run.resume() is not None
        with a_run.open():
            pass
        (group,) = a_run.learner.optimizers[0].param_groups
        assert (group["k"], group["training"]) == (2, True)
        assert torch.equal(group["weight_sum"], expected) and expected > 0
    assert [group[k] for k in ("alpha", "eps", "momentum")] == [0.9, 0.1, 0.5]


OTHER = ["--alpha", "0.9", "--epsilon", "0.1", "--momentum", "0.5"]


def test_optimizer_flags_of_the_present_start_are_in_force(tmp_path, caplog):
    caplog.set_level("INFO")
    old = make_run(tmp_path, "--total_steps", "100")
    learn(old)
    with old.open():
        pass
    now = make_run(tmp_path, "--total_steps", "100", "--learning_rate", "0.01", *OTHER)
    assert now.resume() is not None
    (group,) = now.learner.optimizers[0].param_groups
    assert [group[k] for k in ("alpha", "eps", "momentum")] == [0.9, 0.1, 0.5]
    for line in ("alpha was 0.99 and is now 0.9", "initial_lr was 0.0006 and is now"):
        assert f"  optimizer, group 0: {line}" in caplog.text
    bias = last_parameter(now)
    state = now.learner.optimizers[0].state[bias]
    before, square = bias.clone(), state["square_avg"].clone()
    learn(now)
    assert rates(now) == [0.01 * 0.5]
    # The step worked out by hand, with the averages of the checkpoint.
    g = bias.grad
    square = 0.9 * square + 0.1 * g.square()
    expected = before - 0.005 * g / (square.sqrt() + 0.1)
    torch.testing.assert_close(bias, expected)


def test_a_groups_own_options_are_those_of_the_present_code(
    tmp_path, two_optimizers, caplog
):
    caplog.set_level("INFO")
    with make_run(tmp_path).open():
        pass
    now = make_run(tmp_path, *OTHER)
    assert now.resume() is not None
    first, second = now.learner.optimizers[0].param_groups
    assert (first["eps"], second["eps"]) == (0.1, 0.5)
    assert "group 0: eps was 0.01 and is now 0.1" in caplog.text
    assert "group 1: eps was" not in caplog.text


# ------------------------------------------------------------------- a fork's columns


def test_what_a_fork_adds_to_the_loss_becomes_a_column(tmp_path, monkeypatch):
    """Of groups of columns the sum; from [T, B], with a gradient, on its way."""
    a_run = make_run(tmp_path)
    gradient = a_run.learner.gradient
    novelty = counters.Field("novelty_loss", "1", "error of the predictor")

    def with_novelty(rows, state):
        for part in gradient(rows, state):
            error = torch.ones(rows["done"].shape, requires_grad=True)
            yield part._replace(extra={novelty: error, "my_count": 3})

    a_run.learner.gradient = lambda *args: list(with_novelty(*args))
    monkeypatch.setattr(losses, "PIECE_BYTES", 5000)  # A row of Catch has 200 bytes.
    with a_run.open():
        learn(a_run)
        a_run.log({"my_gauge": 7})
    (row,) = log_rows(tmp_path / "x")
    n = len(list(gradient(random_rows(), ())))
    assert n > 1
    for name, expected in (("novelty_loss", 55 * n), ("my_count", 3 * n)):
        assert float(row[name]) == expected
    assert row["my_gauge"] == "7"
    total, *parts = (
        float(row[f"{name}_loss"]) for name in ("total", "pg", "baseline", "entropy")
    )
    assert total == pytest.approx(sum(parts), rel=1e-5)
    assert 0 < float(row["entropy"]) <= np.log(3) and 0 < float(row["mean_rho"]) <= 1
    assert "novelty_loss,1,error of the predictor" in (
        (tmp_path / "x" / "fields.csv").read_text()
    )


@pytest.mark.parametrize(
    "value, said",
    [
        ("seven", "'seven', which is a str"),
        ("7", "'7', which is a str"),
        (None, "None, which is a NoneType"),
        ({"a": 1}, "{'a': 1}, which is a dict"),
        (torch.ones(2, dtype=torch.complex64), "tensor(.*), which is a Tensor"),
    ],
)
def test_a_fork_s_column_that_is_no_number_is_named(tmp_path, value, said):
    a_run = make_run(tmp_path)
    gradient = a_run.learner.gradient
    column = counters.Field("my_column", "1", "a mistake")
    a_run.learner.gradient = lambda *args: [
        part._replace(extra={column: value}) for part in gradient(*args)
    ]
    with pytest.raises(ConfigError, match=f"my_column was given {said}; expected a nu"):
        learn(a_run)


def with_column(key):
    return lambda loss: loss._replace(extra={**loss.extra, key: 7.0})


TAKEN = ["learning_rate", "steps", "replay_mean_rho", "info_speed"]


@pytest.mark.parametrize(
    "change, said",
    [
        *(
            (with_column(name), f"the log has two columns with the name {name}:")
            for name in TAKEN
        ),
        (
            with_column(counters.Field("policy_lag_mean", "1", "-")),
            "the log has two columns with the name policy_lag_mean:",
        ),
        (with_column("a,b"), "a column with the name 'a,b': expected a name without c"),
        (lambda loss: loss.total_loss, "compute_loss returned a Tensor; expected an I"),
        (
            lambda loss: loss._replace(total_loss=loss.total_loss.detach()),
            r"expected .*, got float32\[\] without a gradient$",
        ),
        (
            lambda loss: loss._replace(total_loss=loss.total_loss.expand(5)),
            r"expected .*, got float32\[5\] with a gradient$",
        ),
        (lambda loss: loss._replace(total_loss=0.5), "expected .*, got a float$"),
    ],
)
def test_a_fork_s_loss_that_does_not_fit_is_refused_at_the_first_update(
    tmp_path, change, said
):
    flags = (a_run := make_run(tmp_path, "--info_keys", "speed")).flags

    def loss(*args):
        return change(update.compute_loss(*args))

    a_run.learner.gradient = functools.partial(
        update.compute_gradient, flags, a_run.learner.net, loss
    )
    with pytest.raises(ConfigError, match=said):
        learn(a_run)


def main(argv: list[str]) -> int:
    """Train with a loss that adds a column which is no number."""
    compute_loss = update.compute_loss
    update.compute_loss = lambda *args: compute_loss(*args)._replace(
        extra={"my_column": "seven"}
    )
    return monobeast.main(argv)


def test_a_run_with_such_a_column_ends_in_one_line_with_a_checkpoint(start, tmp_path):
    flags = ["--env", "Catch", "--serial", "--xpid", "x", *SIZES]
    program = start(*flags, module=__name__)
    assert program.wait() == Exit.CONFIG, program.text()
    assert program.text().splitlines()[-1] == (
        "ConfigError: the log's column my_column was given 'seven', which is a str; "
        "expected a number"
    )
    assert "Traceback" not in program.text()
    assert checkpoint.load(tmp_path / "runs/x/checkpoints") is not None


# -------------------------------------------------------------- a stranger's checkpoint


@pytest.mark.parametrize("key", ["flags", "optimizer", "learner", "rng", "time_s"])
@pytest.mark.parametrize("value", [None, {}, {"class": "RMSprop"}, "missing"])
def test_a_strangers_checkpoint_in_place_of_ours_is_told_in_one_line(
    savedir, key, value
):
    old = checkpoint.load(savedir / "old" / "checkpoints")
    assert old is not None
    state = {k: v for k, v in old.state.items() if k != key}
    if value != "missing":
        state[key] = value
    folder = savedir / "old" / "checkpoints"
    checkpoint.save(folder, step=300, tensors=old.tensors, state=state)
    with pytest.raises(CheckpointError, match="0300.safetensors was not") as error:
        make_run(savedir, xpid="old").resume()
    assert "\n" not in str(error.value) and "--init_from" in str(error.value)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--env", "tests.running.test_run:wide_env"], [": file [3], model [5]"]),
        (
            ["--env", "tests.running.test_run:wide_env"],
            ["--env was Catch in that run and is tests."],
        ),
        (["--use_lstm"], ["missing ", "--use_lstm was False in that run and is True"]),
        *(
            ([flag], ["missing ", f"{flag} was False in that run and is True"])
            for flag in obeyed(monobeast)
        ),
        (["--env", "CartPole-v1"], [": file ["]),
    ],
)
def test_weights_that_do_not_fit_are_told_in_one_line(savedir, flags, said):
    new = make_run(savedir, "--init_from", "old", *flags, xpid="new")
    before = weights(new)
    old = checkpoint.load_from(newest(savedir)).tensors["model"]
    if {k: x.shape for k, x in before.items()} == {k: x.shape for k, x in old.items()}:
        pytest.skip(f"a fork's: {flags[0]} does not change its Net")
    with pytest.raises(
        ConfigError, match="--init_from .* does not fit: model"
    ) as error:
        new.resume()
    assert "\n" not in str(error.value)
    for part in said:
        assert part in str(error.value)
    for key, tensor in weights(new).items():
        assert torch.equal(tensor, before[key]), key


def test_no_checkpoint_there_says_what_to_name(savedir):
    (savedir / "empty").mkdir()
    for name in ("nowhere", "empty"):
        new = make_run(savedir, "--init_from", name, xpid="new")
        with pytest.raises(
            ConfigError, match=f"--init_from is {name}, where .*savedir"
        ):
            new.resume()


@pytest.mark.parametrize("name", ["old", "runs/old"])
def test_an_environment_may_change_the_folder_before_weights_are_taken(
    savedir, monkeypatch, name
):
    monkeypatch.chdir(savedir.parent)
    new = make_run(Path("runs"), "--init_from", name, xpid="new")
    opening = run.run_folder(new.flags)
    monkeypatch.chdir("/")
    with opening as run_dir:
        new.run_dir = run_dir
        new.resume()
    assert torch.all(last_parameter(new) == 200.0)


def test_a_damaged_checkpoint_is_passed_over_or_an_error(savedir, caplog):
    file = newest(savedir)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    new = make_run(savedir, "--init_from", "old", xpid="new")
    new.resume()
    assert torch.all(last_parameter(new) == 100.0)
    assert f"Checkpoint not used: {newest(savedir)}" in caplog.text
    new = make_run(savedir, "--init_from", str(newest(savedir)), xpid="new")
    with pytest.raises(CheckpointError, match="has another sha256"):
        new.resume()


@pytest.mark.parametrize("kind", ["nan", "flags", "dtype", "extra", "state"])
def test_a_stranger_s_checkpoint_runs_nothing_and_harms_nothing(
    savedir, tmp_path, kind
):
    """Well formed, with the right checksums: it was made to be loaded."""
    good = checkpoint.load_from(newest(savedir))
    assert good is not None
    tensors, state = good.tensors, good.state
    name, *_ = (name for name, x in tensors["model"].items() if x.is_floating_point())
    match kind:
        case "nan":
            tensors["model"][name].fill_(float("nan"))
        case "flags":
            tensors["model"] = {}
            state["flags"] = {"env": "\x1b[2J\nroot# " + "x" * 10**6, "model": [{}]}
        case "dtype":
            tensors["model"][name] = tensors["model"][name].double()
        case "extra":
            tensors["model"]["__class__"] = torch.zeros(1)
        case "state":
            state["flags"] = state["learner"] = [["evil"]] * 10
    evil = tmp_path / "evil"
    evil.write_bytes(checkpoint._encode(1, tensors, state))
    new = make_run(savedir, "--init_from", str(evil), xpid="new")
    before = weights(new)
    events: list[str] = []
    sys.addaudithook(lambda event, args: events.append(event) if watching else None)
    watching = True
    if kind == "state":  # What is not needed is not looked at.
        new.resume()
        assert torch.all(last_parameter(new) == 200.0)
    else:
        with pytest.raises((ConfigError, CheckpointError)) as error:
            new.resume()
        message = str(error.value)
        assert message.isprintable() and len(message) < 3000
        for key, tensor in weights(new).items():
            assert torch.equal(tensor, before[key]), key
    watching = False
    assert "open" in events  # The hook works.
    assert not {"pickle.find_class", "exec", "os.system", "subprocess.Popen"} & {
        *events
    }


def test_the_environments_options_are_told_and_what_has_changed_of_them(caplog):
    caplog.set_level("INFO")
    run.log_options({"noop_max": 3, "sticky_actions": 0.25}, {})
    assert caplog.messages == ["Environment options: noop_max 3, sticky_actions 0.25"]
    caplog.clear()
    recorded = {"env_options": {"noop_max": 3, "sticky_actions": 0.0, "old": True}}
    run.log_options({"noop_max": 3, "sticky_actions": 0.25}, recorded)
    _, *changes = [message.split() for message in caplog.messages]
    assert [(words[0], words[2], words[-1]) for words in changes] == [
        ("old", "True", "reported"),
        ("sticky_actions", "0.0", "0.25"),
    ]
    caplog.clear()
    run.log_options({}, {"flags": {}})  # A run of before there were options.
    assert not caplog.messages


@pytest.mark.parametrize(
    "number, name, remedy",
    [
        (errno.EFBIG, None, "Raise the limit on the size of files (ulimit -f)."),
        (errno.EDQUOT, "/no/such/file", "Free some space (df), or choose another"),
        (errno.ENOENT, None, None),
    ],
)
def test_a_disk_that_takes_no_more_is_told_with_the_remedy(number, name, remedy):
    error = OSError(number, os.strerror(number), name)
    line = program.describe_full_disk(error)
    if remedy is None:
        assert line is None
    else:
        assert os.strerror(number) in line and remedy in line


def test_no_room_for_temporary_files_is_told_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [tmp_path / "no"])
    with pytest.raises(FileNotFoundError) as caught:
        tempfile.mkdtemp()
    assert "set TMPDIR to another folder" in program.describe_full_disk(caught.value)


@pytest.mark.parametrize("savedir, xpid", [("s" * 300, "x"), (".", "x" * 300)])
def test_a_name_that_is_too_long_is_one_line(tmp_path, savedir, xpid):
    flags = {"savedir": tmp_path / savedir, "xpid": xpid, "seed": 1, "init_from": None}
    with pytest.raises(ConfigError, match="File name too long.*another --savedir"):
        with run.run_folder(SimpleNamespace(**flags)):
            raise AssertionError("the folder was opened")


@pytest.mark.parametrize(
    "name, make",
    [
        ("runs", lambda path: path.symlink_to(path)),
        ("runs/x/out.log", Path.mkdir),
        ("runs/x/logs.csv", Path.mkdir),
        ("runs/x/tensorboard", Path.touch),
    ],
)
def test_a_path_in_savedir_of_the_wrong_kind_is_one_line(tmp_path, capsys, name, make):
    def open_run(flags):
        with run.run_folder(flags) as run_dir, logs.RunLog(run_dir):
            raise AssertionError(f"{name} was opened")

    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    flags = SimpleNamespace(
        mode="test",
        savedir=str(tmp_path / "runs"),
        xpid="x",
        seed=1,
        init_from=None,
    )
    assert program.run_program(lambda argv: flags, None, open_run, []) == Exit.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert f"'{path}'" in line and "choose another --savedir" in line.lower()


def test_an_error_before_there_are_flags_is_shown_as_it_is(capsys):
    def parse_flags(argv):
        raise PermissionError("of a folder")

    assert program.run_program(parse_flags, None, None, []) == Exit.INTERNAL
    err = capsys.readouterr().err
    assert err.endswith("PermissionError: of a folder\n") and "UnboundLoc" not in err


def test_a_file_in_a_folder_of_another_user_is_one_line():
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/runs/x/1.csv")
    line = program.describe_unusable_path(error, "/runs")
    assert "'/runs/x/1.csv'. This program must be able to write there" in line
    assert program.describe_unusable_path(error, "/other") is None


@pytest.mark.parametrize(
    "env, inference, learner, actors_do_both, expected",
    [
        (0.9, 0.3, 0.4, False, "env-bound 90%"),
        (0.3, 0.71, 0.4, False, "inference-bound 71%"),
        (0.3, 0.4, 0.98, False, "learner-bound 98%"),
        # Actors that step 50 % and choose 45 % of the time never rest.
        (0.5, 0.45, 0.7, False, "learner-bound 70%"),
        (0.5, 0.45, 0.7, True, "env-bound 95%"),
        (0.45, 0.5, 0.7, True, "inference-bound 95%"),
        (0.3, 0.3, 0.7, True, "learner-bound 70%"),
    ],
)
def test_the_bottleneck_is_the_busiest_stage(
    env, inference, learner, actors_do_both, expected
):
    busy = {"env": env, "inference": inference, "learner": learner}
    assert run.bottleneck(busy, actors_do_both=actors_do_both) == expected


def test_before_anything_has_worked_there_is_no_bottleneck():
    assert run.bottleneck({}, actors_do_both=True) is None


def test_games_that_no_window_shows_are_told(savedir, monkeypatch, capsys):
    old = make_run(savedir, xpid="old")
    folder.write_meta(savedir / "old", flags=vars(old.flags), extra={})
    monkeypatch.setattr(monobeast, "create_env", lambda flags, mode: Catch())
    argv = f"--mode test_render --savedir {savedir} --xpid old --num_episodes 1"
    assert monobeast.test(monobeast.parse_flags(argv.split())) == Exit.DONE
    out = capsys.readouterr().out
    assert "Maybe no window: the environment has render_mode None" in out
