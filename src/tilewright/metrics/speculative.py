"""Figures of `tilewright bench speculative`; `llm/acceptance.py` and `bench/speculative_figures.py` compute them."""

from tilewright.metrics.metric import Metric

TAU = (
    Metric(
        "tokens_per_round",
        "",
        "all tokens of all responses over all rounds. A last round that an end-of-sequence token, a stop string or "
        "the length limit cuts counts for what it added. It is what a round gave in the end, and long responses "
        "weigh more",
        head="τ",
        form=".2f",
        csv=True,
    ),
    Metric(
        "tau_by_response",
        "",
        "of each response the mean over its rounds of accepted drafts + 1, of these the mean over the responses. A "
        "response that is easy to draft weighs as much as one that takes many more rounds, so that this is the "
        "higher one where responses differ; what the last round accepted past the end counts",
        csv=True,
    ),
    Metric(
        "tau_published",
        "",
        "`tau_by_response` without the first round of each response: by the count of the published code",
        csv=True,
    ),
)
"""The three counts of tokens a round."""

FIGURES = (
    Metric("dataset", "", "name of the file, without its suffix", head="data", csv=True),
    Metric(
        "batch_size",
        "rows",
        "decoded together; where several are measured, the tables name it behind the dataset",
        csv=True,
    ),
    Metric("drafter", "", "what drafted; `none` is the baseline", head="drafter", csv=True),
    Metric("block_size", "tokens", "in a block, the known one included; 1 without a drafter", csv=True),
    Metric("responses", "", "turns that were answered", csv=True),
    Metric("skipped", "", "turns left out because they do not fit the context", csv=True),
    Metric("tokens", "tokens", "generated, the end-of-sequence token included", csv=True),
    Metric(
        "rounds",
        "",
        "that ran, over all responses; a round of a batch counts once for each of its rows that was not done",
        csv=True,
    ),
    Metric(
        "tokens_per_s",
        "tokens/s",
        "generated tokens of all responses over the seconds of decoding, prefill and compilation excluded: the "
        "median over the repetitions. All ways of decoding a dataset run in turns, every second time in reverse",
        head="tokens/s",
        short="tok/s",
        digits=3,
        csv=True,
    ),
    Metric("tokens_per_s_range", "tokens/s", "the least and the most of the repetitions"),
    Metric(
        "baseline_tokens_per_s",
        "tokens/s",
        "`tokens_per_s` of the baseline of that batch size, in the same turns",
        csv=True,
    ),
    Metric("baseline_tokens_per_s_range", "tokens/s", "likewise"),
    Metric("speedup", "", "`tokens_per_s` / `baseline_tokens_per_s`", head="speedup", form=".2f", csv=True, par=1.0),
    Metric("speedup_range", "", "the least and the most of the quotients within one repetition"),
    Metric(
        "mean_round_ms",
        "ms",
        "seconds of decoding over the rounds of the batch (one that serves eight rows is one); for the baseline, of "
        "a step. The median over the repetitions",
        csv=True,
    ),
    Metric(
        "round_cost_steps",
        "steps",
        "`mean_round_ms` over the baseline's: what a round costs, in steps. For one row, a drafter pays where τ is larger",
        head="steps a round",
        short="round",
        form=".1f",
        csv=True,
    ),
    Metric(
        "round_ms",
        "ms",
        "time of one round that drafts and of its parts: drafting; the target's pass over the block; all else (see "
        "below); empty for the baseline. They are differences of times, and may come out below 0",
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
        "price per hour / (3600 · `tokens_per_s`) · 10⁶; for time in decoding alone",
        head="cost/M tokens",
        short="cost/M",
        form=",.2f",
        csv=True,
    ),
    Metric(
        "distinct_4gram_ratio",
        "",
        "different 4-grams over all 4-grams of a response, the mean over responses. A text that loops is easy to "
        "draft: read τ with this",
        head="4-grams",
        form=".0%",
        csv=True,
    ),
    Metric(
        "identical",
        "",
        "whether all responses equal the baseline's, token for token. *same* in the table: how many do",
        head="same",
        csv=True,
    ),
    Metric(
        "first_differences",
        "token position",
        "for each response the first token that differs from the baseline's, from 0; null where none does",
    ),
    Metric("speculative_decoding", "", "[below](#as-vllm-names-them)"),
    Metric("acceptance_by_position", "", "[below](#acceptance-by-position)"),
    Metric("tau_by_position", "", "[below](#τ-against-the-position-in-the-response)"),
    Metric("chosen", "", "what rounds did where that was chosen as decoding went: [below](#rounds-that-were-chosen)"),
    Metric(
        "categories",
        "",
        "for each category (where there are at least two) `category`, `responses`, `tokens`, `rounds` and the three "
        "τ; a table each, and a line each in CSV",
    ),
)
"""Of each dataset, batch size and drafter; `TAU` goes with them."""

