"""The key somebody may have meant."""

from difflib import SequenceMatcher, get_close_matches

from rollmatch.config.schema import fields


def nearest(key: str) -> str | None:
    """The known key most like an unknown one: in its own section, and failing that anywhere in the tree.

    >>> nearest("training.packing_bufer"), nearest("custom.packing_buffer"), nearest("training.zzz")
    ('training.packing_buffer', 'training.packing_buffer', None)
    """
    section, _, name = key.rpartition(".")
    beside = {path.rpartition(".")[2]: path for path in fields() if path.rpartition(".")[0] == section}
    if close := get_close_matches(name, beside, n=1):
        return beside[close[0]]
    anywhere = {path.rpartition(".")[2] for path in fields()}
    if not (close := get_close_matches(name, sorted(anywhere), n=1, cutoff=0.8)):
        return None
    homes = [path for path in fields() if path.rpartition(".")[2] == close[0]]
    return max(homes, key=lambda path: SequenceMatcher(None, key, path).ratio())
