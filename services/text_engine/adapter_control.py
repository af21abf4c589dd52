"""Loads and unloads LoRA adapters while the engine serves, from folders below one that the operator has named.

Files are read and checked beside the engine; it stops between two steps only to take the weights.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.text_engine.config import TextEngineSettings
from services.text_engine.engine_thread import EngineThread, in_engine
from services.text_engine.models.config import ModelConfig
from services.text_engine.models.lora.adapter_files import AdapterError, read_adapter
from shared.errors import InvalidRequest, NotFound, UnsupportedFeature
from shared.log import get_logger
from shared.wire.engine_admin import LoadAdapterRequest

log = get_logger(__name__)


class AdapterControl:
    """config   the whole model's; None: it has no adapters"""

    def __init__(self, thread: EngineThread, settings: TextEngineSettings, config: ModelConfig | None) -> None:
        self._thread = thread
        self._settings = settings
        self._config = config

    async def load(self, request: LoadAdapterRequest) -> None:
        """Raises InvalidRequest for an adapter that cannot be served, NotFound for a folder that holds none, Overloaded
        where there is no room, UnsupportedFeature where it is switched off."""
        root, config = self._switched_on()
        folder = _below(root, request.lora_path)
        try:
            files = await asyncio.to_thread(
                read_adapter, request.lora_name, folder, config, max_rank=self._settings.max_lora_rank
            )
        except FileNotFoundError:
            raise NotFound(f"there is no adapter in {request.lora_path!r}", param="lora_path") from None
        except (AdapterError, OSError) as error:
            raise InvalidRequest(str(error), param="lora_path") from error
        await in_engine(self._thread, lambda engine: engine.adapters.load(files, replace=request.load_inplace))
        log.info("an adapter was loaded", name=request.lora_name, rank=files.identity.rank)

    async def unload(self, name: str) -> None:
        """Raises ModelNotFound if there is none of this name, UnsupportedFeature where it is switched off."""
        self._switched_on()
        await in_engine(self._thread, lambda engine: engine.adapters.unload(name))
        log.info("an adapter was unloaded", name=name)

    def _switched_on(self) -> tuple[Path, ModelConfig]:
        if self._settings.lora_folder is None or self._config is None:
            raise UnsupportedFeature(
                "adapters cannot be loaded or unloaded while this engine serves; it was started without --lora-folder"
            )
        return self._settings.lora_folder, self._config


def _below(root: Path, path: str) -> Path:
    """Links included. A path that leaves the folder gets one answer, whatever is there."""
    resolved = root.resolve()
    try:
        folder = (resolved / path).resolve()
    except (OSError, ValueError):  # a NUL byte, a name too long
        folder = Path("/")
    if not folder.is_relative_to(resolved):
        raise InvalidRequest(
            "lora_path is not below the folder that this server loads adapters from", param="lora_path"
        )
    return folder
