# SPDX-License-Identifier: Apache-2.0
"""The networks on every kind of space; the LSTM that cuts where episodes end."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import monobeast
import polybeast
from core.algorithm.recurrent import create_lstm, unroll_lstm
from core.algorithm.torsos import TORSOS, MLPTorso, ShallowTorso, SmallTorso
from core.errors import ConfigError
from core.nests import leaves, map_nest
from core.rollout import spec_of
from core.running.precision import to_bfloat16
from monobeast import LSTM_SIZE

T, B, A = 5, 3, 7
TRAINERS = pytest.mark.parametrize("trainer", [monobeast, polybeast])

ATARI = spaces.Box(0, 255, (4, 84, 84), np.uint8)
PICTURES = {
    "atari": ATARI,
    "channels last": spaces.Box(0, 255, (48, 36, 3), np.uint8),
    "one channel": spaces.Box(0, 255, (1, 37, 41), np.uint8),
    "float": spaces.Box(0.0, 1.0, (3, 36, 36), np.float32),
}
SMALL_PICTURES = {
    "minatar": spaces.Box(0.0, 1.0, (10, 10, 4), bool),
    "as many channels as pixels": spaces.Box(0.0, 1.0, (10, 10, 10), bool),
    "5 x 9": spaces.Box(0, 255, (2, 5, 9), np.uint8),
    "35 x 36": spaces.Box(0, 255, (3, 35, 36), np.uint8),
}
VECTORS = {
    "box": spaces.Box(-1.0, 1.0, (11,), np.float32),
    "double": spaces.Box(-1.0, 1.0, (5, 3), np.float64),
    "scalar": spaces.Box(-1.0, 1.0, (), np.float32),
    "bytes": spaces.Box(0, 255, (10, 5), np.uint8),
    "4 x 9": spaces.Box(0, 255, (4, 9, 2), np.uint8),
    "discrete": spaces.Discrete(5, start=-2),
    "multi discrete": spaces.MultiDiscrete([2, 3, 5]),
    "multi discrete, nested": spaces.MultiDiscrete([[2, 3], [5, 7]]),
    "multi discrete, start": spaces.MultiDiscrete([2, 3], start=[-1, 4]),
    "multi binary": spaces.MultiBinary((2, 3)),
    "dict": spaces.Dict(
        picture=spaces.Box(0, 255, (2, 13), np.uint8),
        rest=spaces.Tuple(
            [
                spaces.Discrete(3, start=1),
                spaces.Dict(bits=spaces.MultiBinary(5)),
                spaces.Box(-np.inf, np.inf, (), np.float32),
                spaces.MultiDiscrete([2, 7]),
            ]
        ),
    ),
}
FITTING = (
    [("mlp", *item) for item in {**VECTORS, **SMALL_PICTURES, **PICTURES}.items()]
    + [("small", *item) for item in SMALL_PICTURES.items()]
    + [("small", name, PICTURES[name]) for name in ("channels last", "float")]
    + [("shallow", *item) for item in PICTURES.items()]
    + [("deep", *item) for item in PICTURES.items()]
)


def make_rows(observation_space, action_space):
    """Return [T, B] rollout rows of samples of the spaces, as tensors."""
    for space in (observation_space, action_space):
        space.seed(0)

    def sample(space):
        samples = [space.sample() for _ in range(T * B)]
        flat = [[leaf for _, leaf in leaves(sample)] for sample in samples]
        stacked = iter([np.stack(values) for values in zip(*flat)])
        return map_nest(
            lambda s: torch.from_numpy(
                next(stacked).astype(s.dtype).reshape(T, B, *s.shape)
            ),
            spec_of(space),
        )

    rng = np.random.default_rng(0)
    return {
        "observation": sample(observation_space),
        "reward": torch.from_numpy(rng.normal(0, 3, (T, B)).astype(np.float32)),
        "done": torch.from_numpy(rng.random((T, B)) < 0.3),
        "last_action": sample(action_space),
    }


def make_net(observation_space, action_space=None, *, trainer=monobeast, **options):
    torch.manual_seed(0)
    actions = action_space or spaces.Discrete(A)
    return trainer.Net(observation_space, actions, **options)


# --------------------------------------------------------------------------- the nets


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize(
    "model, space",
    [(model, space) for model, _, space in FITTING],
    ids=[f"{model}-{name}" for model, name, _ in FITTING],
)
def test_every_model_gives_logits_and_a_baseline_per_row(model, space, use_lstm):
    net = make_net(space, model=model, use_lstm=use_lstm)
    rows = make_rows(space, spaces.Discrete(A))
    state = net.initial_state(B)
    with torch.no_grad():
        outputs, new_state = net(rows, state)
    assert outputs["policy_logits"].shape == (T, B, A)
    assert outputs["baseline"].shape == (T, B)
    for output in outputs.values():
        assert output.dtype == torch.float32
        assert output.isfinite().all()
    assert [s.shape for s in new_state] == [s.shape for s in state]
    assert [s.shape for s in state] == [(1, B, LSTM_SIZE)] * (2 if use_lstm else 0)


@pytest.mark.parametrize("model", ["shallow", "deep", "small"])
def test_a_torso_for_pictures_has_the_activations_of_its_paper(model):
    space = spaces.Box(0, 255, (3, 37, 41), np.uint8)
    torso = make_net(space, model=model).torso
    picture = torch.randint(256, (1, *space.shape), dtype=torch.uint8)
    x = picture / 255
    if model == "deep":  # Figure 3 of Espeholt et al. 2018.
        layers = iter(torso.convs[:12])
        for conv, pool, *blocks in zip(*[layers] * 4):
            x = pool(conv(x))
            for block in blocks:
                x = x + block.conv2(block.conv1(x.relu()).relu())
    else:
        for conv in torso.convs[::2]:
            x = conv(x.relu())
    x = x.relu().flatten(1) @ torso.fc.weight.flatten(1).T + torso.fc.bias
    if model == "small":
        x = torso.last(x.relu())
    torch.testing.assert_close(torso(picture), x.relu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("model", ["mlp", "tanh"])
def test_every_parameter_gets_a_gradient(model, use_lstm):
    space = VECTORS["dict"]
    net = make_net(space, model=model, use_lstm=use_lstm)
    rows = make_rows(space, spaces.Discrete(A))
    outputs, _ = net(rows, net.initial_state(B))
    sum(output.square().sum() for output in outputs.values()).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


@pytest.mark.parametrize("output", ["policy_logits", "baseline"])
def test_policy_and_baseline_of_tanh_share_no_parameter(output):
    space = VECTORS["box"]
    net = make_net(space, model="tanh")
    outputs, _ = net(make_rows(space, spaces.Discrete(A)))
    outputs[output].square().sum().backward()
    learned = {name for name, x in net.named_parameters() if x.grad is not None}
    own = ("policy.", "torso.") if output == "policy_logits" else ("baseline.", "value")
    assert learned == {x for x, _ in net.named_parameters() if x.startswith(own)}


@pytest.mark.parametrize("use_lstm", [False, True])
def test_a_batch_of_rows_equals_row_by_row(use_lstm):
    space = VECTORS["dict"]
    net = make_net(space, use_lstm=use_lstm)
    rows = make_rows(space, spaces.Discrete(A))
    with torch.no_grad():
        together, _ = net(rows, net.initial_state(B))
        state = net.initial_state(B)
        for t in range(T):
            row = map_nest(lambda x, t=t: x[t : t + 1], rows)
            alone, state = net(row, state)
            for key in together:
                torch.testing.assert_close(
                    alone[key][0], together[key][t], atol=1e-6, rtol=1e-5
                )


def count(net, kind):
    return sum(isinstance(module, kind) for module in net.modules())


def test_the_deep_model_has_the_papers_fifteen_convolutions():
    convs = make_net(ATARI, model="deep").torso.convs
    assert count(convs, nn.Conv2d) == 15
    channels = [m.out_channels for m in convs.modules() if isinstance(m, nn.Conv2d)]
    assert channels == 5 * [16] + 5 * [32] + 5 * [32]


def test_the_small_model_is_as_wide_as_minatar_s_and_the_mlp():
    torso = make_net(SMALL_PICTURES["minatar"]).torso
    (conv,) = [m for m in torso.convs if isinstance(m, nn.Conv2d)]
    assert (conv.in_channels, conv.out_channels, conv.kernel_size) == (4, 16, (3, 3))
    assert tuple(torso.fc.weight.shape) == (256, 16, 8, 8)
    assert tuple(torso.last.weight.shape) == (256, 256)


@pytest.mark.parametrize(
    "model, size, activation", [("mlp", 256, nn.ReLU), ("tanh", 64, nn.Tanh)]
)
def test_models_of_linear_layers_differ_in_width_and_activation(
    model, size, activation
):
    first, f, second, g = make_net(VECTORS["box"], model=model).torso.layers
    assert tuple(first.weight.shape) == (size, 11)
    assert tuple(second.weight.shape) == (size, size)
    assert type(f) is type(g) is activation


def test_the_shallow_model_is_that_of_nature():
    convs = [m for m in make_net(ATARI).torso.convs if isinstance(m, nn.Conv2d)]
    layers = [(c.out_channels, c.kernel_size[0], c.stride[0]) for c in convs]
    assert layers == [(32, 8, 4), (64, 4, 2), (64, 3, 1)]


@pytest.mark.parametrize(
    "model, pixels, features",
    [
        ("shallow", 84, 64 * 7 * 7),  # 84 -> 20 -> 9 -> 7
        ("shallow", 96, 64 * 8 * 8),  # 96 -> 23 -> 10 -> 8
        ("shallow", 36, 64 * 1 * 1),  # 36 -> 8 -> 3 -> 1
        ("deep", 84, 32 * 11 * 11),  # 84 -> 42 -> 21 -> 11
        ("deep", 96, 32 * 12 * 12),  # 96 -> 48 -> 24 -> 12
    ],
)
def test_the_size_behind_the_convolutions_is_computed(model, pixels, features):
    space = spaces.Box(0, 255, (4, pixels, pixels), np.uint8)
    assert make_net(space, model=model).torso.fc.weight[0].numel() == features


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("model", ["deep", "shallow", "small", "mlp"])
def test_bfloat16_is_near_float32_and_stays_in_the_torso(model, use_lstm):
    space = spaces.Box(0, 255, (4, 40, 48), np.uint8)
    rows = make_rows(space, spaces.Discrete(A))
    precise = make_net(space, model=model, use_lstm=use_lstm)
    fast = make_net(space, model=model, use_lstm=use_lstm, bfloat16=True)
    acting = make_net(space, model=model, use_lstm=use_lstm, bfloat16=True)
    for net in (fast, acting):
        net.load_state_dict(precise.state_dict())
    to_bfloat16(acting.torso)  # As actors have it.
    seen = []
    for layer in fast.torso.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    state = precise.initial_state(B)
    expected, _ = precise(rows, state)
    for net in (fast, acting):
        outputs, _ = net(rows, state)
        for key, x in outputs.items():
            assert x.dtype == torch.float32
            scale = expected[key].abs().max().item()
            torch.testing.assert_close(x, expected[key], atol=0.05 * scale, rtol=0)
    assert set(seen) == {torch.bfloat16}
    sum(x.sum() for x in fast(rows, state)[0].values()).backward()
    assert {p.grad.dtype for p in fast.parameters()} == {torch.float32}


class NormedTorso(nn.Module):
    """A torso of a fork: it begins with a norm, and has a buffer of large numbers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm([3, 10, 7])
        self.layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(200, 2))
        self.register_buffer("mean", torch.tensor(1001.0))

    def forward(self, x):
        return self.layers(self.norm(x.float()) + x - self.mean)


