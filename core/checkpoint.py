# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: written so that one good one always exists, read without trust.

    checkpoints/
        step-000000123456.safetensors       the last `keep` of them
        step-000000123456.safetensors.old   only for a moment, while its step is saved
                                            again

A checkpoint is a safetensors file, which any safetensors reader opens: tensors named
`<group>/<name>`, and as metadata the step, everything that is not a tensor as JSON, and
the sha256 of all the file, its own 64 digits taken as zeros.

It is written without a name (O_TMPFILE), synced, read back, and only then linked: a
process killed at any moment, or a full disk, costs the new checkpoint and no old one,
and nothing half written is left. Where files cannot be without a name (macOS, network
file systems) it is called `.tmp-<pid>-<random>` until it is renamed; `sweep` removes
leftovers.

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
import stat
from pathlib import Path
from typing import Any

import psutil
import safetensors.torch
import torch

FORMAT = "torchbeast-checkpoint"
VERSION = 2  # Goes up whenever an older program would misread what is written.

_NAME = re.compile(r"step-(\d{12})\.safetensors(\.old)?", re.ASCII)
_GROUP = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_TEMPORARY = re.compile(r"\.tmp-(\d{1,9})-.*", re.ASCII)
# In a header. What quotes it, as in a tensor's name, has backslashes there.
_SHA256 = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_LENGTH_BYTES = 8  # Of the header's length, with which a safetensors file begins.
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
    data = _encode(step, tensors, state)
    path = directory / f"step-{step:012d}.safetensors"
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            _sync_dir(directory.parent)
        _write(path, data, step)
        _sync_dir(directory)
        _delete_old(directory, path, keep)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"saving {path} failed: {error}") from error
    return path


def sweep(directory: Path) -> None:
    """Remove what dead processes left half written.

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


def _encode(
    step: int, tensors: dict[str, dict[str, torch.Tensor]], state: dict[str, Any]
) -> bytes:
    """Return a checkpoint's bytes."""
    flat = {}
    for group, named in tensors.items():
        if not _GROUP.fullmatch(group):
            raise ValueError(f"group of tensors {group!r} is not {_GROUP.pattern}")
        for name, tensor in named.items():
            flat[f"{group}/{name}"] = tensor.detach().to("cpu", copy=True).contiguous()
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "step": str(step),
        "groups": " ".join(tensors),  # Some may be empty.
        "state": json.dumps(state),
        "sha256": "0" * 64,
    }
    return _seal(safetensors.torch.save(flat, metadata))


def _seal(data: bytes) -> bytes:
    """Return a checkpoint's bytes with the sha256 that they should have."""
    start, end = _find_digest(data)
    return data[:start] + _digest(data, start, end) + data[end:]


def _digest(data: bytes, start: int, end: int) -> bytes:
    """Return the sha256 of data, in hex, with [start:end] taken as zeros."""
    view = memoryview(data)
    digest = hashlib.sha256(view[:start])
    digest.update(b"0" * (end - start))
    digest.update(view[end:])
    return digest.hexdigest().encode()


def _write(path: Path, data: bytes, step: int) -> None:
    """Write a file that has its name only once it is complete, synced and read back."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{secrets.token_hex(4)}")
    fd = _open_unnamed(path.parent)
    is_named = fd is None
    if fd is None:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(fd, "w+b") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
            file.seek(0)
            # What `load` would not take may not replace anything.
            _parse(file.read(), step)
            _make_room(path)
            if is_named:
                temporary.rename(path)
            else:
                # With any src_dir_fd Python calls linkat, which can follow that link.
                os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd)
    finally:
        if is_named:
            _remove(temporary)  # If it still has that name.


def _open_unnamed(directory: Path) -> int | None:
    """Open a new file that has no name yet; None if that cannot be done there."""
    if not hasattr(os, "O_TMPFILE") or not Path("/proc/self/fd").exists():
        return None
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE, 0o666)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EISDIR, errno.EINVAL):
            return None
        raise


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


def _make_room(path: Path) -> None:
    """Free the name of a checkpoint, which is taken if its step has been saved before.

    A good one stays as `.old`, which `load` reads too.
    """
    if _is_good(path):
        path.rename(f"{path}.old")
    else:
        _remove(path)


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
            _remove(directory / name)
        elif name == newest.name or _is_good(directory / name):
            good.add(step_name)


def _remove(path: Path) -> None:
    """Remove what is not needed any more, if it can be removed and is there at all."""
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

    A file may have any name.

    Raises:
      CheckpointError: what is there is not good.
    """
    if not path.is_file():
        return load(path / "checkpoints") or load(path)
    try:
        return _read(path)
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
        raise CheckpointError("its name is not step-<12 digits>.safetensors")
    return _read(path, int(match[1]))


