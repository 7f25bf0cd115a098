"""Modes, loads, schedules, clips and settings: each slip planted in a small watched loop, and a healthy twin."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradproof
from gradproof.diagnosis import bookkeeping
from gradproof.diagnosis.curves import trains_well
from gradproof.record.run import open_run
from gradproof.record.writer import RunWriter


class Net(nn.Module):
    def __init__(self, always_on=False):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 1)
        self.always_on = always_on

    def forward(self, x):
        h = self.first(x).relu()
        h = F.dropout(h, 0.2) if self.always_on else self.drop(h)
        return self.last(h)


def train(
    tmp_path, *, model=None, optimizer=None, each_step=None, after_epoch=None, epochs=4, batches=10, clip=None
):
    """A few epochs of a regression; returns the causes by id."""
    torch.manual_seed(0)
    model = model or Net()
    optimizer = optimizer(model.parameters()) if optimizer else torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(16 * batches, 4)
    y = x[:, :1] - x[:, 1:2]
    with gradproof.watch(model, optimizer, out=tmp_path / "run", experiments=False):
        for _ in range(epochs):
            model.train()
            for rows in range(0, len(x), 16):
                optimizer.zero_grad()
                F.mse_loss(model(x[rows : rows + 16]), y[rows : rows + 16]).backward()
                if clip:
                    clip(model)
                optimizer.step()
                if each_step:
                    each_step(optimizer)
            if after_epoch:
                after_epoch(model, x)
    found = gradproof.diagnose(tmp_path / "run")
    return {cause.id: cause for cause in found.causes if cause.level != "note"}


def validate(model, x, mode="eval"):
    getattr(model, mode)()
    with torch.no_grad():
        return model(x)


def test_validation_in_train_mode_is_named_with_its_line(tmp_path):
    causes = train(tmp_path, after_epoch=lambda m, x: validate(m, x, "train"))
    cause = causes["train-eval-mode-error/train-mode"]
    assert cause.level == "problem" and cause.confidence == "proven"
    assert "drop" in cause.where and "test_bookkeeping.py:" in cause.where


def test_validation_in_eval_mode_is_silent(tmp_path):
    assert not [id for id in train(tmp_path, after_epoch=validate) if id.startswith("train-eval")]


def test_forward_without_gradient_in_every_step_is_part_of_training(tmp_path):
    model, x = Net(), torch.randn(8, 4)

    def act(optimizer):
        with torch.no_grad():
            model(x)

    assert not [id for id in train(tmp_path, model=model, each_step=act) if id.startswith("train-eval")]


def test_functional_dropout_that_is_always_on(tmp_path):
    causes = train(tmp_path, model=Net(always_on=True), after_epoch=validate)
    assert "test_bookkeeping.py:" in causes["train-eval-mode-error/functional-dropout"].where


class Attends(Net):
    def __init__(self, asks):
        super().__init__()
        self.asks = asks

    def forward(self, x):
        h = self.first(x)[:, None]
        p = 0.0 if self.asks and not self.training else 0.2
        return self.last(F.scaled_dot_product_attention(h, h, h, dropout_p=p)[:, 0])


@pytest.mark.parametrize("asks", [True, False])
def test_attention_that_drops_in_eval_mode(tmp_path, asks):
    causes = train(tmp_path, model=Attends(asks), after_epoch=validate)
    found = causes.get("train-eval-mode-error/functional-dropout")
    assert (found is None) == asks and (asks or "dropout_p" in found.evidence[0])


class MadeInForward(Net):
    def forward(self, x):
        return self.last(nn.Dropout(0.2)(self.first(x)))


class FoundByEval(Net):
    def forward(self, x):
        return self.last(self.drop(self.first(x)))


@pytest.mark.parametrize("model", [MadeInForward, FoundByEval])
def test_a_dropout_that_eval_does_not_reach(tmp_path, model):
    causes = train(tmp_path, model=model(), after_epoch=validate)
    found = causes.get("train-eval-mode-error/functional-dropout")
    assert (found is not None) == (model is MadeInForward)
    if found:
        assert "eval() does not reach" in found.evidence[0] and "test_bookkeeping.py:" in found.where


def test_nothing_stays_wrapped():
    before = torch.no_grad.__enter__, nn.Module.eval, nn.Module.load_state_dict, torch.load, F.dropout
    attention = F.scaled_dot_product_attention
    model = Net()
    with (
        gradproof.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), out=None) as run,
        torch.no_grad(),
    ):
        model(torch.randn(2, 4))
    assert before == (
        torch.no_grad.__enter__,
        nn.Module.eval,
        nn.Module.load_state_dict,
        torch.load,
        F.dropout,
    )
    assert F.scaled_dot_product_attention is attention
    for file in run.path.iterdir():
        file.unlink()
    run.path.rmdir()


@pytest.mark.parametrize("keep", [lambda m: m.state_dict(), lambda m: copy.deepcopy(m.state_dict())])
def test_best_weights_kept_by_reference(tmp_path, keep):
    kept = []

    def after(model, x):
        kept.append(keep(model))
        if len(kept) == 4:
            model.load_state_dict(kept[0])

    causes = train(tmp_path, after_epoch=after)
    shared = kept[0]["last.bias"].data_ptr() == kept[1]["last.bias"].data_ptr()
    assert ("weights-state-error/by-reference" in causes) == shared


@pytest.mark.parametrize("prefix", ["module.", ""])
def test_keys_that_fit_nowhere(tmp_path, prefix):
    def after(model, x):
        state = {prefix + name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, strict=False)

    assert ("weights-state-error/keys" in train(tmp_path, after_epoch=after)) == bool(prefix)


@pytest.mark.parametrize("whole", [True, False])
def test_clip_of_other_parameters(tmp_path, whole):
    other = Net()
    clip = lambda m: nn.utils.clip_grad_norm_((m if whole else other).parameters(), 1.0)  # noqa: E731
    found = train(tmp_path, clip=clip).get("grad-clip-misuse/wrong-parameters")
    assert (found is None) == whole
    assert whole or found.confidence == "proven"


@pytest.mark.parametrize("clipped", ["second", "neither"])
def test_a_clip_may_be_for_the_second_optimizer_that_steps(clipped, tmp_path):
    tables, dense, x = nn.Embedding(9, 4), nn.Linear(4, 1), torch.arange(9)
    chosen = {"second": dense, "neither": nn.Linear(4, 1)}[clipped]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (tables, dense)]
    with gradproof.watch(nn.ModuleList([tables, dense]), out=tmp_path / "run", experiments=False):
        for _ in range(20):
            dense(tables(x)).square().mean().backward()
            nn.utils.clip_grad_norm_(chosen.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found = {cause.id for cause in gradproof.diagnose(tmp_path / "run").causes}
    assert ("grad-clip-misuse/wrong-parameters" in found) == (clipped == "neither")


def train_masters(path, masters_of, clipped_of, clear=True, steps=12):
    """A bfloat16 model whose gradients are clipped and copied to float32 masters, which the optimizer steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1)).to(torch.bfloat16)
    weights = list(model.parameters())
    masters, clipped = masters_of(weights), clipped_of(model)
    optimizer = torch.optim.SGD(masters, lr=0.05)
    x = torch.randn(32, 4).to(torch.bfloat16)
    with gradproof.watch(model, optimizer, out=path, experiments=False):
        for _ in range(steps):
            F.mse_loss(model(x), x[:, :1]).backward()
            nn.utils.clip_grad_norm_(clipped, 1.0)
            gradients = [p.grad.float() for p in weights]
            if len(masters) == 1:
                gradients = [torch.cat([g.reshape(-1) for g in gradients])]
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient
            if clear:
                model.zero_grad()
            optimizer.step()
            with torch.no_grad():
                new = torch.cat([master.reshape(-1) for master in masters])
                for p, part in zip(weights, new.split([p.numel() for p in weights]), strict=True):
                    p.copy_(part.view_as(p))
            model.zero_grad()
    return {cause.id for cause in gradproof.diagnose(path).causes if cause.level != "note"}


