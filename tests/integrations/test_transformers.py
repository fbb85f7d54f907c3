"""A callback of the Hugging Face Trainer fits the posterior of the trained model to its training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nullbayes as nb

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'nullbayes[transformers]'")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate: pip install 'nullbayes[transformers]'")
pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]  # of the Trainer, about itself

from nullbayes.integrations.transformers import PosteriorCallback  # noqa: E402 - after the packages are known to be there

GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(5, 30, (100, 6), generator=GENERATOR, device="cpu")
MASK = torch.ones_like(IDS)
MASK[::3, 4:] = 0
LABELS = IDS[:, 0] % 2


def examples(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"input_ids": IDS[i], "attention_mask": MASK[i], "labels": LABELS[i]} for i in range(start, stop)]


def small_bert() -> Any:
    torch.manual_seed(0)
    settings = transformers.BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    return transformers.BertForSequenceClassification(settings)


@pytest.mark.slow
def test_posterior_is_that_of_the_trained_model_on_its_training_data_in_order(tmp_path: Path) -> None:
    chosen, fit = {"parameters": "classifier.*"}, {"n_samples": 4, "progress": False}
    held_out = torch.utils.data.DataLoader(examples(50, 100), batch_size=10)  # type: ignore[arg-type]
    seeded = fit | {"generator": torch.Generator().manual_seed(1)}
    callback = PosteriorCallback(held_out=held_out, posterior_options=chosen, fit_options=seeded)
    settings = transformers.TrainingArguments(
        str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        dataloader_drop_last=True,
    )
    model, before = small_bert(), small_bert().state_dict()
    trainer = transformers.Trainer(model, settings, train_dataset=examples(0, 50), callbacks=[callback])
    trainer.train()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())  # it was trained

    inputs = {"input_ids": IDS, "attention_mask": MASK}
    batch = {name: tensor[:50] for name, tensor in inputs.items()} | {"labels": LABELS[:50]}
    again = nb.ProjectedPosterior(model, **chosen)
    again.fit([batch], **fit, generator=torch.Generator().manual_seed(1))
    assert callback.posterior.report.n_data == 50
    assert torch.allclose(callback.posterior.directions, again.directions, atol=1e-5)
    assert torch.allclose(callback.posterior.predict(inputs).mean, model.eval()(**inputs).logits, atol=1e-6)
    assert callback.posterior.is_ood(inputs).shape == (100,)
