# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: written so that one good one always exists, read without trust.

    checkpoints/
        step-000000123456/
            model.safetensors       one file per group of tensors
            optimizer.safetensors
            state.json              everything that is not a tensor
            manifest.json           step, and size and sha256 of each file above
        step-000000123456.old/      only for a moment, while its step is saved again
        .tmp-<pid>-<random>/        being written or deleted; `sweep` removes leftovers

A checkpoint is written under a temporary name, synced, read back, and renamed: a
process killed at any moment, or a full disk, costs the new checkpoint and no old one.
Reading checks every byte against the manifest, and the manifest against its folder.
Nothing here pickles or unpickles, so a checkpoint from a stranger can be wrong, but it
cannot run code.
"""

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import psutil
import safetensors.torch
import torch

FORMAT = "torchbeast-checkpoint"
VERSION = 1  # Goes up whenever an older program would misread what is written.

_NAME = re.compile(r"step-(\d{12})(\.old)?", re.ASCII)
_GROUP = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_TEMPORARY = re.compile(r"\.tmp-(\d{1,9})-.*", re.ASCII)
_MAX_MANIFEST_BYTES = 2**20  # A real one has some hundred bytes.
_MAX_DIFFERENCES = 8  # Named in one message; the rest is counted.
_MAX_REASON = 500  # Characters. Damaged files put strange things into messages.


class CheckpointError(Exception):
    """A checkpoint could not be written, or none of those there is good."""


class CheckpointMismatch(CheckpointError):
    """A good checkpoint, but of another model or optimizer."""


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint as `load` found it."""

    path: Path
    step: int
    tensors: dict[str, dict[str, torch.Tensor]]  # On the CPU; group, then name.
    state: dict[str, Any]
    # One line (path, reason) for each newer one that is not good.
    rejected: list[str] = dataclasses.field(default_factory=list)


# --------------------------------------------------------------------------- writing


def save(
    directory: Path,
    *,
    step: int,
    tensors: dict[str, dict[str, torch.Tensor]],
    state: dict[str, Any],
    keep: int = 3,
) -> Path:
    """Write one checkpoint, then delete all but the last `keep` good ones.

    At every moment in between, `load` finds a good one, also when this step has been
    saved before and is being replaced. One process at a time may save to a directory;
    others may load.

    Args:
      directory: holds a run's checkpoints; created if missing.
      tensors: groups of named tensors. Any device and strides; no other process or
        thread may change them meanwhile. Storage shared by two names is written twice.
      state: what JSON can hold: string keys, lists instead of tuples.

    Returns:
      The path of the new checkpoint.

    Raises:
      ValueError: a tensor of the group "model" is not finite: training cannot go on
        from it. Or an argument is out of range.
      CheckpointError: disk full, read-only, or the like. The old checkpoints are as
        they were and nothing temporary is left.
    """
    if not 0 <= step < 10**12:
        raise ValueError(f"step is {step}; expected 0 <= step < 10**12")
    if keep < 1:
        raise ValueError(f"keep is {keep}; expected at least 1")
    for name, tensor in tensors.get("model", {}).items():
        if not torch.isfinite(tensor).all():
            raise ValueError(
                f"model tensor {name} is not finite at step {step}; not saved"
            )
    files = {"state.json": json.dumps(state).encode()}
    for group, named in tensors.items():
        if not _GROUP.fullmatch(group):
            raise ValueError(f"group of tensors {group!r} is not {_GROUP.pattern}")
        files[f"{group}.safetensors"] = safetensors.torch.save(
            {
                name: tensor.detach().to("cpu", copy=True).contiguous()
                for name, tensor in named.items()
            }
        )
    path = directory / f"step-{step:012d}"
    temporary = _temporary(directory)
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            _sync_dir(directory.parent)
        temporary.mkdir()
        for name, data in files.items():
            _write(temporary / name, data)
        records = {name: _record(data) for name, data in files.items()}
        _write(temporary / "manifest.json", _manifest(step, records))
        _sync_dir(temporary)
        _read(temporary, step)  # What `load` would not take may not replace anything.
        _move(temporary, path)
        _sync_dir(directory)
        _delete_old(directory, path, keep)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"saving {path} failed: {error}") from error
    finally:
        _remove(temporary)
    return path


