# SPDX-License-Identifier: Apache-2.0
"""Shared memory, rollout buffers, batches and shared weights, also across processes."""

import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from core.actors import shared_memory
from core.actors.processes import ActorProcess
from core.actors.shared_memory import (
    BatchAssembler,
    RolloutBuffers,
    SharedArrays,
    SharedWeights,
)
from core.errors import ConfigError
from core.nests import ArraySpec, leaves
from tests.python import run_python

# Those of `spawn` import torch: tests/actors/test_processes.py has them.
METHODS = sorted({"fork", "forkserver"} & {*multiprocessing.get_all_start_methods()})
DEADLINE_S = 60.0  # Of every wait for another process, which may have to import torch.
FD_FOLDER = Path("/proc/self/fd")

SPECS = {
    "float": ArraySpec((5, 3), np.dtype(np.float32)),
    "double": ArraySpec((7,), np.dtype(np.float64)),
    "picture": ArraySpec((3, 11, 13), np.dtype(np.uint8)),
    "long": ArraySpec((11,), np.dtype(np.int64)),
    "int": ArraySpec((13, 2), np.dtype(np.int32)),
    "flag": ArraySpec((17,), np.dtype(bool)),
    "scalar": ArraySpec((), np.dtype(np.float32)),
    "nothing": ArraySpec((0, 5), np.dtype(np.int8)),
}


@pytest.fixture(params=["memfd", "file"])
def memory(request, monkeypatch):
    """Run a test with memfd, and with the unlinked file of other systems."""
    if request.param == "file":
        monkeypatch.delattr(os, "memfd_create")
        assert shared_memory.memory_folder() is not None
    else:
        if not hasattr(os, "memfd_create"):
            pytest.skip("no memfd_create on this system")
        assert shared_memory.memory_folder() is None


def open_files():
    """Return descriptor and inode of each open file.

    Not of sockets and pipes: threads of other tests may open some at any time.
    """
    if not FD_FOLDER.is_dir():
        pytest.skip("no /proc/self/fd on this system")
    gc.collect()
    found = set()
    for fd in map(int, os.listdir(FD_FOLDER)):
        with contextlib.suppress(OSError):  # Of the listing itself, and closed by now.
            status = os.stat(fd)
            if stat.S_ISREG(status.st_mode):
                found.add((fd, status.st_dev, status.st_ino))
    return found


# ----------------------------------------------------------------------- SharedArrays


def test_arrays_have_the_shapes_and_dtypes_of_their_specs(memory):
    arrays = SharedArrays(SPECS).arrays
    got = {name: ArraySpec(a.shape, a.dtype) for name, a in arrays.items()}
    assert got == SPECS


def test_arrays_start_at_cache_lines_and_do_not_overlap(memory):
    arrays = SharedArrays(SPECS).arrays
    ends = 0
    for name, array in arrays.items():  # In the order of the specs.
        start = array.__array_interface__["data"][0]
        assert start % 64 == 0, name
        assert start >= ends, name
        assert array.flags.writeable and array.flags.c_contiguous, name
        ends = start + array.nbytes
    first = next(iter(arrays.values())).__array_interface__["data"][0]
    assert ends - first <= shared_memory.nbytes(SPECS)


def test_arrays_start_filled_with_obvious_values(memory):
    arrays = SharedArrays(SPECS).arrays
    assert np.isnan(arrays["float"]).all()
    assert np.isnan(arrays["double"]).all()
    assert np.isnan(arrays["scalar"])
    assert (arrays["picture"] == 0xA5).all()
    assert (arrays["long"] == np.iinfo(np.int64).min).all()
    assert (arrays["int"] == np.iinfo(np.int32).min).all()
    assert arrays["flag"].all()


def test_nbytes_counts_whole_cache_lines():
    lines = [1, 1, 7, 2, 2, 1, 1, 0]  # Of SPECS, by hand.
    assert shared_memory.nbytes(SPECS) == 64 * sum(lines)


def test_no_arrays_at_all_are_fine(memory):
    assert SharedArrays({}).arrays == {}


def test_any_number_of_arrays_costs_two_file_descriptors(memory):
    before = open_files()
    many = {f"array-{i}": SPECS["float"] for i in range(97)}
    few = {"one": SPECS["float"]}
    kept = [SharedArrays(many), SharedArrays(few)]
    assert len(open_files() - before) == 2 * len(kept)


