"""Token ids, the bytes they stand for, and the 1,000 coordinate tokens among them. Needs no torch.

Everything is in bytes, because a byte-level BPE may split one UTF-8 character over several tokens:
decoding token by token as text would damage it.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from rollmatch.errors import ConfigError
from rollmatch.records import NUM_BINS

CHAT_STOP = "<|im_end|>"
"""Ends a turn in the ChatML family."""


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
    """Read-only view of a byte-level BPE tokenizer with coordinate tokens (``coordinates=False`` does without them).

    Errors: ``tokenizer-not-byte-level``, ``coord-tokens-missing``, ``stop-token-missing``.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop_token: str = CHAT_STOP, coordinates: bool = True) -> None:
        self.tokenizer = tokenizer
        added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._pieces = _pieces_of(tokenizer, added)
        self.coord_ids = self._find_coord_ids(added) if coordinates or coord_token(0) in added.values() else ()
        self._bins = {token_id: coord_bin for coord_bin, token_id in enumerate(self.coord_ids)}
        stop_id = tokenizer.token_to_id(stop_token)
        if stop_id is None:
            raise ConfigError(f"the tokenizer has no token {stop_token}", code="stop-token-missing", key="model.model")
        self.stop_id: int = stop_id
        self.stop_token = stop_token
        self.control_ids = frozenset(added) - frozenset(self.coord_ids)
        """Added tokens that are not coordinates (chat framing, vision placeholders, padding)."""

    @classmethod
    def load(cls, directory: str | Path, *, stop_token: str | None = None, coordinates: bool = True) -> "Vocabulary":
        """Read ``tokenizer.json`` of a model directory. Errors: ``tokenizer-missing`` and the class's.

        The stop token is ``<|im_end|>`` where there is one, else the ``eos_token`` of ``tokenizer_config.json``.
        """
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{path} does not exist",
                code="tokenizer-missing",
                key="model.model",
                remedy="Name a directory with a saved fast tokenizer.",
            )
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()  # a file may have been saved with either, and prompts would be cut or padded
        tokenizer.no_padding()
        if stop_token is None:
            stop_token = CHAT_STOP if tokenizer.token_to_id(CHAT_STOP) is not None else _eos_token_of(path.parent)
        return cls(tokenizer, stop_token=stop_token, coordinates=coordinates)

    def _find_coord_ids(self, added: dict[int, str]) -> tuple[int, ...]:
        ids_of = {text: token_id for token_id, text in added.items()}
        missing = [k for k in range(NUM_BINS) if coord_token(k) not in ids_of]
        if missing:
            raise ConfigError(
                f"{len(missing)} of {NUM_BINS} coordinate tokens are no single tokens, first {coord_token(missing[0])}",
                code="coord-tokens-missing",
                key="model.model",
                remedy="Add <|coord_0|> .. <|coord_999|> to the tokenizer as added tokens and resize the embeddings.",
            )
        return tuple(ids_of[coord_token(k)] for k in range(NUM_BINS))

    def piece(self, token_id: int) -> bytes:
        """The bytes one token stands for; none for an id that only pads the embedding."""
        return self._pieces.get(token_id, b"")

    def decode(self, token_ids: Iterable[int]) -> bytes:
        """The bytes a list of tokens stands for; may end in mid-character."""
        return b"".join(self.piece(token_id) for token_id in token_ids)

    def text(self, token_ids: Iterable[int]) -> str:
        """For people: undecodable bytes become replacement characters."""
        return self.decode(token_ids).decode("utf-8", errors="replace")

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokenise a text alone, nothing added; literals of added tokens become those tokens."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_bytes(self, raw: bytes) -> tuple[int, ...]:
        """Tokenise bytes that may begin in mid-character.

        Decodes back to exactly these bytes, unless the tokenizer's normalizer rewrites them.
        """
        lead = 0
        while lead < len(raw) and 0x80 <= raw[lead] < 0xC0:
            lead += 1
        return tuple(self._byte_ids[byte] for byte in raw[:lead]) + self.encode(raw[lead:].decode("utf-8"))

    def is_control(self, token_id: int) -> bool:
        """Whether a token may never stand inside an answer: chat framing, placeholders, ids beyond the vocabulary."""
        return token_id in self.control_ids or token_id not in self._pieces

    def bin_of(self, token_id: int) -> int | None:
        """The bin of a coordinate token, None for any other token."""
        return self._bins.get(token_id)

    @cached_property
    def _byte_ids(self) -> dict[int, int]:
        table = _bytes_of_byte_level_characters()
        ids = ((byte, self.tokenizer.token_to_id(character)) for character, byte in table.items())
        return {byte: token_id for byte, token_id in ids if token_id is not None}

    def __len__(self) -> int:
        return len(self._pieces)


def _eos_token_of(directory: Path) -> str:
    """What the model's own configuration ends a sequence with; ``<|im_end|>`` where it says nothing."""
    try:
        eos = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return CHAT_STOP
    named = eos.get("content") if isinstance(eos, dict) else eos
    return named if isinstance(named, str) else CHAT_STOP


def _pieces_of(tokenizer: Tokenizer, added: dict[int, str]) -> dict[int, bytes]:
    table = _bytes_of_byte_level_characters()
    _check_alphabet(tokenizer, table)
    pieces: dict[int, bytes] = {}
    for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id in added:
            pieces[token_id] = added[token_id].encode()
        elif all(character in table for character in text):
            pieces[token_id] = bytes(table[character] for character in text)
        else:
            raise ConfigError(
                f"token {token_id} ({text!r}) is not spelled in byte-level characters",
                code="tokenizer-not-byte-level",
                key="model.model",
                remedy="Use a byte-level BPE tokenizer (Qwen, Llama 3, GPT families).",
            )
    return pieces


def _check_alphabet(tokenizer: Tokenizer, table: dict[str, int]) -> None:
    """Every byte is a token: a WordPiece or WordLevel vocabulary in plain ASCII is spelled alike, but lacks that."""
    missing = [byte for character, byte in table.items() if tokenizer.token_to_id(character) is None]
    if missing:
        raise ConfigError(
            f"{len(missing)} of 256 bytes are no tokens, first {missing[0]:#04x}",
            code="tokenizer-not-byte-level",
            key="model.model",
            remedy="Use a byte-level BPE tokenizer (Qwen, Llama 3, GPT families).",
        )


def trim_stop(response: Sequence[int], stop_ids: Iterable[int]) -> tuple[int, ...]:
    """Drop the stop token and all after it; every real server returns it untrimmed.

    >>> trim_stop([5, 6, 9, 7], {9})
    (5, 6)
    >>> trim_stop([5, 6], {9})
    (5, 6)
    """
    stops = frozenset(stop_ids)
    for place, token_id in enumerate(response):
        if token_id in stops:
            return tuple(response[:place])
    return tuple(response)


def why_ended(sampled: Sequence[int], *, stop_id: int) -> str:
    """``stop`` where the stop token ended a response as sampled, else ``length``, whatever the engine says.

    vLLM also stops at the other end-of-sequence tokens of ``generation_config.json``. Such a token stays in the
    response: it was sampled, and the stop token was not.

    >>> why_ended([7, 8, 9], stop_id=9), why_ended([7, 8, 2], stop_id=9)
    ('stop', 'length')
    """
    return "stop" if stop_id in sampled else "length"
