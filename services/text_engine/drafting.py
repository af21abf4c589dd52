"""Puts together what guesses at coming tokens, as the settings say: look-up in the text, and a draft model with it."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

from services.text_engine.config import TextEngineSettings
from services.text_engine.core.block_manager import BlockManager
from services.text_engine.core.speculation.draft_model import DraftModelDrafter
from services.text_engine.core.speculation.interface import Drafter
from services.text_engine.core.speculation.prompt_lookup_drafter import PromptLookupDrafter
from services.text_engine.core.speculation.step_costs import StepCosts
from services.text_engine.runner.draft_model import DraftRunner
from services.text_engine.runner.kv_cache import BLOCK_SIZE
from services.text_engine.runner.loading import LoadedModel
from services.text_engine.runner.model_runner import ModelRunner
from services.text_engine.runner.step_costs import Measured, measure_step_costs
from services.text_engine.tokenizer import Tokenizer
from shared.log import get_logger
from shared.settings_errors import SettingRefused

log = get_logger(__name__)


def check_vocabulary(settings: TextEngineSettings, tokenizer: Tokenizer) -> None:
    """That a draft model's tokens, as far as both have them, stand for the same text; their special ones may differ.

    tokenizer   the target's
    Raises SettingRefused, or FileNotFoundError for a draft model without a tokenizer.
    """
    if settings.speculative_model is None:
        return
    drafts = Tokenizer.load(settings.speculative_model)
    for token_id in range(min(tokenizer.vocab_size, drafts.vocab_size)):
        ours, theirs = tokenizer.token_bytes(token_id), drafts.token_bytes(token_id)
        if ours != theirs:
            raise SettingRefused(
                "speculative_model",
                settings.speculative_model,
                f"has another vocabulary than the model: its token {token_id} is {theirs!r}, the model's is {ours!r}; "
                "give a smaller model of the same family, or leave it out",
            )


def make_draft_runner(model: LoadedModel, *, vocab_size: int, banned_ids: AbstractSequence[int]) -> DraftRunner | None:
    """The draft model with a KV cache beside the target's, if there is one.

    vocab_size, banned_ids   what the target samples, and never samples
    """
    if model.draft is None:
        return None
    return DraftRunner(
        model.draft,
        model.device,
        num_blocks=model.plan.num_blocks,
        num_sampled=vocab_size,
        banned_ids=banned_ids,
        max_blocks=-(-model.plan.max_model_len // BLOCK_SIZE),
    )


def make_drafter(
    settings: TextEngineSettings,
    runner: ModelRunner,
    draft: DraftRunner | None,
    blocks: BlockManager,
    *,
    banned_ids: AbstractSequence[int],
) -> Drafter | None:
    """Measures what steps cost, for a few seconds a model, unless nothing is to be guessed."""
    if settings.speculative == "off":
        return None
    lookup = PromptLookupDrafter(
        _costs(settings, runner, "steps measured, by their tokens"),
        num_speculative_tokens=settings.num_speculative_tokens,
        never_sampled=frozenset(banned_ids),
    )
    if draft is None:
        return lookup
    costs = _costs(settings, draft, "the draft model's steps measured, by their tokens")
    return DraftModelDrafter(lookup, draft, costs, blocks.grow, block_size=BLOCK_SIZE)


def _costs(settings: TextEngineSettings, measured: Measured, message: str) -> StepCosts:
    costs = measure_step_costs(measured, block_size=BLOCK_SIZE, max_num_tokens=settings.max_num_batched_tokens)
    log.info(message, costs=str(costs))
    return costs