def float_copies(weights):
    return [p.detach().float().clone() for p in weights]


def flat_copy(weights):
    return [torch.cat([p.detach().float().reshape(-1) for p in weights])]


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("masters_of", [float_copies, flat_copy])
def test_master_weights_go_with_the_parameters_that_are_clipped(masters_of, clear, tmp_path):
    own = train_masters(tmp_path / "own", masters_of, lambda model: list(model.parameters()), clear)
    assert "grad-clip-misuse/wrong-parameters" not in own
    # a copy that was made before training is as good as the model at the first step, and then no longer
    other = train_masters(
        tmp_path / "other", masters_of, lambda m: list(copy.deepcopy(m).parameters()), clear
    )
    assert "grad-clip-misuse/wrong-parameters" in other


def test_ones_and_zeros_that_two_models_share_make_no_copies(tmp_path):
    """A transformer's norms and biases are the same in any two of them before training."""

    def make():
        model = nn.Sequential(nn.Linear(4, 16), *(nn.LayerNorm(16) for _ in range(8)), nn.Linear(16, 1))
        for layer in (model[0], model[-1]):
            nn.init.zeros_(layer.bias)
        return model

    other = make()
    clip = lambda m: nn.utils.clip_grad_norm_(other.parameters(), 1.0)  # noqa: E731
    causes = train(tmp_path, model=make(), optimizer=lambda p: torch.optim.SGD(p, lr=1e-6), clip=clip)
    assert causes["grad-clip-misuse/wrong-parameters"].confidence == "proven"


