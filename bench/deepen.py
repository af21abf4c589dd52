"""A model that answers as another does and costs more: `python -m bench.deepen FOLDER OUT --layers 120`.

The added layers add zeros to the residual stream. Beside the original as its draft model it tells what speculation
gains when every guess holds, without a pair of models that were trained together:

  python -m bench.deepen SmolLM2-135M /tmp/deep --layers 120
  python -m bench.speculation /tmp/deep --draft-model SmolLM2-135M
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_LAYER = re.compile(r"(.*\.layers\.)(\d+)(\..*)")
_ADDING = ("self_attn.o_proj", "mlp.down_proj")  # what a layer adds to the stream goes through these
_ADDING_TENSORS = {f".{name}.{kind}" for name in _ADDING for kind in ("weight", "bias")}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="a Llama-like text model")
    options.add_argument("out", type=Path, help="a new folder")
    options.add_argument("--layers", type=int, required=True, help="how many it then has")
    given = options.parse_args()
    deepen(given.folder, given.out, given.layers)


def deepen(folder: Path, out: Path, num_layers: int) -> None:
    """Write the checkpoint `out`, in one file. The added layers are the first one again, but add zeros.

    Raises ValueError if the model has more layers than that, or layers of another kind.
    """
    config = json.loads((folder / "config.json").read_text())
    num_given = config["num_hidden_layers"]
    if num_layers < num_given:
        raise ValueError(f"{folder} has {num_given} layers, more than {num_layers}")
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    first = [match for name in weights if (match := _LAYER.match(name)) and match[2] == "0"]
    if not all(any(match[3] == f".{adding}.weight" for match in first) for adding in _ADDING):
        raise ValueError(f"{folder} has no layers with {' and '.join(_ADDING)}")
    for number in range(num_given, num_layers):
        for match in first:
            weight = weights[match[0]]
            is_adding = match[3] in _ADDING_TENSORS
            weights[f"{match[1]}{number}{match[3]}"] = torch.zeros_like(weight) if is_adding else weight.clone()
    out.mkdir(parents=True)
    for file in folder.iterdir():
        is_replaced = file.suffix == ".safetensors" or file.name.endswith(".index.json") or file.name == "config.json"
        if file.is_file() and not is_replaced:
            shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps(_deepened(config, num_layers), indent=2))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def _deepened(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """With lists that have an entry for every layer, such as layer_types, as long as that."""
    num_given = config["num_hidden_layers"]
    changes: dict[str, Any] = {"num_hidden_layers": num_layers}
    for name, value in config.items():
        if "layer" in name and isinstance(value, list) and len(value) == num_given:
            changes[name] = value + value[:1] * (num_layers - num_given)
    return config | changes


if __name__ == "__main__":
    main()
