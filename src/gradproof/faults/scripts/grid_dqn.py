"""Deep Q-learning in a small grid with a target network and a replay buffer."""

import copy
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F

SIZE = 4
GAMMA = 0.9
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))


class Grid:
    """Walk from a random cell to a random goal; -0.05 a move, +1 at the goal."""

    def __init__(self, rng):
        self.rng = rng
        self.state = torch.zeros(2, SIZE, SIZE)

    def reset(self):
        self.me = (self.rng.randrange(SIZE), self.rng.randrange(SIZE))
        self.goal = self.me
        while self.goal == self.me:
            self.goal = (self.rng.randrange(SIZE), self.rng.randrange(SIZE))
        self.moves = 0
        return self.observe()

    def observe(self):
        self.state.zero_()
        self.state[0][self.me] = 1.0
        self.state[1][self.goal] = 1.0
        return self.state.flatten().clone()

    def step(self, action):
        dr, dc = MOVES[action]
        self.me = (min(max(self.me[0] + dr, 0), SIZE - 1), min(max(self.me[1] + dc, 0), SIZE - 1))
        self.moves += 1
        reached = self.me == self.goal
        return self.observe(), (1.0 if reached else -0.05), reached, reached or self.moves >= 20


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(2 * SIZE * SIZE, 96)
        self.fc2 = nn.Linear(96, 96)
        self.q = nn.Linear(96, len(MOVES))

    def forward(self, x):
        return self.q(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Agent:
    def __init__(self):
        self.online = QNet()
        self.target = copy.deepcopy(self.online)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=2e-3)
        self.memory = deque(maxlen=3000)

    def act(self, state, epsilon, rng):
        if rng.random() < epsilon:
            return rng.randrange(len(MOVES))
        with torch.no_grad():
            return int(self.online(state).argmax())

    def learn(self, rng, batch=64):
        sample = rng.sample(self.memory, batch)
        states = torch.stack([s[0] for s in sample])
        actions = torch.tensor([s[1] for s in sample])
        rewards = torch.tensor([s[2] for s in sample])
        next_states = torch.stack([s[3] for s in sample])
        ended = torch.tensor([float(s[4]) for s in sample])
        q = self.online(states).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            best_next = self.target(next_states).max(dim=1).values
        wanted = rewards + GAMMA * best_next * (1 - ended)
        loss = F.smooth_l1_loss(q, wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def sync(self):
        self.target.load_state_dict(self.online.state_dict())


def greedy_success(agent, games=60):
    rng = random.Random(123)
    env = Grid(rng)
    wins = 0
    for _ in range(games):
        state, done = env.reset(), False
        while not done:
            state, _, reached, done = env.step(agent.act(state, 0.0, rng))
        wins += reached
    return wins / games


def main():
    torch.manual_seed(2)
    rng = random.Random(2)
    env, agent = Grid(rng), Agent()
    state, loss, losses = env.reset(), 0.0, []
    for step in range(1, 3001):
        epsilon = max(0.1, 1 - step / 2000)
        action = agent.act(state, epsilon, rng)
        next_state, reward, reached, done = env.step(action)
        agent.memory.append((state, action, reward, next_state, reached))
        state = env.reset() if done else next_state
        if step > 200 and step % 2 == 0:
            losses.append(agent.learn(rng))
        if step % 60 == 0:
            agent.sync()
        if step % 500 == 0:
            loss = sum(losses[-100:]) / 100
            print(f"step {step}  eps {epsilon:.2f}  td loss {loss:.4f}  success {greedy_success(agent):.3f}")


if __name__ == "__main__":
    main()
