"""Prometheus metrics of the server. Metrics with vLLM's meaning have vLLM's names.

Counter names lack the `_total` that Prometheus' text format adds.
"""

from tilewright.metrics.metric import Metric

GAUGES = (
    Metric("vllm:num_requests_running", "", "Running requests."),
    Metric("vllm:num_requests_waiting", "", "Waiting requests."),
    Metric("vllm:kv_cache_usage_perc", "", "Share of pages held by running requests."),
    Metric("tilewright_waiting_tokens", "tokens", "Prompt tokens of waiting requests."),
    Metric("tilewright_slots", "", "Maximum number of running requests."),
    Metric("tilewright_pages", "", "Pages in the pool."),
    Metric("tilewright_prefix_pages", "", "Pages held by the prefix cache."),
    Metric("tilewright_engine_step_age_seconds", "s", "Time since the engine's last iteration."),
    Metric("tilewright_warm_seconds", "s", "Compilation time before the engine was ready."),
    Metric("tilewright_programs_ready", "", "Compiled programs that requests may use."),
    Metric("tilewright_programs_declared", "", "All programs that requests may use, also those that are still compiled."),
    Metric("tilewright_padding_ratio", "", "Share of padding rows in all rounds."),
    Metric("tilewright_prefill_padding_ratio", "", "Share of padding in prefilled positions."),
)
"""Gauges of the engine's current state."""

COUNTERS = (
    Metric("vllm:prompt_tokens", "tokens", "Prompt tokens of all requests."),
    Metric("vllm:generation_tokens", "tokens", "Generated tokens."),
    Metric("vllm:prefix_cache_queries", "tokens", "Prompt tokens looked up in the prefix cache."),
    Metric("vllm:prefix_cache_hits", "tokens", "Prompt tokens found there."),
    Metric("vllm:num_preemptions", "", "Requests that lost their pages and were recomputed."),
    Metric("vllm:admission_rejections", "", "Requests rejected because the queue was full."),
    Metric("vllm:spec_decode_num_drafts", "", "Rounds of a request with drafts."),
    Metric("vllm:spec_decode_num_draft_tokens", "tokens", "Draft tokens."),
    Metric("vllm:spec_decode_num_accepted_tokens", "tokens", "Accepted draft tokens."),
    Metric("tilewright_dispatches", "", "Dispatches of rounds."),
    Metric("tilewright_automaton_rounds", "", "Rounds with grammar masks from the device."),
    Metric("tilewright_constrained_rounds", "", "Rounds with grammar masks from the host."),
    Metric("tilewright_row_rounds", "", "Rows of requests in rounds."),
    Metric("tilewright_padding_rows", "", "Padding rows in rounds."),
    Metric("tilewright_prefill_tokens", "positions", "Positions prefilled for requests."),
    Metric("tilewright_prefill_padding", "positions", "Padding positions in prefill."),
    Metric("vllm:request_success", "", "Finished requests.", label="finished_reason"),
    Metric(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "tokens",
        "Accepted draft tokens by position in the block, from 0.",
        label="position",
    ),
    Metric("tilewright_xla_compilations", "", "Compiled programs; while serving only undeclared ones.", label="phase"),
    Metric(
        "tilewright_rounds",
        "",
        "Rounds by drafter and block width; denoising steps by computed part.",
        label="choice",
    ),
)
"""Counters since the start."""

HISTOGRAMS = (
    Metric("vllm:time_to_first_token_seconds", "s", "From submission to the first token."),
    Metric("vllm:inter_token_latency_seconds", "s", "Between successive arrivals of a request's tokens."),
    Metric("vllm:e2e_request_latency_seconds", "s", "From submission to the end."),
    Metric("vllm:request_queue_time_seconds", "s", "From submission to admission."),
    Metric("vllm:request_prefill_time_seconds", "s", "From admission to the first token."),
    Metric("vllm:request_decode_time_seconds", "s", "From the first token to the end."),
)
"""Histograms of request times."""
