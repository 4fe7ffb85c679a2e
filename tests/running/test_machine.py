# SPDX-License-Identifier: Apache-2.0
"""The machine: memory, open files, cores, priorities, with container limits."""

import collections
import os
import resource
import types

import psutil
import pytest

from core.actors import shared_memory
from core.errors import ConfigError
from core.running import machine as machine_module
from core.running.machine import available_memory, check_resources, num_cores
from tests.python import run_python
from tests.running.conftest import DEADLINE_S

MIB = 2**20


Usage = collections.namedtuple("Usage", "total used free")


def check(**changes):
    needs = dict(shared_bytes=3 * MIB, memory_folder=None, files=71, processes=2)
    return list(check_resources(**(needs | changes)))


@pytest.fixture
def machine(monkeypatch):
    """A machine with 1,009 MiB of memory, 89 MiB in a folder, 5 cores, 128 files."""
    monkeypatch.setattr(machine_module, "available_memory", lambda: 1009 * MIB)
    monkeypatch.setattr(machine_module, "num_cores", lambda: 5)
    usage = {"/folder": Usage(100 * MIB, 11 * MIB, 89 * MIB)}
    monkeypatch.setattr(machine_module.shutil, "disk_usage", usage.__getitem__)
    limits = [128, 256]
    no_limit = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda which: tuple(limits) if which == resource.RLIMIT_NOFILE else no_limit,
    )
    monkeypatch.setattr(
        resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new)
    )
    return limits


def test_what_fits_is_said_with_both_numbers(machine):
    memory, files, cores = check()
    assert "need 3.0 MiB, have 1,009.0 MiB" in memory
    assert "need 71, have 256" in files
    assert "2 busy processes or threads on 5" in cores


def test_a_need_that_fits_exactly_is_fine(machine):
    check(shared_bytes=1009 * MIB, files=256)
    check(shared_bytes=89 * MIB, memory_folder="/folder")


def test_too_little_memory_is_refused_with_both_numbers_and_the_remedy(machine):
    with pytest.raises(ConfigError) as caught:
        check(shared_bytes=1010 * MIB)
    for part in ("1,010.0 MiB", "1,009.0 MiB", "Lower --num_buffers"):
        assert part in str(caught.value)


def test_what_the_replay_needs_is_said_and_named_as_the_remedy(machine):
    memory, *_ = check(replay_share=0.25)
    assert "need 3.0 MiB (0.8 of them for the replay), have" in memory
    with pytest.raises(ConfigError, match=r"Lower --replay_capacity, --num_buffers"):
        check(shared_bytes=1010 * MIB, replay_share=0.25)


def test_a_folder_too_small_is_refused_with_both_numbers_and_the_remedy(machine):
    with pytest.raises(ConfigError) as caught:
        check(shared_bytes=90 * MIB, memory_folder="/folder")
    for part in ("90.0 MiB", "89.0 MiB", "Lower --num_buffers", "enlarge /folder"):
        assert part in str(caught.value)


def make_files_beyond_the_limit():
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, 2 * MIB))
    shared_memory._open_anonymous(2 * MIB)
    with pytest.raises(OSError) as error:
        shared_memory._open_anonymous(2 * MIB + 1)
    print(error.value.strerror)
    with pytest.raises(ConfigError) as error:
        check(shared_bytes=3 * MIB)
    print(error.value)


def test_shared_memory_beyond_the_limit_on_files_is_refused_with_both_numbers(
    run_forked,
):
    """The limit is real, since the kernel counts shared memory as a file."""
    status, said = run_forked(make_files_beyond_the_limit)
    assert status == 0, said
    kernels, ours = said.splitlines()
    assert kernels == "File too large"
    for part in ("need 3.0 MiB", "more than 2,048 KiB (ulimit -f)", "Raise the limit"):
        assert part in ours


def test_too_few_files_are_refused_with_both_numbers_and_the_remedy(machine):
    with pytest.raises(ConfigError) as caught:
        check(files=257)
    for part in ("need 257", "have 256", "Lower --num_actors", "ulimit -Hn"):
        assert part in str(caught.value)


