"""A model that runs by transformers' own code, attention excepted: that goes over our paged cache.

For text models that are none of our families: slower, but the scheduler, the prefix cache, preemption and all else see
no difference. A step's ragged batch is one row of tokens with the positions that they have in their sequences. What a
layer's attention looks like is what it asks for when it is called; before a model serves anybody, its logits over the
paged cache are compared with those that it computes alone, so that a state that is kept elsewhere is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from services.text_engine.attention.interface import AttentionBackend, AttentionMetadata, AttentionShape
from services.text_engine.models.config import ConfigError, ModelConfig

IMPLEMENTATION: Final = "diptych_paged"
# Arguments of transformers' attention functions that change the result, and that no backend of ours has.
REFUSED_ARGUMENTS: Final = ("s_aux", "position_bias", "head_mask", "alibi")
PROBE_LENGTHS: Final = (13, 8, 5)  # one sequence's two chunks, and another sequence beside the second
# Of the logits' spread: the median token's error. One that misses a part of its past is off by about all of it.
MAX_ERRORS: Final = {torch.float32: 0.05, torch.bfloat16: 0.2, torch.float16: 0.1}


@dataclass(frozen=True, slots=True)
class Window:
    """What stands in a mask's place: how many positions a token sees, itself included; None: all before it."""

    size: int | None


class AttentionCall(Protocol):
    """What runs when a layer asks for attention; travels through the model as the argument `paged`."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """query, key, value [num_tokens, heads, head_dim], rotated -> [num_tokens, num_heads * head_dim]"""
        ...


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step's attention, over the caches of all layers.

    unturned  [num_tokens, head_dim] fp32 for each head_dim: cosines and sines that rotate by nothing
    """

    attention: AttentionBackend
    shapes: tuple[AttentionShape, ...]
    kv_caches: list[torch.Tensor]
    metadata: AttentionMetadata
    unturned: dict[int, torch.Tensor]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: AttentionShape
    ) -> torch.Tensor:
        assert shape == self.shapes[layer]
        cos_sin = self.unturned[shape.head_dim]
        return self.attention.attend(query, key, value, cos_sin, self.kv_caches[layer], self.metadata, shape)


class TransformersDecoder:
    """Satisfies `CausalModel`."""

    def __init__(self, config: ModelConfig, model: Any, attention: AttentionBackend, device: torch.device) -> None:
        """model: a *ForCausalLM on `device`, loaded with IMPLEMENTATION. Raises ConfigError if it cannot be served."""
        self.config = config
        self._model = model
        self._attention = attention
        self._device = device
        self._body = model.base_model
        if self._body is model:
            raise ConfigError(f"{config.architecture}: its head cannot be told from the rest of it")
        self._embed_tokens = model.get_input_embeddings()
        self.attention_shapes = self._find_shapes()
        # The model itself becomes its own head, whatever that does beside one product: rows go through unchanged.
        self._pass_rows_through()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._embed_tokens(token_ids)
        return rows

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        unturned = {shape.head_dim: _unturned(len(hidden), shape.head_dim, self._device) for shape in self._each_shape}
        step = PagedStep(self._attention, self.attention_shapes, kv_caches, metadata, unturned)
        return self._run_body(hidden, positions, step)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()

    def check(self, block_size: int) -> None:
        """Compare with what the model gives alone. Raises ConfigError if the paged cache is not all of its state."""
        try:
            error = self._error_over_pages(block_size)
        except Exception as problem:  # whatever its code raises, where it is not run as it expects
            raise ConfigError(f"{self.config.architecture} cannot run over a paged cache: {problem}") from problem
        if not error < MAX_ERRORS[self._embed_tokens.weight.dtype]:
            raise ConfigError(
                f"{self.config.architecture} does not give its own logits over a paged cache (error {error:.2g} of "
                "their spread): it keeps a state that the cache does not hold, or looks at other tokens' positions"
            )

    def _error_over_pages(self, block_size: int) -> float:
        """Of the logits' spread, for the median token: of a prompt's first chunk, or its second, or beside that."""
        lengths = PROBE_LENGTHS
        generator = torch.Generator().manual_seed(5)
        prompts = [
            torch.randint(0, self.config.vocab_size, (n,), generator=generator).to(self._device)
            for n in (lengths[0] + lengths[1], lengths[2])
        ]
        exact = [self._alone(prompt) for prompt in prompts]
        first, second = torch.split(prompts[0], list(lengths[:2]))
        caches = [self._attention.allocate_kv_cache(3, block_size, shape) for shape in self.attention_shapes]
        whole = self._probe_step(caches, block_size, [(first, 0, [2, 0])])
        parts = self._probe_step(caches, block_size, [(second, lengths[0], [2, 0]), (prompts[1], 0, [1])])
        got = [whole, *torch.split(parts, list(lengths[1:]))]
        want = [*torch.split(exact[0], list(lengths[:2])), exact[1]]
        errors = [
            ((ours - theirs).square().mean(-1).sqrt() / theirs.std()).median().item()
            for ours, theirs in zip(got, want, strict=True)
        ]
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    @property
    def _each_shape(self) -> set[AttentionShape]:
        return set(self.attention_shapes)

    def _find_shapes(self) -> tuple[AttentionShape, ...]:
        """From a run in which every layer says what it wants."""
        found: dict[int, AttentionShape] = {}

        def record(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: AttentionShape
        ) -> torch.Tensor:
            if key.shape != value.shape:
                raise ConfigError("its values have another size than its keys")
            if layer in found:
                raise ConfigError(f"its layer {layer} attends more than once")
            found[layer] = shape
            return torch.zeros_like(query).flatten(1)

        tokens = torch.zeros(2, dtype=torch.int64, device=self._device)
        try:
            self._run_body(self.embed(tokens), torch.arange(2, device=self._device), record)
        except Exception as error:  # whatever its code raises, where attention is not what it expects
            raise ConfigError(f"{self.config.architecture} cannot run over a paged cache: {error}") from error
        if sorted(found) != list(range(self.config.num_layers)):
            raise ConfigError(
                f"{self.config.architecture}: {len(found)} of {self.config.num_layers} layers attend through "
                "transformers' attention interface; all must"
            )
        return tuple(found[layer] for layer in range(self.config.num_layers))

    def _run_body(self, hidden: torch.Tensor, positions: torch.Tensor, paged: AttentionCall) -> torch.Tensor:
        output = self._body(inputs_embeds=hidden[None], position_ids=positions[None], use_cache=False, paged=paged)
        rows: torch.Tensor = output.last_hidden_state[0]
        return rows

    def _pass_rows_through(self) -> None:
        setattr(self._model, self._model.base_model_prefix, _RowsUnchanged())

    def _alone(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens, vocab_size] fp32, with nothing of ours in it."""
        setattr(self._model, self._model.base_model_prefix, self._body)
        self._model.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self._model(input_ids=token_ids[None], use_cache=False).logits
            return logits[0].float()
        finally:
            self._model.set_attn_implementation(IMPLEMENTATION)
            self._pass_rows_through()

    def _probe_step(
        self, caches: list[torch.Tensor], block_size: int, batch: list[tuple[torch.Tensor, int, list[int]]]
    ) -> torch.Tensor:
        """Logits of all rows of (new tokens, how many the cache holds already, blocks) each."""
        slots: list[int] = []
        positions: list[int] = []
        starts = [0]
        for tokens, num_computed, blocks in batch:
            new = range(num_computed, num_computed + len(tokens))
            positions += new
            slots += [blocks[position // block_size] * block_size + position % block_size for position in new]
            starts.append(starts[-1] + len(tokens))
        widest = max(len(blocks) for _, _, blocks in batch)

        def ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        metadata = AttentionMetadata(
            cu_seqlens_q=ints(starts),
            seq_lens=ints([num_computed + len(tokens) for tokens, num_computed, _ in batch]),
            block_tables=ints([blocks + [0] * (widest - len(blocks)) for _, _, blocks in batch]),
            slot_mapping=ints(slots, torch.int64),
        )
        hidden = self.embed(torch.cat([tokens for tokens, _, _ in batch]))
        return self.compute_logits(self.forward(hidden, ints(positions, torch.int64), caches, metadata))


class _Rows:
    """A body's output with rows and nothing else, for heads that ask for more or take it for a tuple."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, place: int) -> torch.Tensor | None:
        return self.last_hidden_state if place == 0 else None

    def __getattr__(self, _name: str) -> None:
        return None


