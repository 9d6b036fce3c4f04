"""Which steps of a round are stochastic and trained. One draw per round, from (run seed, round) alone."""

from collections.abc import Sequence

from pydantic import Field

from mdiff_core import seeds
from mdiff_core.errors import BadSetting
from mdiff_core.options import Options


class AllOptions(Options):
    """Nothing to set."""


class WindowOptions(Options):
    """A run of steps inside the half-open range [lo, hi)."""

    size: int = Field(ge=1)
    """Steps in the window."""
    lo: int = Field(default=0, ge=0)
    """First step it may hold."""
    hi: int | None = Field(default=None, ge=1)
    """One past the last step it may hold; none is the number of steps."""


class ProgressiveOptions(WindowOptions):
    """A window that moves through its range as training goes on."""

    every: int = Field(default=25, ge=1)
    """Rounds between moves."""
    stride: int = Field(default=1, ge=1)
    """Steps it moves by."""
    wrap: bool = False
    """Start again at `lo` after the end of the range; otherwise it stays there."""


class SubsetOptions(Options):
    """A few steps out of a list."""

    k: int = Field(ge=1)
    """Steps drawn each round."""
    steps: tuple[int, ...] = Field(min_length=1)
    """Steps to draw from."""


def end_of(options: WindowOptions, steps: int) -> int:
    """One past the last step the window may hold."""
    return steps if options.hi is None else options.hi


def check_range(options: WindowOptions, steps: int) -> None:
    """BadSetting unless the window fits its range and the range fits `steps`."""
    hi = end_of(options, steps)
    if hi > steps:
        raise BadSetting(f"sampling.window.options.hi: {hi} is past the last of {steps} steps; use {steps} at most")
    room = hi - options.lo
    if room < 1:
        raise BadSetting(f"sampling.window.options.lo: {options.lo} leaves no step below hi {hi}; use {hi - 1} at most")
    if options.size > room:
        raise BadSetting(
            f"sampling.window.options.size: {options.size} steps do not fit in [{options.lo}, {hi}); use {room} at most"
        )


class All:
    """Every step."""

    Options = AllOptions

    def __init__(self, options: AllOptions) -> None:
        """`options` is empty; every window is made from its options."""

    def check(self, steps: int) -> None:
        """Any number of steps will do."""

    def reach(self, steps: int) -> tuple[int, ...]:
        """All of them."""
        return tuple(range(steps))

    def draw(self, *, steps: int, seed: int, round: int) -> tuple[int, ...]:
        """0..steps-1, whatever the seed and round."""
        return tuple(range(steps))


class RandomWindow:
    """A window whose start is drawn uniformly from lo..hi-size, both included (Flow-GRPO-Fast)."""

    Options = WindowOptions

    def __init__(self, options: WindowOptions) -> None:
        self.options = options

    def check(self, steps: int) -> None:
        """BadSetting when the window does not fit."""
        check_range(self.options, steps)

    def reach(self, steps: int) -> tuple[int, ...]:
        """All between `lo` and `hi`."""
        return tuple(range(self.options.lo, end_of(self.options, steps)))

    def draw(self, *, steps: int, seed: int, round: int) -> tuple[int, ...]:
        """`size` steps in a row."""
        self.check(steps)
        size, lo = self.options.size, self.options.lo
        starts = end_of(self.options, steps) - size - lo + 1
        start = lo + seeds.derive(seed, round, "window") % starts
        return tuple(range(start, start + size))


class Progressive:
    """A window that moves from lo towards hi, `stride` steps every `every` rounds (MixGRPO, arXiv 2507.21802)."""

    Options = ProgressiveOptions

    def __init__(self, options: ProgressiveOptions) -> None:
        self.options = options

    def check(self, steps: int) -> None:
        """BadSetting when the window does not fit."""
        check_range(self.options, steps)

    def reach(self, steps: int) -> tuple[int, ...]:
        """All between `lo` and `hi`."""
        return tuple(range(self.options.lo, end_of(self.options, steps)))

    def draw(self, *, steps: int, seed: int, round: int) -> tuple[int, ...]:
        """`size` steps in a row; the round decides which, the seed plays no part."""
        self.check(steps)
        options = self.options
        last = end_of(options, steps) - options.size - options.lo
        moves = round // options.every
        if options.wrap:
            moves %= -(-last // options.stride) + 1
        start = options.lo + min(moves * options.stride, last)
        return tuple(range(start, start + options.size))


class Subset:
    """`k` steps of a list, every k-subset equally likely."""

    Options = SubsetOptions

    def __init__(self, options: SubsetOptions) -> None:
        self.options = options

    def check(self, steps: int) -> None:
        """BadSetting when the list repeats itself, leaves 0..steps-1 or holds fewer than `k`."""
        listed, k = self.options.steps, self.options.k
        repeated = sorted({step for step in listed if listed.count(step) > 1})
        if repeated:
            raise BadSetting(
                f"sampling.window.options.steps: {spell(repeated)} is listed more than once; name each step once"
            )
        outside = [step for step in listed if not 0 <= step < steps]
        if outside:
            raise BadSetting(
                f"sampling.window.options.steps: {spell(outside)} is not among the {steps} steps; use 0 to {steps - 1}"
            )
        if k > len(listed):
            raise BadSetting(
                f"sampling.window.options.k: {k} is more than the {len(listed)} steps listed; use {len(listed)} at most"
            )

    def reach(self, steps: int) -> tuple[int, ...]:
        """Those listed."""
        return tuple(sorted(self.options.steps))

    def draw(self, *, steps: int, seed: int, round: int) -> tuple[int, ...]:
        """The `k` steps whose hashes come first, in ascending order."""
        self.check(steps)
        ranked = sorted(self.options.steps, key=lambda step: seeds.derive(seed, round, "window", step))
        return tuple(sorted(ranked[: self.options.k]))


def spell(steps: Sequence[int]) -> str:
    """'3, 5'."""
    return ", ".join(map(str, steps))
