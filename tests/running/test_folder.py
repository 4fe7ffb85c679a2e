# SPDX-License-Identifier: Apache-2.0
"""A run's folder: meta.json, its lock, the link `latest`."""

import errno
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.errors import ConfigError
from core.running import folder as folder_module
from core.running import log_setup, logs
from core.running.folder import (
    RunDirBusy,
    link_latest,
    prepare_run_dir,
    read_meta,
    write_meta,
)
from tests.conftest import DEADLINE_S, Forked
from tests.running.conftest import event_steps, read_rows, steps_of, write_rows


def test_meta_says_what_ran_where_from_which_code(tmp_path):
    flags = {"env": "Catch", "info_keys": ("a", "b"), "savedir": Path("x"), "seed": 3}
    write_meta(tmp_path, flags=flags, extra={"step": 0, "first_env_seeds": [7]})
    meta = read_meta(tmp_path)
    assert meta["flags"] == {
        "env": "Catch",
        "info_keys": ["a", "b"],
        "savedir": "x",
        "seed": 3,
    }
    assert meta["first_env_seeds"] == [7]
    assert torch.__version__.startswith(meta["versions"]["torch"])  # Maybe +cu130.
    assert meta["versions"]["python"] == sys.version.split()[0]
    assert {"gymnasium", "ale-py", "numpy", "grpcio"} < meta["versions"].keys()
    assert meta["cpu_count"] == os.cpu_count()
    assert meta["command"][1:] == sys.orig_argv[1:]
    assert meta["command"][0] == Path(sys.orig_argv[0]).name
    assert {"host", "platform", "commit", "dirty"} < meta.keys()


def test_a_package_without_metadata_does_not_stop_a_run(tmp_path, monkeypatch):
    """An interrupted `pip uninstall` leaves such folders."""
    (tmp_path / "gone-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    write_meta(tmp_path, flags={}, extra={})
    assert read_meta(tmp_path)["versions"]["torch"]


def test_meta_lists_every_start(tmp_path):
    write_meta(tmp_path, flags={"seed": 1}, extra={"step": 0})
    write_meta(tmp_path, flags={"seed": 2}, extra={"step": 500})
    meta = read_meta(tmp_path)
    assert [start["step"] for start in meta["starts"]] == [0, 500]
    assert all(start["time"].endswith("+00:00") for start in meta["starts"])
    assert meta["flags"] == {"seed": 2}


def test_nothing_of_the_environment_is_in_any_file(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "planted-3f9a")
    run_dir = prepare_run_dir(tmp_path, "run")
    with log_setup.setup_logging(run_dir):
        write_meta(run_dir, flags={"seed": 1}, extra={"step": 0})
        write_rows(run_dir, [1, 2])
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert len(files) >= 6
    for path in files:
        assert b"planted-3f9a" not in path.read_bytes(), path
        assert b"WANDB_API_KEY" not in path.read_bytes(), path


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Run git in a new checkout that core/running/folder.py seems to lie in."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # Tests may run in a hook of git.
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "folder.py").write_text("1")
    monkeypatch.setattr(folder_module, "__file__", str(folder / "folder.py"))

    def run(*args):
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        return subprocess.run(
            ["git", *who, *args],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        ).stdout.strip()

    run("init", "-q")
    return run


def test_meta_names_the_commit_and_whether_files_differ_from_it(git, tmp_path):
    git("add", ".")
    git("commit", "-q", "-m", "x")
    (tmp_path / "checkout" / "logs").write_text("untracked")
    for dirty in (False, True):
        write_meta(tmp_path, flags={}, extra={})
        meta = read_meta(tmp_path)
        assert meta["commit"] == git("rev-parse", "HEAD")
        assert meta["dirty"] is dirty
        (tmp_path / "checkout" / "folder.py").write_text("2")


def test_the_commit_of_a_checkout_around_an_installed_copy_is_not_ours(git, tmp_path):
    (tmp_path / "checkout" / "theirs.py").write_text("1")
    git("add", "theirs.py")
    git("commit", "-q", "-m", "x")
    write_meta(tmp_path, flags={}, extra={})
    assert read_meta(tmp_path)["commit"] is None


def test_without_git_there_is_no_commit_but_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    write_meta(tmp_path, flags={}, extra={})
    assert read_meta(tmp_path)["commit"] is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"flags": {}}'])
def test_a_meta_file_that_is_missing_or_damaged_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "meta.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "meta.json"))):
        read_meta(tmp_path)


def test_latest_points_to_the_run_linked_last(tmp_path):
    for xpid in ("one", "two", "two", "one"):
        run_dir = prepare_run_dir(tmp_path / "runs", xpid)
        assert run_dir.is_dir()
        link_latest(run_dir)
        assert os.readlink(tmp_path / "runs" / "latest") == xpid
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    assert names == {"one", "two", "latest", ".locks"}


def test_a_savedir_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    bad = ("file", "file/below", "loop", "loop/below", "x" * 300)
    for savedir in (tmp_path / name for name in bad):
        said = f"--savedir is {savedir}, where the folder one cannot be created"
        with pytest.raises(ConfigError, match=said):
            prepare_run_dir(savedir, "one")


