"""Which quantized checkpoints the engine takes: `quantization_config` of config.json -> how its matrices are stored.

The models' families know nothing of this: a quantized matrix takes the place of the plain one of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from services.text_engine.models.config import Fields, read_json
from services.text_engine.models.quantization import awq, compressed_tensors, fp8, gguf_file, gptq
from services.text_engine.models.quantization.interface import QuantizedFormat

READERS: Mapping[str, Callable[[Fields], QuantizedFormat]] = MappingProxyType(
    {
        "awq": awq.read_format,
        "gptq": gptq.read_format,
        "compressed-tensors": compressed_tensors.read_format,
        "fp8": fp8.read_format,
        "fbgemm_fp8": fp8.read_format,
    }
)


def read_format(fields: Fields) -> QuantizedFormat | None:
    """How a checkpoint with this config.json stores its quantized matrices; None: it has none.

    Raises ConfigError for a method, or a variant of one, that the engine does not read.
    """
    stated_in = next(
        (where for where in (fields, fields.nested("text_config")) if "quantization_config" in where), None
    )
    if stated_in is None:
        return None
    stated = stated_in.nested("quantization_config")
    method = stated.raw("quant_method")
    read = READERS.get(str(method))
    if read is None:
        raise stated.error(
            "quant_method",
            f"supported: {', '.join(READERS)}; or serve the unquantized checkpoint with --quantization int8 or int4",
        )
    return read(stated)


def load_format(folder: Path) -> QuantizedFormat | None:
    """Of a checkpoint folder, a GGUF file's included. Raises ConfigError as `read_format`."""
    if gguf_file.find_file(folder) is not None:
        return gguf_file.FORMAT
    return read_format(read_json(folder / "config.json"))
