# SPDX-License-Identifier: Apache-2.0
"""A learner as people wrote them on TorchBeast in 2019, for
tests/extension/test_old_forks.py.

It knows the extension as it was: rows are tuples, one environment per stream, threads
without supervision, a main loop that looks at `stats` and at the sizes of the queues.
Whatever here needs a change to run is a break for somebody's fork.
"""

import collections
import logging
import threading
import time

import torch
from torch import nn
from torch.nn import functional as F

import libtorchbeast
import nest
from core.algorithm import vtrace

EnvOutput = collections.namedtuple(
    "EnvOutput", "frame rewards done episode_step episode_return"
)
AgentOutput = collections.namedtuple("AgentOutput", "action policy_logits baseline")


class Net(nn.Module):
    def __init__(self, num_inputs, num_actions, action_dtype=torch.int64):
        super().__init__()
        self.action_dtype = action_dtype
        self.fc = nn.Linear(num_inputs, 16)
        self.core = nn.LSTM(16 + 1, 16)
        self.policy = nn.Linear(16, num_actions)
        self.baseline = nn.Linear(16, 1)

    def initial_state(self, batch_size=1):
        return tuple(torch.zeros(1, batch_size, 16) for _ in range(2))

    def forward(self, inputs, core_state):
        T, B = inputs["reward"].shape
        x = F.relu(self.fc(inputs["frame"].view(T * B, -1).float()))
        reward = torch.clamp(inputs["reward"], -1, 1).view(T * B, 1)
        x = torch.cat([x, reward], dim=-1).view(T, B, -1)
        outputs = []
        for row, notdone in zip(x.unbind(), (~inputs["done"]).float().unbind()):
            core_state = nest.map(notdone.view(1, -1, 1).mul, core_state)
            output, core_state = self.core(row.unsqueeze(0), core_state)
            outputs.append(output)
        x = torch.flatten(torch.cat(outputs), 0, 1)
        policy_logits = self.policy(x)
        action = torch.multinomial(F.softmax(policy_logits, dim=1), num_samples=1)
        return (
            action.view(T, B).to(self.action_dtype),
            policy_logits.view(T, B, -1),
            self.baseline(x).view(T, B),
        ), core_state


def inference(inference_batcher, model, lock=threading.Lock()):  # noqa: B008
    with torch.no_grad():
        for batch in inference_batcher:
            env_outputs, agent_state = batch.get_inputs()
            frame, reward, done, *_ = env_outputs
            with lock:
                outputs = model(
                    dict(frame=frame, reward=reward, done=done), agent_state
                )
            batch.set_outputs(nest.map(lambda t: t.cpu(), outputs))


def compute_loss(flags, model, tensors):
    """Return the loss, and the rows that it is about: an `EnvOutput`."""
    batch, initial_agent_state = tensors
    env_outputs, actor_outputs = batch
    frame, reward, done, *_ = env_outputs
    learner_outputs, _ = model(
        dict(frame=frame, reward=reward, done=done), initial_agent_state
    )
    bootstrap_value = AgentOutput._make(learner_outputs).baseline[-1]
    batch = nest.map(lambda t: t[1:], batch)
    learner_outputs = nest.map(lambda t: t[:-1], AgentOutput._make(learner_outputs))
    env_outputs, actor_outputs = batch
    env_outputs = EnvOutput._make(env_outputs)
    actor_outputs = AgentOutput._make(actor_outputs)

    actions = actor_outputs.action.long()
    vtrace_returns = vtrace.from_logits(
        behavior_policy_logits=actor_outputs.policy_logits,
        target_policy_logits=learner_outputs.policy_logits,
        actions=actions,
        discounts=(~env_outputs.done).float() * flags.discounting,
        rewards=torch.clamp(env_outputs.rewards, -1, 1),
        values=learner_outputs.baseline,
        bootstrap_value=bootstrap_value,
    )
    log_probs = vtrace.action_log_probs(learner_outputs.policy_logits, actions)
    log_policy = F.log_softmax(learner_outputs.policy_logits, dim=-1)
    total_loss = (
        -torch.sum(log_probs * vtrace_returns.pg_advantages)
        + 0.5 * torch.sum((vtrace_returns.vs - learner_outputs.baseline) ** 2)
        + flags.entropy_cost * torch.sum(log_policy.exp() * log_policy)
    )
    return total_loss, env_outputs


def learn(flags, learner_queue, model, actor_model, optimizer, stats, lock):
    for tensors in learner_queue:
        tensors = nest.map(lambda t: t.to("cpu"), tensors)
        with lock:  # One thread learns at a time.
            total_loss, env_outputs = compute_loss(flags, model, tensors)
            optimizer.zero_grad()
            total_loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 40.0)
            optimizer.step()
            actor_model.load_state_dict(model.state_dict())
            episode_returns = env_outputs.episode_return[env_outputs.done]
            stats["step"] = (
                stats.get("step", 0) + flags.unroll_length * flags.batch_size
            )
            stats["mean_episode_return"] = torch.mean(episode_returns).item()
            stats["total_loss"] = total_loss.item()
            stats["rows"].append(env_outputs)


def train(flags):
    """Learn for `flags.total_steps`; return what was seen on the way."""
    learner_queue = libtorchbeast.BatchingQueue(
        batch_dim=1,
        minimum_batch_size=flags.batch_size,
        maximum_batch_size=flags.batch_size,
        check_inputs=True,
        maximum_queue_size=flags.batch_size,
    )
    inference_batcher = libtorchbeast.DynamicBatcher(
        batch_dim=1,
        minimum_batch_size=1,
        maximum_batch_size=512,
        timeout_ms=100,
        check_outputs=True,
    )
    model = Net(flags.num_inputs, flags.num_actions, flags.action_dtype)
    actor_model = Net(flags.num_inputs, flags.num_actions, flags.action_dtype)
    actor_model.load_state_dict(model.state_dict())
    actors = libtorchbeast.ActorPool(
        unroll_length=flags.unroll_length,
        learner_queue=learner_queue,
        inference_batcher=inference_batcher,
        env_server_addresses=flags.addresses,
        initial_agent_state=actor_model.initial_state(),
    )
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=flags.learning_rate, eps=0.01, alpha=0.99
    )
    stats = {"rows": []}
    lock = threading.Lock()

    def run():
        try:
            actors.run()
        except Exception as e:
            logging.error("Exception in actorpool thread!")
            flags.actorpool_errors.append(e)  # In 2019: traceback.print_exc()

    actorpool_thread = threading.Thread(target=run, name="actorpool-thread")
    learner_threads = [
        threading.Thread(
            target=learn,
            name=f"learner-thread-{i}",
            args=(flags, learner_queue, model, actor_model, optimizer, stats, lock),
        )
        for i in range(2)
    ]
    inference_threads = [
        threading.Thread(
            target=inference,
            name=f"inference-thread-{i}",
            args=(inference_batcher, actor_model),
        )
        for i in range(2)
    ]
    actorpool_thread.start()
    for t in learner_threads + inference_threads:
        t.start()

    while stats.get("step", 0) < flags.total_steps:
        time.sleep(flags.log_every_s)
        logging.info(
            "Step %i. Inference batcher size: %i. Learner queue size: %i.",
            stats.get("step", 0),
            inference_batcher.size(),
            learner_queue.size(),
        )

    inference_batcher.close()
    learner_queue.close()
    actorpool_thread.join()
    for t in learner_threads + inference_threads:
        t.join()
    return stats