def test_clip_of_one_tensor_at_a_time(tmp_path):
    def clip(model):
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_(parameter, 1e-3)

    assert "grad-clip-misuse/per-tensor" in train(tmp_path, clip=clip)


SCHEDULES = {
    "dies-early": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.2),
    "warmup-never-ends": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, s / 5000)),
    "multiplied": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.05 * min(1.0, (s + 1) / 10)),
    "cycles-too-fast": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 6),
    "below-zero": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 - s / 40),
    "": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 60),
    "  ": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 - s / 60 if s < 58 else -1e-17),
    " ": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (s + 1) / 20)),
}


@pytest.mark.parametrize("what", SCHEDULES)
def test_schedules(tmp_path, what):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = SCHEDULES[what](optimizer)
    causes = train(
        tmp_path, model=model, optimizer=lambda _: optimizer, each_step=lambda _: scheduler.step(), epochs=6
    )
    named = [id for id in causes if id.startswith("lr-schedule-error")]
    assert named == ([f"lr-schedule-error/{what}"] if what.strip() else [])


@pytest.mark.parametrize("length, ids", [(200, ["lr-schedule-error/warmup-never-ends"]), (8, [])])
def test_a_warmup_in_steps_that_is_stepped_once_an_epoch(tmp_path, length, ids):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / length))

    causes = train(
        tmp_path,
        model=model,
        optimizer=lambda _: optimizer,
        after_epoch=lambda *_: scheduler.step(),
        epochs=8,
    )
    found = [id for id in causes if id.startswith("lr-schedule-error")]
    assert found == ids and all(causes[id].level in ("warning", "problem") for id in ids)


def noam(scale, warmup):
    return lambda s: scale * min((s + 1) ** -0.5, (s + 1) * warmup**-1.5)


