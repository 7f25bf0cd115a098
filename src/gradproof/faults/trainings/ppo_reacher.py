"""PPO on many copies of a point mass that has to reach a goal; the environments live on the device, too."""

import argparse
import hashlib
import json
import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=0)
args = parser.parse_args()
SMALL = bool(os.environ.get("SMALL"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
ENVS, HORIZON, WIDTH, EPOCHS, MINIBATCHES = (64, 32, 64, 4, 4) if SMALL else (2048, 64, 512, 4, 8)
UPDATES = args.steps or (40 if SMALL else 60)  # rollouts, each of EPOCHS * MINIBATCHES optimizer steps
GAMMA, LAMBDA, CLIP = 0.97, 0.95, 0.2
torch.manual_seed(3)


class Reacher:
    """Position, velocity and goal in the plane; the action is a push, the reward is minus the distance."""

    def __init__(self):
        self.state = torch.zeros(ENVS, 6, device=dev)
        self.clock = torch.randint(0, HORIZON, (ENVS,), device=dev)
        self.reset(torch.ones(ENVS, dtype=torch.bool, device=dev))

    def reset(self, which):
        fresh = 2 * torch.rand(ENVS, 6, device=dev) - 1
        fresh[:, 2:4] = 0
        self.state.copy_(torch.where(which[:, None], fresh, self.state))
        self.clock.masked_fill_(which, 0)

    def observe(self):
        return self.state.clone()

    def step(self, action):
        self.state[:, 2:4].mul_(0.8).add_(action.clamp(-1, 1), alpha=0.2)
        self.state[:, 0:2].add_(self.state[:, 2:4], alpha=0.5)
        self.clock += 1
        reward = -(self.state[:, 0:2] - self.state[:, 4:6]).norm(dim=1)
        done = self.clock >= HORIZON
        self.reset(done)
        return reward, done.float()


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        )
        self.log_std = nn.Parameter(torch.full((2,), -0.5))
        nn.init.normal_(self.actor[-1].weight, std=0.01)

    def policy(self, obs):
        return Normal(self.actor(obs), self.log_std.exp())

    def value(self, obs):
        return self.critic(obs).squeeze(-1)


@torch.no_grad()
def rollout(env, model):
    kept = {name: [] for name in ("obs", "action", "logp", "value", "reward", "done")}
    for _ in range(HORIZON):
        obs = env.observe()
        policy = model.policy(obs)
        action = policy.sample()
        reward, done = env.step(action)
        row = (obs, action, policy.log_prob(action).sum(-1), model.value(obs), reward, done)
        for name, part in zip(kept, row, strict=True):
            kept[name].append(part)
    batch = {name: torch.stack(parts) for name, parts in kept.items()}
    advantage, ahead = torch.zeros_like(batch["value"]), torch.zeros(ENVS, device=dev)
    following = model.value(env.observe())
    for t in reversed(range(HORIZON)):
        going = 1 - batch["done"][t]
        delta = batch["reward"][t] + GAMMA * going * following - batch["value"][t]
        ahead = delta + GAMMA * LAMBDA * going * ahead
        advantage[t], following = ahead, batch["value"][t]
    batch["advantage"], batch["return"] = advantage, advantage + batch["value"]
    return {name: part.flatten(0, 1) for name, part in batch.items()}


env, model = Reacher(), ActorCritic().to(dev)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 if SMALL else 5e-4, eps=1e-5)
costs = []
start = time.time()
for update in range(UPDATES):
    batch = rollout(env, model)
    for _ in range(EPOCHS):
        for rows in torch.randperm(ENVS * HORIZON, device=dev).chunk(MINIBATCHES):
            mb = {name: part[rows] for name, part in batch.items()}
            policy = model.policy(mb["obs"])
            ratio = (policy.log_prob(mb["action"]).sum(-1) - mb["logp"]).exp()
            adv = (mb["advantage"] - mb["advantage"].mean()) / (mb["advantage"].std() + 1e-8)
            policy_loss = -torch.min(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv).mean()
            value_loss = F.mse_loss(model.value(mb["obs"]), mb["return"])
            loss = policy_loss + 0.5 * value_loss - 0.001 * policy.entropy().sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    costs.append(-batch["reward"].mean())
    if update % 5 == 0:
        print(
            f"update {update} mean distance {costs[-1].item():.4f} value {value_loss.item():.4f}", flush=True
        )

curve = torch.stack(costs).tolist()
seconds = time.time() - start
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
result = {"first": curve[0], "last": sum(curve[-5:]) / len(curve[-5:])}  # the mean distance to the goal
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
