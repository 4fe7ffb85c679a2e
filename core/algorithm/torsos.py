# SPDX-License-Identifier: Apache-2.0
"""Torsos: the part of a network that turns observations into features.

`Net` in each trainer chooses one by `--model` and adds the core and the heads. Open
this file to see or change the convolutions.
"""

from collections.abc import Callable, Iterator

import gymnasium as gym
import torch
import torch.nn.functional as F
from torch import nn

from core.errors import ConfigError
from core.nests import Nest
from core.rollout import flat_ranges, text_of

MAX_WEIGHTS = 2**28  # Of one layer: 1 GiB.


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float = 2**0.5) -> nn.Module:
    """Return `layer` with orthogonal weights and no bias (Saxe et al. 2014).

    Signals keep their size from layer to layer. With torch's own initial weights, the
    movements on an Atari screen change the features of ShallowTorso by only about 1e-4,
    and it takes long until the agent begins to learn.
    """
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def model_for(space: gym.Space) -> str:
    """Return the `--model` that fits observations from this space."""
    side = picture_side(space)
    return "shallow" if side >= 36 else "small" if side >= 5 else "mlp"


def picture_side(space: gym.Space) -> int:
    """Return the smaller of a picture's height and width; 0 if it is not a picture."""
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 3:
        return 0
    first, middle, last = space.shape  # Either the first or the last are the channels.
    return min(middle, max(first, last))


class ImageTorso(nn.Module):
    """The base of the convolutional torsos: layout, scaling, and the linear layer.

    Takes [N, C, H, W] or [N, H, W, C]: the second or the last axis has the channels,
    whichever is smaller (the last if they are equal). Integers are scaled by the range
    of the space. Convolutions run channels-last, three times as fast on a CPU.
    """

    name: str  # The value of --model.
    min_side = 36

    def __init__(
        self, space: gym.Space, make_convs: Callable[[int], nn.Module], size: int
    ):
        super().__init__()
        if picture_side(space) < self.min_side:
            raise ConfigError(
                f"--model {self.name} needs one Box of three axes, at least "
                f"{self.min_side} pixels a side, as observation; the environment has "
                f"{text_of(space)}. Use --model {model_for(space)}."
            )
        assert isinstance(space, gym.spaces.Box)
        self.channels_first = space.shape[0] < space.shape[-1]
        C = space.shape[0] if self.channels_first else space.shape[-1]
        self.convs = make_convs(C)
        offset, scale = flat_ranges(space)
        self.offset = int(offset.min())
        self.scale = int((offset + scale).max()) - self.offset
        with torch.no_grad():
            _, C, H, W = self._convolve(torch.zeros(1, *space.shape)).shape
        if C * H * W * size > MAX_WEIGHTS:
            raise ConfigError(
                f"--model {self.name} would have {C * H * W * size:,} weights behind "
                f"its convolutions for {text_of(space)}. Make the pictures smaller, "
                "such as by gymnasium.wrappers.ResizeObservation(env, (84, 84))."
            )
        self.fc = orthogonal(MapLinear(C, size, kernel_size=(H, W)))
        self.num_features = size
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        if not self.channels_first:
            x = x.movedim(-1, 1)  # [N, C, H, W]
        # Before the conversion to float, since bytes are copied faster.
        x = x.contiguous(memory_format=torch.channels_last)
        if self.offset:
            x = (x.double() - self.offset).float()  # float32 rounds large integers.
        return self.convs(x.float() if self.scale == 1 else x / self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.fc(self._convolve(x)))


class PictureConv(nn.Conv2d):
    """A convolution over pictures with a few channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return super().forward(x)
        # The tensor cores of a GPU take channels by eight: the others are zeros.
        more = (0, 0, 0, 0, 0, -x.shape[1] % 8)
        x, weight = F.pad(x, more), F.pad(self.weight, more)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class MapLinear(nn.Conv2d):
    """A linear layer over a whole map: [N, C, H, W] to [N, features]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            # oneDNN computes a convolution, on AMD CPUs twice as fast as MKL computes
            # nn.Linear.
            return super().forward(x).flatten(1)
        # The gradient of a convolution takes eight times as long as all the rest of
        # ShallowTorso. Channels come last, so `flatten` copies nothing.
        x, weight = (y.movedim(1, -1).flatten(1) for y in (x, self.weight))
        return F.linear(x, weight, self.bias)


