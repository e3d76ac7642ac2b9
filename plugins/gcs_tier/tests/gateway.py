"""The XML API of Google Cloud Storage, as obstore speaks it, before fake-gcs-server, which lacks its uploads.

``python gateway.py PORT UPSTREAM TOKENS`` serves until it is killed. Reads, listings and deletes are passed on. A PUT
and an upload in parts become uploads of the JSON API, with the condition on the generation; parts are kept here until
the upload is ended. What an error says is put into the XML API's words. TOKENS, with commas between, are the ones that
are taken.
"""

import http.client
import json
import re
import secrets
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

_UPLOADS: dict[str, dict[int, bytes]] = {}
_LOCK = threading.Lock()
_PASSED_ON = {"range", "accept", "content-type"}
_BOUNDARY = "kvtiers-boundary"


class Gateway(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    upstream_port = 0
    tokens: frozenset[str] = frozenset()

    def setup(self):
        super().setup()
        self.upstream = http.client.HTTPConnection("127.0.0.1", self.upstream_port, timeout=30)

    def finish(self):
        self.upstream.close()
        super().finish()

    def serve(self):
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # whoever sent it has ended: nothing of an upload is kept then
            self.close_connection = True
            return
        bucket, _, name = unquote(url.path[1:]).partition("/")
        if self.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            self.refuse(401, "AuthenticationRequired")
        elif url.path.startswith(("/storage/", "/upload/")):
            self.answer(*self.ask(self.command, self.path, body))
        elif "uploads" in query:
            self.begin(bucket)
        elif "uploadId" in query:
            self.upload(bucket, name, query, body)
        elif self.command == "PUT":
            self.put(bucket, name, body)
        else:
            self.pass_on(bucket, name, body)

    def __getattr__(self, name):
        if name.startswith("do_"):
            return self.serve
        raise AttributeError(name)

    def pass_on(self, bucket, name, body):
        status, headers, found = self.ask(self.command, self.path, body)
        if status in {404, 500} and not self.has(bucket):
            self.refuse(404, "NoSuchBucket")
        elif status == 404:
            self.refuse(404, "NoSuchKey")
        elif status == 416:
            self.refuse(416, "InvalidRange")
        else:
            self.answer(status, headers, found)

    def put(self, bucket, name, body):
        meta = json.dumps({"name": name, "storageClass": self.headers.get("x-goog-storage-class", "STANDARD")}).encode()
        part = f"\r\n--{_BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
        head = f"--{_BOUNDARY}\r\nContent-Type: application/json\r\n\r\n".encode() + meta
        end = f"\r\n--{_BOUNDARY}--\r\n".encode()
        condition = self.headers.get("x-goog-if-generation-match")
        query = f"uploadType=multipart&name={quote(name, safe='')}"
        query += f"&ifGenerationMatch={condition}" if condition else ""
        kind = {"content-type": f"multipart/related; boundary={_BOUNDARY}"}
        path = f"/upload/storage/v1/b/{quote(bucket)}/o?{query}"
        status, _, found = self.ask("POST", path, head + part + body + end, kind)
        if status == 200:
            made = json.loads(found)
            self.answer(200, {"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}, b"")
        elif status == 412:
            self.refuse(412, "PreconditionFailed")
        elif status == 404:
            self.refuse(404, "NoSuchBucket")
        else:
            self.refuse(status, "InternalError")

    def begin(self, bucket):
        if not self.has(bucket):
            self.refuse(404, "NoSuchBucket")
            return
        upload = secrets.token_hex(8)
        with _LOCK:
            _UPLOADS[upload] = {}
        text = f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>k</Key><UploadId>{upload}</UploadId>"
        self.answer(200, {}, f"{text}</InitiateMultipartUploadResult>".encode())

    def upload(self, bucket, name, query, body):
        [upload] = query["uploadId"]
        with _LOCK:
            parts = _UPLOADS.get(upload)
        if parts is None:
            self.refuse(404, "NoSuchUpload")
        elif self.command == "PUT":
            number = int(query["partNumber"][0])
            parts[number] = body
            self.answer(200, {"ETag": f'"{number}"'}, b"")
        elif self.command == "DELETE":
            del _UPLOADS[upload]
            self.answer(204, {}, b"")
        else:
            numbers = [int(found) for found in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
            assert numbers == sorted(parts), (numbers, sorted(parts))
            whole = b"".join(parts[number] for number in numbers)
            self.finish_upload(bucket, name, upload, whole)

    def finish_upload(self, bucket, name, upload, whole):
        path = f"/upload/storage/v1/b/{quote(bucket)}/o?uploadType=media&name={quote(name, safe='')}"
        status, _, found = self.ask("POST", path, whole, {"content-type": "application/octet-stream"})
        if status != 200:
            self.refuse(status, "InternalError")
            return
        del _UPLOADS[upload]
        text = f'<CompleteMultipartUploadResult><Key>k</Key><ETag>"{json.loads(found)["etag"]}"</ETag>'
        headers = {"x-goog-generation": json.loads(found)["generation"]}
        self.answer(200, headers, f"{text}</CompleteMultipartUploadResult>".encode())

    def has(self, bucket):
        return self.ask("GET", f"/storage/v1/b/{quote(bucket)}", b"")[0] == 200

    def ask(self, method, path, body, headers=None):
        passed = {name.lower(): value for name, value in self.headers.items() if name.lower() in _PASSED_ON}
        passed |= headers or {}
        try:
            self.upstream.request(method, path, body or None, passed)
            answer = self.upstream.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        except (OSError, http.client.HTTPException):
            self.upstream.close()
            return 503, {}, b"<Error><Code>ServiceUnavailable</Code></Error>"

    def refuse(self, status, code):
        self.answer(
            status, {}, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        )

    def answer(self, status, headers, body):
        dropped = {"transfer-encoding", "connection", "date", "server"}
        headers = {name: value for name, value in headers.items() if name.lower() not in dropped}
        self.send_response(status)
        if self.command != "HEAD" or not any(name.lower() == "content-length" for name in headers):
            headers = {name: value for name, value in headers.items() if name.lower() != "content-length"}
            headers["Content-Length"] = str(0 if self.command == "HEAD" else len(body))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    """The gateway."""

    request_queue_size = 256


def main():
    """Serve."""
    Gateway.upstream_port, Gateway.tokens = int(sys.argv[2]), frozenset(sys.argv[3].split(","))
    with Server(("127.0.0.1", int(sys.argv[1])), Gateway) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
