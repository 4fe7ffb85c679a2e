# SPDX-License-Identifier: Apache-2.0
"""The resources of the machine: cores, memory, open files, priorities. No torch."""

import contextlib
import ctypes
import math
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from core import ranks
from core.errors import ConfigError

OPEN_FILES = 65536  # The limit to set, since many streams may connect to a server.
CGROUP = Path("/sys/fs/cgroup")  # In a container with cgroup v2: the container's own.


def tmpfs_folder() -> str | None:
    """Return a folder in memory, for use with a full disk; None if there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def be_killed_first_for_memory() -> None:
    """If memory runs out, make Linux kill this process before the learner.

    If an environment process dies, it is replaced, but if the learner dies, the run
    ends. The score 1000, the highest, makes Linux count this process as if it used all
    memory in addition to its own. A lower score does not suffice, because the learner
    may use most of the memory. Child processes inherit the score.
    """
    with contextlib.suppress(OSError):  # Not Linux, or forbidden.
        Path("/proc/self/oom_score_adj").write_text("1000")


def available_memory() -> int:
    """Return the free memory in bytes, at most what the container may still use."""
    import psutil  # Imported here: environment servers do not need psutil.

    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError, KeyError):  # No cgroup v2, or limit.
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        stat = {key: int(value) for key, value in map(str.split, lines)}
        # Cached files count as used, but the kernel drops them when memory is needed.
        available = min(available, limit - used + stat["file"] - stat["shmem"])
    return available


def check_resources(
    *,
    shared_bytes: int,
    memory_folder: str | None,
    files: int,
    processes: int,
    replay_share: float = 0,
) -> Iterator[str]:
    """Compare the needs of a run with the machine; yield a log line per resource.

    Args:
      shared_bytes: shared memory that the run will allocate.
      memory_folder: the folder of the shared memory; None for plain memory (memfd).
      files: number of file descriptors that the parent will hold open. The soft limit
        is raised as `raise_file_limit` says.
      processes: number of processes and threads that are busy most of the time.
      replay_share: the share of the shared memory that is for --replay_capacity.

    Raises:
      ConfigError: the machine has too little; the message shows both numbers and says
        what to change.
    """
    mib = 2**20
    if memory_folder is None:
        have, where = available_memory(), "memory (memfd: /dev/shm is not needed)"
        remedy = "--num_buffers, --envs_per_actor or --unroll_length"
    else:
        have, where = shutil.disk_usage(memory_folder).free, memory_folder
        remedy = f"--num_buffers or --envs_per_actor, or enlarge {memory_folder}"
    need = f"{shared_bytes / mib:,.1f} MiB"
    if replay_share:
        remedy = f"--replay_capacity, {remedy}"
        need += f" ({shared_bytes * replay_share / mib:,.1f} of them for the replay)"
    line = f"shared memory: need {need}, have {have / mib:,.1f} MiB of {where}"
    if shared_bytes > have:
        raise ConfigError(f"{line}. Lower {remedy}.")
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != resource.RLIM_INFINITY and shared_bytes > largest:
        raise ConfigError(
            f"shared memory: need {shared_bytes / mib:,.1f} MiB, but no file may have "
            f"more than {largest // 1024:,} KiB (ulimit -f), and shared memory counts "
            f"as one. Raise the limit, or lower {remedy}."
        )
    yield line

    raise_file_limit()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = math.inf if soft == resource.RLIM_INFINITY else soft
    line = f"open files: need {files}, have {limit} (ulimit -n)"
    if files > limit:
        raise ConfigError(
            f"{line}. Lower --num_actors, or raise the limit (ulimit -Hn)."
        )
    yield line

    cores = num_cores()
    line = f"cores: {processes} busy processes or threads on {cores}"
    if processes > 2 * cores:
        line += "; more --envs_per_actor and fewer --num_actors would be faster"
    elif processes > cores:
        line += ", which is usual"
    yield line


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory, so that the next update reuses it.

    Each update allocates and frees the same large tensors. By default malloc returns
    blocks above 32 MB to the kernel at once. Then the page faults that get them back
    take a fifth of the time of an update on a CPU. All threads share one arena, and so
    one pool of memory. Call this before any thread starts, because a thread keeps the
    arena that it has. Without glibc this has no effect.
    """
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # malloc.h
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(m_arena_max, 1)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def lower_priority(niceness: int = 19) -> None:
    """Give this thread a lower priority than the learner's threads.

    On Linux this changes the calling thread and the threads that it starts later. On
    other systems it changes the process.

    Threads that step environments or choose actions can wait: the learner needs the
    cores only while it has a batch. But if a learner's thread is preempted, cores stay
    idle, because the other threads of the learner wait for this thread. With
    SCHED_BATCH, a thread does not preempt another one whenever a message wakes it.
    """
    os.nice(niceness)
    if hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):  # Some containers forbid it.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def num_cores() -> int:
    """Return the number of cores that this process and its container may use.

    Several learners on one machine share its cores.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # No cgroup v2, or no limit.
        quota_us, period_us = map(int, (CGROUP / "cpu.max").read_text().split())
        cores = min(cores, math.ceil(quota_us / period_us))
    return max(1, cores // ranks.local_size())


def raise_file_limit() -> None:
    """Raise the soft limit of open files to OPEN_FILES, or as far as possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