def test_keys_with_slashes_have_memory_of_their_own():
    byte = ArraySpec((), np.dtype(np.uint8))
    spec = {"a/b": byte, "a": {"b": byte}, "a~1b": byte, "": {"": byte}, "/": byte}
    sizes = {"num_buffers": 1, "unroll_length": 1, "envs_per_actor": 1}
    slabs = shared_memory.buffer_specs(spec, [], **sizes)
    rows = RolloutBuffers(spec, slabs).rows
    arrays = [rows["a/b"], rows["a"]["b"], rows["a~1b"], rows[""][""], rows["/"]]
    for i, array in enumerate(arrays):
        array[...] = i
    assert [int(array[0, 0, 0]) for array in arrays] == [0, 1, 2, 3, 4]


def test_dropping_the_arrays_gives_back_memory_and_files(memory):
    before = open_files()
    shared = SharedArrays(SPECS)
    del shared
    gc.collect()
    assert not open_files() - before


def test_an_array_outlives_its_segment_object(memory):
    array = SharedArrays(SPECS).arrays["float"]
    gc.collect()
    array[...] = 3.0
    assert array.sum() == 3.0 * array.size


ODD_SIZE = 64 * 1_000_003  # Nobody else's segment has it.


def files_in_dev_shm():
    """Return the files there that have ODD_SIZE; other programs use the folder too."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm on this system")
    found = []
    for file in os.scandir("/dev/shm"):
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_size == ODD_SIZE:
                found.append(file.name)
    return found


def make_and_die(memfd):
    if not memfd:
        del os.memfd_create
    _shared = SharedArrays({"a": ArraySpec((ODD_SIZE,), np.dtype(np.uint8))})
    print("made")
    signal.raise_signal(signal.SIGKILL)


@pytest.mark.parametrize("memfd", [True, False])
def test_memory_goes_with_a_killed_process(memfd, run_forked):
    assert run_forked(make_and_die, memfd) == (-signal.SIGKILL, "made\n")
    assert files_in_dev_shm() == []


def count_up(shared, by):
    """Run in a child: what the parent wrote, plus `by`."""
    shared.arrays["long"] += by
    shared.arrays["flag"][...] = False


@pytest.mark.parametrize("method", METHODS)
def test_a_child_writes_and_the_parent_sees_it(method, memory):
    shared = SharedArrays(SPECS)
    shared.arrays["long"][...] = np.arange(11)
    run_child(method, count_up, shared, 100)
    np.testing.assert_array_equal(shared.arrays["long"], 100 + np.arange(11))
    assert not shared.arrays["flag"].any()
    assert np.isnan(shared.arrays["float"]).all()


def run_child(method, target, *args):
    process = multiprocessing.get_context(method).Process(
        target=target, args=args, daemon=True
    )
    process.start()
    process.join(DEADLINE_S)
    exitcode = process.exitcode
    process.kill()
    process.join()
    assert exitcode == 0


def fill_the_device(memfd):
    # The limit on file sizes stands in for a full device: it needs no privileges.
    limit = 2**20
    if not memfd:
        del os.memfd_create
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    files = os.listdir("/dev/fd")
    with pytest.raises(OSError):
        SharedArrays({"a": ArraySpec((limit + 1,), np.dtype(np.uint8))})
    print(len(os.listdir("/dev/fd")) - len(files))
    SharedArrays({"a": ArraySpec((limit,), np.dtype(np.uint8))})
    print("fits")


@pytest.mark.parametrize("memfd", [True, False])
def test_a_full_device_is_an_oserror_and_leaves_nothing_behind(memfd, run_forked):
    assert run_forked(fill_the_device, memfd) == (0, "0\nfits\n")


def test_a_full_tmpfs_is_an_oserror_and_not_a_sigbus(tmp_path):
    unshare = ["unshare", "--mount", "--map-root-user"]
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    try:
        possible = subprocess.run([*unshare, "sh", "-c", mount], capture_output=True)
    except FileNotFoundError:
        pytest.skip("no unshare on this system")
    if possible.returncode != 0:
        pytest.skip(f"may not mount a tmpfs here: {possible.stderr.decode()}")
    code = f"""
        import errno, os
        import numpy as np
        from core.actors import shared_memory
        from core.nests import ArraySpec
        shared_memory.memory_folder = lambda: {str(tmp_path)!r}
        spec = ArraySpec((2**20 + 1,), np.dtype(np.uint8))
        try:
            shared_memory.SharedArrays({{"a": spec}})
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
        full = os.statvfs({str(tmp_path)!r})
        print(full.f_bfree == full.f_blocks, os.listdir({str(tmp_path)!r}))
    """
    mount_first = [*unshare, "sh", "-c", mount + ' && exec "$@"', "sh"]
    done = run_python(code, python=[*mount_first, sys.executable])
    assert (done.returncode, done.stdout) == (0, "True []\n"), done.stderr


# --------------------------------------------------------------------- RolloutBuffers

N, T, E, A = 7, 5, 3, 11  # Buffers, unroll length, environments per actor, actions.

ROW_SPEC = {
    "observation": {
        "picture": ArraySpec((2, 13), np.dtype(np.uint8)),
        "pair": (
            ArraySpec((), np.dtype(np.int64)),
            ArraySpec((17,), np.dtype(np.float32)),
        ),
    },
    "done": ArraySpec((), np.dtype(bool)),
    "policy_logits": ArraySpec((A,), np.dtype(np.float32)),
}
STATE_SPEC = [
    ArraySpec((2, E, 19), np.dtype(np.float32)),
    ArraySpec((1, E, 23), np.dtype(np.float32)),
]


def make_buffers(num_buffers):
    sizes = dict(num_buffers=num_buffers, unroll_length=T, envs_per_actor=E)
    slabs = shared_memory.buffer_specs(ROW_SPEC, STATE_SPEC, **sizes)
    return RolloutBuffers(ROW_SPEC, slabs)


@pytest.fixture
def buffers():
    """Buffers in which every number differs, as far as its dtype can tell."""
    made = make_buffers(N)
    rng = np.random.default_rng(0)
    for array in [a for _, a in leaves(made.rows)] + list(made.agent_state):
        array[...] = rng.integers(0, 2 if array.dtype == bool else 251, array.shape)
    return made


def test_each_key_is_one_slab(buffers):
    for (name, slab), (_, spec) in zip(
        leaves(buffers.rows), leaves(ROW_SPEC), strict=True
    ):
        assert slab.shape == (N, T + 1, E, *spec.shape), name
        assert slab.dtype == spec.dtype, name
    shapes = [state.shape for state in buffers.agent_state]
    assert shapes == [(N, 2, E, 19), (N, 1, E, 23)]


def test_a_rollout_is_a_view_of_one_buffer(buffers):
    rollout = buffers.rollout(4)
    for (name, view), (_, slab) in zip(
        leaves(rollout), leaves(buffers.rows), strict=True
    ):
        assert np.shares_memory(view, slab), name
        np.testing.assert_array_equal(view, slab[4], err_msg=name)


def write_own_buffer(buffers, index):
    """Run in a child: fill one buffer through every view."""
    for t in range(buffers.unroll_length + 1):
        row = buffers.row(index, t)
        row["policy_logits"][...] = t
        row["observation"]["pair"][0][...] = 10 * t
    for slab in buffers.agent_state:
        slab[index] = 0.5


@pytest.mark.parametrize("method", METHODS)
def test_a_child_fills_its_buffer_and_no_other(method, buffers):
    expected = {name: slab.copy() for name, slab in leaves(buffers.rows)}
    states = [slab.copy() for slab in buffers.agent_state]
    run_child(method, write_own_buffer, buffers, 3)
    t = np.arange(T + 1).reshape(T + 1, 1)
    expected["policy_logits"][3] = t[..., None]
    expected["observation/pair/0"][3] = 10 * t
    for name, slab in leaves(buffers.rows):
        np.testing.assert_array_equal(slab, expected[name], err_msg=name)
    for slab, state in zip(buffers.agent_state, states):
        state[3] = 0.5
        np.testing.assert_array_equal(slab, state)


# --------------------------------------------------------------------- BatchAssembler


def check_batch(assembler, buffers, indices):
    """Compare a batch with a copy made one environment at a time."""
    for (name, batch), (_, slab) in zip(
        leaves(assembler.batch), leaves(buffers.rows), strict=True
    ):
        assert batch.shape[:2] == (T + 1, len(indices) * E), name
        for i, index in enumerate(indices):
            for e in range(E):
                np.testing.assert_array_equal(
                    batch[:, i * E + e], slab[index, :, e], err_msg=name
                )
    for state, slab in zip(assembler.agent_state, buffers.agent_state, strict=True):
        assert state.shape[1] == len(indices) * E
        for i, index in enumerate(indices):
            for e in range(E):
                np.testing.assert_array_equal(state[:, i * E + e], slab[index, :, e])


def test_a_batch_holds_the_buffers_side_by_side_in_the_order_named(buffers):
    assembler = BatchAssembler(buffers, 4)
    assembler.fill([5, 0, 6, 2])
    check_batch(assembler, buffers, [5, 0, 6, 2])


def test_the_next_batch_reuses_the_memory_of_the_first(buffers):
    assembler = BatchAssembler(buffers, 2)
    before = [batch for _, batch in leaves(assembler.batch)]
    assembler.fill([0, 1])
    assembler.fill([4, 3])
    check_batch(assembler, buffers, [4, 3])
    for old, (name, new) in zip(before, leaves(assembler.batch), strict=True):
        assert old is new, name


def test_a_batch_does_not_change_when_actors_write_again(buffers):
    assembler = BatchAssembler(buffers, 2)
    assembler.fill([4, 3])
    before = {name: batch.copy() for name, batch in leaves(assembler.batch)}
    state = assembler.agent_state[0].copy()
    write_own_buffer(buffers, 3)
    for name, batch in leaves(assembler.batch):
        np.testing.assert_array_equal(batch, before[name], err_msg=name)
    np.testing.assert_array_equal(assembler.agent_state[0], state)


@pytest.mark.parametrize("indices", [[], [1], [1, 2, 3]])
def test_a_wrong_number_of_buffers_is_refused(indices, buffers):
    with pytest.raises(ValueError):
        BatchAssembler(buffers, 2).fill(indices)


def test_replayed_buffers_stand_after_the_new_ones_and_are_marked(buffers):
    assembler = BatchAssembler(buffers, 2, num_replayed=3)
    memory = [batch for _, batch in leaves(assembler.batch)]
    for new, replayed in [([4, 3], []), ([5, 0], [4, 1, 3]), ([2, 6], [])]:
        assembler.fill(new, replayed)
        marks = assembler.batch.pop("replayed")
        num_old = len(replayed) * E
        assert marks.tolist() == [[False] * 2 * E + [True] * num_old] * (T + 1)
        check_batch(assembler, buffers, [*new, *replayed])
        for old, (name, batch) in zip(memory, leaves(assembler.batch), strict=True):
            assert np.shares_memory(old, batch), name


# ---------------------------------------------------------------------- SharedWeights

# Below the size from which torch copies with several threads, which would wait for each
# other longer than they copy on a machine that does other things too.
WEIGHT_SHAPES = {
    "first": (29_989,),
    "bias": (),
    "middle": (151, 199),
    "last": (31_013,),
}


def tensors_full_of(value):
    return {
        name: torch.full(shape, float(value)) for name, shape in WEIGHT_SHAPES.items()
    }


def net_full_of(value):
    net = nn.Module()
    for name, tensor in tensors_full_of(value).items():
        net.register_buffer(name, tensor)
    return net


def values_in(net):
    return {value for t in net.buffers() for value in t.float().unique().tolist()}


def test_fetch_returns_the_newest_weights_and_their_version():
    weights = SharedWeights(tensors_full_of(5), 5)
    weights.publish(tensors_full_of(7), 7)
    mine = net_full_of(-1)
    assert weights.fetch(mine, -1) == 7
    assert values_in(mine) == {7.0}


def test_version_zero_is_a_version():
    weights = SharedWeights(tensors_full_of(3), 0)
    mine = net_full_of(-1)
    assert weights.fetch(mine, -1) == 0
    assert values_in(mine) == {3.0}


def test_fetch_leaves_alone_what_is_already_newest():
    weights = SharedWeights(tensors_full_of(7), 7)
    mine = net_full_of(-1)
    assert weights.fetch(mine, have=7) == 7
    assert values_in(mine) == {-1.0}


def test_fetch_brings_whatever_differs_from_what_one_has():
    # A learner that went back to a checkpoint has a lower version than its actors.
    weights = SharedWeights(tensors_full_of(5), 5)
    mine = net_full_of(-1)
    assert weights.fetch(mine, have=7) == 5
    assert values_in(mine) == {5.0}


MIN_VERSIONS = 307  # That a reader must see; it skips others.


def read_weights(weights, pipe):
    """Run in a child: fetch under a writer that never rests, and check each version.

    Sends b"F" after the first version, and at last (version, smallest, largest value)
    of each version whose tensors held anything but its number.
    """
    torch.set_num_threads(1)
    mine, version, wrong = net_full_of(-1), -1, []
    for i in range(MIN_VERSIONS):
        newest = version
        while newest == version:
            newest = weights.fetch(mine, version)
        version = newest
        low = min(t.min().item() for t in mine.buffers())
        high = max(t.max().item() for t in mine.buffers())
        if not low == high == version:
            wrong.append((version, low, high))
        if i == 0:
            pipe.send(b"F")
    pipe.send(wrong)


def test_readers_never_see_two_versions_mixed_and_a_killed_one_blocks_nobody(_context):
    weights = SharedWeights(tensors_full_of(0), 0)
    # Written from last to first and read from first to last: the two meet halfway.
    tensors = dict(reversed(tensors_full_of(0).items()))
    pipes, processes = [], []
    for _ in range(2):
        ours, theirs = _context.Pipe()
        args = (weights, theirs)
        process = _context.Process(target=read_weights, args=args, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            assert pipe.poll(DEADLINE_S) and pipe.recv() == b"F"
        deadline, version = time.monotonic() + DEADLINE_S, 0
        # Bursts, so that copies are disturbed, and rests, so that some succeed.
        while not pipes[1].poll(0.001 if version % 7 == 0 else 0):
            assert time.monotonic() < deadline
            version += 1
            for tensor in tensors.values():
                tensor.fill_(version)
            weights.publish(tensors, version)
            if version == 7:
                processes[0].kill()
        assert pipes[1].recv() == []
        for process, expected in zip(processes, [-9, 0]):
            process.join(DEADLINE_S)
            assert process.exitcode == expected
    finally:
        for process in processes:
            process.kill()
            process.join()


# ----------------------------------------------------------------------------- weights


def a_net(size=3, *, more=()):
    net = nn.Sequential(nn.Linear(2, size), *more)
    net.register_buffer("count", torch.zeros((), dtype=torch.int64))
    return net


@pytest.mark.parametrize(
    "other, difference",
    [
        (a_net(5), r"0.weight is float\[5,2\], the learner's is float\[3,2\]"),
        (a_net(more=[nn.Linear(3, 7)]), r"1.weight is float\[7,3\], the .* is none"),
        (nn.Sequential(nn.Linear(2, 3)), r"count is none, the .* is int64\[\]"),
    ],
)
def test_the_weights_of_another_network_are_refused(other, difference):
    weights = SharedWeights(a_net().state_dict(), 0)
    with pytest.raises(ConfigError, match=rf"\(first difference: {difference}\)"):
        weights.check(other)


def test_an_actor_in_bfloat16_has_the_learners_network():
    net = a_net()
    weights = SharedWeights(net.state_dict(), 0)
    weights.check(net.bfloat16())


def test_a_buffer_that_the_network_assigns_anew_is_shared_too():
    ours, theirs = net_full_of(3), net_full_of(-1)
    weights = SharedWeights(ours.state_dict(), 0)
    process = ActorProcess(0, 0, None, np.zeros(1), weights, None)
    fetch = process.fetcher(theirs)
    theirs.middle = theirs.middle + 2  # As `forward` may.
    assert fetch() == 0
    assert values_in(theirs) == {3.0}


@pytest.mark.parametrize(
    "name, dtype", [("sequence", "int64"), ("x", "bfloat16"), ("x", "float8_e4m3fn")]
)
def test_a_buffer_may_have_any_name_and_a_dtype_that_numpy_lacks(name, dtype):
    ours, theirs = nn.Module(), nn.Module()
    for net, value in ((ours, 3), (theirs, -1)):
        net.register_buffer(name, torch.full((5,), value).to(getattr(torch, dtype)))
    weights = SharedWeights(ours.state_dict(), 0)
    weights.check(theirs)
    assert weights.fetch(theirs, -1) == 0
    assert values_in(theirs) == {3.0}
