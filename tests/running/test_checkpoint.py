# SPDX-License-Identifier: Apache-2.0
"""What `core.running.checkpoint` promises: one good checkpoint always, never a wrong
one."""

import collections
import contextlib
import errno
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from core.errors import ConfigError
from core.running import atomic, checkpoint, optimizer_state
from core.running.checkpoint import CheckpointError, CheckpointMismatch, load, save
from tools.nemesis.checkpoints import mutate

SEED = 20180209
MUTATIONS = 70

DTYPES = [
    getattr(torch, name)
    for name in (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 "
        "int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool"
    ).split()
]


class OwnOptimizer(torch.optim.Optimizer):
    """Has state of all kinds, of each parameter and of the optimizer as a whole."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})
        self.state["all"] = {"calls": 0, "rates": {"x": torch.ones(2)}}

    @torch.no_grad()
    def step(self, closure):
        torch.enable_grad()(closure)()
        of_all = self.state["all"]
        of_all["calls"] += 1
        of_all["rates"]["x"] *= 0.9
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["sum"] = torch.zeros_like(p, dtype=torch.float64)
                state["signs"] = [(torch.zeros_like(p, dtype=torch.bool), "kind")]
                state["steps"] = {"x": torch.zeros(p.shape, dtype=torch.int64)}
            (negative, kind), number = state["signs"][0], state["steps"]["x"]
            assert kind == "kind"
            state["sum"] += p.grad.double() / 3
            number += ~negative
            state["signs"] = [(p.grad < 0, kind)]
            rate = self.param_groups[0]["lr"] * of_all["rates"]["x"][0]
            p -= (rate * state["sum"] / (number + of_all["calls"])).float()


# An optimizer, and options that make it keep all the state it can.
OPTIMIZERS = {
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "lr": 0.01}),
    "Adam": (torch.optim.Adam, {"betas": (0.8, 0.99), "amsgrad": True, "lr": 0.01}),
    "Adam, lr a tensor": (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    "NAdam": (torch.optim.NAdam, {}),
    "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "LBFGS": (torch.optim.LBFGS, {"max_iter": 2}),
    "a fork's": (OwnOptimizer, {}),
}


FSYNC = os.fsync


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """Save time: only a power failure could tell. Two tests below look at syncing."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def contents(step):
    """Return tensors and state that all differ from those of other steps."""
    tensors = {
        "model": {"weight": torch.full((5, 3), float(step)), "bias": torch.ones(3)},
        "rng": {"torch": torch.arange(7, dtype=torch.uint8) + step % 200},
    }
    return {"step": step, "tensors": tensors, "state": {"seen": step, "lr": 0.1}}


def save_steps(directory, *steps):
    for step in steps:
        save(directory, **contents(step))


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def step_names(*steps):
    return [f"step-{step:012d}.safetensors" for step in steps]


def path_of(directory, step):
    return directory / step_names(step)[0]


def spoil(path):
    """Flip the last bit."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def assert_same_tensors(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        same = (
            got[name]
            .flatten()
            .view(torch.uint8)
            .equal(tensor.detach().contiguous().flatten().view(torch.uint8))
        )
        assert same, name


def assert_good(directory, step):
    """Check that `load` gives this step, with all that belongs to it."""
    found = load(directory)
    assert found.step == step
    assert found.state == contents(step)["state"]
    for group, tensors in contents(step)["tensors"].items():
        assert_same_tensors(found.tensors[group], tensors)
    return found


# ------------------------------------------------------------------- forked children


def print_result(function, *args):
    os.fsync = lambda fd: None
    print(json.dumps(function(*args)))


@pytest.fixture
def in_child(run_forked):
    """Return a function's result in a child, which can lose its rights or its life."""

    def in_child(function, *args):
        status, said = run_forked(print_result, function, *args)
        assert status == 0, said
        return json.loads(said)

    return in_child


