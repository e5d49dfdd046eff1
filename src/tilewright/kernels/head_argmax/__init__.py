"""Most likely token, `argmax(x @ head)`, for drafts and greedy decoding, which need no other logits."""
