"""What a model family is: it says how a checkpoint is read. The network is the same for all of them (`decoder`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.text_engine.models.config import Fields, ModelConfig


@dataclass(frozen=True, slots=True)
class Family:
    """One model class of transformers.

    read_config  config.json -> ModelConfig, without what generation_config.json adds
    prefixes     start of a tensor's name in the checkpoint -> start of ours; the first that fits wins
    ignored      starts of names that another part of the system loads
    renamed      parts of a tensor's name -> what they are in ours, one after the other
    """

    model_type: str
    read_config: Callable[[Fields], ModelConfig]
    prefixes: tuple[tuple[str, str], ...] = (("model.", ""), ("lm_head.", "lm_head."))
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def our_name(self, name: str) -> str | None:
        """Our name of the checkpoint's tensor `name`; None if it is not the decoder's to load."""
        if name.startswith(self.ignored) or name.endswith("rotary_emb.inv_freq"):
            return None
        for theirs, ours in self.renamed:
            name = name.replace(theirs, ours)
        for theirs, ours in self.prefixes:
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name
