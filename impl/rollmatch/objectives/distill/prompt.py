"""What a teacher is asked in place of the policy's question. Needs no torch."""

from dataclasses import dataclass, replace
from string import Formatter

from rollmatch.data.content import IMAGE_TAG
from rollmatch.errors import ConfigError, DataError
from rollmatch.records import Sample

QUESTION = "question"
"""Name that stands for the text of the last user message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPrompt:
    """``prompt`` of a teacher, or ``answers`` of the data set."""

    text: str
    key: str
    """Of the configuration, for messages."""
    user: str
    """Question of samples without one of their own."""

    @property
    def names(self) -> tuple[str, ...]:
        """Metadata fields that it shows. Errors: ``teacher-prompt-malformed``.

        >>> TeacherPrompt(text="{question} It is {answer}. {{}}", key="prompt", user="").names
        ('answer',)
        """
        try:
            parts = list(Formatter().parse(self.text))
        except ValueError as error:
            raise self._malformed(str(error)) from error
        found = [name for _, name, *_ in parts if name is not None]
        wrong = [name for _, name, form, conversion in parts if name is not None and (form or conversion)]
        wrong += [name for name in found if not name or "." in name or "[" in name]
        if wrong:
            raise self._malformed(f"{{{wrong[0]}}} is no plain name")
        return tuple(dict.fromkeys(name for name in found if name != QUESTION))

    def fill(self, sample: Sample) -> str:
        """The text with the sample's fields. Errors: ``teacher-prompt-field``."""
        messages, last = self._asked(sample)
        missing = [name for name in self.names if name not in sample.metadata]
        if missing or last is None:
            problem = f"has no metadata field {missing[0]}" if missing else "has no message of the user's"
            remedy = f"Add it, or leave it out of {self.key}."
            raise DataError(problem, code="teacher-prompt-field", key=sample.origin, remedy=remedy)
        return self.text.format_map(
            {name: sample.metadata[name] for name in self.names} | {QUESTION: messages[last][1]}
        )

    def ask(self, sample: Sample) -> Sample:
        """The sample with this question in place of its last user message. Errors: ``teacher-prompt-field``.

        >>> chat = (("user", "1+1?"), ("assistant", "2"), ("user", "2+2?"))
        >>> asked = Sample(sample_id=0, origin="x:1", images=(), messages=chat, metadata={"answer": 4})
        >>> TeacherPrompt(text="{question} It is {answer}.", key="prompt", user="").ask(asked).messages
        (('user', '1+1?'), ('assistant', '2'), ('user', '2+2? It is 4.'))
        """
        text, (messages, last) = self.fill(sample), self._asked(sample)
        assert last is not None
        return replace(sample, messages=(*messages[:last], ("user", text), *messages[last + 1 :]))

    def _asked(self, sample: Sample) -> tuple[tuple[tuple[str, str], ...], int | None]:
        """The sample's messages, and which is the last of the user's."""
        messages = sample.messages or (("user", IMAGE_TAG * len(sample.images) + self.user),)
        return messages, max((place for place, (role, _) in enumerate(messages) if role == "user"), default=None)

    def _malformed(self, problem: str) -> ConfigError:
        remedy = "Write {question} or {name of a metadata field}; {{ and }} are braces."
        return ConfigError(problem, code="teacher-prompt-malformed", key=self.key, remedy=remedy)