# -------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_comes_back_bit_by_bit(tmp_path, dtype):
    generator = torch.Generator().manual_seed(SEED)
    raw = torch.randint(256, (5, 3, 8), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        tensor = raw[:, :, 0] % 2 == 1
    else:
        tensor = raw.view(dtype)  # NaN and infinity too.
    tensors = {"tensor": tensor, "scalar": tensor.flatten()[0], "empty": tensor[:0]}
    save(tmp_path, step=1, tensors={"rows": tensors}, state={})
    assert_same_tensors(load(tmp_path).tensors["rows"], tensors)


def test_views_and_shared_memory_come_back_as_what_they_showed(tmp_path):
    base = torch.arange(15.0).view(5, 3)
    tensors = {
        "base": base,
        "same": base,
        "row": base[2],
        "transposed": base.t(),
        "strided": base[::2, 1:],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "parameter": torch.nn.Parameter(base),
    }
    save(tmp_path, step=1, tensors={"model": tensors}, state={})
    assert_same_tensors(load(tmp_path).tensors["model"], tensors)


def test_state_comes_back_exactly(tmp_path):
    state = {"float": 0.1 + 0.2, "int": 2**80, "none": None, "nest": [{"é\n": [True]}]}
    save(tmp_path, step=1, tensors={}, state=state)
    assert load(tmp_path).state == state


def test_save_returns_the_path_that_load_reports(tmp_path):
    path = save(tmp_path / "a" / "b", **contents(13))
    assert path == tmp_path / "a" / "b" / "step-000000000013.safetensors"
    found = load(tmp_path / "a" / "b")
    assert (found.path, found.step, found.rejected) == (path, 13, [])


def test_loaded_tensors_can_be_written_to(tmp_path):
    save_steps(tmp_path, 1)
    found = load(tmp_path)
    found.tensors["model"]["weight"].add_(1)
    assert_good(tmp_path, 1)


# -------------------------------------------------------------------------- what stays


def test_the_last_three_are_kept(tmp_path):
    save_steps(tmp_path, 1, 2, 3, 5, 11)
    assert names(tmp_path) == step_names(3, 5, 11)


def test_a_newer_damaged_one_does_not_displace_what_is_saved(tmp_path):
    save_steps(tmp_path, 1, 7)
    spoil(path_of(tmp_path, 7))
    save_steps(tmp_path, 2, 3, 4, 5)
    assert names(tmp_path) == step_names(3, 4, 5, 7)
    assert_good(tmp_path, 5)


def test_saving_a_step_again_replaces_it(tmp_path):
    save_steps(tmp_path, 1, 2)
    save(tmp_path, step=2, tensors={}, state={"again": True})
    assert names(tmp_path) == step_names(1, 2)
    assert load(tmp_path).state == {"again": True}


def test_no_checkpoint_at_all_loads_as_none(tmp_path):
    (tmp_path / f".{step_names(1)[0]}.tmp-7").touch()
    assert load(tmp_path) is None
    assert load(tmp_path / "missing") is None


def test_none_good_among_some_is_an_error_naming_each(tmp_path):
    save_steps(tmp_path, 1, 2)
    for path in tmp_path.iterdir():
        spoil(path)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    for name in step_names(1, 2):
        assert f"{name}: has another sha256" in str(error.value)


def test_a_directory_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot read"):
        load(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "mnt")
    with pytest.raises(CheckpointError, match="is a link to a folder that does not ex"):
        load(tmp_path / "link")


def test_load_survives_a_trainer_that_saves_meanwhile(tmp_path, monkeypatch):
    save_steps(tmp_path, 1)
    read, calls = checkpoint._read_named, []

    def read_late(path):
        if not calls:
            monkeypatch.undo()  # What save itself reads is not to wait.
            save_steps(tmp_path, 2, 3, 4)
        calls.append(path)
        return read(path)

    monkeypatch.setattr(checkpoint, "_read_named", read_late)
    assert assert_good(tmp_path, 4).rejected == []
    assert calls[0] == path_of(tmp_path, 1)


def test_sweep_removes_what_killed_processes_left(tmp_path):
    save_steps(tmp_path, 1)
    # The second is what programs until 2026 left.
    for name in (f".{step_names(2)[0]}.tmp-{os.getpid()}", ".tmp-123-0a"):
        shutil.copy(path_of(tmp_path, 1), tmp_path / name)
    atomic.sweep(tmp_path)
    assert names(tmp_path) == step_names(1)


def test_sweep_of_a_missing_directory_does_nothing(tmp_path):
    atomic.sweep(tmp_path / "missing")
    assert names(tmp_path) == []


# ----------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": 10**12}, "step is 10"),
        ({"tensors": {"../model": {}}}, "'../model'"),
    ],
    ids=str,
)
def test_impossible_arguments_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path, **(contents(1) | changes))
    assert names(tmp_path) == []


