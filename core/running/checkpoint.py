# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a good one exists at every moment, and each is checked when it is read.

    checkpoints/
        step-000000123456.safetensors       the last KEEP checkpoints
        .step-...tmp-<pid>                  a checkpoint that is being written

A checkpoint is a safetensors file, which any safetensors reader opens. Its tensors are
named `<group>/<name>`. Its metadata hold the step, the state that is not in tensors (as
JSON), and the sha256 of the whole file, computed with its own 64 digits set to zeros.

`save` writes a temporary file, syncs it, reads it back, and renames it: see
`core.running.atomic`. If the process is killed or the disk is full, the new checkpoint
is lost and all old ones stay. The next start removes the temporary file.

This module does not use pickle: a checkpoint from a stranger can have wrong contents,
but it cannot run code.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from core.nests import describe_array
from core.running.atomic import sync_folder, write_atomically

FORMAT = "torchbeast-checkpoint"
KEEP = 3
VERSION = 2  # Increase this if an older program would misread the new files.

_NAME = re.compile(r"step-(\d{12})\.safetensors", re.ASCII)
_GROUP = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
# Finds the sha256 in a header. The name of a tensor cannot match, because JSON escapes
# the quotes in it.
_SHA256 = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_LENGTH_BYTES = 8  # A safetensors file begins with its header's length: 8 bytes.
_MAX_DIFFERENCES = 8  # A message names so many differences and counts all others.
_MAX_REASON = 500  # Longest reason in a message, since it may quote a damaged file.


class CheckpointError(Exception):
    """A checkpoint could not be written, or no good checkpoint exists."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is good, but of another model or optimizer."""


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint that was read and checked."""

    path: Path
    step: int
    tensors: dict[str, dict[str, torch.Tensor]]  # On the CPU; group, then name.
    state: dict[str, Any]
    # One line (path and reason) for each newer checkpoint that is damaged.
    rejected: list[str] = dataclasses.field(default_factory=list)


def save(
    directory: Path,
    *,
    step: int,
    tensors: dict[str, dict[str, torch.Tensor]],
    state: dict[str, Any],
) -> Path:
    """Write one checkpoint, then delete all older ones except the last KEEP - 1.

    `load` finds a good checkpoint at every moment, also while a checkpoint of the same
    step is replaced. Only one process at a time may save to a directory. Other
    processes may load meanwhile.

    Args:
      directory: the folder of a run's checkpoints; created if missing.
      tensors: groups of named tensors, on any device, with any strides. No other
        process or thread may change them during the call. A tensor with two names is
        written twice.
      state: values that JSON can hold: string keys, lists instead of tuples.

    Returns:
      The path of the new checkpoint.

    Raises:
      ValueError: an argument is out of range.
      CheckpointError: the file cannot be written: disk full, read-only, or the like.
        The old checkpoints are unchanged.
    """
    if not 0 <= step < 10**12:
        raise ValueError(f"step is {step}; expected 0 <= step < 10**12")
    data = _encode(step, tensors, state)
    path = directory / f"step-{step:012d}.safetensors"
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            sync_folder(directory.parent)
        # A file that `load` would refuse must not replace a good one.
        write_atomically(path, data, check=lambda data: _parse(data, step))
        _delete_old(directory, path)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"saving {path} failed: {error}") from error
    return path


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
        "groups": " ".join(tensors),  # A group may have no tensors.
        "state": json.dumps(state),
        "sha256": "0" * 64,
    }
    return seal(safetensors.torch.save(flat, metadata))


def seal(data: bytes) -> bytes:
    """Return a checkpoint's bytes with their correct sha256 in the header."""
    start, end = _find_digest(data)
    return data[:start] + _digest(data, start, end) + data[end:]


def _digest(data: bytes, start: int, end: int) -> bytes:
    """Return the sha256 of data in hex; data[start:end] counts as zeros."""
    view = memoryview(data)
    digest = hashlib.sha256(view[:start])
    digest.update(b"0" * (end - start))
    digest.update(view[end:])
    return digest.hexdigest().encode()


def _delete_old(directory: Path, newest: Path) -> None:
    """Delete the checkpoints older than `newest`, except the last KEEP - 1.

    Checkpoints of a higher step stay. This run did not load them, because they are not
    good; a log line named the reason.
    """
    older = [n for n in _names(directory) if _NAME.fullmatch(n) and n < newest.name]
    for name in older[KEEP - 1 :]:
        with contextlib.suppress(OSError):  # The next save tries again.
            (directory / name).unlink()


def load(directory: Path) -> Checkpoint | None:
    """Return the newest good checkpoint, or None if there is no checkpoint at all.

    `rejected` names the newer checkpoints that are not good: truncated, changed,
    incomplete, or of another format. The tensors own their memory, so the caller may
    write to them.

    Raises:
      CheckpointError: there are checkpoints, but none is good. (A start from scratch
        would lose the run without notice.)
    """
    while True:
        names = _names(directory)
        rejected: list[str] = []
        for name in names:
            path = directory / name
            try:
                found = _read_named(path)
            except CheckpointError as error:
                rejected.append(printable(f"{path}: {error}"))
            else:
                break
        if rejected and _names(directory) != names:
            continue  # A trainer has saved and deleted files since. Try again.
        if not names:
            return None
        if len(rejected) == len(names):
            raise CheckpointError(
                "\n  ".join([f"no checkpoint in {directory} is good:", *rejected])
                + "\nRestore one from a backup, or move the folder away to start "
                "from scratch."
            )
        found.rejected = rejected
        return found


