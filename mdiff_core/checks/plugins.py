"""Each plug-in that the settings name, and its options."""

from collections.abc import Iterator

from pydantic import ValidationError

from mdiff_core import registry
from mdiff_core.errors import BadSetting
from mdiff_core.options import Choice, Options
from mdiff_core.overrides import sentence
from mdiff_core.settings import RewardTerm, RunConfig


def choices(config: RunConfig) -> Iterator[tuple[str, str, Choice]]:
    """(slot, dotted path, choice) of every plug-in the settings name."""
    yield "family", "model.family", config.model.family
    yield "kernel", "sampling.kernel", config.sampling.kernel
    yield "window", "sampling.window", config.sampling.window
    yield "engine", "rollout.engine", config.rollout.engine
    yield "loss", "loss", config.loss
    for i, term in enumerate(config.score.rewards):
        yield "reward", f"score.rewards.{i}", as_choice(term)
    for i, term in enumerate(config.evaluate.gold):
        yield "reward", f"evaluate.gold.{i}", as_choice(term)
    for i, choice in enumerate(config.score.filters):
        yield "filter", f"score.filters.{i}", choice


def as_choice(term: RewardTerm) -> Choice:
    """A reward without its weight."""
    return Choice(name=term.name, options=term.options)


def check_choice(slot: str, path: str, choice: Choice) -> Options:
    """The plug-in's validated options; complaints carry the full dotted path."""
    try:
        return registry.options(slot, choice)
    except ValidationError as error:
        kind: type[Options] = registry.find(slot, choice.name).Options
        raise BadSetting(f"{sentence(error, kind, f'{path}.options')} ({slot} '{choice.name}')") from None
    except BadSetting as error:
        raise BadSetting(f"{path}.name: {str(error).removeprefix(f'{slot}: ')}") from None
