"""Figures of `tilewright bench serving`; `bench/serving_figures.py` computes them."""

from tilewright.metrics.metric import Metric

LATENCIES = (
    Metric("ttft", "ms", "from sending (with connecting) to the first chunk", head="first token (TTFT)"),
    Metric(
        "tpot",
        "ms",
        "from first to last chunk, over all tokens but one; none for a single token or chunk (vLLM: 0)",
        head="per token (TPOT)",
    ),
    Metric("itl", "ms", "between successive chunks", head="between chunks (ITL)"),
    Metric(
        "token_itl",
        "ms",
        "between successive chunks with tokens, divided by the tokens of the later chunk, once per token; "
        "null without token counts",
        head="between tokens",
    ),
    Metric("e2e", "ms", "from sending to `[DONE]`", head="end to end (E2E)"),
    Metric(
        "held",
        "ms",
        "delay by the `--concurrency` limit",
        head="held by --concurrency",
    ),
    Metric(
        "slip",
        "ms",
        "delay by this client, without `held`",
        head="sent late",
    ),
)
"""Latencies in table order. A run has mean and percentiles of each, such as `ttft_mean_ms` and `ttft_p99_ms`."""

SERVING = (
    Metric("requests", "", "sent; answered to the end with at least one token; all others"),
    Metric("completed", head="Completed", form=","),
    Metric("failed"),
    Metric("rejected", "", "failures with status 429 or 503"),
    Metric(
        "failures",
        "",
        "`requests` and `first_message` of each `kind`: `unreachable`, `disconnected`, `timeout`, "
        "`malformed`, `error_event` (in the stream), `empty` (no token), `http_<status>`",
    ),
    Metric("duration_s", "s", "from sending the first request to the last end or failure"),
    Metric("requests_per_s", "1/s", "`completed` / `duration_s`", form=",.2f"),
    Metric("requests_within_goodput", "", "completed requests that meet all `--goodput` objectives; the same / `duration_s`"),
    Metric("goodput_requests_per_s", "1/s", head="Goodput", form=",.2f"),
    Metric(
        "prompt_tokens",
        "tokens",
        "of completed requests; prompt tokens are null if the server does not count text prompts",
    ),
    Metric("output_tokens", "tokens"),
    Metric(
        "cached_prompt_tokens",
        "tokens",
        "prompt tokens found in the server's prefix cache (`prompt_tokens_details`)",
    ),
    Metric("output_tokens_counted_by", "", "`usage`, `chunks` or `both`"),
    Metric(
        "output_tokens_per_s",
        "tokens/s",
        "output tokens, all tokens / `duration_s`",
        head="Output",
        form=",.1f",
    ),
    Metric("total_tokens_per_s", "tokens/s", form=",.1f"),
    Metric("tokens_per_chunk", "tokens", "output tokens over chunks, of responses with usage"),
    Metric("peak_concurrency", "", "maximum number of concurrent requests"),
    Metric(
        "speculative_decoding",
        "",
        "sums of the server's acceptance fields ([as vLLM](#as-vllm-names-them)) over the `requests` that have them",
    ),
    Metric(
        "length_scale",
        "",
        "factor on a trace's lengths, from `--context`",
    ),
    Metric(
        "characters_per_token",
        "",
        "for cutting text: `given`, `measured` with the server, or `assumed`",
    ),
    Metric("characters_per_token_source"),
    Metric("warmup_failed", "", "failed warm-up requests"),
)
"""Figures of a run."""