MEANT = {  # learning rate that Adam is given, schedule
    "noam from 1": (1.0, lambda o: torch.optim.lr_scheduler.LambdaLR(o, noam(0.1, 10))),
    "noam from a small rate": (0.1, lambda o: torch.optim.lr_scheduler.LambdaLR(o, noam(1.0, 40))),
    "noam whose peak is its base": (0.1, lambda o: torch.optim.lr_scheduler.LambdaLR(o, noam(1.0, 100))),
    "a factor": (1.0, lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.01 * 0.99**s)),
    "the start of a long warmup": (
        1.0,
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: (s + 1) / 5000),
    ),
    "short cycles": (0.02, lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 20)),
}


@pytest.mark.parametrize("what", MEANT)
def test_schedules_that_are_meant(tmp_path, what):
    """The rates that come of them train well, whatever the optimizer was given."""
    rate, schedule = MEANT[what]
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    scheduler = schedule(optimizer)
    causes = train(
        tmp_path, model=model, optimizer=lambda _: optimizer, each_step=lambda _: scheduler.step(), epochs=14
    )
    assert not [id for id in causes if id.startswith("lr-schedule-error")]
    assert trains_well(open_run(tmp_path / "run"))


def test_a_rate_that_stays_far_below_is_a_suspicion_where_nothing_is_learned(tmp_path):
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1e-5 * 0.99**s)
    causes = train(
        tmp_path, model=model, optimizer=lambda _: optimizer, each_step=lambda _: scheduler.step(), epochs=6
    )
    (found,) = [cause for id, cause in causes.items() if id.startswith("lr-schedule-error/multiplied")]
    assert found.level == "warning" and found.confidence != "proven"


@pytest.mark.parametrize("learned", [True, False])
def test_a_rate_that_dies_when_all_is_learned(tmp_path, learned):
    writer = RunWriter(tmp_path / "run", {"optimizers": [{"class": "SGD", "base_lr": 0.1}]})
    for step in range(200):
        loss = 2.0 * (0.8 if learned else 0.999) ** step + (0.001 if learned else 0.0)
        lr = 0.1 * 0.85**step
        writer.write_step(
            {"step": step, "loss": loss, "lr": lr, "optimizer": 0, "order": "zbsl", "backwards": 1}
        )
    writer.close()
    (found,) = list(bookkeeping.schedule(open_run(tmp_path / "run")))
    assert (found.name, found.level) == ("dies-early", "note" if learned else "problem")


SETTINGS = {
    "betas": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.9, 0.1)),
    "eps": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1.0),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.999),
    "weight-decay": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.5),
    "": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    " ": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=5e-4),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings(tmp_path, what):
    causes = train(tmp_path, optimizer=SETTINGS[what])
    named = [id for id in causes if id.startswith("optimizer-config")]
    assert named == ([f"optimizer-config/{what}"] if what.strip() else [])


def test_optimizer_made_anew_every_epoch(tmp_path):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(64, 4)
    first = torch.optim.Adam(model.parameters())
    from gradproof.probes.hooks import attach
    from gradproof.probes.names import Names
    from gradproof.probes.watch import open_session

    session = open_session(tmp_path / "run", command=["x"], names=Names())
    with attach(session):
        for epoch in range(5):
            optimizer = first if epoch == 0 else torch.optim.Adam(model.parameters())
            for _ in range(4):
                optimizer.zero_grad()
                model(x).pow(2).mean().backward()
                optimizer.step()
        session.close()
    causes = {cause.id for cause in gradproof.diagnose(tmp_path / "run").causes}
    assert "weights-state-error/optimizer-remade" in causes


