"""What all sections of the tree share: frozen, strict, no unknown keys; and the kinds of numbers in it."""

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

_Item = TypeVar("_Item")


class Section(BaseModel):
    """A mapping of the YAML. Attribute names are YAML keys.

    A field's docstring is its description in the JSON schema, in editors and in ``docs/reference/configuration.md``.
    That of a number ends with ``Unit: ...``.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _has_no_nul(cls, value: Any) -> Any:
        """Most texts are paths or arguments of processes, which end at a NUL."""
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and "\0" in text:
                raise PydanticCustomError("out_of_range", "Input should be text without NUL characters")
        return value


def _minus_one_or_positive(value: int) -> int:
    if value == -1 or value >= 1:
        return value
    raise PydanticCustomError("out_of_range", "Input should be -1 or at least 1")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Listed = Annotated[tuple[_Item, ...], BeforeValidator(_as_tuple)]
"""A YAML list, as the tuple that a frozen section holds."""
Text = Annotated[str, Field(min_length=1)]
"""A text that is not empty."""
Count = Annotated[int, Field(ge=1)]
"""A whole number from 1."""
Index = Annotated[int, Field(ge=0)]
"""A whole number from 0."""
CountOrMinusOne = Annotated[
    int,
    AfterValidator(_minus_one_or_positive),
    WithJsonSchema({"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1}]}),
]
"""A whole number from 1, or -1 for no limit."""
Weight = Annotated[float, Field(ge=0)]
"""A number from 0."""
Positive = Annotated[float, Field(gt=0)]
"""A number above 0."""
Share = Annotated[float, Field(ge=0, le=1)]
"""0 to 1, both included."""
PositiveShare = Annotated[float, Field(gt=0, le=1)]
"""Above 0, up to 1."""
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
"""0 up to, but not 1."""


def lower_case(value: Any) -> Any:
    """For keys whose values may be written in any case."""
    return value.lower() if isinstance(value, str) else value
