"""Who may share computed prefixes with whom: requests with different salts never find each other's blocks."""

from __future__ import annotations

from shared.hashing import digest


class CacheSalts:
    """by_key   whether every API key has a prefix cache of its own: an answer's speed then tells nothing of others'
    prompts. Several keys of one name are one tenant."""

    def __init__(self, *, by_key: bool = False) -> None:
        self.by_key = by_key

    def salt(self, asked: str, key_name: str | None) -> str:
        """asked   by the request itself; it separates further, never less"""
        if not self.by_key:
            return asked
        return digest(b"tenant", (key_name or "").encode(), asked.encode()).hex()