def sweep(directory: Path) -> None:
    """Remove what dead processes left half written or half deleted.

    Call it when a run starts, before it saves: what bears our own process id then comes
    from an earlier process with the same one, as in a container started again.
    """
    for path in directory.glob(".tmp-*"):
        match = _TEMPORARY.fullmatch(path.name)
        if match is None:
            continue
        pid = int(match[1])
        if pid == os.getpid() or not psutil.pid_exists(pid):
            _remove(path)


def _temporary(directory: Path) -> Path:
    return directory / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"


def _record(data: bytes) -> dict[str, Any]:
    """Return what the manifest says about a file."""
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _manifest(step: int, records: dict[str, dict[str, Any]]) -> bytes:
    """Return the one manifest that fits these files.

    Every byte of it follows from the folder, so a change anywhere shows.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "files": {name: records[name] for name in sorted(records)},
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_dir(path: Path) -> None:
    """Make names in a folder survive a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot sync folders. They sync renames themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _move(temporary: Path, path: Path) -> None:
    """Give a complete checkpoint its name, which may be taken.

    POSIX cannot replace a folder that is not empty in one step. Between the two renames
    the old one is there as `.old`, which `load` reads too.
    """
    if os.path.lexists(path):
        if _is_good(path):
            old = path.with_name(f"{path.name}.old")
            _discard(old)
            path.rename(old)
        else:
            _discard(path)
    temporary.rename(path)


def _delete_old(directory: Path, newest: Path, keep: int) -> None:
    """Delete what is older than the last `keep` good ones, the newest included.

    Damaged ones among the kept ones stay until they are older than those. So does
    anything with a higher step: `load` passed it over and said so.
    """
    good: set[str] = set()  # Names without `.old`.
    for name in _names(directory):
        step_name = name.removesuffix(".old")
        if not _NAME.fullmatch(name) or step_name > newest.name:
            continue
        if step_name in good or len(good) == keep:
            _discard(directory / name)
        elif name == newest.name or _is_good(directory / name):
            good.add(step_name)


def _discard(path: Path) -> None:
    """Delete a checkpoint; half deleted, it must not look like a damaged one."""
    if not os.path.lexists(path):
        return
    temporary = _temporary(path.parent)
    path.rename(temporary)
    _remove(temporary)


