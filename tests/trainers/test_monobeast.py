# SPDX-License-Identifier: Apache-2.0
"""MonoBeast: acting and learning, against rollouts that arithmetic can check."""

import contextlib
import copy
import functools
import itertools
import json
import os
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import monobeast
import polybeast
from core.actors import prepare, serial
from core.actors.shared_memory import SharedWeights
from core.algorithm import losses, update
from core.algorithm.replay import create_replay
from core.algorithm.update import Learner
from core.environments.stepping import env_seed
from core.environments.toys import Catch
from core.errors import ConfigError, EnvSpecError, Exit
from core.nests import ArraySpec, map_nest
from core.rollout import Spaces
from core.running.compute import explain_out_of_memory
from tests.actors.pool import E, Pool, T, make_actor, make_flags
from tools.runs import log_rows


def test_serial_and_asynchronous_actors_write_the_same_rollout():
    flags = make_flags("Catch", "--num_actors", "1")
    with Pool(flags) as pool:
        ours = pool.next_rollout()
    torch.manual_seed(env_seed(flags.seed, 0, 0, 0))
    spaces = monobeast.read_env(flags)[0]
    net = monobeast.create_net(flags, spaces)
    pool.weights.fetch(net, -1)
    torch.manual_seed(env_seed(flags.seed, 0, 0, 0))
    monobeast.create_net(flags, spaces)  # The actor drew its own weights first.
    actor = make_actor(flags, net)
    actor.unroll(0)
    theirs = actor.buffers.rollout(0)
    map_nest(np.testing.assert_array_equal, ours, theirs)


def test_an_environment_that_seeds_torch_does_not_choose_the_actions():
    """They were the same in each game."""
    flags = make_flags("tests.fault_env:ChangesTorch", "--unroll_length", "60")
    actor = make_actor(flags)
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    actor.unroll(0)
    rollout = actor.buffers.rollout(0)
    ends = np.flatnonzero(rollout["done"][1:, 0]) + 1
    games = np.split(rollout["last_action"][1:, 0], ends)
    assert {len(game) for game in games[:-1]} == {5} and len(games) > 9
    assert len({game.tobytes() for game in games[:-1]}) > 1


def test_environments_of_an_actor_have_the_spaces_that_the_network_is_for():
    flags = make_flags("Catch")
    spaces = monobeast.read_env(flags)[0]
    actions = gym.spaces.Discrete(spaces.action.n + 1)
    other = Spaces(spaces.observation, actions)
    with pytest.raises(EnvSpecError) as error:
        monobeast.Actor(
            flags,
            monobeast.create_net(flags, other),
            other,
            make_actor(flags).buffers,
            actor_id=0,
            incarnation=0,
            fetch=lambda: 0,
            clock=np.zeros(1),
        )
    assert str(error.value).startswith(
        f"expected the action space {actions} of the environment that the program made "
        f"first, got {spaces.action}. "
    )


def test_an_output_that_net_outputs_declares_is_in_the_rollout(monkeypatch):
    forward, declared = monobeast.Net.forward, monobeast.net_outputs

    def with_aux(self, rows, core_state=()):
        outputs, core_state = forward(self, rows, core_state)
        return {**outputs, "aux": 7 * rows["last_action"] + 5}, core_state

    def with_aux_declared(spaces):
        return {**declared(spaces), "aux": ArraySpec((), np.dtype(np.int64))}

    monkeypatch.setattr(monobeast.Net, "forward", with_aux)
    monkeypatch.setattr(monobeast, "net_outputs", with_aux_declared)
    actor = make_actor(make_flags("Catch", "--num_actors", "1"))
    actor.unroll(0)
    rollout = actor.buffers.rollout(0)
    assert (rollout["aux"][0] == 0).all()  # No action led to the first row.
    expected = 7 * rollout["last_action"][:-1] + 5
    np.testing.assert_array_equal(rollout["aux"][1:], expected)


def test_each_action_is_chosen_by_the_newest_weights():
    versions = itertools.count(start=3)
    actor = make_actor(make_flags("Catch"), fetch=lambda: next(versions))
    for index, first in (0, 0), (1, 3 + T - 1):  # Row 0 is the rollout's before.
        actor.unroll(index)
        found = actor.buffers.rollout(index)["policy_version"]
        expected = [first, *range(3 + index * T, 3 + (index + 1) * T)]
        assert found.T.tolist() == [expected] * E


