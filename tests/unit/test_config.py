"""From a recipe and overrides to a RunConfig: what is accepted, and how what is not is said."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import get_args, get_origin

import pytest
from pydantic import ValidationError

from mdiff_core import checks, config, reference, registry, settings
from mdiff_core.errors import BadSetting
from mdiff_core.options import Options
from mdiff_core.overrides import bare
from mdiff_core.settings import Ema, Old, RunConfig

ROOT = Path(__file__).parents[2]
RL = "shapes_flow_grpo"
SFT = "shapes_sft"
TUNED = "max-autotune-no-cudagraphs"
NFT = ['loss={"name": "nft"}', 'sampling.kernel={"name": "ode"}', 'sampling.window={"name": "all"}']
DPO = ['loss={"name": "dpo"}', *NFT[1:]]
CPS = ['sampling.kernel={"name": "cps"}']
BATCH = ["advantage.mean=batch", "advantage.std=batch"]
WINDOW = 'sampling.window={"name": "window", "options": {"size": 2, "hi": 5}}'


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name their files from there."""
    monkeypatch.chdir(ROOT)


def complaint(recipe: str, *overrides: str) -> str:
    with pytest.raises(BadSetting) as caught:
        checks.check(config.load(recipe, overrides))
    return str(caught.value)


def test_recipes_are_the_modules() -> None:
    assert set(config.RECIPES) == {path.stem for path in (ROOT / "mdiff_core/recipes").glob("[a-z]*.py")}


@pytest.mark.parametrize("name", config.RECIPES)
def test_every_recipe_resolves_and_passes_every_check(name: str) -> None:
    found = config.load(name)
    built = found.model.path.startswith("build/")  # by `make tiny`; of the shipped model's architecture
    checks.check(config.load(name, ["model.path=assets/shapes_sd3"] if built else []))
    assert (found.recipe, found.seed, found.name, found.store) == (name, 0, "", "")
    assert RunConfig.from_json(found.to_json()) == found
    assert import_module(f"mdiff_core.recipes.{name}").__doc__


def test_published_settings_are_as_published() -> None:
    for name, beta in (("sd35m_flow_grpo_ocr", 0.04), ("sd35m_flow_grpo_pickscore", 0.01)):
        found = config.load(name)
        assert (found.sampling.width, found.sampling.steps, found.evaluate.steps, found.sampling.guidance) == (
            512,
            10,
            40,
            4.5,
        )
        assert (found.sampling.kernel.name, found.sampling.kernel.options) == ("flow_sde", {"eta": 0.7})
        assert (found.sampling.window.name, found.rollout.group_size, found.prompts.per_round) == ("all", 24, 48)
        assert (found.train.lr, found.train.lora.rank, found.train.lora.alpha, found.train.lora.init) == (
            3e-4,
            32,
            64,
            "gaussian",
        )
        assert found.loss.options == {"clip": 1e-4, "beta": beta}
        assert (found.advantage.std, found.train.precision, found.train.updates_per_round) == ("batch", "fp16", 2)


def test_published_settings_without_guidance_are_as_published() -> None:
    fast, *nft = (config.load(f"sd35m_{name}") for name in ("flow_grpo_fast_pickscore", "nft_pickscore", "nft_ocr"))
    for found in (fast, *nft):
        assert (found.sampling.steps, found.evaluate.steps) == (10, 40)
        assert (found.sampling.guidance, found.evaluate.guidance) == (1, 1)
        assert (found.rollout.group_size, found.prompts.per_round, found.advantage.std) == (24, 48, "batch")
        assert (found.train.lr, found.train.lora.rank, found.train.lora.alpha) == (3e-4, 32, 64)
        assert (found.train.precision, found.advantage.clamp) == ("fp16", 5)
    assert (fast.sampling.kernel.name, fast.sampling.kernel.options) == ("cps", {"eta": 0.8})
    assert fast.sampling.window.options == {"size": 3, "lo": 0, "hi": 5}
    assert (fast.loss.options, fast.train.updates_per_round) == ({"clip": 1e-5}, 2)
    old = Old(flat=0, slope=0.001, most=0.5), Old(flat=75, slope=0.0075, most=0.999)
    for found, beta, updates, following in zip(nft, (1.0, 0.1), (1, 2), old, strict=True):
        assert (found.sampling.kernel.name, found.rollout.weights) == ("ode", "old")
        assert found.loss.options == {"beta": beta, "c": 5.0, "kl": 1e-4, "timesteps": 0.99}
        assert (found.train.updates_per_round, found.train.old) == (updates, following)


