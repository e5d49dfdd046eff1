"""Denoises one response in four ways and prints the steps that each takes.

    python examples/diffusion.py
    python examples/diffusion.py --model GSAI-ML/LLaDA-8B-Instruct --prompt "Write a haiku."

Dense steps compute every position. Sparse steps compute those whose keys and values changed. A threshold commits every token
with at least that probability, so that a step may commit several.
"""

import argparse

import tilewright as tw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo-diffusion")
    parser.add_argument("--prompt", default="a=4829 b=1734 a+b\n")
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()

    model = tw.load(options.model)
    assert isinstance(model, tw.DiffusionModel), f"{options.model} is no diffusion model"
    for mode in ("dense", "sparse"):
        for threshold in (None, 0.9):
            denoising = tw.Denoising(new_tokens=options.new_tokens, block_length=32, mode=mode, threshold=threshold)
            result = model.generate(options.prompt, denoising)[0]
            name = mode if threshold is None else f"{mode}, threshold {threshold}"
            print(f"{name:24} {result.steps:4} steps   {result.text.strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()
