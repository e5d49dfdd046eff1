"""The most likely tokens: `top_k(x @ head)`, for a drafter that chooses among the best candidates of each slot."""