def _remove(path: Path) -> None:
    """Remove something temporary; what cannot be removed now is left to `sweep`."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


# --------------------------------------------------------------------------- reading


def load(directory: Path) -> Checkpoint | None:
    """Return the newest good checkpoint, or None if there is not a single one.

    Those that were passed over (truncated, changed, incomplete, of another format) are
    named in `rejected`. The tensors own their memory and may be written to.

    Raises:
      CheckpointError: there are checkpoints but none is good. Starting from scratch in
        their place would be a silent loss.
    """
    while True:
        names = _names(directory)
        rejected: list[str] = []
        for name in names:
            path = directory / name
            try:
                found = _read_named(path)
            except CheckpointError as error:
                rejected.append(one_line(f"{path}: {error}"))
            else:
                break
        if rejected and _names(directory) != names:
            continue  # The trainer saved and deleted while this process was reading.
        if not names:
            return None
        if len(rejected) == len(names):
            raise CheckpointError(
                "\n  ".join([f"no checkpoint in {directory} is good:", *rejected])
                + "\nBring one back from a backup, or move the folder away to start "
                "from scratch."
            )
        found.rejected = rejected
        return found


def load_from(path: Path) -> Checkpoint | None:
    """Return the checkpoint at `path`, or the newest good one of the run there.

    Raises:
      CheckpointError: what is there is not good.
    """
    if not (path / "manifest.json").exists():
        return load(path / "checkpoints") or load(path)
    try:
        return _read_named(path)
    except CheckpointError as error:
        raise CheckpointError(one_line(f"{path}: {error}")) from error


def _names(directory: Path) -> dict[str, int]:
    """Return the names of checkpoints, good or not, newest first, and their inodes."""
    try:
        with os.scandir(directory) as entries:
            found = {e.name: e.inode() for e in entries if e.name.startswith("step-")}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"cannot read {directory}: {error}") from error

    def age(name: str) -> tuple[str, bool]:
        return name.removesuffix(".old"), not name.endswith(".old")

    return {name: found[name] for name in sorted(found, key=age, reverse=True)}


def _is_good(path: Path) -> bool:
    try:
        _read_named(path)
    except CheckpointError:
        return False
    return True


def _read_named(path: Path) -> Checkpoint:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError("its name is not step-<12 digits>")
    return _read(path, int(match[1]))


def _read(path: Path, step: int) -> Checkpoint:
    """Read the checkpoint of a step and check all of it.

    Raises:
      CheckpointError: something is wrong with it; the message is the reason alone.
    """
    try:
        return _read_verified(path, step, _read_manifest(path, step))
    except CheckpointError:
        raise
    except Exception as error:
        # Parsers meet damaged and hostile bytes here. However one of them gives up
        # (also RecursionError, MemoryError), this checkpoint is not good.
        raise CheckpointError(f"{type(error).__name__}: {error}") from error


def _read_manifest(path: Path, step: int) -> bytes:
    """Return the manifest, having checked names, kinds and sizes against the folder."""
    if path.is_symlink():
        raise CheckpointError("is a symbolic link")
    sizes = {}
    with os.scandir(path) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                raise CheckpointError(f"{entry.name!r} is not a regular file")
            sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    size = sizes.pop("manifest.json", None)
    if size is None:
        raise CheckpointError("manifest.json is missing")
    if size > _MAX_MANIFEST_BYTES:
        raise CheckpointError(f"manifest.json has {size} bytes")
    raw = (path / "manifest.json").read_bytes()
    manifest = json.loads(raw)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError("manifest.json does not describe a checkpoint")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"has format version {manifest.get('version')!r}; this program reads "
            f"version {VERSION}"
        )
    if manifest["step"] != step:
        raise CheckpointError(f"manifest.json is of step {manifest['step']!r}")
    # Names are compared with those in the folder and never used to open anything, so
    # "../x" is a missing file.
    differences = [f"{name!r} is missing" for name in manifest["files"].keys() - sizes]
    for name in sizes:
        if name not in manifest["files"]:
            differences.append(f"{name!r} does not belong to it")
        elif (expected := manifest["files"][name]["size"]) != sizes[name]:
            differences.append(
                f"{name!r} has {sizes[name]} bytes instead of {expected!r}"
            )
    if differences:
        raise CheckpointError(_join(differences))
    return raw


def _read_verified(path: Path, step: int, manifest: bytes) -> Checkpoint:
    """Read each file once, compare it with the manifest, and parse those same bytes."""
    expected = json.loads(manifest)["files"]
    state: Any = None
    tensors = {}
    records = {}
    for name in expected:
        data = (path / name).read_bytes()
        records[name] = _record(data)
        if records[name] != expected[name]:
            raise CheckpointError(f"{name!r} has another sha256 than when written")
        group, dot, kind = name.partition(".")
        if name == "state.json":
            state = json.loads(data)
        elif _GROUP.fullmatch(group) and kind == "safetensors":
            tensors[group] = safetensors.torch.load(data)
        else:
            raise CheckpointError(f"{name!r} does not belong into a checkpoint")
    if manifest != _manifest(step, records):
        raise CheckpointError("manifest.json is not as it was written")
    if not isinstance(state, dict):
        raise CheckpointError("state.json is missing or not an object")
    return Checkpoint(path, step, tensors, state)


def one_line(text: str) -> str:
    """Return text that is safe in a log and a terminal."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + " ..."


def _join(differences: list[str]) -> str:
    shown = differences[:_MAX_DIFFERENCES]
    if len(differences) > len(shown):
        shown.append(f"and {len(differences) - len(shown)} more")
    return "; ".join(shown)


# ------------------------------------------------------- tensors and optimizer states


def check_tensors(
    expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor], *, what: str
) -> None:
    """Check that tensors from a file have the names, shapes and dtypes of a model's.

    Raises:
      CheckpointMismatch: they have not. The message is one line that names each
        difference, such as "model: policy.weight: file [6,512], model [18,512]".
    """
    differences = []
    for name in expected.keys() & got.keys():
        file, ours = got[name], expected[name]
        if file.shape != ours.shape or file.dtype != ours.dtype:
            with_dtype = file.dtype != ours.dtype
            differences.append(
                f"{name}: file {_describe(file, with_dtype)}, "
                f"{what} {_describe(ours, with_dtype)}"
            )
    differences.sort()
    differences += [f"missing {name}" for name in sorted(expected.keys() - got.keys())]
    differences += [f"unknown {name}" for name in sorted(got.keys() - expected.keys())]
    if differences:
        raise CheckpointMismatch(one_line(f"{what}: {_join(differences)}"))


