"""Random specifications and deltas: mostly sound, with all the oddities that line rules can trip over."""

from hypothesis import strategies as st

NAMES = ("Alpha", "Beta", "Gamma", "alpha", "Beta  two", "beta two", "Delta ##", "C#", "\u00c9t\u00e9", "Long name of a rule")
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
_names = st.sampled_from(NAMES)
_odd_body = st.lists(st.sampled_from(BODY_LINES), max_size=7)
_plain_body = st.sampled_from(
    (["A MUST hold.", "", "#### Scenario: one", "- x"], ["B MUST hold.", "", "#### Scenario: one", "- y", "", "#### Four", "- z"])
)
_bodies = st.one_of(_plain_body, _plain_body, _odd_body)


@st.composite
def _blocks(draw, names):
    header = draw(st.sampled_from(("### Requirement: ", "### Requirement: ", "### Requirement: ", "### REQUIREMENT:")))
    return "\n".join(line for name in names for line in (header + name, *draw(_bodies), ""))


@st.composite
def bases(draw):
    """A main specification, or None for a new capability."""
    if draw(st.integers(0, 9)) == 0:
        return None
    names = draw(st.lists(_names, unique_by=str.strip, max_size=5))
    before = draw(st.sampled_from(("# lamp\n\n## Purpose\nLight.\n\n", "## Purpose\nLight.\n```\n## Requirements\n```\n", "")))
    header = draw(st.sampled_from(("## Requirements", "## Requirements", "## Requirements", "##  requirements ", "")))
    preamble = draw(st.sampled_from(("", "", "Some words.\n\n\n", "   \n")))
    after = draw(st.sampled_from(("", "", "\n\n## Notes\nMore.\n\n\n\nAnd more.\n")))
    text = f"{before}{header}\n{preamble}{draw(_blocks(names))}{after}"
    return _with_endings(draw, text)


@st.composite
def deltas(draw):
    """A delta of any sections in any order, some of them twice."""
    kinds = draw(st.lists(st.sampled_from(("ADDED", "MODIFIED", "REMOVED", "RENAMED", "Added")), min_size=1, max_size=4))
    parts = [draw(st.sampled_from(("", "", "# Delta\n\n", "## Purpose\nFor light.\n\n", "### Requirement: Stray\n\n")))]
    for kind in kinds:
        names = draw(st.lists(_names, max_size=3))
        parts.append(f"{draw(_section_header(kind))}\n\n{draw(_section_body(kind, names))}\n")
    return _with_endings(draw, "".join(parts))


def _section_header(kind):
    forms = (f"## {kind} Requirements",) * 8 + (f"##  {kind} Requirements  ", f"## {kind}  Requirements")
    return st.sampled_from(forms)


@st.composite
def _section_body(draw, kind, names):
    if kind == "REMOVED":
        form = draw(st.sampled_from(("### Requirement: {}", "- `### Requirement: {}`", "* ### Requirement: {}")))
        return "\n".join(form.format(name) for name in names)
    if kind == "RENAMED":
        sides = draw(st.sampled_from((("FROM", "TO"), ("FROM", "TO"), ("FROM", "TO"), ("FROM", "FROM"), ("TO",))))
        form = draw(st.sampled_from(("- {}: `### Requirement: {}`", "{}: ### Requirement: {}", "  + {}:### Requirement: {}")))
        return "\n".join(form.format(side, draw(_names)) for _ in names[:2] for side in sides)
    return draw(_blocks(names))


def _with_endings(draw, text):
    form = draw(st.sampled_from(("\n", "\n", "\n", "\r\n", "mark")))
    return f"\ufeff{text}" if form == "mark" else text.replace("\n", form)
