"""The base of every setting: frozen, strict, and deaf to unknown keys."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, JsonValue, field_validator

LARGEST = 2**31
"""No number of any setting is beyond it: what is was mistyped, and would end as NaN or out of memory, hours later."""


class Options(BaseModel):
    """Settings of one part of mdiff; an unknown key or a wrong type is an error, never a guess."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _within_reason(cls, value: Any) -> Any:
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, int | float) and abs(number) > LARGEST for number in numbers):
            raise ValueError(f"is out of range; it should be within +-{LARGEST}")
        return value

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the settings back from `to_json` (lists become tuples here, which strict Python input refuses)."""
        return cls.model_validate_json(text)

    def to_json(self) -> str:
        """Canonical JSON: declaration order, no white space, so that equal settings are equal bytes."""
        return self.model_dump_json()


class Choice(Options):
    """A plug-in by its registry name, with options that the plug-in's own class validates."""

    name: str
    """Registry name."""
    options: dict[str, JsonValue] = {}
    """Options of that plug-in; see its class."""
