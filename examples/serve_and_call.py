"""Starts a server and calls it with OpenAI's client: a question, a stream, and JSON of a schema.

pip install 'tilewright[serve,gguf,grammar]' openai
python examples/serve_and_call.py
"""

import argparse
import subprocess
import sys

import openai

SCHEMA = {"type": "object", "properties": {"capital": {"type": "string", "maxLength": 20}}, "required": ["capital"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt", default="The capital of France is")
    options = parser.parse_args()

    command = [sys.executable, "-m", "tilewright", "serve", options.model, "--slots", "1", "--context", "1024", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(
                word for line in server.stdout for word in line.split() if word.startswith("http://")
            )  # printed when ready
            client = openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none")
            model = client.models.list().data[0].id

            answer = client.completions.create(model=model, prompt=options.prompt, max_tokens=32, temperature=0)
            print("answer:", answer.choices[0].text.strip())

            print("stream:", end=" ")
            for chunk in client.completions.create(model=model, prompt=options.prompt, max_tokens=32, stream=True, seed=7):
                print(chunk.choices[0].text, end="", flush=True)
            print()

            wanted = {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA}}
            extra = {"response_format": wanted}
            structured = client.completions.create(model=model, prompt=options.prompt, max_tokens=64, extra_body=extra)
            print("JSON:", structured.choices[0].text)
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
