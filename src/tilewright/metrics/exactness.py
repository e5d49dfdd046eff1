"""Figures of `tilewright verify-exact`."""

from tilewright.metrics.metric import Metric

EXACTNESS = (
    Metric("same", "", "whether every path of every finding gave the plain tokens, and nothing else went wrong", head="same"),
    Metric("prompt_tokens", "tokens", "of each request"),
    Metric(
        "requests_compared",
        "",
        "requests, each kind of sampling counted apart, and those that get the plain tokens on all paths, also for "
        "the requests made of them",
    ),
    Metric("requests_agreeing"),
    Metric(
        "plain",
        "",
        "for each kind of sampling the SHA-256 of the plain answers: of each its length and its token ids, as "
        "little-endian 32-bit integers, in the order of the requests",
    ),
    Metric("findings", "", "one for each drafter, path and kind of sampling"),
    Metric("drafter"),
    Metric("path", head="path", words=True),
    Metric("sampling"),
    Metric("sha256", "", "the same of the path's answers, of a request that was asked twice the last"),
    Metric(
        "answers",
        "",
        "that were compared: those to requests made of others too (the same again, one with the same beginning, one "
        "that goes on from half an answer), and all attempts to run out of pages",
    ),
    Metric(
        "exercised",
        "",
        "what happened: `rounds` (in the engine counted once for all rows, else for each), `accepted drafts`, "
        "`preemptions`, `prefix tokens` found in the cache, requests `cancelled`, and with a team the rounds `of` "
        "each choice",
        head="exercised",
        words=True,
    ),
    Metric("not_exercised", "", "what the path was to do and did not"),
    Metric(
        "problem",
        "",
        "what went wrong besides tokens: a request that the engine gave up, slots or pages held at the end, "
        "programs compiled meanwhile",
    ),
    Metric("seconds", "s", "of the path, compilation outside of the engine included"),
    Metric(
        "differences",
        "",
        "for each answer that differs: the request's `number` (`about`: how it was made of that), and the first "
        "`position` that differs, from 0 behind the prompt; `token` and `text` there, `plain_token` and "
        "`plain_text`, null behind an end",
    ),
    Metric(
        "margin",
        "logits",
        "by how much the target's largest logit exceeds its second there, in one pass over the plain text up to it, "
        "without a cache; the pass is in the model's dtype, the logits are float32",
    ),
    Metric(
        "lead",
        "logits",
        "how far the plain token is ahead of the other in what the draw compares: logits after penalties, "
        "temperature and filters, with the noise of the request's seed and position. A rounding tie is near 0 here, "
        "also where `margin` is not; null where a filter left one out",
    ),
)
"""Of a run, of its findings and of their differences."""
