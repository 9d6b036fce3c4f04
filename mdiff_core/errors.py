"""Errors a person can act on. Every message names the field, the value and the way out."""

from collections.abc import Sequence
from pathlib import Path


class MdiffError(Exception):
    """Base of the errors that mdiff raises on purpose."""


class BadSetting(MdiffError, ValueError):
    """A setting, prompt file or artifact is wrong; running again without a change will fail again."""


class BadArtifact(MdiffError, ValueError):
    """A folder is not the artifact it claims to be: manifest missing, checksum wrong, schema unknown."""


class Damaged(BadArtifact):
    """A file of a finished artifact is not as it was written: made or fetched again, it will be."""

    def __init__(self, what: str, path: Path, way_out: str = "run its stage again") -> None:
        """`path` is the file, or where it should be."""
        super().__init__(f"{what}; {way_out}")
        self.what, self.path, self.way_out = what, path, way_out

    def __reduce__(self) -> tuple[type, tuple[str, Path, str]]:
        return type(self), (self.what, self.path, self.way_out)


class DriftExceeded(MdiffError, RuntimeError):
    """Engine and trainer disagree about log-probs by more than the recipe's limit."""


class EngineFailed(MdiffError, RuntimeError):
    """An engine died, hung or answered with something that must not be trained on; worth a retry."""


class RewardFailed(MdiffError, RuntimeError):
    """A reward raised or returned something that is not one finite score per sample."""


class RewardUnavailable(RewardFailed):
    """A reward's server or process is down, slow or busy: no sample is at fault, and asking again later may help."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        """`retry_after` is how many seconds the other side asked to be left alone."""
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type, tuple[str, float]]:
        return type(self), (str(self), self.retry_after)


class PartlyFailed(RewardFailed):
    """Some samples of a batch got no score; the others' stand."""

    def __init__(self, values: Sequence[float], reasons: Sequence[str], retry_after: float = 0.0) -> None:
        """One value and reason a sample: NaN and why, or the score and nothing."""
        super().__init__(next((reason for reason in reasons if reason), "no reason given"))
        self.values, self.reasons, self.retry_after = list(values), list(reasons), retry_after

    def __reduce__(self) -> tuple[type, tuple[list[float], list[str], float]]:
        return type(self), (self.values, self.reasons, self.retry_after)


class MissingReward(MdiffError, ValueError):
    """A sample's reward is missing or not finite and the policy for that is `raise`."""