def test_a_run_whose_disk_is_not_mounted_does_not_begin_anew(tmp_path):
    (tmp_path / "one").symlink_to(tmp_path / "mnt" / "one")
    with pytest.raises(ConfigError, match="one is a link to .*mnt/one, which does not"):
        prepare_run_dir(tmp_path, "one")
    assert not (tmp_path / "mnt").exists()


def test_a_run_of_another_user_is_refused_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "one").mkdir()

    def open_nothing(path, *args):  # Root may open every file.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", open_nothing)
    with pytest.raises(ConfigError, match="folder one cannot be .* written to.*lock"):
        prepare_run_dir(tmp_path, "one")


def test_the_run_named_latest_is_the_latest_run(tmp_path):
    run_dir = prepare_run_dir(tmp_path, "one")
    link_latest(run_dir)
    assert prepare_run_dir(tmp_path, "latest") == run_dir
    assert os.readlink(tmp_path / "latest") == "one"


def test_a_folder_in_the_place_of_latest_is_left_alone(tmp_path, caplog):
    (tmp_path / "latest").mkdir()
    link_latest(prepare_run_dir(tmp_path, "one"))
    assert not (tmp_path / "latest").is_symlink()
    assert "latest" in caplog.text
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"one", "latest", ".locks"}


def test_what_a_killed_process_was_writing_is_removed_at_the_next_start(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    nobody = 999_999_999  # Above the largest process id that Linux gives.
    (run_dir / f".meta.json.tmp-{nobody}").write_text("{")
    (run_dir / f".latest.tmp-{nobody}").symlink_to("run")
    prepare_run_dir(tmp_path, "run")
    assert {path.name for path in run_dir.iterdir()} == {".lock"}
    assert {path.name for path in tmp_path.iterdir()} == {"run", ".locks"}


def own(savedir):
    """Have a child that outlives this process, as an actor may for a moment."""
    prepare_run_dir(savedir, "run")
    if (child := os.fork()) == 0:
        signal.pause()
    print(child)
    signal.pause()


@pytest.fixture
def owner(_context, tmp_path):
    """A process that holds the lock of tmp_path/run."""
    with Forked(_context, tmp_path / "owner.txt", own, tmp_path) as process:
        process.wait_for_text("\n")
        yield process
        os.kill(int(process.text()), signal.SIGKILL)


def test_a_run_directory_in_use_is_refused_with_the_pid(tmp_path, owner):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunDirBusy, match=rf"process {owner.pid} on .*--xpid"):
        prepare_run_dir(tmp_path, "run")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_lock_ends_with_its_owner_even_if_killed(tmp_path, owner):
    owner.kill()
    run_dir = prepare_run_dir(tmp_path, "run")  # The forked child still lives.
    assert (run_dir / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_deleted_folder_is_made_anew_and_stays_locked(tmp_path, run_forked):
    def start_another() -> str:
        return run_forked(prepare_run_dir, tmp_path, "run")[1]

    run_dir = prepare_run_dir(tmp_path, "run")
    with log_setup.setup_logging(run_dir):
        write_meta(run_dir, flags={"seed": 7}, extra={"step": 0})
        meta = read_meta(run_dir)
        with logs.RunLog(run_dir) as run_log:
            run_log.log({"step": 100, "sps": 1})
            shutil.rmtree(run_dir)
            assert "RunDirBusy" in start_another() and not run_dir.exists()
            run_log.log({"step": 200, "sps": 2})
            assert "RunDirBusy" in start_another()
            os.remove(run_dir / "out.log")  # This one alone.
            run_log.log({"step": 300, "sps": 3})
            logging.warning("the latest")
    assert read_meta(run_dir) == meta
    assert steps_of(run_dir) == [200, 300]
    assert read_rows(run_dir / "fields.csv")
    said = (run_dir / "out.log").read_text()
    assert f"created again without the old contents: {run_dir}/out.log." in said
    assert "the latest" in said
    assert event_steps(run_dir) == [200, 300]


def test_the_same_process_may_prepare_its_run_again(tmp_path, run_forked):
    prepare_run_dir(tmp_path, "run")
    assert prepare_run_dir(tmp_path, "run").name == "run"
    assert "RunDirBusy" in run_forked(prepare_run_dir, tmp_path, "run")[1]


def test_a_copy_of_a_runs_folder_is_another_run(tmp_path):
    (tmp_path / "x").mkdir()
    run_id = folder_module.run_id({}, tmp_path / "x")
    recorded = {"run_id": run_id}
    assert folder_module.run_id(recorded, tmp_path / "x") == run_id
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    (tmp_path / "x").rename(tmp_path / "z")
    assert folder_module.run_id(recorded, tmp_path / "z") == run_id
    copied = folder_module.run_id(recorded, tmp_path / "y")
    assert copied != run_id
    assert folder_module.run_id({"run_id": copied}, tmp_path / "y") == copied
