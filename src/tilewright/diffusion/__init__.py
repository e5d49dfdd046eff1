"""Denoising of diffusion language models: dense, with cached keys and values, and sparse."""
