"""Training of language models, drafters, diffusion models and graph networks."""
