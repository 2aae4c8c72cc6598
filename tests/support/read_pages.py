"""A parser for HTML pages, and a check that they are safe to open."""

import re
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "wbr", "link", "input"}
HOSTILE_NAMES = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>'",
    "</style></title><b>",
    "{{ 7 * 7 }} {% raw %}",
    "javascript:alert(1)",
    "https://evil.example/x.png",
    "עברית",
    "\u202egpj.exe",
    "\x1b[31mred\x00",
    "half \udcff",
]


class ParsedPage(HTMLParser):
    """Tags in the order they open, attributes, and text; every tag must be closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join("".join(self.texts).split())

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def check_safe(page, script=False):
    """Check that a page loads nothing, and runs nothing but one script that its policy allows by its hash."""
    forbidden = {"link", "iframe", "object", "form", "base"} | (set() if script else {"script"})
    assert not {tag for tag, _ in page.tags} & forbidden
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert attributes.get("src", "data:image/").startswith("data:image/")
        assert attributes.get("href", "#").startswith("#")
        assert "style" not in attributes
    [policy] = [one for one in page.all("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    allowed = r"; script-src 'sha256-[\w+/=]+'" if script else ""
    expected = rf"default-src 'none'; img-src data:; style-src 'unsafe-inline'{allowed}"
    assert re.fullmatch(expected, policy["content"])