def test_overrides_are_json_or_text_and_the_last_wins() -> None:
    found = config.load(
        RL,
        [
            "train.lr=1e-4",
            "train.lr=2e-4",
            "train.ema={}",
            "train.betas=[0.5,0.9]",
            "hardware.topology=1x2",
            "name=2024",
            'sampling.negative="a, b"',
            "train.checkpointing=true",
            "target_reward=0.5",
        ],
    )
    assert (found.train.lr, found.train.ema, found.train.betas) == (2e-4, Ema(), (0.5, 0.9))
    assert (found.hardware.topology, found.name, found.sampling.negative) == ("1x2", "2024", "a, b")
    assert (found.train.checkpointing, found.target_reward) == (True, 0.5)


def test_overrides_reach_into_lists_options_and_what_is_null() -> None:
    found = config.load(
        RL,
        [
            "score.rewards.0.weight=2",
            "score.rewards.1.name=jpeg_compressibility",
            "score.filters=[]",
            "score.filters.0.name=duplicates",
            "score.filters.0.options.keep=none",
            "loss.options.clip=0.5",
            "train.ema.decay=0.8",
        ],
    )
    assert [(term.name, term.weight) for term in found.score.rewards] == [("shapes", 2), ("jpeg_compressibility", 1)]
    assert [(choice.name, choice.options) for choice in found.score.filters] == [("duplicates", {"keep": "none"})]
    assert found.loss.options["clip"] == 0.5
    assert found.train.ema == Ema(decay=0.8)
    checks.check(found)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.lrr=1", "train.lrr: no such setting; did you mean 'train.lr'?"),
        ("trian.lr=1", "trian.lr: no such setting; did you mean 'train.lr'?"),
        ("lr=1", "lr: no such setting; did you mean 'train.lr'?"),
        ("train.ema.dekay=0.5", "train.ema.dekay: no such setting; did you mean 'train.ema.decay'?"),
        ('train.ema={"dekay": 0.5}', "train.ema.dekay: no such setting; did you mean 'train.ema.decay'?"),
        ("score.rewards.0.wieght=2", "score.rewards.0.wieght: no such setting; did you mean 'score.rewards.0.weight'?"),
        ("score.rewards.3.weight=2", "score.rewards.3: score.rewards has 1 entries; use 0 to 1 (the last appends)"),
        ("score.rewards.first.weight=2", "score.rewards.first: score.rewards is a list"),
        ("train.lr.x=1", "train.lr.x: train.lr is one value and has no part 'x'; write train.lr=..."),
        ("train.lr=fast", 'train.lr: "fast" is not a number; give a number'),
        ("train.lr=NaN", 'train.lr: "NaN" is not a number'),
        ("train.lr=true", "train.lr: true is not a number"),
        ("train.lr=0", "train.lr: 0 is out of range; it should be greater than 0"),
        ("train.epochs=1.5", "train.epochs: 1.5 is not a whole number"),
        ("train.checkpointing=yes", 'train.checkpointing: "yes" is not true or false'),
        ("train.ema=3", "train.ema: 3 is not an object"),
        ("score.rewards=[]", "score.rewards: [] is out of range; it should have at least 1 item"),
        ("model.dtype=fp8", "model.dtype: \"fp8\" is not one of 'float32', 'bfloat16' or 'float16'"),
        ("hardware.topology=3x3", "hardware.topology: \"3x3\" is not one of '1x1', '1x2'"),
        ("rounds=0", "rounds: 0 is out of range; it should be greater than or equal to 1"),
        ("recipe=shapes_sft", "recipe: 'shapes_sft' cannot be an override"),
        ("train.lr", "overrides: 'train.lr' is not of the form a.b=c; write for example train.lr=1e-4"),
        ("loss.name=flow_grp", "loss.name: 'flow_grp' is not a known loss; did you mean 'flow_grpo'?"),
        ("score.rewards.0.name=shape", "score.rewards.0.name: 'shape' is not a known reward; did you mean 'shapes'?"),
        ("loss.options.klip=1", "loss.options.klip: no such setting; did you mean 'loss.options.clip'?"),
        ("loss.options.clip=big", "loss.options.clip: \"big\" is not a number; give a number (loss 'flow_grpo')"),
        ("sampling.window.options.hi=x", 'sampling.window.options.hi: "x" is not a whole number'),
        (
            'sampling.window={"name":"all","options":{"size":2}}',
            "sampling.window.options.size: no such setting; there are none to set",
        ),
        ('sampling.window={"name":"window"}', "sampling.window.options.size: missing, and it has no default"),
    ],
)
def test_a_bad_override_is_named_with_its_value_and_a_way_out(override: str, said: str) -> None:
    assert complaint(RL, override).startswith(said)


