"""REINFORCE with a learned baseline: push a cart to a goal on a line, many carts at once."""

import torch
import torch.nn as nn
from torch.distributions import Categorical

ENVS, HORIZON, UPDATES = 48, 20, 120
GAMMA = 0.95


class Carts:
    """Position and speed of each cart; three actions: push left, wait, push right."""

    def reset(self):
        self.position = torch.rand(ENVS) * 2 - 1
        self.speed = torch.zeros(ENVS)
        self.goal = torch.rand(ENVS) * 2 - 1
        return self.observe()

    def observe(self):
        return torch.stack([self.position, self.speed, self.goal, self.goal - self.position], dim=1)

    def step(self, action):
        self.speed = 0.8 * self.speed + 0.1 * (action.float() - 1)
        self.position = self.position + self.speed
        reward = -(self.goal - self.position).abs()
        return self.observe(), reward


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy = nn.Linear(64, 3)
        self.value = nn.Linear(64, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return self.policy(h), self.value(h).squeeze(-1)


def play(env, net):
    log_probs, values, rewards = [], [], []
    obs = env.reset()
    for _ in range(HORIZON):
        logits, value = net(obs)
        dist = Categorical(logits=logits)
        action = dist.sample()
        log_probs.append(dist.log_prob(action))
        values.append(value)
        obs, reward = env.step(action)
        rewards.append(reward)
    return torch.stack(log_probs), torch.stack(values), torch.stack(rewards)


def discounted(rewards):
    returns, running = [], torch.zeros(ENVS)
    for reward in reversed(rewards):
        running = reward + GAMMA * running
        returns.insert(0, running)
    return torch.stack(returns)


def main():
    torch.manual_seed(41)
    env, net = Carts(), ActorCritic()
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    recent = []
    for update in range(1, UPDATES + 1):
        log_probs, values, rewards = play(env, net)
        returns = discounted(rewards)
        advantage = returns - values.detach()
        policy_loss = -(log_probs * advantage).mean()
        value_loss = (returns - values).pow(2).mean()
        loss = policy_loss + 0.1 * value_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        recent = (recent + [rewards.sum(dim=0).mean().item()])[-10:]
        if update % 10 == 0:
            print(
                f"update {update} loss {loss.item():.3f} value loss {value_loss.item():.3f} return {sum(recent) / len(recent):.3f}"
            )


if __name__ == "__main__":
    main()