VLLM = (
    Metric("num_spec_steps", "", "rounds that proposed at least one draft (`vllm:spec_decode_num_drafts`)", csv=True),
    Metric("num_draft_tokens", "", "drafts proposed (`vllm:spec_decode_num_draft_tokens`)", csv=True),
    Metric(
        "num_accepted_draft_tokens",
        "",
        "drafts accepted, before an end cuts the round; the target's own token is none "
        "(`vllm:spec_decode_num_accepted_tokens`)",
        csv=True,
    ),
    Metric("num_spec_tokens", "", "the most drafts in a round: `block_size` − 1", csv=True),
    Metric(
        "mean_acceptance_length",
        "",
        "1 + `num_accepted_draft_tokens` / `num_spec_steps`; 1 without a step. Where every round drafts it exceeds "
        "`tokens_per_round` by what the last rounds accepted past the end",
        csv=True,
    ),
    Metric("draft_acceptance_rate", "", "`num_accepted_draft_tokens` / `num_draft_tokens`; 0 without a draft", csv=True),
    Metric("acceptance_histogram", "", "entry j: rounds that accepted exactly j drafts; `num_spec_tokens` + 1 entries"),
    Metric(
        "acceptance_histogram_by_draft_length",
        "",
        'the same for each number k of drafts that rounds proposed, as an object: "k" to k + 1 entries',
    ),
)
"""The fields of `speculative_decoding`, which mean what they mean in vLLM."""

POSITIONS = (
    Metric("accepted", "", "rounds that accepted the draft at this position (vLLM: `spec_decode_num_accepted_tokens_per_pos`)"),
    Metric("reached", "", "rounds that had a draft here and accepted all before it"),
    Metric(
        "rate",
        "",
        "`accepted` / `num_spec_steps`: unconditional, never rises with the position. 1 plus the sum of all rates "
        "is `mean_acceptance_length`",
        head="rate",
        form=".0%",
    ),
    Metric("conditional", "", "`accepted` / `reached`: how good the drafter is at this position once it has come this far"),
)
"""Of each draft of a block."""

CHOSEN = (
    Metric(
        "widths",
        "",
        "why the output does not depend on the choices: `alike`, the target gives a row the same tokens in programs "
        "of any width; `masked`, every round runs the widest program; `inexact`, neither (`bench speculative "
        "--block-size auto-inexact`)",
    ),
    Metric(
        "choices",
        "",
        "of each choice that ran (`drafter` and `block_size`; `none` and 1 is plain decoding) `rounds`, `tokens` "
        "that they added, `share_of_rounds`, `tokens_per_round`; of the last repetition",
    ),
    Metric(
        "costs",
        "",
        "for each shape (`batch_size`, `capacity`) and by whether rows draw (`drawn`) `dispatch_ms`, what a dispatch "
        "takes besides its rounds, and `rounds`: of each choice `round_ms` of a round that drafts and `idle_ms` of "
        "one in which n-grams find nothing, or draft in a learnt drafter's place, `measured` or on a line between "
        "those that were, corrected by the times of dispatches, all widths of a drafter alike; `round_cost_steps`, "
        "`expected_tokens_per_round` and `expected_speedup` over plain decoding, by all that was decoded so far, "
        "which is what the next batch begins with",
    ),
)
"""What rounds did where that was chosen as decoding went."""
