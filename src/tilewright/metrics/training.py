"""Figures of `tilewright train`."""

from tilewright.metrics.metric import Metric

TRAINING = (
    Metric(
        "loss_nats_per_token",
        "nats",
        "the mean cross-entropy over the steps since the evaluation before the last one; for drafters weighted by "
        "slot as in their papers; for diffusion models of the masked tokens of responses, each over the share of "
        "its sequence that is masked in expectation, by the weight of all",
    ),
    Metric(
        "held_out_loss_nats_per_token",
        "nats",
        "the same over the first 32 batches of the held-out text (diffusion models: over 8 that are drawn as for "
        "training), after the last step",
    ),
    Metric("curve", "", "both, with `step`, at every evaluation"),
    Metric(
        "tokens_per_s",
        "tokens/s",
        "tokens of the batches over the seconds of this process, compilation and evaluations included; 0 where a "
        "finished run is asked for again",
    ),
    Metric(
        "model_flops_utilization",
        "",
        "operations that the model needs a second, over the bfloat16 peak of the devices that share them "
        "(`tilewright chips`): PaLM's 6 N + 12 L H Q T a token (arXiv 2204.02311, appendix B), N the parameters "
        "that a token is multiplied with, T the sequence's length; from this process's first step, which compiles, "
        "to its last. What the backward pass computes again does not count. Language and diffusion models, where "
        "the peak is known: never on a CPU",
    ),
    Metric("seconds", "s", "of the loop in this process"),
    Metric(
        "compilations",
        "",
        "of the loop: programs that were not in memory, how many of these came from the cache on disk, and what "
        "compiling or loading took",
    ),
    Metric("programs_loaded"),
    Metric("compile_seconds", "s"),
    Metric("training_tokens", "tokens", "of the text; for a drafter those in the loss"),
    Metric(
        "training_texts",
        "",
        "`train diffusion`: prompts with responses that the texts gave; problems are drawn without end",
    ),
    Metric("agreement", "", "EAGLE-3: for each draft step the share of held-out positions where drafter and target agree"),
    Metric(
        "held_out",
        "",
        "`train demo`, `train evaluate`: for the held-out `library`, `dependencies` and `questions` apart: "
        "`loss_nats_per_token` over windows of 512 tokens, at most 16 batches of 8, `tokens` predicted there, "
        "`bits_per_byte`, and `distinct_4gram_ratio` of 16 greedy continuations of 128 tokens",
    ),
    Metric(
        "bits_per_byte",
        "bits",
        "the loss over all predicted tokens by the bytes that these stand for: comparable between tokenizers",
    ),
    Metric(
        "text",
        "",
        "`train demo`, `train evaluate`: documents by kind, their weights, lines kept and lines left out by reason, "
        "dependencies with version and licence",
    ),
    Metric(
        "accuracy",
        "",
        "graphs: after the last epoch, and at each run's best validation (whose weights are saved) or at the best "
        "epoch of all folds",
    ),
    Metric("loss_nats", "nats", "graphs: the mean cross-entropy of the last epoch, of each run"),
    Metric("epochs_per_s", "1/s", "graphs: epochs of all runs side by side, compilation and evaluations included"),
)
"""Of a run."""

ACCURACY = (
    Metric(
        "train",
        "",
        "`mean`, `std` and each of `runs` (folds, for graphs), in the part of the data of that name; null where nothing was "
        "measured. Tables show %, with the standard deviation of several",
        head="training",
    ),
    Metric("val", head="validation"),
    Metric("test", head="test"),
)
"""Of `train gnn`, at each of the epochs of `accuracy`."""
