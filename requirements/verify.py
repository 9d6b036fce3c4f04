"""Compare what is installed with the pins: `python requirements/verify.py requirements/dev.txt [more.txt ...]`.

Says how many packages are matched, mismatched, missing and extra, and names all but the matched ones. Exit code 1 when any is
mismatched or missing; an extra one is only told, as base images bring their own.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def pins(paths: Sequence[Path]) -> dict[str, Requirement]:
    """Package to its pin, for this Python and platform."""
    found = {}
    for path in paths:
        text = re.sub(r"#.*|--hash=\S+", "", path.read_text()).replace("\\\n", " ")
        for line in filter(str.strip, text.splitlines()):
            requirement = Requirement(line.strip())
            if requirement.marker is None or requirement.marker.evaluate():
                found[canonicalize_name(requirement.name)] = requirement
    return found


def installed() -> dict[str, str]:
    """Package to version; of one that is there twice, the one that is imported."""
    found: dict[str, str] = {}
    for distribution in distributions():
        found.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution.version)
    return found


def compare(pinned: Mapping[str, Requirement], there: Mapping[str, str]) -> dict[str, list[str]]:
    """Lines by verdict. A local version as torch's 2.11.0+cu130 matches the pin 2.11.0."""
    verdicts: dict[str, list[str]] = {"matched": [], "mismatched": [], "missing": [], "extra": []}
    for name, pin in sorted(pinned.items()):
        if name not in there:
            verdicts["missing"].append(f"{name}{pin.specifier}")
        elif pin.specifier.contains(there[name], prereleases=True):
            verdicts["matched"].append(name)
        else:
            verdicts["mismatched"].append(f"{name} {there[name]}, pinned {pin.specifier}")
    verdicts["extra"] = [f"{name} {there[name]}" for name in sorted(there.keys() - pinned.keys())]
    return verdicts


def main(arguments: Sequence[str]) -> int:
    """Exit code."""
    if not arguments:
        sys.stderr.write("usage: python requirements/verify.py requirements/dev.txt [more.txt ...]\n")
        return 2
    verdicts = compare(pins([Path(argument) for argument in arguments]), installed())
    for verdict, lines in verdicts.items():
        sys.stdout.write(f"{len(lines):4} {verdict}\n")
        if verdict != "matched":
            sys.stdout.write("".join(f"     {line}\n" for line in lines))
    return int(bool(verdicts["mismatched"] or verdicts["missing"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
