"""Generates with a drafter and without: the same tokens in fewer passes of the model.

python examples/speculative.py
python examples/speculative.py --model model.gguf --drafter ngram
"""

import argparse

import tilewright as tw

PROMPT = "# A Python class for a stack\n\nclass Stack:\n    def __init__(self):"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="ngram", help="ngram, or the folder or hub id of a trained drafter")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args()

    lm = tw.load(options.model, drafter=options.drafter)
    sampling = tw.Sampling(options.max_new_tokens)
    drafted = lm.generate(options.prompt, sampling)[0]
    plain = lm.generate(options.prompt, sampling, speculative=False)[0]

    print(drafted.text)
    print()
    print(f"plain decoding: {len(plain.acceptance_lengths)} passes for {len(plain.tokens)} tokens")
    rounds = len(drafted.acceptance_lengths)
    print(f"with {options.drafter}: {rounds} passes, {len(drafted.tokens) / rounds:.2f} tokens each")
    print(f"same tokens: {drafted.tokens == plain.tokens}")


if __name__ == "__main__":
    main()