# --------------------------------------------------------------- failing file systems


def write_beyond_the_limit(directory):
    """Save with files limited to 64 KiB: what a full disk looks like from inside."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
    arguments = contents(2)
    arguments["tensors"]["model"]["big"] = torch.zeros(2**18)
    return error_of_save(directory, arguments)


def write_without_rights(directory, mode):
    """Save to a directory of the given mode."""
    os.chdir(directory)  # Its parents may be closed to other users.
    os.chmod(".", 0o755)
    save_steps(Path("checkpoints"), 1)
    os.chmod("checkpoints", mode)
    if os.geteuid() == 0:
        os.seteuid(65534)  # Root may write anywhere; nobody may not.
    return error_of_save(Path("checkpoints"), contents(2))


def error_of_save(directory, arguments):
    try:
        save(directory, **arguments)
    except CheckpointError as error:
        return [str(error), type(error.__cause__).__name__]
    return None


def test_a_full_disk_costs_no_old_checkpoint(tmp_path, in_child):
    folder = tmp_path / "checkpoints"
    save_steps(folder, 1)
    message, cause = in_child(write_beyond_the_limit, folder)
    assert "step-000000000002.safetensors failed" in message
    assert os.strerror(errno.EFBIG) in message
    assert cause == "OSError"
    assert names(folder) == step_names(1)
    assert_good(folder, 1)


@pytest.mark.parametrize("mode", [0o555, 0o000], ids=oct)
def test_a_closed_directory_costs_no_old_checkpoint(tmp_path, in_child, mode):
    message, cause = in_child(write_without_rights, tmp_path, mode)
    os.chmod(tmp_path / "checkpoints", 0o755)
    assert os.strerror(errno.EACCES) in message
    assert cause == "PermissionError"
    assert names(tmp_path / "checkpoints") == step_names(1)
    assert_good(tmp_path / "checkpoints", 1)


def test_a_failing_sync_is_an_error(tmp_path, monkeypatch):
    def fail(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    save_steps(tmp_path, 1)
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="Input"):
        patch.setattr(os, "fsync", fail)
        save_steps(tmp_path, 2)
    assert names(tmp_path) == step_names(1)


def test_a_disk_that_stores_other_bytes_is_an_error(tmp_path, monkeypatch):
    class Wrong:
        """A file that changes the last byte it is given."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *exc_info):
            self.file.close()

        def write(self, data):
            return self.file.write(data[:-1] + bytes([data[-1] ^ 1]))

        def __getattr__(self, name):
            return getattr(self.file, name)

    def open_wrong(file, mode):
        opened = open(file, mode)
        return Wrong(opened) if "w" in mode else opened

    save_steps(tmp_path, 1)
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="sha256"):
        patch.setattr(atomic, "open", open_wrong, raising=False)
        save_steps(tmp_path, 2)
    assert names(tmp_path) == step_names(1)


def test_a_file_is_synced_before_it_has_its_name_and_the_directory_after(
    tmp_path, monkeypatch
):
    save_steps(tmp_path, 1)
    events = []
    replace = os.replace

    def log_fsync(fd):
        events.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        FSYNC(fd)

    def log_replace(path, target):
        events.append(f"named {target.name}")
        replace(path, target)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "replace", log_replace)
    save_steps(tmp_path, 2)
    (name,) = step_names(2)
    assert events == [f".{name}.tmp-{os.getpid()}", f"named {name}", tmp_path.name]


