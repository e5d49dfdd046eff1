"""The chat page: one document that asks nothing of anybody but the server that it came from."""

import base64
import hashlib
import re
from importlib import resources


def digest(text: str) -> str:
    """A source expression of a content security policy that lets exactly this text in."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def policy(page: str) -> str:
    """A content security policy under which a page's own script and style run, and nothing else does."""
    (style,), (script,) = (re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("style", "script"))
    return (
        f"default-src 'none'; connect-src 'self'; script-src {digest(script)}; style-src {digest(style)}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


SOURCE = resources.files("tilewright.server").joinpath("page.html").read_text(encoding="utf-8")
PAGE = SOURCE.encode()
"""Page that `GET /` answers, as `text/html; charset=utf-8`; `Content-Security-Policy` is `CSP`."""
CSP = policy(SOURCE)