def test_flags_reach_the_environments_of_an_actor(monkeypatch):
    made, create_env = [], monobeast.create_env

    def counting(flags):
        made.append(create_env(flags))
        return made[-1]

    argv = ["--recycle_games", "1", "--info_keys", "half"]
    flags = make_flags("tests.counting_env:make", *argv, "--unroll_length", "20")
    monkeypatch.setattr(monobeast, "create_env", counting)
    actor = make_actor(flags)
    num_made = len(made)
    actor.unroll(0)
    rows = actor.buffers.rollout(0)
    assert len(made) - num_made == np.count_nonzero(rows["done"][1:]) > 0
    assert np.isfinite(rows["info"]["half"]).any()


def test_what_forward_keeps_while_it_acts_serves_the_learner_of_a_serial_run(
    monkeypatch,
):
    """Both have one Net: its tables were 'Inference tensors', which cannot learn."""
    forward = monobeast.Net.forward

    def with_table(self, rows, core_state=()):
        outputs, core_state = forward(self, rows, core_state)
        if not hasattr(self, "table"):
            self.table = torch.ones(3)
        logits = outputs["policy_logits"] * self.table
        return {**outputs, "policy_logits": logits}, core_state

    monkeypatch.setattr(monobeast.Net, "forward", with_table)
    flags = make_flags("Catch", "--serial")
    learner = monobeast.create_learner(flags, monobeast.read_env(flags)[0])
    actor = make_actor(flags, learner.net, lambda: learner.updates)
    actor.unroll(0)
    learner.update(actor.buffers.rollout(0), ())
    assert learner.updates == 1


def test_a_recurrent_state_that_numpy_cannot_hold_is_refused(monkeypatch):
    def initial_state(self, batch_size):
        return torch.zeros(1, batch_size, 2), torch.zeros(1, batch_size).bfloat16()

    monkeypatch.setattr(monobeast.Net, "initial_state", initial_state)
    with pytest.raises(ConfigError, match="that numpy has, got float32, bfloat16: "):
        Pool(make_flags("Catch"))


def test_a_loss_that_reads_what_rows_lack_is_told_how_they_get_it():
    def loss(flags, net, rows, state):
        return rows["aux"].sum()

    flags = make_flags("Catch", "--num_actors", "1")
    flags.batch_size = E
    with Pool(flags) as pool:
        rollout = pool.next_rollout()
    net = monobeast.create_net(flags, monobeast.read_env(flags)[0])
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(KeyError, match="'aux'") as caught:
        Learner(flags, net, [optimizer], loss).update(rollout, ())
    (text,) = caught.value.args
    assert "policy_logits" in text and "that net_outputs declares" in text


def test_a_batch_learns_the_same_whole_and_in_groups_of_columns(monkeypatch):
    flags = make_flags("tests.counting_env:make_truncating", "--num_actors", "1")
    flags.batch_size = E
    with Pool(flags) as pool:
        rollout = pool.next_rollout()
    gradients = []
    for piece_bytes in (2**30, 1):
        monkeypatch.setattr(losses, "PIECE_BYTES", piece_bytes)
        torch.manual_seed(0)
        learner = monobeast.create_learner(flags, monobeast.read_env(flags)[0])
        learner.update(rollout, ())
        gradients.append([p.grad.clone() for p in learner.net.parameters()])
    for whole, pieces in zip(*gradients):
        torch.testing.assert_close(whole, pieces, rtol=1e-4, atol=1e-5)


