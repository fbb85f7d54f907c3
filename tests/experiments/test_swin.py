"""The Swin transformer of the experiments computes what that of transformers computes, with the same weights."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nullbayes.experiments.swin import Swin, read_weights, weights_of

pytestmark = pytest.mark.cpu
SMALL = {"outputs": 5, "image": 32, "window": 4, "width": 8, "depths": (2, 2), "heads": (2, 4)}


def same_network(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The small network of transformers, with random weights."""
    monkeypatch.setitem(sys.modules, "torchvision", None)  # one that does not fit torch would stop the import
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=5,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = transformers.SwinForImageClassification(config).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model


def test_swin_t_has_as_many_parameters_as_published() -> None:
    assert sum(weight.numel() for weight in Swin().parameters()) == 28_288_354


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_outputs_are_those_of_transformers_from_its_own_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = same_network(monkeypatch)
    theirs.save_pretrained(tmp_path)  # type: ignore[operator]
    ours = Swin(**SMALL).eval()
    ours.load_state_dict(read_weights(tmp_path / "model.safetensors"))
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-4, atol=1e-5)

    back = in_their_names(ours.state_dict())
    changed = {name: value + 0.1 for name, value in back.items()}
    ours.load_state_dict(weights_of(changed))
    with torch.no_grad():
        for weight in theirs.parameters():
            weight += 0.1
        torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-4, atol=1e-5)


def in_their_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under the names that Hugging Face's file has."""
    found = {}
    for name, value in state.items():
        block = re.match(r"layers\.\d+\.blocks\.\d+", name)
        tail = name.rsplit(".", 1)[1]
        if ".attn.qkv." in name:
            assert block is not None
            for part, chunk in zip(("query", "key", "value"), value.chunk(3), strict=True):
                found[f"swin.encoder.{block[0]}.attention.self.{part}.{tail}"] = chunk
            continue
        for ours, theirs in {
            ".attn.relative": ".attention.self.relative", ".attn.proj.": ".attention.output.dense.",
            ".norm1.": ".layernorm_before.", ".norm2.": ".layernorm_after.", ".mlp.fc1.": ".intermediate.dense.",
            ".mlp.fc2.": ".output.dense.",
        }.items():  # fmt: skip
            name = name.replace(ours, theirs)
        name = {"head": "classifier", "norm": "swin.layernorm"}.get(name.split(".")[0], name.split(".")[0]) + (
            "." + name.split(".", 1)[1]
        )
        name = name.replace("patch_embed.proj", "swin.embeddings.patch_embeddings.projection")
        name = name.replace("patch_embed.norm", "swin.embeddings.norm")
        found[f"swin.encoder.{name}" if name.startswith("layers.") else name] = value
    return found


def test_the_authors_file_with_masks_and_indices_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Swin(**SMALL)
    extra = {
        "layers.0.blocks.1.attn_mask": torch.zeros(4, 16, 16),
        "layers.0.blocks.0.attn.relative_position_index": torch.zeros(16, 16, dtype=torch.long),
    }
    torch.save({"model": {**model.state_dict(), **extra}}, tmp_path / "w.pth")
    found = read_weights(tmp_path / "w.pth")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("depth", "patch", "reach"),
    [(1, 3, 16), (2, 3, 32), (2, 0, 16)],
    ids=["its window", "a shifted block reaches the next window", "the shift joins no opposite edges"],
)
def test_a_patch_sees_its_window_and_through_a_shifted_one_its_neighbours(depth: int, patch: int, reach: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 64, 64, requires_grad=True)
    model = Swin(outputs=2, image=64, window=4, width=4, depths=(depth,), heads=(1,))
    for weight in model.parameters():
        nn.init.normal_(weight)
    patches = model.layers(model.patch_embed(x))
    (gradient,) = torch.autograd.grad(patches[0, patch, patch, 0], x)
    seen = gradient.abs().amax((0, 1)) > 1e-9 * gradient.abs().max()
    assert seen[:reach, :reach].any(0).all()
    assert seen[:reach, :reach].any(1).all()
    assert not seen[reach:].any()
    assert not seen[:, reach:].any()


def test_images_that_cannot_be_cut_into_windows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Images of 100 pixels .* use 224 pixels"):
        Swin(image=100)
