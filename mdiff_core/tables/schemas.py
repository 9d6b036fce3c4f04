"""What a table must have, and where its files say so."""

from collections.abc import Sequence
from dataclasses import dataclass

from mdiff_core.errors import BadArtifact

NAME, VERSION = b"mdiff.table", b"mdiff.version"
"""Keys of the schema metadata in every file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What a table must have; the shapes and number types come with the data."""

    name: str
    version: str
    columns: tuple[str, ...]
    """Columns every such table has."""
    extra: str = ""
    """Prefix of further columns, which differ from table to table; empty when there are none."""
    one_shape: bool = False
    """Whether all rows must have the same shapes and number types."""

    def check(self, names: Sequence[str], where: str) -> None:
        """BadArtifact when a column is missing or unknown."""
        for name in self.columns:
            if name not in names:
                raise BadArtifact(f"{where}: {self.name} table without the column '{name}'; run its stage again")
        for name in names:
            if name not in self.columns and not (self.extra and name.startswith(self.extra)):
                raise BadArtifact(f"{where}: {self.name} table with an unknown column '{name}'; run its stage again")
