# SPDX-License-Identifier: Apache-2.0
"""examples/nethack: its network, its environment, and the trainers with its patches.

Only the tests of the environment need nle: `pip install --no-deps nle`. Those of the
patches are skipped in a fork that has edited what they edit, since they do not apply.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from core.environments import check
from core.nests import map_nest
from core.rollout import Spaces
from examples.nethack.environment import make_env
from examples.nethack.torso import (
    CROP,
    NUM_TRIGRAMS,
    STONE,
    NetHackTorso,
    trigrams_of,
)
from tests.trainers.test_clipped_forks import load

ROOT = Path(__file__).parents[2]
H, W, NUM_GLYPHS = 21, 79, 5976
INTS = np.iinfo(np.int32)
SPACE = gym.spaces.Dict(  # Those of NLE.
    glyphs=gym.spaces.Box(0, NUM_GLYPHS, (H, W), np.int16),
    blstats=gym.spaces.Box(INTS.min, INTS.max, (27,), np.int64),
    message=gym.spaces.Box(0, 255, (256,), np.uint8),
)


def observations(*shape):
    """Return random observations [*shape, ...]: any that the spaces allow."""
    SPACE.seed(0)
    samples = [SPACE.sample() for _ in range(int(np.prod(shape)))]
    stacked = {key: np.stack([x[key] for x in samples]) for key in SPACE}
    return map_nest(lambda x: torch.from_numpy(x).unflatten(0, shape), stacked)


@pytest.fixture(scope="module")
def torso():
    torch.manual_seed(0)
    return NetHackTorso(SPACE)


def test_every_part_of_the_network_learns(torso):
    features = torso(observations(16))
    assert features.shape == (16, torso.num_features)
    assert features.isfinite().all()
    features.sum().backward()
    for name, parameter in torso.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
    for glyphs in torso.map_glyphs, torso.crop_glyphs:
        assert not glyphs.weight[STONE].any() and not glyphs.weight.grad[STONE].any()


@pytest.mark.parametrize("key", SPACE)
def test_the_features_depend_on_each_part_of_the_observation(torso, key):
    rows = observations(2)
    rows["blstats"][:, :2] = torch.tensor([40, 10])  # The crop stays where it is.
    changed = map_nest(torch.clone, rows)
    changed[key][0] = changed[key][1]
    with torch.no_grad():
        before, after = torso(rows), torso(changed)
    assert not torch.equal(before[0], after[0])
    torch.testing.assert_close(before[1], after[1])


@pytest.mark.parametrize("x, y", [(40, 10), (0, 0), (W - 1, H - 1), (1, H - 1)])
def test_the_crop_has_the_agent_in_its_middle(torso, x, y):
    glyphs = torch.arange(2 * H * W).view(2, H, W).int()
    (crop, *_) = torso.crop_around(glyphs, torch.tensor([x, 9]), torch.tensor([y, 9]))
    for row in range(CROP):
        for column in range(CROP):
            i, j = y + row - CROP // 2, x + column - CROP // 2
            inside = 0 <= i < H and 0 <= j < W
            expected = glyphs[0, i, j] if inside else torso.outside
            assert crop[row, column] == expected


def test_messages_differ_by_the_order_of_their_characters():
    texts = [b"You hit it.", b"It hits you.", b"You hit it. ", b"abc", b"cba", b""]
    rows = torch.zeros(len(texts), 256, dtype=torch.uint8)
    for row, text in zip(rows, texts):
        row[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    hashed = trigrams_of(rows)
    assert hashed.min() == 0 and hashed.max() < NUM_TRIGRAMS
    assert (hashed != 0).sum(1).tolist() == [max(0, len(text) - 2) for text in texts]
    assert set(hashed[0].tolist()) != set(hashed[1].tolist())
    assert (hashed[0, :9] == hashed[2, :9]).all()
    assert hashed[3, 0] != hashed[4, 0]


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A folder with the three patched files."""
    folder = tmp_path_factory.mktemp("fork")
    patches = sorted((ROOT / "examples" / "nethack").glob("*.patch"))
    assert len(patches) == 3
    for patch in patches:
        shutil.copy(ROOT / f"{patch.stem}.py", folder)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    if subprocess.run(["git", "apply", *patches], cwd=folder).returncode:
        pytest.skip("Net or create_env was edited: examples/nethack does not apply")
    return folder


@pytest.mark.parametrize("name", ["monobeast", "polybeast"])
def test_the_patched_trainers_evaluate_rows(fork, name):
    """With the flags of settings/nethack.txt."""
    trainer = load(fork / f"{name}.py")
    settings = f"@{ROOT}/settings/nethack.txt"
    flags = trainer.parse_flags([settings, "--env", "NetHackScore-v0"])
    net = trainer.create_net(flags, Spaces(SPACE, gym.spaces.Discrete(23)))
    T, B = 3, 2
    rows = {
        "observation": observations(T, B),
        "reward": torch.full((T, B), 1000.0),
        "done": torch.tensor([[True, False], [False, True], [False, False]]),
        "last_action": torch.randint(23, (T, B)),
    }
    outputs, _ = net(rows, net.initial_state(B))
    assert outputs["policy_logits"].shape == (T, B, 23)
    assert outputs["baseline"].shape == (T, B)
    assert net.core is not None and isinstance(net.torso, NetHackTorso)


# What needs nle.


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """An empty folder for temporary files, which is the working directory too."""
    pytest.importorskip("nle")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["monobeast", "polybeast_env"])
def test_the_patched_programs_create_a_task_by_its_name(fork, temporary, name):
    flags = ["--env", "NetHackStaircase-v0"]
    module = load(fork / f"{name}.py")
    env = module.create_env(module.parse_flags(flags))
    assert env.spec.id == "NetHackStaircase-v0"
    assert env.observation_space == SPACE
    env.close()


def test_what_the_network_embeds_as_zeros_is_stone(temporary):
    nethack = pytest.importorskip("nle.nethack")
    assert nethack.glyph_to_cmap(STONE) == 0  # S_stone, in NetHack's rm.h.
    env = make_env()
    assert (env.reset(seed=1)[0]["glyphs"] == STONE).mean() > 0.5
    env.close()


def test_the_environment_passes_the_check(temporary, capsys):
    assert check.main(["examples.nethack.environment:make_env"]) == 0
    capsys.readouterr()


def test_the_first_seed_decides_all_games_and_no_file_stays(temporary):
    def firsts(seed):
        env = make_env()
        seeds = [seed, None, None]
        stats = [env.reset(seed=seed)[0]["blstats"].tolist() for seed in seeds]
        assert env.unwrapped.get_seeds()[2] is False  # NetHack's own reseeding.
        env.close()
        return stats

    one, two, three = firsts(1)
    assert firsts(1) == [one, two, three]
    assert one != two != three
    assert firsts(2)[0] != one
    assert os.listdir(temporary) == []


def test_it_draws_its_map_and_has_no_window(temporary):
    env = make_env(render_mode="rgb_array")
    env.reset(seed=1)
    picture = env.render()
    assert picture.shape == (16 * H, 16 * W, 3) and picture.dtype == np.uint8
    assert picture.any()
    env.close()
    with pytest.raises(ValueError, match="--video"):
        make_env(render_mode="human")
