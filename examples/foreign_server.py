# SPDX-License-Identifier: Apache-2.0
"""An environment server that uses nothing but gRPC and proto/, as a model.

    pip install grpcio grpcio-tools
    python examples/foreign_server.py 127.0.0.1:4431

Translate it into the language of your simulator. In its game the agent sees a bit and
gets a reward of 1 for naming it. An episode has ten steps, so a perfect policy has a
mean return of 10.
"""

import random
import struct
import sys
from concurrent import futures
from pathlib import Path

import grpc

sys.path.append(str(Path(__file__).resolve().parents[1]))
pb, services = grpc.protos_and_services("proto/torchbeast.proto")

K, LENGTH = 4, 10  # Environments per stream; steps per episode.
DTYPES = {"f": "float32", "?": "bool", "i": "int32", "q": "int64"}
# What a step holds, and how `struct` packs it for one environment.
ROW = {"observation": "ff", "reward": "f", "done": "?", "truncated": "?"}
ROW |= {"episode_return": "f", "episode_step": "i", "last_action": "q"}
ROW |= {"info/game_return": "f", "info/game_step": "f"}


class Game:
    def __init__(self, seed):
        self.random, self.steps, self.total = random.Random(seed), 0, 0.0

    def row(self, action=None):
        """Take a step; return what ROW lists. The very first row has no action."""
        reward = 0.0 if action is None else float(action == self.bit)
        steps, total = self.steps + (action is not None), self.total + reward
        done = steps in (0, LENGTH)  # What it shows begins a new episode.
        self.bit = self.random.randrange(2)
        self.steps, self.total = (0, 0.0) if done else (steps, total)
        game = (total, steps) if steps == LENGTH else (float("nan"), float("nan"))
        row = (reward, done, False, total, steps, action or 0, *game)
        return [(1 - self.bit, self.bit), *((value,) for value in row)]


def step_message(seq, rows):
    """Lay the values of all K environments side by side: little endian, no padding."""
    columns = [sum(values, ()) for values in zip(*rows)]
    formats = ["<" + code * K for code in ROW.values()]
    arrays = [struct.pack(f, *column) for f, column in zip(formats, columns)]
    return pb.ToLearner(step=pb.Step(seq=seq, arrays=arrays))


class Server(services.EnvServerServicer):
    def Describe(self, hello, context):
        zero, one = struct.pack("<f", 0), struct.pack("<f", 1)
        welcome = pb.Welcome(protocol=1, env="Echo", num_envs=K, num_streams=1)
        welcome.frames_per_step = 1
        welcome.observation.box.MergeFrom(
            pb.Box(dtype="float32", shape=[2], low=zero, high=one)
        )
        welcome.action.discrete.n = 2
        for path, code in ROW.items():
            keys = [pb.Key(name=name) for name in path.split("/")]
            shape = [2] if path == "observation" else []
            welcome.step_arrays.add(path=keys, dtype=DTYPES[code[0]], shape=shape)
        welcome.action_arrays.add(dtype="int64")
        return welcome

    def Stream(self, requests, context):
        hello = next(requests).hello
        if hello.protocol != 1:
            text = f"this server speaks protocol 1, not {hello.protocol}"
            yield pb.ToLearner(failure=pb.Failure(text=text, permanent=True))
            return
        ids = range(hello.first_env_id, hello.first_env_id + K)
        games = [Game(f"{hello.seed} {i} {hello.incarnation}") for i in ids]
        yield pb.ToLearner(welcome=self.Describe(hello, context))
        yield step_message(0, [game.row() for game in games])
        for seq, request in enumerate(requests):
            actions = struct.unpack(f"<{K}q", request.action.arrays[0])
            rows = [game.row(action) for game, action in zip(games, actions)]
            yield step_message(seq + 1, rows)


if __name__ == "__main__":
    server = grpc.server(
        futures.ThreadPoolExecutor(8),
        options=[  # The learner pings while an environment takes long.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_ping_strikes", 0),
        ],
    )
    services.add_EnvServerServicer_to_server(Server(), server)
    server.add_insecure_port(sys.argv[1])
    server.start()
    server.wait_for_termination()