def test_an_environment_that_is_not_that_of_env_is_recorded_as_it_is(
    monkeypatch, tmp_path, capsys
):
    """A fork has edited create_env, and --env is not given."""
    pytest.importorskip("ale_py")
    monkeypatch.setattr(
        monobeast, "create_env", lambda flags, render_mode=None: Catch()
    )
    argv = ["--savedir", str(tmp_path), "--xpid", "a"]
    sizes = ["--num_actors", "2", "--batch_size", "2", "--total_steps", "80"]
    assert monobeast.main([*argv, *sizes, "--serial"]) == Exit.DONE
    last = log_rows(tmp_path / "a")[-1]
    assert last["frames"] == last["step"] == "80"
    meta = json.loads((tmp_path / "a" / "meta.json").read_text())
    assert meta["env_options"] == {"create_env": "Catch"}
    said = capsys.readouterr().err
    assert "Environment Catch: Box" in said and "Give --env another name" in said
    assert "noop_max" not in said
    assert monobeast.main([*argv, "--mode", "test", "--num_episodes", "1"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["env"] == "Catch"


def test_a_step_counts_as_the_frames_that_the_options_say(monkeypatch, tmp_path):
    monkeypatch.setattr(monobeast, "env_options", lambda flags, env: {"frame_skip": 3})
    argv = ["--env", "Catch", "--savedir", str(tmp_path), "--xpid", "a", "--serial"]
    sizes = ["--num_actors", "1", "--batch_size", "1", "--total_steps", "20"]
    assert monobeast.main([*argv, *sizes]) == Exit.DONE
    last = log_rows(tmp_path / "a")[-1]
    assert int(last["frames"]) == 3 * int(last["step"]) > 0


def test_the_clock_of_updates_runs_during_an_update_of_a_serial_run(
    monkeypatch, tmp_path
):
    clocks, updates = np.zeros(2), []

    @contextlib.contextmanager
    def limit_calls(*args, **options):
        yield clocks

    def update(learner, *args):
        updates.append(clocks[1])
        learn(learner, *args)

    learn = Learner.update
    monkeypatch.setattr(Learner, "update", update)
    monkeypatch.setattr(serial, "limit_calls", limit_calls)
    argv = ["--env", "Catch", "--savedir", str(tmp_path), "--xpid", "a", "--serial"]
    sizes = ["--num_actors", "1", "--batch_size", "1", "--total_steps", "40"]
    assert monobeast.main([*argv, *sizes]) == Exit.DONE
    assert len(updates) == 2 and all(updates) and clocks[1] == 0


def test_an_environment_that_changes_the_folder_moves_no_run(monkeypatch, tmp_path):
    """A simulator may want a folder of its own; --savedir may be relative."""
    (tmp_path / "simulator").mkdir()
    (tmp_path / "simulator" / "level.txt").touch()
    has_moved = False

    def create_env(flags, render_mode=None):
        nonlocal has_moved
        if not has_moved:  # As a module that changes the folder when it is imported.
            os.chdir(tmp_path / "simulator")
            has_moved = True
        assert os.path.exists("level.txt")
        return Catch()

    monkeypatch.setattr(monobeast, "create_env", create_env)
    monkeypatch.chdir(tmp_path)
    argv = ["--env", "Catch", "--savedir", "runs", "--xpid", "a", "--serial"]
    sizes = ["--num_actors", "1", "--batch_size", "1", "--total_steps", "20"]
    assert monobeast.main([*argv, *sizes]) == Exit.DONE
    assert os.listdir(tmp_path / "simulator") == ["level.txt"]
    assert os.getcwd() == str(tmp_path / "simulator")
    assert log_rows(tmp_path / "runs" / "a")
    assert (tmp_path / "runs" / "latest").samefile(tmp_path / "runs" / "a")


@pytest.mark.parametrize("module", [monobeast, polybeast])
def test_a_step_is_one_that_an_environment_took(module):
    """The row after a truncated one shows the reset, and no step led to it."""
    env_steps = 0

    class Env(gym.Wrapper):
        def step(self, action):
            nonlocal env_steps
            env_steps += 1
            return super().step(action)

    flags = make_flags("tests.counting_env:make_truncating", "--serial")
    flags.learner_device = "cpu"
    learner = module.create_learner(flags, monobeast.read_env(flags)[0])
    actor = make_actor(flags, learner.net, lambda: learner.updates)
    actor.envs.envs = [Env(env) for env in actor.envs.envs]
    for updates in range(1, 10):
        actor.unroll(0)
        batch = actor.buffers.rollout(0)
        if module is polybeast:
            batch = map_nest(torch.from_numpy, batch)
        learner.update(batch, ())
        assert (learner.step, learner.updates) == (env_steps, updates)
    assert env_steps < updates * T * E  # There were such rows.


@pytest.mark.parametrize("module", [monobeast, polybeast])
def test_rollouts_beyond_the_maximal_lag_are_left_out_and_counted(module):
    """Lag 7 and 3 at their first actions; what was chosen later is younger."""
    flags = make_flags("Catch", "--num_actors", "1", "--use_lstm")
    flags.batch_size = 2 * E
    flags.learner_device = "cpu"
    with Pool(flags) as pool:
        rollout = pool.next_rollout()
    # A fork's two networks may have states of different sizes.
    net = module.create_learner(flags, monobeast.read_env(flags)[0]).net
    state = tuple(s.numpy() for s in net.initial_state(2 * E))
    for s in state:
        s[:, E:] = 1.0
    both = map_nest(lambda x: np.concatenate([x, x], axis=1), rollout)
    both["policy_version"][1:, :E] = 3
    both["policy_version"][1:, E:] = 7
    both["policy_version"][2:, 0] = 10
    both["policy_version"][0] = 0  # The rollout before's.

    def learned_from(max_policy_lag, columns=slice(None)):
        torch.manual_seed(0)
        flags.max_policy_lag = max_policy_lag
        learner = module.create_learner(flags, monobeast.read_env(flags)[0])
        learner.updates = 10
        batch, agent_state = map_nest(lambda x: x[:, columns], (both, state))
        if module is polybeast:
            batch, agent_state = map_nest(torch.from_numpy, (batch, agent_state))
        learner.update(batch, agent_state)
        counts = (learner.step, learner.updates - 10, learner.counts.stale)
        assert learner.counts.rows == {
            "learned": learner.step,
            "stale": learner.counts.stale * T,
            "unused": 0,
        }
        return counts, [p.grad for p in learner.net.parameters()]

    for max_lag, columns, counts in [
        (None, slice(None), (2 * E * T, 1, 0)),
        (7, slice(None), (2 * E * T, 1, 0)),
        (6, slice(E, None), (E * T, 1, E)),
        (3, slice(E, None), (E * T, 1, E)),
        (2, slice(0), (0, 0, 2 * E)),
    ]:
        got, gradients = learned_from(max_lag)
        assert got == counts
        if counts[0]:
            torch.testing.assert_close(gradients, learned_from(None, columns)[1])
        else:
            assert gradients == [None] * len(gradients)


def test_a_recurrent_state_of_any_type_stays_as_it_is(monkeypatch):
    flags = make_flags("Catch", "--num_actors", "1")
    spaces = monobeast.read_env(flags)[0]
    net = monobeast.create_net(flags, spaces)
    dtypes = [torch.int64, torch.float64, torch.bool]
    monkeypatch.setattr(
        net,
        "initial_state",
        lambda B: tuple(  # A parameter may be among them.
            torch.zeros(1, B, dtype=d, requires_grad=d is torch.float64) for d in dtypes
        ),
    )
    outputs = monobeast.net_outputs(spaces)
    _, state = prepare.rollout_specs(flags, spaces, net, outputs)
    assert [spec.dtype for spec in state] == [np.int64, np.float64, np.bool_]


@pytest.mark.parametrize(
    "kind, left", [("torch", "machine"), ("numpy", "machine"), ("gpu", "GPU")]
)
def test_an_update_without_memory_says_what_is_how_large(kind, left, monkeypatch):
    flags = make_flags("Catch", "--num_actors", "1", "--disable_cuda")
    spaces = monobeast.read_env(flags)[0]
    learner = monobeast.create_learner(flags, spaces)
    outputs = monobeast.net_outputs(spaces)
    row, _ = prepare.rollout_specs(flags, spaces, learner.net, outputs)
    batch = map_nest(lambda s: np.zeros((T + 1, E, *s.shape), s.dtype), row)

    def forward(rows, state):
        if kind == "gpu":
            raise torch.cuda.OutOfMemoryError("CUDA cannot allocate")
        torch.empty(2**50) if kind == "torch" else np.empty(2**50)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**21, 2**30))
    monkeypatch.setattr(learner.net, "forward", forward)
    with pytest.raises(MemoryError) as error, explain_out_of_memory(batch, learner.net):
        learner.update(batch, ())
    assert f"{E} rollouts of {T} steps: the batch has 0.0 MiB, the network 0." in (
        str(error.value)
    )
    assert f"The {left} has " in str(error.value)
    assert ("has 2.0 MiB left" in str(error.value)) == (kind == "gpu")
    assert "Lower --batch_size" in str(error.value)
    assert "allocate" in str(error.value.__cause__)
    assert not learner.lock.locked()