# ------------------------------------------------------------------------------ crashes


CHANGES = ("open to write", "os.mkdir", "os.rename", "os.remove")


def before_change(action, *, changes=CHANGES):
    """Call `action(n)` right before this process's n-th change of the file system."""
    count = itertools.count(1)

    def hook(event, args):
        if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR):
            event = "open to write"
        if event in changes:
            action(next(count))

    sys.addaudithook(hook)


def kill_at(number):
    def kill(n):
        if n == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def disk_full_at(number):
    def fail(n):
        if n == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return fail


def save_in_fork(directory, step, action, damaged=False, **kwargs):
    """Save three steps, then one in a fork; return how the fork ended.

    With `damaged`, the third of the three is damaged.
    """
    shutil.rmtree(directory, ignore_errors=True)
    save_steps(directory, 1, 2, 3)
    if damaged:
        spoil(path_of(directory, 3))
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            before_change(action, **kwargs)
            save_steps(directory, step)
            status = 0
        except CheckpointError:
            status = 74
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at_each_change(directory, step, damaged):
    for number in range(1, 1000):
        status = save_in_fork(directory, step, kill_at(number), damaged)
        assert status in (0, -signal.SIGKILL)
        found = load(directory)
        assert found.step in (3 - damaged, step)
        assert_good(directory, found.step)
        # Nor does a half written one look like a damaged one.
        assert len(found.rejected) <= damaged
        atomic.sweep(directory)
        save_steps(directory, step + 1)
        assert names(directory)[-1:] == step_names(step + 1)
        assert len(names(directory)) == 3
        if status == 0:
            return number - 1
    raise AssertionError("never came to the end of a save")


def fail_at_each_change(directory, step):
    for number in range(1, 1000):
        # What fails while cleaning up can only be left to `sweep`.
        action, changes = disk_full_at(number), CHANGES[:3]
        status = save_in_fork(directory, step, action, changes=changes)
        assert status in (0, 74)
        assert load(directory).rejected == []
        assert_good(directory, load(directory).step)
        assert not list(directory.glob(".*tmp-*"))
        if status == 0:
            return number - 1
    raise AssertionError("never came to the end of a save")


@pytest.mark.parametrize(
    ("step", "damaged"),
    [(4, False), (3, False), (3, True)],
    ids=["new", "replaced", "damaged"],
)
def test_a_kill_before_any_change_of_the_disk_leaves_a_good_one(
    tmp_path, in_child, step, damaged
):
    changes = in_child(kill_at_each_change, tmp_path / "run", step, damaged)
    assert changes >= 2


@pytest.mark.parametrize("step", [3, 4], ids=["replaced", "new"])
def test_an_error_at_any_change_of_the_disk_leaves_a_good_one(tmp_path, in_child, step):
    assert in_child(fail_at_each_change, tmp_path / "run", step) >= 2


# ------------------------------------------------------------------- damage and attacks


def test_each_mutation_is_found_and_the_previous_good_one_used(tmp_path):
    steps = (1, 2, 3)
    save_steps(tmp_path, *steps)
    originals = {path: path.read_bytes() for path in tmp_path.iterdir()}
    rng = random.Random(SEED)
    kinds = set()
    for _ in range(MUTATIONS):
        what, damaged = mutate(rng, tmp_path, *step_names(3, 2))
        kinds.add(what.split()[0])
        found = load(tmp_path)
        assert found.step == 3 - damaged, what
        assert len(found.rejected) == damaged, what
        for name, line in zip(step_names(3, 2), found.rejected):
            assert line.startswith(f"{tmp_path / name}: "), what
            assert "\n" not in line, what
        assert_good(tmp_path, found.step)
        for path, data in originals.items():
            path.write_bytes(data)
    assert len(kinds) == 7
    assert assert_good(tmp_path, 3).rejected == []


