# SPDX-License-Identifier: Apache-2.0
"""A server of another make, whose action has a part of every kind, and a mask.

    python tests/trainers/foreign_body.py unix:/tmp/s [stuck]

If it is stuck, the masks of an episode's third row allow nothing for the leg.

Nothing but gRPC and proto/, like examples/foreign_server.py, whose server it changes.
"""

import struct
import sys
from concurrent import futures
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.foreign_server import Server, pb, services

K, LENGTH = 2, 5
DTYPES = {"f": "float32", "?": "bool", "i": "int32", "q": "int64", "b": "int8"}
# Path, struct's format for one environment, and shape of each part of an action.
ACTION = [(("arm",), "ff", [2]), (("legs", 0), "bb", [2]), (("legs", 1), "q", [])]
ACTION += [(("toes",), "qq", [2])]
ROW = [(("observation", "action_mask"), "8b", [8])]
ROW += [(("observation", "x"), "fff", [3]), (("reward",), "f", [])]
ROW += [(("done",), "?", []), (("truncated",), "?", [])]
ROW += [(("episode_return",), "f", []), (("episode_step",), "i", [])]
ROW += [(("last_action", *path), code, shape) for path, code, shape in ACTION]
ROW += [(("info", key), "f", []) for key in ("game_return", "game_step")]
MASKS = [(0, 1, 1, 1, 0, 0, 1, 1), (1, 0, 0, 0, 1, 1, 0, 0)]  # Legs, toe 0, toe 1.
FIRST = [(0.0, 1.0), (0, 0), (-1,), (0, 5)]


class Game:
    def __init__(self):
        self.steps = 0

    def row(self, action=FIRST):
        (mask, nan), steps = (MASKS[self.steps % 2], float("nan")), self.steps
        if steps == 2 and "stuck" in sys.argv:
            mask = (0, 0, 0, *mask[3:])
        self.steps = (self.steps + 1) % LENGTH
        done, ended = steps == 0, steps == 0 and action is not FIRST
        length = LENGTH if ended else steps
        game = [(length,), (length,)] if ended else [(nan,), (nan,)]
        row = [mask, (0.5, -0.5, steps), (float(action is not FIRST),), (done,)]
        return [*row, (False,), (length,), (length,), *action, *game]

    def allows(self, action):
        arm, bits, (leg,), toes = action
        mask = MASKS[(self.steps - 1) % LENGTH % 2]
        # Entries of the mask: 3 for the leg, from -1 on, 2 and, from 5 on, 3 for toes.
        legal = mask[leg + 1] and mask[3 + toes[0]] and mask[toes[1]]
        is_near = -1 <= arm[0] <= 1 <= arm[1] <= 3
        return legal and set(bits) <= {0, 1} and is_near


def arrays(rows, spec):
    """Lay the values of all K environments side by side: little endian."""
    for column, (_, code, _) in zip(zip(*rows), spec, strict=True):
        yield struct.pack("<" + code * K, *sum(map(tuple, column), ()))


class Body(Server):
    def Describe(self, hello, context):
        welcome = super().Describe(hello, context)
        welcome.env, welcome.num_envs = "Body", K
        for field in ("observation", "action", "step_arrays", "action_arrays"):
            welcome.ClearField(field)
        for field, spec in ("step_arrays", ROW), ("action_arrays", ACTION):
            for path, code, shape in spec:
                keys = [
                    pb.Key(**{"index" if isinstance(k, int) else "name": k})
                    for k in path
                ]
                array = getattr(welcome, field).add(path=keys, shape=shape)
                array.dtype = DTYPES[code[-1]]
        seen = {"action_mask": pb.Space(), "x": pb.Space()}
        seen["action_mask"].multi_binary.shape.append(8)
        low, high = struct.pack("<f", -9), struct.pack("<f", 9)
        seen["x"].box.CopyFrom(pb.Box(dtype="float32", shape=[3], low=low, high=high))
        arm, legs, toes = pb.Space(), pb.Space(), pb.Space()
        low, high = struct.pack("<ff", -1, 1), struct.pack("<ff", 1, 3)
        arm.box.CopyFrom(pb.Box(dtype="float32", shape=[2], low=low, high=high))
        legs.tuple.spaces.add().multi_binary.shape.append(2)
        legs.tuple.spaces.add().discrete.CopyFrom(pb.Discrete(n=3, start=-1))
        toes.multi_discrete.CopyFrom(
            pb.MultiDiscrete(shape=[2], nvec=[2, 3], start=[0, 5])
        )
        parts = {"arm": arm, "legs": legs, "toes": toes}
        for space, items in (welcome.observation, seen), (welcome.action, parts):
            entries = [pb.Entry(key=key, space=part) for key, part in items.items()]
            space.dict.entries.extend(entries)
        return welcome

    def Stream(self, requests, context):
        hello = next(requests).hello
        games = [Game() for _ in range(K)]
        yield pb.ToLearner(welcome=self.Describe(hello, context))
        rows = [game.row() for game in games]
        for seq in range(sys.maxsize):
            step = pb.Step(seq=seq, arrays=arrays(rows, ROW))
            yield pb.ToLearner(step=step)
            received = next(requests).action.arrays
            columns = []
            for data, (_, code, _) in zip(received, ACTION, strict=True):
                values, n = struct.unpack("<" + code * K, data), len(code)
                columns.append([values[i * n : (i + 1) * n] for i in range(K)])
            actions = list(zip(*columns))
            if not all(map(Game.allows, games, actions)):
                failure = pb.Failure(text=f"illegal: {actions}", permanent=True)
                yield pb.ToLearner(failure=failure)
                return
            rows = [game.row(action) for game, action in zip(games, actions)]


if __name__ == "__main__":
    server = grpc.server(futures.ThreadPoolExecutor(8))
    services.add_EnvServerServicer_to_server(Body(), server)
    server.add_insecure_port(sys.argv[1])
    server.start()
    server.wait_for_termination()