def test_nan_observations_leave_the_weights_alone_and_ten_in_a_row_stop_the_run():
    flags = make_flags("Catch", "--num_actors", "1")
    flags.batch_size = E
    with Pool(flags) as pool:
        good = pool.next_rollout()
    bad = map_nest(np.copy, good)
    bad["observation"][2, 1] = np.nan
    learner = monobeast.create_learner(flags, monobeast.read_env(flags)[0])
    for _ in range(2):  # A good one between them: they are not in a row.
        learner.update(good, ())
        weights = {k: v.clone() for k, v in learner.net.state_dict().items()}
        for _ in range(9):
            learner.update(bad, ())
    assert (learner.updates, learner.skipped) == (2, 18)
    said = r"10 .* batch: observation\. In the loss: total_loss, .* Check the env"
    with pytest.raises(FloatingPointError, match=said):
        learner.update(bad, ())
    learner.update(bad, ())  # By another thread: no second failure.
    assert learner.skipped == 19
    for name, weight in learner.net.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    "fn, said",
    [
        (lambda x: x.log(), "In the loss: total_loss, baseline_loss. Lower"),
        (lambda x: x.sqrt(), "In the loss: nothing, but in its gradient. Lower"),
        (lambda x: x.detach().log(), "In the loss: total_loss, baseline_loss. Lower"),
    ],
)
def test_a_loss_that_is_not_finite_by_itself_is_told_where_to_look(fn, said):
    flags = make_flags("Catch", "--num_actors", "1")
    flags.batch_size = E
    with Pool(flags) as pool:
        rollout = pool.next_rollout()
    net = monobeast.create_net(flags, monobeast.read_env(flags)[0])

    def loss(*args):
        loss = update.compute_loss(*args)
        part = fn(next(net.parameters()).sum() * 0)
        return loss._replace(
            total_loss=loss.total_loss + part, baseline_loss=part.detach()
        )

    learner = Learner(flags, net, [torch.optim.SGD(net.parameters())], loss)
    learner.skipped_in_a_row = update.MAX_BAD_UPDATES - 1
    with pytest.raises(FloatingPointError) as caught:
        learner.update(rollout, ())
    text = str(caught.value)
    assert f"Not finite in the batch: nothing. {said}" in text
    assert "look into the loss and Net.forward" in text