def test_a_flipped_bit_in_any_byte_is_found(tmp_path):
    save_steps(tmp_path, 1, 2)
    rng = random.Random(SEED)
    with path_of(tmp_path, 2).open("r+b") as file:
        for at, byte in enumerate(file.read()):
            for changed in (byte ^ 1 << rng.randrange(8), byte):
                file.seek(at)
                file.write(bytes([changed]))
                file.flush()
                assert load(tmp_path).step == (2 if changed == byte else 1), at


def test_any_safetensors_reader_opens_a_checkpoint(tmp_path):
    path = save(tmp_path, **contents(2))
    tensors = safetensors.torch.load_file(path)
    assert tensors.keys() == {"model/weight", "model/bias", "rng/torch"}
    with safetensors.safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["state"]) == contents(2)["state"]


METADATA = {
    "format": checkpoint.FORMAT,
    "version": str(checkpoint.VERSION),
    "step": "2",
    "groups": "model",
    "state": "{}",
    "sha256": "0" * 64,
}


def forge(directory, header, data=b"", length=None, **metadata):
    """Write step 2 with the sha256 that it should have, as an attacker would.

    `header` is JSON, or what follows the metadata.
    """
    raw = json.dumps({"__metadata__": METADATA | metadata}, separators=(",", ":"))
    if isinstance(header, bytes):
        raw = raw.encode() + header
    else:
        entries = json.dumps(header)[1:]
        raw = (raw[:-1] + ("," if header else "") + entries).encode()
    size = struct.pack("<Q", len(raw) if length is None else length)
    file = size + raw + data
    with contextlib.suppress(CheckpointError):
        file = checkpoint.seal(file)
    path_of(directory, 2).write_bytes(file)


