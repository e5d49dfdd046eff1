"""A hub in miniature on localhost: the requests that the hub's client makes for a model, and faults to order."""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class Repo:
    """A repository: what each commit holds, and which commit each branch or tag names."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        commit = self.refs.get(revision, revision)
        return commit if commit in self.commits else None


@dataclass
class HubServer:
    """Serves `repos` at `url` while used as a context manager.

    Attributes:
        requests: method and path of each request so far.
        ranges: the Range header of each file request that had one.
        cut: file name to the number of bytes after which its next transfer breaks off, once.
        refused: names of files that are answered with 403.
        status: if set, every request is answered with it.
    """

    repos: dict[str, Repo]
    requests: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    status: int | None = None

    def __enter__(self) -> "HubServer":
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """From here on, connections are refused."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    # One connection a request: a stopped server then leaves none open.
    protocol_version = "HTTP/1.0"

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server_hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        if hub.status is not None:
            self._fail(hub.status, "")
        elif found := API.fullmatch(path):
            self._describe(found)
        elif found := FILE.fullmatch(path):
            self._file(found)
        else:
            self._fail(404, "")

    def _find(self, found: re.Match[str]) -> tuple[Repo, str] | None:
        repo = self.server_hub.repos.get(found["repo"])
        if repo is None:
            self._fail(404, "RepoNotFound")
            return None
        commit = repo.commit(found["revision"] or "main")
        if commit is None:
            self._fail(404, "RevisionNotFound")
            return None
        return repo, commit

    def _describe(self, found: re.Match[str]) -> None:
        place = self._find(found)
        if place is None:
            return
        repo, commit = place
        files = repo.commits[commit]
        if found["what"] == "tree":
            entries = [{"type": "file", "path": n, "size": len(d), "oid": _oid(d)} for n, d in files.items()]
            self._json(entries)
        else:
            siblings = [{"rfilename": name, "size": len(data), "blobId": _oid(data)} for name, data in files.items()]
            self._json({"id": found["repo"], "sha": commit, "siblings": siblings, "private": False, "tags": []})

    def _file(self, found: re.Match[str]) -> None:
        place = self._find(found)
        if place is None:
            return
        repo, commit = place
        data = repo.commits[commit].get(found["path"])
        if repo.gated:
            self._fail(403, "GatedRepo")
        elif found["path"] in self.server_hub.refused:
            self._fail(403, "")
        elif data is None:
            self._fail(404, "EntryNotFound")
        else:
            self._send_file(found["path"], data, commit)

    def _send_file(self, name: str, data: bytes, commit: str) -> None:
        start = 0
        wanted = self.headers.get("Range")
        if wanted is not None:
            self.server_hub.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
        self.send_response(200 if wanted is None else 206)
        self.send_header("ETag", f'"{_oid(data)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(data) - start))
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            stop = start + self.server_hub.cut.pop(name, len(data))
            self.wfile.write(data[start:stop])

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