def test_no_limit_on_files_is_enough(machine):
    machine[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    check(files=10**6)
    assert machine == [resource.RLIM_INFINITY] * 2


def test_the_soft_limit_really_is_raised():
    done = run_python("""
        import resource
        from core.running.machine import check_resources
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        list(check_resources(shared_bytes=1, memory_folder="/", files=67, processes=1))
        soft, now = resource.getrlimit(resource.RLIMIT_NOFILE)
        print(soft == resource.RLIM_INFINITY or soft >= 67, now == hard)
    """)
    assert done.stdout == "True True\n", done.stderr


def test_many_more_processes_than_cores_are_remarked_on(machine):
    assert "fewer --num_actors" not in check(processes=10)[2]
    assert "fewer --num_actors" in check(processes=11)[2]


def test_available_memory_is_some_of_the_machine_s():
    assert 0 < available_memory() <= psutil.virtual_memory().total


def test_who_lets_the_learner_go_first_is_a_nicer_batch_process():
    done = run_python("""
        import os
        from core.running.machine import lower_priority
        lower_priority()
        print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_BATCH)
    """)
    assert done.stdout == "19 True\n", done.stderr


def test_num_cores_heeds_the_affinity():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no sched_setaffinity on this system")
    done = run_python("""
        import os
        from core.running.machine import num_cores
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        print(num_cores())
    """)
    assert done.stdout == "1\n", done.stderr


@pytest.fixture
def container(monkeypatch, tmp_path):
    """A container on a machine of 1,009 MiB and 64 cores: a folder for its limits."""
    memory = types.SimpleNamespace(available=1009 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    monkeypatch.setattr(machine_module, "CGROUP", tmp_path)
    return tmp_path


def limit_memory(container, limit, *, used, files, shared):
    (container / "memory.max").write_text(f"{limit}\n")
    (container / "memory.current").write_text(f"{used}\n")
    stat = f"anon 12345\nfile {files}\nkernel 17\nshmem {shared}\n"
    (container / "memory.stat").write_text(stat)


def test_a_container_s_memory_limit_counts(container):
    limit_memory(container, 499 * MIB, used=97 * MIB, files=0, shared=0)
    assert available_memory() == (499 - 97) * MIB


def test_cached_files_count_as_available_but_shared_memory_does_not(container):
    limit_memory(container, 499 * MIB, used=97 * MIB, files=53 * MIB, shared=11 * MIB)
    assert available_memory() == (499 - 97 + 53 - 11) * MIB


def test_a_limit_above_what_the_machine_has_gives_no_more(container):
    limit_memory(container, 4999 * MIB, used=97 * MIB, files=0, shared=0)
    assert available_memory() == 1009 * MIB


def test_a_container_without_a_memory_limit_has_the_machine_s(container):
    limit_memory(container, "max", used=97 * MIB, files=0, shared=0)
    assert available_memory() == 1009 * MIB


@pytest.mark.parametrize(
    "quota, cores",
    [
        ("300000 100000", 3),
        ("250000 100000", 3),
        ("10000 100000", 1),
        ("9900000 100000", 64),
        ("max 100000", 64),
    ],
)
def test_a_container_s_cpu_limit_counts(container, quota, cores):
    (container / "cpu.max").write_text(quota + "\n")
    assert num_cores() == cores


def test_without_a_container_the_machine_counts(container):
    assert num_cores() == 64
    assert available_memory() == 1009 * MIB


def page_faults(*, keep):
    """Return the page faults of 5 rounds of two 40 MB arrays, and whether glibc."""
    done = run_python(f"""
        import platform, resource, threading
        import numpy as np
        from core.running.machine import keep_freed_memory
        if {keep}: keep_freed_memory()
        def round():
            arrays = [np.ones(5 * 2**20) for _ in range(2)]
        round()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):  # In learner threads, which share what is kept.
            thread = threading.Thread(target=round)
            thread.start()
            thread.join({DEADLINE_S})
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        print(faults, platform.libc_ver()[0])
    """)
    assert done.returncode == 0, done.stderr
    faults, *libc = done.stdout.split()
    return int(faults), libc


def test_freed_memory_comes_back_without_page_faults():
    faults, libc = page_faults(keep=False)
    if libc != ["glibc"]:
        pytest.skip("only glibc's malloc can be told to keep memory")
    kept, _ = page_faults(keep=True)
    # Without it each page faults each round: 4 KB pages, or 2 MB ones (40 per round).
    assert faults >= 5 * 40
    assert kept < faults / 10
