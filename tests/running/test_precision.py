# SPDX-License-Identifier: Apache-2.0
"""`--precision auto`: what it takes, and that a run keeps it."""

import json
import logging

import gymnasium as gym
import numpy as np
import pytest
import torch

import monobeast
from core.running import folder, precision

SCREEN = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
SMALL = gym.spaces.Box(0, 1, (10, 7, 5), np.uint8)
NUMBERS = gym.spaces.Box(-1, 1, (3,), np.float32)
MASKED = gym.spaces.Dict(observation=SCREEN, action_mask=gym.spaces.MultiBinary(7))
CPU = """processor\t: 0
flags\t\t: fpu avx512f{}
bugs\t\t: amx_bf16 avx512_bf16 are no flags here
"""


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    """Give this machine's processor other instructions."""

    def become(flags):
        path = tmp_path / "cpuinfo"
        path.write_text(CPU.format(flags))
        monkeypatch.setattr(precision, "CPU_INFO", path)

    return become


@pytest.mark.parametrize(
    "flags, unit",
    [
        ("", None),
        (" avx512_bf16", "AVX512-BF16"),
        (" amx_bf16 amx_tile", "AMX"),
        (" avx512_bf16 amx_bf16", "AMX"),
        (" avx512_bf16x", None),
    ],
)
def test_a_cpu_is_fast_in_bfloat16_if_its_flags_say_so(flags, unit, cpu):
    cpu(flags)
    assert precision.bfloat16_unit("cpu") == unit


def test_a_system_that_does_not_describe_its_cpu_is_not_fast(monkeypatch, tmp_path):
    monkeypatch.setattr(precision, "CPU_INFO", tmp_path / "missing")
    assert precision.bfloat16_unit("cpu") is None


@pytest.mark.parametrize("capability, is_fast", [((7, 5), False), ((8, 0), True)])
def test_a_gpu_is_fast_in_bfloat16_from_ampere_on(capability, is_fast, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    assert (precision.bfloat16_unit("cuda:1") == "GPU") == is_fast


@pytest.mark.parametrize(
    "model, space, expected",
    [
        ("auto", SCREEN, "bfloat16"),
        ("auto", MASKED, "bfloat16"),
        ("deep", SCREEN, "bfloat16"),
        ("auto", SMALL, "bfloat16"),
        ("auto", NUMBERS, "float32"),
        ("tanh", NUMBERS, "float32"),
        ("mlp", SCREEN, "float32"),
    ],
)
def test_torsos_with_convolutions_are_in_bfloat16(model, space, expected, cpu):
    cpu(" avx512_bf16")
    chosen, reason = precision.best_precision(model, space, ["cpu"])
    assert chosen == expected
    part = {"bfloat16": "cpu has AVX512-BF16", "float32": "has no convolutions"}
    assert part[expected] in reason
    if expected == "float32":
        named = "mlp (--model auto)" if model == "auto" else f"--model {model}"
        assert reason.startswith(named)
        assert "written a torso with convolutions, add --precision bfloat16" in reason


@pytest.mark.parametrize("devices", [("cpu",), ("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_all_devices_must_be_fast_in_bfloat16(devices, monkeypatch):
    slow: set[str] = set()
    monkeypatch.setattr(
        precision, "bfloat16_unit", lambda device: None if device in slow else "a unit"
    )
    assert precision.best_precision("deep", SCREEN, devices)[0] == "bfloat16"
    for device in devices:
        slow = {device}
        chosen, reason = precision.best_precision("deep", SCREEN, devices)
        assert chosen == "float32"
        assert f"{device} has no bfloat16 instructions" in reason


def settle(run_dir, *argv):
    """Return what the run computes in, as its start settles and records it."""
    flags = monobeast.parse_flags(["--savedir", str(run_dir), *argv])
    flags = precision.settle_precision(flags, run_dir, SCREEN, "cpu")
    folder.write_meta(run_dir, flags=vars(flags), extra={})
    return flags.precision


def test_a_run_keeps_its_precision_on_any_processor(tmp_path, cpu, caplog):
    caplog.set_level(logging.INFO)
    cpu(" avx512_bf16")
    assert settle(tmp_path) == "bfloat16"
    assert "--precision auto takes bfloat16: --model shallow is faster" in caplog.text
    cpu("")
    assert settle(tmp_path) == "bfloat16"
    assert "bfloat16: the run has used it before" in caplog.text
    assert settle(tmp_path, "--precision", "float32") == "float32"
    cpu(" avx512_bf16")
    assert settle(tmp_path) == "float32"
    assert "float32: the run has used it before" in caplog.text


def test_a_run_older_than_the_flag_goes_on_in_float32(tmp_path, cpu):
    cpu(" avx512_bf16")
    settle(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    del meta["flags"]["precision"]
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert settle(tmp_path) == "float32"


@pytest.mark.parametrize("given", ["float32", "bfloat16"])
def test_what_the_user_asks_for_is_taken_as_it_is(given, tmp_path, cpu, caplog):
    caplog.set_level(logging.INFO)
    for flags in ("", " avx512_bf16"):
        cpu(flags)
        assert settle(tmp_path, "--precision", given) == given
    assert caplog.text == ""
