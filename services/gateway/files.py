"""Uploaded files: pictures are sent once and then named by id in any number of requests.

Only pictures have a use here, so only purposes that may mean a picture are accepted. What is uploaded for "vision" must
begin as a picture does; more of it is read only by the encoder, when it is used.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from services.gateway.body import limited_stream
from services.gateway.chosen_ids import MAX_UUID_CHARS, content_digest
from services.gateway.file_store import FileInfo, FileStore, new_file_id
from shared.errors import FileNotFound, InvalidImage, InvalidRequest, PayloadTooLarge
from shared.http_errors import from_validation_errors
from shared.image_header import read_header

Model = TypeVar("Model", bound=BaseModel)
FORM_OVERHEAD_BYTES: Final = 64 * 1024
MAX_FIELDS: Final = 16
MAX_FILENAME_CHARS: Final = 255


class UploadForm(BaseModel):
    """The fields of the form beside its file."""

    model_config = ConfigDict(frozen=True)

    purpose: Literal["vision", "user_data", "assistants"]
    ttl_s: int | None = Field(default=None, ge=1, alias="expires_after[seconds]")
    uuid: str | None = Field(default=None, min_length=1, max_length=MAX_UUID_CHARS)
    anchor: Literal["created_at"] = Field(default="created_at", alias="expires_after[anchor]")


class FileQuery(BaseModel):
    """The query of a list, as OpenAI's clients page through it.

    after   the id at which the page before this one ended
    """

    model_config = ConfigDict(frozen=True)

    purpose: str | None = None
    limit: int = Field(default=10_000, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    max_bytes: int
    ttl_s: int
    max_ttl_s: int


class Files:
    """What takes more than the store: uploads, which are checked, and lists, which come in pages."""

    def __init__(self, store: FileStore, limits: FileLimits) -> None:
        self._store = store
        self._limits = limits

    async def upload(self, request: Request, owner: str) -> FileInfo:
        """Raises InvalidRequest, PayloadTooLarge; RequestAborted if the client leaves meanwhile."""
        form = await _read_form(request, self._limits.max_bytes + FORM_OVERHEAD_BYTES)
        try:
            upload = form.get("file")
            if not isinstance(upload, UploadFile):
                raise InvalidRequest("file: send the picture as the form's file of this name", param="file")
            data = await upload.read()
            info = self._described(form, upload.filename or "upload", len(data), owner)
        finally:
            await form.close()
        if info.purpose == "vision":
            _check_picture(data)
        if info.uuid is not None:
            info = info.model_copy(update={"content": await content_digest(data)})
        await self._store.put(info, data)
        return info

    async def page(self, query: FileQuery, owner: str) -> tuple[list[FileInfo], bool]:
        """One page of the owner's files, and whether more follow."""
        infos = await self._store.owned_by(owner)
        if query.order == "desc":
            infos.reverse()
        if query.purpose is not None:
            infos = [info for info in infos if info.purpose == query.purpose]
        if query.after is not None:
            ids = [info.id for info in infos]
            if query.after not in ids:
                raise FileNotFound(f"after: there is no file {query.after[:80]!r} in this list", param="after")
            infos = infos[ids.index(query.after) + 1 :]
        return infos[: query.limit], len(infos) > query.limit

    def _described(self, form: FormData, filename: str, size_bytes: int, owner: str) -> FileInfo:
        fields = _validated(UploadForm, {name: value for name, value in form.items() if isinstance(value, str)})
        ttl_s = self._limits.ttl_s if fields.ttl_s is None else fields.ttl_s
        if ttl_s > self._limits.max_ttl_s:
            raise InvalidRequest(
                f"expires_after.seconds is {ttl_s}; at most {self._limits.max_ttl_s}", param="expires_after[seconds]"
            )
        if not size_bytes:
            raise InvalidRequest("file: the file has 0 bytes", param="file")
        if size_bytes > self._limits.max_bytes:
            raise PayloadTooLarge(
                f"file: the file has {size_bytes} bytes; at most {self._limits.max_bytes}", param="file"
            )
        now = int(time.time())
        return FileInfo(
            id=new_file_id(),
            owner=owner,
            filename=filename[:MAX_FILENAME_CHARS],
            purpose=fields.purpose,
            size_bytes=size_bytes,
            created_at=now,
            expires_at=now + ttl_s,
            uuid=fields.uuid,
        )


def _check_picture(data: bytes) -> None:
    """Raises InvalidImage where the encoder would, from the header alone."""
    try:
        read_header(data)
    except InvalidImage as error:
        raise type(error)(f"file: {error.message}", param="file") from error


def upload_schema() -> dict[str, Any]:
    """The form of an upload, as the OpenAPI document has it."""
    schema = UploadForm.model_json_schema()
    schema["properties"]["file"] = {"type": "string", "format": "binary"}
    # A form has no null.
    schema["properties"]["expires_after[seconds]"] = {"type": "integer", "minimum": 1}
    schema["properties"]["uuid"] = {"type": "string", "minLength": 1, "maxLength": MAX_UUID_CHARS}
    schema["required"].append("file")
    return schema


def parse_query(request: Request) -> FileQuery:
    return _validated(FileQuery, dict(request.query_params))


async def _read_form(request: Request, max_bytes: int) -> FormData:
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise InvalidRequest("files are uploaded as multipart/form-data with the fields file and purpose")
    chunks: AsyncGenerator[bytes] = limited_stream(request, max_bytes)
    parser = MultiPartParser(request.headers, chunks, max_files=1, max_fields=MAX_FIELDS)
    parser.spool_max_size = max_bytes  # in memory, where the file will be kept anyway, never on a disk
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the form cannot be read: {error.message}") from None
    whole = {id(value.file) for _, value in form.multi_items() if isinstance(value, UploadFile)}
    for file in parser._files_to_close_on_error:
        if id(file) not in whole:  # the form ends within it: the parser neither hands it out nor closes it
            file.close()
    return form


def _validated(model: type[Model], fields: dict[str, str]) -> Model:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise from_validation_errors(error.errors()) from None