def test_a_torso_of_your_own_acts_in_bfloat16_as_it_learns():
    torso, x = NormedTorso(), 1000 + torch.rand(B, 3, 10, 7)
    acting = copy.deepcopy(torso)
    to_bfloat16(acting)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(acting(x), torso(x))


@pytest.mark.parametrize("model", ["small", "shallow", "deep"])
def test_where_the_channels_stand_does_not_matter(model):
    first = spaces.Box(0, 255, (3, 40, 48), np.uint8)
    last = spaces.Box(0, 255, (40, 48, 3), np.uint8)
    action_space = spaces.Discrete(A)
    rows = make_rows(first, action_space)
    moved = {**rows, "observation": rows["observation"].movedim(2, -1).contiguous()}
    with torch.no_grad():
        a, _ = make_net(first, model=model)(rows)
        b, _ = make_net(last, model=model)(moved)
    for key in a:
        torch.testing.assert_close(a[key], b[key], atol=1e-6, rtol=1e-5)


def torso_features(model, space, observation):
    with torch.no_grad():
        return make_net(space, model=model).torso(observation)


RANGES = {  # low, high, dtype, and what the network should see of a value x.
    "bytes": (0, 255, np.uint8, lambda x: x / 255),
    "0 and 1": (0, 1, np.uint8, lambda x: x),
    "0 to 10": (0, 10, np.uint8, lambda x: x / 10),
    "3 to 13": (3, 13, np.int64, lambda x: (x - 3) / 10),
    "-1 to 1": (-1, 1, np.int8, lambda x: x),
    "-128 to 127": (-128, 127, np.int8, lambda x: x / 128),
    "16 bits": (0, 65535, np.uint16, lambda x: x / 65535),
    "32 bits": (-(2**31), 2**31 - 1, np.int32, lambda x: x),
    "64 bits": (-(2**63), 2**63 - 1, np.int64, lambda x: x),
    "counters": (0, 2**62, np.int64, lambda x: x),
    "constant": (7, 7, np.uint8, lambda x: x),
    "seconds": (17 * 10**8, 17 * 10**8 + 99, np.int64, lambda x: (x - 17 * 10**8) / 99),
    "floats": (0.0, 255.0, np.float32, lambda x: x),
}


