"""Compares text in memory with a stream, and measures the padding of packings.

    python benchmarks/streaming.py DATA TOKENIZER --repetitions 3 --json streaming.json

DATA is a file or folder of training data, TOKENIZER a folder with a tokenizer.json. Each repetition trains a tiny model for a
few steps, in turns from memory and from a stream, in a process each, of which it takes peak resident memory and seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tilewright.models.tokenizer import load_tokenizer
from tilewright.train.data import encode_each, find_files
from tilewright.train.stream import PackedText, StreamBatches, StreamSources
from tilewright.train.text import StreamOptions, TextOptions

LENGTH = 512
SIZES = "hidden_size=32,layers=1,heads=2,kv_heads=1,head_dim=16,intermediate_size=48"


def train(data: Path, tokenizer: Path, stream: bool) -> dict[str, float]:
    """Trains a tiny model in a process of its own; returns its peak memory in MB, and its seconds."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            "-m",
            "tilewright",
            "train",
            "lm",
            str(data),
            "--out",
            f"{out}/lm",
            "--tokenizer",
            str(tokenizer),
        ]
        command += ["--sizes", SIZES, "--steps", "10", "--batch-size", "4", "--sequence-length", str(LENGTH)]
        command += ["--evaluate-every", "10", "--held-out", "0.1", "--text", f"stream={str(stream).lower()}"]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise ValueError(f"expected a run of {' '.join(command)}, found status {os.waitstatus_to_exitcode(status)}")
        return {"peak_mb": usage.ru_maxrss / 1024, "seconds": time.perf_counter() - started}


def padding(data: Path, tokenizer: Path, packing: Any, batches: int) -> float:
    """Returns the share of padding in the first batches of a stream."""
    encode = partial(encode_each, load_tokenizer(tokenizer), ends=(0,))
    options = TextOptions(batch_size=16, sequence_length=LENGTH)
    sources = StreamSources.divide(find_files([data], Counter()), 0.1, 1, 0)
    stream = StreamBatches(sources, PackedText(encode, LENGTH + 1, packing), options, StreamOptions(shuffle=256))
    for _ in islice(stream.batches(0), batches):
        continue
    return stream.padding_share


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--batches", type=int, default=40, help="batches of 16 sequences whose padding is counted")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    size = sum(file.path.stat().st_size for file in find_files([args.data], Counter()))
    shares = {
        packing: padding(args.data, args.tokenizer, packing, args.batches)
        for packing in ("concatenate", "first-fit", "best-fit")
    }
    runs: dict[str, list[dict[str, float]]] = {"memory": [], "stream": []}
    for _ in range(args.repetitions):
        for kind, found in runs.items():
            found.append(train(args.data, args.tokenizer, kind == "stream"))
    print(f"{size / 1e6:,.1f} MB; padding: {', '.join(f'{packing} {share:.2%}' for packing, share in shares.items())}")
    for kind, found in runs.items():
        peak, seconds = (sorted(each[name] for each in found) for name in ("peak_mb", "seconds"))
        print(f"{kind}: peak {statistics.median(peak):,.0f} MB, {statistics.median(seconds):,.1f} s (from {seconds[0]:.1f})")
    if args.json:
        args.json.write_text(json.dumps({"bytes": size, "padding": shares, "runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
