"""`python -m services.gateway`: the gateway alone, set up by environment variables."""

from __future__ import annotations

import sys

from services.gateway.app import run
from services.gateway.config import GatewaySettings
from shared.settings import SettingsError, load_settings

if __name__ == "__main__":
    try:
        settings = load_settings(GatewaySettings)
    except SettingsError as error:
        sys.exit("\n".join(f"error: {line}" for line in str(error).splitlines()))
    run(settings)
