"""The weight artifact keeps its promises: same bytes for the same weights, and a sentence for whatever is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor, nn

from mdiff_core import policies
from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.types import PolicyVersion
from tests.train_world import Net

DIGEST = "ab" * 32
TARGETS = ("blocks.0.to_q", "blocks.2.to_out")
RANK, ALPHA = 3, 6.0


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().requires_grad_(False)


def adapter(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"A": (RANK, 16), "B": (16, RANK)}
    return {
        f"{target}.lora_{side}.weight": torch.randn(shape, generator=generator)
        for target in TARGETS
        for side, shape in shapes.items()
    }


def base(folder: Path) -> PolicyVersion:
    return policies.base_version(folder, base="models/tiny", base_digest=DIGEST)


def lora(folder: Path, *, seed: int = 1, ema: bool = False, parent: PolicyVersion | None = None) -> PolicyVersion:
    return policies.write_lora(
        folder,
        tensors=adapter(seed),
        averages={"ema": adapter(seed + 100)} if ema else {},
        rank=RANK,
        alpha=ALPHA,
        targets=TARGETS,
        parent=parent or base(folder.parent / "base"),
        version="00001",
    )


def full(folder: Path, model: nn.Module) -> PolicyVersion:
    weights = {name: value.detach() for name, value in model.named_parameters()}
    return policies.write_full(
        folder, tensors=weights, averages={}, parent=base(folder.parent / "base"), version="00001"
    )


def answer(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    x, text = torch.randn(3, 2, 4, 4, generator=generator), torch.randn(3, 6, generator=generator)
    with torch.no_grad():
        return model(x, torch.tensor([0.9, 0.5, 0.1]), text)


def test_opening_gives_back_what_was_written(tmp_path: Path) -> None:
    for written in (base(tmp_path / "base"), lora(tmp_path / "lora", ema=True), full(tmp_path / "full", net())):
        assert policies.open_policy(written.path) == written
    child = lora(tmp_path / "child", parent=policies.open_policy(tmp_path / "lora"))
    assert (child.parent, child.base, child.base_digest) == (written_version(tmp_path / "lora"), "models/tiny", DIGEST)
    assert child.version == f"00001-{child.checksum[:8]}"
    assert child.targets == TARGETS


def written_version(folder: Path) -> str:
    return policies.open_policy(folder).version


def test_equal_weights_are_equal_bytes_and_different_ones_are_not(tmp_path: Path) -> None:
    first, again = lora(tmp_path / "a"), lora(tmp_path / "b")
    other = lora(tmp_path / "c", seed=2)
    averaged = lora(tmp_path / "d", ema=True)
    assert contents(first.path) == contents(again.path)
    assert len({policy.checksum for policy in (first, other, averaged)}) == 3


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_tensors_have_the_names_of_the_plain_transformer(tmp_path: Path) -> None:
    policy = lora(tmp_path / "lora", ema=True)
    assert set(policies.tensors(policy)) == set(adapter(1))
    assert all(torch.equal(value, adapter(101)[name]) for name, value in policies.tensors(policy, "ema").items())
    assert policies.tensors(base(tmp_path / "base")) == {}
    assert (policies.adapter_of(policy).rank, policies.adapter_of(policy).scale) == (RANK, 2.0)


def test_a_merged_lora_computes_what_peft_computes(tmp_path: Path) -> None:
    from peft import PeftModel

    policy = lora(tmp_path / "lora", ema=True)
    merged = net()
    assert policies.apply_to(merged, policy) == policies.checksum_of(policy)
    beside = PeftModel.from_pretrained(net(), str(policy.path)).base_model.model
    # Float32 adds W x + s B A x in another order than (W + s B A) x; the outputs are of order 1 to 10.
    torch.testing.assert_close(answer(merged), answer(beside), rtol=1e-6, atol=1e-6 * float(answer(beside).abs().max()))
    assert (answer(merged) - answer(net())).abs().max() > 1e-2
    averaged = PeftModel.from_pretrained(net(), str(policy.path / "ema")).base_model.model
    policies.apply_to(merged, policy, "ema")
    torch.testing.assert_close(answer(merged), answer(averaged), rtol=1e-5, atol=1e-5)


def test_applying_again_replaces_and_the_base_brings_the_first_weights_back(tmp_path: Path) -> None:
    one, other = lora(tmp_path / "one"), lora(tmp_path / "other", seed=2)
    whole = full(tmp_path / "full", net(seed=9))
    used, fresh = net(), net()
    for policy in (one, whole, other):
        policies.apply_to(used, policy)
    policies.apply_to(fresh, other)
    assert torch.equal(answer(used), answer(fresh))
    policies.apply_to(used, whole)
    assert torch.equal(answer(used), answer(net(seed=9)))
    policies.apply_to(used, base(tmp_path / "base"))
    assert torch.equal(answer(used), answer(net()))


def test_a_merge_into_half_precision_is_rounded_once(tmp_path: Path) -> None:
    policy = lora(tmp_path / "lora")
    model = net().to(torch.bfloat16)
    weight = model.get_parameter("blocks.0.to_q.weight").float().clone()
    a, b = (policies.tensors(policy)[f"blocks.0.to_q.lora_{side}.weight"] for side in "AB")
    policies.apply_to(model, policy)
    assert torch.equal(model.get_parameter("blocks.0.to_q.weight"), (weight + 2.0 * (b @ a)).bfloat16())


class Narrow(Net):
    """Has the targets' names, not their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].to_q = nn.Linear(16, 8)