def _describe(tensor: torch.Tensor, with_dtype: bool) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.") if with_dtype else ""
    return f"{dtype}[{','.join(map(str, tensor.shape))}]"


def optimizer_state(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return any torch optimizer's state as flat named tensors and JSON.

    What `optimizer.state_dict()` holds, without pickle and with parameters by name.
    Options that are functions stay out. Tensors are called `<parameter>/<key>`, and
    are the optimizer's own, not copies.

    Raises:
      ValueError: the optimizer has parameters that are not the model's, or state that
        neither tensors nor JSON can express.
    """
    tensors: dict[str, torch.Tensor] = {}

    def encode(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[name] = value.detach()
            return {"tensor": name}
        if isinstance(value, tuple):  # Adam's betas. JSON has only lists.
            return {"tuple": encode(name, list(value))}
        if isinstance(value, list):
            return [encode(f"{name}/{i}", item) for i, item in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise ValueError(
            f"optimizer state {name} is a {type(value).__name__}; a checkpoint can "
            "hold tensors, numbers, strings, None, and lists or tuples of these"
        )

    groups, state = [], {}
    parameters = dict(model.named_parameters())
    for i, (group, names) in enumerate(
        zip(optimizer.param_groups, _parameter_names(optimizer, model))
    ):
        options = {
            key: encode(f"group {i}/{key}", value)
            for key, value in group.items()
            if key != "params" and not callable(value)
        }
        groups.append({"params": names, "options": options})
        for name in names:
            if parameters[name] in optimizer.state:
                state[name] = {
                    key: encode(f"{name}/{key}", value)
                    for key, value in optimizer.state[parameters[name]].items()
                }
    return tensors, {
        "class": type(optimizer).__name__,
        "groups": groups,
        "state": state,
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    tensors: dict[str, torch.Tensor],
    state: dict[str, Any],
) -> None:
    """Bring back what `optimizer_state` returned; further updates are bit-equal.

    `tensors` are copied. The optimizer keeps options that the file does not have.

    Raises:
      CheckpointMismatch: the state is of another kind of optimizer or of other
        parameters.
    """
    if state["class"] != type(optimizer).__name__:
        raise CheckpointMismatch(
            f"optimizer: file {state['class']}, this run {type(optimizer).__name__}"
        )
    ours = _parameter_names(optimizer, model)
    theirs = [group["params"] for group in state["groups"]]
    if ours != theirs:
        raise CheckpointMismatch(one_line(_group_differences(ours, theirs)))

    def decode(value: Any) -> Any:
        match value:
            case {"tensor": name}:
                if name not in tensors:
                    raise CheckpointMismatch(f"optimizer: missing {name}")
                return tensors[name].clone()
            case {"tuple": items}:
                return tuple(decode(items))
            case list():
                return [decode(item) for item in value]
        return value

    # torch numbers the parameters through all groups.
    index = {name: i for i, name in enumerate(itertools.chain(*ours))}
    optimizer.load_state_dict(
        {
            "state": {
                index[name]: {key: decode(value) for key, value in entries.items()}
                for name, entries in state["state"].items()
            },
            "param_groups": [
                {
                    **group,
                    **{k: decode(value) for k, value in saved["options"].items()},
                    "params": [index[name] for name in names],
                }
                for group, saved, names in zip(
                    optimizer.param_groups, state["groups"], ours
                )
            ],
        }
    )


def _parameter_names(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> list[list[str]]:
    """Return the model's names of the optimizer's parameters, a list per group."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    strangers = sum(id(p) not in name_of for params in groups for p in params)
    if strangers:
        raise ValueError(
            f"{strangers} of the optimizer's parameters are not among the model's"
        )
    return [[name_of[id(p)] for p in params] for params in groups]


def _group_differences(ours: list[list[str]], theirs: list[list[str]]) -> str:
    our_names, their_names = set(itertools.chain(*ours)), set(itertools.chain(*theirs))
    differences = [f"missing {name}" for name in sorted(our_names - their_names)]
    differences += [f"unknown {name}" for name in sorted(their_names - our_names)]
    if not differences:
        differences = ["the same parameters in other groups, or in another order"]
    return f"optimizer: {_join(differences)}"
