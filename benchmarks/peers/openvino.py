"""Decodes with OpenVINO GenAI for `cpu_peers.py`: `python openvino.py MODEL.gguf THREADS`.

Reads requests {"prompt": token ids, "tokens": count} line by line, and prints the times of each as JSON.
"""

import json
import sys

import numpy as np
import openvino as ov
import openvino_genai as genai

pipeline = genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]))
print(json.dumps({"version": genai.__version__}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    ids = ov.Tensor(np.asarray([request["prompt"]], np.int64))
    result = pipeline.generate(ids, max_new_tokens=request["tokens"], ignore_eos=True, do_sample=False)
    metrics = result.perf_metrics
    tokens = metrics.get_num_generated_tokens()
    decode_s = metrics.get_tpot().mean * (tokens - 1) / 1e3
    print(json.dumps({"prompt_s": metrics.get_ttft().mean / 1e3, "decode_s": decode_s, "tokens": tokens}), flush=True)
