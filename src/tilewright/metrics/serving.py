"""Figures of `tilewright bench serving`; `bench/serving_figures.py` computes them."""

from tilewright.metrics.metric import Metric

LATENCIES = (
    Metric(
        "ttft", "ms", "from when the request is sent, its connection included, to its first chunk", head="first token (TTFT)"
    ),
    Metric(
        "tpot",
        "ms",
        "from its first chunk to its last, over all its tokens but one, as in vLLM's benchmark. An answer of one token or of "
        "one chunk has none, where vLLM's has 0",
        head="per token (TPOT)",
    ),
    Metric("itl", "ms", "from a chunk to the next: a value for each pair of neighbours", head="between chunks (ITL)"),
    Metric(
        "token_itl",
        "ms",
        "from a chunk with tokens to the next: a value for each of its tokens, the time over how many they are. Null if one "
        "answer does not say it",
        head="between tokens",
    ),
    Metric("e2e", "ms", "from when the request is sent to the end of its answer, `[DONE]`", head="end to end (E2E)"),
    Metric(
        "held",
        "ms",
        "from when it was due until the limit of `--concurrency` let it go; 0 without one",
        head="held by --concurrency",
    ),
    Metric(
        "slip",
        "ms",
        "from when it was due until it was sent, less `held`: how late this client was. A client that is too slow for its plan "
        "shows here",
        head="sent late",
    ),
)
"""Of each request, in the order of the table. A run has mean and percentiles of each, as `ttft_mean_ms` and `ttft_p99_ms`."""

SERVING = (
    Metric("requests", "", "sent; answered to the end with at least one token; the others. Nothing is sent twice"),
    Metric("completed", head="Completed", form=","),
    Metric("failed"),
    Metric("rejected", "", "of those that failed: with 429 or 503"),
    Metric(
        "failures",
        "",
        "by `kind`, most frequent first, the number of `requests` and the `first_message`: `unreachable` (no "
        "connection), `disconnected` (it ended before the answer did), `timeout`, `malformed` (no HTTP, no stream "
        "of events, no completion), `error_event` (an error within the stream), `empty` (no token), and `http_` "
        "with the status",
    ),
    Metric("duration_s", "s", "from the first request sent to the end of the last answer or failure"),
    Metric("requests_per_s", "1/s", "`completed` / `duration_s`", form=",.2f"),
    Metric("requests_within_goodput", "", "completed requests that meet all of `--goodput`, and these / `duration_s`"),
    Metric("goodput_requests_per_s", "1/s", head="Goodput", form=",.2f"),
    Metric(
        "prompt_tokens",
        "tokens",
        "of completed requests. Prompt tokens are null where the server does not say them and the prompt is text",
    ),
    Metric("output_tokens", "tokens"),
    Metric(
        "cached_prompt_tokens",
        "tokens",
        "of them, those that the server had in its prefix cache, which cost it nothing; null where it does not say "
        "(OpenAI's `prompt_tokens_details`)",
    ),
    Metric("output_tokens_counted_by", "", "`usage`, `chunks`, or `both` where answers differ"),
    Metric(
        "output_tokens_per_s",
        "tokens/s",
        "output tokens, and prompt and output tokens, / `duration_s`",
        head="Output",
        form=",.1f",
    ),
    Metric("total_tokens_per_s", "tokens/s", form=",.1f"),
    Metric("tokens_per_chunk", "tokens", "output tokens over chunks, of answers with usage"),
    Metric("peak_concurrency", "", "the most requests under way at once"),
    Metric(
        "speculative_decoding",
        "",
        "the fields [as vLLM names them](#as-vllm-names-them), over all rounds of the `requests` whose answers have "
        "`metrics.speculative_decoding` with whole counts of rounds and drafts (vLLM: "
        "`--per-request-spec-decode-metrics`); null if none has. τ in the table is its `mean_acceptance_length`",
    ),
    Metric(
        "length_scale",
        "",
        "what a trace's lengths were multiplied by: `--context` over the positions of the whole trace's longest "
        "request, at most 1. Results are rounded down, to 1 at least",
    ),
    Metric(
        "characters_per_token",
        "",
        "by which prompts were cut from text: `given`, `measured` (a request with the beginning of the text, whose "
        "usage says how many tokens it is), or `assumed`",
    ),
    Metric("characters_per_token_source"),
    Metric("warmup_failed", "", "of the requests before the first that counts"),
)
"""Of a run."""