def create_own_env(flags, render_mode=None):
    """Create an environment that the actors of another process do not have."""
    return Catch()


def main(argv: list[str]) -> int:
    """Train with an environment that is assigned in this process only."""
    monobeast.create_env = create_own_env
    return monobeast.main(argv)


def test_code_that_the_actors_do_not_have_is_refused_in_one_line(start):
    flags = ["--env", "Catch", "--num_actors", 1, "--start_method", "forkserver"]
    program = start(*flags, module=__name__)
    assert program.wait() == 78, program.text()
    last = program.text().splitlines()[-1]
    assert last.startswith(f"ConfigError: this program uses {__name__}.create_own_env,")
    assert "but its actor processes have monobeast.create_env: they import the" in last


def test_the_main_module_has_the_same_name_in_all_processes():
    code = type("Net", (), {"__module__": "__main__"})
    names = prepare.names_of(code, monobeast.Net)
    code.__module__ = "__mp_main__"  # As multiprocessing calls it in a child.
    assert prepare.names_of(code, monobeast.Net) == names


def test_a_partial_has_the_same_name_in_all_processes():
    ours, theirs = (functools.partial(lambda: None) for _ in range(2))
    assert prepare.names_of(ours) == prepare.names_of(theirs) == ["functools.partial"]


def test_the_actors_of_a_resumed_run_play_other_games_and_know_the_version(monkeypatch):
    class Told(Exception):
        pass

    def actors(act, flags, buffers, weights, *, first_incarnation, **_):
        raise Told(first_incarnation, weights.fetch(learner.net, -1))

    monkeypatch.setattr(monobeast, "Actors", actors)
    flags = make_flags("Catch")
    spaces = monobeast.read_env(flags)[0]
    learner = monobeast.create_learner(flags, spaces)
    learner.updates = 7
    run = SimpleNamespace(flags=flags, learner=learner, first_incarnation=3 << 16)
    with pytest.raises(Told) as told:
        monobeast.train_async(run, spaces, None)
    assert told.value.args == (3 << 16, 7)


def test_learn_loop_publishes_a_buffer_that_forward_assigns_anew(monkeypatch):
    forward = monobeast.Net.forward

    def counting(self, rows, core_state=()):
        self.count = self.count + 1
        return forward(self, rows, core_state)

    monkeypatch.setattr(monobeast.Net, "forward", counting)
    flags = make_flags("Catch", "--num_actors", "1", "--batch_size", str(E))
    spaces = monobeast.read_env(flags)[0]
    net = monobeast.create_net(flags, spaces)
    net.register_buffer("count", torch.zeros(()))
    learner = Learner(flags, net, [torch.optim.SGD(net.parameters(), lr=0.01)])
    theirs = copy.deepcopy(net)
    weights = SharedWeights(net.state_dict(), 0)
    actor = make_actor(flags, net)
    actor.unroll(0)
    takes = iter([[0], None])
    actors = SimpleNamespace(take=lambda n: next(takes), give_back=lambda indices: None)
    replay = create_replay(flags, 0)
    monobeast.learn_loop(flags, learner, actors, actor.buffers, weights, replay)
    assert weights.fetch(theirs, -1) == 1
    assert theirs.count == net.count > 0
