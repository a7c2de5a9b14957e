"""Token ids, the text and the bytes they stand for, and the 1,000 coordinate tokens among them.

Rollout matching reads bytes, because one UTF-8 character may be split over several tokens: decoding token by token as
text would damage it.
"""

import json
import re
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rollmatch.config.files import TOKENIZER_FILES
from rollmatch.errors import ConfigError
from rollmatch.model.stops import find_stops
from rollmatch.records import NUM_BINS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_SPACE_MARK = "\u2581"
"""SentencePiece's space."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_ANCHOR = "\n"
"""A token of its own in every tokenizer that puts a space before a text."""


def coord_token(coord_bin: int) -> str:
    """The literal of one coordinate.

    >>> coord_token(12)
    '<|coord_12|>'
    """
    return f"<|coord_{coord_bin}|>"


def _bytes_of_byte_level_characters() -> dict[str, int]:
    """The printable stand-in characters of byte-level BPE (GPT-2's table), back to bytes.

    >>> table = _bytes_of_byte_level_characters()
    >>> table["a"], table["\\u0120"], len(table)
    (97, 32, 256)
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


class Vocabulary:
    """Read-only view of a fast tokenizer with coordinate tokens (``coordinates=False`` does without them).

    Text is what people and functions read: as ``decode(ids, skip_special_tokens=True)`` of transformers writes it.
    Bytes are what rollout matching reads: one piece per token, which joined are the answer as it was sampled.

    ``stop_ids``: further tokens that end a response, beside ``stop_token``. ``decode``: ids to text; by default the
    tokenizer's own. Errors: ``coord-tokens-missing``, ``stop-token-missing``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_token: str,
        stop_ids: Iterable[int] = (),
        coordinates: bool = True,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._decode_text = decode or partial(tokenizer.decode, skip_special_tokens=False)
        added = tokenizer.get_added_tokens_decoder()
        ids_of = {token.content: token_id for token_id, token in added.items()}
        self.coord_ids = _find_coord_ids(ids_of) if coordinates or coord_token(0) in ids_of else ()
        self._bins = {token_id: coord_bin for coord_bin, token_id in enumerate(self.coord_ids)}
        stop_id = tokenizer.token_to_id(stop_token)
        if stop_id is None:
            raise ConfigError(
                f"the tokenizer has no token {stop_token}",
                code="stop-token-missing",
                key="model.stop_token",
                remedy="Name the token that ends a turn of the model.",
            )
        self.stop_id: int = stop_id
        """Ends a turn; what targets and turns of environments are written with."""
        self.stop_ids = frozenset({stop_id, *(each for each in stop_ids if tokenizer.id_to_token(each) is not None)})
        """Every token that ends a response."""
        special = {token_id for token_id, token in added.items() if token.special}
        self.control_ids = frozenset(special | self.stop_ids) - frozenset(self.coord_ids)
        """Special tokens that are no coordinates (chat framing, vision placeholders, padding)."""
        self._spell = _speller_of(tokenizer)
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def load(cls, directory: str | Path, *, stop_token: str | None = None, coordinates: bool = True) -> "Vocabulary":
        """Read the tokenizer of a model directory. Errors: those of ``load_tokenizer`` and of ``of``."""
        return cls.of(load_tokenizer(directory), directory, stop_token=stop_token, coordinates=coordinates)

    @classmethod
    def of(
        cls,
        tokenizer: "PreTrainedTokenizerBase",
        directory: str | Path,
        *,
        stop_token: str | None = None,
        coordinates: bool = True,
    ) -> "Vocabulary":
        """That of a tokenizer of transformers, which learner, engine and servers encode and decode with.

        ``stop_token``: as ``find_stops``. Errors: ``tokenizer-not-fast``, those of ``find_stops``, the class's.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(
                f"{type(tokenizer).__name__} has no fast form",
                code="tokenizer-not-fast",
                key="model.model",
                remedy="Save the model's tokenizer as tokenizer.json, or take another model.",
            )
        backend.no_truncation()  # a file may have been saved with either, and prompts would be cut or padded
        backend.no_padding()
        stops = find_stops(tokenizer, directory, stop_token=stop_token)
        if not stops.is_generated:
            warnings.warn(
                f"generation_config.json of {directory} does not name {stops.token}, which ends a turn: engines that "
                "are not sent it generate past it; add its id to eos_token_id",
                stacklevel=2,
            )
        return cls(
            backend,
            stop_token=stops.token,
            stop_ids=stops.ids,
            coordinates=coordinates,
            decode=partial(tokenizer.decode, skip_special_tokens=False),
        )

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The tokens that end a response, the primary one first."""
        others = sorted(self.stop_ids - {self.stop_id})
        return tuple(str(self.tokenizer.id_to_token(token_id)) for token_id in (self.stop_id, *others))

    def piece(self, token_id: int) -> bytes:
        """The bytes one token stands for; none for an id without a token, or where the tokenizer has no bytes."""
        found = self._pieces.get(token_id)
        if found is None:
            token = self.tokenizer.id_to_token(token_id)
            found = self._pieces[token_id] = b"" if token is None else self._spell(token, token_id)
        return found

    def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """[N] what each token adds to the text; no bytes for control tokens. For any fast tokenizer."""
        if self.has_bytes:
            return [b"" if self.is_control(token_id) else self.piece(token_id) for token_id in token_ids]
        stream = DecodeStream(skip_special_tokens=True)
        return [(stream.step(self.tokenizer, token_id) or "").encode() for token_id in token_ids]

    @property
    def has_bytes(self) -> bool:
        """Whether the tokenizer's decoder says which bytes a token stands for."""
        return self._spell is not _no_bytes

    def decode(self, token_ids: Iterable[int]) -> bytes:
        """The bytes a list of tokens stands for; may end in mid-character."""
        return b"".join(self.piece(token_id) for token_id in token_ids)

    def text(self, token_ids: Iterable[int]) -> str:
        """What people and functions read: as transformers' ``decode(token_ids, skip_special_tokens=True)``.

        Coordinates stay, also where they are special tokens. Undecodable bytes become replacement characters.
        """
        return self._decode_text([token_id for token_id in token_ids if not self.is_control(token_id)])

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokenise a whole text, nothing added; literals of added tokens become those tokens."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_bytes(self, raw: bytes) -> tuple[int, ...]:
        """Tokenise what stands inside a text: bytes that may begin in mid-character.

        Decodes back to exactly these bytes, unless the tokenizer's normalizer rewrites them. Tokenizers that put a
        space before a text, or strip one, are given a line feed to begin with, whose ids are taken off again.
        """
        lead = 0
        while lead < len(raw) and 0x80 <= raw[lead] < 0xC0:
            lead += 1
        anchor, num_anchor_ids = self._anchor
        rest = self.encode(anchor + raw[lead:].decode("utf-8"))[num_anchor_ids:] if lead < len(raw) else ()
        return tuple(self._byte_ids[byte] for byte in raw[:lead]) + rest

    def is_exact(self, text: str) -> bool:
        """Whether a text comes out of the tokenizer as it went in."""
        return self.decode(self.encode_bytes(text.encode())) == text.encode()

    def is_control(self, token_id: int) -> bool:
        """Whether a token may never stand inside an answer: chat framing, placeholders, ids beyond the vocabulary."""
        return token_id in self.control_ids or self.tokenizer.id_to_token(token_id) is None

    def bin_of(self, token_id: int) -> int | None:
        """The bin of a coordinate token, None for any other token."""
        return self._bins.get(token_id)

    @cached_property
    def _anchor(self) -> tuple[str, int]:
        """What stands before a fragment when it is encoded, and its number of ids."""
        changed = any(self.decode(self.encode(probe)) != probe.encode() for probe in ("a", " a"))
        return (_ANCHOR, len(self.encode(_ANCHOR))) if changed else ("", 0)

    @cached_property
    def _byte_ids(self) -> dict[int, int]:
        table = _bytes_of_byte_level_characters()
        spelled = [(byte, name) for character, byte in table.items() for name in (character, f"<0x{byte:02X}>")]
        ids = ((byte, self.tokenizer.token_to_id(name)) for byte, name in spelled)
        return {
            byte: token_id for byte, token_id in ids if token_id is not None and self.piece(token_id) == bytes([byte])
        }

    def __len__(self) -> int:
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))


