"""A Hugging Face Hub on this machine: the parts of its HTTP interface that reading a data set and pushing a model use."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "a" * 40


@contextmanager
def _running(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def serve(name: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serve a data set; its address, for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            file = path.rpartition("/")[2]
            if path.startswith(f"/datasets/{name}/resolve/") and file in files:
                etag = hashlib.sha1(files[file]).hexdigest()
                self._answer(files[file], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
            elif path.startswith(f"/api/datasets/{name}/tree/"):
                sizes = [
                    {"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c).hexdigest()} for f, c in files.items()
                ]
                self._answer(json.dumps(sizes).encode(), {})
            elif path.startswith(f"/api/datasets/{name}"):
                info = {"_id": "1", "id": name, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
                self._answer(json.dumps({**info, "private": False, "gated": False, "tags": []}).encode(), {})
            else:
                self._answer(b"", {"X-Error-Code": "EntryNotFound" if name in path else "RepoNotFound"}, 404)

        do_HEAD = do_GET

        def _answer(self, body: bytes, headers: Mapping[str, str], status: int = 200) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with _running(Handler) as address:
        yield address


@contextmanager
def receive(repo: str, uploaded: dict[str, bytes]) -> Iterator[str]:
    """Serve the part of the Hub's interface that uploading a folder of small files to a new model uses; its address.

    Args:
        repo: the only name that may be made.
        uploaded: receives files by name.
    """

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            found = {"_id": "1", "id": repo, "sha": COMMIT, "siblings": [], "private": True, "tags": []}
            self._answer(
                found if f"/{repo}" in self.path else {"error": "no such model"}, 200 if f"/{repo}" in self.path else 404
            )

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                made = "/".join(filter(None, (asked.get("organization"), asked["name"])))
                if made != repo or not (asked.get("private") or asked.get("visibility") == "private"):
                    self._answer({"error": f"no right to make {made}"}, 403)
                    return
                self._answer({"url": f"http://{self.headers['Host']}/{repo}"})
            elif self.path.endswith("/preupload/main"):
                files = [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
                ]
                self._answer({"files": files})
            elif self.path.endswith("/commit/main"):
                for line in body.splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        uploaded[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                self._answer({"commitUrl": f"http://{self.headers['Host']}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})
            else:
                self._answer({"error": f"unexpected {self.path}"}, 404)

        def _answer(self, value: Any, status: int = 200) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with _running(Handler) as address:
        yield address