def entry(start, end, shape=(3,), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


class Bomb:
    def __reduce__(self):  # Not os._exit itself: coverage puts its own in its place.
        return exec, ("import os; os._exit(1)",)


HOSTILE_FILES = {
    "empty": b"",
    "too short": b"\x01",
    "header of 2**63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "header beyond the file": struct.pack("<Q", 1000) + b"{}",
    "header is a list": struct.pack("<Q", 2) + b"[]",
    "header is not unicode": struct.pack("<Q", 3) + b"{\xff}",
    "no metadata": safetensors.torch.save({"model/a": torch.ones(3)}),
    "other program's": safetensors.torch.save({"a": torch.ones(3)}, {"format": "pt"}),
    "pickle": pickle.dumps(Bomb()),
    "torch": b"PK\x03\x04" + bytes(1000),
}
# Header, data, and changes of the metadata; the sha256 is right.
HOSTILE_CONTENTS = {
    "header is twice": (b"{}", b"", {}),
    "header is not unicode": (b"\xff", b"", {}),
    "deep header": (b'{"a":' * 100_000, b"", {}),
    "overlapping": (
        {"model/a": entry(0, 12), "model/b": entry(4, 16)},
        bytes(16),
        {},
    ),
    "the same twice": (
        {"model/a": entry(0, 12), "model/b": entry(0, 12)},
        bytes(12),
        {},
    ),
    "hole": ({"model/a": entry(4, 16)}, bytes(16), {}),
    "beyond the data": ({"model/a": entry(0, 12)}, bytes(8), {}),
    "more data": ({"model/a": entry(0, 12)}, bytes(20), {}),
    "backwards": ({"model/a": entry(12, 0)}, bytes(12), {}),
    "negative": ({"model/a": entry(-12, 0)}, bytes(12), {}),
    "shape overflows": ({"model/a": entry(0, 0, (2**32,) * 3)}, b"", {}),
    "shape without data": ({"model/a": entry(0, 12, (2**40,))}, bytes(12), {}),
    "negative shape": ({"model/a": entry(0, 12, (-3,))}, bytes(12), {}),
    "unknown dtype": ({"model/a": entry(0, 12, dtype="object")}, bytes(12), {}),
    "dtype torch lacks": ({"model/a": entry(0, 6, (12,), "F4")}, bytes(6), {}),
    "unknown group": ({"other/a": entry(0, 12)}, bytes(12), {}),
    "no group": ({"a": entry(0, 12)}, bytes(12), {}),
    "groups are a list": ({}, b"", {"groups": ["model"]}),
    "other format": ({}, b"", {"format": "pt"}),
    "version is a list": ({}, b"", {"version": [2]}),
    "escape sequences": ({}, b"", {"version": "\x1b[2J"}),
    "step is not there": ({}, b"", {"step": None}),
    "deep state": ({}, b"", {"state": "[" * 1_000_000}),
    "deep objects": ({}, b"", {"state": '{"a":' * 1_000_000}),
    "large integer": ({}, b"", {"state": '{"step": ' + "9" * 100_000 + "e"}),
    "not an object": ({}, b"", {"state": "[1, 2]"}),
    "empty state": ({}, b"", {"state": ""}),
    "state is a number": ({}, b"", {"state": 7}),
}


def assert_passed_over(directory, reason=""):
    found = assert_good(directory, 1)
    (line,) = found.rejected
    assert line.startswith(f"{path_of(directory, 2)}: ")
    assert reason in line
    assert line.isprintable() and len(line) < 1000


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_what_is_no_checkpoint_is_passed_over(tmp_path, name):
    save_steps(tmp_path, 1)
    path_of(tmp_path, 2).write_bytes(HOSTILE_FILES[name])
    assert_passed_over(tmp_path)


@pytest.mark.parametrize("name", HOSTILE_CONTENTS)
def test_hostile_contents_are_passed_over(tmp_path, name):
    save_steps(tmp_path, 1)
    header, data, metadata = HOSTILE_CONTENTS[name]
    forge(tmp_path, header, data, **metadata)
    assert_passed_over(tmp_path)


def test_what_a_forger_changes_nothing_in_is_good(tmp_path):
    """Else the test above would show nothing."""
    forge(tmp_path, {"model/a": entry(0, 12)}, struct.pack("<3f", 1, 2, 3))
    found = load(tmp_path)
    assert found.tensors["model"]["a"].tolist() == [1, 2, 3]
    assert found.rejected == []


def test_a_header_longer_than_its_file_is_not_read(tmp_path):
    save_steps(tmp_path, 1)
    forge(tmp_path, {}, length=2**40)
    assert_passed_over(tmp_path, "is truncated, or not a checkpoint")


def test_pipes_are_passed_over(tmp_path):
    save_steps(tmp_path, 1)
    os.mkfifo(path_of(tmp_path, 2))  # Reading it would wait for ever.
    assert_passed_over(tmp_path, "is not a regular file")


def test_a_checkpoint_of_another_step_s_name_is_passed_over(tmp_path):
    save_steps(tmp_path, 1)
    shutil.copy(path_of(tmp_path, 1), path_of(tmp_path, 2))
    assert_passed_over(tmp_path, "is of step 1")


def test_an_unknown_format_version_is_passed_over(tmp_path, monkeypatch):
    save_steps(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "VERSION", 17)
        save_steps(tmp_path, 2)
    assert_passed_over(tmp_path, "version '17'; this program reads version 2")


def test_an_unknown_name_is_passed_over(tmp_path):
    save_steps(tmp_path, 1)
    (tmp_path / "step-best\n").mkdir()
    (line,) = assert_good(tmp_path, 1).rejected
    assert "its name is not step-<12 digits>.safetensors" in line
    assert line.isprintable()


def pickle_events(directory):
    """Save and load; return what was unpickled meanwhile, and with a control."""
    events = []
    sys.addaudithook(
        lambda event, args: event.startswith("pickle.") and events.append(str(args))
    )
    save_steps(directory, 1)
    load(directory)
    seen = list(events)
    pickle.loads(pickle.dumps(Path))  # The hook does see it.
    return [seen, events]


def test_nothing_is_unpickled(tmp_path, in_child):
    seen, control = in_child(pickle_events, tmp_path)
    assert seen == []
    assert control != []


# ----------------------------------------------------------- optimizers and mismatches


def make_model():
    torch.manual_seed(SEED)
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))


