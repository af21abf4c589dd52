"""The output of a batch: a line for each request that is over, appended as it ends, so that a run can be resumed."""

from __future__ import annotations

import fcntl
import os
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
import orjson

from diptych.batch.requests import Place
from diptych.errors import BadSetting, CommandFailed

_ID: Final = "batch_req_"


class BatchOutput:
    """Open while entered, and nobody else's meanwhile.

    done     the names (see Place) of the requests that are over
    failed   why those of them that have no good answer have none
    """

    def __init__(self, path: Path, *, retry_failed: bool = False) -> None:
        """retry_failed   lines without a good answer are taken out, and so asked again"""
        self._path = path
        self._retry_failed = retry_failed
        self.done: set[str | int] = set()
        self.failed: dict[str | int, str] = {}

    def __enter__(self) -> Self:
        """Raises BadSetting for a file that cannot be written, is written by another run, or holds something else."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise BadSetting(f"another run is writing {self._path}") from None
        except OSError as error:
            raise BadSetting(f"{self._path} cannot be written: {error.strerror}") from None
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):  # of a line that could not be written, once more; `add` has told of it
            self._file.close()

    def add(self, place: Place, *, response: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        """The end of one request: what the server said, or why it could not be asked. Raises CommandFailed."""
        line: dict[str, Any] = {"id": f"{_ID}{uuid.uuid4().hex}", "custom_id": place.custom_id}
        if place.custom_id is None:
            line["line"] = place.number
        line |= {"response": response, "error": error}
        if not _is_good(line):
            self.failed[place.name] = _reason(line)
        try:
            self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            self._file.flush()
        except OSError as failure:
            reason = f"{self._path} cannot be written: {failure.strerror}"
            raise CommandFailed(f"{reason}; the same command goes on from here") from None

    def _read(self) -> None:
        """Learn what is done; what a killed run has left of a last line is cut off."""
        self._file.seek(0)
        offset = 0
        for number, raw in enumerate(self._file, start=1):
            line = _parsed(raw)
            if line is None:
                if raw.endswith(b"\n") or (number == 1 and not _could_begin_a_line(raw)):
                    raise BadSetting(f"{self._path} is not the output of a batch: see its line {number}")
                self._file.truncate(offset)
                break
            name: str | int = line.get("line", number) if line["custom_id"] is None else line["custom_id"]
            if _is_good(line):
                self.done.add(name)
            else:
                self.failed[name] = _reason(line)
            offset += len(raw)
        if self._retry_failed and self.failed:
            self._drop_failed()
        self.done.update(self.failed)
        self._end_last_line()

    def _drop_failed(self) -> None:
        """Go on with a copy that has the good lines only, ours from the start."""
        copy = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        file = copy.open("x+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        self._file.seek(0)
        for raw in self._file:
            line = _parsed(raw)
            if line is not None and _is_good(line):
                file.write(raw)
        file.flush()
        copy.replace(self._path)
        self._file.close()
        self._file = file
        self.failed.clear()

    def _end_last_line(self) -> None:
        """A whole line that only lacks its end must not swallow the next one."""
        if not self._file.seek(0, os.SEEK_END):
            return
        self._file.seek(-1, os.SEEK_END)
        if self._file.read(1) != b"\n":
            self._file.write(b"\n")
            self._file.flush()


def response_part(response: httpx.Response) -> dict[str, Any]:
    """OpenAI's `response`: status, id, body."""
    try:
        body: Any = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        body = {"error": {"message": response.text[:1000], "type": "unknown", "code": None, "param": None}}
    request_id = response.headers.get("x-request-id", "")
    return {"status_code": response.status_code, "request_id": request_id, "body": body}


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    is_ours = isinstance(line, dict) and str(line.get("id", "")).startswith(_ID) and "custom_id" in line
    return line if is_ours else None


def _could_begin_a_line(raw: bytes) -> bool:
    start = b'{"id":"' + _ID.encode()
    return raw[: len(start)] == start[: len(raw)]


def _reason(line: dict[str, Any]) -> str:
    """Of a line without a good answer: what was said of it, with the server's status."""
    response = line.get("response")
    if not isinstance(response, dict):
        return _message(line) or "it was not asked"
    said = _message(response.get("body"))
    return f"status {response.get('status_code')}" + (f": {said}" if said else "")


def _message(body: object) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else ""


def _is_good(line: dict[str, Any]) -> bool:
    response = line.get("response")
    return isinstance(response, dict) and response.get("status_code") == httpx.codes.OK
