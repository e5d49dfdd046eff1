"""Chat page: one HTML document that loads nothing from other hosts."""

import base64
import hashlib
import re
from importlib import resources


def digest(text: str) -> str:
    """Returns the source expression of a content security policy that allows exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def policy(page: str) -> str:
    """Returns a content security policy that allows a page's own script and style only."""
    (style,), (script,) = (re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("style", "script"))
    return (
        f"default-src 'none'; connect-src 'self'; script-src {digest(script)}; style-src {digest(style)}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


SOURCE = resources.files("tilewright.server").joinpath("page.html").read_text(encoding="utf-8")
PAGE = SOURCE.encode()
"""Response body of `GET /` (`text/html; charset=utf-8`)."""
CSP = policy(SOURCE)
"""Value of the page's header `Content-Security-Policy`."""