class Other(Net):
    """Lacks a target."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks[2]


@pytest.mark.parametrize(("model", "word"), [(Narrow, "model's is"), (Other, "1 of 2 LoRA targets")])
def test_a_lora_that_does_not_fit_changes_nothing(tmp_path: Path, model: Callable[[], Net], word: str) -> None:
    wrong = model().requires_grad_(False)
    before = {name: value.clone() for name, value in wrong.state_dict().items()}
    with pytest.raises(BadArtifact, match=word):
        policies.apply_to(wrong, lora(tmp_path / "lora"))
    assert all(torch.equal(value, before[name]) for name, value in wrong.state_dict().items())


def test_full_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArtifact, match=r"do not match the model's names and shapes, such as blocks\.2"):
        policies.apply_to(net(), full(tmp_path / "full", Other()))


def test_a_lora_without_one_a_and_one_b_a_target_is_never_written(tmp_path: Path) -> None:
    some = adapter(1)
    del some["blocks.0.to_q.lora_B.weight"]
    with pytest.raises(BadArtifact, match="not one A and B each"):
        policies.write_lora(
            tmp_path / "lora",
            tensors=some,
            averages={},
            rank=RANK,
            alpha=ALPHA,
            targets=TARGETS,
            parent=base(tmp_path / "base"),
            version="00001",
        )
    with pytest.raises(BadArtifact, match=r"no policy\.json"):
        policies.open_policy(tmp_path / "lora")


def test_another_base_is_refused(tmp_path: Path) -> None:
    policy = lora(tmp_path / "lora")
    policies.check_base(policy, DIGEST)
    with pytest.raises(BadArtifact, match=r"trained from models/tiny .* set model\.path to that base"):
        policies.check_base(policy, "cd" * 32)


def test_another_model_of_the_same_architecture_is_refused_where_both_are_known(tmp_path: Path) -> None:
    first = policies.base_version(tmp_path / "base", base="models/tiny", base_digest=DIGEST, base_weights="ab" * 32)
    policy = policies.open_policy(first.path)
    policies.check_base(policy, DIGEST, "ab" * 32)
    policies.check_base(policy, DIGEST)  # a hub id
    policies.check_base(lora(tmp_path / "lora"), DIGEST, "ab" * 32)
    with pytest.raises(
        BadArtifact, match=r"from models/tiny, whose weights .* are not those .* set model\.path to that base"
    ):
        policies.check_base(policy, DIGEST, "cd" * 32)


def edited(folder: Path, **changes: object) -> None:
    path = folder / "policy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda folder: (folder / "policy.json").unlink(), r"no policy\.json"),
        (lambda folder: (folder / "policy.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "policy.json").write_text("[]"), "not a JSON object"),
        (lambda folder: edited(folder, format=2), "format 2 is not 1"),
        (lambda folder: edited(folder, kind="dora"), "dora"),
        (lambda folder: edited(folder, targets=["blocks.0.to_q"]), "target_count"),
        (lambda folder: edited(folder, checksum="0" * 64), "checksum does not follow"),
        (lambda folder: edited(folder, files={"../../etc/passwd": "0"}), "a lora policy holds"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "missing"),
        (lambda folder: flipped(folder / "adapter_model.safetensors"), "sha256"),
        (lambda folder: flipped(folder / "ema" / "adapter_model.safetensors"), "sha256"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "sha256"),
    ],
)
def test_a_spoilt_policy_is_not_opened(tmp_path: Path, spoil: Callable[[Path], object], word: str) -> None:
    policy = lora(tmp_path / "lora", ema=True)
    spoil(policy.path)
    with pytest.raises(BadArtifact, match=word):
        policies.open_policy(policy.path)


def test_each_set_of_weights_has_a_checksum_that_depends_on_it_alone(tmp_path: Path) -> None:
    def written(name: str, **averages: int) -> PolicyVersion:
        return policies.write_lora(
            tmp_path / name,
            tensors=adapter(1),
            averages={one: adapter(seed) for one, seed in averages.items()},
            rank=RANK,
            alpha=ALPHA,
            targets=TARGETS,
            parent=base(tmp_path / "base"),
            version="00001",
        )

    alone, both, equal = written("alone"), written("both", ema=2, old=3), written("equal", ema=1, old=1)
    assert policies.checksum_of(alone) == alone.checksum != both.checksum
    of_both = [policies.checksum_of(both, weights) for weights in ("live", "ema", "old")]
    assert of_both[0] == alone.checksum and len({*of_both}) == 3
    assert {policies.checksum_of(equal, weights) for weights in ("live", "ema", "old")} == {alone.checksum}
    assert policies.open_policy(both.path) == both
    assert all(torch.equal(value, adapter(3)[name]) for name, value in policies.tensors(both, "old").items())
    assert [policies.held(policy, "old") for policy in (alone, both, base(tmp_path / "base"))] == [
        "live",
        "old",
        "live",
    ]
    (tmp_path / "both" / "old" / "adapter_config.json").unlink()
    with pytest.raises(BadArtifact, match="missing"):
        policies.open_policy(both.path)


def test_without_ema_there_are_no_averaged_weights_to_take(tmp_path: Path) -> None:
    policy = lora(tmp_path / "lora")
    assert not policies.has(policy, "ema")
    assert policies.has(lora(tmp_path / "averaged", ema=True), "ema")
    with pytest.raises(BadArtifact, match=r"has no ema weights; use its live ones, or set train\.ema"):
        policies.tensors(policy, "ema")


@pytest.fixture(params=["local", "memory"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "shelf")
    uri = f"memory://{tmp_path.name}-shelf"
    fsspec.filesystem("memory").makedirs(tmp_path.name)
    return uri


def test_the_latest_is_what_was_published_last(shelf: str, tmp_path: Path) -> None:
    one, other = lora(tmp_path / "one", ema=True), lora(tmp_path / "other", seed=2)
    first = policies.publish(shelf, "shapes", one.path)
    assert policies.latest(shelf, "shapes") == first == f"{shelf}/shapes/{one.version}"
    second = policies.publish(shelf, "shapes", other.path)
    assert policies.latest(shelf, "shapes") == second
    assert policies.publish(shelf, "shapes", one.path) == first
    assert policies.latest(shelf, "shapes") == first
    fs, root = fsspec.url_to_fs(first)
    fs.get(root, str(tmp_path / "fetched"), recursive=True)
    assert policies.open_policy(tmp_path / "fetched").checksum == one.checksum


def test_a_version_is_there_as_a_whole_or_not_at_all(shelf: str, tmp_path: Path) -> None:
    policy = lora(tmp_path / "one")
    uri = policies.publish(shelf, "shapes", policy.path)
    fs, root = fsspec.url_to_fs(uri)
    fs.rm_file(f"{root}/policy.json")
    fs.pipe_file(f"{root}/adapter_model.safetensors", b"torn")
    policies.publish(shelf, "shapes", policy.path)
    fs.get(root, str(tmp_path / "fetched"), recursive=True)
    assert policies.open_policy(tmp_path / "fetched").checksum == policy.checksum


@pytest.mark.parametrize(
    "spoil",
    [
        lambda fs, root: fs.rm_file(f"{root}/adapter_model.safetensors"),
        lambda fs, root: fs.pipe_file(f"{root}/adapter_model.safetensors", b"torn"),
        lambda fs, root: fs.pipe_file(f"{root}/policy.json", b""),
        lambda fs, root: fs.pipe_file(f"{root}/policy.json", fs.cat_file(f"{root}/policy.json")[:-9]),
        lambda fs, root: fs.pipe_file(
            f"{root}/policy.json", fs.cat_file(f"{root}/policy.json").replace(b'"checksum": "', b'"checksum": "0')
        ),
        lambda fs, root: fs.pipe_file(f"{root.rpartition('/')[0]}/latest.json", b""),
    ],
    ids=["missing", "torn", "empty", "cut", "flipped", "pointer"],
)
def test_publishing_again_repairs_what_is_damaged(
    shelf: str, tmp_path: Path, spoil: Callable[[Any, str], object]
) -> None:
    policy = lora(tmp_path / "one")
    uri = policies.publish(shelf, "shapes", policy.path)
    spoil(*fsspec.url_to_fs(uri))
    assert policies.publish(shelf, "shapes", policy.path) == policies.latest(shelf, "shapes") == uri
    fs, root = fsspec.url_to_fs(uri)
    fs.get(root, str(tmp_path / "fetched"), recursive=True)
    assert policies.open_policy(tmp_path / "fetched").checksum == policy.checksum


def test_a_changed_byte_of_a_published_file_is_repaired(tmp_path: Path) -> None:
    policy = lora(tmp_path / "one")
    uri = policies.publish(str(tmp_path / "shelf"), "shapes", policy.path)
    flipped(Path(uri) / "adapter_model.safetensors")
    policies.publish(str(tmp_path / "shelf"), "shapes", policy.path)
    assert policies.open_policy(Path(uri)).checksum == policy.checksum


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}"])
def test_a_broken_pointer_is_a_sentence(shelf: str, tmp_path: Path, text: bytes) -> None:
    uri = policies.publish(shelf, "shapes", lora(tmp_path / "one").path)
    fs, root = fsspec.url_to_fs(uri)
    fs.pipe_file(f"{root.rpartition('/')[0]}/latest.json", text)
    with pytest.raises(BadArtifact, match=r"latest.json: not a pointer to a version .* publish the policy again"):
        policies.latest(shelf, "shapes")


def test_a_version_is_never_overwritten_by_other_content(shelf: str, tmp_path: Path) -> None:
    policy = lora(tmp_path / "one")
    policies.publish(shelf, "shapes", policy.path)
    edited(policy.path, parent="another")
    with pytest.raises(BadArtifact, match="already published with other content"):
        policies.publish(shelf, "shapes", policy.path)


def test_what_cannot_be_published_or_found_is_said(shelf: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="'shapes' was never published"):
        policies.latest(shelf, "shapes")
    with pytest.raises(BadSetting, match="one folder name"):
        policies.publish(shelf, "../shapes", lora(tmp_path / "one").path)
    with pytest.raises(BadArtifact, match=r"no policy\.json"):
        policies.publish(shelf, "shapes", tmp_path)


def test_alpha_is_part_of_the_checksum(tmp_path: Path) -> None:
    parent = base(tmp_path / "base")
    made = [
        policies.write_lora(
            tmp_path / str(alpha), tensors=adapter(0), averages={}, rank=RANK, alpha=alpha, targets=TARGETS,
            parent=parent, version="1",
        )
        for alpha in (ALPHA, 2 * ALPHA)
    ]  # fmt: skip
    assert made[0].checksum != made[1].checksum
