"""An exported policy is a model that diffusers opens, with the weights that the engine would have drawn with."""

from pathlib import Path

import pytest
import torch
from torch import nn

from mdiff_core import config, export, policies
from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.families.sd3 import SD3, SD3Options
from tests.policies_made import base_policy, lora_policy

MODEL = config.recipe("shapes_flow_grpo").model
BASE = Path(MODEL.path)


def transformer(model: Path) -> nn.Module:
    return SD3(SD3Options(max_sequence_length=16)).transformer(str(model), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("weights", ["live", "ema"])
def test_a_lora_is_merged_into_a_model_that_diffusers_opens(tmp_path: Path, weights: policies.Weights) -> None:
    from diffusers import StableDiffusion3Pipeline

    policy = lora_policy(tmp_path / "lora", BASE, base_policy(tmp_path / "base", BASE), ema=True)
    export.export(policy.path, tmp_path / "out", MODEL, weights=weights)
    merged = transformer(BASE)
    policies.apply_to(merged, policy, weights)
    opened = StableDiffusion3Pipeline.from_pretrained(tmp_path / "out").transformer.state_dict()
    expected, plain = merged.state_dict(), transformer(BASE).state_dict()
    assert all(torch.equal(opened[name], expected[name]) for name in expected)
    assert any(not torch.equal(opened[name], plain[name]) for name in expected)


def test_the_file_has_the_type_that_was_asked_for(tmp_path: Path) -> None:
    policy = base_policy(tmp_path / "base", BASE)
    arguments = [str(policy.path), str(tmp_path / "out"), "--recipe", "shapes_flow_grpo", "--dtype", "float16"]
    assert export.main(arguments) == 0
    old, new = (f / "transformer" / "diffusion_pytorch_model.safetensors" for f in (BASE, tmp_path / "out"))
    assert new.stat().st_size == old.stat().st_size


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = base_policy(tmp_path / "base", BASE)
    (tmp_path / "there").mkdir()
    with pytest.raises(BadSetting, match=r"out: .*there exists"):
        export.export(policy.path, tmp_path / "there", MODEL)
    other = policies.base_version(tmp_path / "other", base="models/x", base_digest="ab" * 32)
    with pytest.raises(BadArtifact, match="trained from models/x"):
        export.export(other.path, tmp_path / "out", MODEL)
    lora = lora_policy(tmp_path / "lora", BASE, policy)
    assert export.main([str(lora.path), str(tmp_path / "out"), "--recipe", "shapes_flow_grpo", "--weights", "ema"]) == 1
    assert "has no ema weights" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"base", "other", "lora", "there"}


def test_a_policy_of_another_world_is_not_merged(tmp_path: Path) -> None:
    """The two shipped models differ in their weights alone."""
    policy = lora_policy(tmp_path / "lora", BASE, base_policy(tmp_path / "base", BASE))
    with pytest.raises(
        BadArtifact, match=r"trained from assets/shapes_sd3, whose weights .* are not those of the recipe's model"
    ):
        export.export(policy.path, tmp_path / "out", config.recipe("shapes_ocr").model)
    assert not (tmp_path / "out").exists()
