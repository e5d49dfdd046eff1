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
    Metric("base_held_out_loss_nats_per_token", "nats", "`train lora`: the same without the adapter"),
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
    Metric("micro_f1", "", "`train gnn` with several labels of a node: micro-F1, instead of accuracies"),
    Metric("r2", "", "`train gnn` with numbers as labels: coefficients of determination, mean over the numbers, likewise"),
    Metric("auc", "", "`train gnn --task link`: areas under the ROC curve, instead of accuracies"),
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

LOG = (
    Metric("step", "", "steps before the row was written", head="steps", form=",d"),
    Metric("time", "s", "when the row was written, since 1970"),
    Metric("loss", "nats", "mean since the previous row, weighted by tokens", head="loss", digits=4),
    Metric("held_out_loss", "nats", "on held-out batches, at each evaluation", head="held-out loss", digits=4),
    Metric("train", "", "graphs: accuracy on parts of the data, mean of all runs", head="training accuracy", digits=4),
    Metric("val", head="validation accuracy", digits=4),
    Metric("test", head="test accuracy", digits=4),
    Metric(
        "gradient_norm",
        "",
        "global norm of the gradient before clipping, mean since the previous row",
        "gradient norm",
        digits=3,
    ),
    Metric("learning_rate", "", "of AdamW, mean since the previous row", "learning rate", digits=3),
    Metric(
        "step_seconds",
        "s",
        "time of a step since the previous row, without the first step of a process, evaluations and checkpoints",
        head="s/step",
        digits=3,
    ),
    Metric("tokens_per_s", "tokens/s", "work in that time; graphs: epochs", head="tokens/s", digits=3),
    Metric("epochs_per_s", "1/s", head="epochs/s", digits=3),
    Metric("model_flops_utilization", "", "see above, in that time; absent on CPUs", head="FLOPs utilisation", form=".1%"),
    Metric(
        "data_wait_share", "", "share of that time in which the loop waits for a batch", head="waiting for data", form=".1%"
    ),
)
"""Fields of a row in `metrics.jsonl`."""

PLAN = (
    Metric("setting", "", "what was changed; settings are listed in the order in which they were tried"),
    Metric("chip", "", "topology, devices, and sizes of the mesh axes"),
    Metric("devices"),
    Metric("mesh"),
    Metric("batch_rows", "", "sequences of a step over all devices, and positions of each"),
    Metric("positions"),
    Metric("remat", "", "activations and whole weights are computed and gathered again"),
    Metric("scan", "", "layers run in a loop"),
    Metric("accumulate", "", "parts of a batch that run one after another"),
    Metric("state_dtype", "", "dtype of the optimizer's moving averages"),
    Metric("compiled", "", "each compiled step: `layers_compiled`, and device memory as in *Overlap*"),
    Metric("model_layers", "", "layers of the model"),
    Metric(
        "model_peak_bytes",
        "bytes",
        "peak memory per chip of the step of all layers; null where a compiled step exceeds the memory",
    ),
    Metric("is_extrapolated", "", "`model_peak_bytes` follows from two compiled steps of fewer layers"),
    Metric("memory_bytes", "bytes", "memory of a chip"),
    Metric("fits", "", "`model_peak_bytes` is at most `memory_bytes`"),
    Metric("refusal", "", "the compiler's words where a step exceeds the memory"),
)
"""Figures of `tilewright plan training`, one record for each setting."""