@pytest.mark.parametrize("model", ["small", "mlp"])
@pytest.mark.parametrize("name", RANGES)
def test_integers_are_scaled_by_the_range_of_their_space(model, name):
    low, high, dtype, seen = RANGES[name]
    shape = (3, 5, 7)
    space = spaces.Box(low, high, shape, dtype)
    real = spaces.Box(-np.inf, np.inf, shape, np.float32)
    x = make_rows(space, spaces.Discrete(A))["observation"].flatten(0, 1)
    expected = torso_features(model, real, seen(x.double()).float())
    scale = expected.abs().max().item()
    torch.testing.assert_close(
        torso_features(model, space, x), expected, atol=1e-6 * scale, rtol=1e-5
    )


def test_bytes_are_scaled_bit_for_bit_as_ever():
    """Weights of old runs play as they did."""
    torch.manual_seed(1)
    shape = (3, 36, 36)
    byte = spaces.Box(0, 255, shape, np.uint8)
    x = make_rows(byte, spaces.Discrete(A))["observation"].flatten(0, 1)
    for model, expected in (("shallow", x / 255), ("mlp", x.float() * (1 / 255))):
        torso = make_net(byte, model=model).torso
        layers = torso.convs if model == "shallow" else torso.layers
        seen = []
        layers.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0])
        )
        torso(x)
        assert torch.equal(seen[0], expected.reshape(seen[0].shape))


