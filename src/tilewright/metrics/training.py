"""Figures of `tilewright train`."""

from tilewright.metrics.metric import Metric

TRAINING = (
    Metric(
        "loss_nats_per_token",
        "nats",
        "mean cross-entropy since the evaluation before the last; drafters: weighted by slot; diffusion: "
        "masked response tokens, each over its expected masked share",
    ),
    Metric(
        "held_out_loss_nats_per_token",
        "nats",
        "the same on 32 held-out batches (diffusion: 8), after the last step",
    ),
    Metric("curve", "", "both losses at every evaluation, with `step`"),
    Metric(
        "tokens_per_s",
        "tokens/s",
        "over this process, with compilation and evaluations",
    ),
    Metric(
        "model_flops_utilization",
        "",
        "required operations per second (6 N + 12 L H Q T per token, PaLM, arXiv 2204.02311, appendix B; "
        "without recomputation) over the devices' bfloat16 peak; from the first step on; null on CPUs",
    ),
    Metric("seconds", "s", "training loop in this process"),
    Metric(
        "compilations",
        "",
        "programs compiled or loaded, those loaded from disk, and their time",
    ),
    Metric("programs_loaded"),
    Metric("compile_seconds", "s"),
    Metric("training_tokens", "tokens", "of the text; drafters: tokens in the loss"),
    Metric(
        "training_texts",
        "",
        "`train diffusion`: prompts with responses",
    ),
    Metric("agreement", "", "EAGLE-3 and MTP: share of held-out positions where drafter and target agree, by draft step"),
    Metric(
        "accuracy",
        "",
        "graphs: after the last epoch, and at the best validation epoch",
    ),
    Metric("loss_nats", "nats", "graphs: mean cross-entropy of the last epoch, per run"),
    Metric("epochs_per_s", "1/s", "graphs: all parallel runs, with compilation and evaluations"),
)
"""Figures of a run."""

ACCURACY = (
    Metric(
        "train",
        "",
        "`mean`, `std` and `runs` (or folds) on this part of the data",
        head="training",
    ),
    Metric("val", head="validation"),
    Metric("test", head="test"),
)
"""Accuracies of `train gnn`, for each epoch of `accuracy`."""
