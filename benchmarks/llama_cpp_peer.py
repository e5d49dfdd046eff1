"""Runs llama.cpp in another process: JSON requests line by line on its standard input, JSON responses on its standard output.

`Peer` starts the process and sends requests. The process runs this file under a Python interpreter with `llama-cpp-python`, and
needs no module of this project. The process computes only between a request and its response, so that measurements of two
sides can alternate.
"""

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any


class Peer:
    """A process with llama.cpp, used as a context manager."""

    def __init__(self, python: Path):
        self.python = python

    def __enter__(self) -> "Peer":
        # -P prevents files of this folder from shadowing modules of the other environment.
        command = [str(self.python), "-P", __file__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def ask(self, what: str, **values: Any) -> Any:
        """Calls a method of `Llama` in the process. Returns its result.

        Raises:
            RuntimeError: the process ended; its standard error has the reason.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # without a process there is no answer either
            self.process.stdin.write(json.dumps([what, values]) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"expected an answer to {what}; llama.cpp's process ended with {self.process.wait()}")
        return json.loads(answer)


class Llama:
    """Answers requests in the process; each public method is a request."""

    def __init__(self) -> None:
        import llama_cpp

        self.api = llama_cpp
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.quiet, None)
        llama_cpp.llama_backend_init()
        self.model = self.context = None

    def about(self) -> dict[str, str]:
        return {"version": self.api.__version__, "features": self.api.llama_print_system_info().decode().strip(" |")}

    def quantise(self, source: str, target: str, kind: str) -> None:
        """Writes a model file in another format, from tensors of any format."""
        params = self.api.llama_model_quantize_default_params()
        params.ftype = getattr(self.api, f"LLAMA_FTYPE_MOSTLY_{kind}")
        params.allow_requantize = True
        if self.api.llama_model_quantize(source.encode(), target.encode(), params):
            raise SystemExit(f"llama.cpp could not write {source} as {kind}")

    def open(self, model: str, threads: int, rows: int, positions: int, flash: bool) -> None:
        """Loads a model for `rows` of `positions` each, with or without flash attention."""
        api = self.api
        if self.context is not None:
            api.llama_free(self.context)
            api.llama_model_free(self.model)
        self.model = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        if self.model is None:
            raise SystemExit(f"llama.cpp could not load {model}")
        params = api.llama_context_default_params()
        params.n_ctx = rows * positions
        params.n_batch = max(512, positions)
        params.n_seq_max = rows
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash)
        self.context = api.llama_init_from_model(self.model, params)
        if self.context is None:
            raise SystemExit(f"llama.cpp could not make room for {rows} rows of {positions} positions")
        self.size = params.n_batch
        self.rows = rows
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(self.size, 0, 1)

    def decode(self, items: Sequence[tuple[int, int, int, bool]]) -> None:
        """Computes a batch of (token, position, row, True to compute logits)."""
        batch = self.batch
        for i, (token, position, row, wanted) in enumerate(items):
            batch.token[i] = token
            batch.pos[i] = position
            batch.logits[i] = wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = row
        batch.n_tokens = len(items)
        if self.api.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp could not compute a batch")

    def logits(self, at: int) -> Any:
        """Returns the logits of an item of the last batch; the next batch overwrites the array."""
        import numpy as np

        found = self.api.llama_get_logits_ith(self.context, at)
        return np.ctypeslib.as_array(ctypes.cast(found, ctypes.POINTER(ctypes.c_float)), (self.vocabulary,))

    def forget(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def score(self, tokens: list[int], start: int) -> float:
        """Returns the log-likelihood in nats of the tokens from `start` on, each given the tokens before it."""
        import numpy as np

        self.forget()
        self.decode([(token, i, 0, i >= start - 1) for i, token in enumerate(tokens[:-1])])
        total = 0.0
        for i in range(start, len(tokens)):
            logits = self.logits(i - 1).astype(np.float64)
            total += logits[tokens[i]] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        return float(total)

    def generate(self, prompts: list[list[int]], new: int, ends: list[int]) -> dict[str, Any]:
        """Decodes greedily, one row per prompt, until a token of `ends` or `new` tokens.

        Returns:
            the tokens of each row, the seconds of the prompts (up to the first new tokens) and of the later steps.
        """
        self.forget()
        began = time.perf_counter()
        first = []
        for row, prompt in enumerate(prompts):
            for start in range(0, len(prompt), self.size):
                part = prompt[start : start + self.size]
                last = start + len(part) == len(prompt)
                self.decode([(token, start + i, row, last and i == len(part) - 1) for i, token in enumerate(part)])
            first.append(int(self.logits(len(part) - 1).argmax()))
        prefilled = time.perf_counter()
        tokens = [[token] for token in first]
        while going := [row for row, made in enumerate(tokens) if len(made) < new and made[-1] not in ends]:
            self.decode([(tokens[row][-1], len(prompts[row]) + len(tokens[row]) - 1, row, True) for row in going])
            for i, row in enumerate(going):
                tokens[row].append(int(self.logits(i).argmax()))
        return {"tokens": tokens, "prefill_s": prefilled - began, "decode_s": time.perf_counter() - prefilled}

    def draft(self, prompt: list[int], new: int, ends: list[int], drafts: int, ngram: int) -> dict[str, Any]:
        """Decodes one row greedily with prompt lookup drafts of llama-cpp-python.

        Args:
            drafts: maximum number of drafts per round.
            ngram: maximum length of the n-gram to look up.

        Returns:
            the result of `generate`, and the number of rounds.
        """
        import numpy as np
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        lookup = LlamaPromptLookupDecoding(max_ngram_size=ngram, num_pred_tokens=drafts)
        started = self.generate([prompt], 1, ends)
        tokens = started["tokens"][0]
        rounds = 0
        memory = self.api.llama_get_memory(self.context)
        began = time.perf_counter()
        while len(tokens) < new and tokens[-1] not in ends:
            at = len(prompt) + len(tokens) - 1
            proposed = lookup(np.asarray([*prompt, *tokens], np.intc))[: new - len(tokens) - 1].tolist()
            self.decode([(token, at + i, 0, True) for i, token in enumerate([tokens[-1], *proposed])])
            rounds += 1
            for i in range(len(proposed) + 1):
                tokens.append(int(self.logits(i).argmax()))
                if tokens[-1] in ends or i == len(proposed) or tokens[-1] != proposed[i]:
                    break
            self.api.llama_memory_seq_rm(memory, 0, len(prompt) + len(tokens) - 1, -1)
        return {**started, "tokens": [tokens], "decode_s": time.perf_counter() - began, "rounds": rounds}


def serve() -> None:
    llama = Llama()
    for line in sys.stdin:
        what, values = json.loads(line)
        print(json.dumps(getattr(llama, what)(**values)), flush=True)


if __name__ == "__main__":
    serve()
