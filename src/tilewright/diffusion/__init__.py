"""Denoising of diffusion language models: dense, over cached keys and values, and sparse."""