def test_each_integer_of_a_vector_has_a_range_of_its_own():
    space = spaces.Dict(
        counts=spaces.Box(np.array([0, 10]), np.array([2, 1010]), dtype=np.int32),
        minigrid=spaces.Box(0, 10, (1, 2, 1), np.uint8),
        direction=spaces.Discrete(4),
        bits=spaces.MultiBinary(2),
    )
    net = make_net(space)
    seen = []
    net.torso.layers.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    net.torso(
        {
            "counts": torch.tensor([[1, 510]], dtype=torch.int32),
            "minigrid": torch.tensor([[[[5], [10]]]], dtype=torch.uint8),
            "direction": torch.tensor([2]),
            "bits": torch.tensor([[1, 0]], dtype=torch.int8),
        }
    )
    parts = {"bits": [1, 0], "counts": [0.5, 0.5], "direction": [0, 0, 1, 0]}
    parts["minigrid"] = [0.5, 1]
    torch.testing.assert_close(
        seen[0], torch.tensor([sum([parts[key] for key in space.spaces], [])]).float()
    )


@pytest.mark.parametrize("model", ["small", "mlp"])
def test_bits_are_zeros_and_ones(model):
    bits = SMALL_PICTURES["minatar"]
    real = spaces.Box(0.0, 1.0, bits.shape, np.float32)
    x = make_rows(bits, spaces.Discrete(A))["observation"].flatten(0, 1)
    assert x.dtype == torch.bool
    torch.testing.assert_close(
        torso_features(model, bits, x), torso_features(model, real, x.float())
    )


