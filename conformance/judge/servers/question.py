"""What a server is asked, in no dialect yet."""

import base64
from dataclasses import dataclass
from typing import Any

DATA_URL = "data:image/png;base64,"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A user's question, as text and as the ids that the model's chat template makes of it."""

    text: str
    ids: list[int]
    """With one placeholder where there is a picture."""
    picture: bytes | None = None
    """A PNG file; it stands before the text."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A picture as the tag that ms-swift reads."""
        return [{"role": "user", "content": "<image>" * (self.picture is not None) + self.text}]

    @property
    def parts(self) -> list[dict[str, Any]]:
        """As OpenAI's chat has it."""
        shown = [{"type": "image_url", "image_url": {"url": f"{DATA_URL}{one}"}} for one in self.pictures]
        return [{"role": "user", "content": [*shown, {"type": "text", "text": self.text}]}]

    @property
    def pictures(self) -> list[str]:
        """Base64; one or none."""
        return [] if self.picture is None else [base64.b64encode(self.picture).decode("ascii")]
