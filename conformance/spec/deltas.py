"""Random specifications and deltas: mostly sound, with all the oddities that line rules can trip over."""

from hypothesis import strategies as st

NAMES = ("Alpha", "Beta", "Gamma", "alpha", "Beta  two", "beta two", "Delta ##", "C#", "\u00c9t\u00e9", "A long name")
BODY_LINES = (
    "A MUST hold.",
    "",
    "",
    "  indented",
    "**ID**: 7",
    "```",
    "  ~~~",
    "~~~~",
    "```python",
    "#### Scenario: one",
    "#### Scenario: two ####",
    "#### scenario:  three",
    "#### Four",
    "####five",
    "##### six",
    "### Notes",
    "### requirement:\tGamma",
    "###Requirement: Tight",
    "  ### Requirement: Indented",
    "- **WHEN** x",
    "- **THEN** y \u00a0",
    "trailing  ",
    "\t",
    "## ",
    "line\u2028separator",
)
PLAIN_BODIES = (
    ["A MUST hold.", "", "#### Scenario: one", "- x"],
    ["B MUST hold.", "", "#### Scenario: one", "- y", "", "", "#### Four", "- z"],
)
SECTIONS = ("ADDED", "MODIFIED", "REMOVED", "RENAMED")
_bodies = st.one_of(*[st.sampled_from(PLAIN_BODIES)] * 3, st.lists(st.sampled_from(BODY_LINES), max_size=7))
_rarely = st.sampled_from((True, *[False] * 7))


@st.composite
def edits(draw):
    """(base, delta): a delta that fits its base more often than not; the base is None for a new capability."""
    names = draw(st.permutations(NAMES))
    num_there = draw(st.integers(0, 5))
    there, free = names[:num_there], names[num_there:]
    base = None if draw(_rarely) else _base(draw, there)
    delta = _wild_delta(draw) if draw(_rarely) else _fitting_delta(draw, there if base is not None else [], free)
    return base, delta


def _base(draw, names):
    odd = draw(_rarely)
    before = "## Purpose\nLight.\n```\n## Requirements\n```\n" if odd else "# lamp\n\n## Purpose\nLight.\n\n"
    header = draw(st.sampled_from(("##  requirements ", "", "## Requirements"))) if odd else "## Requirements"
    preamble = draw(st.sampled_from(("", "", "Some words.\n\n\n", "   \n")))
    after = draw(st.sampled_from(("", "", "\n\n## Notes\nMore.\n\n\n\nAnd more.\n")))
    return _with_endings(draw, f"{before}{header}\n{preamble}{_blocks(draw, names)}{after}")


def _fitting_delta(draw, there, free):
    """Each name gets one fate: kept, modified, removed or renamed; some free ones are added."""
    fates = {name: draw(st.sampled_from(("KEPT", "MODIFIED", "REMOVED", "RENAMED"))) for name in there}
    new = list(free)
    renamed = [(name, new.pop()) for name, fate in fates.items() if fate == "RENAMED" and new]
    bodies = {
        "ADDED": _blocks(draw, new[: draw(st.integers(0, 2))]),
        "MODIFIED": _blocks(draw, [name for name, fate in fates.items() if fate == "MODIFIED"]),
        "REMOVED": _removals(draw, [name for name, fate in fates.items() if fate == "REMOVED"]),
        "RENAMED": _renames(draw, renamed),
    }
    opening = draw(st.sampled_from(("", "# Delta\n\n", "## Purpose\nFor light.\n\n")))
    order = draw(st.permutations(SECTIONS))
    return _with_endings(draw, opening + "".join(f"## {word} Requirements\n\n{bodies[word]}\n\n" for word in order))


def _wild_delta(draw):
    """Sections in any order and spelling, some of them twice, with any names."""
    parts = [draw(st.sampled_from(("", "# Delta\n\n", "## Purpose\nFor light.\n\n", "### Requirement: Stray\n\n")))]
    for word in draw(st.lists(st.sampled_from((*SECTIONS, "Added")), min_size=1, max_size=4)):
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
        header = draw(st.sampled_from(("## {} Requirements", "##  {} Requirements  ", "## {}  Requirements")))
        parts.append(f"{header.format(word)}\n\n{_wild_section(draw, word, names)}\n")
    return _with_endings(draw, "".join(parts))


def _wild_section(draw, word, names):
    if word == "REMOVED":
        return _removals(draw, names)
    if word == "RENAMED":
        sides = draw(st.sampled_from((("FROM", "TO"), ("FROM", "FROM", "TO"), ("TO",), ("FROM",))))
        return "\n".join(
            f"- {side}: `### Requirement: {draw(st.sampled_from(NAMES))}`" for _ in names for side in sides
        )
    return _blocks(draw, names)


def _blocks(draw, names):
    headers = ("### Requirement: ",) * 5 + ("### REQUIREMENT:",)
    lines = (line for name in names for line in (draw(st.sampled_from(headers)) + name, *draw(_bodies), ""))
    return "\n".join(lines)


def _removals(draw, names):
    form = draw(st.sampled_from(("### Requirement: {}", "- `### Requirement: {}`", "* ### Requirement: {}")))
    return "\n".join(form.format(name) for name in names)


def _renames(draw, pairs):
    form = draw(
        st.sampled_from(("- {}: `### Requirement: {}`", "{}: ### Requirement: {}", "  + {}:### Requirement: {}"))
    )
    return "\n".join(form.format(side, name) for pair in pairs for side, name in zip(("FROM", "TO"), pair, strict=True))


def _with_endings(draw, text):
    form = draw(st.sampled_from(("\n", "\n", "\n", "\r\n", "mark")))
    return f"\ufeff{text}" if form == "mark" else text.replace("\n", form)