def test_with_as_many_channels_as_pixels_the_last_axis_has_the_channels():
    space = SMALL_PICTURES["as many channels as pixels"]
    assert not make_net(space).torso.channels_first


def test_discrete_observations_become_one_hot_from_their_start():
    space = spaces.Tuple(
        [spaces.Discrete(3, start=-1), spaces.MultiDiscrete([2, 3], start=[4, 0])]
    )
    net = make_net(space)
    seen = []
    net.torso.layers.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    net.torso((torch.tensor([1, -1]), torch.tensor([[4, 2], [5, 0]])))
    expected = [[0, 0, 1, 1, 0, 0, 0, 1], [1, 0, 0, 0, 1, 1, 0, 0]]
    assert seen[0].tolist() == expected


def outputs_of(net, rows, **changes):
    """Return logits and baseline of some rows with other entries."""
    with torch.no_grad():
        outputs, _ = net({**rows, **changes})
    return torch.cat([outputs["policy_logits"], outputs["baseline"][..., None]], -1)


@TRAINERS
@pytest.mark.parametrize("start", [-3, 4])
def test_the_last_action_counts_from_its_start(start, trainer):
    rows = make_rows(VECTORS["box"], spaces.Discrete(A))
    expected = outputs_of(make_net(VECTORS["box"], trainer=trainer), rows)
    actions = spaces.Discrete(A, start=start)
    net = make_net(VECTORS["box"], actions, trainer=trainer)
    actions = rows["last_action"] + start
    assert torch.equal(outputs_of(net, rows, last_action=actions), expected)
    actions = start + (rows["last_action"] + 1) % A
    others = outputs_of(net, rows, last_action=actions)
    assert (others != expected).any(-1).all()


@TRAINERS
@pytest.mark.parametrize("clip_rewards", [True, False])
def test_the_net_sees_the_reward_clipped_like_the_losss(clip_rewards, trainer):
    net = make_net(VECTORS["box"], clip_rewards=clip_rewards, trainer=trainer)
    rows = make_rows(VECTORS["box"], spaces.Discrete(A))
    reward = rows["reward"]
    is_clipped = reward.abs() > 1
    assert is_clipped.any() and not is_clipped.all()
    found = outputs_of(net, rows)
    clipped = outputs_of(net, rows, reward=reward.clamp(-1, 1))
    differs = (found != clipped).any(-1)
    assert torch.equal(differs, is_clipped & (not clip_rewards))
    assert (found != outputs_of(net, rows, reward=torch.zeros(T, B))).any(-1).all()


@pytest.mark.parametrize(
    "space, torso",
    [(space, ShallowTorso) for space in PICTURES.values()]
    + [(space, SmallTorso) for space in SMALL_PICTURES.values()]
    + [(space, MLPTorso) for space in VECTORS.values()]
    + [
        (spaces.Box(0, 255, (84, 84), np.uint8), MLPTorso),
        (spaces.Dict(picture=ATARI), MLPTorso),
    ],
    ids=str,
)
def test_auto_takes_convolutions_for_pictures_and_mlp_for_the_rest(space, torso):
    assert type(make_net(space, model="auto").torso) is torso


def test_the_model_named_is_the_model_made():
    for model in TORSOS:
        torso = type(make_net(PICTURES["float"], model=model).torso)
        assert torso.__name__.lower() == f"{model}torso"


NO_PICTURES = [
    *VECTORS.values(),
    spaces.Box(0, 255, (48, 3, 84), np.uint8),  # Channels in the middle.
    spaces.Dict(picture=ATARI),
]


@pytest.mark.parametrize(
    "model, space, remedy",
    [("deep", space, "small") for space in SMALL_PICTURES.values()]
    + [("shallow", space, "small") for space in SMALL_PICTURES.values()]
    + [
        (m, space, "mlp") for m in ("deep", "shallow", "small") for space in NO_PICTURES
    ],
    ids=str,
)
def test_convolutions_refuse_what_is_no_picture_and_name_what_fits(
    model, space, remedy
):
    with pytest.raises(ConfigError) as caught:
        make_net(space, model=model)
    pixels = "at least 5 pixels" if model == "small" else "at least 36 pixels"
    shown = " ".join(str(space).split())
    for part in (f"--model {model} needs", pixels, shown, f"Use --model {remedy}"):
        assert part in str(caught.value)