def test_another_plug_in_starts_with_its_own_options() -> None:
    """Unless it is the same one, or options follow."""
    found = config.load("shapes_flow_grpo", ["sampling.kernel.name=ode", "score.rewards.0.name=jpeg_compressibility"])
    assert (found.sampling.kernel.name, found.sampling.kernel.options) == ("ode", {})
    chosen = ["sampling.kernel.name=cps", "sampling.kernel.options.eta=0.5"]
    assert config.load("shapes_flow_grpo", chosen).sampling.kernel.options == {"eta": 0.5}
    same = config.load("shapes_flow_grpo", ["sampling.kernel.name=flow_sde"])
    assert same == config.load("shapes_flow_grpo")


def test_an_unknown_recipe_names_the_nearest() -> None:
    assert (
        complaint("shapes_flow_gpo")
        == "recipe: 'shapes_flow_gpo' is not a known recipe; did you mean 'shapes_flow_grpo'?"
    )


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        (RL, [WINDOW, "sampling.window.options.size=9"], "sampling.window.options.size: 9 steps do not fit in [0, 5)"),
        (RL, [WINDOW, "sampling.steps=4"], "sampling.window.options.hi: 5 is past the last of 4 steps"),
        (RL, ["rollout.group_size=1"], "rollout.group_size: 1 sample has no spread"),
        (
            RL,
            ["rollout.group_size=1", "advantage.mean=batch", "advantage.std=group"],
            "rollout.group_size: 1 sample has no spread, so advantage.std=group",
        ),
        (RL, ["sampling.kernel.name=ode", "sampling.kernel.options={}"], "sampling.kernel.name: 'ode' has no noise"),
        (RL, ["sampling.width=68"], "sampling.width: 68 is not a multiple of 8"),
        (RL, ["model.path=nowhere/to/be/found"], "model.path 'nowhere/to/be/found'"),
        (RL, ["prompts.train=nowhere.jsonl"], "prompts.train: 'nowhere.jsonl' cannot be read"),
        (RL, ["prompts.held_out=README.md"], "prompts.held_out: 'README.md' is neither .jsonl nor .txt"),
        (
            RL,
            ["prompts.per_round=12", "train.updates_per_round=13"],
            "train.updates_per_round: 13 optimizer steps cannot share 12 groups",
        ),
        (RL, ["evaluate.weights=ema"], "evaluate.weights: 'ema', but train.ema is null"),
        (RL, ["evaluate.weights=old"], "evaluate.weights: 'old', but train.old is null"),
        (RL, ["rollout.weights=ema"], "rollout.weights: 'ema', but train.ema is null"),
        (RL, ["rollout.weights=ema", "train.ema={}"], "rollout.weights: 'ema', but loss 'flow_grpo' compares with"),
        (RL, ["train.old={}"], "train.old: {"),
        (RL, ["loss.name=grpo_guard", "train.old={}", "rollout.weights=old"], "train.old: {"),
        (RL, ["loss.options.beta=1", "loss.options.kl_against=ema"], "loss.options: 'ema', but train.ema is null"),
        (RL, [*NFT, "sampling.guidance=4.5"], "sampling.guidance: 4.5, but loss 'nft' is derived for samples"),
        (RL, [*DPO, "sampling.guidance=2"], "sampling.guidance: 2, but loss 'dpo' is derived for samples"),
        (RL, [*NFT, "train.old={}"], "rollout.weights: 'live', but loss 'nft' compares with the policy that drew"),
        (RL, [*NFT, "rollout.weights=old"], "rollout.weights: 'old', but train.old is null"),
        (
            RL,
            [*NFT, 'sampling.window={"name":"window","options":{"size":2}}'],
            "sampling.window.name: 'window' chooses",
        ),
        (RL, [*DPO, "rollout.group_size=1", *BATCH], "rollout.group_size: 1 sample has no other to be better than"),
        (RL, ['loss={"name": "grpo_guard"}', *CPS], "sampling.kernel.name: 'cps' leaves the variance out"),
        (RL, [*CPS, 'sampling.window={"name": "all"}'], "sampling.window: step 9, the last of 10, may be trained, and"),
        (
            RL,
            [*CPS, 'sampling.window={"name": "subset", "options": {"k": 1, "steps": [9, 2]}}'],
            "sampling.window: step 9",
        ),
        (RL, [*CPS, 'sampling.window={"name": "all"}', "sampling.steps=1"], "sampling.window: step 0, the last of 1"),
        (
            RL,
            [*CPS, "sampling.kernel.options.eta=0"],
            "sampling.kernel.options: {\"eta\": 0} leave kernel 'cps' no noise",
        ),
        (RL, ["sampling.kernel.options.eta=0"], "sampling.kernel.options.eta: 0 is out of range"),
        (SFT, ['loss={"name": "nft"}'], "loss.name: 'nft' trains on"),
        (SFT, ["rollout.weights=ema"], "rollout.weights: 'ema' has no use with algorithm 'sft'"),
        (
            RL,
            ["evaluate.prompts=1000", "prompts.held_out=assets/shapes_prompts/held_out.jsonl"],
            "evaluate.prompts: 1000, and 'assets/shapes_prompts/held_out.jsonl' has 96 prompts",
        ),
        (RL, ["train.precision=fp16"], "train.precision: 'fp16' needs a GPU"),
        (RL, ["model.dtype=float16"], "model.dtype: 'float16' needs a GPU"),
        (RL, ["train.betas=[0.9,1.0]"], "train.betas: [0.9, 1.0] must both be"),
        (RL, ["train.schedule=cosine"], "train.total_steps: 0 leaves schedule 'cosine' nothing"),
        (RL, ["score.rewards.1.name=shapes"], "score.rewards.1.name: 'shapes' is there twice"),
        (RL, ["score.stream=true"], "score.stream: true, but score.workers is 0"),
        (RL, ["score.gpus_per_worker=1"], "score.gpus_per_worker: 1 has no use with score.workers=0"),
        (RL, ["score.workers=2", "score.gpus_per_worker=0.5"], "score.workers: 2 with 0.5 GPUs each"),
        (
            "sd35m_flow_grpo_ocr",
            ["score.workers=1", "score.gpus_per_worker=1", "score.stream=true"],
            "score.workers: 1 with 1 GPUs each (score.gpus_per_worker) need 1, and there are 0 (the rollout's workers",
        ),
        (
            RL,
            [f"rollout.engine.options.compile_mode={TUNED}"],
            f'rollout.engine.options: {{"compile_mode": "{TUNED}"}}: compile_mode does nothing while compile and compile_vae are false',
        ),
        (
            RL,
            ["rollout.engine.name=sglang", f"rollout.engine.options.compile_mode={TUNED}"],
            f'rollout.engine.options: {{"compile_mode": "{TUNED}"}}: compile_mode does nothing while compile is \'off\'',
        ),
        (RL, ["rollout.gpus_per_engine=1"], "rollout.engines: 1 with 1 GPUs each need 1"),
        ("sd35m_flow_grpo_ocr", ["hardware.topology=1x4"], "hardware.topology: '1x4' starts 4 processes a node"),
        ("sd35m_flow_grpo_ocr", ["rollout.engines=9"], "rollout.engines: 9 with 1 GPUs each need 9"),
        (
            RL,
            ['evaluate.gold=[{"name": "shapes"}]'],
            "evaluate.gold.0.name: 'shapes' is trained on (score.rewards.0)",
        ),
        (
            RL,
            ['evaluate.gold=[{"name": "ocr"}, {"name": "ocr"}]'],
            "evaluate.gold.1.name: 'ocr' is there twice",
        ),
        (RL, ['evaluate.gold=[{"name": "ocr"}]'], "prompts.held_out: assets/shapes_prompts/held_out.jsonl:1: prompt"),
        (RL, ['evaluate.gold=[{"name": "clipp"}]'], "evaluate.gold.0.name: 'clipp' is not a known reward"),
        (RL, ["name=../elsewhere"], "name:"),
        (RL, ["name=a b"], "name:"),
        (RL, ["train.lr=1e400"], "train.lr:"),
        (RL, ["train.lora.rank=99999999999999999999"], "train.lora.rank:"),
        (RL, ["evaluate.width=68"], "sampling.width: 68 is not a multiple of 8"),
        (
            RL,
            ['evaluate.sets=[{"name": "new", "prompts": "assets/shapes_prompts/held_out.jsonl", "count": 97}]'],
            "evaluate.sets.0.count: 97, and 'assets/shapes_prompts/held_out.jsonl' has 96 prompts",
        ),
        (
            RL,
            ['evaluate.sets=[{"name": "new", "prompts": "nowhere.txt", "count": 1}]'],
            "evaluate.sets.0.prompts: 'nowhere.txt' cannot be read",
        ),
        (RL, ["data.captions=some.jsonl"], "data.captions: 'some.jsonl' has no use with algorithm 'rl'"),
        (SFT, ["data=null"], "data: null, but algorithm is 'sft'"),
        (SFT, ['loss={"name": "flow_grpo"}'], "loss.name: 'flow_grpo' trains on sampler steps"),
        (SFT, ["target_reward=0.5"], "target_reward: 0.5 has no meaning"),
    ],
)
def test_contradictions_are_found_before_a_gpu_is_asked_for(recipe: str, overrides: list[str], said: str) -> None:
    assert complaint(recipe, *overrides).startswith(said)


