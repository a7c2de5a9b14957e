"""A page's tags, read with a check of their nesting, and its visible text."""

import re
from html.parser import HTMLParser

VOID = frozenset({"meta", "link", "img", "input", "br"})


class PageOutline(HTMLParser):
    """Checks nesting while it reads; keeps every start tag with its attributes."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        assert len(attributes) == len(attrs), f"<{tag}> repeats an attribute"
        self.tags.append((tag, attributes))
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(text):
    outline = PageOutline()
    outline.feed(text)
    outline.close()
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))
    return outline


def visible(text):
    without = re.sub(r"<(script|style).*?</\1>", " ", text, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", without).split())
