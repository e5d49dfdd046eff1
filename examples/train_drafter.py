"""Trains a DFlash drafter for a target on your own text, and generates with it.

    python examples/train_drafter.py docs
    python examples/train_drafter.py answers.jsonl --target smollm2-135m --steps 5000

Needs the extra `train`. Ten steps only show the way: useful drafters take thousands. An interrupted run continues where it
stopped. The text is the target's, however good the drafter is.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import tilewright as tw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder of text, or JSONL with conversations")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("my-drafter"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompt", default="Why is the sky blue?")
    options = parser.parse_args()

    sizes = ["--batch-size", "2", "--sequence-length", "128", "--steps", str(options.steps)]
    command = ["train", "drafter", str(options.data), "--target", options.target, "--out", str(options.out), *sizes]
    subprocess.run([sys.executable, "-m", "tilewright", *command], check=True)

    lm = tw.load(options.target, drafter=str(options.out))
    result = lm.generate(options.prompt, tw.Sampling(max_new_tokens=64))[0]
    print(result.text)
    print(f"{len(result.tokens) / len(result.acceptance_lengths):.2f} tokens per pass of the target")


if __name__ == "__main__":
    main()
