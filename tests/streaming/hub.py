"""What of the Hub is used: a repository on loopback, whose files come by commits."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import flask
from werkzeug.serving import make_server

REPOSITORY, REVISION = "someone/contexts", "main"


class Hub:
    """One repository of models. `commits`: by commit the paths of its files; `refuses`: no more are taken; `answers`:
    the status that all requests for a listing have, 0: their own."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.commits: list[list[str]] = []
        self.refuses, self.answers = False, 0
        self.url = ""

    def application(self) -> flask.Flask:
        app, api = flask.Flask("hub"), f"/api/models/{REPOSITORY}"

        @app.before_request
        def whole() -> Any:
            listing = "/tree/" in flask.request.path
            return ({"error": "none of yours"}, self.answers) if self.answers and listing else None

        @app.get(api)
        @app.get(f"{api}/revision/{REVISION}")
        def about() -> Any:
            return {"id": REPOSITORY, "modelId": REPOSITORY, "sha": "0" * 40, "private": False, "siblings": []}

        @app.get(f"{api}/tree/{REVISION}")
        @app.get(f"{api}/tree/{REVISION}/<path:folder>")
        def tree(folder: str = "") -> Any:
            found = [self._file(path) for path in self.files if path.rpartition("/")[0] == folder]
            return found if found or not folder else self._missing()

        @app.post(f"{api}/paths-info/{REVISION}")
        def paths() -> Any:
            asked = flask.request.form.getlist("paths") or flask.request.get_json()["paths"]
            return [self._file(path) for path in asked if path in self.files]

        @app.post(f"{api}/preupload/{REVISION}")
        def modes() -> Any:
            files = flask.request.get_json()["files"]
            return {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]}

        @app.post(f"{api}/commit/{REVISION}")
        def commit() -> Any:
            if self.refuses:
                return {"error": "too many commits"}, 429
            lines = [json.loads(line) for line in flask.request.get_data().splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.files.update({one["path"]: base64.b64decode(one["content"]) for one in files})
            self.commits.append([one["path"] for one in files])
            return {"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.url}/{REPOSITORY}/commit/{'1' * 40}"}

        @app.get(f"/{REPOSITORY}/resolve/{REVISION}/<path:path>")
        def file(path: str) -> Any:
            if path not in self.files:
                return self._missing()
            answer = flask.send_file(
                io.BytesIO(self.files[path]), "application/octet-stream", conditional=True, etag=str(hash(path))
            )
            answer.headers["X-Repo-Commit"] = "1" * 40
            return answer

        return app

    def _file(self, path: str) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(self.files[path]), "oid": "2" * 40}

    @staticmethod
    def _missing() -> Any:
        return flask.Response(json.dumps({"error": "none"}), 404, {"X-Error-Code": "EntryNotFound"})


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    """Until the end of the `with`."""
    found = Hub()
    server = make_server("127.0.0.1", 0, found.application(), threaded=True)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
