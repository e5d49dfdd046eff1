// Decodes with llama.cpp for `cpu_peers.py`: `node llama_cpp.mjs MODEL.gguf THREADS`, in a folder with node-llama-cpp.
// Reads requests {"prompt": token ids, "tokens": count} line by line, and prints the times of each as JSON.
import {createRequire} from "node:module";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

// The package is that of the working folder, not of this file's folder.
const require = createRequire(`${process.cwd()}/`);
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(require.resolve("node-llama-cpp")));

const [, , path, threads] = process.argv;
const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads), logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: path});
const context = await model.createContext({threads: Number(threads), contextSize: 4096});
const sequence = context.getSequence();
console.log(JSON.stringify({features: llama.systemInfo.trim()}));
for await (const line of createInterface({input: process.stdin})) {
  const {prompt, tokens} = JSON.parse(line);
  await sequence.clearHistory();
  const begin = performance.now();
  let first = 0;
  let count = 0;
  for await (const _ of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
    if (++count === 1) first = performance.now();
    if (count === tokens) break;
  }
  const end = performance.now();
  console.log(JSON.stringify({prompt_s: (first - begin) / 1e3, decode_s: (end - first) / 1e3, tokens: count}));
}
process.exit(0);