@pytest.mark.parametrize(
    "overrides",
    [
        NFT,
        [*NFT, "sampling.guidance=4.5", "loss.options.guided=true"],
        [*NFT, "train.old={}", "rollout.weights=old", "evaluate.weights=old"],
        [*NFT, 'sampling.kernel={"name": "flow_sde"}', 'sampling.window={"name": "window", "options": {"size": 2}}'],
        [*DPO, "train.ema={}", "rollout.weights=ema"],
        [*CPS, "sampling.window.options.hi=9"],
        ['loss={"name": "grpo_guard"}', 'sampling.window={"name": "all"}'],
        ['sampling.window={"name": "all"}', "sampling.steps=1"],
        ["loss.options.beta=1", "loss.options.kl_against=ema", "train.ema={}"],
    ],
)
def test_what_goes_together_passes(overrides: list[str]) -> None:
    checks.check(config.load(RL, overrides))


def test_prompts_are_checked_against_the_reward(tmp_path: Path) -> None:
    path = tmp_path / "plain.txt"
    path.write_text("a red circle\n")
    assert complaint(RL, f"prompts.train={path}").startswith("prompts.train: ")


def test_a_prompt_that_a_reward_cannot_judge_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    for line, why in {
        "a sign": "prompt 'a sign' wants no text to be seen",
        "a sign that says “OPEN": "the quote “ in 'a sign that says “OPEN' does not close; close it with ”",
        'a sign that says " "': "hold no text",
    }.items():
        path.write_text(f'a sign that says "OPEN"\n\na sign that says “OPEN”\n{line}\n')
        said = complaint(RL, f"prompts.train={path}", 'score.rewards=[{"name": "ocr"}]', f"prompts.held_out={path}")
        assert said.startswith(f"prompts.held_out: {path}:4: ") and why in said


