# A small web server in a thread, with the moods of real ones: cut connections, no ranges, other files, web pages, silence.
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HTML = b"<!DOCTYPE html><html><title>Please log in</title></html>"


@dataclass
class Site:
    """What every request is answered with, and what was asked."""

    content: bytes
    etag: str | None = '"one"'
    modified: str | None = None
    ranges: bool = True
    length: bool = True  # without: no Content-Length
    status: int | None = None
    cuts: list[int | None] = field(default_factory=list)  # one a request: the connection ends after so many bytes of its answer
    always_cut_at: int | None = None
    refuse_ranges: bool = False  # 416
    content_range: str | None = None
    gate: threading.Event | None = None  # the second half of every answer waits for it
    url: str = ""
    asked: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def serve(site: Site) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked.append({**dict(self.headers.items()), "path": self.path})
            _answer(self, site)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that has seen enough closes the connection

    with Server(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        site.url = f"http://127.0.0.1:{server.server_address[1]}/files/archive.tar.gz"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield site
        finally:
            if site.gate is not None:
                site.gate.set()
            server.shutdown()
            thread.join()


def _answer(handler: BaseHTTPRequestHandler, site: Site) -> None:
    if site.status is not None:
        handler.send_error(site.status)
        return
    start, wanted = 0, handler.headers.get("Range")
    if wanted and site.refuse_ranges:
        handler.send_error(416)
        return
    condition = handler.headers.get("If-Range")
    if wanted and site.ranges and condition in (None, site.etag, site.modified):
        start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        size = len(site.content)
        handler.send_response(206)
        handler.send_header("Content-Range", site.content_range or f"bytes {start}-{size - 1}/{size}")
    else:
        handler.send_response(200)
    body = site.content[start:]
    if site.length:
        handler.send_header("Content-Length", str(len(body)))
    for name, value in (("ETag", site.etag), ("Last-Modified", site.modified)):
        if value:
            handler.send_header(name, value)
    handler.end_headers()
    cut = site.cuts.pop(0) if site.cuts else None
    if site.always_cut_at is not None:
        cut = max(0, site.always_cut_at - start)
    body = body[:cut]
    half = len(body) // 2 if site.gate is not None else len(body)
    handler.wfile.write(body[:half])
    handler.wfile.flush()
    if site.gate is not None:
        site.gate.wait(30)
    handler.wfile.write(body[half:])
