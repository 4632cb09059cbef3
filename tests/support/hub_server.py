"""A stand-in of the Hugging Face hub on the loopback: what its client asks to make a repository, commit files, resolve
and download one. Repositories are public, and live as long as the server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Files = dict[str, bytes]


class Hub:
    """``commits``: by repository and commit's id, all files; ``branches``: by repository and name, the commit."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Files]] = {}
        self.branches: dict[str, dict[str, str]] = {}
        self.asked: list[str] = []

    def create(self, name: str) -> bool:
        if name in self.commits:
            return False
        self.commits[name], self.branches[name] = {"0" * 40: {}}, {"main": "0" * 40}
        return True

    def commit(self, name: str, branch: str, added: Files) -> str:
        files = self.commits[name][self.branches[name][branch]] | added
        oid = hashlib.sha1(repr([self.branches[name][branch], sorted(files.items())]).encode()).hexdigest()
        self.commits[name][oid], self.branches[name][branch] = files, oid
        return oid

    def resolve(self, name: str, revision: str) -> str | None:
        return self.branches[name].get(revision, revision if revision in self.commits[name] else None)


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, code: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
        self.send_response(code)
        for key, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
        if found is None:
            return self.answer(404)
        name, revision, path = found.groups()
        if name not in self.hub.commits:
            return self.answer(404, headers={"X-Error-Code": "RepoNotFound"})
        oid = self.hub.resolve(name, revision)
        if oid is None:
            return self.answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        content = self.hub.commits[name][oid].get(path)
        if content is None:
            return self.answer(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": oid})
        etag = hashlib.sha256(content).hexdigest()
        return self.answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": oid})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"warnings": [], "errors": []})
        if self.path == "/api/repos/create":
            about = json.loads(body)
            name = f"{about.get('organization', 'me')}/{about['name']}"
            if name.startswith("others/"):
                return self.answer(403, {"error": "no right to make a repository of others"})
            made = self.hub.create(name)
            return self.answer(200 if made else 409, {"url": f"http://{self.headers['Host']}/{name}"})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", self.path):
            name, branch = found.groups()
            self.hub.branches[name].setdefault(branch, self.hub.branches[name]["main"])
            return self.answer(200)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", self.path):
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for one in json.loads(body)["files"]]  # fmt: skip
            return self.answer(200, {"files": files})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", self.path):
            name, branch = found.groups()
            lines = [json.loads(line) for line in body.splitlines()]
            added = {line["value"]["path"]: base64.b64decode(line["value"]["content"])
                     for line in lines if line["key"] == "file"}  # fmt: skip
            oid = self.hub.commit(name, branch, added)
            url = f"http://{self.headers['Host']}/{name}/commit/{oid}"
            return self.answer(200, {"commitOid": oid, "commitUrl": url})
        return self.answer(404)


@contextmanager
def hub_server() -> Iterator[tuple[str, Hub]]:
    """(its address, what it holds)."""
    handler = type("HubHandler", (Handler,), {"hub": Hub()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
