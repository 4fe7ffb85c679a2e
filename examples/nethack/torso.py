# SPDX-License-Identifier: Apache-2.0
"""A torso for NetHack: the map, what is near the agent, its numbers, the message."""

import gymnasium as gym
import torch
import torch.nn.functional as F
from torch import nn

from core.algorithm.torsos import orthogonal
from core.nests import Nest

STONE = 2359  # The glyph of solid rock and of what is unknown: nine tenths of a map.
MAP_DIM = 8  # Size of a glyph's embedding on the whole map...
CROP_DIM = 32  # ...and near the agent.
CROP = 9  # Side of the square around the agent.
CONDITION = 25  # Index in blstats of a set of bits: stoned, blind, levitating...
NUM_CONDITIONS = 13
NUM_TRIGRAMS = 4096  # Trigrams of characters are hashed to so many embeddings.
TRIGRAM_DIM = 32
SIZE = 256


class NetHackTorso(nn.Module):
    """Features of `glyphs` [21, 79], `blstats` [27] and `message` [256].

    After Küttler et al. 2020 (arXiv:2006.13760), section 4: convolutions over embedded
    glyphs, of the whole map and of a square around the agent, and linear layers. For
    CPUs the convolutions over the map have strides here, and stone is zeros: an
    embedding's gradient costs time for each glyph that is learned.
    """

    num_features = SIZE

    def __init__(self, space: gym.spaces.Dict):
        super().__init__()
        H, W = space["glyphs"].shape
        self.outside = int(space["glyphs"].high.max()) + 1  # A glyph beyond the map.
        self.map_glyphs = nn.Embedding(self.outside, MAP_DIM, padding_idx=STONE)
        self.map = nn.Sequential(
            orthogonal(nn.Conv2d(MAP_DIM, 32, kernel_size=3, stride=3, padding=(0, 1))),
            nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(32, 32, kernel_size=3, stride=2, padding=1)),
            nn.ReLU(inplace=True),
        )
        self.crop_glyphs = nn.Embedding(self.outside + 1, CROP_DIM, padding_idx=STONE)
        self.crop = nn.Sequential(
            orthogonal(nn.Conv2d(CROP_DIM, 32, kernel_size=3)),
            nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(32, 32, kernel_size=3)),
            nn.ReLU(inplace=True),
        )
        self.trigrams = nn.EmbeddingBag(NUM_TRIGRAMS, TRIGRAM_DIM, padding_idx=0)
        num_blstats = space["blstats"].shape[0] + NUM_CONDITIONS
        with torch.no_grad():
            sizes = [
                self.map(torch.zeros(1, MAP_DIM, H, W)).numel(),
                self.crop(torch.zeros(1, CROP_DIM, CROP, CROP)).numel(),
            ]
        self.fc = nn.Sequential(
            orthogonal(nn.Linear(sum(sizes) + num_blstats + TRIGRAM_DIM, SIZE)),
            nn.ReLU(inplace=True),
            orthogonal(nn.Linear(SIZE, SIZE)),
            nn.ReLU(inplace=True),
        )

    def forward(self, observation: Nest) -> torch.Tensor:
        glyphs = observation["glyphs"].int()  # [N, H, W]
        blstats = observation["blstats"]
        crop = self.crop_around(glyphs, x=blstats[:, 0], y=blstats[:, 1])
        features = [
            convolve(self.map, self.map_glyphs(glyphs)),
            convolve(self.crop, self.crop_glyphs(crop)),
            self.numbers(blstats),
            self.trigrams(trigrams_of(observation["message"])),
        ]
        return self.fc(torch.cat(features, dim=1))

    def crop_around(
        self, glyphs: torch.Tensor, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """Return the glyphs [N, CROP, CROP] around (x, y)."""
        side = torch.arange(CROP, device=glyphs.device)
        rows = (y.clamp(0, glyphs.shape[1] - 1)[:, None] + side)[:, :, None]
        columns = (x.clamp(0, glyphs.shape[2] - 1)[:, None] + side)[:, None, :]
        padded = F.pad(glyphs, [CROP // 2] * 4, value=self.outside)
        n = torch.arange(len(glyphs), device=glyphs.device)[:, None, None]
        return padded[n, rows, columns]

    def numbers(self, blstats: torch.Tensor) -> torch.Tensor:
        """Return floats of the size of 1: logarithms, and the bits of the condition."""
        x = blstats.float()
        x = x.sign() * x.abs().log1p() / 4  # 100 becomes 1.15, and 10,000 2.3.
        bits = torch.arange(NUM_CONDITIONS, device=x.device)
        conditions = (blstats[:, CONDITION, None] >> bits) & 1
        return torch.cat([x, conditions], dim=1)


def convolve(convs: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return flat features of [N, H, W, C], channels last from start to end."""
    return convs(x.movedim(-1, 1)).movedim(1, -1).flatten(1)


def trigrams_of(message: torch.Tensor) -> torch.Tensor:
    """Return a number below NUM_TRIGRAMS for each trigram: [N, M - 2], 0 for none."""
    c = message.int()  # Zeros follow the text.
    hashed = ((c[:, :-2] * 31 + c[:, 1:-1]) * 31 + c[:, 2:]) % (NUM_TRIGRAMS - 1) + 1
    return torch.where(c[:, 2:] == 0, 0, hashed)