class SmallTorso(ImageTorso):
    """A convolution and two linear layers, for pictures as small as MinAtar's."""

    name = "small"
    min_side = 5

    def __init__(self, space: gym.Space):
        def convs(channels: int) -> nn.Module:
            return nn.Sequential(
                orthogonal(PictureConv(channels, 16, kernel_size=3)),
                nn.ReLU(inplace=True),
            )

        super().__init__(space, convs, 256)
        self.last = orthogonal(nn.Linear(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.last(super().forward(x)))


class ShallowTorso(ImageTorso):
    """Three convolutions and a linear layer, as in Mnih et al. 2015 (Nature)."""

    name = "shallow"

    def __init__(self, space: gym.Space):
        def convs(channels: int) -> nn.Module:
            return nn.Sequential(
                orthogonal(PictureConv(channels, 32, kernel_size=8, stride=4)),
                nn.ReLU(inplace=True),
                orthogonal(nn.Conv2d(32, 64, kernel_size=4, stride=2)),
                nn.ReLU(inplace=True),
                orthogonal(nn.Conv2d(64, 64, kernel_size=3, stride=1)),
                nn.ReLU(inplace=True),
            )

        super().__init__(space, convs, 512)


class DeepTorso(ImageTorso):
    """The 15 convolutions of Espeholt et al. 2018, figure 3 (right)."""

    name = "deep"

    def __init__(self, space: gym.Space):
        def convs(channels: int) -> nn.Module:
            sections: list[nn.Module] = []
            conv: type[nn.Conv2d] = PictureConv
            for width in (16, 32, 32):
                sections += [
                    conv(channels, width, kernel_size=3, padding=1),
                    nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
                    ResidualBlock(width),
                    ResidualBlock(width),
                ]
                channels, conv = width, nn.Conv2d
            return nn.Sequential(*sections, nn.ReLU())

        super().__init__(space, convs, 256)


class ResidualBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class MLPTorso(nn.Module):
    """Two linear layers over all leaves of the observation, flattened side by side.

    Discrete and MultiDiscrete leaves become one-hot; integer boxes are scaled by the
    ranges of their elements.
    """

    num_features = 256
    activation: type[nn.Module] = nn.ReLU
    offset: torch.Tensor
    scale: torch.Tensor

    def __init__(self, space: gym.Space):
        super().__init__()
        self.space = space
        size = gym.spaces.flatdim(space)
        if size * self.num_features > MAX_WEIGHTS:
            raise ConfigError(
                f"the MLP would have {size * self.num_features:,} weights in its first "
                f"layer for {text_of(space)}. Wrap the environment so that it shows "
                "less: in place of a Discrete a MultiDiscrete of digits, or numbers in "
                "a Box."
            )
        offset, scale = torch.from_numpy(flat_ranges(space))
        self.is_scaled = bool(offset.any() or (scale != 1).any())
        # Integers: in a torso of bfloat16 they stay exact.
        self.register_buffer("offset", offset, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.layers = nn.Sequential(
            orthogonal(nn.Linear(size, self.num_features)),
            self.activation(),
            orthogonal(nn.Linear(self.num_features, self.num_features)),
            self.activation(),
        )

    def forward(self, observation: Nest) -> torch.Tensor:
        x = torch.cat(list(flat_features(self.space, observation)), 1)
        if self.is_scaled:
            x = (x - self.offset) * self.scale.reciprocal()
        return self.layers(x.float())


class TanhTorso(MLPTorso):
    """`MLPTorso` with 64 units and tanh, as PPO's for MuJoCo (Schulman et al. 2017).

    A tanh is smooth and bounded, so one large step of the optimizer changes the mean of
    a Gaussian policy less than with ReLU. `Net` makes two of these torsos, one for the
    policy and one for the baseline, since separate networks learn better (Andrychowicz
    et al. 2020, arXiv:2006.05990).
    """

    num_features = 64
    activation = nn.Tanh


def flat_features(space: gym.Space, x: Nest) -> Iterator[torch.Tensor]:
    """Yield one float tensor [N, features] for each leaf of a batch of observations.

    It is float64 for integers of 32 or 64 bits, most of which float32 cannot hold.
    """
    match space:
        case gym.spaces.Dict():
            for key, sub in space.spaces.items():
                yield from flat_features(sub, x[key])
        case gym.spaces.Tuple():
            for sub, leaf in zip(space.spaces, x):
                yield from flat_features(sub, leaf)
        case gym.spaces.Discrete():
            yield F.one_hot(x - int(space.start), int(space.n)).float()
        case gym.spaces.MultiDiscrete():
            ranges = zip(space.start.flat, space.nvec.flat)
            for i, (start, n) in enumerate(ranges):
                yield F.one_hot(x.view(len(x), -1)[:, i] - int(start), int(n)).float()
        case _:
            is_wide = not x.is_floating_point() and x.element_size() >= 4
            yield x.reshape(len(x), -1).to(torch.float64 if is_wide else torch.float32)


TORSOS = {
    "deep": DeepTorso,
    "shallow": ShallowTorso,
    "small": SmallTorso,
    "mlp": MLPTorso,
    "tanh": TanhTorso,
}
