"""The error tree: raised by meaning anywhere, turned into HTTP in one place per service.

Every class fixes an HTTP status, an OpenAI error `type` and a stable `code`. Messages say what was given, what is
allowed and what to do; `param` names the field of the client's request. Nothing here formats an HTTP response.
"""

from __future__ import annotations

from typing import Any, ClassVar


class DiptychError(Exception):
    """Base of every error that may reach a client; on its own it is an internal error (500)."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_body(self) -> dict[str, Any]:
        """The OpenAI error object: `{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(DiptychError):
    """The client's request is wrong; repeating it unchanged cannot help."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class UnsupportedFeature(InvalidRequest):
    """A known field asks for something that this server does not do (yet)."""

    code = "unsupported_feature"


class InvalidImage(InvalidRequest):
    """The bytes are not an image that can be decoded whole."""

    code = "invalid_image"


class UnsupportedImageFormat(InvalidImage):
    code = "unsupported_image_format"


class ImageTooLarge(InvalidImage):
    """Too many bytes, pixels, or too extreme a shape; decided before decoding."""

    code = "image_too_large"


class InvalidEmbedding(InvalidRequest):
    """What was sent in place of a picture is no embedding that this model can read."""

    code = "invalid_embedding"


class InvalidImageUrl(InvalidRequest):
    code = "invalid_image_url"


class ForbiddenUrl(InvalidImageUrl):
    """The address, scheme or host of an image URL is refused by the address guard."""

    code = "forbidden_url"


class ImageFetchFailed(InvalidImageUrl):
    """The remote server did not deliver the image (status, reset, unknown name, deadline)."""

    code = "image_fetch_failed"


class Unauthorized(DiptychError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ServiceTokenRefused(DiptychError):
    """The caller is none of our own services; seen by them and by operators, never by a client of the gateway."""

    status = 401
    type = "authentication_error"
    code = "invalid_service_token"


class ClientCertificateRequired(DiptychError):
    """The caller has shown no certificate, and this port answers only callers that do."""

    status = 401
    type = "authentication_error"
    code = "client_certificate_required"


class NotFound(DiptychError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class FileNotFound(NotFound):
    """No uploaded file has this id (any more)."""

    code = "file_not_found"


class EmbeddingNotFound(NotFound):
    """No encoder or cache holds this embedding (any more): the image must be sent again."""

    code = "embedding_not_found"


class MethodNotAllowed(DiptychError):
    """allowed   the methods that the path takes, as the header `Allow` lists them; "" if that is not known"""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"
    allowed: str = ""


class PayloadTooLarge(DiptychError):
    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class FileQuotaExceeded(PayloadTooLarge):
    """With this file those of its API key would take more bytes than a key may keep."""

    code = "file_quota_exceeded"


class RateLimited(DiptychError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Overloaded(DiptychError):
    """A bounded queue is full; the request was not started and may be repeated after `retry_after_s`."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"


class NotReady(DiptychError):
    """The service is starting, draining or has no healthy replica of a part that the request needs."""

    status = 503
    type = "service_unavailable_error"
    code = "not_ready"


class UpstreamFailed(DiptychError):
    """Another service broke while it worked on the request."""

    status = 502
    type = "upstream_error"
    code = "upstream_failed"


class UpstreamTooLong(UpstreamFailed):
    """Another service answered this request with more than may be read, as any other replica would."""

    code = "upstream_too_long"


class UpstreamTimeout(DiptychError):
    status = 504
    type = "upstream_error"
    code = "upstream_timeout"


class EncodeFailed(UpstreamFailed):
    """The encoder failed on this image (non-finite values, wrong row count, crash)."""

    code = "encode_failed"


class RequestAborted(DiptychError):
    """The caller went away or asked to abort; seen in logs and events, hardly ever by a client."""

    status = 499
    type = "aborted"
    code = "aborted"


def all_errors(root: type[DiptychError] = DiptychError) -> list[type[DiptychError]]:
    """Every class of the tree, parents first."""
    return [root] + [leaf for child in root.__subclasses__() for leaf in all_errors(child)]


_BY_CODE = {cls.code: cls for cls in reversed(all_errors())}
_BY_STATUS = {cls.status: cls for cls in reversed(all_errors())} | {500: UpstreamFailed, 503: NotReady}


def error_from_body(status: int, body: object, *, retry_after_s: float | None = None) -> DiptychError:
    """Rebuild the error another service answered with, so that its meaning survives the hop.

    An unknown or malformed body becomes `UpstreamFailed` naming the status.
    """
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return UpstreamFailed(f"another service answered with status {status} and no error object")
    fallback = _BY_STATUS.get(status, UpstreamFailed if status >= 500 else InvalidRequest)
    cls = _BY_CODE.get(str(error.get("code")), fallback)
    if cls is ServiceTokenRefused:  # our client did nothing wrong, and has no such token to mend
        return UpstreamFailed("another service refused this one's token: DIPTYCH_SERVICE_TOKEN differs between them")
    if cls is ClientCertificateRequired:
        return UpstreamFailed("another service wants this one's certificate: DIPTYCH_TLS_CERT_FILE is not set here")
    param = error.get("param")
    return cls(error["message"], param=param if isinstance(param, str) else None, retry_after_s=retry_after_s)
