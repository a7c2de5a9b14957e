"""A real byte-level BPE, small and built in code: Qwen's way of spelling, with merges that fuse what hurts.

Every byte is a token. On top of these, chains of merges fuse punctuation across object boundaries (one token may close
an object, close the list, or open the next object), fuse the last byte of a two-byte character with punctuation (so
that a token begins in mid-character), and make a few words. Text is not split before merging, so a fused token may span
white space. The normalizer is NFC, as Qwen's is.
"""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rollmatch.model.vocabulary import Vocabulary, coord_token
from rollmatch.records import NUM_BINS

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|coord_*|>",
)
FUSED = (
    b'"]}, {"',
    b'"]}]}',
    b'", "',
    b'": "',
    b'": ["',
    b'": [{"',
    b'{"objects',
    b"desc",
    b"bbox_2d",
    b"poly",
    b"seven",
    b" red",
    b'\xa9"}, {"',
    b'\xa9"}]}',
)
"""Byte strings that are one token each; the last two begin with the second byte of an e with an acute accent."""


FUSED_NUMBERS = (
    *(b"]}]}", b"]}, {", b"]},\n\t{", b"}\n]\n```", b", ", b"], ", b"label", b"```json\n[\n\t{", b'": [', b"12"),
    *(b"7]}]}", b", 3", b'99, "'),
)
"""What fuses numbers with each other and with punctuation, as no common tokenizer does."""


FUSED_HALVES = ((b"]}", b"]}"),)
"""Two tokens that are one together; the chains above would leave them apart."""


def make_tokenizer(fused_parts: tuple[bytes, ...] = FUSED, halves: tuple[tuple[bytes, bytes], ...] = ()) -> Tokenizer:
    """The tokenizer; ids: 0..255 bytes in GPT-2's order, then merges, control tokens, coordinates."""
    alphabet = _byte_level_alphabet()
    vocab = {character: index for index, character in enumerate(alphabet.values())}
    merges: list[tuple[str, str]] = []
    for fused in fused_parts:
        spelled = "".join(alphabet[byte] for byte in fused)
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocab:
                vocab[spelled[:end]] = len(vocab)
                merges.append((spelled[: end - 1], spelled[end - 1]))
    merges += [tuple("".join(alphabet[byte] for byte in half) for half in pair) for pair in halves]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    literals = [*CONTROL_TOKENS, *(coord_token(k) for k in range(NUM_BINS))]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in literals])
    return tokenizer


@cache
def make_vocabulary() -> Vocabulary:
    """The vocabulary of that tokenizer; shared, because it is read only."""
    return Vocabulary(make_tokenizer(), stop_token="<|im_end|>")


@cache
def make_fusing_vocabulary() -> Vocabulary:
    """A vocabulary that fuses what ``FUSED`` says, and numbers besides."""
    return Vocabulary(make_tokenizer(FUSED + FUSED_NUMBERS, FUSED_HALVES), stop_token="<|im_end|>")


def ids_of_bytes(raw: bytes) -> tuple[int, ...]:
    """One token per byte, whatever merges would do; the only way to spell half a character, or a literal as text."""
    return tuple(_byte_ids()[byte] for byte in raw)


@cache
def _byte_ids() -> dict[int, int]:
    vocabulary = make_vocabulary()
    pieces = {vocabulary.piece(token_id): token_id for token_id in range(len(vocabulary))}
    return {byte: pieces[bytes([byte])] for byte in range(256)}


def _byte_level_alphabet() -> dict[int, str]:
    """Byte -> its stand-in character, asked of the library itself."""
    stand_ins = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(character): character for character in stand_ins if ord(character) < 256}
    others = iter(character for character in stand_ins if ord(character) >= 256)
    return {byte: printable[byte] if byte in printable else next(others) for byte in range(256)}
