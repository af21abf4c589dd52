"""The error tree: each class has its own code, and its meaning survives the hop between two services."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest

from shared import errors
from shared.errors import (
    ClientCertificateRequired,
    ContextTooLong,
    DiptychError,
    EmbeddingNotFound,
    EncodeFailed,
    ForbiddenUrl,
    InvalidImage,
    InvalidImageUrl,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    ServiceTokenRefused,
    UpstreamFailed,
    error_from_body,
)
from shared.http_errors import wire_error
from shared.wire.common import WireError

ALL_ERRORS = sorted(
    (cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, DiptychError)),
    key=lambda cls: cls.__name__,
)


def test_no_two_errors_share_a_code():
    counts = Counter(cls.code for cls in ALL_ERRORS)
    assert [code for code, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("cls", ALL_ERRORS)
def test_every_error_has_an_http_error_status(cls: type[DiptychError]):
    assert 400 <= cls.status <= 599
    if cls.type == "invalid_request_error":
        assert cls.status < 500


@pytest.mark.parametrize("cls", ALL_ERRORS)
def test_an_error_has_the_openai_body(cls: type[DiptychError]):
    body = cls("what was wrong", param="messages").to_body()
    assert body == {"error": {"message": "what was wrong", "type": cls.type, "param": "messages", "code": cls.code}}


def test_a_refused_service_token_is_our_own_fault_and_never_the_clients():
    received = error_from_body(401, ServiceTokenRefused("this port is for Diptych's own services").to_body())
    assert type(received) is UpstreamFailed
    assert "DIPTYCH_SERVICE_TOKEN" in received.message


def test_a_certificate_that_this_service_lacks_is_our_own_fault_too():
    received = error_from_body(401, ClientCertificateRequired("this port wants a client certificate").to_body())
    assert type(received) is UpstreamFailed
    assert "DIPTYCH_TLS_CERT_FILE" in received.message


@pytest.mark.parametrize(
    "cls", [cls for cls in ALL_ERRORS if cls not in (ServiceTokenRefused, ClientCertificateRequired)]
)
def test_an_error_survives_the_hop_to_another_service(cls: type[DiptychError]):
    sent = cls("what was wrong", param="messages")
    received = error_from_body(cls.status, sent.to_body(), retry_after_s=3.0)
    assert type(received) is cls
    assert (received.message, received.param, received.retry_after_s) == ("what was wrong", "messages", 3.0)
    assert str(received) == "what was wrong"


@pytest.mark.parametrize("retry_after_s", [None, 4.2])
def test_an_error_event_says_when_to_come_back_if_anybody_knows(retry_after_s: float | None):
    event = wire_error(Overloaded("full", retry_after_s=retry_after_s))
    assert WireError.model_validate_json(event.model_dump_json(exclude_none=True)).retry_after_s == retry_after_s


def test_an_error_event_of_an_older_service_says_no_time():
    older = {"status": 503, "message": "full", "type": "overloaded_error", "code": "overloaded"}
    assert WireError.model_validate(older).retry_after_s is None


@pytest.mark.parametrize("cls", ALL_ERRORS)
def test_an_error_survives_the_way_back_from_a_worker_process(cls: type[DiptychError]):
    received = pickle.loads(pickle.dumps(cls("what was wrong", param="image", retry_after_s=2.0)))
    assert type(received) is cls
    assert (received.message, received.param, received.retry_after_s) == ("what was wrong", "image", 2.0)


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (ContextTooLong, InvalidRequest),
        (InvalidImage, InvalidRequest),
        (ForbiddenUrl, InvalidImageUrl),
        (EmbeddingNotFound, NotFound),
        (EncodeFailed, UpstreamFailed),
    ],
)
def test_a_narrow_error_can_be_caught_as_the_wide_one(narrow: type[DiptychError], wide: type[DiptychError]):
    with pytest.raises(wide):
        raise narrow("what was wrong")


def test_only_errors_worth_repeating_are_no_client_errors():
    assert (RateLimited.status, Overloaded.status) == (429, 503)
    assert not issubclass(Overloaded, InvalidRequest)


@pytest.mark.parametrize(
    "body", [None, "oops", [], {}, {"error": None}, {"error": "text"}, {"error": {}}, {"error": {"message": 5}}]
)
@pytest.mark.parametrize("status", [200, 404, 500])
def test_an_answer_without_an_error_object_is_the_other_services_failure(status: int, body: object):
    error = error_from_body(status, body)
    assert type(error) is UpstreamFailed
    assert str(status) in error.message


@pytest.mark.parametrize(("status", "cls"), [(400, InvalidRequest), (422, InvalidRequest), (500, UpstreamFailed)])
@pytest.mark.parametrize("code", ["from_a_newer_version", None, 7])
def test_an_unknown_code_is_read_by_its_status(status: int, cls: type[DiptychError], code: object):
    error = error_from_body(status, {"error": {"message": "new", "code": code, "param": 5}})
    assert type(error) is cls
    assert (error.message, error.param) == ("new", None)


@pytest.mark.parametrize("status", [401, 404, 429, 503])
def test_an_unknown_code_keeps_its_status(status: int):
    error = error_from_body(status, {"error": {"message": "new", "code": "from_a_newer_version"}}, retry_after_s=1.0)
    assert error.status == status