def test_pictures_that_make_a_layer_too_large_are_refused():
    space = gym.spaces.Box(0, 255, (1080, 1920, 3), np.uint8)
    with pytest.raises(ConfigError, match=r"would have 1,\d+,\d+,\d+ weights.*Resize"):
        make_net(space, model="shallow")


def test_a_one_hot_that_makes_a_layer_too_large_is_refused():
    space = gym.spaces.Dict(seat=gym.spaces.Discrete(10**9))
    with pytest.raises(ConfigError, match=r"256,000,000,000 weights.*of digits"):
        make_net(space)


@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Box(0, 9, (3,), np.int64),
        spaces.Tuple([spaces.Box(0, 9, (3,), np.int64)]),
    ],
    ids=str,
)
def test_an_action_space_without_a_distribution_is_refused_with_the_remedy(
    action_space,
):
    with pytest.raises(ConfigError) as caught:
        make_net(VECTORS["box"], action_space)
    for part in ("Box(0, 9, (3,), int64)", "no distribution", "Wrap the environment"):
        assert part in str(caught.value)


# --------------------------------------------------------------------------- the LSTM

FEATURES, HIDDEN, LAYERS = 11, 13, 2


def unroll_slowly(lstm, x, done, state):
    """Do what unroll_lstm should do, one row and one environment at a time."""
    outputs, states = [], []
    for b in range(x.shape[1]):
        h, c = (s[:, b : b + 1] for s in state)
        column = []
        for t in range(x.shape[0]):
            if done[t, b]:
                h, c = torch.zeros_like(h), torch.zeros_like(c)
            y, (h, c) = lstm(x[t : t + 1, b : b + 1], (h, c))
            column.append(y)
        outputs.append(torch.cat(column, dim=0))
        states.append((h, c))
    state = tuple(torch.cat(parts, dim=1) for parts in zip(*states))
    return torch.cat(outputs, dim=1), state


def dones(num_rows, *rows, columns=(0, 1, 2)):
    """Return [num_rows, B] bool, true at the rows and columns named."""
    done = torch.zeros(num_rows, B, dtype=torch.bool)
    for t in rows:
        done[t, list(columns)] = True
    return done


def random_dones(seed):
    generator = torch.Generator().manual_seed(seed)
    num_rows = [2, 3, 7, 11][seed % 4]
    chance = [0.1, 0.3, 0.8][seed % 3]
    return torch.rand(num_rows, B, generator=generator) < chance


DONES = {
    "nowhere": dones(7),
    "first row": dones(7, 0),
    "first row, one column": dones(7, 0, columns=[1]),
    "last row": dones(7, 6),
    "last row, one column": dones(7, 6, columns=[2]),
    "first and last row": dones(7, 0, 6),
    "middle": dones(7, 3),
    "everywhere": dones(7, *range(7)),
    "everywhere in one column": dones(7, *range(7), columns=[1]),
    "one row, nowhere": dones(1),
    "one row, everywhere": dones(1, 0),
    "one row, one column": dones(1, 0, columns=[2]),
    **{f"random {seed}": random_dones(seed) for seed in range(24)},
}


def make_lstm(done, proj_size=0):
    """Return an LSTM, inputs and a state, all in float64 and with gradients."""
    torch.manual_seed(0)
    T, B = done.shape
    lstm = nn.LSTM(FEATURES, HIDDEN, LAYERS, proj_size=proj_size).double()
    x = torch.randn(T, B, FEATURES, dtype=torch.float64, requires_grad=True)
    state = tuple(
        torch.randn(LAYERS, B, size, dtype=torch.float64, requires_grad=True)
        for size in (proj_size or HIDDEN, HIDDEN)
    )
    return lstm, x, state


@pytest.mark.parametrize("proj_size", [0, 5])  # With 5 the two states differ in size.
@pytest.mark.parametrize("done", DONES.values(), ids=DONES)
def test_outputs_final_state_and_gradients_equal_the_slow_loop(done, proj_size):
    lstm, x, state = make_lstm(done, proj_size)
    leaves_of = [x, *state, *lstm.parameters()]
    results = []
    for unroll in (unroll_lstm, unroll_slowly):
        y, last = unroll(lstm, x, done, state)
        # Weights that differ everywhere, so that no two errors cancel.
        total = sum(
            (part * torch.arange(part.numel()).reshape(part.shape).cos()).sum()
            for part in (y, *last)
        )
        grads = torch.autograd.grad(
            total, leaves_of, allow_unused=True, materialize_grads=True
        )
        results.append([y, *last, *grads])
    assert [r.shape for r in results[0]] == [r.shape for r in results[1]]
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-8)