def load_from(path: Path) -> Checkpoint | None:
    """Return the checkpoint at `path`, or the newest good one of the run there.

    A file may have any name. Returns None if there is no checkpoint at all.

    Raises:
      CheckpointError: the file is not good, or there is no good checkpoint.
    """
    if not path.is_file():
        return load(path / "checkpoints") or load(path)
    try:
        return _read(path)
    except CheckpointError as error:
        raise CheckpointError(printable(f"{path}: {error}")) from error


def _names(directory: Path) -> dict[str, int]:
    """Return the names of all checkpoints, newest first, with their inode numbers."""
    try:
        with os.scandir(directory) as entries:
            found = {e.name: e.inode() for e in entries if e.name.startswith("step-")}
    except FileNotFoundError as error:
        if directory.is_symlink():
            raise CheckpointError(
                f"{directory} is a link to a folder that does not exist. Is its disk "
                "mounted?"
            ) from error
        return {}
    except OSError as error:
        raise CheckpointError(f"cannot read {directory}: {error}") from error
    return {name: found[name] for name in sorted(found, reverse=True)}


def _read_named(path: Path) -> Checkpoint:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError("its name is not step-<12 digits>.safetensors")
    return _read(path, int(match[1]))


def _read(path: Path, step: int | None = None) -> Checkpoint:
    """Read a checkpoint and check all of it, also its step if `step` is given.

    Raises:
      CheckpointError: the file is not good. The message has the reason, not the path.
    """
    if path.exists() and not path.is_file():  # Reading a pipe would never end.
        raise CheckpointError("is not a regular file")
    try:
        found = _parse(path.read_bytes(), step)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}") from error
    return dataclasses.replace(found, path=path)


def _parse(data: bytes, step: int | None) -> Checkpoint:
    """Return the checkpoint in a file's bytes, after a check of its sha256.

    Raises:
      CheckpointError: the file is damaged, or of another format, version or step.
    """
    start, end = _find_digest(data)
    if _digest(data, start, end) != data[start:end]:
        raise CheckpointError("has another sha256 than when it was written")
    try:
        return _parse_verified(data, step)
    except CheckpointError:
        raise
    except Exception as error:
        # The sha256 is right, but a stranger may have written the file. Any error of a
        # parser, such as RecursionError or MemoryError, means that it is not good.
        raise CheckpointError(f"{type(error).__name__}: {error}") from error


def _find_digest(data: bytes) -> tuple[int, int]:
    """Return the position of the sha256's 64 digits in a checkpoint's bytes."""
    header_end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if header_end > len(data):
        raise CheckpointError(f"is truncated, or not a checkpoint: {len(data)} bytes")
    match = _SHA256.search(data, _LENGTH_BYTES, header_end)
    if match is None:
        raise CheckpointError("is not a checkpoint: its header has no sha256")
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


def printable(text: str) -> str:
    """Return the text, cut to _MAX_REASON, on one line, without control characters."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + " ..."


def mismatch(what: str, differences: list[str]) -> CheckpointMismatch:
    """Return the error that names the differences of a model or an optimizer."""
    shown = differences[:_MAX_DIFFERENCES]
    if len(differences) > len(shown):
        shown.append(f"and {len(differences) - len(shown)} more")
    return CheckpointMismatch(printable(f"{what}: {'; '.join(shown)}"))


def name_differences(expected: Set[str], got: Set[str]) -> list[str]:
    missing = [f"missing {name}" for name in sorted(expected - got)]
    return missing + [f"unknown {name}" for name in sorted(got - expected)]


def weights_for(model: torch.nn.Module, found: Checkpoint) -> dict[str, torch.Tensor]:
    """Return a checkpoint's weights, after a check that they fit the model.

    Tensors that are float32 in the model may be float16 in the file (`tools.publish`).

    Raises:
      CheckpointMismatch: names, shapes or dtypes differ.
    """
    expected = model.state_dict()
    got = dict(found.tensors.get("model", {}))
    for name in got.keys() & expected.keys():
        if (got[name].dtype, expected[name].dtype) == (torch.float16, torch.float32):
            got[name] = got[name].float()
    check_tensors(expected, got)
    return got


def find_not_finite(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor]
) -> str | None:
    """Return the name of one of the model's tensors that has wrong numbers, or None.

    A parameter that is trained must be finite. A buffer or another parameter may hold
    infinities, as a mask of attention does, but no NaN.
    """
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, tensor in tensors.items():
        is_wrong = tensor.isnan() if name not in trained else ~tensor.isfinite()
        if is_wrong.any():
            return name
    return None


def check_tensors(
    expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]
) -> None:
    """Check that tensors from a file have the names, shapes and dtypes of a model's.

    Raises:
      CheckpointMismatch: they differ. The message names each difference in one line,
        such as "model: policy.weight: file [6,512], model [18,512]".
    """
    differences = []
    for name in expected.keys() & got.keys():
        file, ours = got[name], expected[name]
        if file.shape != ours.shape or file.dtype != ours.dtype:
            with_dtype = file.dtype != ours.dtype
            in_file, in_model = (
                describe_array(x.dtype if with_dtype else "", x.shape)
                for x in (file, ours)
            )
            differences.append(f"{name}: file {in_file}, model {in_model}")
    differences.sort()
    differences += name_differences(expected.keys(), got.keys())
    if differences:
        raise mismatch("model", differences)
