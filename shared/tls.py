"""One service's certificate, the contexts that show and check certificates, and their renewal while it runs.

Settings and their checks are in `tls_settings`; how clients without a certificate are refused, in `client_certificate`.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import httpx

from shared.certificates import read_validities
from shared.log import get_logger
from shared.tls_settings import check_authorities, check_certificate, check_pair

log = get_logger(__name__)
SOON_DAYS: Final = 14


class Tls:
    """What one service is known by. Create it after logging is set up, use it on one event loop.

    use         what it is for, in logs and metrics, e.g. "services"
    cert_file   with `key_file`; None: nothing is listened to by TLS, and nothing shown to servers that ask
    ca_file     None: servers are checked against the public authorities, and clients not at all
    """

    def __init__(
        self, use: str, *, cert_file: Path | None = None, key_file: Path | None = None, ca_file: Path | None = None
    ) -> None:
        self.use = use
        self.expires_at: datetime | None = None  # the first of its certificates to do so
        self._cert_file = cert_file
        self._key_file = key_file
        self._ca_file = ca_file
        self._contexts: list[ssl.SSLContext] = []
        self._loaded = self._refused = self._stamps()
        self._note_expiry()

    def server_context(self) -> ssl.SSLContext | None:
        """To listen with; None without a certificate. Clients' own are checked if they show one."""
        if self._cert_file is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self._ca_file is not None:
            context.verify_mode = ssl.CERT_OPTIONAL
        return self._filled(context)

    def client_context(self) -> ssl.SSLContext:
        """To reach other services with: only `ca_file`'s authorities are trusted if there is one."""
        if self._ca_file is None:
            return self._filled(httpx.create_ssl_context(trust_env=False))
        return self._filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def redis_context(self) -> ssl.SSLContext:
        """The same, with the machine's own authorities besides: a Redis may be somebody else's service."""
        return self._filled(ssl.create_default_context())

    def refresh(self) -> None:
        """Take up files that have changed, for new connections. What cannot be used is said once and tried again.

        Authorities are added; one that is gone from its file is trusted until the service starts again.
        """
        stamps = self._stamps()
        if stamps == self._loaded:
            return
        try:
            self._check()
            for context in self._contexts:
                self._fill(context)
        except (OSError, ValueError) as error:
            # A certificate may be in place a moment before its key.
            if stamps != self._refused:
                log.warning("renewed certificate cannot be used", use=self.use, file=self._shown, reason=str(error))
            self._refused = stamps
            return
        self._loaded = stamps
        log.info("certificate renewed", use=self.use, file=self._shown)
        self._note_expiry()

    @property
    def _shown(self) -> str:
        return str(self._cert_file or self._ca_file)

    def _check(self) -> None:
        """Before a context is touched: a half-loaded one would refuse everybody."""
        if self._ca_file is not None:
            check_authorities(self._ca_file)
        if self._cert_file is not None:
            check_certificate(self._cert_file)
        if self._cert_file is not None and self._key_file is not None:
            check_pair(self._cert_file, self._key_file)

    def _filled(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._fill(context)
        self._contexts.append(context)
        return context

    def _fill(self, context: ssl.SSLContext) -> None:
        if self._cert_file is not None:
            context.load_cert_chain(self._cert_file, self._key_file)
        if self._ca_file is not None:
            context.load_verify_locations(self._ca_file)

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        """What is another when a file is, also where a link to a folder is turned, as Kubernetes does."""
        return [_stamp(file) for file in (self._cert_file, self._key_file, self._ca_file) if file is not None]

    def _note_expiry(self) -> None:
        now = datetime.now(UTC)
        own = [] if self._cert_file is None else [each.not_after for each in read_validities(self._cert_file)[:1]]
        authorities = [] if self._ca_file is None else [each.not_after for each in read_validities(self._ca_file)]
        expiries = own + [at for at in authorities if at > now]  # bundles hold some that expired long ago
        if not expiries:
            return
        self.expires_at = min(expiries)
        days_left = (self.expires_at - now).days
        tell = log.warning if days_left < SOON_DAYS else log.info
        tell(
            "certificate expires",
            use=self.use,
            file=self._shown,
            at=self.expires_at.isoformat(timespec="minutes"),
            days_left=days_left,
        )


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
