"""Figures of `tilewright diffuse` and `tilewright bench diffusion`; `bench/diffusion.py` computes them."""

from tilewright.metrics.metric import Metric

DENOISING = (
    Metric(
        "tokens",
        "tokens",
        "of the responses, up to their ends; `committed_tokens` counts what steps put behind an end too",
    ),
    Metric("steps", "", "forward passes, each of a whole batch (with guidance, of both halves together)"),
    Metric(
        "tokens_per_forward",
        "tokens",
        "committed tokens over steps, each row's steps counted by itself; also `_by_step`",
        head="tokens per forward",
        short="tok/\nfwd",
        form=".2f",
    ),
    Metric(
        "spans",
        "",
        "steps by what they looked at: `whole`, `response` (or from the block on), `block`",
        head="steps by span",
        short="steps\nby span",
    ),
    Metric(
        "salient_share",
        "",
        "positions whose MLP was computed over all positions of prompt and response, in the mean over rows, steps "
        "and layers; 1 in dense steps without a suffix window. Also `_by_layer`, `_by_step`, `_by_step_and_layer`",
        head="salient",
        form=".0%",
    ),
    Metric("host_synchronisations", "", "dispatches, each of which the host waits for once, and these over `steps`"),
    Metric("host_synchronisations_per_step", head="host waits a step", short="host waits\na step", form=".3f"),
    Metric(
        "seconds",
        "s",
        "in the denoising loop, without compilation; `tokens` over that. Of the benchmark the median of the "
        "repetitions, with `_range`",
    ),
    Metric("tokens_per_s", "tokens/s", head="tokens/s", short="tok/s", digits=3),
    Metric("correct", "", "responses whose answer is right, and their share; null where nobody knows the answers"),
    Metric("accuracy", head="right", form=".1%"),
    Metric(
        "token_agreement",
        "",
        "places of responses that hold the same token as dense's, over all places, those that one of the two lacks "
        "included; `identical_responses` are equal in all",
        head="agrees with dense",
        short="same",
        form=".1%",
    ),
    Metric(
        "compared_positions",
        "",
        "masked positions of the current block, over all steps of the responses that were gone through beside dense "
        "passes. The next two are means over them",
    ),
    Metric(
        "argmax_agreement",
        "",
        "the share where the step's most likely token is that of a dense pass over the whole sequence, whatever the suffix "
        "window; also `_by_step`",
        head="same argmax",
        short="argmax",
        form=".1%",
    ),
    Metric(
        "logit_kl_nats",
        "nats",
        "the Kullback-Leibler divergence of the step's distribution from the dense pass's, at temperature 1, before "
        "any filter, the mask left out; also `_by_step`",
        head="KL, nats",
        short="KL\nnats",
        form=".4f",
    ),
    Metric(
        "seconds_per_step",
        "s",
        "of the loop over its steps, median of the repetitions, with `_range`",
        head="ms a step",
        short="ms/\nstep",
        form=".2f",
        factor=1000,
    ),
    Metric(
        "speedup",
        "",
        "dense's seconds over this way's for the same prompts, repetition by repetition: the median, with `_range`. "
        "An answer that ends early counts: read it beside the accuracy",
        head="speedup",
        form=".2f",
        par=1.0,
    ),
    Metric("step_speedup", "", "the same of the seconds of a step", head="step speedup", short="step\nspeedup", form=".2f"),
    Metric(
        "compilations",
        "",
        "before the first run; programs that an earlier way left are not counted again",
        head="compiled",
        form=",",
    ),
    Metric("programs_loaded"),
    Metric("compile_seconds", "s", head="seconds", form=".1f"),
    Metric(
        "compilations_while_timed",
        "",
        "in all timed runs of all ways together",
        head="compiled while timed",
        short="while\ntimed",
        form=",",
    ),
    Metric(
        "peak_bytes",
        "bytes",
        "arguments, results and temporaries of the loop's program at once, the weights among them",
        head="peak MB",
        short="peak\nMB",
        form=",.1f",
        factor=1e-6,
    ),
    Metric("positions", "", "of a row, as the program has them"),
)
"""Of one way of denoising."""