def test_a_gru_does_what_a_loop_over_rows_does():
    done = DONES["random 2"]
    T, B = done.shape
    gru = nn.GRU(3, 4, dtype=torch.float64)
    x, h = torch.randn(T, B, 3).double(), torch.randn(1, B, 4).double()
    y, (last,) = unroll_lstm(gru, x, done, (h,))
    for t in range(T):
        expected, h = gru(x[t : t + 1], h.masked_fill(done[t].view(1, B, 1), 0.0))
        torch.testing.assert_close(y[t : t + 1], expected, atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(last, h, atol=1e-10, rtol=1e-8)


def test_in_float32_it_is_as_close_as_float32_is():
    done = DONES["random 2"]
    lstm, x, state = make_lstm(done)
    lstm, x, state = lstm.float(), x.float(), tuple(s.float() for s in state)
    y, last = unroll_lstm(lstm, x, done, state)
    expected, expected_last = unroll_slowly(lstm, x, done, state)
    for got, want in zip((y, *last), (expected, *expected_last)):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["first row", "first and last row", "everywhere", "one row, everywhere"]
)
def test_the_stored_state_is_not_used_where_an_episode_begins(name):
    lstm, x, state = make_lstm(DONES[name])
    junk = tuple(torch.full_like(s, float("nan")) for s in state)
    zeros = tuple(torch.zeros_like(s) for s in state)
    with torch.no_grad():
        y, last = unroll_lstm(lstm, x, DONES[name], junk)
        expected, expected_last = unroll_lstm(lstm, x, DONES[name], zeros)
    for got, want in zip((y, *last), (expected, *expected_last)):
        assert want.isfinite().all()
        torch.testing.assert_close(got, want, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["nowhere", "middle", "everywhere", "random 6"])
def test_the_lstm_runs_once_whatever_the_number_of_rows(name):
    lstm, x, state = make_lstm(DONES[name])
    calls = []
    lstm.register_forward_hook(lambda *_: calls.append(1))
    unroll_lstm(lstm, x, DONES[name], state)
    assert len(calls) == 1


@TRAINERS
def test_an_episode_begins_with_a_new_recurrent_state(trainer):
    space = VECTORS["box"]
    net = make_net(space, use_lstm=True, trainer=trainer)
    rows = make_rows(space, spaces.Discrete(A))
    rows["done"][:] = False
    rows["done"][2] = True
    with torch.no_grad():
        whole, _ = net(rows, net.initial_state(B))
        alone, _ = net(map_nest(lambda x: x[2:], rows), net.initial_state(B))
    for key in whole:
        torch.testing.assert_close(whole[key][2:], alone[key], atol=1e-6, rtol=1e-5)


def test_an_untrained_lstm_keeps_most_of_its_state():
    """Its forget gates begin with a bias of 1, as far as they do not see anything."""
    torch.manual_seed(0)
    lstm = create_lstm(FEATURES, LSTM_SIZE)
    zeros = torch.zeros(1, 1, LSTM_SIZE)
    cell = zeros.clone().requires_grad_()
    _, (_, after) = lstm(torch.zeros(1, 1, FEATURES), (zeros, cell))
    (kept,) = torch.autograd.grad(after.sum(), cell)
    assert kept.mean().item() == pytest.approx(1 / (1 + np.exp(-1)), abs=0.01)


@TRAINERS
def test_the_baseline_begins_with_a_vector_of_length_1_and_no_bias(trainer):
    baseline = make_net(VECTORS["box"], trainer=trainer).baseline
    assert baseline.weight.norm().item() == pytest.approx(1)
    assert not baseline.bias.any()


def test_the_initial_state_is_zero_and_empty_without_lstm():
    space = VECTORS["box"]
    assert make_net(space).initial_state(B) == ()
    state = make_net(space, use_lstm=True).initial_state(B)
    assert all(s.shape == (1, B, LSTM_SIZE) and not s.any() for s in state)