def accumulate(tmp_path, when_to_step, clear_each=False):
    """Micro-batches in groups of four; `when_to_step(i)` decides after the i-th of ten epochs of sixteen."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with gradproof.watch(model, optimizer, out=tmp_path / "run", experiments=False):
        for _ in range(10):
            for i in range(16):
                if clear_each:
                    optimizer.zero_grad()
                x = torch.randn(8, 4)
                (F.mse_loss(model(x), x[:, :1]) / 4).backward()
                if when_to_step(i):
                    optimizer.step()
                    optimizer.zero_grad()
    found = gradproof.diagnose(tmp_path / "run")
    return {cause.id for cause in found.causes if cause.family == "grad-accumulation-error"}


def test_windows_of_micro_batches(tmp_path):
    assert not accumulate(tmp_path / "a", lambda i: (i + 1) % 4 == 0)
    assert not accumulate(tmp_path / "b", lambda i: (i + 1) % 5 == 0 or i == 15)  # a shorter last window
    uneven = accumulate(tmp_path / "c", lambda i: (i + 1) // 4 == 1)
    assert uneven == {"grad-accumulation-error/uneven-windows"}
    cleared = accumulate(tmp_path / "d", lambda i: (i + 1) % 4 == 0, clear_each=True)
    assert cleared == {"grad-accumulation-error/overwritten"}


@pytest.mark.parametrize(
    "steps, elsewhere, found", [(40, False, True), (100, False, False), (40, True, False)]
)
def test_steps_that_stop_while_gradients_go_on(tmp_path, steps, elsewhere, found):
    """Of 100 backwards; those at another line may be those of an attack, or of an explanation."""
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradproof.watch(model, optimizer, out=tmp_path / "run", experiments=False):
        for step in range(100):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if elsewhere and step >= steps:
                loss.backward()
            else:
                loss.backward()
            if step < steps:
                optimizer.step()
    seen = list(bookkeeping.steps_stopped(open_run(tmp_path / "run")))
    assert [s.suspects for s in seen] == ([("param-not-updated/steps-stopped",)] if found else [])


@pytest.mark.parametrize(
    "facts, found",
    [
        ({}, True),
        ({"moved_between_backwards": True}, False),
        ({"lines": {"backward": ["a.py:1", "a.py:2"]}}, False),
    ],
)
def test_backwards_with_a_purpose_of_their_own(tmp_path, facts, found):
    writer = RunWriter(tmp_path / "run", {"optimizers": [{"name": "a", "class": "SGD"}], "facts": facts})
    for step in range(20):
        writer.write_step({"step": step, "loss": 1.0, "order": "bzbs", "lr": 0.1, "backwards": 2})
    writer.close()
    assert bool(list(bookkeeping.cleared_between_backwards(open_run(tmp_path / "run")))) == found


def test_two_stages_of_training_may_have_windows_of_their_own(tmp_path):
    writer = RunWriter(tmp_path / "run", {"optimizers": [{"name": "a"}, {"name": "b"}]})
    for step in range(90):
        late = step >= 60
        writer.write_step({"step": step, "loss": 1.0, "order": "bbbsz" if late else "bsz", "lr": 0.1,
                           "optimizer": int(late), "backwards": 3 if late else 1})  # fmt: skip
    writer.close()
    assert not list(bookkeeping.uneven_windows(open_run(tmp_path / "run")))


@pytest.mark.parametrize("norm, skipped, found", [(math.inf, 0, True), (1e6, 0, False), (math.inf, 1, False)])
def test_a_clip_that_makes_nan_of_infinity(norm, skipped, found, tmp_path):
    """A GradScaler that is still looking for its scale skips the step."""
    writer = RunWriter(tmp_path / "run", {"facts": {"lines": {"clip": ["train.py:7"]}}})
    for step in range(8):
        last = step == 7
        row = {"step": step, "loss": 1.0, "order": "zbcs", "lr": 0.1, "clip_limit": 1.0}
        row |= {"norm_before_clip": norm if last else 2.0, "grad_norm": math.nan if last else 1.0}
        row["skipped"] = skipped if last else 0
        writer.write_step(row)
    writer.close()
    seen = list(bookkeeping.clip_of_infinity(open_run(tmp_path / "run")))
    assert [(s.step, s.where) for s in seen] == ([(7, "train.py:7")] if found else [])
