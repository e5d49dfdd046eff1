"""Figures of `tilewright bench speculative`; `llm/acceptance.py` and `bench/speculative_figures.py` compute them."""

from tilewright.metrics.metric import Metric

TAU = (
    Metric(
        "tokens_per_round",
        "",
        "tokens over rounds, of all responses; a cut last round counts what it added. τ in tables",
        head="τ",
        form=".2f",
        csv=True,
    ),
    Metric(
        "tau_by_response",
        "",
        "mean over responses of each response's mean of accepted drafts + 1 per round, including drafts accepted past the end",
        csv=True,
    ),
    Metric(
        "tau_published",
        "",
        "`tau_by_response` without each response's first round, as published code counts",
        csv=True,
    ),
)
"""Three definitions of tokens per round."""

FIGURES = (
    Metric("dataset", "", "file name without suffix", head="data", csv=True),
    Metric(
        "batch_size",
        "rows",
        "rows decoded together",
        csv=True,
    ),
    Metric("drafter", "", "`none` is plain decoding, the baseline", head="drafter", csv=True),
    Metric("block_size", "tokens", "tokens in a block, with the last committed token; 1 without a drafter", csv=True),
    Metric("responses", "", "answered turns", csv=True),
    Metric("skipped", "", "turns left out because they exceed the context", csv=True),
    Metric("tokens", "tokens", "generated tokens, with end-of-sequence tokens", csv=True),
    Metric(
        "rounds",
        "",
        "rounds of all responses; a batch's round counts once per unfinished row",
        csv=True,
    ),
    Metric(
        "tokens_per_s",
        "tokens/s",
        "generated tokens over decoding time, without prefill and compilation: median of alternating repetitions",
        head="tokens/s",
        short="tok/s",
        digits=3,
        csv=True,
    ),
    Metric("tokens_per_s_range", "tokens/s", "minimum and maximum of the repetitions"),
    Metric(
        "baseline_tokens_per_s",
        "tokens/s",
        "`tokens_per_s` of the baseline with this batch size",
        csv=True,
    ),
    Metric("baseline_tokens_per_s_range", "tokens/s", "its minimum and maximum"),
    Metric("speedup", "", "`tokens_per_s` / `baseline_tokens_per_s`", head="speedup", form=".2f", csv=True, par=1.0),
    Metric("speedup_range", "", "minimum and maximum of the quotients of one repetition"),
    Metric(
        "mean_round_ms",
        "ms",
        "decoding time over rounds of the batch (steps, for the baseline): median",
        csv=True,
    ),
    Metric(
        "round_cost_steps",
        "steps",
        "`mean_round_ms` over the baseline's. At batch size 1, a drafter pays off if τ is larger",
        head="steps a round",
        short="round",
        form=".1f",
        csv=True,
    ),
    Metric(
        "round_ms",
        "ms",
        "one drafting round; its parts: draft, verification by the target, the rest ([time of a round](#time-of-a-round))",
        head="round",
        form=".2f",
        csv=True,
    ),
    Metric("draft_ms", "ms", head="draft", form=".2f", csv=True),
    Metric("verify_ms", "ms", head="verify", form=".2f", csv=True),
    Metric("other_ms", "ms", head="other", form=".2f", csv=True),
    Metric(
        "cost_per_million_tokens",
        "currency of the price",
        "price per hour / (3600 · `tokens_per_s`) · 10⁶",
        head="cost/M tokens",
        short="cost/M",
        form=",.2f",
        csv=True,
    ),
    Metric(
        "distinct_4gram_ratio",
        "",
        "distinct over all 4-grams of a response, mean over responses. Repetitive text is easy to draft",
        head="4-grams",
        form=".0%",
        csv=True,
    ),
    Metric(
        "identical",
        "",
        "true if all responses equal the baseline's; tables show how many do",
        head="same",
        csv=True,
    ),
    Metric(
        "first_differences",
        "token position",
        "first token of each response that differs from the baseline's, from 0; null if equal",
    ),
    Metric("speculative_decoding", "", "acceptance [as in vLLM](#as-vllm-names-them)"),
    Metric("acceptance_by_position", "", "[acceptance of each draft](#acceptance-by-position) of a block"),
    Metric("tau_by_position", "", "τ of rounds that began with `from` up to below `to` response tokens: `rounds` and `tau`"),
    Metric("chosen", "", "[adaptively chosen rounds](#rounds-that-were-chosen)"),
    Metric(
        "categories",
        "",
        "counts and τ of each category, if there are several",
    ),
)
"""Figures of each dataset, batch size and drafter, together with `TAU`."""

VLLM = (
    Metric("num_spec_steps", "", "rounds with at least one draft (`vllm:spec_decode_num_drafts`)", csv=True),
    Metric("num_draft_tokens", "", "drafts (`vllm:spec_decode_num_draft_tokens`)", csv=True),
    Metric(
        "num_accepted_draft_tokens",
        "",
        "accepted drafts, also past an end; without the target's own tokens (`vllm:spec_decode_num_accepted_tokens`)",
        csv=True,
    ),
    Metric("num_spec_tokens", "", "`block_size` − 1", csv=True),
    Metric(
        "mean_acceptance_length",
        "",
        "1 + `num_accepted_draft_tokens` / `num_spec_steps`; 1 without rounds",
        csv=True,
    ),
    Metric("draft_acceptance_rate", "", "`num_accepted_draft_tokens` / `num_draft_tokens`; 0 without drafts", csv=True),
    Metric("acceptance_histogram", "", "entry j: rounds with exactly j accepted drafts"),
    Metric(
        "acceptance_histogram_by_draft_length",
        "",
        "the histogram for each number of drafts in a round",
    ),
)
"""Fields of `speculative_decoding`, as vLLM defines them."""

POSITIONS = (
    Metric("accepted", "", "rounds that accepted this draft"),
    Metric("reached", "", "rounds with a draft here that accepted all earlier drafts"),
    Metric(
        "rate",
        "",
        "`accepted` / `num_spec_steps`",
        head="rate",
        form=".0%",
    ),
    Metric("conditional", "", "`accepted` / `reached`"),
)
"""Figures of each draft position of a block."""

CHOSEN = (
    Metric(
        "widths",
        "",
        "reason why choices do not change the output: `alike` (rows are independent of width), `masked` (all "
        "rounds run the widest program), or `inexact` (they may)",
    ),
    Metric(
        "choices",
        "",
        "for each `drafter`, `block_size` and `tree_nodes` (0 for chains) of the last repetition: `rounds`, `tokens`, "
        "`share_of_rounds`, `tokens_per_round`",
    ),
    Metric(
        "costs",
        "",
        "for each shape and sampling mode (`drawn`): `dispatch_ms` per dispatch, and for each choice "
        "`round_ms`, `idle_ms` (without drafts), `measured` or interpolated, `round_cost_steps`, "
        "`expected_tokens_per_round`, `expected_speedup`",
    ),
)
"""Figures of adaptively chosen rounds."""
