"""Errors a person can act on. Every message names the field, the value and the way out."""


class MdiffError(Exception):
    """Base of the errors that mdiff raises on purpose."""


class BadSetting(MdiffError, ValueError):
    """A setting, prompt file or artifact is wrong; running again without a change will fail again."""


class BadArtifact(MdiffError, ValueError):
    """A folder is not the artifact it claims to be: manifest missing, checksum wrong, schema unknown."""


class DriftExceeded(MdiffError, RuntimeError):
    """Engine and trainer disagree about log-probs by more than the recipe's limit."""


class EngineFailed(MdiffError, RuntimeError):
    """An engine died, hung or answered with something that must not be trained on; worth a retry."""


class RewardFailed(MdiffError, RuntimeError):
    """A reward raised or returned something that is not one finite score per sample."""


class MissingReward(MdiffError, ValueError):
    """A sample's reward is missing or not finite and the policy for that is `raise`."""