class _RowsUnchanged(torch.nn.Module):
    """In the place of a model's body: its output is what it is given."""

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> _Rows:
        return _Rows(inputs_embeds)


@torch.inference_mode()
def load_transformers_decoder(
    folder: Path,
    config: ModelConfig,
    attention: AttentionBackend,
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    random_weights: bool = False,
) -> TransformersDecoder:
    """The model of `folder`, by transformers' class for it, checked. Raises ConfigError if it cannot be served."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, window_of_mask)
    try:
        with _no_progress_bar():
            model = _load(folder, dtype, random_weights)
    except (ValueError, ImportError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{config.architecture} cannot be served by transformers' code: {error}") from error
    decoder = TransformersDecoder(config, model.to(device).eval(), attention, device)
    decoder.check(block_size)
    return decoder


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Its bar would stand among the lines of the log."""
    from transformers import utils

    logging: Any = utils.logging
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _load(folder: Path, dtype: torch.dtype, random_weights: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    local = {"local_files_only": True, "trust_remote_code": False}
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": IMPLEMENTATION}
    if random_weights:
        return auto.from_config(AutoConfig.from_pretrained(folder, **local), **options)
    model, report = auto.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **local, **options)
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(f"the tensors do not fit config.json: missing {', '.join(missing[:5])}")
    return model


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Window | None,
    *,
    paged: AttentionCall | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers; query, key, value [1, heads, num_tokens, head_dim], rotated already."""
    layer = getattr(module, "layer_idx", None)
    if paged is None or not isinstance(layer, int):
        raise ConfigError("its code does not hand attention's arguments on")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigError("its attention is not causal")
    if refused := [name for name in REFUSED_ARGUMENTS if others.get(name) is not None]:
        raise ConfigError(f"its attention has {', '.join(refused)}, which the engine's has not")
    if attention_mask is not None and not isinstance(attention_mask, Window):
        raise ConfigError("it makes masks of its own")
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    head_dim = query.shape[2]
    shape = AttentionShape(
        query.shape[1],
        key.shape[1],
        head_dim,
        head_dim**-0.5 if scaling is None else scaling,
        None if attention_mask is None else attention_mask.size,
        softcap,
    )
    output = paged(layer, query, key, value, shape)
    return output.view(1, *query.shape), None


def window_of_mask(*, use_vmap: bool = False, local_size: int | None = None, **_: object) -> Window:
    """A mask function of transformers. use_vmap: the model has a rule of its own for who sees whom."""
    if use_vmap:
        raise ConfigError("it masks attention by a rule of its own")
    return Window(local_size)


def _unturned(num_tokens: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """As `rope.cos_sin_table` has rows, at an angle of 0."""
    cos_sin = torch.zeros(num_tokens, head_dim, device=device)
    cos_sin[:, : head_dim // 2] = 1.0
    return cos_sin