def test_a_prompt_may_choose_among_the_rewards(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    plain = '{"input": "a sign", "metadata": {"rewards": ["jpeg_compressibility"]}}'
    path.write_text(f'{plain}\n{{"input": "a sign \\"OPEN\\""}}\n')
    both = 'score.rewards=[{"name": "ocr"}, {"name": "jpeg_compressibility"}]'
    files = [f"prompts.train={path}", f"prompts.held_out={path}", "evaluate.prompts=2", both]
    checks.check(config.load(RL, files))
    path.write_text('{"input": "a \\"b\\"", "metadata": {"rewards": ["shapes"]}}\n')
    assert "names 'shapes'; the recipe has ocr, jpeg_compressibility" in complaint(RL, *files)


def test_the_digest_sees_what_decides_the_result_and_nothing_else() -> None:
    def digest(*overrides: str, **inputs: str) -> str:
        return config.digest(
            config.load(RL, overrides).model_dump(mode="json"), {"prompts": "store/prompts/1"} | inputs
        )

    same = digest()
    assert digest("rounds=9", "store=elsewhere", "hardware.topology=1x2", "target_reward=1", "name=x") == same
    assert digest("prompts.train=other.jsonl") == same
    assert digest(prompts="elsewhere/prompts/1") == same
    others = [
        digest("train.lr=0.5"),
        digest("seed=1"),
        digest("prompts.per_round=3"),
        digest(prompts="store/prompts/2"),
    ]
    assert len({same, *others}) == 5


def test_the_command_prints_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert config.main([RL, "train.lr=0.25"]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["lr"] == 0.25


@pytest.mark.parametrize("arguments", [[RL, "train.lrr=1"], ["nonesuch"], [], [RL, "rollout.group_size=1"]])
def test_the_command_fails_with_a_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert config.main(arguments) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.strip() and "Traceback" not in said.err


def test_loading_a_recipe_waits_for_no_heavy_package() -> None:
    heavy = ("torch", "pyarrow", "diffusers", "transformers", "ray", "flytekit", "peft")
    code = f"import sys; from mdiff_core import config; config.load('{RL}'); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_settings_reference_is_current() -> None:
    page = (ROOT / "docs/settings.md").read_text()
    command = [sys.executable, "-m", "mdiff_core.config", "--reference"]  # a process that no test's plug-ins reached
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert page == found.stdout, "run `make docs`"
    assert "| `train.ema.decay` | number > 0, < 1 | `0.9` |" in page


def numbers_of(kind: type[Options]) -> Iterator[str]:
    """Every setting of `kind` itself that is a number, or a list of them."""
    for name, field in kind.model_fields.items():
        inner = bare(field.annotation)
        if inner in (int, float) or get_args(inner)[:1] in ((int,), (float,)):
            yield name


def all_settings() -> list[type[Options]]:
    """The tree's classes and the options of every plug-in."""
    tree = [kind for kind in vars(settings).values() if isinstance(kind, type) and issubclass(kind, Options)]
    plugins = [registry.find(slot, name).Options for slot, names in registry.REGISTRY.items() for name in names]
    return [*tree, *plugins]


@pytest.mark.parametrize("kind", all_settings(), ids=lambda kind: kind.__name__)
def test_an_absurd_number_is_refused_by_every_setting(kind: type[Options]) -> None:
    for name in numbers_of(kind):
        whole = bare(kind.model_fields[name].annotation) is int
        for value in (10**30, -(10**30)) if whole else (1e30, -1e30):
            given = [value] * 2 if get_origin(bare(kind.model_fields[name].annotation)) is tuple else value
            with pytest.raises(ValidationError) as caught:
                kind.from_json(json.dumps({name: given}))
            assert name in {error["loc"][0] for error in caught.value.errors() if error["type"] != "missing"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "prompts.oversample=1e9",
            "prompts.oversample: 1000000000.0 is out of range; it should be less than or equal to 100",
        ),
        ("sampling.kernel.options.eta=1e30", "sampling.kernel.options.eta: 1e+30 is out of range"),
        ("train.drift_limit=1e30", "train.drift_limit: 1e+30 is out of range; it should be within +-2147483648"),
        ("score.rewards.0.weight=-1e30", "score.rewards.0.weight: -1e+30 is out of range"),
        ("train.betas=[0.9, 1e30]", "train.betas: [0.9, 1e+30] is out of range"),
        ("hardware.rollout.memory=much", 'hardware.rollout.memory: "much" is out of range'),
    ],
)
def test_an_absurd_number_is_a_sentence(override: str, said: str) -> None:
    with pytest.raises(BadSetting) as caught:
        checks.check(config.load("shapes_flow_grpo", [override]))
    assert str(caught.value).startswith(said)


def test_every_setting_says_what_it_means() -> None:
    kinds = [kind for kind in all_settings() if kind is not Options]
    silent = [
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, field in kind.model_fields.items()
        if not field.description and not reference.is_group(bare(field.annotation))
    ]
    assert not silent
