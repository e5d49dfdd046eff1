"""Reads a page that was written: its scripts, its data, what it would fetch."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """The elements of a page with their attributes, its text outside of scripts and styles, and what stands in those."""

    def __init__(self, path: Path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.words: list[str] = []
        self.embedded: str | None = None
        self._inside = ""
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = "data" if dict(attrs).get("id") == "data" else tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            assert self.embedded is None
            self.embedded = data
        elif self._inside in ("script", "style"):
            (self.scripts if self._inside == "script" else self.styles).append(data)
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def data(self) -> Any:
        assert self.embedded is not None
        return json.loads(self.embedded)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_self_contained(page: Page) -> None:
    """Nothing on the page asks for another file, and its policy would forbid it; only its own scripts may run."""
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        assert not {"src", "srcset", "href", "xlink:href", "data", "action", "background"} & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], "a handler that the policy would stop"
        assert "url(" not in (attributes.get("style") or "")
    for text in page.styles:
        assert not re.search(r"url\(|@import|//", text)
    for text in page.scripts:
        assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg\")|fetch\(|XMLHttpRequest|import\(|WebSocket|eval\(", text)
    (policy,) = [m["content"] for m in page.named("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.scripts]
    assert re.findall(r"'sha256-([^']+)'", policy) == digests
    assert "script-src 'unsafe" not in policy
