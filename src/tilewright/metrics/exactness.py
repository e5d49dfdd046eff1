"""Figures of `tilewright verify-exact`."""

from tilewright.metrics.metric import Metric

EXACTNESS = (
    Metric("same", "", "true if every path gave the reference tokens without other problems", head="same"),
    Metric("prompt_tokens", "tokens", "of each request"),
    Metric(
        "requests_compared",
        "",
        "requests per kind of sampling; those with the reference tokens on all paths, derived requests included",
    ),
    Metric("requests_agreeing"),
    Metric(
        "plain",
        "",
        "SHA-256 of the reference for each kind of sampling: of each answer its length and token ids, "
        "little-endian 32-bit integers",
    ),
    Metric("findings", "", "a record for each drafter, path and kind of sampling"),
    Metric("drafter"),
    Metric("path", head="path", words=True),
    Metric("sampling"),
    Metric("sha256", "", "digest of the path's answers; of repeated requests the last"),
    Metric(
        "answers",
        "",
        "compared answers, with those to derived requests",
    ),
    Metric(
        "exercised",
        "",
        "counts of `rounds`, `accepted drafts`, `preemptions`, cached `prefix tokens`, `cancelled` requests, "
        "rounds `of` each choice",
        head="exercised",
        words=True,
    ),
    Metric("not_exercised", "", "expected events that did not happen"),
    Metric(
        "problem",
        "",
        "errors other than tokens: failed requests, leaked slots or pages, compilations",
    ),
    Metric("seconds", "s", "time of the path"),
    Metric(
        "differences",
        "",
        "for each differing answer: request `number` (`about`: its derivation), first differing `position`, "
        "`token`, `text`, `plain_token`, `plain_text`; null after an end",
    ),
    Metric(
        "margin",
        "logits",
        "the target's largest minus second largest logit at this position, from an uncached pass",
    ),
    Metric(
        "lead",
        "logits",
        "score of the reference token minus that of the other, after penalties, filters and noise. Rounding "
        "ties are near 0; null if filtered",
    ),
)
"""Figures of a run, its findings and their differences."""
