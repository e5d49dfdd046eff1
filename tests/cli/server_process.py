"""`tilewright serve` in a process of its own."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Process:
    """A server in a process of its own."""

    def __init__(self, *arguments: object):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TILEWRIGHT_COMPILE_CACHE": "0"}
        environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "TILEWRIGHT_API_KEY": "secret"}
        anywhere = () if "--port" in arguments else ("--port", "0")
        command = [sys.executable, "-m", "tilewright", "serve", *anywhere, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        self.url = ""

    def wait_until_ready(self) -> str:
        """The line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = next((word for word in line.split() if word.startswith("http")), "")
        return line

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"content-type": "application/json", "authorization": "Bearer secret"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def ended(self) -> tuple[int, str]:
        """Its status and what it wrote to standard error."""
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


@contextmanager
def process(*arguments: object) -> Iterator[Process]:
    made = Process(*arguments)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()
