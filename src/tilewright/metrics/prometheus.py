"""Metrics that the server exports for Prometheus; where one means what it means in vLLM it has vLLM's name.

Counters are named without the `_total` that Prometheus' text format adds to them.
"""

from tilewright.metrics.metric import Metric

GAUGES = (
    Metric("vllm:num_requests_running", "", "Requests that are computed now."),
    Metric("vllm:num_requests_waiting", "", "Requests that wait."),
    Metric("vllm:kv_cache_usage_perc", "", "Share of the pages that running requests hold."),
    Metric("tilewright_waiting_tokens", "tokens", "Prompt tokens of the requests that wait."),
    Metric("tilewright_slots", "", "Requests that can run at once."),
    Metric("tilewright_pages", "", "Pages in the pool."),
    Metric("tilewright_prefix_pages", "", "Pages that the prefix cache keeps."),
    Metric("tilewright_engine_step_age_seconds", "s", "Since the engine last went round."),
    Metric("tilewright_warm_seconds", "s", "What compiling before the engine was ready took."),
    Metric("tilewright_padding_ratio", "", "Share of padding in the rows of all rounds."),
    Metric("tilewright_prefill_padding_ratio", "", "Share of padding in all prefilled positions."),
)
"""Gauges: the engine as it is now."""

COUNTERS = (
    Metric("vllm:prompt_tokens", "tokens", "Prompt tokens of all requests."),
    Metric("vllm:generation_tokens", "tokens", "Generated tokens."),
    Metric("vllm:prefix_cache_queries", "tokens", "Prompt tokens looked up in the prefix cache."),
    Metric("vllm:prefix_cache_hits", "tokens", "Prompt tokens found there."),
    Metric("vllm:num_preemptions", "", "Requests that gave up their pages and were computed anew."),
    Metric("vllm:admission_rejections", "", "Requests turned away since the queue was full."),
    Metric("vllm:spec_decode_num_drafts", "", "Rounds of a request in which something was drafted."),
    Metric("vllm:spec_decode_num_draft_tokens", "tokens", "Draft tokens."),
    Metric("vllm:spec_decode_num_accepted_tokens", "tokens", "Accepted draft tokens."),
    Metric("tilewright_dispatches", "", "Dispatches of rounds."),
    Metric("tilewright_automaton_rounds", "", "Rounds under masks made on the device, for requests with a grammar."),
    Metric("tilewright_constrained_rounds", "", "Rounds under masks made on the host, for a request with a grammar."),
    Metric("tilewright_row_rounds", "", "Rows that rounds ran for requests."),
    Metric("tilewright_padding_rows", "", "Rows that rounds ran to fill a shape."),
    Metric("tilewright_prefill_tokens", "positions", "Positions that prefill computed for requests."),
    Metric("tilewright_prefill_padding", "positions", "Positions that prefill computed to fill a chunk."),
    Metric("vllm:request_success", "", "Requests that ended.", label="finished_reason"),
    Metric(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "tokens",
        "Accepted draft tokens by their place in the block, from 0.",
        label="position",
    ),
    Metric("tilewright_xla_compilations", "", "Compiled programs; while serving there should be none.", label="phase"),
    Metric(
        "tilewright_rounds",
        "",
        "Rounds, by drafter and block width; denoising steps, by what they look at.",
        label="choice",
    ),
)
"""Counters since the start."""

HISTOGRAMS = (
    Metric("vllm:time_to_first_token_seconds", "s", "From asking to the first token."),
    Metric("vllm:inter_token_latency_seconds", "s", "Between two arrivals of tokens of a request."),
    Metric("vllm:e2e_request_latency_seconds", "s", "From asking to the end."),
    Metric("vllm:request_queue_time_seconds", "s", "From asking to being admitted."),
    Metric("vllm:request_prefill_time_seconds", "s", "From being admitted to the first token."),
    Metric("vllm:request_decode_time_seconds", "s", "From the first token to the end."),
)
"""How long requests took."""
