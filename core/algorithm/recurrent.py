# SPDX-License-Identifier: Apache-2.0
"""An LSTM or GRU over rollouts with episode ends in them, without a loop over time."""

from typing import Any

import torch
from torch import nn


def create_lstm(input_size: int, hidden_size: int) -> nn.LSTM:
    """Return an LSTM whose forget gates are open at first (bias 1).

    With torch's own biases, around 0, an untrained LSTM keeps half of its state in each
    step, and so half of the gradient. A bias of 1 keeps 73 % (Jozefowicz et al. 2015).
    """
    lstm = nn.LSTM(input_size, hidden_size)
    with torch.no_grad():  # Gates are stacked as input, forget, cell, output.
        lstm.get_parameter("bias_ih_l0")[hidden_size : 2 * hidden_size] += 1.0
    return lstm


def unroll_lstm(
    lstm: nn.LSTM | nn.GRU,
    x: torch.Tensor,
    done: torch.Tensor,
    state: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Run an LSTM or GRU over rows with episode ends in them, without a loop over time.

    Each column is cut where an episode begins. The pieces run side by side as one
    packed sequence. Each piece starts from a zero state, but the first piece of a
    column starts from the stored state unless an episode begins at row 0.

    Args:
      x: [T, B, features].  done: [T, B] bool.
      state: two tensors [layers, B, hidden], for a GRU one. With the LSTM's option
        `proj_size`, the first has that size.

    Returns:
      [T, B, hidden], and the state after the last row.
    """
    T, B, _ = x.shape
    state = tuple(s.masked_fill(done[0].view(1, B, 1), 0.0) for s in state)
    if T == 1 or not done[1:].any():  # Syncs with the device.
        return _run(lstm, x, state)

    # Number the rows column by column: row (t, b) is b * T + t.
    starts = done.T.clone()  # [B, T]
    starts[:, 0] = True
    first = starts.flatten().nonzero().squeeze(1)  # [P]: where each piece begins
    piece = starts.flatten().cumsum(0) - 1  # [B*T]: the piece that each row is in
    length = first.diff(append=first.new_tensor([B * T]))
    # A packed sequence has the longest piece first, and the k-th rows of all pieces
    # next to each other.
    by_length = length.argsort(descending=True, stable=True)
    rank = by_length.argsort()  # [P]: the place of each piece in this order
    k = torch.arange(B * T, device=x.device) - first[piece]
    order = (k * len(first) + rank[piece]).argsort()
    packed = nn.utils.rnn.PackedSequence(
        x.transpose(0, 1).flatten(0, 1)[order], k.bincount().cpu()
    )
    opening = rank[piece[::T]]  # [B]: the packed place of each column's first piece
    closing = rank[piece[T - 1 :: T]]
    zeros = (s.new_zeros(s.shape[0], len(first), s.shape[2]) for s in state)
    starting = tuple(x.index_copy(1, opening, s) for x, s in zip(zeros, state))
    out, ending = _run(lstm, packed, starting)
    y = torch.empty_like(out.data).index_copy(0, order, out.data)  # [B*T, hidden]
    return y.view(B, T, -1).transpose(0, 1), tuple(s[:, closing] for s in ending)


def _run(lstm: nn.LSTM | nn.GRU, x: Any, state: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(lstm, nn.LSTM):
        return lstm(x, state)
    y, last = lstm(x, *state)
    return y, (last,)
