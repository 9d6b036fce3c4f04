"""Every contradiction between settings that can be found without a GPU, before one is asked for."""

from mdiff_core.checks import drawing, judging, learning, plugins
from mdiff_core.settings import RunConfig


def check(config: RunConfig) -> None:
    """Raise BadSetting for the first contradiction: a sentence with the field, its value and a way out."""
    for slot, path, choice in plugins.choices(config):
        plugins.check_choice(slot, path, choice)
    learning.check_algorithm(config)
    learning.check_loss(config)
    learning.check_policies(config)
    drawing.check_sampling(config)
    drawing.check_engine(config)
    learning.check_rounds(config)
    judging.check_score(config)
    learning.check_train(config)
    learning.check_targets(config)
    drawing.check_hardware(config)
    judging.check_evaluation(config)
    judging.check_prompts(config)
