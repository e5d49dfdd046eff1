"""The most likely token: `argmax(x @ head)`, for drafts and greedy decoding, which want nothing else of the logits."""
