"""What all bodies share.

Strict: a string is no number and a boolean is no integer. `null` means absent. Unknown fields are
kept aside, and told to the client as ignored.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_ID_CHARACTERS = 200
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def wrong(message: str) -> PydanticCustomError:
    # Braces would be taken as placeholders.
    return PydanticCustomError("invalid_value", "{text}", {"text": message})


def check_client_id(value: str) -> str:
    """It becomes a header."""
    if len(value) > MAX_ID_CHARACTERS:
        raise wrong(f"may have at most {MAX_ID_CHARACTERS} characters")
    if not value or not all("!" <= character <= "~" for character in value):
        raise wrong("must be printable ASCII without spaces")
    return value


Count = Annotated[int, Field(ge=0, le=INT64_MAX)]
ClientId = Annotated[str, AfterValidator(check_client_id)]


class Body(BaseModel):
    """What all bodies share."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None

    def unknown_fields(self) -> dict[str, Any]:
        """Fields that this server does not know, with their values."""
        return dict(self.model_extra or {})
