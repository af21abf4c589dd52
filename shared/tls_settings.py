"""The settings of TLS, the same for every service, and what is wrong with their files, said before anything starts.

What is made of them is in `tls`. Files are PEM, keys without a passphrase.
"""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from shared.certificates import Validity, read_validities
from shared.settings import blank_is_unset


def check_certificate(file: Path) -> None:
    """Raises ValueError, with a remedy, for what is no certificate that is valid now: the first one, which those that
    follow vouch for."""
    _check_validity(_validities(file)[0])


def check_authorities(file: Path) -> None:
    """Raises ValueError, with a remedy, for a file of which no certificate is valid now: bundles hold expired ones."""
    validities = _validities(file)
    now = datetime.now(UTC)
    if not any(each.not_before <= now < each.not_after for each in validities):
        _check_validity(max(validities, key=lambda each: each.not_after))


def _validities(file: Path) -> list[Validity]:
    try:
        validities = read_validities(file)
    except OSError as error:
        raise ValueError(_unreadable(error)) from error
    if not validities:
        raise ValueError("holds no certificate; wanted: a PEM file with -----BEGIN CERTIFICATE-----")
    return validities


def _check_validity(validity: Validity) -> None:
    now = datetime.now(UTC)
    if validity.not_after <= now:
        raise ValueError(f"expired on {validity.not_after:%Y-%m-%d %H:%M} UTC; renew it, then start again")
    if validity.not_before > now:
        raise ValueError(f"is not valid before {validity.not_before:%Y-%m-%d %H:%M} UTC; is the clock right?")


def check_pair(cert_file: Path, key_file: Path) -> None:
    """Raises ValueError, with a remedy, for a key that cannot be used with this certificate."""
    try:
        key_file.read_bytes()
    except OSError as error:
        raise ValueError(_unreadable(error)) from error
    try:
        # OpenSSL would ask the terminal for a passphrase.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, password=_no_passphrase)
    except _PassphraseWanted:
        raise ValueError("needs a passphrase; write it without one: openssl pkey -in FILE -out FILE") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"is not the key of the certificate {cert_file}; take both from one request") from error
        raise ValueError("holds no private key; wanted: a PEM file with -----BEGIN PRIVATE KEY-----") from error


class _PassphraseWanted(Exception):
    """OpenSSL asked for one."""


def _no_passphrase() -> str:
    raise _PassphraseWanted


def _unreadable(error: OSError) -> str:
    match error:
        case FileNotFoundError():
            return "there is no such file; is the path right, and the secret mounted?"
        case PermissionError():
            return f"user {os.getuid()} may not read it; change its owner or its mode"
        case _:
            return f"cannot be read: {error.strerror}"


# --- fields: a certificate `x_cert_file` has its key in `x_key_file` --------------------------------------------------


def _blank_is_off(value: object) -> object:
    return False if isinstance(value, str) and not value.strip() else value


def _is_certificate(file: Path | None) -> Path | None:
    if file is not None:
        check_certificate(file)
    return file


def _are_authorities(file: Path | None) -> Path | None:
    if file is not None:
        check_authorities(file)
    return file


def _is_key(key_file: Path | None, info: ValidationInfo) -> Path | None:
    cert_field = str(info.field_name).replace("_key_", "_cert_")
    if cert_field not in info.data:  # it was refused itself
        return key_file
    cert_file = info.data[cert_field]
    if cert_file is not None and key_file is None:
        raise PydanticCustomError("missing", "a certificate needs its private key")
    if cert_file is None and key_file is not None:
        raise ValueError("is a key without its certificate; set the certificate's file, too")
    if cert_file is not None and key_file is not None:
        check_pair(cert_file, key_file)
    return key_file


def _has_authority(is_required: bool, info: ValidationInfo) -> bool:
    lacking = [name for name in ("tls_cert_file", "tls_ca_file") if name in info.data and info.data[name] is None]
    if is_required and lacking:
        raise ValueError(
            "needs DIPTYCH_TLS_CERT_FILE and DIPTYCH_TLS_CA_FILE: "
            "only over TLS are there client certificates, and an authority has to vouch for them"
        )
    return is_required


CertFile = Annotated[Path | None, BeforeValidator(blank_is_unset), AfterValidator(_is_certificate)]
AuthorityFile = Annotated[Path | None, BeforeValidator(blank_is_unset), AfterValidator(_are_authorities)]
KeyFile = Annotated[Path | None, BeforeValidator(blank_is_unset), AfterValidator(_is_key), Field(validate_default=True)]

# One name for all services, so they take no prefix.
TlsCertFile = Annotated[
    CertFile,
    Field(
        validation_alias="DIPTYCH_TLS_CERT_FILE",
        description="this service's certificate, PEM: panels then speak TLS, and it is shown wherever one is asked for",
    ),
]
TlsKeyFile = Annotated[
    KeyFile,
    Field(
        validation_alias="DIPTYCH_TLS_KEY_FILE", description="that certificate's private key, PEM, without a passphrase"
    ),
]
TlsCaFile = Annotated[
    AuthorityFile,
    Field(
        validation_alias="DIPTYCH_TLS_CA_FILE",
        description="authorities, PEM, that other services' certificates must come from; default: the public ones",
    ),
]
TlsRequireClientCert = Annotated[
    bool,
    BeforeValidator(_blank_is_off),
    AfterValidator(_has_authority),
    Field(
        validation_alias="DIPTYCH_TLS_REQUIRE_CLIENT_CERT",
        description="panels answer only clients with a certificate of the authorities; probes and metrics are open",
    ),
]
TlsServerName = Annotated[
    str | None,
    BeforeValidator(blank_is_unset),
    Field(
        validation_alias="DIPTYCH_TLS_SERVER_NAME",
        description="name that a service's certificate must hold if it is reached by a bare address; default: that "
        "address",
    ),
]