def make_optimizer(kind, model):
    optimizer, options = OPTIMIZERS[kind]
    return optimizer(model.parameters(), **options)


def update(optimizer, model, updates):
    """Do the same updates whenever called with the same ones."""
    for number in updates:
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(7, 5, generator=generator)

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = model(inputs).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def trained(kind):
    model = make_model()
    optimizer = make_optimizer(kind, model)
    update(optimizer, model, range(3))
    return optimizer, model


def through_a_file(directory, optimizer, model):
    tensors, state = optimizer_state.optimizer_state(optimizer, model)
    save(directory, step=1, tensors={"optimizer": tensors}, state=state)
    found = load(directory)
    return found.tensors["optimizer"], found.state


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_go_on_bit_equal_after_a_round_trip(tmp_path, kind):
    optimizer, model = trained(kind)
    tensors, state = through_a_file(tmp_path, optimizer, model)
    assert any(tensor.any() for tensor in tensors.values())  # Not a fresh one's.

    resumed = make_model()
    resumed.load_state_dict(model.state_dict())
    resumed_optimizer = make_optimizer(kind, resumed)
    optimizer_state.restore_optimizer(resumed_optimizer, resumed, tensors, state)

    update(optimizer, model, range(3, 6))
    update(resumed_optimizer, resumed, range(3, 6))
    assert_same_tensors(resumed.state_dict(), model.state_dict())
    after, state_after = optimizer_state.optimizer_state(optimizer, model)
    after_resumed, state_resumed = optimizer_state.optimizer_state(
        resumed_optimizer, resumed
    )
    assert_same_tensors(after_resumed, after)
    assert state_resumed == state_after


def test_options_of_each_group_are_the_present_ones_and_differences_are_told(tmp_path):
    def new(lr, betas, note):
        return torch.optim.Adam(
            [
                {"params": model[1].parameters(), "lr": lr, "schedule": abs},
                {"params": model[0].parameters(), "betas": betas, "note": note},
            ]
        )

    model = make_model()
    old = new(0.1 + 0.2, (0.5, 0.75), [None, "a"])
    tensors, state = through_a_file(tmp_path, old, model)
    optimizer = new(0.5, (0.25, 0.75), [None, "b"])
    lines = optimizer_state.restore_optimizer(optimizer, model, tensors, state)
    first, second = optimizer.param_groups
    assert (first["lr"], second["betas"]) == (0.5, (0.25, 0.75))
    assert lines == [
        "group 1: betas was (0.5, 0.75) and is now (0.25, 0.75)",
        "group 1: note was [None, 'a'] and is now [None, 'b']",
    ]


def test_options_that_differ_from_fresh_ones_are_state_but_not_the_rate():
    def new(**options):
        defaults = {"decay": 0.5, "k": 0, "pair": (1, torch.zeros(3)), **options}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0] |= defaults
        return optimizer

    model = make_model()
    old = new()
    fresh = optimizer_state.group_options(old)
    (group,) = old.param_groups
    group["pair"][1][0] = 7  # In place.
    group |= {"lr": 0.05, "k": 3, "seen": [1, None]}
    tensors, state = optimizer_state.optimizer_state(old, model, fresh)
    assert state["groups"][0]["changed"] == ["k", "pair", "seen"]
    now = new(decay=0.25, k=1)
    lines = optimizer_state.restore_optimizer(now, model, tensors, state)
    assert lines == ["group 0: decay was 0.5 and is now 0.25"]
    (group,) = now.param_groups
    assert [group[k] for k in ("lr", "decay", "k", "seen")] == [0.1, 0.25, 3, [1, None]]
    assert group["pair"][0] == 1 and group["pair"][1].tolist() == [7, 0, 0]


def test_restoring_copies_the_tensors():
    optimizer, model = trained("Adam")
    tensors, state = optimizer_state.optimizer_state(optimizer, model)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    optimizer_state.restore_optimizer(optimizer, model, tensors, state)
    update(optimizer, model, range(2))
    assert_same_tensors(tensors, before)


