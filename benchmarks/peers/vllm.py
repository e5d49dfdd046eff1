"""Decodes with vLLM's CPU backend for `cpu_peers.py`: `python vllm.py FOLDER THREADS`, a folder in Hugging Face's format.

Reads requests {"prompt": token ids, "tokens": count} line by line, and prints the times of each as JSON.
"""

import json
import os
import sys
import time

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{int(sys.argv[2]) - 1}"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
output = os.dup(1)
os.dup2(2, 1)  # vLLM logs to standard output


def reply(**values: object) -> None:
    os.write(output, (json.dumps(values) + "\n").encode())


def main() -> None:
    import vllm

    model = vllm.LLM(sys.argv[1], dtype="bfloat16", max_model_len=4096, max_num_seqs=1, enable_prefix_caching=False)

    def seconds(prompt: list[int], tokens: int) -> float:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        began = time.perf_counter()
        (result,) = model.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        assert len(result.outputs[0].token_ids) == tokens
        return time.perf_counter() - began

    reply(version=vllm.__version__)
    for line in sys.stdin:
        request = json.loads(line)
        prompt_s = seconds(request["prompt"], 1)
        total_s = seconds(request["prompt"], request["tokens"])
        reply(prompt_s=prompt_s, decode_s=total_s - prompt_s, tokens=request["tokens"])


if __name__ == "__main__":
    main()
