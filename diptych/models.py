"""MODEL -> a local folder in Hugging Face format: a folder as it is, a GGUF file, a built-in name, an id on the hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diptych.errors import ModelUnavailable

DEMO_MODEL_VARIABLE = "DIPTYCH_DEMO_MODEL"
CACHE_VARIABLE = "DIPTYCH_CACHE"

# All that loading needs, and nothing twice: no .bin, no GGUF, no exports in subfolders, no second copy of the weights.
HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
HUB_IGNORED = ["*/*", "consolidated*.safetensors"]
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?$")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint on this machine, and the name under which the API serves it."""

    name: str
    folder: Path

    @property
    def has_vision(self) -> bool:
        """Whether the checkpoint has a vision tower, and so needs an encoder."""
        config = json.loads((self.folder / "config.json").read_text())
        return isinstance(config, dict) and "vision_config" in config


def resolve(name: str, *, say: Say) -> Model:
    """Find or make the folder that `name` stands for; `say` hears about what takes time.

    Raises ModelUnavailable with a message that says what to do.
    """
    if name == "demo":
        return _checked(name, demo_folder())
    if name == "smollm2":
        from diptych import smollm2  # late: it needs torch

        return _checked(name, smollm2.checkpoint(cache_folder() / "smollm2", say=say))
    path = Path(name or "/no/model/named").expanduser()  # Path("") would be the current folder
    if path.is_dir():
        return _checked(path.resolve().name, path.resolve())
    if path.suffix == ".gguf" and path.is_file():
        from diptych import gguf_folder  # late: it needs torch

        return _checked(path.stem, gguf_folder.checkpoint(path, cache_folder(), say=say))
    if path.exists():
        raise ModelUnavailable(
            f"model {name!r} is a file; give a GGUF file or the folder that holds config.json and *.safetensors"
        )
    if _HUB_ID.match(name):
        return _checked(name, _from_hub(name, say=say))
    raise ModelUnavailable(
        f"model {name!r} is neither a folder here nor a Hugging Face id such as llava-hf/llava-1.5-7b-hf; "
        "built-in names: demo, smollm2"
    )


def cache_folder() -> Path:
    """Where converted checkpoints are kept: $DIPTYCH_CACHE, else diptych/ in the user's cache folder."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diptych"


def demo_folder() -> Path:
    """The built-in model: $DIPTYCH_DEMO_MODEL, else models/demo/checkpoint of the source tree."""
    if given := os.environ.get(DEMO_MODEL_VARIABLE):
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise ModelUnavailable(f"{DEMO_MODEL_VARIABLE}={given} is not a folder")
        return folder
    folder = demo_root() / "checkpoint"
    if not folder.is_dir():
        raise ModelUnavailable(
            f"the demo model is not in {folder}; run diptych from its source tree, or name another MODEL"
        )
    return folder


def demo_root() -> Path:
    """models/demo of the source tree: the demo model's checkpoint and sample pictures."""
    return Path(__file__).resolve().parents[1] / "models" / "demo"


def demo_samples(checkpoint: Path) -> Path:
    """The demo model's sample pictures: beside its weights, or in models/demo of the source tree."""
    beside = checkpoint / "samples"
    return beside if beside.is_dir() else demo_root() / "samples"


def _checked(name: str, folder: Path) -> Model:
    """A folder that a service could load, or a message that says what it lacks."""
    config = folder / "config.json"
    try:
        json.loads(config.read_text())
    except FileNotFoundError:
        if gguf_files := sorted(folder.glob("*.gguf")):
            raise ModelUnavailable(f"{folder} holds GGUF files; name one as the model: {gguf_files[0]}") from None
        raise ModelUnavailable(f"{folder} is no Hugging Face checkpoint: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{config} cannot be read: {error}") from None
    if not any(folder.glob("*.safetensors")) and not (folder / "model.gguf").exists():
        raise ModelUnavailable(
            f"{folder} holds no *.safetensors weights; .bin files are not loaded, and a GGUF file is itself the MODEL"
        )
    return Model(name, folder)


def _from_hub(name: str, *, say: Say) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ModuleNotFoundError:
        raise ModelUnavailable(
            f"downloading {name} needs the package huggingface-hub: pip install huggingface-hub"
        ) from None
    repo, _, revision = name.partition("@")
    say(f"Looking up {name} on the Hugging Face hub; files already downloaded are used again.")
    try:
        return Path(
            snapshot_download(repo, revision=revision or None, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED)
        )
    except errors.GatedRepoError:
        reason = "its authors ask you to accept a licence: do so on its page, then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "the hub has no such repository, or it is private (then set HF_TOKEN)"
    except errors.RevisionNotFoundError:
        reason = f"the repository has no revision {revision!r}"
    except errors.LocalEntryNotFoundError:
        reason = "it is not in the local cache, and the hub cannot be reached (no network, or HF_HUB_OFFLINE is set)"
    except errors.HfHubHTTPError as error:
        reason = f"the hub answered: {error}"
    except OSError as error:  # a full disk
        reason = str(error)
    except Exception as error:
        # A connection lost half way. The hub's client has changed its HTTP library more than once.
        if "http" not in type(error).__module__:
            raise
        reason = str(error)
    raise ModelUnavailable(f"model {name} cannot be downloaded: {reason}")