def test_another_optimizer_is_a_mismatch():
    optimizer, model = trained("Adam")
    tensors, state = optimizer_state.optimizer_state(optimizer, model)
    with pytest.raises(CheckpointMismatch, match="file Adam, this run SGD"):
        optimizer_state.restore_optimizer(
            make_optimizer("SGD", model), model, tensors, state
        )


def test_other_parameters_are_a_mismatch():
    optimizer, model = trained("Adam")
    tensors, state = optimizer_state.optimizer_state(optimizer, model)
    smaller = torch.nn.ModuleDict({"0": model[0], "core": torch.nn.Linear(5, 3)})
    with pytest.raises(CheckpointMismatch) as error:
        optimizer_state.restore_optimizer(
            make_optimizer("Adam", smaller), smaller, tensors, state
        )
    assert str(error.value) == (
        "optimizer: missing core.bias; missing core.weight; "
        "unknown 1.bias; unknown 1.weight"
    )


def test_parameters_in_another_order_are_a_mismatch():
    optimizer, model = trained("Adam")
    tensors, state = optimizer_state.optimizer_state(optimizer, model)
    turned = torch.optim.Adam(list(model.parameters())[::-1])
    with pytest.raises(CheckpointMismatch, match="in another order"):
        optimizer_state.restore_optimizer(turned, model, tensors, state)


def test_a_missing_tensor_of_the_optimizer_is_a_mismatch():
    optimizer, model = trained("Adam")
    tensors, state = optimizer_state.optimizer_state(optimizer, model)
    del tensors["1.bias/exp_avg"]
    with pytest.raises(CheckpointMismatch, match="missing 1.bias/exp_avg"):
        optimizer_state.restore_optimizer(optimizer, model, tensors, state)


def test_a_parameter_that_is_not_the_model_s_is_refused():
    optimizer, _ = trained("Adam")
    with pytest.raises(ConfigError, match="4 of the optimizer's .* attribute of Net"):
        optimizer_state.optimizer_state(optimizer, make_model())


def test_optimizer_state_that_json_cannot_hold_is_refused():
    optimizer, model = trained("Adam")
    bias = model[1].bias
    for value, message in (
        ({1, 2}, r"1\.bias/seen is a set"),
        ({"a": {1: 2}}, r"1\.bias/seen/a has the key 1 \(int\)"),
    ):
        optimizer.state[bias]["seen"] = value
        with pytest.raises(ConfigError, match=message):
            optimizer_state.optimizer_state(optimizer, model)
    optimizer.state[bias]["seen"] = collections.Counter()
    with pytest.raises(ConfigError, match=r"1\.bias/seen is a Counter"):
        optimizer_state.optimizer_state(optimizer, model)
    del optimizer.state[bias]["seen"]
    optimizer.state[0] = optimizer.state[model[1]] = {"seen": 1}
    assert not optimizer_state.optimizer_state(optimizer, model)[1]["of_all"]


def test_each_difference_is_named_in_one_line():
    ours = {
        "policy.weight": torch.zeros(18, 512),
        "core.weight_ih_l0": torch.zeros(3),
        "steps": torch.zeros((), dtype=torch.int64),
    }
    file = {
        "policy.weight": torch.zeros(6, 512),
        "steps": torch.zeros(()),
        "old": torch.zeros(5),
    }
    with pytest.raises(CheckpointMismatch) as error:
        checkpoint.check_tensors(ours, file)
    assert str(error.value) == (
        "model: policy.weight: file [6,512], model [18,512]; "
        "steps: file float32[], model int64[]; missing core.weight_ih_l0; unknown old"
    )


def test_many_differences_are_counted():
    ours = {f"layer{i:02}": torch.zeros(3) for i in range(11)}
    with pytest.raises(CheckpointMismatch, match="missing layer07; and 3 more$"):
        checkpoint.check_tensors(ours, {})