def _find_coord_ids(ids_of: Mapping[str, int]) -> tuple[int, ...]:
    missing = [k for k in range(NUM_BINS) if coord_token(k) not in ids_of]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {NUM_BINS} coordinate tokens are no single tokens, first {coord_token(missing[0])}",
            code="coord-tokens-missing",
            key="model.model",
            remedy="Add them by rollmatch model add-coords, or set answer_format to one of numbers or text.",
        )
    return tuple(ids_of[coord_token(k)] for k in range(NUM_BINS))


def load_tokenizer(directory: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model directory, as transformers loads it.

    Errors: ``tokenizer-missing``, ``tokenizer-unreadable``.
    """
    from transformers import AutoTokenizer  # a second to load

    if not any((Path(directory) / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"{directory} holds none of {', '.join(TOKENIZER_FILES)}",
            code="tokenizer-missing",
            key="model.model",
            remedy="Name a directory with a saved fast tokenizer.",
        )
    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:  # tokenizers raises Exception itself for a file that it cannot read
        problem, remedy = f"the tokenizer cannot be read: {error}", "Save the model's fast tokenizer again."
        raise ConfigError(problem, code="tokenizer-unreadable", key="model.model", remedy=remedy) from error


Speller = Callable[[str, int], bytes]
"""(token, id) -> the bytes that it stands for."""


def _no_bytes(token: str, token_id: int) -> bytes:
    return b""


def _speller_of(tokenizer: Tokenizer) -> Speller:
    """How the tokenizer's decoder turns tokens into bytes: the table of byte-level BPE, or byte fallback."""
    added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    described: dict[str, Any] = (
        json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {"type": None}
    )
    steps: list[dict[str, Any]] = described["decoders"] if described["type"] == "Sequence" else [described]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        table = _bytes_of_byte_level_characters()

        def spell_byte_level(token: str, token_id: int) -> bytes:
            if token_id in added or not all(character in table for character in token):
                return token.encode()
            return bytes(table[character] for character in token)

        return spell_byte_level
    is_space = {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "} in steps
    if is_space and "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:

        def spell_byte_fallback(token: str, token_id: int) -> bytes:
            found = _BYTE_TOKEN.fullmatch(token) if token_id not in added else None
            if found:
                return bytes([int(found[1], 16)])
            return (token if token_id in special else token.replace(_SPACE_MARK, " ")).encode()

        return spell_byte_fallback
    return _no_bytes


def split_at_stop(sampled: Sequence[int], stop_ids: Container[int]) -> tuple[tuple[int, ...], int | None]:
    """A response as sampled, cut before its first stop token, and that token; None where there is none.

    Whatever the engine says: most servers return the stop token, and some generate past it.

    >>> split_at_stop([5, 6, 9, 7], {9, 2}), split_at_stop([5, 6], {9, 2})
    (((5, 6), 9), ((5, 6), None))
    """
    for place, token_id in enumerate(sampled):
        if token_id in stop_ids:
            return tuple(sampled[:place]), token_id
    return tuple(sampled), None
