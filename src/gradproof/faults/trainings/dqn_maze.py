"""Deep Q-learning in many small mazes at once: replay on the device, target network, Huber loss."""

import argparse
import copy
import hashlib
import json
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=0)
args = parser.parse_args()
SMALL = bool(os.environ.get("SMALL"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
SIDE, ENVS, WIDTH, BATCH, ROOM = (5, 32, 64, 128, 10_000) if SMALL else (8, 512, 1024, 4096, 200_000)
STEPS = args.steps or (1200 if SMALL else 3000)
GAMMA, SYNC = 0.9, 50 if SMALL else 100
torch.manual_seed(0)
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]], device=dev)


class Maze:
    """A walker on a SIDE by SIDE floor looks for the exit; one point for reaching it, a little off for a wall."""

    def __init__(self):
        self.walker = torch.randint(0, SIDE, (ENVS, 2), device=dev)
        self.exit = torch.randint(0, SIDE, (ENVS, 2), device=dev)

    def observe(self):
        cells = torch.zeros(ENVS, 2, SIDE * SIDE, device=dev)
        index = torch.stack([self.walker, self.exit], dim=1)
        return cells.scatter_(2, (index[..., 0] * SIDE + index[..., 1])[..., None], 1.0).flatten(1)

    def step(self, action):
        wanted = self.walker + MOVES[action]
        self.walker = wanted.clamp(0, SIDE - 1)
        bumped = (wanted != self.walker).any(1).float()
        found = (self.walker == self.exit).all(1)
        after = self.observe()
        fresh = torch.randint(0, SIDE, (2, ENVS, 2), device=dev)
        self.walker = torch.where(found[:, None], fresh[0], self.walker)
        self.exit = torch.where(found[:, None], fresh[1], self.exit)
        return after, found.float() - 0.1 * bumped, found.float()


class Replay:
    def __init__(self):
        wide = 2 * SIDE * SIDE
        self.obs, self.next = torch.zeros(ROOM, wide, device=dev), torch.zeros(ROOM, wide, device=dev)
        self.action = torch.zeros(ROOM, dtype=torch.long, device=dev)
        self.reward, self.done = torch.zeros(ROOM, device=dev), torch.zeros(ROOM, device=dev)
        self.count = 0

    def add(self, *parts):
        at = torch.arange(self.count, self.count + ENVS, device=dev) % ROOM
        for memory, part in zip(
            (self.obs, self.action, self.reward, self.next, self.done), parts, strict=True
        ):
            memory[at] = part
        self.count += ENVS

    def sample(self):
        rows = torch.randint(0, min(self.count, ROOM), (BATCH,), device=dev)
        return self.obs[rows], self.action[rows], self.reward[rows], self.next[rows], self.done[rows]


online = nn.Sequential(
    nn.Linear(2 * SIDE * SIDE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)
).to(dev)
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3 if SMALL else 5e-4)
env, replay = Maze(), Replay()

found, losses = [], []
start = time.time()
for step in range(STEPS):
    epsilon = max(0.1, 1 - 2 * step / STEPS)
    obs = env.observe()
    with torch.no_grad():
        greedy = online(obs).argmax(1)
    explore = torch.rand(ENVS, device=dev) < epsilon
    action = torch.where(explore, torch.randint(0, 4, (ENVS,), device=dev), greedy)
    after, reward, done = env.step(action)
    replay.add(obs, action, reward, after, done)
    found.append(done.mean())
    states, actions, rewards, nexts, dones = replay.sample()
    with torch.no_grad():
        future = target(nexts).max(1).values
        goal = rewards + GAMMA * (1 - dones) * future
    chosen = online(states).gather(1, actions[:, None]).squeeze(1)
    loss = F.smooth_l1_loss(chosen, goal)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(online.parameters(), 10.0)
    optimizer.step()
    losses.append(loss.detach())
    if step % SYNC == 0:
        target.load_state_dict(online.state_dict())
    if step % 100 == 0:
        print(f"step {step} td loss {loss.item():.5f} exits a move {found[-1].item():.3f}", flush=True)

seconds = time.time() - start
exits = torch.stack(found).tolist()
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in online.parameters()))
# as something that falls: minus the share of moves that reach an exit
result = {"first": -sum(exits[:50]) / 50, "last": -sum(exits[-50:]) / 50, "metric": sum(exits[-50:]) / 50}
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