def _read(path: Path, step: int | None = None) -> Checkpoint:
    """Read a checkpoint, of any step unless one is given, and check all of it.

    Raises:
      CheckpointError: something is wrong with it; the message is the reason alone.
    """
    try:
        # Opening a pipe would wait for ever without O_NONBLOCK.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CheckpointError("is not a regular file")
            found = _parse(file.read(), step)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError("is a symbolic link") from error
        raise CheckpointError(f"cannot be read: {error.strerror}") from error
    return dataclasses.replace(found, path=path)


def _parse(data: bytes, step: int | None) -> Checkpoint:
    """Return the checkpoint in a file's bytes, having compared them with its sha256.

    Raises:
      CheckpointError: it is damaged, or of another format, version or step.
    """
    start, end = _find_digest(data)
    if _digest(data, start, end) != data[start:end]:
        raise CheckpointError("has another sha256 than when it was written")
    try:
        return _parse_verified(data, step)
    except CheckpointError:
        raise
    except Exception as error:
        # Parsers meet a stranger's bytes here, with the right sha256. However one of
        # them gives up (also RecursionError, MemoryError), this checkpoint is not good.
        raise CheckpointError(f"{type(error).__name__}: {error}") from error


def _find_digest(data: bytes) -> tuple[int, int]:
    """Return where the 64 digits of the sha256 are in a checkpoint's bytes."""
    header_end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if header_end > len(data):
        raise CheckpointError(f"is truncated, or no checkpoint: {len(data)} bytes")
    match = _SHA256.search(data, _LENGTH_BYTES, header_end)
    if match is None:
        raise CheckpointError("is no checkpoint: its header has no sha256")
    return match.span(1)


def _parse_verified(data: bytes, step: int | None) -> Checkpoint:
    header_end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    metadata = json.loads(data[_LENGTH_BYTES:header_end])["__metadata__"]
    if metadata["format"] != FORMAT:
        raise CheckpointError(f"has format {metadata['format']!r}, not {FORMAT}")
    if metadata["version"] != str(VERSION):
        raise CheckpointError(
            f"has format version {metadata['version']!r}; this program reads version "
            f"{VERSION}"
        )
    if step is not None and metadata["step"] != str(step):
        raise CheckpointError(f"is of step {metadata['step']}")
    state = json.loads(metadata["state"])
    if not isinstance(state, dict):
        raise CheckpointError("its state is not an object")
    tensors: dict[str, dict[str, torch.Tensor]]
    tensors = {group: {} for group in metadata["groups"].split()}
    for name, tensor in safetensors.torch.load(data).items():
        group, _, name = name.partition("/")
        tensors[group][name] = tensor
    return Checkpoint(Path(), int(metadata["step"]), tensors, state)


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


def weights_for(model: torch.nn.Module, found: Checkpoint) -> dict[str, torch.Tensor]:
    """Return a checkpoint's weights, having checked that they are a model's.

    What is float32 in the model may be float16 in the file (`tools.publish`).

    Raises:
      CheckpointMismatch: they have other names, shapes or dtypes.
    """
    expected = model.state_dict()
    got = dict(found.tensors.get("model", {}))
    for name in got.keys() & expected.keys():
        if (got[name].dtype, expected[name].dtype) == (torch.float16, torch.float32):
            got[name] = got[name].float()
    check_tensors(expected, got, what="model")
    return got


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
) -> list[str]:
    """Bring back what `optimizer_state` returned; further updates are bit-equal.

    `tensors` are copied. The options of the groups (learning rate, momentum, ...) stay
    those of this program.

    Returns:
      One line for each option that differs from the file's. Not for `lr`, which
      changes with each update.

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
                {**group, "params": [index[name] for name in names]}
                for group, names in zip(optimizer.param_groups, ours)
            ],
        }
    )
    if isinstance(optimizer, torch.optim.RMSprop):
        for group in optimizer.param_groups:
            for entries in map(optimizer.state.get, group["params"]):
                if group["momentum"] and entries:  # The file's momentum may be 0.
                    zeros = torch.zeros_like(entries["square_avg"])
                    entries.setdefault("momentum_buffer", zeros)
    return [
        f"group {i}: {key} was {old} and is now {group[key]}"
        for i, (group, saved) in enumerate(zip(optimizer.param_groups, state["groups"]))
        for key, old in {k: decode(v) for k, v in saved["options"].items()}.items()
        if key in group and key != "lr" and group[key] != old
    ]


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
