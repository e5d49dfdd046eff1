"""Most likely tokens, `top_k(x @ head)`, for drafters that choose among the best candidates of each slot."""
