"""The callbacks, with the real libraries on tiny real models: healthy, sick, and raising in mid-training."""

import gc
import os
import warnings

import pytest
import torch
from torch import nn

import gradproof
from gradproof.record.run import open_run

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def hooks_left():
    """What watching leaves behind in torch: nothing, afterwards."""
    from torch.optim import optimizer as module

    wrapped = [torch.autograd.backward, torch.optim.Optimizer.zero_grad, nn.utils.clip_grad_norm_]
    return [
        *(f.__name__ for f in wrapped if "gradproof" in f.__code__.co_filename),
        *module._global_optimizer_pre_hooks,
        *module._global_optimizer_post_hooks,
    ]


@pytest.fixture(autouse=True)
def quiet_libraries():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own; gradproof's are asked for by name
        warnings.filterwarnings("error", message=".*gradproof.*")
        yield


# Hugging Face ------------------------------------------------------------------------------------------------


def hugging_face_trainer(tmp_path, callback, steps=8, **arguments):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    tokens = torch.randint(17, (64, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": steps}
    quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    return transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(str(tmp_path / "out"), **settings, **quiet, **arguments),
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=[callback] if callback else [],
    )


def test_hugging_face_trainer(tmp_path, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from gradproof.integrations.huggingface import GradproofCallback

    validation = {"eval_strategy": "steps", "eval_steps": 4}
    plain = hugging_face_trainer(tmp_path, None, **validation)
    plain.train()
    callback = GradproofCallback(out=tmp_path / "run")
    watched = hugging_face_trainer(tmp_path, callback, **validation)
    watched.train()
    watched.evaluate()  # after the training: no part of it
    pairs = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "the callback changed the training"
    assert not hooks_left() and f"gradproof diagnose {tmp_path / 'run'}" in capsys.readouterr().err
    run = open_run(callback.path)
    assert len(run) == 8 and run.steps["backwards"].tolist() == [2] * 8
    assert run.steps["order"][3] == "lzbbcs" and run.steps["lr"][0] > run.steps["lr"][-1]
    assert "transformer.h.0.attn.c_attn.weight" in run.table("gradient", "norm").names
    assert [event["step"] for event in run.events if "eval_loss" in event] == [4, 8]
    assert gradproof.diagnose(run).worst in (None, "note")


def test_a_sick_hugging_face_training_is_recognised(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from gradproof.integrations.huggingface import GradproofCallback

    trainer = hugging_face_trainer(tmp_path, GradproofCallback(out=tmp_path / "run"))
    block = trainer.model.transformer.h[1]
    trainer.optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)  # where all of the model was meant
    trainer.train()
    found = gradproof.diagnose(tmp_path / "run")
    assert found.worst == "problem" and found.causes[0].family == "param-not-updated"
    assert found.causes[0].where.startswith("transformer.wte.weight (test_integrations.py:")


def test_a_hugging_face_training_that_raises_leaves_no_hook(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from gradproof.integrations.huggingface import GradproofCallback

    trainer = hugging_face_trainer(tmp_path, GradproofCallback(out=tmp_path / "run"))

    def fail(module, args, output):
        if module.calls == 5:
            raise RuntimeError("out of luck")
        module.calls += 1

    head = trainer.model.lm_head
    head.calls = 0
    head.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.train()
    del trainer, head
    gc.collect()
    assert not hooks_left() and len(open_run(tmp_path / "run")) == 2


# Lightning ---------------------------------------------------------------------------------------------------


def lightning_fit(tmp_path, callback, trained=slice(0, 3), fail_at=None):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

        def training_step(self, batch, index):
            if index == fail_at:
                raise RuntimeError("out of luck")
            return nn.functional.mse_loss(self.body(batch), batch.sum(1, keepdim=True))

        def validation_step(self, batch, index):
            self.log("val_loss", nn.functional.mse_loss(self.body(batch), batch.sum(1, keepdim=True)))

        def configure_optimizers(self):
            return torch.optim.SGD(self.body[trained].parameters(), lr=0.1)

    torch.manual_seed(0)
    model = Regression()
    data = torch.randn(320, 4, generator=torch.Generator().manual_seed(0))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        enable_model_summary=False,
        gradient_clip_val=1.0,
        default_root_dir=tmp_path,
        callbacks=[callback] if callback else [],
        **quiet,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    trainer.fit(model, loader, torch.utils.data.DataLoader(data[:32], batch_size=16))
    return model


def test_lightning(tmp_path, capsys):
    pytest.importorskip("lightning", reason="lightning is not installed")
    from gradproof.integrations.lightning import GradproofCallback

    plain = lightning_fit(tmp_path, None)
    callback = GradproofCallback(out=tmp_path / "run", schedule="parameters every step")
    watched = lightning_fit(tmp_path, callback)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert not hooks_left() and "gradproof diagnose" in capsys.readouterr().err
    run = open_run(callback.path)
    assert len(run) == 40 and run.steps["epoch"][[0, -1]].tolist() == [0, 1]
    assert run.table("gradient", "norm").names == [
        f"body.{i}.{w}" for i in (0, 2) for w in ("weight", "bias")
    ]
    assert {"z", "b", "c", "s"} == set(run.steps["order"][5]) and (run.steps["clip_limit"] == 1).all()
    assert [event["step"] for event in run.events if "val_loss" in event] == [20, 40]
    assert gradproof.diagnose(run).worst in (None, "note")


def test_a_sick_lightning_training_is_recognised(tmp_path):
    pytest.importorskip("lightning", reason="lightning is not installed")
    from gradproof.integrations.lightning import GradproofCallback

    lightning_fit(tmp_path, GradproofCallback(out=tmp_path / "run"), trained=slice(2, 3))
    found = gradproof.diagnose(tmp_path / "run")
    assert found.worst == "problem" and found.causes[0].family == "param-not-updated"
    assert found.causes[0].where.startswith("body.0.weight (test_integrations.py:")


def test_a_lightning_training_that_raises_leaves_no_hook(tmp_path):
    pytest.importorskip("lightning", reason="lightning is not installed")
    from gradproof.integrations.lightning import GradproofCallback

    with pytest.raises(RuntimeError, match="out of luck"):
        lightning_fit(tmp_path, GradproofCallback(out=tmp_path / "run"), fail_at=7)
    assert not hooks_left() and len(open_run(tmp_path / "run")) == 7


# Accelerate --------------------------------------------------------------------------------------------------


def accelerated(tmp_path, trained=slice(0, 3)):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from gradproof.integrations.accelerate import watch_prepared

    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model[trained].parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(torch.randn(640, 4), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with watch_prepared(accelerator, model, optimizer, out=tmp_path / "run") as monitor:
        assert hooks_left(), "this is what the other tests look for"
        for batch in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return open_run(monitor.path)


def test_accelerate(tmp_path):
    run = accelerated(tmp_path)
    assert not hooks_left() and len(run) == 40
    assert run.steps["backwards"].tolist() == [2] * 40 and set(run.steps["order"][5]) == set("zbcs")
    assert run.table("gradient", "norm").names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert gradproof.diagnose(run).worst in (None, "note")


def test_a_sick_accelerate_training_is_recognised(tmp_path):
    found = gradproof.diagnose(accelerated(tmp_path, trained=slice(2, 3)))
    assert found.worst == "problem" and found.causes[0].family == "param-not-updated"
    assert found.causes[0].where.startswith("0.weight (test_integrations.py:")
