"""A Hugging Face Hub of one data set, on this machine: the part of its HTTP interface that `datasets` uses."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "a" * 40


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

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
